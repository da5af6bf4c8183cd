//! Measures a GPU's constants of the cost model: cost per row, per byte and per kernel launch, and latency and bandwidth of its
//! link to the host.
//!
//! As for a host ([`super::calibrate`]), the serving kernels pool random rows of one table that exceeds all caches, first narrow
//! rows, then wide rows, in batches of launches as in a pass. The cost of a launch is the time that additional launches add to a
//! batch; the link is measured by small and large copies from pinned memory. The fastest of several rounds counts.

use std::time::Instant;

use super::calibrate::{BAG_IDS, ROUNDS, WIDTHS, bandwidth_and_row, random_ids, rounded};
use super::topology::{Gpu, Topology};
use crate::RowFormat;
use sterling_core::error::{Error, Result};
use sterling_cuda::Device;
use sterling_cuda::link::fastest_upload;
use sterling_cuda::ops::bags::{IdBags, SumsTo, TableRows, pool};

/// Smallest table to measure with.
const TABLE_BYTES_MIN: usize = 1 << 18;
/// Bytes of the table per id that one launch looks up.
const BYTES_PER_ID: usize = 1 << 10;
/// Warm-up rounds: a list of launches is recorded as a CUDA graph when it recurs.
const ROUNDS_BEFORE: usize = 3;
/// Number of additional launches in a batch, first for launches of many ids, then for launches of one id.
const MORE: [usize; 2] = [4, 256];
/// Bytes of a small copy from the host.
const SMALL_BYTES: usize = 64;

/// Measured constants of a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuConstants {
    /// Value for [`Gpu::bandwidth_gb_s`].
    pub bandwidth_gb_s: f64,
    /// Value for [`Gpu::row_ns`].
    pub row_ns: f64,
    /// Value for [`Gpu::call_us`].
    pub call_us: f64,
    /// Value for [`Gpu::link_gb_s`].
    pub link_gb_s: f64,
    /// Value for [`Gpu::link_us`].
    pub link_us: f64,
}

impl GpuConstants {
    /// Copies the constants into a GPU.
    pub fn apply(&self, gpu: &mut Gpu) {
        gpu.bandwidth_gb_s = rounded(self.bandwidth_gb_s).max(0.001);
        gpu.row_ns = rounded(self.row_ns);
        gpu.call_us = rounded(self.call_us);
        gpu.link_gb_s = rounded(self.link_gb_s).max(0.001);
        gpu.link_us = rounded(self.link_us);
    }
}

/// Copies the constants of measured GPUs to the GPUs of a topology, in order; further GPUs get the last GPU's constants.
///
/// # Errors
/// `Invalid` if the topology has no GPU.
pub fn apply(measured: &[GpuConstants], topology: &mut Topology) -> Result<()> {
    if topology.gpus.is_empty() && !measured.is_empty() {
        return Err(Error::invalid("the topology has no [[gpus]] entry for the measured GPU"));
    }
    for (n, gpu) in topology.gpus.iter_mut().enumerate() {
        measured.get(n).or(measured.last()).into_iter().for_each(|constants| constants.apply(gpu));
    }
    Ok(())
}

/// Measures a GPU with a table of about `table_bytes`, at most a quarter of its free memory. The table should far exceed the
/// GPU's caches.
///
/// # Errors
/// `Invalid` for a table that is too small; `Overloaded` if memory allocation fails; `Unavailable` if the GPU does not respond.
pub fn measure(device: &Device, table_bytes: usize) -> Result<GpuConstants> {
    let start = Instant::now();
    measure_by(device, table_bytes, &|| start.elapsed().as_secs_f64())
}

/// Measures with a clock that returns seconds.
fn measure_by(device: &Device, table_bytes: usize, clock: &dyn Fn() -> f64) -> Result<GpuConstants> {
    let (free, _) = device.memory()?;
    let table_bytes = table_bytes.min(usize::try_from(free / 4).unwrap_or(usize::MAX));
    if table_bytes < TABLE_BYTES_MIN {
        let name = device.name();
        return Err(Error::invalid(format!(
            "calibration of {name} with a table of {table_bytes} bytes, {free} of its memory are free, expected a table of at least {TABLE_BYTES_MIN}"
        )));
    }
    let rows = TableRows { bytes: device.zeros(table_bytes)?, format: RowFormat::F32, width: WIDTHS[0] };
    let mut lookups = Lookups { rows, lane: device.lane()?, device, clock };
    let launch = lookups.seconds_each(WIDTHS[0], 1, MORE[1])?;
    let ids = table_bytes / BYTES_PER_ID;
    let mut ns_a_row = |width: usize| -> Result<f64> {
        let seconds = lookups.seconds_each(width, ids, MORE[0])?;
        Ok((seconds - launch).max(f64::MIN_POSITIVE) * 1e9 / ids as f64)
    };
    // Each bag's sum is written once and has as many bytes as a row.
    let bytes = WIDTHS.map(|width| (4 * width) as f64 * (1.0 + 1.0 / BAG_IDS as f64));
    let (bandwidth_gb_s, row_ns) = bandwidth_and_row(bytes, [ns_a_row(WIDTHS[0])?, ns_a_row(WIDTHS[1])?]);
    let copied = |bytes: usize| fastest_upload(device, bytes, ROUNDS_BEFORE + ROUNDS, clock);
    let (small, large_bytes) = (copied(SMALL_BYTES)?, table_bytes / 4);
    let more = (copied(large_bytes)? - small).max(f64::MIN_POSITIVE) * 1e9;
    let link_gb_s = (large_bytes - SMALL_BYTES) as f64 / more;
    Ok(GpuConstants { bandwidth_gb_s, row_ns, call_us: launch * 1e6, link_gb_s, link_us: small * 1e6 })
}

