//! The reranker: an ONNX graph that sees the user and every candidate.
//!
//! | input | shape | holds |
//! |---|---|---|
//! | `query` | `[Q, D]` | query embeddings |
//! | `item` | `[Q, K0, D]` | the candidates' rows, in f32 |
//! | any other | `[Q, K0]` | the numeric item column of that name |
//!
//! Its output `logits` `[Q, K0, T]` becomes task scores through a sigmoid. Candidates are scored in runs of
//! [`RUN_CANDIDATES`], so that the memory of a run does not grow with K0.

use crate::error::{Error, Result};
use crate::tower::{Graph, Input};

/// Candidates of one query that a run scores.
pub const RUN_CANDIDATES: usize = 2048;

const QUERY: &str = "query";
const ITEM: &str = "item";
const LOGITS: &str = "logits";

/// A reranker with its tasks.
#[derive(Debug)]
pub struct OverArch {
    graph: Graph,
    columns: Vec<String>,
    tasks: usize,
    dimension: usize,
}

/// What is scored: one query and its candidates.
#[derive(Clone, Copy, Debug)]
pub struct Candidates<'a> {
    /// `[D]`
    pub query: &'a [f32],
    /// `[K0, D]`
    pub items: &'a [f32],
    /// The columns of [`OverArch::columns`], each `[K0]`.
    pub columns: &'a [&'a [f32]],
}

impl OverArch {
    /// Takes a graph as reranker for embeddings of width `dimension` and the given number of tasks.
    ///
    /// # Errors
    /// `Invalid` where an input or the output is missing or of another shape.
    pub fn new(graph: Graph, dimension: usize, tasks: usize) -> Result<Self> {
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
        Ok(OverArch { graph, columns, tasks, dimension })
    }

    /// The numeric item columns that the graph reads.
    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    /// Number of tasks, T.
    pub fn tasks(&self) -> usize {
        self.tasks
    }

    /// Writes the task scores of all candidates to `out`, task after task: `[T, K0]`, so that each task is a column.
    ///
    /// # Errors
    /// What the graph's run returns.
    pub fn score(&self, candidates: &Candidates<'_>, out: &mut [f32]) -> Result<()> {
        let count = candidates.items.len() / self.dimension;
        for first in (0..count).step_by(RUN_CANDIDATES) {
            let run = first..(first + RUN_CANDIDATES).min(count);
            let items = &candidates.items[run.start * self.dimension..run.end * self.dimension];
            let query_shape = [1, self.dimension];
            let item_shape = [1, run.len(), self.dimension];
            let column_shape = [1, run.len()];
            let mut inputs = vec![
                Input { name: QUERY, shape: &query_shape, values: candidates.query },
                Input { name: ITEM, shape: &item_shape, values: items },
            ];
            for (name, column) in self.columns.iter().zip(candidates.columns) {
                inputs.push(Input { name, shape: &column_shape, values: &column[run.clone()] });
            }
            let logits = self.graph.run(&inputs, LOGITS)?;
            if logits.shape() != [1, run.len(), self.tasks] {
                return Err(Error::internal(format!(
                    "{}: `{LOGITS}` came out as {:?}, expected [1, {}, {}]",
                    self.graph.name(),
                    logits.shape(),
                    run.len(),
                    self.tasks
                )));
            }
            for (n, of_item) in run.zip(logits.data().chunks_exact(self.tasks)) {
                for (task, logit) in of_item.iter().enumerate() {
                    out[task * count + n] = 1.0 / (1.0 + (-logit).exp());
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
