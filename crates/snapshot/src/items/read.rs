//! Entry points of item files: detect the format and call its reader.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;

use super::builder::Builder;
use super::catalogue::{Items, check_vectors};
use super::faiss::IndexFile;
use super::folder::{FolderTypes, RowFile};
use super::parquet::{open_parquet, unreadable};
use super::{json, parquet};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::items::EMBEDDING;
use sterling_index::ivf::Lists;
use sterling_storage::files::Unchanged;
use sterling_storage::npy;
use sterling_storage::rows::{RowStore, Spill};

/// Item files of a package; the first existing one is used.
pub const ITEM_FILES: [&str; 2] = ["items.parquet", "items.jsonl"];

/// Returns the item file of a package folder.
///
/// # Errors
/// `NotFound` if the folder has no item file.
pub fn file_of(package: &Path) -> Result<PathBuf> {
    let mut paths = ITEM_FILES.iter().map(|name| package.join(name));
    paths.find(|path| path.exists()).ok_or_else(|| {
        let [one, other] = ITEM_FILES;
        let folder = package.display();
        Error::not_found(format!(
            "items: neither `{one}` nor `{other}` is in {folder}, expected one of these, or an item file"
        ))
    })
}

impl Items {
    /// Reads an item file (Parquet or JSON lines) or a folder of them and, optionally, vectors from a `.npy` file.
    ///
    /// # Errors
    /// Errors of reading; `Invalid` with the line or row and the column for a missing or duplicate id, a vector of another width
    /// or with a non-finite number, a column whose type changes, or an empty catalogue.
    pub fn read(path: &Path, vectors: Option<&Path>) -> Result<Self> {
        Items::read_spilling(path, vectors, &Spill::never())
    }

    /// Reads items as [`Items::read`], with vectors that may exceed memory: vectors beyond the limit are written to an anonymous
    /// temporary file, and vectors of a `.npy` file stay in that file.
    ///
    /// # Errors
    /// As [`Items::read`]; `NoSpace` or `Io` if vectors cannot be written.
    pub fn read_spilling(path: &Path, vectors: Option<&Path>, spill: &Spill) -> Result<Self> {
        let mut items = read(path, spill).map_err(|e| e.within(path.display()))?;
        let mut of_file = None;
        if let Some(file) = vectors {
            // The separate vectors replace a column of this name.
            items.dense.remove(EMBEDDING);
            let rows = npy::open_f32(file)?;
            if rows.rows() != items.ids.len() {
                return Err(Error::invalid(format!(
                    "{}: {} vectors, expected one for each of the {} items of {}",
                    file.display(),
                    rows.rows(),
                    items.ids.len(),
                    path.display()
                )));
            }
            of_file = Some((file, rows.fetched(spill)?));
        }
        items.check().map_err(|e| e.within(path.display()))?;
        if let Some((file, rows)) = of_file {
            items.add_vectors(file, rows, 0)?;
        }
        Ok(items)
    }

    /// Adds the vectors of a vector file; `first` is the row of this item file's first item.
    fn add_vectors(&mut self, file: &Path, rows: RowStore<'static>, first: usize) -> Result<()> {
        let place =
            |row: usize, column| format!("row {} (item id {}), column {}", first + row + 1, self.ids[row], column + 1);
        check_vectors(&rows, place).map_err(|e| e.within(file.display()))?;
        self.dense.insert(EMBEDDING.into(), rows);
        Ok(())
    }

