//! What is asked of a card, so that another one, or an emulation, can stand in for it.

use std::fmt::Debug;
use std::sync::Arc;

use sterling_core::error::{Error, Result};

/// Blocks that keep a multiprocessor busy, with as many again that wait for their turn.
pub(crate) const BLOCKS_A_PROCESSOR: usize = 16;

/// What a launch moves and computes at most, as far as the host knows: lists are taken to be of mean length, and all that is
/// collected to be read again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Demand {
    /// Bytes from and to the memory of the card, each once.
    pub bytes: u64,
    /// Bytes that blocks read again, from the caches.
    pub again: u64,
    /// Bytes of the memory of the host.
    pub host: u64,
    /// Multiply-adds of bytes, four to an instruction.
    pub dp4a: u64,
    /// Multiply-adds of bytes by tensor cores.
    pub tensor_int8: u64,
    /// Multiply-adds of bf16 by tensor cores.
    pub tensor_bf16: u64,
    /// Multiply-adds of TF32 by tensor cores.
    pub tensor_tf32: u64,
    /// Multiply-adds in single precision.
    pub single: u64,
}

impl Demand {
    /// So many bytes and nothing that is computed.
    pub fn of_bytes(bytes: usize) -> Self {
        Demand { bytes: bytes as u64, ..Demand::default() }
    }

    /// Both.
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
    /// What it moves and computes at most.
    pub demand: Demand,
}

/// What a stream is asked to do. Addresses of the host are those of pinned memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// Bytes from the host.
    Upload {
        /// Where they go.
        to: u64,
        /// Where they lie.
        from: u64,
        /// How many.
        bytes: usize,
    },
    /// Bytes to the host.
    Download {
        /// Where they lie.
        from: u64,
        /// Where they go.
        to: u64,
        /// How many.
        bytes: usize,
    },
    /// Bytes from one place of the card to another.
    Copy {
        /// Where they go.
        to: u64,
        /// Where they lie.
        from: u64,
        /// How many.
        bytes: usize,
    },
    /// Zeros.
    Clear {
        /// Where.
        address: u64,
        /// How many.
        bytes: usize,
    },
    /// A [`Launch`] with arguments of its own.
    Launch {
        /// The kernel.
        kernel: &'static str,
        /// Blocks along each axis.
        grid: [u32; 3],
        /// Threads of a block.
        threads: u32,
        /// Shared memory of a block.
        shared_bytes: usize,
        /// The structure that the kernel takes.
        arguments: Vec<u8>,
        /// What it moves and computes at most.
        demand: Demand,
    },
}

impl Work {
    /// A launch that outlives its arguments.
    pub fn of(launch: &Launch<'_>) -> Self {
        let Launch { kernel, grid, threads, shared_bytes, arguments, demand } = *launch;
        Work::Launch { kernel, grid, threads, shared_bytes, arguments: arguments.to_vec(), demand }
    }
}

/// A result that is on its way.
#[derive(Debug)]
pub enum Coming {
    /// It is there.
    Here(Vec<u8>),
    /// To pinned memory.
    To(Unfetched),
}

/// Pinned memory that a result is copied to, and that belongs to the result until this is dropped. A lane does not begin again before.
#[derive(Debug)]
pub struct Unfetched {
    address: u64,
    streams: Arc<dyn Streams>,
    /// Shared by all unfetched results of a lane, which counts them by it.
    _of_lane: Arc<()>,
}

impl Unfetched {
    /// Claims pinned memory for a result.
    pub(super) fn new(address: u64, bytes: usize, streams: Arc<dyn Streams>, of_lane: Arc<()>) -> Self {
        streams.expects(address, bytes);
        Unfetched { address, streams, _of_lane: of_lane }
    }

    /// Address of the pinned memory.
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Unfetched {
    fn drop(&mut self) {
        self.streams.fetched(self.address);
    }
}

/// A card, or what stands in for one. Copies and launches of one driver happen in the order in which they are asked for.
pub trait Driver: Send + Sync + Debug {
    /// What it is called.
    fn name(&self) -> String;

    /// What kind of device it is, for explanations.
    fn kind(&self) -> &'static str;

    /// Blocks that are enough to keep it busy.
    fn blocks(&self) -> usize;

    /// Bytes of shared memory that one block may have at most.
    fn shared_bytes_max(&self) -> usize;

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

    /// The address of a copy of these bytes.
    ///
    /// # Errors
    /// As [`Driver::alloc`] and [`Driver::upload`].
    fn alloc_copy(&self, bytes: &[u8]) -> Result<u64> {
        let address = self.alloc(bytes.len().max(1))?;
        // SAFETY: the memory was allocated just now, as long as the bytes.
        unsafe { self.upload(address, bytes)? };
        Ok(address)
    }

    /// The address of zeros.
    ///
    /// # Errors
    /// As [`Driver::alloc`] and [`Driver::clear`].
    fn alloc_zeros(&self, bytes: usize) -> Result<u64> {
        let address = self.alloc(bytes)?;
        // SAFETY: the memory was allocated just now.
        unsafe { self.clear(address, bytes)? };
        Ok(address)
    }

    /// A stretch of work begins: of what was asked before nothing is needed any more but arrays that somebody holds.
    ///
    /// # Errors
    /// As [`Driver::alloc`].
    fn begin(&self) -> Result<()> {
        Ok(())
    }

