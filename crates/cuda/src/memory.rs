//! A device that many share, and its memory as runs of numbers, each freed with its owner.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;

use super::arena::{Arena, Measure};
use super::driver::{Coming, Driver, Streams};
use super::lane::Lane;
use super::lane_bytes::LaneBytes;
use sterling_core::error::{Error, Result};
use sterling_kernels::buffer::Buffer;

/// A driver that many share.
#[derive(Clone, Debug)]
pub struct Device {
    driver: Arc<dyn Driver>,
    /// None for a lane.
    streams: Option<Arc<dyn Streams>>,
    lanes: Arc<LaneBytes>,
}

impl Device {
    /// A device over a driver.
    pub fn new(driver: impl Streams + 'static) -> Self {
        Device::over(Arc::new(driver))
    }

    /// A device over a driver that others hold too.
    pub fn over<D: Streams + 'static>(driver: Arc<D>) -> Self {
        Device { lanes: LaneBytes::of(driver.name()), driver: driver.clone(), streams: Some(driver) }
    }

    /// The same device by a lane of its own: what is asked of it is written down, and runs beside what others ask for.
    ///
    /// # Errors
    /// `Internal` for a lane; `Unavailable` where the card does not answer any more.
    pub fn lane(&self) -> Result<Device> {
        let streams = self.streams.clone().ok_or_else(|| Error::internal("a lane of a lane"))?;
        let lane = Arc::new(Lane::new(streams, self.lanes.clone())?);
        Ok(Device { driver: lane, streams: None, lanes: self.lanes.clone() })
    }

    /// What `copy` makes on the device, in memory that is had and given back as one. Before that it is made once without any
    /// device, which tells how many bytes it takes; `plan` is told them, and may refuse.
    ///
    /// # Errors
    /// As `copy` and `plan`; as [`Driver::alloc`].
    pub fn make<T>(&self, copy: impl Fn(&Device) -> Result<T>, plan: impl FnOnce(usize) -> Result<()>) -> Result<T> {
        let bytes = self.bytes_of(&copy)?;
        plan(bytes)?;
        let arena = Arena::new(self.driver.clone(), bytes)?;
        copy(&Device { driver: Arc::new(arena), streams: None, lanes: self.lanes.clone() })
    }

    /// Bytes that what `copy` makes would take in one piece of memory.
    ///
    /// # Errors
    /// As `copy`.
    pub fn bytes_of<T>(&self, copy: impl Fn(&Device) -> Result<T>) -> Result<usize> {
        let measure = Arc::new(Measure::default());
        drop(copy(&Device { driver: measure.clone(), streams: None, lanes: self.lanes.clone() })?);
        Ok(measure.bytes())
    }

    /// A stretch of work begins; see [`Driver::begin`].
    ///
    /// # Errors
    /// As [`Driver::begin`].
    pub fn begin(&self) -> Result<()> {
        self.driver.begin()
    }

    /// Sends off what was asked for; see [`Driver::flush`].
    ///
    /// # Errors
    /// As [`Driver::flush`].
    pub fn flush(&self) -> Result<()> {
        self.driver.flush()
    }

    /// Waits until all that was asked for is done, so that lanes may read it.
    ///
    /// # Errors
    /// As [`Streams::settle`].
    pub fn settle(&self) -> Result<()> {
        self.streams.as_ref().map_or(Ok(()), |streams| streams.settle())
    }

    /// Waits until all that was sent off is done; see [`Driver::finish`].
    ///
    /// # Errors
    /// As [`Driver::finish`].
    pub fn finish(&self) -> Result<()> {
        self.driver.finish()
    }

    /// What its lanes have of its memory.
    pub fn lanes(&self) -> &LaneBytes {
        &self.lanes
    }

    /// The driver.
    pub(super) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Its streams; none for a lane.
    pub(super) fn streams(&self) -> Option<&Arc<dyn Streams>> {
        self.streams.as_ref()
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
        let address = self.driver.alloc_copy(bytemuck::cast_slice(numbers))?;
        Ok(Array { driver: self.driver.clone(), address, len: numbers.len(), kind: PhantomData })
    }

    /// A copy of numbers on the device with room for so many more behind them.
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

    /// Bytes of the host that kernels read where they lie.
    ///
    /// # Errors
    /// As [`Driver::register`].
    pub fn register(&self, bytes: Buffer<u8>) -> Result<HostBytes> {
        // SAFETY: nobody writes to a buffer that is shared, and it goes behind its registration.
        let address = unsafe { self.driver.register(&bytes)? };
        Ok(HostBytes { driver: self.driver.clone(), bytes, address })
    }

    /// Zeros on the device.
    ///
    /// # Errors
    /// As [`Driver::alloc`].
    pub fn zeros<T: bytemuck::Pod>(&self, len: usize) -> Result<Array<T>> {
        let address = self.driver.alloc_zeros(bytes_of::<T>(len)?.max(1))?;
        Ok(Array { driver: self.driver.clone(), address, len, kind: PhantomData })
    }

    /// Room on the device, in which anything may stand.
    ///
    /// # Errors
    /// As [`Driver::alloc`].
    pub fn room<T: bytemuck::Pod>(&self, len: usize) -> Result<Array<T>> {
        Array::new(self, len)
    }
}

