//! Dense graphs: ONNX files, run by `rten` on the CPU where they are no programs of ours.
//!
//! A [`Graph`] knows its inputs and outputs by name and checks every shape before it runs. User and item towers take the
//! pooled embedding of each feature, `[Q, width]`, under the feature's name; an OverArch takes what [`super::OverArch`] says.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rten::{DataType, Dimension, Model, NodeId, ValueOrView, ValueType};
use rten_tensor::TensorView;
use rten_tensor::prelude::*;

use crate::dense::{Given, Made, RowProgram, Size};
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use crate::tower::Threads;

/// An input or output of a graph. `None` stands for a size that differs from run to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The name in the file.
    pub name: String,
    /// Its dimensions, where the file tells them.
    pub shape: Option<Vec<Option<usize>>>,
}

/// A loaded ONNX graph of f32 tensors.
pub struct Graph {
    name: String,
    model: Model,
    inputs: Vec<(Port, NodeId)>,
    outputs: Vec<(Port, NodeId)>,
    weights: usize,
    /// The file, until the graph is lowered.
    source: Vec<u8>,
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph")
            .field("name", &self.name)
            .field("inputs", &self.inputs)
            .field("outputs", &self.outputs)
            .finish()
    }
}

/// A tensor that goes into a graph.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The input's name.
    pub name: &'a str,
    /// Its shape.
    pub shape: &'a [usize],
    /// Its numbers, row-major.
    pub values: &'a [f32],
}

impl Graph {
    /// Loads a graph. `name` stands in errors.
    ///
    /// # Errors
    /// `Invalid` where the bytes are no ONNX graph or use an operator that the CPU runtime does not have.
    pub fn load(name: &str, bytes: Vec<u8>) -> Result<Self> {
        let weights = bytes.len() / std::mem::size_of::<f32>();
        let unusable = |e: &dyn Display| Error::invalid(format!("{name}: not a usable ONNX graph: {e}"));
        let source = bytes.clone();
        let loaded = guarded(|| Model::load(bytes)).map_err(|panic| unusable(&panic))?;
        let model = loaded.map_err(|e| unusable(&e).caused_by(e))?;
        let ports = |what: &str, ids: &[NodeId]| -> Result<Vec<_>> {
            ids.iter()
                .map(|id| Ok((port(&model, *id).map_err(|e| e.within(format!("{name}: {what}")))?, *id)))
                .collect()
        };
        let (inputs, outputs) = (ports("input", model.input_ids())?, ports("output", model.output_ids())?);
        Ok(Graph { name: name.into(), inputs, outputs, model, weights, source })
    }

    /// The graph as a program that takes its inputs as `given`; none where it has what programs do not, which the log then names.
    pub(super) fn lower(&mut self, given: &[Given], outputs: &[Made]) -> Option<RowProgram> {
        let source = std::mem::take(&mut self.source);
        let fits = |port: &Port, sizes: &[Size]| {
            let fits = |(own, size): (&Option<usize>, &Size)| match size {
                Size::Fixed(n) => own.is_none_or(|own| own as i64 == *n),
                Size::Rows => own.is_none(),
            };
            port.shape.as_ref().is_none_or(|own| own.len() == sizes.len() && own.iter().zip(sizes).all(fits))
        };
        let lowered = || {
            if let Some(port) = self.inputs().find(|p| !given.iter().any(|g| g.name == p.name && fits(p, &g.shape))) {
                let shape = port.shape.as_deref().map_or("?".into(), shown);
                return Err(Error::unsupported(format!("input `{}` of shape {shape}", port.name)));
            }
            RowProgram::lower(&source, given, outputs)
        };
        match guarded(lowered).unwrap_or_else(|panic| Err(Error::unsupported(panic))) {
            Ok(program) => Some(program),
            Err(e) => {
                tracing::info!(graph = self.name, reason = %e, "the graph runs in rten");
                None
            }
        }
    }

    /// The name in errors.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// About how many numbers the graph holds: its file is hardly more than their bytes.
    pub fn weights(&self) -> usize {
        self.weights
    }

    /// The inputs, in the file's order.
    pub fn inputs(&self) -> impl Iterator<Item = &Port> {
        self.inputs.iter().map(|(port, _)| port)
    }

    /// The outputs, in the file's order.
    pub fn outputs(&self) -> impl Iterator<Item = &Port> {
        self.outputs.iter().map(|(port, _)| port)
    }

    /// An input by its name.
    ///
    /// # Errors
    /// `Invalid` naming the inputs that there are.
    pub fn input(&self, name: &str) -> Result<&Port> {
        find(&self.inputs, name).map(|(port, _)| port).ok_or_else(|| self.unknown("input", name, &self.inputs))
    }

