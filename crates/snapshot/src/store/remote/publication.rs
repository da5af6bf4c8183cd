//! Publication of a version to a bucket: allocates the number, removes leftovers of killed publications, uploads the files and
//! completes the version.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use super::super::folder::names_in;
use super::super::lease::{LEASE, LEASE_MS, Lease};
use super::super::{Manifest, Publication, Unit, check_rivals, number, rival_under_way};
use super::Remote;
use super::listing::{GIVEN, Seen};
use crate::manifest::MANIFEST;
use crate::shards::SHARDS_FILE;
use sterling_core::error::{Error, Kind, Result};
use sterling_storage::files;
use sterling_storage::objects::{Tag, WriteCondition, back_off, replace};

/// Maximum number of attempts to allocate a version number: while other publications allocate too, and if the bucket does not
/// answer.
const TRIES: (usize, u32) = (100, 5);
/// Number of attempts to find written objects in a listing; then the first and the longest wait between attempts.
const LISTING_RETRIES: (u32, (Duration, Duration)) = (5, (Duration::from_millis(100), Duration::from_secs(2)));

impl Remote {
    /// Allocates a version number above all existing numbers.
    pub(super) fn take_number(&self, model: &str) -> Result<u64> {
        let key = format!("{model}/{GIVEN}");
        let mut failures = 0;
        for _ in 0..TRIES.0 {
            let before = self.now(&key)?;
            let given =
                before.as_ref().and_then(|(text, _)| number(std::str::from_utf8(text).ok()?.trim())).unwrap_or(0);
            let taken = self.list_now()?.numbers(model).last().copied().unwrap_or(0);
            let version = given.max(taken) + 1;
            let over = before.map_or(WriteCondition::Nothing, |(_, tag)| WriteCondition::This(tag));
            match self.objects.put(&key, format!("{version}\n").into_bytes(), &over) {
                Ok(_) => return Ok(version),
                // Of two concurrent attempts one succeeds, and the other tries again; an attempt whose answer is lost leaves a
                // number unused.
                Err(e) if e.kind() == Kind::Conflict => {}
                Err(e) if e.kind() == Kind::Unavailable && failures < TRIES.1 => {
                    failures += 1;
                    sleep(back_off(LISTING_RETRIES.1, failures));
                }
                Err(e) => return Err(e),
            }
        }
        Err(Error::conflict(format!("{}/{key}: other processes keep changing this object", self.url)))
    }

    /// Removes the leftovers of killed publications, and expired leases of completed ones.
    fn clean(&self, model: &str, own: u64) -> Result<()> {
        let seen = self.list_now()?;
        for version in seen.numbers(model).into_iter().filter(|version| *version != own) {
            if !self.has_lease(&seen, model, version) || self.is_live(&seen, model, version, own) {
                continue;
            }
            let unit = Unit { model, version, shard: None };
            let is_whole = [MANIFEST, SHARDS_FILE].iter().any(|file| seen.keys.contains_key(&unit.key(file)));
            if !is_whole {
                if !self.is_leftover(unit, own)? {
                    continue;
                }
                tracing::warn!(model, version, "removing an unfinished publication");
                self.remove_all(model, version)?;
            }
            self.objects.remove(&unit.key(LEASE))?;
        }
        Ok(())
    }

    /// Returns whether a version is a leftover, checked by requests: an incorrect listing must not cause the removal of a published
    /// version.
    fn is_leftover(&self, unit: Unit<'_>, own: u64) -> Result<bool> {
        for file in [MANIFEST, SHARDS_FILE] {
            match self.objects.head(&unit.key(file)) {
                Err(e) if e.kind() == Kind::NotFound => {}
                other => return other.map(|_| false),
            }
        }
        // Another publisher may have removed the leftover since the listing.
        let written = |version| match self.objects.head(&Unit { version, ..unit }.key(LEASE)) {
            Err(e) if e.kind() == Kind::NotFound => Ok(None),
            other => other.map(|tag| Some(tag.modified_ms)),
        };
        Ok(written(own)?.zip(written(unit.version)?).is_some_and(|(now, then)| now - then >= LEASE_MS))
    }

    fn has_lease(&self, seen: &Seen, model: &str, version: u64) -> bool {
        seen.keys.contains_key(&Unit { model, version, shard: None }.key(LEASE))
    }

    /// Returns whether a version's lease is recent enough, by the bucket's clock, that its publication may be active.
    fn is_live(&self, seen: &Seen, model: &str, version: u64, own: u64) -> bool {
        let written = |version| Some(seen.keys.get(&Unit { model, version, shard: None }.key(LEASE))?.modified_ms);
        match (written(version), written(own)) {
            (Some(written), Some(now)) => now - written < LEASE_MS,
            (Some(_), None) => true,
            (None, _) => false,
        }
    }

