//! One tower in training: its features, and its graph with weights.

use std::ops::Range;

use crate::weights::{Ports, Weights};
use sterling_core::error::{Error, Result};
use sterling_embedding::keyed::Layout;
use sterling_embedding::{BagConfig, JaggedTensor, KeyedTensor, Sequence, SequenceConfig};
use sterling_graph::dense::train::{Batch, OptimizerSpec};
use sterling_graph::dense::{DeclaredInput, DeclaredOutput, InputRows, Size};
use sterling_graph::tower::{FeatureKind, FeatureRow, FeatureSpec, Tower};
use sterling_kernels::threads::Threads;
use sterling_snapshot::model::Package;

/// A tower in training.
#[derive(Debug)]
pub(crate) struct Side {
    /// Name of the tower, `user` or `item`: the prefix of its features' names among the features of both towers.
    name: &'static str,
    /// All features of the tower, in the order of a [`FeatureRow`].
    features: Vec<FeatureSpec>,
    /// Per feature, whether the graph reads it.
    is_read: Vec<bool>,
    /// Inputs of the graph, in its order.
    inputs: Vec<Input>,
    pub(crate) weights: Weights,
}

/// An input of the graph: the feature that it comes from, and how it is made.
#[derive(Debug)]
struct Input {
    feature: usize,
    width: usize,
    source: Source,
}

#[derive(Debug)]
enum Source {
    /// Columns of the pooled embeddings.
    Bag(Range<usize>),
    /// Values of a numeric feature.
    Numbers,
    /// Embedding rows of a sequence, padded with zeros; the sequence is given by its index among all sequences.
    Rows(usize),
    /// Mask of a sequence: 1 per value, 0 for padding.
    Mask,
}

/// Pooled embeddings and sequences of a batch.
type PooledFeatures<'a> = (&'a KeyedTensor, &'a [Sequence]);

