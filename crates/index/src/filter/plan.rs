//! A filter made ready for one snapshot: which way to find eligible items, and how.
//!
//! 1. Leaves are resolved against the columns: names to columns, values to terms or ranges of codes, unknown values to
//!    "no item".
//! 2. The negation-free tree becomes a program over planes and posting lists (`program`) whose result is an upper bound: a positive
//!    leaf is exact or Bloom, a negated one is exact where it can be and passes otherwise.
//! 3. The share of items that pass is estimated from the terms' counts, taken as independent. They are not: the price of a search
//!    rests on a sample besides (`sample`).
//! 4. Where few items pass, these are found before any list is looked at, exactly ([`Route::Slots`]): through the posting list of a rare
//!    term, or by the words of all lists, where a sample lets expect few and words are cheap.
//! 5. Where values have changed since the index was built, all of this tells of the others alone ([`Plan::with_changes`]).

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

/// So many items that posting lists hold may always be searched one by one.
const POSTED_MIN: usize = 256;
/// Nanoseconds for each list that the words of all of them may take, for items that are searched one by one.
const SWEEP_NS_A_LIST: f64 = 40.0;
/// Nanoseconds of asking one item one question.
const QUESTION_NS: f64 = 5.0;
/// Share of the items up to which counts of values are taken for counts of items that may have several.
const COUNTED_SHARE_MAX: f64 = 0.05;
/// Lists that are asked for one after another are evaluated so many words ahead; a run of the stack is then 4 KiB.
const AHEAD_WORDS: usize = 512;
/// Lists in a row after which the next ones are expected to follow.
const IN_A_ROW_MIN: u32 = 3;

/// The way to the eligible items.
#[derive(Clone, Debug, PartialEq)]
pub enum Route {
    /// Every item is eligible.
    All,
    /// No item is.
    Nothing,
    /// These slots are, ascending, and no others: few of them.
    Slots(Vec<Slot>),
    /// Evaluate [`Plan::words`] on the lists that are probed.
    Words,
}

/// A filter made ready for one snapshot.
#[derive(Clone, Debug)]
pub struct Plan {
    route: Route,
    root: Node,
    program: Program,
    pass_rate: f64,
    /// Items that were checked one by one while it was made, and those whose words were evaluated.
    checked: usize,
    swept: usize,
    /// Of words, where they were looked into.
    sample: Sample,
    columns: Columns,
    /// So many are few.
    slots_max: usize,
    /// Items of which planes and posting lists tell what they were.
    changed: Option<Changed>,
    /// Tells the plans apart whose words a scratch may hold.
    number: u64,
}

static PLANS: AtomicU64 = AtomicU64::new(1);

/// Words in use while a plan is evaluated; kept between calls so that nothing is allocated.
#[derive(Debug, Default)]
pub struct Scratch {
    stack: Vec<u64>,
    /// The plan and the list of the last call, and how many lists came in a row.
    plan: u64,
    last: usize,
    in_a_row: u32,
    /// The lists whose words are the first of the stack.
    ahead: std::ops::Range<usize>,
    /// The plan whose words are kept, its words where they lie in a plane, and the lists whose words are there.
    keeps: u64,
    pub(super) kept: Vec<u64>,
    has: Vec<bool>,
}

impl Scratch {
    /// From here on the words of `plan` are kept, so that several searches with it evaluate each list once.
    pub fn keep(&mut self, plan: &Plan) {
        if self.keeps != plan.number {
            self.keeps = plan.number;
            self.has.clear();
        }
    }
}

impl Plan {
    /// Plans a filter for a snapshot's columns and index, of which so many items at most are searched one by one sooner than in the
    /// lists of a search.
    ///
    /// # Errors
    /// `Invalid` with the offset of the term for unknown columns and questions that a column cannot answer.
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

