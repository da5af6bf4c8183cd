//! Modelled GPU: stores and computes nothing, and estimates the time of work from its bytes, operations and launches at
//! the rates of a data sheet. The estimates are not measurements; they are used if no GPU is available.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use super::driver::{BLOCKS_PER_PROCESSOR, Demand, Driver, Launch, Streams, Work};
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;

/// Assumed rates of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct CardRates {
    /// Name of the GPU.
    pub name: &'static str,
    /// Memory bandwidth of copies, in bytes per second.
    pub copied: f64,
    /// Memory bandwidth of kernels, in bytes per second.
    pub memory: f64,
    /// Bandwidth of the second-level cache, in bytes per second.
    pub cache: f64,
    /// Maximum bandwidth at which one multiprocessor reads, in bytes per second.
    pub of_processor: f64,
    /// Number of multiprocessors.
    pub processors: u64,
    /// Bandwidth to and from the host, in bytes per second.
    pub host: f64,
    /// Multiply-adds per second of each kind: bytes with dp4a; bytes, bf16 and TF32 on tensor cores; single precision.
    pub operations: [f64; 5],
    /// Seconds per launch or memory clear inside a CUDA graph, and outside of a graph.
    pub launch: [f64; 2],
    /// Fixed seconds per copy to or from the host.
    pub copy: f64,
    /// Memory in bytes.
    pub bytes: u64,
}

/// Assumed fractions of the published rates: memory bandwidth of copies and of kernels; scalar units; and tensor cores,
/// which `mma.sync` uses less well than Hopper's own instructions.
const SHARE_OF_COPY: f64 = 0.90;
const SHARE_OF_MEMORY: f64 = 0.80;
const SHARE_OF_LANES: f64 = 0.60;
const SHARE_OF_TENSORS: f64 = 0.40;

impl CardRates {
    /// Rates of a Hopper GPU with 132 multiprocessors and the given memory bandwidth and size.
    const fn hopper(name: &'static str, published: f64, bytes: u64) -> Self {
        // 132 x 64 scalar units at 1.755 GHz with four multiply-adds each; dense tensor rates of the data sheet, which
        // counts two operations per multiply-add.
        let published_rates = [59.3e12, 989.5e12, 494.7e12, 247.4e12, 33.5e12];
        let [dp4a, int8, bf16, tf32, single] = published_rates;
        CardRates {
            name,
            copied: SHARE_OF_COPY * published,
            memory: SHARE_OF_MEMORY * published,
            cache: 5.0e12,
            of_processor: 110e9,
            processors: 132,
            host: 50e9,
            operations: [
                SHARE_OF_LANES * dp4a,
                SHARE_OF_TENSORS * int8,
                SHARE_OF_TENSORS * bf16,
                SHARE_OF_TENSORS * tf32,
                SHARE_OF_LANES * single,
            ],
            launch: [1.3e-6, 2.0e-6],
            copy: 5e-6,
            bytes,
        }
    }

    /// NVIDIA's H100 with 80 GB at 3.35 TB/s.
    pub const H100: CardRates = CardRates::hopper("H100", 3.35e12, 80_000_000_000);
    /// NVIDIA's H200 with 141 GB at 4.8 TB/s.
    pub const H200: CardRates = CardRates::hopper("H200", 4.8e12, 141_000_000_000);

    /// Estimates the seconds of a launch without the launch overhead: the longest time of any resource, if each of the
    /// `blocks` blocks has a multiprocessor or all multiprocessors are busy.
    pub fn seconds(&self, demand: &Demand, blocks: u64) -> f64 {
        let busy = blocks.min(self.processors) as f64;
        let share = busy / self.processors as f64;
        let taken_in = (demand.bytes + demand.again) as f64;
        let moved = (demand.bytes as f64 / self.memory).max(taken_in / self.cache);
        let moved = moved.max(taken_in / (busy * self.of_processor)).max(demand.host as f64 / self.host);
        let Demand { dp4a, tensor_int8, tensor_bf16, tensor_tf32, single, .. } = *demand;
        let computed = [dp4a, tensor_int8, tensor_bf16, tensor_tf32, single].into_iter().zip(self.operations);
        computed.map(|(operations, rate)| operations as f64 / (rate * share)).fold(moved, f64::max)
    }
}

/// Estimated work of a modelled GPU.
#[derive(Clone, Debug, Default)]
pub struct Spent {
    /// Estimated seconds of all work.
    pub seconds: f64,
    /// Number of launches, clears and copies within GPU memory.
    pub launches: u64,
    /// Number of copies to and from the host.
    pub copies: u64,
    /// Data and operations of the launches.
    pub demand: Demand,
    /// Estimated work per kernel.
    pub kernels: BTreeMap<&'static str, SpentByKernel>,
}

/// Work of the launches of one kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct SpentByKernel {
    /// Number of launches.
    pub launches: u64,
    /// Data and operations.
    pub demand: Demand,
    /// Seconds, including launch overhead.
    pub seconds: f64,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    used: u64,
    spent: Spent,
    recordings: BTreeMap<u64, Vec<Work>>,
    /// Pinned host memory is really allocated, because worker streams write to it and read from it.
    pinned: BTreeMap<u64, Vec<u8>>,
}

/// GPU that estimates time and computes nothing.
#[derive(Debug)]
pub struct Modelled {
    rates: CardRates,
    state: Mutex<State>,
}

impl Modelled {
    /// Creates a modelled GPU with these rates.
    pub fn new(rates: CardRates) -> Self {
        Modelled { rates, state: Mutex::default() }
    }

