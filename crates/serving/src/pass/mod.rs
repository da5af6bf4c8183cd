//! The forward pass, in three parts.
//!
//! | part | where | does |
//! |---|---|---|
//! | *prepare* | [`prepare`] | request → validated work with a cost estimate, bound to a view; it can no longer be invalid |
//! | *run* | [`Pass`], [`Cpu`], [`Cuda`] | the eleven steps over the view, on one device |
//! | *reply* | receiver of the [`Answer`](sterling_core::request::Answer) | columns → JSON, Arrow or files |
//!
//! The eleven steps, of which prepare does the third:
//!
//! | # | step | in → out |
//! |---|---|---|
//! | 1 | `lookup` | ids of all requests → pooled embeddings, all tables in one call |
//! | 2 | `tower` | pooled, dense and sequence features → query embeddings `[Q, D]` or `[Q, Tq, D]`, and other user tensors for the reranker |
//! | 3 | `plan` | filter → operations on Bloom planes; exclude list → slots |
//! | 4 | `probe` | centroid scores → the best lists |
//! | 5 | `words` | filter bitmap of the probed lists only, 64 items per word |
//! | 6 | `scan` | int8 products of eligible items → the best K0, streamed |
//! | 7 | `verify` | exact check of the filter on the candidates, removal of excluded ones |
//! | 8 | `rescore` | f32 products with the rescoring rows |
//! | 9 | `overarch` | user tensors × item rows and columns → task scores `[T, K0]` |
//! | 10 | `value` | task scores and columns → one value `[K0]` |
//! | 11 | `top` | ids, values and task scores of the best K |
//!
//! On a CPU, read the modules in this order: `cpu` (a batch from end to end), `embed` (1, 2), [`sterling_index::search`] (4 to
//! 8), `answers` (results per request), `rerank` (9 to 11).
//!
//! Updated items need no extra step. A request is answered from one [`View`](crate::view::View), whose snapshot and segments are
//! probed, scanned and rescored together; deleted and replaced items are removed by the filter bitmap of step 5, or in step 7. If
//! a user has several queries, steps 4 to 8 run for each, and their candidates are merged before step 9 (`merge`).
//!
//! The pass does no I/O, except that step 1 fetches rows of a cluster if they were not fetched before ([`fetch`]).

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
pub use prepare::{check_counts, prepare};
pub use work::{Cost, Prepared};
