//! Features of one request or item: converts received values to tower inputs.

use super::spec::{FeatureKind, FeatureSpec, Keep};
use sterling_core::error::{Error, Result};
use sterling_core::request::{LargestNumber, Values};
use sterling_embedding::{Retained, Table};

/// One row of features, validated against a tower: one element per feature.
#[derive(Clone, Debug, PartialEq)]
pub struct FeatureRow {
    pub(super) values: Vec<FeatureValues>,
}

/// Values of one feature in one row.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum FeatureValues {
    /// Ids of a table, with one weight per id if the feature is weighted; empty if the row has no values.
    Ids { ids: Vec<i64>, weights: Option<Vec<f32>> },
    /// Numbers of a dense feature.
    Dense(Vec<f32>),
}

impl FeatureRow {
    /// Returns the number of ids of all features.
    pub fn ids(&self) -> usize {
        self.values.iter().map(FeatureValues::ids).sum()
    }

    /// Returns the ids of feature `n` and their weights; `None` for a numeric feature.
    pub fn ids_of(&self, n: usize) -> Option<(&[i64], Option<&[f32]>)> {
        match self.values.get(n)? {
            FeatureValues::Ids { ids, weights } => Some((ids, weights.as_deref())),
            FeatureValues::Dense(_) => None,
        }
    }

    /// Returns the numbers of feature `n`; `None` for a feature of ids.
    pub fn numbers_of(&self, n: usize) -> Option<&[f32]> {
        match self.values.get(n)? {
            FeatureValues::Ids { .. } => None,
            FeatureValues::Dense(numbers) => Some(numbers),
        }
    }

    /// Returns the number or weight with the largest magnitude outside of 0 to 1. `features` are those of the row.
    pub fn largest(&self, features: &[FeatureSpec]) -> Option<LargestNumber> {
        let of_feature = |(values, spec): (&FeatureValues, &FeatureSpec)| {
            let numbers = match values {
                FeatureValues::Ids { weights, .. } => weights.as_deref().unwrap_or(&[]),
                FeatureValues::Dense(numbers) => numbers,
            };
            LargestNumber::of(numbers, || format!("feature `{}`", spec.source()))
        };
        let all = self.values.iter().zip(features).filter_map(of_feature);
        all.max_by(|x, y| x.number.abs().total_cmp(&y.number.abs()))
    }

    /// Passes the bytes of all values, and the counts of ids, to a hash function, in order.
    pub fn hash_into(&self, update: &mut dyn FnMut(&[u8])) {
        for values in &self.values {
            match values {
                FeatureValues::Ids { ids, weights } => {
                    update(&(ids.len() as u64).to_le_bytes());
                    ids.iter().for_each(|id| update(&id.to_le_bytes()));
                    update(&[u8::from(weights.is_some())]);
                    weights.iter().flatten().for_each(|weight| update(&weight.to_le_bytes()));
                }
                FeatureValues::Dense(numbers) => numbers.iter().for_each(|x| update(&x.to_le_bytes())),
            }
        }
    }

    /// Returns the bytes of the row's values.
    pub fn bytes(&self) -> usize {
        let bytes = |values: &FeatureValues| match values {
            FeatureValues::Ids { ids, weights } => ids.len() * 8 + weights.as_ref().map_or(0, |w| w.len() * 4),
            FeatureValues::Dense(numbers) => numbers.len() * 4,
        };
        self.values.iter().map(bytes).sum()
    }
}

impl FeatureValues {
    pub(super) fn ids(&self) -> usize {
        match self {
            FeatureValues::Ids { ids, .. } => ids.len(),
            FeatureValues::Dense(_) => 0,
        }
    }

    pub(super) fn has_weights(&self) -> bool {
        matches!(self, FeatureValues::Ids { weights: Some(_), .. })
    }

    /// Returns the value of a feature that is missing in a row: an empty bag, or zeros.
    pub(super) fn missing(spec: &FeatureSpec) -> Self {
        match spec.kind {
            FeatureKind::Dense => FeatureValues::Dense(vec![0.0; spec.width.unwrap_or(0)]),
            _ => FeatureValues::Ids { ids: Vec::new(), weights: None },
        }
    }

    /// Converts received values to the kind of values that `spec` declares.
    ///
    /// # Errors
    /// `Invalid` with the received and the expected value.
    pub(super) fn read(spec: &FeatureSpec, table: Option<&Table>, sent: Values) -> Result<Self> {
        let mut values = match (spec.kind, sent) {
            (FeatureKind::Ids, Values::Weighted { .. }) if spec.is_sequence() => {
                return Err(Error::invalid(
                    "got values with weights, expected a list of 64-bit ids: a sequence has no weights",
                ));
            }
            (FeatureKind::Ids, Values::Integers(ids)) => FeatureValues::Ids { ids, weights: None },
            (FeatureKind::Ids, Values::Weighted { ids, weights }) if ids.len() == weights.len() => {
                FeatureValues::Ids { ids, weights: spec.weights.then_some(weights) }
            }
            (FeatureKind::Ids, Values::Weighted { ids, weights }) => {
                return Err(Error::invalid(format!(
                    "got {} weights, expected one for each of {} values",
                    weights.len(),
                    ids.len()
                )));
            }
            (FeatureKind::Category, sent @ (Values::Texts(_) | Values::Integers(_))) => {
                let id = |value: &str| table.and_then(|table| table.category_id(value));
                let ids: Option<Vec<i64>> = match sent {
                    Values::Integers(integers) => integers.iter().map(|n| id(&n.to_string())).collect(),
                    Values::Texts(texts) => texts.iter().map(|text| id(text)).collect(),
                    _ => Some(Vec::new()),
                };
                let ids = ids.ok_or_else(|| Error::internal("a category feature has no vocabulary"))?;
                FeatureValues::Ids { ids, weights: None }
            }
            (FeatureKind::Text, Values::Texts(texts)) if texts.len() <= 1 => {
                let tokenizer = table.and_then(Table::tokenizer);
                let tokenizer = tokenizer.ok_or_else(|| Error::internal("a text feature has no tokenizer"))?;
                let retained = match spec.kept() {
                    Keep::First => Retained::First,
                    Keep::Last => Retained::Last,
                };
                let ids = |text: &String| tokenizer.encode(text, spec.length.unwrap_or(0), retained);
                FeatureValues::Ids { ids: texts.first().map_or(Ok(Vec::new()), ids)?, weights: None }
            }
            (FeatureKind::Text, Values::Texts(texts)) => {
                return Err(Error::invalid(format!("got {} texts, expected one text", texts.len())));
            }
            (FeatureKind::Dense, Values::Integers(integers)) => {
                FeatureValues::Dense(integers.iter().map(|&n| n as f32).collect())
            }
            (FeatureKind::Dense, Values::Numbers(numbers)) => FeatureValues::Dense(numbers),
            (kind, sent) => return Err(Error::invalid(format!("got {}, expected {}", shown(&sent), expected(kind)))),
        };
        values.check(spec)?;
        if spec.is_sequence() {
            values.cut(spec.length.unwrap_or(0), spec.kept());
        }
        Ok(values)
    }

