//! Stores of snapshots, `STORE/NAME/VERSION/`: a folder or an object store bucket.
//!
//! A [`Store`] uses one of two storage backends ([`Shelf`]) with the same layout, so that the files of one store can be copied into
//! the other:
//!
//! - a folder (`folder`): a publication writes to its own folder, which is renamed to the version;
//! - a bucket (`remote`): a publication writes its objects under its version, and the manifest last, on condition that the bucket
//!   has no manifest of this version. Before use, versions are fetched (`fetch`) to a local cache folder of limited size (`cache`).
//!
//! The desired state of a model (active version, labels, rollout) is one small file of the store (`desired`). Checkpoints of a
//! shard with its updates are in a separate local folder (`folds`).

mod cache;
mod desired;
#[cfg(any(test, feature = "testing"))]
mod failing;
mod fetch;
mod folder;
mod folds;
mod lease;
mod remote;
#[cfg(test)]
mod tests;

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
pub use desired::{DESIRED_FILE, Desired};
#[cfg(any(test, feature = "testing"))]
pub use failing::failing;
use folder::Folder;
use remote::Remote;

/// A store of models, each with its versions.
#[derive(Clone, Debug)]
pub struct Store {
    shelf: Arc<dyn Shelf>,
    /// Shard of partitioned versions that this store is restricted to.
    shard: Option<u32>,
    /// Folder of the checkpoints of the selected shard.
    folds: Option<PathBuf>,
}

/// Fingerprint of a version, which changes when a file of the version is replaced, resized or written to; computed without reading
/// the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(u64);

/// A version on local disk, protected from eviction while this value exists.
#[derive(Debug)]
pub struct PinnedVersion {
    folder: PathBuf,
    /// Position of the checkpoint, if the version is read from a checkpoint.
    fold: Option<u64>,
    /// Lock that protects a cached copy from eviction.
    _lock: Option<File>,
}

impl PinnedVersion {
    /// Returns the folder of the version's files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the position of the checkpoint, if the version is read from a checkpoint.
    pub fn fold(&self) -> Option<u64> {
        self.fold
    }
}

/// A version, or one shard of a version.
#[derive(Clone, Copy, Debug)]
struct Unit<'a> {
    model: &'a str,
    version: u64,
    shard: Option<u32>,
}

impl Unit<'_> {
    /// Returns the folder of the version or shard, relative to the store.
    fn path(&self) -> PathBuf {
        let version = Path::new(self.model).join(self.version.to_string());
        self.shard.map_or(version.clone(), |shard| shard_folder(&version, shard))
    }

    /// Returns the object key of a file of the version or shard.
    fn key(&self, file: &str) -> String {
        self.path().join(file).to_string_lossy().into_owned()
    }

    /// Returns the object key of the file that lists the shards of the version.
    fn shards_key(&self) -> String {
        Unit { shard: None, ..*self }.key(SHARDS_FILE)
    }
}

/// A publication in progress.
struct Publication<'a> {
    model: &'a str,
    /// True for a version that is derived from existing versions, such as a merge; its publication is aborted if any other version
    /// is published.
    is_derived: bool,
    /// Writes the files of a version to a folder.
    fill: &'a mut dyn FnMut(&Path, u64) -> Result<()>,
}

