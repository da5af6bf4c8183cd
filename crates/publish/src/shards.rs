//! Document shards: a version is trained as a whole and then partitioned.
//!
//! 1. The complete version is written, calibrated and tested in a temporary folder.
//! 2. Each shard gets its slice of every list, with the centroids, dictionaries and row widths of the complete version; files
//!    that do not depend on items are hard links to those of the complete version.
//! 3. The file that names all shards is written last.
//!
//! Shards may also be made separately (`super::parts`): then this module writes only their shared files and the file that names all
//! shards.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use super::catalogue::Arranged;
use super::making::{self, Extent, VersionInputs};
use super::parts::{CutShards, PartShard};
use super::plan::Stage;
use super::{calibrate, serving};
use sterling_core::error::{Error, Result};
use sterling_index::ivf::Built;
use sterling_snapshot::model::{Decisions, WARMUP_FILE};
use sterling_snapshot::{INDEX_FILE, Manifest, PARTS_FILE, REQUESTS_FILE, ShardOf, Shards, shard_folder};
use sterling_storage::files::{self, Checksum};

/// Folder of the complete version while it is partitioned.
const WHOLE: &str = "whole";

/// Writes the shards of a version to its folder.
pub(super) fn cut(
    making: &VersionInputs<'_>,
    arranged: &Arranged,
    folder: &Path,
    version: u64,
    shards: u32,
) -> Result<()> {
    let whole_folder = make(folder.join(WHOLE))?;
    let whole =
        SharedFiles { manifest: making.whole(arranged, &whole_folder, version)?, folder: &whole_folder, shards };
    let parts: Vec<Built> = (0..shards).map(|shard| arranged.shard(shard, shards)).collect::<Result<_>>()?;
    let mut manifests = Vec::with_capacity(parts.len());
    for (shard, built) in (0..shards).zip(&parts) {
        let to = make(shard_folder(folder, shard))?;
        let mut files = making.files.write_items(arranged, &to, built)?;
        files.insert(INDEX_FILE.into(), arranged.write_index(&to, built)?);
        let decisions = match making.files.package {
            Some(package) => serving::keep(package, &whole.manifest.decisions, &to, &mut files)?,
            None => whole.manifest.decisions.clone(),
        };
        let (items, slots) = (built.items(), built.order.len());
        let of_items = ShardFiles { shard, items, slots, files, decisions };
        manifests.push(whole.shard(making, of_items, &to)?);
    }
    whole.write_shards_file(&manifests, folder)
}

/// Writes a version from shards that were made separately.
pub(super) fn assemble(making: &VersionInputs<'_>, cut: &CutShards, folder: &Path, version: u64) -> Result<()> {
    let whole_folder = make(folder.join(WHOLE))?;
    (making.progress)(Stage::Writing, 0, cut.shards.len());
    let mut files = making.files.write_package(&whole_folder)?;
    let folders: Vec<&Path> = cut.shards.iter().map(|shard| shard.folder.as_path()).collect();
    let reported = |done, total| (making.progress)(Stage::Calibrating, done, total);
    let measured = calibrate::of_shards(&folders, &reported)?;
    if let Some((calibration, queries)) = &measured {
        making::warn(calibration, queries, (making.files.package, making.files.recipe));
    }
    if let Some(source) = calibrate::source(making.plan.queries.as_deref(), making.plan.source.package()) {
        files.extend(calibrate::keep_requests(&source, &whole_folder)?.map(|sum| (REQUESTS_FILE.into(), sum)));
    }
    making::keep(measured, &whole_folder, &mut files)?;
    let decisions = common_decisions(cut.shards.iter().map(|shard| &shard.holds.decisions))?;
    let PartShard { dimension, lists, .. } = cut.shards[0].holds;
    let items = cut.shards.iter().map(|shard| shard.holds.items).sum();
    let extent = Extent { dimension, items, slots: 0, lists };
    let manifest = making.manifest(version, extent, files, decisions.clone())?;
    let whole = SharedFiles { manifest, folder: &whole_folder, shards: cut.shards.len() as u32 };
    let mut manifests = Vec::with_capacity(cut.shards.len());
    for (shard, of) in (0..).zip(&cut.shards) {
        let to = make(shard_folder(folder, shard))?;
        let mut files = of.files.clone();
        files.remove(calibrate::FINDINGS_FILE);
        if decisions.item_part.is_none() {
            files.remove(PARTS_FILE);
        }
        files.iter().try_for_each(|(name, sum)| copy_checked(&of.folder.join(name), &to.join(name), sum))?;
        let PartShard { items, slots, .. } = of.holds;
        let of_items = ShardFiles { shard, items, slots, files, decisions: decisions.clone() };
        manifests.push(whole.shard(making, of_items, &to)?);
        (making.progress)(Stage::Writing, manifests.len(), cut.shards.len());
    }
    whole.write_shards_file(&manifests, folder)
}

