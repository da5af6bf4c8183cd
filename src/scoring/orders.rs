//! The worker of an engine: numbers of units come in, a line each, and a line of JSON goes out for each.
//!
//! | line in | line out |
//! |---|---|
//! | | first of all `{"ready": true, "units": 16}`: the model is loaded, the job begun |
//! | `2` | `{"unit": 2, "done": true, "counts": {..}}`, without `counts` where it was done before |
//! | what fails, or is no number of a unit | `{"unit": 2, "done": false, "code": "..", "retryable": false, "error": ".."}` |
//! | nothing | nothing |

use std::io::{BufRead, Write};

use serde_json::{Value, json};

use super::counts::Counts;
use super::job::JobFolder;
use super::lines::next_line;
use super::run::Scorer;
use crate::error::{Error, Result};
use crate::registry::is_passing;

/// Longest line that comes in, in bytes.
const ORDER_BYTES_MAX: usize = 64;

/// Scores the units that are named until there are no more, or nobody reads what became of them.
///
/// # Errors
/// The first of what failed; `Io` where the lines cannot be read or written.
pub fn serve(folder: &JobFolder, scorer: &Scorer, mut from: impl BufRead, mut to: impl Write) -> Result<()> {
    let mut tell =
        |told: Value| writeln!(to, "{told}").and_then(|()| to.flush()).map_err(|e| Error::io("standard output", e));
    tell(json!({"ready": true, "units": folder.units().len()}))?;
    let mut failed = None;
    loop {
        let mut line = Vec::new();
        let read = next_line(&mut from, &mut line, ORDER_BYTES_MAX).map_err(|e| Error::io("standard input", e))?;
        if read == 0 {
            return failed.map_or(Ok(()), Err);
        }
        let line = String::from_utf8_lossy(&line);
        let order = line.trim();
        if order.is_empty() {
            continue;
        }
        let unit = order.parse().map_err(|_| Error::invalid(format!("unit `{order}`: expected the number of a file")));
        let told = match unit.and_then(|unit| Ok((unit, scorer.order(folder, unit)?))) {
            Ok((unit, Some(counts))) => json!({"unit": unit, "done": true, "counts": counts}),
            Ok((unit, None)) => json!({"unit": unit, "done": true}),
            Err(e) => {
                let unit = order.parse::<u64>().map_or_else(|_| json!(order), |unit| json!(unit));
                let (code, retryable) = (e.kind().name(), is_passing(e.kind()));
                let told =
                    json!({"unit": unit, "done": false, "code": code, "retryable": retryable, "error": e.to_string()});
                failed.get_or_insert(e);
                told
            }
        };
        tell(told)?;
    }
}

impl Scorer {
    /// Scores a unit for somebody who tells of many: nothing where it is done, and not over an input that has changed.
    ///
    /// # Errors
    /// As [`Scorer::score`] and [`JobFolder::check`]; `Invalid` for a number that no unit has.
    pub fn order(&self, folder: &JobFolder, unit: usize) -> Result<Option<Counts>> {
        let units = folder.units().len();
        if unit >= units {
            return Err(Error::invalid(format!("unit {unit}: expected the number of a file, 0 to {}", units - 1)));
        }
        if folder.is_done(unit) {
            return Ok(None);
        }
        folder.check(unit)?;
        self.score(folder, unit, &|_| ()).map(Some)
    }
}
