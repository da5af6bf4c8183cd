//! First-pass codes of an index, read from a mapped tensor file without a copy.

use super::codebook::Codebooks;
use super::coder::Coder;
use super::options::{OF_LINE, VALUES};
use super::rotation::Rotation;
use super::signs::DIMENSIONS;
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_kernels::buffer::Buffer;
use sterling_kernels::cpu::kernels::{BLOCK, CodeBlocks, LINE};
use sterling_storage::files::Tensors;

/// Codes of all slots, with their encoder.
#[derive(Clone, Debug)]
pub(in crate::ivf) struct ItemCodes {
    pub(in crate::ivf) coder: Coder,
    codes: Buffer<u8>,
    /// Factors of sign codes, `[S]`, or empty.
    factors: Buffer<f32>,
    /// Number of lines per block, M / 8.
    lines: usize,
}

fn corrupt(tensor: &str, what: String) -> Error {
    Error::corrupt(format!("tensor `{tensor}`: {what}"))
}

impl ItemCodes {
    /// Opens the codes of `slots` slots of vectors `[D]`, if the index has them.
    ///
    /// # Errors
    /// `Corrupt` with the tensor that is missing or inconsistent.
    pub(in crate::ivf) fn open(tensors: &Tensors, slots: usize, dimension: usize) -> Result<Option<Self>> {
        let names = ["first_pass_codes", "first_pass_values", "first_pass_factors", "first_pass_signs"];
        if !names.iter().any(|name| tensors.has(name)) {
            return Ok(None);
        }
        let (codes, shape) = tensors.get::<u8>("first_pass_codes", 4)?;
        let lines = shape[1];
        let is_signs = tensors.has("first_pass_signs") || tensors.has("first_pass_factors");
        let fits = match is_signs {
            true => lines == Rotation::width_of(dimension) / DIMENSIONS / OF_LINE,
            false => (1..=dimension.div_ceil(OF_LINE)).contains(&lines),
        };
        if !fits || shape != [slots / BLOCK, lines, BLOCK, 4] {
            let what = format!("shape {shape:?} does not fit {slots} slots of {dimension} dimensions");
            return Err(corrupt("first_pass_codes", what));
        }
        let (coder, factors) = match is_signs {
            true => (rotation(tensors, dimension)?, factors(tensors, slots)?),
            false => (books(tensors, dimension, lines * OF_LINE)?, Buffer::default()),
        };
        Ok(Some(ItemCodes { coder, codes, factors, lines }))
    }

    /// Returns the blocks of `items` slots from `first_slot` on, a multiple of 16; blocks from `next` on are prefetched.
    pub(in crate::ivf) fn blocks(&self, first_slot: u32, items: usize, next: Option<u32>) -> CodeBlocks<'_> {
        let from = |slot: u32| slot as usize / BLOCK * self.lines * LINE;
        let bytes = items.div_ceil(BLOCK) * self.lines * LINE;
        let codes = &self.codes[from(first_slot)..][..bytes];
        let factors: &[f32] = match self.factors.is_empty() {
            true => &[],
            false => &self.factors[first_slot as usize..][..items.next_multiple_of(BLOCK)],
        };
        CodeBlocks {
            codes,
            factors,
            lines: self.lines,
            items,
            first_slot,
            words: &[],
            next: next.map_or(&[], |next| &self.codes[from(next)..]),
        }
    }

    /// Returns the size of a block of 16 items in bytes.
    pub(in crate::ivf) fn block_bytes(&self) -> u64 {
        let factors = if self.factors.is_empty() { 0 } else { BLOCK * size_of::<f32>() };
        (self.lines * LINE + factors) as u64
    }

    /// Returns the size of codes and codebooks or rotation in bytes.
    pub(in crate::ivf) fn bytes(&self) -> usize {
        let shared = match &self.coder {
            Coder::Pq4(books) => books.values.len() * VALUES * size_of::<f32>(),
            Coder::Rabitq(rotation) => size_of_val(rotation.signs()),
        };
        self.codes.bytes() + self.factors.bytes() + shared
    }
}

/// Opens the codebooks of product codes.
fn books(tensors: &Tensors, dimension: usize, subspaces: usize) -> Result<Coder> {
    let (values, shape) = tensors.get::<f32>("first_pass_values", 2)?;
    if shape != [dimension, VALUES] {
        return Err(corrupt("first_pass_values", format!("shape {shape:?}, expected [{dimension}, {VALUES}]")));
    }
    Codebooks::new(&values, subspaces).map(Coder::Pq4).map_err(|what| corrupt("first_pass_values", what))
}

/// Opens the rotation of sign codes.
fn rotation(tensors: &Tensors, dimension: usize) -> Result<Coder> {
    let (signs, shape) = tensors.get::<u64>("first_pass_signs", 2)?;
    if tensors.has("first_pass_values") {
        return Err(corrupt("first_pass_values", "values beside signs, expected one of them".into()));
    }
    let expected = Rotation::shape(dimension);
    if shape != expected {
        return Err(corrupt("first_pass_signs", format!("shape {shape:?}, expected {expected:?}")));
    }
    Ok(Coder::Rabitq(Rotation::of_signs(dimension, &signs)))
}

/// Opens the factors of sign codes.
fn factors(tensors: &Tensors, slots: usize) -> Result<Buffer<f32>> {
    let factors = tensors.vector::<f32>("first_pass_factors", slots)?;
    // A factor is at most the length of a residual, whose components are differences of two vector components.
    let most = 2.0 * limits::COMPONENT_MAX * (limits::DIMENSION_MAX as f32).sqrt();
    match factors.iter().all(|factor| (0.0..=most).contains(factor)) {
        true => Ok(factors),
        false => Err(corrupt("first_pass_factors", format!("expected numbers between 0 and {most:e}"))),
    }
}
