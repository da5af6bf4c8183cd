//! Embedding tables in training: pooled lookups, and the backward pass fused with the optimizer.
//!
//! The kernels compute the same bits of rows and state as [`sterling_kernels::cpu::update`]. A step sorts the
//! occurrences of a batch by row with a radix sort, and finds the first occurrence of each distinct row by prefix sums.
//! A group of threads then updates each row, and adds the row's gradients in the order of the batch. For rows with more
//! than [`RUN`] occurrences, other warps first sum groups of [`RUN`] occurrences. The number of launches does not
//! depend on the number of tables.

mod layout;
mod masters;
mod sort;

use bytemuck::{Pod, Zeroable};

use super::{Shape, address_of, launch, need, parts};
use crate::driver::Demand;
use crate::memory::{Array, Device};
use layout::{EACH, RowLaunch, THREADS};
use sort::{Heads, Pairs};
use sterling_core::error::Result;
use sterling_core::limits::COMPONENT_MAX;
use sterling_kernels::cpu::update::RUN;

pub use layout::{FeatureRows, FeatureShape, LearningBatch, LearningLayout, MasterShape, ROWS_MAX, WIDTH_MAX};
pub use masters::Master;

/// Bit that marks a row whose update was rejected.
const REJECTED: u32 = 1 << 31;
/// Occurrences per element of the array of partial sums: see `kernels/learn.cu`.
const SUM_PLACE: usize = RUN / 2;

/// Distinct rows of a batch, read after their update.
#[derive(Debug)]
pub struct Touched {
    rows: Array<u32>,
    count: Array<u32>,
}

/// Distinct rows of a batch in one table, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TouchedRows {
    /// Updated rows.
    pub rows: Vec<u32>,
    /// Rows left unchanged because the updated row or state would not have been finite.
    pub rejected: Vec<u32>,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SortedArgs {
    keys: u64,
    values: u64,
    slot_of: u64,
    weights: u64,
    slots: u64,
    gradients: u64,
    starts: u64,
    row_count: u64,
    runs: u64,
    run_stride: u32,
    unused: u32,
}

/// Pools bags and reads sequences into `values`.
///
/// # Errors
/// `Internal` for arrays that are too short, or if the launch fails; `Overloaded` if the device does not have enough
/// memory.
pub fn look_up(
    device: &Device,
    layout: &LearningLayout,
    masters: &[Master<'_>],
    batch: &LearningBatch,
    values: &Array<f32>,
) -> Result<()> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct LookUpArgs {
        features: u64,
        masters: u64,
        rows: u64,
        weights: u64,
        offsets: u64,
        values: u64,
    }
    need("values", values, batch.values())?;
    let masters = layout.masters(device, masters)?;
    let arguments = LookUpArgs {
        features: batch.features.address(),
        masters: masters.address(),
        rows: batch.rows.address(),
        weights: address_of(batch.weights.as_ref()),
        offsets: batch.offsets.address(),
        values: values.address(),
    };
    let features = layout.features.len();
    let width = layout.masters.iter().map(|master| master.width).max().unwrap_or(0);
    let demand = Demand::of_bytes(batch.rows.len() * (4 + 4 * width) + 4 * batch.values());
    // Each block handles at least eight slots.
    let blocks = if batch.slots_max == 0 { 0 } else { parts(device, batch.slots_max, THREADS / 32, features) };
    let grid = [blocks, features, 1];
    launch(device, &Shape { kernel: "look_up", grid, threads: THREADS as u32, shared_bytes: 0, demand }, &arguments)
}

