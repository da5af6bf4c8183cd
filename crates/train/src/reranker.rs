//! The reranker in training: its graph over pairs of a user and an item, one per event.
//!
//! The graph reads the query, the item's vector, their product (`similarity`) and numeric columns of the items file. Gradients of
//! the first three continue into both towers.

use sterling_core::error::{Error, Result};
use sterling_graph::dense::train::Batch;
use sterling_graph::dense::{DeclaredInput, DeclaredOutput, InputRows, Size};
use sterling_graph::tower::{OverArch, Reads};
use sterling_kernels::threads::Threads;
use sterling_snapshot::items::Items;
use sterling_snapshot::model::{Package, TrainSpec};

use crate::weights::{Ports, Weights};

/// Name of the query among the graph's inputs.
const QUERY: &str = "query";

/// A reranker in training.
#[derive(Debug)]
pub(crate) struct Reranker {
    /// Inputs of the graph, in its order.
    inputs: Vec<Source>,
    dimension: usize,
    pub(crate) weights: Weights,
}

/// Source of an input of the graph.
#[derive(Debug)]
enum Source {
    Query,
    Item,
    Similarity,
    /// Column of the items file, by item index; 0 for an item without a value.
    Column(Vec<f32>),
}

/// Events as pairs: queries and item vectors `[B, D]`, and the index of each item.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pairs<'a> {
    pub(crate) queries: &'a [f32],
    pub(crate) vectors: &'a [f32],
    pub(crate) items: &'a [u32],
}

impl Reranker {
    /// Reads the graph of a package's reranker.
    ///
    /// # Errors
    /// `Invalid` if the package has no reranker, or a column is missing or has texts; `Unsupported` with an input that cannot be
    /// trained, or an operator whose gradient is not implemented.
    pub(crate) fn read(package: &Package, train: &TrainSpec, items: &Items, threads: &Threads) -> Result<Self> {
        let missing = || Error::invalid("train: loss `tasks` needs [overarch], which model.toml does not have");
        let overarch = package.overarch.as_ref().ok_or_else(missing)?;
        let (file, _) = overarch.graph();
        let place = |e: Error| e.within(file);
        let (mut inputs, mut given, mut unread) = (Vec::new(), Vec::new(), Vec::new());
        let declared = overarch.declared();
        for input in declared.all() {
            let name = input.name.as_str();
            let is_number = declared.number_names().any(|number| number == name);
            let source = match name {
                QUERY => Source::Query,
                Reads::ITEM => Source::Item,
                OverArch::SIMILARITY => Source::Similarity,
                _ if is_number => Source::Column(items.numbers(name).map_err(place)?),
                _ => {
                    let known = format!("`{QUERY}`, `{}`, `{}` or a numeric column", Reads::ITEM, OverArch::SIMILARITY);
                    return Err(place(Error::unsupported(format!(
                        "input `{name}` cannot be trained, expected {known}"
                    ))));
                }
            };
            if matches!(source, Source::Column(_)) {
                unread.push(name.to_owned());
            }
            // A row of the graph is a user with one candidate.
            let each = if matches!(source, Source::Query) { None } else { Some(Size::Fixed(1)) };
            let own = input.shape.iter().map(|&n| Size::Fixed(n as i64));
            let shape = std::iter::once(Size::Rows).chain(each).chain(own).collect();
            given.push(DeclaredInput { name: name.to_owned(), is_pair: true, shape });
            inputs.push(source);
        }
        let shape = vec![Size::Rows, Size::Fixed(1), Size::Fixed(overarch.tasks() as i64)];
        let made = DeclaredOutput { name: "logits".into(), shape };
        let ports = Ports { given, made, unread };
        let weights = Weights::read(package, "reranker", file, &ports, Some(&train.dense_optimizer), threads)?;
        Ok(Reranker { inputs, dimension: package.spec.dimension, weights })
    }

