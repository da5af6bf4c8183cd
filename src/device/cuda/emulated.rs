//! A card that is none: kernels compiled for the host's processor run one thread after the other (`kernels/emulate.h`).
//!
//! It is slow and finds what a card would pass over: reads of memory that nobody wrote, threads that miss a barrier, arguments that lie
//! in the memory of another emulated card, and, in a library built with a sanitizer, whatever leaves its array.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use libloading::Library;

use super::driver::{Demand, Driver, Launch, Streams, Work};
use crate::error::{Error, Result};
use crate::locks::locked;

/// Memory of the host that kernels may read: where each run of it begins and ends, and how many there are.
#[repr(C)]
struct Host {
    runs: *const [u64; 2],
    count: usize,
}

// SAFETY: what each call asks for is what the methods of `Driver` ask for; the types are those of `kernels/emulated.cpp`.
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
// SAFETY: as above.
type AllocFn = unsafe extern "C" fn(usize) -> *mut c_void;
// SAFETY: as above.
type FreeFn = unsafe extern "C" fn(*mut c_void);

/// What it was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Lists of work as they came.
    pub submitted: u64,
    /// Lists that were recorded, and how often any of them was replayed.
    pub recorded: u64,
    /// See `recorded`.
    pub replayed: u64,
    /// How often the host waited for a stream that had something to do.
    pub waits: u64,
    /// Bytes that came from the host, beside those that streams brought.
    pub uploaded: u64,
}

/// Streams do nothing before somebody waits for them: as late as a card may be.
#[derive(Debug, Default)]
struct Queues {
    next: u64,
    work: BTreeMap<u64, Vec<Work>>,
    recordings: BTreeMap<u64, Vec<Work>>,
    counts: Counts,
}

/// Memory of all emulated cards: where it begins, how long it is, and whose it is.
static OWNERS: Mutex<BTreeMap<u64, (usize, u64)>> = Mutex::new(BTreeMap::new());
static CARDS: AtomicU64 = AtomicU64::new(0);
/// Bytes of a card that nobody gave another size.
const MEMORY_BYTES: u64 = 1 << 33;

/// The kernels as a shared library, and memory of the host.
#[derive(Debug)]
pub struct Emulated {
    name: String,
    card: u64,
    memory_bytes: u64,
    used_bytes: AtomicU64,
    /// Launches after which it is lost.
    launches_max: AtomicU64,
    is_lost: AtomicBool,
    locks_nothing: AtomicBool,
    launch: LaunchFn,
    alloc: AllocFn,
    free: FreeFn,
    /// Orders the turns of threads; another one for each launch.
    seed: AtomicU64,
    launches: AtomicU64,
    /// Runs of memory of the host that are registered.
    registered: Mutex<Vec<[u64; 2]>>,
    demand: Mutex<[Demand; 2]>,
    streams: Mutex<Queues>,
    /// Keeps the functions loaded.
    _library: Library,
}

impl Emulated {
    /// Loads the library that `kernels/emulated.cpp` became. Threads take turns in an order that `seed` chooses.
    ///
    /// # Errors
    /// `Unavailable` where the file is no such library.
    pub fn open(library: &Path, seed: u64) -> Result<Self> {
        let missing = |e: libloading::Error| Error::unavailable(format!("{}: {e}", library.display()));
        // SAFETY: the library's initialisers register kernels and do nothing else.
        let loaded = unsafe { Library::new(library) }.map_err(missing)?;
        // SAFETY: the types are those of `kernels/emulated.cpp`, which belongs to this file.
        let (launch, alloc, free) = unsafe {
            (
                *loaded.get::<LaunchFn>(b"emu_launch").map_err(missing)?,
                *loaded.get::<AllocFn>(b"emu_alloc").map_err(missing)?,
                *loaded.get::<FreeFn>(b"emu_free").map_err(missing)?,
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
            launch,
            alloc,
            free,
            seed: seed.into(),
            launches: 0.into(),
            registered: Mutex::default(),
            demand: Mutex::default(),
            streams: Mutex::default(),
            _library: loaded,
        })
    }

