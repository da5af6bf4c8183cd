//! Detection of files that change while they are read.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use sterling_core::error::{Error, Kind, Result};

/// State of files before they are read; [`Unchanged::check`] later reports whether the read data may mix old and new
/// content.
#[derive(Debug)]
#[must_use]
pub struct Unchanged(Vec<(PathBuf, Identity)>);

/// Device, inode, length and modification time of a file. For a pipe only device and inode count, because reading
/// changes the others.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Identity {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

impl Identity {
    fn of(path: &Path) -> Result<Self> {
        let of = |about: Metadata| {
            let (bytes, modified) = match about.is_file() {
                true => (about.len(), (about.mtime(), about.mtime_nsec())),
                false => (0, (0, 0)),
            };
            Identity { device: about.dev(), inode: about.ino(), bytes, modified }
        };
        fs::metadata(path).map(of).map_err(|e| Error::io(path.display(), e))
    }
}

impl Unchanged {
    /// Records the state of the files; call it before any of them is opened.
    ///
    /// # Errors
    /// `NotFound` or `Io` with the path.
    pub fn of<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Result<Self> {
        let of = |path: &Path| Ok((path.to_owned(), Identity::of(path)?));
        paths.into_iter().map(of).collect::<Result<_>>().map(Unchanged)
    }

    /// Verifies, after the last byte was read, that no file was modified or replaced meanwhile.
    ///
    /// # Errors
    /// `Io`, with the name of the first changed file if there are several files.
    pub fn check(&self) -> Result<()> {
        self.0.iter().try_for_each(|(path, before)| {
            let how = match Identity::of(path) {
                Ok(now) if now == *before => return Ok(()),
                Ok(now) if now.inode != before.inode => "another file has replaced it".to_owned(),
                Ok(now) => format!("it had {} bytes and has {}", before.bytes, now.bytes),
                Err(e) => e.to_string(),
            };
            let changed = Error::new(Kind::Io, format!("changed while it was read: {how}"));
            let name = path.file_name().unwrap_or_default();
            Err(if self.0.len() > 1 { changed.within(name.display()) } else { changed })
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn written_replaced_and_removed_files_are_changed() {
        let folder = tempfile::tempdir().unwrap();
        let [path, other] = ["items.jsonl", "other"].map(|name| folder.path().join(name));
        let unchanged = |change: &dyn Fn()| {
            fs::write(&path, "one line\n").unwrap();
            let before = Unchanged::of([path.as_path(), Path::new("/dev/null")]).unwrap();
            change();
            before.check().map_err(|e| e.to_string())
        };
        assert_eq!(unchanged(&|| drop(fs::read(&path).unwrap())), Ok(()));
        let touch = || {
            let file = fs::File::options().write(true).open(&path).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        };
        let replace = || {
            fs::write(&other, "one line\n").unwrap();
            fs::rename(&other, &path).unwrap();
        };
        for (change, how) in [
            (&touch as &dyn Fn(), "it had 9 bytes and has 9"),
            (&|| fs::write(&path, "one").unwrap(), "it had 9 bytes and has 3"),
            (&replace, "another file has replaced it"),
            (&|| fs::remove_file(&path).unwrap(), "No such file"),
        ] {
            let error = unchanged(change).unwrap_err();
            assert!(error.contains("items.jsonl: changed while it was read: ") && error.contains(how), "{error}");
        }
        assert_eq!(Unchanged::of([path.as_path()]).unwrap_err().kind(), Kind::NotFound);
    }
}
