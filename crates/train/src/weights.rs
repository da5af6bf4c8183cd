//! The weights of one graph in training, and their optimizer.

use sterling_core::error::Result;
use sterling_graph::dense::train::{
    Batch, DenseOptimizer, Gradients, OptimizerSpec, Parameter, TrainableGraph, Workspace,
};
use sterling_graph::dense::{DeclaredInput, DeclaredOutput};
use sterling_snapshot::model::Package;

/// A graph of a package, its weights, and the optimizer of those.
#[derive(Debug)]
pub(crate) struct Weights {
    name: &'static str,
    /// File of the graph.
    file: String,
    graph: TrainableGraph,
    /// Weights; those of the file until the first step.
    pub(crate) numbers: Vec<f32>,
    /// Optimizer of the weights; none if they are frozen.
    pub(crate) optimizer: Option<DenseOptimizer>,
    workspace: Workspace,
    outputs: Vec<Vec<f32>>,
    gradients: Gradients,
    /// True if several hosts share a batch: [`Weights::backward`] leaves the sums of micro-batches to [`Weights::finish`].
    pub(crate) is_shared: bool,
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
    /// `Unsupported` with the operator that has no gradient here.
    pub(crate) fn read(
        package: &Package,
        name: &'static str,
        file: &str,
        ports: &Ports,
        optimizer: Option<&OptimizerSpec>,
        threads: usize,
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
            is_shared: false,
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

    /// Computes the output of a batch with the weights of the file.
    ///
    /// # Errors
    /// Errors of the graph.
    pub(crate) fn forward_as_it_was(&mut self, batch: &Batch<'_>) -> Result<&[f32]> {
        self.graph.forward(self.graph.initial(), batch, &mut self.workspace, &mut self.outputs)?;
        Ok(self.outputs.first().map_or(&[], Vec::as_slice))
    }

    /// Computes the gradients of weights and inputs from those of the output; returns those of the inputs, each `[rows, width]`.
    /// The weights stay until [`Weights::step`].
    ///
    /// # Errors
    /// Errors of the graph.
    pub(crate) fn backward(&mut self, batch: &Batch<'_>, output: &[f32]) -> Result<&[Vec<f32>]> {
        let Weights { graph, numbers, workspace, gradients, .. } = self;
        match self.is_shared {
            false => graph.backward(numbers, batch, &[output], workspace, gradients)?,
            true => graph.backward_by_micro_batch(numbers, batch, &[output], workspace, gradients)?,
        }
        Ok(&self.gradients.inputs)
    }

    /// Returns the number of sums from which weight gradients are computed.
    pub(crate) fn sums(&self) -> usize {
        self.graph.sums()
    }

    /// Adds the sums of the micro-batches of the last [`Weights::backward`], in their order.
    pub(crate) fn add_sums(&self, total: &mut [f32]) {
        for sums in self.gradients.micro_batches.chunks_exact(total.len().max(1)) {
            total.iter_mut().zip(sums).for_each(|(total, x)| *total += x);
        }
    }

    /// Computes the weight gradients from the sums of all micro-batches.
    ///
    /// # Errors
    /// `Invalid` if the number of sums differs.
    pub(crate) fn finish(&mut self, total: &[f32]) -> Result<()> {
        let batch = Batch { rows: 0, shared: &[], fill: &|_| () };
        self.graph.finish(&self.numbers, &batch, total, &mut self.workspace, &mut self.gradients)
    }

    /// Returns the parameters of the graph: their names, shapes and places among the numbers.
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
