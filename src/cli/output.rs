//! What commands write to stdout.

use std::io::Write as _;

use crate::error::{Error, Result};
use crate::telemetry::printable;

/// Writes text to stdout and ends the line. A reader that has gone (`sterling inspect | head`) is not a failure. Escapes of terminals are
/// written as text: names and reasons come from other machines.
pub(super) fn say(line: impl std::fmt::Display) -> Result<()> {
    let text = line.to_string();
    let shown: Vec<_> =
        text.split('\n').map(|line| line.split('\t').map(printable).collect::<Vec<_>>().join("\t")).collect();
    match writeln!(std::io::stdout().lock(), "{}", shown.join("\n")) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::io("stdout", e)),
        _ => Ok(()),
    }
}
