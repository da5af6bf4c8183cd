//! Reader and writer of matrices in NumPy's `.npy` format.
//!
//! The format (NumPy Enhancement Proposal 1): `\x93NUMPY`, two version bytes, the header length as u16 (version 1) or u32, the
//! header as a Python dictionary of `descr`, `fortran_order` and `shape`, then the numbers. Only little-endian two-dimensional
//! arrays in C order are supported; others are rejected with an error that names the difference.

use std::path::Path;

use crate::files::{self, Checksum};
use crate::rows::{NumberFormat, RowStore};
use sterling_core::error::{Error, Result};
use sterling_kernels::map::ForeignFile;

/// Maximum header length; NumPy writes a few hundred bytes.
const HEADER_BYTES_MAX: usize = 1 << 16;
/// Bytes per read, so that the file and the converted numbers are not both in memory.
const CHUNK_BYTES: usize = 1 << 20;

struct Header {
    descr: String,
    rows: usize,
    cols: usize,
}

/// Returns the text after `'name':` in a header.
fn field<'a>(header: &'a str, name: &str) -> Option<&'a str> {
    let at = header.find(&format!("'{name}'")).or_else(|| header.find(&format!("\"{name}\"")))?;
    header[at + name.len() + 2..].trim_start().strip_prefix(':').map(str::trim_start)
}

fn header(file: &mut ForeignFile, left: &mut usize) -> Result<Header> {
    let broken = |what: &str| Error::invalid(format!("not a .npy matrix: {what}"));
    let mut take = |count: usize| {
        *left = left.checked_sub(count).ok_or_else(|| broken("the header is truncated"))?;
        let mut bytes = vec![0; count];
        file.read(&mut bytes).map(|()| bytes)
    };
    let start = take(8)?;
    if !start.starts_with(b"\x93NUMPY") {
        return Err(broken("the file does not start with \\x93NUMPY"));
    }
    let length_bytes = match start[6] {
        1 => 2,
        2 | 3 => 4,
        other => return Err(broken(&format!("format version {other}, expected 1 to 3"))),
    };
    let length = take(length_bytes)?.iter().rev().fold(0, |length, &byte| length << 8 | usize::from(byte));
    if length > HEADER_BYTES_MAX {
        return Err(broken(&format!("a header of {length} bytes, expected at most {HEADER_BYTES_MAX}")));
    }
    let text = take(length)?;
    let text = std::str::from_utf8(&text).map_err(|_| broken("the header is not UTF-8 text"))?;
    let descr = field(text, "descr")
        .and_then(|t| t.strip_prefix(['\'', '"']))
        .and_then(|t| t.split(['\'', '"']).next())
        .ok_or_else(|| broken("the header has no `descr` of a single type"))?;
    if !field(text, "fortran_order").is_some_and(|t| t.starts_with("False")) {
        return Err(broken("expected `fortran_order` False; save numpy.ascontiguousarray of the matrix"));
    }
    let shape = field(text, "shape")
        .and_then(|t| t.strip_prefix('('))
        .and_then(|t| t.split(')').next())
        .ok_or_else(|| broken("the header has no `shape`"))?;
    let sizes: Vec<&str> = shape.split(',').map(str::trim).filter(|s| !s.is_empty()).collect();
    match sizes.iter().map(|s| s.parse().ok()).collect::<Option<Vec<usize>>>().as_deref() {
        Some(&[rows, cols]) => Ok(Header { descr: descr.to_owned(), rows, cols }),
        _ => Err(broken(&format!("shape ({shape}), expected (rows, columns)"))),
    }
}

/// Open file whose header was read; the numbers follow.
struct Body {
    file: ForeignFile,
    header: Header,
    /// Size of the numbers in the file, in bytes.
    bytes: usize,
}

impl Body {
    fn open(path: &Path) -> Result<Self> {
        let mut file = ForeignFile::open(path)?;
        let mut bytes = file.len();
        let header = header(&mut file, &mut bytes).map_err(|e| e.within(path.display()))?;
        Ok(Body { file, header, bytes })
    }

    /// Reads the numbers and converts `N` bytes each into a `T`.
    fn numbers<const N: usize, T>(mut self, number: impl Fn([u8; N]) -> T) -> Result<Vec<T>> {
        let Header { rows, cols, .. } = self.header;
        let count = rows.checked_mul(cols).filter(|count| count.checked_mul(N) == Some(self.bytes));
        let Some(count) = count else {
            return Err(Error::invalid(format!(
                "{} bytes of numbers, expected {rows} × {cols} numbers of {N} bytes",
                self.bytes
            )));
        };
        let mut values = Vec::with_capacity(count);
        let mut chunk = vec![0; CHUNK_BYTES.min(self.bytes)];
        while values.len() < count {
            let bytes = CHUNK_BYTES.min((count - values.len()) * N);
            self.file.read(&mut chunk[..bytes])?;
            values.extend(chunk[..bytes].as_chunks::<N>().0.iter().map(|&part| number(part)));
        }
        self.file.finish()?;
        Ok(values)
    }
}

