//! Shared device, and typed arrays in device memory that are freed with their owner.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;

use super::arena::{Arena, Measure};
use super::driver::{Driver, PendingResult, Streams};
use super::lane::Lane;
use super::lane_bytes::LaneBytes;
use sterling_core::error::{Error, Result};
use sterling_kernels::buffer::Buffer;

/// Shared driver of a device.
#[derive(Clone, Debug)]
pub struct Device {
    driver: Arc<dyn Driver>,
    /// Streams of the driver; `None` for a worker stream.
    streams: Option<Arc<dyn Streams>>,
    lanes: Arc<LaneBytes>,
}

impl Device {
    /// Creates a device over a driver.
    pub fn new(driver: impl Streams + 'static) -> Self {
        Device::over(Arc::new(driver))
    }

    /// Creates a device over a shared driver.
    pub fn over<D: Streams + 'static>(driver: Arc<D>) -> Self {
        Device { lanes: LaneBytes::of(driver.name()), driver: driver.clone(), streams: Some(driver) }
    }

    /// Creates a worker stream of the device: calls on it are recorded and run concurrently with other streams.
    ///
    /// # Errors
    /// `Internal` for a worker stream; `Unavailable` if the GPU no longer responds.
    pub fn lane(&self) -> Result<Device> {
        let streams =
            self.streams.clone().ok_or_else(|| Error::internal("a worker stream cannot create worker streams"))?;
        let lane = Arc::new(Lane::new(streams, self.lanes.clone())?);
        Ok(Device { driver: lane, streams: None, lanes: self.lanes.clone() })
    }

    /// Runs `copy` with all arrays that it creates in one allocation. A dry run without a device determines the size;
    /// `plan` receives the size, and may reject it.
    ///
    /// # Errors
    /// Those of `copy`, of `plan` and of [`Driver::alloc`].
    pub fn make<T>(&self, copy: impl Fn(&Device) -> Result<T>, plan: impl FnOnce(usize) -> Result<()>) -> Result<T> {
        let bytes = self.bytes_of(&copy)?;
        plan(bytes)?;
        let arena = Arena::new(self.driver.clone(), bytes)?;
        copy(&Device { driver: Arc::new(arena), streams: None, lanes: self.lanes.clone() })
    }

    /// Returns the bytes of one allocation for all arrays that `copy` creates.
    ///
    /// # Errors
    /// Errors of `copy`.
    pub fn bytes_of<T>(&self, copy: impl Fn(&Device) -> Result<T>) -> Result<usize> {
        let measure = Arc::new(Measure::default());
        drop(copy(&Device { driver: measure.clone(), streams: None, lanes: self.lanes.clone() })?);
        Ok(measure.bytes())
    }

    /// Begins a new batch of work; see [`Driver::begin`].
    ///
    /// # Errors
    /// As [`Driver::begin`].
    pub fn begin(&self) -> Result<()> {
        self.driver.begin()
    }

    /// Submits the recorded work; see [`Driver::flush`].
    ///
    /// # Errors
    /// As [`Driver::flush`].
    pub fn flush(&self) -> Result<()> {
        self.driver.flush()
    }

    /// Waits for all work of the device's default stream, so that worker streams may read the results.
    ///
    /// # Errors
    /// As [`Streams::settle`].
    pub fn settle(&self) -> Result<()> {
        self.streams.as_ref().map_or(Ok(()), |streams| streams.settle())
    }

    /// Waits for all submitted work; see [`Driver::finish`].
    ///
    /// # Errors
    /// As [`Driver::finish`].
    pub fn finish(&self) -> Result<()> {
        self.driver.finish()
    }

    /// Returns the memory that the device's worker streams occupy, and its limit.
    pub fn lanes(&self) -> &LaneBytes {
        &self.lanes
    }

    /// Returns the driver of the device.
    pub(super) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Returns the streams of the driver; `None` for a worker stream.
    pub(super) fn streams(&self) -> Option<&Arc<dyn Streams>> {
        self.streams.as_ref()
    }

    /// Returns the name of the device.
    pub fn name(&self) -> String {
        self.driver.name()
    }

    /// Returns the kind of device, for explanations.
    pub fn kind(&self) -> &'static str {
        self.driver.kind()
    }

    /// Returns the free and the total memory in bytes.
    ///
    /// # Errors
    /// As [`Driver::memory`].
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.driver.memory()
    }

    /// Copies numbers to the device.
    ///
    /// # Errors
    /// As [`Driver::alloc`] and [`Driver::upload`].
    pub fn copy<T: bytemuck::Pod>(&self, numbers: &[T]) -> Result<Array<T>> {
        let address = self.driver.alloc_copy(bytemuck::cast_slice(numbers))?;
        Ok(Array { driver: self.driver.clone(), address, len: numbers.len(), kind: PhantomData })
    }

    /// Copies numbers to the device into an array with room for `more` numbers behind them.
    ///
    /// # Errors
    /// As [`Device::copy`].
    pub fn copy_with_room<T: bytemuck::Pod>(&self, numbers: &[T], more: usize) -> Result<Array<T>> {
        if more == 0 {
            return self.copy(numbers);
        }
        let array = self.room(numbers.len().saturating_add(more))?;
        array.write(numbers)?;
        Ok(array)
    }

    /// Registers host memory so that kernels can read it in place.
    ///
    /// # Errors
    /// As [`Driver::register`].
    pub fn register(&self, bytes: Buffer<u8>) -> Result<HostBytes> {
        // SAFETY: a shared buffer is never written, and is dropped only after its registration ended.
        let address = unsafe { self.driver.register(&bytes)? };
        Ok(HostBytes { driver: self.driver.clone(), bytes, address })
    }

    /// Allocates zeros on the device.
    ///
    /// # Errors
    /// As [`Driver::alloc`].
    pub fn zeros<T: bytemuck::Pod>(&self, len: usize) -> Result<Array<T>> {
        let address = self.driver.alloc_zeros(bytes_of::<T>(len)?.max(1))?;
        Ok(Array { driver: self.driver.clone(), address, len, kind: PhantomData })
    }

    /// Allocates uninitialised memory on the device.
    ///
    /// # Errors
    /// As [`Driver::alloc`].
    pub fn room<T: bytemuck::Pod>(&self, len: usize) -> Result<Array<T>> {
        Array::new(self, len)
    }
}

