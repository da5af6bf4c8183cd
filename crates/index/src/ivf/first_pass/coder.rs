//! Encoder of first-pass codes of either kind, with its tensors.

use rayon::prelude::*;

use super::codebook::Codebooks;
use super::encode::ProductEncoder;
use super::options::{CodeKind, CodeShape, OF_LINE};
use super::rotation::Rotation;
use super::signs::SignEncoder;
use sterling_core::error::Result;
use sterling_kernels::cpu::kernels::{BLOCK, LINE};
use sterling_storage::files::TensorFile;

/// Encoder of one kind of codes.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::ivf) enum Coder {
    /// Codebooks of product codes.
    Pq4(Codebooks),
    /// Rotation of sign codes.
    Rabitq(Rotation),
}

/// Codes of all slots, `[blocks, M / 8, 16, 4]`, and factors, `[S]` (empty for product codes).
pub(in crate::ivf) type Coded = (Vec<u8>, Vec<f32>);

impl Coder {
    /// Returns the number of residuals for the training.
    pub(in crate::ivf) fn sample(shape: CodeShape) -> usize {
        match shape.kind {
            CodeKind::Pq4 => Codebooks::SAMPLE,
            CodeKind::None | CodeKind::Auto | CodeKind::Rabitq => 0,
        }
    }

    /// Trains an encoder on `residuals` `[n, D]`.
    pub(in crate::ivf) fn train(residuals: &[f32], dimension: usize, shape: CodeShape, seed: u64) -> Self {
        match shape.kind {
            CodeKind::None | CodeKind::Auto | CodeKind::Pq4 => {
                Coder::Pq4(Codebooks::train(residuals, dimension, shape.subspaces, seed))
            }
            CodeKind::Rabitq => Coder::Rabitq(Rotation::draw(dimension, seed)),
        }
    }

    /// Returns the number of subspaces, M.
    pub(super) fn subspaces(&self) -> usize {
        match self {
            Coder::Pq4(books) => books.subspaces,
            Coder::Rabitq(rotation) => rotation.width() / super::signs::DIMENSIONS,
        }
    }

    /// Returns the size of a block's codes in bytes.
    pub(in crate::ivf) fn block_bytes(&self) -> usize {
        self.subspaces() / OF_LINE * LINE
    }

    /// Declares the tensors for `slots` slots: codes and factors are reserved, codebooks or rotation are added.
    ///
    /// # Errors
    /// As [`TensorFile::reserve`].
    pub(in crate::ivf) fn declare(&self, slots: usize, file: &mut TensorFile<'_>) -> Result<()> {
        file.reserve::<u8>("first_pass_codes", &[slots / BLOCK, self.subspaces() / OF_LINE, BLOCK, 4])?;
        match self {
            Coder::Pq4(books) => {
                let numbers = books.numbers();
                file.add_owned("first_pass_values", &[books.dimension(), numbers.len() / books.dimension()], numbers)
            }
            Coder::Rabitq(rotation) => {
                file.reserve::<f32>("first_pass_factors", &[slots])?;
                let words = rotation.width() / 64;
                file.add_owned("first_pass_signs", &[rotation.signs().len() / words, words], rotation.signs().to_vec())
            }
        }
    }

    /// Encodes slots; `slot` returns the row and the centroid of a slot with an item.
    pub(in crate::ivf) fn coded<'a>(
        &self,
        slots: usize,
        slot: impl Fn(usize) -> Option<(&'a [f32], &'a [f32])> + Sync,
    ) -> Coded {
        let bytes = self.block_bytes();
        let mut codes = vec![0u8; slots / BLOCK * bytes];
        let blocks = codes.par_chunks_exact_mut(bytes).enumerate();
        match self {
            Coder::Pq4(books) => {
                blocks.for_each_init(
                    || ProductEncoder::new(books),
                    |encoder, (block, codes)| {
                        for lane in 0..BLOCK {
                            if let Some((row, centroid)) = slot(block * BLOCK + lane) {
                                pack(encoder.encode(row, centroid), lane, codes);
                            }
                        }
                    },
                );
                (codes, Vec::new())
            }
            Coder::Rabitq(rotation) => {
                let mut factors = vec![0f32; slots];
                blocks.zip(factors.par_chunks_exact_mut(BLOCK)).for_each_init(
                    || SignEncoder::new(rotation),
                    |encoder, ((block, codes), factors)| {
                        for (lane, factor) in factors.iter_mut().enumerate() {
                            if let Some((row, centroid)) = slot(block * BLOCK + lane) {
                                let (of_item, worth) = encoder.encode(row, centroid);
                                pack(of_item, lane, codes);
                                *factor = worth;
                            }
                        }
                    },
                );
                (codes, factors)
            }
        }
    }
}

/// Writes the codes of an item into its position (`lane`) of the block.
fn pack(of_item: &[u8], lane: usize, block: &mut [u8]) {
    for (subspace, &code) in of_item.iter().enumerate() {
        let (line, place) = (subspace / OF_LINE, subspace % OF_LINE);
        block[line * LINE + lane * 4 + place % 4] |= code << (place / 4 * 4);
    }
}
