//! What is scored, and where what becomes of it lies.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::counts::{Counts, ProblemLimit};
use super::questions::Task;
use crate::jobs::{JobFolder, Purpose};
use sterling_core::error::{Error, Result};
use sterling_storage::files;

const SUCCESS_FILE: &str = "_SUCCESS.json";

/// What is asked of every row of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobTerms {
    /// What is made of the rows.
    pub task: Task,
    /// The model's name.
    pub model: String,
    /// Its version.
    pub version: u64,
    /// The digest of the version's bytes.
    pub digest: String,
    /// What requests get that do not say, as JSON.
    pub request: String,
}

impl Purpose for JobTerms {
    fn difference(&self, others: &Self) -> Option<(&'static str, String, String)> {
        let told = |terms: &JobTerms| {
            [
                ("task", format!("{:?}", terms.task)),
                ("model", format!("{:?}", terms.model)),
                ("version", format!("{:?}", (terms.version, &terms.digest))),
                ("request", format!("{:?}", terms.request)),
            ]
        };
        let mut both = told(self).into_iter().zip(told(others));
        both.find(|(here, there)| here != there).map(|((what, here), (_, there))| (what, here, there))
    }
}

impl JobFolder<JobTerms> {
    /// The output file of a unit.
    pub fn output(&self, unit: usize) -> PathBuf {
        self.root().join(format!("{}.parquet", self.name(unit)))
    }

    /// The file of the problems of a unit, a JSON line each, if it has any; it is there before the output is. Readers of data sets skip names
    /// that begin with an underscore.
    pub fn problems(&self, unit: usize) -> PathBuf {
        self.root().join(format!("_{}.problems.jsonl", self.name(unit)))
    }

    /// True where a unit has its output.
    pub fn is_done(&self, unit: usize) -> bool {
        self.output(unit).exists()
    }

    /// The units that have no output yet.
    pub fn left(&self) -> Vec<usize> {
        (0..self.units().len()).filter(|&unit| !self.is_done(unit)).collect()
    }

    /// Says that the job is not done, where a unit has no output: a run before may have said that it was.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn reopen(&self) -> Result<()> {
        match self.left().is_empty() {
            true => Ok(()),
            false => self.retract(),
        }
    }

    fn retract(&self) -> Result<()> {
        let path = self.root().join(SUCCESS_FILE);
        match fs::remove_file(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.and_then(|()| files::sync_folder(self.root())).map_err(|e| Error::io(path.display(), e)),
        }
    }

    /// Counts what all units made, and writes it where none is left. What killed runs left behind is removed.
    ///
    /// # Errors
    /// `Invalid` where more rows have a problem than `limit` allows: then the job does not say that it is done; `Corrupt` with the file that
    /// is no output of this job; `Io`.
    pub fn finish(&self, limit: ProblemLimit) -> Result<Option<Counts>> {
        if !self.left().is_empty() {
            return Ok(None);
        }
        let mut counts = Counts::default();
        for unit in 0..self.units().len() {
            counts.add(&Counts::read(&self.output(unit), &self.problems(unit), &self.origin(unit)?)?);
        }
        self.sweep(&[])?;
        if let Err(e) = limit.check(&counts) {
            self.retract()?;
            return Err(e.within(self.root().display()));
        }
        let text = serde_json::to_vec_pretty(&counts).map_err(|e| Error::internal(format!("counts: {e}")))?;
        files::write_atomic(&self.root().join(SUCCESS_FILE), |out| out.write_all(&text))?;
        Ok(Some(counts))
    }
}
