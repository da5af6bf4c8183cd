//! Answers: converts items to tensors, value by value, so that only the items and one chunk of the output are in memory.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::call::{COLUMNS, Inference, OutputName};
use super::tensor::OutputData;
use crate::entry::{Entry, Items, write_cell, write_integer, write_json, write_number};
use crate::reply::{PIECE_BYTES, PIECE_END_BYTES};
use crate::response::Served;
use sterling_core::error::{Error, Result};
use sterling_index::columns::Cell;

/// Approximate bytes per value.
const VALUE_BYTES: usize = 64;
/// Filler for rows with fewer items than others.
const NO_ITEM: i64 = -1;
/// Maximum number of column values per step of an [`InferenceSizer`], and JSON bytes after which a step ends.
pub(crate) const STEP_VALUES: usize = 16;
const STEP_BYTES: usize = 4096;

/// The best items of each user as tensors, `[users, items]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct InferenceResponse {
    /// Name of the model.
    pub model_name: String,
    /// Version that answered.
    pub model_version: String,
    /// Id of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Snapshot that answered.
    pub parameters: InferenceServed,
    /// Output tensors.
    pub outputs: Vec<OutputTensor>,
}

/// Snapshot that answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct InferenceServed {
    /// Digest of the snapshot's files.
    pub digest: String,
    /// Share of the items that could be searched, 0 to 1.
    pub coverage: f64,
    /// Position of the updates that are visible in the answer.
    pub position: u64,
}

/// A tensor of an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OutputTensor {
    /// Name of the tensor.
    pub name: String,
    /// `INT64`, `FP32` or `BYTES`.
    pub datatype: String,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Size of the values, if they are bytes after the JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<OutputSize>,
    /// Values, row-major.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<OutputData>,
}

/// Size of a tensor's values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OutputSize {
    /// Number of bytes of the values after the JSON.
    pub binary_data_size: usize,
}

/// An answer, written in chunks.
pub struct InferenceReply {
    rows: Vec<Items>,
    outputs: Vec<Output>,
    /// Largest number of items per row.
    width: usize,
    /// JSON before the first output.
    start: Vec<u8>,
    header_bytes: Option<usize>,
    at: Cursor,
}

/// Creates an answer in steps: the sizes of binary tensors, and of the JSON before them, depend on all values.
pub struct InferenceSizer {
    /// The answer; `None` after it was returned.
    reply: Option<InferenceReply>,
    /// Output and value whose bytes are counted next.
    at: (usize, usize),
    json_bytes: usize,
    /// Buffer for JSON that is only counted.
    piece: Vec<u8>,
}

/// An output tensor to be written.
struct Output {
    /// Everything but the values.
    tensor: OutputTensor,
    of: Source,
}

