//! Tests through the crate's public face and its program, in one binary.

#![allow(clippy::unwrap_used)]

mod access;
mod answers;
mod bench;
mod browse;
mod candidate_sequences;
mod catalogue;
mod chaos;
mod connections;
mod contract;
mod debian;
mod edge;
mod examples;
mod faiss;
mod filters;
mod first_pass;
mod folds;
mod fresh;
mod hosts;
mod http;
mod http2;
mod in_process;
mod inference;
mod item_vectors;
mod items;
mod journal;
mod managed_ids;
mod merge;
#[cfg(feature = "nats")]
mod nats;
mod update_log;
// Only the tests of streams use all of its faults.
#[cfg_attr(not(feature = "nats"), allow(dead_code))]
mod network;
mod onnx;
mod out_of_core;
mod outages;
mod packages;
mod parts;
mod placement;
mod planner;
mod program;
mod queries;
mod recall;
mod redis_cluster;
mod registry;
mod remote;
mod remote_faults;
mod route;
mod routed_traffic;
mod routed_updates;
mod routers;
mod score;
mod score_inputs;
mod served_model;
mod shards;
mod side_by_side;
mod snapshots;
mod sparse;
mod support;
mod telemetry;
#[cfg(feature = "text")]
mod text;
#[cfg(feature = "tls")]
mod tls;
mod traffic;
mod train;
mod train_hosts;
mod trial;
mod unscorable;
mod updates;
mod warmup;
mod wire;
mod zoo;
