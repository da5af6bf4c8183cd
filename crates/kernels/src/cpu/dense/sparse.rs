//! Products whose rows have many zeros, such as results of a ReLU: multiply-adds by zeros are skipped.
//!
//! A zero times a finite weight does not change a sum, except that a sum of `-0.0` stays `-0.0` without it. The other terms
//! are added in the order of the tiles. So the results are the same, and the zeros of a call decide which code runs.
//!
//! Each row is multiplied alone. A block of weights, [`DEPTH`] rows and up to [`WIDE`] registers of columns, stays in the L1
//! cache for all rows. Between blocks, `out` holds the sums. A multiply-add loads its weights, so that it takes about 1.3
//! cycles, where a tile takes one.

use std::arch::x86_64::*;

use super::operands::{LANES, PANEL, Part, Product};
use super::registers::{first, lanes};

/// Rows of weights per block, a bit each in the mask of a row.
const DEPTH: usize = 32;
/// Registers of columns per block: 16 KiB of weights.
const WIDE: usize = 8;
/// Rows per pass.
const ROWS: usize = 64;
/// Maximum number of depth blocks of all parts.
const BLOCKS_MAX: usize = 64;
/// Minimum number of rows from which skipping pays off.
const ROWS_MIN: usize = 4;
/// Maximum percentage of numbers that are not zero.
const DENSITY_MAX: usize = 75;

/// Bits of the numbers that are not zero: per depth block of the parts, per row.
struct Masks([[u32; ROWS]; BLOCKS_MAX]);

/// A block of weights, and the rows that are multiplied by it.
#[derive(Clone, Copy)]
struct Block {
    row: usize,
    register: usize,
    depth: usize,
    /// True if the sums begin with the bias.
    is_first: bool,
    /// True if the sums are complete.
    is_last: bool,
    stride: usize,
}

/// Computes a product if many numbers of its rows are zeros; returns whether it did.
///
/// # Safety
/// The CPU has AVX-512 F, BW and VL, and FMA; the slices are as long as `Kernels::product` checks.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
pub(super) unsafe fn product(product: &Product<'_>, out: &mut [f32], stride: usize) -> bool {
    let blocks: usize = product.parts.iter().map(|part| part.depth.div_ceil(DEPTH)).sum();
    let is_packed = product.parts.iter().all(|part| part.weights.row_stride == PANEL);
    if product.rows < ROWS_MIN || blocks == 0 || blocks > BLOCKS_MAX || !is_packed {
        return false;
    }
    let depth: usize = product.parts.iter().map(|part| part.depth).sum();
    let mut masks = Masks([[0; ROWS]; BLOCKS_MAX]);
    for row in (0..product.rows).step_by(ROWS) {
        let rows = ROWS.min(product.rows - row);
        let count = find(product, row, rows, &mut masks);
        if row == 0 && count * 100 > rows * depth * DENSITY_MAX {
            return false;
        }
        // SAFETY: this function's `# Safety` conditions hold.
        unsafe { multiply(product, &masks, row, rows, out.as_mut_ptr(), stride) };
    }
    true
}

/// Fills the masks of `rows` rows from `row` on, and returns the number of bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
fn find(product: &Product<'_>, row: usize, rows: usize, masks: &mut Masks) -> usize {
    let (none, one) = (_mm512_setzero_ps(), _mm512_set1_epi32(1));
    let mut counts = _mm512_setzero_si512();
    let mut some = |x: __m512| {
        let mask = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(x, none);
        counts = _mm512_mask_add_epi32(counts, mask, counts, one);
        u32::from(mask)
    };
    let mut n = 0;
    for part in product.parts.iter().filter(|part| part.depth > 0) {
        for r in 0..rows {
            let numbers = &part.rows[(row + r) * part.stride..][..part.depth];
            let (blocks, rest) = numbers.as_chunks::<DEPTH>();
            for (block, masks) in blocks.iter().zip(&mut masks.0[n..]) {
                // SAFETY: a block fills two registers.
                let [x, y] = unsafe { [_mm512_loadu_ps(block.as_ptr()), _mm512_loadu_ps(block[LANES..].as_ptr())] };
                masks[r] = some(x) | some(y) << LANES;
            }
            if !rest.is_empty() {
                let (x, y) = rest.split_at(rest.len().min(LANES));
                masks.0[n + blocks.len()][r] = some(first(x).1) | some(first(y).1) << LANES;
            }
        }
        n += part.depth.div_ceil(DEPTH);
    }
    _mm512_reduce_add_epi32(counts) as usize
}