fn bytes_of<T>(len: usize) -> Result<usize> {
    let overflows = || Error::invalid(format!("{len} numbers of {} bytes overflow", size_of::<T>()));
    len.checked_mul(size_of::<T>()).ok_or_else(overflows)
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
        let address = device.driver().alloc(bytes_of::<T>(len)?.max(1))?;
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

    /// Copies the first numbers of another array of the same device, as many as it holds.
    ///
    /// # Errors
    /// `Invalid` where the other one holds fewer; as [`Driver::upload`].
    pub fn copy_from(&self, other: &Array<T>) -> Result<()> {
        if other.len < self.len {
            return Err(Error::invalid(format!("{} numbers of an array of {}", self.len, other.len)));
        }
        // SAFETY: both arrays have these bytes, checked above, and live; two arrays do not overlap.
        unsafe { self.driver.copy(self.address, other.address, self.bytes()) }
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

    /// The first `len` numbers, asked for now and taken later.
    ///
    /// # Errors
    /// As [`Array::read`].
    pub fn later(&self, len: usize) -> Result<Later<T>> {
        if len > self.len {
            return Err(Error::invalid(format!("{len} numbers of an array of {}", self.len)));
        }
        // SAFETY: the array has at least as many bytes, checked above, and lives; a lane keeps its memory until it begins again.
        let coming = unsafe { self.driver.send(self.address, len * size_of::<T>())? };
        Ok(Later { coming, driver: self.driver.clone(), len, kind: PhantomData })
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

/// Bytes of the host that kernels of a device read where they lie.
#[derive(Debug)]
pub struct HostBytes {
    driver: Arc<dyn Driver>,
    bytes: Buffer<u8>,
    address: u64,
}

impl HostBytes {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// True where there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Where kernels of the device find them.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        // SAFETY: they were registered when this was made; whoever asks for launches over them keeps it until these are done.
        unsafe { self.driver.unregister(&self.bytes) };
    }
}

/// Numbers that a device was asked for.
#[derive(Debug)]
pub struct Later<T> {
    // Before the lane that it may be the last to hold.
    coming: Coming,
    driver: Arc<dyn Driver>,
    len: usize,
    kind: PhantomData<T>,
}

impl<T: Pod> Later<T> {
    /// The numbers, once they are there.
    ///
    /// # Errors
    /// As [`Driver::receive`].
    pub fn get(self) -> Result<Vec<T>> {
        let mut numbers = Vec::new();
        // Of thousands of results zeros in their place first would take as long as the copy.
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
        // SAFETY: the address came from `alloc` and is not used after the last owner; the driver runs what was launched before first.
        unsafe { self.driver.free(self.address) };
    }
}

impl<T> fmt::Debug for Array<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array[{} x {}]", self.len, std::any::type_name::<T>())
    }
}
