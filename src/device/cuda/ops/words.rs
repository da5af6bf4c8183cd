//! Filter programs over bit planes.

use bytemuck::{Pod, Zeroable};

use super::{Shape, launch, need};
use crate::device::cuda::driver::Demand;
use crate::device::cuda::memory::{Array, Device};
use crate::error::{Error, Result};

/// Runs of words on a program's stack at most, and bits on that of its check.
pub const STACK_MAX: usize = 64;
/// Stands where a step has no plane, and a run none before it.
pub const NO_PLANE: u32 = u32::MAX;

/// What a step does. The first ten stand over words; the last two and those between them push or join bits of one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Operation {
    /// Pushes every item.
    Every,
    /// Pushes no item.
    None,
    /// Pushes a plane or its opposite.
    Push,
    /// ANDs a plane or its opposite.
    Keep,
    /// ORs a plane.
    Add,
    /// ANDs the planes of a term's Bloom positions.
    Bloom,
    /// ANDs a comparison that runs of planes answer but for some items.
    Number,
    /// ANDs a comparison that is made for each item.
    Compare,
    /// Pops and ANDs.
    And,
    /// Pops and ORs.
    Or,
    /// Pushes whether an item has one of the terms.
    HasTerm,
    /// Pushes whether a comparison holds for an item.
    Holds,
}

/// A step of a filter program, as kernels read it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct FilterStep {
    /// An [`Operation`].
    pub operation: u32,
    /// 1 for the opposite.
    pub is_negated: u32,
    /// The plane, or [`NO_PLANE`].
    pub plane: u32,
    /// The column that is looked at.
    pub column: u32,
    /// Its first run or code, and how many.
    pub first: u32,
    /// See `first`.
    pub count: u32,
    /// Runs that pass whole.
    pub sure: u32,
    /// The operator of a comparison, or 6 for ranges of codes.
    pub comparison: u32,
    /// The hash of a term, the bits of a number, or a range of codes, its low end in the low half.
    pub x: u64,
    /// The step of the hash, or the second range.
    pub y: u64,
}

impl FilterStep {
    /// A step without operands.
    pub fn plain(operation: Operation) -> Self {
        FilterStep { operation: operation as u32, plane: NO_PLANE, ..FilterStep::zeroed() }
    }
}

/// A filter's program as the host made it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WordProgram {
    /// Over words.
    pub steps: Vec<FilterStep>,
    /// What an item must hold where the words are only suspected; else none.
    pub checks: Vec<FilterStep>,
    /// Pairs: a plane and the one before it, or [`NO_PLANE`].
    pub runs: Vec<u32>,
    /// Codes of terms, ascending for each step.
    pub codes: Vec<u32>,
    /// Runs of words that stand on the stack at most.
    pub depth: usize,
}

impl WordProgram {
    /// Words of planes that are read for each word of items, where all positions of a Bloom filter have to be looked at.
    fn planes(&self, hashes: usize) -> usize {
        let planes = |step: &FilterStep| match step.operation {
            operation if operation == Operation::Bloom as u32 => hashes,
            operation if operation == Operation::Number as u32 => 2 * step.count as usize,
            _ => usize::from(step.plane != NO_PLANE),
        };
        self.steps.iter().map(planes).sum()
    }
}

/// Where the values of a column lie on the device, as kernels read it; 0 where there are none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct ColumnAt {
    /// u32 `[slots + 1]`
    pub offsets: u64,
    /// u32
    pub codes: u64,
    /// f64 `[slots]`
    pub floats: u64,
}

/// The eligibility index on the device.
#[derive(Debug)]
pub struct PlaneIndex {
    /// `[planes, words]`
    pub planes: Array<u64>,
    /// `[words]`
    pub every: Array<u64>,
    /// The Bloom planes of each list in turn.
    pub bloom: Array<u64>,
    /// Where they start, `[lists]`.
    pub bloom_starts: Array<u64>,
    /// `[lists]`
    pub widths: Array<u32>,
    /// The first word of each list, `[lists + 1]`.
    pub firsts: Array<u32>,
    /// The list of each word.
    pub word_lists: Array<u32>,
    /// The first slot of each word.
    pub word_slots: Array<u32>,
    /// `[columns]`
    pub columns: Array<ColumnAt>,
    /// Positions of a term in a Bloom filter.
    pub hashes: usize,
}

/// The items that pass a filter.
#[derive(Debug)]
pub struct Passing {
    /// `[words]`
    pub words: Array<u64>,
    /// Items that pass in each list.
    pub survivors: Array<u32>,
}

impl PlaneIndex {
    /// Evaluates a program over all words.
    ///
    /// # Errors
    /// `Unsupported` for a program with too deep a stack; `Internal` where a launch fails.
    pub fn evaluate(&self, device: &Device, program: &WordProgram) -> Result<Passing> {
        self.evaluate_among(device, program, &self.every)
    }

    /// The same where other words stand for every item.
    ///
    /// # Errors
    /// As [`PlaneIndex::evaluate`].
    pub fn evaluate_among(&self, device: &Device, program: &WordProgram, every: &Array<u64>) -> Result<Passing> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct FilterArgs {
            steps: u64,
            checks: u64,
            runs: u64,
            codes: u64,
            columns: u64,
            planes: u64,
            every: u64,
            bloom: u64,
            bloom_starts: u64,
            widths: u64,
            firsts: u64,
            word_lists: u64,
            word_slots: u64,
            out: u64,
            survivors: u64,
            step_count: u32,
            check_count: u32,
            words: u32,
            hashes: u32,
        }
        if program.depth > STACK_MAX || check_depth(&program.checks) > STACK_MAX {
            return Err(Error::unsupported(format!("a filter that nests {} deep", program.depth)));
        }
        let words = self.every.len();
        need("words of all items", every, words)?;
        let passing = Passing { words: device.room(words)?, survivors: device.zeros(self.widths.len())? };
        let (steps, checks) = (device.copy(&program.steps)?, device.copy(&program.checks)?);
        let (runs, codes) = (device.copy(&program.runs)?, device.copy(&program.codes)?);
        let arguments = FilterArgs {
            steps: steps.address(),
            checks: checks.address(),
            runs: runs.address(),
            codes: codes.address(),
            columns: self.columns.address(),
            planes: self.planes.address(),
            every: every.address(),
            bloom: self.bloom.address(),
            bloom_starts: self.bloom_starts.address(),
            widths: self.widths.address(),
            firsts: self.firsts.address(),
            word_lists: self.word_lists.address(),
            word_slots: self.word_slots.address(),
            out: passing.words.address(),
            survivors: passing.survivors.address(),
            step_count: program.steps.len() as u32,
            check_count: program.checks.len() as u32,
            words: words as u32,
            hashes: self.hashes as u32,
        };
        let shape = Shape {
            kernel: "filter_words",
            grid: [words.div_ceil(256), 1, 1],
            threads: 256,
            shared_bytes: 8 * 256 * program.depth.saturating_sub(1),
            demand: Demand::of_bytes(words * (8 * (program.planes(self.hashes) + 2) + 8)),
        };
        launch(device, &shape, &arguments)?;
        Ok(passing)
    }
}

/// Bits that a check has on its stack at most.
fn check_depth(checks: &[FilterStep]) -> usize {
    let (mut height, mut most) = (0usize, 0);
    for step in checks {
        let joins = step.operation == Operation::And as u32 || step.operation == Operation::Or as u32;
        height = if joins { height.saturating_sub(1) } else { height + 1 };
        most = most.max(height);
    }
    most
}
