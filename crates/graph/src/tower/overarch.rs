//! The reranker: an ONNX graph with inputs of the user and of every candidate.
//!
//! The reranker finds its inputs by name. Some names are tensors of the user, `[Q, ...]`, or rows of candidates, `[Q,
//! K0, ...]`; the caller lists both kinds ([`Readable`]). Every other name is a number per candidate, `[Q, K0]`: the
//! retrieval score ([`OverArch::SIMILARITY`]) and numeric item columns.
//!
//! The output `logits` `[Q, K0, T]` becomes task scores through a sigmoid. A compiled graph ([`crate::dense`]) runs
//! over blocks of candidates, whose rows are read in place; any other graph runs in `rten` over copies of at most
//! [`RUN_CANDIDATES`] rows, or fewer wide rows. In both cases the memory of a request does not grow with K0 times the
//! width of a row; a sequence of `S` positions is `S` times as wide as its table.

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

/// Maximum count of f32 values copied per run, 64 MiB; a single candidate may have more.
const RUN_NUMBERS: usize = 1 << 24;

const LOGITS: &str = "logits";

/// A reranker with its tasks.
#[derive(Debug)]
pub struct OverArch {
    graph: Graph,
    runs: Runs,
    /// All inputs of the graph.
    declared: Reads,
    /// Inputs read per user and candidate: all inputs or, with an item-side part, those of the candidate side.
    reads: Reads,
    part: Option<ItemPart>,
    tasks: usize,
}

