//! From the values that a request or an item brings to an embedding: checked, looked up, run through a tower.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::spec::{FeatureKind, FeatureSpec};
use crate::embedding::{
    BagConfig, EmbeddingBagCollection, JaggedTensor, KeyedJaggedTensor, KeyedTensor, Lookup, LookupReport,
};
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use crate::tower::{Graph, Input};

/// The values of one feature.
#[derive(Clone, Debug, PartialEq)]
pub enum FeatureValues {
    /// 64-bit ids, each with a weight where there are weights.
    Ids {
        /// The ids.
        values: Vec<i64>,
        /// As many weights.
        weights: Option<Vec<f32>>,
    },
    /// Values of a vocabulary; integers as their text.
    Categories(Vec<String>),
    /// Numbers.
    Dense(Vec<f32>),
}

/// The features of one request or item, by the name of the field that brings them.
pub type Features = BTreeMap<String, FeatureValues>;

/// A graph with the features it takes and the tables that these are looked up in.
#[derive(Debug)]
pub struct Tower {
    side: &'static str,
    features: Vec<FeatureSpec>,
    bags: EmbeddingBagCollection,
    graph: Graph,
    output: &'static str,
    dimension: usize,
}

/// Pooled embeddings and dense features of a batch, ready for the graph.
#[derive(Debug)]
pub struct Pooled {
    rows: usize,
    pooled: KeyedTensor,
    dense: Vec<(String, Vec<f32>, usize)>,
}

impl Tower {
    /// Joins a graph with its features. `tables` serve the features of kind `ids` and `category`.
    ///
    /// # Errors
    /// `Invalid` where an input of the graph has no feature, a feature no input, or their widths differ.
    pub fn new(
        side: &'static str,
        features: &[FeatureSpec],
        tables: &[std::sync::Arc<crate::embedding::Table>],
        graph: Graph,
        output: &'static str,
        dimension: usize,
    ) -> Result<Self> {
        let bags: Vec<BagConfig> = features
            .iter()
            .filter_map(|f| Some(BagConfig { feature: f.name.clone(), table: f.table.clone()?, pooling: f.pooling }))
            .collect();
        let bags = EmbeddingBagCollection::new(tables.to_vec(), &bags)?;
        for feature in features {
            let port =
                graph.input(&feature.name).map_err(|e| e.within(format!("{side}.features `{}`", feature.name)))?;
            let width = match feature.width {
                Some(width) => width,
                None => bags
                    .layout()
                    .keys()
                    .iter()
                    .position(|k| *k == feature.name)
                    .map_or(0, |k| bags.layout().columns(k).len()),
            };
            if port.shape.as_ref().is_some_and(|s| s.len() != 2 || s[1].is_some_and(|w| w != width)) {
                return Err(Error::invalid(format!(
                    "{}: input `{}` has shape {}, and the feature is [?, {width}]",
                    graph.name(),
                    feature.name,
                    crate::tower::shown(port.shape.as_deref().unwrap_or(&[]))
                )));
            }
        }
        if let Some(port) = graph.inputs().find(|p| features.iter().all(|f| f.name != p.name)) {
            return Err(Error::invalid(format!(
                "{}: input `{}` has no feature in {side}.features",
                graph.name(),
                port.name
            )));
        }
        let made = graph.output(output)?;
        if made.shape.as_ref().is_some_and(|s| s.len() != 2 || s[1].is_some_and(|d| d != dimension)) {
            return Err(Error::invalid(format!(
                "{}: output `{output}` has shape {}, expected [?, {dimension}]",
                graph.name(),
                crate::tower::shown(made.shape.as_deref().unwrap_or(&[]))
            )));
        }
        Ok(Tower { side, features: features.to_vec(), bags, graph, output, dimension })
    }

    /// What the tower takes.
    pub fn features(&self) -> &[FeatureSpec] {
        &self.features
    }

    /// Reads the features of a request.
    ///
    /// # Errors
    /// `Invalid` with the feature, what came and what was expected.
    pub fn read(&self, sent: &Map<String, Value>) -> Result<Features> {
        let mut features = Features::new();
        for (name, value) in sent {
            let Some(spec) = self.features.iter().find(|f| f.source() == name) else {
                let mut known: Vec<&str> = self.features.iter().map(FeatureSpec::source).collect();
                known.sort_unstable();
                known.dedup();
                return Err(Error::invalid(format!(
                    "field `features`: unknown feature `{name}`, expected some of: {}",
                    known.join(", ")
                )));
            };
            let values = read_value(spec, value).map_err(|e| e.within(format!("feature `{name}`")))?;
            features.insert(name.clone(), values);
        }
        Ok(features)
    }

