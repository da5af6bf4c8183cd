//! Reader of a body in Arrow's IPC stream format, one record batch at a time.
//!
//! The header of a message is a FlatBuffer, whose tables may be anywhere and may be shared, and which gives the location of
//! values in the message's body. Arrow's reader trusts the offsets and sizes in a header. Each message is therefore
//! validated first: few tables are shared, every buffer is within the body without overlap, and no count exceeds the
//! available bytes. Types that expand beyond their bytes (dictionaries, run-end encoding, list views, compressed
//! buffers) are rejected. `hold` reserves memory for rows before they are created.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use arrow_array::builder::StringBuilder;
use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, ListArray, RecordBatch, RecordBatchOptions};
use arrow_buffer::{Buffer, OffsetBuffer};
use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::read_record_batch;
use arrow_ipc::{self as ipc, MessageHeader, root_as_message_with_opts};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use flatbuffers::VerifierOptions;

use sterling_core::error::{Error, Result};
use sterling_core::limits::FEATURES_MAX;
use sterling_storage::arrow::ArrowColumn;

/// Marker at the start of each message.
const CONTINUATION: [u8; 4] = [0xff; 4];
/// Bytes of the marker and the header length.
const PREFIX_BYTES: usize = 8;
/// Longest header of a message, in bytes.
const DESCRIPTION_BYTES_MAX: usize = 1 << 20;
/// Maximum visits per byte of a header, and minimum budget for short headers; more visits mean shared tables.
const VISITS_MAX: usize = 8;
const VISITS_MIN: usize = 4096;
/// Maximum number of columns: features with their weights, and a few other columns.
const COLUMNS_MAX: usize = 2 * FEATURES_MAX + 16;
/// Memory per value in addition to its numbers or texts, and per text, in bytes.
const CELL_BYTES: usize = 128;
const TEXT_BYTES: usize = 32;

/// Callback that reserves further bytes for the rows of a body; its error rejects the body.
pub(crate) type Reserve<'a> = &'a mut dyn FnMut(usize) -> Result<()>;

/// A stream whose schema has been read.
#[derive(Debug)]
pub(super) struct Stream {
    rest: Buffer,
    /// Schema of the messages.
    sent: SchemaRef,
    /// Schema of the batches after conversion to plain types.
    plain: SchemaRef,
    /// Number of messages so far.
    messages: usize,
    /// Number of rows so far, and their maximum.
    rows: usize,
    rows_max: usize,
}

/// A message: its header, and the bytes of its arrays.
struct Message {
    description: Buffer,
    body: Buffer,
}

impl Stream {
    /// Reads the schema of a stream with at most `rows_max` rows.
    ///
    /// # Errors
    /// `Invalid` with the location in the stream; `Unsupported` with a column of an unsupported type.
    pub(super) fn open(body: &[u8], rows_max: usize) -> Result<Self> {
        if body.starts_with(b"ARROW1") {
            return Err(Error::invalid("body: a file of Arrow's IPC format, expected a stream of it"));
        }
        let mut rest = Buffer::from(body);
        let schema = schema(&mut rest).map_err(|e| e.within("body: message 1"))?;
        if schema.fields().len() > COLUMNS_MAX {
            let count = schema.fields().len();
            return Err(Error::invalid(format!("body: {count} columns, expected at most {COLUMNS_MAX}")));
        }
        let mut names = BTreeSet::new();
        for field in schema.fields() {
            if !names.insert(field.name()) {
                return Err(Error::invalid(format!("column `{}`: it occurs twice, expected once", field.name())));
            }
        }
        let plain = schema.fields().iter().map(|field| {
            let kind = plain(field.data_type()).ok_or_else(|| unread(field))?;
            Ok(Field::new(field.name(), kind, true))
        });
        let plain = Schema::new_with_metadata(plain.collect::<Result<Vec<_>>>()?, schema.metadata().clone());
        Ok(Stream { rest, sent: Arc::new(schema), plain: Arc::new(plain), messages: 1, rows: 0, rows_max })
    }

    /// Returns the schema of the batches, with its metadata.
    pub(super) fn schema(&self) -> &SchemaRef {
        &self.plain
    }

