//! Recurrent layers: GRU, LSTM and RNN over the steps of a sequence, one direction per operation.
//!
//! The input of some steps is multiplied at once, `x W`; then each step multiplies the state of all rows of a block, `h R`, and
//! fuses the gates ([`Cell`]). The result of a row is `[runs, steps, hidden]`, then per run the last state and, of an LSTM, the
//! last cell state. Steps from a row's length on leave its state as it is, and their results are zeros.
//!
//! Memory per block of `n` rows: products of at most [`CHUNK_NUMBERS`] numbers (or one step), and `n` states.

use super::exec::Run;
use super::graph::Graph;
use super::interpret::Real;
use super::ir::{Id, Op, Side, Value};
use super::plan::Planner;
use super::steps::{Place, Work};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{Cell, CellStep, Lines, PANEL, Part, Product, Weights};

/// Maximum numbers of input products that are computed ahead.
const CHUNK_NUMBERS: usize = 64 << 10;
/// Maximum numbers of the row buffers of a block: the weights are read once per step and block, so that a block should have many
/// rows.
const BLOCK_NUMBERS: usize = 2 << 20;
const BLOCK_ROWS_MAX: usize = 56;
/// Maximum multiply-adds per row.
const WORK_MAX: usize = 1 << 30;

/// Operands of a recurrent layer.
#[derive(Clone, Debug)]
pub(super) struct Recurrent {
    pub(super) cell: Cell,
    /// True if the last step comes first.
    pub(super) is_reverse: bool,
    /// `[runs, steps, depth]`
    pub(super) x: Id,
    /// `[depth, gates * hidden]`, constant.
    pub(super) weights: Id,
    /// `[hidden, gates * hidden]`, constant; for [`Cell::GruResetFirst`] without the gate `n`.
    pub(super) recurrence: Id,
    /// `[hidden, hidden]` of gate `n` for [`Cell::GruResetFirst`], constant.
    pub(super) candidate: Option<Id>,
    /// `[gates * hidden]`, added to products of the input, and to those of the state; constant.
    pub(super) biases: [Id; 2],
    /// State and cell state before the first step, `[runs, hidden]`; zeros if there is none.
    pub(super) initial: [Option<Id>; 2],
    /// Number of valid steps per run, `[runs]`.
    pub(super) lengths: Option<Id>,
}

impl Recurrent {
    pub(super) fn reads(&self) -> Vec<Id> {
        let Recurrent { x, weights, recurrence, candidate, biases, initial, lengths, .. } = self;
        let optional = [candidate, &initial[0], &initial[1], lengths].into_iter().flatten().copied();
        [*x, *weights, *recurrence, biases[0], biases[1]].into_iter().chain(optional).collect()
    }

    /// Returns the layer with other operands.
    pub(super) fn over(&self, of: &mut dyn FnMut(Id) -> Result<Id>) -> Result<Recurrent> {
        Ok(Recurrent {
            x: of(self.x)?,
            weights: of(self.weights)?,
            recurrence: of(self.recurrence)?,
            candidate: self.candidate.map(&mut *of).transpose()?,
            biases: [of(self.biases[0])?, of(self.biases[1])?],
            initial: [self.initial[0].map(&mut *of).transpose()?, self.initial[1].map(&mut *of).transpose()?],
            lengths: self.lengths.map(of).transpose()?,
            ..*self
        })
    }

    /// Returns the number of states behind the steps of a run.
    pub(super) fn kept(&self) -> usize {
        if self.cell == Cell::Lstm { 2 } else { 1 }
    }
}

/// Sizes of a layer.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    runs: usize,
    steps: usize,
    depth: usize,
    hidden: usize,
}

impl Sizes {
    fn of(values: &[Value], layer: &Recurrent) -> Result<Sizes> {
        let hidden = values[layer.recurrence].shape.first().copied().unwrap_or(0);
        match values[layer.x].shape[..] {
            [runs, steps, depth] => Ok(Sizes { runs, steps, depth, hidden }),
            ref shape => Err(Error::unsupported(format!("a sequence of shape {shape:?}, expected 3 axes"))),
        }
    }
}

