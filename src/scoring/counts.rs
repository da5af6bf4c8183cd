//! What became of the rows of a job.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Under which key an output's metadata say what it follows from.
pub(super) const ORIGIN: &str = "sterling";

/// A row without an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Problem {
    /// Its row of the input, from 0, empty lines not counted.
    pub(super) row: u64,
    /// Its id, where it could be read.
    pub(super) id: Option<i64>,
    /// The kind of the error.
    pub(super) code: String,
    /// What came and what was expected.
    pub(super) reason: String,
}

/// What became of the rows of a job. Rows in are rows scored and problems.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Rows of the input files.
    pub rows: u64,
    /// Rows with an answer.
    pub scored: u64,
    /// Rows without, by the kind of the error.
    pub problems: BTreeMap<String, u64>,
}

impl Counts {
    /// Adds those of another unit.
    pub fn add(&mut self, other: &Counts) {
        self.rows += other.rows;
        self.scored += other.scored;
        for (code, count) in &other.problems {
            *self.problems.entry(code.clone()).or_default() += count;
        }
    }

    /// The counts of a unit, from its files, which say that they come from `origin`.
    pub(super) fn read(output: &Path, problems: &Path, origin: &str) -> Result<Self> {
        let open = |path: &Path| File::open(path).map_err(|e| Error::io(path.display(), e));
        let corrupt = |path: &Path, e: &dyn std::fmt::Display| Error::corrupt(format!("{}: {e}", path.display()));
        let reader = ParquetRecordBatchReaderBuilder::try_new(open(output)?).map_err(|e| corrupt(output, &e))?;
        let metadata = reader.metadata().file_metadata();
        let said = metadata.key_value_metadata().and_then(|pairs| pairs.iter().find(|pair| pair.key == ORIGIN));
        if said.and_then(|pair| pair.value.as_deref()) != Some(origin) {
            let what = "the output of another job; remove it to have it made by this one";
            return Err(corrupt(output, &what));
        }
        let scored = metadata.num_rows() as u64;
        let mut counts = Counts { rows: scored, scored, ..Counts::default() };
        for line in BufReader::new(open(problems)?).lines() {
            let line = line.map_err(|e| Error::io(problems.display(), e))?;
            let problem: Problem = serde_json::from_str(&line).map_err(|e| corrupt(problems, &e))?;
            *counts.problems.entry(problem.code).or_default() += 1;
            counts.rows += 1;
        }
        Ok(counts)
    }
}
