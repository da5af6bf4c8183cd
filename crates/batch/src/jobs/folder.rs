//! Folder of a job: the job's settings, its input files, and which units are done.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{self, Path, PathBuf};

use rayon::prelude::*;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use sterling_core::error::{Error, Kind, Result};
use sterling_snapshot::items::{RowFile, check_format};
use sterling_storage::files::{self, Checksum, Unchanged};

const JOB_FILE: &str = "_job.json";
/// Settings of a job, which apply to each of its units.
pub trait Purpose: Clone + Serialize + DeserializeOwned {
    /// Returns the first setting in which two jobs differ: the name of the setting, its value in `self` and its value
    /// in `others`.
    fn difference(&self, others: &Self) -> Option<(&'static str, String, String)>;
}

/// An input file of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unit {
    /// Absolute path of the file.
    pub input: PathBuf,
    /// Length and hash of the file.
    pub sum: Checksum,
    /// Partition columns from folder names such as `day=2`, which apply to all rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<(String, String)>,
}

impl Unit {
    /// Returns the file with its partition columns.
    pub fn file(&self) -> RowFile {
        RowFile { path: self.input.clone(), columns: self.columns.clone() }
    }
}

/// Everything that determines the outputs of a job; contents of `_job.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Job<T> {
    asked: T,
    /// Input files in order of their paths; each makes one output file.
    units: Vec<Unit>,
}

/// Folder of a job and its outputs.
#[derive(Clone, Debug)]
pub struct JobFolder<T> {
    root: PathBuf,
    job: Job<T>,
    /// True if this process hashed the inputs when it created the job.
    is_new: bool,
}

impl<T: Purpose> JobFolder<T> {
    /// Creates a job in a folder, or resumes the job of that folder. If several processes start at once, one writes the job file
    /// and the others read it. The process that creates the job hashes the inputs; [`JobFolder::check_all`] and
    /// [`JobFolder::check`] hash them again. A folder among the inputs stands for all files below it.
    ///
    /// # Errors
    /// `Conflict` with the first difference if the folder has another job. `Invalid` without inputs, if an input is listed twice
    /// or overlaps the output folder, and as [`RowFile::below`]. `Unsupported` with an input format that cannot be read;
    /// `NotFound` or `Io` with the path. No job is created after an error.
    pub fn open(root: &Path, asked: T, given: Vec<PathBuf>) -> Result<Self> {
        let mut inputs = Vec::with_capacity(given.len());
        let outputs = resolved(root)?;
        for input in given {
            let input = path::absolute(&input).map_err(|e| Error::io(input.display(), e))?;
            let kind = fs::metadata(&input).map_err(|e| Error::io(input.display(), e))?;
            let is_beside = if kind.is_dir() {
                outputs.starts_with(resolved(&input)?)
            } else {
                resolved(input.parent().unwrap_or(&input))? == outputs
            };
            if is_beside {
                let (root, input) = (root.display(), input.display());
                return Err(Error::invalid(format!(
                    "{root}: the outputs would be in the folder of the input {input}, expected another folder"
                )));
            }
            match kind.file_type() {
                kind if kind.is_dir() => inputs.extend(RowFile::below(&input)?),
                kind if kind.is_file() => inputs.push(RowFile::alone(input)),
                _ => return Err(Error::invalid(format!("{}: neither a file nor a folder", input.display()))),
            }
        }
        inputs.sort_by(|a, b| a.path.cmp(&b.path));
        if let Some(pair) = inputs.windows(2).find(|pair| pair[0].path == pair[1].path) {
            return Err(Error::invalid(format!("input {}: given twice, expected once", pair[0].path.display())));
        }
        if inputs.is_empty() {
            return Err(Error::invalid("no inputs, expected at least one file"));
        }
        if root.is_file() {
            return Err(Error::invalid(format!("{}: a file, expected a folder for the job's output", root.display())));
        }
        let path = root.join(JOB_FILE);
        let begun = read(&path)?;
        let is_new = begun.is_none();
        let job = match begun {
            Some(job) => job,
            None => {
                let unit = |file: &RowFile| {
                    let RowFile { path: input, columns } = file.clone();
                    check_format(&input)?;
                    Ok(Unit { sum: Checksum::of_file(&input)?, input, columns })
                };
                let units = inputs.par_iter().map(unit).collect::<Result<_>>()?;
                fs::create_dir_all(root).map_err(|e| Error::io(root.display(), e))?;
                create(&path, Job { asked: asked.clone(), units })?
            }
        };
        match difference(&job, &asked, &inputs)? {
            None => Ok(JobFolder { root: root.into(), job, is_new }),
            Some(difference) => Err(another(root, &difference)),
        }
    }