    /// Returns the next record batch, converted to plain types, and the index of its first row; `None` at the end.
    ///
    /// # Errors
    /// `Invalid` with the location in the stream; errors of `hold`.
    pub(super) fn next(&mut self, hold: Reserve<'_>) -> Result<Option<(usize, RecordBatch)>> {
        let (number, first) = (self.messages + 1, self.rows);
        let place = |e: Error| e.within(format!("body: message {number}"));
        let Some(message) = take(&mut self.rest).map_err(place)? else { return Ok(None) };
        self.messages = number;
        let batch = self.batch(&message).map_err(place)?;
        self.rows += batch.num_rows();
        hold(batch.columns().iter().map(bytes).sum())?;
        let arrays = self.plain.fields().iter().zip(batch.columns());
        let arrays = arrays.map(|(field, array)| {
            to_plain_array(array, field.data_type())
                .map_err(|e| Error::invalid(format!("column `{}`: {e}", field.name())))
        });
        let arrays = arrays.collect::<Result<Vec<ArrayRef>>>().map_err(place)?;
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        let batch = RecordBatch::try_new_with_options(self.plain.clone(), arrays, &options);
        Ok(Some((first, batch.map_err(|e| place(invalid(&e)))?)))
    }

    fn batch(&self, message: &Message) -> Result<RecordBatch> {
        let described = described(&message.description)?;
        let batch = described.header_as_record_batch().ok_or_else(|| match described.header_type() {
            MessageHeader::DictionaryBatch => Error::unsupported("got a dictionary, expected plain values"),
            other => Error::invalid(format!("got {}, expected a record batch", header(other))),
        })?;
        let rows = usize::try_from(batch.length()).ok().filter(|rows| self.rows.saturating_add(*rows) <= self.rows_max);
        if rows.is_none() {
            return Err(Error::invalid(format!("expected 0 to {} rows in all", self.rows_max)));
        }
        check(&batch, message.body.len(), &self.sent)?;
        read_record_batch(&message.body, batch, self.sent.clone(), &HashMap::new(), None, &described.version())
            .map_err(|e| invalid(&e))
    }
}

/// Calls `of` with the columns of a batch and the index of each row. Unreadable values are errors of their rows only.
pub(super) fn each_row<T>(
    batch: &RecordBatch,
    first_row: usize,
    mut of: impl FnMut(Result<(&[ArrowColumn], usize)>) -> T,
) -> Vec<T> {
    if let Ok(columns) = columns(batch, first_row) {
        return (0..batch.num_rows()).map(|row| of(Ok((&columns[..], row)))).collect();
    }
    let alone = |row: usize| match columns(&batch.slice(row, 1), first_row + row) {
        Ok(columns) => of(Ok((&columns[..], 0))),
        Err(error) => of(Err(error)),
    };
    (0..batch.num_rows()).map(alone).collect()
}

fn columns(batch: &RecordBatch, first_row: usize) -> Result<Vec<ArrowColumn>> {
    let schema = batch.schema();
    let columns = schema.fields().iter().zip(batch.columns());
    columns
        .map(|(field, array)| {
            ArrowColumn::read(array, first_row).map_err(|e| e.within(format!("column `{}`", field.name())))
        })
        .collect()
}

/// Takes the first message; `None` at the end of the stream.
fn take(rest: &mut Buffer) -> Result<Option<Message>> {
    if rest.is_empty() {
        return Ok(None);
    }
    let cut = |rest: &Buffer| {
        Error::invalid(format!("the Arrow stream is truncated: a message has {} bytes, expected more", rest.len()))
    };
    let Some(prefix) = rest.first_chunk::<PREFIX_BYTES>() else { return Err(cut(rest)) };
    let [a, b, c, d, length @ ..] = *prefix;
    if [a, b, c, d] != CONTINUATION {
        return Err(Error::invalid("not a stream of Arrow's IPC format"));
    }
    let length = u32::from_le_bytes(length) as usize;
    if length == 0 {
        return match rest.len() - PREFIX_BYTES {
            0 => Ok(None),
            more => Err(Error::invalid(format!("{more} bytes follow the end of the stream"))),
        };
    }
    if length > DESCRIPTION_BYTES_MAX {
        return Err(Error::invalid(format!(
            "a message header of {length} bytes, expected at most {DESCRIPTION_BYTES_MAX}"
        )));
    }
    if rest.len() - PREFIX_BYTES < length {
        return Err(cut(rest));
    }
    let description = rest.slice_with_length(PREFIX_BYTES, length);
    let left = rest.len() - PREFIX_BYTES - length;
    let body = usize::try_from(described(&description)?.bodyLength()).ok().filter(|body| *body <= left);
    let Some(body_length) = body else { return Err(cut(rest)) };
    let body = rest.slice_with_length(PREFIX_BYTES + length, body_length);
    rest.advance(PREFIX_BYTES + length + body_length);
    Ok(Some(Message { description, body }))
}

