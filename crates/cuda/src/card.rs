//! The GPU driver, through NVIDIA's driver library and NVRTC, both loaded on first use: a build needs neither.
//!
//! Memory comes from the driver's pool and is returned in launch order, so a pass allocates without waiting. Direct
//! calls use one stream; each worker stream ([`Device::lane`](super::Device::lane)) has a separate CUDA stream and
//! memory.

use std::collections::HashMap;
use std::ffi::{CString, c_void};

use cudarc::driver::{result, sys};

use super::compiler;
use super::cubins::{Compilation, Cubins};
use super::driver::{BLOCKS_PER_PROCESSOR, Driver, Launch, Streams, Work};
use super::sources::KERNELS;
use sterling_core::error::{Error, Result};

/// Oldest supported compute capability: the kernels need dp4a, mma of bytes and warp-wide sums.
const CAPABILITY_MIN: (i32, i32) = (8, 0);

/// GPU with the kernels compiled for it.
pub(crate) struct Card {
    name: String,
    context: sys::CUcontext,
    stream: sys::CUstream,
    kernels: HashMap<String, sys::CUfunction>,
    blocks: usize,
    shared_bytes: usize,
    /// True if the GPU can access pageable host memory directly: a copy from such memory may then still read it after
    /// the call returned.
    reads_pageable: bool,
    /// Flags for registering host memory.
    registering: u32,
}

// SAFETY: contexts, streams and functions are handles that the driver lets any thread use; each call makes the context current
// first.
unsafe impl Send for Card {}
// SAFETY: the driver lets any thread use these handles, and orders calls of several threads.
unsafe impl Sync for Card {}

impl std::fmt::Debug for Card {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Card[{}]", self.name)
    }
}

/// Converts an error of the driver. After most of these errors the GPU no longer responds.
fn failed(what: &str) -> impl Fn(result::DriverError) -> Error + '_ {
    move |e| match e.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::overloaded(format!("{what}: the GPU is out of memory")),
        _ => Error::unavailable(format!("{what}: {e}")).caused_by(e),
    }
}

impl Card {
    /// Returns the number of GPUs of the machine.
    ///
    /// # Errors
    /// `Unavailable` without a driver.
    pub(crate) fn count() -> Result<usize> {
        // SAFETY: looks up the library by name; loading the driver only runs its initialisers.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::unavailable("no NVIDIA driver: libcuda.so was not found"));
        }
        result::init().map_err(failed("the NVIDIA driver"))?;
        let count = result::device::get_count().map_err(failed("the NVIDIA driver"))?;
        match usize::try_from(count) {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(Error::unavailable("this machine has no GPUs")),
        }
    }

    /// Opens a GPU by number and compiles the kernels for it.
    ///
    /// # Errors
    /// `Unavailable` without a driver, NVRTC or a GPU of this number; `Unsupported` for a GPU that is too old;
    /// `Internal` if a kernel does not compile.
    pub(crate) fn open(number: usize) -> Result<Self> {
        let count = Card::count()?;
        compiler::version()?;
        let number = i32::try_from(number).ok().filter(|_| number < count).ok_or_else(|| {
            Error::unavailable(format!("cuda:{number}: this machine has {count} GPUs, numbered from 0"))
        })?;
        let device = result::device::get(number).map_err(failed("the GPU"))?;
        let name = format!("cuda:{number} {}", result::device::get_name(device).map_err(failed("the GPU"))?);
        let attribute = |attribute| {
            // SAFETY: the driver returned the device.
            unsafe { result::device::get_attribute(device, attribute) }.map_err(failed("the GPU"))
        };
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        };
        let capability = (attribute(MAJOR)?, attribute(MINOR)?);
        if capability < CAPABILITY_MIN {
            let ((major, minor), least) = (capability, CAPABILITY_MIN);
            return Err(Error::unsupported(format!(
                "{name}: compute capability {major}.{minor}, expected at least {}.{}",
                least.0, least.1
            )));
        }
        // SAFETY: the driver returned the device; its primary context is retained until the process ends.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(failed(&name))?;
        // SAFETY: the context was just created.
        unsafe { result::ctx::set_current(context) }.map_err(failed(&name))?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(failed(&name))?;
        let most = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let kernels = load(capability, most)?;
        let reads_pageable = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS)? > 0;
        let processors = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let blocks = usize::try_from(processors).unwrap_or(1) * BLOCKS_PER_PROCESSOR;
        use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED as READ_ONLY;
        let read_only = if attribute(READ_ONLY)? > 0 { sys::CU_MEMHOSTREGISTER_READ_ONLY } else { 0 };
        let registering = sys::CU_MEMHOSTREGISTER_DEVICEMAP | read_only;
        let shared_bytes = usize::try_from(most).unwrap_or(0);
        Ok(Card { name, context, stream, kernels, blocks, shared_bytes, reads_pageable, registering })
    }

    fn here(&self) -> Result<()> {
        // SAFETY: the context lives as long as the process.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed(&self.name))
    }
}

