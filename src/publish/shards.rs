//! A version that is cut into document shards: trained once, as a whole, and cut after.
//!
//! 1. The whole is written, calibrated and tried in a folder that goes away again.
//! 2. Each shard gets its slice of every list, with the centroids, dictionaries and widths of rows of the whole; files that do not
//!    tell of items are those of the whole, as hard links.
//! 3. The file that names all shards is written last.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use super::making::Making;
use super::serving;
use crate::error::{Error, Result};
use crate::files::{self, Checksum};
use crate::ivf::Built;
use crate::model::WARMUP_FILE;
use crate::snapshot::{INDEX_FILE, Manifest, PARTS_FILE, ShardOf, Shards, shard_folder, shard_of};
use crate::units::ItemId;

/// Where the whole lies while it is cut.
const WHOLE: &str = "whole";

/// Fills the folder of a version with its shards.
pub(super) fn cut(making: &Making<'_>, folder: &Path, version: u64, shards: u32) -> Result<()> {
    let whole_folder = make(folder.join(WHOLE))?;
    let whole = making.whole(&whole_folder, version)?;
    let parts: Vec<Built> = (0..shards).map(|shard| part(making, shard, shards)).collect::<Result<_>>()?;
    let mut manifests = Vec::with_capacity(parts.len());
    for (shard, built) in (0..shards).zip(&parts) {
        let to = make(shard_folder(folder, shard))?;
        manifests.push(write(
            making,
            (&whole_folder, &whole),
            &to,
            built,
            ShardOf { shard, shards, items: whole.items },
        )?);
    }
    fs::remove_dir_all(&whole_folder).map_err(|e| Error::io(whole_folder.display(), e))?;
    Shards::of(&manifests).write(folder)
}

fn make(folder: std::path::PathBuf) -> Result<std::path::PathBuf> {
    fs::create_dir(&folder).map_err(|e| Error::io(folder.display(), e))?;
    Ok(folder)
}

/// The items of a shard in the lists of the whole.
fn part(making: &Making<'_>, shard: u32, shards: u32) -> Result<Built> {
    let arranged = making.files.arranged;
    let built = arranged.built.part(|row| shard_of(ItemId(arranged.ids[row as usize]), shards) == shard);
    match built.items() {
        0 => Err(Error::invalid(format!(
            "shards: shard {shard} of {shards} gets none of {} items, expected fewer shards",
            arranged.ids.len()
        ))),
        _ => Ok(built),
    }
}

/// Brings the files that do not tell of items from the folder of a manifest to that of other items of the same version, whose own
/// files are in `sums`: other names of the same bytes, or copies where the file system has none.
pub(super) fn share(
    (from, of): (&Path, &Manifest),
    folder: &Path,
    sums: &mut BTreeMap<String, Checksum>,
) -> Result<()> {
    // Golden answers are those of all items, and so are the parts of the reranker.
    let others = of.files.iter().filter(|(name, _)| ![WARMUP_FILE, PARTS_FILE].contains(&name.as_str()));
    for (name, sum) in others {
        if !sums.contains_key(name) {
            bring(&from.join(name), &folder.join(name), sum)?;
            sums.insert(name.clone(), sum.clone());
        }
    }
    files::sync_folder(folder).map_err(|e| Error::io(folder.display(), e))
}

fn bring(from: &Path, to: &Path, sum: &Checksum) -> Result<()> {
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

/// Writes a shard, and returns its manifest.
fn write(
    making: &Making<'_>,
    (whole_folder, whole): (&Path, &Manifest),
    folder: &Path,
    built: &Built,
    shard: ShardOf,
) -> Result<Manifest> {
    let mut sums = making.files.write_items(folder, built)?;
    sums.insert(INDEX_FILE.into(), making.files.write_index(folder, built)?);
    let decisions = match making.files.package {
        Some(package) => serving::keep(package, &whole.decisions, folder, &mut sums)?,
        None => whole.decisions.clone(),
    };
    share((whole_folder, whole), folder, &mut sums)?;
    let manifest = Manifest {
        items: built.items(),
        slots: built.order.len(),
        shard: Some(shard),
        position: making.what.positions.get(shard.shard as usize).copied().unwrap_or(0),
        files: sums,
        decisions,
        ..whole.clone()
    };
    manifest.write(folder)?;
    Ok(manifest)
}
