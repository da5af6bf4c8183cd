//! A publication in parts: several machines embed and assign items side by side, one puts the version together, or several its shards.
//!
//! 1. *Embed* ([`Embedding`]): each item file is a unit of a job (`sterling_batch::jobs`) and becomes a folder with its ids and attributes,
//!    its vectors, and what is known of them.
//! 2. *Train* ([`train`]): one machine draws the sample of all vectors and trains the centroids.
//! 3. *Assign* ([`Assigning`]): each unit gets the list of each of its items.
//! 4. A publication takes these in place of items (`gather`): what it writes are the bytes that it would write of the files.
//! 5. Of a version in shards workers *cut* these before ([`Cutting`]), each shard a unit: the publication then only names them.
//!
//! ```text
//! DIR/
//!   _job.json                      what is asked, and of each item file its length and hash; written first
//!   part-NNNNN-HASH/               of an item file
//!     items.parquet                ids and attributes
//!     vectors.npy                  f32 [n, D]
//!     kept.bin                     the tensors that are kept by item, as a version stores them, row after row
//!     note.json                    what this follows from and is like, and the checksums of the other files
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
pub(super) use cut::{CutShards, cut_shards};
pub(super) use gather::gather;
pub use gather::publication;
pub use steps::{Assigning, Embedding, PartCounts, train};
pub(super) use terms::PartShard;
