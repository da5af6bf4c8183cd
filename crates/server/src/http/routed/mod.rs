//! A router: the calls of the API, answered by the shards of a catalogue together.
//!
//! [`RouterApp`] is a [`Retriever`](super::retriever::Retriever) over a [`Fleet`](crate::route::Fleet) in place of registry and engine. It answers what is asked of
//! models (`:retrieve`, `:rank`, `:embed`, an item, versions and shards), and sends changes of items to the shards that they belong to (`items`). What
//! changes a server is asked of the server. `choice` is which version answers, `following` holds answers against others, `pages` is what a cursor means here.

mod app;
mod choice;
mod explain;
mod following;
mod info;
mod items;
mod pages;
mod passes;
mod retriever;
mod sizes;

pub use self::app::RouterApp;
