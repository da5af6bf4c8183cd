//! Eligibility index: bit planes over the items of each list, and posting lists of rare terms.
//!
//! A *plane* has one bit per item, 64 items per word. In a list of `n` slots a plane has `W = ceil(n / 64)` words, and bit `i`
//! stands for slot `i` of the list. Bits of slots without an item are 0.
//!
//! | tensor | planes | one for |
//! |---|---|---|
//! | `planes` | exact, each over all lists | each frequent term, then each bucket of the compared columns (`numbers`) |
//! | `bloom` | `m` for each list, list by list | each bit position of the list's Bloom filters: an item sets `hashes` positions for each other term |
//!
//! The width `m` differs between lists: it is chosen for the item of the list with the most terms. Consecutive lists
//! are contiguous in every exact plane, so probing one list and sweeping all lists use the same flat loops. Rare terms
//! also have the sorted list of their slots. A [`Plan`](super::Plan) compiles a filter into operations on planes
//! (`program`). A Bloom "maybe" cannot be negated. The filter bitmap of a plan is therefore an upper bound, and
//! [`Plan::passes`](super::Plan::passes) verifies each candidate.
//!
//! Source: the signature layout of SilverTorch (arXiv 2511.14881), extended with exact planes and posting lists.

mod build;
#[cfg(feature = "cuda")]
mod device;
mod hash;
mod numbers;
mod view;

pub use build::{Options, encode};
#[cfg(feature = "cuda")]
pub use device::{DeviceLiveItems, DevicePlanes};
pub use view::Index;
pub(super) use view::TermStorage;

#[cfg(test)]
pub(super) use build::encode_by;
#[cfg(test)]
pub(super) use hash::Hashing;
pub(super) use hash::TermHash;
pub(super) use numbers::Run;
