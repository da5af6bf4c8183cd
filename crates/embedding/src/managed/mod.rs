//! Managed ids: unbounded 64-bit ids in a table of fixed size.
//!
//! A managed table assigns its rows to the ids with the best scores (such as the most frequent ids); other ids are
//! unseen. [`ManagedIds`] is that assignment: the id of each row, as snapshots store it (`ids.TABLE`, i64 `[rows]`,
//! [`FREE`] for a free row), and the map from ids to rows that is built from these ids (`map`). Rows and ids of a table are
//! in one file, so no reader sees an id with the row of another id.
//!
//! In training, `learner` counts occurrences and reassigns rows to other ids every n steps, by the scores of `policy`. The row
//! and its optimizer state then become the initial value of the new id. `crate::train::TableUpdate::assigned` lists these
//! changes.
//!
//! The semantics are those of TorchRec's managed collisions (<https://github.com/meta-pytorch/torchrec>,
//! `torchrec/modules/mc_modules.py`), without a shared row for all other ids: the table's `unseen` policy applies to them.

mod learner;
mod map;
mod policy;
mod row_ids;
mod sketch;
#[cfg(test)]
mod tests;

pub(crate) use learner::{IdLearner, SharedIds, initial_row};
pub use learner::{IdState, IdTotals};
pub use map::{FREE, map_bytes};
pub use policy::{Evict, ManagedSpec};
pub use row_ids::{ManagedIds, tensor_name};

use sterling_core::error::{Error, Result};

/// Returns a copy of `values` of length `len`, with `value` for the additional elements.
///
/// # Errors
/// `Overloaded` if memory cannot be allocated.
pub(crate) fn extended<T: Clone>(values: &[T], len: usize, value: T) -> Result<Vec<T>> {
    let mut all = Vec::new();
    all.try_reserve_exact(len).map_err(|e| {
        let bytes = len.saturating_mul(size_of::<T>());
        Error::overloaded(format!("managed ids: cannot allocate {bytes} bytes: {e}")).caused_by(e)
    })?;
    all.extend_from_slice(values);
    all.resize(len, value);
    Ok(all)
}