    /// Removes all objects of a version except its lease, beginning with the objects that complete the version.
    pub(super) fn remove_all(&self, model: &str, version: u64) -> Result<()> {
        let unit = Unit { model, version, shard: None };
        self.objects.remove(&unit.key(MANIFEST))?;
        self.objects.remove(&unit.key(SHARDS_FILE))?;
        let left = self.objects.list(&unit.path().to_string_lossy())?;
        left.iter().filter(|(key, _)| !key.ends_with(LEASE)).try_for_each(|(key, _)| self.objects.remove(key))
    }

    /// Fills a staging folder and uploads its files as a version.
    pub(super) fn fill(&self, what: &mut Publication<'_>, staging: &Path, version: u64) -> Result<()> {
        let unit = Unit { model: what.model, version, shard: None };
        let before = self.versions(what.model)?;
        let lease = Lease::take(&self.objects, unit.key(LEASE))?;
        self.clean(what.model, version)?;
        let may = || {
            if !what.is_derived {
                return Ok(());
            }
            let seen = self.list_now()?;
            check_rivals(what.model, &before, &self.versions(what.model)?)?;
            let mut others = seen.numbers(what.model).into_iter().filter(|other| *other != version);
            match others.any(|other| self.is_live(&seen, what.model, other, version)) {
                true => Err(rival_under_way(what.model)),
                false => Ok(()),
            }
        };
        may()?;
        (what.fill)(staging, version)?;
        let last = if staging.join(SHARDS_FILE).exists() { SHARDS_FILE } else { MANIFEST };
        if let Err(error) = self.upload(unit, staging, last, &lease, may) {
            if self.remove_all(what.model, version).is_err() {
                lease.leave();
            }
            return Err(error);
        }
        let sealed = self.seal(unit, staging, last);
        // If the bucket did not answer, the version may or may not be complete; the next publication finds out.
        if sealed.as_ref().is_err_and(|e| e.kind() != Kind::Conflict) {
            lease.leave();
        }
        sealed
    }

    /// Uploads the files of a folder except the last, and verifies that they are visible.
    fn upload(
        &self,
        unit: Unit<'_>,
        staging: &Path,
        last: &str,
        lease: &Lease,
        may: impl Fn() -> Result<()>,
    ) -> Result<()> {
        let mut files = files_in(staging)?;
        files.retain(|(name, _)| name != last);
        for (name, path) in &files {
            self.objects.upload(&unit.key(name), path)?;
            lease.check()?;
        }
        let mut looks = 1;
        while let Some(key) = self.missing(unit, &files)? {
            if looks == LISTING_RETRIES.0 {
                return Err(Error::unavailable(format!(
                    "{}/{key}: the object is missing or differs from the written bytes",
                    self.url
                )));
            }
            sleep(back_off(LISTING_RETRIES.1, looks));
            looks += 1;
        }
        may()?;
        lease.check()
    }

    /// Returns the key of the first file that a listing does not show with its length; `None` if it shows all files.
    fn missing(&self, unit: Unit<'_>, files: &[(String, PathBuf)]) -> Result<Option<String>> {
        let there: BTreeMap<String, Tag> = self.objects.list(&unit.path().to_string_lossy())?.into_iter().collect();
        for (name, path) in files {
            let (key, bytes) = (unit.key(name), fs::metadata(path).map_err(|e| Error::io(path.display(), e))?.len());
            if there.get(&key).is_none_or(|tag| tag.bytes != bytes) {
                return Ok(Some(key));
            }
        }
        Ok(None)
    }

    /// Writes the file that completes the version, on condition that this file does not exist.
    fn seal(&self, unit: Unit<'_>, staging: &Path, last: &str) -> Result<()> {
        let (key, path) = (unit.key(last), staging.join(last));
        let bytes = files::read(&path)?;
        replace(&*self.objects, &key, &bytes, &WriteCondition::Nothing).map(drop).map_err(|e| match e.kind() {
            Kind::Conflict => {
                Error::conflict(format!("{}/{key}: another process created this object meanwhile", self.url))
            }
            Kind::Unavailable => {
                e.within("the version may or may not be complete (`sterling inspect` shows whether it is)")
            }
            _ => e,
        })
    }

    /// Moves the files of a version that this process published to the cache.
    pub(super) fn keep(&self, seen: &Seen, unit: Unit<'_>, staging: &Path) -> Result<()> {
        let Some(source) = self.source(seen, unit) else { return Ok(()) };
        let folder = self.cache.root().join(unit.path());
        let _held = self.cache.hold(&folder)?;
        let bytes = Manifest::read(staging)?.bytes();
        self.cache.make_room(staging, source.stamp, bytes)?;
        self.cache.settle(staging, &folder)
    }
}

/// Lists the files of a folder and its subfolders by relative path, without hidden files.
fn files_in(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for name in names_in(folder)?.into_iter().filter(|name| !name.starts_with('.')) {
        let path = folder.join(&name);
        match path.is_dir() {
            true => found.extend(files_in(&path)?.into_iter().map(|(inner, path)| (format!("{name}/{inner}"), path))),
            false => found.push((name, path)),
        }
    }
    found.sort();
    Ok(found)
}
