//! Requests side by side on one connection of HTTP/2, within the bounds that those of HTTP/1.1 have.
//!
//! A connection of HTTP/1.1 has one request, which its keeper sees by what the socket does. Here each has a [`Stream`] of its own, from its
//! header until the last byte of its answer has left: of all connections together there are as many as there may be connections, and an answer
//! that its reader does not take is seen although the connection works.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::Response;
use hyper::body::{Frame, SizeHint};
use tokio::sync::OwnedSemaphorePermit;

use super::connections::Connection;

/// Answers that share a connection without keeping each other waiting for long.
const ANSWERS_ABREAST: u64 = 16;
/// Requests that a client may take back beyond those that it read the answers of.
const TAKEN_BACK_MAX: u64 = 100;

/// The requests that are under way on a connection.
#[derive(Debug, Default)]
pub(super) struct Streams(Mutex<Under>);

#[derive(Debug, Default)]
struct Under {
    count: u64,
    /// Each that is under way with the age of the connection, in milliseconds, at which its answer last moved; nothing before there is one.
    open: BTreeMap<u64, Option<u64>>,
    answered: u64,
    taken_back: u64,
}

impl Streams {
    fn under(&self) -> MutexGuard<'_, Under> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the connection must go at this age, if it must.
    pub(super) fn overdue(&self, age: u64, stall_ms: u64) -> Option<&'static str> {
        let under = self.under();
        // Who asks and takes back costs work and reads nothing.
        if under.taken_back > under.answered + TAKEN_BACK_MAX {
            return Some("resets");
        }
        let answers = under.open.values().flatten();
        let (count, oldest) = (answers.clone().count() as u64, answers.min());
        // Each has its turn among those that share the connection.
        let bound = stall_ms * (1 + count / ANSWERS_ABREAST);
        oldest.is_some_and(|moved| age.saturating_sub(*moved) > bound).then_some("stalled")
    }
}

/// One request, until all of its answer has left.
#[derive(Debug)]
pub(super) struct Stream {
    connection: Arc<Connection>,
    number: u64,
    is_answered: AtomicBool,
    _turn: OwnedSemaphorePermit,
}

impl Stream {
    /// Takes in that a whole header came, and that there is a turn for the request.
    pub(super) fn begin(connection: &Arc<Connection>, turn: OwnedSemaphorePermit) -> Arc<Self> {
        let mut under = connection.streams().under();
        under.count += 1;
        let number = under.count;
        if under.open.is_empty() {
            connection.work();
        }
        under.open.insert(number, None);
        drop(under);
        Arc::new(Stream { connection: connection.clone(), number, is_answered: AtomicBool::new(false), _turn: turn })
    }

    /// Takes in that the answer has begun, or that a part of it goes out.
    fn moved(&self) {
        self.is_answered.store(true, Ordering::Relaxed);
        let age = self.connection.age();
        if let Some(moved) = self.connection.streams().under().open.get_mut(&self.number) {
            *moved = Some(age);
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let mut under = self.connection.streams().under();
        under.open.remove(&self.number);
        if self.is_answered.load(Ordering::Relaxed) {
            under.answered += 1;
        } else {
            under.taken_back += 1;
        }
        if under.open.is_empty() {
            self.connection.rest();
        }
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
