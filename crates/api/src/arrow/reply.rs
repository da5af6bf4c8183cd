//! Answers as an Arrow IPC stream, one record batch at a time.
//!
//! A row is an item. Columns are named as the paths in JSON: `id`, `score`, `similarity`, `tasks.{task}`, `columns.{column}`. For
//! a list of requests, the first column is `request`, the index of the request that the item answers. All other JSON fields are
//! in the schema's metadata under `sterling`, as JSON.

use std::collections::HashMap;
use std::iter::once;
use std::ops::Range;
use std::sync::Arc;

use arrow_array::builder::{Float64Builder, Int64Builder, ListBuilder, StringBuilder};
use arrow_array::{ArrayRef, Float32Array, Int64Array, NullArray, RecordBatch, RecordBatchOptions, UInt32Array};
use arrow_ipc::writer::StreamWriter;
use arrow_schema::ArrowError;
use arrow_schema::{DataType, Field, Schema, SchemaRef};

use super::super::entry::{CellKind, Entry, Items, OtherFields, write_json};
use super::super::reply::Reply;
use sterling_core::error::{Error, Result};
use sterling_core::quota::Memory;
use sterling_index::columns::Cell;

/// Maximum rows per record batch.
pub(crate) const ROWS_MAX: usize = 4096;
/// Bytes of columns after which a record batch ends.
pub(crate) const BATCH_BYTES: usize = 256 << 10;
/// Fixed bytes per value in a record batch.
const VALUE_BYTES: usize = 8;
/// Maximum number of simultaneous copies of a record batch: its arrays, and the chunks that are written and sent.
pub(crate) const BATCH_COPIES: usize = 3;
/// Maximum bytes of a record batch's header per column, and without its columns.
const HEADER_BYTES: usize = 256;

/// Media type of an Arrow stream.
pub const ARROW_STREAM: &str = "application/vnd.apache.arrow.stream";

/// A reply written as Arrow in chunks: the schema with the first record batch, the other batches, the end.
pub struct ArrowReply {
    writer: StreamWriter<Vec<u8>>,
    schema: SchemaRef,
    columns: Vec<(String, CellKind)>,
    entries: Vec<Entry>,
    is_list: bool,
    /// Entry and row to write next.
    at: (usize, usize),
    is_done: bool,
}

/// Rows of an entry within one record batch.
struct Part<'a> {
    request: u32,
    items: &'a Items,
    rows: Range<usize>,
}

impl ArrowReply {
    /// Creates the stream of a reply to the call with this id.
    ///
    /// # Errors
    /// `Unavailable` for an unreadable answer of a shard; `Internal` for a schema that Arrow cannot represent; errors of
    /// [`Memory::add`].
    pub fn new(reply: Reply, request_id: &str, memory: &Memory) -> Result<Self> {
        let entries = reply.entries.into_iter().map(|entry| entry.by_columns(memory)).collect::<Result<Vec<_>>>()?;
        let read = entries.iter().filter_map(|entry| entry.0.as_ref().ok());
        let read = read.filter(|items| matches!(items.rest, OtherFields::Read(_)));
        let read_bytes = read.map(|items| items.row_bytes()).max().unwrap_or(0);
        // The size of items from shards is known only after they are parsed.
        memory.add(if read_bytes > 0 { BATCH_COPIES * (BATCH_BYTES + read_bytes) } else { 0 } as u64)?;
        let mut text = Vec::new();
        write_json(&mut text, &reply.served);
        text.pop();
        text.extend_from_slice(b",\"request_id\":");
        write_json(&mut text, request_id);
        write_metadata(&entries, reply.is_list, &mut text);
        let text = String::from_utf8(text)
            .map_err(|e| Error::internal(format!("cannot encode the metadata of an answer: {e}")))?;
        let (mut tasks, mut columns) = (Vec::new(), Vec::<(String, CellKind)>::new());
        for items in entries.iter().filter_map(|entry| entry.0.as_ref().ok()) {
            for task in items.tasks().into_iter().filter(|task| !tasks.contains(&task.name)).collect::<Vec<_>>() {
                tasks.push(task.name.clone());
            }
            for (place, key) in items.columns().into_iter().enumerate() {
                let kind = items.kind(place);
                match columns.iter_mut().find(|(name, _)| *name == key.name) {
                    Some((_, known)) => *known = known.with(kind),
                    None => columns.push((key.name.clone(), kind)),
                }
            }
        }
        let field = |name: &str, kind| Field::new(name, kind, false);
        let fields: Vec<Field> = reply
            .is_list
            .then(|| field("request", DataType::UInt32))
            .into_iter()
            .chain([field("id", DataType::Int64), field("score", DataType::Float32)])
            .chain(once(field("similarity", DataType::Float32)))
            .chain(tasks.iter().map(|task| field(&format!("tasks.{task}"), DataType::Float32)))
            .chain(columns.iter().map(|(name, kind)| Field::new(format!("columns.{name}"), data_type(*kind), true)))
            .collect();
        let metadata = HashMap::from([("sterling".to_owned(), text)]);
        let schema = Arc::new(Schema::new_with_metadata(fields, metadata));
        let writer = StreamWriter::try_new(Vec::new(), &schema).map_err(broken)?;
        Ok(ArrowReply { writer, schema, columns, entries, is_list: reply.is_list, at: (0, 0), is_done: false })
    }

