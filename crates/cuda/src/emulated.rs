//! Emulated GPU: runs kernels that were compiled for the host's processor, one thread after another
//! (`kernels/emulate.h`).
//!
//! The emulation is slow, and detects errors that a GPU would not report: reads of uninitialised memory, threads that
//! miss a barrier, arguments in the memory of another emulated GPU, and, in a library built with a sanitizer, accesses
//! beyond an array.
//!
//! Undefined behaviour of a GPU is a *fault*, which panics: freeing or unpinning memory that queued work or an
//! unfetched result refers to; work on freed memory; work on memory that the driver's default stream has not allocated
//! yet; closing a busy stream. Freed memory is overwritten and not reused for a while. Streams run in a random order:
//! each stream runs its work in order, as early as at submission or as late as when its result is waited for. Launches
//! are checked against the limits of a real device ([`Limits`]).

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use libloading::Library;

use super::driver::{Demand, Driver, Launch, Streams, Work};
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

/// Host memory that kernels may read: start and end of each range, and the number of ranges.
#[repr(C)]
struct Host {
    runs: *const [u64; 2],
    count: usize,
}

// SAFETY: callers must meet the conditions of the methods of `Driver`; the types match `kernels/emulated.cpp`.
type LaunchFn = unsafe extern "C" fn(
    *const c_char,
    *const u32,
    u32,
    usize,
    *const c_void,
    usize,
    Host,
    u64,
    *mut u64,
) -> *const c_char;
// SAFETY: as for `LaunchFn`.
type AllocFn = unsafe extern "C" fn(usize) -> *mut c_void;
// SAFETY: as for `LaunchFn`.
type FreeFn = unsafe extern "C" fn(*mut c_void, usize);
type PoisonFn = FreeFn;

/// Launch limits of a kind of device; every NVIDIA device from compute capability 8.0 on has the limits of one of
/// these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Name of the device.
    pub name: &'static str,
    /// Bytes of shared memory per block, with the opt-in for more than 48 KiB.
    pub shared_bytes: usize,
}

impl Limits {
    /// NVIDIA's H100 and H200 (compute capability 9.0).
    pub const H100: Limits = Limits { name: "H100", shared_bytes: 227 << 10 };
    /// NVIDIA's A100 (8.0).
    pub const A100: Limits = Limits { name: "A100", shared_bytes: 163 << 10 };
    /// NVIDIA's L4 and A10 (8.6 and 8.9).
    pub const L4: Limits = Limits { name: "L4", shared_bytes: 99 << 10 };
    /// All limits.
    pub const ALL: [Limits; 3] = [Limits::H100, Limits::A100, Limits::L4];
}

/// Limits of all devices: threads per block, blocks per axis of a grid, bytes of arguments.
const THREADS_MAX: u32 = 1024;
const GRID_MAX: [u32; 3] = [(1 << 31) - 1, 65_535, 65_535];
const ARGUMENTS_MAX: usize = 4096;

/// Counters of driver calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of submitted sequences of work.
    pub submitted: u64,
    /// Number of recorded sequences.
    pub recorded: u64,
    /// Number of replayed sequences.
    pub replayed: u64,
    /// Number of times that the host waited for a busy stream.
    pub waits: u64,
    /// Bytes uploaded from the host, except uploads on streams.
    pub uploaded: u64,
}

#[derive(Debug, Default)]
struct Queues {
    next: u64,
    work: BTreeMap<u64, VecDeque<Work>>,
    /// Streams whose work failed, with the first error of each.
    failed: BTreeMap<u64, Error>,
    recordings: BTreeMap<u64, Vec<Work>>,
    counts: Counts,
    /// Memory that streams may not use yet, because the driver's default stream was not waited for since the
    /// allocation.
    unsettled: BTreeMap<u64, usize>,
}

/// Memory of all emulated GPUs: start, length, and owner.
static OWNERS: Mutex<BTreeMap<u64, (usize, u64)>> = Mutex::new(BTreeMap::new());
static CARDS: AtomicU64 = AtomicU64::new(0);

/// Freed memory of all emulated GPUs that is not reused yet, in the order of freeing.
#[derive(Debug)]
struct FreedMemory {
    runs: BTreeMap<u64, usize>,
    order: VecDeque<(u64, u64)>,
    bytes: usize,
}

