//! Lowers a plan to a device program: the same steps in the form that kernels read.

use super::Plan;
use crate::columns::{Columns, Comparison};
use crate::filter::index::{Run, TermHash};
use crate::filter::program::{Program, Step};
use crate::filter::question::{Node, Question};
use sterling_core::error::Result;
use sterling_cuda::ops::words::{CHECK_STACK_MAX, FilterStep, NO_PLANE, Operation, WordProgram};

/// Comparison code for ranges of dictionary codes.
const RANGES: u32 = 6;

impl Plan {
    /// Returns the plan as an exact device program: candidates of Bloom planes are verified by lookups.
    pub fn lower(&self) -> WordProgram {
        let mut program = words(&self.program);
        if !self.is_exact() || has_postings(&self.program) {
            checks(&self.root, &self.columns, &mut program);
        }
        program
    }

    /// Checks that a device can evaluate [`Plan::lower`].
    ///
    /// # Errors
    /// As [`WordProgram::check`].
    pub fn check_lowered(&self) -> Result<()> {
        // The stack is at most as deep as the nesting of the filter, plus one entry each for posting lists and the live
        // bitmap.
        if nesting(&self.root).max(self.program.depth) + 2 <= CHECK_STACK_MAX { Ok(()) } else { self.lower().check() }
    }
}

/// Lowers the bitmap steps. A device has no posting lists: Bloom planes replace posting lists, and a negated posting
/// list passes all items.
fn words(program: &Program) -> WordProgram {
    // A posting list needs one more stack entry.
    let depth = program.depth + usize::from(has_postings(program));
    let mut lowered = WordProgram { depth, ..WordProgram::default() };
    for step in &program.steps {
        let step = match step {
            Step::PushPosted { hash, .. } => {
                lowered.steps.push(FilterStep::plain(Operation::Every));
                bloom_step(*hash)
            }
            Step::AddPosted { hash, .. } => {
                lowered.steps.extend([FilterStep::plain(Operation::Every), bloom_step(*hash)]);
                FilterStep::plain(Operation::Or)
            }
            Step::DropPosted { .. } => continue,
            Step::Every => FilterStep::plain(Operation::Every),
            Step::None => FilterStep::plain(Operation::None),
            Step::And => FilterStep::plain(Operation::And),
            Step::Or => FilterStep::plain(Operation::Or),
            Step::Push { plane, negated } => plane_step(Operation::Push, *plane, *negated),
            Step::Keep { plane, negated } => plane_step(Operation::Keep, *plane, *negated),
            Step::Add { plane } => plane_step(Operation::Add, *plane, false),
            Step::Bloom { hash } => bloom_step(*hash),
            Step::Number { sure, unsure, column, comparison, negated } => {
                let first = lowered.runs.len() as u32 / 2;
                sure.iter().chain(unsure).for_each(|run| lowered.runs.extend(pair(run)));
                let (count, sure) = ((sure.len() + unsure.len()) as u32, sure.len() as u32);
                FilterStep { first, count, sure, ..compares(Operation::Number, *column, comparison, *negated) }
            }
            Step::Compare { column, comparison, negated } => {
                compares(Operation::Compare, *column, comparison, *negated)
            }
        };
        lowered.steps.push(step);
    }
    lowered
}

fn bloom_step(hash: TermHash) -> FilterStep {
    FilterStep { x: hash.start, y: hash.step, ..FilterStep::plain(Operation::Bloom) }
}

fn plane_step(operation: Operation, plane: usize, negated: bool) -> FilterStep {
    FilterStep { plane: plane as u32, is_negated: u32::from(negated), ..FilterStep::plain(operation) }
}

/// Converts a bucket range to plane numbers relative to the first plane of numeric buckets, whose offset
/// [`crate::filter::index::DevicePlanes`] knows.
fn pair(run: &Run) -> [u32; 2] {
    [run.plane as u32, run.before.map_or(NO_PLANE, |before| before as u32)]
}

fn compares(operation: Operation, column: usize, comparison: &Comparison, negated: bool) -> FilterStep {
    let step = FilterStep { column: column as u32, is_negated: u32::from(negated), ..FilterStep::plain(operation) };
    let range = |r: &std::ops::Range<u32>| u64::from(r.start) | u64::from(r.end) << 32;
    match comparison {
        Comparison::Codes([first, second]) => {
            FilterStep { comparison: RANGES, x: range(first), y: range(second), ..step }
        }
        Comparison::Float(operator, number) => FilterStep { comparison: *operator as u32, x: number.to_bits(), ..step },
    }
}

/// Adds the checks that verify an item.
fn checks(root: &Node, columns: &Columns, to: &mut WordProgram) {
    let joined = |parts: &[Node], operation, to: &mut WordProgram| {
        for (n, part) in parts.iter().enumerate() {
            checks(part, columns, to);
            if n > 0 {
                to.checks.push(FilterStep::plain(operation));
            }
        }
    };
    match root {
        Node::All => to.checks.push(FilterStep::plain(Operation::Every)),
        Node::Nothing => to.checks.push(FilterStep::plain(Operation::None)),
        Node::And(parts) => joined(parts, Operation::And, to),
        Node::Or(parts) => joined(parts, Operation::Or, to),
        Node::Literal { question: Question::Compares { column, comparison }, negated } => {
            to.checks.push(compares(Operation::Holds, *column, comparison, *negated));
        }
        Node::Literal { question: Question::Terms { column, terms }, negated } => {
            let first = to.codes.len() as u32;
            to.codes.extend(terms.iter().filter_map(|&term| columns.at(*column).code(term)));
            let count = to.codes.len() as u32 - first;
            let step = FilterStep::plain(Operation::HasTerm);
            to.checks.push(FilterStep {
                column: *column as u32,
                is_negated: u32::from(*negated),
                first,
                count,
                ..step
            });
        }
    }
}

/// Returns the nesting depth of a filter tree.
fn nesting(node: &Node) -> usize {
    match node {
        Node::All | Node::Nothing | Node::Literal { .. } => 1,
        Node::And(parts) | Node::Or(parts) => 1 + parts.iter().map(nesting).max().unwrap_or(0),
    }
}

/// Returns true if the program uses posting lists.
fn has_postings(program: &Program) -> bool {
    let is_posted =
        |step: &Step| matches!(step, Step::PushPosted { .. } | Step::AddPosted { .. } | Step::DropPosted { .. });
    program.steps.iter().any(is_posted)
}
