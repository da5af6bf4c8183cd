//! Memory that a worker keeps from request to request: once warm, a pass allocates its answer and nothing else.

use crate::units::Slot;
use crate::{search, value};

#[derive(Default)]
pub(super) struct Scratch {
    pub(super) search: search::Scratch,
    /// Retrieval score and slot of each candidate.
    pub(super) candidates: Vec<(f32, Slot)>,
    /// Rows of a run of candidates, `[n, D]`.
    pub(super) rows: Vec<f32>,
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
