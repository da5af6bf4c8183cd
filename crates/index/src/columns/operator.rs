//! Comparison operators of numeric columns.

/// Right-hand side of a comparison with integers: any decimal number, compared exactly with every i64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold {
    floor: i128,
    is_whole: bool,
}

impl Threshold {
    /// Parses a decimal number like `f64::from_str`, but without rounding. The text must be a finite number.
    pub fn of(text: &str) -> Self {
        let (is_negative, text) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
        let (before, behind) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        // Exponents beyond 64 bits saturate: no text has enough digits to offset such an exponent.
        let huge = if exponent.starts_with('-') { i64::MIN } else { i64::MAX };
        let point = (before.len() as i64).saturating_add(exponent.parse().unwrap_or(huge));
        let (mut complete, mut is_whole) = (0i128, true);
        for (digit, place) in before.bytes().chain(behind.bytes()).map(|byte| i128::from(byte - b'0')).zip(0..) {
            if place < point {
                complete = complete.saturating_mul(10).saturating_add(digit);
            } else {
                is_whole &= digit == 0;
            }
        }
        // Number of zeros that the exponent appends to the digits; 39 zeros exceed 128 bits.
        let zeros = point.saturating_sub((before.len() + behind.len()) as i64).clamp(0, 39);
        let complete = (0..zeros).fold(complete, |complete, _| complete.saturating_mul(10));
        let floor = if is_negative { -complete - i128::from(!is_whole) } else { complete };
        Threshold { floor, is_whole }
    }

    /// Returns true if the integer is less than the threshold.
    pub(super) fn is_above(self, value: i64) -> bool {
        i128::from(value) < self.floor.saturating_add(i128::from(!self.is_whole))
    }

    /// Returns true if the integer is at most the threshold.
    pub(super) fn is_not_below(self, value: i64) -> bool {
        i128::from(value) <= self.floor
    }

    /// Returns true if `value operator threshold` holds.
    pub fn holds(self, operator: Operator, value: i64) -> bool {
        let (less, no_more) = (self.is_above(value), self.is_not_below(value));
        match operator {
            Operator::Less => less,
            Operator::LessEqual => no_more,
            Operator::Greater => !no_more,
            Operator::GreaterEqual => !less,
            Operator::Equal => no_more && !less,
            Operator::NotEqual => !no_more || less,
        }
    }
}

/// Comparison operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub enum Operator {
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    Equal,
    NotEqual,
}

impl Operator {
    /// Returns true if `left operator right` holds; always false for NaN.
    #[allow(clippy::double_comparisons)] // `left != right` would hold for a NaN.
    pub fn holds(self, left: f64, right: f64) -> bool {
        match self {
            Operator::Less => left < right,
            Operator::LessEqual => left <= right,
            Operator::Greater => left > right,
            Operator::GreaterEqual => left >= right,
            Operator::Equal => left == right,
            Operator::NotEqual => left.partial_cmp(&right).is_some_and(std::cmp::Ordering::is_ne),
        }
    }

    /// Returns the operator in filter syntax.
    pub fn sign(self) -> &'static str {
        match self {
            Operator::Less => "<",
            Operator::LessEqual => "<=",
            Operator::Greater => ">",
            Operator::GreaterEqual => ">=",
            Operator::Equal => "=",
            Operator::NotEqual => "!=",
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bounds_are_read_without_rounding() {
        let complete = |floor| Threshold { floor, is_whole: true };
        let above = |floor| Threshold { floor, is_whole: false };
        for (text, expected) in [
            ("1768907725507217522.0", complete(1_768_907_725_507_217_522)),
            ("1.768907725507217522e18", complete(1_768_907_725_507_217_522)),
            ("17689077255072175220E-1", complete(1_768_907_725_507_217_522)),
            ("1768907725507217522.5", above(1_768_907_725_507_217_522)),
            ("-9007199254740993.5", above(-9_007_199_254_740_994)),
            ("-9007199254740993.", complete(-9_007_199_254_740_993)),
            ("+.5e1", complete(5)),
            ("-0.0", complete(0)),
            ("1e-400", above(0)),
            ("-1e-99999999999999999999", above(-1)),
            ("0e99999999999999999999", complete(0)),
            ("0.00000000000000000000000000000000000000000001e44", complete(1)),
        ] {
            assert_eq!(Threshold::of(text), expected, "{text}");
        }
        for (text, is_above) in
            [("1e300", true), ("-1e300", false), ("99999999999999999999999999999999999999999", true)]
        {
            let bound = Threshold::of(text);
            assert_eq!(bound.holds(Operator::Less, i64::MAX), is_above, "{text}");
            assert_eq!(bound.holds(Operator::Greater, i64::MIN), !is_above, "{text}");
        }
    }

    proptest! {
        #[test]
        fn bounds_that_floats_hold_exactly_compare_as_floats(
            text in "[+-]?([0-9]{1,6}|[0-9]{0,5}\\.[0-9]{1,2}|[0-9]{1,5}\\.[0-9]{0,2})(e[+-]?[0-3])?",
            value in -1_000_000i64..1_000_000,
        ) {
            use Operator::*;
            // Multiplied by 10^5, all of these thresholds are integers that a float represents exactly.
            let number = (text.parse::<f64>().unwrap() * 1e5).round();
            for operator in [Less, LessEqual, Greater, GreaterEqual, Equal, NotEqual] {
                let expected = operator.holds(value as f64 * 1e5, number);
                prop_assert_eq!(Threshold::of(&text).holds(operator, value), expected, "{} {:?} {}", value, operator, text);
            }
        }
    }
}
