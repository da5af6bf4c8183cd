//! Postfix program of a plan, and its evaluation over consecutive lists.
//!
//! The stack holds bitmaps of consecutive lists. A leaf usually does not push: it narrows the bitmap on top (`Keep`,
//! `DropPosted`, `Bloom`, `Number`, `Compare`). A conjunction of leaves is then a chain of flat loops over one bitmap, and leaves
//! that test single items see only the items that cheaper leaves left. Every bitmap is 0 in slots without an item,
//! also after a negation.
//!
//! A posting list has few items, so its bitmap is built from zeros and pushed.

use super::index::{Index, Run, TermHash, TermStorage};
use super::question::{Node, Question};
use crate::columns::{Column, Columns, Comparison};
use sterling_core::units::{ListId, TermId};

/// Integer comparisons that cover at most this many values, all with exact planes, use those planes.
const VALUE_PLANES_MAX: usize = 64;
/// Prefetch distance for Bloom planes, in lists.
const BLOOM_AHEAD: usize = 4;
/// Words of a comparison that are evaluated at a time.
const BUCKET_WORDS: usize = 16;

/// Estimated cost of a step in nanoseconds per item: for planes, a posting list, a Bloom filter, buckets including the few items
/// tested one by one, and a comparison with every item.
const PLANE_NS: f64 = 0.02;
const POSTED_NS: f64 = 0.1;
const BLOOM_NS: f64 = 0.35;
const NUMBER_NS: f64 = 0.5;
const COMPARE_NS: f64 = 10.0;

#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Pushes the bitmap of all items.
    Every,
    /// Pushes an empty bitmap.
    None,
    /// Pushes a plane or its complement.
    Push { plane: usize, negated: bool },
    /// ANDs a plane or its complement.
    Keep { plane: usize, negated: bool },
    /// ORs a plane.
    Add { plane: usize },
    /// Pushes the items of a posting list; `hash` is the hash of its term.
    PushPosted {
        posting: usize,
        #[cfg_attr(
            not(feature = "cuda"),
            expect(dead_code, reason = "a GPU has Bloom planes in place of posting lists")
        )]
        hash: TermHash,
    },
    /// ORs the items of a posting list.
    AddPosted {
        posting: usize,
        #[cfg_attr(
            not(feature = "cuda"),
            expect(dead_code, reason = "a GPU has Bloom planes in place of posting lists")
        )]
        hash: TermHash,
    },
    /// ANDs the complement of a posting list.
    DropPosted { posting: usize },
    /// ANDs the planes of a term's Bloom positions.
    Bloom { hash: TermHash },
    /// ANDs a comparison by buckets.
    Number { sure: Vec<Run>, unsure: Vec<Run>, column: usize, comparison: Comparison, negated: bool },
    /// ANDs a comparison evaluated per item.
    Compare { column: usize, comparison: Comparison, negated: bool },
    /// Pops a bitmap and ANDs it.
    And,
    /// Pops a bitmap and ORs it.
    Or,
}

impl Step {
    /// Returns the stack height after the step.
    fn height_after(&self, height: usize) -> usize {
        match self {
            Step::Every | Step::None | Step::Push { .. } | Step::PushPosted { .. } => height + 1,
            Step::And | Step::Or => height - 1,
            _ => height,
        }
    }

    fn item_ns(&self) -> f64 {
        match self {
            Step::PushPosted { .. } | Step::AddPosted { .. } | Step::DropPosted { .. } => POSTED_NS,
            Step::Bloom { .. } => BLOOM_NS,
            Step::Number { sure, unsure, .. } => NUMBER_NS + (sure.len() + unsure.len()) as f64 * PLANE_NS,
            Step::Compare { .. } => COMPARE_NS,
            _ => PLANE_NS,
        }
    }
}

/// Compiled filter.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) steps: Vec<Step>,
    pub(super) depth: usize,
    exact: bool,
}

