//! The few operations on files that a log depends on, so that tests can make each of them fail.

use std::fs::File;
use std::io::{Error, ErrorKind, Result, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::files;

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

impl Tail for File {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        Write::write(self, bytes)
    }

    fn sync(&mut self) -> Result<()> {
        self.sync_data()?;
        match self.metadata()?.nlink() {
            // What is durable under no name is found by no start.
            0 => Err(Error::new(ErrorKind::NotFound, "its file was removed")),
            _ => Ok(()),
        }
    }

    fn cut(&mut self, bytes: u64) -> Result<()> {
        self.set_len(bytes)?;
        self.seek(SeekFrom::Start(bytes)).map(drop)
    }
}

impl Disk for RealDisk {
    fn create(&self, path: &Path) -> Result<Box<dyn Tail>> {
        File::options().write(true).create_new(true).open(path).map(|file| Box::new(file) as _)
    }

    fn open(&self, path: &Path) -> Result<Box<dyn Tail>> {
        let mut file = File::options().write(true).open(path)?;
        file.seek(SeekFrom::End(0))?;
        Ok(Box::new(file))
    }

    fn sync_folder(&self, folder: &Path) -> Result<()> {
        files::sync_folder(folder)
    }
}
