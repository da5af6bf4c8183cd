//! Who wants the updates of a model merged into a version asks here; who merges takes the requests.

use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded};

use sterling_core::error::{Error, Result};

/// Requests that may wait for one that is under way.
const WAITING_MAX: usize = 16;

/// A version that has the updates of a model in it and answers by now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merged {
    /// The version.
    pub version: u64,
    /// The position of the last update that is in it.
    pub position: u64,
    /// Its items.
    pub items: usize,
}

/// A merge that is under way.
#[derive(Clone, Copy, Debug)]
pub struct MergeUnderWay {
    /// When it began.
    pub since: Instant,
    /// The share of its steps that are done.
    pub done: f64,
}

/// Told, once, what became of a merge.
pub type MergeTold = Box<dyn FnOnce(Result<Merged>) + Send>;

/// A model whose updates are to be merged.
pub struct MergeWanted {
    /// The model.
    pub model: String,
    /// Told when the version answers, or why there is none.
    pub told: MergeTold,
}

/// Where merges are asked for.
#[derive(Clone)]
pub struct Merges {
    wanted: Sender<MergeWanted>,
}

impl Merges {
    /// A place to ask at, and the requests for who merges.
    pub fn new() -> (Self, Receiver<MergeWanted>) {
        let (wanted, requests) = bounded(WAITING_MAX);
        (Merges { wanted }, requests)
    }

    /// Asks for a merge.
    pub fn ask(&self, model: &str, told: MergeTold) {
        let wanted = MergeWanted { model: model.into(), told };
        if let Err(e) = self.wanted.try_send(wanted) {
            (e.into_inner().told)(Err(Error::overloaded("too many merges wait, try again later")));
        }
    }
}
