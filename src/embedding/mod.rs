//! Embedding tables: jagged ids in, pooled or sequential embeddings out.
//!
//! Names and meanings are TorchRec's (<https://github.com/meta-pytorch/torchrec>): a [`KeyedJaggedTensor`] carries the ids of
//! all features of a batch, an [`EmbeddingBagCollection`] turns them into one [`KeyedTensor`], an [`EmbeddingCollection`] into
//! one [`JaggedTensor`] of rows a feature. A [`Table`] is whole or cut into shards ([`shard`]), each with its
//! own place ([`tiers`]); [`place`] says as plain data which shard lies where. Where the shards lie changes no answer.

pub mod format;
pub mod jagged;
pub mod keyed;
pub mod lookup;
pub mod place;
pub mod shard;
pub mod table;
pub mod tiers;
mod uses;

pub use crate::device::cpu::pool::RowFormat;
pub use jagged::{Feature, JaggedTensor, KeyedJaggedTensor};
pub use keyed::KeyedTensor;
pub use lookup::{
    BagConfig, EmbeddingBagCollection, EmbeddingCollection, Lookup, LookupReport, OnDegraded, Pooling, SequenceConfig,
    TableCounts,
};
pub use table::{Table, TableSpec, Unseen, Vocabulary};
