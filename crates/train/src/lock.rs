//! The lock of a working folder: one run at a time.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use sterling_core::error::{Error, Result};

const LOCK_FILE: &str = "lock";

/// A locked working folder. The operating system releases the lock when the process ends, however it ends.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    _file: File,
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
                    let what = "another run works in this folder, expected one at a time; give it another --work";
                    return Err(Error::conflict(format!("{}: {what}", folder.display())));
                }
                Err(TryLockError::Error(e)) => return Err(io(e)),
            }
            // A run that ended in between has removed the file: the lock of a file without a name excludes no other run.
            let held = file.metadata().map_err(io)?;
            if fs::metadata(&path).is_ok_and(|named| (named.dev(), named.ino()) == (held.dev(), held.ino())) {
                return Ok(Lock { path, _file: file });
            }
        }
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