impl Graph {
    /// Adds a recurrent layer.
    ///
    /// # Errors
    /// `Unsupported` if shapes do not fit, a weight is not constant, or the layer is too large.
    pub(super) fn recurrent(&mut self, layer: Recurrent) -> Result<Id> {
        let sizes = Sizes::of(&self.values, &layer)?;
        let Sizes { runs, steps, depth, hidden } = sizes;
        let width = layer.cell.gates() * hidden;
        let (recurrence, candidate) = match layer.candidate {
            Some(candidate) => (2 * hidden, Some((candidate, vec![hidden, hidden]))),
            None => (width, None),
        };
        let constants = [(layer.weights, vec![depth, width]), (layer.recurrence, vec![hidden, recurrence])];
        let biases = layer.biases.map(|bias| (bias, vec![width]));
        for (id, shape) in constants.into_iter().chain(candidate).chain(biases) {
            if self.constant(id).is_none() || self.shape(id) != shape {
                let got = self.shape(id);
                return Err(Error::unsupported(format!("weights of shape {got:?}, expected a constant of {shape:?}")));
            }
        }
        let states = layer.initial.iter().flatten().map(|&id| (id, vec![runs, hidden]));
        for (id, shape) in states.chain(layer.lengths.map(|id| (id, vec![runs]))) {
            if self.shape(id) != shape {
                return Err(Error::unsupported(format!("shape {:?}, expected {shape:?}", self.shape(id))));
            }
        }
        let is_pair = |id: &Id| self.values[*id].side == Side::Pair;
        let of_rows: Vec<Id> = layer.reads().into_iter().filter(is_pair).collect();
        if of_rows.iter().any(|&id| self.values[id].rows != Some(0)) {
            return Err(Error::unsupported("candidates along another axis than the batch"));
        }
        let all =
            steps.checked_mul(depth + hidden).and_then(|n| n.checked_mul(width)).and_then(|n| n.checked_mul(runs));
        if all.is_none_or(|work| work > WORK_MAX) {
            return Err(Error::unsupported(format!("{steps} steps of {depth} to {hidden} numbers are too many")));
        }
        let shape = vec![runs, steps + layer.kept(), hidden];
        let rows = (!of_rows.is_empty()).then_some(0);
        self.add(Op::Recurrent(layer.into()), shape, rows)
    }
}

