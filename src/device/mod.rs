//! Where numbers live and where they are worked on. The only folder with `unsafe`.

pub mod buffer;
pub mod kernels;
pub mod map;
pub mod memory;
pub mod pool;
