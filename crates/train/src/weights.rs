//! The weights of one graph in training, and their optimizer.

use std::ops::Range;

use sterling_core::error::{Error, Result};
use sterling_graph::dense::train::{
    Batch, DenseOptimizer, Gradients, OptimizerSpec, Parameter, TrainableGraph, TreeSum, Workspace,
};
use sterling_graph::dense::{DeclaredInput, DeclaredOutput};
use sterling_kernels::threads::Threads;
use sterling_snapshot::model::Package;

/// A graph of a package, its weights, and the optimizer of the weights.
#[derive(Debug)]
pub(crate) struct Weights {
    name: &'static str,
    /// File of the graph.
    file: String,
    graph: TrainableGraph,
    /// Weights; before the first step, the weights of the file.
    pub(crate) numbers: Vec<f32>,
    /// Optimizer of the weights; none if they are frozen.
    pub(crate) optimizer: Option<DenseOptimizer>,
    workspace: Workspace,
    outputs: Vec<Vec<f32>>,
    gradients: Gradients,
    /// If several hosts share a batch, index of the first micro-batch of this host: [`Weights::backward`] leaves the sums of
    /// micro-batches to [`Weights::finish`].
    pub(crate) first_micro_batch: Option<usize>,
}

/// Inputs and output of a graph.
#[derive(Debug)]
pub(crate) struct Ports {
    pub(crate) given: Vec<DeclaredInput>,
    pub(crate) made: DeclaredOutput,
    /// Names of inputs whose gradients are not needed.
    pub(crate) unread: Vec<String>,
}

impl Weights {
    /// Reads a graph for training its output. Without an optimizer the weights are frozen.
    ///
    /// # Errors
    /// `Unsupported` with an operator whose gradient is not implemented.
    pub(crate) fn read(
        package: &Package,
        name: &'static str,
        file: &str,
        ports: &Ports,
        optimizer: Option<&OptimizerSpec>,
        threads: &Threads,
    ) -> Result<Self> {
        let onnx = package.read_file(file)?;
        let Ports { given, made, unread } = ports;
        let read = |frozen: &[String]| {
            let frozen: Vec<&str> = frozen.iter().map(String::as_str).collect();
            let read = TrainableGraph::read(&onnx, given, std::slice::from_ref(made), &frozen);
            read.map_err(|e| e.within(format!("{file} cannot be trained")))
        };
        let mut graph = read(unread)?;
        if optimizer.is_none() && !graph.parameters().is_empty() {
            let all = graph.parameters().iter().map(|p: &Parameter| p.name.clone());
            graph = read(&unread.iter().cloned().chain(all).collect::<Vec<_>>())?;
        }
        let numbers = graph.initial().to_vec();
        let optimizer = optimizer.map(|spec| DenseOptimizer::new(*spec, numbers.len())).transpose()?;
        Ok(Weights {
            name,
            file: file.to_owned(),
            graph,
            numbers,
            optimizer,
            workspace: Workspace::new(threads),
            outputs: Vec::new(),
            gradients: Gradients::default(),
            first_micro_batch: None,
        })
    }

    /// Returns the graph's name: `user`, `item` or `reranker`.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the name of the graph's file, and the file's bytes with the current weights.
    ///
    /// # Errors
    /// `Unsupported` if the weights are not stored in the file as f32.
    pub(crate) fn written(&self) -> Result<(&str, Vec<u8>)> {
        Ok((&self.file, self.graph.write(&self.numbers).map_err(|e| e.within(&self.file))?))
    }

    /// Computes the output of a batch with the current weights, `[rows, width]`.
    ///
    /// # Errors
    /// Errors of the graph.
    pub(crate) fn forward(&mut self, batch: &Batch<'_>) -> Result<&[f32]> {
        self.graph.forward(&self.numbers, batch, &mut self.workspace, &mut self.outputs)?;
        Ok(self.outputs.first().map_or(&[], Vec::as_slice))
    }

    /// Computes the output of a batch with the initial weights, which the graph's file has.
    ///
    /// # Errors
    /// Errors of the graph.
    pub(crate) fn forward_initial_weights(&mut self, batch: &Batch<'_>) -> Result<&[f32]> {
        self.graph.forward(self.graph.initial(), batch, &mut self.workspace, &mut self.outputs)?;
        Ok(self.outputs.first().map_or(&[], Vec::as_slice))
    }

    /// Computes the gradients of weights and inputs from the gradients of the output; returns the gradients of the inputs, each
    /// `[rows, width]`. The weights do not change until [`Weights::step`].
    ///
    /// # Errors
    /// Errors of the graph.
    pub(crate) fn backward(&mut self, batch: &Batch<'_>, output: &[f32]) -> Result<&[Vec<f32>]> {
        let Weights { graph, numbers, workspace, gradients, .. } = self;
        let output = [output];
        match self.first_micro_batch {
            None => graph.backward(numbers, batch, &output, workspace, gradients)?,
            Some(first) => graph.backward_by_micro_batch(numbers, batch, first, &output, workspace, gradients)?,
        }
        Ok(&self.gradients.inputs)
    }

    /// Returns the number of sums over rows from which weight gradients are computed.
    pub(crate) fn sums(&self) -> usize {
        self.graph.sums()
    }

    /// Returns the sums of the last [`Weights::backward`], one subtree of micro-batches after the other.
    pub(crate) fn own_sums(&self) -> &[f32] {
        self.gradients.micro_batches.sums()
    }

    /// Computes the weight gradients from the sums of all hosts. `hosts` has per host its micro-batches, and a buffer that begins
    /// with its sums; removes these sums from the front of the buffer.
    ///
    /// # Errors
    /// `Invalid` if sums are missing.
    pub(crate) fn finish(&mut self, hosts: &mut [(Range<usize>, &[f32])]) -> Result<()> {
        let width = self.graph.sums();
        let mut all = TreeSum::new(width);
        for (micro_batches, sums) in hosts {
            let subtrees = TreeSum::subtrees(micro_batches.clone());
            let count = subtrees.len() * width;
            let missing = || Error::invalid(format!("got {} sums of gradients, expected at least {count}", sums.len()));
            let (own, rest) = sums.split_at_checked(count).ok_or_else(missing)?;
            all.push_sums(&subtrees, own);
            *sums = rest;
        }
        let batch = Batch { rows: 0, shared: &[], fill: &|_| () };
        self.graph.finish(&self.numbers, &batch, all.total(), &mut self.workspace, &mut self.gradients)
    }

    /// Returns the parameters of the graph: their names, shapes and positions in the array of all parameters.
    pub(crate) fn parameters(&self) -> &[Parameter] {
        self.graph.parameters()
    }

    /// Returns the weight gradients of the last [`Weights::backward`].
    #[cfg(test)]
    pub(crate) fn gradients(&self) -> &[f32] {
        &self.gradients.parameters
    }

    /// Returns whether all weight gradients of the last [`Weights::backward`] are finite.
    pub(crate) fn is_finite(&self) -> bool {
        self.gradients.parameters.iter().all(|x| x.is_finite())
    }

    /// Updates the weights by the gradients of the last [`Weights::backward`].
    ///
    /// # Errors
    /// `Invalid` if a gradient is not finite.
    pub(crate) fn step(&mut self) -> Result<()> {
        match &mut self.optimizer {
            Some(optimizer) => optimizer.step(&mut self.numbers, &self.gradients.parameters).map(drop),
            None => Ok(()),
        }
    }
}
