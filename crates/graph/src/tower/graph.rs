//! Dense graphs: ONNX files, compiled to a program ([`crate::dense`]) or, if that fails, run by `rten` on the CPU.
//!
//! A [`Graph`] knows its inputs and outputs by name and checks every shape before it runs. User and item towers take the pooled
//! embedding of each feature, `[Q, width]`, under the feature's name; [`super::OverArch`] describes the inputs of a reranker.
//! `rten` only reads files that passed the checks of `onnx` and were not compiled.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::OnceLock;

use rten::{Model, NodeId, Value, ValueOrView};
use rten_tensor::TensorView;
use rten_tensor::prelude::*;

use super::onnx::{self, Port};
use crate::dense::{DeclaredInput, DeclaredOutput, Precision, ReadGraph, RowProgram, Size};
use crate::tower::Threads;
use sterling_core::error::{Error, Result, panic_message};
use sterling_core::tasks;
use sterling_core::tensor::Tensor;

/// An ONNX graph of f32 tensors.
pub struct Graph {
    name: String,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    weights: usize,
    /// Deviation of the fallback runtime from the ONNX specification, if it evaluates this graph differently.
    misread: Option<String>,
    /// Contents of the file, until it is compiled or loaded by the runtime.
    source: Vec<u8>,
    runtime: OnceLock<Model>,
    precision: Precision,
}

/// How a graph runs.
#[derive(Clone, Debug)]
pub enum Runs {
    /// A compiled program.
    Program(Box<RowProgram>),
    /// The fallback runtime, with the reason why the graph could not be compiled.
    Runtime(String),
}

impl Runs {
    /// Returns the compiled program, if there is one.
    pub fn program(&self) -> Option<&RowProgram> {
        match self {
            Runs::Program(program) => Some(program),
            Runs::Runtime(_) => None,
        }
    }
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

/// Input tensor of a graph.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// Name of the input.
    pub name: &'a str,
    /// Shape of the value.
    pub shape: &'a [usize],
    /// Numbers, row-major.
    pub values: &'a [f32],
}

impl Graph {
    /// Reads a graph. `name` identifies the graph in errors.
    ///
    /// # Errors
    /// `Invalid` if the bytes are not an ONNX graph, or the graph fails a check.
    pub fn load(name: &str, bytes: Vec<u8>) -> Result<Self> {
        let onnx::Ports { inputs, outputs, misread } = onnx::read(&bytes).map_err(|e| e.within(name))?;
        let weights = bytes.len() / std::mem::size_of::<f32>();
        Ok(Graph {
            name: name.into(),
            inputs,
            outputs,
            weights,
            misread,
            source: bytes,
            runtime: OnceLock::new(),
            precision: Precision::F32,
        })
    }

    /// Sets the precision of the products in the compiled program. The fallback runtime only supports f32.
    pub fn in_precision(self, precision: Precision) -> Self {
        Graph { precision, ..self }
    }

    /// Compiles the graph for the inputs `given`; falls back to the runtime if the graph has unsupported parts.
    ///
    /// # Errors
    /// `Invalid` if the runtime lacks an operator too, or evaluates one differently from the ONNX specification.
    pub(super) fn lower(&mut self, given: &[DeclaredInput], outputs: &[DeclaredOutput]) -> Result<Runs> {
        let runs = match self.network(given, outputs, |network| network.program(self.precision)) {
            Ok(program) => Runs::Program(Box::new(program)),
            Err(e) => {
                if let Some(node) = &self.misread {
                    let name = &self.name;
                    return Err(Error::invalid(format!(
                        "{name}: {node} in `rten`, which runs this graph because it cannot be compiled: {e}"
                    )));
                }
                tracing::info!(graph = self.name, reason = %e, "graph not compiled; it runs in rten");
                self.runtime()?;
                Runs::Runtime(e.to_string())
            }
        };
        self.source = Vec::new();
        Ok(runs)
    }