fn described(description: &[u8]) -> Result<ipc::Message<'_>> {
    let looks = VISITS_MAX * description.len() + VISITS_MIN;
    let options = VerifierOptions { max_apparent_size: looks, ..VerifierOptions::default() };
    root_as_message_with_opts(&options, description).map_err(|e| {
        let text = e.to_string();
        Error::invalid(format!("not an Arrow message: {}", text.lines().next().unwrap_or_default()))
    })
}

fn schema(rest: &mut Buffer) -> Result<Schema> {
    let nothing = || Error::invalid("the stream is empty, expected a schema");
    let message = take(rest)?.ok_or_else(nothing)?;
    let described = described(&message.description)?;
    let schema = described
        .header_as_schema()
        .ok_or_else(|| Error::invalid(format!("got {}, expected a schema", header(described.header_type()))))?;
    try_fb_to_schema(schema).map_err(|e| invalid(&e))
}

fn header(header: MessageHeader) -> &'static str {
    header.variant_name().unwrap_or("an unknown header type")
}

/// Rejects a batch whose header describes more than its body contains.
fn check(batch: &ipc::RecordBatch<'_>, body: usize, schema: &Schema) -> Result<()> {
    if batch.compression().is_some() {
        return Err(Error::unsupported(
            "a record batch is compressed, expected plain buffers (the whole body may be compressed: `Content-Encoding`)",
        ));
    }
    let mut variadic = batch.variadicBufferCounts().into_iter().flatten();
    let (most, mut widths) = (batch.buffers().map_or(0, |buffers| buffers.len()), Vec::new());
    for field in schema.fields() {
        // The batch states its number of buffers of view arrays, of which at most the buffers that exist are counted.
        let mut views = |so_far: usize| {
            let count = variadic.next().and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
            count.min(most.saturating_sub(so_far))
        };
        widths_of(field.data_type(), &mut widths, &mut views);
    }
    let mut taken = 0_usize;
    for (n, buffer) in batch.buffers().into_iter().flatten().enumerate() {
        let (offset, length) = (usize::try_from(buffer.offset()), usize::try_from(buffer.length()));
        let (Ok(offset), Ok(length)) = (offset, length) else {
            return Err(Error::invalid("a buffer has a negative offset or length"));
        };
        taken = taken.saturating_add(length);
        if offset.saturating_add(length) > body || taken > body {
            return Err(Error::invalid(format!("buffers overlap or lie outside of the body of {body} bytes")));
        }
        let width = widths.get(n).copied().unwrap_or(1);
        if !length.is_multiple_of(width) {
            return Err(Error::invalid(format!("a buffer of {length} bytes, expected {width} for each entry")));
        }
    }
    let fits = |node: &ipc::FieldNode| {
        (0..=i64::from(i32::MAX)).contains(&node.length()) && (0..=node.length()).contains(&node.null_count())
    };
    match batch.nodes().into_iter().flatten().find(|node| !fits(node)) {
        Some(node) => Err(Error::invalid(format!(
            "an array has {} values and {} nulls, which is not possible",
            node.length(),
            node.null_count()
        ))),
        None => Ok(()),
    }
}

/// Appends, per buffer of a column, the divisor of its length in bytes: offsets and views must be complete.
fn widths_of(kind: &DataType, widths: &mut Vec<usize>, views: &mut dyn FnMut(usize) -> usize) {
    match kind {
        DataType::Null => {}
        DataType::Utf8 => widths.extend([1, size_of::<i32>(), 1]),
        DataType::LargeUtf8 => widths.extend([1, size_of::<i64>(), 1]),
        DataType::Utf8View => {
            widths.extend([1, size_of::<u128>()]);
            widths.extend(std::iter::repeat_n(1, views(widths.len())));
        }
        DataType::List(inner) | DataType::LargeList(inner) => {
            let offset = if matches!(kind, DataType::List(_)) { size_of::<i32>() } else { size_of::<i64>() };
            widths.extend([1, offset]);
            widths_of(inner.data_type(), widths, views);
        }
        DataType::FixedSizeList(inner, _) => {
            widths.push(1);
            widths_of(inner.data_type(), widths, views);
        }
        _ => widths.extend([1, 1]),
    }
}

/// Returns the type to which values of type `kind` are converted; `None` if `kind` is not supported.
fn plain(kind: &DataType) -> Option<DataType> {
    let list = |inner: &Field| Some(DataType::new_list(plain_value(inner.data_type())?, true));
    match kind {
        DataType::Null => Some(DataType::Null),
        // Writers create lists of nulls from empty lists.
        DataType::List(inner) if inner.data_type().is_null() => Some(kind.clone()),
        DataType::List(inner) | DataType::LargeList(inner) => list(inner),
        DataType::FixedSizeList(inner, width) if *width > 0 => list(inner),
        kind => plain_value(kind),
    }
}

