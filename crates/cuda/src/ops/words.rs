//! Filter programs on Bloom planes and posting lists, which compute filter bitmaps.

use bytemuck::{Pod, Zeroable};

use super::scan::Order;
use super::{Shape, address_of, launch, need, parts};
use crate::driver::Demand;
use crate::memory::{Array, Device};
use sterling_core::error::{Error, Result};

/// Maximum number of bits on the stack of a program's exact check.
pub const CHECK_STACK_MAX: usize = 64;
/// Maximum stack depth of a program; at this depth the stacks of one warp fill the shared memory of a block.
pub const STACK_MAX: usize = 1 + SHARED_BYTES / (8 * 32);
/// Maximum threads per block.
const THREADS: usize = 256;
/// Shared memory per block on any device, in bytes.
const SHARED_BYTES: usize = 48 << 10;

/// Returns the threads per block for a stack depth: as many warps as fit. The top of each stack is in a register.
fn threads_of(depth: usize) -> usize {
    (SHARED_BYTES / (8 * (depth - 1).max(1)) / 32 * 32).clamp(32, THREADS)
}
/// Marks a step without a plane, or a value range without a preceding plane.
pub const NO_PLANE: u32 = u32::MAX;

/// Operation of a step, on a word of the bitmap (64 items) or, in an exact check, on the bit of a single item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Operation {
    /// Pushes a word of ones: every item matches.
    Every,
    /// Pushes a word of zeros: no item matches.
    None,
    /// Pushes a plane or the plane's complement.
    Push,
    /// ANDs a plane or its complement to the top of the stack.
    Keep,
    /// ORs a plane to the top of the stack.
    Add,
    /// ANDs the planes at all Bloom filter positions of a term to the top of the stack.
    Bloom,
    /// ANDs a numeric comparison, which planes of value ranges decide for all but some items, to the top of the stack.
    Number,
    /// ANDs a comparison, evaluated per item, to the top of the stack.
    Compare,
    /// Pops two values and pushes their AND.
    And,
    /// Pops two values and pushes their OR.
    Or,
    /// Pushes whether a single item has one of the terms.
    HasTerm,
    /// Pushes whether a comparison holds for a single item.
    Holds,
}

/// Step of a filter program, in the kernels' layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct FilterStep {
    /// Number of an [`Operation`].
    pub operation: u32,
    /// 1 if the step uses the complement.
    pub is_negated: u32,
    /// Index of a plane, or [`NO_PLANE`].
    pub plane: u32,
    /// Index of the column that the step reads.
    pub column: u32,
    /// Index of the first value range or code.
    pub first: u32,
    /// Number of value ranges or codes.
    pub count: u32,
    /// Number of value ranges in which all items match.
    pub sure: u32,
    /// Number of a comparison operator, or 6 for ranges of codes.
    pub comparison: u32,
    /// Hash of a term, bits of a number, or a range of codes with the start in the low half.
    pub x: u64,
    /// Step of the hash of a term, or the second range of codes.
    pub y: u64,
}

impl FilterStep {
    /// Creates a step without operands.
    pub fn plain(operation: Operation) -> Self {
        FilterStep { operation: operation as u32, plane: NO_PLANE, ..FilterStep::zeroed() }
    }
}

/// Compiled filter on the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WordProgram {
    /// Steps on words of the bitmap.
    pub steps: Vec<FilterStep>,
    /// Exact check of items in the bitmap; empty if the bitmap is exact.
    pub checks: Vec<FilterStep>,
    /// Pairs of a plane and the preceding plane of a value range, or [`NO_PLANE`].
    pub runs: Vec<u32>,
    /// Codes of terms, ascending within a step.
    pub codes: Vec<u32>,
    /// Maximum stack depth of the steps.
    pub depth: usize,
}

impl WordProgram {
    /// Checks that a device can evaluate the program.
    ///
    /// # Errors
    /// `Unsupported` if the filter is nested too deeply.
    pub fn check(&self) -> Result<()> {
        let (depth, checks) = (self.depth, check_depth(&self.checks));
        if depth > STACK_MAX || checks > CHECK_STACK_MAX {
            return Err(Error::unsupported(format!(
                "the filter nests {depth} deep and {checks} deep for one item, expected at most {STACK_MAX} and {CHECK_STACK_MAX}"
            )));
        }
        Ok(())
    }

