//! Turns of long answers to be written, so that these leave a thread to short ones.
//!
//! An answer that is written while it is read takes a thread for as long as its reader is fast, and there are few threads. Its pieces are
//! made, and compressed, in turn with those of all others: at one time so many that one thread is left, each of them a piece at a time.
//!
//! A connection of HTTP/1.1 that waits for its turn has room for a piece, so that it takes the turn as soon as it is given one. A stream of
//! HTTP/2 may lose its window meanwhile, at its reader's will, and would keep a turn that others wait for: it takes none.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::thread::available_parallelism;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::Version;
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The turns of one server.
#[derive(Clone)]
pub(super) struct Turns(Arc<Semaphore>);

impl Turns {
    /// One fewer than the runtime has threads.
    pub(super) fn of_this_machine() -> Self {
        let threads = available_parallelism().map_or(1, usize::from);
        Turns(Arc::new(Semaphore::new(threads.saturating_sub(1).max(1))))
    }
}

/// Has answers whose length is not known yet written in turn.
pub(super) async fn take(State(turns): State<Turns>, request: Request, next: Next) -> Response {
    let version = request.version();
    let response = next.run(request).await;
    if version >= Version::HTTP_2 || response.body().size_hint().exact().is_some() {
        return response;
    }
    response.map(|body| Body::new(InTurn { body, turns, waits: None }))
}

type Wait = Pin<Box<dyn Future<Output = Option<OwnedSemaphorePermit>> + Send>>;

/// A body of which each piece takes a turn.
struct InTurn {
    body: Body,
    turns: Turns,
    /// Where others had all turns.
    waits: Option<Wait>,
}

impl InTurn {
    fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<Option<OwnedSemaphorePermit>> {
        let turns = &self.turns.0;
        if self.waits.is_none() {
            if let Ok(turn) = turns.clone().try_acquire_owned() {
                return Poll::Ready(Some(turn));
            }
            let turns = turns.clone();
            self.waits = Some(Box::pin(async move { turns.acquire_owned().await.ok() }));
        }
        let turn = self.waits.as_mut().map_or(Poll::Ready(None), |wait| wait.as_mut().poll(cx));
        if turn.is_ready() {
            self.waits = None;
        }
        turn
    }
}

impl HttpBody for InTurn {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, axum::Error>>> {
        let _turn = ready!(self.poll_turn(cx));
        Pin::new(&mut self.body).poll_frame(cx)
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
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::body::to_bytes;
    use futures_util::future::join_all;
    use futures_util::stream;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn pieces_of_several_answers_are_made_by_no_more_threads_than_may() {
        let (made, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let turns = Turns(Arc::new(Semaphore::new(2)));
        let bodies = (0..8).map(|n: u8| {
            let (made, most) = (made.clone(), most.clone());
            let piece = move |_| {
                most.fetch_max(made.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::sleep(std::time::Duration::from_micros(200));
                made.fetch_sub(1, Ordering::SeqCst);
                Ok::<_, Infallible>(Bytes::from(vec![n; 10]))
            };
            let body = Body::from_stream(stream::iter((0..50).map(piece)));
            let body = Body::new(InTurn { body, turns: turns.clone(), waits: None });
            tokio::spawn(async move { to_bytes(body, usize::MAX).await.unwrap() })
        });
        for (n, bytes) in (0..).zip(join_all(bodies).await) {
            assert_eq!(bytes.unwrap(), vec![n; 500]);
        }
        assert_eq!((most.load(Ordering::SeqCst), turns.0.available_permits()), (2, 2));
    }

    #[tokio::test]
    async fn an_answer_that_is_dropped_while_it_waits_gives_its_turn_up() {
        let turns = Turns(Arc::new(Semaphore::new(1)));
        let held = turns.0.clone().try_acquire_owned().unwrap();
        let body = || Box::pin(InTurn { body: Body::from("x"), turns: turns.clone(), waits: None });
        let (mut first, mut second) = (body(), body());
        let mut cx = Context::from_waker(std::task::Waker::noop());
        assert!(first.as_mut().poll_frame(&mut cx).is_pending() && second.as_mut().poll_frame(&mut cx).is_pending());
        drop(first);
        drop(held);
        assert!(second.as_mut().poll_frame(&mut cx).is_ready());
        assert_eq!(turns.0.available_permits(), 1);
    }
}
