//! The reranker: an ONNX graph that sees the user and every candidate.
//!
//! The reranker finds its inputs by name. Some names are tensors of the user, `[Q, ...]`, or rows of candidates, `[Q,
//! K0, ...]`, as listed by the caller ([`Readable`]). All others are numbers of candidates, `[Q, K0]`: the retrieval
//! score ([`OverArch::SIMILARITY`]) and numeric item columns.
//!
//! Its output `logits` `[Q, K0, T]` becomes task scores through a sigmoid. A compiled graph ([`crate::dense`])
//! runs over blocks of candidates, whose rows it reads in place; any other graph runs in `rten` over copies of at
//! most [`RUN_CANDIDATES`] rows, fewer if they are wide. Either way the memory of a request does not grow with K0 times
//! the width of a row; the width of a sequence is `S` times its table's.

use std::ops::Range;

use super::Scratch;
use super::part::ItemPart;
use super::reads::{Candidates, Readable, Reads, TensorOwner, check};
use crate::dense::{DeclaredOutput, InputRows, ItemCut, Precision, ReadGraph, RowProgram, Size};
use crate::tower::{Graph, Input, Runs, Threads};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::tensor::Tensor;
use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::dense::{MapTarget, Operand, Unary};

/// Maximum number of candidates of one query per run of `rten`.
pub const RUN_CANDIDATES: usize = 2048;

/// Maximum number of f32 values copied per run, 64 MiB; a single candidate may exceed it.
const RUN_NUMBERS: usize = 1 << 24;

const LOGITS: &str = "logits";

/// A reranker with its tasks.
#[derive(Debug)]
pub struct OverArch {
    graph: Graph,
    runs: Runs,
    /// Inputs of the graph.
    declared: Reads,
    /// Inputs read per user and candidate: the same, or, with an item-side part, the remaining ones.
    reads: Reads,
    part: Option<ItemPart>,
    tasks: usize,
}

/// A call of [`OverArch::score`].
struct Scoring<'a> {
    candidates: &'a Candidates<'a>,
    threads: &'a Threads,
    scratch: &'a mut Scratch,
    between: &'a mut dyn FnMut() -> Result<()>,
    tasks: &'a mut [f32],
}

impl OverArch {
    /// Name of the retrieval score among the numbers of candidates.
    pub const SIMILARITY: &'static str = Reads::SIMILARITY;

    /// Creates a reranker from a graph with the given number of tasks. Its inputs are some of `readable`, or numbers of
    /// candidates.
    ///
    /// # Errors
    /// `Invalid` if an input or the output has another shape, or no input belongs to a candidate.
    pub fn new(mut graph: Graph, readable: &[Readable], tasks: usize) -> Result<Self> {
        let reads = self::reads(&graph, readable, tasks)?;
        let runs = graph.lower(&reads.given(), &[logits(tasks)])?;
        Ok(OverArch { graph, runs, declared: reads.clone(), reads, part: None, tasks })
    }

    /// Creates a reranker with item-side precomputation of the values of `cut`.
    ///
    /// # Errors
    /// As [`OverArch::new`]; `Unsupported` if the graph cannot be compiled, `Invalid` for a cut of another graph.
    pub fn with_part(graph: Graph, readable: &[Readable], tasks: usize, cut: &ItemCut) -> Result<Self> {
        let declared = reads(&graph, readable, tasks)?;
        let (is_item, precision) = (declared.are_of_item(), graph.precision());
        let halves =
            graph.network(&declared.given(), &[logits(tasks)], |network| network.halves(&is_item, cut, precision))?;
        let kept = Readable { name: String::new(), whose: TensorOwner::Candidate, shape: vec![halves.width] };
        let mut reads = declared.some(&halves.candidate_inputs);
        reads.rows.insert(0, kept);
        let item_reads = declared.some(&halves.item_inputs);
        let part = ItemPart::new(cut.clone(), halves.item, item_reads, halves.width, halves.digest);
        let runs = Runs::Program(Box::new(halves.candidates));
        Ok(OverArch { graph: graph.read(), runs, declared, reads, part: Some(part), tasks })
    }

    /// Returns the best cut for item-side precomputation; `None` if the graph cannot be compiled, or the cut
    /// would hardly make candidates cheaper.
    ///
    /// # Errors
    /// As [`OverArch::new`].
    pub fn best_cut(graph: &Graph, readable: &[Readable], tasks: usize) -> Result<Option<ItemCut>> {
        let reads = self::reads(graph, readable, tasks)?;
        let (is_item, work) = (reads.are_of_item(), reads.work());
        match graph.network(&reads.given(), &[logits(tasks)], |network| network.best_cut(&is_item, &work)) {
            Err(e) if e.kind() == Kind::Unsupported => Ok(None),
            cut => cut,
        }
    }

