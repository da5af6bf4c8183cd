//! Matrices of f32 that may be larger than memory: borrowed, owned, or in a file that is read sequentially in chunks.
//!
//! A file is either a user's (`.npy`) or a *spill*: rows that exceeded the memory budget ([`RowWriter`]). A spill file is
//! unlinked right after its creation, so its space is freed when the process ends, even after a crash.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt as _;

use crate::files;
use sterling_core::error::{Error, Result};
use sterling_core::tensor::Matrix;
use sterling_kernels::map::ForeignFile;

/// Bytes of f32 per chunk read from a file.
const CHUNK_BYTES: usize = 16 << 20;
/// Bytes that are converted at a time, and size of the write buffer of a spill.
const PART_BYTES: usize = 1 << 20;

/// Number format of a file, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberFormat {
    /// Half precision.
    F16,
    /// Single precision.
    F32,
    /// Double precision, rounded to f32 when read.
    F64,
}

impl NumberFormat {
    /// Returns the bytes per number.
    pub fn bytes(self) -> usize {
        match self {
            NumberFormat::F16 => 2,
            NumberFormat::F32 => 4,
            NumberFormat::F64 => 8,
        }
    }
}

/// Matrix `[rows, cols]`, in memory or in a file.
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
    /// Concatenated matrices, each with the index of its first row in the concatenation.
    Joined(Vec<(usize, RowStore<'a>)>),
}

/// Elements of a matrix in a file, row by row.
#[derive(Debug)]
struct NumberFile {
    file: ForeignFile,
    /// Byte offset of the first number.
    start: u64,
    format: NumberFormat,
    /// Name of the file in errors.
    name: String,
}

impl NumberFile {
    fn read(&self, first: usize, to: &mut [f32]) -> Result<()> {
        match self.format {
            NumberFormat::F32 => {
                self.file.read_at(self.start + (first * size_of::<f32>()) as u64, bytemuck::cast_slice_mut(to))
            }
            NumberFormat::F16 => self.read_as::<half::f16>(first, to, |from, to| from.convert_to_f32_slice(to)),
            NumberFormat::F64 => self.read_as::<f64>(first, to, |from, to| {
                to.iter_mut().zip(from).for_each(|(to, from)| *to = *from as f32);
            }),
        }
    }

    fn read_as<T: Pod>(&self, first: usize, to: &mut [f32], convert: impl Fn(&[T], &mut [f32])) -> Result<()> {
        let part = PART_BYTES / size_of::<T>();
        let mut from = vec![T::zeroed(); part.min(to.len())];
        for (n, to) in to.chunks_mut(part).enumerate() {
            let from = &mut from[..to.len()];
            let start = self.start + ((first + n * part) * size_of::<T>()) as u64;
            self.file.read_at(start, bytemuck::cast_slice_mut(from))?;
            convert(from, to);
        }
        Ok(())
    }
}

impl<'a> From<Matrix<'a>> for RowStore<'a> {
    fn from(matrix: Matrix<'a>) -> Self {
        RowStore { rows: matrix.rows(), cols: matrix.cols(), source: Source::Memory(Cow::Borrowed(matrix.data())) }
    }
}

impl RowStore<'static> {
    /// Creates a matrix that owns its values.
    ///
    /// # Errors
    /// As [`Matrix::new`].
    pub fn owned(values: Vec<f32>, cols: usize) -> Result<Self> {
        let rows = Matrix::new(&values, cols)?.rows();
        Ok(RowStore { source: Source::Memory(Cow::Owned(values)), rows, cols })
    }

    /// Creates a matrix of all numbers of a file from the byte `start` on; errors call the file `name`.
    ///
    /// # Errors
    /// `Invalid` if the length of the file does not match.
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
            return Err(Error::invalid(format!(
                "{held} bytes of numbers, expected {rows} × {cols} numbers of {width} bytes"
            )));
        }
        Ok(RowStore { source: Source::File(NumberFile { file, start: start as u64, format, name }), rows, cols })
    }

    /// Concatenates matrices of one width.
    ///
    /// # Errors
    /// `Invalid` if the widths of the matrices differ.
    pub fn joined(matrices: Vec<Self>) -> Result<Self> {
        let (mut rows, cols) = (0, matrices.first().map_or(0, RowStore::cols));
        if let Some(other) = matrices.iter().find(|matrix| matrix.cols != cols) {
            return Err(Error::invalid(format!(
                "rows of {} numbers, expected {cols} as in the first matrix",
                other.cols
            )));
        }
        let place = |matrix: RowStore<'static>| {
            let first = rows;
            rows += matrix.rows;
            (first, matrix)
        };
        let source = Source::Joined(matrices.into_iter().map(place).collect());
        Ok(RowStore { source, rows, cols })
    }

    /// Restricts a matrix in a file to a range of rows.
    ///
    /// # Errors
    /// `Invalid` if the range exceeds the matrix.
    pub fn of_file(self, range: Range<usize>) -> Result<Self> {
        let all = self.rows;
        match self.source {
            Source::File(file) if range.start <= range.end && range.end <= all => {
                let start = file.start + (range.start * self.cols * file.format.bytes()) as u64;
                Ok(RowStore { source: Source::File(NumberFile { start, ..file }), rows: range.len(), cols: self.cols })
            }
            _ => {
                Err(Error::invalid(format!("rows {} to {} are outside of the {all} rows", range.start + 1, range.end)))
            }
        }
    }

    /// Loads the matrix into memory if the budget allows it.
    ///
    /// # Errors
    /// As [`RowStore::read`].
    pub fn fetched(self, spill: &Spill) -> Result<Self> {
        match self.cols > 0 && self.in_memory().is_none() && spill.claim(self.bytes()) {
            true => Ok(RowStore { source: Source::Memory(Cow::Owned(self.all()?)), ..self }),
            false => Ok(self),
        }
    }

    /// Moves the matrix to a spill file.
    ///
    /// # Errors
    /// As [`RowWriter::push`].
    pub fn spilled(self, spill: &Spill) -> Result<Self> {
        let Source::Memory(values) = &self.source else { return Ok(self) };
        let mut writer = RowWriter::new(self.cols, Spill::new(0, &spill.folder));
        writer.push(values)?;
        writer.finish()
    }
}

