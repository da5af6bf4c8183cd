//! Reverse-mode differentiation from graph to graph: the gradients of a graph as graphs of the same operations.
//!
//! 1. [`Adjoint::rows`] computes per row, from the inputs and the gradients of the outputs, the gradients of the
//!    inputs. The graph begins with the forward graph: values that the gradients need are recomputed in the same block of
//!    rows, so that nothing is stored between the forward and the backward pass.
//! 2. The gradient of a shared value is a sum over rows ([`Sum`]): of outer products for the matrix of a product, of
//!    numbers otherwise.
//! 3. [`Adjoint::totals`] computes from these sums, once per batch, the gradients of the shared inputs, including
//!    parameters.
//!
//! The rules are those of reverse accumulation (Griewank and Walther, *Evaluating Derivatives*, chapter 3), with PyTorch's
//! choices at points without a derivative (`rules`).

use super::reverse::{Reverse, SumOf};
use super::rules;
use super::sums::Sum;
use crate::dense::graph::Graph;
use crate::dense::ir::{GraphInput, Id, Op, Side, Value};
use sterling_core::error::{Error, Result};

/// The gradients of a graph.
#[derive(Debug)]
pub(super) struct Adjoint {
    /// Graph per row. Its inputs are the inputs of the forward graph, then the gradients of the forward graph's
    /// outputs.
    pub(super) rows: Graph,
    /// Per row input, the output of `rows` that is its gradient; `None` if the gradient is 0.
    pub(super) inputs: Vec<Option<usize>>,
    pub(super) sums: Vec<Sum>,
    /// Graph per batch, for a single row. The inputs are the shared inputs listed in `shared`, then the sums; the
    /// outputs are the gradients of the shared inputs.
    pub(super) totals: Graph,
    /// Shared inputs that `totals` reads, by their index among the shared inputs.
    pub(super) shared: Vec<usize>,
    /// Per shared input, the output of `totals` that is its gradient; `None` if the gradient is 0.
    pub(super) gradients: Vec<Option<usize>>,
}

/// Returns the gradients of `graph` with respect to those of its inputs that are `wanted`.
///
/// # Errors
/// `Unsupported` if the gradients are too large.
pub(super) fn adjoint(graph: &Graph, wanted: &[bool]) -> Result<Adjoint> {
    let (active, count) = (active(graph, wanted), graph.values.len());
    let mut rows = Reverse::new(graph.clone(), active.clone());
    for &output in &graph.outputs {
        let Value { shape, rows: axis, .. } = graph.values[output].clone();
        rows.graph.inputs.push(GraphInput { side: Side::Pair, shape, rows: axis });
        let gradient = rows.graph.input(rows.graph.inputs.len() - 1)?;
        rows.give(output, gradient)?;
    }
    rules::follow_all(&mut rows, count)?;
    let mut outputs = Vec::new();
    let mut output = |id: Id| {
        outputs.push(id);
        outputs.len() - 1
    };
    let input_of = |n: usize| graph.values.iter().position(|value| matches!(value.op, Op::Inputs(first) if first == n));
    let numbered = || graph.inputs.iter().enumerate();
    let of_rows = numbered().filter(|(_, input)| input.side == Side::Pair);
    let inputs = of_rows.map(|(n, _)| input_of(n).and_then(|id| rows.gradients[id]).map(&mut output)).collect();
    let mut of_values = Vec::new();
    let mut sums = Vec::new();
    for SumOf { value, left, right, runs, depth, columns } in std::mem::take(&mut rows.sums) {
        of_values.push(value);
        sums.push(Sum { left: left.map(&mut output), right: output(right), runs, depth, columns });
    }
    rows.graph.outputs = outputs;

    let all_shared: Vec<usize> = numbered().filter(|(_, input)| input.side != Side::Pair).map(|(n, _)| n).collect();
    let (mut totals, of) = of_one_row(graph, &all_shared, &sums, &of_values)?;
    let first = totals.inputs.len() - sums.len();
    let count = totals.values.len();
    let mut active_there = vec![false; count];
    of.iter().zip(&active).for_each(|(to, &active)| to.iter().for_each(|&to| active_there[to] = active));
    let gradients: Vec<Id> = (0..sums.len()).map(|n| totals.input(first + n)).collect::<Result<_>>()?;
    let mut reverse = Reverse::new(totals, active_there);
    for (&value, gradient) in of_values.iter().zip(gradients) {
        let to = of[value].ok_or_else(|| Error::internal("the summed value is not shared by all rows"))?;
        reverse.give(to, gradient)?;
    }
    rules::follow_all(&mut reverse, count)?;
    let gradient_of = |&n: &usize| input_of(n).and_then(|id| of[id]).and_then(|id| reverse.gradients[id]);
    let found: Vec<Option<Id>> = all_shared.iter().map(gradient_of).collect();
    totals = reverse.graph;
    totals.outputs = found.iter().flatten().copied().collect();
    let mut numbers = 0..;
    let gradients = found.iter().map(|id| id.and_then(|_| numbers.next())).collect();
    let (totals, shared) = without_unread(totals, all_shared.len())?;
    Ok(Adjoint { rows: rows.graph, inputs, sums, totals, shared, gradients })
}

