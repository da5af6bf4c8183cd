//! Interface to a GPU, which an emulated or a modelled GPU implements too.

use std::fmt::Debug;
use std::sync::Arc;

use sterling_core::error::{Error, Result};

/// Number of blocks per multiprocessor that keeps it busy: half of these blocks run while the other half is queued.
pub(crate) const BLOCKS_PER_PROCESSOR: usize = 16;

/// Upper bound of the data and operations of a launch, as far as the host knows them: lists are assumed to have mean
/// length, and all collected candidates are assumed to be read again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Demand {
    /// Bytes to and from GPU memory, each counted once.
    pub bytes: u64,
    /// Bytes that blocks read again, from the caches.
    pub again: u64,
    /// Bytes to and from host memory.
    pub host: u64,
    /// Multiply-adds of bytes with dp4a, four per instruction.
    pub dp4a: u64,
    /// Multiply-adds of bytes on tensor cores.
    pub tensor_int8: u64,
    /// Multiply-adds of bf16 on tensor cores.
    pub tensor_bf16: u64,
    /// Multiply-adds of TF32 on tensor cores.
    pub tensor_tf32: u64,
    /// Multiply-adds in single precision.
    pub single: u64,
}

impl Demand {
    /// Returns the demand of moving `bytes` bytes without computation.
    pub fn of_bytes(bytes: usize) -> Self {
        Demand { bytes: bytes as u64, ..Demand::default() }
    }

    /// Sums two demands.
    pub fn and(self, other: Demand) -> Self {
        Demand {
            bytes: self.bytes + other.bytes,
            again: self.again + other.again,
            host: self.host + other.host,
            dp4a: self.dp4a + other.dp4a,
            tensor_int8: self.tensor_int8 + other.tensor_int8,
            tensor_bf16: self.tensor_bf16 + other.tensor_bf16,
            tensor_tf32: self.tensor_tf32 + other.tensor_tf32,
            single: self.single + other.single,
        }
    }
}

/// Launch of a kernel over a grid of blocks.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Blocks per axis, at least 1.
    pub grid: [u32; 3],
    /// Threads per block, a multiple of the warp size.
    pub threads: u32,
    /// Shared memory per block, in bytes.
    pub shared_bytes: usize,
    /// Argument structure of the kernel.
    pub arguments: &'a [u8],
    /// Upper bound of the launch's data and operations.
    pub demand: Demand,
}

/// Operation on a stream. Host addresses refer to pinned memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// Copy from the host.
    Upload {
        /// Destination address.
        to: u64,
        /// Source address.
        from: u64,
        /// Number of bytes.
        bytes: usize,
    },
    /// Copy to the host.
    Download {
        /// Source address.
        from: u64,
        /// Destination address.
        to: u64,
        /// Number of bytes.
        bytes: usize,
    },
    /// Copy within GPU memory.
    Copy {
        /// Destination address.
        to: u64,
        /// Source address.
        from: u64,
        /// Number of bytes.
        bytes: usize,
    },
    /// Fill GPU memory with zeros.
    Clear {
        /// Start address.
        address: u64,
        /// Number of bytes.
        bytes: usize,
    },
    /// [`Launch`] with owned arguments.
    Launch {
        /// Name of the kernel.
        kernel: &'static str,
        /// Blocks per axis.
        grid: [u32; 3],
        /// Threads per block.
        threads: u32,
        /// Shared memory per block, in bytes.
        shared_bytes: usize,
        /// Argument structure of the kernel.
        arguments: Vec<u8>,
        /// Upper bound of the launch's data and operations.
        demand: Demand,
    },
}

impl Work {
    /// Copies a launch, including its arguments.
    pub fn of(launch: &Launch<'_>) -> Self {
        let Launch { kernel, grid, threads, shared_bytes, arguments, demand } = *launch;
        Work::Launch { kernel, grid, threads, shared_bytes, arguments: arguments.to_vec(), demand }
    }
}

/// Result that may still be in transfer.
#[derive(Debug)]
pub enum PendingResult {
    /// Bytes of a complete result.
    Here(Vec<u8>),
    /// Result in transfer to pinned memory.
    To(Unfetched),
}

/// Pinned memory to which a result is copied; the result owns the memory until this value is dropped. Until then the
/// worker stream cannot begin its next batch.
#[derive(Debug)]
pub struct Unfetched {
    address: u64,
    streams: Arc<dyn Streams>,
    /// Shared by all unfetched results of a worker stream; the reference count gives the number of unfetched results.
    _of_lane: Arc<()>,
}

