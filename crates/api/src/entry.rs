//! Contents of an answer by item and by column, independent of the output format: JSON items, JSON columns, or Arrow.

use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{CompactFormatter, Formatter as _};

use super::problem::Problem;
use super::response::{Explain, Item, Step};
use super::written::ItemJson;
use sterling_core::error::{Error, Result};
use sterling_core::quota::Memory;
use sterling_core::request::{Answer, Content, Ranked};
use sterling_index::columns::{Cell, ColumnKind, Stacked};

/// Items with the names of their fields.
#[derive(Clone, Debug)]
pub(super) struct Items {
    pub(super) ranked: Ranked,
    pub(super) explain: Option<Explain>,
    pub(super) degraded_rows: u64,
    pub(super) rest: OtherFields,
    /// Cursor of the next page, if pages were requested and a next page exists.
    pub(super) cursor: Option<String>,
    /// True if the JSON lists the items column by column.
    pub(super) is_table: bool,
}

/// Fields of items other than ids and scores.
#[derive(Clone, Debug)]
pub(super) enum OtherFields {
    /// Fields that this server computed.
    NamedColumns(Box<NamedColumns>),
    /// JSON from shards, item by item.
    ItemJson(WrittenRows),
    /// Parsed JSON from shards, column by column.
    Read(Box<ReadColumns>),
}

/// JSON of items from several shards, unchanged, and the order of the items.
#[derive(Clone, Debug, Default)]
pub struct WrittenRows {
    parts: Vec<ItemJson>,
    /// For each item, its part and its index in that part; empty if all items are of one part, in the order of that part.
    order: Vec<(usize, usize)>,
}

impl WrittenRows {
    /// Combines the items of several parts; `order` has, for each item, its part and its index in that part.
    pub fn new(parts: Vec<ItemJson>, order: Vec<(usize, usize)>) -> Self {
        WrittenRows { parts, order }
    }

    fn of(&self, row: usize) -> &[u8] {
        let (part, at) = if self.order.is_empty() { (0, row) } else { self.order[row] };
        self.parts.get(part).map_or(&[], |written| written.of(at))
    }
}

impl From<ItemJson> for WrittenRows {
    fn from(written: ItemJson) -> Self {
        WrittenRows::new(vec![written], Vec::new())
    }
}

/// Tasks and columns with their names.
#[derive(Clone, Debug)]
pub(super) struct NamedColumns {
    pub(super) tasks: Vec<Key>,
    pub(super) requested: Vec<Key>,
    columns: Stacked,
    picked: Vec<usize>,
}

/// A name, and `"name":` ready to be copied.
#[derive(Clone, Debug)]
pub(super) struct Key {
    pub(super) name: String,
    pub(super) json: Vec<u8>,
}

impl Key {
    fn new(name: &str) -> Self {
        let mut json = Vec::with_capacity(name.len() + 3);
        write_json(&mut json, name);
        json.push(b':');
        Key { name: name.to_owned(), json }
    }
}

/// Tasks and columns parsed from the JSON of items.
#[derive(Clone, Debug, Default)]
pub(super) struct ReadColumns {
    tasks: Vec<(Key, Vec<f32>)>,
    columns: Vec<(Key, Vec<Value>)>,
    /// Bytes of the largest item.
    row_bytes: usize,
}

/// Type of a column of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CellKind {
    /// Column whose values are all missing.
    Nothing,
    Integer,
    Integers,
    Float,
    Text,
    Texts,
}

impl CellKind {
    fn of(cell: &Cell<'_>) -> Self {
        match cell {
            Cell::Missing => CellKind::Nothing,
            Cell::Integer(_) => CellKind::Integer,
            Cell::Integers(_) => CellKind::Integers,
            Cell::Float(_) => CellKind::Float,
            Cell::Text(_) => CellKind::Text,
            Cell::Texts(_) => CellKind::Texts,
        }
    }