    /// An output by its name.
    ///
    /// # Errors
    /// `Invalid` naming the outputs that there are.
    pub fn output(&self, name: &str) -> Result<&Port> {
        find(&self.outputs, name).map(|(port, _)| port).ok_or_else(|| self.unknown("output", name, &self.outputs))
    }

    fn unknown(&self, what: &str, name: &str, of: &[(Port, NodeId)]) -> Error {
        let known: Vec<&str> = of.iter().map(|(p, _)| p.name.as_str()).collect();
        Error::invalid(format!("{}: no {what} `{name}`; it has: {}", self.name, known.join(", ")))
    }

    /// Runs the graph on `threads` and returns the named output, whose shape is the declared one where the file tells it.
    ///
    /// # Errors
    /// `Invalid` for a missing or unknown input or one of another shape; `Internal` where the runtime fails.
    pub fn run(&self, inputs: &[Input<'_>], output: &str, threads: &Threads) -> Result<Tensor> {
        let given = inputs.iter().map(|input| self.given(input)).collect::<Result<Vec<_>>>()?;
        for (port, _) in &self.inputs {
            let times = match inputs.iter().filter(|i| i.name == port.name).count() {
                0 => "missing",
                1 => continue,
                _ => "given twice",
            };
            return Err(Error::invalid(format!("{}: input `{}` is {times}", self.name, port.name)));
        }
        let (port, id) = find(&self.outputs, output).ok_or_else(|| self.unknown("output", output, &self.outputs))?;
        let failed = |e: &dyn Display| Error::internal(format!("{}: the graph failed: {e}", self.name));
        let made =
            guarded(|| self.model.run_n(given, [*id], Some(threads.options()))).map_err(|panic| failed(&panic))?;
        let [value] = made.map_err(|e| failed(&e).caused_by(e))?;
        let tensor: rten_tensor::Tensor<f32> =
            value.into_tensor().ok_or_else(|| failed(&format!("output `{output}` is not f32")))?;
        let shape = tensor.shape().to_vec();
        if let Some(expected) = port.shape.as_ref().filter(|s| !fits(s, &shape)) {
            return Err(failed(&format!("output `{output}` came out as {shape:?}, expected {}", shown(expected))));
        }
        Tensor::new(shape, tensor.into_data())
    }

    fn given<'a>(&self, input: &Input<'a>) -> Result<(NodeId, ValueOrView<'a>)> {
        let Input { name, shape, values } = *input;
        let (port, id) = find(&self.inputs, name).ok_or_else(|| self.unknown("input", name, &self.inputs))?;
        if let Some(expected) = port.shape.as_ref().filter(|s| !fits(s, shape)) {
            let place = format!("{}: input `{name}`", self.name);
            return Err(Error::invalid(format!("{place} has shape {shape:?}, expected {}", shown(expected))));
        }
        if values.len() != shape.iter().product::<usize>() {
            let place = format!("{}: input `{name}`", self.name);
            return Err(Error::internal(format!("{place}: shape {shape:?} does not hold {} numbers", values.len())));
        }
        Ok((*id, ValueOrView::from(TensorView::from_data(shape, values))))
    }
}

/// Runs a call of the runtime, which panics on some malformed graphs.
fn guarded<T>(call: impl FnOnce() -> T) -> std::result::Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        format!("the runtime panicked: {}", text.unwrap_or("without a message"))
    })
}

fn port(model: &Model, id: NodeId) -> Result<Port> {
    let info = model.node_info(id).ok_or_else(|| Error::invalid("is not in the graph"))?;
    let name = info.name().filter(|n| !n.is_empty()).ok_or_else(|| Error::invalid("has no name"))?.to_owned();
    if let Some(kind) = info.dtype().filter(|d| *d != ValueType::Tensor(DataType::Float)) {
        return Err(Error::invalid(format!("`{name}` is {kind}, expected tensor(f32)")));
    }
    let size = |d: &Dimension| if let Dimension::Fixed(n) = d { Some(*n) } else { None };
    Ok(Port { name, shape: info.shape().map(|dimensions| dimensions.iter().map(size).collect()) })
}

fn find<'a>(ports: &'a [(Port, NodeId)], name: &str) -> Option<&'a (Port, NodeId)> {
    ports.iter().find(|(port, _)| port.name == name)
}

fn fits(expected: &[Option<usize>], got: &[usize]) -> bool {
    expected.len() == got.len() && expected.iter().zip(got).all(|(e, g)| e.is_none_or(|e| e == *g))
}

/// A shape as people write it: `[?, 64]`.
pub fn shown(shape: &[Option<usize>]) -> String {
    let sizes: Vec<String> = shape.iter().map(|d| d.map_or("?".into(), |n| n.to_string())).collect();
    format!("[{}]", sizes.join(", "))
}

#[cfg(test)]
mod tests;
