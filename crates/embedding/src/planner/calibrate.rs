//! Measures a host's constants of the cost model: cost per row, per byte and per call, with all cores in use.
//!
//! Every core looks up random rows of one table that exceeds all caches, first narrow rows, then wide rows, through the
//! [`EmbeddingBagCollection`] that also serves. With t the time per row over all cores, `bandwidth = (wide - narrow bytes) /
//! (t_wide - t_narrow)` and `row_ns = t_narrow - narrow / bandwidth`. The cost per call is the time of a lookup of one id in a
//! table that fits a cache. The best of several rounds counts, because disturbances only add time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::topology::Host;
use crate::{
    BagConfig, EmbeddingBagCollection, KeyedJaggedTensor, Lookup, Pooling, RowFormat, Table, TableSpec, Unseen,
};
use sterling_core::error::{Error, Result};
use sterling_core::random::{GAMMA, splitmix64};
use sterling_core::tasks;
use sterling_kernels::buffer::Buffer;

/// Widths of the narrow and the wide rows, in f32.
pub(super) const WIDTHS: [usize; 2] = [16, 512];
/// Number of rounds per measurement; the fastest round counts.
pub(super) const ROUNDS: usize = 5;
pub(super) const BAG_IDS: usize = 32;
/// Approximate bytes of rows that one core reads per round.
const ROUND_BYTES: usize = 64 << 20;
/// Smallest table that exceeds caches enough to measure memory.
const TABLE_BYTES_MIN: usize = 1 << 20;
/// Number of calls per round, for the cost of a call.
const CALLS: usize = 2_000;

/// Measured constants of a host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// Value for [`Host::bandwidth_gb_s`].
    pub bandwidth_gb_s: f64,
    /// Value for [`Host::row_ns`].
    pub row_ns: f64,
    /// Value for [`Host::call_us`].
    pub call_us: f64,
}

impl Constants {
    /// Copies the constants into a host.
    pub fn apply(&self, host: &mut Host) {
        host.bandwidth_gb_s = rounded(self.bandwidth_gb_s).max(0.001);
        host.row_ns = rounded(self.row_ns);
        host.call_us = rounded(self.call_us);
    }
}

/// Measures this machine with `cores` threads and a table of about `table_bytes`, which should far exceed the CPU's caches.
///
/// # Errors
/// `Invalid` for zero cores or a table that is too small; `Overloaded` if memory allocation fails.
pub fn measure(cores: usize, table_bytes: usize) -> Result<Constants> {
    if cores == 0 || table_bytes < TABLE_BYTES_MIN {
        return Err(Error::invalid(format!(
            "calibration with {cores} cores and {table_bytes} bytes, expected at least 1 and {TABLE_BYTES_MIN}"
        )));
    }
    // Nonzero contents give every page its own memory: untouched pages would all map the zero page.
    let numbers: Buffer<u8> = Buffer::filled(table_bytes, |to| {
        to.as_chunks_mut::<4>().0.iter_mut().enumerate().for_each(|(i, b)| *b = (i as f32).to_le_bytes());
    })?;
    let per_row = |width: usize| -> Result<f64> {
        let tables = collection(&numbers, width, table_bytes)?;
        let mut rounds = (0..ROUNDS).map(|round| row_ns(&tables, width, cores, round as u64));
        rounds.try_fold(f64::INFINITY, |least, t| Ok(t?.min(least)))
    };
    let (bandwidth_gb_s, row_ns) =
        bandwidth_and_row(WIDTHS.map(|w| (w * 4) as f64), [per_row(WIDTHS[0])?, per_row(WIDTHS[1])?]);
    let few = collection(&numbers, WIDTHS[0], TABLE_BYTES_MIN / 64)?;
    let call_us = (0..ROUNDS).try_fold(f64::INFINITY, |least, _| Ok::<f64, Error>(call_us(&few)?.min(least)))?;
    Ok(Constants { bandwidth_gb_s, row_ns, call_us })
}

