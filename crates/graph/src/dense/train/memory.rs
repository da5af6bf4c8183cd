//! Buffers of forward and backward passes, the threads that share a pass, and the layout of a micro-batch in these buffers.

use std::ops::Range;

use super::run::{MICRO_BATCH, Pass, Rows};
use super::tree::TreeSum;
use crate::dense::exec::Scratch;
use sterling_kernels::threads::Threads;

/// Buffers of forward and backward passes, one set per thread; after the first passes little is allocated.
#[derive(Debug)]
pub struct Workspace {
    pub(super) threads: Threads,
    pub(super) workers: Vec<Worker>,
    /// Buffers of the computation that follows the sums over rows.
    pub(super) last: Scratch,
}

/// Buffers of one thread.
#[derive(Debug, Default)]
pub(super) struct Worker {
    pub(super) scratch: Scratch,
    /// Gradient sums over the micro-batches of this thread.
    pub(super) sums: TreeSum,
}

impl Workspace {
    /// Creates buffers for passes on `threads`.
    pub fn new(threads: &Threads) -> Self {
        let workers = (0..threads.count()).map(|_| Worker::default()).collect();
        Workspace { threads: threads.clone(), workers, last: Scratch::default() }
    }

    /// Runs a pass over the micro-batches with the buffers `rooms`; each worker runs consecutive micro-batches, numbered from 0 on.
    pub(super) fn run(
        &mut self,
        pass: &Pass,
        shared: &[&[f32]],
        mut rooms: Vec<Room<'_>>,
        work: impl Fn(usize, &mut Room<'_>, &mut Worker) + Sync + Send,
    ) {
        let each = rooms.len().div_ceil(self.workers.len()).max(1);
        let shares = self.workers.iter_mut().zip(rooms.chunks_mut(each)).enumerate().collect();
        self.threads.run(shares, |(n, (worker, rooms)): (usize, (&mut Worker, &mut [Room<'_>]))| {
            // The values that all rows share.
            pass.start(shared, &mut worker.scratch);
            rooms.iter_mut().zip(n * each..).for_each(|(room, micro_batch)| work(micro_batch, room, worker));
        });
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

/// The parts of several buffers that one micro-batch writes.
pub(super) type Room<'a> = Vec<&'a mut [f32]>;

/// Splits buffers `[rows, width]` into the parts of each micro-batch.
pub(super) fn by_micro_batch<'a>(buffers: &'a mut [Vec<f32>], widths: &[usize], rows: usize) -> Vec<Room<'a>> {
    let mut all: Vec<Room<'a>> = (0..rows.div_ceil(MICRO_BATCH)).map(|_| Vec::new()).collect();
    for (buffer, &width) in buffers.iter_mut().zip(widths) {
        let parts = buffer.chunks_mut((MICRO_BATCH * width).max(1));
        all.iter_mut().zip(parts).for_each(|(all, part)| all.push(part));
    }
    all
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
