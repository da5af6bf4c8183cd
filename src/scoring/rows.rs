//! Rows of an input file, in chunks.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::Path;

use crate::error::{Error, Result};

/// Rows that are scored together.
const CHUNK_ROWS: usize = 64;
/// Bytes of rows after which a chunk ends before it has so many.
const CHUNK_BYTES: usize = 1 << 20;
/// Longest row, in bytes.
const ROW_BYTES_MAX: usize = 8 << 20;

/// Consecutive rows of a file.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    /// Its place among the chunks of the file.
    pub(super) number: usize,
    /// The row of the file that it begins with, from 0.
    pub(super) first_row: u64,
    /// The rows; an error where a line is none.
    pub(super) lines: Vec<Result<String>>,
    /// Bytes of the file up to its end.
    pub(super) bytes: u64,
}

/// Hands the chunks of a file of JSON lines out until `take` says that it wants no more. Empty lines are no rows.
pub(super) fn read(path: &Path, mut take: impl FnMut(Chunk) -> bool) -> Result<()> {
    let io = |e| Error::io(path.display(), e);
    let mut file = BufReader::with_capacity(1 << 20, File::open(path).map_err(io)?);
    let mut chunk = Chunk::default();
    let (mut row, mut bytes, mut held) = (0, 0, 0);
    loop {
        let mut line = Vec::new();
        let read = next_line(&mut file, &mut line, ROW_BYTES_MAX).map_err(io)?;
        if bytes == 0 && line.starts_with(b"\xef\xbb\xbf") {
            line.drain(..3);
        }
        bytes += read;
        let text = match line.len() > ROW_BYTES_MAX {
            true => Some(Err(Error::invalid(format!("longer than {ROW_BYTES_MAX} bytes")))),
            false => text(line).transpose(),
        };
        if let Some(text) = text {
            held += text.as_ref().map_or(0, String::len);
            chunk.lines.push(text);
            row += 1;
        }
        let is_full = chunk.lines.len() == CHUNK_ROWS || held >= CHUNK_BYTES;
        if is_full || (read == 0 && !chunk.lines.is_empty()) {
            let next = Chunk { number: chunk.number + 1, first_row: row, ..Chunk::default() };
            held = 0;
            if !take(Chunk { bytes, ..std::mem::replace(&mut chunk, next) }) {
                return Ok(());
            }
        }
        if read == 0 {
            return Ok(());
        }
    }
}

/// The text of a line without what surrounds it; none where nothing is left.
fn text(line: Vec<u8>) -> Result<Option<String>> {
    if line.trim_ascii().is_empty() {
        return Ok(None);
    }
    let text = String::from_utf8(line).map_err(|e| Error::invalid(format!("not UTF-8: {}", e.utf8_error())))?;
    Ok(Some(text))
}

/// Reads a line without its end, of which it keeps one byte more than `most`; the bytes that it went over, none at the end.
pub(super) fn next_line(file: &mut impl BufRead, line: &mut Vec<u8>, most: usize) -> std::io::Result<u64> {
    let mut read = 0;
    loop {
        let here = match file.fill_buf() {
            Ok(here) => here,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        let end = here.iter().position(|&byte| byte == b'\n');
        let used = end.map_or(here.len(), |at| at + 1);
        let kept = end.unwrap_or(here.len()).min((most + 1).saturating_sub(line.len()));
        line.extend_from_slice(&here[..kept]);
        file.consume(used);
        read += used as u64;
        if end.is_some() || used == 0 {
            return Ok(read);
        }
    }
}