/// Returns per value whether its gradient is needed: whether the value depends on a wanted input through differentiable
/// operations.
fn active(graph: &Graph, wanted: &[bool]) -> Vec<bool> {
    let mut active = vec![false; graph.values.len()];
    for (id, value) in graph.values.iter().enumerate() {
        active[id] = !graph.still.contains(&id)
            && match &value.op {
                Op::Inputs(first) => wanted[*first],
                op => rules::differentiable(op).iter().any(|&read| active[read]),
            };
    }
    active
}

/// Returns the shared part of a graph as a graph of a single row, with the sums as further inputs, and the new value of
/// each old value.
fn of_one_row(graph: &Graph, shared: &[usize], sums: &[Sum], of: &[Id]) -> Result<(Graph, Vec<Option<Id>>)> {
    let alone = |shape: Vec<usize>| GraphInput { side: Side::Pair, shape, rows: None };
    let own = shared.iter().map(|&n| alone(graph.inputs[n].shape.clone()));
    debug_assert_eq!(sums.len(), of.len());
    let summed = of.iter().map(|&value| alone(graph.shape(value).to_vec()));
    let mut to = Graph::new(own.chain(summed).collect());
    let mut made: Vec<Option<Id>> = vec![None; graph.values.len()];
    for (id, value) in graph.values.iter().enumerate().filter(|(_, value)| value.side != Side::Pair) {
        made[id] = Some(match &value.op {
            Op::Inputs(first) => {
                let n = shared.iter().position(|n| n == first);
                to.input(n.ok_or_else(|| Error::internal("a shared value reads an input that is not shared"))?)?
            }
            op => {
                let op = op.over(&mut |read| {
                    made[read].ok_or_else(|| Error::internal("a shared value depends on row inputs"))
                })?;
                to.add(op, value.shape.clone(), None)?
            }
        });
    }
    Ok((to, made))
}

/// Returns the graph without unread inputs among the first `own`, and the indices of the remaining ones of these
/// inputs.
fn without_unread(graph: Graph, own: usize) -> Result<(Graph, Vec<usize>)> {
    let needed = graph.needed(&graph.outputs, &[]);
    let is_read = |n: usize| {
        let mut values = graph.values.iter().zip(&needed);
        values.any(|(value, &needed)| needed && matches!(value.op, Op::Inputs(first) if first == n))
    };
    let retained: Vec<usize> = (0..graph.inputs.len()).filter(|&n| n >= own || is_read(n)).collect();
    let mut to = Graph::new(retained.iter().map(|&n| graph.inputs[n].clone()).collect());
    let mut made = vec![None; graph.values.len()];
    let missing = || Error::internal("a value is read before it is computed");
    for (id, value) in graph.values.iter().enumerate().filter(|(id, _)| needed[*id]) {
        made[id] = Some(match &value.op {
            Op::Inputs(first) => to.input(retained.iter().position(|n| n == first).ok_or_else(missing)?)?,
            op => {
                let op = op.over(&mut |read| made[read].ok_or_else(missing))?;
                to.add(op, value.shape.clone(), value.rows)?
            }
        });
    }
    to.outputs = graph.outputs.iter().map(|&id| made[id].ok_or_else(missing)).collect::<Result<_>>()?;
    Ok((to, retained.into_iter().filter(|&n| n < own).collect()))
}