/// Loads the functions of all kernels in the current context. Kernels are compiled once per architecture and cached on
/// disk. Each kernel may use the maximum shared memory of a block; this limit is set once, because threads that set it
/// with each launch would overwrite each other's values.
fn load(capability: (i32, i32), shared_bytes: i32) -> Result<HashMap<String, sys::CUfunction>> {
    let (architecture, compiler) = (format!("sm_{}{}", capability.0, capability.1), compiler::version()?);
    let cubins = Cubins::of_user();
    let mut kernels = HashMap::new();
    for source in &KERNELS {
        let recipe = Compilation::new(source, &architecture, &compiler)?;
        let code = match &cubins {
            Some(cubins) => cubins.get(&recipe, compiler::compile)?,
            None => compiler::compile(&recipe)?,
        };
        // SAFETY: the code is compiler output, or was read from a file whose checksum is valid.
        let module = unsafe { result::module::load_data(code.as_ptr().cast()) }.map_err(failed(source.name))?;
        for name in source.kernels() {
            let named = CString::new(name).map_err(|e| Error::internal(format!("{}: {e}", source.name)))?;
            // SAFETY: the module was just loaded and is never unloaded.
            let function = unsafe { result::module::get_function(module, named) }.map_err(failed(name))?;
            use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MOST;
            // SAFETY: the function belongs to a module that is never unloaded.
            unsafe { result::function::set_function_attribute(function, MOST, shared_bytes) }.map_err(failed(name))?;
            kernels.insert(name.to_owned(), function);
        }
    }
    Ok(kernels)
}

