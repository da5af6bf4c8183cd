//! What all calls share: the models, the workers, the budget for bodies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;

use super::bodies::Bodies;
use super::meters::AnswerMeters;
use super::options::Options;
use crate::engine::{Engine, Passes};
use crate::error::{Error, Result};
use crate::fresh::Feeds;
use crate::registry::Registry;

/// What handlers share.
pub struct App {
    /// The models.
    pub registry: Arc<Registry>,
    /// The workers.
    pub engine: Engine<Passes>,
    pub(super) bodies: Bodies,
    /// Long bodies that may be prepared at once.
    pub(super) long_bodies: Arc<Semaphore>,
    pub(super) draining: AtomicBool,
    pub(super) meters: AnswerMeters,
    /// The updates of the models, where the server takes any.
    pub(super) feeds: Option<Arc<Feeds>>,
    /// How long a call waits for the position that it wants to see.
    pub(super) updates_wait: Duration,
}

impl App {
    /// Models and workers behind one edge.
    pub fn new(registry: Registry, engine: Engine<Passes>, options: &Options) -> Self {
        // Half of the cores that passes use at most: those that wait for answers to short requests come first.
        let long_bodies = Arc::new(Semaphore::new((engine.workers() / 2).max(1)));
        let (registry, bodies) = (Arc::new(registry), Bodies::new(options));
        let (draining, updates_wait) = (AtomicBool::new(false), Duration::from_secs(1));
        let meters = AnswerMeters::default();
        App { registry, engine, bodies, long_bodies, draining, meters, feeds: None, updates_wait }
    }

    /// The same edge, which takes updates too; calls wait for a position as long as other requests have time.
    pub fn with_updates(self, feeds: Option<Arc<Feeds>>, wait: Duration) -> Self {
        App { feeds, updates_wait: wait, ..self }
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
