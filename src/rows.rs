//! Matrices of f32 that may be larger than memory: borrowed, owned, or in a file that is read from the start, chunk by chunk.
//!
//! A file is one of a user's (`.npy`), or a *spill*: numbers that came in turn and that memory was not to hold ([`RowWriter`]). A
//! spill has no name from its first byte on, so that its space is free again when the program ends, however it ends.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::device::map::ForeignFile;
use crate::error::{Error, Result};
use crate::files;
use crate::tensor::Matrix;

/// Bytes of f32 that are read of a file at a time.
const CHUNK_BYTES: usize = 16 << 20;
/// Bytes of a spill that go to its file together.
const WRITE_BYTES: usize = 1 << 20;

/// How a number lies in a file, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberFormat {
    /// Half precision.
    F16,
    /// Single precision.
    F32,
    /// Double precision, rounded when it is read.
    F64,
}

impl NumberFormat {
    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            NumberFormat::F16 => 2,
            NumberFormat::F32 => 4,
            NumberFormat::F64 => 8,
        }
    }

    fn decode(self, bytes: &[u8], out: &mut Vec<f32>) {
        match self {
            NumberFormat::F16 => out.extend(bytes.as_chunks().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32())),
            NumberFormat::F32 => out.extend(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b))),
            NumberFormat::F64 => out.extend(bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b) as f32)),
        }
    }
}

/// A matrix `[rows, cols]`, in memory or in a file.
#[derive(Debug)]
pub struct RowStore<'a> {
    source: Source<'a>,
    rows: usize,
    cols: usize,
}

#[derive(Debug)]
enum Source<'a> {
    Memory(Cow<'a, [f32]>),
    File(NumberFile),
}

/// The numbers of a matrix in a file, row after row.
#[derive(Debug)]
struct NumberFile {
    file: ForeignFile,
    /// The first byte of the numbers.
    start: u64,
    format: NumberFormat,
    /// What errors call the file.
    name: String,
}

impl<'a> From<Matrix<'a>> for RowStore<'a> {
    fn from(matrix: Matrix<'a>) -> Self {
        RowStore { rows: matrix.rows(), cols: matrix.cols(), source: Source::Memory(Cow::Borrowed(matrix.data())) }
    }
}

impl RowStore<'static> {
    /// A matrix of its own in memory.
    ///
    /// # Errors
    /// As [`Matrix::new`].
    pub fn owned(values: Vec<f32>, cols: usize) -> Result<Self> {
        let rows = Matrix::new(&values, cols)?.rows();
        Ok(RowStore { source: Source::Memory(Cow::Owned(values)), rows, cols })
    }

    /// A matrix whose numbers are all that a file holds from the byte `start` on; `name` stands in errors.
    ///
    /// # Errors
    /// `Invalid` where the file is longer or shorter.
    pub fn in_file(
        file: ForeignFile,
        name: String,
        start: usize,
        format: NumberFormat,
        [rows, cols]: [usize; 2],
    ) -> Result<Self> {
        let (held, width) = (file.len().saturating_sub(start), format.bytes());
        let wanted = rows.checked_mul(cols).and_then(|count| count.checked_mul(width));
        if wanted != Some(held) {
            return Err(Error::invalid(format!("{held} bytes of numbers, expected {rows} × {cols} of {width} bytes")));
        }
        Ok(RowStore { source: Source::File(NumberFile { file, start: start as u64, format, name }), rows, cols })
    }

    /// The same matrix where it is to lie: in memory, or else in a spill where it is in memory now.
    ///
    /// # Errors
    /// As [`RowStore::read`]; `Io` where the spill cannot be written.
    pub fn placed(self, in_memory: bool, spill: &Spill) -> Result<Self> {
        match &self.source {
            Source::File(_) if in_memory => Ok(RowStore { source: Source::Memory(Cow::Owned(self.all()?)), ..self }),
            Source::Memory(values) if !in_memory => {
                let mut writer = RowWriter::new(self.cols, Spill { memory_bytes: 0, ..spill.clone() });
                writer.push(values)?;
                writer.finish()
            }
            _ => Ok(self),
        }
    }
}