    /// Looks the features of a batch up in their tables: one call for all of them. A feature that a row does not bring is
    /// an empty bag, or zeros.
    ///
    /// # Errors
    /// `Invalid` for values of another kind, too many ids, or numbers that are not finite; what the lookup returns.
    pub fn lookup(&self, rows: &[Features], terms: &Lookup) -> Result<(Pooled, LookupReport)> {
        let mut jagged = Vec::new();
        let mut dense = Vec::new();
        for spec in &self.features {
            let wrong = |e: Error| e.within(format!("{}.features `{}`", self.side, spec.source()));
            match spec.kind {
                FeatureKind::Dense => {
                    dense.push((spec.name.clone(), gather_dense(spec, rows).map_err(wrong)?, spec.width.unwrap_or(0)))
                }
                _ => jagged.push((spec.name.clone(), self.gather_ids(spec, rows).map_err(wrong)?)),
            }
        }
        let any_weights = jagged.iter().any(|(_, j)| j.weights().is_some());
        if any_weights {
            for (_, of_feature) in jagged.iter_mut().filter(|(_, j)| j.weights().is_none()) {
                let lengths: Vec<i64> = of_feature.lengths().map(|n| n as i64).collect();
                let values = of_feature.values().to_vec();
                let ones = vec![1.0; values.len()];
                *of_feature = JaggedTensor::from_lengths(values, &lengths, Some(ones))?;
            }
        }
        if jagged.is_empty() {
            let pooled = KeyedTensor::zeros(self.bags.layout().clone(), rows.len());
            return Ok((Pooled { rows: rows.len(), pooled, dense }, Vec::new()));
        }
        let ids = KeyedJaggedTensor::from_jagged(jagged)?;
        let (pooled, report) = self.bags.lookup(&ids, terms)?;
        Ok((Pooled { rows: rows.len(), pooled, dense }, report))
    }

    fn gather_ids(&self, spec: &FeatureSpec, rows: &[Features]) -> Result<JaggedTensor<i64>> {
        let mut values = Vec::new();
        let mut weights: Option<Vec<f32>> = None;
        let mut lengths = Vec::with_capacity(rows.len());
        let table = self.bags.tables().iter().find(|t| Some(t.name()) == spec.table.as_deref());
        for row in rows {
            let before = values.len();
            match (row.get(spec.source()), spec.kind) {
                (None, _) => {}
                (Some(FeatureValues::Ids { values: ids, weights: of_ids }), FeatureKind::Ids) => {
                    values.extend_from_slice(ids);
                    if of_ids.is_some() || weights.is_some() {
                        let all = weights.get_or_insert_with(|| vec![1.0; before]);
                        all.extend_from_slice(of_ids.as_deref().unwrap_or(&[]));
                        all.resize(values.len(), 1.0);
                    }
                }
                (Some(FeatureValues::Categories(texts)), FeatureKind::Category) => {
                    let vocabulary = table
                        .and_then(|t| t.vocabulary())
                        .ok_or_else(|| Error::internal("a category without a vocabulary"))?;
                    values.extend(texts.iter().map(|t| vocabulary.id(t)));
                }
                (Some(other), kind) => {
                    return Err(Error::invalid(format!("got {}, expected {}", shown(other), expected(kind))));
                }
            }
            let count = values.len() - before;
            if count > spec.max_ids {
                return Err(Error::invalid(format!("got {count} values, expected at most {}", spec.max_ids)));
            }
            lengths.push(count as i64);
        }
        if let Some(all) = &mut weights {
            all.resize(values.len(), 1.0);
        }
        JaggedTensor::from_lengths(values, &lengths, weights)
    }

