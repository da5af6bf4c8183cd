//! Parsed expression: tests of features, joined by NOT, AND and OR.

use std::fmt;

use super::lexer;
use crate::columns::Operator;

/// Test of a feature.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Test {
    /// The item has one of these values. In canonical form, the values are sorted and deduplicated.
    Has(Vec<String>),
    /// A number of the item satisfies the comparison with the number in the text.
    Compares(Operator, String),
    /// The item has a value.
    IsPresent,
}

/// Test of one feature, with its position in the text.
#[derive(Clone, Debug)]
pub struct Leaf {
    /// Name or number of the feature.
    pub feature: String,
    /// The test.
    pub test: Test,
    /// Byte offset in the text, for errors; ignored by comparisons of leaves.
    pub offset: usize,
}

impl Leaf {
    fn key(&self) -> (&str, &Test) {
        (&self.feature, &self.test)
    }
}
impl PartialEq for Leaf {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}
impl Eq for Leaf {}
impl PartialOrd for Leaf {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Leaf {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}
impl std::hash::Hash for Leaf {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

/// Parsed expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// Empty text: every item.
    All,
    /// A single test.
    Leaf(Leaf),
    /// Negation.
    Not(Box<Expr>),
    /// All operands hold.
    And(Vec<Expr>),
    /// At least one operand holds.
    Or(Vec<Expr>),
}

pub(super) fn word(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    if lexer::is_word(text) {
        return f.write_str(text);
    }
    f.write_str("\"")?;
    for c in text.chars() {
        match c {
            '"' | '\\' => write!(f, "\\{c}")?,
            '\n' => f.write_str("\\n")?,
            '\t' => f.write_str("\\t")?,
            c => write!(f, "{c}")?,
        }
    }
    f.write_str("\"")
}

impl fmt::Display for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        word(f, &self.feature)?;
        match &self.test {
            Test::Has(values) => match values.as_slice() {
                [one] => {
                    f.write_str(":")?;
                    word(f, one)
                }
                many => {
                    f.write_str(" IN (")?;
                    for (n, value) in many.iter().enumerate() {
                        f.write_str(if n > 0 { ", " } else { "" })?;
                        word(f, value)?;
                    }
                    f.write_str(")")
                }
            },
            Test::Compares(operator, number) => {
                write!(f, " {} ", operator.sign())?;
                word(f, number)
            }
            Test::IsPresent => f.write_str(" IS NOT NULL"),
        }
    }
}
