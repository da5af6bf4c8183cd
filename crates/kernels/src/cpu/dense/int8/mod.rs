//! Int8 products: matrices are quantized once, per column; rows when they are multiplied, per row.
//!
//! A weight is `scale * code` with a code from -127 to 127. A number of a row is `scale * (code - zero)` with a code
//! from 0 to 255, where `zero` is the code of 0 and the scale is the range of the row, 0 included, over 255. So a
//! number is off by at most half a scale, a row of one sign has the full resolution, and 0 stays 0. The sums of
//! products of codes are exact integers. The conversion to f32 is a fixed sequence of operations without fused
//! multiply-adds: results are equal bit for bit on every instruction set, and do not depend on other rows.
//!
//! A row with NaN or an infinite number yields NaN in all columns.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use std::cell::RefCell;

use super::operands::{LANES, Lines, MapTarget, Operand, PANEL, Unary};
use crate::cpu::isa::{Isa, Kernels};

/// Numbers of the depth that are multiplied in one 32-bit lane.
const QUAD: usize = 4;
/// Bytes of a panel's columns per quad of the depth.
const QUAD_BYTES: usize = PANEL * QUAD;
/// Maximum number of rows that are quantized and multiplied together. Several tiles of rows read a panel from the L1
/// cache.
const ROWS_MAX: usize = 56;
/// Depth above which a panel and the codes of these rows exceed the L1 cache, and maximum number of rows then.
const DEEP: usize = 512;
const DEEP_ROWS_MAX: usize = 14;
/// Number of columns that are computed before their function is applied, so that they are still in the L1 cache.
const TILE_COLUMNS: usize = 4 * PANEL;
/// Maximum depth of an int8 product: sums of deeper ones may exceed 32 bits.
pub const INT8_DEPTH_MAX: usize = 1 << 16;

/// Matrix `[depth, columns]`, quantized per column.
#[derive(Clone, Debug)]
pub struct Int8Matrix {
    depth: usize,
    columns: usize,
    /// Codes `[panels, quads, PANEL, QUAD]`, four codes per number.
    codes: Lines,
    /// Scale of each column, padded to complete panels.
    scales: Vec<f32>,
    /// Sum of the codes of each column, padded to complete panels.
    sums: Vec<i32>,
}

impl Int8Matrix {
    /// Quantizes a row-major matrix; returns `None` if it has NaN, an infinite weight or too many rows.
    pub fn quantize(matrix: &[f32], depth: usize, columns: usize) -> Option<Int8Matrix> {
        let matrix = matrix.get(..depth * columns)?;
        if depth > INT8_DEPTH_MAX || columns == 0 || !matrix.iter().all(|w| w.is_finite()) {
            return None;
        }
        let (panels, quads) = (columns.div_ceil(PANEL), depth.div_ceil(QUAD));
        let mut largest = vec![0f32; columns];
        for row in matrix.chunks_exact(columns) {
            largest.iter_mut().zip(row).for_each(|(largest, w)| *largest = largest.max(w.abs()));
        }
        let (mut scales, mut sums) = (vec![0.0; panels * PANEL], vec![0; panels * PANEL]);
        let inverses: Vec<f32> = largest.iter().map(|largest| inverse(largest / 127.0)).collect();
        for (scale, (largest, inverse)) in scales.iter_mut().zip(largest.iter().zip(&inverses)) {
            *scale = if *inverse > 0.0 { largest / 127.0 } else { 0.0 };
        }
        let mut codes = Lines::new(panels * quads * PANEL);
        let bytes: &mut [i8] = bytemuck::cast_slice_mut(codes.numbers_mut());
        for (k, row) in matrix.chunks_exact(columns).enumerate() {
            for (column, (w, inverse)) in row.iter().zip(&inverses).enumerate() {
                let code = (w * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
                let (panel, within) = (column / PANEL, column % PANEL);
                bytes[(panel * quads + k / QUAD) * QUAD_BYTES + within * QUAD + k % QUAD] = code;
                sums[column] += i32::from(code);
            }
        }
        Some(Int8Matrix { depth, columns, codes, scales, sums })
    }

    /// Returns the number of rows.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Returns the number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the size in memory in bytes.
    pub fn bytes(&self) -> usize {
        4 * (self.codes.numbers().len() + self.scales.len() + self.sums.len())
    }

    fn quads(&self) -> usize {
        self.depth.div_ceil(QUAD)
    }

    fn codes(&self) -> &[i8] {
        bytemuck::cast_slice(self.codes.numbers())
    }

    /// Returns the position of a register of 16 columns in the codes; its quads are [`QUAD_BYTES`] apart.
    fn register(&self, register: usize) -> usize {
        let first = register * LANES;
        first / PANEL * self.quads() * QUAD_BYTES + first % PANEL * QUAD
    }
}

/// Returns the inverse of a scale; 0 if the scale is too small for an inverse, so that all codes are 0.
#[inline(always)]
fn inverse(scale: f32) -> f32 {
    if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 }
}