impl Unfetched {
    /// Claims pinned memory for a result.
    pub(super) fn new(address: u64, bytes: usize, streams: Arc<dyn Streams>, of_lane: Arc<()>) -> Self {
        streams.expects(address, bytes);
        Unfetched { address, streams, _of_lane: of_lane }
    }

    /// Returns the address of the pinned memory.
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Unfetched {
    fn drop(&mut self) {
        self.streams.fetched(self.address);
    }
}

/// Interface to a GPU, or to a substitute. Copies and launches of a driver run in the order of the calls.
pub trait Driver: Send + Sync + Debug {
    /// Returns the name of the device.
    fn name(&self) -> String;

    /// Returns the kind of device, for explanations.
    fn kind(&self) -> &'static str;

    /// Returns the number of blocks that keep the device busy.
    fn blocks(&self) -> usize;

    /// Returns the maximum shared memory per block, in bytes.
    fn shared_bytes_max(&self) -> usize;

    /// Returns the free and the total memory in bytes.
    ///
    /// # Errors
    /// `Unavailable` if the GPU no longer responds.
    fn memory(&self) -> Result<(u64, u64)>;

    /// Allocates uninitialised memory and returns its address.
    ///
    /// # Errors
    /// `Overloaded` if the GPU is out of memory.
    fn alloc(&self, bytes: usize) -> Result<u64>;

    /// Allocates memory and copies bytes to it.
    ///
    /// # Errors
    /// As [`Driver::alloc`] and [`Driver::upload`].
    fn alloc_copy(&self, bytes: &[u8]) -> Result<u64> {
        let address = self.alloc(bytes.len().max(1))?;
        // SAFETY: the memory was just allocated, with the length of `bytes`.
        unsafe { self.upload(address, bytes)? };
        Ok(address)
    }

    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// As [`Driver::alloc`] and [`Driver::clear`].
    fn alloc_zeros(&self, bytes: usize) -> Result<u64> {
        let address = self.alloc(bytes)?;
        // SAFETY: the memory was just allocated.
        unsafe { self.clear(address, bytes)? };
        Ok(address)
    }

    /// Begins a new batch of work: only arrays that are still referenced are kept from earlier work.
    ///
    /// # Errors
    /// As [`Driver::alloc`].
    fn begin(&self) -> Result<()> {
        Ok(())
    }

    /// Submits the recorded work without waiting.
    ///
    /// # Errors
    /// As [`Driver::upload`].
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    /// Waits for all submitted work; afterwards memory that this work reads and writes may be freed.
    ///
    /// # Errors
    /// As [`Driver::download`]; after an error, no submitted work is running either.
    fn finish(&self) -> Result<()> {
        Ok(())
    }

    /// Starts a copy to the host, after all earlier work.
    ///
    /// # Safety
    /// `from` is the address of at least `bytes` bytes.
    ///
    /// # Errors
    /// As [`Driver::download`].
    unsafe fn send(&self, from: u64, bytes: usize) -> Result<PendingResult> {
        let mut here = vec![0; bytes];
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe { self.download(from, &mut here)? };
        Ok(PendingResult::Here(here))
    }

    /// Waits for a result of `bytes` bytes, and calls `take` with the bytes in place.
    ///
    /// # Errors
    /// As [`Driver::download`].
    fn receive(&self, coming: &PendingResult, bytes: usize, take: &mut dyn FnMut(&[u8])) -> Result<()> {
        match coming {
            PendingResult::Here(here) if here.len() == bytes => take(here),
            _ => return Err(Error::internal("the result belongs to another driver or has another size")),
        }
        Ok(())
    }

    /// Frees memory.
    ///
    /// # Safety
    /// `address` came from [`Driver::alloc`] and is not used afterwards.
    unsafe fn free(&self, address: u64);

    /// Registers host memory, which must stay valid, and returns the address at which kernels read it.
    ///
    /// # Safety
    /// The bytes are not changed before [`Driver::unregister`] has returned.
    ///
    /// # Errors
    /// `Unsupported` if the driver cannot register host memory; the system's error if too little memory may be locked,
    /// or if the bytes are registered already.
    unsafe fn register(&self, _bytes: &[u8]) -> Result<u64> {
        Err(Error::unsupported("kernels of this driver cannot read host memory"))
    }

