//! Journal (write-ahead log) of updates: ordered, and durable before they are acknowledged.
//!
//! A journal is a sequence of records, each with a *position* (sequence number): 1, 2, 3 and so on. Appended records are
//! acknowledged once they are durable, and only then. A follower reads the records from any position, now or after a restart,
//! each once and in order. Records that a snapshot includes may be released.
//!
//! [`Log`] stores the records in local files (modules `format`, `log` for writing, `scan` for reading). A stream of NATS
//! JetStream stores the records of many machines (`nats`, in builds with that feature). An append may be slow, is acknowledged by
//! a callback, and may be conditional on the position of the journal.
//!
//! ```
//! use std::sync::mpsc::channel;
//! use std::time::Duration;
//! use sterling_journal::{Append, Journal, Log, LogOptions};
//!
//! let folder = tempfile::tempdir()?;
//! let log = Log::open(folder.path(), LogOptions::default())?;
//! let (notify, durable) = channel();
//! let append = Append { records: vec![b"one".to_vec(), b"two".to_vec()], expected: Some(0) };
//! log.append(append, Box::new(move |positions| notify.send(positions).unwrap()));
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
#[cfg(feature = "nats")]
pub mod nats;
mod scan;
mod shared;
mod streams;
#[cfg(test)]
mod tests;
mod topic;
mod watermark;

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use sterling_core::error::Result;

pub use disk::{Disk, RealDisk, Tail};
pub use format::PAYLOAD_BYTES_MAX;
pub use log::{Log, LogOptions, Logs, wait_until_closed};
pub use streams::StreamOptions;
pub use topic::Topic;

/// Callback that is called once with the positions of the appended records, or with the error.
pub type Done = Box<dyn FnOnce(Result<Range<u64>>) + Send>;

/// Records that are appended together, with consecutive positions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Append {
    /// Records of 1 to [`PAYLOAD_BYTES_MAX`] bytes each; an append without records returns the next position.
    pub records: Vec<Vec<u8>>,
    /// Expected position of the journal's last record before the append; the append fails at any other position.
    pub expected: Option<u64>,
}

/// A record of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Sequence number, from 1.
    pub position: u64,
    /// Appended bytes.
    pub payload: Vec<u8>,
}

/// A durable sequence of records.
pub trait Journal: Send + Sync {
    /// Appends records and calls `done` when they are durable, on a thread of the journal; `done` must not block.
    ///
    /// Errors passed to `done`: `Conflict` if the journal is not at the expected position; `NoSpace` if the records do not fit,
    /// which free space resolves; `Invalid` for a record that is empty or too long; `Unavailable` if an earlier failure has made
    /// it uncertain which records are durable.
    fn append(&self, append: Append, done: Done);

    /// Returns the position of the last durable record; 0 if there never was one.
    fn last(&self) -> u64;

    /// Returns the position of the first retained record, or of the next one if none is retained.
    fn first(&self) -> u64;

    /// Returns a follower of the records after a position.
    ///
    /// # Errors
    /// `NotFound` if some of these records were released; `Corrupt` or `Io` if the records cannot be read.
    fn follow(&self, after: u64) -> Result<Box<dyn Follower>>;

    /// Permits the journal to delete the records up to a position.
    ///
    /// # Errors
    /// `Io` with the file.
    fn release(&self, position: u64) -> Result<()>;

    /// Returns whether other writers exist, so that there may be records after [`Journal::last`].
    fn has_others(&self) -> bool {
        false
    }

    /// Returns a fault that an operator should know of and that no pending call reports.
    fn trouble(&self) -> Option<String> {
        None
    }

    /// Returns a condition that an operator should know of although updates are accepted and followed.
    fn warning(&self) -> Option<String> {
        None
    }

    /// Returns the approximate bytes of the records after a position.
    fn bytes_after(&self, _position: u64) -> u64 {
        0
    }
}

/// Journals of a server.
pub trait Journals: Send + Sync {
    /// Opens the journal of a model or a shard; a new one begins after position `after`.
    ///
    /// # Errors
    /// `NotReady` if another process has the journal open, `Unavailable` if the broker does not answer; `Corrupt`, `Unsupported` or
    /// `Io` if the journal cannot be used.
    fn open(&self, topic: &Topic, after: u64) -> Result<Box<dyn Journal>>;

    /// Returns whether other servers append to and follow the same journals.
    fn are_shared(&self) -> bool {
        false
    }

    /// Returns the local folder for data that replaces released records, such as checkpoints; `None` if a journal releases
    /// nothing.
    fn folder(&self, topic: &Topic) -> Option<PathBuf>;
}

/// Reader of a journal's records in order.
pub trait Follower: Send {
    /// Returns the next record as soon as it is durable, or `None` after `wait`.
    ///
    /// # Errors
    /// `Corrupt` or `Io` if the record cannot be read, `NotFound` if the record was released.
    fn next(&mut self, wait: Duration) -> Result<Option<Record>>;
}