/// Rows and the matrix by which they are multiplied.
#[derive(Clone, Copy, Debug)]
pub struct Int8Part<'a> {
    /// Rows in f32, each as long as the depth of the matrix.
    pub rows: &'a [f32],
    /// Distance between rows.
    pub stride: usize,
    /// Right factor.
    pub matrix: &'a Int8Matrix,
}

/// A sum of int8 products, with optional bias and function.
#[derive(Clone, Copy, Debug)]
pub struct Int8Product<'a> {
    /// Number of rows of each part and of the result.
    pub rows: usize,
    /// Products to sum, at least one; their matrices have equally many columns.
    pub parts: &'a [Int8Part<'a>],
    /// Bias, `[columns]` and a register's width of padding, or empty.
    pub bias: &'a [f32],
    /// Function of the results.
    pub map: Option<Unary>,
}

/// Quantization of a row.
#[derive(Clone, Copy, Debug, Default)]
struct RowScale {
    scale: f32,
    inverse: f32,
    /// Code of 0.
    zero: i32,
}

impl RowScale {
    /// Returns the quantization of a row with numbers from `min` to `max`, which include 0.
    #[inline(always)]
    fn of(min: f32, max: f32, is_finite: bool) -> RowScale {
        // The difference of both bounds might overflow.
        let scale = max / 255.0 - min / 255.0;
        let inverse = inverse(scale);
        match (is_finite, inverse > 0.0) {
            (false, _) => RowScale { scale: f32::NAN, inverse: 0.0, zero: 0 },
            (true, false) => RowScale::default(),
            (true, true) => RowScale { scale, inverse, zero: (-min * inverse).round_ties_even() as i32 },
        }
    }
}

/// Rows to quantize.
#[derive(Clone, Copy)]
struct Rows<'a> {
    numbers: &'a [f32],
    stride: usize,
    depth: usize,
    count: usize,
}

/// Quantized rows, and columns of the result to compute.
#[derive(Clone, Copy)]
struct Tile<'a> {
    /// Number of rows, at most [`ROWS_MAX`].
    rows: usize,
    /// Codes of the rows, `stride` bytes apart, padded to complete quads.
    codes: &'a [u8],
    stride: usize,
    scales: &'a [RowScale; ROWS_MAX],
    matrix: &'a Int8Matrix,
    /// First column, a multiple of [`TILE_COLUMNS`], and number of columns.
    first: usize,
    count: usize,
    /// Bias of all columns, or empty.
    bias: &'a [f32],
    /// True if the products are added to the numbers of the output instead of the bias.
    adds: bool,
}

macro_rules! dispatch {
    ($self:ident, $function:ident ( $($argument:expr),* )) => {
        match $self.isa {
            // SAFETY: `Kernels` exists only if its features were detected; the caller checked the slices.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::$function($($argument),*) },
            // SAFETY: `Kernels` exists only if its features were detected; the caller checked the slices.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::$function($($argument),*) },
            _ => portable::$function($($argument),*),
        }
    };
}

/// Scratch memory of a thread: codes of a block's rows, and results before their function is applied.
#[derive(Default)]
struct Room {
    codes: Lines,
    results: Lines,
}

thread_local! {
    static ROOM: RefCell<Room> = RefCell::default();
}