    /// Computes the logits of events, `[B, T]`, with the current weights.
    ///
    /// # Errors
    /// Errors of the graph.
    pub(crate) fn logits(&mut self, pairs: &Pairs<'_>) -> Result<Vec<f32>> {
        let Reranker { inputs, dimension, weights } = self;
        let fill = |rows: InputRows<'_>| fill(inputs, *dimension, pairs, rows);
        let batch = Batch { rows: pairs.items.len(), shared: &[], fill: &fill };
        Ok(weights.forward(&batch)?.to_vec())
    }

    /// Computes the logits of events with the initial weights, which the package's graph file has.
    ///
    /// # Errors
    /// Errors of the graph.
    pub(crate) fn logits_of_initial_weights(&mut self, pairs: &Pairs<'_>) -> Result<Vec<f32>> {
        let Reranker { inputs, dimension, weights } = self;
        let fill = |rows: InputRows<'_>| fill(inputs, *dimension, pairs, rows);
        let batch = Batch { rows: pairs.items.len(), shared: &[], fill: &fill };
        Ok(weights.forward_initial_weights(&batch)?.to_vec())
    }

    /// Computes the gradients of the weights from the gradients of the logits; writes the gradients of queries and item vectors,
    /// `[B, D]` each. The weights do not change until [`Weights::step`].
    ///
    /// # Errors
    /// Errors of the graph.
    pub(crate) fn backward(
        &mut self,
        pairs: &Pairs<'_>,
        logits: &[f32],
        of_queries: &mut Vec<f32>,
        of_vectors: &mut Vec<f32>,
    ) -> Result<()> {
        let Reranker { inputs, dimension, weights } = self;
        let dimension = *dimension;
        let fill = |rows: InputRows<'_>| fill(inputs, dimension, pairs, rows);
        let batch = Batch { rows: pairs.items.len(), shared: &[], fill: &fill };
        let of_inputs = weights.backward(&batch, logits)?;
        for gradients in [&mut *of_queries, &mut *of_vectors] {
            gradients.clear();
            gradients.resize(pairs.items.len() * dimension, 0.0);
        }
        let add = |to: &mut [f32], from: &[f32]| to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        for (source, made) in inputs.iter().zip(of_inputs) {
            match source {
                Source::Query => add(of_queries, made),
                Source::Item => add(of_vectors, made),
                Source::Similarity => {
                    let sides = [(&mut *of_queries, pairs.vectors), (&mut *of_vectors, pairs.queries)];
                    for (to, other) in sides {
                        let rows = to.chunks_exact_mut(dimension).zip(other.chunks_exact(dimension));
                        for ((to, other), slope) in rows.zip(made) {
                            to.iter_mut().zip(other).for_each(|(to, other)| *to += slope * other);
                        }
                    }
                }
                Source::Column(_) => {}
            }
        }
        Ok(())
    }
}

