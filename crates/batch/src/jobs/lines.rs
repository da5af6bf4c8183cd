//! Reads lines of bounded length.

use std::io::{BufRead, ErrorKind};

/// Reads a line without its newline into `line`, and keeps at most `most + 1` bytes, so that the caller can detect a
/// line of more than `most` bytes. Returns the number of bytes consumed, 0 at the end of the input.
///
/// # Errors
/// Errors of the reader.
pub fn next_line(file: &mut impl BufRead, line: &mut Vec<u8>, most: usize) -> std::io::Result<u64> {
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
