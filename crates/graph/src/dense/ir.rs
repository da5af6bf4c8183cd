//! Intermediate representation: a checked graph of a dozen kinds of operations. Each value has a shape and a kind of
//! inputs that it depends on.
//!
//! A graph is written for **one row**: a candidate of a reranker, or a request of a tower. A value that depends on rows
//! ([`Side::Pair`]) stores which of its axes counts rows; that axis has size 1 in the graph, and no operation may mix
//! numbers along it. Other values are constant (and folded on creation) or belong to the user: they are computed once
//! for all rows.

use std::sync::Arc;

use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{Binary, Cell, Fold, Unary};

/// Inputs that a value depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    /// No inputs.
    Constant,
    /// User inputs only.
    User,
    /// Row inputs, and possibly user inputs.
    Pair,
}

/// Index of a value in the graph.
pub(super) type Id = usize;

/// Operation that computes a value.
#[derive(Clone, Debug)]
pub(super) enum Op {
    /// Consecutive inputs from this index on, as many as fill the shape.
    Inputs(usize),
    Constant(Arc<[f32]>),
    Unary(Unary, Id),
    /// Element-wise operation with broadcasting.
    Binary(Binary, Id, Id),
    /// Matrix product over the last two axes, with broadcasting of the axes before.
    MatMul(Id, Id),
    /// `[1, columns]`: rows `[1, depth]` times matrices `[depth, columns]`, summed, plus a bias `[columns]`.
    Linear {
        parts: Vec<(Id, Id)>,
        bias: Option<Id>,
    },
    /// Reduction along the last axis, which then has size 1.
    Fold(Fold, Id),
    /// Concatenation along an axis.
    Concat(usize, Vec<Id>),
    /// Number `n` of the result is number `index[n]` of the operand: a transposition, slice, expansion or gather.
    Pick(Id, Arc<[u32]>),
    /// Adjoint of [`Op::Pick`]: number `k` of the result is the sum of all numbers `n` of the operand with `index[n] ==
    /// k`.
    Spread(Id, Arc<[u32]>),
    Reshape(Id),
    /// GRU, LSTM or RNN.
    Recurrent(Arc<Recurrent>),
}

/// Operands of a recurrent layer.
#[derive(Clone, Debug)]
pub(super) struct Recurrent {
    pub(super) cell: Cell,
    /// True if the steps are processed from the last to the first.
    pub(super) is_reverse: bool,
    /// `[runs, steps, depth]`
    pub(super) x: Id,
    /// `[depth, gates * hidden]`, constant.
    pub(super) weights: Id,
    /// `[hidden, gates * hidden]`, constant; for [`Cell::GruResetFirst`] without the gate `n`.
    pub(super) recurrence: Id,
    /// `[hidden, hidden]` of gate `n` for [`Cell::GruResetFirst`], constant.
    pub(super) candidate: Option<Id>,
    /// `[gates * hidden]`: biases of the products with the input, and of the products with the state; constant.
    pub(super) biases: [Id; 2],
    /// State and cell state before the first step, `[runs, hidden]`; `None` for zeros.
    pub(super) initial: [Option<Id>; 2],
    /// Number of valid steps per sequence, `[runs]`.
    pub(super) lengths: Option<Id>,
}

impl Recurrent {
    pub(super) fn reads(&self) -> Vec<Id> {
        let Recurrent { x, weights, recurrence, candidate, biases, initial, lengths, .. } = self;
        let optional = [candidate, &initial[0], &initial[1], lengths].into_iter().flatten().copied();
        [*x, *weights, *recurrence, biases[0], biases[1]].into_iter().chain(optional).collect()
    }

    /// Returns the layer with each operand replaced by the result of `of`, called in the order of [`Recurrent::reads`].
    pub(super) fn over(&self, of: &mut dyn FnMut(Id) -> Result<Id>) -> Result<Recurrent> {
        Ok(Recurrent {
            x: of(self.x)?,
            weights: of(self.weights)?,
            recurrence: of(self.recurrence)?,
            biases: [of(self.biases[0])?, of(self.biases[1])?],
            candidate: self.candidate.map(&mut *of).transpose()?,
            initial: [self.initial[0].map(&mut *of).transpose()?, self.initial[1].map(&mut *of).transpose()?],
            lengths: self.lengths.map(of).transpose()?,
            ..*self
        })
    }

    /// Returns the number of final states (state, cell state) that follow the steps of a sequence in the result.
    pub(super) fn kept(&self) -> usize {
        if self.cell == Cell::Lstm { 2 } else { 1 }
    }

    /// Returns the sizes of the layer.
    ///
    /// # Errors
    /// `Unsupported` if the input does not have three axes.
    pub(super) fn sizes(&self, values: &[Value]) -> Result<RecurrentSizes> {
        let hidden = values[self.recurrence].shape.first().copied().unwrap_or(0);
        match values[self.x].shape[..] {
            [runs, steps, depth] => Ok(RecurrentSizes { runs, steps, depth, hidden }),
            ref shape => Err(refused(format!("the sequence has shape {shape:?}, expected 3 axes"))),
        }
    }
}