    /// Returns the rows of the next record batch.
    fn parts(&mut self) -> Vec<Part<'_>> {
        let (mut parts, mut room, mut bytes) = (Vec::new(), ROWS_MAX, 0);
        let (mut entry, mut row) = self.at;
        while let Some(Entry(answer)) = self.entries.get(entry).filter(|_| room > 0 && bytes < BATCH_BYTES) {
            let rows = answer.as_ref().map_or(0, |items| items.len());
            let mut end = rows.min(row + room);
            if let Ok(items) = answer.as_ref()
                && row < end
            {
                end = until_full(items, row..end, &mut bytes);
                parts.push(Part { request: entry as u32, items, rows: row..end });
            }
            room -= end - row;
            (entry, row) = if end == rows { (entry + 1, 0) } else { (entry, end) };
        }
        self.at = (entry, row);
        parts
    }

    fn advance(&mut self) -> Result<Vec<u8>> {
        let (schema, columns, is_list) = (self.schema.clone(), self.columns.clone(), self.is_list);
        let parts = self.parts();
        if parts.is_empty() {
            self.is_done = true;
            self.writer.finish().map_err(broken)?;
        } else {
            let batch = batch(&parts, schema, &columns, is_list)?;
            let header_bytes = HEADER_BYTES * (1 + batch.num_columns());
            self.writer.get_mut().reserve_exact(batch.get_array_memory_size() + header_bytes);
            self.writer.write(&batch).map_err(broken)?;
            self.is_done = self.entries.get(self.at.0..).is_none_or(|rest| rest.iter().all(|entry| entry.len() == 0));
            if self.is_done {
                self.writer.finish().map_err(broken)?;
            }
        }
        Ok(std::mem::take(self.writer.get_mut()))
    }

    /// Returns whether all chunks are written.
    pub fn is_done(&self) -> bool {
        self.is_done
    }
}

impl Iterator for ArrowReply {
    type Item = Result<Vec<u8>>;

    fn next(&mut self) -> Option<Result<Vec<u8>>> {
        if self.is_done {
            return None;
        }
        let piece = self.advance();
        self.is_done |= piece.is_err();
        Some(piece)
    }
}

/// Returns the row at which a record batch is full; `bytes` is the size of the batch and is updated. A batch has at
/// least one row.
fn until_full(items: &Items, rows: Range<usize>, bytes: &mut usize) -> usize {
    let columns = items.columns().len();
    if columns == 0 {
        return rows.end;
    }
    // If even the widest rows fit, their sizes need not be computed.
    let beside = columns * VALUE_BYTES;
    let most = (beside + items.row_bytes()).saturating_mul(rows.len());
    if *bytes + most <= BATCH_BYTES {
        *bytes += most;
        return rows.end;
    }
    for row in rows.clone() {
        *bytes += beside + (0..columns).map(|column| items.cell(column, row).bytes()).sum::<usize>();
        if *bytes >= BATCH_BYTES {
            return row + 1;
        }
    }
    rows.end
}

/// Writes the JSON of the answers without their items, for the metadata.
fn write_metadata(entries: &[Entry], is_list: bool, out: &mut Vec<u8>) {
    if !is_list {
        if let Some(Entry(Ok(items))) = entries.first() {
            items.rest(out);
        }
        return out.push(b'}');
    }
    out.extend_from_slice(b",\"results\":[");
    for (n, Entry(answer)) in entries.iter().enumerate() {
        out.extend_from_slice(if n == 0 { b"{" } else { b",{" });
        match answer {
            Ok(items) => {
                out.extend_from_slice(b"\"rows\":");
                write_json(out, &items.len());
                items.rest(out);
            }
            Err(problem) => {
                out.extend_from_slice(b"\"problem\":");
                write_json(out, problem);
            }
        }
        out.push(b'}');
    }
    out.extend_from_slice(b"]}");
}

fn data_type(kind: CellKind) -> DataType {
    let list = |item| DataType::List(Arc::new(Field::new_list_field(item, true)));
    match kind {
        CellKind::Nothing => DataType::Null,
        CellKind::Integer => DataType::Int64,
        CellKind::Integers => list(DataType::Int64),
        CellKind::Float => DataType::Float64,
        CellKind::Text => DataType::Utf8,
        CellKind::Texts => list(DataType::Utf8),
    }
}