fn unexpected<T>(header: &Header, expected: &str) -> Result<T> {
    Err(Error::invalid(format!("numbers of type `{}`, expected {expected}, little-endian", header.descr)))
}

/// Opens a matrix of floats (f2, f4 or f8); its numbers are read on demand.
///
/// # Errors
/// `NotFound` or `Io`; `Invalid` with the path and the reason.
pub fn open_f32(path: &Path) -> Result<RowStore<'static>> {
    let Body { file, header, bytes } = Body::open(path)?;
    let format = match header.descr.as_str() {
        "<f2" => Ok(NumberFormat::F16),
        "<f4" => Ok(NumberFormat::F32),
        "<f8" => Ok(NumberFormat::F64),
        _ => unexpected(&header, "f2, f4 or f8"),
    };
    let (name, start) = (path.display().to_string(), file.len() - bytes);
    let rows = format.and_then(|format| RowStore::in_file(file, name, start, format, [header.rows, header.cols]));
    rows.map_err(|e| e.within(path.display()))
}

/// Reads a matrix of floats. Returns the numbers row by row, and the numbers of rows and columns.
///
/// # Errors
/// As [`open_f32`]; `Io` if the file changes meanwhile.
pub fn read_f32(path: &Path) -> Result<(Vec<f32>, usize, usize)> {
    let file = open_f32(path)?;
    Ok((file.all()?, file.rows(), file.cols()))
}

/// Reads a matrix of integers of up to 64 bits. Returns the numbers row by row, and the numbers of rows and columns.
///
/// # Errors
/// As [`read_f32`].
pub fn read_i64(path: &Path) -> Result<(Vec<i64>, usize, usize)> {
    read(path, |body| match body.header.descr.as_str() {
        "|i1" => body.numbers(|b: [u8; 1]| i64::from(i8::from_le_bytes(b))),
        "|u1" => body.numbers(|b: [u8; 1]| i64::from(b[0])),
        "<i2" => body.numbers(|b: [u8; 2]| i64::from(i16::from_le_bytes(b))),
        "<i4" => body.numbers(|b: [u8; 4]| i64::from(i32::from_le_bytes(b))),
        "<u4" => body.numbers(|b: [u8; 4]| i64::from(u32::from_le_bytes(b))),
        "<i8" => body.numbers(i64::from_le_bytes),
        _ => unexpected(&body.header, "i1, u1, i2, i4, u4 or i8"),
    })
}

fn read<T>(path: &Path, numbers: impl FnOnce(Body) -> Result<Vec<T>>) -> Result<(Vec<T>, usize, usize)> {
    let body = Body::open(path)?;
    let (rows, cols) = (body.header.rows, body.header.cols);
    let values = numbers(body).map_err(|e| e.within(path.display()))?;
    Ok((values, rows, cols))
}

/// Writes a matrix of f32 in chunks; returns the checksum of the file.
///
/// # Errors
/// As [`files::write_atomic`] and [`RowStore::read`].
pub fn write_f32(path: &Path, rows: &RowStore<'_>) -> Result<Checksum> {
    let mut unread = None;
    let written = files::write_atomic(path, |out| {
        out.write_all(&written_header("<f4", [rows.rows(), rows.cols()]))?;
        let put = rows.each(|_, chunk| {
            out.write_all(bytemuck::cast_slice(chunk.data())).map_err(|e| Error::io(path.display(), e))
        });
        put.map_err(|e| {
            unread = Some(e);
            std::io::ErrorKind::Other.into()
        })
    });
    written.map_err(|e| unread.unwrap_or(e))
}

/// Writes a column of u32; returns the checksum of the file.
///
/// # Errors
/// As [`files::write_atomic`].
pub fn write_u32(path: &Path, values: &[u32]) -> Result<Checksum> {
    files::write_atomic(path, |out| {
        out.write_all(&written_header("<u4", [values.len(), 1]))?;
        out.write_all(bytemuck::cast_slice(values))
    })
}

