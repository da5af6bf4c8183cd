//! Quantized matrices and rows, which the loops of each instruction set multiply.

use super::super::operands::{LANES, Lines, PANEL};

/// Numbers of the depth that are multiplied in one 32-bit lane.
pub(super) const QUAD: usize = 4;
/// Bytes of a panel's columns per quad of the depth.
pub(super) const QUAD_BYTES: usize = PANEL * QUAD;
/// Maximum number of rows that are quantized and multiplied together. Several tiles of rows read a panel from the L1
/// cache.
pub(super) const ROWS_MAX: usize = 56;
/// Number of columns that are computed before their function is applied, so that they are still in the L1 cache.
pub(super) const TILE_COLUMNS: usize = 4 * PANEL;
/// Maximum depth of an int8 product: sums of deeper ones may exceed 32 bits.
pub const INT8_DEPTH_MAX: usize = 1 << 16;

/// Matrix `[depth, columns]`, quantized per column.
#[derive(Clone, Debug)]
pub struct Int8Matrix {
    pub(super) depth: usize,
    pub(super) columns: usize,
    /// Codes `[panels, quads, PANEL, QUAD]`, four codes per number.
    pub(super) codes: Lines,
    /// Scale of each column, padded to complete panels.
    pub(super) scales: Vec<f32>,
    /// Sum of the codes of each column, padded to complete panels.
    pub(super) sums: Vec<i32>,
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

    pub(super) fn quads(&self) -> usize {
        self.depth.div_ceil(QUAD)
    }

    pub(super) fn codes(&self) -> &[i8] {
        bytemuck::cast_slice(self.codes.numbers())
    }

    /// Returns the position of a register of 16 columns in the codes; its quads are [`QUAD_BYTES`] apart.
    pub(super) fn register(&self, register: usize) -> usize {
        let first = register * LANES;
        first / PANEL * self.quads() * QUAD_BYTES + first % PANEL * QUAD
    }
}

/// Returns the inverse of a scale; 0 if the scale is too small for an inverse, so that all codes are 0.
#[inline(always)]
fn inverse(scale: f32) -> f32 {
    if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 }
}

/// Quantization of a row.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RowScale {
    pub(super) scale: f32,
    pub(super) inverse: f32,
    /// Code of 0.
    pub(super) zero: i32,
}

impl RowScale {
    /// Returns the quantization of a row with numbers from `min` to `max`, which include 0.
    #[inline(always)]
    pub(super) fn of(min: f32, max: f32, is_finite: bool) -> RowScale {
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
pub(super) struct Rows<'a> {
    pub(super) numbers: &'a [f32],
    pub(super) stride: usize,
    pub(super) depth: usize,
    pub(super) count: usize,
}

/// Quantized rows, and columns of the result to compute.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    /// Number of rows, at most [`ROWS_MAX`].
    pub(super) rows: usize,
    /// Codes of the rows, `stride` bytes apart, padded to complete quads.
    pub(super) codes: &'a [u8],
    pub(super) stride: usize,
    pub(super) scales: &'a [RowScale; ROWS_MAX],
    pub(super) matrix: &'a Int8Matrix,
    /// First column, a multiple of [`TILE_COLUMNS`], and number of columns.
    pub(super) first: usize,
    pub(super) count: usize,
    /// Bias of all columns, or empty.
    pub(super) bias: &'a [f32],
    /// True if the products are added to the numbers of the output instead of the bias.
    pub(super) adds: bool,
}