/// Storage backend of versions.
trait Shelf: Debug + Send + Sync {
    /// Returns the name of the store: a path or a URL.
    fn name(&self) -> String;
    /// Returns the local folder of the store's versions, or of their cached copies.
    fn root(&self) -> &Path;
    /// Updates the listing of published versions, for backends that cache the listing.
    fn renew(&self) -> Result<()>;
    /// Returns the reason why the last update of the listing failed, if it failed.
    fn trouble(&self) -> Option<String>;
    /// Returns true for a bucket, whose files are transferred over a network.
    fn is_bucket(&self) -> bool;
    /// Returns whether versions of a model, or of any model, are cached and can be served without the store.
    fn has_copies(&self, model: Option<&str>) -> bool;
    /// Rejects a store that does not support concurrent publishers.
    fn prove(&self) -> Result<()>;
    /// Lists names that may be models.
    fn names(&self) -> Result<Vec<String>>;
    /// Returns the numbers of a model's versions that have all of these files, ascending.
    fn numbers(&self, model: &str, files: &[String]) -> Result<Vec<u64>>;
    /// Returns the fingerprint of a version.
    fn stamp(&self, unit: Unit<'_>) -> Option<Stamp>;
    /// Returns a folder with the metadata of a version, its manifest and `model.toml`; a bucket fetches only these files.
    fn outline(&self, unit: Unit<'_>) -> Result<PathBuf>;
    /// Returns the version on local disk; a bucket fetches the version.
    fn ensure_local(&self, unit: Unit<'_>) -> Result<PinnedVersion>;
    /// Deletes a damaged cached copy of a version; returns whether such a copy was deleted and can be fetched again.
    fn discard(&self, unit: Unit<'_>) -> Result<bool>;
    fn read(&self, model: &str, file: &str) -> Result<Vec<u8>>;
    /// Reads a small file of a model as of the last listing.
    fn glance(&self, model: &str, file: &str) -> Result<Vec<u8>>;
    /// Writes a small file of a model if its content is still `before` (compare-and-swap); otherwise returns false.
    fn swap(&self, model: &str, file: &str, before: Option<&[u8]>, bytes: &[u8]) -> Result<bool>;
    fn publish(&self, what: &mut Publication<'_>) -> Result<u64>;
    /// Adds files to a published version in this order; `fill` writes them to a folder.
    fn add(&self, unit: Unit<'_>, files: &[&str], fill: &mut dyn FnMut(&Path) -> Result<()>) -> Result<()>;
    fn remove(&self, model: &str, version: u64) -> Result<()>;
}

impl Store {
    /// Opens the store in a folder, which need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Store { shelf: Arc::new(Folder::new(root.into())), shard: None, folds: None }
    }

    /// Opens a store by name: a folder, or the URL of a bucket, such as `s3://bucket/prefix`. Opening a store sends no request to a
    /// bucket.
    ///
    /// # Errors
    /// `Invalid` for an invalid URL, or if no folder for the cache is known; `Unsupported` for a bucket in a build without support
    /// for buckets.
    pub fn open(name: &Path, cache: &CacheOptions) -> Result<Self> {
        if !objects::is_url(name) {
            return Ok(Store::new(name));
        }
        let url = name.to_string_lossy().trim_end_matches('/').to_owned();
        let remote = Remote::new(url.clone(), objects::open(&url)?, cache)?;
        Ok(Store { shelf: Arc::new(remote), shard: None, folds: None })
    }

    /// Restricts the store to one shard of partitioned versions.
    #[must_use]
    pub fn of_shard(self, shard: u32) -> Self {
        Store { shard: Some(shard), ..self }
    }

    /// Returns the name of the store: its folder, or its URL.
    pub fn name(&self) -> String {
        self.shelf.name()
    }

    /// Returns the local folder of versions or of their cached copies.
    pub fn root(&self) -> &Path {
        self.shelf.root()
    }

    fn unit<'a>(&self, model: &'a str, version: u64) -> Unit<'a> {
        Unit { model, version, shard: self.shard }
    }

    /// Returns the backend for a call that may block on a disk or a network.
    fn shelf(&self) -> &dyn Shelf {
        may_block();
        &*self.shelf
    }

    /// Updates the listing of published versions. Between calls a bucket uses its last listing; a folder is always current.
    ///
    /// # Errors
    /// `Unavailable` if a bucket does not answer, or did not answer a moment ago; the last listing remains in use.
    pub fn renew(&self) -> Result<()> {
        self.shelf().renew()
    }

    /// Returns the reason why the store is unreachable; `None` if it is reachable. While unreachable, the store uses its last
    /// listing.
    pub fn trouble(&self) -> Option<String> {
        self.shelf.trouble()
    }

    /// Returns true for a bucket, whose files may be damaged in transfer or become visible out of order.
    pub fn is_bucket(&self) -> bool {
        self.shelf.is_bucket()
    }

    /// Returns whether versions of one model, or of any model, are cached, so that they can be served while the bucket does not
    /// answer.
    pub fn has_copies(&self, model: Option<&str>) -> bool {
        self.shelf.has_copies(model)
    }

    /// Rejects a store that cannot coordinate publishers: a bucket that ignores conditional writes. A bucket that this caller may
    /// only read is accepted.
    ///
    /// # Errors
    /// `Unsupported` with the observed behaviour; `Unavailable` if the bucket does not answer.
    pub fn prove(&self) -> Result<()> {
        self.shelf().prove().map_err(|e| e.within(format!("store {}", self.name())))
    }

    /// Returns the models of the store, sorted. A missing store has no models; a model with an unreadable folder is included.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn models(&self) -> Result<Vec<String>> {
        self.named(|name| self.versions(name).map_or(true, |v| !v.is_empty()))
    }

    /// Returns the models with partitioned versions, sorted.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn sharded_models(&self) -> Result<Vec<String>> {
        self.named(|name| self.sharded_versions(name).is_ok_and(|v| !v.is_empty()))
    }

    /// Returns the names of model folders that satisfy `is_one`, sorted.
    fn named(&self, is_one: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        let mut names = self.shelf().names()?;
        names.retain(|name| check_name("model name", name).is_ok() && is_one(name));
        names.sort();
        Ok(names)
    }

    /// Returns the published versions of a model, ascending: folders with a manifest whose name is a canonical number from 1 up,
    /// with at most 18 digits.
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

    /// Returns the partitioned versions of a model, ascending.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn sharded_versions(&self, model: &str) -> Result<Vec<u64>> {
        if check_name("model name", model).is_err() {
            return Ok(Vec::new());
        }
        self.shelf().numbers(model, &[SHARDS_FILE.into()])
    }

