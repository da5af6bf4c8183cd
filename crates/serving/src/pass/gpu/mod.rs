//! The pass on a GPU: complete batches, from features or query embeddings to the result columns, with one wait at the end.
//!
//! [`resident`] holds a snapshot in device memory, or on each of several devices a part of every list, whose results [`shared`]
//! merges; [`delta`] holds the delta of the snapshot. Requests of a batch are embedded together. The requests then go through
//! [`search`] and [`rerank`] in groups that find candidates in the same way, each as large as device memory allows. The CPU
//! executes everything that a device cannot do or fails at, so that every request is answered. A failing device is paused
//! ([`health`]).
//!
//! | step | on the device |
//! |---|---|
//! | 1, 2 | pooled rows of tables, the compiled graph of the tower; on the host if tables or graph do not allow it |
//! | 3 | planned by the host; filter bitmap of a plan over all lists, exact, once for all requests that share it |
//! | 4 | centroids scored, lists selected; with a filter bitmap, as many lists as hold enough eligible items |
//! | 6, 7 | int8 scan with a rising score threshold, list by list if requests share lists; excluded items never become candidates |
//! | 8 | products with the most precise stored rows (rescoring rows, otherwise int8), the best K0 |
//! | merge | for several queries per user: distinct items, with the score that the model defines |
//! | 9, 10, 11 | rows and columns gathered, the compiled graph of the reranker, the value model, the best K |

mod answers;
mod candidates;
mod cuda;
mod delta;
mod embedded;
mod groups;
mod health;
mod rerank;
mod residency;
mod resident;
mod residents;
mod search;
mod select;
mod shared;

pub use cuda::Cuda;
pub use residents::Residents;
