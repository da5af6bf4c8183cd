//! A router: answers the calls of the API by scatter-gather over the shards of a catalogue.
//!
//! [`RouterApp`] is a [`Retriever`](super::retriever::Retriever) over a [`Fleet`](crate::route::Fleet) instead of a registry and
//! an engine. The router answers calls about models (`:retrieve`, `:rank`, `:embed`, items, versions, shards) and forwards
//! changes of items to their shards (`items`). Administrators' calls go to servers directly. `choice` selects the version that
//! answers, `following` compares answers for audits and shadows, and `pages` implements cursors.

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