impl RowStore<'_> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Width of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of the numbers in memory, or what they would take there.
    pub fn bytes(&self) -> u64 {
        self.rows as u64 * self.cols as u64 * size_of::<f32>() as u64
    }

    /// All of the matrix, where it lies in memory.
    pub fn in_memory(&self) -> Option<Matrix<'_>> {
        match &self.source {
            Source::Memory(values) => Matrix::new(values, self.cols).ok(),
            Source::File(_) => None,
        }
    }

    /// Some rows; those of a file are read into `scratch`.
    ///
    /// # Errors
    /// `Io` with the file, also where somebody has changed it since it was opened.
    ///
    /// # Panics
    /// Where the range leaves the matrix.
    pub fn read<'s>(&'s self, range: Range<usize>, scratch: &'s mut Vec<f32>) -> Result<Matrix<'s>> {
        assert!(range.start <= range.end && range.end <= self.rows, "{range:?} leaves {} rows", self.rows);
        let numbers = range.start * self.cols..range.end * self.cols;
        match &self.source {
            Source::Memory(values) => Matrix::new(&values[numbers], self.cols),
            Source::File(of) => {
                scratch.clear();
                scratch.reserve(numbers.len());
                let width = of.format.bytes();
                let mut bytes = vec![0; (WRITE_BYTES / width * width).min(numbers.len() * width)];
                let mut at = numbers.start;
                while at < numbers.end {
                    let part = bytes.len().min((numbers.end - at) * width);
                    of.file
                        .read_at(of.start + (at * width) as u64, &mut bytes[..part])
                        .map_err(|e| e.within(&of.name))?;
                    of.format.decode(&bytes[..part], scratch);
                    at += part / width;
                }
                Matrix::new(scratch, self.cols)
            }
        }
    }

    /// All rows in turn: those in memory at once, those of a file chunk by chunk. `told` gets the number of the first row of a chunk,
    /// and the chunk.
    ///
    /// # Errors
    /// As [`RowStore::read`]; what `told` returns.
    pub fn each(&self, mut told: impl FnMut(usize, Matrix<'_>) -> Result<()>) -> Result<()> {
        if let Some(all) = self.in_memory() {
            return told(0, all);
        }
        let (mut scratch, rows) = (Vec::new(), (CHUNK_BYTES / size_of::<f32>() / self.cols.max(1)).max(1));
        for first in (0..self.rows).step_by(rows) {
            told(first, self.read(first..(first + rows).min(self.rows), &mut scratch)?)?;
        }
        Ok(())
    }

    /// A copy of all numbers, row after row.
    ///
    /// # Errors
    /// As [`RowStore::read`].
    pub fn all(&self) -> Result<Vec<f32>> {
        let mut values = Vec::with_capacity(self.rows * self.cols);
        self.each(|_, chunk| {
            values.extend_from_slice(chunk.data());
            Ok(())
        })?;
        Ok(values)
    }

    /// The rows of these numbers, which rise, one after the other.
    ///
    /// # Errors
    /// As [`RowStore::read`].
    pub fn picked(&self, numbers: &[u32]) -> Result<Vec<f32>> {
        let mut values = Vec::with_capacity(numbers.len() * self.cols);
        let mut left = numbers;
        self.each(|first, chunk| {
            let (here, rest) = left.split_at(left.partition_point(|&row| (row as usize) < first + chunk.rows()));
            here.iter().for_each(|&row| values.extend_from_slice(chunk.row(row as usize - first)));
            left = rest;
            Ok(())
        })?;
        Ok(values)
    }
}

/// How many numbers memory may hold, and where others go.
#[derive(Clone, Debug)]
pub struct Spill {
    /// Bytes of a matrix that stay in memory.
    pub memory_bytes: u64,
    /// The folder of a matrix that has more.
    pub folder: PathBuf,
}

impl Spill {
    /// Memory holds everything.
    pub fn never() -> Self {
        Spill { memory_bytes: u64::MAX, folder: PathBuf::new() }
    }
}

/// A matrix that grows row by row, and leaves memory when it takes too much of it.
#[derive(Debug)]
pub struct RowWriter {
    cols: usize,
    numbers: usize,
    memory: Vec<f32>,
    file: Option<BufWriter<File>>,
    spill: Spill,
}

impl RowWriter {
    /// A matrix of no rows yet.
    pub fn new(cols: usize, spill: Spill) -> Self {
        RowWriter { cols, numbers: 0, memory: Vec::new(), file: None, spill }
    }

    /// Width of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Appends rows.
    ///
    /// # Errors
    /// `NoSpace` or `Io` with the folder.
    pub fn push(&mut self, rows: &[f32]) -> Result<()> {
        self.numbers += rows.len();
        let bytes = self.numbers as u64 * size_of::<f32>() as u64;
        if self.file.is_none() && bytes <= self.spill.memory_bytes {
            self.memory.extend_from_slice(rows);
            return Ok(());
        }
        let folder = &self.spill.folder;
        let mut write = || {
            let file = match &mut self.file {
                Some(file) => file,
                None => self.file.insert(BufWriter::with_capacity(WRITE_BYTES, nameless(folder)?)),
            };
            file.write_all(bytemuck::cast_slice(&std::mem::take(&mut self.memory)))?;
            file.write_all(bytemuck::cast_slice(rows))
        };
        write().map_err(|e| unwritten(folder, e))
    }

    /// The matrix.
    ///
    /// # Errors
    /// As [`RowWriter::push`]; `Invalid` for numbers that make no whole rows.
    pub fn finish(self) -> Result<RowStore<'static>> {
        let Some(file) = self.file else { return RowStore::owned(self.memory, self.cols) };
        let folder = &self.spill.folder;
        let file = file.into_inner().map_err(|e| unwritten(folder, e.into_error()))?;
        let file = ForeignFile::of(file).map_err(|e| unwritten(folder, e))?;
        let (name, rows) = (folder.display().to_string(), self.numbers / self.cols.max(1));
        RowStore::in_file(file, name, 0, NumberFormat::F32, [rows, self.cols])
    }
}

/// A file that nobody else can open.
fn nameless(folder: &Path) -> std::io::Result<File> {
    fs::create_dir_all(folder)?;
    let path = files::temporary(&folder.join("spill"));
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

fn unwritten(folder: &Path, e: std::io::Error) -> Error {
    let what = format!("{}: vectors that memory is not to hold", folder.display());
    match e.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Error::no_space(format!("{what}: {e}")).caused_by(e),
        _ => Error::io(what, e),
    }
}