    /// Reads one of several item files of a catalogue; the file may have no rows. `types` are the partition column types of all
    /// files; `vectors` is the file with the vectors of all items, and the row in it of this item file's first item.
    ///
    /// # Errors
    /// As [`Items::read_spilling`], except that an empty file is valid.
    pub fn read_one(
        file: &RowFile,
        types: &FolderTypes,
        vectors: Option<(&Path, usize)>,
        spill: &Spill,
    ) -> Result<Self> {
        let path = &file.path;
        let mut builder = Builder::new(spill.clone());
        builder.begin_file(types.cells(&file.columns));
        let mut items = read_alone(path, builder).map_err(|e| e.within(path.display()))?;
        if vectors.is_some() {
            items.dense.remove(EMBEDDING);
        }
        items.check_each().map_err(|e| e.within(path.display()))?;
        if let Some((file, first)) = vectors.filter(|_| !items.is_empty()) {
            let rows = npy::open_f32(file)?.of_file(first..first + items.len());
            let of_items = |e: Error| e.within(format!("vectors of {}", path.display())).within(file.display());
            items.add_vectors(file, rows.map_err(of_items)?.fetched(spill)?, first)?;
        }
        Ok(items)
    }

    /// Reads files that [`Items::write`] wrote as one catalogue; `named` returns the name of each file for errors.
    ///
    /// # Errors
    /// As [`Items::read`].
    pub fn read_parts(files: &[PathBuf], named: impl Fn(usize) -> String, spill: &Spill) -> Result<Self> {
        let mut builder = Builder::new(spill.clone());
        for (number, file) in files.iter().enumerate() {
            builder.begin_file(Vec::new());
            parquet::read(file, &mut builder).map_err(|e| e.within(named(number)))?;
        }
        let items = builder.finish()?;
        items.check()?;
        Ok(items)
    }

    /// Writes ids and attributes, without vectors, as a Parquet file that [`Items::read_parts`] reads.
    ///
    /// # Errors
    /// `Io` or `NoSpace` with the path.
    pub fn write(&self, path: &Path) -> Result<()> {
        parquet::write(self, path)
    }

    /// Counts the items of a file.
    ///
    /// # Errors
    /// `NotFound` or `Io`; `Invalid` for a file that cannot be read.
    pub fn count(path: &Path) -> Result<usize> {
        let within = |e: Error| e.within(path.display());
        let file = File::open(path).map_err(|e| Error::io(path.display(), e))?;
        match text_of(path, file).map_err(within)? {
            None => {
                let rows = open_parquet(path).map_err(within)?.metadata().file_metadata().num_rows();
                usize::try_from(rows).map_err(|_| within(unreadable(&format_args!("{rows} rows"))))
            }
            Some(lines) => json::count(lines).map_err(|e| Error::io(path.display(), e)),
        }
    }

    /// Reads the ids, vectors and inverted lists of a Faiss index file and, optionally, the attributes of an item file with the
    /// same ids in any order. Items are in the order of the item file, or without one in the order of the index.
    ///
    /// # Errors
    /// As [`IndexFile`] and [`Items::read`]; `Invalid` with an id that occurs twice in the index or is missing in one of the files.
    pub fn read_faiss(index: &Path, attributes: Option<&Path>) -> Result<(Self, Lists)> {
        let file = IndexFile::open(index)?;
        let mut items = match attributes {
            Some(path) => Items::read(path, None)?,
            None => Items { ids: file.ids().to_vec(), ..Items::default() },
        };
        let mut entries = HashMap::with_capacity(file.ids().len());
        for (&id, entry) in file.ids().iter().zip(0u32..) {
            if entries.insert(id, entry).is_some() {
                return Err(Error::invalid(format!(
                    "{}: id {id} occurs twice, expected each id once",
                    index.display()
                )));
            }
        }
        let path = attributes.unwrap_or(index).display();
        let entry = |id| {
            let entry = entries.remove(id);
            entry.ok_or_else(|| Error::invalid(format!("{path}: id {id} is not in {}", index.display())))
        };
        let of_rows = items.ids.iter().map(entry).collect::<Result<Vec<u32>>>()?;
        if let Some(id) = entries.keys().min() {
            let (index, count) = (index.display(), entries.len());
            return Err(Error::invalid(format!(
                "{path}: no id {id}, which is in {index}; {count} ids of the index are missing"
            )));
        }
        let values = file.vectors(&of_rows).map_err(|e| e.within(index.display()))?;
        items.dense.insert(EMBEDDING.into(), RowStore::owned(values, file.dimension())?);
        items.check().map_err(|e| e.within(path))?;
        Ok((items, file.lists(&of_rows)))
    }
}

