//! What an answer takes while it is put together of those of shards, beside what these send.

use crate::route::Errand;
use sterling_api::Widths;
use sterling_core::request::{Rank, Retrieve};

/// Memory of a candidate and of a result on their way through, in bytes.
const CANDIDATE_BYTES: usize = 48;
const RESULT_BYTES: usize = 256;
/// Candidates of a request that does not say.
const CANDIDATES: usize = 1000;

/// About what an answer takes while it is put together.
pub(super) fn bytes(work: &Errand) -> usize {
    match work {
        Errand::Retrieve(retrieve) => held(retrieve),
        Errand::Rank(rank) => {
            let Rank { items, .. } = &**rank;
            items.len().saturating_mul(RESULT_BYTES).saturating_add(Widths::default().as_text(items.len()))
        }
    }
}

/// The same of a retrieval.
pub(super) fn held(retrieve: &Retrieve) -> usize {
    let candidates = retrieve.candidates.unwrap_or(CANDIDATES).max(retrieve.k);
    let items = candidates.saturating_mul(CANDIDATE_BYTES).saturating_add(retrieve.k.saturating_mul(RESULT_BYTES));
    items.saturating_add(Widths::default().as_text(retrieve.k))
}
