//! The one forward pass, in three parts.
//!
//! | part | where | does |
//! |---|---|---|
//! | *prepare* | [`prepare`] | request → typed, checked, priced work, bound to a view; nothing of it can be wrong any more |
//! | *run* | [`Pass`], [`Cpu`], [`Cuda`] | the eleven steps over the view, on one device |
//! | *reply* | whoever gets the [`Answer`](sterling_core::request::Answer) | columns → JSON, Arrow or files |
//!
//! The eleven steps, of which prepare does the third:
//!
//! | # | step | in → out |
//! |---|---|---|
//! | 1 | `lookup` | ids of all requests → pooled embeddings, all tables in one call |
//! | 2 | `tower` | pooled, dense and sequence features → query embeddings `[Q, D]` or `[Q, Tq, D]`, and what the OverArch reads besides |
//! | 3 | `plan` | filter → operations on bit planes; exclude list → slots |
//! | 4 | `probe` | centroid scores → the best lists |
//! | 5 | `words` | bit words of the probed lists only, 64 items a word |
//! | 6 | `scan` | int8 products of surviving items → the best K0, streamed |
//! | 7 | `verify` | exact check of the filter on the candidates, excluded ones drop out |
//! | 8 | `rescore` | f32 products with the wide rows |
//! | 9 | `overarch` | tensors of the user × rows and columns of the items → task scores `[T, K0]` |
//! | 10 | `value` | task scores and columns → one value `[K0]` |
//! | 11 | `top` | ids, values and task scores of the best K |
//!
//! On a CPU they are read in this order: `cpu` (a batch from end to end), `embed` (1, 2), [`sterling_index::search`] (4 to 8), `answers` (what was
//! found, request by request), `rerank` (9 to 11).
//!
//! Items that updates have brought are no step of their own. A request is answered from one [`View`](crate::view::View), whose
//! snapshot and what lies beside it are probed, scanned and rescored as one; what is deleted or replaced drops out with the words
//! of step 5, or in step 7. Where a user has several queries, steps 4 to 8 run for each of them, and what they found is merged
//! before step 9 (`merge`).
//!
//! The pass does no I/O: rows of a cluster are fetched before ([`fetch`]) or, where nobody did, in step 1.

mod answers;
mod batch;
mod cost;
mod cpu;
mod embed;
mod fetch;
mod gpu;
mod merge;
mod prepare;
mod rerank;
mod scratch;
mod trace;
mod work;

pub use batch::{Batch, Pass, run};
pub use cpu::Cpu;
pub use fetch::fetch;
pub use gpu::{Cuda, Residents};
pub use prepare::prepare;
pub use work::{Cost, Prepared};
