//! Sterling: index-as-model retrieval.
//!
//! One snapshot holds the sparse tables, the dense towers, the item index, the eligibility filter, the reranker, the
//! value model and the item columns; one forward pass ([`serving::pass`]) answers a request. As a library:
//!
//! | type | does |
//! |---|---|
//! | [`Trainer`] | trains a model package on events |
//! | [`Publisher`] | turns a model package or vectors with attributes into a version in a store |
//! | [`Snapshot`], [`Retriever`] | load a version and answer requests in this process |
//! | [`Server`] | answers over HTTP from a store until it is stopped |
//! | [`Client`] | calls a server or router |
//!
//! ```
//! use sterling::{Publisher, Reading, Retrieve, Retriever, Snapshot, User};
//!
//! let folder = tempfile::tempdir()?;
//! let (store, items) = (folder.path().join("store"), folder.path().join("items.jsonl"));
//! let item = |id: i64| {
//!     let angle = id as f32 / 1000.0;
//!     let (x, y, parity) = (angle.cos(), angle.sin(), if id % 2 == 0 { "even" } else { "odd" });
//!     format!("{{\"id\": {id}, \"embedding\": [{x}, {y}], \"attributes\": {{\"parity\": \"{parity}\"}}}}\n")
//! };
//! std::fs::write(&items, (0..1000).map(item).collect::<String>())?;
//!
//! Publisher::new(&store).name("circle").items(&items).publish()?;
//! let snapshot = Snapshot::open(&store, "circle")?;
//! assert_eq!((snapshot.version(), snapshot.items()), (1, 1000));
//!
//! let request = Retrieve {
//!     filter: "parity:even".into(),
//!     k: 3,
//!     reading: Reading { columns: vec!["parity".into()], ..Reading::default() },
//!     ..Retrieve::of(User::Vector(vec![1.0, 0.0]))
//! };
//! let found = Retriever::new(&snapshot).retrieve(&request)?;
//! let ids: Vec<i64> = found.items.iter().map(|item| item.id).collect();
//! assert_eq!(ids, [0, 2, 4]);
//! assert_eq!(found.items[0].columns["parity"], "even");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `examples/` has a program for each use. The implementation is in separate crates, which are modules here and can be used alone:
//! the index ([`index`]), the embedding tables ([`embedding`]), ONNX graphs ([`graph`]), CPU kernels ([`kernels`]), the write-ahead
//! log ([`journal`]) and the rest of the table in `docs/internals/architecture.md`.
//!
//! | letter | meaning | letter | meaning |
//! |---|---|---|---|
//! | Q | queries in a batch | P | probed lists |
//! | D | embedding width | K0 | candidates |
//! | N | items | T | tasks |
//! | C | lists (clusters) | K | results |

pub mod cli;
mod facade;

pub use facade::{Client, Published, Publisher, Retriever, Server, Snapshot, Trainer};
pub use sterling_core::request::{Rank, Reading, Retrieve, User, Values};
pub use sterling_server::config::Config;
pub use sterling_snapshot::Recipe;

pub use sterling_api as api;
pub use sterling_batch as batch;
pub use sterling_bench as bench;
pub use sterling_core::{clock, error, items, limits, locks, logging, packed, quota, request, sampler, tensor, units};
pub use sterling_cuda as cuda;
pub use sterling_embedding as embedding;
pub use sterling_graph as graph;
pub use sterling_index as index;
pub use sterling_journal as journal;
pub use sterling_kernels as kernels;
pub use sterling_publish as publish;
pub use sterling_rollout as rollout;
pub use sterling_server as server;
pub use sterling_serving as serving;
pub use sterling_snapshot as snapshot;
pub use sterling_storage as storage;
pub use sterling_telemetry as telemetry;
pub use sterling_train as train;
