//! Rows of an input file, in chunks.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow_array::RecordBatch;

use super::lines::Lines;
use super::questions::{Asking, Questions};
use super::table::{Roles, sources};
use sterling_core::error::{Error, Result};
use sterling_snapshot::items::{batch_rows, open_parquet, text_of, unreadable};
use sterling_snapshot::model::Package;

/// Rows that are scored together.
const CHUNK_ROWS: usize = 64;
/// Bytes of rows after which a chunk ends before it has so many.
const CHUNK_BYTES: usize = 1 << 20;

/// Consecutive rows of a file.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Its place among the chunks of the file.
    pub(super) number: usize,
    /// The row of the file that it begins with, from 0.
    pub(super) first_row: u64,
    /// Bytes of the file up to its end, about.
    pub(super) bytes: u64,
    rows: Rows,
}

#[derive(Debug)]
enum Rows {
    /// Of JSON; an error where a line is none.
    Lines(Vec<Result<String>>),
    /// Of Parquet.
    Table(RecordBatch, Arc<Roles>),
}

impl Chunk {
    /// How many rows it has.
    pub(super) fn len(&self) -> usize {
        match &self.rows {
            Rows::Lines(lines) => lines.len(),
            Rows::Table(batch, _) => batch.num_rows(),
        }
    }

    /// What its rows ask.
    pub(super) fn asked(self, questions: &Questions, package: &Package) -> Vec<Asking> {
        match self.rows {
            Rows::Lines(lines) => {
                let sources = sources(package.item.as_ref());
                let asked = |line: Result<String>| match line {
                    Ok(line) => questions.of_line(&line, &sources),
                    Err(e) => (None, Err(e)),
                };
                lines.into_iter().map(asked).collect()
            }
            Rows::Table(batch, roles) => roles.rows(&batch, self.first_row, questions),
        }
    }
}

/// Who takes the chunks of a file, one after the other, until it wants no more.
struct Taker<T> {
    take: T,
    number: usize,
    row: u64,
}

impl<T: FnMut(Chunk) -> bool> Taker<T> {
    fn give(&mut self, rows: Rows, bytes: u64) -> bool {
        let chunk = Chunk { number: self.number, first_row: self.row, bytes, rows };
        self.number += 1;
        self.row += chunk.len() as u64;
        (self.take)(chunk)
    }
}

/// Hands the chunks of a file out until `take` says that it wants no more.
///
/// # Errors
/// `NotFound` or `Io`; `Invalid` where it is no Parquet, or its columns are no rows of these questions.
pub(super) fn read(
    path: &Path,
    questions: &Questions,
    package: &Package,
    take: impl FnMut(Chunk) -> bool,
) -> Result<()> {
    let io = |e| Error::io("rows", e);
    let bytes = Arc::new(AtomicU64::new(0));
    let file = Counted { file: File::open(path).map_err(io)?, bytes: bytes.clone() };
    let mut taker = Taker { take, number: 0, row: 0 };
    let Some(lines) = text_of(path, file)? else {
        return read_table(path, questions, package, &mut taker);
    };
    let mut lines = Lines::new(lines);
    loop {
        let (mut rows, mut held) = (Vec::new(), 0);
        while rows.len() < CHUNK_ROWS
            && held < CHUNK_BYTES
            && let Some(row) = lines.next_row().map_err(io)?
        {
            held += row.as_ref().map_or(0, String::len);
            rows.push(row);
        }
        if rows.is_empty() || !taker.give(Rows::Lines(rows), bytes.load(Ordering::Relaxed)) {
            return Ok(());
        }
    }
}

fn read_table(
    path: &Path,
    questions: &Questions,
    package: &Package,
    taker: &mut Taker<impl FnMut(Chunk) -> bool>,
) -> Result<()> {
    let bytes = std::fs::metadata(path).map_err(|e| Error::io("rows", e))?.len();
    let reader = open_parquet(path)?;
    let roles = Arc::new(Roles::of(reader.schema(), package, questions.template())?);
    let all = reader.metadata().file_metadata().num_rows().max(1) as u64;
    let rows = batch_rows(reader.metadata(), CHUNK_ROWS);
    let reader = reader.with_batch_size(rows).build().map_err(|e| unreadable(&e))?;
    for batch in reader {
        let batch = batch.map_err(|e| unreadable(&e))?;
        // Rows of long lists come in smaller chunks.
        let parts = (batch.get_array_memory_size() / CHUNK_BYTES + 1).min(batch.num_rows().max(1));
        let rows = batch.num_rows().div_ceil(parts).max(1);
        for first in (0..batch.num_rows()).step_by(rows) {
            let part = batch.slice(first, rows.min(batch.num_rows() - first));
            let done = taker.row + part.num_rows() as u64;
            let done = (bytes as u128 * u128::from(done) / u128::from(all)) as u64;
            if !taker.give(Rows::Table(part, roles.clone()), done) {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// A file that tells how many of its bytes were read.
struct Counted {
    file: File,
    bytes: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.bytes.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}