/// Returns the relative cost of a part of a conjunction; cheap parts run first.
fn rank(node: &Node, index: &Index) -> u8 {
    match node {
        Node::All | Node::Nothing => 0,
        Node::Literal { question: Question::Terms { terms, .. }, negated } => {
            match (terms.as_slice(), terms.first().map(|&first| index.held(first))) {
                ([_], Some(TermStorage::Plane(_))) => 1,
                ([_], Some(TermStorage::Posting(_))) if !negated => 0,
                _ if *negated => 2,
                ([_], Some(TermStorage::Bloom)) => 5,
                _ => 4,
            }
        }
        Node::Literal { question: Question::Compares { column, comparison }, .. } => {
            if index.numbers.answer(*column, comparison).is_some() { 3 } else { 6 }
        }
        Node::And(_) | Node::Or(_) => 4,
    }
}

impl Program {
    pub(super) fn of(root: &Node, columns: &Columns, index: &Index) -> Self {
        let mut program = Program { steps: Vec::new(), depth: 0, exact: true };
        Compiler { program: &mut program, columns, index, height: 0 }.push(root);
        program
    }

    /// Returns true if the bitmap is exact, false if it is only an upper bound.
    pub(super) fn is_exact(&self) -> bool {
        self.exact
    }

    /// Estimates the cost of an evaluation, in nanoseconds of one core per item.
    pub(super) fn item_ns(&self) -> f64 {
        self.steps.iter().map(Step::item_ns).sum()
    }

    /// Evaluates the program over consecutive lists; the result is at the start of `stack`.
    pub(super) fn run(&self, columns: &Columns, index: &Index, lists: std::ops::Range<usize>, stack: &mut Vec<u64>) {
        let span = index.span(lists.clone());
        let words = span.len();
        if stack.len() < self.depth * words {
            stack.resize(self.depth * words, 0);
        }
        let mut height = 0;
        for step in &self.steps {
            height = step.height_after(height);
            let top = (height - 1) * words;
            let (run, above) = stack[top..].split_at_mut(words);
            match step {
                Step::Every => run.copy_from_slice(&index.every[span.clone()]),
                Step::None => run.fill(0),
                Step::Push { plane, negated: false } => run.copy_from_slice(index.plane(*plane, span.clone())),
                Step::Push { plane, negated: true } => {
                    let pairs = index.every[span.clone()].iter().zip(index.plane(*plane, span.clone()));
                    run.iter_mut().zip(pairs).for_each(|(to, (every, plane))| *to = every & !plane);
                }
                Step::Keep { plane, negated } => {
                    let plane = index.plane(*plane, span.clone());
                    match negated {
                        false => run.iter_mut().zip(plane).for_each(|(r, p)| *r &= p),
                        true => run.iter_mut().zip(plane).for_each(|(r, p)| *r &= !p),
                    }
                }
                Step::Add { plane } => {
                    run.iter_mut().zip(index.plane(*plane, span.clone())).for_each(|(r, p)| *r |= p);
                }
                Step::PushPosted { posting, .. } => {
                    run.fill(0);
                    index.posted(*posting, lists.clone()).for_each(|(word, bit)| run[word] |= bit);
                }
                Step::AddPosted { posting, .. } => {
                    index.posted(*posting, lists.clone()).for_each(|(word, bit)| run[word] |= bit);
                }
                Step::DropPosted { posting } => {
                    index.posted(*posting, lists.clone()).for_each(|(word, bit)| run[word] &= !bit);
                }
                Step::And => run.iter_mut().zip(&above[..words]).for_each(|(r, a)| *r &= a),
                Step::Or => run.iter_mut().zip(&above[..words]).for_each(|(r, a)| *r |= a),
                Step::Bloom { hash } => {
                    let mut at = 0;
                    for list in lists.clone() {
                        if list + BLOOM_AHEAD < lists.end {
                            index.prefetch_bloom(ListId((list + BLOOM_AHEAD) as u32), *hash);
                        }
                        let list = ListId(list as u32);
                        let end = at + index.words(list);
                        index.bloom(list, *hash, &mut run[at..end]);
                        at = end;
                    }
                }
                Step::Number { sure, unsure, column, comparison, negated } => {
                    let looked = ItemTest { column: columns.at(*column), comparison, negated: *negated };
                    looked.and_comparison(index, sure, unsure, span.start, run);
                }
                Step::Compare { column, comparison, negated } => {
                    let looked = ItemTest { column: columns.at(*column), comparison, negated: *negated };
                    for (n, word) in run.iter_mut().enumerate() {
                        *word = looked.holding(index, span.start + n, *word);
                    }
                }
            }
        }
    }
}

