//! Value model, and the columns of the best candidates.

use bytemuck::{Pod, Zeroable};

use super::rows::SlotRows;
use super::{Shape, address_of, launch, need, parts};
use crate::driver::Demand;
use crate::memory::{Array, Device};
use sterling_core::error::Result;

/// Maximum threads per block of the evaluation.
const THREADS_MAX: usize = 128;
/// Shared memory per block on any GPU, in bytes.
const SHARED_BYTES: usize = 48 << 10;

/// Returns the threads per block for a stack depth: as many warps as the shared memory allows.
fn threads_of(depth: usize) -> usize {
    (SHARED_BYTES / (4 * depth.max(1)) / 32 * 32).clamp(32, THREADS_MAX)
}

/// Step of a value model, in the kernels' layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ValueStep {
    /// Constant of the operation in `kernels/value.cu`.
    pub operation: u32,
    /// Bits of a number, or index of an input or constant.
    pub operand: u32,
}

/// Input of a value model, in the kernels' layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ValueInput {
    kind: u32,
    task: u32,
    column: u64,
}

impl ValueInput {
    /// Creates an input from the scores of a task.
    pub fn task(task: usize) -> Self {
        ValueInput { kind: 0, task: task as u32, column: 0 }
    }

    /// Creates an input from a column with one number per slot.
    pub fn column(column: &Array<f32>) -> Self {
        ValueInput { kind: 1, task: 0, column: column.address() }
    }

    /// Creates an input from the retrieval score.
    pub fn similarity() -> Self {
        ValueInput { kind: 2, task: 0, column: 0 }
    }
}

/// Value model on the device.
#[derive(Debug)]
pub struct ValueProgram {
    /// Program of a stack machine.
    pub steps: Array<ValueStep>,
    /// Inputs that the program reads.
    pub inputs: Array<ValueInput>,
    /// Number of constants per request.
    pub constants: usize,
    /// Number of reranker tasks, T.
    pub tasks: usize,
    /// Maximum stack depth.
    pub depth: usize,
}

/// Inputs of the evaluation per candidate.
#[derive(Clone, Copy, Debug)]
pub struct Rated<'a> {
    /// Slots of the candidates.
    pub of: SlotRows<'a>,
    /// Ordered keys of the retrieval scores.
    pub similarity: &'a Array<u32>,
    /// Logits `[queries, stride, n]`, and `n`; `None` without a reranker.
    pub logits: Option<(&'a Array<f32>, usize)>,
}

/// Task scores and values of candidates.
#[derive(Debug)]
pub struct Valued {
    /// Task scores, `[queries, stride, T]`.
    pub tasks: Array<f32>,
    /// Ordered keys of the values, `[queries, stride]`.
    pub keys: Array<u32>,
    /// Number of candidates with a task score of NaN, `[queries]`. Such candidates get the lowest value.
    pub bad: Array<u32>,
}

impl ValueProgram {
    /// Computes task scores and values of all candidates. `constants` has the constants of each query.
    ///
    /// # Errors
    /// `Internal` for arrays that are too short or if the launch fails.
    pub fn evaluate(&self, device: &Device, rated: &Rated<'_>, constants: &Array<f32>) -> Result<Valued> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct ValueArgs {
            steps: u64,
            inputs: u64,
            constants: u64,
            logits: u64,
            slots: u64,
            similarity: u64,
            counts: u64,
            tasks: u64,
            keys: u64,
            bad: u64,
            stride: u32,
            step_count: u32,
            constant_count: u32,
            task_count: u32,
            logit_stride: u32,
            unused: u32,
        }
        let SlotRows { slots, counts, stride } = rated.of;
        let queries = counts.len();
        need("constants", constants, queries * self.constants)?;
        need("similarities", rated.similarity, queries * stride)?;
        let tasks = if rated.logits.is_some() { self.tasks } else { 0 };
        if let Some((logits, logit_stride)) = rated.logits {
            need("logits", logits, (queries * stride).saturating_sub(1) * logit_stride + self.tasks)?;
        }
        let valued = Valued {
            tasks: device.room(queries * stride * tasks)?,
            keys: device.room(queries * stride)?,
            bad: device.zeros(queries)?,
        };
        let arguments = ValueArgs {
            steps: self.steps.address(),
            inputs: self.inputs.address(),
            constants: constants.address(),
            logits: address_of(rated.logits.map(|(logits, _)| logits)),
            slots: slots.address(),
            similarity: rated.similarity.address(),
            counts: counts.address(),
            tasks: valued.tasks.address(),
            keys: valued.keys.address(),
            bad: valued.bad.address(),
            stride: stride as u32,
            step_count: self.steps.len() as u32,
            constant_count: self.constants as u32,
            task_count: tasks as u32,
            logit_stride: rated.logits.map_or(0, |(_, n)| n as u32),
            unused: 0,
        };
        let threads = threads_of(self.depth);
        let grid = [parts(device, stride, threads, queries), queries, 1];
        let shared_bytes = 4 * threads * self.depth.max(1);
        let demand = Demand::of_bytes(queries * stride * (12 + 8 * tasks + 4 * self.inputs.len()));
        let threads = threads as u32;
        launch(device, &Shape { kernel: "evaluate", grid, threads, shared_bytes, demand }, &arguments)?;
        Ok(valued)
    }
}

