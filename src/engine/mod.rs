//! What keeps models in memory and workers busy.
//!
//! `registry` knows which versions are loaded and which one answers; a swap is one pointer. `queue` bounds what may wait:
//! requests beyond it are refused at once, those whose deadline passes before a worker takes them are answered without
//! work, and workers take waiting requests of one model together.

mod queue;
mod registry;

use std::time::Instant;

pub use queue::{Engine, Options};
pub use registry::{Loaded, Registry};

use crate::error::Result;
use crate::forward::{self, Deadline};
use crate::snapshot::Snapshot;
use crate::wire::{EmbedRequest, ModelInfo, RankRequest, RetrieveRequest, Retrieved};

/// A model in memory, as the engine sees it.
pub trait Model: Send + Sync {
    /// What it is.
    fn info(&self) -> ModelInfo;

    /// What it reads.
    fn snapshot(&self) -> &Snapshot;

    /// Answers requests together, each with its own result.
    fn retrieve(&self, requests: &[&RetrieveRequest], deadline: Instant) -> Vec<Result<Retrieved>>;

    /// Scores given items.
    ///
    /// # Errors
    /// What is wrong with the request, or `DeadlineExceeded`.
    fn rank(&self, request: &RankRequest, deadline: Instant) -> Result<Retrieved>;

    /// The query embedding of features, and the ids answered with default rows.
    ///
    /// # Errors
    /// What is wrong with the request, or `DeadlineExceeded`.
    fn embed(&self, request: &EmbedRequest, deadline: Instant) -> Result<(Vec<f32>, u64)>;
}

impl Model for Snapshot {
    fn info(&self) -> ModelInfo {
        Snapshot::info(self)
    }

    fn snapshot(&self) -> &Snapshot {
        self
    }

    fn retrieve(&self, requests: &[&RetrieveRequest], deadline: Instant) -> Vec<Result<Retrieved>> {
        forward::retrieve(self, requests, Deadline(deadline))
    }

    fn rank(&self, request: &RankRequest, deadline: Instant) -> Result<Retrieved> {
        forward::rank(self, request, Deadline(deadline))
    }

    fn embed(&self, request: &EmbedRequest, deadline: Instant) -> Result<(Vec<f32>, u64)> {
        forward::embed(self, request, Deadline(deadline))
    }
}
