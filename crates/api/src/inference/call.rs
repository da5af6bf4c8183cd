//! Requests: converts tensors and parameters to retrievals.

use std::collections::BTreeSet;

use serde::Deserialize;
use utoipa::ToSchema;

use super::tensor::{InputTensor, Tensor};
use crate::body::object;
use crate::request::{OnDegradedName, PriorityName, on_degraded, priority, terms};
use crate::values::{List, nullable};
use sterling_core::error::{Error, Result};
use sterling_core::limits::{BATCH_REQUESTS_MAX, COLUMNS_MAX, FEATURES_MAX};
use sterling_core::request::{self, CallOptions, Features, Priority, Reading, Retrieve, User, Values};

/// Maximum tensors of a request: each feature with its counts and its weights.
const INPUTS_MAX: usize = 3 * FEATURES_MAX;
/// Maximum bytes of the filters of all rows, because each row is planned separately.
const FILTERS_BYTES_MAX: usize = 4 << 20;
/// Tensor of query vectors, in place of features.
const VECTOR: &str = "vector";
/// Name suffixes of tensors that describe another tensor.
const COUNTS: &str = ".counts";
const WEIGHTS: &str = ".weights";
/// Name prefix of column outputs.
pub(super) const COLUMNS: &str = "columns.";

/// Users as tensors, and the requested output tensors.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InferenceRequest {
    /// Request id, returned with the answer.
    #[serde(default)]
    id: Option<String>,
    /// Model name; some clients repeat it although the path contains it.
    #[serde(default)]
    model_name: Option<String>,
    /// Retrieval parameters for all users.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<InferenceParameters>)]
    parameters: InferenceParameters,
    /// Features of the users, or their vectors.
    #[schema(value_type = Vec<InputTensor>, min_items = 1)]
    inputs: List<InputTensor, INPUTS_MAX>,
    /// Requested output tensors; default: all except columns.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<Vec<RequestedOutput>>)]
    outputs: List<RequestedOutput, { COLUMNS_MAX + INPUTS_MAX }>,
}

/// Retrieval parameters, with the same meaning as in a retrieval.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct InferenceParameters {
    #[serde(default)]
    #[schema(minimum = 1, maximum = 100_000)]
    k: Option<usize>,
    #[serde(default)]
    #[schema(minimum = 1, maximum = 200_000)]
    candidates: Option<usize>,
    #[serde(default)]
    #[schema(minimum = 0.5, maximum = 0.999)]
    recall: Option<f64>,
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1_048_576)]
    probes: Option<usize>,
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<bool>)]
    exact: bool,
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<String>)]
    filter: String,
    #[serde(default)]
    #[schema(minimum = 1, maximum = 600_000)]
    timeout_ms: Option<u64>,
    /// Timeout in microseconds, as sent by Triton clients; 0 means none.
    #[serde(default)]
    timeout: Option<u64>,
    /// Name, or level as sent by Triton clients: 0 and 1 are `interactive`, others `batch`.
    #[serde(default)]
    #[schema(value_type = Option<PriorityName>)]
    priority: Option<PriorityLevel>,
    #[serde(default, deserialize_with = "on_degraded")]
    #[schema(value_type = Option<OnDegradedName>)]
    on_degraded: request::OnDegraded,
    /// True if all output tensors are returned as bytes after the JSON.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<bool>)]
    binary_data_output: bool,
}

