//! A store in an object store bucket.
//!
//! At each poll, one listing of the bucket's keys (`listing`) shows all versions, their fingerprints and desired states. Other data
//! of the bucket is requested when it is needed. While the bucket does not answer, the last listing remains in use; without a
//! listing, the contents of the local cache are used.
//!
//! A publication (`publication`) allocates its number by a conditional write to an object. It writes its objects to their final
//! keys. The object that completes the version (its manifest, or the file that lists its shards) is written last, on condition that
//! it does not exist. Readers ignore a version that is not complete; a later publication removes the leftovers of a killed
//! publication (`lease`).

mod listing;
mod publication;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use xxhash_rust::xxh3::xxh3_64;

use super::super::manifest::MANIFEST;
use super::super::shards::SHARDS_FILE;
use super::cache::{Cache, CacheOptions};
use super::fetch::Source;
use super::folder::{Staging, lock_folder, names_in, remove_leftovers};
use super::{PinnedVersion, Publication, Shelf, Stamp, Unit};
use listing::{LATER, Seen};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::locks::locked;
use sterling_storage::files;
use sterling_storage::objects::{Health, Objects, Proof, Tag, WriteCondition, found, prove, read_twice, replace};

/// A bucket and the local cache of its versions.
#[derive(Debug)]
pub(super) struct Remote {
    url: String,
    objects: Arc<dyn Objects>,
    cache: Cache,
    health: Health,
    /// Last listing of the bucket, if there was one.
    seen: Mutex<Option<Arc<Seen>>>,
    /// Last read content of small files, with their tags.
    read: Mutex<BTreeMap<String, (u64, Vec<u8>)>>,
    proven: Mutex<bool>,
}

impl Remote {
    pub(super) fn new(url: String, objects: Arc<dyn Objects>, cache: &CacheOptions) -> Result<Self> {
        let cache = Cache::new(&url, cache)?;
        let (health, seen, read, proven) = (Health::default(), Mutex::default(), Mutex::default(), Mutex::new(false));
        Ok(Remote { url, objects, cache, health, seen, read, proven })
    }

    fn look(&self) -> Result<Seen> {
        self.objects.list("").map(Seen::of)
    }

    fn take(&self, looked: Result<Seen>) -> Result<()> {
        metrics::gauge!("sterling_store_available").set(f64::from(looked.is_ok()));
        let looked = looked?;
        *locked(&self.seen) = Some(Arc::new(looked));
        Ok(())
    }

    /// Lists the bucket now, even shortly after a failed attempt.
    fn list_now(&self) -> Result<Arc<Seen>> {
        self.take(self.health.reported(self.look()))?;
        Ok(self.seen())
    }

    fn seen(&self) -> Arc<Seen> {
        if let Some(seen) = &*locked(&self.seen) {
            return seen.clone();
        }
        Arc::new(self.fetched())
    }

    /// Returns a listing that consists of the cached versions.
    fn fetched(&self) -> Seen {
        let mut keys = BTreeMap::new();
        for model in names_in(self.cache.root()).unwrap_or_default() {
            for folder in self.cache.versions(&model) {
                let Ok(path) = folder.strip_prefix(self.cache.root()) else { continue };
                for file in [path.join(MANIFEST), path.with_file_name(SHARDS_FILE)] {
                    if self.cache.root().join(&file).exists() {
                        keys.insert(file.to_string_lossy().into_owned(), Tag::default());
                    }
                }
            }
        }
        Seen { keys, is_of_cache: true, ..Seen::default() }
    }

    /// Returns the source of a version as of the last listing.
    fn source<'a>(&'a self, seen: &Seen, unit: Unit<'a>) -> Option<Source<'a>> {
        let manifest = seen.keys.get(&unit.key(MANIFEST))?.clone();
        let shards = match unit.shard {
            Some(_) => Some(seen.keys.get(&unit.shards_key())?.clone()),
            None => None,
        };
        let folder = unit.path().to_string_lossy().into_owned();
        let later = seen.under(&folder).filter(|(name, _)| name.starts_with(LATER));
        let others: Vec<(String, Tag)> = later.map(|(name, tag)| (name.to_owned(), tag.clone())).collect();
        // As in a folder store, an object that is added, removed or replaced changes the fingerprint of the version.
        let looks = seen.looks.get(&folder).copied().unwrap_or_default();
        let marks = [looks, shards.as_ref().map_or(0, Tag::mark)];
        let stamp = Stamp(xxh3_64(&marks.map(u64::to_le_bytes).concat()));
        Some(Source { objects: &*self.objects, unit, stamp, manifest, shards, others })
    }