    /// The eligible slots, where few are; else a sample is taken.
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
        let is_cheap = sweep_ns <= SWEEP_NS_A_LIST * index.lists() as f64;
        if is_cheap
            && expected <= self.slots_max as f64
            && let Some(slots) = self.sweep(index)
        {
            return Some(slots);
        }
        walked.map(|_| self.posted(index))
    }

    /// The eligible slots that posting lists hold.
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

    /// The eligible slots by the words of all lists, unless these are many more than were expected.
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

    /// Keeps those that pass.
    fn check(&mut self, slots: &mut Vec<Slot>) {
        self.checked += slots.len();
        slots.retain(|&slot| self.passes(slot));
    }

    /// The same plan for a snapshot in which values have changed since its index was built; `filter` is what the plan was made of.
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

    /// The way to the eligible items.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// The estimated share of items that pass, 0 to 1.
    pub fn pass_rate(&self) -> f64 {
        self.pass_rate
    }

    /// What passes by its words, as some lists show it; counts of terms do not tell what they have in common.
    pub fn passing(&self, index: &Index) -> PassingShares {
        match self.route {
            Route::All => PassingShares { items: 1.0, lists: 1.0 },
            _ => self.sample.passing(self.pass_rate, index.items() as f64 / index.lists().max(1) as f64),
        }
    }

    /// The share of items whose words pass that the filter holds for, as a sample shows it.
    pub fn holding(&self) -> f64 {
        self.sample.holding()
    }

    /// True where [`Plan::words`] is the truth and not only an upper bound.
    pub fn is_exact(&self) -> bool {
        self.program.is_exact()
    }

    /// What [`Plan::words`] is thought to take, in nanoseconds of one core for each item.
    pub fn words_ns(&self) -> f64 {
        self.program.item_ns()
    }

    /// What [`Plan::passes`] is thought to take, in nanoseconds of one core.
    pub fn passes_ns(&self) -> f64 {
        questions(&self.root) as f64 * QUESTION_NS
    }

    /// What it took to make the plan, beside reading the filter, in nanoseconds of one core.
    pub fn planning_ns(&self) -> f64 {
        let asked = self.checked + self.sample.asked();
        asked as f64 * self.passes_ns() + (self.sample.items() + self.swept) as f64 * self.words_ns()
    }

    /// True where the item in the slot satisfies the filter.
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

    /// Evaluates the filter on one list: bit `i` of `out` (`[W]`, `W` = [`Index::words`]) is set for every item `i` of the
    /// list that passes, and for some that do not where the plan is not exact. Bits past the list's items are 0.
    ///
    /// Lists that are asked for in their order are evaluated many at a time, which a sweep over all of them profits from;
    /// those of a plan whose words are kept ([`Scratch::keep`]) are copied from the second time on.
    pub fn words(&self, index: &Index, list: ListId, scratch: &mut Scratch, out: &mut [u64]) {
        self.words_of_planes(index, list, scratch, out);
        if let Some(changed) = &self.changed {
            let first = index.first_slot(list);
            changed.put_right(&self.columns, first, first + index.length(list) as u32, out);
        }
    }

    /// The same by planes alone.
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

/// Two plans of one snapshot that ask the same.
impl PartialEq for Plan {
    fn eq(&self, other: &Self) -> bool {
        self.root == other.root && self.changed == other.changed
    }
}

/// The share of items that pass, with terms taken as independent.
fn pass_rate(node: &Node, columns: &Columns, index: &Index) -> f64 {
    let items = index.items().max(1) as f64;
    let rate = match node {
        Node::All => 1.0,
        Node::Nothing => 0.0,
        Node::And(parts) => parts.iter().map(|p| pass_rate(p, columns, index)).product(),
        Node::Or(parts) => 1.0 - parts.iter().map(|p| 1.0 - pass_rate(p, columns, index)).product::<f64>(),
        Node::Literal { question, negated } => {
            let rate = match question {
                // Of values that exclude each other shares add up.
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

/// About how many items a comparison holds for.
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
    // A sample of a thousand slots tells a share to within a few hundredths.
    let slots = index.list_end();
    let sampled = (0..slots).step_by((slots / 1024).max(1) as usize);
    let held = sampled.clone().filter(|&s| column.compares(comparison, Slot(s))).count();
    held as f64 / sampled.count().max(1) as f64 * index.items() as f64
}

/// How many questions a filter may ask one item.
fn questions(node: &Node) -> usize {
    match node {
        Node::All | Node::Nothing => 0,
        Node::Literal { question: Question::Terms { terms, .. }, .. } => terms.len(),
        Node::Literal { question: Question::Compares { .. }, .. } => 1,
        Node::And(parts) | Node::Or(parts) => parts.iter().map(questions).sum(),
    }
}

/// How many slots of posting lists hold all eligible ones; `None` where no posting lists do.
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

/// Whether some of the slots that posting lists hold may not be eligible.
fn has_and(node: &Node) -> bool {
    match node {
        Node::And(_) => true,
        Node::Or(parts) => parts.iter().any(has_and),
        _ => false,
    }
}

/// Adds the slots that [`walk`] counted, in no order.
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
