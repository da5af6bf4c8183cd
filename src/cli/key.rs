//! `sterling key`.

use std::fs::OpenOptions;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;

use super::output::say;
use super::store::local_path;
use sterling_core::error::{Error, Result};
use sterling_server::http::{NewKey, Role, check_keys, new_key};

/// Arguments of `sterling key`.
#[derive(Debug, clap::Args)]
pub(super) struct Key {
    /// Name of the key's owner, in logs and in the file
    name: String,
    /// Permissions of the key
    #[arg(long, default_value = "read")]
    role: KeyRole,
    /// Model that the key may use; repeatable [default: all]
    #[arg(long)]
    model: Vec<String>,
    /// Requests per second that each server process admits [default: unlimited]
    #[arg(long, value_name = "N")]
    rate: Option<f64>,
    /// Requests that may arrive at once; default: those of one second
    #[arg(long, value_name = "N", requires = "rate")]
    burst: Option<f64>,
    /// Key of a router: servers share their workers and memory among the router's clients
    #[arg(long)]
    router: bool,
    /// Append the entry to this file, which servers reload automatically, and print only the key
    #[arg(long, value_name = "FILE", value_parser = local_path())]
    file: Option<PathBuf>,
}

/// Roles of access keys.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum KeyRole {
    /// Retrievals and all other calls that change nothing
    Read,
    /// Calls of `read`, and changes of items
    Write,
    /// Calls of `write`, and changes of versions and labels, and merges
    Admin,
}

impl Key {
    pub(super) fn run(self) -> Result<()> {
        let role = match self.role {
            KeyRole::Read => Role::Read,
            KeyRole::Write => Role::Write,
            KeyRole::Admin => Role::Admin,
        };
        let key = new_key(&self.name, role, &self.model, self.rate, self.burst)?;
        let NewKey { secret, entry } = if self.router { key.for_router() } else { key };
        let Some(path) = self.file else {
            return say(format_args!("{secret}\n\n{entry}"));
        };
        let invalid = |e| Error::io(path.display(), e);
        let mut file =
            OpenOptions::new().read(true).append(true).create(true).mode(0o640).open(&path).map_err(invalid)?;
        let mut complete = Vec::new();
        file.read_to_end(&mut complete).map_err(invalid)?;
        let there = complete.len();
        complete.extend_from_slice(format!("\n{entry}").as_bytes());
        check_keys(&path, &complete)?;
        // Writes the entry in one call, because a server may read the file at any time.
        file.write_all(&complete[there..]).map_err(invalid)?;
        say(format_args!("{secret}"))
    }
}
