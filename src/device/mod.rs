//! Where numbers live and where they are worked on. The only folder with `unsafe`.
//!
//! [`cpu`] holds the loops of the CPU; [`buffer`] is memory that they read, owned or in a mapped file ([`map`]); [`memory`] asks for
//! lines ahead; [`heap`] gives memory back; [`priority`] says whose turn it is. [`cuda`] is memory, launches and kernels of GPUs.

pub mod buffer;
pub mod cpu;
pub mod cuda;
pub mod heap;
mod limit;
pub mod map;
pub mod memory;
pub mod priority;