    fn require_source<'a>(&'a self, seen: &Seen, unit: Unit<'a>) -> Result<Source<'a>> {
        let reported = || Error::not_found(format!("{}/{}: not published", self.url, unit.path().display()));
        self.source(seen, unit).ok_or_else(reported)
    }

    /// Reads a small object in its current state. An object of the last listing must exist, so a single "not found" is retried.
    fn small(&self, key: &str) -> Result<(Vec<u8>, Tag)> {
        let read = || read_twice(&*self.objects, key);
        let is_seen = locked(&self.seen).as_ref().is_some_and(|seen| seen.keys.contains_key(key));
        if is_seen { found(read) } else { read() }
    }

    /// Reads a small object in its current state; `None` if the object does not exist.
    fn now(&self, key: &str) -> Result<Option<(Vec<u8>, Tag)>> {
        match self.small(key) {
            Err(e) if e.kind() == Kind::NotFound => Ok(None),
            other => other.map(Some),
        }
    }

    /// Rejects a bucket that ignores conditional writes or that this caller may only read.
    fn may_write(&self) -> Result<()> {
        let mut proven = locked(&self.proven);
        if !*proven {
            if prove(&*self.objects)? == Proof::ReadOnly {
                return Err(Error::new(Kind::Io, "the bucket rejects writes with this caller's credentials"));
            }
            *proven = true;
        }
        Ok(())
    }

    fn versions(&self, model: &str) -> Result<Vec<u64>> {
        self.numbers(model, &[MANIFEST.into()])
    }
}

impl Shelf for Remote {
    fn name(&self) -> String {
        self.url.clone()
    }

    fn root(&self) -> &Path {
        self.cache.root()
    }

    fn renew(&self) -> Result<()> {
        let before = self.health.trouble();
        let looked = self.health.ask(|| {
            self.look()
                .inspect_err(|error| tracing::warn!(%error, "the store does not answer; its last listing stays in use"))
        });
        if before.is_some() && looked.is_ok() {
            tracing::info!(store = self.url, "the store answers again");
        }
        self.take(looked)
    }

    fn trouble(&self) -> Option<String> {
        let Some((since, why)) = self.health.trouble() else {
            let is_unseen = locked(&self.seen).is_none();
            return is_unseen
                .then(|| format!("store {}: no answer yet, previously fetched versions are served", self.url));
        };
        Some(format!("store {}: no answer for {} s, loaded versions keep serving: {why}", self.url, since.as_secs()))
    }

    fn is_bucket(&self) -> bool {
        true
    }

    fn has_copies(&self, model: Option<&str>) -> bool {
        let fetched = self.fetched();
        match model {
            Some(model) => !fetched.numbers(model).is_empty(),
            None => !fetched.keys.is_empty(),
        }
    }

    fn prove(&self) -> Result<()> {
        prove(&*self.objects).map(|proof| {
            if proof == Proof::ReadOnly {
                tracing::info!(
                    store = self.url,
                    "the bucket rejects writes with this caller's credentials; using the bucket read-only"
                );
            }
        })
    }

    fn names(&self) -> Result<Vec<String>> {
        let seen = self.seen();
        let mut names: Vec<String> =
            seen.keys.keys().filter_map(|key| key.split_once('/')).map(|(name, _)| name.to_owned()).collect();
        names.dedup();
        Ok(names)
    }

    fn numbers(&self, model: &str, files: &[String]) -> Result<Vec<u64>> {
        let seen = self.seen();
        let mut numbers = seen.numbers(model);
        numbers.retain(|&version| {
            let unit = Unit { model, version, shard: None };
            files.iter().all(|file| seen.keys.contains_key(&unit.key(file)))
        });
        Ok(numbers)
    }

    fn stamp(&self, unit: Unit<'_>) -> Option<Stamp> {
        let seen = self.seen();
        match seen.is_of_cache {
            true => Cache::stamp(&self.cache.root().join(unit.path())),
            false => self.source(&seen, unit).map(|source| source.stamp),
        }
    }

    fn outline(&self, unit: Unit<'_>) -> Result<PathBuf> {
        let seen = self.seen();
        match seen.is_of_cache {
            true => Ok(self.cache.root().join(unit.path())),
            false => self.require_source(&seen, unit)?.outline(&self.cache),
        }
    }

    fn ensure_local(&self, unit: Unit<'_>) -> Result<PinnedVersion> {
        let held = self.cache.hold(&self.cache.root().join(unit.path()))?;
        let seen = self.seen();
        if !seen.is_of_cache {
            let source = self.require_source(&seen, unit)?;
            if !source.is_there(&self.cache) {
                source.fetch(&self.cache)?;
                self.cache.tidy(unit.model, &seen.numbers(unit.model));
            }
        }
        Ok(held)
    }

