//! Inverted file index (IVF) over int8 rows.
//!
//! Items are grouped into C inverted lists, the clusters of a k-means. A query scores the centroids, selects the best P lists
//! (nprobe) and scans their rows with integer products; the best K0 items are the candidates. Rescoring rows give the
//! candidates their final scores.
//!
//! | tensor | holds |
//! |---|---|
//! | `codes` u8 `[blocks, G, 16, 4]` | int8 rows plus 128, in blocks of 16 items (see [`sterling_kernels::cpu::kernels`]) |
//! | `scales` f32 `[S]` | scale of each slot's codes; 0 for slots without an item |
//! | `list_lengths` u32 `[C]` | items of each list; a list occupies a whole number of blocks |
//! | `centroids` f32 `[C, D]` | centroids of the lists |
//! | `penalties` f32 `[C]` | subtracted from a centroid's product if queries probe the nearest centroids in L2: `|c|² / 2` |
//! | `rows` bf16, f16 or f32 `[S, D]` | rescoring rows, if the recipe requests them |
//!
//! Rows that are added later use the same lists, or lists of their own if they do not fit (`stray`, `own_lists`).
//!
//! If the recipe requests them, smaller codes are scanned in place of the int8 rows to select a few candidates (`first_pass`).
//!
//! Scores are inner products. Source: IVF with scalar quantization as in Faiss (arXiv 2401.08281), and the int8 co-design of
//! SilverTorch (arXiv 2511.14881).

mod assign;
mod batch;
mod build;
mod check_interval;
mod coded;
#[cfg(feature = "cuda")]
mod device;
mod encode;
mod filtered;
mod first_pass;
mod kmeans;
mod ood;
mod options;
mod own_lists;
mod probing;
mod quantize;
mod random;
mod rebalance;
mod scores;
mod search;
mod sizes;
mod statistics;
mod stray;
mod termination;
mod trained;
mod union;
mod view;

pub use assign::Assigner;
pub use batch::{BatchScratch, Search};
pub use build::{Built, Lists, build, from_lists, list_offsets, steps};
pub use check_interval::CheckInterval;
pub use coded::CodedRow;
#[cfg(feature = "cuda")]
pub use device::{DeviceIndex, EligibleParts, FilteredSearch, FilteredSearches, LiveParts, SegmentItems};
pub use filtered::{MemberWords, Words};
pub use first_pass::{CodeChoice, CodeKind, CodeShape, FirstPass, IndexExtent, Rates};
pub use ood::OodProbing;
pub use options::{Options, Rescore};
pub use own_lists::OwnLayout;
pub use probing::{Counters, Probing, Scratch};
pub use rebalance::rebalance;
pub use scores::Int8Scores;
pub use sizes::Sizes;
pub use statistics::RowSurvey;
pub use termination::{Ending, ResidualQuantiles, Seen, UnscannedLists, next_check};
pub use trained::Trained;
pub use union::{Member, Union};
pub use view::{Index, WideRows};

#[cfg(test)]
mod tests;
