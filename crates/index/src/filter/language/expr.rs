//! An expression as it was written: questions about features, joined by NOT, AND and OR.

use std::fmt;

use super::lexer;
use crate::columns::Operator;

/// What a leaf asks of a feature.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Test {
    /// The item has one of these values. Sorted and without repeats in canonical form.
    Has(Vec<String>),
    /// A number of the item compares so to the number that the text writes.
    Compares(Operator, String),
    /// The item has a value.
    IsPresent,
}

/// A question about one feature, and where it stood in the text.
#[derive(Clone, Debug)]
pub struct Leaf {
    /// The feature's name or number.
    pub feature: String,
    /// What is asked.
    pub test: Test,
    /// Byte offset in the text, for errors; it takes no part in comparisons.
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

/// A parsed expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// The empty text: every item.
    All,
    /// One question.
    Leaf(Leaf),
    /// The opposite.
    Not(Box<Expr>),
    /// Every part holds.
    And(Vec<Expr>),
    /// Some part holds.
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
