//! Types that every crate of Sterling uses: [`error`], [`units`] of ids and slots, [`limits`], [`tensor`] shapes, memory [`quota`].
//! The HTTP layer parses the [`request`] types and [`items`], and the serving pass answers or applies them.
//!
//! ```
//! use sterling_core::error::{Error, Kind};
//! use sterling_core::request::{Retrieve, User};
//! use sterling_core::units::ItemId;
//!
//! let request = Retrieve {
//!     filter: "section:python".into(),
//!     exclude: vec![ItemId(7)],
//!     ..Retrieve::of(User::Vector(vec![0.5; 16]))
//! };
//! assert_eq!((request.k, request.recall), (20, None));
//!
//! let error = Error::invalid("field `k`: got 0, expected 1 to 100000").within("requests[3]");
//! assert_eq!((error.kind(), error.kind().is_retryable()), (Kind::Invalid, false));
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

pub mod blocking;
pub mod clock;
pub mod error;
pub mod items;
pub mod limits;
pub mod locks;
pub mod logging;
pub mod packed;
pub mod quota;
pub mod random;
pub mod request;
pub mod sampler;
pub mod spelling;
pub mod tasks;
pub mod tensor;
pub mod units;
