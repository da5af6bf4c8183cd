//! Memory of emulated GPUs: owners, freed memory that is withheld from reuse, and faults of its use.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use super::Emulated;
use crate::driver::Driver;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

/// Memory of all emulated GPUs: start, length, and owner.
static OWNERS: Mutex<BTreeMap<u64, (usize, u64)>> = Mutex::new(BTreeMap::new());

/// Freed memory of all emulated GPUs that is not reused yet, in the order of freeing.
#[derive(Debug)]
pub(super) struct FreedMemory {
    pub(super) runs: BTreeMap<u64, usize>,
    order: VecDeque<(u64, u64)>,
    bytes: usize,
}

pub(super) static GRAVES: Mutex<FreedMemory> =
    Mutex::new(FreedMemory { runs: BTreeMap::new(), order: VecDeque::new(), bytes: 0 });
/// Byte that overwrites memory before it is reused.
pub(super) const DEAD: u8 = 0xDD;
/// Maximum bytes of freed memory that are withheld from reuse.
const WITHHELD_BYTES_MAX: usize = 64 << 20;

/// Returns whether one of the ranges overlaps the given bytes; an empty range counts as one byte.
pub(super) fn overlaps(runs: &BTreeMap<u64, usize>, (from, bytes): (u64, usize)) -> bool {
    let end = from + bytes.max(1) as u64;
    runs.range(..end).next_back().is_some_and(|(&start, &len)| start + len as u64 > from)
}

impl Emulated {
    /// Returns the GPU whose memory has a single range that contains all of these bytes.
    pub(super) fn owner((address, bytes): (u64, usize)) -> Option<u64> {
        let owners = locked(&OWNERS);
        let (&first, &(len, card)) = owners.range(..=address).next_back()?;
        (address - first + bytes.max(1) as u64 <= len as u64).then_some(card)
    }

    pub(super) fn check_owner(&self, what: &str, (address, bytes): (u64, usize)) -> Result<()> {
        if Emulated::owner((address, bytes)) == Some(self.card) {
            return Ok(());
        }
        if overlaps(&locked(&GRAVES).runs, (address, bytes)) {
            self.fault(&format!("{what}: the memory has been freed"));
        }
        Err(Error::internal(format!("{what}: the address is not in the memory of {}", self.name)))
    }

    /// Allocates GPU memory or pinned memory.
    pub(super) fn take(&self, bytes: usize) -> Result<u64> {
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
    pub(super) fn give_back(&self, how: &str, address: u64) {
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
    pub(super) fn check_unused(&self, how: &str, run: (u64, usize)) {
        let bytes = run.1;
        if let Some(work) = self.queued_over(run) {
            self.fault(&format!("memory of {bytes} bytes is {how} while `{work}` that has not run yet uses it"));
        }
        let is_expected = overlaps(&locked(&self.expected), run);
        if is_expected {
            self.fault(&format!("memory of {bytes} bytes is {how} while it has an unfetched result"));
        }
    }

    /// Releases withheld memory.
    fn release_withheld(&self, graves: &mut FreedMemory, address: u64) {
        let bytes = graves.runs.remove(&address).unwrap_or(0);
        graves.bytes -= bytes;
        // SAFETY: the library allocated the memory, which had no owner since it was freed.
        unsafe { (self.free)(address as *mut c_void, bytes) };
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
