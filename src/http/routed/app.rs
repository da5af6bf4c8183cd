//! What the calls of a router share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::app::{Asides, Host};
use super::super::bodies::Bodies;
use super::super::meters::AnswerMeters;
use super::super::options::Options;
use crate::error::{Error, Result};
use crate::route::Cluster;

/// The shards, behind an edge.
pub struct RouterApp {
    cluster: Arc<Cluster>,
    pub(super) bodies: Bodies,
    pub(super) asides: Asides,
    draining: AtomicBool,
    meters: AnswerMeters,
}

impl RouterApp {
    /// A cluster behind an edge.
    pub fn new(cluster: Cluster, options: &Options) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        RouterApp {
            cluster: Arc::new(cluster),
            bodies: Bodies::new(options),
            asides: Asides::new(cores),
            draining: AtomicBool::new(false),
            meters: AnswerMeters::default(),
        }
    }

    /// The shards.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    pub(super) fn ready(&self) -> Result<()> {
        match self.draining.load(Ordering::Relaxed) {
            true => Err(Error::not_ready("the router is shutting down")),
            false => self.cluster.ready(),
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

    fn admits(&self) -> Result<()> {
        self.cluster.admits()
    }
}
