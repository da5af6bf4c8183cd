//! Worker stream: records calls on the host and submits them together to a CUDA stream, when a result is waited for or
//! at [`Driver::flush`].
//!
//! A worker stream has separate GPU memory, in which arrays are adjacent, and pinned host memory. All uploads are one
//! copy and all clears are one operation, before the launches; results are copied out afterwards. Requests that differ
//! only in their numbers cause the same launches at the same addresses. When such a sequence occurs for the second
//! time, it is recorded as a CUDA graph, which one call replays.
//!
//! Two worker streams alternate: while one computes, the host records and uploads the next group of requests on the other.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, MutexGuard};

use bytemuck::{Pod, Zeroable};

use super::driver::{Demand, Driver, Launch, PendingResult, Streams, Unfetched, Work};
use super::lane_bytes::LaneBytes;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

/// Alignment of arrays, in bytes.
const ALIGNMENT: usize = 256;
/// Maximum number of recordings, and of remembered sequences that occurred once.
const RECORDINGS_MAX: usize = 32;
const SEEN_MAX: usize = 256;
/// Minimum size of a buffer, in bytes.
const ROOM_MIN: usize = 1 << 16;
/// Number of batches after which a buffer shrinks, if no batch among them used half of the buffer.
const SHRINK_AFTER: usize = 256;

/// Maximum number of results that one launch copies, and the size in bytes from which a separate copy is as fast.
const TOGETHER_MAX: usize = 16;
const TOGETHER_BYTES_MAX: usize = 1 << 18;
const TOGETHER_THREADS: usize = 256;

/// One result in the arguments of the kernel that copies several results.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ResultAt {
    from: u64,
    to: u64,
    bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ResultsArgs {
    results: [ResultAt; TOGETHER_MAX],
}

/// Combines consecutive copies of results into one launch, since each separate copy costs a few microseconds.
fn merge_downloads(work: Vec<Work>) -> Vec<Work> {
    let of = |work: &Work| match *work {
        Work::Download { from, to, bytes } if bytes <= TOGETHER_BYTES_MAX => {
            Some(ResultAt { from, to, bytes: bytes as u64 })
        }
        _ => None,
    };
    let mut list = Vec::with_capacity(work.len());
    for run in work.chunk_by(|before, next| of(before).is_some() && of(next).is_some()) {
        for together in run.chunks(TOGETHER_MAX) {
            let found: Vec<ResultAt> = together.iter().filter_map(of).collect();
            if found.len() < 2 {
                list.extend_from_slice(together);
                continue;
            }
            let mut arguments = ResultsArgs::zeroed();
            arguments.results[..found.len()].copy_from_slice(&found);
            let most = found.iter().map(|result| result.bytes as usize).max().unwrap_or(0);
            let bytes = found.iter().map(|result| result.bytes).sum();
            list.push(Work::of(&Launch {
                kernel: "send_results",
                grid: [most.div_ceil(4 * TOGETHER_THREADS).max(1) as u32, found.len() as u32, 1],
                threads: TOGETHER_THREADS as u32,
                shared_bytes: 0,
                arguments: bytemuck::bytes_of(&arguments),
                demand: Demand { bytes, host: bytes, ..Demand::default() },
            }));
        }
    }
    list
}

/// Rounds the size of an array to steps of an eighth of a power of two, so that small changes in size do not move later arrays.
fn rounded(bytes: usize) -> usize {
    let step = (bytes.next_power_of_two() / 8).max(ALIGNMENT);
    bytes.max(1).next_multiple_of(step)
}

/// Buffer whose memory is handed out from the start.
#[derive(Debug, Default)]
struct Run {
    address: u64,
    bytes: usize,
    used: usize,
    /// Number of bytes submitted to the GPU.
    sent: usize,
    /// Bytes requested since the buffer was emptied.
    wanted: usize,
    /// Maximum bytes requested by any recent batch.
    most: usize,
    stretches: usize,
}

impl Run {
    /// Returns the address of `bytes` bytes, if there is room.
    fn take(&mut self, bytes: usize) -> Option<u64> {
        self.wanted += bytes;
        let place = self.address + self.used as u64;
        let fits = self.used + bytes <= self.bytes;
        if fits {
            self.used += bytes;
        }
        fits.then_some(place)
    }

    /// Returns the range handed out since the last submission.
    fn unsent(&mut self) -> Option<(u64, usize)> {
        let (from, bytes) = (self.address + self.sent as u64, self.used - self.sent);
        self.sent = self.used;
        (bytes > 0).then_some((from, bytes))
    }
}

/// Sequence of work that one call replays.
#[derive(Debug)]
struct Recording {
    hash: u64,
    work: Vec<Work>,
    handle: u64,
}

