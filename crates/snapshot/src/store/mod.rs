//! Where snapshots are published to and found in: `STORE/NAME/VERSION/`, a folder or a bucket of objects.
//!
//! A [`Store`] is one of two kinds of [`Shelf`], which have the same layout, so that one can be copied into the other:
//!
//! - a folder (`folder`): a publication is a folder of its own that is renamed to its version;
//! - a bucket (`remote`): a publication writes its objects under its version, the manifest last and only where there is none.
//!   What is read of it is brought to a folder of this machine first (`fetch`), which is bounded (`cache`).
//!
//! What people wish of a model, which version answers and what labels point to, is one small file of the store (`wish`).
//! A shard and its updates become one in a folder beside the store (`folds`).

mod cache;
#[cfg(any(test, feature = "testing"))]
mod failing;
mod fetch;
mod folder;
mod folds;
mod lease;
mod remote;
#[cfg(test)]
mod tests;
mod wish;

use std::fmt::Debug;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::manifest::{MANIFEST, Manifest};
use super::shards::{SHARDS_FILE, Shards, shard_folder};
use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Result};
use sterling_storage::files::Checksum;
use sterling_storage::objects;

pub use cache::CacheOptions;
#[cfg(any(test, feature = "testing"))]
pub use failing::failing;
use folder::Folder;
use remote::Remote;
pub use wish::{WISH_FILE, Wish};

/// A store of models, each a folder of versions.
#[derive(Clone, Debug)]
pub struct Store {
    shelf: Arc<dyn Shelf>,
    /// Of versions that were cut, the shard that is meant.
    shard: Option<u32>,
    /// Where folds of that shard lie.
    folds: Option<PathBuf>,
}

/// Changes when a file of a version is replaced, grows, shrinks or is written to, without any of them being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(u64);

/// A version on this machine's disks, which stays there as long as this does.
#[derive(Debug)]
pub struct Held {
    folder: PathBuf,
    /// The position of the fold that it is, where it is one.
    fold: Option<u64>,
    /// Of a copy, what keeps it from making room for others.
    _lock: Option<File>,
}

impl Held {
    /// The folder of its files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The position up to which the updates of the shard were folded in, where they were.
    pub fn fold(&self) -> Option<u64> {
        self.fold
    }
}

/// A version, or one shard of it.
#[derive(Clone, Copy, Debug)]
struct Unit<'a> {
    model: &'a str,
    version: u64,
    shard: Option<u32>,
}

impl Unit<'_> {
    /// Its folder, under that of the store.
    fn path(&self) -> PathBuf {
        let version = Path::new(self.model).join(self.version.to_string());
        self.shard.map_or(version.clone(), |shard| shard_folder(&version, shard))
    }

    /// The key of one of its files.
    fn key(&self, file: &str) -> String {
        self.path().join(file).to_string_lossy().into_owned()
    }

    /// The key of the file that names the shards of its version.
    fn shards_key(&self) -> String {
        Unit { shard: None, ..*self }.key(SHARDS_FILE)
    }
}

/// What a publication does and may do.
struct Publication<'a> {
    model: &'a str,
    /// True for a version that is made of those that are there, and gives way to any other.
    is_derived: bool,
    /// Fills a folder with the files of a version.
    fill: &'a mut dyn FnMut(&Path, u64) -> Result<()>,
}