    /// The same under another name and with so many bytes of memory.
    pub fn like(self, name: &str, memory_bytes: u64) -> Self {
        Emulated { name: name.into(), memory_bytes, ..self }
    }

    /// It answers nothing any more once it has launched so many kernels more.
    pub fn lose_after(&self, launches: u64) {
        self.launches_max.store(self.launches() + launches, Ordering::Relaxed);
    }

    /// It registers no memory of the host from now on.
    pub fn lock_nothing(&self) {
        self.locks_nothing.store(true, Ordering::Relaxed);
    }

    /// Bytes of the host that are registered.
    pub fn registered_bytes(&self) -> u64 {
        locked(&self.registered).iter().map(|run| run[1] - run[0]).sum()
    }

    fn here(&self) -> Result<()> {
        match self.is_lost.load(Ordering::Relaxed) {
            true => Err(Error::unavailable(format!("{}: the card is lost", self.name))),
            false => Ok(()),
        }
    }

    /// Whose memory lies at an address.
    fn owner(address: u64) -> Option<u64> {
        let owners = locked(&OWNERS);
        let (&first, &(bytes, card)) = owners.range(..=address).next_back()?;
        (address - first < bytes as u64).then_some(card)
    }

    fn check_own(&self, what: &str, address: u64) -> Result<()> {
        match Emulated::owner(address) {
            Some(card) if card == self.card => Ok(()),
            _ => Err(Error::internal(format!("{what}: the address is not one of {}", self.name))),
        }
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        locked(&self.streams)
    }

    /// What was asked of its streams.
    pub fn counts(&self) -> Counts {
        self.queues().counts
    }

    /// What all launches so far said that they would do, and the multiply-adds that they did.
    pub fn demand(&self) -> [Demand; 2] {
        *locked(&self.demand)
    }

    /// How many kernels it has launched.
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

    /// Few and many in turns, so that blocks have several things to do, and one each.
    fn blocks(&self) -> usize {
        if self.launches().is_multiple_of(2) { 4 } else { 512 }
    }

    fn memory(&self) -> Result<(u64, u64)> {
        self.here()?;
        Ok((self.memory_bytes.saturating_sub(self.used_bytes.load(Ordering::Relaxed)), self.memory_bytes))
    }

    fn alloc(&self, bytes: usize) -> Result<u64> {
        self.here()?;
        if bytes as u64 > self.memory()?.0 {
            return Err(Error::overloaded(format!("{}: the card has no more memory", self.name)));
        }
        // SAFETY: the library allocates like malloc.
        let memory = unsafe { (self.alloc)(bytes) };
        if memory.is_null() {
            Err(Error::overloaded(format!("{bytes} bytes cannot be had")))
        } else {
            self.used_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
            locked(&OWNERS).insert(memory as u64, (bytes.max(1), self.card));
            Ok(memory as u64)
        }
    }

    unsafe fn free(&self, address: u64) {
        if let Some((bytes, _)) = locked(&OWNERS).remove(&address) {
            self.used_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
        }
        // SAFETY: the caller's condition; the address is a pointer of `alloc`.
        unsafe { (self.free)(address as *mut c_void) }
    }

    /// Refuses what is registered already, as a card does.
    // SAFETY: what the trait asks of callers; the bytes are read by launches alone.
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

