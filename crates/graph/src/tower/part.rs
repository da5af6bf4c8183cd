//! What an OverArch says of an item whoever asks: worked out when the item is published or changes, and kept by item.

use super::reads::{Candidates, Reads};
use super::scratch::Scratch;
use crate::dense::{InputRows, ItemCut, RowProgram};
use sterling_core::error::{Error, Result};

/// The part of an OverArch that depends on the item alone.
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

    /// A name for what makes it, weights and all.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Whether this is what a publication kept under a digest. Those of 16 digits, of older ones, are of the program's text.
    pub fn is(&self, digest: &str) -> bool {
        digest == self.digest || digest == self.program.digest()
    }

    /// Where the graph is cut.
    pub fn cut(&self) -> &ItemCut {
        &self.cut
    }

    /// What makes it.
    pub fn program(&self) -> &RowProgram {
        &self.program
    }

    /// What it is made of: rows and numbers of the item.
    pub fn reads(&self) -> &Reads {
        &self.reads
    }

    /// Numbers that are kept of an item.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Writes the part of items, `[count, width]`, to `out`. `items` bring what [`ItemPart::reads`] says.
    ///
    /// # Errors
    /// `Internal` where they do not.
    pub fn run(&self, items: &Candidates<'_>, scratch: &mut Scratch, out: &mut [f32]) -> Result<()> {
        if items.numbers.len() != self.reads.numbers.len() || out.len() != items.count * self.width {
            return Err(Error::internal("items without what their part is made of"));
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
