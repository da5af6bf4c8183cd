//! Work that takes long, beside the threads that answer connections.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::error::{Error, Result};

/// How long a call that takes long waits for others of the kind.
const ASIDE_WAIT: Duration = Duration::from_secs(1);
/// Bodies from so many bytes on are read and prepared on threads of their own. A filter takes about a tenth of a microsecond
/// a byte, so that shorter ones hold up whoever else this thread answers for a few milliseconds at most.
const LONG_BODY_BYTES: usize = 32 << 10;

/// What takes long beside all else: so much of it may run at once.
#[derive(Clone)]
pub(super) struct Asides(Arc<Semaphore>);

impl Asides {
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