static GRAVES: Mutex<FreedMemory> = Mutex::new(FreedMemory { runs: BTreeMap::new(), order: VecDeque::new(), bytes: 0 });
/// Byte that overwrites memory before it is reused.
const DEAD: u8 = 0xDD;
/// Maximum bytes of freed memory that are withheld from reuse.
const WITHHELD_BYTES_MAX: usize = 64 << 20;

/// Returns whether one of the ranges overlaps the given bytes; an empty range counts as one byte.
fn overlaps(runs: &BTreeMap<u64, usize>, (from, bytes): (u64, usize)) -> bool {
    let end = from + bytes.max(1) as u64;
    runs.range(..end).next_back().is_some_and(|(&start, &len)| start + len as u64 > from)
}

/// Returns the memory ranges of an operation; every word of a launch's arguments counts as a possible address.
fn named(work: &Work) -> Vec<(u64, usize)> {
    match work {
        Work::Upload { to, from, bytes } | Work::Download { from, to, bytes } | Work::Copy { to, from, bytes } => {
            vec![(*to, *bytes), (*from, *bytes)]
        }
        Work::Clear { address, bytes } => vec![(*address, *bytes)],
        Work::Launch { arguments, .. } => {
            arguments.as_chunks::<8>().0.iter().map(|word| (u64::from_le_bytes(*word), 1)).collect()
        }
    }
}

/// Returns the name of an operation for messages of faults.
fn called(work: &Work) -> &'static str {
    match work {
        Work::Upload { .. } => "an upload",
        Work::Download { .. } => "a download",
        Work::Copy { .. } => "a copy",
        Work::Clear { .. } => "a clearing",
        Work::Launch { kernel, .. } => kernel,
    }
}
/// Default memory size of a GPU, in bytes.
const MEMORY_BYTES: u64 = 1 << 33;

/// Emulated GPU: the kernels in a shared library, and host memory.
#[derive(Debug)]
pub struct Emulated {
    name: String,
    card: u64,
    memory_bytes: u64,
    used_bytes: AtomicU64,
    /// Number of launches after which the device is lost.
    launches_max: AtomicU64,
    is_lost: AtomicBool,
    locks_nothing: AtomicBool,
    limits: Limits,
    /// True if streams only run when they are waited for, in the order of the waits.
    is_late: bool,
    faults: Mutex<Vec<String>>,
    keeps_faults: AtomicBool,
    /// Pinned memory of unfetched results.
    expected: Mutex<BTreeMap<u64, usize>>,
    launch: LaunchFn,
    alloc: AllocFn,
    free: FreeFn,
    poison: PoisonFn,
    /// Seed for the order of threads; different for each launch.
    seed: AtomicU64,
    /// Seed for the order of streams.
    turns: AtomicU64,
    launches: AtomicU64,
    /// Registered ranges of host memory.
    registered: Mutex<Vec<[u64; 2]>>,
    demand: Mutex<[Demand; 2]>,
    streams: Mutex<Queues>,
    /// Keeps the library and its functions loaded.
    _library: Library,
}

impl Emulated {
    /// Loads the library built from `kernels/emulated.cpp`. `seed` determines the order of threads.
    ///
    /// # Errors
    /// `Unavailable` if the file is not a library of kernels.
    pub fn open(library: &Path, seed: u64) -> Result<Self> {
        let missing = |e: libloading::Error| Error::unavailable(format!("{}: {e}", library.display()));
        // SAFETY: the library's initialisers only register kernels.
        let loaded = unsafe { Library::new(library) }.map_err(missing)?;
        // SAFETY: the types match `kernels/emulated.cpp`, which is maintained with this file.
        let (launch, alloc, free, poison) = unsafe {
            (
                *loaded.get::<LaunchFn>(b"emu_launch").map_err(missing)?,
                *loaded.get::<AllocFn>(b"emu_alloc").map_err(missing)?,
                *loaded.get::<FreeFn>(b"emu_free").map_err(missing)?,
                *loaded.get::<PoisonFn>(b"emu_poison").map_err(missing)?,
            )
        };
        Ok(Emulated {
            name: "emulated".into(),
            card: CARDS.fetch_add(1, Ordering::Relaxed),
            memory_bytes: MEMORY_BYTES,
            used_bytes: 0.into(),
            launches_max: u64::MAX.into(),
            is_lost: false.into(),
            locks_nothing: false.into(),
            limits: Limits::L4,
            is_late: false,
            faults: Mutex::default(),
            keeps_faults: false.into(),
            expected: Mutex::default(),
            launch,
            alloc,
            free,
            poison,
            seed: seed.into(),
            turns: (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1).into(),
            launches: 0.into(),
            registered: Mutex::default(),
            demand: Mutex::default(),
            streams: Mutex::default(),
            _library: loaded,
        })
    }

