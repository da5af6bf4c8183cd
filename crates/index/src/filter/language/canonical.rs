//! Canonical form of filters: NOT at the leaves, nested AND and OR flattened, operands sorted and deduplicated.

use std::fmt;

use super::expr::{Expr, Leaf, Test, word};

/// Canonical form of an expression: equal filters are equal values and print the same text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Canonical {
    /// Every item.
    All,
    /// No item.
    Nothing,
    /// A leaf or its negation.
    Literal {
        /// The test.
        leaf: Leaf,
        /// True if the leaf is negated.
        negated: bool,
    },
    /// All operands hold; at least two operands, sorted, none of them an `And`.
    And(Vec<Canonical>),
    /// At least one operand holds; at least two operands, sorted, none of them an `Or`.
    Or(Vec<Canonical>),
}

impl Expr {
    /// Returns the canonical form.
    pub fn canonical(&self) -> Canonical {
        self.push_negation(false)
    }

    fn push_negation(&self, negated: bool) -> Canonical {
        match (self, negated) {
            (Expr::All, false) => Canonical::All,
            (Expr::All, true) => Canonical::Nothing,
            (Expr::Not(inner), _) => inner.push_negation(!negated),
            (Expr::Leaf(leaf), _) => {
                let mut leaf = leaf.clone();
                if let Test::Has(values) = &mut leaf.test {
                    values.sort();
                    values.dedup();
                }
                Canonical::Literal { leaf, negated }
            }
            (Expr::And(parts), false) | (Expr::Or(parts), true) => {
                Canonical::and(parts.iter().map(|p| p.push_negation(negated)).collect())
            }
            (Expr::Or(parts), false) | (Expr::And(parts), true) => {
                Canonical::or(parts.iter().map(|p| p.push_negation(negated)).collect())
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
            Canonical::Literal { leaf: Leaf { feature, test: Test::IsPresent, .. }, negated: true } => {
                word(f, feature)?;
                f.write_str(" IS NULL")
            }
            Canonical::Literal { leaf, negated: true } => write!(f, "NOT {leaf}"),
            Canonical::And(inner) => parts(f, inner, " AND "),
            Canonical::Or(inner) => parts(f, inner, " OR "),
        }
    }
}
