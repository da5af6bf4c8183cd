//! File operations of a log behind a trait, so that tests can inject a fault into each of them.

use std::fs::{File, Metadata};
use std::io::{Error, ErrorKind, Result, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use sterling_core::blocking::may_block;
use sterling_storage::files;

/// A file that is opened for appending.
pub trait Tail: Send {
    /// Appends a prefix of the bytes and returns its length.
    ///
    /// # Errors
    /// Errors of the operating system; after an error some of the bytes may be in the file, but none count as written.
    fn write(&mut self, bytes: &[u8]) -> Result<usize>;

    /// Makes all written bytes durable.
    ///
    /// # Errors
    /// Errors of the operating system; after an error, bytes written since the last successful sync must be treated as lost.
    fn sync(&mut self) -> Result<()>;

    /// Truncates the file to a length.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn cut(&mut self, bytes: u64) -> Result<()>;

    /// Checks that a restart would find the file under its name with the written length. The default implementation checks nothing.
    ///
    /// # Errors
    /// Reason why a restart would not find the file with that length.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// Storage of a log's files.
pub trait Disk: Send + Sync {
    /// Creates a new file.
    ///
    /// # Errors
    /// Errors of the operating system, including the error that the file exists.
    fn create(&self, path: &Path) -> Result<Box<dyn Tail>>;

    /// Opens a file for appending.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn open(&self, path: &Path) -> Result<Box<dyn Tail>>;

    /// Makes the directory entries of a folder durable.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn sync_folder(&self, folder: &Path) -> Result<()>;
}

/// File system of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealDisk;

/// File of the operating system, opened for appending.
struct RealTail {
    path: PathBuf,
    file: File,
    /// Device and inode number, which identify the file under any name.
    identity: (u64, u64),
    /// Number of bytes that were written to the file.
    bytes: u64,
}

impl RealTail {
    fn boxed(path: &Path, mut file: File) -> Result<Box<dyn Tail>> {
        let (identity, bytes) = (identity(&file.metadata()?), file.seek(SeekFrom::End(0))?);
        Ok(Box::new(RealTail { path: path.to_owned(), file, identity, bytes }))
    }
}

fn identity(of: &Metadata) -> (u64, u64) {
    (of.dev(), of.ino())
}

impl Tail for RealTail {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        may_block();
        let written = self.file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn sync(&mut self) -> Result<()> {
        may_block();
        self.file.sync_data()?;
        // Durable bytes are lost to a restart if the file was removed or renamed.
        self.check()
    }

    fn cut(&mut self, bytes: u64) -> Result<()> {
        may_block();
        self.file.set_len(bytes)?;
        self.bytes = bytes;
        self.file.seek(SeekFrom::Start(bytes)).map(drop)
    }

    fn check(&self) -> Result<()> {
        may_block();
        let found = match std::fs::metadata(&self.path) {
            Ok(found) => found,
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Err(Error::new(ErrorKind::NotFound, "the segment's file was removed or renamed"));
            }
            // A failed check does not prove that the file has changed.
            Err(_) => return Ok(()),
        };
        if identity(&found) != self.identity {
            return Err(Error::new(ErrorKind::NotFound, "another file replaced the segment's file"));
        }
        match found.len() {
            bytes if bytes == self.bytes => Ok(()),
            bytes => Err(Error::other(format!("the segment's file has {bytes} bytes, expected {}", self.bytes))),
        }
    }
}

impl Disk for RealDisk {
    fn create(&self, path: &Path) -> Result<Box<dyn Tail>> {
        may_block();
        RealTail::boxed(path, File::options().write(true).create_new(true).open(path)?)
    }

    fn open(&self, path: &Path) -> Result<Box<dyn Tail>> {
        may_block();
        RealTail::boxed(path, File::options().write(true).open(path)?)
    }

    fn sync_folder(&self, folder: &Path) -> Result<()> {
        files::sync_folder(folder)
    }
}
