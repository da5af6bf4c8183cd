//! Contents of complete files: mapped if they are immutable, read otherwise.
//!
//! A map shows the file's current contents at each access, and an access beyond the end of a truncated file ends the
//! process (`SIGBUS`). So only files of a store are mapped, and only until they are copied: after a load, a server uses
//! its own memory. Files of users, which a training job may still be writing, are read into memory instead, and
//! rejected if they change meanwhile.

use std::fs::File;
use std::io::Read;
use std::ops::Deref;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::SystemTime;

use bytemuck::{Pod, Zeroable};

use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Kind, Result};

/// Allocations of at least this size request transparent huge pages, which cover 512 times more memory per TLB entry.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Allocations up to this size come from the heap, which reuses memory; pages from the kernel would cost a fault each.
const HEAP_BYTES: usize = 1 << 20;

/// Opens a regular file for reading. Other files are rejected: opening a pipe may block until a writer appears, and a device may
/// have no end.
///
/// # Errors
/// `NotFound` or `Io` with the path; `Io` also for a file that is not regular.
pub fn open(path: &Path) -> Result<File> {
    may_block();
    let io = |e| Error::io(path.display(), e);
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(io)?;
    match file.metadata().map_err(io)?.is_file() {
        true => Ok(file),
        false => Err(Error::new(Kind::Io, format!("{}: not a regular file", path.display()))),
    }
}

/// Read-only contents of a complete file.
#[derive(Debug, Default)]
pub struct Map {
    held: MapStorage,
}

#[derive(Debug, Default)]
enum MapStorage {
    #[default]
    Nothing,
    /// A mapped file, and the open file from which copies are read.
    File(memmap2::Mmap, ForeignFile),
    /// Anonymous memory.
    Pages(memmap2::Mmap),
    /// Heap memory in cache lines, and its length in bytes.
    Heap(Vec<Line>, usize),
}

/// A cache line, so that data on the heap has the alignment that it has in a map, up to a line.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Map {
    /// Maps a file of a store: such files are written under another name, renamed, and never changed. An empty file
    /// gives an empty map.
    ///
    /// # Errors
    /// `NotFound` or `Io` with the path.
    pub fn published(path: &Path) -> Result<Self> {
        let file = ForeignFile::open(path)?;
        if file.is_empty() {
            return Ok(Map::default());
        }
        // SAFETY: published files are immutable by the store's contract (written under another name, then renamed), so
        // the bytes do not change and are not truncated while they are mapped.
        let map = unsafe { memmap2::Mmap::map(&file.file) }.map_err(|e| Error::io(path.display(), e))?;
        Ok(Map { held: MapStorage::File(map, file) })
    }

    /// Reads a file into memory; other processes may modify the file.
    ///
    /// # Errors
    /// As [`ForeignFile`].
    pub fn read(path: &Path) -> Result<Self> {
        let mut file = ForeignFile::open(path)?;
        let mut read = Ok(());
        let map = Map::filled(file.len(), |to| read = file.read(to))?;
        read.and_then(|()| file.finish()).map_err(|e| e.within(path.display()))?;
        Ok(map)
    }

    /// Allocates memory that `fill` writes once.
    ///
    /// # Errors
    /// `Overloaded` if the allocation fails.
    pub fn filled(bytes: usize, fill: impl FnOnce(&mut [u8])) -> Result<Self> {
        if bytes == 0 {
            fill(&mut []);
            return Ok(Map::default());
        }
        let lacking = |e: &dyn std::fmt::Display| Error::overloaded(format!("cannot map {bytes} bytes of memory: {e}"));
        if bytes <= HEAP_BYTES {
            let (mut lines, count) = (Vec::new(), bytes.div_ceil(size_of::<Line>()));
            lines.try_reserve_exact(count).map_err(|e| lacking(&e))?;
            lines.resize(count, Line::zeroed());
            fill(&mut bytemuck::cast_slice_mut(&mut lines)[..bytes]);
            return Ok(Map { held: MapStorage::Heap(lines, bytes) });
        }
        let mut map = memmap2::MmapMut::map_anon(bytes).map_err(|e| lacking(&e))?;
        if bytes >= HUGE_PAGE_BYTES {
            // The call fails if the system has no huge pages; small pages are slower but correct.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        fill(&mut map);
        Ok(Map { held: MapStorage::Pages(map.make_read_only().map_err(|e| lacking(&e))?) })
    }

    /// Copies the bytes from `start` on. Bytes of a mapped file are read from the file instead of the map, so that a
    /// file that was truncated or modified after it was mapped gives an error instead of ending the process.
    ///
    /// # Errors
    /// As [`ForeignFile::read_at`].
    pub fn copy_to(&self, start: usize, to: &mut [u8]) -> Result<()> {
        match &self.held {
            MapStorage::File(_, file) => file.read_at(start as u64, to),
            MapStorage::Nothing | MapStorage::Pages(_) | MapStorage::Heap(..) => {
                to.copy_from_slice(&self[start..start + to.len()]);
                Ok(())
            }
        }
    }
}

