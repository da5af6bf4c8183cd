//! Training of graphs: gradients of an ONNX graph with respect to inputs and parameters, and optimizers of the
//! parameters.
//!
//! A [`TrainableGraph`] is read like a [`RowProgram`](super::RowProgram), except that parameters are not folded as
//! constants: floating-point initializers become inputs that all rows share. [`TrainableGraph::forward`] computes the
//! outputs of a batch of rows. [`TrainableGraph::backward`] computes, from the gradients of the outputs, the gradients
//! of each row's inputs and the gradients of the parameters, summed over rows. `adjoint` derives the backward pass as a
//! graph, `rules` has the derivative of each operation, `run` executes both graphs with the kernels and the planner of
//! compiled graphs, `file` finds the parameters and writes new values. [`DenseOptimizer`] updates the parameters.
//!
//! **Order of sums.** The gradient of a parameter is summed in row order within each micro-batch of 64 rows (`MICRO_BATCH`), and
//! these sums are added in pairs, in the order of a binary tree ([`TreeSum`]). The bits are the same for any number of threads
//! and any block size. Another instruction set may round differently.
//!
//! **Rows.** Inputs whose [`DeclaredInput`] has `is_pair` have values per row. A row is a request of a tower; for a
//! reranker, a row is a user with one candidate if the user inputs are given per row too. Inputs that all rows share
//! ([`Batch::shared`]) have gradients like parameters.
//!
//! ```
//! use sterling_graph::dense::train::{Batch, DenseOptimizer, Gradients, OptimizerKind, OptimizerSpec, TrainableGraph, Workspace};
//! use sterling_graph::dense::{DeclaredInput, InputRows, DeclaredOutput, Size};
//! use sterling_kernels::threads::Threads;
//!
//! let onnx = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tiny/user.onnx"))?;
//! let row = |name: &str, width| DeclaredInput { name: name.into(), is_pair: true, shape: vec![Size::Rows, Size::Fixed(width)] };
//! let given = [row("installed", 4), row("section", 2), row("size", 3)];
//! let query = [DeclaredOutput { name: "query".into(), shape: vec![Size::Rows, Size::Fixed(4)] }];
//! let graph = TrainableGraph::read(&onnx, &given, &query, &[])?;
//! let mut parameters = graph.initial().to_vec();
//! let mut optimizer = DenseOptimizer::new(OptimizerSpec::new(OptimizerKind::Adam, 0.01), parameters.len())?;
//! let (mut workspace, mut outputs, mut gradients) = (Workspace::new(&Threads::default()), Vec::new(), Gradients::default());
//!
//! // Moves all queries towards the first axis.
//! let fill = |rows: InputRows<'_>| rows.each(|n, row| row.iter_mut().zip(0..).for_each(|(x, i)| *x = ((n * 9 + i) % 7) as f32));
//! let batch = Batch { rows: 100, shared: &[], fill: &fill };
//! let mut first = Vec::new();
//! for _ in 0..20 {
//!     graph.forward(&parameters, &batch, &mut workspace, &mut outputs)?;
//!     first.push(outputs[0].chunks(4).map(|query| query[0]).sum::<f32>() / 100.0);
//!     let of_query: Vec<f32> = [-0.01, 0.0, 0.0, 0.0].repeat(100);
//!     graph.backward(&parameters, &batch, &[&of_query], &mut workspace, &mut gradients)?;
//!     optimizer.step(&mut parameters, &gradients.parameters)?;
//! }
//! assert!(first[19] > first[0] && gradients.inputs[1].len() == 100 * 2);
//! let _trained: Vec<u8> = graph.write(&parameters)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod adjoint;
mod file;
mod memory;
mod optimizer;
mod reverse;
mod rules;
mod run;
mod sums;
mod tree;

use std::ops::Range;

use super::graph::Graph;
use super::ir::{GraphInput, Side};
use super::{DeclaredInput, DeclaredOutput, InputRows, ReadGraph, Size};
use adjoint::Adjoint;
pub use file::Parameter;
pub use memory::Workspace;
use memory::{Room, Worker, at, by_micro_batch, copy, fit, micro_batch, refill};
pub use optimizer::{DenseOptimizer, OptimizerKind, OptimizerSpec};
pub use run::MICRO_BATCH;
use run::{Outputs, Pass};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::Kernels;
use sums::Sum;
pub use tree::TreeSum;

