//! Filter tree resolved for one snapshot: names to columns, values to terms.

use std::collections::{BTreeMap, BTreeSet};

use super::index::{Index, TermStorage};
use super::language::{Canonical, Leaf, Test};
use crate::columns::{Column, Columns, Comparison, Operator, evaluate_bits};
use sterling_core::error::Result;
use sterling_core::units::{Slot, TermId};

/// Resolved leaf.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Question {
    /// The item has one of these terms.
    Terms { column: usize, terms: Vec<TermId> },
    /// A number of the item satisfies the comparison.
    Compares { column: usize, comparison: Comparison },
}

impl Question {
    /// Returns true if the test holds for no item of the snapshot.
    fn is_empty(&self) -> bool {
        match self {
            Question::Terms { terms, .. } => terms.is_empty(),
            Question::Compares { comparison: Comparison::Codes(ranges), .. } => ranges.iter().all(|r| r.is_empty()),
            Question::Compares { .. } => false,
        }
    }

    /// Returns true if the test holds for the item in the slot.
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

    /// Evaluates the test on the `requested` slots among 64 slots from `first` on, as bitmaps.
    pub(super) fn holding(&self, columns: &Columns, first: Slot, requested: u64) -> u64 {
        match self {
            Question::Terms { .. } => evaluate_bits(requested, |bit| self.holds(columns, Slot(first.0 + bit))),
            Question::Compares { column, comparison } => columns.at(*column).holding(comparison, first, requested),
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

/// Resolves the leaves of a filter. Operands that are always true or always false are removed. Equalities with several
/// values of one column become one leaf, as if the filter had used `IN`.
pub(super) fn resolve(filter: &Canonical, columns: &Columns, index: &Index) -> Result<Node> {
    let all = |parts: &[Canonical]| parts.iter().map(|p| resolve(p, columns, index)).collect::<Result<Vec<_>>>();
    Ok(match filter {
        Canonical::All => Node::All,
        Canonical::Nothing => Node::Nothing,
        Canonical::Literal { leaf, negated } => {
            let question = question(leaf, columns)
                .map_err(|e| e.within(format_args!("filter: `{leaf}` at byte {}", leaf.offset)).at(leaf.offset))?;
            match question {
                // No item has the values: nothing passes, and everything passes the negation.
                question if question.is_empty() && *negated => Node::All,
                question if question.is_empty() => Node::Nothing,
                question => Node::Literal { question: as_terms(question, leaf, columns, index), negated: *negated },
            }
        }
        Canonical::And(parts) => {
            let mut parts = all(parts)?;
            parts.retain(|p| *p != Node::All);
            join(&mut parts, true, columns, index);
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
            join(&mut parts, false, columns, index);
            match parts.len() {
                _ if parts.contains(&Node::All) => Node::All,
                0 => Node::Nothing,
                1 => parts.swap_remove(0),
                _ => Node::Or(parts),
            }
        }
    })
}

/// Converts an equality with an integer to a test for its term, unless the term has only Bloom planes: comparisons are exact.
fn as_terms(question: Question, leaf: &Leaf, columns: &Columns, index: &Index) -> Question {
    if let Question::Compares { column, comparison: Comparison::Codes([codes, _]) } = &question
        && matches!(leaf.test, Test::Compares(Operator::Equal, _))
        && let Some(term) = columns.at(*column).first_term().map(|first| TermId(first.0 + codes.start))
        && index.held(term) != TermStorage::Bloom
    {
        return Question::Terms { column: *column, terms: vec![term] };
    }
    question
}

/// Merges the operands of an OR that test for terms of one column, and the operands of an AND that test for the absence
/// of such terms.
///
/// If no item has two values of a column, `x != 1 AND x != 2` equals `x != 1 AND NOT x:2`, and `NOT x != 1 OR NOT x !=
/// 2` equals `NOT x != 1 OR x:2`. Only one comparison per column remains; the others become term tests.
fn join(parts: &mut Vec<Node>, is_and: bool, columns: &Columns, index: &Index) {
    let (mut terms_of, mut has_compared) = (BTreeMap::<usize, Vec<TermId>>::new(), BTreeSet::new());
    parts.retain(|part| match part {
        Node::Literal { question: Question::Terms { column, terms }, negated } if *negated == is_and => {
            terms_of.entry(*column).or_default().extend(terms);
            false
        }
        Node::Literal { question: Question::Compares { column, comparison }, negated } if *negated != is_and => {
            let Some(term) = excluded(columns.at(*column), comparison, index) else { return true };
            if has_compared.insert(*column) {
                return true;
            }
            terms_of.entry(*column).or_default().push(term);
            false
        }
        _ => true,
    });
    let joined = terms_of.into_iter().map(|(column, mut terms)| {
        terms.sort();
        terms.dedup();
        Node::Literal { question: Question::Terms { column, terms }, negated: is_and }
    });
    // Operands are tested in order, and terms are the cheapest test.
    parts.splice(0..0, joined);
}

/// Returns the term of the only value that an inequality excludes, in a column with at most one value per item.
fn excluded(column: &Column, comparison: &Comparison, index: &Index) -> Option<TermId> {
    let Comparison::Codes([below, above]) = comparison else { return None };
    let is_inequality = below.start == 0
        && below.end + 1 == above.start
        && above.end as usize == column.dictionary_len()
        && column.is_single();
    let term = TermId(column.first_term()?.0 + below.end);
    (is_inequality && index.held(term) != TermStorage::Bloom).then_some(term)
}

pub(super) fn question(leaf: &Leaf, columns: &Columns) -> Result<Question> {
    let number = columns.number(&leaf.feature)?;
    let column = columns.at(number);
    match &leaf.test {
        Test::Has(values) => {
            column.check_has_terms()?;
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
        Test::IsPresent => Ok(Question::Compares { column: number, comparison: column.presence()? }),
    }
}
