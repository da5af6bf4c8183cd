//! Work that takes long, beside the threads that answer connections.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use sterling_core::error::{Error, Kind, Result};

/// How long a call that takes long waits for others of the kind.
const ASIDE_WAIT: Duration = Duration::from_secs(1);
/// How long a read of the store is waited for, and how many there are at once.
const STORE_WAIT: Duration = Duration::from_secs(2);
const STORE_READS: usize = 8;
/// Bodies from so many bytes on are read and prepared on threads of their own. A filter takes about a tenth of a microsecond
/// a byte, so that shorter ones hold up whoever else this thread answers for a few milliseconds at most.
const LONG_BODY_BYTES: usize = 32 << 10;

/// What takes long beside all else: so much of it may run at once.
#[derive(Clone)]
pub(super) struct Asides(Arc<Semaphore>);

impl Asides {
    /// Reads of a store, which use no core while a folder on a network or a disk does not answer: so many of them wait for it at most.
    pub(super) fn of_store() -> Self {
        Asides(Arc::new(Semaphore::new(STORE_READS)))
    }

    /// Half of the cores that may be used at most: those that wait for answers to short requests come first.
    pub(super) fn new(cores: usize) -> Self {
        Asides(Arc::new(Semaphore::new((cores / 2).max(1))))
    }

    /// Runs what takes long, such as reading a long body or a column, where nobody else waits for it.
    ///
    /// # Errors
    /// `Overloaded` where others of the kind take all the time there is for them; else what `work` ends with.
    pub(super) async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
        let crowded = || Error::overloaded("other calls that take long are answered before it, try again later");
        let place = timeout(ASIDE_WAIT, self.0.clone().acquire_owned()).await.map_err(|_| crowded())?;
        let place = place.map_err(|e| Error::internal(format!("places of long calls: {e}")))?;
        let span = tracing::Span::current();
        let done = tokio::task::spawn_blocking(move || {
            let _place = place;
            span.in_scope(work)
        });
        done.await.map_err(|e| Error::internal(format!("a request broke what answers it: {e}")))?
    }

    /// Reads a store where nobody else waits for it.
    ///
    /// # Errors
    /// `Unavailable` where the store does not answer in time; else what `read` ends with. A read goes on when nobody waits for it any more.
    pub(super) async fn read<T: Send + 'static>(&self, read: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
        let silent = || Error::unavailable(format!("the store has not answered for {} s", STORE_WAIT.as_secs()));
        match timeout(STORE_WAIT, self.run(read)).await {
            Ok(Err(error)) if error.kind() == Kind::Overloaded => Err(silent()),
            done => done.unwrap_or_else(|_| Err(silent())),
        }
    }

    /// Reads and prepares what a body asks for: here, or, where that takes long, where nobody else waits for it.
    ///
    /// # Errors
    /// As [`Asides::run`].
    pub(super) async fn prepare<T: Send + 'static>(
        &self,
        body: impl Deref<Target = [u8]> + Send + 'static,
        prepare: impl FnOnce(&[u8]) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if body.len() < LONG_BODY_BYTES {
            return prepare(&body);
        }
        self.run(move || prepare(&body)).await
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn a_store_that_hangs_holds_up_who_asks_for_it_and_nobody_else() {
        let reads = Asides::of_store();
        let (end, hangs) = crossbeam_channel::bounded::<()>(0);
        let waiting: Vec<_> = (0..STORE_READS + 4)
            .map(|_| {
                let (reads, hangs) = (reads.clone(), hangs.clone());
                tokio::spawn(async move { reads.read(move || Ok(hangs.recv().is_err())).await })
            })
            .collect();
        // The only thread of this runtime answers others meanwhile.
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
