//! Filter plan for one snapshot: chooses how to find the eligible items.
//!
//! 1. Leaves are resolved against the columns: names to columns, values to terms or ranges of codes, unknown values to "none".
//! 2. The tree with negations at its leaves is compiled to a program over planes and posting lists (`program`), whose result is
//!    an upper bound. A positive leaf is exact or uses Bloom planes. A negated leaf is exact if possible and passes every item
//!    otherwise.
//! 3. The share of passing items is estimated from the counts of terms, as if terms were independent. Terms are correlated, so
//!    the cost estimate of a search also uses a sample (`sample`).
//! 4. If few items pass, they are found exactly before any list is scanned ([`Route::Slots`]). Passing items then come from the
//!    posting list of a rare term, or from the filter bitmaps of all lists if a sample predicts few items and bitmaps are cheap.
//! 5. If values were updated since the index was built, steps 1 to 4 cover only the other items ([`Plan::with_changes`]).

#[cfg(feature = "cuda")]
mod lower;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::changed::Changed;
use super::index::Index;
use super::language::Canonical;
use super::program::Program;
use super::question::{Node, Question, resolve};
use super::sample::{PassingShares, Sample};
use crate::columns::{Columns, Comparison, Overlay, bits};
use sterling_core::error::Result;
use sterling_core::units::{ListId, Slot};

/// Number of posting-list items up to which a search always scores the items one by one instead of list by list.
const POSTED_MIN: usize = 256;
/// Maximum time to compute the bitmaps of all lists so that the passing items can be scored one by one, in ns per list.
const SWEEP_NS_PER_LIST: f64 = 40.0;
/// Estimated cost of one test on one item, in nanoseconds.
const TEST_NS: f64 = 5.0;
/// Share of items up to which value counts approximate item counts, even if items may have several values.
const COUNTED_SHARE_MAX: f64 = 0.05;
/// Number of 64-bit bitmap words evaluated at once if lists are visited in order; a stack entry is then 4 KiB.
const AHEAD_WORDS: usize = 512;
/// Number of consecutive lists after which the following lists are expected to be visited too.
const IN_A_ROW_MIN: u32 = 3;

/// Way to find the eligible items.
#[derive(Clone, Debug, PartialEq)]
pub enum Route {
    /// Every item is eligible.
    All,
    /// No item is eligible.
    Nothing,
    /// Only these few slots are eligible, in ascending order.
    Slots(Vec<Slot>),
    /// Eligible items are those in the filter bitmaps ([`Plan::words`]) of the probed lists.
    Words,
}

/// Filter prepared for one snapshot.
#[derive(Clone, Debug)]
pub struct Plan {
    route: Route,
    root: Node,
    program: Program,
    pass_rate: f64,
    /// Items that were checked one by one during planning, and items whose bitmaps were evaluated.
    checked: usize,
    swept: usize,
    /// Sample of filter bitmaps, if a sample was taken.
    sample: Sample,
    columns: Columns,
    /// Maximum number of eligible items that are scored one by one instead of list by list.
    slots_max: usize,
    /// Updated items, for which planes and posting lists are outdated.
    changed: Option<Changed>,
    /// Number of this plan, by which a scratch identifies the plan of its cached bitmaps.
    number: u64,
}

static PLANS: AtomicU64 = AtomicU64::new(1);

/// Buffers for the evaluation of plans, reused between calls to avoid allocations.
#[derive(Debug, Default)]
pub struct Scratch {
    stack: Vec<u64>,
    /// Plan and list of the last call, and the number of consecutive lists before it.
    plan: u64,
    last: usize,
    in_a_row: u32,
    /// Lists whose bitmaps are at the start of the stack.
    ahead: std::ops::Range<usize>,
    /// Plan whose bitmaps are cached, the bitmaps in plane order, and the lists whose bitmaps are present.
    keeps: u64,
    pub(super) kept: Vec<u64>,
    has: Vec<bool>,
}

impl Scratch {
    /// Caches the bitmaps of `plan` from now on, so that several searches with this plan evaluate each list once.
    pub fn keep(&mut self, plan: &Plan) {
        if self.keeps != plan.number {
            self.keeps = plan.number;
            self.has.clear();
        }
    }
}

