//! GRU, LSTM and RNN: one operation per direction, with constant weights and default activation functions.
//!
//! A recurrent operation computes `[batch, steps, numbers]`, and the outputs of ONNX are views of this value: `Y`
//! `[steps, directions, batch, hidden]`, `Y_h` and `Y_c` `[directions, batch, hidden]`; with `layout` 1 the batch comes
//! first.

use rten_onnx::onnx::NodeProto;

use super::known::{Attributes, Importer, Known, refused};
use crate::dense::ir::{Id, Recurrent};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::Cell;

/// Positions of a node's inputs.
const X: usize = 0;
const W: usize = 1;
const R: usize = 2;
const B: usize = 3;
const LENGTHS: usize = 4;
const INITIAL: [usize; 2] = [5, 6];
const PEEPHOLES: usize = 7;

/// Properties that all directions of a layer share.
struct Layer {
    cell: Cell,
    hidden: usize,
    /// Batch axis of `x`, and batch axis of the initial states.
    batch: [usize; 2],
}

impl Importer {
    /// Imports a recurrent layer and its outputs.
    pub(super) fn recurrent(
        &mut self,
        operator: &str,
        node: &NodeProto,
        attributes: &mut Attributes<'_>,
    ) -> Result<()> {
        let (is_batch_first, directions) = (attributes.integer("layout", 0) != 0, directions(attributes)?);
        let cell = match operator {
            "RNN" => Cell::Rnn,
            "LSTM" => Cell::Lstm,
            _ if attributes.integer("linear_before_reset", 0) != 0 => Cell::Gru,
            _ => Cell::GruResetFirst,
        };
        default_activations(cell, directions.len(), attributes)?;
        if attributes.integer("input_forget", 0) != 0 || Importer::has(node, PEEPHOLES) {
            return Err(refused("coupled gates (`input_forget`) and peepholes are not supported"));
        }
        let recurrence = self.value(node, R)?;
        let [of_directions, _, hidden] = self.graph.shape(recurrence)[..] else {
            return Err(refused(format!(
                "recurrence weights have shape {:?}, expected 3 axes",
                self.graph.shape(recurrence)
            )));
        };
        let wanted = attributes.integer("hidden_size", hidden as i64);
        if of_directions != directions.len() || wanted != hidden as i64 || hidden == 0 {
            return Err(refused(format!(
                "recurrence weights have {of_directions} directions and {hidden} states, unlike `direction` or `hidden_size` {wanted}"
            )));
        }
        let layer = Layer { cell, hidden, batch: if is_batch_first { [0, 0] } else { [1, 1] } };
        let x = self.value(node, X)?;
        let x = self.batch_first(x, layer.batch[0])?;
        let lengths = if Importer::has(node, LENGTHS) { Some(self.number(node, LENGTHS)?) } else { None };
        let mut made = Vec::new();
        for (direction, &is_reverse) in directions.iter().enumerate() {
            let initial = [
                self.initial_state(node, INITIAL[0], direction, &layer)?,
                if cell == Cell::Lstm { self.initial_state(node, INITIAL[1], direction, &layer)? } else { None },
            ];
            let weights = self.turned(node, W, direction)?;
            let recurrence = self.turned(node, R, direction)?;
            let (recurrence, candidate) = match cell {
                Cell::GruResetFirst => {
                    (self.columns(recurrence, 0, 2 * hidden)?, Some(self.columns(recurrence, 2 * hidden, hidden)?))
                }
                _ => (recurrence, None),
            };
            let biases = self.biases(node, direction, &layer)?;
            let of = Recurrent { cell, is_reverse, x, weights, recurrence, candidate, biases, initial, lengths };
            made.push(self.graph.recurrent(of)?);
        }
        attributes.finish()?;
        let steps = self.graph.shape(x)[1];
        // Steps of the sequence and of both states, in the order of the node's outputs.
        let parts = [(0, steps), (steps, 1), (steps + 1, 1)];
        for (n, (name, (first, count))) in node.output.iter().zip(parts).enumerate() {
            if name.is_empty() {
                continue;
            }
            if n == 2 && cell != Cell::Lstm {
                return Err(refused("the node has 3 outputs, expected at most 2"));
            }
            let each = made.iter().map(|&id| self.steps(id, first, count)).collect::<Result<Vec<_>>>()?;
            // `[batch, steps, directions, hidden]`
            let all = self.graph.concat(2, &each)?;
            let output = match (n, is_batch_first) {
                (0, true) => all,
                (0, false) => self.graph.transpose(all, &[1, 2, 0, 3])?,
                (_, true) => self.without_steps(all, &[0, 1, 2, 3])?,
                (_, false) => self.without_steps(all, &[1, 2, 0, 3])?,
            };
            self.note(operator, node, output)?;
            self.known.insert(name.clone(), Known::Value(output));
        }
        Ok(())
    }

    /// Moves the batch axis of `x` to the front.
    fn batch_first(&mut self, x: Id, batch: usize) -> Result<Id> {
        if self.rank(x) != 3 {
            return Err(refused(format!("the sequence has shape {:?}, expected 3 axes", self.graph.shape(x))));
        }
        if batch == 0 { Ok(x) } else { self.graph.transpose(x, &[1, 0, 2]) }
    }