/// Arguments of a call of [`OverArch::score`].
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

    /// Creates a reranker from a graph with `tasks` tasks. An input of the graph is one of `readable`, or one number
    /// per candidate.
    ///
    /// # Errors
    /// `Invalid` if an input or the output has the wrong shape, or no input belongs to a candidate.
    pub fn new(mut graph: Graph, readable: &[Readable], tasks: usize) -> Result<Self> {
        let reads = self::reads(&graph, readable, tasks)?;
        let runs = graph.lower(&reads.given(), &[logits(tasks)])?;
        Ok(OverArch { graph, runs, declared: reads.clone(), reads, part: None, tasks })
    }

    /// Creates a reranker whose values in `cut` are precomputed per item.
    ///
    /// # Errors
    /// As [`OverArch::new`]; `Unsupported` if the graph cannot be compiled, `Invalid` if `cut` belongs to another
    /// graph.
    pub fn with_part(graph: Graph, readable: &[Readable], tasks: usize, cut: &ItemCut) -> Result<Self> {
        let declared = reads(&graph, readable, tasks)?;
        let (is_item, precision) = (declared.are_of_item(), graph.precision());
        let halves =
            graph.network(&declared.given(), &[logits(tasks)], |network| network.halves(&is_item, cut, precision))?;
        let retained = Readable { name: String::new(), whose: TensorOwner::Candidate, shape: vec![halves.width] };
        let mut reads = declared.some(&halves.candidate_inputs);
        reads.rows.insert(0, retained);
        let item_reads = declared.some(&halves.item_inputs);
        let part = ItemPart::new(cut.clone(), halves.item, item_reads, halves.width, halves.digest);
        let runs = Runs::Program(Box::new(halves.candidates));
        Ok(OverArch { graph: graph.read(), runs, declared, reads, part: Some(part), tasks })
    }

    /// Returns the best cut for item-side precomputation; `None` if the graph cannot be compiled, or no cut makes
    /// candidates much cheaper.
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

    /// Returns the item-side part, if there is one. The results of the part come first in the rows that
    /// [`OverArch::rows`] lists.
    pub fn part(&self) -> Option<&ItemPart> {
        self.part.as_ref()
    }

    /// Returns all inputs of the graph, including inputs that only the item-side part reads.
    pub fn declared(&self) -> &Reads {
        &self.declared
    }

    /// Returns the tensors of the user that the graph reads.
    pub fn user(&self) -> &[Readable] {
        &self.reads.user
    }

    /// Returns the rows of candidates that the graph reads.
    pub fn rows(&self) -> &[Readable] {
        &self.reads.rows
    }

    /// Returns the scalars of candidates that the graph reads: item columns, and [`OverArch::SIMILARITY`].
    pub fn numbers(&self) -> impl ExactSizeIterator<Item = &str> {
        self.reads.number_names()
    }

    /// Returns the number of elements in a candidate's rows.
    pub fn row_width(&self) -> usize {
        self.reads.row_width()
    }

    /// Returns the precision of the products in the compiled graph.
    pub fn precision(&self) -> Precision {
        self.graph.precision()
    }

    /// Returns the number of tasks, T.
    pub fn tasks(&self) -> usize {
        self.tasks
    }

    /// Returns the cost of scoring candidates, in multiply-adds or equivalents: the cost of the compiled program, or
    /// per candidate one multiply-add for each weight of the graph and each number of the user's tensors; plus the
    /// lookups of sequence rows.
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

    /// Returns the name of the graph's file, and how the graph runs.
    pub fn graph(&self) -> (&str, &Runs) {
        (self.graph.name(), &self.runs)
    }

    /// Returns the compiled program, if there is one. The program's input rows are the rows of a candidate, followed by
    /// the candidate's numbers.
    pub fn program(&self) -> Option<&RowProgram> {
        self.runs.program()
    }

    /// Returns whether a compiled program computes the scores, rather than `rten`.
    pub fn is_program(&self) -> bool {
        self.program().is_some()
    }

    /// Writes the task scores of candidates, `[T, count]`, to `tasks`. Calls `between` before every block; an error of
    /// `between` stops the run. Returns false if a score is NaN, which may be the fault of one candidate.
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

    /// Runs the graph for sandbox validation: returns whether all computed logits are finite. If `between` ends the run
    /// because of a deadline, the result covers the candidates computed until then.
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
        match self.run(&mut Scoring { candidates, threads, scratch, between, tasks }) {
            Err(e) if e.kind() != Kind::DeadlineExceeded => Err(e),
            _ => Ok(scratch.not_finite.is_empty()),
        }
    }

    fn run(&self, scoring: &mut Scoring<'_>) -> Result<()> {
        let candidates = scoring.candidates;
        scoring.scratch.not_finite.clear();
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
        let (logits, not_finite) = (&mut scratch.logits, &mut scratch.not_finite);
        let mut fill = |given: InputRows<'_>| candidates.write(width, given);
        let count = candidates.count;
        between()?;
        program.run(count, candidates.user, &mut scratch.program, &mut fill, &mut |first, rows, block| {
            let made = block.output(0);
            for task in 0..self.tasks {
                logits.clear();
                logits.extend((0..rows).map(|n| made.row(n)[task]));
                not_finite.extend((0..rows).filter(|&n| !logits[n].is_finite()).map(|n| first + n));
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
            for (n, of_item) in range.zip(logits.data().chunks_exact(self.tasks)) {
                if of_item.iter().any(|logit| !logit.is_finite()) {
                    scratch.not_finite.push(n);
                }
                let scores = of_item.iter().map(|logit| 1.0 / (1.0 + (-logit).exp()));
                scores.enumerate().for_each(|(task, score)| tasks[task * count + n] = score);
            }
        }
        Ok(())
    }

    /// Copies the rows of the candidates in `range`, input after input.
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

/// Returns the number of candidates per run of `rten`, for rows of `row_width` numbers.
fn run_of(row_width: usize) -> usize {
    (RUN_NUMBERS / row_width.max(1)).clamp(1, RUN_CANDIDATES)
}

fn logits(tasks: usize) -> DeclaredOutput {
    DeclaredOutput { name: LOGITS.into(), shape: vec![Size::Fixed(1), Size::Rows, Size::Fixed(tasks as i64)] }
}

/// Returns the inputs of a graph that is a reranker with `tasks` tasks.
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
