//! What is asked of a card, so that another one, or an emulation, can stand in for it.

use std::fmt::Debug;
use std::sync::Arc;

use super::array::Array;
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

/// A driver that many share.
#[derive(Clone, Debug)]
pub struct Device {
    driver: Arc<dyn Driver>,
}

impl Device {
    /// A device over a driver.
    pub fn new(driver: impl Driver + 'static) -> Self {
        Device { driver: Arc::new(driver) }
    }

    /// The driver.
    pub(super) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// What it is called.
    pub fn name(&self) -> String {
        self.driver.name()
    }

    /// Bytes of its memory that are free, and all of them.
    ///
    /// # Errors
    /// As [`Driver::memory`].
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.driver.memory()
    }

    /// A copy of numbers on the device.
    ///
    /// # Errors
    /// As [`Driver::alloc`] and [`Driver::upload`].
    pub fn copy<T: bytemuck::Pod>(&self, numbers: &[T]) -> Result<Array<T>> {
        let array = Array::new(self, numbers.len())?;
        array.write(numbers)?;
        Ok(array)
    }

    /// Zeros on the device.
    ///
    /// # Errors
    /// As [`Driver::alloc`].
    pub fn zeros<T: bytemuck::Pod>(&self, len: usize) -> Result<Array<T>> {
        let array = Array::new(self, len)?;
        array.clear()?;
        Ok(array)
    }

    /// Room on the device, in which anything may stand.
    ///
    /// # Errors
    /// As [`Driver::alloc`].
    pub fn room<T: bytemuck::Pod>(&self, len: usize) -> Result<Array<T>> {
        Array::new(self, len)
    }
}