    /// Returns the type that can hold the values of both types; a column never has both numbers and texts.
    pub(super) fn with(self, other: CellKind) -> CellKind {
        use CellKind::{Float, Integer, Integers, Nothing, Text, Texts};
        match (self, other) {
            (kind, Nothing) | (Nothing, kind) => kind,
            (Text | Texts, Text | Texts) if self != other => Texts,
            (Integer | Integers, Integer | Integers) if self != other => Integers,
            (Float, Integer) | (Integer, Float) => Float,
            _ => self,
        }
    }
}

impl Items {
    pub(super) fn len(&self) -> usize {
        self.ranked.ids.len()
    }

    /// Returns the names of the tasks.
    pub(super) fn tasks(&self) -> Vec<&Key> {
        match &self.rest {
            OtherFields::NamedColumns(named) => named.tasks.iter().collect(),
            OtherFields::Read(read) => read.tasks.iter().map(|(key, _)| key).collect(),
            OtherFields::ItemJson(_) => Vec::new(),
        }
    }

    /// Returns the names of the requested columns.
    pub(super) fn columns(&self) -> Vec<&Key> {
        match &self.rest {
            OtherFields::NamedColumns(named) => named.requested.iter().collect(),
            OtherFields::Read(read) => read.columns.iter().map(|(key, _)| key).collect(),
            OtherFields::ItemJson(_) => Vec::new(),
        }
    }

    pub(super) fn task_count(&self) -> usize {
        match &self.rest {
            OtherFields::NamedColumns(named) => named.tasks.len(),
            OtherFields::Read(read) => read.tasks.len(),
            OtherFields::ItemJson(_) => 0,
        }
    }

    /// Returns the scores of a task.
    pub(super) fn task(&self, task: usize) -> &[f32] {
        let count = self.len();
        match &self.rest {
            OtherFields::NamedColumns(_) => &self.ranked.tasks[task * count..(task + 1) * count],
            OtherFields::Read(read) => &read.tasks[task].1,
            OtherFields::ItemJson(_) => &[],
        }
    }

