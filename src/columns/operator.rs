//! The comparisons that a column of numbers answers.

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
