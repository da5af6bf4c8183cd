//! Steps of recurrent layers: the gates of a cell after its products, for a block of rows.
//!
//! Equations as in ONNX: [GRU](https://onnx.ai/onnx/operators/onnx__GRU.html),
//! [LSTM](https://onnx.ai/onnx/operators/onnx__LSTM.html), [RNN](https://onnx.ai/onnx/operators/onnx__RNN.html).

use super::maps::{sigmoid, tanh};

/// Kind of a recurrent layer, with its default activation functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cell {
    /// Simple recurrent layer: `h = tanh(x + s)`.
    Rnn,
    /// LSTM with gates `i`, `o`, `f`, `c`.
    Lstm,
    /// GRU with gates `z`, `r`, `n`; the reset gate scales the state after its product (`linear_before_reset`, as PyTorch
    /// does).
    Gru,
    /// GRU with gates `z`, `r`, `n`; the reset gate scales the state before its product.
    GruResetFirst,
}

impl Cell {
    /// Returns the number of gates of the cell.
    pub fn gates(self) -> usize {
        match self {
            Cell::Rnn => 1,
            Cell::Lstm => 4,
            Cell::Gru | Cell::GruResetFirst => 3,
        }
    }
}

/// Products of one time step of a block of rows. Each product has `gates * hidden` numbers per row, gate after gate.
#[derive(Clone, Copy, Debug)]
pub struct CellStep<'a> {
    /// Kind of the layer.
    pub cell: Cell,
    /// Number of rows.
    pub rows: usize,
    /// Width of the state.
    pub hidden: usize,
    /// Products of the input, biases included.
    pub input: &'a [f32],
    /// Distance between the rows of `input`.
    pub stride: usize,
    /// Products of the state, `[rows, gates * hidden]`.
    pub state: &'a [f32],
}

/// Splits the first `N * hidden` numbers into gates.
#[inline(always)]
fn gates<const N: usize>(numbers: &[f32], hidden: usize) -> [&[f32]; N] {
    std::array::from_fn(|n| &numbers[n * hidden..][..hidden])
}

#[inline(always)]
fn products<'a, const N: usize>(step: &CellStep<'a>, row: usize) -> ([&'a [f32]; N], [&'a [f32]; N]) {
    let width = N * step.hidden;
    (gates(&step.input[row * step.stride..][..width], step.hidden), gates(&step.state[row * width..], step.hidden))
}

/// Computes the scaled state of [`Cell::GruResetFirst`], `[rows, hidden]`.
#[inline(always)]
pub(super) fn reset<const FMA: bool>(step: &CellStep<'_>, h: &[f32], to: &mut [f32]) {
    let hidden = step.hidden;
    for row in 0..step.rows {
        let ([_, xr, _], [_, sr, _]) = products::<3>(step, row);
        let (h, to) = (&h[row * hidden..][..hidden], &mut to[row * hidden..][..hidden]);
        for ((to, h), (x, s)) in to.iter_mut().zip(h).zip(xr.iter().zip(sr)) {
            *to = sigmoid::<FMA>(x + s) * h;
        }
    }
}

#[inline(always)]
fn next_of_gru<const FMA: bool>(h: f32, update: f32, new: f32) -> f32 {
    let keeps = sigmoid::<FMA>(update);
    (1.0 - keeps) * tanh::<FMA>(new) + keeps * h
}

/// Computes the next states of the rows that `is_active`. A loop writes one state and reads few others, because the compiler
/// vectorizes it only if it can compare their addresses.
#[inline(always)]
pub(super) fn advance<const FMA: bool>(
    step: &CellStep<'_>,
    is_active: &dyn Fn(usize) -> bool,
    h: &mut [f32],
    c: &mut [f32],
) {
    let hidden = step.hidden;
    for row in (0..step.rows).filter(|&row| is_active(row)) {
        let h = &mut h[row * hidden..][..hidden];
        match step.cell {
            Cell::Rnn => {
                let ([x], [s]) = products::<1>(step, row);
                for (h, (x, s)) in h.iter_mut().zip(x.iter().zip(s)) {
                    *h = tanh::<FMA>(x + s);
                }
            }
            Cell::Lstm => {
                let ([xi, xo, xf, xc], [si, so, sf, sc]) = products::<4>(step, row);
                let c = &mut c[row * hidden..][..hidden];
                let input = xi.iter().zip(xf).zip(xc);
                let state = si.iter().zip(sf).zip(sc);
                for ((c, ((xi, xf), xc)), ((si, sf), sc)) in c.iter_mut().zip(input).zip(state) {
                    let (keeps, takes) = (sigmoid::<FMA>(xf + sf), sigmoid::<FMA>(xi + si));
                    *c = keeps * *c + takes * tanh::<FMA>(xc + sc);
                }
                for ((h, c), (x, s)) in h.iter_mut().zip(c.iter()).zip(xo.iter().zip(so)) {
                    *h = sigmoid::<FMA>(x + s) * tanh::<FMA>(*c);
                }
            }
            Cell::Gru => {
                let ([xz, xr, xn], [sz, sr, sn]) = products::<3>(step, row);
                let input = xz.iter().zip(xr).zip(xn);
                let state = sz.iter().zip(sr).zip(sn);
                for ((h, ((xz, xr), xn)), ((sz, sr), sn)) in h.iter_mut().zip(input).zip(state) {
                    *h = next_of_gru::<FMA>(*h, xz + sz, xn + sigmoid::<FMA>(xr + sr) * sn);
                }
            }
            Cell::GruResetFirst => {
                let ([xz, _, xn], [sz, _, sn]) = products::<3>(step, row);
                for ((h, (xz, xn)), (sz, sn)) in h.iter_mut().zip(xz.iter().zip(xn)).zip(sz.iter().zip(sn)) {
                    *h = next_of_gru::<FMA>(*h, xz + sz, xn + sn);
                }
            }
        }
    }
}