/// Priority class in the queue.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged, expecting = "expected `interactive`, `batch` or an integer from 0")]
enum PriorityLevel {
    Level(u64),
    Named(#[serde(deserialize_with = "priority")] Priority),
}

impl InferenceParameters {
    fn terms(&self) -> Result<CallOptions> {
        let timeout_ms = match (self.timeout_ms, self.timeout.filter(|&micros| micros > 0)) {
            (Some(_), Some(_)) => {
                return Err(Error::invalid("parameters `timeout` and `timeout_ms`: got both, expected one of them"));
            }
            (timeout_ms, micros) => timeout_ms.or(micros.map(|micros| micros.div_ceil(1000))),
        };
        let priority = match self.priority {
            None | Some(PriorityLevel::Level(0 | 1)) => Priority::Interactive,
            Some(PriorityLevel::Level(_)) => Priority::Batch,
            Some(PriorityLevel::Named(priority)) => priority,
        };
        terms(timeout_ms, priority)
    }
}

/// A requested output tensor.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct RequestedOutput {
    /// `ids`, `scores`, `similarities`, `counts`, `tasks.TASK` or `columns.COLUMN`.
    name: String,
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<OutputParameters>)]
    parameters: OutputParameters,
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct OutputParameters {
    /// True if the values of this output are returned as bytes after the JSON.
    #[serde(default)]
    binary_data: Option<bool>,
}

/// Name of a requested output, and whether its values are bytes.
pub(super) type OutputName = (String, bool);

/// A parsed call.
pub struct Inference {
    /// Retrievals, one per row of the tensors.
    pub requests: Vec<(Retrieve, CallOptions)>,
    pub(super) id: Option<String>,
    /// Requested outputs by name; all except columns if the list is empty.
    pub(super) wanted: Vec<OutputName>,
    pub(super) is_binary: bool,
}

/// Parses a call of `model`: JSON and, if `header` gives its length, bytes of tensors after it. `features` are the names of the
/// model's features.
///
/// # Errors
/// `Invalid` with the tensor or the field, the received and the expected value.
pub fn inference(model: &str, body: &[u8], header: Option<usize>, features: &BTreeSet<&str>) -> Result<Inference> {
    let (json, mut binary) = match header {
        None => (body, &[][..]),
        Some(length) => body.split_at_checked(length).ok_or_else(|| {
            Error::invalid(format!("inference-header-content-length: got {length}, the body has {} bytes", body.len()))
        })?,
    };
    let InferenceRequest { id, model_name, parameters, inputs: List(inputs), outputs: List(outputs) } = object(json)?;
    if let Some(name) = model_name.filter(|name| name != model) {
        return Err(Error::invalid(format!("field `model_name`: got `{name}`, expected `{model}`, as in the path")));
    }
    let tensors = inputs.into_iter().map(|input| input.read(&mut binary)).collect::<Result<Vec<_>>>()?;
    if !binary.is_empty() {
        return Err(Error::invalid(format!("body: {} bytes follow the last tensor", binary.len())));
    }
    let is_binary = parameters.binary_data_output;
    let wanted: Vec<OutputName> =
        outputs.into_iter().map(|output| (output.name, output.parameters.binary_data.unwrap_or(is_binary))).collect();
    if let Some((_, (twice, _))) =
        wanted.iter().enumerate().find(|(n, (name, _))| wanted[..*n].iter().any(|(other, _)| other == name))
    {
        return Err(Error::invalid(format!("output `{twice}` is requested twice")));
    }
    let rows = tensors.first().map_or(0, |tensor| tensor.rows);
    if parameters.filter.len().saturating_mul(rows) > FILTERS_BYTES_MAX {
        return Err(Error::too_costly(format!(
            "parameter `filter`: {} bytes for each of {rows} rows, expected at most {FILTERS_BYTES_MAX} in all",
            parameters.filter.len()
        )));
    }
    let columns = wanted.iter().filter_map(|(name, _)| name.strip_prefix(COLUMNS)).map(str::to_owned).collect();
    let terms = parameters.terms()?;
    let reading = Reading { columns, on_degraded: parameters.on_degraded, ..Reading::default() };
    let retrieve = |user| Retrieve {
        filter: parameters.filter.clone(),
        k: parameters.k.unwrap_or(Retrieve::K_DEFAULT),
        candidates: parameters.candidates,
        recall: parameters.recall,
        probes: parameters.probes,
        exact: parameters.exact,
        reading: reading.clone(),
        ..Retrieve::of(user)
    };
    let requests = users(tensors, features)?.into_iter().map(|user| (retrieve(user), terms)).collect();
    Ok(Inference { requests, id, wanted, is_binary })
}