/// Comparison that tests items one by one.
struct ItemTest<'a> {
    column: &'a Column,
    comparison: &'a Comparison,
    negated: bool,
}

impl ItemTest<'_> {
    /// Tests the `requested` items of a word against the comparison or its negation.
    fn holding(&self, index: &Index, word: usize, requested: u64) -> u64 {
        if requested == 0 {
            return 0;
        }
        let holding = self.column.holding(self.comparison, index.word_slots[word], requested);
        if self.negated { requested & !holding } else { holding }
    }

    /// ANDs the comparison into the words from `first` on. Buckets in `sure` pass entirely; items of `unsure` are tested.
    fn and_comparison(&self, index: &Index, sure: &[Run], unsure: &[Run], first: usize, run: &mut [u64]) {
        let flip = if self.negated { u64::MAX } else { 0 };
        let (mut passing, mut open) = ([0; BUCKET_WORDS], [0; BUCKET_WORDS]);
        for (n, words) in run.chunks_mut(BUCKET_WORDS).enumerate() {
            let at = first + n * BUCKET_WORDS..first + n * BUCKET_WORDS + words.len();
            index.runs(sure, at.clone(), &mut passing[..words.len()]);
            index.runs(unsure, at.clone(), &mut open[..words.len()]);
            for (((word, passing), open), at) in words.iter_mut().zip(passing).zip(open).zip(at) {
                *word = *word & (passing ^ flip) & !open | self.holding(index, at, *word & open);
            }
        }
    }
}

struct Compiler<'a> {
    program: &'a mut Program,
    columns: &'a Columns,
    index: &'a Index,
    height: usize,
}