/// Evaluates a layer as its equations say.
pub(super) fn evaluate<'a, T: Real + 'a>(layer: &Recurrent, values: &[Value], of: &dyn Fn(Id) -> &'a [T]) -> Vec<T> {
    let Ok(Sizes { runs, steps, depth, hidden }) = Sizes::of(values, layer) else { return Vec::new() };
    let (zero, one) = (T::from(0.0), T::from(1.0));
    let width = layer.cell.gates() * hidden;
    let sigmoid = |x: T| one / (one + (-x).exp());
    let product = |x: &[T], matrix: &[T], first: T, columns: usize, column: usize| {
        x.iter().enumerate().fold(first, |sum, (k, &x)| sum + x * matrix[k * columns + column])
    };
    let mut out = Vec::new();
    for run in 0..runs {
        let state = |n: usize| {
            layer.initial[n].map_or(vec![zero; hidden], |id| of(id)[run * hidden..(run + 1) * hidden].to_vec())
        };
        let (mut h, mut c) = (state(0), state(1));
        let mut made = vec![zero; steps * hidden];
        for n in 0..steps {
            let t = if layer.is_reverse { steps - 1 - n } else { n };
            if layer.lengths.is_some_and(|id| T::from(t as f32) >= of(id)[run]) {
                continue;
            }
            let x = &of(layer.x)[(run * steps + t) * depth..][..depth];
            let input = |gate: usize, n: usize| {
                let column = gate * hidden + n;
                product(x, of(layer.weights), of(layer.biases[0])[column], width, column)
            };
            let from = |h: &[T], gate: usize, n: usize| {
                let (matrix, columns, column) = match layer.candidate {
                    Some(candidate) if gate == 2 => (of(candidate), hidden, n),
                    Some(_) => (of(layer.recurrence), 2 * hidden, gate * hidden + n),
                    None => (of(layer.recurrence), width, gate * hidden + n),
                };
                product(h, matrix, of(layer.biases[1])[gate * hidden + n], columns, column)
            };
            let both = |gate: usize, n: usize| input(gate, n) + from(&h, gate, n);
            let next: Vec<T> = match layer.cell {
                Cell::Rnn => (0..hidden).map(|n| both(0, n).tanh()).collect(),
                Cell::Lstm => {
                    let gates = |n: usize| (sigmoid(both(0, n)), sigmoid(both(1, n)), sigmoid(both(2, n)), both(3, n));
                    let all: Vec<_> = (0..hidden).map(gates).collect();
                    c = all.iter().zip(&c).map(|((i, _, f, new), c)| *f * *c + *i * new.tanh()).collect();
                    all.iter().zip(&c).map(|((_, o, ..), c)| *o * c.tanh()).collect()
                }
                Cell::Gru | Cell::GruResetFirst => {
                    let reset: Vec<T> = (0..hidden).map(|n| sigmoid(both(1, n))).collect();
                    let scaled: Vec<T> = reset.iter().zip(&h).map(|(r, h)| *r * *h).collect();
                    let gate = |n: usize| {
                        let new = match layer.candidate {
                            Some(_) => input(2, n) + from(&scaled, 2, n),
                            None => input(2, n) + reset[n] * from(&h, 2, n),
                        };
                        let z = sigmoid(both(0, n));
                        (one - z) * new.tanh() + z * h[n]
                    };
                    (0..hidden).map(gate).collect()
                }
            };
            h = next;
            made[t * hidden..(t + 1) * hidden].copy_from_slice(&h);
        }
        out.extend(made);
        out.extend(h);
        if layer.cell == Cell::Lstm {
            out.extend(c);
        }
    }
    out
}

/// A compiled layer; matrices are packed constants.
#[derive(Clone, Debug)]
pub(super) struct RecurrentWork {
    pub(super) cell: Cell,
    pub(super) is_reverse: bool,
    /// Runs, steps, numbers of an input, numbers of the state.
    pub(super) shape: [usize; 4],
    pub(super) x: Place,
    pub(super) weights: Place,
    pub(super) recurrence: Place,
    pub(super) candidate: Option<Place>,
    pub(super) biases: [Place; 2],
    pub(super) initial: [Option<Place>; 2],
    pub(super) lengths: Option<Place>,
}

impl RecurrentWork {
    pub(super) fn cost(&self) -> usize {
        let [runs, steps, depth, hidden] = self.shape;
        runs * steps * self.cell.gates() * hidden * (depth + hidden)
    }

    /// Returns the numbers of a result.
    pub(super) fn numbers(&self) -> usize {
        let [runs, steps, _, hidden] = self.shape;
        runs * (steps + self.kept()) * hidden
    }

    fn kept(&self) -> usize {
        if self.cell == Cell::Lstm { 2 } else { 1 }
    }

    #[cfg(test)]
    pub(super) fn places(&self) -> Vec<Place> {
        let optional = [self.candidate, self.initial[0], self.initial[1], self.lengths].into_iter().flatten();
        [self.x, self.weights, self.recurrence, self.biases[0], self.biases[1]].into_iter().chain(optional).collect()
    }
}

/// Returns the rows per block of a plan with a recurrent layer, if its buffers take `numbers` numbers per row.
pub(super) fn block_rows(numbers: usize) -> usize {
    (BLOCK_NUMBERS / numbers.max(1)).clamp(1, BLOCK_ROWS_MAX)
}

