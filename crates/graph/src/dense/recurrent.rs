//! Recurrent layers: GRU, LSTM and RNN over the steps of a sequence, one direction per operation.
//!
//! The inputs of several steps are multiplied at once, `x W`; then each step multiplies the state of all rows of a
//! block, `h R`, and applies the gates (`Cell`) in one kernel. The result of a row is `[runs, steps, hidden]`, where
//! each sequence is followed by the last state and, for an LSTM, the last cell state. Steps behind the valid length do
//! not change the state, and their results are zeros.
//!
//! Memory per block of `n` rows: input products of at most [`CHUNK_NUMBERS`] numbers (or one step), and `n` states.

use super::exec::Run;
use super::graph::Graph;
use super::ir::{Id, Op, Recurrent, RecurrentSizes, Side};
use super::plan::Planner;
use super::steps::{BufferRange, RecurrentWork, Work};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::dense::{CellStep, Lines, PANEL, Part, Product, Weights, packed_stride};

/// Maximum count of numbers of input products that are computed ahead of the steps.
const CHUNK_NUMBERS: usize = 64 << 10;
/// Maximum multiply-adds of a layer per row.
const WORK_MAX: usize = 1 << 30;

impl Graph {
    /// Adds a recurrent layer.
    ///
    /// # Errors
    /// `Unsupported` if shapes do not fit, a weight is not constant, or the layer is too large.
    pub(super) fn recurrent(&mut self, layer: Recurrent) -> Result<Id> {
        let RecurrentSizes { runs, steps, depth, hidden } = layer.sizes(&self.values)?;
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
                return Err(Error::unsupported(format!("weights have shape {got:?}, expected constants {shape:?}")));
            }
        }
        let states = layer.initial.iter().flatten().map(|&id| (id, vec![runs, hidden]));
        for (id, shape) in states.chain(layer.lengths.map(|id| (id, vec![runs]))) {
            if self.shape(id) != shape {
                return Err(Error::unsupported(format!(
                    "a state or lengths have shape {:?}, expected {shape:?}",
                    self.shape(id)
                )));
            }
        }
        let is_pair = |id: &Id| self.values[*id].side == Side::Pair;
        let of_rows: Vec<Id> = layer.reads().into_iter().filter(is_pair).collect();
        if of_rows.iter().any(|&id| self.values[id].rows != Some(0)) {
            return Err(Error::unsupported(
                "a recurrent layer has candidates along another axis, expected them along the batch axis",
            ));
        }
        let all =
            steps.checked_mul(depth + hidden).and_then(|n| n.checked_mul(width)).and_then(|n| n.checked_mul(runs));
        if all.is_none_or(|work| work > WORK_MAX) {
            return Err(Error::unsupported(format!(
                "a recurrent layer of {steps} steps from {depth} to {hidden} elements is too large"
            )));
        }
        let shape = vec![runs, steps + layer.kept(), hidden];
        let rows = (!of_rows.is_empty()).then_some(0);
        self.add(Op::Recurrent(layer.into()), shape, rows)
    }
}

impl Planner<'_> {
    pub(super) fn recurrent(&mut self, layer: &Recurrent) -> Result<Work> {
        let RecurrentSizes { runs, steps, depth, hidden } = layer.sizes(&self.graph.values)?;
        let place = |planner: &mut Self, id: Option<Id>| id.map(|id| planner.place(id)).transpose();
        let x = self.place(layer.x)?;
        let mut matrix = |id: Id| -> Result<BufferRange> {
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

/// Memory of a layer's run: input products of some steps `[rows, steps, width]`, products of the state `[rows, width]`,
/// the state, and the cell state or scaled state.
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
    fn begin(&self, initial: Option<BufferRange>, run: usize, hidden: usize, to: &mut [f32]) {
        let Some(initial) = initial else { return to[..self.rows * hidden].fill(0.0) };
        let (numbers, apart) = self.at(initial);
        for (row, to) in to.chunks_exact_mut(hidden.max(1)).enumerate().take(self.rows) {
            to.copy_from_slice(&numbers[row * apart + run * hidden..][..hidden]);
        }
    }

    /// Multiplies the inputs of `count` steps from `first` on; one product covers the steps of a row or the rows of a
    /// step, whichever are more.
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
                weights: self.packed(of.weights, depth, width),
            };
            let bias = self.at(of.biases[0]).0;
            let product = Product { rows: together, columns: width, parts: &[part], bias, ..Product::default() };
            self.kernels.product(&product, &mut buffers.ahead[(row * count + k) * width..], to_stride);
        }
    }

    fn packed(&self, matrix: BufferRange, depth: usize, columns: usize) -> Weights<'_> {
        let row_stride = packed_stride(columns);
        Weights { numbers: self.at(matrix).0, row_stride, panel_stride: depth * row_stride }
    }

    /// Computes step `first + k`, whose input products are at index `k` of the `count` products computed ahead.
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
        let part =
            Part { rows: h, stride: hidden, depth: hidden, weights: self.packed(of.recurrence, hidden, columns) };
        let backwards = t % 2 == 1;
        let product = Product { rows, columns, parts: &[part], bias, backwards, ..Product::default() };
        self.kernels.product(&product, products, width);
        let input = &ahead[k * width..];
        let step = CellStep { cell: of.cell, rows, hidden, input, stride: count * width, state: &[] };
        if let Some(candidate) = of.candidate {
            self.kernels.reset(&CellStep { state: products, ..step }, h, c);
            let part = Part { rows: c, stride: hidden, depth: hidden, weights: self.packed(candidate, hidden, hidden) };
            let bias = &self.at(BufferRange { offset: of.biases[1].offset + columns, ..of.biases[1] }).0;
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
