//! A store in a folder.
//!
//! A publication writes to `STORE/NAME/.publishing-RANDOM/`, which readers ignore, and renames this folder to its version when the
//! manifest is written. Two advisory locks (`flock`) coordinate publishers in one process, in containers and on hosts that share
//! the store:
//!
//! - `STORE/NAME/.lock` is held briefly: while leftovers are removed and a number is allocated, and around the rename. The file
//!   holds the highest number ever allocated, so that the number of a removed version is not reused with other bytes.
//! - `.publishing-RANDOM/.lock` is held during the publication; the system releases it when the process ends for any reason. A
//!   leftover is a staging folder whose lock is free or missing.

use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use xxhash_rust::xxh3::xxh3_64;

use super::super::manifest::MANIFEST;
use super::{PinnedVersion, Publication, Shelf, Stamp, Unit, check_rivals, number, rival_under_way};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::locks::locked;
use sterling_storage::files;

/// Prefix of the folder of an unfinished publication, before its random name.
const STAGING: &str = ".publishing-";
/// Lock file of a model or of an unfinished publication.
pub(super) const LOCK: &str = ".lock";

/// A folder of models, each a folder of versions.
#[derive(Debug)]
pub(super) struct Folder {
    root: PathBuf,
    sight: Mutex<FolderCheck>,
}

/// Result of the last check of the folder.
#[derive(Debug, Default)]
struct FolderCheck {
    /// True if the folder ever existed; otherwise the first publication creates the folder.
    was_there: bool,
    /// Reason why the folder cannot be read, although the folder existed before.
    trouble: Option<String>,
}

impl Folder {
    /// Opens the store at `root`; the folder need not exist yet.
    pub(super) fn new(root: PathBuf) -> Self {
        Folder { root, sight: Mutex::default() }
    }

    fn folder(&self, unit: Unit<'_>) -> PathBuf {
        self.root.join(unit.path())
    }

    fn whole(&self, model: &str, version: u64) -> PathBuf {
        self.folder(Unit { model, version, shard: None })
    }

    /// Returns the versions of a model, partitioned or not.
    fn taken(&self, model: &str) -> Result<Vec<u64>> {
        let names = names_in(&self.root.join(model))?;
        Ok(names.iter().filter_map(|name| number(name)).collect())
    }

    /// Removes leftovers, allocates a number and creates a staging folder.
    fn begin(&self, model: &str, parent: &Path) -> Result<(Staging, u64)> {
        let mut numbers = lock_folder(parent)?;
        remove_leftovers(parent)?;
        let mut text = String::new();
        // After a crash the file may have any content; the version folders then show the used numbers.
        let _ = numbers.read_to_string(&mut text);
        let given = number(text.trim()).unwrap_or(0);
        let published = self.numbers(model, &[MANIFEST.into()])?;
        let mut version = published.last().map_or(given, |last| given.max(*last)) + 1;
        while self.whole(model, version).exists() {
            version += 1;
        }
        let keep = |numbers: &mut File| -> std::io::Result<()> {
            numbers.set_len(0)?;
            numbers.rewind()?;
            writeln!(numbers, "{version}")?;
            numbers.sync_all()
        };
        keep(&mut numbers).map_err(|e| Error::io(parent.join(LOCK).display(), e))?;
        Ok((Staging::new(parent)?, version))
    }

    /// Renames a filled staging folder to its version, if `may` permits the rename.
    fn finish(&self, staging: &Staging, parent: &Path, target: &Path, may: impl Fn(&Path) -> Result<()>) -> Result<()> {
        let _numbers = lock_folder(parent)?;
        may(&staging.folder)?;
        staging.unlock()?;
        if target.exists() {
            return Err(Error::conflict(format!(
                "{}: another process created this folder meanwhile",
                target.display()
            )));
        }
        // The folders are opened before the rename, because a lack of descriptors must not fail a completed publication.
        let opened = |folder: &Path| files::open_folder(folder).map_err(|e| Error::io(folder.display(), e));
        let (of_model, of_store) = (opened(parent)?, opened(&self.root)?);
        let placed = place(&staging.folder, target, || of_model.sync_all().and_then(|()| of_store.sync_all()));
        placed.map_err(|e| Error::io(target.display(), e))
    }
}

impl Shelf for Folder {
    fn name(&self) -> String {
        self.root.display().to_string()
    }

    fn root(&self) -> &Path {
        &self.root
    }

