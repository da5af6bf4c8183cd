//! The folder that snapshots are published to and found in: `STORE/NAME/VERSION/`.
//!
//! A publication writes into `STORE/NAME/.publishing-RANDOM/`, which no reader looks at, and renames it to its version
//! when its manifest is written. Two advisory locks (`flock`) keep publishers apart, in one process, in containers and on
//! hosts that share the store:
//!
//! - `STORE/NAME/.lock` is held for moments: while leftovers are cleaned and a number is taken, and around the rename. It
//!   holds the highest number ever given, so that one whose folder was removed does not come back with other bytes.
//! - `.publishing-RANDOM/.lock` is held as long as the publication lives; the system lets go of it when its process dies,
//!   however it dies. A leftover is a staging folder whose lock can be taken, or that has none.

use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::manifest::MANIFEST;
use super::shards::{SHARDS_FILE, shard_folder};
use crate::error::{Error, Result};
use crate::files;

/// What the folder of an unfinished publication is called, before its random name.
const STAGING: &str = ".publishing-";
/// The file that is locked, of a model and of an unfinished publication.
const LOCK: &str = ".lock";

/// A folder of models, each a folder of versions.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
    /// Of versions that were cut, the shard that is meant.
    shard: Option<u32>,
}

/// Changes when a file of a version is replaced, grows, shrinks or is written to, without any of them being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(u64);