/// Columns that are returned for the best candidates.
#[derive(Debug)]
pub struct ReturnedColumns {
    /// Slots, `[queries, top_stride]`.
    pub slots: Array<u32>,
    /// Ordered keys of the retrieval scores.
    pub similarity: Array<u32>,
    /// Task scores, `[queries, top_stride, T]`.
    pub tasks: Array<f32>,
}

/// Gathers the columns of the best candidates, `best.slots[q, ..counts[q]]`, which are indices among the candidates of
/// query `q`.
///
/// # Errors
/// As [`ValueProgram::evaluate`].
pub fn gather_columns(
    device: &Device,
    best: SlotRows<'_>,
    rated: &Rated<'_>,
    tasks: (&Array<f32>, usize),
) -> Result<ReturnedColumns> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct ColumnsArgs {
        places: u64,
        counts: u64,
        slots: u64,
        similarity: u64,
        tasks: u64,
        slots_out: u64,
        similarity_out: u64,
        tasks_out: u64,
        stride: u32,
        top_stride: u32,
        task_count: u32,
        unused: u32,
    }
    let (queries, (tasks, task_count)) = (best.counts.len(), tasks);
    need("places", best.slots, queries * best.stride)?;
    need("task scores", tasks, queries * rated.of.stride * task_count)?;
    let reported = ReturnedColumns {
        slots: device.room(queries * best.stride)?,
        similarity: device.room(queries * best.stride)?,
        tasks: device.room(queries * best.stride * task_count)?,
    };
    let arguments = ColumnsArgs {
        places: best.slots.address(),
        counts: best.counts.address(),
        slots: rated.of.slots.address(),
        similarity: rated.similarity.address(),
        tasks: tasks.address(),
        slots_out: reported.slots.address(),
        similarity_out: reported.similarity.address(),
        tasks_out: reported.tasks.address(),
        stride: rated.of.stride as u32,
        top_stride: best.stride as u32,
        task_count: task_count as u32,
        unused: 0,
    };
    let grid = [parts(device, best.stride, 256, queries), queries, 1];
    let demand = Demand::of_bytes(queries * best.stride * (4 + 16 + 8 * task_count));
    launch(device, &Shape { kernel: "take_columns", grid, threads: 256, shared_bytes: 0, demand }, &arguments)?;
    Ok(reported)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterling_core::limits::VALUE_DEPTH_MAX;

    /// Each level of an expression needs at most five numbers: two arguments, and the left operand of a comparison, a sum and a
    /// product.
    #[test]
    fn stacks_of_any_depth_fit_the_shared_memory_of_any_gpu() {
        for depth in 0..=5 * (VALUE_DEPTH_MAX + 1) + 1 {
            let threads = threads_of(depth);
            assert!(threads.is_multiple_of(32) && (32..=THREADS_MAX).contains(&threads), "{threads}");
            assert!(4 * threads * depth <= SHARED_BYTES, "{depth} numbers of {threads} threads");
        }
        assert_eq!([threads_of(1), threads_of(96)], [THREADS_MAX; 2]);
    }
}
