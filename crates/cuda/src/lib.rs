//! NVIDIA GPUs: memory, launches, and the kernels under `kernels`.
//!
//! A [`Driver`] is what a card can do: memory, copies, launches. Beside the card itself there is a
//! host processor that emulates one ([`emulated`]), on which the tests run every kernel and the launches around them, and one that only
//! says how long work would take ([`modelled`]).
//! [`Device::lane`] is a stretch of work beside others. [`Array`] is memory of a driver; [`ops`] are the operations, each a checked launch of one kernel or a few.
//!
//! Kernels are CUDA C++ that NVRTC compiles at run time for the card ([`sources`]), and g++ for the emulation. What they compute is
//! what the loops of [`sterling_kernels::cpu`] compute.
//!
//! ```
//! use sterling_cuda::Choice;
//!
//! let choice: Choice = "cpu".parse()?;
//! assert_eq!(choice.open()?.to_string(), "cpu");
//! # Ok::<(), sterling_core::error::Error>(())
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

mod arena;
#[cfg(feature = "cuda")]
mod card;
pub mod choice;
#[cfg(feature = "cuda")]
pub mod compiler;
pub mod cubins;
pub mod cut;
mod driver;
pub mod emulated;
mod lane;
mod lane_bytes;
pub mod link;
pub mod memory;
pub mod modelled;
pub mod ops;
pub mod sources;
pub mod spare;

pub use choice::{Choice, ChosenDevice, Devices};
pub use driver::{Demand, Driver, Launch, Streams, Work};
pub use lane_bytes::LaneBytes;
pub use memory::{Array, Device, HostBytes, Later};