    /// Sets the name and the memory size.
    pub fn like(mut self, name: &str, memory_bytes: u64) -> Self {
        (self.name, self.memory_bytes) = (name.into(), memory_bytes);
        self
    }

    /// Sets the launch limits of another device; the default, L4, has the smallest limits.
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Makes streams run only when they are waited for.
    pub fn late(mut self) -> Self {
        self.is_late = true;
        self
    }

    /// Makes the device fail after `launches` more launches.
    pub fn lose_after(&self, launches: u64) {
        self.launches_max.store(self.launches() + launches, Ordering::Relaxed);
    }

    /// Makes a lost device work again; queued work is discarded.
    pub fn find_again(&self) {
        self.queues().work.values_mut().for_each(VecDeque::clear);
        self.launches_max.store(u64::MAX, Ordering::Relaxed);
        self.is_lost.store(false, Ordering::Relaxed);
    }

    /// Collects faults for [`Emulated::faults`] instead of panicking.
    pub fn keep_faults(&self) {
        self.keeps_faults.store(true, Ordering::Relaxed);
    }

    /// Returns the faults that have occurred.
    pub fn faults(&self) -> Vec<String> {
        locked(&self.faults).clone()
    }

    /// # Panics
    /// Unless faults are collected, or the thread is already panicking.
    fn fault(&self, what: &str) {
        let what = format!("{}: {what}", self.name);
        locked(&self.faults).push(what.clone());
        if !self.keeps_faults.load(Ordering::Relaxed) && !std::thread::panicking() {
            panic!("{what}");
        }
    }

