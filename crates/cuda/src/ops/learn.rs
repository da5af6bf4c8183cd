//! Embedding tables in training: pooled lookups, and the backward pass fused with the optimizer.
//!
//! The bits of rows and state are those of [`sterling_kernels::cpu::update`]. A step sorts the occurrences of a batch by row with
//! a radix sort, finds the first occurrence of each distinct row by prefix sums, and updates each row by a group of threads, which
//! adds its gradients in the order of the batch. Rows with more than [`RUN`] occurrences add sums of runs, which other warps
//! compute before. The number of launches does not depend on the number of tables.

use bytemuck::{Pod, Zeroable};

use super::{Shape, address_of, launch, need, parts};
use crate::driver::Demand;
use crate::memory::{Array, Device};
use sterling_core::error::{Error, Result};
use sterling_core::limits::COMPONENT_MAX;
use sterling_kernels::cpu::update::{BLOCK, Decay, RUN, RuleKind, Step};

/// Maximum width of a table.
pub const WIDTH_MAX: usize = 256;
/// Maximum number of rows of all tables that learn together.
pub const ROWS_MAX: u64 = (1 << 31) - 1;

/// Marks an id without a row.
const NO_ROW: u32 = u32::MAX;
/// Marks the number of a row whose update was rejected.
const REJECTED: u32 = 1 << 31;
const THREADS: usize = 256;
/// Columns of a thread.
const EACH: usize = 4;
/// Pairs that a block sorts, and its shared memory: counts per warp and digit, and a number per warp.
const TILE: usize = 2048;
const TILE_WARPS: usize = 8;
const DIGIT_BITS: u32 = 8;
const SORT_BYTES: usize = 4 * (TILE_WARPS * (1 << DIGIT_BITS) + TILE_WARPS);
/// Occurrences per place in the sums of runs: see `kernels/learn.cu`.
const SUM_PLACE: usize = RUN / 2;

/// Rows and state of a table: stretches of `stride` numbers, of which the first `width` are the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MasterShape {
    /// Number of rows.
    pub rows: u64,
    /// Numbers per row.
    pub width: usize,
    /// Distance between rows.
    pub stride: usize,
    /// False for a frozen table.
    pub learns: bool,
}

/// Feature that reads a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureShape {
    /// Number of the table.
    pub table: usize,
    /// First column of the bags in the pooled output; `None` for a sequence.
    pub column: Option<usize>,
    /// True if the sums of bags are divided by their lengths.
    pub is_mean: bool,
}

/// Tables and features in the order of the kernels: tables that learn first, equal widths together.
#[derive(Clone, Debug)]
pub struct LearningLayout {
    masters: Vec<MasterShape>,
    features: Vec<FeatureShape>,
    pooled_width: usize,
    /// Tables by number.
    table_order: Vec<usize>,
    /// Number of the first row of each ordered table that learns, and the number of all rows of these.
    first_rows: Vec<u32>,
    /// Features by number, by their tables.
    feature_order: Vec<usize>,
    launches: Vec<RowLaunch>,
}

/// Rows that one launch updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RowLaunch {
    kind: RowKind,
    first_row: u32,
    end_row: u32,
}

/// Compile-time and launch parameters of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RowKind {
    is_wide: bool,
    lanes: u32,
    is_whole: bool,
}

/// Ids of a feature, resolved to rows.
#[derive(Clone, Debug)]
pub struct FeatureRows<'a> {
    /// Row of each id; negative without one.
    pub rows: &'a [i64],
    /// Offsets of the bags in `rows`, not decreasing from the first one on, which is subtracted; ignored for a sequence.
    pub offsets: &'a [usize],
    /// Weights of the ids; `None` means 1, as for a sequence.
    pub weights: Option<&'a [f32]>,
}

/// Ids of a batch on a device.
#[derive(Debug)]
pub struct LearningBatch {
    rows: Array<u32>,
    weights: Option<Array<f32>>,
    offsets: Array<u32>,
    features: Array<FeatureArgs>,
    /// Features, slots and ids of tables that learn, which come first.
    learning_features: usize,
    learning_slots: usize,
    learning_ids: usize,
    /// Maximum number of slots of a feature.
    slots_max: usize,
    /// Start of the pooled values and of each sequence among the values, and their number.
    starts: Vec<usize>,
}

/// Rows and state of a table on the device, and the settings of the step, `None` for a frozen table.
#[derive(Clone, Copy, Debug)]
pub struct Master<'a> {
    /// `[rows, stride]`
    pub stretches: &'a Array<f32>,
    /// Settings of this step.
    pub step: Option<Step>,
}

