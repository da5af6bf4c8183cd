//! Steps of compiled dense graphs on a GPU.

use bytemuck::{Pod, Zeroable};

use super::{Shape, address_of, launch, parts, times};
use crate::driver::{BLOCKS_PER_PROCESSOR, Demand};
use crate::memory::{Array, Device};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{
    Binary, CHAIN_MAX, ChainLink, EQUAL_FOLDS_MAX, Fold, Form, PANEL, PARTS_MAX, PairRows, Unary,
};

/// Tile of a matrix product: rows, rows per warp, columns (narrow and wide), and words of depth per stage in shared
/// memory.
const TILE_ROWS: usize = 128;
const WARP_ROWS: usize = 32;
const TILE_COLUMNS: [usize; 2] = [64, 128];
const TILE_DEPTH: usize = 16;
/// Number of tiles in shared memory: one that is being multiplied, and two that are being loaded.
const TILES_HELD: usize = 3;
/// Number of partial products that emulate a single-precision product on tensor cores.
const SPLIT_PRODUCTS: usize = 3;

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

/// Factor of a matrix product, in the kernels' layout.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct FactorAt {
    /// Rows of `depth` numbers.
    pub rows: NumbersAt,
    /// Matrix `[depth, columns]` in panels of 32 columns.
    pub matrix: NumbersAt,
    /// Numbers per row.
    pub depth: u32,
    /// Stride of matrix rows.
    pub row_stride: u32,
    /// Stride of panels.
    pub panel_stride: u32,
    unused: u32,
}

impl FactorAt {
    /// Creates a factor of a matrix product.
    pub fn new(rows: NumbersAt, matrix: NumbersAt, depth: usize, strides: (usize, usize)) -> Self {
        let (row_stride, panel_stride) = (strides.0 as u32, strides.1 as u32);
        FactorAt { rows, matrix, depth: depth as u32, row_stride, panel_stride, unused: 0 }
    }
}

/// Output of a sum of matrix products.
#[derive(Clone, Copy, Debug)]
pub struct ProductTo {
    /// Bias that is added to each row; address 0 for none.
    pub bias: NumbersAt,
    /// Destination of the rows; a row has `runs` adjacent results of `columns` numbers each.
    pub out: NumbersAt,
    /// Number of results per row.
    pub runs: usize,
    /// Number of columns of a result.
    pub columns: usize,
    /// True if negative results become 0.
    pub relu: bool,
    /// Number format of the factors; with pairs, depths and strides count pairs.
    pub factors: Form,
    /// Number format of the result; pairs only if the factors are pairs.
    pub result: Form,
}

/// Multiplies rows by matrices and sums the products.
///
/// # Errors
/// `Internal` for more factors than supported, or if a launch fails.
pub fn product(device: &Device, rows: RowsOf<'_>, parts: &[FactorAt], to: &ProductTo) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct ProductOfArgs {
        parts: [FactorAt; PARTS_MAX],
        bias: NumbersAt,
        out: NumbersAt,
        counts: u64,
        part_count: u32,
        runs: u32,
        columns: u32,
        is_rectified: u32,
    }
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct PairArgs {
        of: ProductOfArgs,
        is_paired: u32,
        unused: u32,
    }
    if parts.len() > PARTS_MAX {
        return Err(Error::internal(format!("a product has {} parts, expected at most {PARTS_MAX}", parts.len())));
    }
    let mut all = [FactorAt::default(); PARTS_MAX];
    all[..parts.len()].copy_from_slice(parts);
    let arguments = ProductOfArgs {
        parts: all,
        bias: to.bias,
        out: to.out,
        counts: rows.counts.address(),
        part_count: parts.len() as u32,
        runs: to.runs as u32,
        columns: to.columns as u32,
        is_rectified: u32::from(to.relu),
    };
    let count = rows.most * to.runs;
    let depth: usize = parts.iter().map(|part| part.depth as usize).sum();
    let tall = count.div_ceil(TILE_ROWS);
    let [narrow, wide] = TILE_COLUMNS;
    // Wide tiles read rows half as often, which pays off if enough tiles remain to keep the device busy.
    // Single-precision products gain nothing, because the tensor cores limit their speed.
    let is_wide = to.factors == Form::Pairs
        && to.columns > narrow
        && BLOCKS_PER_PROCESSOR * rows.requests() * tall * to.columns.div_ceil(wide) >= device.driver().blocks();
    let width = if is_wide { wide } else { narrow };
    let tiles = [to.columns.div_ceil(width), tall];
    let shape = |kernel| Shape {
        kernel,
        grid: [tiles[0], tiles[1], rows.requests()],
        threads: 256,
        shared_bytes: 4 * TILES_HELD * (TILE_ROWS * (TILE_DEPTH + 4) + TILE_DEPTH * (width + 8)),
        demand: product_demand(rows.requests(), [count, depth, to.columns], (tiles, width), to),
    };
    match (to.factors, to.result) {
        (Form::Single, Form::Single) => launch(device, &shape("product_of"), &arguments),
        (Form::Single, Form::Pairs) => {
            Err(Error::internal("a product of f32 factors cannot have a result in bf16 pairs"))
        }
        (Form::Pairs, result) => {
            let arguments = PairArgs { of: arguments, is_paired: u32::from(result == Form::Pairs), unused: 0 };
            launch(device, &shape(if is_wide { "product_of_wide_pairs" } else { "product_of_pairs" }), &arguments)
        }
    }
}

