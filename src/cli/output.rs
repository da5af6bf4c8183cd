//! Output of commands to stdout.

use std::io::Write as _;

use serde_json::json;

use sterling_core::error::{Error, Result};
use sterling_core::logging::printable;
use sterling_telemetry::now;

/// Announces the address of a server. If logs are JSON, the announcement is a log line too, so that a log collector reads one
/// format.
pub(super) fn announce(is_json: bool, line: std::fmt::Arguments<'_>) -> Result<()> {
    if !is_json {
        return say(line);
    }
    let fields = json!({"message": line.to_string()});
    say(json!({"timestamp": now(), "level": "INFO", "fields": fields, "target": "sterling"}))
}

/// Writes a line to stdout. Writing to a closed pipe (`sterling inspect | head`) is not a failure. Terminal escapes are printed as
/// text, because names and reasons come from other machines.
pub(super) fn say(line: impl std::fmt::Display) -> Result<()> {
    let text = line.to_string();
    let shown: Vec<_> =
        text.split('\n').map(|line| line.split('\t').map(printable).collect::<Vec<_>>().join("\t")).collect();
    match writeln!(std::io::stdout().lock(), "{}", shown.join("\n")) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(Error::io("stdout", e)),
        _ => Ok(()),
    }
}