    fn discard(&self, unit: Unit<'_>) -> Result<bool> {
        let folder = self.cache.root().join(unit.path());
        let is_there = Cache::stamp(&folder).is_some() && !self.seen().is_of_cache;
        if is_there {
            tracing::warn!(folder = %folder.display(), "the cached copy is damaged; fetching it again");
            Cache::discard(&folder)?;
        }
        Ok(is_there)
    }

    fn read(&self, model: &str, file: &str) -> Result<Vec<u8>> {
        self.small(&format!("{model}/{file}")).map(|(bytes, _)| bytes)
    }

    fn glance(&self, model: &str, file: &str) -> Result<Vec<u8>> {
        let (seen, key) = (self.seen(), format!("{model}/{file}"));
        let copy = self.cache.root().join(&key);
        if seen.is_of_cache {
            return files::read(&copy);
        }
        let Some(mark) = seen.keys.get(&key).map(Tag::mark) else {
            return Err(Error::not_found(format!("{}/{key}: the object does not exist", self.url)));
        };
        if let Some((_, bytes)) = locked(&self.read).get(&key).filter(|(of, _)| *of == mark) {
            return Ok(bytes.clone());
        }
        let (bytes, tag) = self.small(&key)?;
        fs::create_dir_all(self.cache.root().join(model)).map_err(|e| Error::io(copy.display(), e))?;
        files::write_atomic(&copy, |out| out.write_all(&bytes))?;
        locked(&self.read).insert(key, (tag.mark(), bytes.clone()));
        Ok(bytes)
    }

    fn swap(&self, model: &str, file: &str, before: Option<&[u8]>, bytes: &[u8]) -> Result<bool> {
        self.may_write()?;
        let key = format!("{model}/{file}");
        let now = self.now(&key)?;
        if now.as_ref().map(|(bytes, _)| bytes.as_slice()) != before {
            return Ok(false);
        }
        let over = now.map_or(WriteCondition::Nothing, |(_, tag)| WriteCondition::This(tag));
        let is_swapped = match replace(&*self.objects, &key, bytes, &over) {
            Err(e) if e.kind() == Kind::Conflict => false,
            other => other.map(|_| true)?,
        };
        if is_swapped {
            // A server that starts while the bucket does not answer must not return to the previous content.
            let copy = self.cache.root().join(&key);
            let retained = fs::create_dir_all(self.cache.root().join(model)).map_err(|e| Error::io(copy.display(), e));
            let retained = retained.and_then(|()| files::write_atomic(&copy, |out| out.write_all(bytes)));
            if let Err(error) = retained {
                tracing::warn!(model, file, %error, "written to the bucket, but not cached locally");
            }
        }
        Ok(is_swapped)
    }

    fn publish(&self, what: &mut Publication<'_>) -> Result<u64> {
        self.may_write().map_err(|e| e.within(format!("store {}", self.url)))?;
        let model = what.model;
        let parent = self.cache.root().join(model);
        fs::create_dir_all(&parent).map_err(|e| Error::io(parent.display(), e))?;
        let staging = {
            let _lock = lock_folder(&parent)?;
            remove_leftovers(&parent)?;
            Staging::new(&parent)?
        };
        let version = self.take_number(model)?;
        let published = self.fill(what, &staging.folder, version);
        if published.is_ok() {
            let unit = Unit { model, version, shard: None };
            let is_cut = staging.folder.join(SHARDS_FILE).exists();
            // Shards are fetched separately.
            let retained = self.list_now().and_then(|seen| {
                staging.unlock()?;
                if is_cut { Ok(()) } else { self.keep(&seen, unit, &staging.folder) }
            });
            if let Err(error) = retained {
                tracing::info!(model, version, %error, "published, but not cached locally");
            }
        }
        let _ = fs::remove_dir_all(&staging.folder);
        published.map(|()| version)
    }

    fn add(&self, unit: Unit<'_>, files: &[&str], fill: &mut dyn FnMut(&Path) -> Result<()>) -> Result<()> {
        let held = self.ensure_local(unit)?;
        fill(held.folder())?;
        for file in files.iter().filter(|file| held.folder().join(file).exists()) {
            self.objects.upload(&unit.key(file), &held.folder().join(file))?;
        }
        let bytes = super::Manifest::read(held.folder())?.bytes();
        match self.source(&*self.list_now()?, unit) {
            Some(source) => Cache::mark(held.folder(), source.stamp, bytes),
            None => Ok(()),
        }
    }

    fn remove(&self, model: &str, version: u64) -> Result<()> {
        self.remove_all(model, version)?;
        self.list_now().map(drop)
    }
}