impl RowStore<'_> {
    /// Returns the number of rows.
    #[inline]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the width of a row.
    #[inline]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns the size of the numbers as f32, in bytes.
    pub fn bytes(&self) -> u64 {
        self.rows as u64 * self.cols as u64 * size_of::<f32>() as u64
    }

    /// Returns the matrix if it is in memory.
    pub fn in_memory(&self) -> Option<Matrix<'_>> {
        match &self.source {
            Source::Memory(values) => Matrix::new(values, self.cols).ok(),
            Source::File(_) | Source::Joined(_) => None,
        }
    }

    /// Returns a range of rows; rows of a file are read into `scratch`.
    ///
    /// # Errors
    /// `Io` with the file, also if the file changed since it was opened.
    ///
    /// # Panics
    /// If the range exceeds the matrix.
    pub fn read<'s>(&'s self, range: Range<usize>, scratch: &'s mut Vec<f32>) -> Result<Matrix<'s>> {
        assert!(range.start <= range.end && range.end <= self.rows, "range {range:?} exceeds {} rows", self.rows);
        let numbers = range.start * self.cols..range.end * self.cols;
        match &self.source {
            Source::Memory(values) => Matrix::new(&values[numbers], self.cols),
            Source::File(of) => {
                scratch.resize(numbers.len(), 0.0);
                of.read(numbers.start, scratch).map_err(|e| e.within(&of.name))?;
                Matrix::new(scratch, self.cols)
            }
            Source::Joined(matrices) => {
                scratch.clear();
                let (mut next, mut part) = (range.start, Vec::new());
                while next < range.end {
                    let (first, matrix) = &matrices[matrices.partition_point(|(first, _)| *first <= next) - 1];
                    let end = range.end.min(first + matrix.rows);
                    scratch.extend_from_slice(matrix.read(next - first..end - first, &mut part)?.data());
                    next = end;
                }
                Matrix::new(scratch, self.cols)
            }
        }
    }

    /// Passes all rows to `reported` in order: at once if they are in memory, else in chunks. `reported` gets the index of a
    /// chunk's first row, and the chunk.
    ///
    /// # Errors
    /// As [`RowStore::read`]; errors of `reported`.
    pub fn each(&self, mut reported: impl FnMut(usize, Matrix<'_>) -> Result<()>) -> Result<()> {
        if let Some(all) = self.in_memory() {
            return reported(0, all);
        }
        let (mut scratch, rows) = (Vec::new(), (CHUNK_BYTES / size_of::<f32>() / self.cols.max(1)).max(1));
        for first in (0..self.rows).step_by(rows) {
            reported(first, self.read(first..(first + rows).min(self.rows), &mut scratch)?)?;
        }
        Ok(())
    }

    /// Copies all numbers, row by row.
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

    /// Copies the rows with these indices, which must be ascending.
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

/// Memory budget of all matrices together, and the folder for spill files. Clones share the budget.
#[derive(Clone, Debug)]
pub struct Spill {
    left: Arc<AtomicU64>,
    folder: PathBuf,
    others: u64,
}

impl Spill {
    /// Creates a budget of `memory_bytes`; matrices beyond it go to spill files in `folder`.
    pub fn new(memory_bytes: u64, folder: impl Into<PathBuf>) -> Self {
        Spill { left: Arc::new(AtomicU64::new(memory_bytes)), folder: folder.into(), others: u64::MAX }
    }

    /// Sets a separate limit for data that accompanies the matrices (ids, columns) and always stays in memory.
    #[must_use]
    pub fn with_others(self, bytes: u64) -> Self {
        Spill { others: bytes, ..self }
    }

    /// Checks the size of accompanying data against its limit.
    ///
    /// # Errors
    /// `NoSpace` with the limit.
    pub fn check_others(&self, bytes: u64) -> Result<()> {
        match bytes <= self.others {
            true => Ok(()),
            false => Err(Error::no_space(format!(
                "memory: ids and columns need more than {} MiB, half of the limit; they always stay in memory",
                self.others >> 20
            ))),
        }
    }

    /// Creates an unlimited budget: no matrix is spilled.
    pub fn never() -> Self {
        Spill::new(u64::MAX, PathBuf::new())
    }

    /// Reserves memory if the budget allows it.
    fn claim(&self, bytes: u64) -> bool {
        self.left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes)).is_ok()
    }

    fn give_back(&self, bytes: u64) {
        self.left.fetch_add(bytes, Relaxed);
    }
}

