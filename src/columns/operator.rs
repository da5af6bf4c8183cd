//! The comparisons that a column of numbers answers.

/// What integers are compared with: any number, exactly for every i64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold {
    floor: i128,
    is_whole: bool,
}

impl Threshold {
    /// The number that `text` writes, which is about `number`.
    pub(super) fn of(text: &str, number: f64) -> Self {
        // A whole number is compared as one, a fraction through its floor.
        let whole = text.parse::<i128>().ok().or((number.fract() == 0.0).then_some(number as i128));
        Threshold { floor: whole.unwrap_or(number.floor() as i128), is_whole: whole.is_some() }
    }

    /// Whether an integer is less.
    pub(super) fn is_above(self, value: i64) -> bool {
        i128::from(value) < self.floor.saturating_add(i128::from(!self.is_whole))
    }

    /// Whether an integer is less, or the bound itself.
    pub(super) fn is_not_below(self, value: i64) -> bool {
        i128::from(value) <= self.floor
    }

    /// Whether an integer compares so with it.
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

/// How a number is compared.
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
    /// True where `left` compares so to `right`; never for a NaN.
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

    /// The operator as a filter writes it.
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
