//! Checkpoints of a shard with its updates (`fold` in names), stored by the server that ingests the updates.
//!
//! A partitioned version is one version over all shards, so no single shard can publish a new version. Instead, a server merges the
//! updates of its shard into a snapshot of the same version. The checkpoint replaces the published shard on this server and records
//! the position up to which it includes updates. The checkpoint is stored in a local folder next to the journal, to which the
//! positions refer:
//!
//! ```text
//! FOLDS/NAME/shard-N/VERSION/DIGEST/    digest of the published shard: republished bytes have no checkpoint
//!   shards.json                         copy of the published file
//!   POSITION/                           snapshot with the updates up to this position
//! ```
//!
//! The newest checkpoint is used. The previous checkpoint is retained, and the journal has the updates after it: if the newest
//! checkpoint is damaged, it is moved aside and the previous checkpoint is used.

use std::fs;
use std::path::{Path, PathBuf};

use super::super::manifest::Manifest;
use super::super::shards::{Shards, shard_folder};
use super::folder::{Staging, lock_folder, names_in, remove_atomically, remove_leftovers};
use super::{PinnedVersion, Store, Unit, number};
use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Result};
use sterling_storage::files;

/// Number of checkpoints that are retained per shard.
const RETAINED_CHECKPOINTS: usize = 2;
/// Prefix of the folder name of a damaged checkpoint, before its position.
const DAMAGED: &str = ".damaged-";

/// A checkpoint and its position.
struct ShardCheckpoint {
    position: u64,
    folder: PathBuf,
}

/// Returns the folder of a shard's checkpoints, over all versions of its model; `None` if the version is not partitioned.
fn checkpoints_of_shard(root: &Path, unit: Unit<'_>) -> Option<PathBuf> {
    Some(shard_folder(&root.join(unit.model), unit.shard?))
}

impl Store {
    /// Returns the same store, with the checkpoints of its shard in a local folder, which need not exist yet.
    #[must_use]
    pub fn with_checkpoints(self, root: impl Into<PathBuf>) -> Self {
        Store { folds: Some(root.into()), ..self }
    }

    /// Returns the folder of a shard's checkpoints and the manifest of the published shard, if there are any checkpoints.
    fn checkpoints_of(&self, unit: Unit<'_>) -> Result<Option<(PathBuf, Manifest)>> {
        let of_shard = self.folds.as_ref().and_then(|root| checkpoints_of_shard(root, unit));
        may_block();
        let of_version = of_shard.map(|folder| folder.join(unit.version.to_string()));
        let Some(of_version) = of_version.filter(|folder| folder.exists()) else { return Ok(None) };
        let published = Manifest::read(&self.shelf().outline(unit)?)?;
        Ok(Some((of_version.join(published.digest()), published)))
    }

    fn newest_checkpoint(&self, unit: Unit<'_>) -> Result<Option<ShardCheckpoint>> {
        let Some((parent, _)) = self.checkpoints_of(unit)? else { return Ok(None) };
        let newest = positions(&parent)?.pop();
        Ok(newest.map(|position| ShardCheckpoint { position, folder: parent.join(position.to_string()) }))
    }

    /// Returns the position of the checkpoint that replaces the shard of a version on this server, if a checkpoint exists.
    ///
    /// # Errors
    /// As [`Store::outline`] and [`Manifest::read`].
    pub fn folded(&self, model: &str, version: u64) -> Result<Option<u64>> {
        Ok(self.newest_checkpoint(self.unit(model, version))?.map(|fold| fold.position))
    }

    /// Returns the position that applies if the newest checkpoint is damaged: the position of the previous checkpoint, or of the
    /// published shard. `None` without a checkpoint.
    ///
    /// # Errors
    /// As [`Store::folded`].
    pub fn position_after_checkpoint(&self, model: &str, version: u64) -> Result<Option<u64>> {
        let Some((parent, published)) = self.checkpoints_of(self.unit(model, version))? else { return Ok(None) };
        let mut behind = positions(&parent)?;
        Ok(behind.pop().map(|_| behind.pop().unwrap_or(published.position)))
    }

    /// Returns the folder of the checkpoint that replaces the shard of a version.
    pub(super) fn checkpoint_outline(&self, unit: Unit<'_>) -> Result<Option<PathBuf>> {
        Ok(self.newest_checkpoint(unit)?.map(|fold| fold.folder))
    }

