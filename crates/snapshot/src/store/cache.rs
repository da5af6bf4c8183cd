//! Local cache of versions from a bucket, with a limit on disk space.
//!
//! The cache folder has the layout of a store. Each version has a lock file, which processes that use the version hold locked
//! (`flock`, across all processes that share the folder). The lock file's modification time is the time of the last use: unused
//! versions are evicted, the least recently used first. The file `.origin` of a cached version holds its stamp in the bucket and
//! its size.

use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use xxhash_rust::xxh3::xxh3_64;

use super::folder::{LOCK, lock_folder, names_in};
use super::{PinnedVersion, Stamp, number};
use sterling_core::error::{Error, Result};
use sterling_storage::files;

/// Prefix of the folder of an incomplete fetch, before the version's name.
pub(super) const FETCHING: &str = ".fetching-";
/// Prefix of the name of a folder that is being removed.
const REMOVED_PREFIX: &str = ".gone-";
const ORIGIN: &str = ".origin";

/// Local copies of versions from a bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CacheOptions {
    /// Folder of the copies; without it, `sterling` in `$XDG_CACHE_HOME`, else in `~/.cache`.
    #[schema(value_type = Option<String>)]
    pub folder: Option<PathBuf>,
    /// Disk space for the copies, in MiB; 0: 7/8 of the disk space that other files leave free.
    pub limit_mb: u64,
}

/// Origin of a cached version.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Origin {
    stamp: u64,
    bytes: u64,
}

/// Local cache folder.
#[derive(Debug)]
pub(super) struct Cache {
    root: PathBuf,
    /// Maximum bytes of cached versions; `None` if the limit depends on free disk space.
    limit: Option<u64>,
}

