//! Limits of the queue, of batches and of memory.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use sterling_core::error::{Error, Result};
use sterling_core::limits::TIMEOUT_MS_MAX;

/// Queue, batches, workers and memory of requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Maximum number of waiting requests; further ones are rejected. Usually the deadline rejects earlier.
    pub queue: usize,
    /// Maximum number of requests per batch of a worker.
    pub batch: usize,
    /// Number of workers, which is the number of cores that passes use; 0: one per core. One more is reserved for short
    /// requests.
    pub workers: usize,
    /// Default deadline of requests, in milliseconds.
    pub timeout_ms: u64,
    /// Cost estimate above which a request is expensive, in milliseconds. Expensive requests occupy at most
    /// `workers` - 1 workers, at least one.
    pub expensive_request_ms: u64,
    /// Memory of all requests from acceptance to answer, in MiB.
    pub memory_mb: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { queue: 1024, batch: 32, workers: 0, timeout_ms: 1000, expensive_request_ms: 20, memory_mb: 1024 }
    }
}

impl Options {
    /// Validates the options.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range.
    pub fn check(&self) -> Result<()> {
        for (name, value, least, most) in [
            ("queue", self.queue as u64, 1, 1 << 20),
            ("batch", self.batch as u64, 1, 4096),
            ("workers", self.workers as u64, 0, 1024),
            ("timeout_ms", self.timeout_ms, 1, TIMEOUT_MS_MAX),
            ("expensive_request_ms", self.expensive_request_ms, 1, TIMEOUT_MS_MAX),
            ("memory_mb", self.memory_mb, 1, 1 << 30),
        ] {
            if value < least || value > most {
                return Err(Error::invalid(format!("engine.{name}: got {value}, expected {least} to {most}")));
            }
        }
        Ok(())
    }

    /// Resolves the number of workers on this machine.
    pub(super) fn worker_count(&self) -> usize {
        match self.workers {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            count => count,
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }
}
