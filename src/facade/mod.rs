//! Library facade: a few types over the crates with which a program trains, publishes, loads, retrieves, serves and calls.

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