impl Plan {
    /// Plans a filter for the columns and the index of a snapshot. If at most `slots_max` items pass, they are scored
    /// one by one.
    ///
    /// # Errors
    /// `Invalid` with the offset of the term, for unknown columns and tests that a column does not support.
    pub fn new(filter: &Canonical, columns: &Columns, index: &Index, slots_max: usize) -> Result<Self> {
        let root = resolve(filter, columns, index)?;
        let mut plan = Plan {
            route: Route::Words,
            pass_rate: pass_rate(&root, columns, index),
            program: Program::of(&root, columns, index),
            checked: 0,
            swept: 0,
            sample: Sample::default(),
            root,
            columns: columns.clone(),
            slots_max,
            changed: None,
            number: PLANS.fetch_add(1, Ordering::Relaxed),
        };
        plan.route = match &plan.root {
            Node::All => Route::All,
            Node::Nothing => Route::Nothing,
            _ => match plan.few(index) {
                None => Route::Words,
                Some(slots) => {
                    plan.pass_rate = slots.len() as f64 / index.items().max(1) as f64;
                    if slots.is_empty() { Route::Nothing } else { Route::Slots(slots) }
                }
            },
        };
        Ok(plan)
    }

    /// Returns the eligible slots if there are few. If there are many, takes a sample for later estimates.
    fn few(&mut self, index: &Index) -> Option<Vec<Slot>> {
        let walked = walk(&self.root, index).filter(|&walked| walked <= self.slots_max.max(POSTED_MIN));
        let sweep_ns = self.words_ns() * index.items() as f64;
        let check_ns = if has_and(&self.root) { self.passes_ns() } else { 0.0 };
        if walked.is_some_and(|walked| walked as f64 * check_ns <= sweep_ns) {
            return Some(self.posted(index));
        }
        let passes = |slot| self.passes(slot);
        let asks = (!self.is_exact()).then_some((&passes as &dyn Fn(Slot) -> bool, self.passes_ns()));
        self.sample = Sample::of(&self.program, &self.columns, index, asks);
        let expected = self.passing(index).items * index.items() as f64;
        let is_cheap = sweep_ns <= SWEEP_NS_PER_LIST * index.lists() as f64;
        if is_cheap
            && expected <= self.slots_max as f64
            && let Some(slots) = self.sweep(index)
        {
            return Some(slots);
        }
        walked.map(|_| self.posted(index))
    }

    /// Returns the eligible slots from posting lists.
    fn posted(&mut self, index: &Index) -> Vec<Slot> {
        let mut slots = Vec::new();
        collect(&self.root, index, &mut slots);
        slots.sort_unstable();
        slots.dedup();
        if has_and(&self.root) {
            self.check(&mut slots);
        }
        slots
    }

    /// Computes the eligible slots by the bitmaps of all lists. Returns `None` if there are many more slots than expected.
    fn sweep(&mut self, index: &Index) -> Option<Vec<Slot>> {
        self.swept = index.items();
        let (mut slots, mut stack, mut next) = (Vec::new(), Vec::new(), 0);
        while next < index.lists() {
            let lists = index.lists_within(next, AHEAD_WORDS);
            next = lists.end;
            let span = index.span(lists.clone());
            self.program.run(&self.columns, index, lists, &mut stack);
            for (first, &word) in index.word_slots[span].iter().zip(&stack) {
                slots.extend(bits(word).map(|bit| Slot(first.0 + bit)));
            }
            if slots.len() > 2 * self.slots_max {
                return None;
            }
        }
        if !self.is_exact() {
            self.check(&mut slots);
        }
        Some(slots)
    }

    /// Retains the slots whose items pass the filter.
    fn check(&mut self, slots: &mut Vec<Slot>) {
        self.checked += slots.len();
        slots.retain(|&slot| self.passes(slot));
    }

