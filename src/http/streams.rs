//! Requests side by side on one connection of HTTP/2, within the bounds that those of HTTP/1.1 have.
//!
//! A connection of HTTP/1.1 has one request, which its keeper sees by what the socket does. Here each has a [`Stream`] of its own, from its
//! header until the last byte of its answer has left: of all connections together there are as many as there may be connections, and an answer
//! that its reader does not take is seen although the connection works.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::Response;
use hyper::body::{Frame, SizeHint};
use tokio::sync::OwnedSemaphorePermit;

use super::options::Options;

use crate::locks::locked;

/// Answers that share a connection without keeping each other waiting for long.
const ANSWERS_ABREAST: u64 = 16;
/// Requests that a client may take back beyond those that it read the answers of.
const TAKEN_BACK_MAX: u64 = 100;

/// The requests of a connection.
#[derive(Debug)]
pub(super) struct Streams {
    /// When the connection was opened.
    opened: Instant,
    under: Mutex<Under>,
}

#[derive(Debug, Default)]
struct Under {
    count: u64,
    /// Each that is under way with the age of the connection, in milliseconds, at which its answer last moved; nothing before there is one.
    open: BTreeMap<u64, Option<u64>>,
    /// The age at which the last of them ended.
    rested: u64,
    answered: u64,
    taken_back: u64,
}

impl Streams {
    /// Those of a connection that was opened then.
    pub(super) fn new(opened: Instant) -> Self {
        Streams { opened, under: Mutex::default() }
    }

    fn under(&self) -> MutexGuard<'_, Under> {
        locked(&self.under)
    }

    fn age(&self) -> u64 {
        self.opened.elapsed().as_millis() as u64
    }

    /// The age of the connection at which the last request ended; nothing while one is under way.
    pub(super) fn rested(&self) -> Option<u64> {
        let under = self.under();
        under.open.is_empty().then_some(under.rested)
    }

    /// Why the connection must go, if it must.
    pub(super) fn overdue(&self, options: &Options) -> Option<&'static str> {
        let (age, under) = (self.age(), self.under());
        // Who asks and takes back costs work and reads nothing.
        if under.taken_back > under.answered + TAKEN_BACK_MAX {
            return Some("resets");
        }
        if under.open.is_empty() {
            return (age.saturating_sub(under.rested) > options.idle_ms).then_some("idle");
        }
        let answers = under.open.values().flatten();
        let (count, oldest) = (answers.clone().count() as u64, answers.min());
        // Each has its turn among those that share the connection.
        let bound = options.stall_ms * (1 + count / ANSWERS_ABREAST);
        oldest.is_some_and(|moved| age.saturating_sub(*moved) > bound).then_some("stalled")
    }
}

/// One request, until all of its answer has left.
#[derive(Debug)]
pub(super) struct Stream {
    all: Arc<Streams>,
    number: u64,
    is_answered: AtomicBool,
    _turn: OwnedSemaphorePermit,
}

impl Stream {
    /// Takes in that a whole header came, and that there is a turn for the request.
    pub(super) fn begin(all: Arc<Streams>, turn: OwnedSemaphorePermit) -> Arc<Self> {
        let mut under = all.under();
        under.count += 1;
        let number = under.count;
        under.open.insert(number, None);
        drop(under);
        Arc::new(Stream { all, number, is_answered: AtomicBool::new(false), _turn: turn })
    }

    /// Takes in that the answer has begun, or that a part of it goes out.
    fn moved(&self) {
        self.is_answered.store(true, Ordering::Relaxed);
        let age = self.all.age();
        if let Some(moved) = self.all.under().open.get_mut(&self.number) {
            *moved = Some(age);
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let age = self.all.age();
        let mut under = self.all.under();
        under.open.remove(&self.number);
        if self.is_answered.load(Ordering::Relaxed) {
            under.answered += 1;
        } else {
            under.taken_back += 1;
        }
        under.rested = age;
    }
}

/// The body of an answer, and with it its request.
#[derive(Debug)]
pub(super) struct Streamed {
    body: Body,
    /// Nothing of one that had no turn.
    stream: Option<Arc<Stream>>,
}

impl Streamed {
    pub(super) fn refused(body: Body) -> Self {
        Streamed { body, stream: None }
    }

    pub(super) fn of(response: Response<Body>, stream: Arc<Stream>) -> Response<Self> {
        stream.moved();
        response.map(|body| Streamed { body, stream: Some(stream) })
    }
}

/// A piece of an answer, which is under way until it has been written to the socket.
struct Piece {
    bytes: Bytes,
    _stream: Arc<Stream>,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl HttpBody for Streamed {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        let Poll::Ready(Some(Ok(frame))) = polled else { return polled };
        let Some(_stream) = self.stream.clone() else { return Poll::Ready(Some(Ok(frame))) };
        _stream.moved();
        Poll::Ready(Some(Ok(frame.map_data(|bytes| Bytes::from_owner(Piece { bytes, _stream })))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use tokio::sync::Semaphore;

    use super::*;

    fn options() -> Options {
        Options { idle_ms: 1000, stall_ms: 100, ..Options::default() }
    }

    /// Requests of a connection that was opened some time ago.
    fn aged(ms: u64) -> Arc<Streams> {
        Arc::new(Streams::new(Instant::now() - Duration::from_millis(ms)))
    }

    fn begin(all: &Arc<Streams>) -> Arc<Stream> {
        Stream::begin(all.clone(), Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap())
    }

    #[test]
    fn a_connection_rests_when_no_request_is_under_way() {
        let all = aged(5000);
        assert_eq!((all.rested(), all.overdue(&options())), (Some(0), Some("idle")));
        let (first, second) = (begin(&all), begin(&all));
        assert_eq!((all.rested(), all.overdue(&options())), (None, None), "work may take its time");
        drop(first);
        assert!(all.rested().is_none());
        drop(second);
        assert!(all.rested().unwrap() >= 5000 && all.overdue(&options()).is_none());
    }

    #[test]
    fn an_answer_that_does_not_move_is_seen_and_more_of_them_are_given_longer() {
        let all = aged(5000);
        let unread: Vec<_> = (0..40).map(|_| begin(&all)).collect();
        unread[0].moved();
        all.under().open.insert(1, Some(4850));
        assert_eq!(all.overdue(&options()), Some("stalled"));
        unread[1..].iter().for_each(|stream| stream.moved());
        assert_eq!(all.overdue(&options()), None, "forty share the connection");
        all.under().open.insert(1, Some(4000));
        assert_eq!(all.overdue(&options()), Some("stalled"));
        unread[0].moved();
        assert_eq!(all.overdue(&options()), None);
    }

    #[test]
    fn requests_that_are_taken_back_are_counted_against_those_that_are_answered() {
        let all = aged(0);
        for _ in 0..50 {
            begin(&all).moved();
        }
        for taken_back in 1..=50 + TAKEN_BACK_MAX {
            drop(begin(&all));
            assert_eq!(all.overdue(&options()), None, "{taken_back}");
        }
        drop(begin(&all));
        assert_eq!(all.overdue(&options()), Some("resets"));
    }
}