/// Writes the graph's inputs for some events.
fn fill(inputs: &[Source], dimension: usize, pairs: &Pairs<'_>, rows: InputRows<'_>) {
    rows.each(|n, mut numbers| {
        let query = &pairs.queries[n * dimension..][..dimension];
        let vector = &pairs.vectors[n * dimension..][..dimension];
        for source in inputs {
            let width = if matches!(source, Source::Query | Source::Item) { dimension } else { 1 };
            let (to, rest) = numbers.split_at_mut(width);
            match source {
                Source::Query => to.copy_from_slice(query),
                Source::Item => to.copy_from_slice(vector),
                Source::Similarity => to[0] = query.iter().zip(vector).map(|(x, y)| x * y).sum(),
                Source::Column(values) => to[0] = values[pairs.items[n] as usize],
            }
            numbers = rest;
        }
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::path::Path;

    use serde::Deserialize;

    use super::*;
    use crate::tasks::Labels;
    use sterling_snapshot::items;

    #[derive(Deserialize)]
    struct Case {
        package: String,
        items: Vec<u32>,
        queries: String,
        vectors: String,
        labels: String,
        weights: String,
        tasks: Vec<f32>,
        loss: f64,
        gradients: Vec<Gradient>,
    }

    #[derive(Deserialize)]
    struct Gradient {
        name: String,
        step: usize,
        largest: f64,
        values: String,
    }

    fn floats(digits: &str) -> Vec<f32> {
        let byte = |n: usize| u8::from_str_radix(&digits[2 * n..2 * n + 2], 16).unwrap();
        let number = |n: usize| f32::from_le_bytes([byte(n), byte(n + 1), byte(n + 2), byte(n + 3)]);
        (0..digits.len() / 2).step_by(4).map(number).collect()
    }

    #[test]
    fn losses_and_gradients_of_rerankers_are_those_of_pytorch() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let cases = std::fs::read(root.join("tests/golden/train/tasks.json")).unwrap();
        let cases: Vec<Case> = serde_json::from_slice(&cases).unwrap();
        assert_eq!(cases.len(), 2);
        for case in cases {
            let folder = root.join("models").join(&case.package);
            let package = Package::open_with_progress(&folder, &|_| ()).unwrap();
            let items = Items::read(&items::file_of(&folder).unwrap(), None).unwrap();
            let train: TrainSpec = serde_json::from_str(r#"{"label": "click", "loss": "tasks"}"#).unwrap();
            let mut reranker = Reranker::read(&package, &train, &items, &Threads::new(2).unwrap()).unwrap();
            let (queries, vectors) = (floats(&case.queries), floats(&case.vectors));
            let pairs = Pairs { queries: &queries, vectors: &vectors, items: &case.items };
            let logits = reranker.logits(&pairs).unwrap();
            assert_eq!(reranker.logits_of_initial_weights(&pairs).unwrap(), logits);
            let (labels, weights) = (floats(&case.labels), floats(&case.weights));
            let mut of_logits = Vec::new();
            let loss = Labels { labels: &labels, weights: &weights, tasks: &case.tasks }.loss(&logits, &mut of_logits);
            assert!((loss / case.loss - 1.0).abs() < 1e-5, "{loss} {}", case.loss);
            let (mut of_queries, mut of_vectors) = (Vec::new(), Vec::new());
            reranker.backward(&pairs, &of_logits, &mut of_queries, &mut of_vectors).unwrap();
            let most = case.gradients.iter().fold(0.0, |most: f64, gradient| most.max(gradient.largest));
            for want in &case.gradients {
                let parameter = || {
                    let known = reranker.weights.parameters().iter().find(|parameter| parameter.name == want.name);
                    &reranker.weights.gradients()[known.unwrap().range.clone()]
                };
                let got = match want.name.as_str() {
                    QUERY => &of_queries,
                    "item" => &of_vectors,
                    _ => parameter(),
                };
                for (n, x) in floats(&want.values).into_iter().enumerate() {
                    let (got, bound) = (got[n * want.step], 1e-5 * want.largest.max(most / 100.0));
                    assert!(f64::from((got - x).abs()) <= bound, "{}, `{}`: {got} {x}", case.package, want.name);
                }
            }
        }
    }

    #[test]
    fn inputs_that_cannot_be_trained_are_rejected_by_name() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
        let train: TrainSpec = serde_json::from_str(r#"{"label": "click", "loss": "tasks"}"#).unwrap();
        let refused = |name: &str, without: &str| {
            let package = Package::open_with_progress(&root.join(name), &|_| ()).unwrap();
            let mut items = Items::read(&items::file_of(&root.join(name)).unwrap(), None).unwrap();
            items.columns.retain(|column| column.name != without);
            Reranker::read(&package, &train, &items, &Threads::default()).unwrap_err().to_string()
        };
        assert!(refused("din", "").contains("input `past` cannot be trained, expected `query`, `item`, `similarity`"));
        assert!(refused("dcn", "price").contains("`price`"));
        assert!(refused("sasrec", "").contains("needs [overarch]"));
    }
}