    /// Ends a registration by [`Driver::register`].
    ///
    /// # Safety
    /// The bytes are registered, and no launch reads them any more.
    unsafe fn unregister(&self, _bytes: &[u8]) {}

    /// Copies to the GPU; `from` may change after this call returned.
    ///
    /// # Safety
    /// `to` is the address of at least as many bytes as `from` has.
    ///
    /// # Errors
    /// `Unavailable` if the GPU no longer responds.
    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()>;

    /// Copies from the GPU, after all earlier work.
    ///
    /// # Safety
    /// `from` is the address of at least as many bytes as `to` has.
    ///
    /// # Errors
    /// `Unavailable` if the GPU no longer responds, `Internal` if an earlier launch failed.
    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()>;

    /// Copies within GPU memory.
    ///
    /// # Safety
    /// `to` and `from` are addresses of at least `bytes` bytes each, which do not overlap.
    ///
    /// # Errors
    /// As [`Driver::upload`].
    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()>;

    /// Fills memory with zeros.
    ///
    /// # Safety
    /// `address` is the address of at least `bytes` bytes.
    ///
    /// # Errors
    /// As [`Driver::upload`].
    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<()>;

    /// Launches a kernel.
    ///
    /// # Safety
    /// The arguments match the kernel. All memory that the kernel accesses through them belongs to this driver, or is
    /// registered host memory that the kernel only reads.
    ///
    /// # Errors
    /// `Internal` if the launch is not possible or the kernel failed.
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()>;
}

/// Streams in addition to the driver's default stream; each stream runs its work in order.
pub trait Streams: Driver {
    /// Waits for all work on the driver's default stream.
    ///
    /// # Errors
    /// `Unavailable` if the GPU no longer responds.
    fn settle(&self) -> Result<()>;

    /// Allocates pinned host memory, from and to which the GPU can copy directly.
    ///
    /// # Errors
    /// `Overloaded` if no more host memory can be pinned.
    fn pin(&self, bytes: usize) -> Result<u64>;

    /// Frees pinned memory.
    ///
    /// # Safety
    /// `address` came from [`Streams::pin`] and is not used afterwards.
    unsafe fn unpin(&self, address: u64);

    /// Records that a result will be read from pinned memory. An emulated GPU reports a fault if this memory is freed
    /// or reused before [`Streams::fetched`].
    fn expects(&self, _address: u64, _bytes: usize) {}

    /// Records that a result in pinned memory is no longer read.
    fn fetched(&self, _address: u64) {}

    /// Records that GPU or pinned memory is reused and its content is no longer read. An emulated GPU overwrites the
    /// memory.
    fn recycles(&self, _address: u64, _bytes: usize) {}

    /// Creates a stream.
    ///
    /// # Errors
    /// `Unavailable` if the GPU no longer responds.
    fn stream(&self) -> Result<u64>;

    /// Destroys a stream.
    ///
    /// # Safety
    /// `stream` came from [`Streams::stream`] and is not used afterwards.
    unsafe fn close(&self, stream: u64);

    /// Submits work to a stream, in order, without waiting.
    ///
    /// # Safety
    /// The conditions of [`Driver::upload`], [`Driver::download`], [`Driver::clear`] and [`Driver::launch`]; all memory
    /// stays valid until [`Streams::wait`] has returned.
    ///
    /// # Errors
    /// Errors of these methods.
    unsafe fn submit(&self, stream: u64, work: &[Work]) -> Result<()>;

    /// Records work for [`Streams::replay`] without running it.
    ///
    /// # Safety
    /// The conditions of [`Streams::submit`], at every replay.
    ///
    /// # Errors
    /// As [`Streams::submit`].
    unsafe fn record(&self, stream: u64, work: &[Work]) -> Result<u64>;

    /// Submits recorded work to a stream without waiting.
    ///
    /// # Safety
    /// As [`Streams::submit`].
    ///
    /// # Errors
    /// As [`Streams::submit`].
    unsafe fn replay(&self, stream: u64, recording: u64) -> Result<()>;

    /// Destroys a recording.
    ///
    /// # Safety
    /// `recording` came from [`Streams::record`] and is not used afterwards.
    unsafe fn forget(&self, recording: u64);

    /// Waits for all work on a stream.
    ///
    /// # Safety
    /// `stream` came from [`Streams::stream`].
    ///
    /// # Errors
    /// `Unavailable` if the GPU no longer responds, `Internal` if a launch failed.
    unsafe fn wait(&self, stream: u64) -> Result<()>;
}
