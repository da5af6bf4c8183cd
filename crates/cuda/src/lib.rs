//! NVIDIA GPUs: memory, launches, and the CUDA kernels in `kernels`.
//!
//! A [`Driver`] is the interface to a GPU: memory, copies, launches. Besides the GPU itself, a host processor can emulate one
//! ([`emulated`]), on which the tests run every kernel and its launches, and a model estimates the time of work ([`modelled`]).
//! [`Device::lane`] is a worker stream, which runs concurrently with others. [`Array`] is typed device memory; [`ops`] are the
//! operations, each a checked launch of one kernel or a few.
//!
//! Kernels are CUDA C++ that NVRTC compiles at run time for the GPU ([`sources`]), and g++ for the emulation. They compute the same
//! as the loops of [`sterling_kernels::cpu`].
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
