//! Steps of compiled dense graphs on a GPU: element-wise functions, reductions, chains and selections;
//! `steps/products.rs` has the matrix products.

mod products;

use bytemuck::{Pod, Zeroable};

use super::{Shape, address_of, launch, parts, times};
use crate::driver::Demand;
use crate::memory::{Array, Device};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{Binary, CHAIN_MAX, ChainLink, EQUAL_FOLDS_MAX, Fold, Unary};

pub use products::{FactorAt, MatricesAt, ProductTo, matrices, narrow, pack_narrow, product};

/// Strided numbers of a step, in the kernels' layout: number `[request, row, outer, inner]` is at the address plus the
/// sum of the indices times their strides.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct NumbersAt {
    /// Address of the first f32; 0 if there are no numbers.
    pub address: u64,
    /// Stride of requests; 0 if all requests share the numbers.
    pub request: u64,
    /// Stride of rows.
    pub row: u32,
    /// Stride of the `outer` index.
    pub outer: u32,
    /// Stride of the `inner` index: 1, or 0 if one number is repeated.
    pub inner: u32,
    unused: u32,
}

impl NumbersAt {
    /// Returns the numbers of an array from `offset` on.
    pub fn of(array: &Array<f32>, offset: usize, request: usize, row: usize) -> Self {
        let address = array.address() + 4 * offset as u64;
        NumbersAt { address, request: request as u64, row: row as u32, outer: 0, inner: 1, unused: 0 }
    }

    /// Returns the numbers after the first `count` ones.
    pub fn behind(self, count: usize) -> Self {
        NumbersAt { address: self.address + 4 * count as u64, ..self }
    }

    /// Sets the strides of the `outer` and `inner` index.
    pub fn runs(self, outer: usize, inner: usize) -> Self {
        NumbersAt { outer: outer as u32, inner: inner as u32, ..self }
    }
}

/// Rows of several requests; request `r` has `counts[r]` rows.
#[derive(Clone, Copy, Debug)]
pub struct RowsOf<'a> {
    /// Number of rows per request, `[requests]`.
    pub counts: &'a Array<u32>,
    /// Maximum number of rows per request.
    pub most: usize,
}

impl RowsOf<'_> {
    fn requests(&self) -> usize {
        self.counts.len()
    }
}

/// Returns the demand of a step that reads and writes `numbers` numbers per row.
fn numbers_demand(rows: RowsOf<'_>, numbers: usize) -> Demand {
    Demand::of_bytes(4 * rows.requests() * rows.most * numbers)
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct MapArgs {
    first: NumbersAt,
    second: NumbersAt,
    out: NumbersAt,
    counts: u64,
    function: u32,
    outer: u32,
    inner: u32,
    unused: u32,
}

/// Indices of the numbers of a row that a step processes.
#[derive(Clone, Copy, Debug)]
pub struct RunsOfRow {
    /// Number of `outer` indices.
    pub outer: usize,
    /// Number of `inner` indices.
    pub inner: usize,
}

fn map(
    device: &Device,
    rows: RowsOf<'_>,
    kernel: &'static str,
    runs: RunsOfRow,
    [first, second, out]: [NumbersAt; 3],
    function: u32,
) -> Result<()> {
    let RunsOfRow { outer, inner } = runs;
    let (outer, inner) = (outer as u32, inner as u32);
    let arguments = MapArgs { first, second, out, counts: rows.counts.address(), function, outer, inner, unused: 0 };
    let each = if kernel == "fold_runs" { 8 } else { 256 };
    let count = rows.most * runs.outer * if kernel == "fold_runs" { 1 } else { runs.inner };
    let grid = [parts(device, count, each, rows.requests()), rows.requests(), 1];
    let operands = if kernel == "map_two" { 2 } else { 1 };
    let demand = numbers_demand(rows, runs.outer * runs.inner * operands + count / rows.most.max(1));
    launch(device, &Shape { kernel, grid, threads: 256, shared_bytes: 0, demand }, &arguments)
}

/// Applies a unary function to each number.
///
/// # Errors
/// As [`product`].
pub fn map1(device: &Device, rows: RowsOf<'_>, f: Unary, runs: RunsOfRow, a: NumbersAt, out: NumbersAt) -> Result<()> {
    map(device, rows, "map_one", runs, [a, NumbersAt::default(), out], f as u32)
}

/// Applies a binary function to each pair of numbers.
///
/// # Errors
/// As [`product`].
pub fn map2(
    device: &Device,
    rows: RowsOf<'_>,
    f: Binary,
    runs: RunsOfRow,
    [a, b]: [NumbersAt; 2],
    out: NumbersAt,
) -> Result<()> {
    map(device, rows, "map_two", runs, [a, b, out], f as u32)
}

/// Reduces the `inner` numbers of each `outer` index to one number.
///
/// # Errors
/// As [`product`].
pub fn fold(device: &Device, rows: RowsOf<'_>, f: Fold, runs: RunsOfRow, a: NumbersAt, out: NumbersAt) -> Result<()> {
    map(device, rows, "fold_runs", runs, [a, NumbersAt::default(), out], f as u32)
}

/// Reduction of the numbers whose key equals a row's key, in the kernels' layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct KeyedFoldAt {
    /// Numbers to reduce, one per key.
    pub values: NumbersAt,
    function: u32,
    unused: [u32; 3],
}

