//! Pooled lookups in NEON: 8 columns per pair of registers, with the sums of up to 64 columns of a bag in registers at once.

use std::arch::aarch64::*;

use super::bags::{BagSums, Bags, ColumnRun, PREFETCH_ROWS, bag_factor, prefetch_first, prefetch_row};
use super::rows::Rows;
use super::rows::formats::*;

/// Number of columns per pair of registers.
const LANES: usize = 8;

/// Computes the sums of all columns, group by group.
///
/// # Safety
/// The CPU has NEON; the conditions of [`super::pool`] hold.
#[target_feature(enable = "neon")]
pub(super) unsafe fn pool<const F: usize>(rows: &Rows<'_>, bags: &Bags<'_>, out: &mut BagSums<'_>) {
    let mut first = 0;
    while first < rows.width {
        let left = rows.width - first;
        let mut part = ColumnRun { first, columns: left };
        // SAFETY: this function's `# Safety` conditions hold, and `part` lies inside the row.
        unsafe {
            match left.div_ceil(LANES) {
                1 => group::<F, 1>(rows, bags, out, part),
                2 => group::<F, 2>(rows, bags, out, part),
                3 => group::<F, 3>(rows, bags, out, part),
                4 => group::<F, 4>(rows, bags, out, part),
                5..=7 => {
                    part.columns = 4 * LANES;
                    group::<F, 4>(rows, bags, out, part);
                }
                _ => {
                    part.columns = left.min(8 * LANES);
                    group::<F, 8>(rows, bags, out, part);
                }
            }
        }
        first += part.columns;
    }
}

/// Computes the sums of up to `8 V` columns; the last pair of registers may be partly filled.
///
/// # Safety
/// As [`pool`]; `part` lies inside the row and takes `V` pairs of registers.
#[target_feature(enable = "neon")]
unsafe fn group<const F: usize, const V: usize>(
    rows: &Rows<'_>,
    bags: &Bags<'_>,
    out: &mut BagSums<'_>,
    part: ColumnRun,
) {
    let base = rows.bytes.as_ptr();
    let last = part.columns - (V - 1) * LANES;
    let span = part.span(rows.format);
    prefetch_first(rows, bags, &span);
    for bag in 0..bags.offsets.len().saturating_sub(1) {
        let mut sum = [[vdupq_n_f32(0.0); 2]; V];
        // The bias of a quantized row is the same for all columns, so biases are summed once and added at the end.
        let mut shift = vdupq_n_f32(0.0);
        for at in bags.range(bag) {
            prefetch_row(rows, bags.ids, at + PREFETCH_ROWS, &span);
            // SAFETY: offsets lie inside ids, and there is one weight per id (checked in `super::pool`).
            let (id, weight) = unsafe { (*bags.ids.get_unchecked(at), bags.weight_unchecked(at)) };
            if id < 0 {
                continue;
            }
            // SAFETY: ids are below the number of rows, so the row lies inside the bytes.
            let row = unsafe { base.add(id as usize * rows.row_bytes) };
            let mut weight = vdupq_n_f32(weight);
            if F >= INT8 {
                // SAFETY: quantized rows start with four bytes of scale and bias.
                let (scale, bias) = unsafe { head(row) };
                shift = vfmaq_f32(shift, weight, bias);
                weight = vmulq_f32(weight, scale);
            }
            for (v, sum) in sum.iter_mut().enumerate() {
                let lanes = if v + 1 == V { last } else { LANES };
                // SAFETY: the columns lie inside the row.
                let [low, high] = unsafe { load::<F>(row, part.first + v * LANES, lanes) };
                *sum = [vfmaq_f32(sum[0], weight, low), vfmaq_f32(sum[1], weight, high)];
            }
        }
        let factor = vdupq_n_f32(bag_factor(bags, bag));
        let to = &mut out.data[bag * out.stride + out.column + part.first..][..part.columns];
        for (sum, to) in sum.iter().zip(to.chunks_mut(LANES)) {
            let mut complete = [0f32; LANES];
            // SAFETY: `complete` holds a pair of registers.
            unsafe {
                vst1q_f32(complete.as_mut_ptr(), vmulq_f32(vaddq_f32(sum[0], shift), factor));
                vst1q_f32(complete.as_mut_ptr().add(4), vmulq_f32(vaddq_f32(sum[1], shift), factor));
            }
            to.copy_from_slice(&complete[..to.len()]);
        }
    }
}

