//! The lock of a working folder: one run at a time. The lock file names the package that the run writes, until the run has ended.

use std::fs::{self, File, TryLockError};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf, absolute};

use sterling_core::error::{Error, Result};

const LOCK_FILE: &str = "lock";

/// A locked working folder. The operating system releases the lock when the process ends, however it ends.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    file: File,
}

impl Lock {
    /// Locks a folder.
    ///
    /// # Errors
    /// `Conflict` if another run holds the lock; `NoSpace` or `Io` with the path.
    pub(crate) fn take(folder: &Path) -> Result<Self> {
        let path = folder.join(LOCK_FILE);
        let io = |e| Error::io(path.display(), e);
        loop {
            let file = File::options().write(true).create(true).truncate(false).open(&path).map_err(io)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let what = "another run uses this working folder, expected one run per folder; pass another --work";
                    return Err(Error::conflict(format!("{}: {what}", folder.display())));
                }
                Err(TryLockError::Error(e)) => return Err(io(e)),
            }
            // A run that ended between open and lock has removed the file: the lock of a deleted file excludes no other run.
            let held = file.metadata().map_err(io)?;
            if fs::metadata(&path).is_ok_and(|named| (named.dev(), named.ino()) == (held.dev(), held.ino())) {
                return Ok(Lock { path, file });
            }
        }
    }

    /// Records the package that the run is about to write.
    ///
    /// # Errors
    /// `NoSpace` or `Io` with the path.
    pub(crate) fn record(&self, out: &Path) -> Result<()> {
        let record = || {
            self.file.set_len(0)?;
            self.file.write_all_at(absolute(out)?.as_os_str().as_bytes(), 0)?;
            self.file.sync_data()
        };
        record().map_err(|e| Error::io(self.path.display(), e))
    }

    /// Returns whether a run in a folder has recorded a package, and has not ended.
    pub(crate) fn has_recorded(folder: &Path, out: &Path) -> bool {
        let recorded = fs::read(folder.join(LOCK_FILE)).ok();
        absolute(out).is_ok_and(|out| recorded.as_deref() == Some(out.as_os_str().as_bytes()))
    }

    /// Removes the lock file, at the end of a run.
    ///
    /// # Errors
    /// `Io` with the path.
    pub(crate) fn remove(&self) -> Result<()> {
        match fs::remove_file(&self.path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(self.path.display(), e)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::error::Kind;

    #[test]
    fn a_folder_is_locked_once_until_its_holder_ends() {
        let folder = tempfile::tempdir().unwrap();
        let lock = Lock::take(folder.path()).unwrap();
        assert_eq!(Lock::take(folder.path()).unwrap_err().kind(), Kind::Conflict);
        drop(lock);
        let lock = Lock::take(folder.path()).unwrap();
        lock.remove().unwrap();
        // The folder is free for the next run, although the old holder has not ended.
        let next = Lock::take(folder.path()).unwrap();
        drop(lock);
        assert_eq!(Lock::take(folder.path()).unwrap_err().kind(), Kind::Conflict);
        drop(next);
        assert!(Lock::take(&folder.path().join("none")).is_err());
    }
}
