//! Limits of connections and requests, with their defaults.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use sterling_core::error::{Error, Result};

/// Maximum number of connections if `connections` is 0.
const CONNECTIONS_DEFAULT_MAX: usize = 16_384;

/// Limits of connections, bodies and shutdown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Maximum number of open connections; 0: the descriptor limit of the process, at most 16,384. At the limit,
    /// the connection that is idle for longest is closed.
    pub connections: usize,
    /// Time from the first byte of a request to the end of its header, in milliseconds.
    pub header_ms: u64,
    /// Idle time of a connection between two requests, in milliseconds.
    pub idle_ms: u64,
    /// Time for a complete body, in milliseconds.
    pub body_ms: u64,
    /// Longest pause of a client that sends a body or reads an answer, in milliseconds.
    pub stall_ms: u64,
    /// Memory for request bodies, read and parsed, in MiB; answers have the same budget again.
    pub bodies_mb: usize,
    /// Time from SIGTERM, when `/readyz` starts to return 503, until the socket closes, in milliseconds.
    pub drain_ms: u64,
    /// Time for running requests to finish after that, in milliseconds.
    pub stop_ms: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            connections: 0,
            header_ms: 10_000,
            idle_ms: 75_000,
            body_ms: 30_000,
            stall_ms: 15_000,
            bodies_mb: 256,
            drain_ms: 2000,
            stop_ms: 10_000,
        }
    }
}

impl Options {
    /// Rejects options out of range.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range.
    pub fn check(&self) -> Result<()> {
        for (name, value, least, most) in [
            ("connections", self.connections as u64, 0, 1 << 20),
            ("header_ms", self.header_ms, 1, 3_600_000),
            ("idle_ms", self.idle_ms, 1, 86_400_000),
            ("body_ms", self.body_ms, 1, 3_600_000),
            ("stall_ms", self.stall_ms, 1, 3_600_000),
            ("bodies_mb", self.bodies_mb as u64, 1, 1 << 20),
            ("drain_ms", self.drain_ms, 0, 3_600_000),
            ("stop_ms", self.stop_ms, 0, 3_600_000),
        ] {
            if value < least || value > most {
                return Err(Error::invalid(format!("http.{name}: got {value}, expected {least} to {most}")));
            }
        }
        Ok(())
    }

    /// Returns the maximum number of connections for a process with `descriptors` file descriptors: some are reserved for files,
    /// the cluster, and the connection that is being rejected.
    pub(super) fn connections_of(&self, descriptors: u64) -> usize {
        let retained = (descriptors / 16).clamp(32, 256).min(descriptors / 2);
        let possible = usize::try_from(descriptors - retained).unwrap_or(usize::MAX).max(1);
        match self.connections {
            0 => possible.min(CONNECTIONS_DEFAULT_MAX),
            requested => requested.min(possible),
        }
    }

    pub(super) fn body(&self) -> Duration {
        Duration::from_millis(self.body_ms)
    }

    pub(super) fn stall(&self) -> Duration {
        Duration::from_millis(self.stall_ms)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn file_descriptors_are_reserved_for_other_uses() {
        let all = Options::default();
        for (descriptors, connections) in [(64, 32), (2, 1), (0, 1), (1024, 960), (65_536, 16_384), (u64::MAX, 16_384)]
        {
            assert_eq!(all.connections_of(descriptors), connections, "{descriptors}");
        }
        let few = Options { connections: 10, ..Options::default() };
        assert_eq!((few.connections_of(1024), few.connections_of(8)), (10, 4));
    }

    #[test]
    fn invalid_options_are_named() {
        assert!(Options::default().check().is_ok());
        let error = Options { stall_ms: 0, ..Options::default() }.check().unwrap_err().to_string();
        assert_eq!(error, "http.stall_ms: got 0, expected 1 to 3600000");
    }
}
