//! What streams of updates must keep to.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::{Error, Result};

/// Most copies that a stream may have.
const REPLICAS_MAX: usize = 5;

/// What streams of updates must keep to, in builds that have them (feature `nats`, part of `full`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StreamOptions {
    /// Copies that a stream must keep of each message; one that is made gets so many, 1 to 5.
    pub replicas: usize,
    /// Monitors of the brokers, `http://HOST:8222` each: at the start every one must say that its broker syncs what it
    /// acknowledges. Without any nobody looks, which is warned of.
    pub monitors: Vec<String>,
}

impl Default for StreamOptions {
    fn default() -> Self {
        StreamOptions { replicas: 1, monitors: Vec::new() }
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
        match self.monitors.iter().find(|monitor| !monitor.starts_with("http://")) {
            Some(other) => Err(Error::invalid(format!("streams.monitors: got `{other}`, expected http://HOST:PORT"))),
            None => Ok(()),
        }
    }
}
