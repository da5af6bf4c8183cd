//! A stretch of work that a card does without the host: everything that is asked of a lane is written down, and goes to a stream of
//! its own at once, as late as somebody waits for a result.
//!
//! A lane has its own memory on the card, in which arrays lie side by side, and pinned memory of the host. What is uploaded and
//! what is cleared are one copy and one clearing, before all launches; results are copied out behind them. The same requests with
//! other numbers ask for the same launches over the same addresses: from the second time on such a list of work is a recording
//! (a CUDA graph), and one call starts it.
//!
//! Two lanes work side by side: while one computes, the next group of requests is written down and uploaded on the other.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, MutexGuard};

use bytemuck::{Pod, Zeroable};

use super::driver::{Coming, Demand, Driver, Launch, Streams, Unfetched, Work};
use super::lane_bytes::LaneBytes;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

/// Arrays start at whole lines of this many bytes.
const ALIGNMENT: usize = 256;
/// Lists of work that are kept as recordings, and those that are remembered to have been seen once.
const RECORDINGS_MAX: usize = 32;
const SEEN_MAX: usize = 256;
/// Least bytes of a run of memory.
const ROOM_MIN: usize = 1 << 16;
/// Stretches of work after which a run of memory becomes smaller, if none of them took half of it.
const SHRINK_AFTER: usize = 256;

/// Results that one launch brings to the host, and bytes of a result from which on a copy of its own is as fast.
const TOGETHER_MAX: usize = 16;
const TOGETHER_BYTES_MAX: usize = 1 << 18;
const TOGETHER_THREADS: usize = 256;

/// A result as the kernel that brings several takes it.
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

