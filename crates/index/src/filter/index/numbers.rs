//! Buckets of compared columns: exact planes along the axis of a column's values.
//!
//! The values of a column are partitioned into buckets of about equal numbers of items; a value that many items share gets a
//! bucket of its own. Plane `b` of a column holds the items whose value is in buckets `0..=b`. Any range of buckets is then the
//! difference of two planes, and the last plane holds all items with a value. A comparison is a range of buckets that pass
//! entirely, and at most two buckets whose items are tested one by one, so it is exact. (Range-encoded bitmaps: O'Neil
//! and Quass, *Improved query performance with variant indexes*, SIGMOD 1997.)

use crate::columns::{Column, ColumnKind, Comparison, Operator};
use sterling_core::error::{Error, Result};
use sterling_core::units::Slot;
use sterling_kernels::buffer::Buffer;
use sterling_storage::files::{TensorFile, Tensors};

/// Sampled values for the choice of the bucket bounds.
const SAMPLE_MAX: usize = 1 << 20;

/// Buckets of one column during the build.
#[derive(Debug)]
pub(super) struct Buckets {
    pub(super) column: usize,
    /// Smallest value, largest value and number of items per bucket.
    firsts: Vec<f64>,
    lasts: Vec<f64>,
    counts: Vec<u32>,
}

impl Buckets {
    /// Partitions a column into about `buckets` buckets; `None` if the column is not comparable, or if slots have several
    /// values.
    pub(super) fn of(
        number: usize,
        column: &Column,
        items: impl Iterator<Item = Slot> + Clone,
        buckets: u32,
    ) -> Option<Self> {
        let comparable = column.kind() != ColumnKind::Texts && column.is_filterable() && column.is_single();
        if !comparable || buckets == 0 {
            return None;
        }
        let places = items.filter_map(|slot| column.place(slot));
        let step = places.clone().count().div_ceil(SAMPLE_MAX).max(1);
        let mut sample: Vec<f64> = places.clone().step_by(step).collect();
        sample.sort_unstable_by(f64::total_cmp);
        let bounds = bounds(&sample, buckets as usize);
        let (mut firsts, mut lasts) = (vec![f64::INFINITY; bounds.len()], vec![f64::NEG_INFINITY; bounds.len()]);
        let mut counts = vec![0u32; bounds.len()];
        for place in places {
            let bucket = bounds.partition_point(|&b| b < place);
            firsts[bucket] = firsts[bucket].min(place);
            lasts[bucket] = lasts[bucket].max(place);
            counts[bucket] += 1;
        }
        let filled =
            |values: Vec<f64>| values.into_iter().zip(&counts).filter(|(_, n)| **n > 0).map(|(v, _)| v).collect();
        let (firsts, lasts) = (filled(firsts), filled(lasts));
        counts.retain(|&n| n > 0);
        Some(Buckets { column: number, firsts, lasts, counts })
    }

    pub(super) fn len(&self) -> usize {
        self.firsts.len()
    }

    /// Returns the bucket of a value of the column.
    pub(super) fn bucket(&self, place: f64) -> usize {
        self.lasts.partition_point(|&last| last < place)
    }
}

/// Returns the upper bounds of the buckets for sorted values; the last one is infinite.
fn bounds(sorted: &[f64], buckets: usize) -> Vec<f64> {
    let mut bounds = Vec::with_capacity(2 * buckets);
    for n in 1..=buckets {
        let Some(&bound) = (n * sorted.len() / buckets).checked_sub(1).and_then(|at| sorted.get(at)) else { continue };
        if bounds.last() == Some(&bound) {
            // The value spans an entire quantile: end a bucket at the value before it, so that this value gets its own bucket.
            let before = sorted.partition_point(|&v| v < bound).checked_sub(1).map(|at| sorted[at]);
            let place = bounds.len() - 1;
            if let Some(before) = before.filter(|b| place == 0 || bounds[place - 1] < *b) {
                bounds.insert(place, before);
            }
        } else {
            bounds.push(bound);
        }
    }
    bounds.push(f64::INFINITY);
    bounds
}

