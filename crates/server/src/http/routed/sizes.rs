//! Estimates the router's memory for merging an answer, without the bodies that shards send.

use crate::route::FleetRequest;
use sterling_api::Widths;
use sterling_core::request::{Rank, Retrieve};

/// Memory per candidate and per result while they are merged, in bytes.
const CANDIDATE_BYTES: usize = 48;
const RESULT_BYTES: usize = 256;
/// Default number of candidates.
const CANDIDATES: usize = 1000;

/// Estimates the memory for merging an answer, in bytes.
pub(super) fn bytes(work: &FleetRequest) -> usize {
    match work {
        FleetRequest::Retrieve(retrieve) => held(retrieve),
        FleetRequest::Rank(rank) => {
            let Rank { items, .. } = &**rank;
            items.len().saturating_mul(RESULT_BYTES).saturating_add(Widths::default().as_text(items.len()))
        }
    }
}

/// Estimates the memory for merging a retrieval, in bytes.
pub(super) fn held(retrieve: &Retrieve) -> usize {
    let candidates = retrieve.candidates.unwrap_or(CANDIDATES).max(retrieve.k);
    let items = candidates.saturating_mul(CANDIDATE_BYTES).saturating_add(retrieve.k.saturating_mul(RESULT_BYTES));
    items.saturating_add(Widths::default().as_text(retrieve.k))
}
