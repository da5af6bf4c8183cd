//! A device that many share, and its memory as runs of numbers, each freed with its owner.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;

use super::driver::Driver;
use crate::error::{Error, Result};

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

    /// What kind of device it is, for explanations.
    pub fn kind(&self) -> &'static str {
        self.driver.kind()
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

/// A run of `T` in the memory of a device.
pub struct Array<T> {
    driver: Arc<dyn Driver>,
    address: u64,
    len: usize,
    kind: PhantomData<T>,
}

impl<T: Pod> Array<T> {
    /// Room for `len` numbers, in which anything may stand.
    pub(super) fn new(device: &Device, len: usize) -> Result<Self> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .ok_or_else(|| Error::invalid(format!("{len} numbers of {} bytes overflow", size_of::<T>())))?;
        let address = device.driver().alloc(bytes.max(1))?;
        Ok(Array { driver: device.driver().clone(), address, len, kind: PhantomData })
    }

    /// How many numbers it holds.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True where it holds none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Where it lies. Not a pointer of the host, and worth something only to kernels of its device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Overwrites the first numbers.
    ///
    /// # Errors
    /// `Invalid` where there are more than it holds; as [`Driver::upload`].
    pub fn write(&self, numbers: &[T]) -> Result<()> {
        self.write_at(0, numbers)
    }

    /// Overwrites numbers from the given one on.
    ///
    /// # Errors
    /// As [`Array::write`].
    pub fn write_at(&self, first: usize, numbers: &[T]) -> Result<()> {
        if first.checked_add(numbers.len()).is_none_or(|end| end > self.len) {
            return Err(Error::invalid(format!("{} numbers do not fit an array of {}", numbers.len(), self.len)));
        }
        let to = self.address + (first * size_of::<T>()) as u64;
        // SAFETY: these bytes are the array's, checked above, and it lives.
        unsafe { self.driver.upload(to, bytemuck::cast_slice(numbers)) }
    }

    /// Overwrites all with zeros.
    ///
    /// # Errors
    /// As [`Driver::clear`].
    pub fn clear(&self) -> Result<()> {
        // SAFETY: these are the bytes of the array, which lives.
        unsafe { self.driver.clear(self.address, self.bytes()) }
    }

    /// The first `len` numbers, once all that was asked of the device before is done.
    ///
    /// # Errors
    /// `Invalid` where it holds fewer; as [`Driver::download`].
    pub fn read(&self, len: usize) -> Result<Vec<T>> {
        if len > self.len {
            return Err(Error::invalid(format!("{len} numbers of an array of {}", self.len)));
        }
        let mut numbers = vec![T::zeroed(); len];
        // SAFETY: the array has at least as many bytes, checked above, and lives.
        unsafe { self.driver.download(self.address, bytemuck::cast_slice_mut(&mut numbers))? };
        Ok(numbers)
    }

    /// All numbers.
    ///
    /// # Errors
    /// As [`Array::read`].
    pub fn to_vec(&self) -> Result<Vec<T>> {
        self.read(self.len)
    }

    /// Makes it hold at least `len` numbers; where it grows, what it held is lost.
    ///
    /// # Errors
    /// As [`Driver::alloc`].
    pub fn fit(&mut self, device: &Device, len: usize) -> Result<()> {
        if self.len < len {
            *self = Array::new(device, len)?;
        }
        Ok(())
    }
}

impl<T> Drop for Array<T> {
    fn drop(&mut self) {
        // SAFETY: the address came from `alloc` and is not used after the last owner; the driver runs what was launched before first.
        unsafe { self.driver.free(self.address) };
    }
}

impl<T> fmt::Debug for Array<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array[{} x {}]", self.len, std::any::type_name::<T>())
    }
}
