//! Arena: one allocation of known size that holds many arrays and is freed as a whole. A dry run without a GPU computes
//! the size.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::driver::{Driver, Launch};
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

/// Alignment of arrays, in bytes.
const ALIGNMENT: usize = 256;

fn aligned(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(ALIGNMENT)
}

/// Allocation of a driver, handed out from its start. A dropped array returns no memory; dropping the last array frees
/// the arena.
#[derive(Debug)]
pub(super) struct Arena {
    inner: Arc<dyn Driver>,
    address: u64,
    bytes: usize,
    used: Mutex<usize>,
}

impl Arena {
    /// Allocates `bytes` bytes.
    ///
    /// # Errors
    /// As [`Driver::alloc`].
    pub(super) fn new(inner: Arc<dyn Driver>, bytes: usize) -> Result<Self> {
        let address = inner.alloc(bytes.max(1))?;
        Ok(Arena { inner, address, bytes, used: Mutex::default() })
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: `alloc` returned the address, and every array in the arena holds a reference to the arena, so none is
        // left.
        unsafe { self.inner.free(self.address) };
    }
}

impl Driver for Arena {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn blocks(&self) -> usize {
        self.inner.blocks()
    }

    fn shared_bytes_max(&self) -> usize {
        self.inner.shared_bytes_max()
    }

    fn memory(&self) -> Result<(u64, u64)> {
        self.inner.memory()
    }

    fn alloc(&self, bytes: usize) -> Result<u64> {
        let mut used = locked(&self.used);
        let end = used.saturating_add(aligned(bytes));
        if end > self.bytes {
            return Err(Error::internal(format!(
                "an arena needs {end} bytes, expected at most the planned {}",
                self.bytes
            )));
        }
        Ok(self.address + std::mem::replace(&mut *used, end) as u64)
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn free(&self, _: u64) {}

    unsafe fn register(&self, bytes: &[u8]) -> Result<u64> {
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe { self.inner.register(bytes) }
    }

    unsafe fn unregister(&self, bytes: &[u8]) {
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe { self.inner.unregister(bytes) }
    }

    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe { self.inner.upload(to, from) }
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe { self.inner.download(from, to) }
    }

    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe { self.inner.copy(to, from, bytes) }
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe { self.inner.clear(address, bytes) }
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe { self.inner.launch(launch) }
    }
}

/// Driver of a dry run, which only sums the bytes that an arena would need: it has no memory, runs no kernels, and
/// reads return 0.
#[derive(Debug, Default)]
pub(super) struct Measure {
    used: AtomicUsize,
}

impl Measure {
    /// Returns the bytes of an arena for all arrays so far.
    pub(super) fn bytes(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }
}

impl Driver for Measure {
    fn name(&self) -> String {
        "nothing".into()
    }

    fn kind(&self) -> &'static str {
        "nothing"
    }

    fn blocks(&self) -> usize {
        1
    }

    fn shared_bytes_max(&self) -> usize {
        usize::MAX
    }

    fn memory(&self) -> Result<(u64, u64)> {
        Ok((0, 0))
    }

    fn alloc(&self, bytes: usize) -> Result<u64> {
        Ok(self.used.fetch_add(aligned(bytes), Ordering::Relaxed) as u64)
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn free(&self, _: u64) {}

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn register(&self, _: &[u8]) -> Result<u64> {
        Ok(0)
    }

    // SAFETY: callers meet the `# Safety` conditions of the trait; nothing is dereferenced here.
    unsafe fn upload(&self, _: u64, _: &[u8]) -> Result<()> {
        Ok(())
    }

    unsafe fn download(&self, _: u64, to: &mut [u8]) -> Result<()> {
        to.fill(0);
        Ok(())
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn copy(&self, _: u64, _: u64, _: usize) -> Result<()> {
        Ok(())
    }

    unsafe fn clear(&self, _: u64, _: usize) -> Result<()> {
        Ok(())
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn launch(&self, _: &Launch<'_>) -> Result<()> {
        Ok(())
    }
}
