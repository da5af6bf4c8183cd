//! Matrix products of compiled dense graphs on tensor cores, the conversion of their factors to bf16 pairs, and products
//! of matrices that differ per row.

use bytemuck::{Pod, Zeroable};

use super::super::{Shape, launch, parts, times};
use super::{NumbersAt, RowsOf, numbers_demand};
use crate::driver::{BLOCKS_PER_PROCESSOR, Demand};
use crate::memory::{Array, Device};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{Form, PANEL, PARTS_MAX, PairRows};

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