/// Matrix that grows by rows and moves to a file when it exceeds the memory budget.
#[derive(Debug)]
pub struct RowWriter {
    cols: usize,
    numbers: usize,
    memory: Vec<f32>,
    file: Option<BufWriter<File>>,
    spill: Spill,
}

impl RowWriter {
    /// Creates a writer that has no rows yet.
    pub fn new(cols: usize, spill: Spill) -> Self {
        RowWriter { cols, numbers: 0, memory: Vec::new(), file: None, spill }
    }

    /// Returns the width of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Appends rows.
    ///
    /// # Errors
    /// `NoSpace` or `Io` with the folder.
    pub fn push(&mut self, rows: &[f32]) -> Result<()> {
        self.numbers += rows.len();
        if self.file.is_none() {
            if self.spill.claim(size_of_val(rows) as u64) {
                self.memory.extend_from_slice(rows);
                return Ok(());
            }
            self.spill.give_back(size_of_val(self.memory.as_slice()) as u64);
        }
        let folder = &self.spill.folder;
        let mut write = || {
            let file = match &mut self.file {
                Some(file) => file,
                None => self.file.insert(BufWriter::with_capacity(PART_BYTES, create_unlinked_file(folder)?)),
            };
            file.write_all(bytemuck::cast_slice(&std::mem::take(&mut self.memory)))?;
            file.write_all(bytemuck::cast_slice(rows))
        };
        write().map_err(|e| unwritten(folder, e))
    }

    /// Returns the finished matrix.
    ///
    /// # Errors
    /// As [`RowWriter::push`]; `Invalid` if the numbers are not a multiple of the row width.
    pub fn finish(self) -> Result<RowStore<'static>> {
        let Some(file) = self.file else { return RowStore::owned(self.memory, self.cols) };
        let folder = &self.spill.folder;
        let file = file.into_inner().map_err(|e| unwritten(folder, e.into_error()))?;
        let file = ForeignFile::of(file).map_err(|e| unwritten(folder, e))?;
        let (name, rows) = (folder.display().to_string(), self.numbers / self.cols.max(1));
        RowStore::in_file(file, name, 0, NumberFormat::F32, [rows, self.cols])
    }
}