    /// Returns a random number below `below`.
    fn random(&self, below: usize) -> usize {
        let next = |mut x: u64| {
            x ^= x << 13;
            x ^= x >> 7;
            Some(x ^ x << 17)
        };
        let drawn = self.turns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).unwrap_or(1);
        (drawn >> 11) as usize % below.max(1)
    }

    /// Makes later registrations of host memory fail.
    pub fn lock_nothing(&self) {
        self.locks_nothing.store(true, Ordering::Relaxed);
    }

    /// Returns the number of registered bytes of host memory.
    pub fn registered_bytes(&self) -> u64 {
        locked(&self.registered).iter().map(|run| run[1] - run[0]).sum()
    }

    fn here(&self) -> Result<()> {
        match self.is_lost.load(Ordering::Relaxed) {
            true => Err(Error::unavailable(format!("{}: the GPU is lost", self.name))),
            false => Ok(()),
        }
    }

    /// Returns the GPU whose memory has a single range that contains all of these bytes.
    fn owner((address, bytes): (u64, usize)) -> Option<u64> {
        let owners = locked(&OWNERS);
        let (&first, &(len, card)) = owners.range(..=address).next_back()?;
        (address - first + bytes.max(1) as u64 <= len as u64).then_some(card)
    }

    fn check_owner(&self, what: &str, (address, bytes): (u64, usize)) -> Result<()> {
        if Emulated::owner((address, bytes)) == Some(self.card) {
            return Ok(());
        }
        if overlaps(&locked(&GRAVES).runs, (address, bytes)) {
            self.fault(&format!("{what}: the memory has been freed"));
        }
        Err(Error::internal(format!("{what}: the address is not in the memory of {}", self.name)))
    }

    /// Allocates GPU memory or pinned memory.
    fn take(&self, bytes: usize) -> Result<u64> {
        self.here()?;
        if bytes as u64 > self.memory()?.0 {
            return Err(Error::overloaded(format!("{}: the GPU is out of memory", self.name)));
        }
        // SAFETY: the library allocates like malloc.
        let memory = unsafe { (self.alloc)(bytes) };
        if memory.is_null() {
            return Err(Error::overloaded(format!("cannot allocate {bytes} bytes")));
        }
        let bytes = bytes.max(1);
        self.used_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        locked(&OWNERS).insert(memory as u64, (bytes, self.card));
        Ok(memory as u64)
    }

    /// Frees memory, which is withheld from reuse for a while.
    fn give_back(&self, how: &str, address: u64) {
        let Some((bytes, _)) = locked(&OWNERS).remove(&address) else {
            return self.fault(&format!("memory is {how} that was never allocated, or was {how} before"));
        };
        self.used_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
        self.queues().unsettled.remove(&address);
        // SAFETY: the memory belongs to this GPU, has this size, and has no other owner.
        unsafe { (self.poison)(address as *mut c_void, bytes) };
        let mut graves = locked(&GRAVES);
        graves.runs.insert(address, bytes);
        graves.order.push_back((address, self.card));
        graves.bytes += bytes;
        while graves.bytes > WITHHELD_BYTES_MAX
            && let Some(oldest) = graves.order.iter().position(|(_, card)| *card == self.card)
            && let Some((address, _)) = graves.order.remove(oldest)
        {
            self.release_withheld(&mut graves, address);
        }
        drop(graves);
        self.check_unused(how, (address, bytes));
    }

    /// Faults if queued work or an unfetched result still uses memory.
    fn check_unused(&self, how: &str, run: (u64, usize)) {
        let bytes = run.1;
        if let Some(work) = self.queued_over(run) {
            self.fault(&format!("memory of {bytes} bytes is {how} while `{work}` that has not run yet uses it"));
        }
        let is_expected = overlaps(&locked(&self.expected), run);
        if is_expected {
            self.fault(&format!("memory of {bytes} bytes is {how} while it has an unfetched result"));
        }
    }

    /// Returns the name of queued work that uses any of these bytes.
    fn queued_over(&self, (address, bytes): (u64, usize)) -> Option<&'static str> {
        // After the GPU is lost, queued work does not run.
        if self.is_lost.load(Ordering::Relaxed) {
            return None;
        }
        let (queues, run) = (self.queues(), BTreeMap::from([(address, bytes)]));
        let uses = |work: &&Work| named(work).into_iter().any(|named| overlaps(&run, named));
        queues.work.values().flatten().find(uses).map(called)
    }

    /// Releases withheld memory.
    fn release_withheld(&self, graves: &mut FreedMemory, address: u64) {
        let bytes = graves.runs.remove(&address).unwrap_or(0);
        graves.bytes -= bytes;
        // SAFETY: the library allocated the memory, which had no owner since it was freed.
        unsafe { (self.free)(address as *mut c_void, bytes) };
    }

    /// # Errors
    /// `Internal` for a launch that a device rejects.
    fn check_limits(&self, launch: &Launch<'_>) -> Result<()> {
        let Launch { kernel, grid, threads, shared_bytes, arguments, .. } = *launch;
        let Limits { name, shared_bytes: shared_max } = self.limits;
        let refused = |what: String| Err(Error::internal(format!("kernel `{kernel}`: {what}")));
        if shared_bytes > shared_max {
            return refused(format!(
                "{shared_bytes} bytes of shared memory per block, expected at most {shared_max} on {name}"
            ));
        }
        if threads > THREADS_MAX || !threads.is_multiple_of(32) || threads == 0 {
            return refused(format!(
                "blocks of {threads} threads, expected whole warps of at most {THREADS_MAX} threads"
            ));
        }
        if grid.iter().zip(GRID_MAX).any(|(&blocks, most)| blocks == 0 || blocks > most) {
            return refused(format!("a grid of {grid:?} blocks, expected 1 to {GRID_MAX:?}"));
        }
        if arguments.len() > ARGUMENTS_MAX {
            return refused(format!("{} bytes of arguments, expected at most {ARGUMENTS_MAX}", arguments.len()));
        }
        Ok(())
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        locked(&self.streams)
    }

    /// Returns the counters of calls.
    pub fn counts(&self) -> Counts {
        self.queues().counts
    }

    /// Returns the demand of all launches so far as stated by the host, and the multiply-adds that the kernels
    /// executed.
    pub fn demand(&self) -> [Demand; 2] {
        *locked(&self.demand)
    }

    /// Returns the number of launched kernels.
    pub fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }
}

