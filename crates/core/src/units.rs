//! Newtypes for numbers that must not be mixed up: item ids, slots, lists and filter terms; and the order of scores.

use std::cmp::Ordering;

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};

/// Sentinel for "no item" in arrays of rows or slots.
pub const NO_ITEM: u32 = u32::MAX;

/// Orders scores, best first. -0 and +0 are equal.
#[inline]
pub fn by_score(score: f32, other: f32) -> Ordering {
    // Adding +0 turns -0 into +0.
    (other + 0.0).total_cmp(&(score + 0.0))
}

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable, Serialize, Deserialize)]
        #[repr(transparent)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl $name {
            /// Returns the number as an index into a slice.
            #[inline]
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

unit! {
    /// Client-defined 64-bit id of an item. Any value is allowed; ids are unique within a snapshot.
    ItemId(i64)
}
unit! {
    /// Index of an item in the snapshot's arrays. Items of an inverted list are consecutive, and every list starts at a multiple
    /// of 16, so some slots hold no item.
    Slot(u32)
}
unit! {
    /// Number of an inverted list (cluster), `0..C`.
    ListId(u32)
}
unit! {
    /// Number of a (feature, value) pair of the filterable attributes, dense within a snapshot.
    TermId(u32)
}
