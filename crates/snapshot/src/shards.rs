//! Document shards: the partition of a version by item ids, and the file that lists the shards.
//!
//! A partitioned version has a folder per shard in `STORE/NAME/VERSION/`, `shard-0` and so on. Each folder is a snapshot that a
//! server loads (`serve --shard N`). [`SHARDS_FILE`] lists the shards with their digests and is written last. All shards share the
//! centroids, dictionaries and calibration of the version, because these are made before the version is partitioned.
//!
//! The shard of an item is the hash of its id, scaled to the number of shards. The definition of an item's shard never changes.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::manifest::{FORMAT, Manifest};
use sterling_core::error::{Error, Result};
use sterling_core::limits::SHARDS_MAX;
use sterling_storage::files;

/// File that lists the shards of a version.
pub const SHARDS_FILE: &str = "shards.json";
/// Partition function, as recorded in [`SHARDS_FILE`].
const HASH: &str = "floor(xxh3_64(id as 8 bytes, little-endian) * shards / 2^64)";

/// Returns the folder of a shard within the folder of its version.
pub fn shard_folder(version: &Path, shard: u32) -> PathBuf {
    version.join(format!("shard-{shard}"))
}

/// Shards of a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shards {
    /// Format version of the snapshots.
    pub format: u32,
    /// Name of the model.
    pub name: String,
    /// Version number.
    pub version: u64,
    /// Partition function of the items.
    pub hash: String,
    /// Items of all shards together.
    pub items: usize,
    /// Shards in order of their numbers.
    pub shards: Vec<ShardEntry>,
}

/// Entry of a shard in [`SHARDS_FILE`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// Number of items of the shard.
    pub items: usize,
    /// Digest of the shard's files.
    pub digest: String,
}

impl Shards {
    /// Lists the shards with these manifests, in order of their numbers.
    pub fn of(manifests: &[Manifest]) -> Self {
        let entry = |manifest: &Manifest| ShardEntry { items: manifest.items, digest: manifest.digest() };
        let first = manifests.first();
        Shards {
            format: FORMAT,
            name: first.map(|m| m.name.clone()).unwrap_or_default(),
            version: first.map_or(0, |m| m.version),
            hash: HASH.into(),
            items: manifests.iter().map(|m| m.items).sum(),
            shards: manifests.iter().map(entry).collect(),
        }
    }

    /// Reads [`SHARDS_FILE`] in the folder of a version.
    ///
    /// # Errors
    /// `NotFound` if the file does not exist; `Corrupt` or `Unsupported` with the reason.
    pub fn read(version: &Path) -> Result<Self> {
        let path = version.join(SHARDS_FILE);
        let text = files::read(&path)?;
        let corrupt = |reason: String| Error::corrupt(format!("{}: {reason}", path.display()));
        let shards: Shards = serde_json::from_slice(&text).map_err(|e| corrupt(e.to_string()))?;
        if shards.format != FORMAT || shards.hash != HASH {
            let (format, hash) = (shards.format, &shards.hash);
            return Err(Error::unsupported(format!(
                "{}: format {format}, partitioned by `{hash}`, expected format {FORMAT}, partitioned by `{HASH}`",
                path.display()
            )));
        }
        let sum: usize = shards.shards.iter().map(|shard| shard.items).sum();
        if sum != shards.items || shards.shards.is_empty() || shards.shards.len() > SHARDS_MAX as usize {
            let (count, items) = (shards.shards.len(), shards.items);
            return Err(corrupt(format!(
                "{count} shards with {sum} items in total, expected 1 to {SHARDS_MAX} shards with {items} items"
            )));
        }
        Ok(shards)
    }

    /// Writes [`SHARDS_FILE`] into the folder of a version.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn write(&self, version: &Path) -> Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(|e| Error::internal(format!("shards: {e}")))?;
        files::write_atomic(&version.join(SHARDS_FILE), |out| out.write_all(&text)).map(drop)
    }

    /// Returns the digest of all shards: the hash of their digests, 16 hexadecimal digits.
    pub fn digest(&self) -> String {
        let text: String = self.shards.iter().map(|shard| format!("{} {}\n", shard.items, shard.digest)).collect();
        format!("{:016x}", xxh3_64(text.as_bytes()))
    }

    /// Rejects a snapshot that differs from the entry of its shard.
    ///
    /// # Errors
    /// `Corrupt` with the difference.
    pub fn check(&self, manifest: &Manifest) -> Result<()> {
        let corrupt = |what: String| Err(Error::corrupt(format!("{SHARDS_FILE}: {what}")));
        let Some(part) = manifest.shard else {
            return corrupt("the file is in the folder of a version without shards".into());
        };
        let count = self.shards.len();
        let Some(entry) = self.shards.get(part.shard as usize).filter(|_| part.shards as usize == count) else {
            return corrupt(format!(
                "the file lists {count} shards, but this snapshot is shard {} of {}",
                part.shard, part.shards
            ));
        };
        let says = (&*self.name, self.version, self.items, entry.items, &*entry.digest);
        let digest = manifest.published_digest();
        let is = (&*manifest.name, manifest.version, part.items, manifest.published_items(), &*digest);
        match says == is {
            true => Ok(()),
            false => corrupt(format!(
                "the entry of shard {} has (model, version, items of all, items, digest) = {says:?}, the snapshot is {is:?}",
                part.shard
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;

    use super::*;
    use sterling_core::items::shard_of;
    use sterling_core::units::ItemId;

    #[test]
    fn items_are_sharded_by_the_stated_hash_and_evenly() {
        // Expected values from the definition of the hash, implemented in another language.
        for (id, shards, expected) in [(0, 1, 0), (1, 3, 0), (2, 3, 0), (-7, 3, 2), (902, 5, 4), (i64::MIN, 64, 32)] {
            assert_eq!(shard_of(ItemId(id), shards), expected, "{id} of {shards}");
        }
        let mut counts = [0; 7];
        (0..70_000).for_each(|id| counts[shard_of(ItemId(id), 7) as usize] += 1);
        // Five standard deviations of 10,000.
        assert!(counts.iter().all(|count| (9500..10_500).contains(count)), "{counts:?}");
    }

    #[test]
    fn inconsistent_files_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let entry = |items| ShardEntry { items, digest: "ab".into() };
        let shards = Shards {
            format: FORMAT,
            name: "m".into(),
            version: 3,
            hash: HASH.into(),
            items: 5,
            shards: vec![entry(2), entry(3)],
        };
        shards.write(folder.path()).unwrap();
        assert_eq!(Shards::read(folder.path()).unwrap(), shards);
        for invalid in [
            Shards { items: 6, ..shards.clone() },
            Shards { shards: Vec::new(), items: 0, ..shards.clone() },
            Shards { hash: "id mod shards".into(), ..shards.clone() },
            Shards { format: 99, ..shards.clone() },
        ] {
            invalid.write(folder.path()).unwrap();
            assert!(Shards::read(folder.path()).is_err(), "{invalid:?}");
        }
        let turned = Shards { shards: vec![entry(3), entry(2)], ..shards.clone() };
        assert_ne!(turned.digest(), shards.digest());
        for text in ["", "{}", "[]"] {
            fs::write(folder.path().join(SHARDS_FILE), text).unwrap();
            assert!(Shards::read(folder.path()).is_err());
        }
    }
}
