//! What streams of updates must keep to.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use sterling_core::error::{Error, Result};

/// Most copies that a stream may have.
const REPLICAS_MAX: usize = 5;
/// Longest prefix of streams, in bytes.
const PREFIX_BYTES_MAX: usize = 64;

/// What streams of updates must keep to, in builds that have them (feature `nats`, part of `full`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StreamOptions {
    /// Copies that a stream must keep of each message; one that is made gets so many, 1 to 5.
    pub replicas: usize,
    /// Monitors of the brokers, `http://HOST:8222` each: at the start every one must say that its broker syncs what it
    /// acknowledges. Without any nobody looks, which is warned of.
    pub monitors: Vec<String>,
    /// What the names of streams (`PREFIX-MODEL`) and their subjects (`PREFIX.MODEL`) begin with, so that two installations can share
    /// brokers.
    pub prefix: String,
    /// A file that says who this server is: `USER:PASSWORD`, a token, the seed of an nkey, or what `nsc generate creds` writes. It is
    /// read at every connection, and stands before what the addresses hold.
    #[schema(value_type = Option<String>)]
    pub credentials: Option<PathBuf>,
}

impl Default for StreamOptions {
    fn default() -> Self {
        StreamOptions { replicas: 1, monitors: Vec::new(), prefix: "sterling".into(), credentials: None }
    }
}

impl StreamOptions {
    /// Refuses options that cannot work.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and what was expected.
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
