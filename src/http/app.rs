//! What all calls share: the models, the workers, the budget for bodies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
    pub(super) draining: AtomicBool,
}

impl App {
    /// Models and workers behind one edge.
    pub fn new(registry: Registry, engine: Engine<Passes>, options: &Options) -> Self {
        App { registry: Arc::new(registry), engine, bodies: Bodies::new(options), draining: AtomicBool::new(false) }
    }

    pub(super) fn ready(&self) -> Result<()> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(Error::not_ready("the server is shutting down"));
        }
        self.registry.ready()
    }
}
