//! Memory limit for the worker streams of a device.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sterling_core::error::{Error, Result};

/// Bytes of device memory that worker streams occupy, and their limit.
#[derive(Debug)]
pub struct LaneBytes {
    device: String,
    taken: AtomicU64,
    most: AtomicU64,
}

impl LaneBytes {
    pub(super) fn of(device: String) -> Arc<Self> {
        Arc::new(LaneBytes { device, taken: 0.into(), most: u64::MAX.into() })
    }

    /// Returns the bytes that worker streams occupy.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Returns the maximum bytes that worker streams may occupy.
    pub fn most(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }

    /// Sets the maximum bytes that worker streams may occupy.
    pub fn set_most(&self, bytes: u64) {
        self.most.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn take(&self, bytes: usize) -> Result<()> {
        let (before, most) = (self.taken.fetch_add(bytes as u64, Ordering::Relaxed), self.most());
        if before + bytes as u64 > most {
            self.taken.fetch_sub(bytes as u64, Ordering::Relaxed);
            return Err(Error::overloaded(format!(
                "{}: requests occupy {before} bytes of device memory and need {bytes} more, expected at most {most}",
                self.device
            )));
        }
        metrics::gauge!("sterling_device_request_bytes", "device" => self.device.clone()).increment(bytes as f64);
        Ok(())
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.taken.fetch_sub(bytes as u64, Ordering::Relaxed);
        metrics::gauge!("sterling_device_request_bytes", "device" => self.device.clone()).decrement(bytes as f64);
    }
}
