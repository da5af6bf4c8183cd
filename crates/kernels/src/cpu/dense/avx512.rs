//! Dense loops in AVX-512.

use std::arch::x86_64::*;

pub(super) use super::layer_norm::norm;
use super::maps;
use super::operands::{
    Binary, EQUAL_FOLDS_MAX, EqualFold, Fold, Form, Keys, LANES, Lines, MapTarget, Operand, PANEL, PairRows, Product,
    Unary, Weights,
};
use super::recurrent::{self, CellStep};
use super::registers::{first, joined, lanes, larger, reduced, smaller};
pub(super) use super::softmax::softmax;
use super::tiles::tiles;

#[target_feature(enable = "avx512f")]
#[inline]
fn multiply_add(sum: __m512, x: __m512, weights: __m512) -> __m512 {
    _mm512_fmadd_ps(x, weights, sum)
}

/// Placeholder that is never called: products of f32 factors cannot be written as bf16 pairs (`Kernels::product`
/// rejects them).
#[target_feature(enable = "avx512f")]
#[inline]
fn no_pairs(first: __m512, _: __m512) -> __m512 {
    first
}

tiles!("avx512f,avx512bw,avx512vl", multiply_add, no_pairs);

/// Maximum number of columns that half a register holds.
pub(super) const HALF: usize = LANES / 2;

/// Product with at most [`HALF`] columns, in half registers: a core multiplies and adds two half registers in the time
/// of one complete register.
///
/// # Safety
/// The CPU has AVX-512 F and VL, and FMA; the slices are as long as `Kernels::product` checks.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn half(product: &Product<'_>, out: &mut [f32], stride: usize) {
    let tiles = product.rows.div_ceil(ROWS_MAX);
    let mut row = 0;
    for tile in 0..tiles {
        let rows = (product.rows - row).div_ceil(tiles - tile);
        // SAFETY: this function's conditions; the tile lies inside the result.
        unsafe {
            match rows {
                1 => half_tile::<1>(product, out.as_mut_ptr(), row, stride),
                2 => half_tile::<2>(product, out.as_mut_ptr(), row, stride),
                3 => half_tile::<3>(product, out.as_mut_ptr(), row, stride),
                4 => half_tile::<4>(product, out.as_mut_ptr(), row, stride),
                5 => half_tile::<5>(product, out.as_mut_ptr(), row, stride),
                6 => half_tile::<6>(product, out.as_mut_ptr(), row, stride),
                7 => half_tile::<7>(product, out.as_mut_ptr(), row, stride),
                8 => half_tile::<8>(product, out.as_mut_ptr(), row, stride),
                9 => half_tile::<9>(product, out.as_mut_ptr(), row, stride),
                10 => half_tile::<10>(product, out.as_mut_ptr(), row, stride),
                11 => half_tile::<11>(product, out.as_mut_ptr(), row, stride),
                12 => half_tile::<12>(product, out.as_mut_ptr(), row, stride),
                13 => half_tile::<13>(product, out.as_mut_ptr(), row, stride),
                _ => half_tile::<ROWS_MAX>(product, out.as_mut_ptr(), row, stride),
            }
        }
        row += rows;
    }
}

/// Computes the sums of `M` rows.
///
/// # Safety
/// As [`half`]; the rows lie inside the result.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
unsafe fn half_tile<const M: usize>(product: &Product<'_>, out: *mut f32, row: usize, stride: usize) {
    let mut sums = [_mm256_setzero_ps(); M];
    if !product.bias.is_empty() {
        // SAFETY: a bias holds a complete register.
        sums = [unsafe { _mm256_loadu_ps(product.bias.as_ptr()) }; M];
    }
    for part in product.parts {
        let rows = part.rows.as_ptr().wrapping_add(row * part.stride);
        for k in 0..part.depth {
            // SAFETY: weights reach to the last register of the last row (`super::operands::reach`).
            let weights = unsafe { _mm256_loadu_ps(part.weights.numbers.as_ptr().add(k * part.weights.row_stride)) };
            for (m, sum) in sums.iter_mut().enumerate() {
                // SAFETY: all rows of a part hold `depth` numbers.
                let x = _mm256_set1_ps(unsafe { *rows.add(m * part.stride + k) });
                *sum = _mm256_fmadd_ps(x, weights, *sum);
            }
        }
    }
    let mask = lanes(product.columns) as __mmask8;
    for (m, sum) in sums.into_iter().enumerate() {
        // `max` returns its second operand if one is NaN, so NaN sums stay NaN.
        let sum = if product.relu { _mm256_max_ps(_mm256_setzero_ps(), sum) } else { sum };
        // SAFETY: the masked numbers lie inside the result.
        unsafe { _mm256_mask_storeu_ps(out.add((row + m) * stride), mask, sum) };
    }
}

