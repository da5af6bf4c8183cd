//! Versions in memory, and what is told of those that are not.

use std::sync::Arc;
use std::time::Duration;

use super::memory::Room;
use crate::view::{Live, View};
use sterling_core::error::Kind;
use sterling_snapshot::{Held, Snapshot, Stamp};

/// One version in memory. Requests hold it while they run.
#[derive(Debug)]
pub struct Loaded<T = Live> {
    pub(super) content: Arc<T>,
    pub(super) name: String,
    pub(super) version: u64,
    pub(super) digest: String,
    /// What its folder looked like when it was loaded.
    pub(super) stamp: Option<Stamp>,
    /// The position of the fold that it is, where it is one.
    pub(super) fold: Option<u64>,
    pub(super) room: Option<Room>,
    /// Keeps its files where they are.
    pub(super) _held: Option<Held>,
}

impl Loaded {
    /// A snapshot that no registry holds.
    pub fn new(snapshot: Snapshot) -> Self {
        let (name, version) = (snapshot.manifest.name.clone(), snapshot.manifest.version);
        let digest = snapshot.digest().to_owned();
        let content = Arc::new(Live::new(Arc::new(snapshot)));
        Loaded { content, name, version, digest, stamp: None, fold: None, room: None, _held: None }
    }

    /// What answers at this moment.
    pub fn view(&self) -> Arc<View> {
        self.content.view()
    }
}

impl<T> Loaded<T> {
    /// What was loaded.
    pub fn content(&self) -> &Arc<T> {
        &self.content
    }

    /// The model's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The digest of its bytes as they were published.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Bytes of memory that were planned for it.
    pub fn memory_bytes(&self) -> u64 {
        self.room.as_ref().map_or(0, Room::bytes)
    }
}

/// Why a version was not taken in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// What sort of failure it was.
    pub kind: Kind,
    /// The failure.
    pub reason: String,
    /// Loads that have failed since the folder changed last.
    pub attempts: u32,
    /// When it is tried again though its folder does not change; never, where there is none.
    pub retry_in: Option<Duration>,
}

/// The state of one version, published or in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionState {
    /// The version.
    pub version: u64,
    /// True where the store has it.
    pub published: bool,
    /// True where it is in memory.
    pub loaded: bool,
    /// True for the one that answers unpinned requests.
    pub active: bool,
    /// The labels that point to it.
    pub labels: Vec<String>,
    /// The digest of the bytes in memory.
    pub digest: Option<String>,
    /// Why what the store has of it was refused, where it was.
    pub refused: Option<Refused>,
}
