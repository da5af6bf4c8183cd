//! Memory that a thread keeps from request to request.

use std::cell::RefCell;

use crate::topk::Selector;
use crate::units::Slot;
use crate::{filter, ivf, value};

#[derive(Default)]
pub(super) struct Scratch {
    pub(super) selector: Selector,
    pub(super) search: ivf::Scratch,
    /// Of requests that are searched together.
    pub(super) selectors: Vec<Selector>,
    pub(super) batch: ivf::Batch,
    pub(super) words: filter::Scratch,
    /// Retrieval score and slot of each candidate.
    pub(super) candidates: Vec<(f32, Slot)>,
    /// Slots that are rescored, ascending, and their scores.
    pub(super) slots: Vec<u32>,
    pub(super) products: Vec<f32>,
    /// `[K0, D]`
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

/// Lends the thread's memory to `f`. What `f` finds in it is what the last request left; what a panic leaves is dropped.
pub(super) fn with_scratch<T>(f: impl FnOnce(&mut Scratch) -> T) -> T {
    thread_local!(static SCRATCH: RefCell<Scratch> = RefCell::default());
    let mut scratch = SCRATCH.take();
    let made = f(&mut scratch);
    SCRATCH.set(scratch);
    made
}