impl Driver for Card {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn kind(&self) -> &'static str {
        "cuda"
    }

    fn blocks(&self) -> usize {
        self.blocks
    }

    fn shared_bytes_max(&self) -> usize {
        self.shared_bytes
    }

    fn memory(&self) -> Result<(u64, u64)> {
        self.here()?;
        let (free, all) = result::mem_get_info().map_err(failed(&self.name))?;
        Ok((free as u64, all as u64))
    }

    fn alloc(&self, bytes: usize) -> Result<u64> {
        self.here()?;
        // SAFETY: the memory is only used in stream order.
        unsafe { result::malloc_async(self.stream, bytes) }.map_err(failed(&self.name))
    }

    unsafe fn free(&self, address: u64) {
        if self.here().is_ok() {
            // SAFETY: the caller meets the method's `# Safety` conditions; earlier launches run first. A lost GPU has
            // nothing to free.
            let _ = unsafe { result::free_async(address, self.stream) };
        }
    }

    unsafe fn register(&self, bytes: &[u8]) -> Result<u64> {
        self.here()?;
        let (host, mut address) = (bytes.as_ptr().cast_mut().cast::<c_void>(), 0);
        // SAFETY: the caller meets the method's `# Safety` conditions; kernels only read the bytes.
        unsafe { sys::cuMemHostRegister_v2(host, bytes.len(), self.registering) }
            .result()
            .map_err(failed(&self.name))?;
        // SAFETY: the bytes were just registered.
        let found = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, host, 0) }.result();
        if let Err(e) = found {
            // SAFETY: the bytes were just registered, and their address has not been returned to a caller.
            unsafe { self.unregister(bytes) };
            return Err(failed(&self.name)(e));
        }
        Ok(address)
    }

    unsafe fn unregister(&self, bytes: &[u8]) {
        if self.here().is_ok() {
            // SAFETY: the caller meets the method's `# Safety` conditions. A lost GPU no longer reads.
            let _ = unsafe { sys::cuMemHostUnregister(bytes.as_ptr().cast_mut().cast()) }.result();
        }
    }

    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        self.here()?;
        // SAFETY: the caller meets the method's `# Safety` conditions; memory that is not pinned is staged before the
        // call returns, or read before the wait ends.
        unsafe { result::memcpy_htod_async(to, from, self.stream) }.map_err(failed(&self.name))?;
        if self.reads_pageable { self.settle() } else { Ok(()) }
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.here()?;
        // SAFETY: the caller meets the method's `# Safety` conditions; `to` is borrowed until the stream has been
        // synchronized.
        unsafe {
            result::memcpy_dtoh_async(to, from, self.stream).map_err(failed(&self.name))?;
            result::stream::synchronize(self.stream).map_err(failed(&self.name))
        }
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.here()?;
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }.map_err(failed(&self.name))
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        self.here()?;
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe { result::memset_d8_async(address, 0, bytes, self.stream) }.map_err(failed(&self.name))
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.here()?;
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe { self.launch_on(self.stream, launch) }
    }
}

impl Card {
    /// # Safety
    /// As [`Driver::launch`], on a stream of this GPU, whose context is current.
    unsafe fn launch_on(&self, stream: sys::CUstream, launch: &Launch<'_>) -> Result<()> {
        let missing = || Error::internal(format!("no kernel is named `{}`", launch.kernel));
        let function = *self.kernels.get(launch.kernel).ok_or_else(missing)?;
        let [x, y, z] = launch.grid;
        let mut arguments = [launch.arguments.as_ptr().cast_mut().cast::<c_void>()];
        let (shared_bytes, threads) = (launch.shared_bytes as u32, (launch.threads, 1, 1));
        // SAFETY: the caller meets the method's `# Safety` conditions; the driver copies the arguments before the call
        // returns and writes nothing to them.
        unsafe { result::launch_kernel(function, (x, y, z), threads, shared_bytes, stream, &mut arguments) }
            .map_err(failed(launch.kernel))
    }

    /// # Safety
    /// As [`Streams::submit`], on a stream of this GPU, whose context is current.
    unsafe fn enqueue(&self, stream: sys::CUstream, work: &Work) -> Result<()> {
        // SAFETY: the caller meets the method's `# Safety` conditions; host memory is pinned and stays valid until the
        // stream has been waited for.
        unsafe {
            match work {
                Work::Upload { to, from, bytes } => {
                    let from = std::slice::from_raw_parts(*from as *const u8, *bytes);
                    result::memcpy_htod_async(*to, from, stream).map_err(failed(&self.name))
                }
                Work::Download { from, to, bytes } => {
                    let to = std::slice::from_raw_parts_mut(*to as *mut u8, *bytes);
                    result::memcpy_dtoh_async(to, *from, stream).map_err(failed(&self.name))
                }
                Work::Copy { to, from, bytes } => {
                    result::memcpy_dtod_async(*to, *from, *bytes, stream).map_err(failed(&self.name))
                }
                Work::Clear { address, bytes } => {
                    result::memset_d8_async(*address, 0, *bytes, stream).map_err(failed(&self.name))
                }
                Work::Launch { kernel, grid, threads, shared_bytes, arguments, demand } => {
                    let (grid, threads, shared_bytes, demand) = (*grid, *threads, *shared_bytes, *demand);
                    self.launch_on(stream, &Launch { kernel, grid, threads, shared_bytes, arguments, demand })
                }
            }
        }
    }

