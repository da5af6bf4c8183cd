//! The item index: an inverted file of int8 rows.
//!
//! Items lie in the order of C lists, the clusters of a k-means. A query scores the centroids, takes the best P lists and
//! scans their rows with integer products; the best K0 are the candidates. Rows kept in a wider format rescore them.
//!
//! | tensor | holds |
//! |---|---|
//! | `codes` u8 `[blocks, G, 16, 4]` | int8 rows plus 128, in blocks of 16 items (see [`sterling_kernels::cpu::kernels`]) |
//! | `scales` f32 `[S]` | what a code of each slot is worth; 0 where a slot holds no item |
//! | `list_lengths` u32 `[C]` | items of each list; a list takes whole blocks |
//! | `centroids` f32 `[C, D]` | the centres of the lists |
//! | `penalties` f32 `[C]` | what a centroid's product loses, where queries probe the nearest centroids in L2: `|c|² / 2` |
//! | `rows` bf16, f16 or f32 `[S, D]` | the rows that rescore, where the recipe asks for them |
//!
//! Rows that came later lie in the same lists, or, where these do not fit them, in lists of their own (`stray`, `own`).
//!
//! Where the recipe asks for them, smaller codes are scanned in place of the int8 rows for few candidates (`first_pass`).
//!
//! Scores are inner products. Source: IVF with scalar quantisation as in Faiss (arXiv 2401.08281), and the int8
//! co-design of SilverTorch (arXiv 2511.14881).

mod ahead;
mod assign;
mod batch;
mod build;
mod coded;
#[cfg(feature = "cuda")]
mod device;
mod encode;
mod filtered;
mod first_pass;
mod kmeans;
mod options;
mod own;
mod pace;
mod probing;
mod quantize;
mod random;
mod rebalance;
mod scores;
mod search;
mod sizes;
mod stray;
mod survey;
mod trained;
mod union;
mod view;

pub use ahead::{Ahead, Ending, Margins, Seen, next_look};
pub use assign::Assigner;
pub use batch::{BatchScratch, Search};
pub use build::{Built, Lists, build, from_lists, list_offsets, steps};
pub use coded::CodedRow;
#[cfg(feature = "cuda")]
pub use device::{BesideLists, DeviceIndex, EligibleParts, FilteredSearch, LiveParts, Until};
pub use filtered::{MemberWords, Words};
pub use first_pass::{CodeChoice, CodeKind, CodeShape, FirstPass, IndexExtent, Rates};
pub use options::{Options, Rescore};
pub use own::OwnLayout;
pub use pace::Pace;
pub use probing::{Counters, Probing, Scratch};
pub use rebalance::rebalance;
pub use scores::Int8Scores;
pub use sizes::Sizes;
pub use survey::RowSurvey;
pub use trained::Trained;
pub use union::{Member, Union};
pub use view::{Index, WideRows};

#[cfg(test)]
mod tests;
