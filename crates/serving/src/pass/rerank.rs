//! Steps 9 to 11: selects the best candidates by value, from candidates with retrieval scores.

use std::time::Instant;

use super::batch::{Batch, late};
use super::embed::EmbeddedRequest;
use super::scratch::Scratch;
use super::trace::{Step, Trace};
use crate::view::View;
use sterling_core::error::Result;
use sterling_core::request::Ranked;
use sterling_core::units::{Slot, by_score};
use sterling_graph::dense::InputRows;
use sterling_graph::tower::{Candidates, Threads};
use sterling_snapshot::model::SIMILARITY;

/// Reranks the candidates of one request after the other.
pub(super) struct Reranker<'a> {
    pub(super) batch: &'a dyn Batch,
    pub(super) view: &'a View,
    pub(super) threads: &'a Threads,
    pub(super) scratch: &'a mut Scratch,
}

impl Reranker<'_> {
    /// Returns the best `k` of the candidates.
    pub(super) fn ranked(
        &mut self,
        requested: &EmbeddedRequest<'_>,
        trace: &mut Trace,
        candidates: &[(f32, Slot)],
        k: usize,
    ) -> Result<Ranked> {
        let read = Instant::now();
        self.read_columns(candidates);
        let read = read.elapsed();
        self.score(requested, candidates, trace)?;
        let undefined = self.undefined(requested, candidates.len())?;
        let valued = Instant::now();
        self.value(&requested.prepared.constants, candidates);
        let items = candidates.len() as u64;
        trace.add([Step { name: "value", took: read + valued.elapsed(), items, bytes: 0 }]);
        Ok(trace.step("top", || self.top(k, candidates, undefined), |_| (0, 0)))
    }

    /// Returns the number of candidates for which a task score is NaN. Such candidates are not returned: one item that the
    /// reranker cannot score must not fail the answer.
    ///
    /// # Errors
    /// As [`Prepared::check_undefined`](super::work::Prepared::check_undefined).
    fn undefined(&self, requested: &EmbeddedRequest<'_>, count: usize) -> Result<usize> {
        let tasks = &self.scratch.tasks;
        if self.scratch.has_scores {
            return Ok(0);
        }
        let undefined = (0..count).filter(|&n| is_undefined(tasks, count, n)).count();
        requested.prepared.check_undefined(undefined, count)?;
        Ok(undefined)
    }

    /// Reads the retrieval score and the snapshot's numeric columns of the candidates.
    fn read_columns(&mut self, candidates: &[(f32, Slot)]) {
        let columns = &mut self.scratch.columns;
        columns.resize_with(self.view.numbers().len(), Vec::new);
        for (number, column) in columns.iter_mut().enumerate() {
            column.clear();
            self.view.read_numbers(number, candidates.iter().map(|(_, slot)| *slot), column);
        }
        self.scratch.similarity.clear();
        self.scratch.similarity.extend(candidates.iter().map(|(score, _)| *score));
    }

    fn column(&self, name: &str) -> Option<&[f32]> {
        if name == SIMILARITY {
            return Some(&self.scratch.similarity);
        }
        let place = self.view.numbers().position(|n| n == name)?;
        Some(&self.scratch.columns[place])
    }

    /// Step 9: computes task scores `[T, K0]`, in chunks of candidates.
    fn score(&mut self, requested: &EmbeddedRequest<'_>, candidates: &[(f32, Slot)], trace: &mut Trace) -> Result<()> {
        let mut tasks = std::mem::take(&mut self.scratch.tasks);
        let mut graphs = std::mem::take(&mut self.scratch.graphs);
        let mut slots = std::mem::take(&mut self.scratch.slots);
        tasks.clear();
        let mut scored = Ok(true);
        if let Some(overarch) = self.view.overarch().filter(|_| !candidates.is_empty()) {
            let count = candidates.len();
            tasks.resize(overarch.tasks() * count, 0.0);
            slots.clear();
            slots.extend(candidates.iter().map(|(_, slot)| *slot));
            let main = self.view.main();
            let user = requested.user_tensors(&main.package.user_inputs);
            let numbers: Vec<&[f32]> = overarch.numbers().filter_map(|name| self.column(name)).collect();
            let rows = |given: InputRows<'_>| self.view.write_candidates(&slots[given.rows.clone()], given);
            let run = Candidates { user: &user, count, rows: &rows, numbers: &numbers };
            let deadline = self.batch.deadline(requested.place);
            let mut between = || match deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                true => Err(late("overarch")),
                false => Ok(()),
            };
            let bytes = count as u64 * main.candidates.bytes(&main.index);
            let run = || overarch.score(&run, self.threads, &mut graphs, &mut between, &mut tasks);
            scored = trace.step("overarch", run, |_| (count as u64, bytes));
        }
        (self.scratch.tasks, self.scratch.graphs, self.scratch.slots) = (tasks, graphs, slots);
        self.scratch.has_scores = scored?;
        Ok(())
    }

    /// Step 10: computes one value per candidate, `[K0]`.
    fn value(&mut self, constants: &[f32], candidates: &[(f32, Slot)]) {
        let mut values = std::mem::take(&mut self.scratch.values);
        let mut program = std::mem::take(&mut self.scratch.program);
        let count = candidates.len();
        values.resize(count, 0.0);
        let names = &self.view.main().package.spec.tasks;
        let input = |name: &String| match names.iter().position(|task| task.name == *name) {
            Some(task) => &self.scratch.tasks[task * count..(task + 1) * count],
            None => self.column(name).unwrap_or(&self.scratch.similarity),
        };
        let model = self.view.value();
        let inputs: Vec<&[f32]> = model.inputs().iter().map(input).collect();
        model.evaluate(&inputs, constants, &mut program, &mut values);
        (self.scratch.values, self.scratch.program) = (values, program);
    }

    /// Step 11: selects the best K candidates by value, without the `undefined` ones whose score is NaN; ties are
    /// broken by the lower item id.
    fn top(&mut self, k: usize, candidates: &[(f32, Slot)], undefined: usize) -> Ranked {
        let Scratch { tasks, values, order, .. } = &mut *self.scratch;
        let count = candidates.len();
        let id = |n: u32| self.view.id(candidates[n as usize].1);
        // Adding 0 converts -0 to 0, so that answers contain no -0.
        let value = |n: u32| values[n as usize] + 0.0;
        let better = |a: &u32, b: &u32| by_score(value(*a), value(*b)).then_with(|| id(*a).cmp(&id(*b)));
        order.clear();
        order.extend((0..count as u32).filter(|&n| undefined == 0 || !is_undefined(tasks, count, n as usize)));
        if k < order.len() {
            order.select_nth_unstable_by(k, better);
            order.truncate(k);
        }
        order.sort_unstable_by(better);
        let of_task = |task: usize| order.iter().map(move |&n| task * count + n as usize);
        Ranked {
            slots: order.iter().map(|&n| candidates[n as usize].1).collect(),
            ids: order.iter().map(|&n| id(n)).collect(),
            scores: order.iter().map(|&n| value(n)).collect(),
            similarities: order.iter().map(|&n| candidates[n as usize].0).collect(),
            tasks: (0..tasks.len() / count.max(1)).flat_map(of_task).map(|at| tasks[at]).collect(),
            unknown: Vec::new(),
            undefined,
        }
    }
}

/// Returns whether a task score of candidate `n` is NaN; `tasks` are `[T, count]`.
fn is_undefined(tasks: &[f32], count: usize, n: usize) -> bool {
    tasks.iter().skip(n).step_by(count).any(|score| score.is_nan())
}
