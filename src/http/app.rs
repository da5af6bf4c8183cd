//! What all calls share: the models, the workers, the budget for bodies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::bodies::Bodies;
use super::options::Options;
use crate::engine::{Engine, Passes};
use crate::error::{Error, Result};
use crate::fresh::Feeds;
use crate::registry::Registry;

/// How long a call that takes long waits for others of the kind.
const ASIDE_WAIT: Duration = Duration::from_secs(1);

/// What handlers share.
pub struct App {
    /// The models.
    pub registry: Arc<Registry>,
    /// The workers.
    pub engine: Engine<Passes>,
    pub(super) bodies: Bodies,
    /// What takes long beside the passes: so much of it may run at once.
    asides: Arc<Semaphore>,
    pub(super) draining: AtomicBool,
    /// The updates of the models, where the server takes any.
    pub(super) feeds: Option<Arc<Feeds>>,
    /// How long a call waits for the position that it wants to see.
    pub(super) updates_wait: Duration,
}

impl App {
    /// Models and workers behind one edge.
    pub fn new(registry: Registry, engine: Engine<Passes>, options: &Options) -> Self {
        // Half of the cores that passes use at most: those that wait for answers to short requests come first.
        let asides = Arc::new(Semaphore::new((engine.workers() / 2).max(1)));
        let (registry, bodies) = (Arc::new(registry), Bodies::new(options));
        let (draining, updates_wait) = (AtomicBool::new(false), Duration::from_secs(1));
        App { registry, engine, bodies, asides, draining, feeds: None, updates_wait }
    }

    /// The same edge, which takes updates too; calls wait for a position as long as other requests have time.
    pub fn with_updates(self, feeds: Option<Arc<Feeds>>, wait: Duration) -> Self {
        App { feeds, updates_wait: wait, ..self }
    }

    /// Runs what takes long, such as reading a long body or a column, where nobody else waits for it.
    ///
    /// # Errors
    /// `Overloaded` where others of the kind take all the time there is for them; else what `work` ends with.
    pub(super) async fn aside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let crowded = || Error::overloaded("other calls that take long are answered before it, try again later");
        let place = timeout(ASIDE_WAIT, self.asides.clone().acquire_owned()).await.map_err(|_| crowded())?;
        let place = place.map_err(|e| Error::internal(format!("places of long calls: {e}")))?;
        let span = tracing::Span::current();
        let done = tokio::task::spawn_blocking(move || {
            let _place = place;
            span.in_scope(work)
        });
        done.await.map_err(|e| Error::internal(format!("a request broke what answers it: {e}")))?
    }

    pub(super) fn ready(&self) -> Result<()> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(Error::not_ready("the server is shutting down"));
        }
        self.registry.ready()?;
        match self.registry.list().iter().find_map(|model| Some((model.name().to_owned(), model.content().stalled()?)))
        {
            Some((name, why)) => Err(Error::not_ready(format!("model `{name}` follows its updates no more: {why}"))),
            None => Ok(()),
        }
    }
}
