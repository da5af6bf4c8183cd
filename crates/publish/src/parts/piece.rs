//! Piece of a distributed publication: the folder of one unit's results, created atomically, with a file (the note) that records
//! its inputs and the checksums of its files.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use sterling_core::error::{Error, Kind, Result};
use sterling_storage::files::{self, Checksum};

const NOTE: &str = "note.json";

/// Content of a piece's note.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PieceNote<T> {
    /// Description of all inputs from which the piece was made.
    of: String,
    /// Properties of the piece's content.
    pub(super) holds: T,
    files: BTreeMap<String, Checksum>,
}

/// Note with a checksum of the content.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note<T> {
    piece: PieceNote<T>,
    digest: String,
}

/// Content of a piece in progress, and its files.
pub(super) type PieceInProgress<T> = (T, BTreeMap<String, Checksum>);

/// Makes a piece: `make` writes its files to a temporary folder, which is renamed at the end. If another worker has made the piece
/// meanwhile, that piece is used.
///
/// # Errors
/// Errors of `make`; `Io` or `NoSpace` with the path.
pub(super) fn write<T: Serialize>(
    path: &Path,
    of: String,
    make: impl FnOnce(&Path) -> Result<PieceInProgress<T>>,
) -> Result<()> {
    let written = files::write_folder(path, |staging| {
        let (holds, files) = make(staging)?;
        let piece = PieceNote { of, holds, files };
        let digest = piece.digest()?;
        let text = serde_json::to_vec_pretty(&Note { piece, digest }).map_err(|e| unreported(&e))?;
        files::write_atomic(&staging.join(NOTE), |out| out.write_all(&text)).map(drop)
    });
    // Writing may fail because another worker's piece exists and a process that found all units done has deleted the temporary
    // folder.
    written.or_else(|e| if path.join(NOTE).exists() { Ok(()) } else { Err(e) })
}

/// Returns whether a piece with these inputs exists.
///
/// # Errors
/// As [`PieceNote::noted`].
pub(super) fn is_there<T: Serialize + DeserializeOwned>(path: &Path, of: &str) -> Result<bool> {
    match PieceNote::<T>::noted(path, of) {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == Kind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

fn invalid(file: &Path, what: &dyn std::fmt::Display) -> Error {
    Error::corrupt(format!("{}: {what}; remove the folder to rebuild it", file.display()))
}

fn unreported(e: &serde_json::Error) -> Error {
    Error::internal(format!("{NOTE}: {e}"))
}

impl<T: Serialize + DeserializeOwned> PieceNote<T> {
    /// Reads the note of a piece with these inputs, without reading its files.
    ///
    /// # Errors
    /// `NotFound` without a note; `Corrupt` for a damaged note, and for a note with other inputs; `Io`.
    pub(super) fn noted(path: &Path, of: &str) -> Result<Self> {
        let corrupt = |what: &dyn std::fmt::Display| {
            Error::corrupt(format!("{}: {what}; remove this folder to rebuild it", path.display()))
        };
        let text = match fs::read(path.join(NOTE)) {
            Err(_) if path.exists() && !path.join(NOTE).exists() => return Err(corrupt(&format_args!("no {NOTE}"))),
            read => read.map_err(|e| Error::io(path.display(), e))?,
        };
        let note: Note<T> = serde_json::from_slice(&text).map_err(|e| corrupt(&format_args!("{NOTE}: {e}")))?;
        if note.piece.digest()? != note.digest {
            return Err(corrupt(&format_args!("{NOTE}: the content of the note has changed")));
        }
        match note.piece.of == of {
            true => Ok(note.piece),
            false => Err(corrupt(&"made from other files, centroids or queries than the current ones")),
        }
    }

    /// Reads the note of a piece with these inputs, and verifies the checksums of the piece's files.
    ///
    /// # Errors
    /// As [`PieceNote::noted`]; `Corrupt` with the damaged file.
    pub(super) fn open(path: &Path, of: &str) -> Result<Self> {
        let piece = PieceNote::noted(path, of)?;
        piece.check(path, |_| true)?;
        Ok(piece)
    }

    /// Reads the note of a piece with these inputs, and verifies the lengths of the piece's files.
    ///
    /// # Errors
    /// As [`PieceNote::open`].
    pub(super) fn sized(path: &Path, of: &str) -> Result<Self> {
        let piece = PieceNote::noted(path, of)?;
        for (name, sum) in &piece.files {
            match fs::metadata(path.join(name)) {
                Err(e) if e.kind() == ErrorKind::NotFound => return Err(invalid(&path.join(name), &"missing")),
                about => {
                    let bytes = about.map_err(|e| Error::io(path.join(name).display(), e))?.len();
                    if bytes != sum.bytes {
                        let got = format_args!("{bytes} bytes, expected {}", sum.bytes);
                        return Err(invalid(&path.join(name), &got));
                    }
                }
            }
        }
        Ok(piece)
    }

    /// Verifies the checksums of the piece's files for which `is_asked` returns true.
    ///
    /// # Errors
    /// `Corrupt` with the file.
    pub(super) fn check(&self, path: &Path, is_asked: impl Fn(&str) -> bool) -> Result<()> {
        for (name, sum) in self.files.iter().filter(|(name, _)| is_asked(name)) {
            let file = path.join(name);
            let now = match Checksum::of_file(&file) {
                Err(e) if e.kind() == Kind::NotFound => return Err(invalid(&file, &"missing")),
                now => now?,
            };
            if now != *sum {
                let (Checksum { bytes, xxh3 }, got) = (sum, &now);
                let got =
                    format_args!("{} bytes with hash {}, expected {bytes} bytes with hash {xxh3}", got.bytes, got.xxh3);
                return Err(invalid(&file, &got));
            }
        }
        Ok(())
    }

    /// Returns the content and the files of the piece.
    pub(super) fn into_parts(self) -> PieceInProgress<T> {
        (self.holds, self.files)
    }

    pub(super) fn has(&self, file: &str) -> bool {
        self.files.contains_key(file)
    }
}

impl<T: Serialize> PieceNote<T> {
    /// Returns the checksum of the note, which covers all files of the piece through their checksums.
    pub(super) fn digest(&self) -> Result<String> {
        let text = serde_json::to_vec(self).map_err(|e| unreported(&e))?;
        Ok(Checksum::of(&text).xxh3)
    }
}