/// Source of a tensor's values.
enum Source {
    Ids,
    Counts,
    Scores,
    Similarities,
    Task(usize),
    /// Index of the column among the requested columns, for each row.
    Column(Vec<usize>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cursor {
    Start,
    /// JSON before the values of an output.
    About(usize),
    /// Value of an output as JSON: index of the output, index of the value.
    Value(usize, usize),
    /// Value of an output as bytes: index of the output, index of the value.
    Bytes(usize, usize),
    End,
}

impl InferenceSizer {
    /// Starts the answer to a call from the answers to its retrievals.
    ///
    /// # Errors
    /// `Invalid` for an unknown output; `Internal` for a problem in place of an answer.
    pub fn new(call: &Inference, served: &Served, entries: Vec<Entry>) -> Result<Self> {
        let invalid = |_| Error::internal("got a problem, expected items");
        let rows = entries
            .into_iter()
            .map(|entry| entry.0.map(|items| *items).map_err(invalid))
            .collect::<Result<Vec<_>>>()?;
        let width = rows.iter().map(|items| items.len()).max().unwrap_or(0);
        let all = || all_outputs(&rows).into_iter().map(|name| (name, call.is_binary)).collect();
        let wanted: Vec<OutputName> = if call.wanted.is_empty() { all() } else { call.wanted.clone() };
        let outputs = wanted.into_iter().map(|(name, is_binary)| Output::new(name, is_binary, &rows, width));
        let outputs = outputs.collect::<Result<Vec<_>>>()?;
        let response = InferenceResponse {
            model_name: served.model.clone(),
            model_version: served.version.to_string(),
            id: call.id.clone(),
            parameters: InferenceServed {
                digest: served.digest.clone(),
                coverage: served.coverage,
                position: served.position,
            },
            outputs: Vec::new(),
        };
        let mut start =
            serde_json::to_vec(&response).map_err(|e| Error::internal(format!("cannot encode an answer: {e}")))?;
        // The closing brackets of the list and of the object are written after the outputs.
        start.truncate(start.len() - b"]}".len());
        let reply = InferenceReply { rows, outputs, width, start, header_bytes: None, at: Cursor::Start };
        Ok(InferenceSizer { reply: Some(reply), at: (0, 0), json_bytes: 0, piece: Vec::new() })
    }

    /// Counts the bytes of some values. Returns the answer after the last one.
    pub fn step(&mut self) -> Option<InferenceReply> {
        let reply = self.reply.as_mut()?;
        let (n, value) = self.at;
        if let Some(output) = reply.outputs.get(n) {
            let all = if output.is_binary() { reply.values(output) } else { 0 };
            let end = if matches!(output.of, Source::Column(_)) { all.min(value + STEP_VALUES) } else { all };
            let bytes = reply.packed_bytes(output, value..end);
            if let Some(size) = &mut reply.outputs[n].tensor.parameters {
                size.binary_data_size += bytes;
            }
            self.at = if end == all { (n + 1, 0) } else { (n, end) };
            return None;
        }
        if reply.outputs.iter().any(Output::is_binary) {
            // Writes the JSON, and discards it.
            let most = self.json_bytes + STEP_BYTES;
            while !matches!(reply.at, Cursor::Bytes(..)) {
                if self.json_bytes >= most {
                    return None;
                }
                self.piece.clear();
                reply.advance(&mut self.piece);
                self.json_bytes += self.piece.len();
            }
            reply.header_bytes = Some(self.json_bytes);
            reply.at = Cursor::Start;
        }
        self.reply.take()
    }
}

impl InferenceReply {
    /// Returns the bytes of the JSON, if bytes of tensors follow it.
    pub fn header_bytes(&self) -> Option<usize> {
        self.header_bytes
    }

    /// Returns the number of items of all rows.
    pub fn len(&self) -> usize {
        self.rows.iter().map(|items| items.len()).sum()
    }

    /// Returns whether no row has items.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether all chunks are written.
    pub fn is_done(&self) -> bool {
        self.at == Cursor::End
    }

    /// Returns the number of values of an output.
    fn values(&self, output: &Output) -> usize {
        let of_row = if matches!(output.of, Source::Counts) { 1 } else { self.width };
        self.rows.len() * of_row
    }

    fn advance(&mut self, out: &mut Vec<u8>) {
        self.at = match self.at {
            Cursor::Start => {
                out.extend_from_slice(&self.start);
                Cursor::About(0)
            }
            Cursor::About(n) => self.about(n, out),
            Cursor::Value(n, value) => {
                let output = &self.outputs[n];
                if value == self.values(output) {
                    out.extend_from_slice(b"]}");
                    Cursor::About(n + 1)
                } else {
                    if value > 0 {
                        out.push(b',');
                    }
                    self.write(output, value, out);
                    Cursor::Value(n, value + 1)
                }
            }
            Cursor::Bytes(n, value) => match self.outputs.get(n) {
                None => Cursor::End,
                Some(output) if !output.is_binary() || value == self.values(output) => Cursor::Bytes(n + 1, 0),
                Some(output) => {
                    self.pack(output, value, out);
                    Cursor::Bytes(n, value + 1)
                }
            },
            Cursor::End => Cursor::End,
        }
    }

    fn about(&self, n: usize, out: &mut Vec<u8>) -> Cursor {
        let Some(output) = self.outputs.get(n) else {
            out.extend_from_slice(b"]}");
            let is_binary = self.outputs.iter().any(Output::is_binary);
            return if is_binary { Cursor::Bytes(0, 0) } else { Cursor::End };
        };
        if n > 0 {
            out.push(b',');
        }
        write_json(out, &output.tensor);
        if output.is_binary() {
            return Cursor::About(n + 1);
        }
        out.pop();
        out.extend_from_slice(b",\"data\":[");
        Cursor::Value(n, 0)
    }

    /// Returns the bytes of values of an output in binary form.
    fn packed_bytes(&self, output: &Output, values: Range<usize>) -> usize {
        match output.of {
            Source::Counts | Source::Ids => values.len() * size_of::<i64>(),
            Source::Scores | Source::Similarities | Source::Task(_) => values.len() * size_of::<f32>(),
            Source::Column(_) => {
                let mut bytes = values.len() * size_of::<u32>();
                values.for_each(|value| with_text(&self.cell(output, value), |text| bytes += text.len()));
                bytes
            }
        }
    }

    /// Returns the row and the index within it of a value, and whether there is an item; shorter rows are padded with -1, 0 or an
    /// empty text.
    fn item(&self, value: usize) -> (&Items, usize, bool) {
        let (row, at) = (value / self.width.max(1), value % self.width.max(1));
        let items = &self.rows[row];
        (items, at, at < items.len())
    }

    fn integer(&self, output: &Output, value: usize) -> Option<i64> {
        match output.of {
            Source::Counts => Some(self.rows[value].len() as i64),
            Source::Ids => {
                let (items, at, is_there) = self.item(value);
                Some(if is_there { items.ranked.ids[at].0 } else { NO_ITEM })
            }
            _ => None,
        }
    }

    fn number(&self, output: &Output, value: usize) -> Option<f32> {
        let (items, at, is_there) = self.item(value);
        let numbers = match output.of {
            Source::Scores => &items.ranked.scores,
            Source::Similarities => &items.ranked.similarities,
            Source::Task(task) => items.task(task),
            Source::Ids | Source::Counts | Source::Column(_) => return None,
        };
        Some(if is_there { numbers[at] } else { 0.0 })
    }

    fn cell(&self, output: &Output, value: usize) -> Cell<'_> {
        let Source::Column(places) = &output.of else { return Cell::Missing };
        let (items, at, is_there) = self.item(value);
        let place = places[value / self.width.max(1)];
        if is_there { items.cell(place, at) } else { Cell::Missing }
    }

    /// Writes a value as JSON.
    fn write(&self, output: &Output, value: usize, out: &mut Vec<u8>) {
        if let Some(integer) = self.integer(output, value) {
            write_integer(out, integer);
        } else if let Some(number) = self.number(output, value) {
            write_number(out, number);
        } else {
            with_text(&self.cell(output, value), |text| write_json(out, text));
        }
    }

    /// Writes a value as bytes, little-endian; a text follows its length.
    fn pack(&self, output: &Output, value: usize, out: &mut Vec<u8>) {
        if let Some(integer) = self.integer(output, value) {
            out.extend_from_slice(&integer.to_le_bytes());
        } else if let Some(number) = self.number(output, value) {
            out.extend_from_slice(&number.to_le_bytes());
        } else {
            with_text(&self.cell(output, value), |text| {
                out.extend_from_slice(&(text.len() as u32).to_le_bytes());
                out.extend_from_slice(text.as_bytes());
            });
        }
    }
}

impl Iterator for InferenceReply {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        if self.is_done() {
            return None;
        }
        let values: usize = self.outputs.iter().map(|output| self.values(output)).sum();
        let mut out = Vec::with_capacity((VALUE_BYTES * values).clamp(PIECE_END_BYTES, PIECE_BYTES + PIECE_END_BYTES));
        while out.len() < PIECE_BYTES && !self.is_done() {
            self.advance(&mut out);
        }
        Some(out)
    }
}