    /// Opens the existing job of a folder, without a check of its settings.
    ///
    /// # Errors
    /// `NotFound` if no job was started in the folder; `Corrupt` or `Io`.
    pub fn begun(root: &Path) -> Result<Self> {
        let job = read(&root.join(JOB_FILE))?;
        let job =
            job.ok_or_else(|| Error::not_found(format!("{}: no job was started in this folder", root.display())))?;
        Ok(JobFolder { root: root.into(), job, is_new: false })
    }

    /// Rejects settings that differ from the job's.
    ///
    /// # Errors
    /// `Conflict` with the first difference.
    pub fn check_terms(&self, asked: &T) -> Result<()> {
        terms_differ(&self.job, asked).map_or(Ok(()), |difference| Err(another(&self.root, &difference)))
    }

    /// Returns the path of the folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the settings of the job.
    pub fn asked(&self) -> &T {
        &self.job.asked
    }

    /// Returns the input files in order of their paths.
    pub fn units(&self) -> &[Unit] {
        &self.job.units
    }

    /// Verifies that no input has changed since the job was created.
    ///
    /// # Errors
    /// As [`JobFolder::check`], for the first changed input.
    pub fn check_all(&self) -> Result<()> {
        match self.is_new {
            true => Ok(()),
            false => (0..self.job.units.len()).try_for_each(|unit| self.check(unit).map(drop)),
        }
    }

    /// Verifies that an input has not changed since the job was created. After reading the input, the caller checks the returned
    /// [`Unchanged`] to detect a change in the meantime.
    ///
    /// # Errors
    /// `Conflict` if the input changed; `NotFound` or `Io` with its path.
    pub fn check(&self, unit: usize) -> Result<Unchanged> {
        let Unit { input, sum, .. } = &self.job.units[unit];
        let before = Unchanged::of([input.as_path()])?;
        let now = Checksum::of_file(input)?;
        match now == *sum {
            true => Ok(before),
            false => Err(Error::conflict(format!(
                "{}: another job was started in this folder: its input {} had {} bytes with hash {}, now {} bytes with hash {}",
                self.root.display(),
                input.display(),
                sum.bytes,
                sum.xxh3,
                now.bytes,
                now.xxh3
            ))),
        }
    }

    /// Returns the base name of a unit's output files.
    pub fn name(&self, unit: usize) -> String {
        let input = self.job.units[unit].input.to_string_lossy();
        format!("part-{unit:05}-{:016x}", xxh3_64(input.as_bytes()))
    }

    /// Returns the JSON that identifies the job's settings and the input of a unit; the unit's output stores this JSON
    /// as metadata.
    ///
    /// # Errors
    /// `Internal` if the job cannot be serialized.
    pub fn origin(&self, unit: usize) -> Result<String> {
        serde_json::to_string(&(&self.job.asked, &self.job.units[unit]))
            .map_err(|e| Error::internal(format!("job: {e}")))
    }

    /// Removes temporary files that killed workers left: those of the job, of its units, and of the file names in `others`.
    ///
    /// # Errors
    /// `Io` with the folder.
    pub fn sweep(&self, others: &[&str]) -> Result<()> {
        let mut left: Vec<String> = [JOB_FILE].iter().chain(others).map(|name| format!(".{name}.tmp-")).collect();
        left.extend([".part-".into(), "._part-".into()]);
        for entry in fs::read_dir(&self.root).map_err(|e| Error::io(self.root.display(), e))?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            // Errors are ignored: another worker may have removed the file, and a worker that still writes it finds the final
            // output in place.
            if left.iter().any(|start| name.starts_with(start)) {
                let _ = fs::remove_file(entry.path()).or_else(|_| fs::remove_dir_all(entry.path()));
            }
        }
        Ok(())
    }
}

