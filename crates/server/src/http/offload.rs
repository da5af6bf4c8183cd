//! Runs slow work outside of the threads that drive connections.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use sterling_core::error::{Error, Result};
use sterling_core::tasks;

/// Longest wait of a slow call for a free slot.
const ASIDE_WAIT: Duration = Duration::from_secs(1);
/// Longest wait for a read of the store, and the maximum number of concurrent reads.
const STORE_WAIT: Duration = Duration::from_secs(2);
const STORE_READS: usize = 8;
/// Minimum size of bodies that are parsed on separate threads, in bytes. A filter takes about 0.1 µs per byte, so shorter bodies
/// delay other connections of the thread by a few milliseconds at most. A tokenizer takes up to about 4 µs per byte.
const LONG_BODY_BYTES: usize = 32 << 10;
const LONG_TEXTS_BYTES: usize = 1 << 10;

/// Limits the number of concurrent slow calls.
#[derive(Clone)]
pub(super) struct Asides(Arc<Semaphore>);

impl Asides {
    /// Creates the limit for reads of a store. A read uses no core while a network folder or disk does not answer, so the limit
    /// does not depend on cores.
    pub(super) fn of_store() -> Self {
        Asides(Arc::new(Semaphore::new(STORE_READS)))
    }

    /// Creates the limit for calls that compute: at most half of the usable cores, so that short requests keep the rest.
    pub(super) fn new(cores: usize) -> Self {
        Asides(Arc::new(Semaphore::new((cores / 2).max(1))))
    }

    /// Runs slow work, such as parsing a long body or reading a column, on a blocking thread.
    ///
    /// # Errors
    /// `Overloaded` if no slot gets free in time; else errors of `work`.
    pub(super) async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
        let crowded = || Error::overloaded("too many long calls are waiting, try again later");
        let slot = timeout(ASIDE_WAIT, self.0.clone().acquire_owned()).await.map_err(|_| crowded())?;
        Asides::run_in(slot, work).await
    }

    async fn run_in<T: Send + 'static>(
        slot: std::result::Result<OwnedSemaphorePermit, AcquireError>,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let slot = slot.map_err(|e| Error::internal(format!("cannot reserve a slot for a long call: {e}")))?;
        let span = tracing::Span::current();
        let done = tasks::blocking(move || {
            let _slot = slot;
            span.in_scope(work)
        });
        done.await
    }

    /// Reads a store on a blocking thread. A read continues after its caller has given up.
    ///
    /// # Errors
    /// `Unavailable` if the store does not answer in time; else errors of `read`.
    pub(super) async fn read<T: Send + 'static>(&self, read: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
        let silent = || Error::unavailable(format!("the store has not answered for {} s", STORE_WAIT.as_secs()));
        // Includes the wait for a slot: reads that the store has not answered may occupy all of them.
        let done = async { Asides::run_in(self.0.clone().acquire_owned().await, read).await };
        timeout(STORE_WAIT, done).await.unwrap_or_else(|_| Err(silent()))
    }

    /// Parses and prepares a body: on this thread if it is short, else on a blocking thread. Texts in the body are
    /// tokenized if `has_texts` is set.
    ///
    /// # Errors
    /// As [`Asides::run`].
    pub(super) async fn prepare<T: Send + 'static>(
        &self,
        body: impl Deref<Target = [u8]> + Send + 'static,
        has_texts: bool,
        prepare: impl FnOnce(&[u8]) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let long = if has_texts { LONG_TEXTS_BYTES } else { LONG_BODY_BYTES };
        if body.len() < long {
            return prepare(&body);
        }
        self.run(move || prepare(&body)).await
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::error::Kind;

    #[tokio::test(flavor = "current_thread")]
    async fn errors_of_a_read_are_returned_unchanged() {
        let error = Asides::of_store().read(|| Err::<(), _>(Error::overloaded("no memory"))).await.unwrap_err();
        assert_eq!((error.kind(), error.to_string().as_str()), (Kind::Overloaded, "no memory"));
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_hung_store_delays_only_its_own_calls() {
        let reads = Asides::of_store();
        let (end, hangs) = crossbeam_channel::bounded::<()>(0);
        let waiting: Vec<_> = (0..STORE_READS + 4)
            .map(|_| {
                let (reads, hangs) = (reads.clone(), hangs.clone());
                tokio::spawn(async move { reads.read(move || Ok(hangs.recv().is_err())).await })
            })
            .collect();
        // The only thread of this runtime answers other requests in the meantime.
        tokio::time::sleep(Duration::from_millis(1)).await;
        for one in waiting {
            let error = one.await.unwrap().unwrap_err();
            assert_eq!(
                (error.kind(), error.to_string().as_str()),
                (Kind::Unavailable, "the store has not answered for 2 s")
            );
        }
        drop(end);
        while reads.read(|| Ok(7)).await.is_err() {}
    }
}