#[derive(Debug, Default)]
struct State {
    /// Uploaded arrays; `staging` is pinned memory of the same size and layout.
    inputs: Run,
    staging: Run,
    /// Zeroed arrays.
    zeros: Run,
    rooms: Run,
    /// Pinned memory for results.
    results: Run,
    /// Allocations that did not fit a buffer: GPU memory with sizes, and pinned memory.
    beyond: Vec<(u64, usize)>,
    beyond_pinned: Vec<u64>,
    /// Number of arrays that are still referenced.
    live: usize,
    work: Vec<Work>,
    is_under_way: bool,
    /// Reason why results of the current batch failed.
    failure: Option<String>,
    recordings: VecDeque<Recording>,
    seen: VecDeque<u64>,
}

/// Driver that records calls for a worker stream.
#[derive(Debug)]
pub(super) struct Lane {
    inner: Arc<dyn Streams>,
    stream: u64,
    blocks: usize,
    /// Memory that all worker streams of the GPU occupy.
    bytes: Arc<LaneBytes>,
    /// Shared with each unfetched result.
    unfetched: Arc<()>,
    state: Mutex<State>,
}

impl Lane {
    /// Creates a worker stream of a GPU.
    ///
    /// # Errors
    /// `Unavailable` if the GPU no longer responds.
    pub(super) fn new(inner: Arc<dyn Streams>, bytes: Arc<LaneBytes>) -> Result<Self> {
        let (stream, blocks) = (inner.stream()?, inner.blocks());
        Ok(Lane { inner, stream, blocks, bytes, unfetched: Arc::default(), state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Work recorded before a panic is discarded when the next batch begins.
        locked(&self.state)
    }

    fn wait_for(&self, state: &mut State) -> Result<()> {
        if state.is_under_way {
            // After a failure, nothing runs on the stream any more.
            state.is_under_way = false;
            // SAFETY: the stream belongs to `self` and is alive.
            unsafe { self.inner.wait(self.stream) }.inspect_err(|e| state.failure = Some(e.to_string()))?;
        }
        Ok(())
    }

    /// Submits the recorded work; on failure, remembers the reason.
    fn submit(&self, state: &mut State) -> Result<()> {
        self.submit_all(state).inspect_err(|e| state.failure = Some(e.to_string()))
    }

    fn submit_all(&self, state: &mut State) -> Result<()> {
        let mut list = Vec::with_capacity(state.work.len() + 2);
        let first = state.inputs.sent as u64;
        if let Some((to, bytes)) = state.inputs.unsent() {
            list.push(Work::Upload { to, from: state.staging.address + first, bytes });
        }
        list.extend(state.zeros.unsent().map(|(address, bytes)| Work::Clear { address, bytes }));
        list.append(&mut merge_downloads(std::mem::take(&mut state.work)));
        if list.is_empty() {
            return Ok(());
        }
        let mut hasher = DefaultHasher::new();
        list.hash(&mut hasher);
        let hash = hasher.finish();
        state.is_under_way = true;
        let known = state.recordings.iter().position(|r| r.hash == hash && r.work == list);
        if let Some(known) = known.and_then(|n| state.recordings.remove(n)) {
            let handle = known.handle;
            state.recordings.push_front(known);
            // SAFETY: the recording uses memory of this worker stream, which is alive, and pinned host memory.
            return unsafe { self.inner.replay(self.stream, handle) };
        }
        if !state.seen.contains(&hash) {
            state.seen.push_front(hash);
            state.seen.truncate(SEEN_MAX);
            // SAFETY: all addresses belong to arrays of this worker stream, or to arrays whose owners keep them until
            // the results are read; host memory is pinned and stays valid until the stream has been waited for.
            return unsafe { self.inner.submit(self.stream, &list) };
        }
        // SAFETY: the same holds as for `submit`, at every replay.
        let handle = unsafe { self.inner.record(self.stream, &list)? };
        state.recordings.push_front(Recording { hash, work: list, handle });
        if let Some(old) = (state.recordings.len() > RECORDINGS_MAX).then(|| state.recordings.pop_back()).flatten() {
            // SAFETY: the handle came from `record` and is not used afterwards.
            unsafe { self.inner.forget(old.handle) };
        }
        // SAFETY: the recording was just made and uses memory of this worker stream, which is alive.
        unsafe { self.inner.replay(self.stream, handle) }
    }

    /// Allocates GPU memory outside of the buffers for an array that did not fit. The next batch enlarges the buffers.
    fn beyond(&self, state: &mut State, bytes: usize) -> Result<u64> {
        let address = self.take(bytes)?;
        state.beyond.push((address, bytes));
        Ok(address)
    }

    /// Allocates GPU memory, within the limit for worker streams.
    fn take(&self, bytes: usize) -> Result<u64> {
        self.bytes.take(bytes)?;
        let address = self.inner.alloc(bytes).inspect_err(|_| self.bytes.give_back(bytes))?;
        // The stream may use the memory only after the driver's default stream has reached the allocation.
        let settled = self.inner.settle();
        // SAFETY: the memory was just allocated, with this size.
        settled.map(|()| address).inspect_err(|_| unsafe { self.give_back(address, bytes) })
    }

    /// # Safety
    /// `address` came from [`Lane::take`] with this size, and is not used afterwards.
    unsafe fn give_back(&self, address: u64, bytes: usize) {
        // SAFETY: the caller meets the method's `# Safety` conditions.
        unsafe { self.inner.free(address) };
        self.bytes.give_back(bytes);
    }

    fn pinned_beyond(&self, state: &mut State, bytes: usize) -> Result<u64> {
        let address = self.inner.pin(bytes)?;
        state.beyond_pinned.push(address);
        Ok(address)
    }

    /// Returns an address on the GPU for `bytes`, and stages them in pinned memory for the upload that precedes all
    /// launches.
    fn staged(&self, state: &mut State, bytes: &[u8]) -> Result<u64> {
        let room = rounded(bytes.len());
        let (to, from) = match state.inputs.take(room) {
            Some(to) => (to, state.staging.address + (to - state.inputs.address)),
            None => {
                let (to, from) = (self.beyond(state, room)?, self.pinned_beyond(state, room)?);
                state.work.push(Work::Upload { to, from, bytes: bytes.len() });
                (to, from)
            }
        };
        // SAFETY: `from` is pinned memory of at least this size, which is handed out only here and read by no running work.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), from as *mut u8, bytes.len()) };
        Ok(to)
    }

    /// Empties a buffer and enlarges it to the requested size. Shrinks the buffer if for many batches half of it was
    /// enough.
    fn renew(&self, run: &mut Run, is_pinned: bool) -> Result<()> {
        let bytes = rounded(run.wanted).max(ROOM_MIN);
        if run.wanted > run.bytes {
            return self.replace(run, bytes, is_pinned);
        }
        self.inner.recycles(run.address, run.bytes);
        run.most = run.most.max(bytes);
        run.stretches += 1;
        (run.used, run.sent, run.wanted) = (0, 0, 0);
        if run.stretches < SHRINK_AFTER {
            return Ok(());
        }
        let most = std::mem::take(&mut run.most);
        run.stretches = 0;
        if most <= run.bytes / 2 { self.replace(run, most, is_pinned) } else { Ok(()) }
    }

    /// Replaces the memory of a buffer. If allocation fails, the buffer is empty, and the next batch may run without
    /// it.
    fn replace(&self, run: &mut Run, bytes: usize, is_pinned: bool) -> Result<()> {
        self.give_up(run, is_pinned);
        let address = if is_pinned { self.inner.pin(bytes)? } else { self.take(bytes)? };
        *run = Run { address, bytes, ..Run::default() };
        Ok(())
    }

    fn give_up(&self, run: &mut Run, is_pinned: bool) {
        let old = std::mem::take(run);
        if old.bytes > 0 {
            // SAFETY: the address came from `pin` or `take`, and the stream no longer uses it, because it has been waited for.
            unsafe {
                if is_pinned {
                    self.inner.unpin(old.address)
                } else {
                    self.give_back(old.address, old.bytes)
                };
            }
        }
    }

    /// Frees the arrays that did not fit into a buffer.
    fn free_oversized(&self, state: &mut State) {
        for (address, bytes) in state.beyond.drain(..) {
            // SAFETY: the address came from `take`, no array refers to it any more, and the stream is idle.
            unsafe { self.give_back(address, bytes) };
        }
        for address in state.beyond_pinned.drain(..) {
            // SAFETY: the address came from `pin`, no array refers to it any more, and the stream is idle.
            unsafe { self.inner.unpin(address) };
        }
    }
}

impl Driver for Lane {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn blocks(&self) -> usize {
        self.blocks
    }

    fn shared_bytes_max(&self) -> usize {
        self.inner.shared_bytes_max()
    }

    fn memory(&self) -> Result<(u64, u64)> {
        self.inner.memory()
    }

    /// Discards work whose results were never waited for, and empties the buffers, unless an array is still referenced.
    ///
    /// # Errors
    /// `Internal` while a result is unfetched, because new work would overwrite the result; as [`Streams::pin`].
    fn begin(&self) -> Result<()> {
        let mut state = self.state();
        let unfetched = Arc::strong_count(&self.unfetched) - 1;
        if unfetched > 0 {
            return Err(Error::internal(format!(
                "a batch begins on a stream with {unfetched} unfetched results, expected none"
            )));
        }
        if state.live > 0 {
            return Ok(());
        }
        self.wait_for(&mut state)?;
        state.work.clear();
        state.failure = None;
        self.free_oversized(&mut state);
        let State { inputs, staging, zeros, rooms, results, .. } = &mut *state;
        self.renew(inputs, false)?;
        if staging.bytes != inputs.bytes
            && let Err(e) = self.replace(staging, inputs.bytes, true)
        {
            // `inputs` and `staging` are only useful together.
            self.give_up(inputs, false);
            return Err(e);
        }
        self.renew(zeros, false)?;
        self.renew(rooms, false)?;
        self.renew(results, true)
    }

    fn finish(&self) -> Result<()> {
        self.wait_for(&mut self.state())
    }

    fn alloc(&self, bytes: usize) -> Result<u64> {
        let (mut state, room) = (self.state(), rounded(bytes));
        let address = match state.rooms.take(room) {
            Some(address) => address,
            None => self.beyond(&mut state, room)?,
        };
        state.live += 1;
        Ok(address)
    }

    fn alloc_copy(&self, bytes: &[u8]) -> Result<u64> {
        let mut state = self.state();
        let address = self.staged(&mut state, bytes)?;
        state.live += 1;
        Ok(address)
    }

    fn alloc_zeros(&self, bytes: usize) -> Result<u64> {
        let (mut state, room) = (self.state(), rounded(bytes));
        let address = match state.zeros.take(room) {
            Some(address) => address,
            None => {
                let address = self.beyond(&mut state, room)?;
                state.work.push(Work::Clear { address, bytes: room });
                address
            }
        };
        state.live += 1;
        Ok(address)
    }

    // SAFETY: the recorded work preserves the trait's conditions on callers.
    unsafe fn free(&self, _: u64) {
        let mut state = self.state();
        state.live = state.live.saturating_sub(1);
    }

    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        let mut state = self.state();
        let staged = self.staged(&mut state, from)?;
        state.work.push(Work::Copy { to, from: staged, bytes: from.len() });
        Ok(())
    }

    // SAFETY: the recorded work preserves the trait's conditions on callers.
    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        // SAFETY: the caller meets the method's `# Safety` conditions.
        let coming = unsafe { self.send(from, to.len())? };
        self.receive(&coming, to.len(), &mut |bytes| to.copy_from_slice(bytes))
    }