impl Output {
    fn new(name: String, is_binary: bool, rows: &[Items], width: usize) -> Result<Self> {
        let (of, datatype) = Source::named(&name, rows)?;
        let counts = matches!(of, Source::Counts);
        let shape = if counts { vec![rows.len()] } else { vec![rows.len(), width] };
        let parameters = is_binary.then_some(OutputSize { binary_data_size: 0 });
        Ok(Output { tensor: OutputTensor { name, datatype: datatype.into(), shape, parameters, data: None }, of })
    }

    /// Returns whether the values are bytes after the JSON.
    fn is_binary(&self) -> bool {
        self.tensor.parameters.is_some()
    }
}

impl Source {
    /// Returns the source of the output with this name, and its data type.
    fn named(name: &str, rows: &[Items]) -> Result<(Self, &'static str)> {
        if let Some(column) = name.strip_prefix(COLUMNS) {
            // A column requested by its number has that number as its name.
            let place = |items: &Items| items.columns().iter().position(|key| key.name == column);
            let places: Option<Vec<usize>> = rows.iter().map(place).collect();
            let none = || {
                Error::invalid(format!(
                    "output `{name}`: the answer has no such column, expected the name of a requested column"
                ))
            };
            return Ok((Source::Column(places.ok_or_else(none)?), "BYTES"));
        }
        Ok(match name {
            "ids" => (Source::Ids, "INT64"),
            "counts" => (Source::Counts, "INT64"),
            "scores" => (Source::Scores, "FP32"),
            "similarities" => (Source::Similarities, "FP32"),
            _ => {
                let tasks = rows.first().map(|items| items.tasks()).unwrap_or_default();
                let task = name.strip_prefix("tasks.").and_then(|name| tasks.iter().position(|task| task.name == name));
                let task = task.ok_or_else(|| {
                    let known = all_outputs(rows).join(", ");
                    Error::invalid(format!("output `{name}`: expected one of {known}, or `{COLUMNS}COLUMN`"))
                })?;
                (Source::Task(task), "FP32")
            }
        })
    }
}

fn all_outputs(rows: &[Items]) -> Vec<String> {
    let tasks = rows.first().map(|items| items.tasks()).unwrap_or_default();
    let tasks = tasks.into_iter().map(|task| format!("tasks.{}", task.name));
    ["ids", "scores", "similarities", "counts"].map(str::to_owned).into_iter().chain(tasks).collect()
}

/// Passes the values of an item as text: a text unchanged, other values as JSON, empty if missing.
fn with_text(cell: &Cell<'_>, mut reported: impl FnMut(&str)) {
    match cell {
        Cell::Missing => reported(""),
        Cell::Text(text) => reported(text),
        other => {
            let mut out = Vec::new();
            write_cell(&mut out, other);
            reported(std::str::from_utf8(&out).unwrap_or_default());
        }
    }
}
