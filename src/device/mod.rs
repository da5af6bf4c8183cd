//! Where numbers live and where they are worked on. The only folder with `unsafe`.
//!
//! [`cpu`] holds the loops of the CPU; [`buffer`] is memory that they read, owned or in a mapped file ([`map`]); [`memory`] asks for
//! lines ahead; [`heap`] gives memory back.

pub mod buffer;
pub mod cpu;
pub mod heap;
pub mod map;
pub mod memory;