/// A cached version or an incomplete fetch.
struct Entry {
    folder: PathBuf,
    lock: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl Cache {
    /// Opens the subfolder of the cache for the store with this URL.
    pub(super) fn new(url: &str, options: &CacheOptions) -> Result<Self> {
        let of_user = || {
            let named = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
            let caches = named("XDG_CACHE_HOME").or_else(|| named("HOME").map(|home| home.join(".cache")));
            caches.map(|caches| caches.join("sterling"))
        };
        let folder = options.folder.clone().or_else(of_user).ok_or_else(|| {
            Error::invalid(format!("store {url}: `cache.folder`: expected a folder that versions are fetched to"))
        })?;
        let root = folder.join(format!("{:016x}", xxh3_64(url.as_bytes())));
        fs::create_dir_all(&root).map_err(|e| Error::io(root.display(), e))?;
        let limit = (options.limit_mb > 0).then(|| options.limit_mb.saturating_mul(1 << 20));
        Ok(Cache { root, limit })
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the maximum bytes of cached versions, which now use `taken` bytes. Without a fixed limit, the maximum follows the
    /// free disk space, which other programs change.
    fn limit(&self, taken: u64) -> Result<u64> {
        if let Some(limit) = self.limit {
            return Ok(limit);
        }
        let disk = rustix::fs::statvfs(&self.root).map_err(|e| Error::io(self.root.display(), e.into()))?;
        Ok(disk.f_bavail.saturating_mul(disk.f_frsize).saturating_add(taken) / 8 * 7)
    }

    /// Protects a version that is cached or about to be cached from eviction.
    pub(super) fn hold(&self, folder: &Path) -> Result<PinnedVersion> {
        let path = lock_of(folder);
        let parent = path.parent().unwrap_or(&self.root);
        let lock = fs::create_dir_all(parent).and_then(|()| {
            let lock = File::options().write(true).create(true).truncate(false).open(&path)?;
            lock.lock_shared()?;
            lock.set_modified(SystemTime::now())?;
            Ok(lock)
        });
        let lock = lock.map_err(|e| Error::io(path.display(), e))?;
        Ok(PinnedVersion { folder: folder.to_owned(), fold: None, _lock: Some(lock) })
    }

    /// Returns the stamp of the version in a folder, if the version is complete.
    pub(super) fn stamp(folder: &Path) -> Option<Stamp> {
        origin(folder).map(|origin| Stamp(origin.stamp))
    }

    /// Records the stamp and size of the version that is in a folder or is being fetched to it.
    pub(super) fn mark(folder: &Path, stamp: Stamp, bytes: u64) -> Result<()> {
        let text = serde_json::to_vec(&Origin { stamp: stamp.0, bytes });
        let text = text.map_err(|e| Error::internal(format!("origin: {e}")))?;
        files::write_atomic(&folder.join(ORIGIN), |out| out.write_all(&text)).map(drop)
    }

    /// Renames the complete staging folder to the folder of its version, and replaces an older copy.
    pub(super) fn settle(&self, staging: &Path, folder: &Path) -> Result<()> {
        if folder.exists() {
            Cache::discard(folder)?;
        }
        fs::rename(staging, folder).map_err(|e| Error::io(folder.display(), e))?;
        files::sync_folder(folder.parent().unwrap_or(&self.root)).map_err(|e| Error::io(folder.display(), e))
    }

    /// Removes a folder atomically: renames it first, so that a partially removed version is never visible.
    pub(super) fn discard(folder: &Path) -> Result<()> {
        let removed = folder.with_file_name(format!("{REMOVED_PREFIX}{:016x}", RandomState::new().hash_one(folder)));
        fs::rename(folder, &removed).map_err(|e| Error::io(folder.display(), e))?;
        fs::remove_dir_all(&removed).map_err(|e| Error::io(removed.display(), e))
    }

    /// Evicts unused versions until a version that is about to be fetched fits.
    pub(super) fn make_room(&self, staging: &Path, stamp: Stamp, bytes: u64) -> Result<()> {
        let _lock = lock_folder(&self.root)?;
        let mut entries = entries(&self.root)?;
        entries.retain(|entry| entry.folder != staging);
        entries.sort_by_key(|entry| entry.used);
        let mut taken: u64 = entries.iter().map(|entry| entry.bytes).sum();
        let limit = self.limit(taken)?;
        for entry in &entries {
            if taken.saturating_add(bytes) <= limit {
                break;
            }
            let lock = File::options().write(true).open(&entry.lock);
            let Ok(lock) = lock.and_then(|lock| lock.try_lock().map_err(Into::into).map(|()| lock)) else { continue };
            tracing::info!(folder = %entry.folder.display(), bytes = entry.bytes, "evicting a version from the cache");
            Cache::discard(&entry.folder)?;
            taken -= entry.bytes;
            drop(lock);
        }
        if taken.saturating_add(bytes) > limit {
            let (need, limit) = (bytes.div_ceil(1 << 20), limit >> 20);
            return Err(Error::no_space(format!(
                "cache {}: a version needs {need} MB, the limit for all versions is {limit} MB, {} MB are in use",
                self.root.display(),
                taken.div_ceil(1 << 20)
            )));
        }
        Cache::mark(staging, stamp, bytes)?;
        metrics::gauge!("sterling_store_cache_bytes").set((taken + bytes) as f64);
        Ok(())
    }

    /// Removes manifests and lock files of versions that are neither published nor cached.
    pub(super) fn tidy(&self, model: &str, published: &[u64]) {
        let parent = self.root.join(model);
        for name in names_in(&parent).unwrap_or_default() {
            let outline = name.strip_prefix(FETCHING).and_then(|rest| rest.split_once('-')).map(|(version, _)| version);
            let lock = name.strip_prefix('.').and_then(|rest| rest.strip_suffix(".used"));
            let Some(version) = outline.or(lock).and_then(number) else { continue };
            let is_whole = origin(&parent.join(&name)).is_some() || parent.join(version.to_string()).exists();
            if !published.contains(&version) && !is_whole {
                let path = parent.join(&name);
                // An error is ignored: another process may remove the same file at the same time.
                let _ = if outline.is_some() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
            }
        }
    }

    /// Returns the folders of a model's complete versions.
    pub(super) fn versions(&self, model: &str) -> Vec<PathBuf> {
        let entries = entries_of(&self.root.join(model)).unwrap_or_default();
        let is_whole = |folder: &PathBuf| !is_fetching(folder);
        entries.into_iter().map(|entry| entry.folder).filter(is_whole).collect()
    }
}

/// Returns the lock file of a version.
fn lock_of(folder: &Path) -> PathBuf {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    folder.with_file_name(format!(".{name}.used"))
}

fn is_fetching(folder: &Path) -> bool {
    folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(FETCHING))
}

fn origin(folder: &Path) -> Option<Origin> {
    serde_json::from_slice(&fs::read(folder.join(ORIGIN)).ok()?).ok()
}

/// Lists all entries of the cache.
fn entries(root: &Path) -> Result<Vec<Entry>> {
    let models = names_in(root)?.into_iter().map(|model| entries_of(&root.join(model)));
    models.collect::<Result<Vec<_>>>().map(|entries| entries.into_iter().flatten().collect())
}

/// Lists the entries in the folder of a model or of a partitioned version.
fn entries_of(parent: &Path) -> Result<Vec<Entry>> {
    let mut found = Vec::new();
    for name in names_in(parent)? {
        let folder = parent.join(&name);
        if name.starts_with(REMOVED_PREFIX) {
            // A process that was killed while it removed this folder has left the folder behind.
            let _ = fs::remove_dir_all(&folder);
        } else if let Some(Origin { bytes, .. }) = origin(&folder) {
            let lock = if is_fetching(&folder) { folder.join(LOCK) } else { lock_of(&folder) };
            let used = fs::metadata(&lock).and_then(|about| about.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
            found.push(Entry { folder, lock, bytes, used });
        } else if number(&name).is_some() {
            found.extend(entries_of(&folder)?);
        }
    }
    Ok(found)
}
