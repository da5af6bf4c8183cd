//! Requests with their query embeddings in the memory of a device.

use crate::device::cuda::ops::steps::{self, NumbersAt, Placing, RowsOf};
use crate::device::cuda::{Array, Device};
use crate::error::Result;
use crate::pass::work::Prepared;

/// Requests of a batch with their query embeddings on the device.
pub(super) struct Embedded<'a> {
    /// Their places in the batch, and they.
    pub(super) requests: Vec<(usize, &'a Prepared)>,
    /// `[requests, D]`
    pub(super) vectors: Array<f32>,
    /// Those of ids that were answered with default rows.
    pub(super) degraded_rows: Vec<u64>,
}

/// The rows of a matrix `[_, width]` that are named, side by side.
pub(super) fn rows_of(device: &Device, matrix: &Array<f32>, width: usize, rows: &[usize]) -> Result<Array<f32>> {
    let index: Vec<u32> = rows.iter().flat_map(|row| (row * width..(row + 1) * width).map(|n| n as u32)).collect();
    let (index, one, out) = (device.copy(&index)?, device.copy(&[1u32])?, device.room(rows.len() * width)?);
    let placing = Placing { runs: 1, count: rows.len() * width, stride: 0, first: 0 };
    let (from, to) = (NumbersAt::of(matrix, 0, 0, 0), NumbersAt::of(&out, 0, 0, 0));
    steps::pick(device, RowsOf { counts: &one, most: 1 }, from, Some(&index), placing, to)?;
    Ok(out)
}
