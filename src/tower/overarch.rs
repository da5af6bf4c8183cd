//! The reranker: an ONNX graph that sees the user and every candidate.
//!
//! What it reads it finds by name. Some names stand for tensors of the user, `[Q, ...]`, or for rows of candidates, `[Q, K0, ...]`: the
//! caller says which ([`Readable`]). All others are numbers of candidates, `[Q, K0]`: the retrieval score
//! ([`OverArch::SIMILARITY`]) and numeric item columns.
//!
//! Its output `logits` `[Q, K0, T]` becomes task scores through a sigmoid. A graph that is a program of ours ([`crate::dense`])
//! runs over blocks of candidates, whose rows it takes straight from where they lie; any other runs in `rten` over copies of at
//! most [`RUN_CANDIDATES`] rows. Either way the memory of a request does not grow with K0 times the width of a row.

use std::ops::Range;

use super::Scratch;
use crate::dense::{Given, Made, RowProgram, Size};
use crate::device::cpu::Kernels;
use crate::device::cpu::dense::{MapTarget, Operand, Unary};
use crate::error::{Error, Kind, Result};
use crate::tensor::Tensor;
use crate::tower::{Graph, Input, Port, Runs, Threads, shown};

/// Most candidates of one query that a run of `rten` scores.
pub const RUN_CANDIDATES: usize = 2048;

const LOGITS: &str = "logits";

/// Whose a tensor is that an OverArch may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The user's: the same for all candidates, `[Q, ...]`.
    User,
    /// Each candidate's: `[Q, K0, ...]`.
    Candidate,
}

/// A tensor that an OverArch may read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Readable {
    /// The name of the input.
    pub name: String,
    /// Whose it is.
    pub whose: Whose,
    /// Its dimensions after those of users and candidates.
    pub shape: Vec<usize>,
}

impl Readable {
    /// Numbers of one user or candidate.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    fn sizes(&self, count: usize) -> Vec<usize> {
        let ahead: &[usize] = if self.whose == Whose::User { &[1] } else { &[1, count] };
        [ahead, &self.shape].concat()
    }

    fn given(&self) -> Given {
        let is_pair = self.whose == Whose::Candidate;
        let ahead = [Size::Fixed(1), Size::Rows];
        let ahead = ahead[..1 + usize::from(is_pair)].iter().copied();
        Given {
            name: self.name.clone(),
            is_pair,
            shape: ahead.chain(self.shape.iter().map(|&n| Size::Fixed(n as i64))).collect(),
        }
    }
}

/// A reranker with its tasks.
#[derive(Debug)]
pub struct OverArch {
    graph: Graph,
    runs: Runs,
    user: Vec<Readable>,
    rows: Vec<Readable>,
    /// The inputs that are numbers of candidates.
    numbers: Vec<Readable>,
    tasks: usize,
}

/// What is scored: one user and the candidates.
#[derive(Clone, Copy)]
pub struct Candidates<'a> {
    /// The tensors of [`OverArch::user`], each flat.
    pub user: &'a [&'a [f32]],
    /// How many candidates.
    pub count: usize,
    /// Writes the rows of a candidate, those of [`OverArch::rows`] side by side.
    pub row: &'a dyn Fn(usize, &mut [f32]),
    /// The numbers of [`OverArch::numbers`], each `[count]`.
    pub numbers: &'a [&'a [f32]],
}

impl OverArch {
    /// The name of the retrieval score among the numbers of candidates.
    pub const SIMILARITY: &'static str = "similarity";