/// An input with values per row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowInput {
    /// Name of the input in the file.
    pub name: String,
    /// Numbers per row.
    pub width: usize,
}

/// Rows that a graph runs over.
#[derive(Clone, Copy)]
pub struct Batch<'a> {
    /// Number of rows.
    pub rows: usize,
    /// Values of the shared inputs, in the order of the inputs.
    pub shared: &'a [&'a [f32]],
    /// Writes the inputs of some rows; the inputs of a row are contiguous, in the order of the inputs. Called once per
    /// block of rows, by any thread, in the forward and in the backward pass.
    pub fill: &'a (dyn Fn(InputRows<'_>) + Sync),
}

/// Inputs of a backward pass.
#[derive(Clone, Copy)]
struct Upstream<'a> {
    parameters: &'a [f32],
    batch: &'a Batch<'a>,
    output_gradients: &'a [&'a [f32]],
}

impl std::fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batch").field("rows", &self.rows).field("shared", &self.shared.len()).finish_non_exhaustive()
    }
}

/// Results of a backward pass. Buffers are reused between passes.
#[derive(Clone, Debug, Default)]
pub struct Gradients {
    /// Per row input, `[rows, width]`, in the order of [`TrainableGraph::inputs`].
    pub inputs: Vec<Vec<f32>>,
    /// Per shared input, in the order of the inputs, summed over rows.
    pub shared: Vec<Vec<f32>>,
    /// Gradients of all parameters, summed over rows.
    pub parameters: Vec<f32>,
    /// Gradient sums of micro-batches, added in tree order; filled by [`TrainableGraph::backward_by_micro_batch`].
    pub micro_batches: TreeSum,
}

/// A graph with parameters, and its gradients.
#[derive(Debug)]
pub struct TrainableGraph {
    file: Vec<u8>,
    parameters: Vec<Parameter>,
    initial: Vec<f32>,
    inputs: Vec<RowInput>,
    /// Numbers per shared input.
    shared: Vec<usize>,
    /// Numbers per row of each output.
    widths: Vec<usize>,
    forward: Pass,
    backward: Pass,
    totals: Pass,
    adjoint: Adjoint,
    kernels: Kernels,
}

impl TrainableGraph {
    /// Reads an ONNX graph whose inputs are `given` and whose outputs are `outputs`.
    ///
    /// Parameters are the f32 initializers that outputs depend on through differentiable operations. Constants that an
    /// exporter wrote are excluded: single numbers of any shape without a name like a module's parameter (`a.b`), masks
    /// (numbers from 10,000 on, or matrices of zeros and ones), and running statistics of a batch norm. `frozen` names
    /// initializers that are not trained, and inputs whose gradients are not needed, which saves their computation.
    ///
    /// # Errors
    /// `Unsupported` with the operator, attribute or shape that compiled graphs do not have; `Invalid` if `frozen` has an unknown
    /// name.
    pub fn read(
        onnx: &[u8],
        given: &[DeclaredInput],
        outputs: &[DeclaredOutput],
        frozen: &[&str],
    ) -> Result<TrainableGraph> {
        TrainableGraph::read_with(onnx, given, outputs, frozen, Kernels::best())
    }

    fn read_with(
        onnx: &[u8],
        given: &[DeclaredInput],
        outputs: &[DeclaredOutput],
        frozen: &[&str],
        kernels: Kernels,
    ) -> Result<TrainableGraph> {
        let (mut parameters, mut initial) = file::parameters(onnx, frozen)?;
        let mut graph = with_parameters(onnx, given, outputs, &parameters)?;
        let wanted = |parameters: &[Parameter]| -> Vec<bool> {
            let own = given.iter().map(|input| !frozen.contains(&input.name.as_str()));
            own.chain(parameters.iter().map(|_| true)).collect()
        };
        let mut adjoint = adjoint::adjoint(&graph, &wanted(&parameters))?;
        let shared_inputs = given.iter().filter(|input| !input.is_pair).count();
        let has_gradient = adjoint.gradients[shared_inputs..].to_vec();
        if has_gradient.contains(&None) {
            // Initializers without a gradient become constants again, and are folded.
            let all = std::mem::take(&mut initial);
            let retained = parameters.into_iter().zip(&has_gradient).filter(|(_, gradient)| gradient.is_some());
            parameters = retained.map(|(parameter, _)| parameter).collect();
            for parameter in &mut parameters {
                let first = initial.len();
                initial.extend_from_slice(&all[parameter.range.clone()]);
                parameter.range = first..initial.len();
            }
            graph = with_parameters(onnx, given, outputs, &parameters)?;
            adjoint = adjoint::adjoint(&graph, &wanted(&parameters))?;
        }
        let names = given.iter().map(|input| input.name.clone()).collect();
        let graph = TrainableGraph::compile(&graph, adjoint, names, parameters.len(), kernels)?;
        Ok(TrainableGraph { file: onnx.to_vec(), parameters, initial, ..graph })
    }

