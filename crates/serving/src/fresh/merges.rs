//! Channel of merge requests, from callers to the thread that merges the updates of a model into a version.

use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded};

use sterling_core::error::{Error, Result};

/// Maximum number of queued requests.
const WAITING_MAX: usize = 16;

/// Version that contains the merged updates of a model and is active.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merged {
    /// Version number.
    pub version: u64,
    /// Position of the last merged update.
    pub position: u64,
    /// Number of items.
    pub items: usize,
}

/// Running merge.
#[derive(Clone, Copy, Debug)]
pub struct MergeUnderWay {
    /// Start time.
    pub since: Instant,
    /// Share of the merge's steps that are done.
    pub done: f64,
}

/// Callback with the outcome of a merge, called once.
pub type MergeCallback = Box<dyn FnOnce(Result<Merged>) + Send>;

/// Request to merge the updates of a model.
pub struct MergeWanted {
    /// Name of the model.
    pub model: String,
    /// Called when the version is active, or with the error.
    pub reported: MergeCallback,
}

/// Sender of merge requests.
#[derive(Clone)]
pub struct Merges {
    wanted: Sender<MergeWanted>,
}

impl Merges {
    /// Creates the channel.
    pub fn new() -> (Self, Receiver<MergeWanted>) {
        let (wanted, requests) = bounded(WAITING_MAX);
        (Merges { wanted }, requests)
    }

    /// Requests a merge.
    pub fn ask(&self, model: &str, reported: MergeCallback) {
        let wanted = MergeWanted { model: model.into(), reported };
        if let Err(e) = self.wanted.try_send(wanted) {
            (e.into_inner().reported)(Err(Error::overloaded("too many merges wait, try again later")));
        }
    }
}
