//! Rows of an input file, in chunks.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow_array::RecordBatch;

use super::lines::Lines;
use super::questions::{Questions, RowRequest};
use super::table::{Roles, sources};
use sterling_core::error::{Error, Result};
use sterling_snapshot::items::{batch_rows, open_parquet, text_of, unreadable};
use sterling_snapshot::model::Package;

const CHUNK_ROWS: usize = 64;
/// Bytes of rows that end a chunk with fewer than [`CHUNK_ROWS`] rows.
const CHUNK_BYTES: usize = 1 << 20;

/// Consecutive rows of a file.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Sequence number of the chunk within the file.
    pub(super) number: usize,
    /// Row number in the file of the chunk's first row, from 0.
    pub(super) first_row: u64,
    /// Approximate number of file bytes up to the end of the chunk.
    pub(super) bytes: u64,
    rows: Rows,
}

#[derive(Debug)]
enum Rows {
    /// JSON lines with their line numbers; `Err` for an invalid line.
    Lines(Vec<(u64, Result<String>)>),
    /// Rows of a Parquet file.
    Table(RecordBatch, Arc<Roles>),
}

impl Chunk {
    /// Returns the number of rows.
    pub(super) fn len(&self) -> usize {
        match &self.rows {
            Rows::Lines(lines) => lines.len(),
            Rows::Table(batch, _) => batch.num_rows(),
        }
    }

    /// Returns the line number of each row, from 1; `None` for Parquet.
    pub(super) fn lines(&self) -> Option<Vec<u64>> {
        match &self.rows {
            Rows::Lines(lines) => Some(lines.iter().map(|(line, _)| *line).collect()),
            Rows::Table(..) => None,
        }
    }

    /// Builds the requests of the rows.
    pub(super) fn asked(self, questions: &Questions, package: &Package) -> Vec<RowRequest> {
        match self.rows {
            Rows::Lines(lines) => {
                let sources = sources(package.item.as_ref());
                let asked = |(_, line): (u64, Result<String>)| match line {
                    Ok(line) => questions.parse_line(&line, &sources),
                    Err(e) => (None, Err(e)),
                };
                lines.into_iter().map(asked).collect()
            }
            Rows::Table(batch, roles) => roles.rows(&batch, self.first_row, questions),
        }
    }
}

/// Passes the chunks of a file to `take`, in order, until `take` returns false.
struct ChunkSender<T> {
    take: T,
    number: usize,
    row: u64,
}

impl<T: FnMut(Chunk) -> bool> ChunkSender<T> {
    fn give(&mut self, rows: Rows, bytes: u64) -> bool {
        let chunk = Chunk { number: self.number, first_row: self.row, bytes, rows };
        self.number += 1;
        self.row += chunk.len() as u64;
        (self.take)(chunk)
    }
}

/// Reads a file and passes its chunks to `take` until `take` returns false.
///
/// # Errors
/// `NotFound` or `Io`; `Invalid` if a Parquet file is unreadable or its columns do not suit the requests.
pub(super) fn read(
    path: &Path,
    questions: &Questions,
    package: &Package,
    take: impl FnMut(Chunk) -> bool,
) -> Result<()> {
    let io = |e| Error::io("rows", e);
    let bytes = Arc::new(AtomicU64::new(0));
    let file = Counted { file: File::open(path).map_err(io)?, bytes: bytes.clone() };
    let mut taker = ChunkSender { take, number: 0, row: 0 };
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
            rows.push((lines.line(), row));
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
    taker: &mut ChunkSender<impl FnMut(Chunk) -> bool>,
) -> Result<()> {
    let bytes = std::fs::metadata(path).map_err(|e| Error::io("rows", e))?.len();
    let reader = open_parquet(path)?;
    let roles = Arc::new(Roles::of(reader.schema(), package, questions.template())?);
    let all = reader.metadata().file_metadata().num_rows().max(1) as u64;
    let rows = batch_rows(reader.metadata(), CHUNK_ROWS);
    let reader = reader.with_batch_size(rows).build().map_err(|e| unreadable(&e))?;
    for batch in reader {
        let batch = batch.map_err(|e| unreadable(&e))?;
        // Rows with long lists make smaller chunks.
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

/// A file that counts the bytes read from it.
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