impl KeyedFoldAt {
    /// Creates a reduction.
    pub fn new(f: Fold, values: NumbersAt) -> Self {
        KeyedFoldAt { values, function: f as u32, unused: [0; 3] }
    }
}

/// Reduces, for each row, `count` numbers; each is multiplied by 1 if its key equals the row's key, and by 0 otherwise.
/// Reduction `n` computes number `n` of the output row.
///
/// # Errors
/// `Internal` for more reductions than supported, or if the launch fails.
pub fn fold_equal(
    device: &Device,
    rows: RowsOf<'_>,
    (key, keys): (NumbersAt, NumbersAt),
    count: usize,
    (folds, out): (&[KeyedFoldAt], NumbersAt),
) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct EqualArgs {
        key: NumbersAt,
        keys: NumbersAt,
        out: NumbersAt,
        folds: [KeyedFoldAt; EQUAL_FOLDS_MAX],
        counts: u64,
        fold_count: u32,
        count: u32,
    }
    if folds.len() > EQUAL_FOLDS_MAX {
        return Err(Error::internal(format!(
            "a step has {} reductions, expected at most {EQUAL_FOLDS_MAX}",
            folds.len()
        )));
    }
    let mut all = [KeyedFoldAt::default(); EQUAL_FOLDS_MAX];
    all[..folds.len()].copy_from_slice(folds);
    let counts = rows.counts.address();
    let (fold_count, count) = (folds.len() as u32, count as u32);
    let arguments = EqualArgs { key, keys, out, folds: all, counts, fold_count, count };
    let grid = [parts(device, rows.most, 8, rows.requests()), rows.requests(), 1];
    // Keys and numbers of a request are read from memory once, and from the caches again for each row.
    let (requests, beside) = (rows.requests(), count as usize * (1 + folds.len()));
    let again = 4 * times(&[requests, rows.most.saturating_sub(1), beside]);
    let once = 4 * requests * (beside + rows.most * (1 + folds.len()));
    let single = times(&[requests, rows.most, beside]);
    let demand = Demand { again, single, ..Demand::of_bytes(once) };
    launch(device, &Shape { kernel: "fold_equal", grid, threads: 256, shared_bytes: 0, demand }, &arguments)
}

/// Chain of functions on single numbers of each row, like `cpu::dense::Chain`.
#[derive(Clone, Copy, Debug)]
pub struct ChainAt<'a> {
    /// Inputs, which fill the first registers.
    pub reads: &'a [NumbersAt],
    /// Functions whose results fill the next registers.
    pub links: &'a [ChainLink],
    /// Output number `n` of a row is register `kept[n]`.
    pub kept: &'a [usize],
}

/// Threads per block of a chain; the registers of all threads are in shared memory.
const CHAIN_THREADS: usize = 128;

