//! Document shards: one version cut into several by the ids of its items, and the file that names them.
//!
//! A version that is cut lies in `STORE/NAME/VERSION/` as a folder a shard, `shard-0` and on, each a snapshot that a server
//! loads (`serve --shard N`), beside [`SHARDS_FILE`], which names them with their digests and is written last. All shards have
//! the centroids, the dictionaries and the calibration of the whole: they were trained once, and cut after.
//!
//! The shard of an item is stated here and does not change: the hash of its id, scaled to the number of shards.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::manifest::{FORMAT, Manifest};
use sterling_core::error::{Error, Result};
use sterling_core::limits::SHARDS_MAX;
use sterling_core::units::ItemId;
use sterling_storage::files;

/// The file that names the shards of a version.
pub const SHARDS_FILE: &str = "shards.json";
/// How items are cut, as the file says it.
const HASH: &str = "floor(xxh3_64(id as 8 bytes, little-endian) * shards / 2^64)";

/// The shard that holds an item, of `shards`: its XXH3 hash of 64 bits, seed 0, of the id's eight bytes, little-endian, scaled
/// to the number of shards.
pub fn shard_of(item: ItemId, shards: u32) -> u32 {
    let hash = xxh3_64(&item.0.to_le_bytes());
    ((u128::from(hash) * u128::from(shards)) >> 64) as u32
}

/// The folder of a shard in that of its version.
pub fn shard_folder(version: &Path, shard: u32) -> PathBuf {
    version.join(format!("shard-{shard}"))
}

/// The shards of a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shards {
    /// The format of the snapshots.
    pub format: u32,
    /// The model's name.
    pub name: String,
    /// The version under that name.
    pub version: u64,
    /// How items are cut.
    pub hash: String,
    /// Items of all shards together.
    pub items: usize,
    /// The shards, in the order of their numbers.
    pub shards: Vec<ShardEntry>,
}

/// A shard as the file names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// Its items.
    pub items: usize,
    /// The digest of its bytes.
    pub digest: String,
}

impl Shards {
    /// Names the shards whose manifests these are, in the order of their numbers.
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

    /// Reads the file in the folder of a version.
    ///
    /// # Errors
    /// `NotFound` where there is none; `Corrupt` or `Unsupported` with the reason.
    pub fn read(version: &Path) -> Result<Self> {
        let path = version.join(SHARDS_FILE);
        let text = files::read(&path)?;
        let corrupt = |reason: String| Error::corrupt(format!("{}: {reason}", path.display()));
        let shards: Shards = serde_json::from_slice(&text).map_err(|e| corrupt(e.to_string()))?;
        if shards.format != FORMAT || shards.hash != HASH {
            let (format, hash) = (shards.format, &shards.hash);
            return Err(Error::unsupported(format!(
                "{}: format {format}, cut by `{hash}`, expected format {FORMAT}, cut by `{HASH}`",
                path.display()
            )));
        }
        let sum: usize = shards.shards.iter().map(|shard| shard.items).sum();
        if sum != shards.items || shards.shards.is_empty() || shards.shards.len() > SHARDS_MAX as usize {
            let (count, items) = (shards.shards.len(), shards.items);
            return Err(corrupt(format!("{count} shards of {sum} items, expected 1 to {SHARDS_MAX} of {items}")));
        }
        Ok(shards)
    }

    /// Writes the file into the folder of a version.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn write(&self, version: &Path) -> Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(|e| Error::internal(format!("shards: {e}")))?;
        files::write_atomic(&version.join(SHARDS_FILE), |out| out.write_all(&text)).map(drop)
    }

    /// One name for all the bytes of all shards: the hash of their digests, 16 hexadecimal digits.
    pub fn digest(&self) -> String {
        let text: String = self.shards.iter().map(|shard| format!("{} {}\n", shard.items, shard.digest)).collect();
        format!("{:016x}", xxh3_64(text.as_bytes()))
    }

    /// Refuses a snapshot that is not the shard that the file names.
    ///
    /// # Errors
    /// `Corrupt` with what differs.
    pub fn check(&self, manifest: &Manifest) -> Result<()> {
        let corrupt = |what: String| Err(Error::corrupt(format!("{SHARDS_FILE}: {what}")));
        let Some(part) = manifest.shard else {
            return corrupt("its folder holds a version that was not cut".into());
        };
        let count = self.shards.len();
        let Some(entry) = self.shards.get(part.shard as usize).filter(|_| part.shards as usize == count) else {
            return corrupt(format!("it names {count} shards, the snapshot is {} of {}", part.shard, part.shards));
        };
        let says = (&*self.name, self.version, self.items, entry.items, &*entry.digest);
        let digest = manifest.published_digest();
        let is = (&*manifest.name, manifest.version, part.items, manifest.published_items(), &*digest);
        match says == is {
            true => Ok(()),
            false => corrupt(format!(
                "it says of shard {} (model, version, items of all, items, digest) = {says:?}, the snapshot is {is:?}",
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

    #[test]
    fn items_are_cut_as_it_is_stated_and_evenly() {
        // By the definition of the hash, written down in another language.
        for (id, shards, expected) in [(0, 1, 0), (1, 3, 0), (2, 3, 0), (-7, 3, 2), (902, 5, 4), (i64::MIN, 64, 32)] {
            assert_eq!(shard_of(ItemId(id), shards), expected, "{id} of {shards}");
        }
        let mut counts = [0; 7];
        (0..70_000).for_each(|id| counts[shard_of(ItemId(id), 7) as usize] += 1);
        // Five standard deviations of 10,000.
        assert!(counts.iter().all(|count| (9500..10_500).contains(count)), "{counts:?}");
    }

    #[test]
    fn files_that_do_not_fit_are_refused() {
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
        for wrong in [
            Shards { items: 6, ..shards.clone() },
            Shards { shards: Vec::new(), items: 0, ..shards.clone() },
            Shards { hash: "id mod shards".into(), ..shards.clone() },
            Shards { format: 99, ..shards.clone() },
        ] {
            wrong.write(folder.path()).unwrap();
            assert!(Shards::read(folder.path()).is_err(), "{wrong:?}");
        }
        let turned = Shards { shards: vec![entry(3), entry(2)], ..shards.clone() };
        assert_ne!(turned.digest(), shards.digest());
        for text in ["", "{}", "[]"] {
            fs::write(folder.path().join(SHARDS_FILE), text).unwrap();
            assert!(Shards::read(folder.path()).is_err());
        }
    }
}