    // SAFETY: the recorded work preserves the trait's conditions on callers.
    unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.state().work.push(Work::Copy { to, from, bytes });
        Ok(())
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        self.state().work.push(Work::Clear { address, bytes });
        Ok(())
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.state().work.push(Work::of(launch));
        Ok(())
    }

    // SAFETY: the recorded work preserves the trait's conditions on callers.
    unsafe fn send(&self, from: u64, bytes: usize) -> Result<PendingResult> {
        let (mut state, room) = (self.state(), rounded(bytes));
        let to = match state.results.take(room) {
            Some(to) => to,
            None => self.pinned_beyond(&mut state, room)?,
        };
        state.work.push(Work::Download { from, to, bytes });
        Ok(PendingResult::To(Unfetched::new(to, bytes, self.inner.clone(), self.unfetched.clone())))
    }

    fn flush(&self) -> Result<()> {
        self.submit(&mut self.state())
    }

    fn receive(&self, coming: &PendingResult, bytes: usize, take: &mut dyn FnMut(&[u8])) -> Result<()> {
        let PendingResult::To(unfetched) = coming else {
            return Err(Error::internal("the result belongs to another stream"));
        };
        let mut state = self.state();
        self.submit(&mut state)?;
        self.wait_for(&mut state)?;
        if let Some(failure) = &state.failure {
            return Err(Error::unavailable(failure.clone()));
        }
        // SAFETY: the address is pinned memory of at least this size, which `send` reserved for this result. The memory
        // stays valid until the next batch begins, which requires that the result is dropped; the copy is complete.
        take(unsafe { std::slice::from_raw_parts(unfetched.address() as *const u8, bytes) });
        Ok(())
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let mut state = std::mem::take(&mut *self.state());
        // Errors are ignored: a lost GPU has nothing to free.
        let _ = self.wait_for(&mut state);
        self.free_oversized(&mut state);
        let State { inputs, staging, zeros, rooms, results, .. } = &mut state;
        for (run, is_pinned) in [(staging, true), (inputs, false), (zeros, false), (rooms, false), (results, true)] {
            self.give_up(run, is_pinned);
        }
        // SAFETY: the handles came from the driver's own calls, and nothing refers to them: arrays and results would
        // keep `self` alive.
        unsafe {
            state.recordings.iter().for_each(|recording| self.inner.forget(recording.handle));
            self.inner.close(self.stream);
        }
    }
}
