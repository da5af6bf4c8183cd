//! Memory that a worker keeps from request to request: once warm, a pass allocates its answer and little else.

use sterling_core::units::Slot;
use sterling_graph::tower;
use sterling_index::value;

#[derive(Default)]
pub(super) struct Scratch {
    /// What graphs work in.
    pub(super) graphs: tower::Scratch,
    /// Where the candidates lie, `[K0]`.
    pub(super) slots: Vec<Slot>,
    /// The snapshot's numeric columns at the candidates, each `[K0]`.
    pub(super) columns: Vec<Vec<f32>>,
    /// `[T, K0]`
    pub(super) tasks: Vec<f32>,
    /// `[K0]`
    pub(super) similarity: Vec<f32>,
    /// `[K0]`
    pub(super) values: Vec<f32>,
    pub(super) order: Vec<u32>,
    pub(super) program: value::Scratch,
}
