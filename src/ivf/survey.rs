//! What must be known of all rows before an index of them is built, found in one pass over them.

use half::f16;
use rayon::prelude::*;

use super::options::Rescore;
use super::view::{EXPECTED, unfit};
use crate::error::{Error, Result};
use crate::limits;
use crate::rows::RowStore;
use crate::tensor::Matrix;

/// How far rows of one length may differ from it, as a share.
const LENGTH_TOLERANCE: f32 = 1e-3;

/// Rows that can be searched, and what they are like.
#[derive(Clone, Debug)]
pub struct RowSurvey {
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// The length of all rows, where they have one up to a thousandth.
    pub(super) length: Option<f32>,
    /// The first row that half precision does not hold, and its largest number: half precision ends at 65,504, and below its
    /// smallest normal number, 2^-14, it keeps few digits or none. A row all of whose numbers are that small would lose its order.
    pub(super) beyond_half: Option<(usize, f32)>,
}

impl RowSurvey {
    /// Looks at all rows.
    ///
    /// # Errors
    /// `Invalid` for more of them, or wider ones, than an index holds, and with the first number that is not finite or too large;
    /// as [`RowStore::read`].
    pub fn of(rows: &RowStore<'_>) -> Result<Self> {
        let (count, cols) = (rows.rows(), rows.cols());
        if cols > limits::DIMENSION_MAX || count > limits::ITEMS_MAX {
            return Err(Error::invalid(format!(
                "index: {count} rows of {cols} numbers, expected at most {} of {}",
                limits::ITEMS_MAX,
                limits::DIMENSION_MAX
            )));
        }
        let mut survey = RowSurvey { rows: count, cols, length: None, beyond_half: None };
        rows.each(|first, chunk| survey.add(first, chunk))?;
        Ok(survey)
    }

    fn add(&mut self, first: usize, chunk: Matrix<'_>) -> Result<()> {
        let unfit = |row: usize| unfit(chunk.row(row)).map(|at| (row, at));
        if let Some((row, at)) = (0..chunk.rows()).into_par_iter().find_map_first(unfit) {
            return Err(Error::invalid(format!(
                "index: item {}: number {} of its vector is {:e}, expected {EXPECTED}",
                first + row + 1,
                at + 1,
                chunk.row(row)[at]
            )));
        }
        if first == 0 && chunk.rows() > 0 {
            self.length = Some(length(chunk.row(0))).filter(|length| *length > 0.0);
        }
        self.length = self.length.filter(|length| are_of_length(chunk, *length));
        if self.beyond_half.is_none() {
            let leaves = (0..chunk.rows()).into_par_iter().find_first(|row| leaves_half(most(chunk.row(*row))));
            self.beyond_half = leaves.map(|row| (first + row, most(chunk.row(row))));
        }
        Ok(())
    }

    /// The rows that hold these vectors: f32 instead of f16 where one leaves its range.
    pub(super) fn fitting(&self, rescore: Rescore) -> Rescore {
        if rescore == Rescore::F16 && self.beyond_half.is_some() { Rescore::F32 } else { rescore }
    }

    /// The same, where others than those asked for with a warning.
    pub(super) fn fitted(&self, rescore: Rescore) -> Rescore {
        let fitting = self.fitting(rescore);
        if let Some((row, most)) = self.beyond_half.filter(|_| fitting != rescore) {
            let item = row + 1;
            tracing::warn!(
                "index.rescore: f32 instead of f16, which does not hold item {item}, whose largest number is {most:e}"
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

fn leaves_half(most: f32) -> bool {
    most != 0.0 && !(f16::MIN_POSITIVE.to_f32()..=f16::MAX.to_f32()).contains(&most)
}

fn are_of_length(rows: Matrix<'_>, wanted: f32) -> bool {
    (0..rows.rows()).into_par_iter().all(|row| (length(rows.row(row)) - wanted).abs() <= wanted * LENGTH_TOLERANCE)
}

/// The length of all rows, where they have one up to a thousandth.
pub(super) fn common_length(rows: Matrix<'_>) -> Option<f32> {
    Some(length(rows.row(0))).filter(|length| *length > 0.0 && are_of_length(rows, *length))
}
