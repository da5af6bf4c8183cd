//! The codes of an index, read from a mapped tensor file without a copy.

use super::books::{Codebooks, VALUES};
use super::options::OF_LINE;
use crate::device::buffer::Buffer;
use crate::device::cpu::kernels::{BLOCK, CodeBlocks, LINE};
use crate::error::{Error, Result};
use crate::files::Tensors;

/// Codes of all slots and the values that they name.
#[derive(Clone, Debug)]
pub(in crate::ivf) struct ItemCodes {
    pub(in crate::ivf) books: Codebooks,
    codes: Buffer<u8>,
    /// Lines of a block, M / 8.
    lines: usize,
}

impl ItemCodes {
    /// Opens the codes of so many slots of vectors `[D]`, where there are any.
    ///
    /// # Errors
    /// `Corrupt` with the tensor where one of two is missing or does not fit the rest.
    pub(in crate::ivf) fn open(tensors: &Tensors, slots: usize, dimension: usize) -> Result<Option<Self>> {
        if !tensors.has("first_pass_codes") && !tensors.has("first_pass_values") {
            return Ok(None);
        }
        let corrupt = |tensor: &str, what: String| Error::corrupt(format!("tensor `{tensor}`: {what}"));
        let (codes, shape) = tensors.get::<u8>("first_pass_codes", 4)?;
        let lines = shape[1];
        let most = dimension.div_ceil(OF_LINE);
        if !(1..=most).contains(&lines) || shape != [slots / BLOCK, lines, BLOCK, 4] {
            let what = format!("shape {shape:?} does not fit {slots} slots of {dimension} dimensions");
            return Err(corrupt("first_pass_codes", what));
        }
        let (values, shape) = tensors.get::<f32>("first_pass_values", 2)?;
        if shape != [dimension, VALUES] {
            let what = format!("shape {shape:?}, expected [{dimension}, {VALUES}]");
            return Err(corrupt("first_pass_values", what));
        }
        let books = Codebooks::new(&values, lines * OF_LINE).map_err(|what| corrupt("first_pass_values", what))?;
        Ok(Some(ItemCodes { books, codes, lines }))
    }

    /// The blocks of the `items` slots from a multiple of 16 on, before those of the slots `next`.
    pub(in crate::ivf) fn blocks(&self, first_slot: u32, items: usize, next: Option<u32>) -> CodeBlocks<'_> {
        let from = |slot: u32| slot as usize / BLOCK * self.lines * LINE;
        let bytes = items.div_ceil(BLOCK) * self.lines * LINE;
        let codes = &self.codes[from(first_slot)..][..bytes];
        CodeBlocks {
            codes,
            lines: self.lines,
            items,
            first_slot,
            next: next.map_or(&[], |next| &self.codes[from(next)..]),
        }
    }

    /// Bytes of a block of 16 items.
    pub(in crate::ivf) fn block_bytes(&self) -> u64 {
        (self.lines * LINE) as u64
    }

    /// Bytes of codes and values.
    pub(in crate::ivf) fn bytes(&self) -> usize {
        self.codes.bytes() + self.books.values.len() * VALUES * size_of::<f32>()
    }
}