/// What keeps versions.
trait Shelf: Debug + Send + Sync {
    /// Its name, as people write it.
    fn name(&self) -> String;
    /// The folder of this machine that its versions lie in, or are brought to.
    fn root(&self) -> &Path;
    /// Looks at what is published now, where that is not done by each question.
    fn renew(&self) -> Result<()>;
    /// Why it cannot be looked at, where that is so.
    fn trouble(&self) -> Option<String>;
    /// True for a bucket, whose bytes come by a network.
    fn is_bucket(&self) -> bool;
    /// True where versions of a model, or of any, were brought here and could be served without the store.
    fn has_copies(&self, model: Option<&str>) -> bool;
    /// Refuses a store that two cannot publish to.
    fn prove(&self) -> Result<()>;
    /// Names that may be those of models.
    fn names(&self) -> Result<Vec<String>>;
    /// The numbers of a model's versions that have a file of each of these names, ascending.
    fn numbers(&self, model: &str, files: &[String]) -> Result<Vec<u64>>;
    /// What a version looks like from outside.
    fn stamp(&self, unit: Unit<'_>) -> Option<Stamp>;
    /// A folder with what tells of a version before it is brought: its manifest and `model.toml`.
    fn outline(&self, unit: Unit<'_>) -> Result<PathBuf>;
    /// The version on this machine's disks.
    fn bring(&self, unit: Unit<'_>) -> Result<Held>;
    /// Throws a copy of a version away that turned out to be damaged; returns whether there was one that can be had anew.
    fn discard(&self, unit: Unit<'_>) -> Result<bool>;
    /// A small file of a model.
    fn read(&self, model: &str, file: &str) -> Result<Vec<u8>>;
    /// The same as it was at the last look.
    fn glance(&self, model: &str, file: &str) -> Result<Vec<u8>>;
    /// Writes a small file of a model where it holds what it held before; returns false, and writes nothing, where it does not.
    fn swap(&self, model: &str, file: &str, before: Option<&[u8]>, bytes: &[u8]) -> Result<bool>;
    /// Publishes a version.
    fn publish(&self, what: &mut Publication<'_>) -> Result<u64>;
    /// Puts files beside those of a published version that `fill` writes to its folder, in this order.
    fn add(&self, unit: Unit<'_>, files: &[&str], fill: &mut dyn FnMut(&Path) -> Result<()>) -> Result<()>;
    /// Removes a version.
    fn remove(&self, model: &str, version: u64) -> Result<()>;
}

impl Store {
    /// The store in a folder, which need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Store { shelf: Arc::new(Folder::new(root.into())), shard: None, folds: None }
    }

    /// The store of a name: a folder, or the URL of a bucket, such as `s3://bucket/prefix`. Nothing is asked of it yet.
    ///
    /// # Errors
    /// `Invalid` for a URL that cannot be one, or where there is no folder for what is fetched; `Unsupported` for a bucket in a
    /// build that knows none.
    pub fn open(name: &Path, cache: &CacheOptions) -> Result<Self> {
        if !objects::is_url(name) {
            return Ok(Store::new(name));
        }
        let url = name.to_string_lossy().trim_end_matches('/').to_owned();
        let remote = Remote::new(url.clone(), objects::open(&url)?, cache)?;
        Ok(Store { shelf: Arc::new(remote), shard: None, folds: None })
    }

    /// The same store as the server of one shard sees it: versions that were cut, and of each that shard alone.
    #[must_use]
    pub fn of_shard(self, shard: u32) -> Self {
        Store { shard: Some(shard), ..self }
    }

    /// The name of the store: its folder, or its URL.
    pub fn name(&self) -> String {
        self.shelf.name()
    }

    /// The folder of this machine that versions lie in, or are brought to.
    pub fn root(&self) -> &Path {
        self.shelf.root()
    }

    fn unit<'a>(&self, model: &'a str, version: u64) -> Unit<'a> {
        Unit { model, version, shard: self.shard }
    }

    /// What holds the versions, for a call that may wait for a disk or a network.
    fn shelf(&self) -> &dyn Shelf {
        may_block();
        &*self.shelf
    }

    /// Looks at what is published by now. Until then a bucket is what it was at the last look; a folder is always as it is.
    ///
    /// # Errors
    /// `Unavailable` where a bucket does not answer, or did not a moment ago: what was seen last stays.
    pub fn renew(&self) -> Result<()> {
        self.shelf().renew()
    }

    /// Why the store cannot be looked at, where it cannot: what is known of it is then that of the last look.
    pub fn trouble(&self) -> Option<String> {
        self.shelf.trouble()
    }

    /// True for a bucket: what is read of it may be damaged on its way, or come before the rest.
    pub fn is_bucket(&self) -> bool {
        self.shelf.is_bucket()
    }

    /// True where versions of a bucket were fetched before, of one model or of any, so that they can be served while it does not
    /// answer.
    pub fn has_copies(&self, model: Option<&str>) -> bool {
        self.shelf.has_copies(model)
    }

    /// Refuses a store that does not keep publishers apart: a bucket that passes over the conditions of writes. One that takes
    /// no writes of this caller is none of those.
    ///
    /// # Errors
    /// `Unsupported` with what it did; `Unavailable` where it does not answer.
    pub fn prove(&self) -> Result<()> {
        self.shelf().prove().map_err(|e| e.within(format!("store {}", self.name())))
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
        let mut names = self.shelf().names()?;
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
        if check_name("model name", model).is_err() {
            return Ok(Vec::new());
        }
        match self.shard {
            None => self.shelf().numbers(model, &[MANIFEST.into()]),
            Some(shard) => {
                let manifest = shard_folder(Path::new(""), shard).join(MANIFEST);
                self.shelf().numbers(model, &[SHARDS_FILE.into(), manifest.to_string_lossy().into_owned()])
            }
        }
    }

    /// The versions of a model that were cut into shards, ascending.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn cut_versions(&self, model: &str) -> Result<Vec<u64>> {
        if check_name("model name", model).is_err() {
            return Ok(Vec::new());
        }
        self.shelf().numbers(model, &[SHARDS_FILE.into()])
    }

    /// The folder of this machine where a version lies, or that of the shard that is meant. Of a bucket it is there once it was
    /// brought ([`Store::bring`]).
    pub fn folder(&self, model: &str, version: u64) -> PathBuf {
        self.shelf.root().join(self.unit(model, version).path())
    }

    /// A folder that holds the manifest of a version and its `model.toml`, or those of the fold that stands for it; of a bucket
    /// nothing else is read.
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`, `Io`.
    pub fn outline(&self, model: &str, version: u64) -> Result<PathBuf> {
        check_model(model)?;
        let unit = self.unit(model, version);
        self.folded_outline(unit)?.map_or_else(|| self.shelf().outline(unit), Ok)
    }

    /// The manifest of a version, or that of the shard that is meant.
    ///
    /// # Errors
    /// As [`Store::outline`] and [`Manifest::read`].
    pub fn manifest(&self, model: &str, version: u64) -> Result<Manifest> {
        Manifest::read(&self.outline(model, version)?)
    }

    /// The shards of a version that was cut, and the manifest of each.
    ///
    /// # Errors
    /// As [`Store::outline`]; what is wrong with the files.
    pub fn shards(&self, model: &str, version: u64) -> Result<(Shards, Vec<Manifest>)> {
        let of_shard = |shard| Store { shelf: self.shelf.clone(), shard: Some(shard), folds: None };
        let first = of_shard(0).outline(model, version)?;
        let shards = Shards::read(first.parent().unwrap_or(&first))?;
        let manifests = (0..shards.shards.len() as u32).map(|shard| of_shard(shard).manifest(model, version));
        let manifests = manifests.collect::<Result<_>>()?;
        Ok((shards, manifests))
    }

    /// A small file of a version, of one that was cut that of its first shard, held against its manifest; none where it has no such file.
    ///
    /// # Errors
    /// As [`Store::manifest`]; `Corrupt` for a file that is not what the manifest says.
    pub fn small_file(&self, model: &str, version: u64, file: &str) -> Result<Option<Vec<u8>>> {
        let is_cut = self.shard.is_none() && self.cut_versions(model)?.contains(&version);
        let shard = if is_cut { Some(0) } else { self.shard };
        let of = Store { shelf: self.shelf.clone(), shard, folds: None };
        let Some(sum) = of.manifest(model, version)?.files.remove(file) else { return Ok(None) };
        let path = Unit { model: "", ..of.unit(model, version) }.path().join(file);
        let bytes = self.shelf().read(model, &path.to_string_lossy())?;
        match Checksum::of(&bytes) == sum {
            true => Ok(Some(bytes)),
            false => {
                Err(Error::corrupt(format!("model `{model}` version {version}: {file}: not what its manifest says")))
            }
        }
    }

    /// The version on this machine's disks: as it lies there, or fetched from its bucket; or the fold that stands for it. What is fetched is held against its
    /// manifest, and goes on where an earlier fetch broke off.
    ///
    /// # Errors
    /// `Corrupt` with the file that is not what the manifest says; `NoSpace` where it does not fit; `NotFound`, `Unavailable`,
    /// `Io`; `NotReady` where it was replaced meanwhile.
    pub fn bring(&self, model: &str, version: u64) -> Result<Held> {
        check_model(model)?;
        let unit = self.unit(model, version);
        self.bring_fold(unit)?.map_or_else(|| self.shelf().bring(unit), Ok)
    }

    /// Throws a fetched copy of a version away that turned out to be damaged, or puts the fold aside that stood for it. Returns false
    /// where there is nothing that could stand in its place: the store is a folder itself, or does not answer.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn discard(&self, model: &str, version: u64) -> Result<bool> {
        let unit = self.unit(model, version);
        Ok(self.put_fold_aside(unit)? || self.shelf().discard(unit)?)
    }

    /// What the files of a version look like from outside, or `None` where it is not published.
    pub fn stamp(&self, model: &str, version: u64) -> Option<Stamp> {
        check_name("model name", model).ok()?;
        self.shelf().stamp(self.unit(model, version))
    }

    /// The newest of the published versions (ascending) that stands for this one: itself, or one that was merged from it and later updates.
    pub fn successor(&self, model: &str, version: u64, published: &[u64]) -> u64 {
        let mut later = published.iter().copied().rev().take_while(|later| *later > version);
        later.find(|later| self.stands_for(model, *later, version)).unwrap_or(version)
    }

    /// True where `later` is this version, or was merged from it and later updates.
    pub fn stands_for(&self, model: &str, later: u64, version: u64) -> bool {
        later == version || self.manifest(model, later).is_ok_and(|found| found.origin() == version)
    }

    /// Publishes a snapshot that `fill` writes: its files go to a folder that no reader looks at, which then gets its version, a
    /// number that no other publication gets. `fill` gets that folder and the version.
    ///
    /// # Errors
    /// What `fill` returns, `Invalid` for a name that cannot be a folder, `Conflict` where somebody else has put something in the
    /// version's place, `Io`, `Unavailable`. Nothing is published then.
    pub fn publish(&self, model: &str, fill: impl FnOnce(&Path, u64) -> Result<()>) -> Result<u64> {
        self.publish_as(model, false, fill)
    }

    /// The same for a version that is made of those that are there: where another one has come meanwhile, or is under way, that
    /// one takes over and nothing is published. One that begins later gets a higher number.
    ///
    /// # Errors
    /// As [`Store::publish`]; `Conflict` where another one takes over.
    pub fn publish_unrivalled(&self, model: &str, fill: impl FnOnce(&Path, u64) -> Result<()>) -> Result<u64> {
        self.publish_as(model, true, fill)
    }

    fn publish_as(&self, model: &str, is_derived: bool, fill: impl FnOnce(&Path, u64) -> Result<()>) -> Result<u64> {
        check_name("model name", model)?;
        let mut fill = Some(fill);
        let mut once = |folder: &Path, version| match fill.take() {
            Some(fill) => fill(folder, version),
            None => Err(Error::internal("a version is filled twice")),
        };
        self.shelf().publish(&mut Publication { model, is_derived, fill: &mut once })
    }

    /// Puts files beside those of a published version, which `fill` writes to the folder that it gets. Readers see them in the
    /// order of `files`.
    ///
    /// # Errors
    /// What `fill` returns; as [`Store::bring`].
    pub fn add(
        &self,
        model: &str,
        version: u64,
        files: &[&str],
        mut fill: impl FnMut(&Path) -> Result<()>,
    ) -> Result<()> {
        self.shelf().add(self.unit(model, version), files, &mut fill)
    }

    /// Removes a published version. Who is loading it may find it damaged; who has it in memory keeps it.
    ///
    /// # Errors
    /// `Io` with the path, `Unavailable`.
    pub fn remove(&self, model: &str, version: u64) -> Result<()> {
        check_model(model)?;
        self.shelf().remove(model, version)
    }
}

/// Refuses a rival of a version that is made of those that are there: of the versions there now, one that was not `before`.
fn check_rivals(model: &str, before: &[u64], now: &[u64]) -> Result<()> {
    match now.iter().find(|version| !before.contains(version)) {
        Some(other) => Err(Error::conflict(format!("model `{model}`: version {other} was published meanwhile"))),
        None => Ok(()),
    }
}

/// The error of a version that is made of others while another publication is under way.
fn rival_under_way(model: &str) -> Error {
    Error::conflict(format!("model `{model}`: another publication is under way"))
}

/// The version that a folder's name says.
fn number(name: &str) -> Option<u64> {
    let is_canonical = name.len() <= 18 && name.starts_with(|c: char| ('1'..='9').contains(&c));
    if is_canonical { name.parse().ok() } else { None }
}

/// Rejects a model whose name no folder of a store can have, before the name becomes part of a path: `..` and `/` lead out of the store.
///
/// # Errors
/// `NotFound` with the name and the rule.
fn check_model(model: &str) -> Result<()> {
    check_name("model name", model).map_err(|e| Error::not_found(e.to_string()))
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