    /// Sends off what was asked for so far, and does not wait.
    ///
    /// # Errors
    /// As [`Driver::upload`].
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    /// Waits until all that was sent off is done, so that memory which it reads and writes may be freed.
    ///
    /// # Errors
    /// As [`Driver::download`]; nothing runs any more in this case too.
    fn finish(&self) -> Result<()> {
        Ok(())
    }

    /// Asks for a copy to the host, once everything that was asked before is done.
    ///
    /// # Safety
    /// `from` is the address of at least as many bytes.
    ///
    /// # Errors
    /// As [`Driver::download`].
    unsafe fn send(&self, from: u64, bytes: usize) -> Result<Coming> {
        let mut here = vec![0; bytes];
        // SAFETY: the caller's condition.
        unsafe { self.download(from, &mut here)? };
        Ok(Coming::Here(here))
    }

    /// Waits for what was asked for, as many bytes as were, and has it taken from where it lies.
    ///
    /// # Errors
    /// As [`Driver::download`].
    fn receive(&self, coming: &Coming, bytes: usize, take: &mut dyn FnMut(&[u8])) -> Result<()> {
        match coming {
            Coming::Here(here) if here.len() == bytes => take(here),
            _ => return Err(Error::internal("a result that is not this driver's")),
        }
        Ok(())
    }

    /// Gives memory back.
    ///
    /// # Safety
    /// `address` is one that [`Driver::alloc`] gave and that nobody uses any more.
    unsafe fn free(&self, address: u64);

    /// The address at which kernels read bytes of the host where they lie, which stay in memory meanwhile.
    ///
    /// # Safety
    /// Nobody changes the bytes before [`Driver::unregister`] has returned.
    ///
    /// # Errors
    /// `Unsupported` for a driver without it; as the system refuses it: for want of memory that may be locked, or where the bytes are
    /// registered already.
    unsafe fn register(&self, _bytes: &[u8]) -> Result<u64> {
        Err(Error::unsupported("kernels of this driver read no memory of the host"))
    }

    /// Ends what [`Driver::register`] began.
    ///
    /// # Safety
    /// The bytes are registered, and no launch reads them any more.
    unsafe fn unregister(&self, _bytes: &[u8]) {}

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

    /// Copies from one place of the card to another.
    ///
    /// # Safety
    /// Both are addresses of at least as many bytes, which do not overlap.
    ///
    /// # Errors
    /// As [`Driver::upload`].
    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()>;

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
    /// The arguments are those that the kernel takes, and all that it reads and writes with them lies in memory of this driver, or is
    /// read of the host and registered.
    ///
    /// # Errors
    /// `Internal` where the kernel cannot be launched so, or failed.
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()>;
}

/// Lists of work that run beside what the driver itself is asked for, each stream in its own order.
pub trait Streams: Driver {
    /// Waits until all that the driver itself was asked for is done.
    ///
    /// # Errors
    /// `Unavailable` where the card does not answer any more.
    fn settle(&self) -> Result<()>;

    /// The address of memory of the host that the card copies from and to by itself.
    ///
    /// # Errors
    /// `Overloaded` where there is no more.
    fn pin(&self, bytes: usize) -> Result<u64>;

    /// Gives pinned memory back.
    ///
    /// # Safety
    /// `address` is one that [`Streams::pin`] gave and that nothing uses any more.
    unsafe fn unpin(&self, address: u64);

    /// Notes that a result will be read from pinned memory. An emulation fails where this memory is given back or reused before
    /// [`Streams::fetched`].
    fn expects(&self, _address: u64, _bytes: usize) {}

    /// Notes that nobody reads that result any more.
    fn fetched(&self, _address: u64) {}

    /// Notes that memory, on the card or pinned, is used anew: what stands in it is not read any more. An emulation overwrites it.
    fn recycles(&self, _address: u64, _bytes: usize) {}

    /// A new stream.
    ///
    /// # Errors
    /// `Unavailable` where the card does not answer any more.
    fn stream(&self) -> Result<u64>;

    /// Ends a stream.
    ///
    /// # Safety
    /// It is one that [`Streams::stream`] gave and that nobody uses any more.
    unsafe fn close(&self, stream: u64);

    /// Asks a stream for work, in its order, and does not wait.
    ///
    /// # Safety
    /// As [`Driver::upload`], [`Driver::download`], [`Driver::clear`] and [`Driver::launch`] ask for; the memory stays until
    /// [`Streams::wait`] has returned.
    ///
    /// # Errors
    /// As these.
    unsafe fn submit(&self, stream: u64, work: &[Work]) -> Result<()>;

    /// Work that one call of [`Streams::replay`] asks for. Nothing runs yet.
    ///
    /// # Safety
    /// As [`Streams::submit`], whenever it is replayed.
    ///
    /// # Errors
    /// As [`Streams::submit`].
    unsafe fn record(&self, stream: u64, work: &[Work]) -> Result<u64>;

    /// Asks a stream for recorded work, and does not wait.
    ///
    /// # Safety
    /// As [`Streams::submit`].
    ///
    /// # Errors
    /// As [`Streams::submit`].
    unsafe fn replay(&self, stream: u64, recording: u64) -> Result<()>;

    /// Forgets a recording.
    ///
    /// # Safety
    /// It is one that [`Streams::record`] gave and that is not used any more.
    unsafe fn forget(&self, recording: u64);

    /// Waits until a stream has done all that it was asked for.
    ///
    /// # Safety
    /// It is one that [`Streams::stream`] gave.
    ///
    /// # Errors
    /// `Unavailable` where the card does not answer any more, `Internal` where a launch failed.
    unsafe fn wait(&self, stream: u64) -> Result<()>;
}