    /// Returns the local folder of a version, or of the selected shard. For a bucket the folder exists after
    /// [`Store::ensure_local`].
    pub fn folder(&self, model: &str, version: u64) -> PathBuf {
        self.shelf.root().join(self.unit(model, version).path())
    }

    /// Returns a folder with the manifest and `model.toml` of a version, or of the checkpoint that replaces the version. From a
    /// bucket, only these two files are fetched.
    ///
    /// # Errors
    /// `NotFound`, `Unavailable`, `Io`.
    pub fn outline(&self, model: &str, version: u64) -> Result<PathBuf> {
        check_model(model)?;
        let unit = self.unit(model, version);
        self.checkpoint_outline(unit)?.map_or_else(|| self.shelf().outline(unit), Ok)
    }

    /// Returns the manifest of a version, or of the selected shard.
    ///
    /// # Errors
    /// As [`Store::outline`] and [`Manifest::read`].
    pub fn manifest(&self, model: &str, version: u64) -> Result<Manifest> {
        Manifest::read(&self.outline(model, version)?)
    }

    /// Returns the shards of a partitioned version and their manifests.
    ///
    /// # Errors
    /// As [`Store::outline`]; errors of invalid files.
    pub fn shards(&self, model: &str, version: u64) -> Result<(Shards, Vec<Manifest>)> {
        let of_shard = |shard| Store { shelf: self.shelf.clone(), shard: Some(shard), folds: None };
        let first = of_shard(0).outline(model, version)?;
        let shards = Shards::read(first.parent().unwrap_or(&first))?;
        let manifests = (0..shards.shards.len() as u32).map(|shard| of_shard(shard).manifest(model, version));
        let manifests = manifests.collect::<Result<_>>()?;
        Ok((shards, manifests))
    }

    /// Reads a small file of a version, verified against its manifest; for a partitioned version, reads the file of its first
    /// shard. `None` if the version has no such file.
    ///
    /// # Errors
    /// As [`Store::manifest`]; `Corrupt` for a file that differs from the manifest.
    pub fn small_file(&self, model: &str, version: u64, file: &str) -> Result<Option<Vec<u8>>> {
        let is_cut = self.shard.is_none() && self.sharded_versions(model)?.contains(&version);
        let shard = if is_cut { Some(0) } else { self.shard };
        let of = Store { shelf: self.shelf.clone(), shard, folds: None };
        let Some(sum) = of.manifest(model, version)?.files.remove(file) else { return Ok(None) };
        let path = Unit { model: "", ..of.unit(model, version) }.path().join(file);
        let bytes = self.shelf().read(model, &path.to_string_lossy())?;
        match Checksum::of(&bytes) == sum {
            true => Ok(Some(bytes)),
            false => {
                Err(Error::corrupt(format!("model `{model}` version {version}: {file}: differs from its manifest")))
            }
        }
    }

    /// Returns a version on local disk: in the store's folder, fetched from its bucket, or the checkpoint that replaces the
    /// version. A fetch verifies files against the manifest, and resumes where an earlier fetch was interrupted.
    ///
    /// # Errors
    /// `Corrupt` with a file that differs from the manifest; `NoSpace` if the version does not fit; `NotFound`, `Unavailable`,
    /// `Io`; `NotReady` if the version was replaced meanwhile.
    pub fn ensure_local(&self, model: &str, version: u64) -> Result<PinnedVersion> {
        check_model(model)?;
        let unit = self.unit(model, version);
        self.ensure_local_checkpoint(unit)?.map_or_else(|| self.shelf().ensure_local(unit), Ok)
    }