/// Estimates the demand of products of `[rows, depth]` per request with `[depth, columns]`, in tiles of this width. Every tile
/// reads its rows and columns; all reads but the first come from the caches. Tensor cores compute complete warp tiles.
fn product_demand(
    requests: usize,
    [rows, depth, columns]: [usize; 3],
    (tiles, width): ([usize; 2], usize),
    to: &ProductTo,
) -> Demand {
    let once = rows * depth * requests + depth * columns;
    let read = times(&[requests, rows, depth, tiles[0]]) + times(&[requests, depth, columns, tiles[1]]);
    let out = requests * rows * to.result.room(columns);
    let demand = Demand { again: (4 * read).saturating_sub(4 * once as u64), ..Demand::of_bytes(4 * (once + out)) };
    let (tall, wide) = (rows.next_multiple_of(WARP_ROWS), tiles[0] * width);
    let whole = times(&[requests, tall, wide, depth.next_multiple_of(TILE_DEPTH)]);
    match to.factors {
        Form::Single => Demand { tensor_tf32: times(&[SPLIT_PRODUCTS]) * whole, ..demand },
        // In this format, one unit of depth is a pair.
        Form::Pairs => Demand { tensor_bf16: 2 * whole, ..demand },
    }
}

/// Returns the demand of a step that reads and writes `numbers` numbers per row.
fn numbers_demand(rows: RowsOf<'_>, numbers: usize) -> Demand {
    Demand::of_bytes(4 * rows.requests() * rows.most * numbers)
}

/// Converts the first `count` numbers of each row to pairs of bf16.
///
/// # Errors
/// As [`product`].
pub fn narrow(device: &Device, rows: RowsOf<'_>, from: NumbersAt, count: usize, out: NumbersAt) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct NarrowArgs {
        from: NumbersAt,
        out: NumbersAt,
        counts: u64,
        count: u32,
        unused: u32,
    }
    let arguments = NarrowArgs { from, out, counts: rows.counts.address(), count: count as u32, unused: 0 };
    let grid = [parts(device, rows.most * Form::Pairs.room(count), 256, rows.requests()), rows.requests(), 1];
    let demand = numbers_demand(rows, count + Form::Pairs.room(count));
    launch(device, &Shape { kernel: "narrow", grid, threads: 256, shared_bytes: 0, demand }, &arguments)
}

/// Packs a matrix `[depth, columns]` of each row into the panels of `out`, as pairs of matrix rows.
///
/// # Errors
/// As [`product`].
pub fn pack_narrow(
    device: &Device,
    rows: RowsOf<'_>,
    from: NumbersAt,
    (depth, columns, at): (usize, usize, PairRows),
    out: NumbersAt,
) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct PackArgs {
        from: NumbersAt,
        out: NumbersAt,
        counts: u64,
        depth: u32,
        columns: u32,
        panel_rows: u32,
        unused: u32,
    }
    let arguments = PackArgs {
        from,
        out: out.behind(at.first * PANEL),
        counts: rows.counts.address(),
        depth: depth as u32,
        columns: columns as u32,
        panel_rows: at.all as u32,
        unused: 0,
    };
    let words = Form::Pairs.room(depth) * columns.next_multiple_of(PANEL);
    let grid = [parts(device, rows.most * words, 256, rows.requests()), rows.requests(), 1];
    let demand = numbers_demand(rows, depth * columns + words);
    launch(device, &Shape { kernel: "pack_narrow", grid, threads: 256, shared_bytes: 0, demand }, &arguments)
}

/// Matrices of each row: `[m, k]` at each offset of `left`, `[k, n]` at each offset of `right`.
#[derive(Clone, Copy, Debug)]
pub struct MatricesAt<'a> {
    /// Left matrices, and the offset of each matrix in a row.
    pub left: (NumbersAt, &'a Array<u32>),
    /// Right matrices, and the offset of each matrix in a row.
    pub right: (NumbersAt, &'a Array<u32>),
    /// Sizes `m`, `k` and `n`.
    pub shape: [usize; 3],
}

/// Multiplies matrices that differ from row to row.
///
/// # Errors
/// As [`product`].
pub fn matrices(device: &Device, rows: RowsOf<'_>, of: &MatricesAt<'_>, out: NumbersAt) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct MatricesArgs {
        left: NumbersAt,
        right: NumbersAt,
        out: NumbersAt,
        left_at: u64,
        right_at: u64,
        counts: u64,
        batch: u32,
        m: u32,
        k: u32,
        n: u32,
    }
    let ([m, k, n], batch) = (of.shape, of.left.1.len());
    let arguments = MatricesArgs {
        left: of.left.0,
        right: of.right.0,
        out,
        left_at: of.left.1.address(),
        right_at: of.right.1.address(),
        counts: rows.counts.address(),
        batch: batch as u32,
        m: m as u32,
        k: k as u32,
        n: n as u32,
    };
    let grid = [parts(device, rows.most * batch * m * n, 256, rows.requests()), rows.requests(), 1];
    let (each, products) = (batch * (m * k + k * n), times(&[rows.requests(), rows.most, batch, m, n, k]));
    let demand = Demand { again: 8 * products, single: products, ..numbers_demand(rows, each + batch * m * n) };
    launch(device, &Shape { kernel: "product_of_matrices", grid, threads: 256, shared_bytes: 0, demand }, &arguments)
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
