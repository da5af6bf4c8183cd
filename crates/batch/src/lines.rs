//! Rows of JSON lines files.

use std::io::BufRead;

use crate::jobs::next_line;
use sterling_core::error::{Error, Result};

const ROW_BYTES_MAX: usize = 8 << 20;

/// Iterates over the rows of a JSON lines file; skips empty lines.
pub struct Lines {
    from: Box<dyn BufRead>,
    /// Number of lines read, blank ones too.
    line: u64,
}

impl Lines {
    /// Iterates over the rows of `from`.
    pub fn new(from: Box<dyn BufRead>) -> Self {
        Lines { from, line: 0 }
    }

    /// Returns the line of the last row, from 1; blank lines count.
    pub fn line(&self) -> u64 {
        self.line
    }

    /// Returns the next row, or the row's error if it is too long or not UTF-8.
    ///
    /// # Errors
    /// Errors of the reader.
    pub fn next_row(&mut self) -> std::io::Result<Option<Result<String>>> {
        loop {
            let mut line = Vec::new();
            let read = next_line(&mut self.from, &mut line, ROW_BYTES_MAX)?;
            self.line += u64::from(read > 0);
            if self.line == 1 && line.starts_with(b"\xef\xbb\xbf") {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn blank_lines_are_counted_and_skipped() {
        let long = "x".repeat(ROW_BYTES_MAX + 1);
        let text = format!("\u{feff}\n\na\n   \r\n\nb\n{long}\n\nc\n\n");
        let mut lines = Lines::new(Box::new(std::io::Cursor::new(text)));
        let mut rows = Vec::new();
        while let Some(row) = lines.next_row().unwrap() {
            rows.push((lines.line(), row.unwrap_or_else(|e| e.to_string()[..11].to_owned())));
        }
        assert_eq!(rows, [(3, "a".into()), (6, "b".into()), (7, "longer than".into()), (9, "c".to_owned())]);
    }
}