/// Resolves symbolic links of a path whose last components may not exist yet.
fn resolved(path: &Path) -> Result<PathBuf> {
    let found = match fs::canonicalize(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => path::absolute(path),
        found => return found.map_err(|e| Error::io(path.display(), e)),
    };
    let complete = found.map_err(|e| Error::io(path.display(), e))?;
    match (complete.parent(), complete.file_name()) {
        (Some(parent), Some(name)) => Ok(resolved(parent)?.join(name)),
        _ => Err(Error::not_found(format!("{}: a part of the path does not exist", path.display()))),
    }
}

fn another(root: &Path, difference: &str) -> Error {
    Error::conflict(format!(
        "{}: another job was started in this folder: {difference}; run the same command again to resume that job, or choose another folder",
        root.display()
    ))
}

fn read<T: Purpose>(path: &Path) -> Result<Option<Job<T>>> {
    match fs::read(path).map_err(|e| Error::io(path.display(), e)) {
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .map_err(|e| Error::corrupt(format!("{}: not a job: {e}", path.display()))),
        Err(e) if e.kind() == Kind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Writes the job file atomically unless another process was first; returns the job that is then in place.
fn create<T: Purpose>(path: &Path, job: Job<T>) -> Result<Job<T>> {
    let text = serde_json::to_vec_pretty(&job).map_err(|e| Error::internal(format!("job: {e}")))?;
    let complete = files::temporary(path);
    let written = File::create(&complete).and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()));
    written.map_err(|e| Error::io(complete.display(), e))?;
    let linked = fs::hard_link(&complete, path);
    let placed = match &linked {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => {
            // The file system has no hard links. If two processes create different jobs at the same instant, the metadata of the
            // outputs reveal it at the end.
            fs::rename(&complete, path)
        }
        _ => fs::remove_file(&complete),
    };
    if let Err(e) = placed {
        // The file of another process may be in place, and the end of that job may have removed this temporary file.
        return read(path)?.ok_or_else(|| Error::io(path.display(), e));
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    files::sync_folder(folder).map_err(|e| Error::io(folder.display(), e))?;
    match linked {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(read(path)?.unwrap_or(job)),
        _ => Ok(job),
    }
}

/// Returns the first difference between the existing job and the requested one.
fn difference<T: Purpose>(begun: &Job<T>, asked: &T, inputs: &[RowFile]) -> Result<Option<String>> {
    if let Some(difference) = terms_differ(begun, asked) {
        return Ok(Some(difference));
    }
    if begun.units.len() != inputs.len() {
        return Ok(Some(differ("number of inputs", &begun.units.len(), &inputs.len())));
    }
    for (unit, RowFile { path: input, .. }) in begun.units.iter().zip(inputs) {
        // Jobs created by an earlier release may name inputs by relative paths.
        if unit.input != *input && resolved(&unit.input).ok() != Some(resolved(input)?) {
            return Ok(Some(differ("input", &unit.input.display(), &input.display())));
        }
        let bytes = fs::metadata(input).map_err(|e| Error::io(input.display(), e))?.len();
        if unit.sum.bytes != bytes {
            return Ok(Some(differ(&format!("input {}, in bytes,", input.display()), &unit.sum.bytes, &bytes)));
        }
    }
    Ok(None)
}

fn terms_differ<T: Purpose>(begun: &Job<T>, asked: &T) -> Option<String> {
    begun.asked.difference(asked).map(|(what, begun, asked)| differ(what, &begun, &asked))
}

fn differ(what: &str, begun: &dyn std::fmt::Display, asked: &dyn std::fmt::Display) -> String {
    format!("the other job's {what} is {begun}, this job's is {asked}")
}
