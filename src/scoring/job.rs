//! What is scored, and where its parts lie.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::run::Counts;
use crate::error::{Error, Kind, Result};
use crate::files::{self, Checksum};

const JOB_FILE: &str = "_job.json";
const SUCCESS_FILE: &str = "_SUCCESS.json";

/// Everything that the answers of a job follow from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// The model's name.
    pub model: String,
    /// Its version.
    pub version: u64,
    /// The digest of the version's bytes.
    pub digest: String,
    /// What requests get that do not say, as JSON.
    pub defaults: String,
    /// The input files, each of which makes one output file.
    pub units: Vec<Unit>,
}

/// An input file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unit {
    /// Its path as it was given.
    pub input: PathBuf,
    /// Its length and hash.
    pub sum: Checksum,
}

impl Unit {
    /// The unit of an input file.
    ///
    /// # Errors
    /// `NotFound` or `Io` with the path.
    pub fn of(input: PathBuf) -> Result<Self> {
        Ok(Unit { sum: Checksum::of_file(&input)?, input })
    }
}

/// The folder that a job writes to.
#[derive(Clone, Debug)]
pub struct JobFolder {
    root: PathBuf,
    job: Job,
}

impl JobFolder {
    /// Begins the job in a folder, or goes on with it where it was begun there.
    ///
    /// # Errors
    /// `Conflict` with the first difference where another job was begun there; `Io`.
    pub fn open(root: &Path, job: Job) -> Result<Self> {
        fs::create_dir_all(root).map_err(|e| Error::io(root.display(), e))?;
        let path = root.join(JOB_FILE);
        match fs::read(&path).map_err(|e| Error::io(path.display(), e)) {
            Ok(text) => {
                let begun: Job = serde_json::from_slice(&text)
                    .map_err(|e| Error::corrupt(format!("{}: not a job: {e}", path.display())))?;
                if let Some(difference) = difference(&begun, &job) {
                    return Err(Error::conflict(format!(
                        "{}: another job was begun here: {difference}; go on with the same, or choose another folder",
                        root.display()
                    )));
                }
            }
            Err(e) if e.kind() == Kind::NotFound => {
                let text = serde_json::to_vec_pretty(&job).map_err(|e| Error::internal(format!("job: {e}")))?;
                files::write_atomic(&path, |out| out.write_all(&text))?;
            }
            Err(e) => return Err(e),
        }
        Ok(JobFolder { root: root.into(), job })
    }

    /// The job.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// The output file of a unit.
    pub fn output(&self, unit: usize) -> PathBuf {
        self.root.join(format!("{}.parquet", self.name(unit)))
    }

    /// The file of the problems of a unit, a JSON line each; it is there before the output is.
    pub fn problems(&self, unit: usize) -> PathBuf {
        self.root.join(format!("{}.problems.jsonl", self.name(unit)))
    }

    fn name(&self, unit: usize) -> String {
        let input = self.job.units[unit].input.to_string_lossy();
        format!("part-{unit:05}-{:016x}", xxh3_64(input.as_bytes()))
    }

    /// The units that have no output yet.
    pub fn left(&self) -> Vec<usize> {
        (0..self.job.units.len()).filter(|&unit| !self.output(unit).exists()).collect()
    }

    /// Counts what all units made, and writes it where none is left.
    ///
    /// # Errors
    /// `Corrupt` with the file that is no output of a job; `Io`.
    pub fn finish(&self) -> Result<Option<Counts>> {
        if !self.left().is_empty() {
            return Ok(None);
        }
        let mut counts = Counts::default();
        for unit in 0..self.job.units.len() {
            counts.add(&Counts::read(&self.output(unit), &self.problems(unit))?);
        }
        let text = serde_json::to_vec_pretty(&counts).map_err(|e| Error::internal(format!("counts: {e}")))?;
        files::write_atomic(&self.root.join(SUCCESS_FILE), |out| out.write_all(&text))?;
        Ok(Some(counts))
    }
}

/// What differs first between the job that was begun and the one that is asked for.
fn difference(begun: &Job, asked: &Job) -> Option<String> {
    let told = |what: &str, begun: &dyn std::fmt::Debug, asked: &dyn std::fmt::Debug| {
        Some(format!("its {what} is {begun:?}, asked for is {asked:?}"))
    };
    if begun.model != asked.model {
        return told("model", &begun.model, &asked.model);
    }
    if (begun.version, &begun.digest) != (asked.version, &asked.digest) {
        return told("version", &(begun.version, &begun.digest), &(asked.version, &asked.digest));
    }
    if begun.defaults != asked.defaults {
        return told("request", &begun.defaults, &asked.defaults);
    }
    if begun.units.len() != asked.units.len() {
        return told("number of inputs", &begun.units.len(), &asked.units.len());
    }
    let (begun, asked) = begun.units.iter().zip(&asked.units).find(|(begun, asked)| begun != asked)?;
    told("input", begun, asked)
}
