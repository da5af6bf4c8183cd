//! Reading segments: record by record, and after a crash deciding what the end of the last one is.
//!
//! A crash may leave the records of the last commit torn: cut off by the end of the file, or with sectors that were never
//! written, which read as zeros. Nobody was told that these are durable, so they are cut. Anything else that is wrong is
//! damage, and may be damage to what somebody was told is durable: the log refuses to open and names the place.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::Record;
use super::format::{HEAD_BYTES, HEADER_BYTES, Head, PAYLOAD_BYTES_MAX, read_header};
use sterling_core::error::{Error, Result};

/// A disk writes that many bytes whole or not at all.
const SECTOR_BYTES: usize = 512;
/// Bytes that are read at a time.
const READ_BYTES: usize = 256 << 10;
/// How the names of segments end.
const SUFFIX: &str = ".log";

/// A segment on the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) first: u64,
    pub(super) path: PathBuf,
    /// Bytes of its file once it is full; 0 of the one that is written.
    pub(super) bytes: u64,
}

impl Segment {
    /// The segment whose first record has a position.
    pub(super) fn new(folder: &Path, first: u64) -> Self {
        Segment { first, path: folder.join(format!("{first:020}{SUFFIX}")), bytes: 0 }
    }
}

/// The segments of a folder in their order.
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

/// Reads the records of one segment.
pub(super) struct Cursor {
    path: PathBuf,
    file: BufReader<File>,
    /// The position of the next record.
    next: u64,
    /// Where it starts, in bytes of the file.
    offset: u64,
}

impl Cursor {
    /// Reads from the start of a segment.
    pub(super) fn open(segment: &Segment) -> Result<Self> {
        let path = &segment.path;
        let file = File::open(path).map_err(|e| Error::io(path.display(), e))?;
        let mut file = BufReader::with_capacity(READ_BYTES, file);
        let mut bytes = [0; HEADER_BYTES];
        file.read_exact(&mut bytes).map_err(|e| Error::io(path.display(), e))?;
        match read_header(&bytes) {
            Ok(first) if first == segment.first => {}
            Ok(first) => return Err(Error::corrupt(format!("{}: it begins at position {first}", path.display()))),
            Err(why) => return Err(Error::corrupt(format!("{}: {why}", path.display()))),
        }
        Ok(Cursor { path: path.clone(), file, next: segment.first, offset: HEADER_BYTES as u64 })
    }

    pub(super) fn next_position(&self) -> u64 {
        self.next
    }

    /// Where the next record starts, in bytes of the file.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// The next record, or `None` where the file holds no whole one there.
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

    /// Reads as much as there is.
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

    /// What is wrong at the place where no whole record starts.
    pub(super) fn damaged(&self, what: &str) -> Error {
        Error::corrupt(format!(
            "{}: the record of position {}, at byte {}, {what}",
            self.path.display(),
            self.next,
            self.offset
        ))
    }

    /// Decides what follows the last whole record of the last segment: nothing, or what a crash has torn, which is never a record
    /// up to the position `durable`.
    ///
    /// # Errors
    /// `Corrupt` with the place where it is neither.
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
            return Err(self.damaged(&format!("is damaged, and record {later} behind it knows that it was durable")));
        }
        let is_cut = match Head::read(&rest) {
            Some(head) => rest.len() < HEAD_BYTES + head.length,
            None => rest.len() < HEAD_BYTES,
        };
        let length = Head::read(&rest).map_or(HEAD_BYTES, |head| HEAD_BYTES + head.length);
        if is_cut || has_empty_sector(&rest[..length.min(rest.len())], self.offset) {
            return Ok(rest.len() as u64);
        }
        Err(self.damaged("is damaged: no crash leaves it so"))
    }
}

/// A whole record of `rest` that was written when the one of `position` was durable.
fn synced_later(rest: &[u8], position: u64) -> Option<u64> {
    let most = position.saturating_add((rest.len() / HEAD_BYTES) as u64);
    (0..rest.len().saturating_sub(HEAD_BYTES)).find_map(|at| {
        // Most places are no head: their position alone says so.
        let named = rest[at + 8..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let head = (named > position && named <= most).then(|| Head::read(&rest[at..])).flatten()?;
        let payload = rest[at + HEAD_BYTES..].get(..head.length.min(PAYLOAD_BYTES_MAX))?;
        (head.synced >= position && head.is_check_of(payload)).then_some(head.position)
    })
}

/// True where the part of the bytes in any sector of the disk is zero; they start at `offset` of a file.
fn has_empty_sector(bytes: &[u8], offset: u64) -> bool {
    let first = SECTOR_BYTES - offset as usize % SECTOR_BYTES;
    let (head, rest) = bytes.split_at(first.min(bytes.len()));
    std::iter::once(head).chain(rest.chunks(SECTOR_BYTES)).any(|part| part.iter().all(|&byte| byte == 0))
}
