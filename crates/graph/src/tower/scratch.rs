//! Memory that graphs work in.

use crate::dense;

/// Memory that the caller keeps from run to run: once warm, a program allocates nothing.
#[derive(Debug, Default)]
pub struct Scratch {
    pub(super) program: dense::Scratch,
    /// Rows of a run of candidates in `rten`, input after input, each `[n, width]`.
    pub(super) rows: Vec<f32>,
    /// The rows of one of them, side by side.
    pub(super) row: Vec<f32>,
    /// One task's logits of a block.
    pub(super) logits: Vec<f32>,
    /// False once a logit was no finite number.
    pub(super) has_finite_logits: bool,
}
