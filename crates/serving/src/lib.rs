//! Answers requests in memory: read [`view`]s over a snapshot and its delta, the delta ([`fresh`]), the [`registry`] of loaded
//! models, the forward [`pass`], and the scheduler ([`engine`]) with admission control by deadline and memory [`quota`](sterling_core::quota).
//!
//! A pass answers requests over a view of a loaded version, on any thread:
//!
//! ```no_run
//! use std::path::Path;
//! use std::sync::Arc;
//! use sterling_core::request::{Request, Retrieve, User};
//! use sterling_graph::tower::Threads;
//! use sterling_serving::pass::{self, Cpu};
//! use sterling_serving::view::View;
//! use sterling_snapshot::{Placement, Snapshot};
//!
//! let snapshot = Snapshot::load(Path::new("store/catalogue/1"), &Placement::default())?;
//! let view = Arc::new(View::new(Arc::new(snapshot)));
//! let request = Request::Retrieve(Retrieve::of(User::Vector(vec![0.5; view.dimension()])));
//! let prepared = pass::prepare(&view, request)?;
//! let answers = pass::run(&mut Cpu::new(Threads::new(1)), &[prepared], None);
//! # Ok::<(), sterling_core::error::Error>(())
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

pub mod engine;
pub mod fresh;
pub mod pass;
pub mod registry;
pub mod view;
