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
mod operands;
mod portable;

use std::cell::RefCell;

use super::operands::{LANES, Lines, MapTarget, Operand, Unary};
use crate::cpu::isa::{Isa, Kernels};
pub use operands::{INT8_DEPTH_MAX, Int8Matrix};
use operands::{ROWS_MAX, RowScale, Rows, TILE_COLUMNS, Tile};

/// Depth above which a panel and the codes of these rows exceed the L1 cache, and maximum number of rows then.
const DEEP: usize = 512;
const DEEP_ROWS_MAX: usize = 14;

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