    /// # Safety
    /// As [`Streams::record`], between the beginning and the end of a capture.
    unsafe fn captured(&self, stream: sys::CUstream, work: &[Work]) -> Result<sys::CUgraphExec> {
        // SAFETY: the caller meets the method's `# Safety` conditions.
        let requested = work.iter().try_for_each(|work| unsafe { self.enqueue(stream, work) });
        // Ends the capture even after an error. SAFETY: the stream is capturing.
        let graph = unsafe { result::stream::end_capture(stream) }.map_err(failed(&self.name));
        requested?;
        let graph = graph?;
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the graph was just created, and is not used afterwards.
        unsafe {
            let made = result::graph::instantiate(graph, flags).map_err(failed(&self.name));
            result::graph::destroy(graph).map_err(failed(&self.name))?;
            made
        }
    }
}

impl Streams for Card {
    fn settle(&self) -> Result<()> {
        self.here()?;
        // SAFETY: the stream lives as long as the GPU driver.
        unsafe { result::stream::synchronize(self.stream) }.map_err(failed(&self.name))
    }

    fn pin(&self, bytes: usize) -> Result<u64> {
        self.here()?;
        // SAFETY: allocates; the memory is written before it is read.
        unsafe { result::malloc_host(bytes, 0) }.map(|memory| memory as u64).map_err(failed(&self.name))
    }

    unsafe fn unpin(&self, address: u64) {
        if self.here().is_ok() {
            // SAFETY: the caller meets the method's `# Safety` conditions. A lost GPU has nothing to free.
            let _ = unsafe { result::free_host(address as *mut c_void) };
        }
    }

    fn stream(&self) -> Result<u64> {
        self.here()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        stream.map(|stream| stream as u64).map_err(failed(&self.name))
    }

    unsafe fn close(&self, stream: u64) {
        if self.here().is_ok() {
            // SAFETY: the caller meets the method's `# Safety` conditions.
            let _ = unsafe { result::stream::destroy(stream as sys::CUstream) };
        }
    }

    unsafe fn submit(&self, stream: u64, work: &[Work]) -> Result<()> {
        self.here()?;
        // SAFETY: the caller meets the method's `# Safety` conditions.
        work.iter().try_for_each(|work| unsafe { self.enqueue(stream as sys::CUstream, work) })
    }

    unsafe fn record(&self, stream: u64, work: &[Work]) -> Result<u64> {
        self.here()?;
        let (stream, alone) = (stream as sys::CUstream, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe {
            result::stream::begin_capture(stream, alone).map_err(failed(&self.name))?;
            self.captured(stream, work).map(|graph| graph as u64)
        }
    }

    unsafe fn replay(&self, stream: u64, recording: u64) -> Result<()> {
        self.here()?;
        // SAFETY: the caller meets the `# Safety` conditions of this method: stream and recording are handles of this
        // GPU.
        unsafe { result::graph::launch(recording as sys::CUgraphExec, stream as sys::CUstream) }
            .map_err(failed(&self.name))
    }

    unsafe fn forget(&self, recording: u64) {
        if self.here().is_ok() {
            // SAFETY: the caller meets the method's `# Safety` conditions.
            let _ = unsafe { result::graph::exec_destroy(recording as sys::CUgraphExec) };
        }
    }

    unsafe fn wait(&self, stream: u64) -> Result<()> {
        self.here()?;
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe { result::stream::synchronize(stream as sys::CUstream) }.map_err(failed(&self.name))
    }
}
