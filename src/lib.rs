//! Sterling: index-as-model retrieval.
//!
//! One snapshot holds the sparse tables, the dense towers, the item index, the eligibility filter, the reranker, the
//! value model and the item columns; one forward pass ([`pass`]) answers a request.
//!
//! | letter | meaning | letter | meaning |
//! |---|---|---|---|
//! | Q | queries in a batch | P | probed lists |
//! | D | embedding width | K0 | candidates |
//! | N | items | T | tasks |
//! | C | lists (clusters) | K | results |

pub mod bench;
mod blocking;
pub mod cli;
pub mod clock;
pub mod columns;
pub mod compact;
pub mod config;
pub mod dense;
pub mod device;
pub mod doctor;
pub mod draws;
pub mod embedding;
pub mod engine;
pub mod error;
pub mod files;
pub mod filter;
pub mod fresh;
pub mod gather;
pub mod http;
pub mod items;
pub mod ivf;
pub mod jobs;
pub mod journal;
pub mod limits;
pub mod locks;
pub mod logging;
pub mod model;
pub mod npy;
pub mod objects;
pub mod packed;
pub mod pass;
pub mod planner;
pub mod publish;
pub mod quota;
pub mod registry;
pub mod request;
pub mod route;
pub mod rows;
pub mod scoring;
pub mod search;
pub mod snapshot;
pub mod telemetry;
pub mod tensor;
pub mod topk;
pub mod tower;
pub mod traffic;
pub mod trial;
pub mod units;
pub mod value;
pub mod view;
pub mod warmup;
