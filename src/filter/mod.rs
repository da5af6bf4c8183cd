//! The filter language: which items are eligible.
//!
//! A superset of SilverTorch's expression syntax. Text becomes tokens (`lexer`), tokens an [`Expr`] (`parser`), and that
//! its canonical form ([`Expr::canonical`]): NOT pushed to the leaves, nested AND and OR flattened, parts sorted and
//! deduplicated, so that equal filters are equal values. Nothing here knows a catalogue; `bloom` resolves the leaves.
//! The grammar, with examples that a test runs, is in `docs/FILTERS.md`.

mod lexer;
mod parser;

use std::fmt;

pub use parser::parse;

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

    fn sign(self) -> &'static str {
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

/// What a leaf asks of a feature.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Test {
    /// The item has one of these values. Sorted and without repeats in canonical form.
    Has(Vec<String>),
    /// A number of the item compares so to the number that the text writes.
    Compares(Operator, String),
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

/// The canonical form of an expression: equal filters are equal values and print the same text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Canonical {
    /// Every item.
    All,
    /// No item.
    Nothing,
    /// A leaf, or its opposite.
    Literal {
        /// The question.
        leaf: Leaf,
        /// True where the opposite is asked.
        negated: bool,
    },
    /// Every part holds; at least two, sorted, none of them an `And`.
    And(Vec<Canonical>),
    /// Some part holds; at least two, sorted, none of them an `Or`.
    Or(Vec<Canonical>),
}

impl Expr {
    /// The canonical form.
    pub fn canonical(&self) -> Canonical {
        self.pushed(false)
    }

    fn pushed(&self, negated: bool) -> Canonical {
        match (self, negated) {
            (Expr::All, false) => Canonical::All,
            (Expr::All, true) => Canonical::Nothing,
            (Expr::Not(inner), _) => inner.pushed(!negated),
            (Expr::Leaf(leaf), _) => {
                let mut leaf = leaf.clone();
                if let Test::Has(values) = &mut leaf.test {
                    values.sort();
                    values.dedup();
                }
                Canonical::Literal { leaf, negated }
            }
            (Expr::And(parts), false) | (Expr::Or(parts), true) => {
                Canonical::and(parts.iter().map(|p| p.pushed(negated)).collect())
            }
            (Expr::Or(parts), false) | (Expr::And(parts), true) => {
                Canonical::or(parts.iter().map(|p| p.pushed(negated)).collect())
            }
        }
    }
}

impl Canonical {
    fn and(parts: Vec<Canonical>) -> Canonical {
        let mut flat = Vec::with_capacity(parts.len());
        for part in parts {
            match part {
                Canonical::All => {}
                Canonical::Nothing => return Canonical::Nothing,
                Canonical::And(inner) => flat.extend(inner),
                other => flat.push(other),
            }
        }
        flat.sort();
        flat.dedup();
        match flat.len() {
            0 => Canonical::All,
            1 => flat.swap_remove(0),
            _ => Canonical::And(flat),
        }
    }

    fn or(parts: Vec<Canonical>) -> Canonical {
        let mut flat = Vec::with_capacity(parts.len());
        for part in parts {
            match part {
                Canonical::Nothing => {}
                Canonical::All => return Canonical::All,
                Canonical::Or(inner) => flat.extend(inner),
                other => flat.push(other),
            }
        }
        flat.sort();
        flat.dedup();
        match flat.len() {
            0 => Canonical::Nothing,
            1 => flat.swap_remove(0),
            _ => Canonical::Or(flat),
        }
    }
}

fn word(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
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
        }
    }
}

impl fmt::Display for Canonical {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = |f: &mut fmt::Formatter<'_>, parts: &[Canonical], between: &str| {
            parts.iter().enumerate().try_for_each(|(n, part)| {
                f.write_str(if n > 0 { between } else { "" })?;
                match part {
                    Canonical::And(_) | Canonical::Or(_) => write!(f, "({part})"),
                    _ => write!(f, "{part}"),
                }
            })
        };
        match self {
            Canonical::All => Ok(()),
            Canonical::Nothing => f.write_str("NOT ()"),
            Canonical::Literal { leaf, negated: false } => write!(f, "{leaf}"),
            Canonical::Literal { leaf, negated: true } => write!(f, "NOT {leaf}"),
            Canonical::And(inner) => parts(f, inner, " AND "),
            Canonical::Or(inner) => parts(f, inner, " OR "),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn canonical(text: &str) -> String {
        parse(text).unwrap_or_else(|e| panic!("{text}: {e}")).canonical().to_string()
    }

    #[test]
    fn equal_filters_have_one_canonical_text() {
        for (a, b) in [
            ("b:2 AND a:1", "a:1 & b:2"),
            ("NOT (a:1 OR b:2)", "NOT b:2 AND !a:1"),
            ("a:1 AND (b:2 AND c:3)", "(a:1 AND b:2) AND c:3"),
            ("a:1 OR a:1", "a:1"),
            ("a IN (y, x, x)", "a IN (\"x\", y)"),
            ("a IN (x)", "a:x"),
            ("a NOT IN (x)", "NOT a:x"),
            ("a:1:0.5", "a:1"),
            ("", "  "),
            ("() AND a:1", "a:1"),
            ("NOT NOT a:1", "a:1"),
            ("not a:1 and b:2 or c:3", "((NOT a:1) AND b:2) OR c:3"),
            ("price<10", "price < 10"),
            ("price == 10", "price = 10"),
        ] {
            assert_eq!(canonical(a), canonical(b), "{a} and {b}");
        }
        assert_eq!(canonical("NOT ()"), "NOT ()");
        assert_eq!(canonical("tags:\"role::program\" AND 42:7"), "42:7 AND tags:\"role::program\"");
    }

    fn expr() -> impl Strategy<Value = Expr> {
        let text = || proptest::string::string_regex("[a-z_]{1,3}|[ a-zAND\"\\\\:()é\n-]{0,5}|-?[0-9]{1,3}").unwrap();
        let name = text().prop_filter("a feature has a name", |t| !t.is_empty());
        let number = proptest::string::string_regex("-?[0-9]{1,3}(\\.[0-9])?").unwrap();
        let operator = prop_oneof![Just(Operator::Less), Just(Operator::NotEqual), Just(Operator::GreaterEqual)];
        let test = prop_oneof![
            proptest::collection::vec(text(), 1..4).prop_map(Test::Has),
            (operator, number).prop_map(|(o, n)| Test::Compares(o, n)),
        ];
        let leaf = (name, test).prop_map(|(feature, test)| Expr::Leaf(Leaf { feature, test, offset: 0 }));
        prop_oneof![1 => Just(Expr::All), 9 => leaf].prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                inner.clone().prop_map(|e| Expr::Not(Box::new(e))),
                proptest::collection::vec(inner.clone(), 1..4).prop_map(Expr::And),
                proptest::collection::vec(inner, 1..4).prop_map(Expr::Or),
            ]
        })
    }

    proptest! {
        #[test]
        fn canonical_text_parses_back_to_itself(expr in expr()) {
            let form = expr.canonical();
            let again = parse(&form.to_string()).map_err(|e| TestCaseError::fail(format!("{form}: {e}")))?.canonical();
            prop_assert_eq!(&again, &form);
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in "\\PC{0,60}|[a:()<>=!&| \"\\\\NOT,IN0-9.-]{0,60}") {
            let _ = parse(&text);
        }
    }
}
