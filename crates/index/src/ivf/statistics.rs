//! Statistics of all rows that an index build needs, collected by reading each row once.

use half::f16;
use rayon::prelude::*;

use super::first_pass::IndexExtent;
use super::options::Rescore;
use super::view::{EXPECTED, first_invalid};
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_core::tensor::Matrix;
use sterling_storage::rows::RowStore;

/// Relative tolerance for rows of one length.
const LENGTH_TOLERANCE: f32 = 1e-3;

/// Statistics of rows that can be indexed.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowSurvey {
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Lengths of the first, the shortest and the longest row.
    lengths: Option<[f32; 3]>,
    /// First row that half precision cannot represent, with its largest magnitude. Half precision ends at 65,504, and
    /// below its smallest normal number, 2^-14, half precision keeps few digits or none. Rounding would change the rank
    /// of a row that has only such small numbers.
    pub(super) beyond_half: Option<(usize, f32)>,
}

impl RowSurvey {
    /// Reads all rows.
    ///
    /// # Errors
    /// `Invalid` for too many or too wide rows, and for the first number that is not finite or too large; as [`RowStore::read`].
    pub fn of(rows: &RowStore<'_>) -> Result<Self> {
        let mut survey = RowSurvey { rows: rows.rows(), cols: rows.cols(), lengths: None, beyond_half: None };
        survey.check_size()?;
        rows.each(|first, chunk| survey.add(first, chunk))?;
        Ok(survey)
    }

    /// Creates statistics for encoded rows, which were checked before and are arranged unchanged.
    pub(super) fn for_coded_rows(rows: usize, cols: usize) -> Self {
        RowSurvey { rows, cols, lengths: None, beyond_half: None }
    }

    /// Merges the statistics of consecutive parts.
    ///
    /// # Errors
    /// `Invalid` for no parts or parts of unequal width; as [`RowSurvey::of`].
    pub fn joined(parts: impl IntoIterator<Item = RowSurvey>) -> Result<Self> {
        let mut parts = parts.into_iter();
        let mut all = parts.next().ok_or_else(|| Error::invalid("index: no rows, expected at least one"))?;
        for part in parts {
            if part.cols != all.cols {
                let (cols, expected) = (part.cols, all.cols);
                return Err(Error::invalid(format!(
                    "index: rows of {cols} numbers, expected {expected} as in the rows before"
                )));
            }
            all.lengths = match (all.lengths, part.lengths) {
                (Some([first, least, most]), Some([_, low, high])) => Some([first, least.min(low), most.max(high)]),
                (all, part) => all.or(part),
            };
            all.beyond_half = all.beyond_half.or(part.beyond_half.map(|(row, most)| (all.rows + row, most)));
            all.rows += part.rows;
        }
        all.check_size().map(|()| all)
    }

    /// Returns the size of an index of the rows with this rescoring format.
    pub(super) fn extent(&self, rescore: Rescore) -> IndexExtent {
        let (items, dimension) = (self.rows, self.cols);
        IndexExtent { items, dimension, row_bytes: self.fitting(rescore).width() * dimension }
    }

    /// Returns the common length of all rows, if their lengths agree to a thousandth.
    pub fn length(&self) -> Option<f32> {
        let [first, least, most] = self.lengths?;
        (first > 0.0 && is_of_length(least, first) && is_of_length(most, first)).then_some(first)
    }

    fn check_size(&self) -> Result<()> {
        match self.cols > limits::DIMENSION_MAX || self.rows > limits::ITEMS_MAX {
            true => Err(Error::invalid(format!(
                "index: {} rows of {} numbers, expected at most {} rows of at most {} numbers",
                self.rows,
                self.cols,
                limits::ITEMS_MAX,
                limits::DIMENSION_MAX
            ))),
            false => Ok(()),
        }
    }

    fn add(&mut self, first: usize, chunk: Matrix<'_>) -> Result<()> {
        let unfit = |row: usize| first_invalid(chunk.row(row)).map(|at| (row, at));
        if let Some((row, at)) = (0..chunk.rows()).into_par_iter().find_map_first(unfit) {
            return Err(Error::invalid(format!(
                "index: item {}: number {} of its vector is {:e}, expected {EXPECTED}",
                first + row + 1,
                at + 1,
                chunk.row(row)[at]
            )));
        }
        let lengths = (0..chunk.rows()).into_par_iter().map(|row| length(chunk.row(row)));
        let extremes = lengths.map(|length| [length; 2]).reduce_with(|a, b| [a[0].min(b[0]), a[1].max(b[1])]);
        if let Some([low, high]) = extremes {
            let [of_first, least, most] = self.lengths.unwrap_or([length(chunk.row(0)), low, high]);
            self.lengths = Some([of_first, least.min(low), most.max(high)]);
        }
        if self.beyond_half.is_none() {
            let leaves = (0..chunk.rows()).into_par_iter().find_first(|row| exceeds_f16(most(chunk.row(*row))));
            self.beyond_half = leaves.map(|row| (first + row, most(chunk.row(row))));
        }
        Ok(())
    }

