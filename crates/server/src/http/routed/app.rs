//! State that the calls of a router share.

use std::sync::Arc;

use super::super::access::AccessControl;
use super::super::app::{CallState, Host};
use super::super::audit::Audit;
use super::super::bodies::Bodies;
use super::super::offload::Asides;
use super::super::options::Options;
use super::super::shadow::Shadows;
use super::super::traces::Traces;
use super::super::writers::ChunkThreads;
use crate::route::Fleet;
use sterling_core::error::Result;
use sterling_core::quota::Flow;

/// State of a router: its shards and limits.
pub struct RouterApp {
    fleet: Arc<Fleet>,
    pub(super) bodies: Bodies,
    pub(super) asides: Asides,
    entrance: CallState,
    pub(super) writers: Arc<ChunkThreads>,
    /// Recall audit.
    pub(super) audit: Audit,
    /// Shadow traffic.
    pub(super) shadows: Shadows,
}

impl RouterApp {
    /// Creates the state of a router's HTTP edge; `traces` exports spans of its calls.
    ///
    /// # Errors
    /// `Io` if the system gives no threads for long answers.
    pub fn new(fleet: Fleet, access: AccessControl, traces: Traces, options: &Options) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let asides = Asides::new(cores);
        Ok(RouterApp {
            audit: Audit::new(fleet.options().audit_share),
            shadows: Shadows::default(),
            fleet: Arc::new(fleet),
            bodies: Bodies::new(options, asides.clone()),
            asides,
            entrance: CallState { access, traces, ..CallState::default() },
            writers: ChunkThreads::start()?,
        })
    }

    /// Servers of the shards.
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }
}

impl Host for RouterApp {
    fn entrance(&self) -> &CallState {
        &self.entrance
    }

    fn writers(&self) -> &Arc<ChunkThreads> {
        &self.writers
    }

    fn admits(&self, _flow: &dyn Fn() -> Flow, _body: Option<&[u8]>) -> Result<()> {
        self.fleet.admits()
    }

    fn lacks(&self, model: &str) -> bool {
        self.fleet.lacks(model)
    }
}
