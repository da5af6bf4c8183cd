//! The few operations on files that a log depends on, so that tests can make each of them fail.

use std::fs::{File, Metadata};
use std::io::{Error, ErrorKind, Result, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use sterling_core::blocking::may_block;
use sterling_storage::files;

/// The end of a file that grows.
pub trait Tail: Send {
    /// Appends some of the bytes, and says how many.
    ///
    /// # Errors
    /// What the operating system says; none of the bytes count then, though some may be there.
    fn write(&mut self, bytes: &[u8]) -> Result<usize>;

    /// Makes everything that was written durable.
    ///
    /// # Errors
    /// What the operating system says; nothing since the last success may be trusted then.
    fn sync(&mut self) -> Result<()>;

    /// Cuts the file to a length.
    ///
    /// # Errors
    /// What the operating system says.
    fn cut(&mut self, bytes: u64) -> Result<()>;

    /// Checks that a start would find the file, under its name and as long as it was written. By default nothing is known of that.
    ///
    /// # Errors
    /// What is wrong with the file.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// Where a log's files lie.
pub trait Disk: Send + Sync {
    /// Makes a new file.
    ///
    /// # Errors
    /// What the operating system says, also where there is a file of the name.
    fn create(&self, path: &Path) -> Result<Box<dyn Tail>>;

    /// Opens a file at its end.
    ///
    /// # Errors
    /// What the operating system says.
    fn open(&self, path: &Path) -> Result<Box<dyn Tail>>;

    /// Makes it durable which files a folder has.
    ///
    /// # Errors
    /// What the operating system says.
    fn sync_folder(&self, folder: &Path) -> Result<()>;
}

/// Files of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealDisk;

/// The end of a file of the operating system.
struct RealTail {
    path: PathBuf,
    file: File,
    /// What the file is known by, whatever its name is.
    identity: (u64, u64),
    /// Its length, as it was written.
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
        // What is durable under no name, or under another one, is found by no start.
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
                return Err(Error::new(ErrorKind::NotFound, "its file was removed or renamed"));
            }
            // What cannot be looked at now is no worse for that.
            Err(_) => return Ok(()),
        };
        if identity(&found) != self.identity {
            return Err(Error::new(ErrorKind::NotFound, "another file has taken the place of its file"));
        }
        match found.len() {
            bytes if bytes == self.bytes => Ok(()),
            bytes => Err(Error::other(format!("its file has {bytes} bytes, expected {}", self.bytes))),
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
