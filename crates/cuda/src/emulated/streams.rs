//! Streams of the emulated GPU: queued work, which runs in a random order, and recordings.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;

use super::memory::{DEAD, overlaps};
use super::{Counts, Emulated};
use crate::driver::{Driver, Launch, Streams, Work};
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

#[derive(Debug, Default)]
pub(super) struct Queues {
    next: u64,
    pub(super) work: BTreeMap<u64, VecDeque<Work>>,
    /// Streams whose work failed, with the first error of each.
    failed: BTreeMap<u64, Error>,
    recordings: BTreeMap<u64, Vec<Work>>,
    pub(super) counts: Counts,
    /// Memory that streams may not use yet, because the driver's default stream was not waited for since the
    /// allocation.
    pub(super) unsettled: BTreeMap<u64, usize>,
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

impl Emulated {
    /// Returns the name of queued work that uses any of these bytes.
    pub(super) fn queued_over(&self, (address, bytes): (u64, usize)) -> Option<&'static str> {
        // After the GPU is lost, queued work does not run.
        if self.is_lost.load(Ordering::Relaxed) {
            return None;
        }
        let (queues, run) = (self.queues(), BTreeMap::from([(address, bytes)]));
        let uses = |work: &&Work| named(work).into_iter().any(|named| overlaps(&run, named));
        queues.work.values().flatten().find(uses).map(called)
    }

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