/// Work in which results that follow each other go to the host by one launch: each copy takes a few microseconds beside its bytes.
fn results_together(work: Vec<Work>) -> Vec<Work> {
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

/// The bytes that an array takes: in steps of an eighth of a power of two, so that arrays which differ a little leave those behind
/// them where they are.
fn rounded(bytes: usize) -> usize {
    let step = (bytes.next_power_of_two() / 8).max(ALIGNMENT);
    bytes.max(1).next_multiple_of(step)
}

/// A run of memory that is given out from its start.
#[derive(Debug, Default)]
struct Run {
    address: u64,
    bytes: usize,
    used: usize,
    /// As far as it went to the card.
    sent: usize,
    /// Bytes that were asked for since it was empty.
    wanted: usize,
    /// Most bytes that any of so many stretches asked for.
    most: usize,
    stretches: usize,
}

impl Run {
    /// A place of so many bytes, where there is room.
    fn take(&mut self, bytes: usize) -> Option<u64> {
        self.wanted += bytes;
        let place = self.address + self.used as u64;
        let fits = self.used + bytes <= self.bytes;
        if fits {
            self.used += bytes;
        }
        fits.then_some(place)
    }

    /// What was taken since it last went to the card.
    fn unsent(&mut self) -> Option<(u64, usize)> {
        let (from, bytes) = (self.address + self.sent as u64, self.used - self.sent);
        self.sent = self.used;
        (bytes > 0).then_some((from, bytes))
    }
}

/// A list of work that can be started by one call.
#[derive(Debug)]
struct Recording {
    hash: u64,
    work: Vec<Work>,
    handle: u64,
}

#[derive(Debug, Default)]
struct State {
    /// Arrays that came from the host, with as much pinned memory in which they wait, each at the same place.
    inputs: Run,
    staging: Run,
    /// Arrays of zeros.
    zeros: Run,
    rooms: Run,
    /// Pinned memory for results.
    results: Run,
    /// What did not fit, with its bytes: on the card, and pinned.
    beyond: Vec<(u64, usize)>,
    beyond_pinned: Vec<u64>,
    /// Arrays that somebody holds.
    live: usize,
    work: Vec<Work>,
    is_under_way: bool,
    /// Why results of this stretch did not come.
    failure: Option<String>,
    recordings: VecDeque<Recording>,
    seen: VecDeque<u64>,
}

/// A driver that writes down what is asked of it.
#[derive(Debug)]
pub(super) struct Lane {
    inner: Arc<dyn Streams>,
    stream: u64,
    blocks: usize,
    /// What all lanes of the card have of its memory.
    bytes: Arc<LaneBytes>,
    /// Shared with each result that is not fetched.
    unfetched: Arc<()>,
    state: Mutex<State>,
}

impl Lane {
    /// A lane of a card.
    ///
    /// # Errors
    /// `Unavailable` where the card does not answer any more.
    pub(super) fn new(inner: Arc<dyn Streams>, bytes: Arc<LaneBytes>) -> Result<Self> {
        let (stream, blocks) = (inner.stream()?, inner.blocks());
        Ok(Lane { inner, stream, blocks, bytes, unfetched: Arc::default(), state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Whoever panicked had written down some work: it is forgotten when the next stretch begins.
        locked(&self.state)
    }

    fn wait_for(&self, state: &mut State) -> Result<()> {
        if state.is_under_way {
            // Of a stream that failed nothing runs any more, either.
            state.is_under_way = false;
            // SAFETY: the stream is the lane's, which lives.
            unsafe { self.inner.wait(self.stream) }.inspect_err(|e| state.failure = Some(e.to_string()))?;
        }
        Ok(())
    }

    /// Sends off what was written down.
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
        list.append(&mut results_together(std::mem::take(&mut state.work)));
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
            // SAFETY: the recording is of work on this lane's memory, which lives; its host memory is pinned.
            return unsafe { self.inner.replay(self.stream, handle) };
        }
        if !state.seen.contains(&hash) {
            state.seen.push_front(hash);
            state.seen.truncate(SEEN_MAX);
            // SAFETY: all addresses are of arrays that were given out by this lane or that their owners hold until the results are
            // read, those of the host are pinned and stay until the lane has waited.
            return unsafe { self.inner.submit(self.stream, &list) };
        }
        // SAFETY: as above.
        let handle = unsafe { self.inner.record(self.stream, &list)? };
        state.recordings.push_front(Recording { hash, work: list, handle });
        if let Some(old) = (state.recordings.len() > RECORDINGS_MAX).then(|| state.recordings.pop_back()).flatten() {
            // SAFETY: the handle came from `record` and is forgotten here.
            unsafe { self.inner.forget(old.handle) };
        }
        // SAFETY: as above.
        unsafe { self.inner.replay(self.stream, handle) }
    }

    /// Memory of the card that is not in any run, for an array that found no room: the next stretch will have it.
    fn beyond(&self, state: &mut State, bytes: usize) -> Result<u64> {
        let address = self.take(bytes)?;
        state.beyond.push((address, bytes));
        Ok(address)
    }

    /// Memory of the card, as far as lanes may have it.
    fn take(&self, bytes: usize) -> Result<u64> {
        self.bytes.take(bytes)?;
        let address = self.inner.alloc(bytes).inspect_err(|_| self.bytes.give_back(bytes))?;
        // The stream may use it once the driver itself has come there.
        let settled = self.inner.settle();
        // SAFETY: it was taken just now.
        settled.map(|()| address).inspect_err(|_| unsafe { self.give_back(address, bytes) })
    }

    /// # Safety
    /// The address came from [`Lane::take`] with so many bytes, and nothing uses it any more.
    unsafe fn give_back(&self, address: u64, bytes: usize) {
        // SAFETY: the caller's condition.
        unsafe { self.inner.free(address) };
        self.bytes.give_back(bytes);
    }

    fn pinned_beyond(&self, state: &mut State, bytes: usize) -> Result<u64> {
        let address = self.inner.pin(bytes)?;
        state.beyond_pinned.push(address);
        Ok(address)
    }

    /// A place of the card and one of pinned memory whose bytes come there before any launch.
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
        // SAFETY: `from` is pinned memory of at least as many bytes that nothing else was given and no work under way reads.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), from as *mut u8, bytes.len()) };
        Ok(to)
    }

    /// Makes a run as large as what was wanted of it, and empties it. One that was twice as large as needed for long becomes smaller.
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

    /// Gives a run other memory in place of what it has. If there is none, it has none, and the next stretch may go without.
    fn replace(&self, run: &mut Run, bytes: usize, is_pinned: bool) -> Result<()> {
        self.give_up(run, is_pinned);
        let address = if is_pinned { self.inner.pin(bytes)? } else { self.take(bytes)? };
        *run = Run { address, bytes, ..Run::default() };
        Ok(())
    }

    fn give_up(&self, run: &mut Run, is_pinned: bool) {
        let old = std::mem::take(run);
        if old.bytes > 0 {
            // SAFETY: the address came from `pin` or `take`, and nothing on the stream uses it: the lane has waited.
            unsafe {
                if is_pinned {
                    self.inner.unpin(old.address)
                } else {
                    self.give_back(old.address, old.bytes)
                };
            }
        }
    }

    /// Gives up the arrays that found no room in a run.
    fn give_up_beyond(&self, state: &mut State) {
        for (address, bytes) in state.beyond.drain(..) {
            // SAFETY: the address came from `take`, no array has it any more, and the stream has come to its end.
            unsafe { self.give_back(address, bytes) };
        }
        for address in state.beyond_pinned.drain(..) {
            // SAFETY: as above, from `pin`.
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

    /// Empties the lane, unless an array of it is held: of work that nobody came to wait for nothing is left.
    ///
    /// # Errors
    /// `Internal` while a result of the lane is not fetched, since what comes next would take its place; as [`Streams::pin`].
    fn begin(&self) -> Result<()> {
        let mut state = self.state();
        let unfetched = Arc::strong_count(&self.unfetched) - 1;
        if unfetched > 0 {
            return Err(Error::internal(format!(
                "a stretch of work begins on a stream with {unfetched} unfetched results"
            )));
        }
        if state.live > 0 {
            return Ok(());
        }
        self.wait_for(&mut state)?;
        state.work.clear();
        state.failure = None;
        self.give_up_beyond(&mut state);
        let State { inputs, staging, zeros, rooms, results, .. } = &mut *state;
        self.renew(inputs, false)?;
        if staging.bytes != inputs.bytes
            && let Err(e) = self.replace(staging, inputs.bytes, true)
        {
            // Neither is there without the other.
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

    // SAFETY: what the trait asks of callers is kept in the work that is written down.
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

    // SAFETY: what the trait asks of callers is kept in the work that is written down.
    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        // SAFETY: the caller's condition.
        let coming = unsafe { self.send(from, to.len())? };
        self.receive(&coming, to.len(), &mut |bytes| to.copy_from_slice(bytes))
    }

    // SAFETY: what the trait asks of callers is kept in the work that is written down.
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

    // SAFETY: what the trait asks of callers is kept in the work that is written down.
    unsafe fn send(&self, from: u64, bytes: usize) -> Result<Coming> {
        let (mut state, room) = (self.state(), rounded(bytes));
        let to = match state.results.take(room) {
            Some(to) => to,
            None => self.pinned_beyond(&mut state, room)?,
        };
        state.work.push(Work::Download { from, to, bytes });
        Ok(Coming::To(Unfetched::new(to, bytes, self.inner.clone(), self.unfetched.clone())))
    }

    fn flush(&self) -> Result<()> {
        self.submit(&mut self.state())
    }

    fn receive(&self, coming: &Coming, bytes: usize, take: &mut dyn FnMut(&[u8])) -> Result<()> {
        let Coming::To(unfetched) = coming else {
            return Err(Error::internal("a result that is not this lane's"));
        };
        let mut state = self.state();
        self.submit(&mut state)?;
        self.wait_for(&mut state)?;
        if let Some(failure) = &state.failure {
            return Err(Error::unavailable(failure.clone()));
        }
        // SAFETY: this is pinned memory of at least as many bytes, which `send` took for this result and which stays until the lane
        // begins again, which it does not before the result is dropped; the copy to it is done.
        take(unsafe { std::slice::from_raw_parts(unfetched.address() as *const u8, bytes) });
        Ok(())
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let mut state = std::mem::take(&mut *self.state());
        // A card that is lost has nothing to give back.
        let _ = self.wait_for(&mut state);
        self.give_up_beyond(&mut state);
        let State { inputs, staging, zeros, rooms, results, .. } = &mut state;
        for (run, is_pinned) in [(staging, true), (inputs, false), (zeros, false), (rooms, false), (results, true)] {
            self.give_up(run, is_pinned);
        }
        // SAFETY: all came from the driver's own calls, and nobody has them any more: arrays and results hold the lane.
        unsafe {
            state.recordings.iter().for_each(|recording| self.inner.forget(recording.handle));
            self.inner.close(self.stream);
        }
    }
}
