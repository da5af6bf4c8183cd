//! Tests through the crate's public face and its program, in one binary.

#![allow(clippy::unwrap_used)]

mod bench;
mod catalogue;
mod debian;
mod edge;
mod faiss;
mod filters;
mod fresh;
mod http;
mod items;
mod journal;
mod placement;
mod planner;
mod program;
mod redis_cluster;
mod registry;
mod remote;
mod snapshots;
mod sparse;
mod support;
mod updates;
mod warmup;
