//! Comparisons of filters, prepared for one column and evaluated on its slots.

use std::ops::Range;

use super::operator::{Operator, Threshold};
use super::overlay::Predicate;
use super::sparse::bits;
use super::view::{Column, Values};
use sterling_core::error::{Error, Result};
use sterling_core::units::Slot;

/// Comparison prepared for one column.
#[derive(Clone, Debug, PartialEq)]
pub enum Comparison {
    /// Holds if a code of the slot is in one of these ranges of an integer dictionary.
    Codes([Range<u32>; 2]),
    /// Holds if the float of the slot satisfies the comparison.
    Float(Operator, f64),
}

impl Comparison {
    /// Returns true if the comparison holds for all values between two ranks ([`Column::place`]), false if it holds for
    /// none, and `None` if it holds for some.
    pub fn over(&self, first: f64, last: f64) -> Option<bool> {
        let (all, any) = match self {
            Comparison::Codes(ranges) => {
                let inside = |r: &Range<u32>| f64::from(r.start) <= first && last < f64::from(r.end);
                let touches = |r: &Range<u32>| !r.is_empty() && first < f64::from(r.end) && f64::from(r.start) <= last;
                (ranges.iter().any(inside), ranges.iter().any(touches))
            }
            Comparison::Float(operator, n) => {
                let (at_first, at_last) = (operator.holds(first, *n), operator.holds(last, *n));
                match operator {
                    Operator::Equal => (at_first && at_last, first <= *n && *n <= last),
                    Operator::NotEqual => (*n < first || last < *n, at_first || at_last),
                    _ => (at_first && at_last, at_first || at_last),
                }
            }
        };
        if all {
            Some(true)
        } else if any {
            None
        } else {
            Some(false)
        }
    }
}

impl Column {
    /// Returns a comparison that holds if the slot has any value.
    ///
    /// # Errors
    /// `Invalid` if the column is not filterable.
    pub fn presence(&self) -> Result<Comparison> {
        self.check_filterable()?;
        Ok(match &self.values {
            Values::Floats(_) => Comparison::Float(Operator::GreaterEqual, f64::NEG_INFINITY),
            _ => Comparison::Codes([0..self.dictionary_len() as u32, 0..0]),
        })
    }

    /// Prepares a comparison with the number in `text`.
    ///
    /// # Errors
    /// `Invalid` if the column has no numbers or is not filterable, or if the text is not a number.
    pub fn comparison(&self, operator: Operator, text: &str) -> Result<Comparison> {
        let number = self.compared_number(text)?;
        match &self.values {
            Values::Floats(_) => Ok(Comparison::Float(operator, number)),
            Values::Texts { .. } => Err(Error::invalid(format!(
                "column `{0}` holds texts, which cannot be compared: use `{0}:value`",
                self.name()
            ))),
            Values::Integers(values) => {
                let bound = Threshold::of(text);
                let equal = values.partition_point(|&v| bound.is_not_below(v)) as u32;
                let below = values.partition_point(|&v| bound.is_above(v)) as u32;
                let end = values.len() as u32;
                Ok(Comparison::Codes(match operator {
                    Operator::Less => [0..below, 0..0],
                    Operator::LessEqual => [0..equal, 0..0],
                    Operator::Greater => [equal..end, 0..0],
                    Operator::GreaterEqual => [below..end, 0..0],
                    Operator::Equal => [below..equal, 0..0],
                    Operator::NotEqual => [0..below, equal..end],
                }))
            }
        }
    }

    fn compared_number(&self, text: &str) -> Result<f64> {
        self.check_filterable()?;
        let name = self.name();
        text.parse()
            .ok()
            .filter(|n: &f64| n.is_finite())
            .ok_or_else(|| Error::invalid(format!("got `{text}`, expected a number to compare `{name}` with")))
    }

    /// Returns a test for equality with one of `values`, for updated values in an overlay. Unlike [`Column::term`], it
    /// works for values that are not in the dictionary.
    ///
    /// # Errors
    /// As [`Column::term`].
    pub fn term_test(&self, values: &[String]) -> Result<Predicate> {
        match &self.values {
            Values::Integers(_) => {
                values.iter().map(|value| self.integer(value)).collect::<Result<_>>().map(Predicate::Integers)
            }
            _ => Ok(Predicate::Texts(values.to_vec())),
        }
    }

    /// Returns the test of [`Column::comparison`] in the form for updated values in an overlay.
    ///
    /// # Errors
    /// As [`Column::comparison`].
    pub fn comparison_test(&self, operator: Operator, text: &str) -> Result<Predicate> {
        let number = self.compared_number(text)?;
        Ok(match &self.values {
            Values::Floats(_) => Predicate::Number(operator, number),
            _ => Predicate::Threshold(operator, Threshold::of(text)),
        })
    }

    /// Returns true if the comparison holds for any value of the slot.
    pub fn compares(&self, comparison: &Comparison, slot: Slot) -> bool {
        match (comparison, &self.values) {
            (Comparison::Float(operator, number), Values::Floats(values)) => {
                values.get(slot.index()).is_some_and(|v| operator.holds(*v, *number))
            }
            (Comparison::Codes(ranges), _) => self.codes(slot).iter().any(|c| ranges.iter().any(|r| r.contains(c))),
            _ => false,
        }
    }

    /// Evaluates the comparison on 64 slots from `first` on. Only the slots of the bitmap `requested` are evaluated and returned.
    pub(crate) fn holding(&self, comparison: &Comparison, first: Slot, requested: u64) -> u64 {
        let (Comparison::Float(operator, number), Values::Floats(values)) = (comparison, &self.values) else {
            return evaluate_bits(requested, |bit| self.compares(comparison, Slot(first.0 + bit)));
        };
        let values = values.get(first.index()..).unwrap_or_default();
        let n = *number;
        match operator {
            Operator::Less => evaluate_masked(values, requested, |v| v < n),
            Operator::LessEqual => evaluate_masked(values, requested, |v| v <= n),
            Operator::Greater => evaluate_masked(values, requested, |v| v > n),
            Operator::GreaterEqual => evaluate_masked(values, requested, |v| v >= n),
            Operator::Equal => evaluate_masked(values, requested, |v| v == n),
            Operator::NotEqual => evaluate_masked(values, requested, |v| v != n && !v.is_nan()),
        }
    }
}

/// Evaluates `holds` on each set bit of `requested`, and returns the bits for which it is true.
pub(crate) fn evaluate_bits(requested: u64, holds: impl Fn(u32) -> bool) -> u64 {
    bits(requested).fold(0, |holding, bit| holding | u64::from(holds(bit)) << bit)
}

/// Evaluates `holds` on 64 values and masks the result with `requested`. A branch-free loop is cheaper if many bits are set.
fn evaluate_masked(values: &[f64], requested: u64, holds: impl Fn(f64) -> bool) -> u64 {
    match values.first_chunk::<64>() {
        Some(values) if requested.count_ones() > 16 => {
            let all = values.iter().enumerate().fold(0, |all, (bit, &v)| all | u64::from(holds(v)) << bit);
            all & requested
        }
        _ => evaluate_bits(requested, |bit| values.get(bit as usize).is_some_and(|&v| holds(v))),
    }
}
