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
//!
//! This file opens and configures a GPU and launches its kernels.

mod limits;
mod memory;
mod streams;

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use libloading::Library;

use super::driver::{Demand, Driver, Launch};
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

pub use limits::Limits;
use memory::{GRAVES, overlaps};
use streams::Queues;

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

static CARDS: AtomicU64 = AtomicU64::new(0);

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
