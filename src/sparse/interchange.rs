//! Jagged features as JSON and as Arrow.
//!
//! JSON is one object: `keys`, `values`, one of `lengths` or `offsets` (feature after feature), perhaps `weights`. Arrow is a
//! batch of one row an example: a list column of int64 a feature and, where there are weights, a list column of float32 named
//! `FEATURE.weights` beside each. A null list is an empty bag.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Float32Array, Int64Array, ListArray, RecordBatch, RecordBatchOptions};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Float32Type, Int64Type, Schema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::sparse::jagged::{JaggedTensor, KeyedJaggedTensor};

/// What stands behind a feature's name in the name of its weights.
const WEIGHTS_SUFFIX: &str = ".weights";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Plain {
    keys: Vec<String>,
    values: Vec<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lengths: Option<Vec<i64>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    offsets: Option<Vec<i64>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weights: Option<Vec<f32>>,
}

impl KeyedJaggedTensor {
    /// Reads the JSON form.
    ///
    /// # Errors
    /// `Invalid` where the form is another one, or as [`KeyedJaggedTensor::from_lengths`] and
    /// [`KeyedJaggedTensor::from_offsets`].
    pub fn from_json(value: &Value) -> Result<Self> {
        let plain = Plain::deserialize(value).map_err(|e| Error::invalid(format!("jagged features: {e}")))?;
        match (plain.lengths, plain.offsets) {
            (Some(lengths), None) => Self::from_lengths(plain.keys, plain.values, &lengths, plain.weights),
            (None, Some(offsets)) => Self::from_offsets(plain.keys, plain.values, &offsets, plain.weights),
            (both, _) => Err(Error::invalid(format!(
                "jagged features: {} of `lengths` and `offsets` are given, expected one",
                if both.is_some() { "both" } else { "none" }
            ))),
        }
    }

    /// The JSON form, with lengths.
    pub fn to_json(&self) -> Value {
        let plain = Plain {
            keys: self.keys().to_vec(),
            values: self.values().to_vec(),
            lengths: Some(self.lengths().map(|n| n as i64).collect()),
            offsets: None,
            weights: self.weights().map(<[f32]>::to_vec),
        };
        serde_json::to_value(plain).expect("keys, whole numbers and finite weights are JSON")
    }

    /// Reads the features `keys` from the list columns of a batch.
    ///
    /// # Errors
    /// `Invalid` where a column is missing, is no list of int64 (weights: float32), or holds a null inside a list, and as
    /// [`KeyedJaggedTensor::from_jagged`].
    pub fn from_arrow(batch: &RecordBatch, keys: &[&str]) -> Result<Self> {
        let part = |key: &str| {
            let column = batch.column_by_name(key).ok_or_else(|| {
                Error::invalid(format!("feature `{key}` is no column, expected a list of int64 of that name"))
            })?;
            let (offsets, values) = runs_of(key, column, &DataType::Int64)?;
            let values = values.as_primitive::<Int64Type>().values().to_vec();
            let name = format!("{key}{WEIGHTS_SUFFIX}");
            let weights = match batch.column_by_name(&name) {
                None => None,
                Some(column) => {
                    let (weight_offsets, weights) = runs_of(&name, column, &DataType::Float32)?;
                    if weight_offsets != offsets {
                        return Err(Error::invalid(format!("`{name}` has runs of other lengths than `{key}`")));
                    }
                    Some(weights.as_primitive::<Float32Type>().values().to_vec())
                }
            };
            JaggedTensor::from_offsets(values, &offsets, weights).map_err(|e| e.within(format!("feature `{key}`")))
        };
        Self::from_jagged(keys.iter().map(|&key| Ok((key, part(key)?))).collect::<Result<Vec<_>>>()?)
    }

    /// One row an example, one list column a feature, and one of weights beside each where there are weights.
    ///
    /// # Errors
    /// `Unsupported` where there are more ids than an Arrow list column counts.
    pub fn to_arrow(&self) -> Result<RecordBatch> {
        if i32::try_from(self.values().len()).is_err() {
            return Err(Error::unsupported(format!("{} ids, expected at most {}", self.values().len(), i32::MAX)));
        }
        let mut fields = Vec::new();
        let mut columns: Vec<ArrayRef> = Vec::new();
        let mut push = |name: String, kind: DataType, lengths: &[usize], values: ArrayRef| {
            let item = Arc::new(Field::new_list_field(kind, false));
            let list = ListArray::new(item, OffsetBuffer::from_lengths(lengths.iter().copied()), values, None);
            fields.push(Field::new(name, list.data_type().clone(), false));
            columns.push(Arc::new(list));
        };
        for (key, part) in self.to_jagged() {
            let lengths: Vec<usize> = part.lengths().collect();
            push(key.clone(), DataType::Int64, &lengths, Arc::new(Int64Array::from(part.values().to_vec())));
            if let Some(weights) = part.weights() {
                let name = format!("{key}{WEIGHTS_SUFFIX}");
                push(name, DataType::Float32, &lengths, Arc::new(Float32Array::from(weights.to_vec())));
            }
        }
        let options = RecordBatchOptions::new().with_row_count(Some(self.stride()));
        RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), columns, &options)
            .map_err(|e| Error::invalid(format!("jagged features as columns: {e}")))
    }
}