    /// Returns the initial state of a direction, `[batch, hidden]`; `None` if the state is all zeros.
    fn initial_state(&mut self, node: &NodeProto, n: usize, direction: usize, layer: &Layer) -> Result<Option<Id>> {
        if !Importer::has(node, n) {
            return Ok(None);
        }
        let state = self.value(node, n)?;
        let original = self.expanded.get(&state).copied().unwrap_or(state);
        if self.bound(original) == 0.0 {
            return Ok(None);
        }
        let shape = self.graph.shape(state).to_vec();
        let axis = 1 - layer.batch[1];
        if shape.len() != 3 || shape[2] != layer.hidden || direction >= shape[axis] {
            return Err(refused(format!("the initial state has shape {shape:?}, which does not fit the layer")));
        }
        let own = self.along(state, axis, &[direction])?;
        let rows = self.rows(own).map(|_| 0);
        self.graph.reshape(own, vec![shape[layer.batch[1]], layer.hidden], rows).map(Some)
    }

    /// Returns the transposed weights of a direction, from input `n`.
    fn turned(&mut self, node: &NodeProto, n: usize, direction: usize) -> Result<Id> {
        let weights = self.value(node, n)?;
        let shape = self.graph.shape(weights).to_vec();
        if shape.len() != 3 || direction >= shape[0] {
            return Err(refused(format!("weights have shape {shape:?}, expected 3 axes and a direction {direction}")));
        }
        let own = self.along(weights, 0, &[direction])?;
        let own = self.graph.reshape(own, shape[1..].to_vec(), self.rows(own))?;
        self.graph.transpose(own, &[1, 0])
    }

    /// Returns some columns of a matrix.
    fn columns(&mut self, matrix: Id, first: usize, count: usize) -> Result<Id> {
        let size = self.graph.shape(matrix)[1];
        if first + count > size {
            return Err(refused(format!("weights have {size} columns, too few for the hidden size")));
        }
        self.along(matrix, 1, &(first..first + count).collect::<Vec<_>>())
    }

    /// Returns the biases of the products with the input and with the state. Both biases are summed into the first one,
    /// except for a gate that scales the products with the state.
    fn biases(&mut self, node: &NodeProto, direction: usize, layer: &Layer) -> Result<[Id; 2]> {
        let width = layer.cell.gates() * layer.hidden;
        let mut both = [vec![0.0; width], vec![0.0; width]];
        if Importer::has(node, B) {
            let bias = self.value(node, B)?;
            let shape = self.graph.shape(bias).to_vec();
            let numbers = self.graph.constant(bias).filter(|_| shape.len() == 2 && shape[1] == 2 * width);
            let own = numbers.and_then(|numbers| numbers.chunks_exact(2 * width).nth(direction));
            let own = own
                .ok_or_else(|| refused(format!("the bias of shape {shape:?} is not a constant that fits the layer")))?;
            let (of_input, of_state) = own.split_at(width);
            for n in 0..width {
                let is_scaled = layer.cell == Cell::Gru && n >= 2 * layer.hidden;
                both[0][n] = if is_scaled { of_input[n] } else { of_input[n] + of_state[n] };
                both[1][n] = if is_scaled { of_state[n] } else { 0.0 };
            }
        }
        let [of_input, of_state] = both;
        Ok([self.graph.number(vec![width], of_input)?, self.graph.number(vec![width], of_state)?])
    }

    /// Returns `count` steps of a layer from `first` on, `[batch, count, 1, hidden]`.
    fn steps(&mut self, made: Id, first: usize, count: usize) -> Result<Id> {
        let steps = self.along(made, 1, &(first..first + count).collect::<Vec<_>>())?;
        let [batch, _, hidden] = self.graph.shape(steps)[..] else {
            return Err(refused("expected layer results with 3 axes"));
        };
        self.graph.reshape(steps, vec![batch, count, 1, hidden], self.rows(steps))
    }

    /// Removes the axis of steps, which has size 1, after reordering the axes of a state by `order`.
    fn without_steps(&mut self, state: Id, order: &[usize; 4]) -> Result<Id> {
        let moved = self.graph.transpose(state, order)?;
        let axis = order.iter().position(|&axis| axis == 1).unwrap_or(0);
        self.without_axes(moved, &[axis])
    }
}

/// Returns per direction whether the sequence is read in reverse.
fn directions(attributes: &mut Attributes<'_>) -> Result<Vec<bool>> {
    match attributes.text("direction", "forward").as_str() {
        "forward" => Ok(vec![false]),
        "reverse" => Ok(vec![true]),
        "bidirectional" => Ok(vec![false, true]),
        other => Err(refused(format!("direction `{other}`, expected forward, reverse or bidirectional"))),
    }
}

/// Rejects activation functions other than the default ones, and clipping.
fn default_activations(cell: Cell, directions: usize, attributes: &mut Attributes<'_>) -> Result<()> {
    let expected: &[&str] = match cell {
        Cell::Rnn => &["tanh"],
        Cell::Lstm => &["sigmoid", "tanh", "tanh"],
        Cell::Gru | Cell::GruResetFirst => &["sigmoid", "tanh"],
    };
    if let Some(named) = attributes.take("activations") {
        let names: Vec<String> = named.strings.iter().map(|name| name.to_lowercase()).collect();
        if !names.is_empty() && names != expected.repeat(directions) {
            return Err(refused(format!("activations {names:?}, expected {expected:?}")));
        }
    }
    for name in ["activation_alpha", "activation_beta", "clip"] {
        if let Some(attribute) = attributes.take(name)
            && (attribute.f.is_some() || !attribute.floats.is_empty())
        {
            return Err(refused(format!("attribute `{name}` is not supported")));
        }
    }
    Ok(())
}
