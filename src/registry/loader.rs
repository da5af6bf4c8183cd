//! What makes a version out of its folder: planned by its manifest first, then loaded.

use std::path::Path;
use std::sync::Arc;

use crate::error::Result;
use crate::snapshot::{Manifest, Placement, Snapshot};
use crate::view::Live;

/// What a folder says of its version, before anything else of it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declared {
    /// The model's name.
    pub name: String,
    /// The version.
    pub version: u64,
    /// One name for all its bytes.
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

    /// The version in memory.
    ///
    /// # Errors
    /// Why it is refused; [`super::is_passing`] says which kinds are tried again.
    fn load(&self, folder: &Path) -> Result<T>;
}

/// Snapshots, with their tables placed alike.
impl Loader<Live> for Placement {
    fn declared(&self, folder: &Path) -> Result<Declared> {
        let manifest = Manifest::read(folder)?;
        let memory_bytes = Snapshot::memory_bytes(folder, &manifest, self)?;
        Ok(Declared { digest: manifest.digest(), name: manifest.name, version: manifest.version, memory_bytes })
    }

    fn load(&self, folder: &Path) -> Result<Live> {
        Snapshot::load(folder, self).map(|snapshot| Live::new(Arc::new(snapshot)))
    }
}
