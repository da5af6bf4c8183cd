//! Options of update streams.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use sterling_core::error::{Error, Result};

const REPLICAS_MAX: usize = 5;
const PREFIX_BYTES_MAX: usize = 64;

/// Update streams on NATS JetStream, in builds with the feature `nats` (part of `full`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StreamOptions {
    /// Copies that a stream must keep of each message, and number of copies of a new stream, 1 to 5.
    pub replicas: usize,
    /// Monitoring addresses of the brokers, `http://HOST:8222` each. At startup every broker must report that it
    /// syncs acknowledged messages. Without any, the server warns and does not check.
    pub monitors: Vec<String>,
    /// Prefix of stream names (`PREFIX-MODEL`) and subjects (`PREFIX.MODEL`), so that installations can share
    /// brokers.
    pub prefix: String,
    /// Credentials file: `USER:PASSWORD`, a token, an nkey seed, or the output of `nsc generate creds`. It is
    /// read at every connection and takes precedence over the addresses.
    #[schema(value_type = Option<String>)]
    pub credentials: Option<PathBuf>,
}

impl Default for StreamOptions {
    fn default() -> Self {
        StreamOptions { replicas: 1, monitors: Vec::new(), prefix: "sterling".into(), credentials: None }
    }
}

impl StreamOptions {
    /// Rejects invalid options.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and the expected value.
    pub fn check(&self) -> Result<()> {
        if !(1..=REPLICAS_MAX).contains(&self.replicas) {
            let what = format!("streams.replicas: got {}, expected 1 to {REPLICAS_MAX}", self.replicas);
            return Err(Error::invalid(what));
        }
        let is_token = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if !(1..=PREFIX_BYTES_MAX).contains(&self.prefix.len()) || !self.prefix.chars().all(is_token) {
            return Err(Error::invalid(format!(
                "streams.prefix: got `{}`, expected 1 to {PREFIX_BYTES_MAX} letters, digits, `-` or `_`",
                self.prefix
            )));
        }
        match self.monitors.iter().find(|monitor| !monitor.starts_with("http://")) {
            Some(other) => Err(Error::invalid(format!("streams.monitors: got `{other}`, expected http://HOST:PORT"))),
            None => Ok(()),
        }
    }
}
