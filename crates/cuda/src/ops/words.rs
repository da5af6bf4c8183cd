//! Filter programs over bit planes.

use bytemuck::{Pod, Zeroable};

use super::scan::Order;
use super::{Shape, address_of, launch, need, parts};
use crate::driver::Demand;
use crate::memory::{Array, Device};
use sterling_core::error::{Error, Result};

/// Bits on the stack of a program's check at most.
pub const CHECK_STACK_MAX: usize = 64;
/// Runs of words on a program's stack at most: those of one warp fill a block's shared memory.
pub const STACK_MAX: usize = 1 + SHARED_BYTES / (8 * 32);
/// Threads of a block at most.
const THREADS: usize = 256;
/// Shared memory that a block of any device has.
const SHARED_BYTES: usize = 48 << 10;

/// Threads of a block, of which each has a stack of so many words but for the top: as many warps as have room.
fn threads_of(depth: usize) -> usize {
    (SHARED_BYTES / (8 * (depth - 1).max(1)) / 32 * 32).clamp(32, THREADS)
}
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
    /// Whether a device can evaluate it.
    ///
    /// # Errors
    /// `Unsupported` where it nests too deep.
    pub fn check(&self) -> Result<()> {
        let (depth, checks) = (self.depth, check_depth(&self.checks));
        if depth > STACK_MAX || checks > CHECK_STACK_MAX {
            return Err(Error::unsupported(format!(
                "the filter nests {depth} deep and {checks} deep for one item, expected at most {STACK_MAX} and {CHECK_STACK_MAX}"
            )));
        }
        Ok(())
    }

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

/// A filter's program on the device, as kernels read it.
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

/// Filters on the device, and room for the items that pass each.
#[derive(Debug)]
pub struct Filters {
    programs: Array<ProgramAt>,
    /// What the programs read.
    _parts: Vec<(Array<FilterStep>, Array<u32>)>,
    /// A bit an item, `[filters, words]`.
    pub words: Array<u64>,
    words_each: usize,
    threads: usize,
    shared_bytes: usize,
    /// Bytes that a word of one of them takes.
    bytes_a_word: usize,
}

impl Filters {
    /// How many.
    pub fn len(&self) -> usize {
        self.programs.len()
    }

    /// True where there are none.
    pub fn is_empty(&self) -> bool {
        self.programs.is_empty()
    }

    /// Where the words of one of them lie.
    pub fn address(&self, filter: usize) -> u64 {
        self.words.address() + (8 * filter * self.words_each) as u64
    }
}

/// Stands for a query without a filter.
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
    /// Filters by their programs, with room for what passes them; `every` has the bits of all items that are there.
    ///
    /// # Errors
    /// `Unsupported` for a program with too deep a stack; as [`Device::copy`].
    pub fn filters(&self, device: &Device, programs: &[WordProgram], every: &Array<u64>) -> Result<Filters> {
        let words_each = self.every.len();
        need("words of all items", every, words_each)?;
        let words = device.room(programs.len() * words_each)?;
        let (mut at, mut parts, mut depth, mut bytes_a_word) = (Vec::new(), Vec::new(), 1, 0);
        for (n, program) in programs.iter().enumerate() {
            program.check()?;
            depth = depth.max(program.depth);
            bytes_a_word = bytes_a_word.max(8 * (program.planes(self.hashes) + 2) + 8);
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
        Ok(Filters { programs, _parts: parts, words, words_each, threads, shared_bytes, bytes_a_word })
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
    /// `Internal` where the launch fails.
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
            demand: Demand::of_bytes(count * words * filters.bytes_a_word),
        };
        launch(device, &shape, &self.arguments(filters))
    }

    /// Evaluates the filter of each query, `of_queries` or [`NO_FILTER`], over its next lists alone.
    ///
    /// # Errors
    /// `Internal` for arrays of other lengths, or where the launch fails.
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
            demand: Demand::of_bytes(words * filters.bytes_a_word),
        };
        launch(device, &shape, &arguments)
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