    /// Calls `f` with the graph, read for the inputs `given`. Must not be called after [`Graph::lower`].
    ///
    /// # Errors
    /// `Unsupported` if the graph has parts that compiled programs do not support; errors of `f`.
    pub(super) fn network<T: Send>(
        &self,
        given: &[DeclaredInput],
        outputs: &[DeclaredOutput],
        f: impl FnOnce(ReadGraph) -> Result<T> + Send,
    ) -> Result<T> {
        let fits = |port: &Port, sizes: &[Size]| {
            let fits = |(own, size): (&Option<usize>, &Size)| match size {
                Size::Fixed(n) => own.is_none_or(|own| own as i64 == *n),
                Size::Rows => own.is_none(),
            };
            port.shape.as_ref().is_none_or(|own| own.len() == sizes.len() && own.iter().zip(sizes).all(fits))
        };
        if let Some(port) = self.inputs().find(|p| !given.iter().any(|g| g.name == p.name && fits(p, &g.shape))) {
            let shape = port.shape.as_deref().map_or("?".into(), shown);
            return Err(Error::unsupported(format!("input `{}` has the unsupported shape {shape}", port.name)));
        }
        let made = guarded(|| deep(|| ReadGraph::read(&self.source, given, outputs).and_then(f))?);
        made.unwrap_or_else(|panic| Err(Error::unsupported(panic)))
    }

    /// Frees the contents of the file after compilation.
    pub(super) fn read(self) -> Self {
        Graph { source: Vec::new(), ..self }
    }

    /// Returns the requested precision of the products in the compiled program.
    pub(super) fn precision(&self) -> Precision {
        self.precision
    }

    /// Returns the graph as loaded by the fallback runtime; the first call loads it.
    fn runtime(&self) -> Result<&Model> {
        if self.runtime.get().is_none() {
            let unusable = |e: &dyn Display| Error::invalid(format!("{}: not a usable ONNX graph: {e}", self.name));
            let source = self.source.clone();
            let loaded = guarded(|| deep(|| Model::load(source))).map_err(|panic| unusable(&panic))??;
            let model = loaded.map_err(|e| unusable(&e).caused_by(e))?;
            let _ = self.runtime.set(model);
        }
        self.runtime.get().ok_or_else(|| Error::internal("the runtime of the graph is not loaded"))
    }

    /// Returns the name of the graph in errors.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the approximate count of numbers in the graph, estimated from the size of the file.
    pub fn weights(&self) -> usize {
        self.weights
    }

    /// Returns the inputs, in the file's order.
    pub fn inputs(&self) -> impl Iterator<Item = &Port> {
        self.inputs.iter()
    }

    /// Returns the outputs, in the file's order.
    pub fn outputs(&self) -> impl Iterator<Item = &Port> {
        self.outputs.iter()
    }

    /// Returns an input by its name.
    ///
    /// # Errors
    /// `Invalid`, naming the existing inputs.
    pub fn input(&self, name: &str) -> Result<&Port> {
        find(&self.inputs, name).ok_or_else(|| self.unknown("input", name, &self.inputs))
    }

    /// Returns an output by its name.
    ///
    /// # Errors
    /// `Invalid`, naming the existing outputs.
    pub fn output(&self, name: &str) -> Result<&Port> {
        find(&self.outputs, name).ok_or_else(|| self.unknown("output", name, &self.outputs))
    }

    fn unknown(&self, what: &str, name: &str, of: &[Port]) -> Error {
        let known: Vec<&str> = of.iter().map(|port| port.name.as_str()).collect();
        Error::invalid(format!("{}: no {what} `{name}`, expected one of: {}", self.name, known.join(", ")))
    }