/// Lookups in a table on a GPU.
struct Lookups<'a> {
    rows: TableRows,
    device: &'a Device,
    lane: Device,
    clock: &'a dyn Fn() -> f64,
}

impl Lookups<'_> {
    /// Returns the seconds per launch of `ids` random rows of a width: the time that `more` launches add to one launch.
    fn seconds_each(&mut self, width: usize, ids: usize, more: usize) -> Result<f64> {
        self.rows.width = width;
        let offsets: Vec<u32> = (0..ids).step_by(BAG_IDS).chain([ids]).map(|end| end as u32).collect();
        let sums = self.device.room::<f32>((offsets.len() - 1) * width)?;
        let numbers = self.device.copy(&random_ids(ids, self.rows.rows()? as u64, 1))?;
        let offsets = self.device.copy(&offsets)?;
        self.device.settle()?;
        let bags = IdBags { ids: &numbers, offsets: &offsets, weights: None, is_mean: false };
        let fastest = |launches: usize| -> Result<f64> {
            let mut least = f64::INFINITY;
            for round in 0..ROUNDS_BEFORE + ROUNDS {
                self.lane.begin()?;
                for _ in 0..launches {
                    pool(&self.lane, &self.rows, &bags, &SumsTo { data: &sums, stride: width, column: 0 })?;
                }
                let end = self.lane.room::<u8>(1)?.later(1)?;
                let start = (self.clock)();
                end.get()?;
                let took = (self.clock)() - start;
                least = if round < ROUNDS_BEFORE { least } else { least.min(took) };
            }
            Ok(least)
        };
        Ok(((fastest(1 + more)? - fastest(1)?) / more as f64).max(f64::MIN_POSITIVE))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::cell::Cell;
    use std::sync::Arc;

    use super::*;
    use sterling_cuda::modelled::{CardRates, Modelled};

    /// A simulated GPU of known rates, which provides the clock.
    #[test]
    fn measured_constants_match_the_gpu() {
        for rates in [CardRates::H100, CardRates::H200] {
            let card = Arc::new(Modelled::new(rates));
            let seconds = Cell::new(0.0);
            let clock = || {
                seconds.set(seconds.get() + card.take().seconds);
                seconds.get()
            };
            let found = measure_by(&Device::over(card.clone()), 1 << 30, &clock).unwrap();
            let near = |what: &str, found: f64, wanted: f64| {
                assert!((found / wanted - 1.0).abs() < 0.02, "{what}: {found}, expected {wanted}");
            };
            near("bandwidth", found.bandwidth_gb_s, rates.memory / 1e9);
            // The id of each row and the offset of each bag.
            near("row", found.row_ns, (8.0 + 4.0 / BAG_IDS as f64) / rates.memory * 1e9);
            near("call", found.call_us, rates.launch[0] * 1e6);
            near("link", found.link_gb_s, rates.host / 1e9);
            near("way", found.link_us, rates.copy * 1e6);
            let too_small = measure_by(&Device::over(card.clone()), 1 << 10, &clock).unwrap_err().to_string();
            assert!(too_small.contains(rates.name) && too_small.contains("1024 bytes"), "{too_small}");
        }
    }

    #[test]
    fn planned_gpus_get_the_measured_constants_in_order() {
        let card = Device::new(Modelled::new(CardRates::H100));
        let constants = |x: f64| GpuConstants {
            bandwidth_gb_s: x * 1000.0,
            row_ns: x / 1e9,
            call_us: x,
            link_gb_s: 1e-9,
            link_us: x + 0.0001,
        };
        let host = Topology::detect().unwrap();
        let none = apply(&[constants(1.0)], &mut host.clone()).unwrap_err().to_string();
        assert!(none.contains("[[gpus]]"), "{none}");
        apply(&[], &mut host.clone()).unwrap();
        let mut topology = host.with_cards(&[card]).unwrap();
        let gpu = topology.gpus[0].clone();
        assert_eq!((gpu.name.as_str(), gpu.hbm_gib), ("H100", 74.5));
        topology.gpus.extend([1, 2].map(|n| Gpu { name: format!("another {n}"), ..gpu.clone() }));
        let before = topology.clone();
        apply(&[], &mut topology).unwrap();
        assert_eq!(topology, before);
        apply(&[constants(1.0), constants(2.0)], &mut topology).unwrap();
        topology.validate().unwrap();
        let found: Vec<f64> = topology.gpus.iter().map(|gpu| gpu.bandwidth_gb_s).collect();
        assert_eq!(found, [1000.0, 2000.0, 2000.0]);
        assert_eq!((topology.gpus[0].row_ns, topology.gpus[0].link_gb_s, topology.gpus[0].link_us), (0.0, 0.001, 1.0));
        assert_eq!(Topology::parse(&topology.to_toml().unwrap()).unwrap(), topology);
    }
}
