//! Working memory of graphs.

use crate::dense;

/// Memory that the caller reuses between runs: after the first runs, a compiled program allocates nothing.
#[derive(Debug, Default)]
pub struct Scratch {
    pub(super) program: dense::Scratch,
    /// Rows of the candidates of one run of `rten`, input after input, each `[n, width]`.
    pub(super) rows: Vec<f32>,
    /// Concatenated rows of one candidate.
    pub(super) row: Vec<f32>,
    /// Logits of one task for a block.
    pub(super) logits: Vec<f32>,
    /// Candidates of the run with a logit that is not finite; a candidate occurs once per such logit.
    pub(super) not_finite: Vec<usize>,
}

impl Scratch {
    /// Returns the candidates of the last run of a reranker that have logits that are not finite, in any order and with
    /// repetitions.
    pub fn not_finite(&self) -> &[usize] {
        &self.not_finite
    }
}