impl Side {
    /// Reads the graph of a tower for training its `output`.
    ///
    /// # Errors
    /// `Unsupported` with an operator whose gradient is not implemented.
    pub(crate) fn read(
        package: &Package,
        tower: &Tower,
        name: &'static str,
        output: &str,
        optimizer: Option<&OptimizerSpec>,
        threads: &Threads,
    ) -> Result<Self> {
        let file = tower.graph().0.to_owned();
        let tensors: Vec<_> = tower.tensors().iter().filter(|tensor| tower.input(&tensor.name).is_ok()).collect();
        let sizes = |shape: &[usize]| -> Vec<Size> {
            std::iter::once(Size::Rows).chain(shape.iter().map(|&n| Size::Fixed(n as i64))).collect()
        };
        let given =
            |name: &str, shape: &[usize]| DeclaredInput { name: name.into(), is_pair: true, shape: sizes(shape) };
        let all: Vec<DeclaredInput> = tensors.iter().map(|tensor| given(&tensor.name, &tensor.shape)).collect();
        let made = DeclaredOutput { name: output.into(), shape: sizes(&[package.spec.dimension]) };
        let features = tower.features().to_vec();
        let mut inputs = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            let feature = features.iter().position(|feature| feature.name == tensor.feature);
            let feature =
                feature.ok_or_else(|| Error::internal(format!("input `{}` belongs to no feature", tensor.name)))?;
            let spec = &features[feature];
            let source = match (spec.kind, spec.is_sequence()) {
                (FeatureKind::Dense, _) => Source::Numbers,
                (_, false) => Source::Bag(0..0),
                (_, true) if tensor.name == spec.name => Source::Rows(0),
                (_, true) => Source::Mask,
            };
            inputs.push(Input { feature, width: tensor.count(), source });
        }
        // Inputs without embeddings need no gradient.
        let unread = tensors.iter().zip(&inputs).filter(|(_, i)| matches!(i.source, Source::Numbers | Source::Mask));
        let unread = unread.map(|(tensor, _)| tensor.name.clone()).collect();
        let weights = Weights::read(package, name, &file, &Ports { given: all, made, unread }, optimizer, threads)?;
        let is_read = (0..features.len()).map(|n| inputs.iter().any(|input| input.feature == n)).collect();
        Ok(Side { name, features, is_read, inputs, weights })
    }

    fn looked_up(&self) -> impl Iterator<Item = (usize, &FeatureSpec)> {
        let read = self.features.iter().enumerate().filter(|(n, _)| self.is_read[*n]);
        read.filter(|(_, feature)| feature.kind != FeatureKind::Dense)
    }

    /// Returns the index and the table of each feature that is looked up.
    pub(crate) fn lookups(&self) -> impl Iterator<Item = (usize, &str)> {
        self.looked_up().filter_map(|(n, feature)| Some((n, feature.table.as_deref()?)))
    }

    /// Returns the tables that the graph reads.
    pub(crate) fn tables(&self) -> impl Iterator<Item = &str> {
        self.lookups().map(|(_, table)| table)
    }

    /// Returns whether a feature among the features of both towers belongs to this tower.
    pub(crate) fn has_feature(&self, key: &str) -> bool {
        key.split_once('.').is_some_and(|(side, _)| side == self.name)
    }

    fn key(&self, feature: &FeatureSpec) -> String {
        format!("{}.{}", self.name, feature.name)
    }

    /// Returns the features of the tower that are pooled.
    pub(crate) fn bags(&self) -> impl Iterator<Item = BagConfig> {
        let pooled = self.looked_up().filter(|(_, feature)| !feature.is_sequence());
        pooled.map(|(_, feature)| BagConfig {
            feature: self.key(feature),
            table: feature.table.clone().unwrap_or_default(),
            pooling: feature.pooling,
        })
    }

    /// Returns the features of the tower that are sequences.
    pub(crate) fn sequences(&self) -> impl Iterator<Item = SequenceConfig> {
        let sequences = self.looked_up().filter(|(_, feature)| feature.is_sequence());
        sequences.map(|(_, feature)| SequenceConfig {
            feature: self.key(feature),
            table: feature.table.clone().unwrap_or_default(),
        })
    }

    /// Resolves the positions of the tower's features among the pooled embeddings and among all `sequences`.
    ///
    /// # Errors
    /// `Internal` if a feature is missing.
    pub(crate) fn connect(&mut self, layout: &Layout, sequences: &[String]) -> Result<()> {
        for input in &mut self.inputs {
            let key = format!("{}.{}", self.name, self.features[input.feature].name);
            let missing = || Error::internal(format!("feature `{key}` was not looked up"));
            match &mut input.source {
                Source::Bag(columns) => {
                    let k = layout.keys().iter().position(|other| *other == key).ok_or_else(missing)?;
                    *columns = layout.columns(k);
                }
                Source::Rows(sequence) => {
                    *sequence = sequences.iter().position(|other| *other == key).ok_or_else(missing)?;
                }
                Source::Numbers | Source::Mask => {}
            }
        }
        Ok(())
    }

    /// Returns whether a row has weighted ids.
    pub(crate) fn has_weights(&self, row: &FeatureRow) -> bool {
        self.looked_up().any(|(n, _)| row.ids_of(n).is_some_and(|(_, weights)| weights.is_some()))
    }

    /// Returns the ids of rows, one example per row, padded with empty examples up to `examples`. With `any_weights`, ids without
    /// a weight get 1.
    ///
    /// # Errors
    /// `Invalid` if the numbers of ids and weights differ.
    pub(crate) fn ids(
        &self,
        rows: &[&FeatureRow],
        examples: usize,
        any_weights: bool,
    ) -> Result<Vec<(String, JaggedTensor<i64>)>> {
        let of_feature = |(n, feature): (usize, &FeatureSpec)| {
            let (mut all, mut weights) = (Vec::new(), any_weights.then(Vec::new));
            let mut lengths = Vec::with_capacity(examples);
            for row in rows {
                let (ids, own) =
                    row.ids_of(n).ok_or_else(|| Error::internal("got numbers for a feature, expected ids"))?;
                all.extend_from_slice(ids);
                lengths.push(ids.len() as i64);
                if let Some(weights) = &mut weights {
                    weights.extend_from_slice(own.unwrap_or(&[]));
                    weights.resize(all.len(), 1.0);
                }
            }
            lengths.resize(examples, 0);
            Ok((self.key(feature), JaggedTensor::from_lengths(all, &lengths, weights)?))
        };
        self.looked_up().map(of_feature).collect()
    }

    /// Computes the output `[rows, D]` of rows, which are the first examples of the lookup.
    ///
    /// # Errors
    /// Errors of the graph.
    pub(crate) fn forward(&mut self, rows: &[&FeatureRow], looked: PooledFeatures<'_>) -> Result<Vec<f32>> {
        let Side { inputs, weights, .. } = self;
        let fill = |block: InputRows<'_>| fill(inputs, rows, looked, block);
        let batch = Batch { rows: rows.len(), shared: &[], fill: &fill };
        Ok(weights.forward(&batch)?.to_vec())
    }

    /// Computes the gradients of weights and inputs from the gradients of the output. Adds the gradients of inputs to the gradients
    /// of the lookup, at the same positions. The weights do not change until [`Weights::step`].
    ///
    /// # Errors
    /// Errors of the graph.
    pub(crate) fn backward(
        &mut self,
        rows: &[&FeatureRow],
        looked: PooledFeatures<'_>,
        output: &[f32],
        of_bags: &mut KeyedTensor,
        of_sequences: &mut [Vec<f32>],
    ) -> Result<()> {
        let Side { inputs, weights, .. } = self;
        let fill = |block: InputRows<'_>| fill(inputs, rows, looked, block);
        let batch = Batch { rows: rows.len(), shared: &[], fill: &fill };
        let of_inputs = weights.backward(&batch, output)?;
        let pooled_width = of_bags.width();
        for (input, made) in inputs.iter().zip(of_inputs) {
            match &input.source {
                Source::Bag(columns) => {
                    let to = of_bags.values_mut().chunks_exact_mut(pooled_width);
                    for (to, from) in to.zip(made.chunks_exact(input.width)) {
                        to[columns.clone()].iter_mut().zip(from).for_each(|(to, from)| *to += from);
                    }
                }
                Source::Rows(sequence) => {
                    let (_, looked) = &looked.1[*sequence];
                    let (offsets, to) = (looked.offsets(), &mut of_sequences[*sequence]);
                    let width = looked.width();
                    for (example, from) in made.chunks_exact(input.width).enumerate() {
                        let to = &mut to[offsets[example] * width..offsets[example + 1] * width];
                        to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
                    }
                }
                Source::Numbers | Source::Mask => {}
            }
        }
        Ok(())
    }
}

/// Writes the graph's inputs for some rows.
fn fill(inputs: &[Input], rows: &[&FeatureRow], (pooled, sequences): PooledFeatures<'_>, block: InputRows<'_>) {
    let (pooled_width, all) = (pooled.width(), pooled.values());
    block.each(|n, mut numbers| {
        for input in inputs {
            let (to, rest) = numbers.split_at_mut(input.width);
            match &input.source {
                Source::Bag(columns) => to.copy_from_slice(&all[n * pooled_width..][columns.clone()]),
                Source::Numbers => to.copy_from_slice(rows[n].numbers_of(input.feature).unwrap_or(&[])),
                Source::Rows(sequence) => {
                    let found = sequences[*sequence].1.run(n);
                    to[..found.len()].copy_from_slice(found);
                    to[found.len()..].fill(0.0);
                }
                Source::Mask => {
                    let count = rows[n].ids_of(input.feature).map_or(0, |(ids, _)| ids.len());
                    to[..count].fill(1.0);
                    to[count..].fill(0.0);
                }
            }
            numbers = rest;
        }
    });
}
