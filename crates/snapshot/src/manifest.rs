//! `manifest.json`: what a snapshot holds, written last, so that a folder with a manifest is whole.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fmt, fs};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::model::Decisions;
use sterling_core::error::{Error, Kind, Result};
use sterling_graph::tower::Runs;
use sterling_journal::Topic;
use sterling_storage::files::{self, Checksum};

/// The format this program writes. Every earlier one stays loadable.
pub const FORMAT: u32 = 1;
/// The manifest's file name.
pub const MANIFEST: &str = "manifest.json";

/// This program, as it names itself in what it publishes.
pub const PROGRAM: &str = concat!("sterling ", env!("CARGO_PKG_VERSION"));

/// What runs a graph, as it was when the version was published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GraphRecord {
    /// A program with this digest.
    Program(String),
    /// The runtime, for this reason.
    Runtime(String),
}

impl From<&Runs> for GraphRecord {
    fn from(runs: &Runs) -> Self {
        match runs {
            Runs::Program(program) => GraphRecord::Program(program.digest()),
            Runs::Runtime(reason) => GraphRecord::Runtime(reason.clone()),
        }
    }
}

impl fmt::Display for GraphRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GraphRecord::Program(digest) => write!(f, "is a program, {digest}"),
            GraphRecord::Runtime(reason) => write!(f, "runs whole in rten: {reason}"),
        }
    }
}

/// What a snapshot holds, how large it is and where it came from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The format of the files.
    pub format: u32,
    /// The model's name.
    pub name: String,
    /// The version under that name, from 1 up.
    pub version: u64,
    /// Width of queries and items, D.
    pub dimension: usize,
    /// Items, N. 0 of a version all of whose items updates have deleted: its files hold one, as an index of none cannot be, which
    /// nobody sees.
    pub items: usize,
    /// Slots, N rounded up list by list.
    pub slots: usize,
    /// Lists, C.
    pub lists: usize,
    /// The position of the last update that its items contain; 0, which is left out, where they contain none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub position: u64,
    /// Which part of a version it is, where that was cut into shards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<ShardOf>,
    /// What it was merged from, where it is an earlier version with its updates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged: Option<MergedFrom>,
    /// What it was folded from, where it is a shard with its updates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folded: Option<FoldedFrom>,
    /// Where it came from.
    pub provenance: Provenance,
    /// Every other file of the snapshot with its length and hash.
    pub files: BTreeMap<String, Checksum>,
    /// What ran each graph when all were tried; none of a version that was published before graphs were tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graphs: Option<BTreeMap<String, GraphRecord>>,
    /// How the model is served, where the publication had to decide that.
    #[serde(default, skip_serializing_if = "Decisions::is_empty")]
    pub decisions: Decisions,
}

/// Which part of a version a snapshot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardOf {
    /// Its number, from 0 up.
    pub shard: u32,
    /// How many there are.
    pub shards: u32,
    /// Items of all of them together.
    pub items: usize,
}

/// Where a version came from that is an earlier one with its updates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergedFrom {
    /// The published version whose package it has.
    pub origin: u64,
    /// The share of the lists that the recall of the recipe took when the lists were last trained, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained_share: Option<f64>,
}

/// The published shard that a shard with its updates stands for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FoldedFrom {
    /// Its items.
    pub items: usize,
    /// The digest of its bytes.
    pub digest: String,
}

/// Where a snapshot came from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// The program that wrote it, with its version.
    pub program: String,
    /// The item file as it was named to `publish`, or the index that the items came from.
    pub items_file: String,
    /// The file that the vectors came from, where they stood in one of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vectors_file: Option<String>,
    /// The seed of the index build.
    pub seed: u64,
    /// Seconds that the publication took.
    pub seconds: f64,
}