impl Driver for Emulated {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn kind(&self) -> &'static str {
        "emulated"
    }

    /// Alternates between few and many blocks, so that in one launch a block processes several units of work, and in
    /// the next launch at most one.
    fn blocks(&self) -> usize {
        if self.launches().is_multiple_of(2) { 4 } else { 512 }
    }

    fn shared_bytes_max(&self) -> usize {
        self.limits.shared_bytes
    }

    fn memory(&self) -> Result<(u64, u64)> {
        self.here()?;
        Ok((self.memory_bytes.saturating_sub(self.used_bytes.load(Ordering::Relaxed)), self.memory_bytes))
    }

    fn alloc(&self, bytes: usize) -> Result<u64> {
        let address = self.take(bytes)?;
        self.queues().unsettled.insert(address, bytes.max(1));
        Ok(address)
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; `give_back` checks that `alloc` returned the address.
    unsafe fn free(&self, address: u64) {
        self.give_back("freed", address);
    }

    /// Rejects ranges that are registered already, as a GPU does.
    // SAFETY: callers meet the trait's `# Safety` conditions; only launches read the bytes.
    unsafe fn register(&self, bytes: &[u8]) -> Result<u64> {
        self.here()?;
        let (start, mut registered) = (bytes.as_ptr() as u64, locked(&self.registered));
        let end = start + bytes.len() as u64;
        if self.locks_nothing.load(Ordering::Relaxed) || registered.iter().any(|run| run[0] < end && start < run[1]) {
            return Err(Error::unavailable(format!("{}: {} bytes cannot be registered", self.name, bytes.len())));
        }
        registered.push([start, end]);
        Ok(start)
    }

    // SAFETY: callers meet the `# Safety` conditions of the trait; only launches read the bytes.
    unsafe fn unregister(&self, bytes: &[u8]) {
        locked(&self.registered).retain(|run| run[0] != bytes.as_ptr() as u64);
        if let Some(work) = self.queued_over((bytes.as_ptr() as u64, bytes.len())) {
            self.fault(&format!("memory of the host is unregistered while `{work}` that has not run yet reads it"));
        }
    }

    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        self.here()?;
        if !from.is_empty() {
            self.check_owner("an upload", (to, from.len()))?;
        }
        self.queues().counts.uploaded += from.len() as u64;
        // SAFETY: the caller meets the `# Safety` conditions of this method; `to` is a pointer from `alloc`, which
        // `from` cannot overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
        Ok(())
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.here()?;
        self.check_owner("a download", (from, to.len()))?;
        self.queues().unsettled.clear();
        // SAFETY: the caller meets the `# Safety` conditions of this method; `from` is a pointer from `alloc`, which
        // `to` cannot overlap.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.here()?;
        if bytes > 0 {
            [to, from].into_iter().try_for_each(|address| self.check_owner("a copy", (address, bytes)))?;
        }
        // SAFETY: the caller meets the method's `# Safety` conditions; addresses are pointers of `alloc`.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        self.here()?;
        if bytes > 0 {
            self.check_owner("a clearing", (address, bytes))?;
        }
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
        Ok(())
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.here()?;
        if self.launches() >= self.launches_max.load(Ordering::Relaxed) {
            self.is_lost.store(true, Ordering::Relaxed);
            return self.here();
        }
        self.check_limits(launch)?;
        let (kernel, name) = (launch.kernel, &self.name);
        let (words, _) = launch.arguments.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        if words.iter().any(|&word| overlaps(&locked(&GRAVES).runs, (word, 1))) {
            let what = format!("an argument of `{kernel}` lies in freed memory");
            self.fault(&what);
            return Err(Error::internal(what));
        }
        if words.iter().any(|&word| Emulated::owner((word, 1)).is_some_and(|card| card != self.card)) {
            return Err(Error::internal(format!(
                "{kernel}: an argument lies in the memory of another GPU than {name}"
            )));
        }
        let name = CString::new(launch.kernel)
            .map_err(|e| Error::internal("a kernel name contains a NUL byte").caused_by(e))?;
        let seed = self.seed.fetch_add(1, Ordering::Relaxed);
        self.launches.fetch_add(1, Ordering::Relaxed);
        let mut operations = [0u64; 5];
        let registered = locked(&self.registered).clone();
        let host = Host { runs: registered.as_ptr(), count: registered.len() };
        // SAFETY: the library checks the size of the arguments; the caller guarantees the memory that they point to.
        // The library counts five kinds of operations.
        let failure = unsafe {
            (self.launch)(
                name.as_ptr(),
                launch.grid.as_ptr(),
                launch.threads,
                launch.shared_bytes,
                launch.arguments.as_ptr().cast(),
                launch.arguments.len(),
                host,
                seed,
                operations.as_mut_ptr(),
            )
        };
        let [dp4a, tensor_int8, tensor_bf16, tensor_tf32, single] = operations;
        let counted = Demand { dp4a, tensor_int8, tensor_bf16, tensor_tf32, single, ..Demand::default() };
        let mut demand = locked(&self.demand);
        *demand = [demand[0].and(launch.demand), demand[1].and(counted)];
        drop(demand);
        if failure.is_null() {
            return Ok(());
        }
        // SAFETY: `failure` is a text that stays valid until the next launch of this thread.
        let why = unsafe { CStr::from_ptr(failure) }.to_string_lossy().into_owned();
        Err(Error::internal(why))
    }
}

