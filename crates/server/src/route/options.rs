//! Configuration of a router.

use serde::{Deserialize, Serialize};

use super::tls::ServersTls;
use sterling_core::error::{Error, Result};
use sterling_core::limits::{TIMEOUT_MS_MAX, names_server};

/// Maximum number of configured servers.
const SERVERS_MAX: usize = 4096;

/// Servers and defaults of routed requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Servers, each as `HOST:PORT`: an address, or a name that stands for any number of them. Each server reports its shard.
    pub servers: Vec<String>,
    /// Interval between two polls of the servers and their names, in milliseconds.
    pub refresh_ms: u64,
    /// Number of servers that each shard of a version needs before the version answers.
    pub min_replicas: usize,
    /// Default for the share of the items that an answer must cover.
    pub min_coverage: f64,
    /// Least `min_coverage` that a request may ask for: requests may raise the share, but not lower it below this.
    pub least_coverage: f64,
    /// Default deadline of requests, in milliseconds.
    pub timeout_ms: u64,
    /// Maximum number of concurrent requests.
    pub requests: usize,
    /// Share of retrievals that run again exactly after their answers, to measure recall. While a canary is active, both versions
    /// are audited equally often.
    pub audit_share: f64,
    /// Access key for the servers; empty if they need none.
    pub key: String,
    /// TLS to the servers.
    pub tls: ServersTls,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            servers: Vec::new(),
            refresh_ms: 1000,
            min_replicas: 1,
            min_coverage: 1.0,
            least_coverage: 0.0,
            timeout_ms: 1000,
            requests: 1024,
            audit_share: 0.0,
            key: String::new(),
            tls: ServersTls::default(),
        }
    }
}

impl Options {
    /// Rejects options out of range.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range.
    pub fn check(&self) -> Result<()> {
        let servers = self.servers.len();
        if servers == 0 || servers > SERVERS_MAX {
            return Err(Error::invalid(format!(
                "servers: got {servers}, expected 1 to {SERVERS_MAX}, each as HOST:PORT"
            )));
        }
        if let Some(invalid) = self.servers.iter().find(|server| !names_server(server)) {
            return Err(Error::invalid(format!("servers: got `{invalid}`, expected HOST:PORT")));
        }
        for (name, value, least, most) in [
            ("refresh_ms", self.refresh_ms, 10, 3_600_000),
            ("min_replicas", self.min_replicas as u64, 1, SERVERS_MAX as u64),
            ("timeout_ms", self.timeout_ms, 1, TIMEOUT_MS_MAX),
            ("requests", self.requests as u64, 1, 1 << 20),
        ] {
            if value < least || value > most {
                return Err(Error::invalid(format!("{name}: got {value}, expected {least} to {most}")));
            }
        }
        if !self.key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Error::invalid(
                "key: expected visible characters without spaces, as `sterling key` prints them",
            ));
        }
        for (name, value, least) in [
            ("least_coverage", self.least_coverage, 0.0),
            ("min_coverage", self.min_coverage, self.least_coverage),
            ("audit_share", self.audit_share, 0.0),
        ] {
            if !(least..=1.0).contains(&value) {
                let what = if least > 0.0 { " (`least_coverage`)" } else { "" };
                return Err(Error::invalid(format!("{name}: got {value}, expected {least}{what} to 1")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn invalid_options_are_named() {
        let good = Options { servers: vec!["shards.example:8080".into(), "[::1]:80".into()], ..Options::default() };
        good.check().unwrap();
        for (invalid, expected) in [
            (Options::default(), "servers: got 0"),
            (Options { servers: vec!["shards".into()], ..good.clone() }, "got `shards`, expected HOST:PORT"),
            (Options { servers: vec!["http://a:80".into()], ..good.clone() }, "got `http://a:80`, expected HOST:PORT"),
            (Options { servers: vec![":80".into()], ..good.clone() }, "got `:80`"),
            (Options { servers: vec!["a:0".into()], ..good.clone() }, "got `a:0`"),
            (Options { servers: vec!["a:b".into()], ..good.clone() }, "got `a:b`"),
            (Options { min_replicas: 0, ..good.clone() }, "min_replicas: got 0"),
            (Options { min_coverage: 1.5, ..good.clone() }, "min_coverage: got 1.5"),
            (Options { min_coverage: f64::NAN, ..good.clone() }, "min_coverage"),
            (Options { least_coverage: 1.5, ..good.clone() }, "least_coverage: got 1.5"),
            (
                Options { min_coverage: 0.5, least_coverage: 0.75, ..good.clone() },
                "min_coverage: got 0.5, expected 0.75 (`least_coverage`) to 1",
            ),
            (Options { audit_share: -0.5, ..good.clone() }, "audit_share: got -0.5"),
            (Options { refresh_ms: 0, ..good.clone() }, "refresh_ms: got 0"),
            (Options { key: "a b".into(), ..good.clone() }, "key: expected visible characters"),
        ] {
            let error = invalid.check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