impl Manifest {
    /// Reads the manifest of the snapshot in `folder`.
    ///
    /// # Errors
    /// `NotFound` where the folder holds none, `Corrupt` with the reason where it cannot be used.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(MANIFEST);
        let text = files::read(&path)?;
        let corrupt = |reason: String| Error::corrupt(format!("{}: {reason}", path.display()));
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let Format { format } = serde_json::from_slice(&text).map_err(|e| corrupt(format!("not a manifest: {e}")))?;
        if format == 0 || format > FORMAT {
            return Err(Error::unsupported(format!("{}: format {format}, expected 1 to {FORMAT}", path.display())));
        }
        let manifest: Manifest = serde_json::from_slice(&text).map_err(|e| corrupt(format!("not a manifest: {e}")))?;
        match manifest.files.keys().find(|name| !is_plain(name)) {
            Some(name) => Err(corrupt(format!("file name `{name}` leaves the snapshot's folder"))),
            None => Ok(manifest),
        }
    }

    /// Writes the manifest, which makes the snapshot in `folder` whole.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(|e| Error::internal(format!("manifest: {e}")))?;
        files::write_atomic(&folder.join(MANIFEST), |out| out.write_all(&text)).map(drop)
    }

    /// Holds the length of every file of the snapshot against the manifest, then reads them and holds their hashes against it.
    ///
    /// # Errors
    /// `Corrupt` naming the first file, in the order of names, that is missing or differs.
    pub fn verify(&self, folder: &Path) -> Result<()> {
        let missing = |name: &str, e: Error| match e.kind() {
            Kind::NotFound => Error::corrupt(format!("{}: file `{name}` is missing", folder.display())),
            _ => e,
        };
        let differs =
            |name: &str, found: String| Error::corrupt(format!("{}: file `{name}` has {found}", folder.display()));
        // A folder that is being copied is refused before anything is read.
        for (name, expected) in &self.files {
            let path = folder.join(name);
            let about = fs::metadata(&path).map_err(|e| missing(name, Error::io(path.display(), e)))?;
            if about.len() != expected.bytes {
                return Err(differs(name, format!("{} bytes, expected {}", about.len(), expected.bytes)));
            }
        }
        let check = |(name, expected): (&String, &Checksum)| {
            let found = Checksum::of_file(&folder.join(name)).map_err(|e| missing(name, e))?;
            match found == *expected {
                true => Ok(()),
                false => Err(differs(name, format!("checksum {}, expected {}", found.xxh3, expected.xxh3))),
            }
        };
        let results: Vec<Result<()>> = self.files.par_iter().map(check).collect();
        results.into_iter().collect()
    }

    /// Whether this program, as it is now, ran all graphs before it published the version.
    pub fn is_tried(&self) -> bool {
        self.graphs.is_some() && self.provenance.program == PROGRAM
    }

    /// Whether updates have deleted all of its items: the one that its files hold is none.
    pub fn is_emptied(&self) -> bool {
        self.items == 0
    }

    /// Whose updates it is brought up to date with: the model's, or those of its shard.
    pub fn topic(&self) -> Topic {
        Topic { model: self.name.clone(), shard: self.shard.map(|part| (part.shard, part.shards)) }
    }

    /// Items of the version: of all its shards, where it was cut.
    pub fn items_of_all(&self) -> usize {
        self.shard.map_or(self.items, |part| part.items)
    }

    /// Its items as they were published, where updates were folded in since.
    pub fn published_items(&self) -> usize {
        self.folded.as_ref().map_or(self.items, |from| from.items)
    }

    /// The digest of what was published, which is its own where no updates were folded in since. With a position it says which
    /// items there are: what holds them is nobody's affair.
    pub fn published_digest(&self) -> String {
        self.folded.as_ref().map_or_else(|| self.digest(), |from| from.digest.clone())
    }

    /// The version that was published with the files of the package: itself, or the one that it was merged from.
    pub fn origin(&self) -> u64 {
        self.merged.as_ref().map_or(self.version, |from| from.origin)
    }

    /// Bytes of all files but the manifest.
    pub fn bytes(&self) -> u64 {
        self.files.values().map(|f| f.bytes).sum()
    }

    /// One name for all the bytes of the snapshot: the hash of its files' hashes, 16 hexadecimal digits.
    pub fn digest(&self) -> String {
        let text: String =
            self.files.iter().map(|(name, sum)| format!("{name} {} {}\n", sum.bytes, sum.xxh3)).collect();
        format!("{:016x}", xxhash_rust::xxh3::xxh3_64(text.as_bytes()))
    }
}

fn is_zero(position: &u64) -> bool {
    *position == 0
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.contains(['/', '\\']) && name != ".." && name != "."
}

#[cfg(test)]
impl Manifest {
    /// That of a small version of these files.
    pub(super) fn small(name: &str, version: u64, files: BTreeMap<String, Checksum>) -> Self {
        Manifest {
            format: FORMAT,
            name: name.into(),
            version,
            dimension: 2,
            items: 3,
            slots: 16,
            lists: 1,
            position: 0,
            shard: None,
            merged: None,
            folded: None,
            provenance: Provenance::default(),
            files,
            graphs: None,
            decisions: Decisions::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn manifest(folder: &Path) -> Manifest {
        let sum = files::write_atomic(&folder.join("a.bin"), |out| out.write_all(b"abc")).unwrap();
        let files = BTreeMap::from([("a.bin".to_string(), sum)]);
        Manifest::small("m", 1, files)
    }

    #[test]
    fn a_manifest_comes_back_and_guards_its_files() {
        let folder = tempfile::tempdir().unwrap();
        let written = manifest(folder.path());
        written.write(folder.path()).unwrap();
        let read = Manifest::read(folder.path()).unwrap();
        assert_eq!(read, written);
        read.verify(folder.path()).unwrap();
        for (bytes, expected) in [(&b"abd"[..], "checksum"), (b"ab", "has 2 bytes, expected 3"), (b"", "has 0 bytes")] {
            fs::write(folder.path().join("a.bin"), bytes).unwrap();
            let error = read.verify(folder.path()).unwrap_err();
            assert_eq!(error.kind(), Kind::Corrupt);
            assert!(error.to_string().contains(expected), "{error}");
        }
        fs::remove_file(folder.path().join("a.bin")).unwrap();
        assert!(read.verify(folder.path()).unwrap_err().to_string().contains("`a.bin` is missing"));
    }

    #[test]
    fn manifests_that_cannot_be_used_say_why() {
        let folder = tempfile::tempdir().unwrap();
        let mut written = manifest(folder.path());
        written.format = 99;
        written.write(folder.path()).unwrap();
        assert_eq!(Manifest::read(folder.path()).unwrap_err().kind(), Kind::Unsupported);
        written.format = FORMAT;
        written.files = BTreeMap::from([("../a".to_string(), Checksum::of(b""))]);
        written.write(folder.path()).unwrap();
        assert!(Manifest::read(folder.path()).unwrap_err().to_string().contains("leaves the snapshot's folder"));
        for text in ["", "{", "{}", "{\"format\": 1}", "[]", "{\"format\": 1, \"more\": 2}"] {
            fs::write(folder.path().join(MANIFEST), text).unwrap();
            assert_eq!(Manifest::read(folder.path()).unwrap_err().kind(), Kind::Corrupt, "{text}");
        }
    }
}
