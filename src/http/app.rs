//! What all calls share: the models, the workers, the budget for bodies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Semaphore;

use super::bodies::Bodies;
use super::options::Options;
use crate::engine::{Engine, Passes};
use crate::error::{Error, Result};
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
}

impl App {
    /// Models and workers behind one edge.
    pub fn new(registry: Registry, engine: Engine<Passes>, options: &Options) -> Self {
        // Half of the cores that passes use at most: those that wait for answers to short requests come first.
        let long_bodies = Arc::new(Semaphore::new((engine.workers() / 2).max(1)));
        let (registry, bodies) = (Arc::new(registry), Bodies::new(options));
        App { registry, engine, bodies, long_bodies, draining: AtomicBool::new(false) }
    }

    pub(super) fn ready(&self) -> Result<()> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(Error::not_ready("the server is shutting down"));
        }
        self.registry.ready()
    }
}
