//! Kernels of the CPU, and the memory that they read.
//!
//! [`cpu`] holds the loops of the CPU; [`buffer`] is memory that they read, owned or in a mapped file ([`map`]); [`memory`] asks for
//! lines ahead; [`heap`] gives memory back; [`priority`] says whose turn it is.

pub mod buffer;
pub mod cpu;
pub mod heap;
mod limit;
pub mod map;
pub mod memory;
pub mod priority;
