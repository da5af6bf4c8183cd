//! Settings of an offline scoring job, and the paths of its output files.

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

/// Settings that all rows of a job share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobSettings {
    /// Task that is run for each row.
    pub task: Task,
    /// Name of the model.
    pub model: String,
    /// Version of the model.
    pub version: u64,
    /// Digest of the version's files.
    pub digest: String,
    /// Default request fields, as JSON, for rows that do not set them.
    pub request: String,
}

impl Purpose for JobSettings {
    fn difference(&self, others: &Self) -> Option<(&'static str, String, String)> {
        let reported = |terms: &JobSettings| {
            [
                ("task", format!("{:?}", terms.task)),
                ("model", format!("{:?}", terms.model)),
                ("version", format!("{:?}", (terms.version, &terms.digest))),
                ("request", format!("{:?}", terms.request)),
            ]
        };
        let mut both = reported(self).into_iter().zip(reported(others));
        both.find(|(here, there)| here != there).map(|((what, here), (_, there))| (what, here, there))
    }
}

impl JobFolder<JobSettings> {
    /// Returns the path of a unit's output file.
    pub fn output(&self, unit: usize) -> PathBuf {
        self.root().join(format!("{}.parquet", self.name(unit)))
    }

    /// Returns the path of a unit's problem file, which has one JSON line per problem and exists only if there are any. The
    /// problem file is published before the output file. Readers of data sets skip names that begin with an underscore.
    pub fn problems(&self, unit: usize) -> PathBuf {
        self.root().join(format!("_{}.problems.jsonl", self.name(unit)))
    }

    /// Returns whether a unit has its output file.
    pub fn is_done(&self, unit: usize) -> bool {
        self.output(unit).exists()
    }

    /// Returns the units without an output file.
    pub fn left(&self) -> Vec<usize> {
        (0..self.units().len()).filter(|&unit| !self.is_done(unit)).collect()
    }

    /// Removes the `_SUCCESS.json` of an earlier run if any unit lacks its output file.
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

    /// If all units have their output, sums their counts, writes `_SUCCESS.json` and removes temporary files of killed runs.
    ///
    /// # Errors
    /// `Invalid` if more rows have a problem than `limit` allows: no `_SUCCESS.json` is then written. `Corrupt` if an
    /// output file belongs to another job; `Io`.
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
