//! Buffers that a worker reuses: once warm, a pass allocates little more than its answer.

use sterling_core::units::Slot;
use sterling_graph::tower;
use sterling_index::value;

#[derive(Default)]
pub(super) struct Scratch {
    /// Buffers of graphs.
    pub(super) graphs: tower::Scratch,
    /// Slots of the candidates, `[K0]`.
    pub(super) slots: Vec<Slot>,
    /// Numeric columns at the candidates, each `[K0]`.
    pub(super) columns: Vec<Vec<f32>>,
    /// Task scores, `[T, K0]`.
    pub(super) tasks: Vec<f32>,
    /// False if a task score is NaN.
    pub(super) has_scores: bool,
    /// Retrieval scores, `[K0]`.
    pub(super) similarity: Vec<f32>,
    /// Results of the value model, `[K0]`.
    pub(super) values: Vec<f32>,
    pub(super) order: Vec<u32>,
    pub(super) program: value::Scratch,
}
