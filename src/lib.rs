//! Sterling: index-as-model retrieval.
//!
//! One snapshot holds the sparse tables, the dense towers, the item index, the eligibility filter, the reranker, the
//! value model and the item columns; one forward pass ([`serving::pass`]) answers a request.
//!
//! | letter | meaning | letter | meaning |
//! |---|---|---|---|
//! | Q | queries in a batch | P | probed lists |
//! | D | embedding width | K0 | candidates |
//! | N | items | T | tasks |
//! | C | lists (clusters) | K | results |

pub mod cli;

pub use sterling_api as api;
pub use sterling_batch as batch;
pub use sterling_bench as bench;
pub use sterling_core::{clock, draws, error, limits, locks, logging, packed, request, tensor, units};
pub use sterling_cuda as cuda;
pub use sterling_embedding as embedding;
pub use sterling_graph as graph;
pub use sterling_index as index;
pub use sterling_journal as journal;
pub use sterling_kernels as kernels;
pub use sterling_publish as publish;
pub use sterling_server as server;
pub use sterling_serving as serving;
pub use sterling_snapshot as snapshot;
pub use sterling_storage as storage;
pub use sterling_telemetry as telemetry;
