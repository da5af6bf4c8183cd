//! Fetch of a version from a bucket to a local folder.
//!
//! Files are written to a staging folder whose name contains the tag of the manifest, so that an interrupted fetch resumes with the
//! next file, or in the middle of a file. The length and hash of every file are checked against the manifest. Files that another
//! local version of the model already has are hard-linked instead of read again.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::super::manifest::{MANIFEST, Manifest};
use super::cache::{Cache, FETCHING};
use super::folder::{LOCK, lock_folder};
use super::{Stamp, Unit};
use crate::model::MODEL_FILE;
use sterling_core::error::{Error, Kind, Result};
use sterling_storage::files::{self, Checksum, Hashed};
use sterling_storage::objects::{Objects, Tag, found, read_twice};

/// A version as of the last listing of its bucket.
pub(super) struct Source<'a> {
    pub(super) objects: &'a dyn Objects,
    pub(super) unit: Unit<'a>,
    /// Stamp of the version's objects.
    pub(super) stamp: Stamp,
    pub(super) manifest: Tag,
    /// Tag of the file that lists the version's shards, if a shard is fetched.
    pub(super) shards: Option<Tag>,
    /// Files of the version that the manifest does not list.
    pub(super) others: Vec<(String, Tag)>,
}

impl Source<'_> {
    /// Returns the final folder of the version.
    fn folder(&self, cache: &Cache) -> PathBuf {
        cache.root().join(self.unit.path())
    }

    /// Returns the staging folder. Objects that are added or repaired later do not invalidate its files, because the manifest
    /// determines the content of each file.
    fn staging(&self, cache: &Cache) -> PathBuf {
        let folder = self.folder(cache);
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let mark = self.manifest.mark() ^ self.shards.as_ref().map_or(0, Tag::mark).rotate_left(1);
        folder.with_file_name(format!("{FETCHING}{name}-{mark:016x}"))
    }

    /// Returns whether the version is cached with its current stamp.
    pub(super) fn is_there(&self, cache: &Cache) -> bool {
        Cache::stamp(&self.folder(cache)) == Some(self.stamp)
    }

    /// Fetches the metadata of the version if it is not cached. Returns the folder with the metadata.
    pub(super) fn outline(&self, cache: &Cache) -> Result<PathBuf> {
        if self.is_there(cache) {
            return Ok(self.folder(cache));
        }
        let staging = self.staging(cache);
        fs::create_dir_all(&staging).map_err(|e| Error::io(staging.display(), e))?;
        let manifest = staging.join(MANIFEST);
        let shards = staging.with_file_name(super::SHARDS_FILE);
        if let Some(tag) = self.shards.as_ref().filter(|_| !manifest.exists() || !shards.exists()) {
            // Versions with the same number share this path; the path has the file of the version that was listed last.
            self.whole(&self.unit.shards_key(), tag, &shards)?;
        }
        if !manifest.exists() {
            self.whole(&self.unit.key(MANIFEST), &self.manifest, &manifest)?;
        }
        let named = Manifest::read(&staging)?.files;
        if let Some(sum) = named.get(MODEL_FILE) {
            self.file(cache, &staging, MODEL_FILE, sum)?;
        }
        Ok(staging)
    }

    /// Fetches the version to its final folder.
    pub(super) fn fetch(&self, cache: &Cache) -> Result<()> {
        let staging = self.outline(cache)?;
        let locked = lock_folder(&staging);
        // Another process may have completed the fetch of the version meanwhile.
        if self.is_there(cache) {
            return Ok(());
        }
        let _lock = locked?;
        let manifest = Manifest::read(&staging)?;
        cache.make_room(&staging, self.stamp, manifest.bytes())?;
        for (name, sum) in &manifest.files {
            self.file(cache, &staging, name, sum)?;
        }
        for (name, tag) in &self.others {
            self.whole(&self.unit.key(name), tag, &staging.join(name))?;
        }
        let lock = staging.join(LOCK);
        fs::remove_file(&lock).map_err(|e| Error::io(lock.display(), e))?;
        files::sync_folder(&staging).map_err(|e| Error::io(staging.display(), e))?;
        cache.settle(&staging, &self.folder(cache))
    }

    /// Reads an object that no manifest lists; the object must not have changed since the listing.
    fn whole(&self, key: &str, seen: &Tag, to: &Path) -> Result<()> {
        // The manifest has no checksum of its own, but lists the checksums of all other files.
        let (bytes, tag) = found(|| read_twice(self.objects, key))?;
        if tag.mark() != seen.mark() {
            return Err(Error::not_ready(format!("{key}: the object was replaced during its download")));
        }
        files::write_atomic(to, |out| out.write_all(&bytes)).map(drop)
    }

    /// Fetches a file of the manifest, if the local folder lacks the file.
    fn file(&self, cache: &Cache, staging: &Path, name: &str, sum: &Checksum) -> Result<()> {
        let target = staging.join(name);
        if target.exists() {
            return Ok(());
        }
        let key = self.unit.key(name);
        let reported = |what: String| Error::corrupt(format!("{key}: file `{name}` {what}"));
        let head = match found(|| self.objects.head(&key)) {
            Err(e) if e.kind() == Kind::NotFound => return Err(reported("is missing".into())),
            other => other?,
        };
        if head.bytes != sum.bytes {
            return Err(reported(format!("has {} bytes, expected {}", head.bytes, sum.bytes)));
        }
        if self.link(cache, &target, sum) {
            return Ok(());
        }
        let part = staging.join(format!(".{name}.part"));
        let unwritten = |e| Error::io(part.display(), e);
        let mut found = self.read(&key, &head, &part)?;
        if found != *sum {
            // The wrong bytes may come from an earlier, interrupted fetch, or from the transfer.
            tracing::warn!(key, "the file differs from the manifest; fetching it again");
            fs::remove_file(&part).map_err(unwritten)?;
            found = self.read(&key, &head, &part)?;
        }
        if found != *sum {
            fs::remove_file(&part).map_err(unwritten)?;
            return Err(reported(format!("has checksum {}, expected {}", found.xxh3, sum.xxh3)));
        }
        fs::rename(&part, &target).map_err(unwritten)
    }

    /// Reads an object to a local file, which may already have the beginning of the object.
    fn read(&self, key: &str, head: &Tag, part: &Path) -> Result<Checksum> {
        let unwritten = |e| Error::io(part.display(), e);
        let file = File::options().read(true).write(true).create(true).truncate(false).open(part).map_err(unwritten)?;
        let had = file.metadata().map_err(unwritten)?.len();
        if had > head.bytes {
            file.set_len(0).map_err(unwritten)?;
        }
        let mut to = Hashed::resumed(file).map_err(unwritten)?;
        loop {
            let from = to.bytes();
            let read = found(|| {
                self.objects.read(key, head, to.bytes()..head.bytes, &mut |piece| {
                    metrics::counter!("sterling_store_fetched_bytes_total").increment(piece.len() as u64);
                    to.write_all(piece).map_err(unwritten)
                })
            });
            match read {
                Ok(()) => break,
                // Retries an interrupted fetch immediately as long as bytes arrive.
                Err(e) if e.kind() == Kind::Unavailable && to.bytes() > from => {
                    tracing::warn!(key, at = to.bytes(), error = %e, "the fetch was interrupted; resuming");
                }
                Err(e) if e.kind() == Kind::Conflict => {
                    return Err(Error::not_ready(format!("{key}: the object was replaced during its download")));
                }
                Err(e) => return Err(e),
            }
        }
        to.flush().and_then(|()| to.get_ref().sync_all()).map_err(unwritten)?;
        Ok(to.sum())
    }

    /// Hard-links a file with the same content from another version of the model, if there is one.
    fn link(&self, cache: &Cache, target: &Path, sum: &Checksum) -> bool {
        cache.versions(self.unit.model).iter().any(|folder| {
            let Ok(manifest) = Manifest::read(folder) else { return false };
            let same = manifest.files.iter().find(|(_, of)| *of == sum);
            same.is_some_and(|(name, _)| {
                let path = folder.join(name);
                Checksum::of_file(&path).is_ok_and(|found| found == *sum) && fs::hard_link(&path, target).is_ok()
            })
        })
    }
}
