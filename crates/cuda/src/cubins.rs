//! On-disk cache of compiled kernels, keyed by all inputs of the compilation.
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `STCUBIN1` |
//! | 16 | digest of the inputs: architecture, compiler, options, text |
//! | 8 | size of the code in bytes |
//! | 8 | checksum of the code, XXH3 |
//! | the rest | the code |
//!
//! A file that is truncated or damaged, or whose header does not match its name, counts as missing and is rewritten.
//! Files are written under a temporary name and renamed, so no reader sees a partial file.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::sources::{Source, whole};
use sterling_core::error::{Error, Result};

const MAGIC: &[u8; 8] = b"STCUBIN1";
const HEAD_BYTES: usize = 40;

/// Inputs of a compilation.
#[derive(Clone, Debug)]
pub struct Compilation {
    /// File name of the source.
    pub name: &'static str,
    /// Source text, including all headers.
    pub text: String,
    /// Architecture, such as `sm_90`.
    pub architecture: String,
    /// Further compiler options.
    pub options: Vec<String>,
    /// Name and version of the compiler.
    pub compiler: String,
}

impl Compilation {
    /// Creates the compilation of a kernel source for an architecture.
    ///
    /// # Errors
    /// `Invalid` for a malformed architecture.
    pub fn new(source: &Source, architecture: &str, compiler: &str) -> Result<Self> {
        let digits = architecture.strip_prefix("sm_").unwrap_or_default();
        let is_one = digits.len() >= 2 && digits.len() <= 4 && digits.chars().all(|c| c.is_ascii_alphanumeric());
        if !is_one || !digits.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(Error::invalid(format!("architecture: got `{architecture}`, expected a name such as sm_90")));
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
            // Length prefixes separate the fields.
            digest.update(&(part.len() as u64).to_le_bytes());
            digest.update(part.as_bytes());
        }
        digest.digest128()
    }
}

/// Folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cubins {
    folder: PathBuf,
}

impl Cubins {
    /// Creates a cache in a folder, which need not exist yet.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Cubins { folder: folder.into() }
    }

    /// Creates a cache in the folder `STERLING_KERNELS`, otherwise in `sterling/kernels` of the user's cache; `None`
    /// without a home folder.
    pub fn of_user() -> Option<Self> {
        let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = || named("XDG_CACHE_HOME").or_else(|| named("HOME").map(|home| home.join(".cache")));
        named("STERLING_KERNELS").or_else(|| cache().map(|cache| cache.join("sterling/kernels"))).map(Cubins::new)
    }

    /// Returns the path of the file with a compilation's code.
    pub fn place(&self, recipe: &Compilation) -> PathBuf {
        let stem = recipe.name.trim_end_matches(".cu");
        self.folder.join(format!("{stem}-{}-{:032x}.cubin", recipe.architecture, recipe.digest()))
    }

    /// Reads the code of a compilation; `None` if it is not cached or the file is invalid.
    pub fn read(&self, recipe: &Compilation) -> Option<Vec<u8>> {
        let bytes = fs::read(self.place(recipe)).ok()?;
        let (head, code) = bytes.split_at_checked(HEAD_BYTES)?;
        let is_it = head == header(recipe, code);
        if !is_it {
            tracing::warn!(file = %self.place(recipe).display(), "cached kernel file is damaged or of another compilation; compiling the kernel again");
        }
        is_it.then(|| code.to_vec())
    }

    /// Stores the code of a compilation.
    ///
    /// # Errors
    /// `Io` or `NoSpace` if the file cannot be written.
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

    /// Returns the code from the cache, or compiles it. A failure to write the cache file is ignored.
    ///
    /// # Errors
    /// Errors of `compile`.
    pub fn get(&self, recipe: &Compilation, compile: impl FnOnce(&Compilation) -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        if let Some(code) = self.read(recipe) {
            return Ok(code);
        }
        let code = compile(recipe)?;
        if let Err(e) = self.write(recipe, &code) {
            tracing::warn!(error = %e, "compiled kernels could not be cached; the next start compiles them again");
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
    fn cache_names_depend_on_all_compiler_inputs() {
        let cubins = Cubins::new("kernels");
        let mut places = vec![cubins.place(&recipe())];
        places.push(cubins.place(&Compilation::new(&KERNELS[0], "sm_80", "nvrtc 13.0").unwrap()));
        places.push(cubins.place(&Compilation::new(&KERNELS[0], "sm_90", "nvrtc 13.1").unwrap()));
        places.push(cubins.place(&Compilation::new(&KERNELS[1], "sm_90", "nvrtc 13.0").unwrap()));
        places.push(cubins.place(&Compilation { text: recipe().text + " ", ..recipe() }));
        let mut options = recipe().options;
        options.push("--fmad=false".into());
        places.push(cubins.place(&Compilation { options, ..recipe() }));
        // The same characters, split elsewhere.
        let options = vec!["--gpu-architecture=sm_90--std".into(), "=c++17".into()];
        places.push(cubins.place(&Compilation { options, ..recipe() }));
        let count = places.len();
        places.sort();
        places.dedup();
        assert_eq!(places.len(), count, "{places:?}");
    }

    #[test]
    fn damaged_and_foreign_files_are_compiled_again() {
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
        // The file of another compilation under this name.
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
    fn an_unwritable_cache_folder_only_disables_caching() {
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
    fn architectures_are_parsed_or_rejected() {
        for known in ["sm_80", "sm_90a", "sm_100", "sm_121"] {
            assert!(Compilation::new(&KERNELS[0], known, "").is_ok(), "{known}");
        }
        for invalid in ["", "sm_", "80", "sm_9", "compute_90", "sm_90/../x", "sm_90 --x", "sm_ab", "sm_12345"] {
            assert!(Compilation::new(&KERNELS[0], invalid, "").is_err(), "{invalid}");
        }
    }
}