    /// Returns the item-side part, if there is one. Its results come first in the rows that [`OverArch::rows`] lists.
    pub fn part(&self) -> Option<&ItemPart> {
        self.part.as_ref()
    }

    /// Returns all inputs of the graph, including those of the item-side part.
    pub fn declared(&self) -> &Reads {
        &self.declared
    }

    /// Returns the tensors of the user that the graph reads.
    pub fn user(&self) -> &[Readable] {
        &self.reads.user
    }

    /// Returns the rows of candidates that it reads.
    pub fn rows(&self) -> &[Readable] {
        &self.reads.rows
    }

    /// Returns the numbers of candidates that it reads: item columns, and [`OverArch::SIMILARITY`].
    pub fn numbers(&self) -> impl ExactSizeIterator<Item = &str> {
        self.reads.number_names()
    }

    /// Returns the numbers in the rows of a candidate.
    pub fn row_width(&self) -> usize {
        self.reads.row_width()
    }

    /// Returns the precision of its program's products.
    pub fn precision(&self) -> Precision {
        self.graph.precision()
    }

    /// Returns the number of tasks, T.
    pub fn tasks(&self) -> usize {
        self.tasks
    }

    /// Returns the cost of scoring candidates, in multiply-adds or equivalents: those of the program, or one for each of
    /// the graph's weights and each number of the user's tensors, which may meet every candidate; plus the lookups of sequence
    /// rows.
    pub fn work(&self, candidates: usize) -> usize {
        let places: usize = self.reads.rows.iter().map(Readable::places).filter(|places| *places > 1).sum();
        let looking_up = (places * ReadGraph::work_of_row(0)).saturating_mul(candidates);
        looking_up.saturating_add(self.graph_work(candidates))
    }

    fn graph_work(&self, candidates: usize) -> usize {
        let user: usize = self.reads.user.iter().filter(|input| input.shape.len() > 1).map(Readable::count).sum();
        match &self.runs {
            Runs::Program(program) => program.work(candidates),
            Runs::Runtime(_) => (self.graph.weights() + user).saturating_mul(candidates),
        }
    }

    /// Returns the name of the graph's file, and its runtime.
    pub fn graph(&self) -> (&str, &Runs) {
        (self.graph.name(), &self.runs)
    }

    /// Returns the compiled program, if there is one. Its rows are an item's row followed by its columns.
    pub fn program(&self) -> Option<&RowProgram> {
        self.runs.program()
    }

    /// Returns whether a compiled program scores, rather than `rten`.
    pub fn is_program(&self) -> bool {
        self.program().is_some()
    }

    /// Writes the task scores of candidates, `[T, count]`, to `tasks`. Calls `between` before every block; its error stops the
    /// run. Returns false if a score is NaN, which may be the fault of one candidate.
    ///
    /// # Errors
    /// Errors of the graph's run and of `between`.
    pub fn score(
        &self,
        candidates: &Candidates<'_>,
        threads: &Threads,
        scratch: &mut Scratch,
        between: &mut dyn FnMut() -> Result<()>,
        tasks: &mut [f32],
    ) -> Result<bool> {
        self.run(&mut Scoring { candidates, threads, scratch, between, tasks })?;
        Ok(!tasks.iter().any(|score| score.is_nan()))
    }

    /// Runs the graph for sandbox validation: returns whether all computed logits are finite. If `between` ends the run by a
    /// deadline, that covers the candidates until then.
    ///
    /// # Errors
    /// Other errors of the graph's run and of `between`.
    pub fn try_out(
        &self,
        candidates: &Candidates<'_>,
        threads: &Threads,
        scratch: &mut Scratch,
        between: &mut dyn FnMut() -> Result<()>,
        tasks: &mut [f32],
    ) -> Result<bool> {
        scratch.has_finite_logits = true;
        match self.run(&mut Scoring { candidates, threads, scratch, between, tasks }) {
            Err(e) if e.kind() != Kind::DeadlineExceeded => Err(e),
            _ => Ok(scratch.has_finite_logits),
        }
    }

    fn run(&self, scoring: &mut Scoring<'_>) -> Result<()> {
        let candidates = scoring.candidates;
        let missing = |inputs: &[Readable], given: usize| inputs.get(given).map(|input| input.name.clone());
        let missing =
            missing(&self.reads.user, candidates.user.len()).or(missing(&self.reads.numbers, candidates.numbers.len()));
        if let Some(name) = missing {
            return Err(Error::invalid(format!("{}: input `{name}` is missing", self.graph.name())));
        }
        if candidates.count == 0 {
            return Ok(());
        }
        match &self.runs {
            Runs::Program(program) => self.run_program(program, scoring),
            Runs::Runtime(_) => self.run_graph(scoring),
        }
    }