    /// Adapts the plan to a snapshot with values updated since its index was built; `filter` is the source of the plan.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn with_changes(mut self, filter: &Canonical, index: &Index, overlay: &Arc<Overlay>) -> Result<Self> {
        let Some(changed) = Changed::of(filter, &self.columns, overlay)? else { return Ok(self) };
        let kept: Option<Vec<Slot>> = match &self.route {
            Route::Nothing => Some(Vec::new()),
            Route::Slots(slots) => Some(slots.iter().copied().filter(|&slot| !changed.contains(slot)).collect()),
            Route::All | Route::Words => None,
        };
        self.route = Route::Words;
        let items = index.items().max(1) as f64;
        if let Some(mut slots) = kept {
            slots.extend(changed.passing(&self.columns));
            slots.sort_unstable();
            self.pass_rate = slots.len() as f64 / items;
            if slots.is_empty() {
                self.route = Route::Nothing;
            } else if slots.len() <= self.slots_max.max(POSTED_MIN) {
                self.route = Route::Slots(slots);
            }
        } else {
            let (of_changed, passing) = changed.counts(&self.columns, index.list_end());
            self.pass_rate = (self.pass_rate * (1.0 - of_changed / items).max(0.0) + passing / items).min(1.0);
        }
        self.changed = Some(changed);
        Ok(self)
    }

    /// Returns the way to find the eligible items.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// Returns the estimated share of items that pass, 0 to 1.
    pub fn pass_rate(&self) -> f64 {
        self.pass_rate
    }

    /// Returns the shares of items and of lists that pass, from a sample, because counts of terms do not show
    /// correlations.
    pub fn passing(&self, index: &Index) -> PassingShares {
        match self.route {
            Route::All => PassingShares { items: 1.0, lists: 1.0 },
            _ => self.sample.passing(self.pass_rate, index.items() as f64 / index.lists().max(1) as f64),
        }
    }

    /// Returns the share of the items in the bitmaps that satisfy the filter, from a sample.
    pub fn holding(&self) -> f64 {
        self.sample.holding()
    }

    /// Returns true if [`Plan::words`] is exact, false if it is only an upper bound.
    pub fn is_exact(&self) -> bool {
        self.program.is_exact()
    }

    /// Estimates the cost of [`Plan::words`], in nanoseconds of one core per item.
    pub fn words_ns(&self) -> f64 {
        self.program.item_ns()
    }

    /// Estimates the cost of [`Plan::passes`], in nanoseconds of one core.
    pub fn passes_ns(&self) -> f64 {
        questions(&self.root) as f64 * TEST_NS
    }

    /// Returns the estimated cost of planning without parsing, in nanoseconds of one core.
    pub fn planning_ns(&self) -> f64 {
        let requested = self.checked + self.sample.requested();
        requested as f64 * self.passes_ns() + (self.sample.items() + self.swept) as f64 * self.words_ns()
    }

    /// Returns true if the item in the slot satisfies the filter.
    pub fn passes(&self, slot: Slot) -> bool {
        let of_changed = self.changed.as_ref().and_then(|changed| changed.passes(slot, &self.columns));
        of_changed.unwrap_or_else(|| self.holds(&self.root, slot))
    }

    fn holds(&self, node: &Node, slot: Slot) -> bool {
        match node {
            Node::All => true,
            Node::Nothing => false,
            Node::And(parts) => parts.iter().all(|p| self.holds(p, slot)),
            Node::Or(parts) => parts.iter().any(|p| self.holds(p, slot)),
            Node::Literal { question, negated } => question.holds(&self.columns, slot) != *negated,
        }
    }

    /// Computes the filter bitmap of one list: bit `i` of `out` (`[W]`, `W` = [`Index::words`]) is set for every item `i` of the
    /// list that passes. If the plan is not exact, the bit is also set for some other items. Bits past the list's items are 0.
    ///
    /// Lists that are visited in order are evaluated many at a time, which speeds up sweeps over all lists. With a cache
    /// ([`Scratch::keep`]), the bitmaps of lists are copied from the second time on.
    pub fn words(&self, index: &Index, list: ListId, scratch: &mut Scratch, out: &mut [u64]) {
        self.words_of_planes(index, list, scratch, out);
        if let Some(changed) = &self.changed {
            let first = index.first_slot(list);
            changed.correct_bitmap(&self.columns, first, first + index.length(list) as u32, out);
        }
    }

    /// Computes the bitmap by planes only, without updated values.
    fn words_of_planes(&self, index: &Index, list: ListId, scratch: &mut Scratch, out: &mut [u64]) {
        let list = list.index();
        if scratch.plan != self.number {
            (scratch.ahead, scratch.in_a_row) = (0..0, 0);
        }
        scratch.in_a_row = if list == scratch.last + 1 { scratch.in_a_row + 1 } else { 0 };
        (scratch.plan, scratch.last) = (self.number, list);
        let keeps = scratch.keeps == self.number;
        if keeps && scratch.has.get(list) == Some(&true) {
            let kept = &scratch.kept[index.span(list..list + 1)];
            out[..kept.len()].copy_from_slice(kept);
            return;
        }
        if !scratch.ahead.contains(&list) {
            let wanted = if scratch.in_a_row < IN_A_ROW_MIN { 0 } else { AHEAD_WORDS };
            let lists = index.lists_within(list, wanted);
            scratch.ahead = 0..0;
            self.program.run(&self.columns, index, lists.clone(), &mut scratch.stack);
            scratch.ahead = lists.clone();
            if keeps {
                let span = index.span(lists.clone());
                scratch.kept.resize(index.span(0..index.lists()).end, 0);
                scratch.has.resize(index.lists(), false);
                scratch.kept[span.clone()].copy_from_slice(&scratch.stack[..span.len()]);
                scratch.has[lists].fill(true);
            }
        }
        let start = index.span(scratch.ahead.start..list).len();
        let words = index.words(ListId(list as u32));
        out[..words].copy_from_slice(&scratch.stack[start..start + words]);
    }
}

