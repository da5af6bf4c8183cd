//! Answers requests in memory: read [`view`]s over a snapshot and its delta, the delta ([`fresh`]), the [`registry`] of loaded
//! models, the forward [`pass`], and the scheduler ([`engine`]) with admission control by deadline and memory [`quota`].
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
//!
//! Memory that requests share is held by quota:
//!
//! ```
//! use sterling_serving::quota::{Flow, Quota};
//!
//! let quota = Quota::new("bodies", 1_000);
//! let held = quota.hold(Flow::of_key("shop"), 900)?;
//! assert!(quota.hold(Flow::of_key("books"), 200).is_err());
//! drop(held);
//! assert_eq!(quota.held_bytes(), 0);
//! # Ok::<(), sterling_core::error::Error>(())
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

pub mod engine;
pub mod fresh;
pub mod pass;
pub mod quota;
pub mod registry;
pub mod view;