    /// Returns the work since the last call, and resets the counters.
    pub fn take(&self) -> Spent {
        std::mem::take(&mut self.state().spent)
    }

    /// Returns the assumed rates.
    pub fn rates(&self) -> &CardRates {
        &self.rates
    }

    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    fn spend(&self, spent: &mut Spent, work: &Work, is_recorded: bool) {
        let launch = self.rates.launch[usize::from(!is_recorded)];
        spent.seconds += match work {
            Work::Upload { bytes, .. } | Work::Download { bytes, .. } => {
                spent.copies += 1;
                self.rates.copy + *bytes as f64 / self.rates.host
            }
            Work::Copy { bytes, .. } => {
                spent.launches += 1;
                launch + 2.0 * *bytes as f64 / self.rates.copied
            }
            Work::Clear { bytes, .. } => {
                spent.launches += 1;
                launch + *bytes as f64 / self.rates.copied
            }
            Work::Launch { kernel, grid, demand, .. } => {
                let seconds = launch + self.rates.seconds(demand, grid.iter().map(|&n| u64::from(n)).product());
                let of_kernel = spent.kernels.entry(kernel).or_default();
                of_kernel.launches += 1;
                of_kernel.demand = of_kernel.demand.and(*demand);
                of_kernel.seconds += seconds;
                spent.launches += 1;
                spent.demand = spent.demand.and(*demand);
                seconds
            }
        };
    }
}

impl Driver for Modelled {
    fn name(&self) -> String {
        self.rates.name.into()
    }

    fn kind(&self) -> &'static str {
        "modelled"
    }

    fn blocks(&self) -> usize {
        self.rates.processors as usize * BLOCKS_PER_PROCESSOR
    }

    /// Returns the value of Hopper GPUs.
    fn shared_bytes_max(&self) -> usize {
        227 << 10
    }

    fn memory(&self) -> Result<(u64, u64)> {
        Ok((self.rates.bytes.saturating_sub(self.state().used), self.rates.bytes))
    }

    fn alloc(&self, bytes: usize) -> Result<u64> {
        let mut state = self.state();
        state.used += bytes as u64;
        state.next += 1 << 40;
        Ok(state.next)
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn free(&self, _: u64) {}

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn register(&self, bytes: &[u8]) -> Result<u64> {
        Ok(bytes.as_ptr() as u64)
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn upload(&self, _: u64, _: &[u8]) -> Result<()> {
        Ok(())
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn download(&self, _: u64, to: &mut [u8]) -> Result<()> {
        to.fill(0);
        Ok(())
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn copy(&self, _: u64, _: u64, _: usize) -> Result<()> {
        Ok(())
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn clear(&self, _: u64, _: usize) -> Result<()> {
        Ok(())
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.spend(&mut self.state().spent, &Work::of(launch), false);
        Ok(())
    }
}

impl Streams for Modelled {
    fn settle(&self) -> Result<()> {
        Ok(())
    }

    fn pin(&self, bytes: usize) -> Result<u64> {
        let mut memory = vec![0u8; bytes.max(1)];
        let address = memory.as_mut_ptr() as u64;
        self.state().pinned.insert(address, memory);
        Ok(address)
    }

    // SAFETY: callers meet the trait's `# Safety` conditions.
    unsafe fn unpin(&self, address: u64) {
        self.state().pinned.remove(&address);
    }

    fn stream(&self) -> Result<u64> {
        Ok(0)
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn close(&self, _: u64) {}

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn submit(&self, _: u64, work: &[Work]) -> Result<()> {
        let mut state = self.state();
        work.iter().for_each(|work| self.spend(&mut state.spent, work, false));
        Ok(())
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn record(&self, _: u64, work: &[Work]) -> Result<u64> {
        let mut state = self.state();
        state.next += 1;
        let recording = state.next;
        state.recordings.insert(recording, work.to_vec());
        Ok(recording)
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn replay(&self, _: u64, recording: u64) -> Result<()> {
        let State { spent, recordings, .. } = &mut *self.state();
        let missing = || Error::internal("the recording was destroyed");
        let work = recordings.get(&recording).ok_or_else(missing)?;
        // One call starts all launches of a recording, and costs as much as a launch.
        spent.seconds += self.rates.launch[1];
        work.iter().for_each(|work| self.spend(spent, work, true));
        Ok(())
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn forget(&self, recording: u64) {
        self.state().recordings.remove(&recording);
    }

    // SAFETY: callers meet the trait's `# Safety` conditions; nothing is dereferenced here.
    unsafe fn wait(&self, _: u64) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_the_time_of_its_slowest_dependency() {
        let rates = CardRates::H200;
        let near = |found: f64, wanted: f64| assert!((found / wanted - 1.0).abs() < 1e-9, "{found}, expected {wanted}");
        let bytes = Demand::of_bytes(384_000_000);
        near(rates.seconds(&bytes, 10_000), 384e6 / (0.8 * 4.8e12));
        // A single block reads no faster than its multiprocessor.
        near(rates.seconds(&bytes, 1), 384e6 / 110e9);
        let computed = Demand { tensor_bf16: 494_700_000_000, ..bytes };
        near(rates.seconds(&computed, 132), 1e-3 / 0.4);
        near(rates.seconds(&computed, 66), 2e-3 / 0.4);
        near(rates.seconds(&Demand { again: 616_000_000, ..bytes }, 200), 1e9 / 5e12);
        near(rates.seconds(&Demand { host: 25_000_000_000, ..bytes }, 10_000), 0.5);
        assert_eq!(rates.seconds(&Demand::default(), 1), 0.0);
    }
}