/// Returns bytes per nanosecond, and nanoseconds per row beyond its bytes, from the bytes and nanoseconds of a narrow and a wide
/// row.
pub(super) fn bandwidth_and_row([narrow_bytes, wide_bytes]: [f64; 2], [narrow, wide]: [f64; 2]) -> (f64, f64) {
    // If the wide row took no longer than the narrow one, all of its time is attributed to bandwidth.
    let bandwidth = match wide - narrow {
        more if more > 0.0 => (wide_bytes - narrow_bytes) / more,
        _ => wide_bytes / wide,
    };
    (bandwidth, (narrow - narrow_bytes / bandwidth).max(0.0))
}

/// Rounds to three decimals, the precision of topology files.
pub(super) fn rounded(x: f64) -> f64 {
    (x * 1000.0).round() / 1000.0
}

/// Creates a table with one feature from the first `bytes` of the numbers.
fn collection(numbers: &Buffer<u8>, width: usize, bytes: usize) -> Result<EmbeddingBagCollection> {
    let rows = bytes / (width * 4);
    let spec =
        TableSpec { name: "rows".into(), rows: rows as u64, width, format: RowFormat::F32, unseen: Unseen::Zero };
    let table = Table::host(spec, numbers.slice(0..rows * width * 4)?)?;
    let bag = BagConfig { feature: "ids".into(), table: "rows".into(), pooling: Pooling::Sum };
    EmbeddingBagCollection::new(vec![Arc::new(table)], &[bag])
}

/// Returns the nanoseconds of the slowest of `cores` concurrent threads, divided by the total rows of all threads.
fn row_ns(tables: &EmbeddingBagCollection, width: usize, cores: usize, seed: u64) -> Result<f64> {
    let rows = tables.tables()[0].rows();
    let bags = (ROUND_BYTES / (width * 4 * BAG_IDS)).max(1);
    let lengths = vec![BAG_IDS as i64; bags];
    let batch = |core: usize| {
        let ids = random_ids(bags * BAG_IDS, rows, seed * 1000 + core as u64);
        KeyedJaggedTensor::from_lengths(["ids"], ids, &lengths, None)
    };
    let batches: Vec<KeyedJaggedTensor> = (0..cores).map(batch).collect::<Result<_>>()?;
    let lookup = |batch: &KeyedJaggedTensor| -> Result<Duration> {
        let start = Instant::now();
        std::hint::black_box(tables.lookup(batch, &Lookup::default())?);
        Ok(start.elapsed())
    };
    let times: Vec<Result<Duration>> = std::thread::scope(|scope| {
        let threads: Vec<_> = batches.iter().map(|batch| tasks::PLANNER.start_in(scope, || lookup(batch))).collect();
        threads.into_iter().map(|t| t?.join().expect("a lookup of checked ids does not panic")).collect()
    });
    let longest = times.into_iter().try_fold(Duration::ZERO, |most, t| Ok::<Duration, Error>(most.max(t?)))?;
    Ok(longest.as_secs_f64() * 1e9 / (bags * BAG_IDS * cores) as f64)
}

/// Returns the microseconds of a lookup of one id.
fn call_us(tables: &EmbeddingBagCollection) -> Result<f64> {
    let ids = random_ids(CALLS, tables.tables()[0].rows(), 7);
    let one = |id: &i64| KeyedJaggedTensor::from_lengths(["ids"], vec![*id], &[1], None);
    let batches: Vec<KeyedJaggedTensor> = ids.iter().map(one).collect::<Result<_>>()?;
    let start = Instant::now();
    for batch in &batches {
        std::hint::black_box(tables.lookup(batch, &Lookup::default())?);
    }
    Ok(start.elapsed().as_secs_f64() * 1e6 / CALLS as f64)
}

/// Returns `count` pseudorandom ids below `rows`.
pub(super) fn random_ids(count: usize, rows: u64, seed: u64) -> Vec<i64> {
    let draw = |n: u64| splitmix64(seed.wrapping_add(n).wrapping_mul(GAMMA)) % rows;
    (0..count as u64).map(|n| draw(n) as i64).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn measured_constants_form_a_valid_topology() {
        let constants = measure(2, 4 << 20).unwrap();
        let mut topology = super::super::Topology::detect().unwrap();
        constants.apply(&mut topology.hosts[0]);
        topology.validate().unwrap();
        assert!(measure(0, 4 << 20).is_err() && measure(1, 100).is_err());
    }
}
