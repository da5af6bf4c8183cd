//! Embedding tables and embedding bags: jagged ids in, pooled or sequential embeddings out.
//!
//! Names and semantics are TorchRec's (<https://github.com/meta-pytorch/torchrec>): a [`KeyedJaggedTensor`] holds the ids of all
//! features of a batch, an [`EmbeddingBagCollection`] converts them to one [`KeyedTensor`], an [`EmbeddingCollection`] to one
//! [`JaggedTensor`] of rows per feature (`lookup`). A [`Table`] is complete or partitioned into shards (table-wise, row-wise or
//! column-wise sharding, [`shard`]), each with a source of its rows ([`tiers`]); [`place`] describes the location of shards as
//! plain data. The location of shards changes no result.
//!
//! Modules depend on each other in one direction: types of ids and rows, `spec` and `place`, then [`tiers`], `table`,
//! [`shard`], `lookup`. `device` holds tables in GPU memory; `HotTables` holds tables of which only hot rows are in GPU
//! memory. [`train`] has tables in training, and [`managed`] maps unbounded ids to tables of fixed size.
//!
//! ```
//! use std::sync::Arc;
//! use sterling_embedding::{
//!     BagConfig, EmbeddingBagCollection, KeyedJaggedTensor, Lookup, Pooling, RowFormat, Table, Unseen,
//! };
//!
//! let rows: Vec<f32> = (0..100).flat_map(|row| [row as f32, 1.0]).collect();
//! let table = Table::from_f32("products", 2, &rows, RowFormat::F32, Unseen::Zero)?;
//! let bags = [BagConfig { feature: "viewed".into(), table: "products".into(), pooling: Pooling::Sum }];
//! let collection = EmbeddingBagCollection::new(vec![Arc::new(table)], &bags)?;
//!
//! // Two examples: ids 3 and 4, and none.
//! let ids = KeyedJaggedTensor::from_lengths(["viewed"], vec![3, 4], &[2, 0], None)?;
//! let (pooled, _) = collection.lookup(&ids, &Lookup::default())?;
//! assert_eq!(pooled.row("viewed", 0), Some(&[7.0, 2.0][..]));
//! assert_eq!(pooled.row("viewed", 1), Some(&[0.0, 0.0][..]));
//! # Ok::<(), sterling_core::error::Error>(())
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

#[cfg(feature = "cuda")]
pub mod device;
pub mod format;
#[cfg(feature = "cuda")]
mod hot;
mod jagged;
pub mod keyed;
mod lookup;
pub mod managed;
pub mod place;
#[cfg(feature = "planner")]
pub mod planner;
mod report;
pub mod shard;
mod spec;
mod table;
#[cfg(test)]
mod tests;
pub mod tiers;
mod tokenizer;
pub mod train;
mod vocabulary;

#[cfg(feature = "cuda")]
pub use device::DeviceTables;
#[cfg(feature = "cuda")]
pub use hot::{HostBags, HotCounters, HotTables, HotTurn};
pub use jagged::{Feature, JaggedTensor, KeyedJaggedTensor};
pub use keyed::KeyedTensor;
pub use lookup::{
    BagConfig, EmbeddingBagCollection, EmbeddingCollection, Pooling, Sequence, SequenceConfig, StartedBags,
};
pub use report::{Lookup, LookupReport, OnDegraded, TableCounts};
pub use spec::{TableSpec, Unseen};
pub use sterling_kernels::cpu::pool::RowFormat;
pub use table::{Shard, Table};
pub use tokenizer::{Retained, Tokenizer};
pub use vocabulary::Vocabulary;