pub(super) fn encode(all: &[Buckets], file: &mut TensorFile<'_>) -> Result<()> {
    let ends: usize = all.iter().map(Buckets::len).sum();
    file.add_owned("number_columns", &[all.len()], all.iter().map(|b| b.column as u32).collect())?;
    file.add_owned("number_buckets", &[all.len()], all.iter().map(|b| b.len() as u32).collect())?;
    file.add_owned("number_firsts", &[ends], all.iter().flat_map(|b| b.firsts.clone()).collect())?;
    file.add_owned("number_lasts", &[ends], all.iter().flat_map(|b| b.lasts.clone()).collect())?;
    file.add_owned("number_counts", &[ends], all.iter().flat_map(|b| b.counts.clone()).collect())
}

/// Buckets of all columns, read from a file.
#[derive(Clone, Debug)]
pub(in crate::filter) struct Numbers {
    columns: Buffer<u32>,
    /// First bucket of each column, and the total at the end.
    starts: Vec<usize>,
    firsts: Buffer<f64>,
    lasts: Buffer<f64>,
    counts: Buffer<u32>,
}

/// Range of buckets: the items in `plane` but not in `before`, which is `None` for the first bucket. Plane 0 is the
/// first plane of numeric buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::filter) struct Run {
    pub(in crate::filter) plane: usize,
    pub(in crate::filter) before: Option<usize>,
}

/// Result of a comparison by buckets.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::filter) struct Answer {
    /// Buckets whose items all pass.
    pub(in crate::filter) sure: Vec<Run>,
    /// Buckets whose items must be tested one by one.
    pub(in crate::filter) unsure: Vec<Run>,
    /// Estimated number of items that pass.
    pub(in crate::filter) items: f64,
}

impl Numbers {
    pub(super) fn open(tensors: &Tensors) -> Result<Self> {
        let (columns, count) = tensors.get::<u32>("number_columns", 1)?;
        let buckets = tensors.vector::<u32>("number_buckets", count[0])?;
        let mut starts = vec![0usize];
        for &n in buckets.iter() {
            starts.push(starts[starts.len() - 1].saturating_add(n as usize));
        }
        let total = starts[starts.len() - 1];
        let firsts = tensors.vector::<f64>("number_firsts", total)?;
        let lasts = tensors.vector::<f64>("number_lasts", total)?;
        let counts = tensors.vector::<u32>("number_counts", total)?;
        let numbers = Numbers { columns, starts, firsts, lasts, counts };
        let rising = numbers.starts.windows(2).all(|w| {
            let (firsts, lasts) = (&numbers.firsts[w[0]..w[1]], &numbers.lasts[w[0]..w[1]]);
            firsts.iter().zip(lasts).all(|(f, l)| f <= l) && firsts.iter().skip(1).zip(lasts).all(|(f, l)| l < f)
        });
        if !rising || !numbers.columns.is_sorted_by(|a, b| a < b) {
            return Err(Error::corrupt("tensor `number_firsts`: the buckets of a column are out of order"));
        }
        Ok(numbers)
    }

    pub(super) fn planes(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }

    /// Evaluates a comparison on the buckets of a column; `None` for a column without buckets.
    pub(in crate::filter) fn answer(&self, column: usize, comparison: &Comparison) -> Option<Answer> {
        let at = self.columns.binary_search(&u32::try_from(column).ok()?).ok()?;
        let planes = self.starts[at]..self.starts[at + 1];
        let mut answer = Answer::default();
        let mut before: Option<Option<bool>> = None;
        for plane in planes.clone() {
            let holds = comparison.over(self.firsts[plane], self.lasts[plane]);
            let count = f64::from(self.counts[plane]);
            answer.items += match (holds, comparison) {
                (Some(all), _) => count * f64::from(u8::from(all)),
                // Between one item and all items of the bucket have the value: the geometric mean has the smallest expected
                // error.
                (None, Comparison::Float(Operator::Equal, _)) => count.sqrt(),
                (None, Comparison::Float(Operator::NotEqual, _)) => count - count.sqrt(),
                (None, _) => 0.5 * count,
            };
            let runs = match holds {
                Some(true) => &mut answer.sure,
                None => &mut answer.unsure,
                Some(false) => {
                    before = Some(holds);
                    continue;
                }
            };
            match runs.last_mut() {
                Some(run) if before == Some(holds) => run.plane = plane,
                _ => runs.push(Run { plane, before: (plane > planes.start).then(|| plane - 1) }),
            }
            before = Some(holds);
        }
        Some(answer)
    }
}
