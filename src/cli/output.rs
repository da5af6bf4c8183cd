//! What commands write to stdout.

use std::io::Write as _;

use crate::error::{Error, Result};

/// Writes a line to stdout. A reader that has gone (`sterling inspect | head`) is not a failure.
pub(super) fn say(line: impl std::fmt::Display) -> Result<()> {
    match writeln!(std::io::stdout().lock(), "{line}") {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::io("stdout", e)),
        _ => Ok(()),
    }
}