/// Formats the header: 128 bytes, as NumPy writes it.
fn written_header(descr: &str, [rows, cols]: [usize; 2]) -> Vec<u8> {
    const TEXT_BYTES: usize = 118;
    let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({rows}, {cols}), }}");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((TEXT_BYTES as u16).to_le_bytes());
    bytes.extend(format!("{text:<width$}\n", width = TEXT_BYTES - 1).into_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::error::Kind;

    fn file(version: u8, text: &str, body: &[u8]) -> tempfile::NamedTempFile {
        let mut bytes = b"\x93NUMPY".to_vec();
        bytes.extend([version, 0]);
        match version {
            1 => bytes.extend((text.len() as u16).to_le_bytes()),
            _ => bytes.extend((text.len() as u32).to_le_bytes()),
        }
        bytes.extend(text.as_bytes());
        bytes.extend(body);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        file
    }

    #[test]
    fn matrices_of_every_type_are_read() {
        let text = |descr: &str| format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': (2, 1), }}    \n");
        let floats = [1.5f32, -2.0];
        for version in [1, 2, 3] {
            let four = file(version, &text("<f4"), bytemuck::cast_slice(&floats));
            assert_eq!(read_f32(four.path()).unwrap(), (floats.to_vec(), 2, 1));
        }
        let two = floats.map(half::f16::from_f32);
        assert_eq!(read_f32(file(1, &text("<f2"), bytemuck::cast_slice(&two)).path()).unwrap().0, floats);
        let eight = floats.map(f64::from);
        assert_eq!(read_f32(file(1, &text("<f8"), bytemuck::cast_slice(&eight)).path()).unwrap().0, floats);
        let body = |bytes: usize| (0..2 * bytes).map(|b| if b % bytes == 0 { 7 } else { 0 }).collect::<Vec<u8>>();
        for (descr, bytes) in [("|i1", 1), ("|u1", 1), ("<i2", 2), ("<i4", 4), ("<u4", 4), ("<i8", 8)] {
            let read = read_i64(file(1, &text(descr), &body(bytes)).path()).unwrap();
            assert_eq!(read, (vec![7, 7], 2, 1), "{descr}");
        }
        let negative = file(1, &text("<i4"), bytemuck::cast_slice(&[-1i32, i32::MIN]));
        assert_eq!(read_i64(negative.path()).unwrap().0, [-1, i64::from(i32::MIN)]);
    }

    #[test]
    fn written_matrices_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let (floats, integers) = (folder.path().join("f.npy"), folder.path().join("u.npy"));
        for rows in [0, 1, 7] {
            let numbers: Vec<f32> = (0..rows * 3).map(|n| n as f32 / 3.0).collect();
            let sum = write_f32(&floats, &RowStore::owned(numbers.clone(), 3).unwrap()).unwrap();
            assert_eq!(sum, Checksum::of_file(&floats).unwrap());
            assert_eq!(read_f32(&floats).unwrap(), (numbers, rows, 3));
            let lists: Vec<u32> = (0..rows as u32).map(|n| u32::MAX - n).collect();
            write_u32(&integers, &lists).unwrap();
            assert_eq!(read_i64(&integers).unwrap(), (lists.into_iter().map(i64::from).collect(), rows, 1));
        }
        assert_eq!(std::fs::read(&floats).unwrap().len(), 128 + 7 * 3 * 4);
        let missing = folder.path().join("no/such");
        assert_eq!(write_u32(&missing, &[1]).unwrap_err().kind(), Kind::NotFound);
    }

    #[test]
    fn other_files_are_rejected_with_the_reason() {
        let good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), }";
        for (text, body, reason) in [
            (good, 7, "7 bytes"),
            ("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 1), }", 8, "fortran"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", 8, "shape (2,)"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (2, -1), }", 8, "shape"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807, 9), }", 8, "8 bytes"),
            ("{'descr': '>f4', 'fortran_order': False, 'shape': (2, 1), }", 8, "`>f4`"),
            ("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2, 1), }", 8, "descr"),
            ("{'fortran_order': False, 'shape': (2, 1), }", 8, "descr"),
            ("{'descr': '<f4', 'fortran_order': False}", 8, "shape"),
            ("", 8, "descr"),
        ] {
            let error = read_f32(file(1, text, &vec![0; body]).path()).unwrap_err();
            assert_eq!(error.kind(), Kind::Invalid);
            assert!(error.to_string().contains(reason), "{text}: {error}");
        }
        assert!(read_i64(file(1, good, &[0; 8]).path()).unwrap_err().to_string().contains("`<f4`"));
        for bytes in [&b""[..], b"\x93NUMPY", b"\x93NUMPY\x09\x00\x00\x00\x00\x00", b"\x93NUMPY\x01\x00\xff\xff{}{}"] {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), bytes).unwrap();
            assert_eq!(read_f32(file.path()).unwrap_err().kind(), Kind::Invalid, "{bytes:?}");
        }
        assert_eq!(read_f32(Path::new("no/such.npy")).unwrap_err().kind(), Kind::NotFound);
    }
}