    /// Returns a format that can represent the rows: f32 instead of f16 if a row exceeds the range of f16.
    pub(super) fn fitting(&self, rescore: Rescore) -> Rescore {
        if rescore == Rescore::F16 && self.beyond_half.is_some() { Rescore::F32 } else { rescore }
    }

    /// Like [`RowSurvey::fitting`], but logs a warning if the format changes.
    pub(super) fn fitted(&self, rescore: Rescore) -> Rescore {
        let fitting = self.fitting(rescore);
        if let Some((row, most)) = self.beyond_half.filter(|_| fitting != rescore) {
            let item = row + 1;
            tracing::warn!(
                "index.rescore: stored as f32 instead of f16, which cannot represent item {item} (largest number {most:e})"
            );
        }
        fitting
    }
}

fn length(row: &[f32]) -> f32 {
    row.iter().map(|x| x * x).sum::<f32>().sqrt()
}

fn most(row: &[f32]) -> f32 {
    row.iter().fold(0f32, |most, x| most.max(x.abs()))
}

fn exceeds_f16(most: f32) -> bool {
    most != 0.0 && !(f16::MIN_POSITIVE.to_f32()..=f16::MAX.to_f32()).contains(&most)
}

fn is_of_length(length: f32, wanted: f32) -> bool {
    (length - wanted).abs() <= wanted * LENGTH_TOLERANCE
}

/// Returns a format that can represent one row: f32 instead of f16 if the row exceeds the range of f16.
pub(super) fn fitting(row: &[f32], rescore: Rescore) -> Rescore {
    if rescore == Rescore::F16 && exceeds_f16(most(row)) { Rescore::F32 } else { rescore }
}

/// Returns the common length of all rows, if their lengths agree to a thousandth.
pub(super) fn common_length(rows: Matrix<'_>) -> Option<f32> {
    let are_of = |wanted: f32| (0..rows.rows()).into_par_iter().all(|row| is_of_length(length(rows.row(row)), wanted));
    Some(length(rows.row(0))).filter(|length| *length > 0.0 && are_of(*length))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn statistics_of_parts_add_up_to_those_of_the_catalogue(
            angles in proptest::collection::vec(0.0f32..6.0, 1..60),
            scales in proptest::collection::vec(prop_oneof![8 => Just(1.0f32), 2 => 0.9985f32..1.0015, 1 => Just(0.0), 1 => Just(1e6)], 60),
            is_plain in any::<bool>(),
            cuts in proptest::collection::btree_set(0usize..60, 0..4),
        ) {
            let scale = |n: usize| if is_plain { 3.0 } else { scales[n] };
            let values: Vec<f32> =
                angles.iter().enumerate().flat_map(|(n, angle)| [angle.sin() * scale(n), angle.cos() * scale(n)]).collect();
            let complete = Matrix::new(&values, 2).unwrap();
            let survey = RowSurvey::of(&complete.into()).unwrap();
            prop_assert_eq!(survey.length(), common_length(complete));
            prop_assert!(!is_plain || survey.length().is_some());
            let mut bounds: Vec<usize> = cuts.into_iter().filter(|cut| *cut > 0 && *cut < angles.len()).collect();
            bounds.insert(0, 0);
            bounds.push(angles.len());
            let part = |w: &[usize]| RowSurvey::of(&Matrix::new(&values[2 * w[0]..2 * w[1]], 2).unwrap().into()).unwrap();
            prop_assert_eq!(RowSurvey::joined(bounds.windows(2).map(part)).unwrap(), survey);
        }
    }

    #[test]
    fn incompatible_parts_are_rejected() {
        let of = |rows: usize, cols| RowSurvey { rows, cols, lengths: None, beyond_half: None };
        let invalid = |parts: &[RowSurvey]| RowSurvey::joined(parts.iter().cloned()).unwrap_err().to_string();
        assert!(invalid(&[]).contains("no rows"));
        assert!(invalid(&[of(1, 2), of(1, 3)]).contains("rows of 3 numbers, expected 2 as in the rows before"));
        assert!(invalid(&[of(limits::ITEMS_MAX, 2), of(1, 2)]).contains("expected at most"));
    }
}