/// Returns the decisions of a version from those of its shards.
///
/// # Errors
/// `Conflict` if two shards store different item-side parts of the reranker.
fn common_decisions<'a>(shards: impl Iterator<Item = &'a Decisions> + Clone) -> Result<Decisions> {
    let mut parts =
        shards.clone().enumerate().filter_map(|(shard, decided)| Some((shard, decided.item_part.as_ref()?)));
    if let Some((first, part)) = parts.next()
        && let Some((other, _)) = parts.find(|(_, other)| *other != part)
    {
        let why = "split the reranker differently, expected one split: cut all shards again, with one build";
        return Err(Error::conflict(format!("shards {first} and {other} {why}")));
    }
    // A part that cannot be stored for one shard could not be stored for the complete version.
    Ok(shards.min_by_key(|decisions| decisions.item_part.is_some()).cloned().unwrap_or_default())
}

fn make(folder: std::path::PathBuf) -> Result<std::path::PathBuf> {
    fs::create_dir(&folder).map_err(|e| Error::io(folder.display(), e))?;
    Ok(folder)
}

/// Links the files that do not depend on items from the folder of a manifest to the folder of other items of the same version;
/// `sums` has the checksums of that folder's own files and receives those of the links. Files are hard links, or copies if the file
/// system does not support links.
pub(super) fn share(
    (from, of): (&Path, &Manifest),
    folder: &Path,
    sums: &mut BTreeMap<String, Checksum>,
) -> Result<()> {
    // Golden answers and the item-side part of the reranker depend on all items.
    let others = of.files.iter().filter(|(name, _)| ![WARMUP_FILE, PARTS_FILE].contains(&name.as_str()));
    for (name, sum) in others {
        if !sums.contains_key(name) {
            copy_checked(&from.join(name), &folder.join(name), sum)?;
            sums.insert(name.clone(), sum.clone());
        }
    }
    files::sync_folder(folder).map_err(|e| Error::io(folder.display(), e))
}

fn copy_checked(from: &Path, to: &Path, sum: &Checksum) -> Result<()> {
    if fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    let mut file = File::open(from).map_err(|e| Error::io(from.display(), e))?;
    let copied = files::write_atomic(to, |out| io::copy(&mut file, out).map(drop))?;
    match copied == *sum {
        true => Ok(()),
        false => Err(Error::corrupt(format!("{}: checksum {}, expected {}", from.display(), copied.xxh3, sum.xxh3))),
    }
}

/// Files of a shard that depend on its items, written to its folder.
struct ShardFiles {
    shard: u32,
    items: usize,
    slots: usize,
    files: BTreeMap<String, Checksum>,
    decisions: Decisions,
}

/// Shared files of all shards of a version.
struct SharedFiles<'a> {
    /// Manifest of the version, complete or without the files that depend on items.
    manifest: Manifest,
    folder: &'a Path,
    shards: u32,
}

impl SharedFiles<'_> {
    /// Completes a shard in its folder, and returns the shard's manifest.
    fn shard(&self, making: &VersionInputs<'_>, of_items: ShardFiles, folder: &Path) -> Result<Manifest> {
        let ShardFiles { shard, items, slots, mut files, decisions } = of_items;
        share((self.folder, &self.manifest), folder, &mut files)?;
        let manifest = Manifest {
            items,
            slots,
            shard: Some(ShardOf { shard, shards: self.shards, items: self.manifest.items }),
            position: making.plan.output.position(shard),
            files,
            decisions,
            ..self.manifest.clone()
        };
        manifest.write(folder)?;
        Ok(manifest)
    }

    /// Writes the file that names all shards.
    fn write_shards_file(self, manifests: &[Manifest], folder: &Path) -> Result<()> {
        fs::remove_dir_all(self.folder).map_err(|e| Error::io(self.folder.display(), e))?;
        Shards::of(manifests).write(folder)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::error::Kind;

    fn decided(cut: &str) -> Decisions {
        let part = format!(r#"{{"cut": {cut}, "width": 8, "format": "f16", "digest": "0"}}"#);
        Decisions { item_part: Some(serde_json::from_str(&part).unwrap()), ..Decisions::default() }
    }

    #[test]
    fn shards_with_different_item_parts_are_not_assembled() {
        let common = |shards: &[Decisions]| common_decisions(shards.iter());
        assert_eq!(common(&[decided("[3]"), decided("[3]")]).unwrap(), decided("[3]"));
        assert_eq!(common(&[decided("[3]"), Decisions::default()]).unwrap(), Decisions::default());
        let error = common(&[Decisions::default(), decided("[3]"), decided("[4]")]).unwrap_err();
        assert_eq!(error.kind(), Kind::Conflict);
        assert!(error.to_string().contains("shards 1 and 2 split the reranker differently"), "{error}");
    }
}