    /// Runs [`Graph::run_all`] for one output.
    ///
    /// # Errors
    /// As [`Graph::run_all`].
    pub fn run(&self, inputs: &[Input<'_>], output: &str, threads: &Threads) -> Result<Tensor> {
        let mut made = self.run_all(inputs, &[output], threads)?;
        made.pop().ok_or_else(|| Error::internal(format!("{}: the graph returned no `{output}`", self.name)))
    }

    /// Runs the graph on `threads` and returns the named outputs, whose shapes are checked against the file.
    ///
    /// # Errors
    /// `Invalid` for a missing or unknown input, or an input of another shape; `Internal` if the runtime fails.
    pub fn run_all(&self, inputs: &[Input<'_>], outputs: &[&str], threads: &Threads) -> Result<Vec<Tensor>> {
        let model = self.runtime()?;
        let given = inputs.iter().map(|input| self.given(model, input)).collect::<Result<Vec<_>>>()?;
        for port in &self.inputs {
            let times = match inputs.iter().filter(|i| i.name == port.name).count() {
                0 => "missing",
                1 => continue,
                _ => "given twice",
            };
            return Err(Error::invalid(format!("{}: input `{}` is {times}", self.name, port.name)));
        }
        let ports = outputs.iter().map(|name| self.output(name)).collect::<Result<Vec<_>>>()?;
        let id = |port: &&Port| self.node(model.output_ids(), &self.outputs, &port.name);
        let ids = ports.iter().map(id).collect::<Result<Vec<NodeId>>>()?;
        let failed = |e: &dyn Display| Error::internal(format!("{}: the graph failed: {e}", self.name));
        let made = guarded(|| model.run(given, &ids, Some(threads.options()))).map_err(|panic| failed(&panic))?;
        let made = made.map_err(|e| failed(&e).caused_by(e))?;
        let tensor = |(value, port): (Value, &&Port)| {
            let name = &port.name;
            let tensor: rten_tensor::Tensor<f32> =
                value.into_tensor().ok_or_else(|| failed(&format!("output `{name}` is not f32")))?;
            let shape = tensor.shape().to_vec();
            if let Some(expected) = port.shape.as_ref().filter(|s| !fits(s, &shape)) {
                return Err(failed(&format!("output `{name}` has shape {shape:?}, expected {}", shown(expected))));
            }
            Tensor::new(shape, tensor.into_data())
        };
        made.into_iter().zip(&ports).map(tensor).collect()
    }

    /// Returns the runtime's id of an input or output; the runtime has the same order as the file.
    fn node(&self, ids: &[NodeId], ports: &[Port], name: &str) -> Result<NodeId> {
        let place = ports.iter().position(|port| port.name == name);
        let id = place.and_then(|place| ids.get(place)).copied();
        id.ok_or_else(|| Error::internal(format!("{}: the runtime has no `{name}`", self.name)))
    }

    fn given<'a>(&self, model: &Model, input: &Input<'a>) -> Result<(NodeId, ValueOrView<'a>)> {
        let Input { name, shape, values } = *input;
        let port = self.input(name)?;
        if let Some(expected) = port.shape.as_ref().filter(|s| !fits(s, shape)) {
            let place = format!("{}: input `{name}`", self.name);
            return Err(Error::invalid(format!("{place} has shape {shape:?}, expected {}", shown(expected))));
        }
        if values.len() != shape.iter().product::<usize>() {
            let place = format!("{}: input `{name}`", self.name);
            return Err(Error::internal(format!("{place}: shape {shape:?} does not hold {} numbers", values.len())));
        }
        Ok((self.node(model.input_ids(), &self.inputs, name)?, ValueOrView::from(TensorView::from_data(shape, values))))
    }
}

/// Calls the runtime and converts panics to errors, since the runtime panics on some malformed graphs.
fn guarded<T>(call: impl FnOnce() -> T) -> std::result::Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| format!("the runtime panicked: {}", panic_message(&*panic)))
}

/// Runs a call in a thread whose stack suffices for deep graphs.
fn deep<T: Send>(call: impl FnOnce() -> T + Send) -> Result<T> {
    std::thread::scope(|scope| {
        Ok(tasks::GRAPH.start_in(scope, call)?.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

fn find<'a>(ports: &'a [Port], name: &str) -> Option<&'a Port> {
    ports.iter().find(|port| port.name == name)
}

fn fits(expected: &[Option<usize>], got: &[usize]) -> bool {
    expected.len() == got.len() && expected.iter().zip(got).all(|(e, g)| e.is_none_or(|e| e == *g))
}

/// Formats a shape: `[?, 64]`.
pub fn shown(shape: &[Option<usize>]) -> String {
    let sizes: Vec<String> = shape.iter().map(|d| d.map_or("?".into(), |n| n.to_string())).collect();
    format!("[{}]", sizes.join(", "))
}

#[cfg(test)]
mod tests;
