//! Outer products summed over rows, `Aᵀ B`: the gradient of a matrix that rows were multiplied by.
//!
//! Every number of the result is one chain of multiply-adds in row order that begins with the value in `out`. So a
//! block of rows can be split anywhere without changing the bits. A tile of up to 14 rows and 32 columns of the result
//! stays in registers for all rows of a block. A result with few rows has tiles of up to 128 columns, to have enough
//! independent sums.

use super::super::isa::{Isa, Kernels};

/// Operands of an outer product: two matrices with the same number of rows.
#[derive(Clone, Copy, Debug)]
pub struct Outer<'a> {
    /// Number of rows of both matrices.
    pub rows: usize,
    /// Rows of `depth` numbers.
    pub left: &'a [f32],
    /// Distance between rows of `left`; 0 if all rows read the same numbers.
    pub left_stride: usize,
    /// Rows of the result.
    pub depth: usize,
    /// Rows of `columns` numbers.
    pub right: &'a [f32],
    /// Distance between rows of `right`.
    pub right_stride: usize,
    /// Columns of the result.
    pub columns: usize,
}

impl Kernels {
    /// Adds `leftᵀ right` to `out`, `[depth, columns]`, in row order.
    ///
    /// # Panics
    /// If a slice is shorter than the shapes require.
    pub fn outer(self, outer: &Outer<'_>, out: &mut [f32]) {
        let Outer { rows, left, left_stride, depth, right, right_stride, columns } = *outer;
        if rows == 0 || depth == 0 || columns == 0 {
            return;
        }
        assert!(out.len() >= depth * columns, "an output shorter than the sum");
        assert!(left.len() >= (rows - 1) * left_stride + depth, "left rows too short");
        assert!(right.len() >= (rows - 1) * right_stride + columns, "right rows too short");
        // A result of one column is computed as one row, whose numbers are contiguous.
        let turned = Outer {
            left: right,
            left_stride: right_stride,
            depth: 1,
            right: left,
            right_stride: left_stride,
            columns: depth,
            rows,
        };
        let outer = if columns == 1 { &turned } else { outer };
        match self.isa {
            // SAFETY: `Kernels` is made only after the features were found; the slices are checked above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { avx512::outer(outer, out) },
            // SAFETY: `Kernels` is made only after the features were found; the slices are checked above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::outer(outer, out) },
            _ => plain(outer, out, 0),
        }
    }
}

