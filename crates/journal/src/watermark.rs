//! Highest durable position of a log or a stream, recorded in a file outside of that log or stream.
//!
//! The records alone do not show that the last ones are missing: a log that was truncated, whose segments were removed or whose
//! folder was renamed looks like a shorter log. The highest durable position is therefore recorded in a file elsewhere after each
//! sync. That file itself is not synced: after a power failure the file may hold an earlier position, but never one that was not
//! durable.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use sterling_core::error::{Error, Result};
use sterling_storage::files;

/// Folder of the position files. No model, log or stream can have this name.
pub(super) const MARKS: &str = ".positions";
/// Bytes of the file: 20 decimal digits, a space, 16 hexadecimal digits of the digits' XXH3-64, a line feed.
const BYTES: usize = 38;

/// File that records the highest durable position.
pub(super) struct Mark {
    path: PathBuf,
    /// The open file, after the first write.
    file: Option<File>,
    /// Recorded position, if there is one.
    noted: Option<u64>,
}

impl Mark {
    /// Reads the file if it exists. A file damaged by a crash, such as an empty one, counts as having no position.
    ///
    /// # Errors
    /// `Io` with the path.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let noted = match fs::read(path) {
            Ok(bytes) => {
                let noted = read(&bytes);
                if noted.is_none() {
                    tracing::warn!(file = %path.display(), "the file has no valid position of a journal; the end of the journal is taken from its records");
                }
                noted
            }
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(Error::io(path.display(), e)),
        };
        Ok(Mark { path: path.to_owned(), file: None, noted })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the recorded position; 0 if there is none.
    pub(super) fn position(&self) -> u64 {
        self.noted.unwrap_or(0)
    }

    /// Records a position.
    ///
    /// # Errors
    /// Errors of the operating system; the call may be repeated.
    pub(super) fn set(&mut self, position: u64) -> std::io::Result<()> {
        if self.noted != Some(position) {
            let file = match self.file.take() {
                Some(file) => file,
                None => self.create()?,
            };
            file.write_all_at(&text(position), 0)?;
            (self.file, self.noted) = (Some(file), Some(position));
        }
        Ok(())
    }

    fn create(&self) -> std::io::Result<File> {
        self.path.parent().map_or(Ok(()), fs::create_dir_all)?;
        let file = File::options().write(true).create(true).truncate(false).open(&self.path)?;
        file.set_len(BYTES as u64)?;
        file.sync_all()?;
        // The folder of the file may be new as well, so its parent folder is synced too.
        self.path.ancestors().skip(1).take(2).try_for_each(files::sync_folder)?;
        Ok(file)
    }
}

fn text(position: u64) -> Vec<u8> {
    let digits = format!("{position:020}");
    let check = xxh3_64(digits.as_bytes());
    format!("{digits} {check:016x}\n").into_bytes()
}

fn read(bytes: &[u8]) -> Option<u64> {
    let position = std::str::from_utf8(bytes.get(..20)?).ok()?.parse().ok()?;
    (text(position) == bytes).then_some(position)
}
