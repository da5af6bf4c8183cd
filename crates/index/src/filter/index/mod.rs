//! The eligibility index: bit planes over the items of each list, and posting lists of rare terms.
//!
//! A *plane* is one bit of every item, 64 items a word. A list of `n` slots has `W = ceil(n / 64)` words a plane, bit `i`
//! standing for the list's slot `i`; bits of slots without an item are 0.
//!
//! | tensor | planes | one for |
//! |---|---|---|
//! | `planes` | exact, each over all lists in turn | each frequent term, then each bucket of the compared columns (`numbers`) |
//! | `bloom` | `m` for each list, list after list | each bit position of the list's Bloom filters: an item sets `hashes` positions for each other term |
//!
//! The width `m` differs from list to list: it follows the list's fullest item. A run of lists is a contiguous run of every
//! exact plane, so that probing one list and sweeping over all are the same flat loops. Terms that few items have keep,
//! besides, the sorted list of their slots. A [`Plan`](super::Plan) turns a filter into operations on planes (`program`). A Bloom "maybe"
//! cannot be negated: the words of a plan are an upper bound of the truth, and [`Plan::passes`](super::Plan::passes) decides for each candidate.
//!
//! Source: the signature layout of SilverTorch (arXiv 2511.14881), with exact planes and posting lists beside it.

mod build;
#[cfg(feature = "cuda")]
mod device;
mod hash;
mod numbers;
mod view;

pub use build::{Options, encode};
#[cfg(feature = "cuda")]
pub use device::{DeviceLiveItems, DevicePlanes};
pub(super) use view::Held;
pub use view::Index;

#[cfg(test)]
pub(super) use build::encode_by;
#[cfg(test)]
pub(super) use hash::Hashing;
pub(super) use hash::TermHash;
pub(super) use numbers::Run;
