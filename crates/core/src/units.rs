//! Numbers that must not mix: the user's item id, our slot, a list, a term; and the order of scores.

use std::cmp::Ordering;

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};

/// Stands where the row or the slot of an item is told and there is no item.
pub const NO_ITEM: u32 = u32::MAX;

/// The order of scores, the best first. Both zeros are one.
#[inline]
pub fn by_score(score: f32, other: f32) -> Ordering {
    // The sum of -0 and +0 is +0.
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
            /// The number as an index into a slice.
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
    /// The user's 64-bit name of an item. Any value is allowed; within a snapshot each occurs once.
    ItemId(i64)
}
unit! {
    /// Our position of an item in the index. Items of a list are consecutive, every list starts at a multiple of 16,
    /// so that some slots hold no item.
    Slot(u32)
}
unit! {
    /// One list (cluster) of the inverted file, `0..C`.
    ListId(u32)
}
unit! {
    /// One (feature, value) pair of the filterable attributes, dense over a snapshot.
    TermId(u32)
}