    /// Records whether the folder exists: without this record, a missing folder, such as an unmounted file system, looks like an
    /// empty store.
    fn renew(&self) -> Result<()> {
        let found = fs::read_dir(&self.root);
        let mut sight = locked(&self.sight);
        sight.was_there |= found.is_ok();
        metrics::gauge!("sterling_store_available").set(f64::from(found.is_ok()));
        let trouble = found.err().filter(|_| sight.was_there).map(|e| e.kind().to_string());
        if sight.trouble != trouble {
            match &trouble {
                Some(why) => {
                    tracing::warn!(store = self.name(), why, "the store cannot be read; loaded versions keep serving")
                }
                None => tracing::info!(store = self.name(), "the store can be read again"),
            }
            sight.trouble = trouble;
        }
        Ok(())
    }

    fn trouble(&self) -> Option<String> {
        let why = locked(&self.sight).trouble.clone()?;
        Some(format!("the store's folder cannot be read, loaded versions keep serving: {why}"))
    }

    fn is_bucket(&self) -> bool {
        false
    }

    fn has_copies(&self, _: Option<&str>) -> bool {
        false
    }

    fn prove(&self) -> Result<()> {
        Ok(())
    }

    fn names(&self) -> Result<Vec<String>> {
        names_in(&self.root)
    }

    fn numbers(&self, model: &str, files: &[String]) -> Result<Vec<u64>> {
        let mut versions = self.taken(model)?;
        versions.retain(|version| files.iter().all(|file| self.whole(model, *version).join(file).exists()));
        versions.sort_unstable();
        Ok(versions)
    }

    fn stamp(&self, unit: Unit<'_>) -> Option<Stamp> {
        let mut seen = Vec::new();
        for entry in fs::read_dir(self.folder(unit)).ok()?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            // Hidden files belong to programs that copy versions; such a program renames a file when its copy is complete.
            if !name.starts_with('.') {
                let about = entry.metadata().ok()?;
                seen.push((name, about.ino(), about.len(), about.mtime(), about.mtime_nsec()));
            }
        }
        seen.sort();
        seen.iter().any(|(name, ..)| name == MANIFEST).then(|| Stamp(xxh3_64(format!("{seen:?}").as_bytes())))
    }

    fn outline(&self, unit: Unit<'_>) -> Result<PathBuf> {
        Ok(self.folder(unit))
    }

    fn ensure_local(&self, unit: Unit<'_>) -> Result<PinnedVersion> {
        Ok(PinnedVersion { folder: self.folder(unit), fold: None, _lock: None })
    }

    fn read(&self, model: &str, file: &str) -> Result<Vec<u8>> {
        let path = self.root.join(model).join(file);
        files::read(&path)
    }

    fn discard(&self, _: Unit<'_>) -> Result<bool> {
        Ok(false)
    }

    fn glance(&self, model: &str, file: &str) -> Result<Vec<u8>> {
        self.read(model, file)
    }

    fn swap(&self, model: &str, file: &str, before: Option<&[u8]>, bytes: &[u8]) -> Result<bool> {
        let parent = self.root.join(model);
        let _numbers = lock_folder(&parent)?;
        let now = match self.read(model, file) {
            Err(e) if e.kind() == Kind::NotFound => None,
            other => Some(other?),
        };
        if now.as_deref() != before {
            return Ok(false);
        }
        files::write_atomic(&parent.join(file), |out| out.write_all(bytes))?;
        Ok(true)
    }

    fn publish(&self, what: &mut Publication<'_>) -> Result<u64> {
        let model = what.model;
        let parent = self.root.join(model);
        fs::create_dir_all(&parent).map_err(|e| Error::io(parent.display(), e))?;
        let published = || self.numbers(model, &[MANIFEST.into()]);
        let before = published()?;
        let is_derived = what.is_derived;
        let may = |own: &Path| {
            if !is_derived {
                return Ok(());
            }
            check_rivals(model, &before, &published()?)?;
            match names_in(&parent)?.iter().map(|name| parent.join(name)).find(|other| other != own && is_live(other)) {
                Some(_) => Err(rival_under_way(model)),
                None => Ok(()),
            }
        };
        let (staging, version) = self.begin(model, &parent)?;
        let target = self.whole(model, version);
        let mut unfinished = Unfinished { parent: &parent, version, is_published: false };
        may(&staging.folder)
            .and_then(|()| (what.fill)(&staging.folder, version))
            .and_then(|()| self.finish(&staging, &parent, &target, may))?;
        unfinished.is_published = true;
        Ok(version)
    }

    fn add(&self, unit: Unit<'_>, _: &[&str], fill: &mut dyn FnMut(&Path) -> Result<()>) -> Result<()> {
        fill(&self.folder(unit))
    }

    fn remove(&self, model: &str, version: u64) -> Result<()> {
        let parent = self.root.join(model);
        let _numbers = lock_folder(&parent)?;
        remove_atomically(&parent, &self.whole(model, version))
    }
}

