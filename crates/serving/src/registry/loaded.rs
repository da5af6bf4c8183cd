//! Versions in memory, and the state of those that are not.

use std::sync::Arc;
use std::time::Duration;

use super::memory::Room;
use crate::view::{Live, View};
use sterling_core::error::Kind;
use sterling_snapshot::{PinnedVersion, Snapshot, Stamp};

/// Version in memory. Requests hold a reference while they run.
#[derive(Debug)]
pub struct Loaded<T = Live> {
    pub(super) content: Arc<T>,
    pub(super) name: String,
    pub(super) version: u64,
    pub(super) digest: String,
    /// Stamp of the version's folder when it was loaded.
    pub(super) stamp: Option<Stamp>,
    /// Position of the checkpoint that the version was loaded from, if any.
    pub(super) fold: Option<u64>,
    pub(super) room: Option<Room>,
    /// Handle that prevents the deletion of the version's files.
    pub(super) _held: Option<PinnedVersion>,
}

impl Loaded {
    /// Wraps a snapshot outside of any registry.
    pub fn new(snapshot: Snapshot) -> Self {
        let (name, version) = (snapshot.manifest.name.clone(), snapshot.manifest.version);
        let digest = snapshot.digest().to_owned();
        let content = Arc::new(Live::new(Arc::new(snapshot)));
        Loaded { content, name, version, digest, stamp: None, fold: None, room: None, _held: None }
    }

    /// Returns the current view.
    pub fn view(&self) -> Arc<View> {
        self.content.view()
    }
}

impl<T> Loaded<T> {
    /// Loaded content.
    pub fn content(&self) -> &Arc<T> {
        &self.content
    }

    /// Returns the name of the model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the version number.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the digest of the published bytes.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Returns the bytes of memory reserved for the version.
    pub fn memory_bytes(&self) -> u64 {
        self.room.as_ref().map_or(0, Room::bytes)
    }
}

/// Rejection of a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionRejection {
    /// Kind of failure.
    pub kind: Kind,
    /// Message of the failure.
    pub reason: String,
    /// Number of failed loads since the last change of the folder.
    pub attempts: u32,
    /// Time until the next attempt if the folder does not change; `None` if the version is not tried again.
    pub retry_in: Option<Duration>,
}

/// State of one version, published or in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionState {
    /// Version number.
    pub version: u64,
    /// True if the store has the version.
    pub published: bool,
    /// True if the version is in memory.
    pub loaded: bool,
    /// True if the version answers unpinned requests.
    pub active: bool,
    /// Labels that point to the version.
    pub labels: Vec<String>,
    /// Digest of the bytes in memory.
    pub digest: Option<String>,
    /// Rejection of the published version, if any.
    pub refused: Option<VersionRejection>,
}
