//! Buffers of forward and backward passes, and the layout of a micro-batch in these buffers.

use std::ops::Range;
use std::sync::Mutex;

use super::run::{MICRO_BATCH, Pass, Rows};
use crate::dense::exec::Scratch;

/// Buffers of forward and backward passes, one set per thread; after the first passes little is allocated.
#[derive(Debug)]
pub struct Workspace {
    pub(super) workers: Vec<Worker>,
    /// Buffers of the computation that follows the sums over rows.
    pub(super) last: Scratch,
}

/// Buffers of one thread.
#[derive(Debug, Default)]
pub(super) struct Worker {
    pub(super) scratch: Scratch,
    /// Gradient sums over a micro-batch.
    pub(super) sums: Vec<f32>,
    pub(super) is_started: bool,
}

impl Workspace {
    /// Creates buffers for passes on `threads` threads, at least 1.
    pub fn new(threads: usize) -> Self {
        let workers = (0..threads.max(1)).map(|_| Worker::default()).collect();
        Workspace { workers, last: Scratch::default() }
    }
}

impl Worker {
    /// Computes shared values, before the first micro-batch of a pass.
    pub(super) fn start(&mut self, pass: &Pass, shared: &[&[f32]]) {
        if !std::mem::replace(&mut self.is_started, true) {
            pass.start(shared, &mut self.scratch);
        }
    }
}

/// Returns the rows of micro-batch `n`.
pub(super) fn micro_batch(n: usize, rows: usize) -> Range<usize> {
    n * MICRO_BATCH..rows.min((n + 1) * MICRO_BATCH)
}

/// Resizes buffers to the given counts of numbers.
pub(super) fn fit(buffers: &mut Vec<Vec<f32>>, counts: impl ExactSizeIterator<Item = usize>) {
    buffers.resize_with(counts.len(), Vec::new);
    buffers.iter_mut().zip(counts).for_each(|(buffer, count)| refill(buffer, count));
}

/// Resizes a buffer to `count` zeros.
pub(super) fn refill(buffer: &mut Vec<f32>, count: usize) {
    buffer.clear();
    buffer.resize(count, 0.0);
}

/// Splits buffers `[rows, width]` into the parts of each micro-batch.
pub(super) fn by_micro_batch<'a>(
    buffers: &'a mut [Vec<f32>],
    widths: &[usize],
    rows: usize,
) -> Vec<Mutex<Vec<&'a mut [f32]>>> {
    let mut all: Vec<Vec<&mut [f32]>> = (0..rows.div_ceil(MICRO_BATCH)).map(|_| Vec::new()).collect();
    for (buffer, &width) in buffers.iter_mut().zip(widths) {
        let parts = buffer.chunks_mut((MICRO_BATCH * width).max(1));
        all.iter_mut().zip(parts).for_each(|(all, part)| all.push(part));
    }
    all.into_iter().map(Mutex::new).collect()
}

/// Returns the range of numbers that `rows` occupy in the buffer of their micro-batch.
pub(super) fn at(rows: &Range<usize>, width: usize) -> Range<usize> {
    let first = rows.start % MICRO_BATCH;
    first * width..(first + rows.len()) * width
}

/// Copies an output of a block to the corresponding rows of a micro-batch's buffer.
pub(super) fn copy((numbers, stride): Rows<'_>, rows: Range<usize>, width: usize, room: &mut [f32]) {
    let to = room[at(&rows, width)].chunks_exact_mut(width);
    to.enumerate().for_each(|(n, to)| to.copy_from_slice(&numbers[n * stride..][..width]));
}
