//! The file of rejected events: one JSON object per line, with file, line, field and reason.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;

use sterling_core::error::{Error, Result};

/// Writer of `quarantine.jsonl`, which only the file's owner can read: events are personal data.
#[derive(Debug)]
pub(crate) struct Quarantine {
    path: PathBuf,
    file: Option<BufWriter<File>>,
    bytes: u64,
}

/// Returns the bytes of an entry's line.
fn line<T: Serialize>(entry: &T) -> Result<Vec<u8>> {
    let mut text = serde_json::to_vec(entry).map_err(|e| Error::internal(format!("quarantine: {e}")))?;
    text.push(b'\n');
    Ok(text)
}

impl Quarantine {
    /// Opens the file in a folder and truncates it to its first `bytes`.
    ///
    /// # Errors
    /// `NoSpace` or `Io` with the path; `Corrupt` if the file is shorter than `bytes`.
    pub(crate) fn open(folder: &Path, bytes: u64) -> Result<Self> {
        let path = folder.join("quarantine.jsonl");
        let mut quarantine = Quarantine { path, file: None, bytes };
        let has = std::fs::metadata(&quarantine.path).map_or(0, |found| found.len());
        if has < bytes {
            let path = quarantine.path.display();
            return Err(Error::corrupt(format!(
                "{path}: got {has} bytes, expected at least the {bytes} bytes of the checkpoint"
            )));
        }
        if has > 0 {
            quarantine.opened()?;
        }
        Ok(quarantine)
    }

    fn opened(&mut self) -> Result<&mut BufWriter<File>> {
        if self.file.is_none() {
            let io = |e| Error::io(self.path.display(), e);
            let mut options = OpenOptions::new();
            options.create(true).truncate(false).write(true);
            #[cfg(unix)]
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            let mut file = options.open(&self.path).map_err(io)?;
            file.set_len(self.bytes).map_err(io)?;
            file.seek(SeekFrom::Start(self.bytes)).map_err(io)?;
            self.file = Some(BufWriter::new(file));
        }
        self.file.as_mut().ok_or_else(|| Error::internal("the quarantine file is not open"))
    }

    /// Appends an entry.
    ///
    /// # Errors
    /// `NoSpace` or `Io` with the path.
    pub(crate) fn add<T: Serialize>(&mut self, entry: &T) -> Result<()> {
        let text = line(entry)?;
        self.opened()?.write_all(&text).map_err(|e| Error::io(self.path.display(), e))?;
        self.bytes += text.len() as u64;
        Ok(())
    }

    /// Makes all entries durable; returns the size of the file in bytes.
    ///
    /// # Errors
    /// `NoSpace` or `Io` with the path.
    pub(crate) fn sync(&mut self) -> Result<u64> {
        if let Some(file) = &mut self.file {
            let io = |e| Error::io(self.path.display(), e);
            file.flush().map_err(io)?;
            file.get_ref().sync_data().map_err(io)?;
        }
        Ok(self.bytes)
    }
}