impl Planner<'_> {
    pub(super) fn recurrent(&mut self, layer: &Recurrent) -> Result<Work> {
        let Sizes { runs, steps, depth, hidden } = Sizes::of(&self.graph.values, layer)?;
        let place = |planner: &mut Self, id: Option<Id>| id.map(|id| planner.place(id)).transpose();
        let x = self.place(layer.x)?;
        let mut matrix = |id: Id| -> Result<Place> {
            let depth = self.graph.shape(id)[0];
            Ok(self.factor(x, depth, vec![id])?.matrix)
        };
        Ok(Work::Recurrent(Box::new(RecurrentWork {
            cell: layer.cell,
            is_reverse: layer.is_reverse,
            shape: [runs, steps, depth, hidden],
            x,
            weights: matrix(layer.weights)?,
            recurrence: matrix(layer.recurrence)?,
            candidate: layer.candidate.map(matrix).transpose()?,
            biases: [self.place(layer.biases[0])?, self.place(layer.biases[1])?],
            initial: [place(self, layer.initial[0])?, place(self, layer.initial[1])?],
            lengths: place(self, layer.lengths)?,
        })))
    }
}

/// Memory of a layer's run: input products of some steps `[rows, steps, width]`, products of the state `[rows, width]`, the
/// state, the cell state or the scaled state.
struct Buffers<'a> {
    ahead: &'a mut [f32],
    products: &'a mut [f32],
    h: &'a mut [f32],
    c: &'a mut [f32],
}

