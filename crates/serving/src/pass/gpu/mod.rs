//! The pass on a GPU: whole batches, from features or query embeddings to the columns of the best, with one wait at the end.
//!
//! [`resident`] holds a snapshot in the memory of the device, or a part of every list on each of several, whose findings [`shared`] makes one; [`beside`] what updates have made of it. Requests of a batch are embedded together and then go through
//! [`search`] and [`rerank`] in groups that find their candidates alike, each as large as the device's memory allows. What a
//! device cannot do, or fails at, the CPU does: a request is answered either way. A device that fails is left alone for a while ([`health`]).
//!
//! | step | on the device |
//! |---|---|
//! | 1, 2 | bags of rows pooled from tables, the tower's program; on the host where tables or graph do not allow it |
//! | 3 | planned by the host as ever; words of a plan over all lists, exact, once for all requests that share it |
//! | 4 | centroids scored, lists selected; with words as many lists as hold enough eligible items |
//! | 6, 7 | int8 scan with a rising bar, list by list where requests share lists; excluded items never become candidates |
//! | 8 | products with the widest rows, the best K0 |
//! | merge | where a user has several queries, what each has found: each item once, with the score that the model says |
//! | 9, 10, 11 | rows and columns gathered, the reranker's program, the value model, the best K |

mod answers;
mod beside;
mod cuda;
mod embedded;
mod found;
mod groups;
mod health;
mod kept;
mod rerank;
mod resident;
mod residents;
mod search;
mod select;
mod shared;

pub use cuda::Cuda;
pub use residents::Residents;