fn batch(parts: &[Part<'_>], schema: SchemaRef, columns: &[(String, CellKind)], is_list: bool) -> Result<RecordBatch> {
    let count = parts.iter().map(|part| part.rows.len()).sum();
    // Arrays are allocated once, without spare capacity.
    let numbers = |of: &dyn Fn(&Items) -> &[f32]| -> ArrayRef {
        let mut all = Vec::with_capacity(count);
        parts.iter().for_each(|part| all.extend_from_slice(&of(part.items)[part.rows.clone()]));
        Arc::new(Float32Array::from(all))
    };
    let mut arrays: Vec<ArrayRef> = Vec::with_capacity(schema.fields().len());
    if is_list {
        let mut requests = Vec::with_capacity(count);
        parts.iter().for_each(|part| requests.extend(std::iter::repeat_n(part.request, part.rows.len())));
        arrays.push(Arc::new(UInt32Array::from(requests)));
    }
    let mut ids = Vec::with_capacity(count);
    parts.iter().for_each(|part| ids.extend(part.items.ranked.ids[part.rows.clone()].iter().map(|id| id.0)));
    arrays.push(Arc::new(Int64Array::from(ids)));
    arrays.push(numbers(&|items| &items.ranked.scores));
    arrays.push(numbers(&|items| &items.ranked.similarities));
    let tasks = schema.fields().len() - arrays.len() - columns.len();
    for task in 0..tasks {
        arrays.push(numbers(&|items| items.task(task)));
    }
    for (name, kind) in columns {
        let cells = parts.iter().flat_map(|part| {
            let place = part.items.columns().iter().position(|key| key.name == *name);
            part.rows.clone().map(move |row| place.map_or(Cell::Missing, |place| part.items.cell(place, row)))
        });
        arrays.push(array(*kind, count, cells)?);
    }
    let options = RecordBatchOptions::new().with_row_count(Some(count));
    RecordBatch::try_new_with_options(schema, arrays, &options).map_err(broken)
}

/// Builds the array of a column; values of another kind are missing. The values are counted first, so that the array
/// is allocated once, without spare capacity.
fn array<'a>(kind: CellKind, count: usize, cells: impl Iterator<Item = Cell<'a>> + Clone) -> Result<ArrayRef> {
    Ok(match kind {
        CellKind::Nothing => Arc::new(NullArray::new(count)),
        CellKind::Integer => {
            let mut values = Int64Builder::with_capacity(count);
            for cell in cells {
                values.append_option(match cell {
                    Cell::Integer(x) => Some(x),
                    _ => None,
                });
            }
            Arc::new(values.finish())
        }
        CellKind::Float => {
            let mut values = Float64Builder::with_capacity(count);
            for cell in cells {
                values.append_option(match cell {
                    Cell::Float(x) => Some(x),
                    Cell::Integer(x) => Some(x as f64),
                    _ => None,
                });
            }
            Arc::new(values.finish())
        }
        CellKind::Text => {
            let (_, bytes) = texts_in(cells.clone())?;
            let mut values = StringBuilder::with_capacity(count, bytes);
            for cell in cells {
                match cell {
                    Cell::Text(text) => values.append_value(text),
                    _ => values.append_null(),
                }
            }
            Arc::new(values.finish())
        }
        CellKind::Integers => {
            let integers = cells.clone().map(|cell| match cell {
                Cell::Integer(_) => 1,
                Cell::Integers(many) => many.len(),
                _ => 0,
            });
            let mut lists = ListBuilder::with_capacity(Int64Builder::with_capacity(integers.sum()), count);
            for cell in cells {
                match &cell {
                    Cell::Integer(x) => lists.values().append_value(*x),
                    Cell::Integers(many) => lists.values().append_slice(many),
                    _ => {}
                }
                lists.append(matches!(cell, Cell::Integer(_) | Cell::Integers(_)));
            }
            Arc::new(lists.finish())
        }
        CellKind::Texts => {
            let (texts, bytes) = texts_in(cells.clone())?;
            let mut lists = ListBuilder::with_capacity(StringBuilder::with_capacity(texts, bytes), count);
            for cell in cells {
                match &cell {
                    Cell::Text(text) => lists.values().append_value(text),
                    Cell::Texts(many) => {
                        many.iter().for_each(|text| lists.values().append_value(text));
                    }
                    _ => {}
                }
                lists.append(matches!(cell, Cell::Text(_) | Cell::Texts(_)));
            }
            Arc::new(lists.finish())
        }
    })
}

/// Returns the number of texts in cells and the sum of their lengths.
///
/// # Errors
/// `TooCostly` if the 31-bit offsets of Arrow cannot address them.
fn texts_in<'a>(cells: impl Iterator<Item = Cell<'a>>) -> Result<(usize, usize)> {
    let (texts, bytes) = cells.fold((0, 0), |(count, bytes), cell| match cell {
        Cell::Text(text) => (count + 1, bytes + text.len()),
        Cell::Texts(many) => (count + many.len(), bytes + many.iter().map(|text| text.len()).sum::<usize>()),
        _ => (count, bytes),
    });
    if texts.max(bytes) > i32::MAX as usize {
        return Err(Error::too_costly(format!(
            "texts of one column take more than {} bytes in a record batch",
            i32::MAX
        )));
    }
    Ok((texts, bytes))
}

fn broken(error: ArrowError) -> Error {
    Error::internal(format!("cannot encode an answer as Arrow: {error}"))
}