    /// Returns the values of an item in a requested column.
    pub(super) fn cell(&self, column: usize, row: usize) -> Cell<'_> {
        match &self.rest {
            OtherFields::NamedColumns(named) => named.columns.cell(named.picked[column], self.ranked.slots[row]),
            OtherFields::Read(read) => cell_of(&read.columns[column].1[row]),
            OtherFields::ItemJson(_) => Cell::Missing,
        }
    }

    /// Returns the type of a column: from the model, or derived from the values of shards.
    pub(super) fn kind(&self, column: usize) -> CellKind {
        match &self.rest {
            OtherFields::NamedColumns(named) => {
                let (number, columns) = (named.picked[column], &named.columns);
                match (columns.first().at(number).kind(), columns.is_single(number)) {
                    (ColumnKind::Integers, true) => CellKind::Integer,
                    (ColumnKind::Integers, false) => CellKind::Integers,
                    (ColumnKind::Texts, true) => CellKind::Text,
                    (ColumnKind::Texts, false) => CellKind::Texts,
                    (ColumnKind::Floats, _) => CellKind::Float,
                }
            }
            _ => (0..self.len()).fold(CellKind::Nothing, |kind, row| kind.with(CellKind::of(&self.cell(column, row)))),
        }
    }

    /// Returns the maximum bytes of an item's values in the requested columns.
    pub(super) fn row_bytes(&self) -> usize {
        match &self.rest {
            OtherFields::NamedColumns(named) => {
                named.picked.iter().map(|&column| named.columns.cell_bytes(column)).sum()
            }
            OtherFields::Read(read) => read.row_bytes,
            OtherFields::ItemJson(_) => 0,
        }
    }

    /// Parses the JSON of an item from a shard into columns, within the memory of the answer. Returns `false` if the entry has no
    /// item `row`, or nothing to parse.
    pub(super) fn read_row(&self, row: usize, read: &mut ReadColumns, memory: &Memory) -> Result<bool> {
        let count = self.len();
        let OtherFields::ItemJson(written) = &self.rest else { return Ok(false) };
        if row >= count {
            return Ok(false);
        }
        let Some(text) = written.of(row).strip_prefix(b",") else { return Ok(true) };
        let invalid = |e: serde_json::Error| {
            Error::unavailable(format!("the answer of a shard cannot be decoded by this router: {e}"))
        };
        let text = [b"{\"id\":0,\"score\":0,\"similarity\":0,", text, b"}"].concat();
        let item: Item = serde_json::from_slice(&text).map_err(invalid)?;
        let names = read.tasks.len() + read.columns.len();
        for (name, x) in item.tasks {
            read.tasks.at(&name, || vec![0.0; count])[row] = x;
        }
        let mut bytes = 0;
        for (name, value) in item.columns {
            bytes += held_bytes(&value);
            read.columns.at(&name, || vec![Value::Null; count])[row] = value;
        }
        read.row_bytes = read.row_bytes.max(bytes);
        let added = read.tasks.len() + read.columns.len() - names;
        memory.add((bytes + added * count * size_of::<Value>()) as u64)?;
        Ok(true)
    }

    /// Writes the JSON of an item after its scores, from offset `from`: 0, or the result of the previous call. Returns the offset
    /// to continue from if `out` reaches `most` bytes first.
    pub(super) fn row_rest(&self, row: usize, from: usize, most: usize, out: &mut Vec<u8>) -> Option<usize> {
        match &self.rest {
            OtherFields::ItemJson(written) => {
                let text = &written.of(row)[from..];
                let part = text.len().min(most.saturating_sub(out.len()).max(1));
                out.extend_from_slice(&text[..part]);
                (part < text.len()).then_some(from + part)
            }
            OtherFields::NamedColumns(named) => self.write_named_columns(named, row, from, most, out),
            OtherFields::Read(_) => None,
        }
    }

    fn write_named_columns(
        &self,
        named: &NamedColumns,
        row: usize,
        from: usize,
        most: usize,
        out: &mut Vec<u8>,
    ) -> Option<usize> {
        let count = self.len();
        if from == 0 {
            for (task, key) in named.tasks.iter().enumerate() {
                out.extend_from_slice(if task == 0 { b",\"tasks\":{" } else { b"," });
                out.extend_from_slice(&key.json);
                write_number(out, self.ranked.tasks[task * count + row]);
            }
            if !named.tasks.is_empty() {
                out.push(b'}');
            }
        }
        for (n, (&column, key)) in named.picked.iter().zip(&named.requested).enumerate().skip(from) {
            if n > from && out.len() >= most {
                return Some(n);
            }
            out.extend_from_slice(if n == 0 { b",\"columns\":{" } else { b"," });
            out.extend_from_slice(&key.json);
            write_cell(out, &named.columns.cell(column, self.ranked.slots[row]));
        }
        if !named.picked.is_empty() {
            out.push(b'}');
        }
        None
    }
}

/// Values by name, in order of first appearance.
trait ByName<T> {
    fn at(&mut self, name: &str, empty: impl FnOnce() -> T) -> &mut T;
}

impl<T> ByName<T> for Vec<(Key, T)> {
    fn at(&mut self, name: &str, empty: impl FnOnce() -> T) -> &mut T {
        let place = self.iter().position(|(key, _)| key.name == name).unwrap_or_else(|| {
            self.push((Key::new(name), empty()));
            self.len() - 1
        });
        &mut self[place].1
    }
}

/// Returns the approximate bytes of a value in memory.
fn held_bytes(value: &Value) -> usize {
    size_of::<Value>()
        + match value {
            Value::String(text) => text.len(),
            Value::Array(list) => list.iter().map(held_bytes).sum(),
            _ => 0,
        }
}

fn cell_of(value: &Value) -> Cell<'_> {
    match value {
        Value::Number(n) => n.as_i64().map_or_else(|| n.as_f64().map_or(Cell::Missing, Cell::Float), Cell::Integer),
        Value::String(text) => Cell::Text(text),
        Value::Array(list) if list.iter().all(Value::is_string) => {
            Cell::Texts(list.iter().filter_map(Value::as_str).collect())
        }
        Value::Array(list) => Cell::Integers(list.iter().filter_map(Value::as_i64).collect()),
        Value::Null | Value::Bool(_) | Value::Object(_) => Cell::Missing,
    }
}

