//! Conversion of f32 rows into the stored formats, once, when a table is published.
//!
//! The quantized formats follow FBGEMM's `FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf` bit for bit, with scale and bias
//! at the front of the row, as in FBGEMM's table-batched operator. With `m` the row's smallest number rounded to f16 and
//! `b` bits: `scale = f16((max - m) / (2^b - 1))`, or 1 if the range is 0 or the scale has no inverse;
//! `code = round_half_even((x - m) / scale)`, clamped to `0..2^b`. If FBGEMM would write an infinity or a NaN into a row, the row
//! is rejected; the error names the index of the row.

use half::{bf16, f16};

use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::pool::RowFormat;

/// Encodes f32 rows `[rows, width]` in `format`, `[rows, row_bytes]`.
///
/// # Errors
/// `Invalid` if the values are not complete rows, the width does not suit the format, or a row holds a number that is not
/// finite or exceeds the format's range; the error names the row.
pub fn encode_rows(format: RowFormat, width: usize, values: &[f32]) -> Result<Vec<u8>> {
    let row_bytes = format.row_bytes(width)?;
    if !values.len().is_multiple_of(width) {
        return Err(Error::invalid(format!("got {} numbers, expected rows of {width} numbers", values.len())));
    }
    let mut out = vec![0u8; values.len() / width * row_bytes];
    for (r, (row, to)) in values.chunks_exact(width).zip(out.chunks_exact_mut(row_bytes)).enumerate() {
        encode_row(format, row, to).map_err(|e| e.within(format!("row {r}")))?;
    }
    Ok(out)
}

/// Encodes one row into `out` `[row_bytes]`.
///
/// # Errors
/// `Invalid` if a number is not finite or exceeds the format's range.
pub fn encode_row(format: RowFormat, row: &[f32], out: &mut [u8]) -> Result<()> {
    if let Some(at) = row.iter().position(|x| !x.is_finite()) {
        return Err(Error::invalid(format!("column {at} is {}, expected a finite number", row[at])));
    }
    match format {
        RowFormat::F32 => out.copy_from_slice(bytemuck::cast_slice(row)),
        RowFormat::F16 => narrow(row, out, f16::from_f32, f16::to_f32, f16::to_le_bytes)?,
        RowFormat::Bf16 => narrow(row, out, bf16::from_f32, bf16::to_f32, bf16::to_le_bytes)?,
        RowFormat::Int8 | RowFormat::Int4 | RowFormat::Int2 => quantise(format, row, out)?,
    }
    Ok(())
}

fn narrow<H: Copy>(
    row: &[f32],
    out: &mut [u8],
    from: fn(f32) -> H,
    to: fn(H) -> f32,
    bytes: fn(H) -> [u8; 2],
) -> Result<()> {
    for (at, (&x, out)) in row.iter().zip(out.as_chunks_mut::<2>().0).enumerate() {
        let narrowed = from(x);
        if !to(narrowed).is_finite() {
            return Err(Error::invalid(format!("column {at} is {x}, which f16 cannot represent")));
        }
        *out = bytes(narrowed);
    }
    Ok(())
}

fn quantise(format: RowFormat, row: &[f32], out: &mut [u8]) -> Result<()> {
    let bits = format.bits();
    let top = ((1u32 << bits) - 1) as f32;
    let (least, most) = row.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), &x| (lo.min(x), hi.max(x)));
    let bias = f16::from_f32(least);
    let range = most - bias.to_f32();
    let mut scale = f16::from_f32(if range == 0.0 { 1.0 } else { range / top });
    let mut inverse = 1.0 / scale.to_f32();
    if scale.to_f32() == 0.0 || inverse.is_infinite() {
        (scale, inverse) = (f16::ONE, 1.0);
    }
    if !(bias.to_f32().is_finite() && scale.to_f32().is_finite() && (scale.to_f32() * top + bias.to_f32()).is_finite())
    {
        return Err(Error::invalid(format!(
            "numbers from {least} to {most} exceed the f16 scale and bias of {}, expected a magnitude of at most {}",
            format.name(),
            f16::MAX
        )));
    }
    let (head, codes) = out.split_at_mut(format.head_bytes());
    head[..2].copy_from_slice(&scale.to_le_bytes());
    head[2..].copy_from_slice(&bias.to_le_bytes());
    codes.fill(0);
    let per_byte = 8 / bits;
    for (j, &x) in row.iter().enumerate() {
        let code = ((x - bias.to_f32()) * inverse).round_ties_even().clamp(0.0, top) as u8;
        codes[j / per_byte] |= code << (j % per_byte * bits);
    }
    Ok(())
}