/// Computes the result from a column on, without vector instructions.
#[inline(always)]
fn plain(outer: &Outer<'_>, out: &mut [f32], from: usize) {
    let Outer { rows, left, left_stride, depth, right, right_stride, columns } = *outer;
    for row in 0..rows {
        let right = &right[row * right_stride + from..][..columns - from];
        for (out, x) in out.chunks_exact_mut(columns).zip(&left[row * left_stride..][..depth]) {
            out[from..].iter_mut().zip(right).for_each(|(sum, y)| *sum += x * y);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::Outer;
    use crate::cpu::dense::LANES;

    /// Rows of a tile: 28 of 32 registers hold sums.
    const ROWS_MAX: usize = 14;
    /// Number of rows up to which a tile has [`WIDE`] registers of columns.
    const ROWS_FEW: usize = 3;
    const WIDE: usize = 8;

    /// # Safety
    /// The CPU has AVX-512 F; the slices are as long as `Kernels::outer` checks.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn outer(outer: &Outer<'_>, out: &mut [f32]) {
        let tiles = outer.depth.div_ceil(ROWS_MAX);
        let registers = outer.columns.div_ceil(LANES);
        let mut first = 0;
        for tile in 0..tiles {
            // Tiles of nearly equal height: no tile is left with one or two rows.
            let rows = (outer.depth - first).div_ceil(tiles - tile);
            let mut register = 0;
            while register < registers {
                // SAFETY: this function's `# Safety` conditions hold; the tile begins inside the result.
                register += unsafe {
                    match registers - register {
                        WIDE.. if rows <= ROWS_FEW => wide(outer, out.as_mut_ptr(), first, register, rows),
                        2.. => panel::<2>(outer, out.as_mut_ptr(), first, register, rows),
                        _ => panel::<1>(outer, out.as_mut_ptr(), first, register, rows),
                    }
                };
            }
            first += rows;
        }
    }

    /// # Safety
    /// As [`tile`], for a tile of `rows` rows.
    #[target_feature(enable = "avx512f")]
    unsafe fn wide(outer: &Outer<'_>, out: *mut f32, first: usize, register: usize, rows: usize) -> usize {
        // SAFETY: this function's `# Safety` conditions hold.
        unsafe {
            match rows {
                1 => tile::<1, WIDE>(outer, out, first, register),
                2 => tile::<2, WIDE>(outer, out, first, register),
                _ => tile::<3, WIDE>(outer, out, first, register),
            }
        }
        WIDE
    }

    /// # Safety
    /// As [`tile`], for a tile of `rows` rows.
    #[target_feature(enable = "avx512f")]
    unsafe fn panel<const V: usize>(
        outer: &Outer<'_>,
        out: *mut f32,
        first: usize,
        register: usize,
        rows: usize,
    ) -> usize {
        // SAFETY: this function's `# Safety` conditions hold.
        unsafe {
            match rows {
                1 => tile::<1, V>(outer, out, first, register),
                2 => tile::<2, V>(outer, out, first, register),
                3 => tile::<3, V>(outer, out, first, register),
                4 => tile::<4, V>(outer, out, first, register),
                5 => tile::<5, V>(outer, out, first, register),
                6 => tile::<6, V>(outer, out, first, register),
                7 => tile::<7, V>(outer, out, first, register),
                8 => tile::<8, V>(outer, out, first, register),
                9 => tile::<9, V>(outer, out, first, register),
                10 => tile::<10, V>(outer, out, first, register),
                11 => tile::<11, V>(outer, out, first, register),
                12 => tile::<12, V>(outer, out, first, register),
                13 => tile::<13, V>(outer, out, first, register),
                _ => tile::<14, V>(outer, out, first, register),
            }
        }
        V
    }

    /// Computes the sums of `M` rows from `first` on and `V` registers of columns from `register` on.
    ///
    /// # Safety
    /// As [`outer`]; the rows and the first column of every register lie inside the result.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn tile<const M: usize, const V: usize>(outer: &Outer<'_>, out: *mut f32, first: usize, register: usize) {
        let column = register * LANES;
        let mut masks = [0u16; V];
        for (v, mask) in masks.iter_mut().enumerate() {
            *mask = (u32::MAX >> (32 - (outer.columns - column - v * LANES).min(LANES))) as u16;
        }
        let out = out.wrapping_add(first * outer.columns + column);
        let mut sums = [[_mm512_setzero_ps(); V]; M];
        for (m, sum) in sums.iter_mut().enumerate() {
            for v in 0..V {
                // SAFETY: the masked numbers lie inside the result.
                sum[v] = unsafe { _mm512_maskz_loadu_ps(masks[v], out.add(m * outer.columns + v * LANES)) };
            }
        }
        let (mut left, mut right) =
            (outer.left.as_ptr().wrapping_add(first), outer.right.as_ptr().wrapping_add(column));
        for _ in 0..outer.rows {
            let mut numbers = [_mm512_setzero_ps(); V];
            for v in 0..V {
                // SAFETY: the masked numbers lie inside a row of the right matrix.
                numbers[v] = unsafe { _mm512_maskz_loadu_ps(masks[v], right.add(v * LANES)) };
            }
            for (m, sum) in sums.iter_mut().enumerate() {
                // SAFETY: a row of the left matrix holds `depth` numbers.
                let x = _mm512_set1_ps(unsafe { *left.add(m) });
                for v in 0..V {
                    sum[v] = _mm512_fmadd_ps(x, numbers[v], sum[v]);
                }
            }
            (left, right) = (left.wrapping_add(outer.left_stride), right.wrapping_add(outer.right_stride));
        }
        for (m, sum) in sums.iter().enumerate() {
            for v in 0..V {
                // SAFETY: the masked numbers lie inside the result.
                unsafe { _mm512_mask_storeu_ps(out.add(m * outer.columns + v * LANES), masks[v], sum[v]) };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{Outer, plain};

    /// Rows of a tile: 12 of 16 registers hold sums.
    const ROWS_MAX: usize = 6;
    /// Number of elements of a register.
    const WIDTH: usize = 8;
    /// Registers of a tile's columns.
    const WIDE: usize = 2;

    /// # Safety
    /// The CPU has AVX2 and FMA; the slices are as long as `Kernels::outer` checks.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn outer(outer: &Outer<'_>, out: &mut [f32]) {
        let whole = outer.columns / (WIDTH * WIDE) * (WIDTH * WIDE);
        let tiles = outer.depth.div_ceil(ROWS_MAX);
        let mut first = 0;
        for number in 0..tiles {
            let rows = (outer.depth - first).div_ceil(tiles - number);
            for column in (0..whole).step_by(WIDTH * WIDE) {
                // SAFETY: this function's `# Safety` conditions hold; the tile lies inside the result.
                unsafe {
                    match rows {
                        1 => tile::<1>(outer, out.as_mut_ptr(), first, column),
                        2 => tile::<2>(outer, out.as_mut_ptr(), first, column),
                        3 => tile::<3>(outer, out.as_mut_ptr(), first, column),
                        4 => tile::<4>(outer, out.as_mut_ptr(), first, column),
                        5 => tile::<5>(outer, out.as_mut_ptr(), first, column),
                        _ => tile::<ROWS_MAX>(outer, out.as_mut_ptr(), first, column),
                    }
                }
            }
            first += rows;
        }
        if whole < outer.columns {
            plain(outer, out, whole);
        }
    }

    /// Computes the sums of `M` rows from `first` on and 16 columns from `column` on.
    ///
    /// # Safety
    /// As [`outer`]; the tile lies inside the result.
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn tile<const M: usize>(outer: &Outer<'_>, out: *mut f32, first: usize, column: usize) {
        let out = out.wrapping_add(first * outer.columns + column);
        let mut sums = [[_mm256_setzero_ps(); WIDE]; M];
        for (m, sum) in sums.iter_mut().enumerate() {
            for (v, sum) in sum.iter_mut().enumerate() {
                // SAFETY: the tile lies inside the result.
                *sum = unsafe { _mm256_loadu_ps(out.add(m * outer.columns + v * WIDTH)) };
            }
        }
        let (mut left, mut right) =
            (outer.left.as_ptr().wrapping_add(first), outer.right.as_ptr().wrapping_add(column));
        for _ in 0..outer.rows {
            let mut numbers = [_mm256_setzero_ps(); WIDE];
            for (v, numbers) in numbers.iter_mut().enumerate() {
                // SAFETY: the columns lie inside a row of the right matrix.
                *numbers = unsafe { _mm256_loadu_ps(right.add(v * WIDTH)) };
            }
            for (m, sum) in sums.iter_mut().enumerate() {
                // SAFETY: a row of the left matrix holds `depth` numbers.
                let x = _mm256_set1_ps(unsafe { *left.add(m) });
                for v in 0..WIDE {
                    sum[v] = _mm256_fmadd_ps(x, numbers[v], sum[v]);
                }
            }
            (left, right) = (left.wrapping_add(outer.left_stride), right.wrapping_add(outer.right_stride));
        }
        for (m, sum) in sums.iter().enumerate() {
            for (v, &sum) in sum.iter().enumerate() {
                // SAFETY: the tile lies inside the result.
                unsafe { _mm256_storeu_ps(out.add(m * outer.columns + v * WIDTH), sum) };
            }
        }
    }
}