impl Kernels {
    /// Writes a sum of int8 products to `out`, whose rows are `stride` apart; numbers between the columns and the
    /// stride are unchanged.
    ///
    /// # Panics
    /// If a slice is shorter than the shapes say, or the matrices differ in their columns.
    pub fn product_int8(self, product: &Int8Product<'_>, out: &mut [f32], stride: usize) {
        let Int8Product { rows, parts, bias, .. } = *product;
        let columns = parts[0].matrix.columns;
        if rows == 0 {
            return;
        }
        assert!(stride >= columns && out.len() >= (rows - 1) * stride + columns, "an output shorter than the product");
        assert!(bias.is_empty() || bias.len() >= columns.next_multiple_of(LANES), "a bias shorter than the columns");
        for Int8Part { rows: numbers, stride, matrix } in parts {
            assert!(matrix.columns == columns, "matrices with different columns");
            assert!(numbers.len() >= (rows - 1) * stride + matrix.depth, "rows of a part too short");
        }
        ROOM.with_borrow_mut(|room| {
            let is_deep = parts.iter().any(|part| part.matrix.depth > DEEP);
            let most = if is_deep { DEEP_ROWS_MAX } else { ROWS_MAX };
            let blocks = rows.div_ceil(most);
            let mut row = 0;
            for block in 0..blocks {
                // Blocks of nearly equal height, so that none has only a row or two.
                let count = (rows - row).div_ceil(blocks - block);
                self.block_int8(product, row, count, room, &mut out[row * stride..], stride);
                row += count;
            }
        });
    }

    /// Computes `count` rows from `row` on.
    fn block_int8(
        self,
        product: &Int8Product<'_>,
        row: usize,
        count: usize,
        room: &mut Room,
        out: &mut [f32],
        stride: usize,
    ) {
        let columns = product.parts[0].matrix.columns;
        // A function of a sum of several parts is applied when the last part has been added.
        let is_mapped_at_once = product.map.is_some() && product.parts.len() == 1;
        if is_mapped_at_once && room.results.numbers().len() < ROWS_MAX * TILE_COLUMNS {
            room.results = Lines::new(ROWS_MAX * TILE_COLUMNS);
        }
        for (n, part) in product.parts.iter().enumerate() {
            let matrix = part.matrix;
            // Rows a multiple of 4 KiB apart would share sets of the L1 cache.
            let apart = matrix.depth.next_multiple_of(4 * LANES) + 4 * LANES;
            if 4 * room.codes.numbers().len() < count * apart {
                room.codes = Lines::new(count * apart / 4);
            }
            let codes: &mut [u8] = bytemuck::cast_slice_mut(room.codes.numbers_mut());
            let mut scales = [RowScale::default(); ROWS_MAX];
            let numbers = &part.rows[row * part.stride..];
            let rows = Rows { numbers, stride: part.stride, depth: matrix.depth, count };
            dispatch!(self, quantize(&rows, codes, apart, &mut scales));
            for first in (0..columns).step_by(TILE_COLUMNS) {
                let width = TILE_COLUMNS.min(columns - first);
                let tile = Tile {
                    rows: count,
                    codes,
                    stride: apart,
                    scales: &scales,
                    matrix,
                    first,
                    count: width,
                    bias: product.bias,
                    adds: n > 0,
                };
                match product.map.filter(|_| is_mapped_at_once) {
                    None => dispatch!(self, tile(&tile, &mut out[first..], stride)),
                    Some(f) => {
                        let results = room.results.numbers_mut();
                        dispatch!(self, tile(&tile, results, TILE_COLUMNS));
                        let input = Operand { numbers: results, row: TILE_COLUMNS, outer: 0, inner: 1 };
                        let numbers = &mut out[first..];
                        let mut target = MapTarget { numbers, stride, rows: count, outer: 1, inner: width };
                        self.map1(f, &input, &mut target);
                    }
                }
            }
        }
        if let Some(f) = product.map.filter(|_| !is_mapped_at_once) {
            self.map_in_place(f, count, columns, out, stride);
        }
    }

    /// Applies a function to rows of `columns` numbers.
    fn map_in_place(self, f: Unary, rows: usize, columns: usize, out: &mut [f32], stride: usize) {
        let mut copy = [0.0; TILE_COLUMNS];
        for row in 0..rows {
            for numbers in out[row * stride..][..columns].chunks_mut(TILE_COLUMNS) {
                copy[..numbers.len()].copy_from_slice(numbers);
                let input = Operand { numbers: &copy, row: 0, outer: 0, inner: 1 };
                let inner = numbers.len();
                self.map1(f, &input, &mut MapTarget { numbers, stride: inner, rows: 1, outer: 1, inner });
            }
        }
    }
}

#[cfg(test)]
mod tests;
