//! What is asked of a card, so that another one, or an emulation, can stand in for it.

use std::fmt::Debug;

use crate::error::Result;

/// One launch of a kernel over a grid of blocks.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// The kernel.
    pub kernel: &'static str,
    /// Blocks along each axis, none 0.
    pub grid: [u32; 3],
    /// Threads of a block, whole warps.
    pub threads: u32,
    /// Shared memory of a block.
    pub shared_bytes: usize,
    /// The structure that the kernel takes.
    pub arguments: &'a [u8],
}

/// A card, or what stands in for one. Copies and launches of one driver happen in the order in which they are asked for.
pub trait Driver: Send + Sync + Debug {
    /// What it is called.
    fn name(&self) -> String;

    /// What kind of device it is, for explanations.
    fn kind(&self) -> &'static str;

    /// Bytes of its memory that are free, and all of them.
    ///
    /// # Errors
    /// `Unavailable` where the card does not answer any more.
    fn memory(&self) -> Result<(u64, u64)>;

    /// The address of new memory, in which anything may stand.
    ///
    /// # Errors
    /// `Overloaded` where there is no more.
    fn alloc(&self, bytes: usize) -> Result<u64>;

    /// Gives memory back.
    ///
    /// # Safety
    /// `address` is one that [`Driver::alloc`] gave and that nobody uses any more.
    unsafe fn free(&self, address: u64);

    /// Copies to the card; `from` may change once this returns.
    ///
    /// # Safety
    /// `to` is the address of at least as many bytes.
    ///
    /// # Errors
    /// `Unavailable` where the card does not answer any more.
    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()>;

    /// Copies from the card, once everything that was asked before is done.
    ///
    /// # Safety
    /// `from` is the address of at least as many bytes.
    ///
    /// # Errors
    /// `Unavailable` where the card does not answer any more, `Internal` where an earlier launch failed.
    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()>;

    /// Fills memory with zeros.
    ///
    /// # Safety
    /// `address` is that of at least as many bytes.
    ///
    /// # Errors
    /// As [`Driver::upload`].
    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<()>;

    /// Runs a kernel.
    ///
    /// # Safety
    /// The arguments are those that the kernel takes, and all that it reads and writes with them lies in memory of this driver.
    ///
    /// # Errors
    /// `Internal` where the kernel cannot be launched so, or failed.
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()>;
}
