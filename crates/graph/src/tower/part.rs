//! Item-side precomputation: the part of the reranker that depends on the item alone, evaluated once per item when the item is
//! published or changes, and stored per item.

use super::reads::{Candidates, Reads};
use super::scratch::Scratch;
use crate::dense::{InputRows, ItemCut, RowProgram};
use sterling_core::error::{Error, Result};

/// The part of a reranker that depends on the item alone.
#[derive(Debug)]
pub struct ItemPart {
    cut: ItemCut,
    program: RowProgram,
    reads: Reads,
    width: usize,
    digest: String,
}

impl ItemPart {
    pub(super) fn new(cut: ItemCut, program: RowProgram, reads: Reads, width: usize, digest: String) -> Self {
        ItemPart { cut, program, reads, width, digest }
    }

    /// Returns a digest of the part's compiled graph, including weights.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Returns whether `digest`, recorded by a publication, belongs to this part. Digests of 16 digits, of older
    /// releases, hash the text of the compiled graph.
    pub fn is(&self, digest: &str) -> bool {
        digest == self.digest || digest == self.program.digest()
    }

    /// Returns the cut of the graph.
    pub fn cut(&self) -> &ItemCut {
        &self.cut
    }

    /// Returns the program that computes the part.
    pub fn program(&self) -> &RowProgram {
        &self.program
    }

    /// Returns the inputs of the part: rows and numbers of the item.
    pub fn reads(&self) -> &Reads {
        &self.reads
    }

    /// Returns the count of numbers stored per item.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Writes the results of the part for items, `[count, width]`, to `out`. `items` provide the inputs of
    /// [`ItemPart::reads`].
    ///
    /// # Errors
    /// `Internal` if `items` lack inputs.
    pub fn run(&self, items: &Candidates<'_>, scratch: &mut Scratch, out: &mut [f32]) -> Result<()> {
        if items.numbers.len() != self.reads.numbers.len() || out.len() != items.count * self.width {
            return Err(Error::internal("items lack inputs of the reranker's item-side part"));
        }
        let row_width = self.reads.row_width();
        let mut fill = |given: InputRows<'_>| items.write(row_width, given);
        self.program.run(items.count, &[], &mut scratch.program, &mut fill, &mut |first, rows, block| {
            for (n, mut out) in (0..rows).zip(out[first * self.width..].chunks_exact_mut(self.width)) {
                for output in (0..block.outputs()).map(|o| block.output(o)) {
                    let made = output.row(n);
                    let (here, rest) = out.split_at_mut(made.len());
                    here.copy_from_slice(made);
                    out = rest;
                }
            }
            Ok(())
        })
    }
}
