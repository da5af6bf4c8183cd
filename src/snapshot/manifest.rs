//! `manifest.json`: what a snapshot holds, written last, so that a folder with a manifest is whole.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::device::map::Map;
use crate::error::{Error, Kind, Result};
use crate::files::{self, Checksum};

/// The format this program writes. Every earlier one stays loadable.
pub const FORMAT: u32 = 1;
/// The manifest's file name.
pub const MANIFEST: &str = "manifest.json";
/// What the folder of an unfinished publication is called, before the number of its process.
const STAGING: &str = ".publishing-";

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
    /// Items, N.
    pub items: usize,
    /// Slots, N rounded up list by list.
    pub slots: usize,
    /// Lists, C.
    pub lists: usize,
    /// Where it came from.
    pub provenance: Provenance,
    /// Every other file of the snapshot with its length and hash.
    pub files: BTreeMap<String, Checksum>,
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
        let text = fs::read(&path).map_err(|e| Error::io(path.display(), e))?;
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

    /// Reads every file of the snapshot and holds its length and hash against the manifest.
    ///
    /// # Errors
    /// `Corrupt` naming the first file, in the order of names, that is missing or differs.
    pub fn verify(&self, folder: &Path) -> Result<()> {
        let check = |(name, expected): (&String, &Checksum)| {
            let map = Map::published(&folder.join(name)).map_err(|e| match e.kind() {
                Kind::NotFound => Error::corrupt(format!("{}: file `{name}` is missing", folder.display())),
                _ => e,
            })?;
            if map.len() as u64 != expected.bytes {
                return Err(Error::corrupt(format!(
                    "{}: file `{name}` has {} bytes, expected {}",
                    folder.display(),
                    map.len(),
                    expected.bytes
                )));
            }
            let found = Checksum::of(&map);
            if found != *expected {
                return Err(Error::corrupt(format!(
                    "{}: file `{name}` has checksum {}, expected {}",
                    folder.display(),
                    found.xxh3,
                    expected.xxh3
                )));
            }
            Ok(())
        };
        let results: Vec<Result<()>> = self.files.par_iter().map(check).collect();
        results.into_iter().collect()
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

fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.contains(['/', '\\']) && name != ".." && name != "."
}

/// A folder of models, each a folder of versions.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// The store at `root`; the folder need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Store { root: root.into() }
    }

    /// The folder of the store.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The models of the store, sorted. A store that does not exist holds none.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn models(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for name in names_in(&self.root)? {
            if !self.versions(&name)?.is_empty() {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// The published versions of a model, ascending.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn versions(&self, model: &str) -> Result<Vec<u64>> {
        let folder = self.root.join(model);
        let mut versions: Vec<u64> = names_in(&folder)?
            .iter()
            .filter_map(|name| name.parse().ok())
            .filter(|v: &u64| folder.join(v.to_string()).join(MANIFEST).exists())
            .collect();
        versions.sort_unstable();
        Ok(versions)
    }

    /// The folder of one version.
    pub fn folder(&self, model: &str, version: u64) -> PathBuf {
        self.root.join(model).join(version.to_string())
    }

    /// Publishes a snapshot that `fill` writes: its files go to a folder that no reader looks at, which is synced and
    /// then renamed to the next free version. `fill` gets that folder and the version.
    ///
    /// # Errors
    /// What `fill` returns, `Invalid` for a name that cannot be a folder, `Io`. Nothing is published then.
    pub fn publish(&self, model: &str, fill: impl FnOnce(&Path, u64) -> Result<()>) -> Result<u64> {
        check_name(model)?;
        let parent = self.root.join(model);
        fs::create_dir_all(&parent).map_err(|e| Error::io(parent.display(), e))?;
        remove_abandoned(&parent)?;
        let staging = parent.join(format!("{STAGING}{}", std::process::id()));
        let published = (|| {
            let _ = fs::remove_dir_all(&staging);
            fs::create_dir(&staging).map_err(|e| Error::io(staging.display(), e))?;
            let version = self.versions(model)?.last().map_or(1, |v| v + 1);
            fill(&staging, version)?;
            let target = self.folder(model, version);
            if target.exists() {
                return Err(Error::conflict(format!("{}: published by somebody else meanwhile", target.display())));
            }
            fs::rename(&staging, &target).map_err(|e| Error::io(target.display(), e))?;
            files::sync_folder(&parent).map_err(|e| Error::io(parent.display(), e))?;
            Ok(version)
        })();
        if published.is_err() {
            let _ = fs::remove_dir_all(&staging);
        }
        published
    }
}

/// Removes what publications that were killed have left: folders named by processes that are gone.
fn remove_abandoned(parent: &Path) -> Result<()> {
    let processes = Path::new("/proc");
    if !processes.join("self").exists() {
        return Ok(());
    }
    for name in names_in(parent)? {
        if let Some(process) = name.strip_prefix(STAGING).filter(|p| !processes.join(p).exists()) {
            tracing::warn!(process, folder = %parent.join(&name).display(), "removing an unfinished publication");
            fs::remove_dir_all(parent.join(&name)).map_err(|e| Error::io(parent.join(&name).display(), e))?;
        }
    }
    Ok(())
}

/// Refuses a model name that cannot stand in a URL path and a folder name.
///
/// # Errors
/// `Invalid` with the name and the rule.
pub fn check_name(name: &str) -> Result<()> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if name.is_empty() || name.len() > 128 || name.starts_with('.') || !name.chars().all(allowed) {
        return Err(Error::invalid(format!(
            "model name `{name}`: expected 1 to 128 letters, digits, `_`, `-` or `.`, not starting with `.`"
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

    fn manifest(folder: &Path) -> Manifest {
        let sum = files::write_atomic(&folder.join("a.bin"), |out| out.write_all(b"abc")).unwrap();
        let files = BTreeMap::from([("a.bin".to_string(), sum)]);
        let provenance = Provenance::default();
        Manifest {
            format: FORMAT,
            name: "m".into(),
            version: 1,
            dimension: 2,
            items: 3,
            slots: 16,
            lists: 1,
            provenance,
            files,
        }
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

    #[test]
    fn publication_is_whole_or_absent_and_counts_up() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::new(root.path().join("store"));
        assert!(store.models().unwrap().is_empty());
        for expected in [1, 2] {
            let version = store
                .publish("m", |folder, version| {
                    assert_eq!(version, expected);
                    manifest(folder).write(folder)
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
        assert_eq!(fs::read_dir(root.path().join("store/m")).unwrap().count(), 2, "nothing half-written stays");
        fs::create_dir(root.path().join("store/m/3")).unwrap();
        assert_eq!(store.versions("m").unwrap(), [1, 2], "a folder without a manifest is no version");
        assert_eq!(store.models().unwrap(), ["m"]);
        for name in ["", "a/b", "..", ".x", "a b", "ü", &"x".repeat(129)] {
            assert_eq!(store.publish(name, |_, _| Ok(())).unwrap_err().kind(), Kind::Invalid, "{name}");
        }
    }
}