impl Store {
    /// The store at `root`; the folder need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Store { root: root.into(), shard: None }
    }

    /// The same store as the server of one shard sees it: versions that were cut, and of each that shard alone.
    #[must_use]
    pub fn of_shard(self, shard: u32) -> Self {
        Store { shard: Some(shard), ..self }
    }

    /// The folder of the store.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The models of the store, sorted. A store that does not exist holds none; a model whose folder cannot be read is one.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn models(&self) -> Result<Vec<String>> {
        self.named(|name| self.versions(name).map_or(true, |v| !v.is_empty()))
    }

    /// The models of which versions were cut into shards, sorted.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn cut_models(&self) -> Result<Vec<String>> {
        self.named(|name| self.cut_versions(name).is_ok_and(|v| !v.is_empty()))
    }

    /// The names of models' folders for which `is_one` holds, sorted.
    fn named(&self, is_one: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        let mut names = names_in(&self.root)?;
        names.retain(|name| check_name("model name", name).is_ok() && is_one(name));
        names.sort();
        Ok(names)
    }

    /// The published versions of a model, ascending: folders with a manifest whose name is a number from 1 up, of 18 digits
    /// at most and written as numbers are.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn versions(&self, model: &str) -> Result<Vec<u64>> {
        self.numbered(model, |version| self.folder(model, version).join(MANIFEST).exists())
    }

    /// The numbers of a model's folders for which `is_one` holds, ascending.
    fn numbered(&self, model: &str, is_one: impl Fn(u64) -> bool) -> Result<Vec<u64>> {
        let names = names_in(&self.root.join(model))?;
        let mut versions: Vec<u64> = names.iter().filter_map(|name| number(name)).filter(|v| is_one(*v)).collect();
        versions.sort_unstable();
        Ok(versions)
    }

    /// The folder of one version, or that of the shard that is meant.
    pub fn folder(&self, model: &str, version: u64) -> PathBuf {
        let folder = self.root.join(model).join(version.to_string());
        self.shard.map_or(folder.clone(), |shard| shard_folder(&folder, shard))
    }

    /// The versions of a model that were cut into shards, ascending.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn cut_versions(&self, model: &str) -> Result<Vec<u64>> {
        self.numbered(model, |version| self.root.join(model).join(version.to_string()).join(SHARDS_FILE).exists())
    }

    /// What the files of a version look like from outside, or `None` where it is not published.
    pub fn stamp(&self, model: &str, version: u64) -> Option<Stamp> {
        let folder = self.folder(model, version);
        let mut seen = Vec::new();
        for entry in fs::read_dir(folder).ok()?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            // Hidden files are of those who copy; the rename that ends a copy is seen.
            if !name.starts_with('.') {
                let about = entry.metadata().ok()?;
                seen.push((name, about.ino(), about.len(), about.mtime(), about.mtime_nsec()));
            }
        }
        seen.sort();
        seen.iter().any(|(name, ..)| name == MANIFEST).then(|| Stamp(xxh3_64(format!("{seen:?}").as_bytes())))
    }

    /// Publishes a snapshot that `fill` writes: its files go to a folder that no reader looks at, which is synced and
    /// then renamed to its version, a number that no other publication gets. `fill` gets that folder and the version.
    ///
    /// # Errors
    /// What `fill` returns, `Invalid` for a name that cannot be a folder, `Conflict` where somebody else has put a folder
    /// in the version's place, `Io`. Nothing is published then.
    pub fn publish(&self, model: &str, fill: impl FnOnce(&Path, u64) -> Result<()>) -> Result<u64> {
        self.publish_if(model, fill, |_, _| Ok(()))
    }

    /// The same for a version that is made of those that are there: where another one has come meanwhile, or is under way, that
    /// one takes over and nothing is published. One that begins later gets a higher number.
    ///
    /// # Errors
    /// As [`Store::publish`]; `Conflict` where another one takes over.
    pub fn publish_unrivalled(&self, model: &str, fill: impl FnOnce(&Path, u64) -> Result<()>) -> Result<u64> {
        let before = self.versions(model)?;
        let rivals = |parent: &Path, own: &Path| {
            let now = self.versions(model)?;
            if let Some(other) = now.iter().find(|version| !before.contains(version)) {
                return Err(Error::conflict(format!("model `{model}`: version {other} was published meanwhile")));
            }
            match names_in(parent)?.iter().map(|name| parent.join(name)).find(|other| other != own && is_live(other)) {
                Some(_) => Err(Error::conflict(format!("model `{model}`: another publication is under way"))),
                None => Ok(()),
            }
        };
        self.publish_if(model, fill, rivals)
    }

    /// Publishes where `may` says so of the model's folder and the staging folder, before anything is written and, under the
    /// model's lock, when all is.
    fn publish_if(
        &self,
        model: &str,
        fill: impl FnOnce(&Path, u64) -> Result<()>,
        may: impl Fn(&Path, &Path) -> Result<()>,
    ) -> Result<u64> {
        check_name("model name", model)?;
        let parent = self.root.join(model);
        fs::create_dir_all(&parent).map_err(|e| Error::io(parent.display(), e))?;
        let (staging, version) = self.begin(model, &parent)?;
        let target = self.folder(model, version);
        let published = may(&parent, &staging.folder)
            .and_then(|()| fill(&staging.folder, version))
            .and_then(|()| self.finish(&staging, &parent, &target, may));
        match published {
            Ok(()) => Ok(version),
            Err(e) => {
                // What cannot be removed now, the next publication removes.
                let _ = fs::remove_dir_all(&staging.folder);
                Err(e)
            }
        }
    }

    /// Cleans leftovers, takes a number and makes a staging folder for it.
    fn begin(&self, model: &str, parent: &Path) -> Result<(Staging, u64)> {
        let mut numbers = lock_model(parent)?;
        remove_leftovers(parent)?;
        let mut text = String::new();
        // After a crash it may hold anything; the folders then say what is taken.
        let _ = numbers.read_to_string(&mut text);
        let given = number(text.trim()).unwrap_or(0);
        let mut version = self.versions(model)?.last().map_or(given, |last| given.max(*last)) + 1;
        while self.folder(model, version).exists() {
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

    /// Removes a published version. Who is loading it may find it damaged; who has it in memory keeps it.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn remove(&self, model: &str, version: u64) -> Result<()> {
        let parent = self.root.join(model);
        let _numbers = lock_model(&parent)?;
        // As one that was never finished: what cannot be removed now, the next publication removes.
        let leftover = parent.join(format!("{STAGING}{:016x}", RandomState::new().hash_one(version)));
        let folder = self.folder(model, version);
        fs::rename(&folder, &leftover).map_err(|e| Error::io(folder.display(), e))?;
        fs::remove_dir_all(&leftover).map_err(|e| Error::io(leftover.display(), e))
    }

    /// Gives a filled staging folder its place, where it `may` have it.
    fn finish(
        &self,
        staging: &Staging,
        parent: &Path,
        target: &Path,
        may: impl Fn(&Path, &Path) -> Result<()>,
    ) -> Result<()> {
        let _numbers = lock_model(parent)?;
        may(parent, &staging.folder)?;
        fs::remove_file(staging.folder.join(LOCK)).map_err(|e| Error::io(staging.folder.display(), e))?;
        if target.exists() {
            return Err(Error::conflict(format!("{}: put there by somebody else meanwhile", target.display())));
        }
        fs::rename(&staging.folder, target).map_err(|e| Error::io(target.display(), e))?;
        files::sync_folder(parent).map_err(|e| Error::io(parent.display(), e))?;
        files::sync_folder(&self.root).map_err(|e| Error::io(self.root.display(), e))
    }
}

/// The folder of a publication that is under way, and the lock that says so.
struct Staging {
    folder: PathBuf,
    _lock: File,
}

impl Staging {
    fn new(parent: &Path) -> Result<Self> {
        let folder = parent.join(format!("{STAGING}{:016x}", RandomState::new().hash_one(parent)));
        fs::create_dir(&folder).map_err(|e| Error::io(folder.display(), e))?;
        let lock = folder.join(LOCK);
        let locked = File::create(&lock).and_then(|file| file.try_lock().map_err(Into::into).map(|()| file));
        let _lock = locked.map_err(|e| Error::io(lock.display(), e))?;
        Ok(Staging { folder, _lock })
    }
}

/// Takes the lock of a model's folder, which is let go with the file.
fn lock_model(parent: &Path) -> Result<File> {
    let path = parent.join(LOCK);
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .and_then(|file| file.lock().map(|()| file))
        .map_err(|e| Error::io(format!("{}: the lock of publishers", path.display()), e))
}