impl Compiler<'_> {
    fn emit(&mut self, step: Step) {
        self.height = step.height_after(self.height);
        self.program.depth = self.program.depth.max(self.height);
        self.program.steps.push(step);
    }

    /// Pushes the bitmap of a node.
    fn push(&mut self, node: &Node) {
        match node {
            Node::All => self.emit(Step::Every),
            Node::Nothing => self.emit(Step::None),
            Node::Literal { question, negated: false } => match self.terms(question) {
                Some(terms) => self.push_any(&terms),
                None => {
                    self.emit(Step::Every);
                    self.narrow(node);
                }
            },
            Node::Literal { question, .. } => {
                let plane = match self.terms(question).as_deref() {
                    Some([one]) => self.index.exact_plane(*one),
                    _ => None,
                };
                match plane {
                    Some(plane) => self.emit(Step::Push { plane, negated: true }),
                    None => {
                        self.emit(Step::Every);
                        self.narrow(node);
                    }
                }
            }
            Node::And(parts) => {
                let mut parts: Vec<&Node> = parts.iter().collect();
                parts.sort_by_key(|p| rank(p, self.index));
                for (n, part) in parts.into_iter().enumerate() {
                    if n == 0 { self.push(part) } else { self.narrow(part) }
                }
            }
            Node::Or(parts) => {
                for (n, part) in parts.iter().enumerate() {
                    if n == 0 { self.push(part) } else { self.widen(part) }
                }
            }
        }
    }

    /// Pushes the items that have one of the terms.
    fn push_any(&mut self, terms: &[TermId]) {
        match terms {
            [] => self.emit(Step::None),
            [first, others @ ..] => {
                self.push_one(*first);
                others.iter().for_each(|&term| self.add(term));
            }
        }
    }

    fn push_one(&mut self, term: TermId) {
        match self.index.held(term) {
            TermStorage::Plane(plane) => self.emit(Step::Push { plane, negated: false }),
            TermStorage::Posting(posting) => self.emit(Step::PushPosted { posting, hash: self.hash(term) }),
            TermStorage::Bloom => {
                self.emit(Step::Every);
                self.bloom(term);
            }
        }
    }

    /// ORs the items that have a term.
    fn add(&mut self, term: TermId) {
        match self.index.held(term) {
            TermStorage::Plane(plane) => self.emit(Step::Add { plane }),
            TermStorage::Posting(posting) => self.emit(Step::AddPosted { posting, hash: self.hash(term) }),
            TermStorage::Bloom => {
                self.push_one(term);
                self.emit(Step::Or);
            }
        }
    }

    fn hash(&self, term: TermId) -> TermHash {
        self.index.hash(&self.columns.term_key(term).unwrap_or_default())
    }

    fn bloom(&mut self, term: TermId) {
        self.program.exact = false;
        self.emit(Step::Bloom { hash: self.hash(term) });
    }

    /// ANDs a node into the bitmap on top.
    fn narrow(&mut self, node: &Node) {
        let Node::Literal { question, negated } = node else {
            if *node != Node::All {
                self.push(node);
                self.emit(Step::And);
            }
            return;
        };
        match (self.terms(question), question) {
            (Some(terms), _) if *negated => {
                // In a negated test, every term must be absent. Terms with only Bloom planes do not narrow the bitmap;
                // verification handles them.
                for term in terms {
                    match self.index.held(term) {
                        TermStorage::Plane(plane) => self.emit(Step::Keep { plane, negated: true }),
                        TermStorage::Posting(posting) => self.emit(Step::DropPosted { posting }),
                        TermStorage::Bloom => self.program.exact = false,
                    }
                }
            }
            (Some(terms), _) => match terms.as_slice() {
                [one] if let TermStorage::Plane(plane) = self.index.held(*one) => {
                    self.emit(Step::Keep { plane, negated: false });
                }
                [one] if self.index.held(*one) == TermStorage::Bloom => self.bloom(*one),
                any => {
                    self.push_any(any);
                    self.emit(Step::And);
                }
            },
            (None, Question::Compares { column, comparison }) => {
                let (column, comparison, negated) = (*column, comparison.clone(), *negated);
                self.emit(match self.index.numbers.answer(column, &comparison) {
                    Some(answer) => {
                        Step::Number { sure: answer.sure, unsure: answer.unsure, column, comparison, negated }
                    }
                    None => Step::Compare { column, comparison, negated },
                });
            }
            (None, Question::Terms { .. }) => {}
        }
    }

    /// ORs a node into the bitmap on top.
    fn widen(&mut self, node: &Node) {
        if let Node::Literal { question, negated: false } = node
            && let Some(terms) = self.terms(question)
        {
            terms.into_iter().for_each(|term| self.add(term));
            return;
        }
        self.push(node);
        self.emit(Step::Or);
    }

    /// Returns the terms equivalent to a test: its own terms, or the few frequent values that a comparison covers.
    fn terms(&self, question: &Question) -> Option<Vec<TermId>> {
        match question {
            Question::Terms { terms, .. } => Some(terms.clone()),
            Question::Compares { column, comparison: Comparison::Codes(ranges) } => {
                let first = self.columns.at(*column).first_term()?;
                let covered: usize = ranges.iter().map(ExactSizeIterator::len).sum();
                let terms = || ranges.iter().cloned().flatten().map(|code| TermId(first.0 + code));
                (covered <= VALUE_PLANES_MAX && terms().all(|t| self.index.exact_plane(t).is_some()))
                    .then(|| terms().collect())
            }
            Question::Compares { .. } => None,
        }
    }
}
