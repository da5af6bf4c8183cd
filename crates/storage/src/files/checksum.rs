//! Length and hash of files, which identify them in a manifest.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Result};
use sterling_kernels::priority::breathe;

/// Length and hash of a file, as stored in the manifest.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Checksum {
    /// Length of the file in bytes.
    pub bytes: u64,
    /// XXH3-128 of the bytes, as 32 hexadecimal digits.
    pub xxh3: String,
}

impl Checksum {
    /// Computes the checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Checksum { bytes: bytes.len() as u64, xxh3: format!("{:032x}", xxhash_rust::xxh3::xxh3_128(bytes)) }
    }
}

impl Checksum {
    /// Computes the checksum of a file. Reads the file instead of mapping it, because another process may truncate it meanwhile.
    ///
    /// # Errors
    /// `NotFound` or `Io` with the path.
    pub fn of_file(path: &Path) -> Result<Self> {
        may_block();
        let read = || {
            let mut hashed = Hashed::new(std::io::sink());
            hashed.read(&mut File::open(path)?)?;
            Ok(hashed.sum())
        };
        read().map_err(|e: std::io::Error| Error::io(path.display(), e))
    }
}

/// Writer adapter that counts and hashes the bytes written through it.
pub struct Hashed<W> {
    to: W,
    hash: Xxh3,
    bytes: u64,
}

impl<W> Hashed<W> {
    /// Wraps a writer.
    pub fn new(to: W) -> Self {
        Hashed { to, hash: Xxh3::new(), bytes: 0 }
    }

    /// Returns the inner writer.
    pub fn get_ref(&self) -> &W {
        &self.to
    }

    /// Returns the number of bytes written.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns length and hash of the bytes written.
    pub fn sum(&self) -> Checksum {
        Checksum { bytes: self.bytes, xxh3: format!("{:032x}", self.hash.digest128()) }
    }
}

impl Hashed<std::io::Sink> {
    /// Hashes the rest of a file.
    fn read(&mut self, file: &mut File) -> std::io::Result<()> {
        let mut chunk = vec![0; 1 << 20];
        loop {
            match file.read(&mut chunk)? {
                0 => return Ok(()),
                n => self.write_all(&chunk[..n])?,
            }
        }
    }
}

impl Hashed<File> {
    /// Resumes at the end of a file, as if its content had been written through the adapter.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn resumed(mut file: File) -> std::io::Result<Self> {
        let mut had = Hashed::new(std::io::sink());
        had.read(&mut file)?;
        Ok(Hashed { to: file, hash: had.hash, bytes: had.bytes })
    }
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        breathe();
        let n = self.to.write(buf)?;
        self.hash.update(&buf[..n]);
        self.bytes += n as u64;
        Ok(n)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}
