//! Working memory of graphs.

use crate::dense;

/// Memory that the caller reuses between runs: once warm, a program allocates nothing.
#[derive(Debug, Default)]
pub struct Scratch {
    pub(super) program: dense::Scratch,
    /// Rows of a run of candidates in `rten`, input after input, each `[n, width]`.
    pub(super) rows: Vec<f32>,
    /// Concatenated rows of one candidate.
    pub(super) row: Vec<f32>,
    /// Logits of one task for a block.
    pub(super) logits: Vec<f32>,
    /// False once a logit was not finite.
    pub(super) has_finite_logits: bool,
}