/// # Safety
/// The CPU has AVX-512 F, BW and VL, and FMA.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn map1(f: Unary, input: &Operand<'_>, target: &mut MapTarget<'_>) {
    maps::map1::<true>(f, input, target);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn map2(f: Binary, a: &Operand<'_>, b: &Operand<'_>, target: &mut MapTarget<'_>) {
    maps::map2(f, a, b, target);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
fn folded(
    input: &Operand<'_>,
    count: usize,
    target: &mut MapTarget<'_>,
    none: f32,
    f: impl Fn(__m512, __m512) -> __m512 + Copy,
) {
    for r in 0..target.rows {
        for o in 0..target.outer {
            let run = &input.numbers[r * input.row + o * input.outer..][..count];
            target.numbers[r * target.stride + o] = reduced(run, none, f);
        }
    }
}

/// Computes `maps::fold`, bit for bit. The compiler's version would reduce the lanes of a register through memory.
///
/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn fold(f: Fold, input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>) {
    match f {
        Fold::Sum => folded(input, count, target, f.identity_element(), |x, y| _mm512_add_ps(x, y)),
        Fold::Max => folded(input, count, target, f.identity_element(), |x, y| larger(x, y)),
        Fold::Min => folded(input, count, target, f.identity_element(), |x, y| smaller(x, y)),
    }
}

/// Computes `maps::beside_equal` for all reductions in registers, with shared key comparisons.
///
/// # Safety
/// Each reduction has as many values as there are keys.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
unsafe fn beside_equal(key: __m512, keys: &[f32], folds: &[EqualFold<'_>], may_skip: bool) -> [f32; EQUAL_FOLDS_MAX] {
    let (none, one) = (_mm512_setzero_ps(), _mm512_set1_ps(1.0));
    let mut retained = [none; EQUAL_FOLDS_MAX];
    for (retained, fold) in retained.iter_mut().zip(folds) {
        *retained = _mm512_set1_ps(fold.f.identity_element());
    }
    let mut has_skipped = false;
    for at in (0..keys.len()).step_by(LANES) {
        let mask = lanes(keys.len() - at);
        // SAFETY: masked loads touch only the keys.
        let here = unsafe { _mm512_maskz_loadu_ps(mask, keys.as_ptr().add(at)) };
        let equal = _mm512_mask_cmp_ps_mask::<_CMP_EQ_OQ>(mask, here, key);
        if may_skip && equal == 0 {
            has_skipped = true;
            continue;
        }
        let truth = _mm512_maskz_mov_ps(equal, one);
        for (retained, fold) in retained.iter_mut().zip(folds) {
            // SAFETY: there are as many values as keys.
            let values = unsafe { _mm512_maskz_loadu_ps(mask, fold.values.as_ptr().add(at)) };
            *retained =
                _mm512_mask_mov_ps(*retained, mask, folded_with(fold.f, *retained, _mm512_mul_ps(truth, values)));
        }
    }
    let mut made = [0.0; EQUAL_FOLDS_MAX];
    for ((made, &retained), fold) in made.iter_mut().zip(&retained).zip(folds) {
        let retained = if has_skipped { folded_with(fold.f, retained, none) } else { retained };
        *made = match fold.f {
            Fold::Sum => joined(retained, |x, y| _mm512_add_ps(x, y)),
            Fold::Max => joined(retained, |x, y| larger(x, y)),
            Fold::Min => joined(retained, |x, y| smaller(x, y)),
        };
    }
    made
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
fn folded_with(f: Fold, retained: __m512, x: __m512) -> __m512 {
    match f {
        Fold::Sum => _mm512_add_ps(retained, x),
        Fold::Max => larger(retained, x),
        Fold::Min => smaller(retained, x),
    }
}

/// Computes `maps::is_among` in registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
fn is_among(key: __m512, keys: &[f32]) -> bool {
    let (complete, rest) = keys.as_chunks::<LANES>();
    let (mask, rest) = first(rest);
    let mut found = _mm512_mask_cmp_ps_mask::<_CMP_EQ_OQ>(mask, rest, key);
    for chunk in complete {
        // SAFETY: a chunk fills a register.
        found |= _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(unsafe { _mm512_loadu_ps(chunk.as_ptr()) }, key);
    }
    found != 0
}

/// Computes `maps::fold_equal`, bit for bit. Most rows have a key that is not among the shared keys; they need only one
/// comparison per 16 keys. The other rows compare their keys again, and load only the values whose key matches.
///
/// # Safety
/// As [`map1`]; each reduction has as many values as there are keys.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn fold_equal(keys: &Keys<'_>, folds: &[EqualFold<'_>], out: &mut [f32], stride: usize) {
    let are_finite = maps::are_finite(folds);
    for row in 0..keys.rows {
        let key = _mm512_set1_ps(keys.of_rows[row * keys.stride]);
        let out = &mut out[row * stride..][..folds.len()];
        if are_finite && !is_among(key, keys.shared) {
            out.fill(0.0);
            continue;
        }
        // SAFETY: this function's `# Safety` conditions hold.
        let made = unsafe { beside_equal(key, keys.shared, folds, are_finite) };
        out.copy_from_slice(&made[..out.len()]);
    }
}

/// Computes `maps::column` in registers, instead of reducing lanes through memory.
///
/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn column(product: &Product<'_>, out: &mut [f32], stride: usize) {
    let bias = product.bias.first().copied().unwrap_or(0.0);
    for (row, out) in (0..product.rows).zip(out.iter_mut().step_by(stride.max(1))) {
        let mut sums = _mm512_setzero_ps();
        for part in product.parts {
            let (rows, rest) = part.rows[row * part.stride..][..part.depth].as_chunks::<LANES>();
            let (weights, others) = part.weights.numbers[..part.depth].as_chunks::<LANES>();
            for (row, weights) in rows.iter().zip(weights) {
                // SAFETY: each chunk has exactly the numbers of a register.
                let (x, w) = unsafe { (_mm512_loadu_ps(row.as_ptr()), _mm512_loadu_ps(weights.as_ptr())) };
                sums = _mm512_fmadd_ps(x, w, sums);
            }
            if !rest.is_empty() {
                let ((mask, x), (_, w)) = (first(rest), first(others));
                sums = _mm512_mask3_fmadd_ps(x, w, sums, mask);
            }
        }
        let sum = bias + joined(sums, |x, y| _mm512_add_ps(x, y));
        *out = if product.relu && sum < 0.0 { 0.0 } else { sum };
    }
}

thread_local! {
    /// Columns of products with few columns, each contiguous, per thread.
    static COLUMNS: std::cell::RefCell<Lines> = std::cell::RefCell::default();
}

/// Number of rows that share the loads of the columns.
const FEW_ROWS: usize = 4;

/// Product with few columns. Each number is the sum of 16 chains along the depth, because one lane per column would leave most
/// lanes idle.
///
/// # Safety
/// As [`map1`]; there are at most [`FEW_COLUMNS`] columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn few(product: &Product<'_>, out: &mut [f32], stride: usize) {
    // The buffer is taken, not borrowed in a closure: a closure would be compiled without the target features of its caller.
    let mut lines = COLUMNS.take();
    let depth: usize = product.parts.iter().map(|part| part.depth.next_multiple_of(LANES)).sum();
    if lines.numbers().len() < depth * product.columns {
        lines = Lines::new(depth * product.columns);
    }
    columns_of(product, depth, lines.numbers_mut());
    let mut row = 0;
    while row < product.rows {
        let at = (row, depth, lines.numbers());
        match (product.rows - row, product.columns) {
            (FEW_ROWS.., 1) => few_of::<FEW_ROWS, 1>(product, at, out, stride),
            (FEW_ROWS.., 2) => few_of::<FEW_ROWS, 2>(product, at, out, stride),
            (FEW_ROWS.., 3) => few_of::<FEW_ROWS, 3>(product, at, out, stride),
            (FEW_ROWS.., 4) => few_of::<FEW_ROWS, 4>(product, at, out, stride),
            (FEW_ROWS.., _) => few_of::<FEW_ROWS, 5>(product, at, out, stride),
            (_, 1) => few_of::<1, 1>(product, at, out, stride),
            (_, 2) => few_of::<1, 2>(product, at, out, stride),
            (_, 3) => few_of::<1, 3>(product, at, out, stride),
            (_, 4) => few_of::<1, 4>(product, at, out, stride),
            _ => few_of::<1, 5>(product, at, out, stride),
        }
        row += if product.rows - row >= FEW_ROWS { FEW_ROWS } else { 1 };
    }
    COLUMNS.set(lines);
}

/// Copies the columns of all parts to `[columns, depth]`. Each part starts at a register boundary and is padded with
/// zeros.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
fn columns_of(product: &Product<'_>, depth: usize, to: &mut [f32]) {
    let mut first = 0;
    for part in product.parts {
        let Weights { numbers, row_stride, .. } = part.weights;
        if part.depth == 0 {
            continue;
        }
        assert!(numbers.len() >= (part.depth - 1) * row_stride + product.columns && row_stride < 1 << 27);
        let rows = _mm512_mullo_epi32(counted(), _mm512_set1_epi32(row_stride as i32));
        for column in 0..product.columns {
            let to = to[column * depth + first..].as_chunks_mut::<LANES>().0;
            for (n, to) in to.iter_mut().enumerate().take(part.depth.div_ceil(LANES)) {
                let (k, mask) = (n * LANES, lanes(part.depth - n * LANES));
                // SAFETY: the rows of all unmasked lanes exist, as asserted.
                unsafe {
                    let from = numbers.as_ptr().add(k * row_stride + column);
                    let read = _mm512_mask_i32gather_ps::<4>(_mm512_setzero_ps(), mask, rows, from);
                    _mm512_storeu_ps(to.as_mut_ptr(), read);
                }
            }
        }
        first += part.depth.next_multiple_of(LANES);
    }
}

/// Returns the numbers from 0 to 15, one per lane.
#[target_feature(enable = "avx512f")]
#[inline]
fn counted() -> __m512i {
    _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
}

/// Computes `M` rows of a product with `N` columns.
// The loops use indices, because iterators would move the sums through memory.
#[allow(clippy::needless_range_loop)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
fn few_of<const M: usize, const N: usize>(
    product: &Product<'_>,
    (row, depth, columns): (usize, usize, &[f32]),
    out: &mut [f32],
    stride: usize,
) {
    let mut sums = [[_mm512_setzero_ps(); N]; M];
    let mut first = 0;
    for part in product.parts {
        assert!(part.rows.len() >= (row + M - 1) * part.stride + part.depth);
        assert!(columns.len() >= (N - 1) * depth + first + part.depth.next_multiple_of(LANES));
        let rows = part.rows[row * part.stride..].as_ptr();
        for k in (0..part.depth).step_by(LANES) {
            let mask = lanes(part.depth - k);
            // SAFETY: rows and columns are as long as asserted; lanes beyond the last number of a row are masked.
            unsafe {
                let mut weights = [_mm512_setzero_ps(); N];
                for n in 0..N {
                    weights[n] = _mm512_loadu_ps(columns.as_ptr().add(n * depth + first + k));
                }
                for m in 0..M {
                    let x = _mm512_maskz_loadu_ps(mask, rows.add(m * part.stride + k));
                    for n in 0..N {
                        sums[m][n] = _mm512_fmadd_ps(x, weights[n], sums[m][n]);
                    }
                }
            }
        }
        first += part.depth.next_multiple_of(LANES);
    }
    let none = _mm512_setzero_ps();
    let mut write = |row: usize, column: usize, sum: f32| {
        let sum = product.bias.get(column).copied().unwrap_or(0.0) + sum;
        out[row * stride + column] = if product.relu && sum < 0.0 { 0.0 } else { sum };
    };
    for n in 0..N {
        if M == FEW_ROWS {
            let four = four_sums([sums[0][n], sums[1 % M][n], sums[2 % M][n], sums[3 % M][n]]);
            (0..M).for_each(|m| write(row + m, n, four[m]));
        } else {
            (0..M).for_each(|m| write(row + m, n, four_sums([sums[m][n], none, none, none])[0]));
        }
    }
}

/// Returns the lane sums of four registers.
#[target_feature(enable = "avx512f,avx512vl")]
#[inline]
fn four_sums([a, b, c, d]: [__m512; FEW_ROWS]) -> [f32; FEW_ROWS] {
    let ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    let cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
    let lanes = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    let eight = _mm256_add_ps(
        _mm512_castps512_ps256(lanes),
        _mm512_castps512_ps256(_mm512_shuffle_f32x4::<0b01_00_11_10>(lanes, lanes)),
    );
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let mut sums = [0.0; FEW_ROWS];
    // SAFETY: four numbers fill a register.
    unsafe { _mm_storeu_ps(sums.as_mut_ptr(), four) };
    sums
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn narrow(input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>) {
    maps::narrow(input, count, target);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn pack_narrow(matrix: &[f32], depth: usize, columns: usize, rows: PairRows, out: &mut [f32]) {
    maps::pack_narrow(matrix, depth, columns, rows, out);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn reset(step: &CellStep<'_>, h: &[f32], to: &mut [f32]) {
    recurrent::reset::<true>(step, h, to);
}

/// # Safety
/// As [`map1`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn advance(step: &CellStep<'_>, is_active: &dyn Fn(usize) -> bool, h: &mut [f32], c: &mut [f32]) {
    recurrent::advance::<true>(step, is_active, h, c);
}