impl Run<'_> {
    pub(super) fn recurrent(&self, of: &RecurrentWork, registers: &mut Lines, out: &mut [f32], stride: usize) {
        let [runs, steps, _, hidden] = of.shape;
        let (rows, width) = (self.rows, of.cell.gates() * hidden);
        let chunk = (CHUNK_NUMBERS / (rows * width).max(1)).clamp(1, steps.max(1));
        let room = rows * ((chunk + 1) * width + 2 * hidden);
        if registers.numbers().len() < room + PANEL {
            *registers = Lines::new(room);
        }
        let (ahead, rest) = registers.numbers_mut().split_at_mut(rows * chunk * width);
        let (products, rest) = rest.split_at_mut(rows * width);
        let (h, c) = rest.split_at_mut(rows * hidden);
        let mut buffers = Buffers { ahead, products, h, c };
        let of_run = (steps + of.kept()) * hidden;
        for run in 0..runs {
            let out = &mut out[run * of_run..];
            self.begin(of.initial[0], run, hidden, buffers.h);
            self.begin(of.initial[1], run, hidden, buffers.c);
            for n in (0..steps).step_by(chunk) {
                let count = chunk.min(steps - n);
                let first = if of.is_reverse { steps - n - count } else { n };
                self.multiply_ahead(of, run, [first, count], &mut buffers);
                for k in 0..count {
                    let k = if of.is_reverse { count - 1 - k } else { k };
                    self.advance(of, run, [first, k, count], &mut buffers, out, stride);
                }
            }
            for row in 0..rows {
                let to = &mut out[row * stride + steps * hidden..][..of.kept() * hidden];
                let (last, last_cell) = to.split_at_mut(hidden);
                last.copy_from_slice(&buffers.h[row * hidden..][..hidden]);
                last_cell.copy_from_slice(&buffers.c[row * hidden..][..last_cell.len()]);
            }
        }
    }

    /// Writes the state before the first step.
    fn begin(&self, initial: Option<Place>, run: usize, hidden: usize, to: &mut [f32]) {
        let Some(initial) = initial else { return to[..self.rows * hidden].fill(0.0) };
        let (numbers, apart) = self.at(initial);
        for (row, to) in to.chunks_exact_mut(hidden.max(1)).enumerate().take(self.rows) {
            to.copy_from_slice(&numbers[row * apart + run * hidden..][..hidden]);
        }
    }

    /// Multiplies the inputs of `count` steps from `first` on: those of a row or of a step at once, whichever are more.
    fn multiply_ahead(&self, of: &RecurrentWork, run: usize, [first, count]: [usize; 2], buffers: &mut Buffers<'_>) {
        let [_, steps, depth, hidden] = of.shape;
        let (rows, width) = (self.rows, of.cell.gates() * hidden);
        let (numbers, apart) = self.at(of.x);
        let at = |row: usize, k: usize| row * apart + (run * steps + first + k) * depth;
        let is_by_row = count > rows;
        for n in 0..if is_by_row { rows } else { count } {
            let (row, k, together) = if is_by_row { (n, 0, count) } else { (0, n, rows) };
            let (from_stride, to_stride) = if is_by_row { (depth, width) } else { (apart, count * width) };
            let part = Part {
                rows: &numbers[at(row, k)..],
                stride: from_stride,
                depth,
                weights: self.packed(of.weights, depth),
            };
            let bias = self.at(of.biases[0]).0;
            let product = Product { rows: together, columns: width, parts: &[part], bias, ..Product::default() };
            self.kernels.product(&product, &mut buffers.ahead[(row * count + k) * width..], to_stride);
        }
    }

    fn packed(&self, matrix: Place, depth: usize) -> Weights<'_> {
        Weights { numbers: self.at(matrix).0, row_stride: PANEL, panel_stride: depth * PANEL }
    }

    /// Computes step `first + k`, whose input products are number `k` of `count`.
    fn advance(
        &self,
        of: &RecurrentWork,
        run: usize,
        [first, k, count]: [usize; 3],
        buffers: &mut Buffers<'_>,
        out: &mut [f32],
        stride: usize,
    ) {
        let (rows, hidden, t) = (self.rows, of.shape[3], first + k);
        let width = of.cell.gates() * hidden;
        let Buffers { ahead, products, h, c } = buffers;
        let bias = self.at(of.biases[1]).0;
        let columns = if of.candidate.is_some() { 2 * hidden } else { width };
        let part = Part { rows: h, stride: hidden, depth: hidden, weights: self.packed(of.recurrence, hidden) };
        let product = Product { rows, columns, parts: &[part], bias, ..Product::default() };
        self.kernels.product(&product, products, width);
        let input = &ahead[k * width..];
        let step = CellStep { cell: of.cell, rows, hidden, input, stride: count * width, state: &[] };
        if let Some(candidate) = of.candidate {
            self.kernels.reset(&CellStep { state: products, ..step }, h, c);
            let part = Part { rows: c, stride: hidden, depth: hidden, weights: self.packed(candidate, hidden) };
            let bias = &self.at(Place { offset: of.biases[1].offset + columns, ..of.biases[1] }).0;
            let product = Product { rows, columns: hidden, parts: &[part], bias, ..Product::default() };
            self.kernels.product(&product, &mut products[columns..], width);
        }
        let lengths = of.lengths.map(|place| self.at(place));
        let is_active = |row: usize| lengths.is_none_or(|(numbers, apart)| (t as f32) < numbers[row * apart + run]);
        self.kernels.advance(&CellStep { state: products, ..step }, &is_active, h, c);
        for row in 0..rows {
            let to = &mut out[row * stride + t * hidden..][..hidden];
            match is_active(row) {
                true => to.copy_from_slice(&h[row * hidden..][..hidden]),
                false => to.fill(0.0),
            }
        }
    }
}

impl std::fmt::Display for RecurrentWork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [runs, steps, depth, hidden] = self.shape;
        let (cell, width) = (format!("{:?}", self.cell).to_lowercase(), self.cell.gates() * hidden);
        let (x, weights, recurrence) = (self.x, self.weights, self.recurrence);
        write!(f, "{cell} {x}[{runs}, {steps}, {depth}] x {weights}[{depth}, {width}]")?;
        write!(f, ", state[{hidden}] x {recurrence} + {} + {}", self.biases[0], self.biases[1])?;
        self.candidate.map_or(Ok(()), |candidate| write!(f, ", reset state x {candidate}"))?;
        self.initial.iter().flatten().try_for_each(|place| write!(f, ", from {place}"))?;
        self.lengths.map_or(Ok(()), |place| write!(f, ", lengths {place}"))?;
        if self.is_reverse { write!(f, ", reverse") } else { Ok(()) }
    }
}
