//! NVIDIA GPUs: memory, launches, and the CUDA kernels in `kernels`.
//!
//! A [`Driver`] is the interface to a GPU: memory, copies, launches. Besides a real GPU, there is an emulated one on
//! the host's processor ([`emulated`]), on which the tests run every kernel, and a modelled one that estimates times
//! ([`modelled`]). [`Device::lane`] is a worker stream, which runs concurrently with other streams. [`Array`] is typed
//! device memory; [`ops`] are the operations, each of which checks its arrays and launches one kernel or a few.
//!
//! Kernels are CUDA C++, compiled by NVRTC at run time for the GPU ([`sources`]), and by g++ for the emulation. Kernels
//! compute the same as the loops of [`sterling_kernels::cpu`].
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
mod driver;
pub mod emulated;
mod lane;
mod lane_bytes;
pub mod link;
pub mod memory;
pub mod modelled;
pub mod ops;
pub mod partition;
pub mod sources;
pub mod spare;

pub use choice::{Choice, ChosenDevice, Devices};
pub use driver::{Demand, Driver, Launch, Streams, Work};
pub use lane_bytes::LaneBytes;
pub use memory::{Array, Device, HostBytes, Later};
