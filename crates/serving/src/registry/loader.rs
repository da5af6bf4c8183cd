//! What makes a version out of its folder: planned by its manifest first, then loaded.

use std::path::Path;
use std::sync::Arc;

use crate::view::{Live, View};
use sterling_core::error::Result;
use sterling_kernels::priority::Background;
use sterling_snapshot::sandbox::Trials;
use sterling_snapshot::{Manifest, Placement, Snapshot};

/// What a folder says of its version, before anything else of it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declared {
    /// The model's name.
    pub name: String,
    /// The version.
    pub version: u64,
    /// One name for all its bytes, as they were published.
    pub digest: String,
    /// Bytes of memory that it takes when it is loaded.
    pub memory_bytes: u64,
}

/// Loads versions for a registry.
pub trait Loader<T>: Send + Sync {
    /// What the folder says of its version, read in no time.
    ///
    /// # Errors
    /// Why it cannot be used.
    fn declared(&self, folder: &Path) -> Result<Declared>;

    /// The version in memory. What that takes of the machine's cores stands behind requests as `background` says.
    ///
    /// # Errors
    /// Why it is refused; [`Kind::is_transient`](sterling_core::error::Kind::is_transient) says which kinds are tried again.
    fn load(&self, folder: &Path, background: Background) -> Result<T>;
}

/// Snapshots, with their tables placed alike. Versions whose graphs this program did not try when they were published are tried
/// before anything of them is loaded.
#[derive(Debug, Default)]
pub struct Snapshots {
    /// Where tables lie.
    pub placement: Placement,
    /// Where graphs are tried.
    pub trials: Trials,
    /// Query embeddings that each view records; 0 for none.
    pub recorded: usize,
}

impl Loader<Live> for Snapshots {
    fn declared(&self, folder: &Path) -> Result<Declared> {
        let manifest = Manifest::read(folder)?;
        let memory_bytes = Snapshot::memory_bytes(folder, &manifest, &self.placement)?;
        Ok(Declared {
            digest: manifest.published_digest(),
            name: manifest.name,
            version: manifest.version,
            memory_bytes,
        })
    }

    fn load(&self, folder: &Path, background: Background) -> Result<Live> {
        if !Manifest::read(folder)?.is_tried() {
            self.trials.run(folder).map_err(|e| e.within(folder.display()))?;
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let snapshot = background.pool("load", cores)?.install(|| Snapshot::load(folder, &self.placement))?;
        Ok(Live::of(View::new(Arc::new(snapshot)).recording(self.recorded)))
    }
}