/// Offsets from 0 and the values between them; the bytes under a null list are left out.
fn runs_of(name: &str, column: &ArrayRef, kind: &DataType) -> Result<(Vec<i64>, ArrayRef)> {
    let wrong = || Error::invalid(format!("`{name}` is {:?}, expected a list of {kind:?}", column.data_type()));
    let (bounds, values): (Vec<i64>, &ArrayRef) = if let Some(list) = column.as_list_opt::<i32>() {
        (list.offsets().iter().map(|&o| i64::from(o)).collect(), list.values())
    } else if let Some(list) = column.as_list_opt::<i64>() {
        (list.offsets().to_vec(), list.values())
    } else {
        return Err(wrong());
    };
    if values.data_type() != kind {
        return Err(wrong());
    }
    let (first, last) = (bounds[0], bounds[bounds.len() - 1]);
    let hidden = |row: usize| column.is_null(row) && bounds[row + 1] > bounds[row];
    if (0..column.len()).any(hidden) {
        return Err(Error::invalid(format!("`{name}` has a null list with values under it, expected none")));
    }
    let values = values.slice(first as usize, (last - first) as usize);
    if values.null_count() > 0 {
        return Err(Error::invalid(format!(
            "`{name}` has {} nulls inside its lists, expected none",
            values.null_count()
        )));
    }
    Ok((bounds.iter().map(|b| b - first).collect(), values))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use arrow::array::{Int32Array, Int64Builder, ListBuilder};
    use proptest::prelude::*;
    use serde_json::json;

    proptest! {
        #[test]
        fn json_and_arrow_bring_back_what_went_in(
            runs in prop::collection::vec(prop::collection::vec(prop::collection::vec((any::<i64>(), -1e6f32..1e6), 0..4), 3), 1..4),
            weighted: bool,
        ) {
            let parts = runs.iter().enumerate().map(|(k, bags)| {
                let lengths: Vec<i64> = bags.iter().map(|b| b.len() as i64).collect();
                let weights = weighted.then(|| bags.iter().flatten().map(|(_, w)| *w).collect());
                let values = bags.iter().flatten().map(|(v, _)| *v).collect();
                (format!("k{k}"), JaggedTensor::from_lengths(values, &lengths, weights).unwrap())
            });
            let kjt = KeyedJaggedTensor::from_jagged(parts).unwrap();
            prop_assert_eq!(&KeyedJaggedTensor::from_json(&kjt.to_json()).unwrap(), &kjt);
            let keys: Vec<&str> = kjt.keys().iter().map(String::as_str).collect();
            let batch = kjt.to_arrow().unwrap();
            prop_assert_eq!(&KeyedJaggedTensor::from_arrow(&batch, &keys).unwrap(), &kjt);
            // A slice of a batch starts inside its lists.
            let tail = KeyedJaggedTensor::from_arrow(&batch.slice(1, 2), &keys).unwrap();
            for key in keys {
                prop_assert_eq!(tail.get(key).unwrap().bag(0), kjt.get(key).unwrap().bag(1));
            }
        }
    }

    #[test]
    fn malformed_json_is_named() {
        for (text, part) in [
            (json!({"keys": ["a"], "values": [1]}), "none of `lengths` and `offsets`"),
            (json!({"keys": ["a"], "values": [1], "lengths": [1], "offsets": [0, 1]}), "both of"),
            (json!({"keys": ["a"], "values": [1], "lengths": [2]}), "beyond the 1 values"),
            (json!({"keys": ["a"], "values": [1], "lengths": [0]}), "add up to 0"),
            (json!({"keys": ["a"], "values": [1], "lengths": [-1]}), "length 0 is -1"),
            (json!({"keys": ["a"], "values": [1.5], "lengths": [1]}), "expected i64"),
            (json!({"keys": ["a"], "values": ["x"], "lengths": [1]}), "expected i64"),
            (json!({"keys": ["a"], "values": [9223372036854775808u64], "lengths": [1]}), "expected i64"),
            (json!({"keys": ["a", "a"], "values": [1], "lengths": [1, 0]}), "`a` comes twice"),
            (json!({"keys": ["a"], "values": [1], "lengths": [1], "weights": []}), "0 weights for 1"),
            (json!({"keys": ["a"], "values": [1], "lengths": [1], "weights": [1e300]}), "finite"),
            (json!({"keys": ["a"], "values": [1], "lengths": [1], "wieghts": [1]}), "unknown field"),
            (json!({"keys": ["a", "b"], "values": [], "lengths": [0, 0, 0]}), "multiple of the 2 keys"),
            (json!({"keys": ["a"], "values": [1], "offsets": [1, 1]}), "first offset"),
            (json!({"keys": ["a"], "values": [1], "offsets": []}), "first offset"),
            (json!({"keys": ["a"], "values": [1, 2], "offsets": [0, 2, 1]}), "rising"),
            (json!({"keys": ["a"], "values": [1, 2], "offsets": [0, 1]}), "last offset is 1"),
            (json!([]), "jagged features"),
            (json!(null), "jagged features"),
        ] {
            let error = KeyedJaggedTensor::from_json(&text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn columns_that_are_no_lists_of_ids_are_named() {
        let mut with_null = ListBuilder::new(Int64Builder::new());
        with_null.append_value([Some(1), None]);
        let batch = RecordBatch::try_from_iter([
            ("flat", Arc::new(Int32Array::from(vec![1])) as ArrayRef),
            ("null", Arc::new(with_null.finish()) as ArrayRef),
        ])
        .unwrap();
        for (key, part) in [("none", "no column"), ("flat", "expected a list"), ("null", "1 nulls")] {
            let error = KeyedJaggedTensor::from_arrow(&batch, &[key]).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(key), "{error}");
        }
    }
}
