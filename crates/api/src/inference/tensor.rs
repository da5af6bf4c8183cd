//! Tensors: name, shape, data type, and values in JSON or as little-endian bytes.

use std::fmt;

use half::f16;
use serde::de::{self, DeserializeSeed, Deserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::{ArrayBuilder, Schema};

use crate::values::{Push, nullable};
use sterling_core::error::{Error, Result};
use sterling_core::request::Values;

/// Maximum nesting of values in JSON, equal to the maximum number of dimensions.
const DEPTH_MAX: usize = 8;

/// A tensor of a request.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct InputTensor {
    /// Role of the tensor: a user feature, `FEATURE.counts`, `FEATURE.weights`, or `vector`.
    pub(super) name: String,
    /// Dimensions; the first is the request.
    #[schema(value_type = Vec<u64>, min_items = 1, max_items = 8)]
    shape: Vec<u64>,
    /// `INT64` and other integers, `FP32`, `FP64`, `BYTES`, or `FP16` if its values are bytes.
    datatype: String,
    /// Size of the values, if they are bytes after the JSON.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<TensorParameters>)]
    parameters: TensorParameters,
    /// Values of the tensor, nested or flat, row after row.
    #[serde(default)]
    #[schema(schema_with = nested_values)]
    data: Option<Data>,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct TensorParameters {
    /// Number of bytes of this tensor after the JSON; the bytes of all tensors follow one another in order.
    #[serde(default)]
    binary_data_size: Option<usize>,
}

/// Returns the schema of values in JSON, which may be nested.
fn nested_values() -> Schema {
    let described = ArrayBuilder::new().description(Some("Values of the tensor, nested or flat, row after row."));
    Schema::Array(described.build())
}

/// Values in JSON, nested or flat.
struct Data(Values);

impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut values = Values::Integers(Vec::new());
        deserializer.deserialize_seq(Nested { values: &mut values, depth: 1 })?;
        Ok(Data(values))
    }
}

struct Nested<'a> {
    values: &'a mut Values,
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for Nested<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Nested<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "numbers or texts, nested {DEPTH_MAX} deep at most")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        if self.depth > DEPTH_MAX {
            return Err(de::Error::invalid_type(de::Unexpected::Seq, &self));
        }
        while entries.next_element_seed(Nested { values: &mut *self.values, depth: self.depth + 1 })?.is_some() {}
        Ok(())
    }

    fn visit_i64<E: de::Error>(self, x: i64) -> Result<(), E> {
        Push(self.values).visit_i64(x)
    }

    fn visit_u64<E: de::Error>(self, x: u64) -> Result<(), E> {
        Push(self.values).visit_u64(x)
    }

    fn visit_f64<E: de::Error>(self, x: f64) -> Result<(), E> {
        Push(self.values).visit_f64(x)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<(), E> {
        Push(self.values).visit_str(text)
    }
}

/// A parsed tensor.
#[derive(Debug, PartialEq)]
pub(super) struct Tensor {
    pub(super) name: String,
    /// Size of the first dimension.
    pub(super) rows: usize,
    /// Values per row.
    pub(super) width: usize,
    pub(super) values: Values,
}

impl InputTensor {
    /// Parses the tensor; takes its values from the beginning of `binary` if they are not in the JSON.
    pub(super) fn read(self, binary: &mut &[u8]) -> Result<Tensor> {
        let InputTensor { name, shape, datatype, parameters, data } = self;
        let invalid = |what: String| Error::invalid(format!("input `{name}`: {what}"));
        let count = shape.iter().try_fold(1usize, |all, &size| all.checked_mul(usize::try_from(size).ok()?));
        let (count, rows) = match (count, shape.first()) {
            (Some(count), Some(&rows)) if shape.len() <= DEPTH_MAX => (count, rows as usize),
            (None, _) => return Err(invalid(format!("shape {shape:?}, expected one of fewer values"))),
            _ => return Err(invalid(format!("shape {shape:?}, expected 1 to {DEPTH_MAX} dimensions"))),
        };
        let values = match (data, parameters.binary_data_size) {
            (Some(Data(values)), None) => typed(values, &datatype).map_err(invalid)?,
            (None, Some(size)) => {
                let bytes = binary.split_off(..size).ok_or_else(|| {
                    invalid(format!(
                        "binary_data_size {size}, expected at most {}, the bytes left after the JSON",
                        binary.len()
                    ))
                })?;
                unpacked(bytes, &datatype).map_err(invalid)?
            }
            _ => return Err(invalid("expected either `data` or the parameter `binary_data_size`".into())),
        };
        let got = match &values {
            Values::Integers(list) => list.len(),
            Values::Numbers(list) => list.len(),
            Values::Texts(list) => list.len(),
            Values::Weighted { ids, .. } => ids.len(),
        };
        if got != count {
            return Err(invalid(format!("{got} values, expected {count} by its shape {shape:?}")));
        }
        Ok(Tensor { rows, width: count.checked_div(rows).unwrap_or(0), values, name })
    }
}