    /// Returns the number of plane words that are read per word of items, if all positions of a Bloom filter must be
    /// read.
    fn planes(&self, hashes: usize) -> usize {
        let planes = |step: &FilterStep| match step.operation {
            operation if operation == Operation::Bloom as u32 => hashes,
            operation if operation == Operation::Number as u32 => 2 * step.count as usize,
            _ => usize::from(step.plane != NO_PLANE),
        };
        self.steps.iter().map(planes).sum()
    }
}

/// Addresses of a column's values on the device, in the kernels' layout; 0 for arrays that the column lacks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct ColumnAt {
    /// Offsets, u32 `[slots + 1]`.
    pub offsets: u64,
    /// Codes, u32.
    pub codes: u64,
    /// Numbers, f64 `[slots]`.
    pub floats: u64,
}

/// Filter index on the device.
#[derive(Debug)]
pub struct PlaneIndex {
    /// Planes of value ranges and terms, `[planes, words]`.
    pub planes: Array<u64>,
    /// Bits of all items, `[words]`.
    pub every: Array<u64>,
    /// Bloom planes, list after list.
    pub bloom: Array<u64>,
    /// Start of each list in `bloom`, `[lists]`.
    pub bloom_starts: Array<u64>,
    /// Number of Bloom filter positions of each list, `[lists]`.
    pub widths: Array<u32>,
    /// First word of each list, `[lists + 1]`.
    pub firsts: Array<u32>,
    /// List of each word.
    pub word_lists: Array<u32>,
    /// First slot of each word.
    pub word_slots: Array<u32>,
    /// Values of each column, `[columns]`.
    pub columns: Array<ColumnAt>,
    /// Number of Bloom filter positions per term.
    pub hashes: usize,
}

/// Compiled filter on the device, in the kernels' layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct ProgramAt {
    steps: u64,
    checks: u64,
    runs: u64,
    codes: u64,
    every: u64,
    out: u64,
    step_count: u32,
    check_count: u32,
}

/// Filters on the device, and the filters' bitmaps.
#[derive(Debug)]
pub struct Filters {
    programs: Array<ProgramAt>,
    /// Arrays that the programs read; kept alive with them.
    _parts: Vec<(Array<FilterStep>, Array<u32>)>,
    /// Filter bitmaps, `[filters, words]`.
    pub words: Array<u64>,
    words_each: usize,
    threads: usize,
    shared_bytes: usize,
    /// Bytes read per word of a filter's bitmap.
    bytes_per_word: usize,
}

impl Filters {
    /// Returns the number of filters.
    pub fn len(&self) -> usize {
        self.programs.len()
    }

    /// Returns whether there are no filters.
    pub fn is_empty(&self) -> bool {
        self.programs.is_empty()
    }

    /// Returns the address of a filter's bitmap.
    pub fn address(&self, filter: usize) -> u64 {
        self.words.address() + (8 * filter * self.words_each) as u64
    }
}

/// Marks a query without a filter.
pub const NO_FILTER: u32 = u32::MAX;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct FilterArgs {
    programs: u64,
    columns: u64,
    planes: u64,
    bloom: u64,
    bloom_starts: u64,
    widths: u64,
    firsts: u64,
    word_lists: u64,
    word_slots: u64,
    words: u32,
    hashes: u32,
}