    pub(super) fn ensure_local_checkpoint(&self, unit: Unit<'_>) -> Result<Option<PinnedVersion>> {
        let held = |ShardCheckpoint { position, folder }| PinnedVersion { folder, fold: Some(position), _lock: None };
        Ok(self.newest_checkpoint(unit)?.map(held))
    }

    /// Moves the newest checkpoint, which is damaged, aside; returns false if there is none.
    pub(super) fn set_checkpoint_aside(&self, unit: Unit<'_>) -> Result<bool> {
        let Some(ShardCheckpoint { position, folder }) = self.newest_checkpoint(unit)? else { return Ok(false) };
        tracing::warn!(folder = %folder.display(), "the checkpoint of the shard is damaged; moving it aside and using the previous one");
        let aside = folder.with_file_name(format!("{DAMAGED}{position}"));
        if aside.exists() {
            fs::remove_dir_all(&aside).map_err(|e| Error::io(aside.display(), e))?;
        }
        fs::rename(&folder, &aside).map_err(|e| Error::io(folder.display(), e))?;
        Ok(true)
    }

    /// Stores a checkpoint that `fill` writes to a folder: the shard with this manifest (published, or itself a checkpoint) after
    /// its updates up to a position. An existing checkpoint of the same position is retained, because its items are the same.
    ///
    /// # Errors
    /// Errors of `fill`; `Unsupported` if the store has no folder for checkpoints; `Io`. After an error no
    /// checkpoint is stored.
    pub fn fold(
        &self,
        (manifest, shards): (&Manifest, &Shards),
        position: u64,
        fill: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<()> {
        let unit = Unit { shard: manifest.shard.map(|part| part.shard), ..self.unit(&manifest.name, manifest.version) };
        let of_shard = self.folds.as_ref().and_then(|root| Some((root, checkpoints_of_shard(root, unit)?)));
        let Some((root, of_shard)) = of_shard else {
            return Err(Error::unsupported("this server accepts no updates of the shard, so no updates can be merged"));
        };
        let parent = of_shard.join(unit.version.to_string()).join(manifest.published_digest());
        fs::create_dir_all(&parent).map_err(|e| Error::io(parent.display(), e))?;
        shards.write(&parent)?;
        let staging = {
            let _lock = lock_folder(&parent)?;
            remove_leftovers(&parent)?;
            Staging::new(&parent)?
        };
        fill(&staging.folder)?;
        finish(&staging, &parent, root, position)
    }

    /// Removes the shard's checkpoints of model versions before `before`.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn delete_checkpoints(&self, model: &str, before: u64) -> Result<()> {
        let of_shard = self.folds.as_ref().and_then(|root| checkpoints_of_shard(root, self.unit(model, before)));
        may_block();
        let Some(parent) = of_shard.filter(|parent| parent.exists()) else { return Ok(()) };
        let _lock = lock_folder(&parent)?;
        remove_leftovers(&parent)?;
        let names = names_in(&parent)?;
        let mut old = names.iter().filter(|name| number(name).is_some_and(|version| version < before));
        old.try_for_each(|name| remove_atomically(&parent, &parent.join(name)))
    }
}

/// Renames the folder of a complete checkpoint to its position, and removes checkpoints beyond the retained ones.
fn finish(staging: &Staging, parent: &Path, root: &Path, position: u64) -> Result<()> {
    let _lock = lock_folder(parent)?;
    let target = parent.join(position.to_string());
    if target.exists() {
        return Ok(());
    }
    staging.unlock()?;
    fs::rename(&staging.folder, &target).map_err(|e| Error::io(target.display(), e))?;
    // The parent folders of the checkpoint may be new as well.
    for folder in parent.ancestors().take_while(|folder| folder.starts_with(root)).chain(root.parent()) {
        files::sync_folder(folder).map_err(|e| Error::io(folder.display(), e))?;
    }
    let mut old = positions(parent)?;
    old.truncate(old.len().saturating_sub(RETAINED_CHECKPOINTS));
    old.iter().try_for_each(|position| remove_atomically(parent, &parent.join(position.to_string())))
}

/// Returns the positions of the checkpoints in a folder with readable manifests, ascending.
fn positions(parent: &Path) -> Result<Vec<u64>> {
    let names = names_in(parent)?;
    let mut found: Vec<u64> = names.iter().filter_map(|name| number(name)).collect();
    found.retain(|position| Manifest::read(&parent.join(position.to_string())).is_ok());
    found.sort_unstable();
    Ok(found)
}
