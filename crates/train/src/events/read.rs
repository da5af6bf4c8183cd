//! Reads files of events in chunks, with a bounded number of events in memory.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::check::{Checker, Event};
use super::raw::RejectionReason;
use super::{table, wire};
use sterling_batch::Lines;
use sterling_core::error::{Error, Result};
use sterling_snapshot::items::{RowFile, batch_rows, open_parquet, text_of, unreadable};

/// Events per chunk.
pub(crate) const CHUNK_EVENTS: usize = 256;
/// Number of bytes of lines after which a chunk ends before it has [`CHUNK_EVENTS`] events.
const CHUNK_BYTES: usize = 1 << 20;
/// Path that means standard input.
const STDIN: &str = "-";

/// Result of reading one line or row.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// A valid event.
    Event(Event),
    /// A rejected line or row: its number, from 1, and the reason.
    Refused(u64, RejectionReason),
}

/// Consecutive events of a file.
#[derive(Debug)]
pub(crate) struct Chunk {
    /// Index of the file among the inputs.
    pub(crate) file: usize,
    /// Approximate number of bytes of all files up to the end of the chunk.
    pub(crate) bytes: u64,
    pub(crate) outcomes: Vec<Outcome>,
}

/// Event files of a run, in their order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Inputs {
    files: Vec<InputFile>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct InputFile {
    path: PathBuf,
    /// Size of the file in bytes; 0 for standard input.
    bytes: u64,
}

impl Inputs {
    /// Opens the files that paths name: files, folders of files, or `-`.
    ///
    /// # Errors
    /// `NotFound` or `Io` with the path; `Invalid` for a folder without files, and for standard input named twice.
    pub(crate) fn open(paths: &[PathBuf]) -> Result<Self> {
        let mut files = Vec::new();
        for path in paths {
            if path == Path::new(STDIN) {
                files.push(InputFile { path: path.clone(), bytes: 0 });
                continue;
            }
            let found = match path.is_dir() {
                true => RowFile::below(path)?,
                false => vec![RowFile::alone(path.clone())],
            };
            if found.is_empty() {
                return Err(Error::invalid(format!(
                    "{}: the folder has no files, expected files of events",
                    path.display()
                )));
            }
            for RowFile { path, .. } in found {
                let bytes = std::fs::metadata(&path).map_err(|e| Error::io(path.display(), e))?.len();
                files.push(InputFile { path, bytes });
            }
        }
        let inputs = Inputs { files };
        match inputs.files.iter().filter(|file| file.path == Path::new(STDIN)).count() {
            0 | 1 => Ok(inputs),
            count => Err(Error::invalid(format!("events: `{STDIN}` is named {count} times, expected once"))),
        }
    }

    /// Returns the size of all files in bytes; none if one of them is standard input.
    pub(crate) fn bytes(&self) -> Option<u64> {
        self.is_rereadable().then(|| self.files.iter().map(|file| file.bytes).sum())
    }

    /// Returns whether the inputs can be read more than once.
    pub(crate) fn is_rereadable(&self) -> bool {
        self.files.iter().all(|file| file.path != Path::new(STDIN))
    }

    /// Returns the name of a file for messages.
    pub(crate) fn name(&self, file: usize) -> String {
        self.files[file].path.display().to_string()
    }

    /// Reads all events in their order until `take` returns false.
    ///
    /// # Errors
    /// With the file: `NotFound` or `Io`; `Invalid` if the file is neither Parquet nor JSON lines, is truncated, or has
    /// columns that are not event fields.
    pub(crate) fn read(&self, checker: &mut Checker<'_>, take: &mut dyn FnMut(Chunk) -> bool) -> Result<()> {
        let mut before = 0;
        for (number, file) in self.files.iter().enumerate() {
            let mut taker = EventReader { file: number, before, checker: &mut *checker, take: &mut *take };
            match read(&file.path, &mut taker).map_err(|e| e.within(file.path.display()))? {
                true => before += file.bytes,
                false => return Ok(()),
            }
        }
        Ok(())
    }
}

/// Validates the events of a file and passes them to `take` in chunks.
struct EventReader<'a, 'c> {
    file: usize,
    before: u64,
    checker: &'a mut Checker<'c>,
    take: &'a mut dyn FnMut(Chunk) -> bool,
}

impl EventReader<'_, '_> {
    /// Validates events, each with its line or row number, and passes them to `take`; `bytes` is how much of the file was read.
    fn give(&mut self, raw: Vec<(u64, Result<super::raw::RawEvent, RejectionReason>)>, bytes: u64) -> bool {
        let checked = raw.into_iter().map(|(line, raw)| match raw.and_then(|raw| self.checker.check(raw)) {
            Ok(event) => Outcome::Event(event),
            Err(refusal) => Outcome::Refused(line, refusal),
        });
        let outcomes = checked.collect();
        (self.take)(Chunk { file: self.file, bytes: self.before + bytes, outcomes })
    }
}

/// Reads a file to its end; returns false if no more events are wanted.
fn read(path: &Path, taker: &mut EventReader<'_, '_>) -> Result<bool> {
    let bytes = Arc::new(AtomicU64::new(0));
    let lines = if path == Path::new(STDIN) {
        let lines = text_of(path, Counted { from: std::io::stdin(), bytes: bytes.clone() })?;
        lines.ok_or_else(|| Error::unsupported("got Parquet, expected JSON lines: name the file instead"))?
    } else {
        let file = File::open(path).map_err(|e| Error::io("events", e))?;
        match text_of(path, Counted { from: file, bytes: bytes.clone() })? {
            Some(lines) => lines,
            None => return read_table(path, taker),
        }
    };
    let mut lines = Lines::new(lines);
    loop {
        let (mut raw, mut held) = (Vec::new(), 0);
        while raw.len() < CHUNK_EVENTS
            && held < CHUNK_BYTES
            && let Some(row) = lines.next_row().map_err(|e| Error::io(format!("line {}", lines.line() + 1), e))?
        {
            held += row.as_ref().map_or(0, String::len);
            let row = row.map_err(|e| RejectionReason::of("", e.to_string()));
            raw.push((lines.line(), row.and_then(|row| wire::read(&row))));
        }
        if raw.is_empty() {
            return Ok(true);
        }
        if !taker.give(raw, bytes.load(Ordering::Relaxed)) {
            return Ok(false);
        }
    }
}

fn read_table(path: &Path, taker: &mut EventReader<'_, '_>) -> Result<bool> {
    let bytes = std::fs::metadata(path).map_err(|e| Error::io("events", e))?.len();
    let reader = open_parquet(path)?;
    table::check(reader.schema())?;
    let all = reader.metadata().file_metadata().num_rows().max(1) as u64;
    let rows = batch_rows(reader.metadata(), CHUNK_EVENTS);
    let reader = reader.with_batch_size(rows).build().map_err(|e| unreadable(&e))?;
    let mut row = 0;
    for batch in reader {
        let batch = batch.map_err(|e| unreadable(&e))?;
        let raw = (row + 1..).zip(table::rows(&batch, row)).collect();
        row += batch.num_rows() as u64;
        let done = (u128::from(bytes) * u128::from(row) / u128::from(all)) as u64;
        if !taker.give(raw, done) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Reader that counts the bytes read.
struct Counted<R> {
    from: R,
    bytes: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.from.read(buffer)?;
        self.bytes.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}