/// Returns the users of the rows of tensors.
fn users(tensors: Vec<Tensor>, features: &BTreeSet<&str>) -> Result<Vec<User>> {
    let rows = tensors.first().map_or(0, |tensor| tensor.rows);
    if rows == 0 || rows > BATCH_REQUESTS_MAX {
        return Err(Error::invalid(format!("inputs: got {rows} rows, expected 1 to {BATCH_REQUESTS_MAX}")));
    }
    let mut names = BTreeSet::new();
    for tensor in &tensors {
        if tensor.rows != rows {
            let (name, got) = (&tensor.name, tensor.rows);
            return Err(Error::invalid(format!(
                "input `{name}`: {got} rows, expected {rows} as in the inputs before it"
            )));
        }
        if !names.insert(tensor.name.as_str()) {
            return Err(Error::invalid(format!("input `{}` is given twice", tensor.name)));
        }
    }
    let is_of =
        |name: &str, end: &str| name.strip_suffix(end).is_some_and(|of| !features.contains(name) && names.contains(of));
    let find = |name: &str, end: &str| {
        let name = format!("{name}{end}");
        tensors.iter().find(|tensor| tensor.name == name && is_of(&name, end))
    };
    let mut users: Vec<User> = Vec::with_capacity(rows);
    if let [Tensor { name, values: Values::Numbers(values), width, .. }] = &tensors[..]
        && name == VECTOR
        && !features.contains(VECTOR)
    {
        users.extend((0..rows).map(|row| User::Vector(values[row * width..(row + 1) * width].to_vec())));
        return Ok(users);
    }
    let mut all: Vec<Features> = vec![Features::new(); rows];
    for tensor in &tensors {
        let name = &tensor.name;
        if is_of(name, COUNTS) || is_of(name, WEIGHTS) {
            continue;
        }
        if !features.contains(name.as_str()) {
            let known: Vec<&str> = features.iter().copied().collect();
            let known = if known.is_empty() { "`vector` alone, as FP32".into() } else { known.join(", ") };
            return Err(Error::invalid(format!("input `{name}`: no such feature, expected: {known}")));
        }
        let (counts, weights) = (find(name, COUNTS), find(name, WEIGHTS));
        for (row, features) in all.iter_mut().enumerate() {
            features.insert(name.clone(), values(tensor, counts, weights, row)?);
        }
    }
    users.extend(all.into_iter().map(User::Features));
    Ok(users)
}

