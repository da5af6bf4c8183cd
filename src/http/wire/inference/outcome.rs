//! Answers: items become tensors.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::call::{COLUMNS, Inference, Wanted};
use super::tensor::OutputData;
use crate::columns::Cell;
use crate::error::{Error, Result};
use crate::http::wire::entry::{Entry, Items, write_cell};
use crate::http::wire::response::Served;

/// What stands in an item's place where a row has fewer than others.
const NO_ITEM: i64 = -1;

/// The best items of each user as tensors, `[users, items]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct InferenceResponse {
    /// The model's name.
    pub model_name: String,
    /// The version that answered.
    pub model_version: String,
    /// That of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Which snapshot answered.
    pub parameters: InferenceServed,
    /// The tensors.
    pub outputs: Vec<OutputTensor>,
}

/// Which snapshot answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct InferenceServed {
    /// The digest of the snapshot's bytes.
    pub digest: String,
    /// The share of the items that was there to be searched, 0 to 1.
    pub coverage: f64,
    /// The position of the updates that the answer saw.
    pub position: u64,
}

/// A tensor of an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OutputTensor {
    /// What it is.
    pub name: String,
    /// `INT64`, `FP32` or `BYTES`.
    pub datatype: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Of one whose values are bytes behind the JSON: how many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<OutputSize>,
    /// Its values, row after row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<OutputData>,
}

/// How many bytes a tensor's values are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OutputSize {
    /// Bytes behind the JSON.
    pub binary_data_size: usize,
}

/// An answer as it is sent.
pub struct InferenceAnswer {
    /// JSON, and bytes behind it where there are some.
    pub body: Vec<u8>,
    /// Bytes of JSON, where others stand behind them.
    pub header: Option<usize>,
}

/// The answer to a call from those to its retrievals, one an entry.
///
/// # Errors
/// `Invalid` for an output that is not there; `Internal` for a problem in place of an answer.
pub fn inference_answer(call: &Inference, served: &Served, entries: Vec<Entry>) -> Result<InferenceAnswer> {
    let wrong = |_| Error::internal("a problem in place of items");
    let rows = entries.into_iter().map(|entry| entry.0.map_err(wrong)).collect::<Result<Vec<_>>>()?;
    let rows: Vec<&Items> = rows.iter().map(|items| &**items).collect();
    let all = || all_outputs(&rows).into_iter().map(|name| (name, call.is_binary)).collect();
    let wanted: Vec<Wanted> = if call.wanted.is_empty() { all() } else { call.wanted.clone() };
    let (mut outputs, mut binary) = (Vec::with_capacity(wanted.len()), Vec::new());
    for (name, is_binary) in wanted {
        let (data, shape) = output(&name, &rows)?;
        let datatype = data.datatype().to_owned();
        let parameters = is_binary.then(|| OutputSize { binary_data_size: data.pack(&mut binary) });
        outputs.push(OutputTensor { name, datatype, shape, parameters, data: (!is_binary).then_some(data) });
    }
    let has_binary = outputs.iter().any(|output| output.parameters.is_some());
    let response = InferenceResponse {
        model_name: served.model.clone(),
        model_version: served.version.to_string(),
        id: call.id.clone(),
        parameters: InferenceServed {
            digest: served.digest.clone(),
            coverage: served.coverage,
            position: served.position,
        },
        outputs,
    };
    let mut body = serde_json::to_vec(&response).map_err(|e| Error::internal(format!("an answer: {e}")))?;
    let header = has_binary.then_some(body.len());
    body.extend_from_slice(&binary);
    Ok(InferenceAnswer { body, header })
}

fn all_outputs(rows: &[&Items]) -> Vec<String> {
    let tasks = rows.first().map(|items| items.tasks()).unwrap_or_default();
    let tasks = tasks.into_iter().map(|task| format!("tasks.{}", task.name));
    ["ids", "scores", "similarities", "counts"].map(str::to_owned).into_iter().chain(tasks).collect()
}

/// The values of an output and their shape; rows with fewer items than the longest end with -1, 0 or an empty text.
fn output(name: &str, rows: &[&Items]) -> Result<(OutputData, Vec<usize>)> {
    let width = rows.iter().map(|items| items.len()).max().unwrap_or(0);
    let shape = vec![rows.len(), width];
    let numbers = |of: &dyn Fn(&Items) -> Vec<f32>| {
        let row = |items: &&Items| {
            let mut row = of(items);
            row.resize(width, 0.0);
            row
        };
        OutputData::Numbers(rows.iter().flat_map(row).collect())
    };
    if let Some(column) = name.strip_prefix(COLUMNS) {
        return Ok((OutputData::Texts(texts(column, rows, width)?), shape));
    }
    let data = match name {
        "ids" => {
            let row = |items: &&Items| {
                let mut row: Vec<i64> = items.ranked.ids.iter().map(|id| id.0).collect();
                row.resize(width, NO_ITEM);
                row
            };
            OutputData::Integers(rows.iter().flat_map(row).collect())
        }
        "counts" => {
            let counts = rows.iter().map(|items| items.len() as i64).collect();
            return Ok((OutputData::Integers(counts), vec![rows.len()]));
        }
        "scores" => numbers(&|items| items.ranked.scores.clone()),
        "similarities" => numbers(&|items| items.ranked.similarities.clone()),
        _ => {
            let tasks = rows.first().map(|items| items.tasks()).unwrap_or_default();
            let task = name.strip_prefix("tasks.").and_then(|name| tasks.iter().position(|task| task.name == name));
            let task = task.ok_or_else(|| {
                let known = all_outputs(rows).join(", ");
                Error::invalid(format!("output `{name}`: expected one of {known}, or `{COLUMNS}COLUMN`"))
            })?;
            numbers(&|items| items.task(task).to_vec())
        }
    };
    Ok((data, shape))
}

/// The values of a column as texts: a text as it is, all else as JSON, and an empty one where it is missing.
fn texts(column: &str, rows: &[&Items], width: usize) -> Result<Vec<String>> {
    let mut texts = Vec::with_capacity(rows.len() * width);
    for items in rows {
        let columns = items.columns();
        // A column may be asked for by its number too, and stands in its place then.
        let asked = columns.iter().position(|key| key.name == column);
        let place =
            asked.ok_or_else(|| Error::invalid(format!("output `{COLUMNS}{column}`: expected the column's name")))?;
        for row in 0..width {
            texts.push(match items.len() > row {
                true => text(&items.cell(place, row)),
                false => String::new(),
            });
        }
    }
    Ok(texts)
}

fn text(cell: &Cell<'_>) -> String {
    match cell {
        Cell::Missing => String::new(),
        Cell::Text(text) => (*text).to_owned(),
        other => {
            let mut out = Vec::new();
            write_cell(&mut out, other);
            String::from_utf8(out).unwrap_or_default()
        }
    }
}