/// Allocated version number of a publication; the number is released if the publication panics.
struct Unfinished<'a> {
    parent: &'a Path,
    version: u64,
    is_published: bool,
}

impl Unfinished<'_> {
    /// Releases the number, unless a later number has been allocated; a merge that is repeated then gets the same number again.
    fn release_number(&self) -> Result<()> {
        let io = |e| Error::io(self.parent.join(LOCK).display(), e);
        let mut numbers = lock_folder(self.parent)?;
        let mut text = String::new();
        numbers.read_to_string(&mut text).map_err(io)?;
        if number(text.trim()) == Some(self.version) {
            numbers.set_len(0).and_then(|()| numbers.rewind()).map_err(io)?;
            writeln!(numbers, "{}", self.version - 1).map_err(io)?;
        }
        Ok(())
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if !self.is_published && std::thread::panicking() {
            // If the release fails, a gap in the version numbers is harmless.
            let _ = self.release_number();
        }
    }
}

/// Staging folder of a publication, and the lock that marks it as active. A staging folder that is not renamed is removed at the
/// end, including after an error or a panic.
pub(super) struct Staging {
    pub(super) folder: PathBuf,
    _lock: File,
}

impl Staging {
    pub(super) fn new(parent: &Path) -> Result<Self> {
        let folder = parent.join(format!("{STAGING}{:016x}", RandomState::new().hash_one(parent)));
        fs::create_dir(&folder).map_err(|e| Error::io(folder.display(), e))?;
        let lock = folder.join(LOCK);
        let locked = File::create(&lock).and_then(|file| file.try_lock().map_err(Into::into).map(|()| file));
        let _lock = locked.map_err(|e| Error::io(lock.display(), e))?;
        Ok(Staging { folder, _lock })
    }

    /// Removes the lock file before the folder is renamed.
    pub(super) fn unlock(&self) -> Result<()> {
        fs::remove_file(self.folder.join(LOCK)).map_err(|e| Error::io(self.folder.display(), e))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // If the folder cannot be removed now, the next publication removes it.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Renames a folder and makes the rename durable with `sync`. If `sync` fails, renames the folder back, because a failed
/// publication must not have published anything.
pub(super) fn place(from: &Path, to: &Path, sync: impl Fn() -> std::io::Result<()>) -> std::io::Result<()> {
    fs::rename(from, to)?;
    sync().map_err(|e| match fs::rename(to, from) {
        Ok(()) => e,
        Err(stays) => {
            std::io::Error::other(format!("{e}; the version is published, but may be lost in a power failure: {stays}"))
        }
    })
}

/// Locks a folder, such as a model's, until the returned file is closed.
pub(super) fn lock_folder(parent: &Path) -> Result<File> {
    let path = parent.join(LOCK);
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .and_then(|file| file.lock().map(|()| file))
        .map_err(|e| Error::io(format!("{}: locking the store", path.display()), e))
}

/// Removes a folder in `parent` atomically. The caller must hold the lock of `parent`.
pub(super) fn remove_atomically(parent: &Path, folder: &Path) -> Result<()> {
    // Gives the folder the name of an unfinished publication: if removing it fails, the next publication removes it.
    let leftover = parent.join(format!("{STAGING}{:016x}", RandomState::new().hash_one(folder)));
    fs::rename(folder, &leftover).map_err(|e| Error::io(folder.display(), e))?;
    fs::remove_dir_all(&leftover).map_err(|e| Error::io(leftover.display(), e))
}

/// Removes the staging folders of killed publications. The caller must hold the model's lock: only then is every staging folder
/// without a lock a leftover.
pub(super) fn remove_leftovers(parent: &Path) -> Result<()> {
    for name in names_in(parent)?.iter().filter(|name| name.starts_with(STAGING)) {
        let folder = parent.join(name);
        if !is_live(&folder) {
            tracing::warn!(folder = %folder.display(), "removing an unfinished publication");
            fs::remove_dir_all(&folder).map_err(|e| Error::io(folder.display(), e))?;
        }
    }
    Ok(())
}

/// Returns whether a folder is the staging folder of an active publication.
fn is_live(folder: &Path) -> bool {
    let is_staging = folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(STAGING));
    is_staging
        && match File::options().write(true).open(folder.join(LOCK)) {
            Ok(lock) => lock.try_lock().is_err(),
            Err(e) => e.kind() != std::io::ErrorKind::NotFound,
        }
}

/// Returns the names in a folder; no names if the folder does not exist.
pub(super) fn names_in(folder: &Path) -> Result<Vec<String>> {
    match fs::read_dir(folder) {
        Ok(entries) => Ok(entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect()),
        Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {
            Ok(Vec::new())
        }
        Err(e) => Err(Error::io(folder.display(), e)),
    }
}
