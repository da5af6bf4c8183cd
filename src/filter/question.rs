//! What a filter asks of one snapshot: its tree with names resolved to columns and values to terms.

use super::language::{Canonical, Leaf, Test};
use crate::columns::{Columns, Comparison, asked_one_by_one};
use crate::error::Result;
use crate::units::{Slot, TermId};

/// A resolved leaf.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Question {
    /// The item has one of these terms.
    Terms { column: usize, terms: Vec<TermId> },
    /// A number of the item compares so.
    Compares { column: usize, comparison: Comparison },
}

impl Question {
    /// True where no item of the snapshot can answer it with yes.
    fn is_empty(&self) -> bool {
        match self {
            Question::Terms { terms, .. } => terms.is_empty(),
            Question::Compares { comparison: Comparison::Codes(ranges), .. } => ranges.iter().all(|r| r.is_empty()),
            Question::Compares { .. } => false,
        }
    }

    /// Whether the item of a slot answers it with yes.
    pub(super) fn holds(&self, columns: &Columns, slot: Slot) -> bool {
        match self {
            Question::Terms { column, terms } => {
                let column = columns.at(*column);
                let codes = column.codes(slot);
                terms.iter().any(|&t| column.code(t).is_some_and(|c| codes.binary_search(&c).is_ok()))
            }
            Question::Compares { column, comparison } => columns.at(*column).compares(comparison, slot),
        }
    }

    /// Those of the 64 slots from `first` on that are `asked`, bit by bit, and answer it with yes.
    pub(super) fn holding(&self, columns: &Columns, first: Slot, asked: u64) -> u64 {
        match self {
            Question::Terms { .. } => asked_one_by_one(asked, |bit| self.holds(columns, Slot(first.0 + bit))),
            Question::Compares { column, comparison } => columns.at(*column).holding(comparison, first, asked),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Node {
    All,
    Nothing,
    Literal { question: Question, negated: bool },
    And(Vec<Node>),
    Or(Vec<Node>),
}

/// Resolves the leaves of a filter; parts that no item or every item answers are gone from the tree.
pub(super) fn resolve(filter: &Canonical, columns: &Columns) -> Result<Node> {
    let all = |parts: &[Canonical]| parts.iter().map(|p| resolve(p, columns)).collect::<Result<Vec<_>>>();
    Ok(match filter {
        Canonical::All => Node::All,
        Canonical::Nothing => Node::Nothing,
        Canonical::Literal { leaf, negated } => {
            let question = question(leaf, columns)
                .map_err(|e| e.within(format_args!("filter: `{leaf}` at byte {}", leaf.offset)).at(leaf.offset))?;
            match question {
                // Values that no item has: nothing passes, and everything passes the opposite.
                question if question.is_empty() && *negated => Node::All,
                question if question.is_empty() => Node::Nothing,
                question => Node::Literal { question, negated: *negated },
            }
        }
        Canonical::And(parts) => {
            let mut parts = all(parts)?;
            parts.retain(|p| *p != Node::All);
            match parts.len() {
                _ if parts.contains(&Node::Nothing) => Node::Nothing,
                0 => Node::All,
                1 => parts.swap_remove(0),
                _ => Node::And(parts),
            }
        }
        Canonical::Or(parts) => {
            let mut parts = all(parts)?;
            parts.retain(|p| *p != Node::Nothing);
            match parts.len() {
                _ if parts.contains(&Node::All) => Node::All,
                0 => Node::Nothing,
                1 => parts.swap_remove(0),
                _ => Node::Or(parts),
            }
        }
    })
}

pub(super) fn question(leaf: &Leaf, columns: &Columns) -> Result<Question> {
    let number = columns.number(&leaf.feature)?;
    let column = columns.at(number);
    match &leaf.test {
        Test::Has(values) => {
            let mut terms = Vec::with_capacity(values.len());
            for value in values {
                terms.extend(column.term(value)?);
            }
            terms.sort();
            terms.dedup();
            Ok(Question::Terms { column: number, terms })
        }
        Test::Compares(operator, text) => {
            Ok(Question::Compares { column: number, comparison: column.comparison(*operator, text)? })
        }
    }
}