    /// Takes a graph as reranker with the given number of tasks. Its inputs are some of `readable`, or numbers of candidates.
    ///
    /// # Errors
    /// `Invalid` where an input or the output is of another shape, or nothing of a candidate is read.
    pub fn new(mut graph: Graph, readable: &[Readable], tasks: usize) -> Result<Self> {
        let (mut user, mut rows, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
        for port in graph.inputs() {
            let number = Readable { name: port.name.clone(), whose: Whose::Candidate, shape: Vec::new() };
            let known = readable.iter().find(|r| r.name == port.name);
            match known {
                Some(known) => check(&graph, port, &known.given().shape)?,
                None => check_number(&graph, port, readable)?,
            }
            match known {
                Some(known) if known.whose == Whose::User => user.push(known.clone()),
                Some(known) => rows.push(known.clone()),
                None => numbers.push(number),
            }
        }
        let shape = [Size::Fixed(1), Size::Rows, Size::Fixed(tasks as i64)];
        check(&graph, graph.output(LOGITS)?, &shape)?;
        if rows.is_empty() && numbers.is_empty() {
            return Err(Error::invalid(format!(
                "{}: no input tells of candidates, expected `item` or another",
                graph.name()
            )));
        }
        let given: Vec<Given> = user.iter().chain(&rows).chain(&numbers).map(Readable::given).collect();
        let runs = graph.lower(&given, &[Made { name: LOGITS.into(), shape: shape.to_vec() }])?;
        Ok(OverArch { graph, runs, user, rows, numbers, tasks })
    }

    /// The tensors of the user that the graph reads.
    pub fn user(&self) -> &[Readable] {
        &self.user
    }

    /// The rows of candidates that it reads.
    pub fn rows(&self) -> &[Readable] {
        &self.rows
    }

    /// The numbers of candidates that it reads: item columns, and [`OverArch::SIMILARITY`].
    pub fn numbers(&self) -> impl ExactSizeIterator<Item = &str> {
        self.numbers.iter().map(|number| number.name.as_str())
    }

    /// The numeric item columns that it reads.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.numbers().filter(|name| *name != OverArch::SIMILARITY)
    }

    /// All that it reads.
    pub fn inputs(&self) -> impl Iterator<Item = &Readable> {
        self.user.iter().chain(&self.rows).chain(&self.numbers)
    }

    /// Numbers of the rows of a candidate.
    pub fn row_width(&self) -> usize {
        self.rows.iter().map(Readable::count).sum()
    }

    /// Number of tasks, T.
    pub fn tasks(&self) -> usize {
        self.tasks
    }

    /// What scoring so many candidates costs, in multiply-adds and what takes as long: those of the program, or one for each of
    /// the graph's weights and of the numbers of the user's tensors, which may meet each candidate.
    pub fn work(&self, candidates: usize) -> usize {
        let user: usize = self.user.iter().filter(|input| input.shape.len() > 1).map(Readable::count).sum();
        match &self.runs {
            Runs::Program(program) => program.work(candidates),
            Runs::Runtime(_) => (self.graph.weights() + user).saturating_mul(candidates),
        }
    }

    /// The graph's file, and what runs it.
    pub fn graph(&self) -> (&str, &Runs) {
        (self.graph.name(), &self.runs)
    }

    /// The graph as a program, where it is one: its rows are an item's row and then its columns.
    pub fn program(&self) -> Option<&RowProgram> {
        self.runs.program()
    }

    /// Whether a program of ours scores, not `rten`.
    pub fn is_program(&self) -> bool {
        self.program().is_some()
    }

    /// Writes the task scores of candidates, `[T, count]`, to `tasks`. `between` is asked before every block of them whether to go
    /// on.
    ///
    /// # Errors
    /// What the graph's run and `between` return; `Internal` where a score is not a number.
    pub fn score(
        &self,
        candidates: &Candidates<'_>,
        threads: &Threads,
        scratch: &mut Scratch,
        between: &mut dyn FnMut() -> Result<()>,
        tasks: &mut [f32],
    ) -> Result<()> {
        self.run(candidates, threads, scratch, between, tasks)?;
        match tasks.iter().any(|score| score.is_nan()) {
            true => Err(Error::internal(format!("{}: `{LOGITS}` holds NaN", self.graph.name()))),
            false => Ok(()),
        }
    }

    /// The same for a trial: tells whether all logits are finite numbers, of those that it got to where `between` ends it by a
    /// deadline.
    ///
    /// # Errors
    /// What else the graph's run and `between` return.
    pub fn try_out(
        &self,
        candidates: &Candidates<'_>,
        threads: &Threads,
        scratch: &mut Scratch,
        between: &mut dyn FnMut() -> Result<()>,
        tasks: &mut [f32],
    ) -> Result<bool> {
        scratch.has_finite_logits = true;
        match self.run(candidates, threads, scratch, between, tasks) {
            Err(e) if e.kind() != Kind::DeadlineExceeded => Err(e),
            _ => Ok(scratch.has_finite_logits),
        }
    }

    fn run(
        &self,
        candidates: &Candidates<'_>,
        threads: &Threads,
        scratch: &mut Scratch,
        between: &mut dyn FnMut() -> Result<()>,
        tasks: &mut [f32],
    ) -> Result<()> {
        let missing = |inputs: &[Readable], given: usize| inputs.get(given).map(|input| input.name.clone());
        let missing = missing(&self.user, candidates.user.len()).or(missing(&self.numbers, candidates.numbers.len()));
        if let Some(name) = missing {
            return Err(Error::invalid(format!("{}: input `{name}` is missing", self.graph.name())));
        }
        if candidates.count == 0 {
            return Ok(());
        }
        match &self.runs {
            Runs::Program(program) => self.run_program(program, candidates, scratch, between, tasks),
            Runs::Runtime(_) => self.run_graph(candidates, threads, scratch, between, tasks),
        }
    }