fn bytes_of<T>(len: usize) -> Result<usize> {
    let overflows =
        || Error::invalid(format!("an array of {len} elements of {} bytes exceeds the address space", size_of::<T>()));
    len.checked_mul(size_of::<T>()).ok_or_else(overflows)
}

/// Array of `T` in device memory.
pub struct Array<T> {
    driver: Arc<dyn Driver>,
    address: u64,
    len: usize,
    kind: PhantomData<T>,
}

impl<T: Pod> Array<T> {
    /// Allocates an uninitialised array of `len` numbers.
    pub(super) fn new(device: &Device, len: usize) -> Result<Self> {
        let address = device.driver().alloc(bytes_of::<T>(len)?.max(1))?;
        Ok(Array { driver: device.driver().clone(), address, len, kind: PhantomData })
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the array has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Returns the address in device memory: not a host pointer, and only valid in kernels of the array's device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Overwrites the first elements of the array.
    ///
    /// # Errors
    /// `Invalid` if `numbers` are more than the array holds; as [`Driver::upload`].
    pub fn write(&self, numbers: &[T]) -> Result<()> {
        self.write_at(0, numbers)
    }

    /// Overwrites elements from `first` on.
    ///
    /// # Errors
    /// As [`Array::write`].
    pub fn write_at(&self, first: usize, numbers: &[T]) -> Result<()> {
        if first.checked_add(numbers.len()).is_none_or(|end| end > self.len) {
            return Err(Error::invalid(format!(
                "{} elements from index {first} on do not fit an array of {}",
                numbers.len(),
                self.len
            )));
        }
        let to = self.address + (first * size_of::<T>()) as u64;
        // SAFETY: the written bytes belong to the array, as checked above, and the array is alive.
        unsafe { self.driver.upload(to, bytemuck::cast_slice(numbers)) }
    }

    /// Overwrites all elements with zeros.
    ///
    /// # Errors
    /// As [`Driver::clear`].
    pub fn clear(&self) -> Result<()> {
        // SAFETY: the cleared bytes belong to the array, which is alive.
        unsafe { self.driver.clear(self.address, self.bytes()) }
    }

    /// Fills the array with as many elements from the start of another array of the same device.
    ///
    /// # Errors
    /// `Invalid` if `other` holds fewer elements; as [`Driver::upload`].
    pub fn copy_from(&self, other: &Array<T>) -> Result<()> {
        if other.len < self.len {
            return Err(Error::invalid(format!("cannot copy {} elements of an array of {}", self.len, other.len)));
        }
        // SAFETY: both arrays hold these bytes, as checked above, and are alive; two arrays do not overlap.
        unsafe { self.driver.copy(self.address, other.address, self.bytes()) }
    }

    /// Reads the first `len` elements, after all earlier work.
    ///
    /// # Errors
    /// `Invalid` if the array holds fewer elements; as [`Driver::download`].
    pub fn read(&self, len: usize) -> Result<Vec<T>> {
        if len > self.len {
            return Err(Error::invalid(format!("cannot read {len} elements of an array of {}", self.len)));
        }
        let mut numbers = vec![T::zeroed(); len];
        // SAFETY: the array holds at least as many bytes, as checked above, and is alive.
        unsafe { self.driver.download(self.address, bytemuck::cast_slice_mut(&mut numbers))? };
        Ok(numbers)
    }

    /// Starts the transfer of the first `len` elements to the host, to be read later.
    ///
    /// # Errors
    /// As [`Array::read`].
    pub fn later(&self, len: usize) -> Result<Later<T>> {
        if len > self.len {
            return Err(Error::invalid(format!("cannot read {len} elements of an array of {}", self.len)));
        }
        // SAFETY: the array holds at least as many bytes, as checked above, and is alive; a worker stream keeps the
        // memory until its next batch begins.
        let coming = unsafe { self.driver.send(self.address, len * size_of::<T>())? };
        Ok(Later { coming, driver: self.driver.clone(), len, kind: PhantomData })
    }

    /// Reads all elements.
    ///
    /// # Errors
    /// As [`Array::read`].
    pub fn to_vec(&self) -> Result<Vec<T>> {
        self.read(self.len)
    }

    /// Ensures a capacity of at least `len` elements; growing discards the content.
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

/// Host memory that kernels of a device read in place.
#[derive(Debug)]
pub struct HostBytes {
    driver: Arc<dyn Driver>,
    bytes: Buffer<u8>,
    address: u64,
}

impl HostBytes {
    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns whether the memory has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the address at which kernels of the device read the memory.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        // SAFETY: the bytes were registered at creation; callers keep this value until all launches that read the bytes
        // are done.
        unsafe { self.driver.unregister(&self.bytes) };
    }
}

/// Elements in transfer from a device.
#[derive(Debug)]
pub struct Later<T> {
    // Declared before `driver`, so that it is dropped before the driver, which may be the last owner of the worker
    // stream.
    coming: PendingResult,
    driver: Arc<dyn Driver>,
    len: usize,
    kind: PhantomData<T>,
}

impl<T: Pod> Later<T> {
    /// Waits for the transfer and returns the elements.
    ///
    /// # Errors
    /// As [`Driver::receive`].
    pub fn get(self) -> Result<Vec<T>> {
        let mut numbers = Vec::new();
        // For thousands of results, zeroing the memory first would take as long as the copy.
        let mut take = |bytes: &[u8]| match bytemuck::try_cast_slice(bytes) {
            Ok(here) => numbers = here.to_vec(),
            Err(_) => {
                numbers = vec![T::zeroed(); bytes.len() / size_of::<T>().max(1)];
                bytemuck::cast_slice_mut(&mut numbers).copy_from_slice(bytes);
            }
        };
        self.driver.receive(&self.coming, self.len * size_of::<T>(), &mut take)?;
        Ok(numbers)
    }
}

impl<T> Drop for Array<T> {
    fn drop(&mut self) {
        // SAFETY: the address came from `alloc` and is not used after the last owner is dropped; the driver completes
        // earlier launches first.
        unsafe { self.driver.free(self.address) };
    }
}

impl<T> fmt::Debug for Array<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array[{} x {}]", self.len, std::any::type_name::<T>())
    }
}