impl Emulated {
    /// # Safety
    /// As [`Streams::submit`].
    unsafe fn run(&self, work: &Work) -> Result<()> {
        self.here()?;
        let copy = |from: u64, to: u64, bytes: usize| {
            // SAFETY: the caller meets the method's `# Safety` conditions; addresses are pointers of `alloc`, and the
            // two ranges do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) }
        };
        match work {
            Work::Upload { to, from, bytes } | Work::Download { from, to, bytes } | Work::Copy { to, from, bytes } => {
                // Pinned memory is also owned by the GPU.
                [to, from]
                    .into_iter()
                    .filter(|_| *bytes > 0)
                    .try_for_each(|at| self.check_owner("a copy", (*at, *bytes)))?;
                copy(*from, *to, *bytes);
                Ok(())
            }
            // SAFETY: the caller meets the method's `# Safety` conditions.
            Work::Clear { address, bytes } => unsafe { self.clear(*address, *bytes) },
            Work::Launch { kernel, grid, threads, shared_bytes, arguments, demand } => {
                let (grid, threads, shared_bytes, demand) = (*grid, *threads, *shared_bytes, *demand);
                // SAFETY: the caller meets the method's `# Safety` conditions.
                unsafe { self.launch(&Launch { kernel, grid, threads, shared_bytes, arguments, demand }) }
            }
        }
    }
}

impl Emulated {
    /// Submits work to a stream, and runs some of the queued work immediately, at random.
    fn enqueue(&self, queues: &mut Queues, stream: u64, work: Vec<Work>) {
        let unsettled = |work: &&Work| named(work).into_iter().any(|named| overlaps(&queues.unsettled, named));
        let too_early = work.iter().find(unsettled).map(called);
        queues.work.entry(stream).or_default().extend(work);
        if let Some(work) = too_early {
            self.fault(&format!(
                "`{work}` uses memory whose allocation the driver's stream has not reached: nothing waited for it"
            ));
        }
        if !self.is_late && self.random(4) == 0 {
            for _ in 0..self.random(8) {
                self.step(queues, None);
            }
        }
    }

    /// Runs one operation of the given stream, or of a random stream.
    fn step(&self, queues: &mut Queues, stream: Option<u64>) {
        let busy = || queues.work.iter().filter(|(_, work)| !work.is_empty()).map(|(stream, _)| *stream);
        let chosen = stream.or_else(|| busy().nth(self.random(busy().count())));
        let Some((stream, queue)) = chosen.and_then(|stream| Some((stream, queues.work.get_mut(&stream)?))) else {
            return;
        };
        let Some(work) = queue.pop_front() else { return };
        // SAFETY: `submit` and `replay` require the same conditions of their callers.
        if let Err(e) = unsafe { self.run(&work) } {
            queue.clear();
            queues.failed.entry(stream).or_insert(e);
        }
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        let mut graves = locked(&GRAVES);
        let order = std::mem::take(&mut graves.order);
        let (own, others): (VecDeque<_>, VecDeque<_>) = order.into_iter().partition(|(_, card)| *card == self.card);
        graves.order = others;
        own.into_iter().for_each(|(address, _)| self.release_withheld(&mut graves, address));
        drop(graves);
        let faults = self.faults();
        // Reports a fault of a thread that belongs to no test, and whose panic would be lost.
        if !faults.is_empty() && !self.keeps_faults.load(Ordering::Relaxed) && !std::thread::panicking() {
            panic!("{faults:?}");
        }
    }
}