impl PlaneIndex {
    /// Uploads filters and allocates a bitmap for each; `every` has the bits of all live items.
    ///
    /// # Errors
    /// `Unsupported` for a filter that is nested too deeply; as [`Device::copy`].
    pub fn filters(&self, device: &Device, programs: &[WordProgram], every: &Array<u64>) -> Result<Filters> {
        let words_each = self.every.len();
        need("bitmap of all items", every, words_each)?;
        let words = device.room(programs.len() * words_each)?;
        let (mut at, mut parts, mut depth, mut bytes_per_word) = (Vec::new(), Vec::new(), 1, 0);
        for (n, program) in programs.iter().enumerate() {
            program.check()?;
            depth = depth.max(program.depth);
            bytes_per_word = bytes_per_word.max(8 * (program.planes(self.hashes) + 2) + 8);
            let steps = device.copy(&[&program.steps[..], &program.checks].concat())?;
            let numbers = device.copy(&[&program.runs[..], &program.codes].concat())?;
            at.push(ProgramAt {
                steps: steps.address(),
                checks: steps.address() + (program.steps.len() * size_of::<FilterStep>()) as u64,
                runs: numbers.address(),
                codes: numbers.address() + 4 * program.runs.len() as u64,
                every: every.address(),
                out: words.address() + (8 * n * words_each) as u64,
                step_count: program.steps.len() as u32,
                check_count: program.checks.len() as u32,
            });
            parts.push((steps, numbers));
        }
        let (programs, threads) = (device.copy(&at)?, threads_of(depth));
        let shared_bytes = 8 * threads * (depth - 1);
        Ok(Filters { programs, _parts: parts, words, words_each, threads, shared_bytes, bytes_per_word })
    }

    fn arguments(&self, of: &Filters) -> FilterArgs {
        FilterArgs {
            programs: of.programs.address(),
            columns: self.columns.address(),
            planes: self.planes.address(),
            bloom: self.bloom.address(),
            bloom_starts: self.bloom_starts.address(),
            widths: self.widths.address(),
            firsts: self.firsts.address(),
            word_lists: self.word_lists.address(),
            word_slots: self.word_slots.address(),
            words: of.words_each as u32,
            hashes: self.hashes as u32,
        }
    }

    /// Evaluates filters over all lists.
    ///
    /// # Errors
    /// `Internal` if the launch fails.
    pub fn evaluate(&self, device: &Device, filters: &Filters) -> Result<()> {
        let (count, words) = (filters.len(), filters.words_each);
        if count * words == 0 {
            return Ok(());
        }
        let shape = Shape {
            kernel: "filter_words",
            grid: [words.div_ceil(filters.threads), count, 1],
            threads: filters.threads as u32,
            shared_bytes: filters.shared_bytes,
            demand: Demand::of_bytes(count * words * filters.bytes_per_word),
        };
        launch(device, &shape, &self.arguments(filters))
    }

    /// Evaluates filters only over the next lists of each query. `of_queries` has the index of each query's filter, or
    /// [`NO_FILTER`].
    ///
    /// # Errors
    /// `Internal` for arrays that are too short, or if the launch fails.
    pub fn evaluate_lists(
        &self,
        device: &Device,
        (filters, of_queries): (&Filters, &Array<u32>),
        order: &Order<'_>,
    ) -> Result<()> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct FilterListsArgs {
            of: FilterArgs,
            filters: u64,
            order: u64,
            begins: u64,
            ends: u64,
            stride: u32,
            unused: u32,
        }
        let (queries, lists) = (of_queries.len(), self.widths.len().max(1));
        if filters.is_empty() || queries * order.most == 0 {
            return Ok(());
        }
        need("lists of queries", order.order, queries * order.stride)?;
        need("list counts", order.ends, queries)?;
        let arguments = FilterListsArgs {
            of: self.arguments(filters),
            filters: of_queries.address(),
            order: order.order.address(),
            begins: address_of(order.begins),
            ends: order.ends.address(),
            stride: order.stride as u32,
            unused: 0,
        };
        let words = queries * order.most * filters.words_each.div_ceil(lists);
        let shape = Shape {
            kernel: "filter_lists",
            grid: [parts(device, order.most, filters.threads / 32, queries), queries, 1],
            threads: filters.threads as u32,
            shared_bytes: filters.shared_bytes,
            demand: Demand::of_bytes(words * filters.bytes_per_word),
        };
        launch(device, &shape, &arguments)
    }
}

/// Returns the maximum number of bits on the stack of an exact check.
fn check_depth(checks: &[FilterStep]) -> usize {
    let (mut height, mut most) = (0usize, 0);
    for step in checks {
        let joins = step.operation == Operation::And as u32 || step.operation == Operation::Or as u32;
        height = if joins { height.saturating_sub(1) } else { height + 1 };
        most = most.max(height);
    }
    most
}