/// Distinct rows of a batch after their update.
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
    /// Rows that were left unchanged because row or state would not have been finite.
    pub rejected: Vec<u32>,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct FeatureArgs {
    values: u64,
    first_slot: u32,
    table: u32,
    stride: u32,
    is_mean: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct MasterArgs {
    stretches: u64,
    first_row: u32,
    width: u32,
    stride: u32,
    rule: u32,
    decay: u32,
    rate: f32,
    epsilon: f32,
    beta1: f32,
    beta2: f32,
    lambda: f32,
    max_norm: f32,
    clip: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SlotAt {
    values: u64,
    factor: f32,
    unused: u32,
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

impl MasterShape {
    /// Parameters of the update of its rows; `is_aligned` if all its gradients are at multiples of four numbers.
    fn kind(&self, is_aligned: bool) -> RowKind {
        let mut lanes = 32;
        while lanes > BLOCK / EACH && lanes / 2 * EACH >= self.width {
            lanes /= 2;
        }
        let is_whole = is_aligned && self.width.is_multiple_of(EACH) && self.stride.is_multiple_of(EACH);
        RowKind { is_wide: self.width > 32 * EACH, lanes: lanes as u32, is_whole }
    }

    /// # Errors
    /// `Unsupported` for a width beyond [`WIDTH_MAX`].
    pub fn check(&self) -> Result<()> {
        if self.width > WIDTH_MAX {
            return Err(Error::unsupported(format!(
                "width {} of a table in training on a GPU, expected at most {WIDTH_MAX}",
                self.width
            )));
        }
        Ok(())
    }
}

impl LearningLayout {
    /// Orders tables and features; `pooled_width` is the width of the pooled output.
    ///
    /// # Errors
    /// `Unsupported` for a table wider than [`WIDTH_MAX`], or if the tables that learn have more than [`ROWS_MAX`] rows.
    pub fn new(masters: &[MasterShape], features: &[FeatureShape], pooled_width: usize) -> Result<Self> {
        masters.iter().try_for_each(MasterShape::check)?;
        let is_aligned = |table: usize| {
            let mut columns = features.iter().filter(|f| f.table == table).filter_map(|f| f.column);
            columns.all(|column| column.is_multiple_of(EACH) && pooled_width.is_multiple_of(EACH))
        };
        let kind = |table: usize| masters[table].kind(is_aligned(table));
        let mut table_order: Vec<usize> = (0..masters.len()).collect();
        table_order.sort_by_key(|&table| (!masters[table].learns, kind(table)));
        let place = |table: usize| table_order.iter().position(|&t| t == table).unwrap_or(usize::MAX);
        let mut feature_order: Vec<usize> = (0..features.len()).collect();
        feature_order.sort_by_key(|&feature| place(features[feature].table));
        let (mut first_rows, mut launches, mut rows) = (vec![0u32], Vec::<RowLaunch>::new(), 0u64);
        for &table in table_order.iter().filter(|&&table| masters[table].learns) {
            let first_row = rows as u32;
            rows += masters[table].rows;
            if rows > ROWS_MAX {
                let all: u64 = masters.iter().filter(|m| m.learns).map(|m| m.rows).sum();
                return Err(Error::unsupported(format!(
                    "{all} rows of tables in training on a GPU, expected at most {ROWS_MAX}"
                )));
            }
            first_rows.push(rows as u32);
            match launches.last_mut().filter(|last| last.kind == kind(table)) {
                Some(last) => last.end_row = rows as u32,
                None => launches.push(RowLaunch { kind: kind(table), first_row, end_row: rows as u32 }),
            }
        }
        let (masters, features) = (masters.to_vec(), features.to_vec());
        Ok(LearningLayout { masters, features, pooled_width, table_order, first_rows, feature_order, launches })
    }

    /// Number of tables that learn, which are the first in order.
    fn learning(&self) -> usize {
        self.first_rows.len() - 1
    }

    /// Number of rows of all tables that learn.
    fn rows(&self) -> u32 {
        self.first_rows[self.learning()]
    }

    /// Copies the ids of a batch of `examples` examples to the device: `ids` has those of each feature.
    ///
    /// # Errors
    /// `Internal` for other features than those of the layout; `Unsupported` for 2^31 ids or more; `Overloaded` if the device has
    /// not enough memory.
    pub fn copy(&self, device: &Device, examples: usize, ids: &[FeatureRows<'_>]) -> Result<LearningBatch> {
        let starts = self.starts(examples, ids)?;
        let count: usize = ids.iter().map(|ids| ids.rows.len()).sum();
        if count.max(starts.len()) >= 1 << 31 {
            return Err(Error::unsupported(format!("{count} ids in a batch on a GPU, expected fewer than 2^31")));
        }
        let has_weights = ids.iter().zip(&self.features).any(|(ids, f)| f.column.is_some() && ids.weights.is_some());
        let mut rows = Vec::with_capacity(count);
        let mut weights = Vec::with_capacity(if has_weights { count } else { 0 });
        let (mut offsets, mut features) = (Vec::new(), Vec::with_capacity(self.features.len() + 1));
        let (mut learning_features, mut learning_slots, mut learning_ids, mut slots_max) = (0, 0, 0, 0);
        for &number in &self.feature_order {
            let (shape, ids) = (&self.features[number], &ids[number]);
            let (first_slot, first_id) = (offsets.len(), rows.len());
            rows.extend(ids.rows.iter().map(|&row| u32::try_from(row).unwrap_or(NO_ROW)));
            let table = &self.masters[shape.table];
            let (values, stride) = match shape.column {
                Some(column) => {
                    let first = ids.offsets.first().copied().unwrap_or(0);
                    let before = ids.offsets.iter().take(examples).map(|offset| (first_id + offset - first) as u32);
                    offsets.extend(before);
                    (column, self.pooled_width)
                }
                None => {
                    offsets.extend(first_id as u32..rows.len() as u32);
                    (starts[self.sequence(number)], table.width)
                }
            };
            if has_weights {
                match ids.weights.filter(|_| shape.column.is_some()) {
                    Some(of) => weights.extend_from_slice(of),
                    None => weights.resize(rows.len(), 1.0),
                }
            }
            features.push(FeatureArgs {
                values: values as u64,
                first_slot: first_slot as u32,
                table: self.table_order.iter().position(|&t| t == shape.table).unwrap_or(0) as u32,
                stride: stride as u32,
                is_mean: u32::from(shape.is_mean),
            });
            slots_max = slots_max.max(offsets.len() - first_slot);
            if table.learns {
                (learning_features, learning_slots, learning_ids) = (features.len(), offsets.len(), rows.len());
            }
        }
        features.push(FeatureArgs { first_slot: offsets.len() as u32, ..FeatureArgs::zeroed() });
        offsets.push(rows.len() as u32);
        Ok(LearningBatch {
            rows: device.copy(&rows)?,
            weights: has_weights.then(|| device.copy(&weights)).transpose()?,
            offsets: device.copy(&offsets)?,
            features: device.copy(&features)?,
            learning_features,
            learning_slots,
            learning_ids,
            slots_max,
            starts,
        })
    }

    /// Returns the index of a sequence's start among those of the values.
    fn sequence(&self, feature: usize) -> usize {
        1 + self.features[..feature].iter().filter(|f| f.column.is_none()).count()
    }

    /// Returns the starts of the pooled values and of each sequence, and the end, after checking the ids.
    fn starts(&self, examples: usize, ids: &[FeatureRows<'_>]) -> Result<Vec<usize>> {
        let invalid = |what: String| Err(Error::internal(format!("a batch in training: {what}")));
        if ids.len() != self.features.len() {
            return invalid(format!("{} features, expected {}", ids.len(), self.features.len()));
        }
        let mut starts = vec![0, (examples * self.pooled_width).next_multiple_of(EACH)];
        for (shape, ids) in self.features.iter().zip(ids) {
            let rows = self.masters[shape.table].rows;
            if let Some(row) = ids.rows.iter().find(|&&row| row >= 0 && row as u64 >= rows) {
                return invalid(format!("row {row} of a table of {rows}"));
            }
            if ids.weights.is_some_and(|weights| weights.len() != ids.rows.len()) {
                return invalid(format!("other weights than {} ids", ids.rows.len()));
            }
            let Some(end) = starts.last().copied().filter(|_| shape.column.is_none()) else {
                let spans = |first: usize, last: usize| last - first == ids.rows.len();
                let is_whole = ids.offsets.len() == examples + 1 && ids.offsets.is_sorted();
                if !is_whole || !spans(ids.offsets[0], ids.offsets[examples]) {
                    return invalid(format!(
                        "{} offsets of {} ids in {examples} bags",
                        ids.offsets.len(),
                        ids.rows.len()
                    ));
                }
                continue;
            };
            starts.push((end + ids.rows.len() * self.masters[shape.table].width).next_multiple_of(EACH));
        }
        Ok(starts)
    }

    fn masters(&self, device: &Device, masters: &[Master<'_>]) -> Result<Array<MasterArgs>> {
        if masters.len() != self.masters.len() {
            return Err(Error::internal(format!(
                "{} tables in training, expected {}",
                masters.len(),
                self.masters.len()
            )));
        }
        let arguments = self.table_order.iter().enumerate().map(|(place, &table)| {
            let (shape, master) = (&self.masters[table], &masters[table]);
            need("a table in training", master.stretches, shape.rows as usize * shape.stride)?;
            let mut arguments = MasterArgs {
                stretches: master.stretches.address(),
                first_row: self.first_rows[place.min(self.learning())],
                width: shape.width as u32,
                stride: shape.stride as u32,
                ..MasterArgs::zeroed()
            };
            if shape.learns {
                let step = master.step.ok_or_else(|| Error::internal("a table in training without a rule"))?;
                if shape.width + step.kind.state_width(shape.width) > shape.stride {
                    return Err(Error::internal("a table in training without room for the state"));
                }
                arguments.set(&step);
            }
            Ok(arguments)
        });
        device.copy(&arguments.collect::<Result<Vec<_>>>()?)
    }
}

impl MasterArgs {
    fn set(&mut self, step: &Step) {
        self.rule = match step.kind {
            RuleKind::Sgd => 0,
            RuleKind::Adagrad => 1,
            RuleKind::RowwiseAdagrad => 2,
            RuleKind::Adam => 3,
            RuleKind::RowwiseAdam => 4,
        };
        (self.decay, self.lambda) = match step.decay {
            Decay::None => (0, 0.0),
            Decay::L2(lambda) => (1, lambda),
            Decay::Decoupled(lambda) => (2, lambda),
        };
        (self.rate, self.epsilon, self.beta1, self.beta2) = (step.rate, step.epsilon, step.beta1, step.beta2);
        (self.max_norm, self.clip) = (step.max_norm.unwrap_or(0.0), step.clip.unwrap_or(0.0));
    }
}

impl LearningBatch {
    /// Number of values of outputs and gradients: the pooled ones, then those of each sequence.
    pub fn values(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// Starts of the pooled values and of each sequence.
    pub fn starts(&self) -> &[usize] {
        &self.starts[..self.starts.len() - 1]
    }
}

/// Pools bags and reads sequences into `values`.
///
/// # Errors
/// `Internal` for arrays that are too short, or if the launch fails; `Overloaded` if the device has not enough memory.
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
    // Each block has at least eight slots.
    let blocks = if batch.slots_max == 0 { 0 } else { parts(device, batch.slots_max, THREADS / 32, features) };
    let grid = [blocks, features, 1];
    launch(device, &Shape { kernel: "look_up", grid, threads: THREADS as u32, shared_bytes: 0, demand }, &arguments)
}

/// Updates the rows of a batch by the gradients of its values.
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
    // There are runs only if a row has more than RUN occurrences.
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

/// Occurrences of a batch, sorted by row.
struct Pairs {
    keys: Array<u32>,
    values: Array<u32>,
    slot_of: Option<Array<u32>>,
    slots: Array<SlotAt>,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SortArgs {
    keys: u64,
    values: u64,
    keys_out: u64,
    values_out: u64,
    counts: u64,
    totals: u64,
    count: u32,
    tiles: u32,
    shift: u32,
    bits: u32,
}

impl Pairs {
    fn new(
        device: &Device,
        layout: &LearningLayout,
        masters: &Array<MasterArgs>,
        batch: &LearningBatch,
    ) -> Result<Self> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct PairArgs {
            features: u64,
            masters: u64,
            rows: u64,
            offsets: u64,
            keys: u64,
            values: u64,
            slot_of: u64,
            slots: u64,
            feature_count: u32,
            slot_count: u32,
            count: u32,
            no_key: u32,
        }
        let (count, slots) = (batch.learning_ids, batch.learning_slots);
        let mut pairs = Pairs {
            keys: device.room(count)?,
            values: device.room(count)?,
            slot_of: batch.weights.as_ref().map(|_| device.room(count)).transpose()?,
            slots: device.room(slots)?,
        };
        let arguments = PairArgs {
            features: batch.features.address(),
            masters: masters.address(),
            rows: batch.rows.address(),
            offsets: batch.offsets.address(),
            keys: pairs.keys.address(),
            values: pairs.values.address(),
            slot_of: address_of(pairs.slot_of.as_ref()),
            slots: pairs.slots.address(),
            feature_count: batch.learning_features as u32,
            slot_count: slots as u32,
            count: count as u32,
            no_key: layout.rows(),
        };
        let run = |kernel, things: usize, bytes| {
            let blocks = if things == 0 { 0 } else { parts(device, things, THREADS, 1) };
            let (grid, demand) = ([blocks, 1, 1], Demand::of_bytes(things * bytes));
            launch(device, &Shape { kernel, grid, threads: THREADS as u32, shared_bytes: 0, demand }, &arguments)
        };
        run("describe_slots", slots, 20)?;
        run("make_pairs", count, 12)?;
        pairs.sort(device, u32::BITS - layout.rows().leading_zeros())?;
        Ok(pairs)
    }

    /// Sorts by the lowest `bits` bits of the keys, digit by digit, each pass stable.
    fn sort(&mut self, device: &Device, bits: u32) -> Result<()> {
        let (count, tiles, passes) = (self.keys.len(), self.keys.len().div_ceil(TILE), bits.div_ceil(DIGIT_BITS));
        // Digits of equal length.
        let digit_bits = bits.div_ceil(passes.max(1));
        let digits = 1usize << digit_bits;
        let (mut keys_out, mut values_out): (Array<u32>, Array<u32>) = (device.room(count)?, device.room(count)?);
        let (counts, totals): (Array<u32>, Array<u32>) = (device.room(digits * tiles)?, device.room(digits)?);
        for pass in 0..passes {
            let arguments = SortArgs {
                keys: self.keys.address(),
                values: self.values.address(),
                keys_out: keys_out.address(),
                values_out: values_out.address(),
                counts: counts.address(),
                totals: totals.address(),
                count: count as u32,
                tiles: tiles as u32,
                shift: pass * digit_bits,
                bits: digit_bits,
            };
            let counters = 4 * digits * tiles;
            run_tiles(device, "count_tile", tiles, Demand::of_bytes(4 * count + counters), &arguments)?;
            sum_tiles(device, if tiles == 0 { 0 } else { digits }, tiles, &arguments)?;
            run_tiles(device, "sort_tile", tiles, Demand::of_bytes(16 * count + counters), &arguments)?;
            std::mem::swap(&mut self.keys, &mut keys_out);
            std::mem::swap(&mut self.values, &mut values_out);
        }
        Ok(())
    }
}

/// Launches a kernel with one block per tile.
fn run_tiles<A: Pod>(device: &Device, kernel: &'static str, tiles: usize, demand: Demand, arguments: &A) -> Result<()> {
    let (grid, threads) = ([tiles, 1, 1], THREADS as u32);
    launch(device, &Shape { kernel, grid, threads, shared_bytes: SORT_BYTES, demand }, arguments)
}

/// Turns the counts of tiles into prefix sums per digit, and the totals.
fn sum_tiles(device: &Device, digits: usize, tiles: usize, arguments: &SortArgs) -> Result<()> {
    let (grid, demand) = ([digits, 1, 1], Demand::of_bytes(8 * digits * tiles));
    let shared_bytes = 4 * TILE_WARPS;
    launch(device, &Shape { kernel: "sum_tiles", grid, threads: THREADS as u32, shared_bytes, demand }, arguments)
}

/// First occurrences of the distinct rows, and their number.
struct Heads {
    starts: Array<u32>,
    total: Array<u32>,
}

impl Heads {
    fn new(device: &Device, pairs: &Pairs, no_key: u32) -> Result<Self> {
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        struct HeadArgs {
            keys: u64,
            counts: u64,
            total: u64,
            starts: u64,
            count: u32,
            no_key: u32,
        }
        let count = pairs.keys.len();
        let tiles = count.div_ceil(TILE);
        let heads = Heads { starts: device.room(count + 1)?, total: device.zeros(1)? };
        let counts: Array<u32> = device.room(tiles)?;
        let arguments = HeadArgs {
            keys: pairs.keys.address(),
            counts: counts.address(),
            total: heads.total.address(),
            starts: heads.starts.address(),
            count: count as u32,
            no_key,
        };
        run_tiles(device, "count_heads", tiles, Demand::of_bytes(4 * count), &arguments)?;
        let of_tiles = SortArgs {
            counts: counts.address(),
            totals: heads.total.address(),
            tiles: tiles as u32,
            ..SortArgs::zeroed()
        };
        sum_tiles(device, tiles.min(1), tiles, &of_tiles)?;
        run_tiles(device, "place_heads", tiles, Demand::of_bytes(8 * count), &arguments)?;
        Ok(heads)
    }
}

impl Touched {
    /// Reads the rows of each table, by number, after all earlier work.
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
