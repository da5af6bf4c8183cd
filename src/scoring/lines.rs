//! Rows of JSON lines.

use std::io::{BufRead, ErrorKind};

use crate::error::{Error, Result};

/// Longest row, in bytes.
const ROW_BYTES_MAX: usize = 8 << 20;

/// The rows of a file of JSON lines. Empty lines are none.
pub(super) struct Lines {
    from: Box<dyn BufRead>,
    is_first: bool,
}

impl Lines {
    pub(super) fn new(from: Box<dyn BufRead>) -> Self {
        Lines { from, is_first: true }
    }

    /// The next row; an error in its place where a line is none.
    pub(super) fn next(&mut self) -> std::io::Result<Option<Result<String>>> {
        loop {
            let mut line = Vec::new();
            let read = next_line(&mut self.from, &mut line, ROW_BYTES_MAX)?;
            if std::mem::take(&mut self.is_first) && line.starts_with(b"\xef\xbb\xbf") {
                line.drain(..3);
            }
            if line.len() > ROW_BYTES_MAX {
                return Ok(Some(Err(Error::invalid(format!("longer than {ROW_BYTES_MAX} bytes")))));
            }
            if !line.trim_ascii().is_empty() {
                let text = String::from_utf8(line);
                return Ok(Some(text.map_err(|e| Error::invalid(format!("not UTF-8: {}", e.utf8_error())))));
            }
            if read == 0 {
                return Ok(None);
            }
        }
    }
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
