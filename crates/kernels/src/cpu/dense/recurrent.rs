//! Steps of recurrent layers: the gates of a cell after its products, for a block of rows.
//!
//! Equations as in ONNX: [GRU](https://onnx.ai/onnx/operators/onnx__GRU.html),
//! [LSTM](https://onnx.ai/onnx/operators/onnx__LSTM.html), [RNN](https://onnx.ai/onnx/operators/onnx__RNN.html).

use super::maps::{sigmoid, tanh};

/// Kind of a recurrent layer, with its default activation functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cell {
    /// `h = tanh(x + s)`
    Rnn,
    /// Gates `i`, `o`, `f`, `c`.
    Lstm,
    /// Gates `z`, `r`, `n`; the reset gate scales the state after its product (`linear_before_reset`, as PyTorch does).
    Gru,
    /// Gates `z`, `r`, `n`; the reset gate scales the state before its product.
    GruResetFirst,
}

impl Cell {
    /// Returns its number of gates.
    pub fn gates(self) -> usize {
        match self {
            Cell::Rnn => 1,
            Cell::Lstm => 4,
            Cell::Gru | Cell::GruResetFirst => 3,
        }
    }
}

/// Products of one time step of a block of rows. Each has `gates * hidden` numbers per row, gate after gate.
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
        for n in 0..hidden {
            to[n] = sigmoid::<FMA>(xr[n] + sr[n]) * h[n];
        }
    }
}

/// Computes the next states of the rows that `is_active`.
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
                for n in 0..hidden {
                    h[n] = tanh::<FMA>(x[n] + s[n]);
                }
            }
            Cell::Lstm => {
                let ([xi, xo, xf, xc], [si, so, sf, sc]) = products::<4>(step, row);
                let c = &mut c[row * hidden..][..hidden];
                for n in 0..hidden {
                    let (keeps, takes) = (sigmoid::<FMA>(xf[n] + sf[n]), sigmoid::<FMA>(xi[n] + si[n]));
                    c[n] = keeps * c[n] + takes * tanh::<FMA>(xc[n] + sc[n]);
                    h[n] = sigmoid::<FMA>(xo[n] + so[n]) * tanh::<FMA>(c[n]);
                }
            }
            Cell::Gru | Cell::GruResetFirst => {
                let ([xz, xr, xn], [sz, sr, sn]) = products::<3>(step, row);
                let is_after = step.cell == Cell::Gru;
                for n in 0..hidden {
                    let scale = if is_after { sigmoid::<FMA>(xr[n] + sr[n]) } else { 1.0 };
                    let new = tanh::<FMA>(xn[n] + scale * sn[n]);
                    let keeps = sigmoid::<FMA>(xz[n] + sz[n]);
                    h[n] = (1.0 - keeps) * new + keeps * h[n];
                }
            }
        }
    }
}
