//! Reader of segments, and recovery of the last segment's end after a crash.
//!
//! A crash may tear the records of the last commit: truncated by the end of the file, or with unwritten sectors, which read as
//! zeros. Torn records were never acknowledged, so they are truncated. Any other fault is damage, possibly of acknowledged records:
//! the log then fails to open, with the location of the damage.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::Record;
use super::format::{HEAD_BYTES, HEADER_BYTES, Head, PAYLOAD_BYTES_MAX, read_header};
use sterling_core::error::{Error, Result};

/// Bytes that a disk writes atomically.
const SECTOR_BYTES: usize = 512;
/// Number of bytes per read of a segment.
const READ_BYTES: usize = 256 << 10;
/// File name extension of segments.
const SUFFIX: &str = ".log";

/// A segment on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) first: u64,
    pub(super) path: PathBuf,
    /// Bytes of the segment's file once it is full; 0 for the segment that is being written.
    pub(super) bytes: u64,
}

impl Segment {
    /// Returns the segment whose first record has this position.
    pub(super) fn new(folder: &Path, first: u64) -> Self {
        Segment { first, path: folder.join(format!("{first:020}{SUFFIX}")), bytes: 0 }
    }
}

/// Lists the segments of a folder in order.
pub(super) fn segments(folder: &Path) -> Result<Vec<Segment>> {
    let io = |e| Error::io(folder.display(), e);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        let name = name.to_string_lossy();
        let first =
            name.strip_suffix(SUFFIX).filter(|digits| digits.len() == 20).and_then(|digits| digits.parse().ok());
        found.extend(first.map(|first| Segment::new(folder, first)));
    }
    found.sort_by_key(|segment| segment.first);
    Ok(found)
}

/// Reader of one segment's records.
pub(super) struct Cursor {
    path: PathBuf,
    file: BufReader<File>,
    /// Position of the next record.
    next: u64,
    /// File offset of the next record.
    offset: u64,
}

impl Cursor {
    /// Opens a segment for reading, at its first record.
    pub(super) fn open(segment: &Segment) -> Result<Self> {
        let path = &segment.path;
        let file = File::open(path).map_err(|e| Error::io(path.display(), e))?;
        let mut file = BufReader::with_capacity(READ_BYTES, file);
        let mut bytes = [0; HEADER_BYTES];
        file.read_exact(&mut bytes).map_err(|e| Error::io(path.display(), e))?;
        match read_header(&bytes) {
            Ok(first) if first == segment.first => {}
            Ok(first) => {
                return Err(Error::corrupt(format!(
                    "{}: the header begins at position {first}, expected the position in the file name",
                    path.display()
                )));
            }
            Err(why) => return Err(Error::corrupt(format!("{}: {why}", path.display()))),
        }
        Ok(Cursor { path: path.clone(), file, next: segment.first, offset: HEADER_BYTES as u64 })
    }

    pub(super) fn next_position(&self) -> u64 {
        self.next
    }

    /// Returns the file offset of the next record.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the next record, or `None` if there is no complete and valid record.
    pub(super) fn record(&mut self) -> Result<Option<Record>> {
        let mut head = [0; HEAD_BYTES];
        let read = self.read(&mut head)?;
        let head = Head::read(&head[..read]).filter(|head| head.position == self.next);
        let Some(head) = head else { return self.back() };
        let mut payload = vec![0; head.length];
        if self.read(&mut payload)? < head.length || !head.is_check_of(&payload) {
            return self.back();
        }
        self.next += 1;
        self.offset += (HEAD_BYTES + head.length) as u64;
        Ok(Some(Record { position: head.position, payload }))
    }

    /// Reads until the buffer is full or the file ends.
    fn read(&mut self, to: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while done < to.len() {
            match self.file.read(&mut to[done..]) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::io(self.path.display(), e)),
            }
        }
        Ok(done)
    }

    fn back(&mut self) -> Result<Option<Record>> {
        self.file.seek(SeekFrom::Start(self.offset)).map_err(|e| Error::io(self.path.display(), e))?;
        Ok(None)
    }

    /// Returns the error of an invalid record at the current offset.
    pub(super) fn damaged(&self, what: &str) -> Error {
        Error::corrupt(format!(
            "{}: the record of position {}, at byte {}, {what}",
            self.path.display(),
            self.next,
            self.offset
        ))
    }

    /// Returns the number of bytes after the last valid record of the last segment: 0, or the length of a torn write. A record up
    /// to position `durable` cannot be torn.
    ///
    /// # Errors
    /// `Corrupt` with the location if the bytes are no torn write.
    pub(super) fn check_end(&mut self, durable: u64) -> Result<u64> {
        let mut rest = Vec::new();
        self.file.read_to_end(&mut rest).map_err(|e| Error::io(self.path.display(), e))?;
        if rest.is_empty() {
            return Ok(0);
        }
        if self.next <= durable {
            return Err(self.damaged(&format!("is damaged, and position {durable} was durable")));
        }
        if let Some(later) = synced_later(&rest, self.next) {
            return Err(self.damaged(&format!("is damaged, and record {later} after it shows that it was durable")));
        }
        let is_cut = match Head::read(&rest) {
            Some(head) => rest.len() < HEAD_BYTES + head.length,
            None => rest.len() < HEAD_BYTES,
        };
        let length = Head::read(&rest).map_or(HEAD_BYTES, |head| HEAD_BYTES + head.length);
        if is_cut || has_empty_sector(&rest[..length.min(rest.len())], self.offset) {
            return Ok(rest.len() as u64);
        }
        Err(self.damaged("is damaged in a way that no crash causes"))
    }
}

/// Returns a valid record in `rest` that was written after the record of `position` was durable.
fn synced_later(rest: &[u8], position: u64) -> Option<u64> {
    let most = position.saturating_add((rest.len() / HEAD_BYTES) as u64);
    (0..rest.len().saturating_sub(HEAD_BYTES)).find_map(|at| {
        // At most offsets, the number in the place of the position is out of range, so no record head begins there.
        let named = rest[at + 8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let head = (named > position && named <= most).then(|| Head::read(&rest[at..])).flatten()?;
        let payload = rest[at + HEAD_BYTES..].get(..head.length.min(PAYLOAD_BYTES_MAX))?;
        (head.synced >= position && head.is_check_of(payload)).then_some(head.position)
    })
}

/// Returns whether the bytes of any disk sector are all zero; `bytes` starts at file offset `offset`.
fn has_empty_sector(bytes: &[u8], offset: u64) -> bool {
    let first = SECTOR_BYTES - offset as usize % SECTOR_BYTES;
    let (head, rest) = bytes.split_at(first.min(bytes.len()));
    std::iter::once(head).chain(rest.chunks(SECTOR_BYTES)).any(|part| part.iter().all(|&byte| byte == 0))
}
