//! `manifest.json`: sizes, provenance and checksums of a snapshot. The manifest is written last, so that a folder with a manifest
//! is complete.

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

/// Format version that this program writes. All earlier formats remain loadable.
pub const FORMAT: u32 = 1;
/// File name of the manifest.
pub const MANIFEST: &str = "manifest.json";

/// Name and version of this program, as recorded in snapshots.
pub const PROGRAM: &str = concat!("sterling ", env!("CARGO_PKG_VERSION"));

/// How a graph was executed (compiled, or by ONNX Runtime) when the version was published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GraphRecord {
    /// Compiled graph with this digest.
    Program(String),
    /// Executed by the fallback runtime, for this reason.
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
            GraphRecord::Program(digest) => write!(f, "is compiled, digest {digest}"),
            GraphRecord::Runtime(reason) => write!(f, "is not compiled and runs in rten: {reason}"),
        }
    }
}

/// Sizes, provenance and files of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Format version of the files.
    pub format: u32,
    /// Name of the model.
    pub name: String,
    /// Version number, from 1.
    pub version: u64,
    /// Width of queries and items, D.
    pub dimension: usize,
    /// Number of items, N. The number is 0 for a version whose items have all been deleted by updates; the files then have one
    /// hidden item, because an index cannot be empty.
    pub items: usize,
    /// Number of slots: N, with each list rounded up.
    pub slots: usize,
    /// Number of inverted lists, C.
    pub lists: usize,
    /// Position of the last update that the items include; 0, which is omitted, if they include none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub position: u64,
    /// Shard of a partitioned version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<ShardOf>,
    /// Origin of a version that was made by a merge of an earlier version and its updates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged: Option<MergedFrom>,
    /// Origin of a checkpoint: the published shard that it extends by updates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folded: Option<FoldedFrom>,
    /// Origin of the snapshot.
    pub provenance: Provenance,
    /// Length and hash of every other file of the snapshot.
    pub files: BTreeMap<String, Checksum>,
    /// Execution of each graph in the sandbox validation; `None` for versions published by releases without sandbox validation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graphs: Option<BTreeMap<String, GraphRecord>>,
    /// Serving decisions that the publication made.
    #[serde(default, skip_serializing_if = "Decisions::is_empty")]
    pub decisions: Decisions,
}

/// Shard that a snapshot represents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardOf {
    /// Shard number, from 0.
    pub shard: u32,
    /// Number of shards.
    pub shards: u32,
    /// Items of all shards together.
    pub items: usize,
}

/// Origin of a version made by a merge of an earlier version and its updates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergedFrom {
    /// Published version from whose package files the merged version was made.
    pub origin: u64,
    /// Share of the lists that the recipe's recall needed when the lists were last trained, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trained_share: Option<f64>,
}

/// Published shard to which a checkpoint adds updates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FoldedFrom {
    /// Items of the published shard.
    pub items: usize,
    /// Digest of the published shard.
    pub digest: String,
}

/// Origin of a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// Name and version of the program that wrote the snapshot.
    pub program: String,
    /// Item file as passed to `publish`, or the index that the items came from.
    pub items_file: String,
    /// Separate file with the vectors, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vectors_file: Option<String>,
    /// Seed of the index build.
    pub seed: u64,
    /// Duration of the publication in seconds.
    pub seconds: f64,
}

impl Manifest {
    /// Reads the manifest of the snapshot in `folder`.
    ///
    /// # Errors
    /// `NotFound` if the folder has no manifest, `Corrupt` with the reason if the manifest is invalid.
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

    /// Writes the manifest, which completes the snapshot in `folder`.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(|e| Error::internal(format!("manifest: {e}")))?;
        files::write_atomic(&folder.join(MANIFEST), |out| out.write_all(&text)).map(drop)
    }

    /// Verifies the length of every file, then the hash of every file.
    ///
    /// # Errors
    /// `Corrupt` with the first file, in name order, that is missing or differs from the manifest.
    pub fn verify(&self, folder: &Path) -> Result<()> {
        let missing = |name: &str, e: Error| match e.kind() {
            Kind::NotFound => Error::corrupt(format!("{}: file `{name}` is missing", folder.display())),
            _ => e,
        };
        let differs =
            |name: &str, found: String| Error::corrupt(format!("{}: file `{name}` has {found}", folder.display()));
        // Checks lengths first, to reject a folder that is still being copied before reading any file.
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

    /// Returns whether this release of the program ran all graphs when it published the version.
    pub fn is_tried(&self) -> bool {
        self.graphs.is_some() && self.provenance.program == PROGRAM
    }

    /// Returns whether updates have deleted all items; the single item in the files is then hidden.
    pub fn is_emptied(&self) -> bool {
        self.items == 0
    }

    /// Returns the topic of the updates that apply to the snapshot: the topic of the model, or of the shard.
    pub fn topic(&self) -> Topic {
        Topic { model: self.name.clone(), shard: self.shard.map(|part| (part.shard, part.shards)) }
    }

    /// Returns the number of items of the version, over all shards.
    pub fn items_of_all(&self) -> usize {
        self.shard.map_or(self.items, |part| part.items)
    }

    /// Returns the number of items as published, before a checkpoint added updates.
    pub fn published_items(&self) -> usize {
        self.folded.as_ref().map_or(self.items, |from| from.items)
    }

    /// Returns the digest of the published files; a checkpoint keeps the digest of its published shard. Together with a position,
    /// this digest identifies the set of items, independent of the files that store them.
    pub fn published_digest(&self) -> String {
        self.folded.as_ref().map_or_else(|| self.digest(), |from| from.digest.clone())
    }

    /// Returns the version that was published with the package's files: this version, or the origin of a merge.
    pub fn origin(&self) -> u64 {
        self.merged.as_ref().map_or(self.version, |from| from.origin)
    }

    /// Returns the bytes of all files except the manifest.
    pub fn bytes(&self) -> u64 {
        self.files.values().map(|f| f.bytes).sum()
    }

    /// Returns the digest of the snapshot: the hash of its files' hashes, 16 hexadecimal digits.
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
    /// Returns the manifest of a small version with these files, for tests.
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
    fn manifests_round_trip_and_detect_changed_files() {
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
