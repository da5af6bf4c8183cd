//! Layout of tables, features and ids for the training kernels.

use bytemuck::{Pod, Zeroable};

use crate::memory::{Array, Device};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::update::BLOCK;

/// Maximum width of a table.
pub const WIDTH_MAX: usize = 256;
/// Maximum number of rows in all tables that are trained together.
pub const ROWS_MAX: u64 = (1 << 31) - 1;

/// Number that marks an id without a row.
const NO_ROW: u32 = u32::MAX;
/// Threads per block.
pub(super) const THREADS: usize = 256;
/// Columns per thread.
pub(super) const EACH: usize = 4;

/// Rows and optimizer state of a table: `stride` numbers per row, of which the first `width` are the row and the others
/// the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MasterShape {
    /// Number of rows.
    pub rows: u64,
    /// Numbers per row.
    pub width: usize,
    /// Distance between rows in numbers.
    pub stride: usize,
    /// False if the table is frozen.
    pub learns: bool,
}

/// Feature that reads a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureShape {
    /// Index of the table.
    pub table: usize,
    /// First column of the bags in the pooled output; `None` for a sequence.
    pub column: Option<usize>,
    /// True if the sums of bags are divided by their lengths.
    pub is_mean: bool,
}

/// Tables and features in the order of the kernels: tables in training first, tables of equal width together.
#[derive(Clone, Debug)]
pub struct LearningLayout {
    pub(super) masters: Vec<MasterShape>,
    pub(super) features: Vec<FeatureShape>,
    pooled_width: usize,
    /// Numbers of the tables, in this order.
    pub(super) table_order: Vec<usize>,
    /// First row of each ordered table in training, counted over all these tables, then the total number of their rows.
    pub(super) first_rows: Vec<u32>,
    /// Numbers of the features, in the order of their tables.
    feature_order: Vec<usize>,
    pub(super) launches: Vec<RowLaunch>,
}

/// Range of rows that one launch updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowLaunch {
    pub(super) kind: RowKind,
    pub(super) first_row: u32,
    pub(super) end_row: u32,
}

/// Compile-time and launch parameters of a row update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RowKind {
    pub(super) is_wide: bool,
    pub(super) lanes: u32,
    pub(super) is_whole: bool,
}

/// Ids of a feature, resolved to rows.
#[derive(Clone, Debug)]
pub struct FeatureRows<'a> {
    /// Row of each id; negative for an id without a row.
    pub rows: &'a [i64],
    /// Offsets of the bags in `rows`, not decreasing; the first offset is subtracted from all. Ignored for a sequence.
    pub offsets: &'a [usize],
    /// Weights of the ids; `None` if all are 1, as for a sequence.
    pub weights: Option<&'a [f32]>,
}

/// Ids of a batch in device memory.
#[derive(Debug)]
pub struct LearningBatch {
    pub(super) rows: Array<u32>,
    pub(super) weights: Option<Array<f32>>,
    pub(super) offsets: Array<u32>,
    pub(super) features: Array<FeatureArgs>,
    /// Number of features, slots and ids of tables in training, which come first.
    pub(super) learning_features: usize,
    pub(super) learning_slots: usize,
    pub(super) learning_ids: usize,
    /// Maximum number of slots of one feature.
    pub(super) slots_max: usize,
    /// Offsets at which the pooled values and each sequence start in the values, and the total number of values.
    pub(super) starts: Vec<usize>,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct FeatureArgs {
    values: u64,
    first_slot: u32,
    table: u32,
    stride: u32,
    is_mean: u32,
}

impl MasterShape {
    /// Returns the launch parameters of the table's row update; `is_aligned` if all gradients start at a multiple of
    /// four numbers.
    fn kind(&self, is_aligned: bool) -> RowKind {
        let mut lanes = 32;
        while lanes > BLOCK / EACH && lanes / 2 * EACH >= self.width {
            lanes /= 2;
        }
        let is_whole = is_aligned && self.width.is_multiple_of(EACH) && self.stride.is_multiple_of(EACH);
        RowKind { is_wide: self.width > 32 * EACH, lanes: lanes as u32, is_whole }
    }

    /// # Errors
    /// `Unsupported` for a table wider than [`WIDTH_MAX`].
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
    /// Orders tables and features for the kernels; `pooled_width` is the width of the pooled output.
    ///
    /// # Errors
    /// `Unsupported` for a table wider than [`WIDTH_MAX`], or if the tables in training have more than [`ROWS_MAX`]
    /// rows together.
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

    /// Returns the number of tables in training, which come first in order.
    pub(super) fn learning(&self) -> usize {
        self.first_rows.len() - 1
    }

    /// Returns the number of rows of all tables in training.
    pub(super) fn rows(&self) -> u32 {
        self.first_rows[self.learning()]
    }

    /// Copies the ids of a batch of `examples` examples to the device: `ids` has one element per feature.
    ///
    /// # Errors
    /// `Internal` if `ids` do not match the layout's features; `Unsupported` for 2^31 ids and bags or more;
    /// `Overloaded` if the device does not have enough memory.
    pub fn copy(&self, device: &Device, examples: usize, ids: &[FeatureRows<'_>]) -> Result<LearningBatch> {
        let starts = self.starts(examples, ids)?;
        let count: usize = ids.iter().map(|ids| ids.rows.len()).sum();
        let bags = examples.saturating_mul(self.features.iter().filter(|feature| feature.column.is_some()).count());
        if count.saturating_add(bags) >= 1 << 31 {
            return Err(Error::unsupported(format!(
                "{count} ids in {bags} bags of a batch on a GPU, expected fewer than 2^31 of both"
            )));
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

    /// Returns the index in `starts` of the values of a sequence feature.
    fn sequence(&self, feature: usize) -> usize {
        1 + self.features[..feature].iter().filter(|f| f.column.is_none()).count()
    }

    /// Checks the ids. Returns the offsets at which the pooled values and each sequence start, and the total number of
    /// values.
    fn starts(&self, examples: usize, ids: &[FeatureRows<'_>]) -> Result<Vec<usize>> {
        let invalid = |what: String| Err(Error::internal(format!("batch of training: {what}")));
        if ids.len() != self.features.len() {
            return invalid(format!("got {} features, expected {}", ids.len(), self.features.len()));
        }
        let mut starts = vec![0, (examples * self.pooled_width).next_multiple_of(EACH)];
        for (shape, ids) in self.features.iter().zip(ids) {
            let rows = self.masters[shape.table].rows;
            if let Some(row) = ids.rows.iter().find(|&&row| row >= 0 && row as u64 >= rows) {
                return invalid(format!("row {row} is outside of a table of {rows} rows"));
            }
            if ids.weights.is_some_and(|weights| weights.len() != ids.rows.len()) {
                return invalid(format!("the number of weights differs from {} ids", ids.rows.len()));
            }
            let Some(end) = starts.last().copied().filter(|_| shape.column.is_none()) else {
                let spans = |first: usize, last: usize| last - first == ids.rows.len();
                let is_whole = ids.offsets.len() == examples + 1 && ids.offsets.is_sorted();
                if !is_whole || !spans(ids.offsets[0], ids.offsets[examples]) {
                    return invalid(format!(
                        "{} offsets do not fit {} ids in {examples} bags",
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
}

impl LearningBatch {
    /// Returns the number of values in outputs and gradients: pooled values, then the values of each sequence.
    pub fn values(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// Returns the offsets at which the pooled values and each sequence start in the values.
    pub fn starts(&self) -> &[usize] {
        &self.starts[..self.starts.len() - 1]
    }
}