/// One answer of a reply, or the problem in its place.
#[derive(Clone, Debug)]
pub struct Entry(pub(super) std::result::Result<Box<Items>, Problem>);

impl Entry {
    /// Creates an entry of items; `tasks` are the names of the model's tasks, `requested` the names of the requested columns.
    ///
    /// # Errors
    /// `Internal` for an answer without items or with a number that JSON cannot represent; `Invalid` for an unknown column.
    pub fn items<'a>(
        answer: Answer,
        tasks: impl IntoIterator<Item = &'a str>,
        columns: impl Into<Stacked>,
        requested: &[String],
    ) -> Result<Self> {
        let Content::Items(ranked) = answer.content else {
            return Err(Error::internal("got an embedding in place of items"));
        };
        let numbers = ranked.scores.iter().chain(&ranked.similarities).chain(&ranked.tasks);
        if let Some(x) = numbers.into_iter().find(|x| !x.is_finite()) {
            return Err(Error::internal(format!("the value of an item is {x}, expected a finite number")));
        }
        let columns = columns.into();
        let picked = requested.iter().map(|name| columns.first().number(name)).collect::<Result<Vec<_>>>()?;
        let requested = picked.iter().map(|&number| Key::new(columns.first().at(number).name())).collect();
        let named = NamedColumns { tasks: tasks.into_iter().map(Key::new).collect(), requested, columns, picked };
        Ok(Entry(Ok(Box::new(Items {
            ranked,
            explain: answer.explain.as_ref().map(Explain::from),
            degraded_rows: answer.degraded_rows,
            rest: OtherFields::NamedColumns(Box::new(named)),
            cursor: None,
            is_table: false,
        }))))
    }

    /// Creates an entry of items from shards, with their JSON.
    pub fn gathered(
        ranked: Ranked,
        rest: impl Into<WrittenRows>,
        explain: Option<Explain>,
        degraded_rows: u64,
    ) -> Self {
        let rest = OtherFields::ItemJson(rest.into());
        Entry(Ok(Box::new(Items { ranked, explain, degraded_rows, rest, cursor: None, is_table: false })))
    }

    /// Returns the number of items; 0 for a problem.
    pub(super) fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |items| items.len())
    }

    /// Adds the cursor of the next page.
    pub fn with_cursor(mut self, cursor: Option<String>) -> Self {
        if let Ok(items) = &mut self.0 {
            items.cursor = cursor;
        }
        self
    }

    /// Returns the items, unless the entry is a problem.
    pub fn ranked(&self) -> Option<&Ranked> {
        self.0.as_ref().ok().map(|items| &items.ranked)
    }

    /// Returns the steps of an explained answer.
    pub fn steps(&self) -> &[Step] {
        self.0.as_ref().ok().and_then(|items| items.explain.as_ref()).map_or(&[], |e| &e.steps)
    }
}

impl From<Problem> for Entry {
    fn from(problem: Problem) -> Self {
        Entry(Err(problem))
    }
}

pub(super) fn write_json(out: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    // Serializing these types into a `Vec` cannot fail.
    let _ = serde_json::to_writer(out, value);
}

pub(super) fn write_integer(out: &mut Vec<u8>, x: i64) {
    let _ = CompactFormatter.write_i64(out, x);
}

pub(super) fn write_number(out: &mut Vec<u8>, x: f32) {
    let _ = CompactFormatter.write_f32(out, x);
}

pub(super) fn write_cell(out: &mut Vec<u8>, cell: &Cell<'_>) {
    match cell {
        Cell::Missing => out.extend_from_slice(b"null"),
        Cell::Integer(x) => write_integer(out, *x),
        Cell::Integers(many) => write_json(out, many),
        Cell::Float(x) => write_json(out, x),
        Cell::Text(text) => write_json(out, text),
        Cell::Texts(many) => write_json(out, many),
    }
}