fn is_integer(datatype: &str) -> bool {
    ["INT64", "INT32", "INT16", "INT8", "UINT64", "UINT32", "UINT16", "UINT8"].contains(&datatype)
}

/// Converts values to their data type.
fn typed(values: Values, datatype: &str) -> Result<Values, String> {
    match (datatype, values) {
        (name, Values::Integers(list)) if is_integer(name) => Ok(Values::Integers(list)),
        ("FP32" | "FP64", Values::Numbers(list)) => Ok(Values::Numbers(list)),
        ("FP32" | "FP64", Values::Integers(list)) => Ok(Values::Numbers(list.iter().map(|&x| x as f32).collect())),
        ("BYTES", Values::Texts(list)) => Ok(Values::Texts(list)),
        ("BYTES", Values::Integers(list)) if list.is_empty() => Ok(Values::Texts(Vec::new())),
        ("FP16", _) => {
            Err("JSON cannot represent FP16: send its values as bytes after the JSON, with `binary_data_size`".into())
        }
        (name, Values::Numbers(_)) if is_integer(name) => {
            Err(format!("got values that are not {name}, expected integers of at most {}", i64::MAX))
        }
        (name, _) if is_integer(name) || ["FP32", "FP64", "BYTES"].contains(&name) => {
            Err(format!("got values that are not {name}"))
        }
        (other, _) => Err(unknown(other)),
    }
}

fn unknown(datatype: &str) -> String {
    format!("datatype `{datatype}`, expected an INT or UINT, FP16, FP32, FP64 or BYTES")
}

/// Decodes little-endian values of a data type; texts follow their 32-bit length.
fn unpacked(bytes: &[u8], datatype: &str) -> Result<Values, String> {
    fn each<const SIZE: usize, T>(
        bytes: &[u8],
        datatype: &str,
        of: impl Fn([u8; SIZE]) -> Option<T>,
    ) -> Result<Vec<T>, String> {
        let (chunks, rest) = bytes.as_chunks::<SIZE>();
        if !rest.is_empty() {
            return Err(format!("{} bytes, expected {SIZE} for each {datatype}", bytes.len()));
        }
        let all: Option<Vec<T>> = chunks.iter().map(|&chunk| of(chunk)).collect();
        all.ok_or_else(|| format!("a {datatype} value is out of range"))
    }
    let finite = |x: f32| Some(x).filter(|x| x.is_finite());
    Ok(match datatype {
        "INT64" => Values::Integers(each(bytes, datatype, |b| Some(i64::from_le_bytes(b)))?),
        "INT32" => Values::Integers(each(bytes, datatype, |b| Some(i32::from_le_bytes(b).into()))?),
        "INT16" => Values::Integers(each(bytes, datatype, |b| Some(i16::from_le_bytes(b).into()))?),
        "INT8" => Values::Integers(each(bytes, datatype, |b| Some(i8::from_le_bytes(b).into()))?),
        "UINT64" => Values::Integers(each(bytes, datatype, |b| u64::from_le_bytes(b).try_into().ok())?),
        "UINT32" => Values::Integers(each(bytes, datatype, |b| Some(u32::from_le_bytes(b).into()))?),
        "UINT16" => Values::Integers(each(bytes, datatype, |b| Some(u16::from_le_bytes(b).into()))?),
        "UINT8" => Values::Integers(each(bytes, datatype, |b| Some(u8::from_le_bytes(b).into()))?),
        "FP16" => Values::Numbers(each(bytes, datatype, |b| finite(f16::from_le_bytes(b).into()))?),
        "FP32" => Values::Numbers(each(bytes, datatype, |b| finite(f32::from_le_bytes(b)))?),
        "FP64" => Values::Numbers(each(bytes, datatype, |b| finite(f64::from_le_bytes(b) as f32))?),
        "BYTES" => Values::Texts(texts(bytes)?),
        other => return Err(unknown(other)),
    })
}

fn texts(mut bytes: &[u8]) -> Result<Vec<String>, String> {
    let mut texts = Vec::new();
    while !bytes.is_empty() {
        let length = bytes.split_off(..4).and_then(|length| length.try_into().ok()).map(u32::from_le_bytes);
        let text = length.and_then(|length| bytes.split_off(..length as usize));
        let text = text.ok_or("a text of datatype BYTES ends beyond the bytes of the tensor")?;
        texts.push(std::str::from_utf8(text).map_err(|e| format!("a BYTES value is not a text: {e}"))?.to_owned());
    }
    Ok(texts)
}

/// Values of an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum OutputData {
    /// Values of type INT64.
    Integers(Vec<i64>),
    /// Values of type FP32.
    Numbers(Vec<f32>),
    /// Values of type BYTES.
    Texts(Vec<String>),
}
