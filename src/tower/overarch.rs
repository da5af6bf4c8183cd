//! The reranker: an ONNX graph that sees the user and every candidate.
//!
//! | input | shape | holds |
//! |---|---|---|
//! | `query` | `[Q, D]` | query embeddings |
//! | `item` | `[Q, K0, D]` | the candidates' rows, in f32 |
//! | any other | `[Q, K0]` | the numeric item column of that name |
//!
//! Its output `logits` `[Q, K0, T]` becomes task scores through a sigmoid. Candidates are scored in runs of at
//! most [`RUN_CANDIDATES`], so that the memory of a request does not grow with K0 times D.

use crate::error::{Error, Result};
use crate::tensor::Tensor;
use crate::tower::{Graph, Input, Threads};

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

/// What is scored: one query and a run of its candidates, at most [`RUN_CANDIDATES`].
#[derive(Clone, Copy, Debug)]
pub struct Candidates<'a> {
    /// `[D]`
    pub query: &'a [f32],
    /// Their rows, `[n, D]`.
    pub items: &'a [f32],
    /// The columns of [`OverArch::columns`], each `[n]`.
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

    /// About what scoring one candidate costs: the numbers of the graph's weights.
    pub fn weights(&self) -> usize {
        self.graph.weights()
    }

    /// The task scores of a run of candidates, `[n, T]`.
    ///
    /// # Errors
    /// What the graph's run returns; `Internal` where a score is not a number.
    pub fn score(&self, run: &Candidates<'_>, threads: &Threads) -> Result<Tensor> {
        let count = run.items.len() / self.dimension;
        let query_shape = [1, self.dimension];
        let item_shape = [1, count, self.dimension];
        let column_shape = [1, count];
        let mut inputs = vec![
            Input { name: QUERY, shape: &query_shape, values: run.query },
            Input { name: ITEM, shape: &item_shape, values: run.items },
        ];
        for (name, column) in self.columns.iter().zip(run.columns) {
            inputs.push(Input { name, shape: &column_shape, values: column });
        }
        let logits = self.graph.run(&inputs, LOGITS, threads)?;
        if logits.shape() != [1, count, self.tasks] {
            return Err(Error::internal(format!(
                "{}: `{LOGITS}` came out as {:?}, expected [1, {count}, {}]",
                self.graph.name(),
                logits.shape(),
                self.tasks
            )));
        }
        let scores: Vec<f32> = logits.data().iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect();
        if scores.iter().any(|score| score.is_nan()) {
            return Err(Error::internal(format!("{}: `{LOGITS}` holds NaN", self.graph.name())));
        }
        Tensor::new(vec![count, self.tasks], scores)
    }
}

#[cfg(test)]
mod tests;