    fn run_program(
        &self,
        program: &RowProgram,
        candidates: &Candidates<'_>,
        scratch: &mut Scratch,
        between: &mut dyn FnMut() -> Result<()>,
        tasks: &mut [f32],
    ) -> Result<()> {
        let Candidates { user, count, row, numbers } = *candidates;
        let (kernels, width) = (Kernels::best(), self.row_width());
        let (logits, has_finite) = (&mut scratch.logits, &mut scratch.has_finite_logits);
        let mut fill = |n: usize, given: &mut [f32]| {
            let (rows, of_candidate) = given.split_at_mut(width);
            row(n, rows);
            of_candidate.iter_mut().zip(numbers).for_each(|(number, column)| *number = column[n]);
        };
        between()?;
        program.run(count, user, &mut scratch.program, &mut fill, &mut |first, rows, block| {
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

    fn run_graph(
        &self,
        candidates: &Candidates<'_>,
        threads: &Threads,
        scratch: &mut Scratch,
        between: &mut dyn FnMut() -> Result<()>,
        tasks: &mut [f32],
    ) -> Result<()> {
        let count = candidates.count;
        for first in (0..count).step_by(RUN_CANDIDATES) {
            between()?;
            let range = first..(first + RUN_CANDIDATES).min(count);
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
        rows.resize(range.len() * self.row_width(), 0.0);
        row.resize(self.row_width(), 0.0);
        for (place, n) in range.clone().enumerate() {
            (candidates.row)(n, row);
            let (mut from, mut to) = (&row[..], &mut rows[..]);
            for width in self.rows.iter().map(Readable::count) {
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
        let shapes: Vec<Vec<usize>> = self.inputs().map(|input| input.sizes(range.len())).collect();
        let user = candidates.user.iter().copied();
        let rows = self.rows.iter().map(|input| {
            let (here, rest) = rows.split_at(input.count() * range.len());
            rows = rest;
            here
        });
        let numbers = candidates.numbers.iter().map(|column| &column[range.clone()]);
        let values = user.chain(rows).chain(numbers);
        let named = self.inputs().zip(&shapes).zip(values);
        let inputs: Vec<Input<'_>> =
            named.map(|((input, shape), values)| Input { name: &input.name, shape, values }).collect();
        let logits = self.graph.run(&inputs, LOGITS, threads)?;
        match logits.shape() == [1, range.len(), self.tasks] {
            true => Ok(logits),
            false => Err(Error::internal(format!(
                "{}: `{LOGITS}` came out as {:?}, expected [1, {}, {}]",
                self.graph.name(),
                logits.shape(),
                range.len(),
                self.tasks
            ))),
        }
    }
}

/// Refuses an input that is nothing known and no number of each candidate.
fn check_number(graph: &Graph, port: &Port, readable: &[Readable]) -> Result<()> {
    let Some(shape) = port.shape.as_ref().filter(|shape| shape.len() != 2) else { return Ok(()) };
    let known: Vec<&str> = readable.iter().map(|r| r.name.as_str()).collect();
    Err(Error::invalid(format!(
        "{}: input `{}` of shape {} is none of: {}; a numeric item column is [?, ?]",
        graph.name(),
        port.name,
        shown(shape),
        known.join(", ")
    )))
}

/// Refuses an input or output that is not of these sizes but for the number of users and candidates.
fn check(graph: &Graph, port: &Port, sizes: &[Size]) -> Result<()> {
    let Some(declared) = &port.shape else { return Ok(()) };
    let ahead = if sizes.get(1) == Some(&Size::Rows) { 2 } else { 1 };
    let wanted = |n: usize, size: &Size| match size {
        Size::Fixed(size) if n >= ahead => Some(*size as usize),
        _ => None,
    };
    let wanted: Vec<Option<usize>> = sizes.iter().enumerate().map(|(n, size)| wanted(n, size)).collect();
    let fits = |(own, want): (&Option<usize>, &Option<usize>)| own.zip(*want).is_none_or(|(own, want)| own == want);
    if declared.len() == wanted.len() && declared.iter().zip(&wanted).all(fits) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{}: `{}` has shape {}, expected {}",
        graph.name(),
        port.name,
        shown(declared),
        shown(&wanted)
    )))
}

#[cfg(test)]
mod tests;