impl Streams for Emulated {
    fn settle(&self) -> Result<()> {
        self.queues().unsettled.clear();
        self.here()
    }

    fn pin(&self, bytes: usize) -> Result<u64> {
        self.take(bytes)
    }

    // SAFETY: callers meet the trait's `# Safety` conditions.
    unsafe fn unpin(&self, address: u64) {
        self.give_back("unpinned", address);
    }

    fn expects(&self, address: u64, bytes: usize) {
        let mut expected = locked(&self.expected);
        let is_taken = overlaps(&expected, (address, bytes));
        expected.insert(address, bytes.max(1));
        drop(expected);
        if is_taken {
            self.fault("a result is copied to pinned memory that already has an unfetched result");
        }
    }

    fn fetched(&self, address: u64) {
        locked(&self.expected).remove(&address);
    }

    fn recycles(&self, address: u64, bytes: usize) {
        if bytes == 0 {
            return;
        }
        self.check_unused("reused", (address, bytes));
        if Emulated::owner((address, bytes)) == Some(self.card) {
            // SAFETY: the memory belongs to this GPU, and nothing else uses it.
            unsafe { std::ptr::write_bytes(address as *mut u8, DEAD, bytes) };
        }
    }

    fn stream(&self) -> Result<u64> {
        self.here()?;
        let mut queues = self.queues();
        queues.next += 1;
        let stream = queues.next;
        queues.work.insert(stream, VecDeque::new());
        Ok(stream)
    }

    // SAFETY: callers meet the trait's `# Safety` conditions.
    unsafe fn close(&self, stream: u64) {
        let mut queues = self.queues();
        let left = queues.work.remove(&stream).map_or(0, |work| work.len());
        queues.failed.remove(&stream);
        drop(queues);
        if left > 0 && self.here().is_ok() {
            self.fault(&format!("a stream is closed that still has {left} operations to run"));
        }
    }

    // SAFETY: callers meet the trait's `# Safety` conditions.
    unsafe fn submit(&self, stream: u64, work: &[Work]) -> Result<()> {
        self.here()?;
        let mut queues = self.queues();
        queues.counts.submitted += 1;
        self.enqueue(&mut queues, stream, work.to_vec());
        Ok(())
    }

    unsafe fn record(&self, _: u64, work: &[Work]) -> Result<u64> {
        let mut queues = self.queues();
        queues.counts.recorded += 1;
        queues.next += 1;
        let recording = queues.next;
        queues.recordings.insert(recording, work.to_vec());
        Ok(recording)
    }

    // SAFETY: callers meet the trait's `# Safety` conditions.
    unsafe fn replay(&self, stream: u64, recording: u64) -> Result<()> {
        self.here()?;
        let mut queues = self.queues();
        let work = queues.recordings.get(&recording).cloned();
        let work = work.ok_or_else(|| Error::internal("the recording was destroyed"))?;
        queues.counts.replayed += 1;
        self.enqueue(&mut queues, stream, work);
        Ok(())
    }

    unsafe fn forget(&self, recording: u64) {
        self.queues().recordings.remove(&recording);
    }

    // SAFETY: callers meet the trait's `# Safety` conditions.
    unsafe fn wait(&self, stream: u64) -> Result<()> {
        let mut queues = self.queues();
        queues.counts.waits += 1;
        while queues.work.get(&stream).is_some_and(|work| !work.is_empty()) {
            let is_other = !self.is_late && self.random(2) == 0;
            self.step(&mut queues, (!is_other).then_some(stream));
        }
        queues.failed.remove(&stream).map_or_else(|| self.here(), Err)
    }
}
