//! Worker protocol of processing engines: unit numbers on stdin, one per line, and one line of JSON per unit on stdout.
//!
//! | line in | line out |
//! |---|---|
//! | | first `{"ready": true, "units": 16}`: the model is loaded and the job is open |
//! | `2` | `{"unit": 2, "done": true, "counts": {..}}`, without `counts` if the unit was already done |
//! | a unit that fails, or an invalid number | `{"unit": 2, "done": false, "code": "..", "retryable": false, "error": ".."}` |
//! | an empty line | no line |

use std::io::{BufRead, Write};

use serde::Serialize;
use serde_json::{Value, json};

use super::lines::next_line;
use sterling_core::error::{Error, Result};

const ORDER_BYTES_MAX: usize = 64;

/// Processes the units whose numbers are read from `from` (one per line, below `units`) until the end of `from`, or
/// until `to` is closed. `run` processes one unit and returns its counts, or `None` if the unit was already done.
///
/// # Errors
/// The first error of a unit; `Io` if lines cannot be read or written.
pub fn serve<C: Serialize>(
    units: usize,
    mut run: impl FnMut(usize) -> Result<Option<C>>,
    mut from: impl BufRead,
    mut to: impl Write,
) -> Result<()> {
    let mut tell = |reported: Value| {
        writeln!(to, "{reported}").and_then(|()| to.flush()).map_err(|e| Error::io("standard output", e))
    };
    tell(json!({"ready": true, "units": units}))?;
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
        let reported = match unit.and_then(|unit| checked(unit, units)).and_then(|unit| Ok((unit, run(unit)?))) {
            Ok((unit, Some(counts))) => json!({"unit": unit, "done": true, "counts": counts}),
            Ok((unit, None)) => json!({"unit": unit, "done": true}),
            Err(e) => {
                let unit = order.parse::<u64>().map_or_else(|_| json!(order), |unit| json!(unit));
                let (code, retryable) = (e.kind().name(), e.kind().is_transient());
                let reported =
                    json!({"unit": unit, "done": false, "code": code, "retryable": retryable, "error": e.to_string()});
                failed.get_or_insert(e);
                reported
            }
        };
        tell(reported)?;
    }
}

/// Rejects a unit number that is not below `units`.
///
/// # Errors
/// `Invalid` with the valid range.
pub fn checked(unit: usize, units: usize) -> Result<usize> {
    match unit < units {
        true => Ok(unit),
        false => Err(Error::invalid(format!("unit {unit}: expected the number of a file, 0 to {}", units - 1))),
    }
}