    /// Compiles a graph and its gradients. The last `parameters` inputs of the graph are parameters; `names` are the
    /// names of the other inputs.
    fn compile(
        graph: &Graph,
        adjoint: Adjoint,
        names: Vec<String>,
        parameters: usize,
        kernels: Kernels,
    ) -> Result<TrainableGraph> {
        let count = |input: &GraphInput| input.shape.iter().product::<usize>();
        let own = &graph.inputs[..graph.inputs.len() - parameters];
        let of_rows = own.iter().zip(names).filter(|(input, _)| input.side == Side::Pair);
        Ok(TrainableGraph {
            file: Vec::new(),
            parameters: Vec::new(),
            initial: Vec::new(),
            inputs: of_rows.map(|(input, name)| RowInput { name, width: count(input) }).collect(),
            shared: own.iter().filter(|input| input.side != Side::Pair).map(count).collect(),
            widths: graph.outputs.iter().map(|&output| graph.values[output].count()).collect(),
            forward: Pass::of_rows(graph, kernels)?,
            backward: Pass::of_rows(&adjoint.rows, kernels)?,
            totals: Pass::of_one_row(&adjoint.totals, kernels)?,
            adjoint,
            kernels,
        })
    }

    /// Returns the parameters, in the order of the file.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Returns the values of all parameters in the ONNX file.
    pub fn initial(&self) -> &[f32] {
        &self.initial
    }

    /// Returns the row inputs, in the order in which [`Batch::fill`] writes them.
    pub fn inputs(&self) -> &[RowInput] {
        &self.inputs
    }

    /// Returns the numbers per row of each output.
    pub fn widths(&self) -> &[usize] {
        &self.widths
    }

    /// Computes the outputs of a batch, each `[rows, width]`.
    ///
    /// # Errors
    /// `Invalid` if the number of parameters or of values of shared inputs is wrong.
    pub fn forward(
        &self,
        parameters: &[f32],
        batch: &Batch<'_>,
        workspace: &mut Workspace,
        outputs: &mut Vec<Vec<f32>>,
    ) -> Result<()> {
        let shared = self.shared_inputs(parameters, batch)?;
        fit(outputs, self.widths.iter().map(|width| width * batch.rows));
        let width: usize = self.inputs.iter().map(|input| input.width).sum();
        let fill = |rows: InputRows<'_>| (batch.fill)(InputRows { width, ..rows });
        let room = by_micro_batch(outputs, &self.widths, batch.rows);
        workspace.run(&self.forward, &shared, room, |n, room, worker| {
            self.forward.run(micro_batch(n, batch.rows), &mut worker.scratch, &fill, &mut |rows, outputs| {
                for (o, width) in self.widths.iter().enumerate() {
                    copy(outputs.get(o), rows.clone(), *width, room[o]);
                }
            });
        });
        Ok(())
    }

    /// Computes the gradients of a batch from the gradients of its outputs, each `[rows, width]`. Gradients of row
    /// inputs are per row; gradients of parameters and shared inputs are summed over rows in micro-batches
    /// ([`MICRO_BATCH`]).
    ///
    /// # Errors
    /// `Invalid` if the number of parameters, values of shared inputs or gradients is wrong.
    pub fn backward(
        &self,
        parameters: &[f32],
        batch: &Batch<'_>,
        output_gradients: &[&[f32]],
        workspace: &mut Workspace,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let upstream = Upstream { parameters, batch, output_gradients };
        let mut sums = std::mem::take(&mut gradients.micro_batches);
        let passed = self.backward_rows(&upstream, 0, workspace, gradients, &mut sums);
        let finished = passed.and_then(|()| match sums.total() {
            // A batch without rows has no sums: its gradients are 0.
            [] => self.finish(parameters, batch, &vec![0.0; self.sums()], workspace, gradients),
            total => self.finish(parameters, batch, total, workspace, gradients),
        });
        gradients.micro_batches = sums;
        finished
    }