/// Runs a chain on single numbers of each row.
///
/// # Errors
/// `Internal` for a chain that is longer than supported, or if the launch fails.
pub fn chain(device: &Device, rows: RowsOf<'_>, chain: &ChainAt<'_>, out: NumbersAt) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct ChainArgs {
        reads: [NumbersAt; CHAIN_MAX],
        out: NumbersAt,
        counts: u64,
        links: [u32; CHAIN_MAX],
        kept: [u32; CHAIN_MAX],
        read_count: u32,
        link_count: u32,
        kept_count: u32,
        unused: u32,
    }
    let ChainAt { reads, links, kept } = *chain;
    let most = reads.len().max(links.len()).max(kept.len());
    if most > CHAIN_MAX {
        return Err(Error::internal(format!(
            "a chain has {most} inputs, functions or outputs, expected at most {CHAIN_MAX}"
        )));
    }
    let mut arguments = ChainArgs {
        out,
        counts: rows.counts.address(),
        read_count: reads.len() as u32,
        link_count: links.len() as u32,
        kept_count: kept.len() as u32,
        ..ChainArgs::zeroed()
    };
    arguments.reads[..reads.len()].copy_from_slice(reads);
    for (to, link) in arguments.links.iter_mut().zip(links) {
        // One byte each: the function, the two registers of its operands, and whether the function is binary.
        *to = match *link {
            ChainLink::One(f, a) => f as u32 | (a as u32) << 8,
            ChainLink::Two(f, [a, b]) => f as u32 | (a as u32) << 8 | (b as u32) << 16 | 1 << 24,
        };
    }
    arguments.kept.iter_mut().zip(kept).for_each(|(to, &register)| *to = register as u32);
    let grid = [parts(device, rows.most, CHAIN_THREADS, rows.requests()), rows.requests(), 1];
    let of_rows = |numbers: usize| times(&[rows.requests(), rows.most, numbers]);
    let bytes = 4 * rows.requests() * rows.most * (reads.len() + kept.len());
    let demand = Demand { single: of_rows(links.len()), ..Demand::of_bytes(bytes) };
    let shared_bytes = 4 * CHAIN_THREADS * (reads.len() + links.len());
    let threads = CHAIN_THREADS as u32;
    launch(device, &Shape { kernel: "chain", grid, threads, shared_bytes, demand }, &arguments)
}

/// Destination of selected numbers: groups of `count` numbers, `stride` apart, from number `first` of an output row on.
#[derive(Clone, Copy, Debug)]
pub struct PickDestination {
    /// Number of groups.
    pub runs: usize,
    /// Numbers per group.
    pub count: usize,
    /// Distance between groups in an output row.
    pub stride: usize,
    /// Index of the first number in an output row.
    pub first: usize,
}

/// Selection of the numbers to copy.
#[derive(Clone, Copy, Default)]
struct Picked<'a> {
    /// Number `n` of an output row is number `numbers[n]` of the input row; `None` for number `n`.
    numbers: Option<&'a Array<u32>>,
    /// Output row `n` is input row `rows[n]`; `None` for row `n`.
    rows: Option<&'a Array<u32>>,
}

/// Copies numbers of each row: number `n` of the selection is number `index[n]`, or number `n` if there is no index.
///
/// # Errors
/// As [`product`].
pub fn pick(
    device: &Device,
    rows: RowsOf<'_>,
    from: NumbersAt,
    index: Option<&Array<u32>>,
    placing: PickDestination,
    out: NumbersAt,
) -> Result<()> {
    picked(device, rows, [from, out], Picked { numbers: index, rows: None }, placing)
}

/// Gathers the rows `named` of a matrix `[_, width]`.
///
/// # Errors
/// `Internal` for a row that does not exist; as [`product`]; `Overloaded` if device memory is exhausted.
pub fn take_rows(device: &Device, matrix: &Array<f32>, width: usize, named: &[usize]) -> Result<Array<f32>> {
    if named.iter().any(|row| (row + 1).saturating_mul(width) > matrix.len()) {
        return Err(Error::internal(format!(
            "a row is outside of the matrix, expected rows within {} elements",
            matrix.len()
        )));
    }
    let index: Array<u32> = device.copy(&named.iter().map(|&row| row as u32).collect::<Vec<u32>>())?;
    let (counts, out) = (device.copy(&[named.len() as u32])?, device.room(named.len() * width)?);
    let at = [NumbersAt::of(matrix, 0, 0, width), NumbersAt::of(&out, 0, 0, width)];
    let placing = PickDestination { runs: 1, count: width, stride: 0, first: 0 };
    let of = Picked { numbers: None, rows: Some(&index) };
    picked(device, RowsOf { counts: &counts, most: named.len() }, at, of, placing)?;
    Ok(out)
}

fn picked(
    device: &Device,
    rows: RowsOf<'_>,
    [from, out]: [NumbersAt; 2],
    of: Picked<'_>,
    PickDestination { runs, count, stride, first }: PickDestination,
) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct PickArgs {
        from: NumbersAt,
        out: NumbersAt,
        index: u64,
        rows: u64,
        counts: u64,
        runs: u32,
        count: u32,
        stride: u32,
        first: u32,
    }
    let arguments = PickArgs {
        from,
        out,
        index: address_of(of.numbers),
        rows: address_of(of.rows),
        counts: rows.counts.address(),
        runs: runs as u32,
        count: count as u32,
        stride: stride as u32,
        first: first as u32,
    };
    let grid = [parts(device, rows.most * runs * count, 256, rows.requests()), rows.requests(), 1];
    let demand = numbers_demand(rows, 2 * runs * count);
    launch(device, &Shape { kernel: "pick", grid, threads: 256, shared_bytes: 0, demand }, &arguments)
}