/// Removes what publications that were killed have left. Only for who holds the model's lock: a staging folder without a
/// lock of its own is then no one's.
fn remove_leftovers(parent: &Path) -> Result<()> {
    for name in names_in(parent)?.iter().filter(|name| name.starts_with(STAGING)) {
        let folder = parent.join(name);
        if !is_live(&folder) {
            tracing::warn!(folder = %folder.display(), "removing an unfinished publication");
            fs::remove_dir_all(&folder).map_err(|e| Error::io(folder.display(), e))?;
        }
    }
    Ok(())
}

/// True for the staging folder of a publication that is under way.
fn is_live(folder: &Path) -> bool {
    let is_staging = folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(STAGING));
    is_staging
        && match File::options().write(true).open(folder.join(LOCK)) {
            Ok(lock) => lock.try_lock().is_err(),
            Err(e) => e.kind() != std::io::ErrorKind::NotFound,
        }
}

/// The version that a folder's name says.
fn number(name: &str) -> Option<u64> {
    let is_canonical = name.len() <= 18 && name.starts_with(|c: char| ('1'..='9').contains(&c));
    if is_canonical { name.parse().ok() } else { None }
}

/// Refuses a name that cannot stand in a URL path and a folder name; `what` it is the name of.
///
/// # Errors
/// `Invalid` with the name and the rule.
pub fn check_name(what: &str, name: &str) -> Result<()> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if name.is_empty() || name.len() > 128 || name.starts_with('.') || !name.chars().all(allowed) {
        return Err(Error::invalid(format!(
            "{what} `{name}`: expected 1 to 128 letters, digits, `_`, `-` or `.`, not starting with `.`"
        )));
    }
    Ok(())
}

fn names_in(folder: &Path) -> Result<Vec<String>> {
    match fs::read_dir(folder) {
        Ok(entries) => Ok(entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect()),
        Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {
            Ok(Vec::new())
        }
        Err(e) => Err(Error::io(folder.display(), e)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::error::Kind;

    fn whole(folder: &Path) -> Result<()> {
        fs::write(folder.join(MANIFEST), b"{}").map_err(|e| Error::io(folder.display(), e))
    }

    #[test]
    fn a_version_made_of_others_gives_way_to_one_that_comes_meanwhile() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::new(root.path());
        store.publish("m", |folder, _| whole(folder)).unwrap();
        assert_eq!(store.publish_unrivalled("m", |folder, _| whole(folder)).unwrap(), 2);
        // One that is published while it is made, and one that is under way when it begins or ends.
        let beaten = store.publish_unrivalled("m", |folder, _| {
            store.publish("m", |folder, _| whole(folder))?;
            whole(folder)
        });
        assert_eq!(beaten.unwrap_err().kind(), Kind::Conflict);
        assert_eq!(store.versions("m").unwrap(), [1, 2, 4]);
        let outer = store.publish("m", |folder, _| {
            let inner = store.publish_unrivalled("m", |_, _| unreachable!());
            assert_eq!(inner.unwrap_err().kind(), Kind::Conflict);
            whole(folder)
        });
        assert_eq!(outer.unwrap(), 5);
        // A failed one does not stand in the way.
        assert!(store.publish("m", |_, _| Err(Error::invalid("no"))).is_err());
        let last = store.publish_unrivalled("m", |folder, _| whole(folder)).unwrap();
        store.remove("m", 2).unwrap();
        assert_eq!(store.versions("m").unwrap(), [1, 4, 5, last]);
        assert!(store.remove("m", 2).is_err());
        assert_eq!(names_in(&root.path().join("m")).unwrap().len(), 5, "four versions and the lock");
    }

    #[test]
    fn publication_is_whole_or_absent_and_counts_up() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::new(root.path().join("store"));
        assert!(store.models().unwrap().is_empty());
        for expected in [1, 2] {
            let version = store
                .publish("m", |folder, version| {
                    assert_eq!(version, expected);
                    whole(folder)
                })
                .unwrap();
            assert_eq!(version, expected);
        }
        let failed = store.publish("m", |folder, _| {
            fs::write(folder.join("half"), b"x").unwrap();
            Err(Error::invalid("no"))
        });
        assert!(failed.is_err());
        assert_eq!(store.versions("m").unwrap(), [1, 2]);
        assert_eq!(
            names_in(&root.path().join("store/m")).unwrap().len(),
            3,
            "two versions, the lock, nothing half-written"
        );
        fs::create_dir(root.path().join("store/m/3")).unwrap();
        assert_eq!(store.versions("m").unwrap(), [1, 2], "a folder without a manifest is no version");
        assert_eq!(store.models().unwrap(), ["m"]);
        for name in ["", "a/b", "..", ".x", "a b", "ü", &"x".repeat(129)] {
            assert_eq!(store.publish(name, |_, _| Ok(())).unwrap_err().kind(), Kind::Invalid, "{name}");
        }
    }
}