fn plain_value(kind: &DataType) -> Option<DataType> {
    match kind {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => Some(DataType::Utf8),
        DataType::Boolean | DataType::Date32 | DataType::Date64 | DataType::Timestamp(..) => Some(kind.clone()),
        kind if kind.is_integer() || kind.is_floating() => Some(kind.clone()),
        _ => None,
    }
}

/// Converts the values of an array to the type from [`plain`].
fn to_plain_array(array: &ArrayRef, to: &DataType) -> std::result::Result<ArrayRef, ArrowError> {
    let long = |offset: &i64| i32::try_from(*offset).map_err(|_| ArrowError::OffsetOverflowError(*offset as usize));
    Ok(match (array.data_type(), to) {
        (from, to) if from == to => array.clone(),
        (DataType::LargeUtf8, _) => {
            let held = array.as_string::<i64>();
            texts(held.iter(), span(held.value_offsets()))
        }
        (DataType::Utf8View, _) => {
            let held = array.as_string_view();
            texts(held.iter(), held.lengths().map(|length| length as usize).sum())
        }
        (from, DataType::List(inner)) => {
            let (offsets, values) = match from {
                DataType::FixedSizeList(_, width) => {
                    let lengths = std::iter::repeat_n(*width as usize, array.len());
                    (OffsetBuffer::from_lengths(lengths), array.as_fixed_size_list().values())
                }
                DataType::LargeList(_) => {
                    let list = array.as_list::<i64>();
                    let offsets = list.offsets().iter().map(long).collect::<std::result::Result<Vec<i32>, _>>()?;
                    (OffsetBuffer::new(offsets.into()), list.values())
                }
                _ => (array.as_list::<i32>().offsets().clone(), array.as_list::<i32>().values()),
            };
            let values = to_plain_array(values, inner.data_type())?;
            Arc::new(ListArray::try_new(inner.clone(), offsets, values, array.nulls().cloned())?)
        }
        (from, to) => return Err(ArrowError::CastError(format!("cannot convert {from} to {to}"))),
    })
}

/// Builds texts with this total number of bytes, without spare capacity.
fn texts<'a>(texts: impl ExactSizeIterator<Item = Option<&'a str>>, bytes: usize) -> ArrayRef {
    let mut made = StringBuilder::with_capacity(texts.len(), bytes);
    texts.for_each(|text| made.append_option(text));
    Arc::new(made.finish())
}

fn unread(field: &Field) -> Error {
    Error::unsupported(format!(
        "column `{}`: got {}, expected integers, floats, strings, booleans, dates, timestamps, or lists of these",
        field.name(),
        field.data_type()
    ))
}

/// Returns the memory that a column needs: its converted values, and the values of the rows.
fn bytes(array: &ArrayRef) -> usize {
    let values = match array.data_type() {
        DataType::List(_) => Some(array.as_list::<i32>().values()),
        DataType::LargeList(_) => Some(array.as_list::<i64>().values()),
        DataType::FixedSizeList(..) => Some(array.as_fixed_size_list().values()),
        _ => None,
    };
    let values = values.unwrap_or(array);
    let count = values.len();
    let texts = |length: usize| count.saturating_mul(TEXT_BYTES).saturating_add(length.saturating_mul(2));
    let held = match values.data_type() {
        DataType::Null => 0,
        DataType::Boolean => texts(count * "false".len()),
        DataType::Utf8 => texts(span(values.as_string::<i32>().value_offsets())),
        DataType::LargeUtf8 => texts(span(values.as_string::<i64>().value_offsets())),
        DataType::Utf8View => texts(values.as_string_view().lengths().map(|length| length as usize).sum()),
        kind if kind.is_floating() && array.data_type() != kind => count * 2 * size_of::<f32>(),
        _ => count * 2 * size_of::<i64>(),
    };
    held.saturating_add(array.len() * CELL_BYTES)
}

/// Returns the bytes between the first and the last offset.
fn span<T: Copy + TryInto<usize>>(offsets: &[T]) -> usize {
    let at = |offset: Option<&T>| offset.and_then(|offset| (*offset).try_into().ok()).unwrap_or(0);
    at(offsets.last()).saturating_sub(at(offsets.first()))
}

fn invalid(error: &ArrowError) -> Error {
    Error::invalid(error.to_string())
}