/// Multiplies `rows` rows from `row` on, whose masks are given.
///
/// # Safety
/// As [`product`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
unsafe fn multiply(product: &Product<'_>, masks: &Masks, row: usize, rows: usize, out: *mut f32, stride: usize) {
    let registers = product.columns.div_ceil(LANES);
    let groups = registers.div_ceil(WIDE);
    let last: usize = product.parts.iter().map(|part| part.depth.div_ceil(DEPTH)).sum::<usize>() - 1;
    let mut register = 0;
    for group in 0..groups {
        // Groups of nearly equal width that begin with a panel.
        let width = (registers - register).div_ceil(groups - group).next_multiple_of(2).min(registers - register);
        let mut n = 0;
        for part in product.parts {
            for depth in (0..part.depth).step_by(DEPTH) {
                let block = Block { row, register, depth, is_first: n == 0, is_last: n == last, stride };
                let masks = &masks.0[n][..rows];
                // SAFETY: this function's `# Safety` conditions hold.
                unsafe {
                    match width {
                        1 => of_width::<1>(product, part, masks, out, block),
                        2 => of_width::<2>(product, part, masks, out, block),
                        3 => of_width::<3>(product, part, masks, out, block),
                        4 => of_width::<4>(product, part, masks, out, block),
                        5 => of_width::<5>(product, part, masks, out, block),
                        6 => of_width::<6>(product, part, masks, out, block),
                        7 => of_width::<7>(product, part, masks, out, block),
                        _ => of_width::<WIDE>(product, part, masks, out, block),
                    }
                }
                n += 1;
            }
        }
        register += width;
    }
}

/// Adds the products of a block to `V` registers of sums of each row.
///
/// # Safety
/// As [`product`]; the block lies inside the weights, and a bit of a mask stands for a number of the row.
// The loops use indices, because iterators would move the sums through memory.
#[allow(clippy::needless_range_loop)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
#[inline]
unsafe fn of_width<const V: usize>(product: &Product<'_>, part: &Part<'_>, masks: &[u32], out: *mut f32, block: Block) {
    let Block { row, register, depth, stride, .. } = block;
    let first = register * LANES;
    let weights = &part.weights;
    let panels: [*const f32; WIDE / 2] = std::array::from_fn(|n| {
        let start = (first / PANEL + n) * weights.panel_stride + depth * PANEL;
        weights.numbers.as_ptr().wrapping_add(start)
    });
    let tail = lanes(product.columns - first - (V - 1) * LANES);
    let mask_of = |v: usize| if v + 1 == V { tail } else { u16::MAX };
    for (r, &mask) in masks.iter().enumerate() {
        let to = out.wrapping_add((row + r) * stride + first);
        let numbers = part.rows.as_ptr().wrapping_add((row + r) * part.stride + depth);
        let mut sums = [_mm512_setzero_ps(); V];
        for v in 0..V {
            // SAFETY: a bias holds complete registers for all columns, and the masked sums lie inside the result.
            unsafe {
                if !block.is_first {
                    sums[v] = _mm512_maskz_loadu_ps(mask_of(v), to.add(v * LANES));
                } else if !product.bias.is_empty() {
                    sums[v] = _mm512_loadu_ps(product.bias.as_ptr().add(first + v * LANES));
                }
            }
        }
        let mut rest = mask;
        while rest != 0 {
            let k = rest.trailing_zeros() as usize;
            rest &= rest - 1;
            // SAFETY: a bit stands for a number of the row, and weights reach to the last register of its row.
            unsafe {
                let x = _mm512_set1_ps(*numbers.add(k));
                for v in 0..V {
                    let w = _mm512_loadu_ps(panels[v / 2].add(k * PANEL + v % 2 * LANES));
                    sums[v] = _mm512_fmadd_ps(x, w, sums[v]);
                }
            }
        }
        for v in 0..V {
            if block.is_last && product.relu {
                // `max` returns its second operand if one is NaN, so NaN sums stay NaN.
                sums[v] = _mm512_max_ps(_mm512_setzero_ps(), sums[v]);
            }
            // SAFETY: the masked sums lie inside the result.
            unsafe { _mm512_mask_storeu_ps(to.add(v * LANES), mask_of(v), sums[v]) };
        }
    }
}
