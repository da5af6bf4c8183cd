//! How much may wait, how much is taken together, how much may be held.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use sterling_core::error::{Error, Result};
use sterling_core::limits::TIMEOUT_MS_MAX;

/// How much may wait, how much is taken together, how much may be held.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Requests that may wait; beyond it they are refused. The deadline of a request is most often the narrower bound.
    pub queue: usize,
    /// Most requests that a worker takes together.
    pub batch: usize,
    /// Worker threads, and with them all the CPU that passes use; 0 means one a core.
    pub workers: usize,
    /// Time-out of requests that do not name one, in milliseconds.
    pub timeout_ms: u64,
    /// Requests whose cost says that they take longer than this, in milliseconds, never hold all workers: one stays free
    /// for the others. With a single worker there is none to spare, and the others wait.
    pub dear_ms: u64,
    /// Most memory that all requests may hold between them, from when they are taken in until they are answered, in megabytes of 2^20 bytes.
    pub memory_mb: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { queue: 1024, batch: 32, workers: 0, timeout_ms: 1000, dear_ms: 20, memory_mb: 1024 }
    }
}

impl Options {
    /// Refuses options that cannot work.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range.
    pub fn check(&self) -> Result<()> {
        for (name, value, least, most) in [
            ("queue", self.queue as u64, 1, 1 << 20),
            ("batch", self.batch as u64, 1, 4096),
            ("workers", self.workers as u64, 0, 1024),
            ("timeout_ms", self.timeout_ms, 1, TIMEOUT_MS_MAX),
            ("dear_ms", self.dear_ms, 1, TIMEOUT_MS_MAX),
            ("memory_mb", self.memory_mb, 1, 1 << 30),
        ] {
            if value < least || value > most {
                return Err(Error::invalid(format!("engine.{name}: got {value}, expected {least} to {most}")));
            }
        }
        Ok(())
    }

    /// How many workers that is on this machine.
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
