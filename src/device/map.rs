//! Read-only memory maps of whole files.

use std::fs::File;
use std::ops::Deref;
use std::path::Path;

use crate::error::{Error, Result};

/// A whole file, mapped read-only. Snapshot files are written once under a temporary name and renamed, and never
/// changed afterwards; that is what makes a map of them sound.
#[derive(Debug)]
pub struct Map {
    map: Option<memmap2::Mmap>,
}

impl Map {
    /// Maps the file at `path`. An empty file is an empty map.
    ///
    /// # Errors
    /// `NotFound` or `Io` with the path.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io(path.display(), e))?;
        if file.metadata().map_err(|e| Error::io(path.display(), e))?.len() == 0 {
            return Ok(Map { map: None });
        }
        // SAFETY: published files are immutable by the store's contract (written under another name, then renamed), so
        // no one changes or truncates the bytes while they are mapped.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| Error::io(path.display(), e))?;
        Ok(Map { map: Some(map) })
    }
}

impl Deref for Map {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}
