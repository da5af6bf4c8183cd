//! Compiled kernels on disk: a file for everything that determines it.
//!
//! | bytes | hold |
//! |---|---|
//! | 8 | `STCUBIN1` |
//! | 16 | the digest of what it was compiled from: architecture, compiler, options, text |
//! | 8 | bytes of the code |
//! | 8 | their checksum, XXH3 |
//! | the rest | the code |
//!
//! A file that says otherwise than its place, was cut short or damaged counts as missing, and is written anew. Files are written
//! beside their place and renamed, so that no reader sees half of one.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::sources::{Source, whole};
use sterling_core::error::{Error, Result};

const MAGIC: &[u8; 8] = b"STCUBIN1";
const HEAD_BYTES: usize = 40;

/// What code is made of.
#[derive(Clone, Debug)]
pub struct Compilation {
    /// The file's name.
    pub name: &'static str,
    /// Its text, with what it includes.
    pub text: String,
    /// The architecture, as `sm_90`.
    pub architecture: String,
    /// What else the compiler is told.
    pub options: Vec<String>,
    /// The compiler and its version.
    pub compiler: String,
}

impl Compilation {
    /// A file of kernels for an architecture.
    ///
    /// # Errors
    /// `Invalid` for an architecture that is none.
    pub fn new(source: &Source, architecture: &str, compiler: &str) -> Result<Self> {
        let digits = architecture.strip_prefix("sm_").unwrap_or_default();
        let is_one = digits.len() >= 2 && digits.len() <= 4 && digits.chars().all(|c| c.is_ascii_alphanumeric());
        if !is_one || !digits.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(Error::invalid(format!("architecture: got `{architecture}`, expected one like sm_90")));
        }
        Ok(Compilation {
            name: source.name,
            text: whole(source),
            architecture: architecture.to_owned(),
            options: vec![format!("--gpu-architecture={architecture}"), "--std=c++17".into()],
            compiler: compiler.to_owned(),
        })
    }

    fn digest(&self) -> u128 {
        let mut digest = Xxh3::new();
        let parts = [self.name, &self.architecture, &self.compiler, &self.text];
        for part in parts.into_iter().chain(self.options.iter().map(String::as_str)) {
            // Lengths keep parts from running into each other.
            digest.update(&(part.len() as u64).to_le_bytes());
            digest.update(part.as_bytes());
        }
        digest.digest128()
    }
}

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cubins {
    folder: PathBuf,
}

impl Cubins {
    /// Those of a folder, which need not be there yet.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Cubins { folder: folder.into() }
    }

    /// Those of the folder that `STERLING_KERNELS` names, else of `sterling/kernels` in the user's cache; none without a home.
    pub fn of_user() -> Option<Self> {
        let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = || named("XDG_CACHE_HOME").or_else(|| named("HOME").map(|home| home.join(".cache")));
        named("STERLING_KERNELS").or_else(|| cache().map(|cache| cache.join("sterling/kernels"))).map(Cubins::new)
    }

    /// Where the code of a recipe lies.
    pub fn place(&self, recipe: &Compilation) -> PathBuf {
        let stem = recipe.name.trim_end_matches(".cu");
        self.folder.join(format!("{stem}-{}-{:032x}.cubin", recipe.architecture, recipe.digest()))
    }

    /// The code of a recipe, where it is there and whole.
    pub fn read(&self, recipe: &Compilation) -> Option<Vec<u8>> {
        let bytes = fs::read(self.place(recipe)).ok()?;
        let (head, code) = bytes.split_at_checked(HEAD_BYTES)?;
        let is_it = head == header(recipe, code);
        if !is_it {
            tracing::warn!(file = %self.place(recipe).display(), "damaged or foreign, compiled anew");
        }
        is_it.then(|| code.to_vec())
    }

    /// Keeps the code of a recipe.
    ///
    /// # Errors
    /// `Io` or `NoSpace` where it cannot be written.
    pub fn write(&self, recipe: &Compilation, code: &[u8]) -> Result<()> {
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        let place = self.place(recipe);
        let failed = |path: &Path| {
            let path = path.display().to_string();
            move |e| Error::io(path, e)
        };
        fs::create_dir_all(&self.folder).map_err(failed(&self.folder))?;
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let beside = place.with_extension(format!("{}-{number}.part", std::process::id()));
        let bytes = [&header(recipe, code)[..], code].concat();
        let written = fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, &place)).map_err(failed(&place));
        if written.is_err() {
            let _ = fs::remove_file(&beside);
        }
        written
    }

    /// The code of a recipe, compiled where it is not there. Where it cannot be kept it serves all the same.
    ///
    /// # Errors
    /// As `compile`.
    pub fn get(&self, recipe: &Compilation, compile: impl FnOnce(&Compilation) -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        if let Some(code) = self.read(recipe) {
            return Ok(code);
        }
        let code = compile(recipe)?;
        if let Err(e) = self.write(recipe, &code) {
            tracing::warn!(error = %e, "compiled kernels are not kept");
        }
        Ok(code)
    }
}