/// Sizes of a recurrent layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecurrentSizes {
    pub(super) runs: usize,
    pub(super) steps: usize,
    pub(super) depth: usize,
    pub(super) hidden: usize,
}

impl Op {
    /// Returns the operation with each operand replaced by the result of `of`, called in the order of [`Op::reads`].
    pub(super) fn over(&self, of: &mut dyn FnMut(Id) -> Result<Id>) -> Result<Op> {
        Ok(match self {
            Op::Inputs(_) | Op::Constant(_) => self.clone(),
            Op::Unary(f, a) => Op::Unary(*f, of(*a)?),
            Op::Fold(f, a) => Op::Fold(*f, of(*a)?),
            Op::Pick(a, index) => Op::Pick(of(*a)?, index.clone()),
            Op::Spread(a, index) => Op::Spread(of(*a)?, index.clone()),
            Op::Reshape(a) => Op::Reshape(of(*a)?),
            Op::Recurrent(layer) => Op::Recurrent(layer.over(of)?.into()),
            Op::Binary(f, a, b) => Op::Binary(*f, of(*a)?, of(*b)?),
            Op::MatMul(a, b) => Op::MatMul(of(*a)?, of(*b)?),
            Op::Concat(axis, parts) => Op::Concat(*axis, parts.iter().map(|&part| of(part)).collect::<Result<_>>()?),
            Op::Linear { parts, bias } => Op::Linear {
                parts: parts.iter().map(|&(x, m)| Ok((of(x)?, of(m)?))).collect::<Result<_>>()?,
                bias: bias.map(of).transpose()?,
            },
        })
    }

    /// Returns the operands of the operation.
    pub(super) fn reads(&self) -> Vec<Id> {
        match self {
            Op::Inputs(_) | Op::Constant(_) => Vec::new(),
            Op::Unary(_, a) | Op::Fold(_, a) | Op::Pick(a, _) | Op::Spread(a, _) | Op::Reshape(a) => vec![*a],
            Op::Binary(_, a, b) | Op::MatMul(a, b) => vec![*a, *b],
            Op::Concat(_, parts) => parts.clone(),
            Op::Recurrent(layer) => layer.reads(),
            Op::Linear { parts, bias } => parts.iter().flat_map(|(x, m)| [*x, *m]).chain(*bias).collect(),
        }
    }
}

/// A value of a graph.
#[derive(Clone, Debug)]
pub(super) struct Value {
    pub(super) op: Op,
    pub(super) shape: Vec<usize>,
    pub(super) side: Side,
    /// Axis that counts rows, for values of [`Side::Pair`].
    pub(super) rows: Option<usize>,
}

impl Value {
    /// Returns the count of numbers, per row if the value depends on rows.
    pub(super) fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns whether all axes but the last one have size 1.
    pub(super) fn is_vector(&self) -> bool {
        self.shape.last().is_none_or(|&last| last == self.count())
    }
}

/// An input: its kind, and its shape for one row.
#[derive(Clone, Debug)]
pub(super) struct GraphInput {
    pub(super) side: Side,
    pub(super) shape: Vec<usize>,
    pub(super) rows: Option<usize>,
}

fn refused(what: impl Into<String>) -> Error {
    Error::unsupported(what)
}

/// Returns the broadcast shape of two operands.
pub(super) fn broadcast(a: &[usize], b: &[usize]) -> Result<Vec<usize>> {
    let axes = a.len().max(b.len());
    let at = |s: &[usize], axis: usize| (axis + s.len()).checked_sub(axes).map_or(1, |n| s[n]);
    let both = |axis| match (at(a, axis), at(b, axis)) {
        (x, y) if x == y => Ok(x),
        (1, y) => Ok(y),
        (x, 1) => Ok(x),
        _ => Err(refused(format!("shapes {a:?} and {b:?} cannot be broadcast to one shape"))),
    };
    (0..axes).map(both).collect()
}

/// Returns the distance between neighbouring numbers along each axis of a contiguous value.
pub(super) fn strides(shape: &[usize]) -> Vec<usize> {
    (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect()
}

/// Returns the strides of an operand of shape `of` in a result of shape `shape`: 0 along broadcast axes.
pub(super) fn broadcast_strides(of: &[usize], shape: &[usize]) -> Vec<usize> {
    let own = strides(of);
    let ahead = shape.len() - of.len();
    (0..shape.len()).map(|axis| if axis < ahead || of[axis - ahead] == 1 { 0 } else { own[axis - ahead] }).collect()
}

/// Returns, for each number of a result of `shape`, the index of the operand's number, for an operand with these
/// strides.
pub(super) fn positions(shape: &[usize], strides: &[usize]) -> Vec<u32> {
    let mut all = vec![0u32];
    for (&size, &stride) in shape.iter().zip(strides) {
        all = all.iter().flat_map(|&at| (0..size).map(move |n| at + (n * stride) as u32)).collect();
    }
    all
}