/// Creates a file without a name, which no other process can open.
fn create_unlinked_file(folder: &Path) -> std::io::Result<File> {
    fs::create_dir_all(folder)?;
    let path = files::temporary(&folder.join("spill"));
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

fn unwritten(folder: &Path, e: std::io::Error) -> Error {
    Error::io(format!("{}: the temporary file of vectors cannot be written", folder.display()), e)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::ErrorKind;

    use super::*;
    use proptest::prelude::*;
    use sterling_core::error::Kind;

    proptest! {
        #[test]
        fn rows_are_the_same_wherever_they_lie(
            values in proptest::collection::vec(-1e3f32..1e3, 1..400),
            cols in 1usize..9,
            retained in 0u64..2000,
            step in 1usize..7,
            picked in proptest::collection::btree_set(0u32..400, 0..30),
        ) {
            let values = &values[..values.len() / cols * cols];
            let folder = tempfile::tempdir().unwrap();
            let spill = Spill::new(retained, folder.path().join("not/there/yet"));
            let mut writer = RowWriter::new(cols, spill.clone());
            values.chunks(step * cols).for_each(|rows| writer.push(rows).unwrap());
            let rows = writer.finish().unwrap();
            prop_assert_eq!(rows.in_memory().is_some(), rows.bytes() <= retained);
            let expected = Matrix::new(values, cols).unwrap();
            prop_assert_eq!((rows.rows(), rows.cols()), (expected.rows(), cols));
            let picked: Vec<u32> = picked.into_iter().filter(|row| (*row as usize) < rows.rows()).collect();
            let wanted: Vec<f32> = picked.iter().flat_map(|row| expected.row(*row as usize)).copied().collect();
            let mut rows = rows;
            for in_memory in [false, true, true, false, false] {
                rows = if in_memory { rows.fetched(&Spill::never()) } else { rows.spilled(&spill) }.unwrap();
                prop_assert_eq!(rows.in_memory().is_some(), in_memory || rows.rows() == 0);
                prop_assert_eq!(rows.all().unwrap(), values);
                prop_assert_eq!(rows.picked(&picked).unwrap(), wanted.clone());
                let middle = rows.rows() / 3..rows.rows() / 2;
                // Split at arbitrary rows and joined again, with an empty part.
                let part = |range: Range<usize>| RowStore::owned(values[range.start * cols..range.end * cols].to_vec(), cols).unwrap();
                let parts = [0..middle.start, middle.start..middle.end, middle.end..middle.end, middle.end..rows.rows()];
                let parts = parts.map(|range| if in_memory { part(range) } else { part(range).spilled(&spill).unwrap() });
                let joined = RowStore::joined(parts.into()).unwrap();
                prop_assert_eq!(joined.all().unwrap(), values);
                prop_assert_eq!(joined.picked(&picked).unwrap(), wanted.clone());
                prop_assert_eq!(joined.fetched(&Spill::never()).unwrap().all().unwrap(), values);
                if !in_memory && rows.rows() > 0 {
                    let some = part(0..rows.rows()).spilled(&spill).unwrap().of_file(middle.clone()).unwrap();
                    prop_assert_eq!(some.all().unwrap(), &values[middle.start * cols..middle.end * cols]);
                    prop_assert!(some.of_file(0..middle.len() + 1).is_err());
                }
                let mut scratch = vec![7.0; 3];
                let read = rows.read(middle.clone(), &mut scratch).unwrap();
                prop_assert_eq!(read.data(), &values[middle.start * cols..middle.end * cols]);
            }
        }
    }

    #[test]
    fn matrices_share_the_memory_that_there_is() {
        let folder = tempfile::tempdir().unwrap();
        let spill = Spill::new(40, folder.path());
        let (mut one, mut other) = (RowWriter::new(2, spill.clone()), RowWriter::new(2, spill.clone()));
        one.push(&[1.0; 4]).unwrap();
        other.push(&[2.0; 6]).unwrap();
        // Eight bytes over the budget: the first matrix is spilled and its memory goes to the other.
        one.push(&[3.0; 2]).unwrap();
        other.push(&[4.0; 4]).unwrap();
        let (one, other) = (one.finish().unwrap(), other.finish().unwrap());
        assert!(one.in_memory().is_none() && other.in_memory().is_some());
        assert_eq!(one.all().unwrap(), [1.0, 1.0, 1.0, 1.0, 3.0, 3.0]);
        assert_eq!(other.all().unwrap(), [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0]);
        assert!(one.fetched(&spill).unwrap().in_memory().is_none(), "the other matrix has used the budget");
    }

    #[test]
    fn spilling_to_a_full_disk_is_reported_and_leaves_no_file() {
        // A full device, and a folder that cannot be created.
        let full = |e: ErrorKind| unwritten(Path::new("here"), e.into());
        assert_eq!(full(ErrorKind::StorageFull).kind(), Kind::NoSpace);
        assert!(full(ErrorKind::StorageFull).to_string().starts_with("here: the temporary file of vectors"));
        assert_eq!(full(ErrorKind::PermissionDenied).kind(), Kind::Io);
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut writer = RowWriter::new(2, Spill::new(4, file.path().join("below a file")));
        assert_eq!(writer.push(&[1.0, 2.0]).unwrap_err().kind(), Kind::Io);
    }

    #[test]
    fn a_row_file_changed_by_another_process_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytemuck::cast_slice(&[1.0f32, 2.0, 3.0, 4.0])).unwrap();
        let open =
            |shape| RowStore::in_file(ForeignFile::open(file.path()).unwrap(), "v".into(), 0, NumberFormat::F32, shape);
        assert!(
            open([3, 2]).unwrap_err().to_string().contains("16 bytes of numbers, expected 3 × 2 numbers of 4 bytes")
        );
        assert!(open([usize::MAX, 2]).is_err());
        let rows = open([2, 2]).unwrap();
        assert_eq!(rows.all().unwrap(), [1.0, 2.0, 3.0, 4.0]);
        std::fs::write(file.path(), bytemuck::cast_slice(&[1.0f32; 2])).unwrap();
        assert!(rows.all().unwrap_err().to_string().starts_with("v: changed while it was read"));
    }
}