    /// Computes the gradients of row inputs, and the sums of micro-batches, from which [`TrainableGraph::finish`]
    /// computes the gradients of parameters. Used if several hosts share a batch: each host has complete micro-batches,
    /// from number `first` of the batch on.
    ///
    /// # Errors
    /// As [`TrainableGraph::backward`].
    pub fn backward_by_micro_batch(
        &self,
        parameters: &[f32],
        batch: &Batch<'_>,
        first: usize,
        output_gradients: &[&[f32]],
        workspace: &mut Workspace,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let mut sums = std::mem::take(&mut gradients.micro_batches);
        let upstream = Upstream { parameters, batch, output_gradients };
        let passed = self.backward_rows(&upstream, first, workspace, gradients, &mut sums);
        gradients.micro_batches = sums;
        passed
    }

    /// Returns the count of numbers in the sums of a micro-batch.
    pub fn sums(&self) -> usize {
        self.adjoint.sums.iter().map(Sum::count).sum()
    }

    /// Computes the gradients of row inputs, and adds the sums of each micro-batch to `total`; micro-batches are
    /// numbered from `first` on.
    fn backward_rows(
        &self,
        upstream: &Upstream<'_>,
        first: usize,
        workspace: &mut Workspace,
        gradients: &mut Gradients,
        total: &mut TreeSum,
    ) -> Result<()> {
        let Upstream { parameters, batch, output_gradients } = *upstream;
        let shared = self.shared_inputs(parameters, batch)?;
        let expected: Vec<usize> = self.widths.iter().map(|width| width * batch.rows).collect();
        let lengths: Vec<usize> = output_gradients.iter().map(|numbers| numbers.len()).collect();
        if lengths != expected {
            return Err(Error::invalid(format!("got {lengths:?} numbers of output gradients, expected {expected:?}")));
        }
        let widths: Vec<usize> = self.inputs.iter().map(|input| input.width).collect();
        fit(&mut gradients.inputs, widths.iter().map(|width| width * batch.rows));
        let width: usize = widths.iter().sum();
        let fill = |rows: InputRows<'_>| self.fill(rows, width, batch, output_gradients);
        let count = self.sums();
        // The first worker sums to `total`, so that one thread needs one set of sums.
        std::mem::swap(total, &mut workspace.workers[0].sums);
        workspace.workers.iter_mut().for_each(|worker| worker.sums.reset(count));
        let room = by_micro_batch(&mut gradients.inputs, &widths, batch.rows);
        workspace.run(&self.backward, &shared, room, |n, room, Worker { scratch, sums }| {
            sums.push(first + n..first + n + 1, |sums| {
                self.backward.run(micro_batch(n, batch.rows), scratch, &fill, &mut |rows, outputs| {
                    self.finish_block(rows, outputs, room, sums);
                });
            });
        });
        std::mem::swap(total, &mut workspace.workers[0].sums);
        workspace.workers[1..].iter().for_each(|worker| total.append(&worker.sums));
        Ok(())
    }

    /// Writes the gradients of row inputs of a block to the buffers of its micro-batch, and adds the block to the sums.
    fn finish_block(&self, rows: Range<usize>, outputs: Outputs<'_>, room: &mut Room<'_>, mut sums: &mut [f32]) {
        for ((of, input), room) in self.adjoint.inputs.iter().zip(&self.inputs).zip(room) {
            match of {
                Some(of) => copy(outputs.get(*of), rows.clone(), input.width, room),
                None => room[at(&rows, input.width)].fill(0.0),
            }
        }
        for sum in &self.adjoint.sums {
            let (own, others) = sums.split_at_mut(sum.count());
            let left = sum.left.map(|left| outputs.get(left));
            sum.add(self.kernels, rows.len(), left, outputs.get(sum.right), own);
            sums = others;
        }
    }