/// Reads scale and bias of a quantized row.
///
/// # Safety
/// As [`pool`]; four bytes can be read at `row`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn head(row: *const u8) -> (float32x4_t, float32x4_t) {
    // SAFETY: four bytes can be read.
    let both = vdup_n_u32(unsafe { row.cast::<u32>().read_unaligned() });
    let both = vcvt_f32_f16(vreinterpret_f16_u32(both));
    (vdupq_laneq_f32::<0>(both), vdupq_laneq_f32::<1>(both))
}

/// Loads `lanes` columns from `column` on; codes of quantized rows are not scaled yet. A partial pair is copied to the stack
/// first, because NEON has no masked load.
///
/// # Safety
/// As [`pool`]; the columns lie inside the row, and `column` is a multiple of 8.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load<const F: usize>(row: *const u8, column: usize, lanes: usize) -> [float32x4_t; 2] {
    let (head, bits) = if F >= INT8 { (HEAD, BITS[F]) } else { (0, BITS[F]) };
    // SAFETY: the column lies inside the row.
    let from = unsafe { row.add(head + column * bits / 8) };
    if lanes == LANES {
        // SAFETY: eight columns can be read.
        return unsafe { load_whole::<F>(from) };
    }
    let mut complete = [0u8; 32];
    // SAFETY: `lanes` columns can be read, and they take at most 32 bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(from, complete.as_mut_ptr(), lanes * bits / 8);
        load_whole::<F>(complete.as_ptr())
    }
}

/// Loads eight columns at `from`.
///
/// # Safety
/// As [`pool`]; eight columns of the format can be read at `from`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load_whole<const F: usize>(from: *const u8) -> [float32x4_t; 2] {
    // SAFETY: each arm reads exactly the bytes of eight columns: 32, 16, 16, 8, 4 and 2; loads of bytes need no alignment.
    unsafe {
        match F {
            F32 => [0, 16].map(|at| vreinterpretq_f32_u8(vld1q_u8(from.add(at)))),
            F16 => {
                let halves = vreinterpretq_f16_u8(vld1q_u8(from));
                [vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)]
            }
            BF16 => {
                let halves = vreinterpretq_u16_u8(vld1q_u8(from));
                [vmovl_u16(vget_low_u16(halves)), vmovl_high_u16(halves)]
                    .map(|x| vreinterpretq_f32_u32(vshlq_n_u32::<16>(x)))
            }
            INT8 => numbers(vld1_u8(from)),
            INT4 => {
                let bytes = vcreate_u8(u64::from(from.cast::<u32>().read_unaligned()));
                numbers(vzip1_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8::<4>(bytes)))
            }
            _ => {
                let bytes = vcreate_u8(u64::from(from.cast::<u16>().read_unaligned()));
                let of_column = vtbl1_u8(bytes, vcreate_u8(0x0101_0101_0000_0000));
                // Left shifts by 0, -2, -4 and -6.
                let shifts = vcreate_s8(0xfafc_fe00_fafc_fe00);
                numbers(vand_u8(vshl_u8(of_column, shifts), vdup_n_u8(3)))
            }
        }
    }
}

/// Converts codes to f32.
#[inline]
#[target_feature(enable = "neon")]
fn numbers(codes: uint8x8_t) -> [float32x4_t; 2] {
    let wide = vmovl_u8(codes);
    [vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_high_u16(wide))]
}