    /// Runs the graph: `[rows, D]`.
    ///
    /// # Errors
    /// `Internal` where the graph fails or makes something else.
    pub fn run(&self, pooled: &Pooled) -> Result<Tensor> {
        let keyed: Vec<(&String, Tensor)> = self
            .bags
            .layout()
            .keys()
            .iter()
            .map(|key| {
                pooled.pooled.get(key).map(|t| (key, t)).ok_or_else(|| Error::internal(format!("no pooled `{key}`")))
            })
            .collect::<Result<_>>()?;
        let dense_shapes: Vec<[usize; 2]> = pooled.dense.iter().map(|(_, _, width)| [pooled.rows, *width]).collect();
        let mut inputs: Vec<Input<'_>> =
            keyed.iter().map(|(name, t)| Input { name: name.as_str(), shape: t.shape(), values: t.data() }).collect();
        for ((name, values, _), shape) in pooled.dense.iter().zip(&dense_shapes) {
            inputs.push(Input { name, shape, values });
        }
        let made = self.graph.run(&inputs, self.output)?;
        if made.shape() != [pooled.rows, self.dimension] {
            return Err(Error::internal(format!(
                "{}: `{}` came out as {:?}, expected [{}, {}]",
                self.graph.name(),
                self.output,
                made.shape(),
                pooled.rows,
                self.dimension
            )));
        }
        Ok(made)
    }
}

fn gather_dense(spec: &FeatureSpec, rows: &[Features]) -> Result<Vec<f32>> {
    let width = spec.width.unwrap_or(0);
    let mut values = Vec::with_capacity(rows.len() * width);
    for row in rows {
        match row.get(spec.source()) {
            None => values.resize(values.len() + width, 0.0),
            Some(FeatureValues::Dense(numbers)) if numbers.len() == width => {
                if let Some(x) = numbers.iter().find(|x| !x.is_finite()) {
                    return Err(Error::invalid(format!("got {x}, expected finite numbers")));
                }
                values.extend_from_slice(numbers);
            }
            Some(FeatureValues::Dense(numbers)) => {
                return Err(Error::invalid(format!("got {} numbers, expected {width}", numbers.len())));
            }
            Some(other) => {
                return Err(Error::invalid(format!("got {}, expected {}", shown(other), expected(spec.kind))));
            }
        }
    }
    Ok(values)
}

fn expected(kind: FeatureKind) -> &'static str {
    match kind {
        FeatureKind::Ids => "a list of 64-bit ids, or {\"values\": [..], \"weights\": [..]}",
        FeatureKind::Category => "a text, an integer, or a list of them",
        FeatureKind::Dense => "a list of numbers",
    }
}

fn shown(values: &FeatureValues) -> &'static str {
    match values {
        FeatureValues::Ids { .. } => "ids",
        FeatureValues::Categories(_) => "categories",
        FeatureValues::Dense(_) => "numbers",
    }
}

fn read_value(spec: &FeatureSpec, value: &Value) -> Result<FeatureValues> {
    let wrong = |got: &Value| {
        let mut text = got.to_string();
        if text.chars().count() > 60 {
            text = text.chars().take(60).collect::<String>() + "...";
        }
        Error::invalid(format!("got {text}, expected {}", expected(spec.kind)))
    };
    let list = |value: &Value| match value {
        Value::Array(list) => list.clone(),
        one => vec![one.clone()],
    };
    let numbers = |value: &Value| {
        let one = |v: &Value| v.as_f64().map(|x| x as f32).filter(|x| x.is_finite()).ok_or_else(|| wrong(v));
        list(value).iter().map(one).collect::<Result<Vec<f32>>>()
    };
    match spec.kind {
        FeatureKind::Dense => numbers(value).map(FeatureValues::Dense),
        FeatureKind::Category => {
            let text = |v: &Value| match v {
                Value::String(text) => Ok(text.clone()),
                Value::Number(n) if n.is_i64() || n.is_u64() => Ok(n.to_string()),
                other => Err(wrong(other)),
            };
            list(value).iter().map(text).collect::<Result<_>>().map(FeatureValues::Categories)
        }
        FeatureKind::Ids => {
            let ids = |value: &Value| {
                list(value).iter().map(|v| v.as_i64().ok_or_else(|| wrong(v))).collect::<Result<Vec<i64>>>()
            };
            let Value::Object(fields) = value else {
                return Ok(FeatureValues::Ids { values: ids(value)?, weights: None });
            };
            if let Some(other) = fields.keys().find(|k| !["values", "weights"].contains(&k.as_str())) {
                return Err(Error::invalid(format!("unknown field `{other}`, expected {}", expected(spec.kind))));
            }
            let values = ids(fields.get("values").ok_or_else(|| wrong(value))?)?;
            let weights = fields.get("weights").map(numbers).transpose()?;
            if let Some(weights) = weights.as_ref().filter(|w| w.len() != values.len()) {
                return Err(Error::invalid(format!(
                    "got {} weights, expected one for each of {} values",
                    weights.len(),
                    values.len()
                )));
            }
            Ok(FeatureValues::Ids { values, weights })
        }
    }
}
