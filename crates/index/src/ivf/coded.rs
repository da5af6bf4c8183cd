//! Encoded rows that move between indexes without rounding them a second time.

use bytemuck::{cast_slice, cast_slice_mut};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::options::Rescore;
use super::quantize::{read_lane, write_row};
use super::statistics::fitting;
use super::view::{Index, WideRows};
use sterling_core::units::Slot;
use sterling_kernels::cpu::kernels::BLOCK;

/// Row in the formats of an index.
#[derive(Clone, Debug, PartialEq)]
pub struct CodedRow {
    pub(super) scale: f32,
    /// Codes as in a block, in groups of four, `[G, 4]`.
    pub(super) codes: Vec<u8>,
    /// Format of the wide row for rescoring.
    pub(super) rescore: Rescore,
    /// Bytes of the wide row, `[D]`.
    pub(super) wide: Vec<u8>,
}

impl CodedRow {
    /// Encodes a vector; the row for rescoring is f32 instead of f16 if half precision cannot represent the vector.
    pub(super) fn of(vector: &[f32], rescore: Rescore) -> Self {
        let groups = vector.len().div_ceil(4);
        let (mut block, mut codes) = (vec![128; groups * 4 * BLOCK], vec![0; groups * 4]);
        let scale = write_row(vector, 0, &mut block);
        read_lane(&block, 0, &mut codes);
        let rescore = fitting(vector, rescore);
        CodedRow { scale, codes, rescore, wide: wide(vector, rescore) }
    }

    /// Returns the row of a slot, with its wide row in the format `rescore` if this format can represent the row.
    pub(super) fn read(index: &Index, slot: Slot, rescore: Rescore) -> Self {
        let mut codes = vec![0; index.dimension.div_ceil(4) * 4];
        let block = &index.codes[slot.index() / BLOCK * codes.len() * BLOCK..][..codes.len() * BLOCK];
        read_lane(block, slot.index() % BLOCK, &mut codes);
        let range = slot.index() * index.dimension..(slot.index() + 1) * index.dimension;
        let (rescore, wide) = match &index.rows {
            WideRows::None => (Rescore::None, Vec::new()),
            WideRows::Bf16(rows) => (Rescore::Bf16, cast_slice(&rows[range]).to_vec()),
            WideRows::F16(rows) => (Rescore::F16, cast_slice(&rows[range]).to_vec()),
            // A segment stores all rows in f32 if half precision cannot represent one of them; the other rows return to
            // the format `rescore`.
            WideRows::F32(rows) => {
                let rescore = fitting(&rows[range.clone()], rescore);
                (rescore, wide(&rows[range], rescore))
            }
        };
        CodedRow { scale: index.scales[slot.index()], codes, rescore, wide }
    }

    /// Decodes the row to f32 from its most precise format.
    pub(super) fn numbers(&self, out: &mut [f32]) {
        match self.rescore {
            Rescore::None => {
                let codes = self.codes.iter().map(|&code| f32::from(i16::from(code) - 128));
                out.iter_mut().zip(codes).for_each(|(out, code)| *out = code * self.scale);
            }
            _ => self.write_wide(Rescore::F32, cast_slice_mut(out)),
        }
    }

    /// Writes the wide row in its own format or in f32.
    pub(super) fn write_wide(&self, rescore: Rescore, out: &mut [u8]) {
        if self.rescore == rescore {
            return out.copy_from_slice(&self.wide);
        }
        let number = |bytes: &[u8]| match self.rescore {
            Rescore::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            _ => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        };
        let numbers = self.wide.chunks_exact(2).map(number);
        out.chunks_exact_mut(4).zip(numbers).for_each(|(out, number)| out.copy_from_slice(&number.to_le_bytes()));
    }
}

/// Encodes a vector in a rescoring format.
fn wide(vector: &[f32], rescore: Rescore) -> Vec<u8> {
    match rescore {
        Rescore::None => Vec::new(),
        Rescore::Bf16 => cast_slice(&vector.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<bf16>>()).to_vec(),
        Rescore::F16 => {
            let mut halves = vec![f16::ZERO; vector.len()];
            halves.convert_from_f32_slice(vector);
            cast_slice(&halves).to_vec()
        }
        Rescore::F32 => cast_slice(vector).to_vec(),
    }
}
