//! Buffer ranges of the values of a plan: allocation, reuse after the last reader, and values that are read in place.

use super::graph::NUMBERS_MAX;
use super::ir::{Id, Side};
use super::plan::Planner;
use super::steps::{BufferRange, Memory};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{LANES, Lines};

/// Returns the row stride of a buffer of `count` numbers per row: a multiple of the cache line. Single numbers are
/// contiguous, so that a step processes the numbers of several rows in full registers.
fn room_of_row(count: usize) -> usize {
    if count == 1 { 1 } else { count.next_multiple_of(LANES) }
}

impl Planner<'_> {
    /// Frees the buffers whose last reader is value `id`, at position `at` of the order.
    pub(super) fn give_back(&mut self, at: usize, id: Id) {
        for home in self.reads(id).into_iter().map(|read| self.home[read]) {
            if self.last[home] != at {
                continue;
            }
            // A buffer of several values is freed after the last of them was read.
            self.last[home] = usize::MAX;
            let Some(BufferRange { memory: Memory::Rows(buffer), .. }) = self.places[home] else { continue };
            self.tenants[buffer] -= 1;
            if self.tenants[buffer] == 0 {
                self.free.entry(self.plan.strides[buffer]).or_default().push(buffer);
            }
        }
    }

    /// Returns the buffer range of a value. A constant gets a range when a step first reads it; constant matrices of
    /// products are packed instead and have no range.
    pub(super) fn place(&mut self, id: Id) -> Result<BufferRange> {
        let id = self.root(id);
        if let (None, Some(numbers)) = (self.places[id], self.graph.constant(id)) {
            let memory = Memory::Constant(self.constant(Lines::of(numbers)));
            self.places[id] = Some(BufferRange { memory, offset: 0 });
        }
        self.places[id].ok_or_else(|| Error::internal("a value is read before it is computed"))
    }

    pub(super) fn constant(&mut self, lines: Lines) -> usize {
        self.plan.constants.push(lines);
        self.plan.constants.len() - 1
    }

    pub(super) fn check_numbers(&self, buffered_max: usize) -> Result<()> {
        let (buffered, indexed) = (self.buffered + self.tiled, self.indexed);
        if buffered > buffered_max || indexed > NUMBERS_MAX {
            return Err(Error::unsupported(format!(
                "{buffered} numbers in the buffers of a request with one row and {indexed} indices, expected at most \
                 {buffered_max} and {NUMBERS_MAX}"
            )));
        }
        Ok(())
    }

    /// Allocates a buffer for the numbers of a value.
    pub(super) fn buffer(&mut self, side: Side, count: usize) -> BufferRange {
        self.shared_buffer(side, count, 1)
    }

    /// Allocates a buffer of `count` numbers that `tenants` values share.
    pub(super) fn shared_buffer(&mut self, side: Side, count: usize, tenants: usize) -> BufferRange {
        let memory = match side {
            Side::Pair => {
                let stride = room_of_row(count);
                let buffer = self.free.get_mut(&stride).and_then(Vec::pop).unwrap_or(self.plan.strides.len());
                if buffer == self.plan.strides.len() {
                    self.buffered += stride;
                    self.plan.strides.push(stride);
                    self.tenants.push(0);
                }
                self.tenants[buffer] = tenants;
                Memory::Rows(buffer)
            }
            _ => {
                self.buffered += count;
                self.plan.user_counts.push(count);
                Memory::User(self.plan.user_counts.len() - 1)
            }
        };
        BufferRange { memory, offset: 0 }
    }

    /// Allocates one buffer for the results of one step, a number per value.
    pub(super) fn side_by_side(&mut self, made: &[Id]) -> BufferRange {
        let place = self.shared_buffer(Side::Pair, made.len(), made.len());
        for (n, &id) in made.iter().enumerate() {
            self.places[id] = Some(BufferRange { offset: n, ..place });
        }
        place
    }

    /// Returns the place of a concatenation of adjacent row inputs, which is read in place unless it is an output.
    pub(super) fn adjacent_inputs(&mut self, id: Id, axis: usize, parts: &[Id]) -> Result<Option<BufferRange>> {
        let is_one_run = self.graph.shape(id)[..axis].iter().all(|&size| size == 1);
        let (true, Some(&first)) = (is_one_run && !self.outputs().contains(&id), parts.first()) else {
            return Ok(None);
        };
        let first = self.place(first)?;
        let mut end = first;
        for &part in parts {
            if first.memory != Memory::Given || self.place(part)? != end {
                return Ok(None);
            }
            end.offset += self.graph.values[part].count();
        }
        Ok(Some(first))
    }
}