/// Updates the rows of a batch by the gradients of the values.
///
/// # Errors
/// As [`look_up`].
pub fn update(
    device: &Device,
    layout: &LearningLayout,
    masters: &[Master<'_>],
    batch: &LearningBatch,
    gradients: &Array<f32>,
) -> Result<Touched> {
    #[repr(C)]
    #[derive(Clone, Copy, Pod, Zeroable)]
    struct UpdateArgs {
        of: SortedArgs,
        masters: u64,
        touched: u64,
        master_count: u32,
        first_row: u32,
        end_row: u32,
        lanes: u32,
        is_whole: u32,
        component_max: f32,
    }
    need("gradients", gradients, batch.values())?;
    let count = batch.learning_ids;
    let (touched, masters) = (device.room(count)?, layout.masters(device, masters)?);
    let pairs = Pairs::new(device, layout, &masters, batch)?;
    let heads = Heads::new(device, &pairs, layout.rows())?;
    let learning = || layout.table_order[..layout.learning()].iter().map(|&table| layout.masters[table]);
    let run_stride = learning().map(|master| master.width.next_multiple_of(EACH)).max().unwrap_or(0);
    // Partial sums exist only if a row has more than RUN occurrences.
    let places = if count > RUN { count / SUM_PLACE + 1 } else { 0 };
    let runs: Array<f32> = device.room(places * run_stride)?;
    let arguments = UpdateArgs {
        of: SortedArgs {
            keys: pairs.keys.address(),
            values: pairs.values.address(),
            slot_of: address_of(pairs.slot_of.as_ref()),
            weights: address_of(batch.weights.as_ref()),
            slots: pairs.slots.address(),
            gradients: gradients.address(),
            starts: heads.starts.address(),
            row_count: heads.total.address(),
            runs: runs.address(),
            run_stride: run_stride as u32,
            unused: 0,
        },
        masters: masters.address(),
        touched: touched.address(),
        master_count: layout.learning() as u32,
        first_row: 0,
        end_row: layout.rows(),
        lanes: 32,
        is_whole: 0,
        component_max: COMPONENT_MAX,
    };
    let run = |kernel, blocks, demand, arguments: &UpdateArgs| {
        let grid = [blocks, 1, 1];
        launch(device, &Shape { kernel, grid, threads: THREADS as u32, shared_bytes: 0, demand }, arguments)
    };
    run("sum_runs", places.div_ceil(THREADS / 32), Demand::of_bytes(4 * places * run_stride), &arguments)?;
    for RowLaunch { kind, first_row, end_row } in layout.launches.iter().copied().filter(|_| count > 0) {
        let rows = (end_row - first_row) as usize;
        let numbers = learning().map(|master| 2 * master.stride + master.width).max().unwrap_or(0);
        let arguments =
            UpdateArgs { first_row, end_row, lanes: kind.lanes, is_whole: u32::from(kind.is_whole), ..arguments };
        let kernel = if kind.is_wide { "update_wide" } else { "update_narrow" };
        let blocks = parts(device, count.min(rows), THREADS / kind.lanes as usize, 1);
        run(kernel, blocks, Demand::of_bytes(count * (8 + 4 * numbers)), &arguments)?;
    }
    Ok(Touched { rows: touched, count: heads.total })
}

impl Touched {
    /// Returns the rows of each table, by table number, after all earlier work.
    ///
    /// # Errors
    /// As [`Array::read`].
    pub fn read(&self, layout: &LearningLayout) -> Result<Vec<TouchedRows>> {
        let count = self.count.read(1)?.first().map_or(0, |&count| count as usize);
        let rows = self.rows.read(count)?;
        let mut of_tables = vec![TouchedRows::default(); layout.masters.len()];
        let mut rest = rows.as_slice();
        for (bounds, &table) in layout.first_rows.windows(2).zip(&layout.table_order) {
            let (here, behind) = rest.split_at(rest.partition_point(|row| row & !REJECTED < bounds[1]));
            for row in here {
                let touched = &mut of_tables[table];
                let to = if row & REJECTED > 0 { &mut touched.rejected } else { &mut touched.rows };
                to.push((row & !REJECTED) - bounds[0]);
            }
            rest = behind;
        }
        Ok(of_tables)
    }
}
