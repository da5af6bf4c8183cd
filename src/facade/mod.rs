//! Library facade: train, publish, load, retrieve, serve and call, in a few types over the crates.

mod client;
mod publisher;
mod retriever;
mod server;
mod snapshot;
mod trainer;

pub use client::Client;
pub use publisher::{Published, Publisher};
pub use retriever::Retriever;
pub use server::Server;
pub use snapshot::Snapshot;
pub use trainer::Trainer;