/// Returns the values of a feature in a row.
fn values(tensor: &Tensor, counts: Option<&Tensor>, weights: Option<&Tensor>, row: usize) -> Result<Values> {
    let (name, width) = (&tensor.name, tensor.width);
    let count = match counts {
        None => width,
        Some(Tensor { values: Values::Integers(counts), width: 1, .. }) => {
            let count = usize::try_from(counts[row]).ok().filter(|count| *count <= width);
            count.ok_or_else(|| {
                Error::invalid(format!(
                    "input `{name}{COUNTS}`: got {} in row {row}, expected 0 to {width}",
                    counts[row]
                ))
            })?
        }
        Some(_) => return Err(Error::invalid(format!("input `{name}{COUNTS}`: expected one integer per row"))),
    };
    let range = row * width..row * width + count;
    match (&tensor.values, weights) {
        (Values::Integers(ids), Some(weights)) => match weights {
            Tensor { values: Values::Numbers(weights), width: wide, .. } if *wide == width => {
                Ok(Values::Weighted { ids: ids[range.clone()].to_vec(), weights: weights[range].to_vec() })
            }
            _ => Err(Error::invalid(format!("input `{name}{WEIGHTS}`: expected FP32 of the shape of `{name}`"))),
        },
        (_, Some(_)) => Err(Error::invalid(format!("input `{name}{WEIGHTS}`: only ids have weights"))),
        (Values::Integers(list), None) => Ok(Values::Integers(list[range].to_vec())),
        (Values::Numbers(list), None) => Ok(Values::Numbers(list[range].to_vec())),
        (Values::Texts(list), None) => Ok(Values::Texts(list[range].to_vec())),
        (Values::Weighted { .. }, None) => {
            Err(Error::internal("an input tensor has ids with weights, expected separate tensors"))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;

    fn read(body: &Value) -> Result<Inference> {
        inference("m", body.to_string().as_bytes(), None, &BTreeSet::from(["a"]))
    }

    fn with(parameters: &Value) -> Result<CallOptions> {
        let input = json!({"name": "a", "shape": [1, 1], "datatype": "INT64", "data": [1], "parameters": null});
        let body = json!({"inputs": [input], "parameters": parameters});
        read(&body).map(|call| call.requests[0].1)
    }

    #[test]
    fn null_is_as_if_it_were_left_out() {
        let input = json!({"name": "a", "shape": [1, 1], "datatype": "INT64", "data": [1], "parameters": null});
        let bare = json!({"inputs": [{"name": "a", "shape": [1, 1], "datatype": "INT64", "data": [1]}]});
        let nulls = json!({
            "id": null, "model_name": null, "parameters": null, "outputs": null, "inputs": [input],
        });
        let [bare, nulls] = [bare, nulls].map(|body| read(&body).unwrap());
        assert_eq!((bare.requests, bare.wanted), (nulls.requests, nulls.wanted));
        let nulls = json!({"k": null, "candidates": null, "recall": null, "probes": null, "exact": null, "filter": null,
            "timeout_ms": null, "timeout": null, "priority": null, "on_degraded": null, "binary_data_output": null});
        assert_eq!(with(&nulls).unwrap(), with(&json!({})).unwrap());
        let output = json!({"inputs": [input], "outputs": [{"name": "ids", "parameters": null}]});
        assert_eq!(read(&output).unwrap().wanted, [("ids".to_owned(), false)]);
    }

    #[test]
    fn priorities_and_timeouts_are_read_as_tritons_clients_send_them() {
        let terms = |timeout_ms: Option<u64>, priority| CallOptions {
            timeout: timeout_ms.map(Duration::from_millis),
            priority,
            ..CallOptions::default()
        };
        for (parameters, expected) in [
            (json!({"priority": 0}), terms(None, Priority::Interactive)),
            (json!({"priority": 1, "timeout": 0}), terms(None, Priority::Interactive)),
            (json!({"priority": 2, "timeout": 1_500_001}), terms(Some(1501), Priority::Batch)),
            (json!({"priority": "batch", "timeout_ms": 7}), terms(Some(7), Priority::Batch)),
        ] {
            assert_eq!(with(&parameters).unwrap(), expected, "{parameters}");
        }
        for (parameters, expected) in [
            (json!({"priority": -1}), "expected `interactive`, `batch` or an integer from 0"),
            (json!({"priority": "high"}), "expected `interactive`, `batch` or an integer from 0"),
            (json!({"timeout": 1, "timeout_ms": 1}), "got both"),
            (json!({"timeout": u64::MAX}), "field `timeout_ms`: got"),
            (json!({"on_degraded": "x"}), "unknown variant `x`"),
        ] {
            let error = with(&parameters).unwrap_err().to_string();
            assert!(error.contains(expected), "{parameters}: {error}");
        }
    }

    #[test]
    fn errors_of_ids_beyond_64_bits_name_the_largest_integer() {
        for datatype in ["UINT64", "INT64"] {
            let input = json!({"name": "a", "shape": [1, 2], "datatype": datatype, "data": [1, (1u64 << 63)]});
            let error = read(&json!({"inputs": [input]})).map(drop).unwrap_err().to_string();
            let expected =
                format!("got values that are not {datatype}, expected integers of at most 9223372036854775807");
            assert!(error.contains(&expected), "{error}");
        }
    }
}
