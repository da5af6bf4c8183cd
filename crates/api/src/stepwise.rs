//! Conversions of answers with many items, one item per step: callers can pause between two steps to let other work run.

use std::mem::take;

use super::entry::{Entry, OtherFields, ReadColumns};
use super::written::ItemJson;
use sterling_core::error::Result;
use sterling_core::quota::Memory;
use sterling_core::request::Ranked;

/// Reserved bytes per byte of text for a router: the text and room for its buffer to grow.
const WRITTEN_COPIES: usize = 3;
/// Granularity of the reservations, in bytes.
const WRITTEN_STEP: usize = 64 << 10;

/// Writes the fields of items except ids and scores, for a router.
#[derive(Debug)]
pub struct RowWriter {
    entry: Entry,
    written: ItemJson,
    row: usize,
    text: Vec<u8>,
    /// Reserved memory in bytes.
    held: usize,
}

impl RowWriter {
    /// Creates a writer of the items of an entry.
    pub fn new(entry: Entry) -> Self {
        RowWriter { entry, written: ItemJson::default(), row: 0, text: Vec::new(), held: 0 }
    }

    /// Writes one item. After the last one, returns ids and scores of the items, and the written fields.
    ///
    /// # Errors
    /// As [`Entry::written`].
    pub fn step(&mut self, memory: &Memory) -> Result<Option<(Ranked, ItemJson)>> {
        let Ok(items) = &mut self.entry.0 else { return Ok(Some(Default::default())) };
        if self.row >= items.len() {
            let written = take(&mut self.written);
            let written = if written.text.is_empty() { ItemJson::default() } else { written };
            return Ok(Some((Ranked { tasks: Vec::new(), ..take(&mut items.ranked) }, written)));
        }
        self.text.clear();
        items.row_rest(self.row, 0, usize::MAX, &mut self.text);
        let bytes = WRITTEN_COPIES * (self.written.text.len() + self.text.len());
        if bytes > self.held {
            let more = (bytes - self.held).max(WRITTEN_STEP);
            memory.add(more as u64)?;
            self.held += more;
        }
        self.written.push(&self.text)?;
        self.row += 1;
        Ok(None)
    }
}

/// Reads the fields of items that shards have written ([`RowWriter`]) into columns.
#[derive(Debug)]
pub struct ColumnReader {
    /// Entry whose items are read; `None` after it was returned.
    entry: Option<Entry>,
    read: ReadColumns,
    row: usize,
}

impl ColumnReader {
    /// Creates a reader of the items of an entry.
    pub fn new(entry: Entry) -> Self {
        ColumnReader { entry: Some(entry), read: ReadColumns::default(), row: 0 }
    }

    /// Reads one item. Returns the entry after the last one.
    ///
    /// # Errors
    /// As [`Entry::by_columns`].
    pub fn step(&mut self, memory: &Memory) -> Result<Option<Entry>> {
        if let Some(Entry(Ok(items))) = &mut self.entry {
            if items.read_row(self.row, &mut self.read, memory)? {
                self.row += 1;
                return Ok(None);
            }
            if let OtherFields::ItemJson(_) = items.rest {
                items.rest = OtherFields::Read(Box::new(take(&mut self.read)));
            }
        }
        Ok(self.entry.take())
    }
}

impl Entry {
    /// Converts the fields that shards have written into columns; reserves their memory in `memory`.
    ///
    /// # Errors
    /// `Unavailable` if a shard's text cannot be parsed; as [`Memory::add`].
    pub fn by_columns(self, memory: &Memory) -> Result<Self> {
        let mut reader = ColumnReader::new(self);
        loop {
            if let Some(entry) = reader.step(memory)? {
                return Ok(entry);
            }
        }
    }

    /// Converts the entry like [`Entry::by_columns`], and has its JSON written as columns instead of items.
    ///
    /// # Errors
    /// As [`Entry::by_columns`].
    pub fn as_table(self, memory: &Memory) -> Result<Self> {
        let mut entry = self.by_columns(memory)?;
        if let Ok(items) = &mut entry.0 {
            items.is_table = true;
        }
        Ok(entry)
    }

    /// Returns ids and scores of the items, and their other fields as text for a router; reserves the text's memory in `memory`.
    ///
    /// # Errors
    /// As [`Memory::add`]; `TooCostly` if the text exceeds the limit of the routers' protocol.
    pub fn written(self, memory: &Memory) -> Result<(Ranked, ItemJson)> {
        let mut writer = RowWriter::new(self);
        loop {
            if let Some(done) = writer.step(memory)? {
                return Ok(done);
            }
        }
    }
}
