//! Rows of JSON lines files.

use std::io::BufRead;

use crate::jobs::next_line;
use sterling_core::error::{Error, Result};

const ROW_BYTES_MAX: usize = 8 << 20;

/// Iterates over the rows of a JSON lines file; skips empty lines.
pub struct Lines {
    from: Box<dyn BufRead>,
    is_first: bool,
}

impl Lines {
    /// The rows of a text.
    pub fn new(from: Box<dyn BufRead>) -> Self {
        Lines { from, is_first: true }
    }

    /// Returns the next row, or the row's error if it is too long or not UTF-8.
    ///
    /// # Errors
    /// Errors of the reader.
    pub fn next_row(&mut self) -> std::io::Result<Option<Result<String>>> {
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