    /// Truncates a sequence to at most `length` ids.
    fn cut(&mut self, length: usize, keep: Keep) {
        if let FeatureValues::Ids { ids, .. } = self {
            let kept = keep.of(ids.len(), length);
            ids.truncate(kept.end);
            ids.drain(..kept.start);
        }
    }

    fn check(&self, spec: &FeatureSpec) -> Result<()> {
        match self {
            FeatureValues::Ids { ids, .. } if ids.len() > spec.max_ids => {
                Err(Error::invalid(format!("got {} values, expected at most {}", ids.len(), spec.max_ids)))
            }
            FeatureValues::Ids { weights: Some(weights), .. } => all_finite(weights),
            FeatureValues::Ids { .. } => Ok(()),
            FeatureValues::Dense(numbers) if numbers.len() != spec.width.unwrap_or(0) => {
                Err(Error::invalid(format!("got {} numbers, expected {}", numbers.len(), spec.width.unwrap_or(0))))
            }
            FeatureValues::Dense(numbers) => all_finite(numbers),
        }
    }
}

fn all_finite(numbers: &[f32]) -> Result<()> {
    match numbers.iter().find(|x| !x.is_finite()) {
        Some(x) => Err(Error::invalid(format!("got {x}, expected finite numbers"))),
        None => Ok(()),
    }
}

fn expected(kind: FeatureKind) -> &'static str {
    match kind {
        FeatureKind::Ids => "a list of 64-bit ids, or {\"values\": [..], \"weights\": [..]}",
        FeatureKind::Category => "a text, an integer, or a list of them",
        FeatureKind::Dense => "a list of numbers",
        FeatureKind::Text => "a text",
    }
}

/// Returns a short description of received values, with the first value, for errors.
fn shown(values: &Values) -> String {
    const CHARS_MAX: usize = 60;
    match values {
        Values::Integers(integers) => integers.first().map_or("no values".into(), |n| format!("integers such as {n}")),
        Values::Numbers(numbers) => {
            if let Some(fraction) = numbers.iter().find(|x| x.fract() != 0.0) {
                return format!("numbers such as {fraction}");
            }
            // An integer beyond 64 bits was rounded when it was parsed.
            let beyond = numbers.iter().find(|x| x.abs() >= i64::MAX as f32);
            let beyond = beyond.map(|x| format!("about {x:e}, and integers end at {}", i64::MAX));
            beyond
                .or(numbers.first().map(f32::to_string))
                .map_or("no values".into(), |x| format!("numbers such as {x}"))
        }
        Values::Texts(texts) => texts.first().map_or("no values".into(), |text| {
            let start: String = text.chars().take(CHARS_MAX).collect();
            let more = if start.len() < text.len() { "..." } else { "" };
            format!("texts such as \"{start}{more}\"")
        }),
        Values::Weighted { .. } => "values with weights".into(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// An unweighted collection of TorchRec computes `sum(rows)` and ignores weights of the ids.
    #[test]
    fn drops_weights_of_a_feature_that_takes_none() {
        let spec = |text: &str| serde_json::from_str::<FeatureSpec>(text).unwrap();
        let weighted = spec(r#"{"name": "a", "kind": "ids", "table": "t"}"#);
        let unweighted = spec(r#"{"name": "a", "kind": "ids", "table": "t", "weights": false}"#);
        let read = |spec: &FeatureSpec, weights: &[f32]| {
            FeatureValues::read(spec, None, Values::Weighted { ids: vec![1, 2], weights: weights.to_vec() })
        };
        let ids = vec![1, 2];
        let kept = FeatureValues::Ids { ids: ids.clone(), weights: Some(vec![10.0, 100.0]) };
        assert_eq!(read(&weighted, &[10.0, 100.0]).unwrap(), kept);
        assert_eq!(read(&unweighted, &[10.0, 100.0]).unwrap(), FeatureValues::Ids { ids, weights: None });
        // The request body is still validated.
        assert!(read(&unweighted, &[10.0]).unwrap_err().to_string().contains("got 1 weights, expected one for each"));
        // Written again it has the same meaning: `true` is the default and omitted.
        assert!(!serde_json::to_string(&weighted).unwrap().contains("weights"));
        assert_eq!(spec(&serde_json::to_string(&unweighted).unwrap()), unweighted);
    }
}
