//! Loads a version from its folder: plans it by its manifest, then reads it.

use std::path::Path;
use std::sync::Arc;

use crate::view::{Live, View};
use sterling_core::error::Result;
use sterling_core::tasks;
use sterling_kernels::priority::Background;
use sterling_snapshot::sandbox::SandboxMode;
use sterling_snapshot::{Manifest, Placement, Snapshot};

/// Properties of a version according to its manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declared {
    /// Name of the model.
    pub name: String,
    /// Version number.
    pub version: u64,
    /// Digest of the published bytes.
    pub digest: String,
    /// Memory of the version once it is loaded, in bytes.
    pub memory_bytes: u64,
}

/// Loads versions for a registry.
pub trait Loader<T>: Send + Sync {
    /// Reads the manifest of a folder, which takes little time.
    ///
    /// # Errors
    /// The reason why the version cannot be used.
    fn declared(&self, folder: &Path) -> Result<Declared>;

    /// Loads the version. `background` gives its CPU priority relative to requests.
    ///
    /// # Errors
    /// The reason for the rejection; [`Kind::is_transient`](sterling_core::error::Kind::is_transient) lists the kinds that are
    /// retried.
    fn load(&self, folder: &Path, background: Background) -> Result<T>;
}

/// Loader of snapshots with one placement of tables. Graphs that this build did not validate when they were published are
/// validated in a sandbox before anything is loaded.
#[derive(Debug, Default)]
pub struct Snapshots {
    /// Placement of tables.
    pub placement: Placement,
    /// Sandbox in which graphs are validated.
    pub trials: SandboxMode,
    /// Number of query embeddings that each view records; 0 for none.
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
        let snapshot = background.pool(&tasks::LOAD, cores)?.install(|| Snapshot::load(folder, &self.placement))?;
        Ok(Live::of(View::new(Arc::new(snapshot)).recording(self.recorded)))
    }
}
