//! Tables in training in the memory of a GPU.

use sterling_core::error::Result;
use sterling_cuda::ops::bags::scatter_rows;
use sterling_cuda::{Array, Device};

/// Rows per transfer between host and device.
const TRANSFER_ROWS: usize = 1 << 16;

/// The rows of a table with their optimizer state in the memory of a device.
#[derive(Debug)]
pub(super) struct DeviceStretches {
    device: Device,
    pub(super) data: Array<f32>,
    stride: usize,
}

impl DeviceStretches {
    pub(super) fn copy(device: &Device, stretches: &[f32], stride: usize) -> Result<Self> {
        let data = device.copy(stretches)?;
        device.settle()?;
        Ok(DeviceStretches { device: device.clone(), data, stride })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.data.bytes() as u64
    }

    /// Returns some rows with their state, `[rows, stride]`.
    pub(super) fn read(&self, rows: &[u32]) -> Result<Vec<f32>> {
        let mut out = Vec::with_capacity(rows.len() * self.stride);
        for rows in rows.chunks(TRANSFER_ROWS) {
            let numbers: Vec<u32> = (0..rows.len() as u32).collect();
            let (rows, places) = (self.device.copy(rows)?, self.device.copy(&numbers)?);
            let found = self.device.room(numbers.len() * self.stride)?;
            scatter_rows(&self.device, &self.data, (&rows, &places), (&found, self.stride))?;
            out.extend(found.to_vec()?);
        }
        Ok(out)
    }

    /// Writes distinct rows with their state, `[rows, stride]`.
    pub(super) fn write(&self, rows: &[u32], from: &[f32]) -> Result<()> {
        for (rows, from) in rows.chunks(TRANSFER_ROWS).zip(from.chunks(TRANSFER_ROWS * self.stride)) {
            let numbers: Vec<u32> = (0..rows.len() as u32).collect();
            let (taken, places, from) = (self.device.copy(&numbers)?, self.device.copy(rows)?, self.device.copy(from)?);
            scatter_rows(&self.device, &from, (&taken, &places), (&self.data, self.stride))?;
        }
        // Steps run on another stream, so the copies must be complete before.
        self.device.settle()
    }
}