    /// Deletes a damaged cached copy of a version, or moves its damaged checkpoint aside. Returns false if no replacement exists,
    /// because the store is a folder or does not answer.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn discard(&self, model: &str, version: u64) -> Result<bool> {
        let unit = self.unit(model, version);
        Ok(self.set_checkpoint_aside(unit)? || self.shelf().discard(unit)?)
    }

    /// Returns the fingerprint of a version's files, or `None` if the version is not published.
    pub fn stamp(&self, model: &str, version: u64) -> Option<Stamp> {
        check_name("model name", model).ok()?;
        self.shelf().stamp(self.unit(model, version))
    }

    /// Returns the newest of the `published` versions (ascending) that replaces `version`: `version` itself, or a merge of it with
    /// later updates. Also returns whether that is certain: the manifests of all later versions could be read, or are damaged.
    pub fn successor(&self, model: &str, version: u64, published: &[u64]) -> (u64, bool) {
        let mut is_certain = true;
        for later in published.iter().copied().rev().take_while(|later| *later > version) {
            match self.manifest(model, later) {
                Ok(found) if found.origin() == version => return (later, is_certain),
                Ok(_) => {}
                Err(error) => is_certain &= !error.kind().is_transient(),
            }
        }
        (version, is_certain)
    }

    /// Returns whether `later` is `version` or a merge of `version` with later updates.
    pub fn is_same_or_merged(&self, model: &str, later: u64, version: u64) -> bool {
        later == version || self.manifest(model, later).is_ok_and(|found| found.origin() == version)
    }

    /// Publishes a snapshot. `fill` receives a folder that is invisible to readers and the version number, which no other
    /// publication gets; the folder then becomes the version.
    ///
    /// # Errors
    /// Errors of `fill`; `Invalid` for a name that cannot be a folder; `Conflict` if another program has created the
    /// version's path; `Io`, `Unavailable`. After an error no version is published.
    pub fn publish(&self, model: &str, fill: impl FnOnce(&Path, u64) -> Result<()>) -> Result<u64> {
        self.publish_as(model, false, fill)
    }

    /// Publishes a version that is derived from existing versions. If another version was published meanwhile, or
    /// another publication is active, this version is not published. A publication that starts later gets a higher
    /// number.
    ///
    /// # Errors
    /// As [`Store::publish`]; `Conflict` if another publication wins.
    pub fn publish_unrivalled(&self, model: &str, fill: impl FnOnce(&Path, u64) -> Result<()>) -> Result<u64> {
        self.publish_as(model, true, fill)
    }

    fn publish_as(&self, model: &str, is_derived: bool, fill: impl FnOnce(&Path, u64) -> Result<()>) -> Result<u64> {
        check_name("model name", model)?;
        let mut fill = Some(fill);
        let mut once = |folder: &Path, version| match fill.take() {
            Some(fill) => fill(folder, version),
            None => Err(Error::internal("the files of a version are written twice")),
        };
        self.shelf().publish(&mut Publication { model, is_derived, fill: &mut once })
    }

    /// Adds files to a published version; `fill` writes them to a folder. Readers see the added files in the order of `files`.
    ///
    /// # Errors
    /// Errors of `fill`; as [`Store::ensure_local`].
    pub fn add(
        &self,
        model: &str,
        version: u64,
        files: &[&str],
        mut fill: impl FnMut(&Path) -> Result<()>,
    ) -> Result<()> {
        self.shelf().add(self.unit(model, version), files, &mut fill)
    }

    /// Removes a published version. A server that is loading the version may find it damaged; a server that has loaded the version
    /// keeps it.
    ///
    /// # Errors
    /// `Io` with the path, `Unavailable`.
    pub fn remove(&self, model: &str, version: u64) -> Result<()> {
        check_model(model)?;
        self.shelf().remove(model, version)
    }
}

/// Rejects a derived version if another version was published since `before` was listed.
fn check_rivals(model: &str, before: &[u64], now: &[u64]) -> Result<()> {
    match now.iter().find(|version| !before.contains(version)) {
        Some(other) => Err(Error::conflict(format!("model `{model}`: version {other} was published meanwhile"))),
        None => Ok(()),
    }
}

/// Returns the error of a derived version while another publication is active.
fn rival_under_way(model: &str) -> Error {
    Error::conflict(format!("model `{model}`: another publication is under way"))
}

/// Parses the version number in a folder name.
fn number(name: &str) -> Option<u64> {
    let is_canonical = name.len() <= 18 && name.starts_with(|c: char| ('1'..='9').contains(&c));
    if is_canonical { name.parse().ok() } else { None }
}

/// Rejects an invalid model name before it becomes part of a path, because `..` and `/` would lead out of the store.
///
/// # Errors
/// `NotFound` with the name and the rule.
fn check_model(model: &str) -> Result<()> {
    check_name("model name", model).map_err(|e| Error::not_found(e.to_string()))
}

/// Rejects a name that is not valid in URL paths and folder names; `what` describes the named object.
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
