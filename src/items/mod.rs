//! Item files: what a user brings to `publish`, read into columns.
//!
//! Two forms say the same thing. A JSON line is `{"id": 1, "embedding": [...], "attributes": {"lang": ["en", "fr"],
//! "year": 2024, "price": 9.5}}`; a Parquet file has `id`, `embedding` and the attributes as flat columns. A file is what its
//! first bytes say, JSON lines may be compressed by gzip, and a folder is all its files in the order of their names, as Spark
//! writes one. Vectors may also stand beside either as a `.npy` matrix with one row an item, in the order of the file, or in
//! an index of Faiss.
//!
//! | values in the file | become |
//! |---|---|
//! | strings, booleans, and lists of them | a category of texts, one or many an item |
//! | integers and lists of them | a category of integers, also comparable |
//! | floats | a comparable number, one an item |
//! | lists with a float, all of one length | a dense vector, input of an item tower |
//!
//! No value is changed on the way: what a column cannot keep exactly is an error that names the column and the row.

mod builder;
pub mod faiss;
mod json;
mod parquet;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;

use builder::Builder;

use self::faiss::IndexFile;
use crate::columns::ItemColumn;
use crate::error::{Error, Result};
use crate::ivf::Lists;
use crate::limits;
use crate::npy;
use crate::tensor::Matrix;

/// The name of the column that holds an item's vector.
pub const EMBEDDING: &str = "embedding";
/// The name of the column that holds an item's id.
pub const ID: &str = "id";

/// A dense column `[N, width]`.
#[derive(Clone, Debug, Default)]
pub struct Dense {
    /// Numbers of all items, row after row.
    pub values: Vec<f32>,
    /// Numbers of an item.
    pub width: usize,
}

impl Dense {
    /// The column as rows.
    ///
    /// # Errors
    /// `Invalid` where the width is 0.
    pub fn matrix(&self) -> Result<Matrix<'_>> {
        Matrix::new(&self.values, self.width)
    }
}

/// A whole item file in memory, in the file's order.
#[derive(Debug, Default)]
pub struct Items {
    /// The user's ids, each once.
    pub ids: Vec<i64>,
    /// Categories and numbers, by name.
    pub columns: Vec<ItemColumn>,
    /// Vectors by name; [`EMBEDDING`] is the one that is searched where no item tower makes it.
    pub dense: BTreeMap<String, Dense>,
}

impl Items {
    /// Reads an item file, Parquet or JSON lines, or a folder of such, and, where given, vectors from a `.npy` file.
    ///
    /// # Errors
    /// Unreadable files, and `Invalid` with the line or row and the column: a missing or repeated id, a ragged or
    /// non-finite vector, a column that changes its type, an empty catalogue.
    pub fn read(path: &Path, vectors: Option<&Path>) -> Result<Self> {
        let mut items = read(path).map_err(|e| e.within(path.display()))?;
        if let Some(file) = vectors {
            let (values, rows, width) = npy::read_f32(file)?;
            if rows != items.ids.len() {
                return Err(Error::invalid(format!(
                    "{}: {rows} vectors, expected one for each of the {} items of {}",
                    file.display(),
                    items.ids.len(),
                    path.display()
                )));
            }
            items.dense.insert(EMBEDDING.into(), Dense { values, width });
        }
        items.check().map_err(|e| e.within(path.display()))?;
        Ok(items)
    }

    /// Reads the ids, vectors and lists of an index file of Faiss and, where given, the attributes of an item file, which
    /// names the same ids in any order. The items are in the order of the item file, else in that of the index.
    ///
    /// # Errors
    /// As [`IndexFile`] and [`Items::read`]; `Invalid` with the id that stands twice in the index, or in one of the two
    /// alone.
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
                    "{}: id {id} stands twice, expected each id once",
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
            return Err(Error::invalid(format!("{path}: no id {id}, which is in {index}; {count} are missing")));
        }
        let values = file.vectors(&of_rows).map_err(|e| e.within(index.display()))?;
        items.dense.insert(EMBEDDING.into(), Dense { values, width: file.dimension() });
        items.check().map_err(|e| e.within(path))?;
        Ok((items, file.lists(&of_rows)))
    }

    /// Number of items, N.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// True without items.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    fn check(&self) -> Result<()> {
        if self.is_empty() {
            return Err(Error::invalid("no items, expected at least one"));
        }
        if self.len() > limits::ITEMS_MAX {
            return Err(Error::invalid(format!("{} items, expected at most {}", self.len(), limits::ITEMS_MAX)));
        }
        let mut first = HashMap::with_capacity(self.len());
        for (row, id) in self.ids.iter().enumerate() {
            if let Some(before) = first.insert(id, row) {
                return Err(Error::invalid(format!(
                    "id {id} stands at items {} and {}, expected each id once",
                    before + 1,
                    row + 1
                )));
            }
        }
        for (name, dense) in &self.dense {
            if dense.width == 0 || dense.width > limits::DIMENSION_MAX {
                return Err(Error::invalid(format!(
                    "column `{name}`: vectors of {} numbers, expected 1 to {}",
                    dense.width,
                    limits::DIMENSION_MAX
                )));
            }
            if let Some(at) = dense.values.iter().position(|v| !v.is_finite()) {
                return Err(Error::invalid(format!(
                    "column `{name}`: item {} holds {}, expected a finite number",
                    at / dense.width + 1,
                    dense.values[at]
                )));
            }
        }
        Ok(())
    }
}

fn read(path: &Path) -> Result<Items> {
    let mut builder = Builder::default();
    if path.is_dir() {
        for part in parts(path)? {
            let name = part.file_name().unwrap_or_default();
            read_file(&part, &mut builder).map_err(|e| e.within(name.display()))?;
        }
    } else {
        read_file(path, &mut builder)?;
    }
    Ok(builder.finish())
}

/// The files of a folder that hold items; names that begin with a dot or an underscore are notes of the writer.
fn parts(folder: &Path) -> Result<Vec<PathBuf>> {
    let io = |e| Error::io("items", e);
    let mut parts = Vec::new();
    for entry in folder.read_dir().map_err(io)? {
        let path = entry.map_err(io)?.path();
        let hidden = path
            .file_name()
            .is_none_or(|name| name.as_encoded_bytes().starts_with(b".") || name.as_encoded_bytes().starts_with(b"_"));
        if !hidden && path.is_file() {
            parts.push(path);
        }
    }
    parts.sort();
    Ok(parts)
}

fn read_file(path: &Path, builder: &mut Builder) -> Result<()> {
    let io = |e| Error::io("items", e);
    let mut file = BufReader::with_capacity(1 << 20, File::open(path).map_err(io)?);
    let named_parquet = || {
        let ending = path.extension().unwrap_or(OsStr::new(""));
        ["parquet", "pq"].iter().any(|e| ending.eq_ignore_ascii_case(e))
    };
    match file.fill_buf().map_err(io)? {
        [b'P', b'A', b'R', b'1' | b'E', ..] => parquet::read(path, builder),
        [0x1f, 0x8b, ..] => json::read(BufReader::with_capacity(1 << 20, MultiGzDecoder::new(file)), builder),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            Err(Error::unsupported("compressed by zstd, expected gzip or plain JSON lines"))
        }
        _ if named_parquet() => parquet::read(path, builder),
        _ => json::read(file, builder),
    }
}