    /// Computes the gradients of shared inputs and parameters from `sums`: the sums of all micro-batches, added as
    /// [`TreeSum`] does.
    ///
    /// # Errors
    /// `Invalid` if the number of parameters, values of shared inputs or sums is wrong.
    pub fn finish(
        &self,
        parameters: &[f32],
        batch: &Batch<'_>,
        sums: &[f32],
        workspace: &mut Workspace,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let (shared, scratch) = (self.shared_inputs(parameters, batch)?, &mut workspace.last);
        if sums.len() != self.sums() {
            return Err(Error::invalid(format!("got {} sums of gradients, expected {}", sums.len(), self.sums())));
        }
        let Gradients { shared: of_shared, parameters, .. } = gradients;
        fit(of_shared, self.shared.iter().copied());
        refill(parameters, self.initial.len());
        let fill = |rows: InputRows<'_>| {
            let own = self.adjoint.shared.iter().map(|&n| shared[n]).chain([sums]);
            let mut room = &mut rows.numbers[..];
            for numbers in own {
                let (here, rest) = std::mem::take(&mut room).split_at_mut(numbers.len());
                here.copy_from_slice(numbers);
                room = rest;
            }
        };
        self.totals.start(&[], scratch);
        self.totals.run(0..1, scratch, &fill, &mut |_, outputs| {
            let of_parameters = self.parameters.iter().map(|parameter| parameter.range.clone());
            let (first, rest) = self.adjoint.gradients.split_at(self.shared.len());
            for (of, room) in first.iter().zip(of_shared.iter_mut()) {
                match of {
                    Some(of) => room.iter_mut().zip(outputs.get(*of).0).for_each(|(to, x)| *to = *x),
                    None => room.fill(0.0),
                }
            }
            for (of, range) in rest.iter().zip(of_parameters) {
                if let Some(of) = of {
                    let count = range.len();
                    parameters[range].copy_from_slice(&outputs.get(*of).0[..count]);
                }
            }
        });
        Ok(())
    }

    /// Returns the ONNX file with new values of the parameters.
    ///
    /// # Errors
    /// `Invalid` if the number of values is wrong; `Unsupported` if a parameter is not stored in the file as f32.
    pub fn write(&self, parameters: &[f32]) -> Result<Vec<u8>> {
        self.check(parameters)?;
        file::with_parameters(&self.file, &self.parameters, parameters)
    }

    fn check(&self, parameters: &[f32]) -> Result<()> {
        let (got, expected) = (parameters.len(), self.initial.len());
        if got == expected {
            return Ok(());
        }
        Err(Error::invalid(format!("got {got} numbers of parameters, expected {expected}")))
    }

    /// Returns the shared values: the shared inputs, then the parameters.
    fn shared_inputs<'a>(&self, parameters: &'a [f32], batch: &Batch<'a>) -> Result<Vec<&'a [f32]>> {
        self.check(parameters)?;
        let lengths: Vec<usize> = batch.shared.iter().map(|numbers| numbers.len()).collect();
        if lengths != self.shared {
            return Err(Error::invalid(format!("shared inputs have {lengths:?} numbers, expected {:?}", self.shared)));
        }
        let own = self.parameters.iter().map(|parameter| &parameters[parameter.range.clone()]);
        Ok(batch.shared.iter().copied().chain(own).collect())
    }

    /// Writes the inputs of rows, followed by the gradients of the rows' outputs.
    fn fill(&self, rows: InputRows<'_>, width: usize, batch: &Batch<'_>, output_gradients: &[&[f32]]) {
        let InputRows { rows, numbers, stride, .. } = rows;
        (batch.fill)(InputRows { rows: rows.clone(), numbers, stride, width });
        for (n, row) in rows.zip(numbers.chunks_mut(stride.max(1))) {
            let mut room = &mut row[width..];
            for (gradients, &width) in output_gradients.iter().zip(&self.widths) {
                let (here, rest) = std::mem::take(&mut room).split_at_mut(width);
                here.copy_from_slice(&gradients[n * width..][..width]);
                room = rest;
            }
        }
    }
}

/// Reads the graph of a file in which parameters become shared inputs, after the inputs `given`.
fn with_parameters(
    onnx: &[u8],
    given: &[DeclaredInput],
    outputs: &[DeclaredOutput],
    parameters: &[Parameter],
) -> Result<Graph> {
    let shape = |shape: &[usize]| shape.iter().map(|&size| Size::Fixed(size as i64)).collect();
    let own = parameters.iter().map(|p| DeclaredInput { name: p.name.clone(), is_pair: false, shape: shape(&p.shape) });
    let all: Vec<DeclaredInput> = given.iter().cloned().chain(own).collect();
    Ok(ReadGraph::imported(onnx, &all, outputs)?.graph)
}

#[cfg(test)]
mod tests;