fn header(recipe: &Compilation, code: &[u8]) -> Vec<u8> {
    let length = (code.len() as u64).to_le_bytes();
    [&MAGIC[..], &recipe.digest().to_le_bytes(), &length, &xxh3_64(code).to_le_bytes()].concat()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::sources::KERNELS;

    fn recipe() -> Compilation {
        Compilation::new(&KERNELS[0], "sm_90", "nvrtc 13.0").unwrap()
    }

    #[test]
    fn code_is_compiled_once_and_read_from_then_on() {
        let folder = tempfile::tempdir().unwrap();
        let cubins = Cubins::new(folder.path().join("made/by/need"));
        let code = vec![7u8; 5000];
        assert_eq!(cubins.get(&recipe(), |_| Ok(code.clone())).unwrap(), code);
        let never = |_: &Compilation| -> Result<Vec<u8>> { panic!("compiled again") };
        assert_eq!(cubins.get(&recipe(), never).unwrap(), code);
        assert_eq!(fs::read_dir(cubins.folder).unwrap().count(), 1, "something else was left");
    }

    #[test]
    fn what_determines_code_names_it() {
        let cubins = Cubins::new("kernels");
        let mut places = vec![cubins.place(&recipe())];
        places.push(cubins.place(&Compilation::new(&KERNELS[0], "sm_80", "nvrtc 13.0").unwrap()));
        places.push(cubins.place(&Compilation::new(&KERNELS[0], "sm_90", "nvrtc 13.1").unwrap()));
        places.push(cubins.place(&Compilation::new(&KERNELS[1], "sm_90", "nvrtc 13.0").unwrap()));
        places.push(cubins.place(&Compilation { text: recipe().text + " ", ..recipe() }));
        let mut options = recipe().options;
        options.push("--fmad=false".into());
        places.push(cubins.place(&Compilation { options, ..recipe() }));
        // The same letters, parted elsewhere.
        let options = vec!["--gpu-architecture=sm_90--std".into(), "=c++17".into()];
        places.push(cubins.place(&Compilation { options, ..recipe() }));
        let count = places.len();
        places.sort();
        places.dedup();
        assert_eq!(places.len(), count, "{places:?}");
    }

    #[test]
    fn damaged_and_foreign_files_are_compiled_anew() {
        let folder = tempfile::tempdir().unwrap();
        let cubins = Cubins::new(folder.path());
        let (code, place) = ((0..200u8).collect::<Vec<u8>>(), cubins.place(&recipe()));
        cubins.write(&recipe(), &code).unwrap();
        let whole = fs::read(&place).unwrap();
        let mut broken: Vec<Vec<u8>> = (0..whole.len()).map(|n| whole[..n].to_vec()).collect();
        broken.extend((0..whole.len()).map(|n| {
            let mut flipped = whole.clone();
            flipped[n] ^= 1 << (n % 8);
            flipped
        }));
        broken.push([&whole[..], b"more"].concat());
        // Another recipe's file in this place.
        let other = Compilation::new(&KERNELS[1], "sm_90", "nvrtc 13.0").unwrap();
        cubins.write(&other, &code).unwrap();
        broken.push(fs::read(cubins.place(&other)).unwrap());
        for (n, bytes) in broken.into_iter().enumerate() {
            fs::write(&place, bytes).unwrap();
            assert_eq!(cubins.read(&recipe()), None, "broken file {n}");
        }
        assert_eq!(cubins.get(&recipe(), |_| Ok(code.clone())).unwrap(), code);
        assert_eq!(cubins.read(&recipe()), Some(code));
    }

    #[test]
    fn a_folder_that_cannot_be_written_costs_the_keeping_alone() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "no folder").unwrap();
        let cubins = Cubins::new(file.join("kernels"));
        assert_eq!(cubins.get(&recipe(), |_| Ok(vec![1, 2])).unwrap(), [1, 2]);
        assert!(cubins.write(&recipe(), &[1]).is_err());
        let refused = Error::internal("no such compiler");
        assert!(cubins.get(&recipe(), |_| Err(refused)).is_err());
    }

    #[test]
    fn architectures_are_named_or_refused() {
        for known in ["sm_80", "sm_90a", "sm_100", "sm_121"] {
            assert!(Compilation::new(&KERNELS[0], known, "").is_ok(), "{known}");
        }
        for wrong in ["", "sm_", "80", "sm_9", "compute_90", "sm_90/../x", "sm_90 --x", "sm_ab", "sm_12345"] {
            assert!(Compilation::new(&KERNELS[0], wrong, "").is_err(), "{wrong}");
        }
    }
}
