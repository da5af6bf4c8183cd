//! What takes long for an answer of many items, an item at a time: its caller stops between any two of them to let others go first.

use std::mem::take;

use super::entry::{Entry, ReadColumns, Rest};
use super::written::Written;
use sterling_core::error::Result;
use sterling_core::request::Ranked;
use sterling_serving::quota::Memory;

/// Memory of what is written for a router, by its bytes: its text with room to grow.
const WRITTEN_COPIES: usize = 3;
/// Memory for it is set aside in steps of so many bytes.
const WRITTEN_STEP: usize = 64 << 10;

/// Writes what items say besides ids and scores, for a router.
#[derive(Debug)]
pub struct RowWriter {
    entry: Entry,
    written: Written,
    row: usize,
    text: Vec<u8>,
    /// Bytes of memory that were set aside.
    held: usize,
}

impl RowWriter {
    /// Writes the items of an entry.
    pub fn new(entry: Entry) -> Self {
        RowWriter { entry, written: Written::default(), row: 0, text: Vec::new(), held: 0 }
    }

    /// Writes one item. Returns the items and what they say once all of them are written.
    ///
    /// # Errors
    /// As [`Entry::written`].
    pub fn step(&mut self, memory: &Memory) -> Result<Option<(Ranked, Written)>> {
        let Ok(items) = &mut self.entry.0 else { return Ok(Some(Default::default())) };
        if self.row >= items.len() {
            let written = take(&mut self.written);
            let written = if written.text.is_empty() { Written::default() } else { written };
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

/// Reads what shards have written of items, to be told column by column.
#[derive(Debug)]
pub struct ColumnReader {
    /// Nothing once it was returned.
    entry: Option<Entry>,
    read: ReadColumns,
    row: usize,
}

impl ColumnReader {
    /// Reads the items of an entry.
    pub fn new(entry: Entry) -> Self {
        ColumnReader { entry: Some(entry), read: ReadColumns::default(), row: 0 }
    }

    /// Reads one item. Returns the entry once all of them are read.
    ///
    /// # Errors
    /// As [`Entry::by_columns`].
    pub fn step(&mut self, memory: &Memory) -> Result<Option<Entry>> {
        if let Some(Entry(Ok(items))) = &mut self.entry {
            if items.read_row(self.row, &mut self.read, memory)? {
                self.row += 1;
                return Ok(None);
            }
            if let Rest::Written(_) = items.rest {
                items.rest = Rest::Read(Box::new(take(&mut self.read)));
            }
        }
        Ok(self.entry.take())
    }
}

impl Entry {
    /// The same, to be read column by column, within the memory of the answer.
    ///
    /// # Errors
    /// `Unavailable` for what a shard said that is not read; those of [`Memory::add`].
    pub fn by_columns(self, memory: &Memory) -> Result<Self> {
        let mut reader = ColumnReader::new(self);
        loop {
            if let Some(entry) = reader.step(memory)? {
                return Ok(entry);
            }
        }
    }

    /// The same, whose JSON is columns in place of items.
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

    /// The items, and what they say besides ids and scores, for whoever writes them; within the memory of the answer.
    ///
    /// # Errors
    /// Those of [`Memory::add`]; `TooCostly` beyond what the protocol of routers has room for.
    pub fn written(self, memory: &Memory) -> Result<(Ranked, Written)> {
        let mut writer = RowWriter::new(self);
        loop {
            if let Some(done) = writer.step(memory)? {
                return Ok(done);
            }
        }
    }
}