impl Deref for Map {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.held {
            MapStorage::Nothing => &[],
            MapStorage::File(map, _) | MapStorage::Pages(map) => map,
            MapStorage::Heap(lines, bytes) => &bytemuck::cast_slice(lines)[..*bytes],
        }
    }
}

/// A file that other processes may modify; a modification during reading is an error.
#[derive(Debug)]
pub struct ForeignFile {
    file: File,
    len: usize,
    modified: Option<SystemTime>,
}

impl ForeignFile {
    /// Opens a file for reading from its start.
    ///
    /// # Errors
    /// `NotFound` or `Io` with the path.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |e| Error::io(path.display(), e);
        ForeignFile::of(open(path)?).map_err(io)
    }

    /// Wraps an open file, positioned at its start.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn of(file: File) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(ForeignFile { file, len: metadata.len() as usize, modified: metadata.modified().ok() })
    }

    /// Returns the length of the file when it was opened, in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the file was empty when it was opened.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads the next bytes.
    ///
    /// # Errors
    /// `Io`, also if the file ends earlier.
    pub fn read(&mut self, to: &mut [u8]) -> Result<()> {
        self.file.read_exact(to).map_err(|e| self.unread(e))
    }

    /// Reads the bytes from `start` on, independent of earlier reads.
    ///
    /// # Errors
    /// As [`ForeignFile::read`] and [`ForeignFile::finish`].
    pub fn read_at(&self, start: u64, to: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(to, start).map_err(|e| self.unread(e))?;
        self.finish()
    }

    /// Checks that the file did not change between opening and now, so that the bytes read belong to one version of it.
    ///
    /// # Errors
    /// `Io` if the file has changed since it was opened.
    pub fn finish(&self) -> Result<()> {
        let now = self.file.metadata().map_err(|e| Error::io("reading", e))?;
        match now.len() as usize == self.len && now.modified().ok() == self.modified {
            true => Ok(()),
            false => Err(self.changed()),
        }
    }

    fn unread(&self, e: std::io::Error) -> Error {
        match e.kind() {
            std::io::ErrorKind::UnexpectedEof => self.changed(),
            _ => Error::io("reading", e),
        }
    }

    fn changed(&self) -> Error {
        let found = self.file.metadata().map_or(0, |m| m.len());
        let what = format!("changed while it was read: it had {} bytes and has {found}", self.len);
        Error::new(Kind::Io, what)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_foreign_file_that_changes_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let changes: [fn(&Path); 3] = [
            |path| File::options().write(true).open(path).unwrap().set_len(3).unwrap(),
            |path| File::options().write(true).open(path).unwrap().set_len(30_000).unwrap(),
            |path| {
                let file = File::options().write(true).open(path).unwrap();
                file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
            },
        ];
        for change in changes {
            std::fs::write(file.path(), vec![7; 20_000]).unwrap();
            let mut foreign = ForeignFile::open(file.path()).unwrap();
            let mut bytes = vec![0; 10_000];
            foreign.read(&mut bytes).unwrap();
            change(file.path());
            let rest = foreign.read(&mut bytes).and_then(|()| foreign.finish());
            assert!(rest.unwrap_err().to_string().contains("changed while it was read: it had 20000 bytes"));
        }
        std::fs::write(file.path(), vec![7; 20_000]).unwrap();
        assert_eq!(&*Map::read(file.path()).unwrap(), vec![7; 20_000]);
        std::fs::write(file.path(), b"").unwrap();
        assert!(Map::read(file.path()).unwrap().is_empty() && Map::published(file.path()).unwrap().is_empty());
    }

    #[test]
    fn copies_of_a_mapped_file_that_changed_are_errors() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![7; 20_000]).unwrap();
        let map = Map::published(file.path()).unwrap();
        let mut bytes = vec![0; 10_000];
        map.copy_to(10_000, &mut bytes).unwrap();
        assert_eq!(bytes, vec![7; 10_000]);
        file.as_file().set_len(4096).unwrap();
        for start in [0, 10_000] {
            let error = map.copy_to(start, &mut bytes).unwrap_err().to_string();
            assert!(error.contains("it had 20000 bytes and has 4096"), "{error}");
        }
    }

    #[test]
    fn read_bytes_survive_a_truncated_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![7; 1 << 20]).unwrap();
        let map = Map::read(file.path()).unwrap();
        file.as_file().set_len(0).unwrap();
        assert!(map.iter().all(|&byte| byte == 7));
    }
}
