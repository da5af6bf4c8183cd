//! Tables in training: the backward pass of lookups, fused with the optimizer.
//!
//! [`LearningTables`] mirrors `EmbeddingBagCollection` and `EmbeddingCollection` over tables of f32 rows, the *master tables*
//! ([`MasterTable`]), each with a [`Rule`]. A step processes a batch of ids in three calls:
//!
//! 1. [`Preparer::prepare`] resolves ids to rows and sorts them, once per table. Preparation reads no row, so that another thread
//!    can prepare the next batch meanwhile.
//! 2. [`LearningTables::forward`] pools bags and reads sequences.
//! 3. [`LearningTables::backward`] sums the gradients of bags and sequences by row, and applies the rules. The gradient of a
//!    table is never materialized: memory holds the gradients of the bags and a few bytes per id.
//!
//! Plain rows, such as the items of an in-batch softmax, are sequences of one id per example. [`MasterTable::served`] converts a
//! master to a served table; checkpoints hold [`MasterRows`]. Ids may be managed ([`MasterTable::with_ids`]): every n steps,
//! rows are reassigned to other ids, and batches that were prepared before are rejected.
//!
//! The semantics are those of TorchRec's fused optimizers, computed by FBGEMM (<https://github.com/pytorch/FBGEMM>,
//! `docs/src/fbgemm_gpu`), with these differences:
//!
//! - The gradient of a mean is divided by the bag's length, also with weights.
//! - An id without a row trains nothing.
//! - Weight decay and `max_norm` are those of FBGEMM's GPU kernels; FBGEMM's CPU kernels ignore both.
//! - Adam corrects its bias by the number of updates of the row.
//! - An update that would make a row or its state non-finite is not written, but reported.
//!
//! The order of sums is a contract (`sterling_kernels::cpu::update`): threads, kernels, partitions ([`MasterTable::cut`]) and,
//! with the feature `cuda`, GPUs (`LearningTables::on_device`) change no bit of rows and state. Partitions of a table may be
//! remote ([`MasterSource`]). Rows of remote partitions are requested when a batch is prepared, and have the same values as if
//! batches ran one after the other, however many batches are prepared ahead. Several hosts may share a step ([`HostBatch`]):
//! each host has a part of the rows of every table ([`MasterTable::on_host`]) and of the examples.
//!
//! ```
//! use sterling_embedding::train::{LearningTables, MasterTable, Rule, RuleKind};
//! use sterling_embedding::{BagConfig, KeyedJaggedTensor, KeyedTensor, Pooling, Unseen};
//! use sterling_kernels::threads::Threads;
//!
//! let rule = Rule::new(RuleKind::Sgd, 0.5);
//! let table = MasterTable::from_f32("products", 2, &[1.0, 2.0, 3.0, 4.0], Unseen::Zero, Some(rule))?;
//! let bags = [BagConfig { feature: "viewed".into(), table: "products".into(), pooling: Pooling::Mean }];
//! let mut tables = LearningTables::new(vec![table], &bags, &[], &Threads::default())?;
//!
//! // One example with row 1 twice, and an id without a row.
//! let ids = KeyedJaggedTensor::from_lengths(["viewed"], vec![1, 1, 0, 99], &[4], None)?;
//! let batch = tables.prepare(ids)?;
//! let (pooled, _) = tables.forward(&batch)?;
//! assert_eq!(pooled.values(), [7.0 / 4.0, 10.0 / 4.0]);
//!
//! let gradients = KeyedTensor::new(vec!["viewed".into()], &[2], vec![4.0, 8.0])?;
//! let report = tables.backward(batch, &gradients, &[])?;
//! assert_eq!(tables.tables()[0].values()?, [0.5, 1.0, 2.0, 2.0]);
//! assert_eq!((report.tables[0].rows.as_slice(), report.tables[0].skipped_ids), (&[0, 1][..], 1));
//! # Ok::<(), sterling_core::error::Error>(())
//! ```

mod batch;
#[cfg(feature = "cuda")]
mod device;
mod hosts;
mod managed;
mod master;
mod parts;
mod report;
#[cfg(feature = "cuda")]
mod resident;
mod rule;
mod share;
mod staged;
mod tables;
#[cfg(test)]
mod tests;

pub use batch::{PreparedBatch, Preparer};
pub use hosts::{Examples, HostBatch};
pub use master::{MasterRows, MasterTable};
pub use parts::{MasterSource, stretch_bytes};
pub use report::{TableUpdate, UpdateReport};
pub use rule::{Decay, Rule, RuleKind, Schedule};
pub use share::{HostShare, OtherHosts};
pub use tables::LearningTables;