fn read(path: &Path, spill: &Spill) -> Result<Items> {
    let mut builder = Builder::new(spill.clone());
    if !path.is_dir() {
        builder.begin_file(Vec::new());
        return read_alone(path, builder);
    }
    let files = RowFile::below(path)?;
    let types = FolderTypes::of(files.iter().map(|file| file.columns.as_slice()));
    let before = Unchanged::of(files.iter().map(|file| file.path.as_path()))?;
    for file in &files {
        builder.begin_file(types.cells(&file.columns));
        let name = file.path.strip_prefix(path).unwrap_or(&file.path);
        read_file(&file.path, &mut builder).map_err(|e| unreadable_while(&before, e.within(name.display())))?;
    }
    before.check()?;
    let now = RowFile::below(path)?;
    if now != files {
        let (had, has) = (files.len(), now.len());
        let what = format!("changed while it was read: it had {had} files and now has {has}, or other ones");
        return Err(Error::new(Kind::Io, what));
    }
    builder.finish()
}

fn read_alone(path: &Path, mut builder: Builder) -> Result<Items> {
    let before = Unchanged::of([path])?;
    read_file(path, &mut builder).map_err(|e| unreadable_while(&before, e))?;
    before.check()?;
    builder.finish()
}

/// Returns an error that the file changed while it was read or, if the file is unchanged, `error`.
fn unreadable_while(before: &Unchanged, error: Error) -> Error {
    before.check().err().unwrap_or(error)
}

fn read_file(path: &Path, builder: &mut Builder) -> Result<()> {
    let file = File::open(path).map_err(|e| Error::io("items", e))?;
    match text_of(path, file)? {
        Some(lines) => json::read(lines, builder),
        None => parquet::read(path, builder),
    }
}

/// Returns the text of a file, decompressed if necessary; `None` if the file is Parquet by its first bytes or, if these are
/// inconclusive, by its name.
///
/// # Errors
/// `Io`; `Unsupported` with the format for a compression other than gzip, and for a known format that cannot be read.
pub fn text_of(path: &Path, file: impl Read + 'static) -> Result<Option<Box<dyn BufRead>>> {
    let mut file = BufReader::with_capacity(1 << 20, file);
    let io = |e| Error::io(path.display(), e);
    let mut lines: Box<dyn BufRead> = match file.fill_buf().map_err(io)? {
        [b'P', b'A', b'R', b'1' | b'E', ..] => return Ok(None),
        [0x1f, 0x8b, ..] => Box::new(BufReader::with_capacity(1 << 20, MultiGzDecoder::new(file))),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            return Err(Error::unsupported("compressed by zstd, expected gzip or plain JSON lines"));
        }
        _ if has_ending(path, &["parquet", "pq"]) => return Ok(None),
        _ => Box::new(file),
    };
    match other_format(path, lines.fill_buf().map_err(io)?) {
        Some(format) => Err(Error::unsupported(format!("{format}, expected JSON lines, plain or by gzip, or Parquet"))),
        None => Ok(Some(lines)),
    }
}

/// Rejects a file whose first bytes show an unsupported format.
///
/// # Errors
/// As [`text_of`], with the path.
pub fn check_format(path: &Path) -> Result<()> {
    let file = File::open(path).map_err(|e| Error::io(path.display(), e))?;
    text_of(path, file).map(drop).map_err(|e| e.within(path.display()))
}

fn has_ending(path: &Path, endings: &[&str]) -> bool {
    let ending = path.extension().unwrap_or(OsStr::new(""));
    endings.iter().any(|e| ending.eq_ignore_ascii_case(e))
}

