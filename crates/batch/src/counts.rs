//! Row counts of a job and the problems of rows that could not be scored.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::str::FromStr;

use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde::{Deserialize, Serialize};

use sterling_core::error::{Error, Result};

/// Key of an output's Parquet metadata that identifies the job and input it was computed from.
pub(super) const ORIGIN: &str = "sterling";
/// Key of the Parquet metadata that holds the number of rows with a problem.
pub(super) const PROBLEMS: &str = "sterling.problems";

/// A row without an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Problem {
    /// Row number in the input, from 0; blank lines are no rows.
    pub(super) row: u64,
    /// Line of the row in JSON lines, from 1; blank lines count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) line: Option<u64>,
    /// Id of the row, if it could be parsed.
    pub(super) id: Option<i64>,
    /// Kind of the error.
    pub(super) code: String,
    /// Received and expected values.
    pub(super) reason: String,
}

/// Row counts of a job: input rows are scored rows plus problems.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Rows of the input files.
    pub rows: u64,
    /// Rows with an answer.
    pub scored: u64,
    /// Rows without an answer, by error kind.
    pub problems: BTreeMap<String, u64>,
}

impl Counts {
    /// Adds the counts of another unit.
    pub fn add(&mut self, other: &Counts) {
        self.rows += other.rows;
        self.scored += other.scored;
        for (code, count) in &other.problems {
            *self.problems.entry(code.clone()).or_default() += count;
        }
    }

    /// Returns the number of rows with a problem of any kind.
    pub fn invalid(&self) -> u64 {
        self.problems.values().sum()
    }

    /// Reads the counts of a unit from its output files, and checks that these were written for `origin`.
    pub(super) fn read(output: &Path, problems: &Path, origin: &str) -> Result<Self> {
        let open = |path: &Path| File::open(path).map_err(|e| Error::io(path.display(), e));
        let corrupt = |path: &Path, e: &dyn std::fmt::Display| Error::corrupt(format!("{}: {e}", path.display()));
        let reader = ParquetRecordBatchReaderBuilder::try_new(open(output)?).map_err(|e| corrupt(output, &e))?;
        let metadata = reader.metadata().file_metadata();
        let pairs = metadata.key_value_metadata();
        let reported = |key| pairs?.iter().find(|pair| pair.key == key)?.value.as_deref();
        let count = reported(PROBLEMS).and_then(|count| count.parse::<u64>().ok());
        let Some(count) = count.filter(|_| reported(ORIGIN) == Some(origin)) else {
            let what = "the output of another job; remove it to rebuild it";
            return Err(corrupt(output, &what));
        };
        let scored = metadata.num_rows() as u64;
        let mut counts = Counts { rows: scored + count, scored, ..Counts::default() };
        if count == 0 {
            return Ok(counts);
        }
        for line in BufReader::new(open(problems)?).lines() {
            let line = line.map_err(|e| Error::io(problems.display(), e))?;
            let problem: Problem = serde_json::from_str(&line).map_err(|e| corrupt(problems, &e))?;
            *counts.problems.entry(problem.code).or_default() += 1;
        }
        match counts.invalid() == count {
            true => Ok(counts),
            false => {
                let what = format!("{} problems, but {} counts {count} of them", counts.invalid(), output.display());
                Err(corrupt(problems, &what))
            }
        }
    }
}

/// Limit on the rows of a job with a problem: a number, or a percentage of all rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ProblemLimit {
    /// Maximum number of rows with a problem.
    Rows(u64),
    /// Maximum percentage of rows with a problem among all rows.
    Percent(f64),
}

impl ProblemLimit {
    /// Returns the maximum number of rows with a problem among `rows`.
    pub fn most(self, rows: u64) -> u64 {
        match self {
            ProblemLimit::Rows(rows) => rows,
            // Floating-point error must not round an exact percentage down (2.3 is stored as slightly less).
            ProblemLimit::Percent(percent) => (rows as f64 * percent / 100.0 * (1.0 + 1e-12)) as u64,
        }
    }

    /// Rejects counts with more problems than the limit.
    ///
    /// # Errors
    /// `Invalid` with both numbers.
    pub(super) fn check(self, counts: &Counts) -> Result<()> {
        let most = self.most(counts.rows);
        let (invalid, rows) = (counts.invalid(), counts.rows);
        match invalid <= most {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "{invalid} of {rows} rows have a problem, expected at most {most}: see the `_*.problems.jsonl` files of the output; all other rows are scored"
            ))),
        }
    }
}

impl FromStr for ProblemLimit {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let expected = || format!("got `{text}`, expected a number of rows such as 100 or a share such as 0.5%");
        let limit = match text.strip_suffix('%') {
            Some(percent) => percent.parse().ok().filter(|p| (0.0..=100.0).contains(p)).map(ProblemLimit::Percent),
            None => text.parse().ok().map(ProblemLimit::Rows),
        };
        limit.ok_or_else(expected)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn problems_above_the_limit_are_rejected() {
        let counts =
            |rows, invalid| Counts { rows, scored: rows - invalid, problems: [("invalid".into(), invalid)].into() };
        for (limit, rows, invalid, is_within) in [
            ("0", 10, 0, true),
            ("0", 10, 1, false),
            ("6", 10, 6, true),
            ("5", 10, 6, false),
            ("1%", 1000, 10, true),
            ("1%", 1000, 11, false),
            ("0.5%", 100, 1, false),
            ("100%", 3, 3, true),
            ("2.3%", 3000, 69, true),
            ("2.3%", 3000, 70, false),
            ("0%", 0, 0, true),
        ] {
            let limit: ProblemLimit = limit.parse().unwrap();
            assert_eq!(limit.check(&counts(rows, invalid)).is_ok(), is_within, "{limit:?} {rows} {invalid}");
        }
        for invalid in ["", "-1", "1.5", "101%", "-1%", "NaN%", "%", "many"] {
            assert!(invalid.parse::<ProblemLimit>().unwrap_err().contains("expected a number of rows"), "{invalid}");
        }
    }
}
