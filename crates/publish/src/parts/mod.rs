//! Distributed publication: several machines embed and assign items concurrently; one then makes the version, or several make its
//! shards.
//!
//! 1. *Embed* ([`Embedding`]): each item file is a unit of a job (`sterling_batch::jobs`), and becomes a folder with its ids and
//!    attributes, its vectors and their statistics.
//! 2. *Train* ([`train`]): one machine samples all vectors and trains the centroids.
//! 3. *Assign* ([`Assigning`]): each unit gets the list of each of its items.
//! 4. A publication reads the results of these steps in place of the item files (`gather`), and writes the same bytes as it would
//!    from them.
//! 5. For a version in shards, workers first make the shards ([`Cutting`]), each as one unit of work; the publication then only
//!    lists the shards.
//!
//! ```text
//! DIR/
//!   _job.json                      parameters, and length and hash of each item file; written first
//!   part-NNNNN-HASH/               one per item file
//!     items.parquet                ids and attributes
//!     vectors.npy                  f32 [n, D]
//!     kept.bin                     stored tensors per item, in the format of a version, row after row
//!     note.json                    inputs and statistics, and the checksums of the other files
//!   trained/                       centroids.npy, f32 [C, D], and note.json
//!   part-NNNNN-HASH-lists/         lists.npy, u32 [n, 1], and note.json
//!   shard-N-of-S/                  the files of a shard's items, findings.safetensors and note.json
//! ```

mod cut;
mod gather;
mod kinds;
mod piece;
mod steps;
mod terms;

pub use cut::Cutting;
pub(super) use cut::{CutShards, finished_shards};
pub(super) use gather::gather;
pub use gather::publication;
pub use steps::{Assigning, Embedding, PartCounts, train};
pub(super) use terms::PartShard;
