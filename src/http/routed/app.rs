//! What the calls of a router share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::access::AccessControl;
use super::super::app::{Asides, Host};
use super::super::bodies::Bodies;
use super::super::meters::AnswerMeters;
use super::super::options::Options;
use super::super::slow::SlowCalls;
use super::super::traces::Traces;
use crate::error::{Error, Result};
use crate::route::Fleet;

/// The shards, behind an edge.
pub struct RouterApp {
    fleet: Arc<Fleet>,
    pub(super) bodies: Bodies,
    pub(super) asides: Asides,
    access: AccessControl,
    slow: SlowCalls,
    traces: Traces,
    draining: AtomicBool,
    meters: AnswerMeters,
}

impl RouterApp {
    /// A fleet behind an edge, which tells a collector of its calls.
    pub fn new(fleet: Fleet, access: AccessControl, traces: Traces, options: &Options) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        RouterApp {
            fleet: Arc::new(fleet),
            bodies: Bodies::new(options),
            asides: Asides::new(cores),
            access,
            slow: SlowCalls::default(),
            traces,
            draining: AtomicBool::new(false),
            meters: AnswerMeters::default(),
        }
    }

    /// The shards.
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    pub(super) fn ready(&self) -> Result<()> {
        match self.draining.load(Ordering::Relaxed) {
            true => Err(Error::not_ready("the router is shutting down")),
            false => self.fleet.ready(),
        }
    }
}

impl Host for RouterApp {
    fn draining(&self) -> &AtomicBool {
        &self.draining
    }

    fn meters(&self) -> &AnswerMeters {
        &self.meters
    }

    fn access(&self) -> &AccessControl {
        &self.access
    }

    fn slow(&self) -> &SlowCalls {
        &self.slow
    }

    fn traces(&self) -> &Traces {
        &self.traces
    }

    fn admits(&self) -> Result<()> {
        self.fleet.admits()
    }
}
