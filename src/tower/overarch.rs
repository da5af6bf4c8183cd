//! The reranker: an ONNX graph that sees the user and every candidate.
//!
//! | input | shape | holds |
//! |---|---|---|
//! | `query` | `[Q, D]` | query embeddings |
//! | `item` | `[Q, K0, D]` | the candidates' rows, in f32 |
//! | any other | `[Q, K0]` | the numeric item column of that name |
//!
//! Its output `logits` `[Q, K0, T]` becomes task scores through a sigmoid. A graph that is a program of ours ([`crate::dense`])
//! runs over blocks of candidates, whose rows it takes straight from where they lie; any other runs in `rten` over copies of at
//! most [`RUN_CANDIDATES`] rows. Either way the memory of a request does not grow with K0 times D.

use super::Scratch;
use crate::dense::{Given, RowProgram, Size};
use crate::device::cpu::Kernels;
use crate::device::cpu::dense::{MapTarget, Operand, Unary};
use crate::error::{Error, Kind, Result};
use crate::tower::{Graph, Input, Runs, Threads};

/// Most candidates of one query that a run of `rten` scores.
pub const RUN_CANDIDATES: usize = 2048;

const QUERY: &str = "query";
const ITEM: &str = "item";
const LOGITS: &str = "logits";

/// A reranker with its tasks.
#[derive(Debug)]
pub struct OverArch {
    graph: Graph,
    runs: Runs,
    columns: Vec<String>,
    tasks: usize,
    dimension: usize,
}

/// What is scored: one query and its candidates.
#[derive(Clone, Copy)]
pub struct Candidates<'a> {
    /// `[D]`
    pub query: &'a [f32],
    /// How many.
    pub count: usize,
    /// Writes the row `[D]` of a candidate.
    pub row: &'a dyn Fn(usize, &mut [f32]),
    /// The columns of [`OverArch::columns`], each `[count]`.
    pub columns: &'a [&'a [f32]],
}

impl OverArch {
    /// Takes a graph as reranker for embeddings of width `dimension` and the given number of tasks.
    ///
    /// # Errors
    /// `Invalid` where an input or the output is missing or of another shape.
    pub fn new(mut graph: Graph, dimension: usize, tasks: usize) -> Result<Self> {
        let place = graph.name().to_owned();
        let check = |port: &crate::tower::Port, rank: usize, last: Option<usize>| {
            let Some(shape) = &port.shape else { return Ok(()) };
            let wrong_last = last.zip(shape.last().copied().flatten()).is_some_and(|(want, got)| want != got);
            if shape.len() != rank || wrong_last {
                let last = last.map_or("?".into(), |n| n.to_string());
                return Err(Error::invalid(format!(
                    "{place}: `{}` has shape {}, expected {rank} dimensions, the last of size {last}",
                    port.name,
                    crate::tower::shown(shape)
                )));
            }
            Ok(())
        };
        check(graph.input(QUERY)?, 2, Some(dimension))?;
        check(graph.input(ITEM)?, 3, Some(dimension))?;
        check(graph.output(LOGITS)?, 3, Some(tasks))?;
        let mut columns = Vec::new();
        for port in graph.inputs().filter(|p| ![QUERY, ITEM].contains(&p.name.as_str())) {
            check(port, 2, None)?;
            columns.push(port.name.clone());
        }
        let (d, one) = (Size::Fixed(dimension as i64), Size::Fixed(1));
        let input = |name: &str, is_pair, shape: &[Size]| Given { name: name.into(), is_pair, shape: shape.to_vec() };
        let mut given = vec![input(QUERY, false, &[one, d]), input(ITEM, true, &[one, Size::Rows, d])];
        given.extend(columns.iter().map(|name| input(name, true, &[one, Size::Rows])));
        let runs = graph.lower(&given, (LOGITS, &[one, Size::Rows, Size::Fixed(tasks as i64)]))?;
        Ok(OverArch { graph, runs, columns, tasks, dimension })
    }

    /// The numeric item columns that the graph reads.
    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    /// Number of tasks, T.
    pub fn tasks(&self) -> usize {
        self.tasks
    }

    /// What scoring so many candidates costs, in multiply-adds and what takes as long: those of the program, or one for each of
    /// the graph's weights.
    pub fn work(&self, candidates: usize) -> usize {
        match &self.runs {
            Runs::Program(program) => program.work(candidates),
            Runs::Runtime(_) => self.graph.weights().saturating_mul(candidates),
        }
    }

    /// The graph's file, and what runs it.
    pub fn graph(&self) -> (&str, &Runs) {
        (self.graph.name(), &self.runs)
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
        if let Some(name) = self.columns.get(candidates.columns.len()) {
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
        let Candidates { query, count, row, columns } = *candidates;
        let (kernels, logits, has_finite) = (Kernels::best(), &mut scratch.logits, &mut scratch.has_finite_logits);
        let mut fill = |n: usize, given: &mut [f32]| {
            let (item, numbers) = given.split_at_mut(self.dimension);
            row(n, item);
            numbers.iter_mut().zip(columns).for_each(|(number, column)| *number = column[n]);
        };
        between()?;
        program.run(count, &[query], &mut scratch.program, &mut fill, &mut |first, rows, block| {
            for task in 0..self.tasks {
                logits.clear();
                logits.extend((0..rows).map(|n| block.row(n)[task]));
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
            scratch.rows.resize(range.len() * self.dimension, 0.0);
            let rows = scratch.rows.chunks_exact_mut(self.dimension);
            rows.zip(range.clone()).for_each(|(row, n)| (candidates.row)(n, row));
            let shapes = ([1, self.dimension], [1, range.len(), self.dimension], [1, range.len()]);
            let mut inputs = vec![
                Input { name: QUERY, shape: &shapes.0, values: candidates.query },
                Input { name: ITEM, shape: &shapes.1, values: &scratch.rows },
            ];
            let columns = self.columns.iter().zip(candidates.columns);
            inputs.extend(columns.map(|(name, column)| Input {
                name,
                shape: &shapes.2,
                values: &column[range.clone()],
            }));
            let logits = self.graph.run(&inputs, LOGITS, threads)?;
            if logits.shape() != [1, range.len(), self.tasks] {
                return Err(Error::internal(format!(
                    "{}: `{LOGITS}` came out as {:?}, expected [1, {}, {}]",
                    self.graph.name(),
                    logits.shape(),
                    range.len(),
                    self.tasks
                )));
            }
            scratch.has_finite_logits &= logits.data().iter().all(|logit| logit.is_finite());
            for (n, of_item) in range.zip(logits.data().chunks_exact(self.tasks)) {
                let scores = of_item.iter().map(|logit| 1.0 / (1.0 + (-logit).exp()));
                scores.enumerate().for_each(|(task, score)| tasks[task * count + n] = score);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