    // SAFETY: as above.
    unsafe fn unregister(&self, bytes: &[u8]) {
        locked(&self.registered).retain(|run| run[0] != bytes.as_ptr() as u64);
    }

    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        self.here()?;
        if !from.is_empty() {
            self.check_own("an upload", to)?;
        }
        self.queues().counts.uploaded += from.len() as u64;
        // SAFETY: the caller's condition; addresses are pointers of `alloc`, which `from` cannot overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
        Ok(())
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        self.here()?;
        self.check_own("a download", from)?;
        // SAFETY: as in `upload`.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.here()?;
        if bytes > 0 {
            [to, from].into_iter().try_for_each(|address| self.check_own("a copy", address))?;
        }
        // SAFETY: the caller's condition; addresses are pointers of `alloc`.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's condition.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
        Ok(())
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.here()?;
        if self.launches() >= self.launches_max.load(Ordering::Relaxed) {
            self.is_lost.store(true, Ordering::Relaxed);
            return self.here();
        }
        let (words, _) = launch.arguments.as_chunks::<8>();
        let is_foreign =
            |word: &[u8; 8]| Emulated::owner(u64::from_le_bytes(*word)).is_some_and(|card| card != self.card);
        if words.iter().any(is_foreign) {
            let (kernel, name) = (launch.kernel, &self.name);
            return Err(Error::internal(format!(
                "{kernel}: an argument lies in the memory of another card than {name}"
            )));
        }
        let name = CString::new(launch.kernel).map_err(|e| Error::internal("a kernel's name").caused_by(e))?;
        let seed = self.seed.fetch_add(1, Ordering::Relaxed);
        self.launches.fetch_add(1, Ordering::Relaxed);
        let mut operations = [0u64; 5];
        let registered = locked(&self.registered).clone();
        let host = Host { runs: registered.as_ptr(), count: registered.len() };
        // SAFETY: the library checks the size of the arguments; what they point to is the caller's condition. It counts five kinds of
        // operations.
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
        // SAFETY: a text that stays until the next launch of this thread.
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
            // SAFETY: the caller's condition; addresses are pointers of `alloc`, and what is copied does not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) }
        };
        match work {
            Work::Upload { to, from, bytes } | Work::Download { from, to, bytes } | Work::Copy { to, from, bytes } => {
                // Pinned memory is the card's too.
                [to, from].into_iter().filter(|_| *bytes > 0).try_for_each(|at| self.check_own("a copy", *at))?;
                copy(*from, *to, *bytes);
                Ok(())
            }
            // SAFETY: the caller's condition.
            Work::Clear { address, bytes } => unsafe { self.clear(*address, *bytes) },
            Work::Launch { kernel, grid, threads, shared_bytes, arguments, demand } => {
                let (grid, threads, shared_bytes, demand) = (*grid, *threads, *shared_bytes, *demand);
                // SAFETY: the caller's condition.
                unsafe { self.launch(&Launch { kernel, grid, threads, shared_bytes, arguments, demand }) }
            }
        }
    }
}

impl Streams for Emulated {
    fn settle(&self) -> Result<()> {
        Ok(())
    }

    fn pin(&self, bytes: usize) -> Result<u64> {
        self.alloc(bytes)
    }

    // SAFETY: what the trait asks of callers.
    unsafe fn unpin(&self, address: u64) {
        // SAFETY: the caller's condition.
        unsafe { self.free(address) }
    }

    fn stream(&self) -> Result<u64> {
        self.here()?;
        let mut queues = self.queues();
        queues.next += 1;
        let stream = queues.next;
        queues.work.insert(stream, Vec::new());
        Ok(stream)
    }

    // SAFETY: what the trait asks of callers; nothing is looked at here.
    unsafe fn close(&self, stream: u64) {
        self.queues().work.remove(&stream);
    }

    // SAFETY: what the trait asks of callers.
    unsafe fn submit(&self, stream: u64, work: &[Work]) -> Result<()> {
        let mut queues = self.queues();
        queues.counts.submitted += 1;
        queues.work.entry(stream).or_default().extend_from_slice(work);
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

    // SAFETY: what the trait asks of callers.
    unsafe fn replay(&self, stream: u64, recording: u64) -> Result<()> {
        let mut queues = self.queues();
        let work = queues.recordings.get(&recording).cloned();
        let work = work.ok_or_else(|| Error::internal("a recording that was forgotten"))?;
        queues.counts.replayed += 1;
        queues.work.entry(stream).or_default().extend(work);
        Ok(())
    }

    unsafe fn forget(&self, recording: u64) {
        self.queues().recordings.remove(&recording);
    }

    // SAFETY: what the trait asks of callers.
    unsafe fn wait(&self, stream: u64) -> Result<()> {
        let work = {
            let mut queues = self.queues();
            queues.counts.waits += 1;
            std::mem::take(queues.work.entry(stream).or_default())
        };
        // SAFETY: what `submit` and `replay` asked their callers for.
        work.iter().try_for_each(|work| unsafe { self.run(work) })
    }
}
