//! The journal: updates in one order, durable before they are acknowledged.
//!
//! A journal is a sequence of records, each with a *position*: 1, 2, 3 and so on. What is appended is acknowledged when it is
//! durable, and only then. Whoever needs the records follows them from a position of its own on, today or after a restart,
//! and takes each once and in order. What a snapshot contains may be released.
//!
//! [`Log`] keeps the records in files of this machine (`format` says how, `log` writes them, `scan` reads them). A stream of
//! NATS JetStream keeps those of many machines (`nats`, in builds with the feature of the name). An append may be slow, is
//! acknowledged by a call back, and may be made to depend on the position that the journal is at.
//!
//! ```
//! use std::sync::mpsc::channel;
//! use std::time::Duration;
//! use sterling_journal::{Append, Journal, Log, LogOptions};
//!
//! let folder = tempfile::tempdir()?;
//! let log = Log::open(folder.path(), LogOptions::default())?;
//! let (told, durable) = channel();
//! let append = Append { records: vec![b"one".to_vec(), b"two".to_vec()], expected: Some(0) };
//! log.append(append, Box::new(move |positions| told.send(positions).unwrap()));
//! assert_eq!(durable.recv()??, 1..3);
//!
//! let mut follower = log.follow(1)?;
//! let record = follower.next(Duration::from_secs(1))?.unwrap();
//! assert_eq!((record.position, record.payload), (2, b"two".to_vec()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

mod disk;
mod follow;
mod format;
mod log;
mod mark;
#[cfg(feature = "nats")]
pub mod nats;
mod scan;
mod shared;
mod streams;
#[cfg(test)]
mod tests;
mod topic;

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use sterling_core::error::Result;

pub use disk::{Disk, RealDisk, Tail};
pub use format::PAYLOAD_BYTES_MAX;
pub use log::{Log, LogOptions, Logs};
pub use streams::StreamOptions;
pub use topic::Topic;

/// Told, once, which positions the appended records have, or why they were not appended.
pub type Done = Box<dyn FnOnce(Result<Range<u64>>) + Send>;

/// What is appended together: the records follow one another.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Append {
    /// The records, each of 1 to [`PAYLOAD_BYTES_MAX`] bytes; none tells the position that the next one would have.
    pub records: Vec<Vec<u8>>,
    /// Where given, the position of the last record before these: with another one nothing is appended.
    pub expected: Option<u64>,
}

/// A record of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its place in the order, from 1 up.
    pub position: u64,
    /// What was appended.
    pub payload: Vec<u8>,
}

/// A durable sequence of records.
pub trait Journal: Send + Sync {
    /// Appends records and tells `done` when they are durable, on a thread of the journal's: `done` must not wait.
    ///
    /// Errors that `done` is told: `Conflict` where the journal is not at the position expected, `NoSpace` where the records
    /// do not fit, which more room mends, `Invalid` for a record that is too long or empty, `Unavailable` where an earlier
    /// failure has made it uncertain what is durable.
    fn append(&self, append: Append, done: Done);

    /// The position of the last durable record; 0 where there never was one.
    fn last(&self) -> u64;

    /// The position of the first record that is kept, or of the next one where none is.
    fn first(&self) -> u64;

    /// The records after a position.
    ///
    /// # Errors
    /// `NotFound` where some of them were released; `Corrupt` or `Io` where they cannot be read.
    fn follow(&self, after: u64) -> Result<Box<dyn Follower>>;

    /// Lets go of the records up to a position, as far as that saves anything.
    ///
    /// # Errors
    /// `Io` with the file.
    fn release(&self, position: u64) -> Result<()>;

    /// Whether others append too, so that there may be later records than [`Journal::last`].
    fn has_others(&self) -> bool {
        false
    }

    /// What an operator should look at, where something is wrong that ends by itself or for which nobody waits.
    fn trouble(&self) -> Option<String> {
        None
    }

    /// What an operator should look at though updates are taken and followed, where anything is.
    fn warning(&self) -> Option<String> {
        None
    }

    /// Bytes of the records after a position, about.
    fn bytes_after(&self, _position: u64) -> u64 {
        0
    }
}

/// The journals of a server.
pub trait Journals: Send + Sync {
    /// The journal of a model or a shard, which begins after a position where there is none yet.
    ///
    /// # Errors
    /// `NotReady` where another process has it to itself, `Unavailable` where it does not answer; `Corrupt`, `Unsupported` or
    /// `Io` where it cannot be used.
    fn open(&self, topic: &Topic, after: u64) -> Result<Box<dyn Journal>>;

    /// Whether other servers append to the same journals and follow them.
    fn are_shared(&self) -> bool {
        false
    }

    /// Where that is kept which a journal lets go of and this server needs; none where it lets go of nothing.
    fn folder(&self, topic: &Topic) -> Option<PathBuf>;
}

/// Takes the records of a journal in their order.
pub trait Follower: Send {
    /// The next record as soon as it is durable, or `None` where there was none in `wait`.
    ///
    /// # Errors
    /// `Corrupt` or `Io` where it cannot be read, `NotFound` where it was released.
    fn next(&mut self, wait: Duration) -> Result<Option<Record>>;
}