/// Two plans of a snapshot are equal if they test the same conditions.
impl PartialEq for Plan {
    fn eq(&self, other: &Self) -> bool {
        self.root == other.root && self.changed == other.changed
    }
}

/// Estimates the share of items that pass, as if terms were independent.
fn pass_rate(node: &Node, columns: &Columns, index: &Index) -> f64 {
    let items = index.items().max(1) as f64;
    let rate = match node {
        Node::All => 1.0,
        Node::Nothing => 0.0,
        Node::And(parts) => parts.iter().map(|p| pass_rate(p, columns, index)).product(),
        Node::Or(parts) => 1.0 - parts.iter().map(|p| 1.0 - pass_rate(p, columns, index)).product::<f64>(),
        Node::Literal { question, negated } => {
            let rate = match question {
                // Shares of mutually exclusive values add up.
                Question::Terms { column, terms } if columns.at(*column).is_single() => {
                    terms.iter().map(|&t| f64::from(index.count(t))).sum::<f64>() / items
                }
                Question::Terms { terms, .. } => {
                    1.0 - terms.iter().map(|&t| 1.0 - f64::from(index.count(t)) / items).product::<f64>()
                }
                Question::Compares { column, comparison } => compared(*column, comparison, columns, index) / items,
            };
            if *negated { 1.0 - rate } else { rate }
        }
    };
    rate.clamp(0.0, 1.0)
}

/// Estimates the number of items that satisfy a comparison.
fn compared(number: usize, comparison: &Comparison, columns: &Columns, index: &Index) -> f64 {
    let column = columns.at(number);
    if let (Comparison::Codes(ranges), Some(first)) = (comparison, column.first_term()) {
        let counted = ranges.iter().map(|r| index.counted(first.0 + r.start..first.0 + r.end) as f64).sum();
        // Items with several values count several times.
        if column.is_single() || counted < COUNTED_SHARE_MAX * index.items() as f64 {
            return counted;
        }
    } else if let Some(answer) = index.numbers.answer(number, comparison) {
        return answer.items;
    }
    // A sample of a thousand slots estimates a share to within a few hundredths.
    let slots = index.list_end();
    let sampled = (0..slots).step_by((slots / 1024).max(1) as usize);
    let held = sampled.clone().filter(|&s| column.compares(comparison, Slot(s))).count();
    held as f64 / sampled.count().max(1) as f64 * index.items() as f64
}

/// Returns the maximum number of tests that a filter applies to one item.
fn questions(node: &Node) -> usize {
    match node {
        Node::All | Node::Nothing => 0,
        Node::Literal { question: Question::Terms { terms, .. }, .. } => terms.len(),
        Node::Literal { question: Question::Compares { .. }, .. } => 1,
        Node::And(parts) | Node::Or(parts) => parts.iter().map(questions).sum(),
    }
}

/// Returns the number of posting-list slots that include all eligible slots; `None` if posting lists do not cover the filter.
fn walk(node: &Node, index: &Index) -> Option<usize> {
    match node {
        Node::Nothing => Some(0),
        Node::Literal { question: Question::Terms { terms, .. }, negated: false } => {
            terms.iter().map(|&t| index.posting(t).map(|posting| index.posting_slots(posting).len())).sum()
        }
        Node::And(parts) => parts.iter().filter_map(|p| walk(p, index)).min(),
        Node::Or(parts) => parts.iter().map(|p| walk(p, index)).sum(),
        _ => None,
    }
}

/// Returns true if posting-list slots may include ineligible slots.
fn has_and(node: &Node) -> bool {
    match node {
        Node::And(_) => true,
        Node::Or(parts) => parts.iter().any(has_and),
        _ => false,
    }
}

/// Appends the slots that [`walk`] counted, unordered.
fn collect(node: &Node, index: &Index, slots: &mut Vec<Slot>) {
    match node {
        Node::Literal { question: Question::Terms { terms, .. }, negated: false } => {
            let postings = terms.iter().filter_map(|&t| index.posting(t));
            slots.extend(postings.flat_map(|posting| index.posting_slots(posting)).copied().map(Slot));
        }
        Node::And(parts) => {
            if let Some((_, part)) = parts.iter().filter_map(|p| Some((walk(p, index)?, p))).min_by_key(|(n, _)| *n) {
                collect(part, index, slots);
            }
        }
        Node::Or(parts) => parts.iter().for_each(|p| collect(p, index, slots)),
        _ => {}
    }
}