    fn run_program(&self, program: &RowProgram, scoring: &mut Scoring<'_>) -> Result<()> {
        let Scoring { candidates, scratch, between, tasks, .. } = scoring;
        let (kernels, width) = (Kernels::best(), self.row_width());
        let (logits, has_finite) = (&mut scratch.logits, &mut scratch.has_finite_logits);
        let mut fill = |given: InputRows<'_>| candidates.write(width, given);
        let count = candidates.count;
        between()?;
        program.run(count, candidates.user, &mut scratch.program, &mut fill, &mut |first, rows, block| {
            let made = block.output(0);
            for task in 0..self.tasks {
                logits.clear();
                logits.extend((0..rows).map(|n| made.row(n)[task]));
                *has_finite &= logits.iter().all(|logit| logit.is_finite());
                let logits = Operand { numbers: logits, row: 0, outer: 0, inner: 1 };
                let scores = &mut tasks[task * count + first..][..rows];
                let mut scores = MapTarget { numbers: scores, stride: rows, rows: 1, outer: 1, inner: rows };
                kernels.map1(Unary::Sigmoid, &logits, &mut scores);
            }
            between()
        })
    }

    fn run_graph(&self, scoring: &mut Scoring<'_>) -> Result<()> {
        let Scoring { candidates, threads, scratch, between, tasks } = scoring;
        let count = candidates.count;
        let run = run_of(self.row_width());
        for first in (0..count).step_by(run) {
            between()?;
            let range = first..(first + run).min(count);
            self.gather(candidates, range.clone(), scratch);
            let logits = self.run_some(candidates, range.clone(), &scratch.rows, threads)?;
            scratch.has_finite_logits &= logits.data().iter().all(|logit| logit.is_finite());
            for (n, of_item) in range.zip(logits.data().chunks_exact(self.tasks)) {
                let scores = of_item.iter().map(|logit| 1.0 / (1.0 + (-logit).exp()));
                scores.enumerate().for_each(|(task, score)| tasks[task * count + n] = score);
            }
        }
        Ok(())
    }

    /// Copies the rows of some candidates, input after input.
    fn gather(&self, candidates: &Candidates<'_>, range: Range<usize>, scratch: &mut Scratch) {
        let Scratch { rows, row, .. } = scratch;
        let width = self.row_width();
        rows.resize(range.len() * width, 0.0);
        row.resize(width, 0.0);
        for (place, n) in range.clone().enumerate() {
            (candidates.rows)(InputRows { rows: n..n + 1, numbers: row, stride: width, width });
            let (mut from, mut to) = (&row[..], &mut rows[..]);
            for width in self.reads.rows.iter().map(Readable::count) {
                to[place * width..][..width].copy_from_slice(&from[..width]);
                (from, to) = (&from[width..], &mut to[range.len() * width..]);
            }
        }
    }

    fn run_some(
        &self,
        candidates: &Candidates<'_>,
        range: Range<usize>,
        mut rows: &[f32],
        threads: &Threads,
    ) -> Result<Tensor> {
        let shapes: Vec<Vec<usize>> = self.reads.all().map(|input| input.sizes(range.len())).collect();
        let user = candidates.user.iter().copied();
        let rows = self.reads.rows.iter().map(|input| {
            let (here, rest) = rows.split_at(input.count() * range.len());
            rows = rest;
            here
        });
        let numbers = candidates.numbers.iter().map(|column| &column[range.clone()]);
        let values = user.chain(rows).chain(numbers);
        let named = self.reads.all().zip(&shapes).zip(values);
        let inputs: Vec<Input<'_>> =
            named.map(|((input, shape), values)| Input { name: &input.name, shape, values }).collect();
        let logits = self.graph.run(&inputs, LOGITS, threads)?;
        match logits.shape() == [1, range.len(), self.tasks] {
            true => Ok(logits),
            false => Err(Error::internal(format!(
                "{}: `{LOGITS}` has shape {:?}, expected [1, {}, {}]",
                self.graph.name(),
                logits.shape(),
                range.len(),
                self.tasks
            ))),
        }
    }
}

/// Returns the number of candidates per run of `rten`, for rows of this width.
fn run_of(row_width: usize) -> usize {
    (RUN_NUMBERS / row_width.max(1)).clamp(1, RUN_CANDIDATES)
}

fn logits(tasks: usize) -> DeclaredOutput {
    DeclaredOutput { name: LOGITS.into(), shape: vec![Size::Fixed(1), Size::Rows, Size::Fixed(tasks as i64)] }
}

/// Returns the inputs of a graph as reranker of `tasks` tasks.
fn reads(graph: &Graph, readable: &[Readable], tasks: usize) -> Result<Reads> {
    let reads = Reads::of(graph, readable)?;
    check(graph, graph.output(LOGITS)?, &logits(tasks).shape)?;
    match reads.rows.is_empty() && reads.numbers.is_empty() {
        true => {
            Err(Error::invalid(format!("{}: no input depends on candidates, expected `item` or another", graph.name())))
        }
        false => Ok(reads),
    }
}

#[cfg(test)]
mod tests;