/// Detects unsupported formats by the first bytes of a file, or by its name and first bytes.
fn other_format(path: &Path, first: &[u8]) -> Option<&'static str> {
    match first {
        [b'A', b'R', b'R', b'O', b'W', b'1', ..] | [b'F', b'E', b'A', b'1', ..] => Some("a Feather (Arrow) file"),
        [0xff, 0xff, 0xff, 0xff, ..] => Some("an Arrow stream"),
        [b'O', b'R', b'C', ..] => Some("an ORC file"),
        [b'O', b'b', b'j', 1, ..] => Some("an Avro file"),
        [0x93, b'N', b'U', b'M', b'P', b'Y', ..] => Some("a NumPy matrix (.npy)"),
        [b'P', b'K', 3, 4, ..] => Some("a ZIP archive, such as .npz"),
        [0x89, b'H', b'D', b'F', ..] => Some("an HDF5 file"),
        _ => {
            let text = first.strip_prefix(b"\xef\xbb\xbf").unwrap_or(first).trim_ascii_start();
            let line = text.split(|byte| *byte == b'\n').next().unwrap_or(text);
            match line.first() {
                Some(b'[') => Some("a JSON list"),
                None | Some(b'{') => None,
                _ => (has_ending(path, &["csv", "tsv"]) || is_header(line)).then_some("a CSV file"),
            }
        }
    }
}

/// Returns whether a line has at least two names separated by commas, semicolons or tabs.
fn is_header(line: &[u8]) -> bool {
    let is_name = |cell: &[u8]| {
        let cell = cell.trim_ascii();
        let name = cell.strip_prefix(b"\"").and_then(|cell| cell.strip_suffix(b"\"")).unwrap_or(cell);
        name.first().is_some_and(|first| first.is_ascii_alphabetic() || *first == b'_')
            && name.iter().all(|byte| byte.is_ascii_alphanumeric() || b"_.- ".contains(byte))
    };
    let mut cells = line.split(|byte| b",;\t".contains(byte));
    line.iter().any(|byte| b",;\t".contains(byte)) && cells.all(is_name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::fs;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Returns whether this process has read from a file that it has open.
    fn is_being_read(path: &Path) -> bool {
        let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten();
        descriptors.filter(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == path)).any(|fd| {
            let about = fs::read_to_string(Path::new("/proc/self/fdinfo").join(fd.file_name())).unwrap_or_default();
            let position = about.split_whitespace().nth(1).and_then(|position| position.parse::<u64>().ok());
            position.is_some_and(|position| position > 0)
        })
    }

    #[test]
    fn items_that_change_during_the_read_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let line = |id: usize| format!("{{\"id\": {id}, \"embedding\": [{}]}}\n", vec!["0.25"; 64].join(","));
        let text: String = (0..40_000).map(line).collect();
        let path = folder.path().join("items.jsonl");
        let overwrite = |_: &Path| {
            use std::os::unix::fs::FileExt as _;
            let file = File::options().write(true).open(&path).unwrap();
            file.write_all_at(b"9", text.len() as u64 - 4).unwrap();
        };
        let replace = |folder: &Path| {
            let other = folder.join(".other");
            fs::write(&other, line(1)).unwrap();
            fs::rename(&other, &path).unwrap();
        };
        let add = |folder: &Path| fs::write(folder.join("items-2.jsonl"), line(40_001)).unwrap();
        type Change<'c> = &'c (dyn Fn(&Path) + Sync);
        let changes: [(&Path, Change<'_>); 3] = [(&path, &overwrite), (&path, &replace), (folder.path(), &add)];
        for (read, change) in changes {
            fs::write(&path, &text).unwrap();
            let ended = AtomicBool::new(false);
            let outcome = std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !ended.load(Ordering::Relaxed) && !is_being_read(&path) {
                        std::thread::yield_now();
                    }
                    change(folder.path());
                });
                let outcome = Items::read(read, None).map(|items| items.len()).map_err(|e| e.to_string());
                ended.store(true, Ordering::Relaxed);
                outcome
            });
            let error = outcome.unwrap_err();
            assert!(error.contains("changed while it was read"), "{error}");
        }
        fs::write(&path, line(1)).unwrap();
        assert_eq!(Items::read(folder.path(), None).unwrap().len(), 2);
    }
}
