//! Atomic files: a reader sees a complete file or none. Tensors are stored as `.safetensors` (temporary name, then rename).
//!
//! A [`TensorFile`] collects named tensors and writes them in the safetensors format
//! (<https://github.com/huggingface/safetensors#format>): 8 bytes of header length, a JSON header, then the data. The header is
//! padded with spaces so that the data starts at a multiple of 64 bytes. Tensors whose length is a multiple of 64 bytes come first
//! and are aligned to a cache line. The other tensors follow in descending order of element size, so that each is
//! aligned to its elements. A tensor that is computed in chunks is reserved first and written into the file later
//! ([`TensorWriter`]). [`Tensors`] maps such a file and returns typed views.

mod checksum;
mod unchanged;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{BuildHasher as _, RandomState};
use std::io::{BufWriter, Read as _, Write};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytemuck::Pod;
use safetensors::SafeTensors;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Result};
use sterling_kernels::buffer::Buffer;
use sterling_kernels::map::{self, Map};

pub use checksum::{Checksum, Hashed};
pub use safetensors::Dtype;
pub use unchanged::Unchanged;

/// Alignment of the data of a tensor file: one cache line, so that a 64-byte load never straddles two.
const DATA_ALIGN_BYTES: usize = 64;

/// Element type of a tensor, with its safetensors type.
pub trait Element: Pod {
    /// Safetensors type of the elements.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($t:ty => $d:ident),* $(,)?) => { $(impl Element for $t { const DTYPE: Dtype = Dtype::$d; })* };
}
elements! { u8 => U8, i8 => I8, u16 => U16, i32 => I32, u32 => U32, i64 => I64, u64 => U64, f32 => F32, f64 => F64, half::f16 => F16, half::bf16 => BF16 }

/// Named tensors to be written to one file.
#[derive(Default)]
pub struct TensorFile<'a> {
    tensors: Vec<Named<'a>>,
}

struct Named<'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    values: Numbers<'a>,
}

/// Values of a tensor, or the number of bytes reserved for them.
enum Numbers<'a> {
    Given(Box<dyn Bytes + 'a>),
    Reserved(usize),
}

impl Numbers<'_> {
    fn len(&self) -> usize {
        self.given().map_or_else(|bytes| bytes, <[u8]>::len)
    }

    fn given(&self) -> std::result::Result<&[u8], usize> {
        match self {
            Numbers::Given(values) => Ok(values.bytes()),
            Numbers::Reserved(bytes) => Err(*bytes),
        }
    }
}

/// Borrowed or owned values as bytes.
trait Bytes {
    fn bytes(&self) -> &[u8];
}

impl<T: Element> Bytes for &[T] {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

impl<T: Element> Bytes for Vec<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

impl<'a> TensorFile<'a> {
    /// Creates a file without tensors.
    pub fn new() -> Self {
        TensorFile::default()
    }

    /// Adds a tensor whose values are borrowed until the file is written.
    ///
    /// # Errors
    /// `Internal` if the shape does not match the number of values, or if the name is taken.
    pub fn add<T: Element>(&mut self, name: impl Into<String>, shape: &[usize], values: &'a [T]) -> Result<()> {
        self.push::<T>(name.into(), shape, values.len(), Numbers::Given(Box::new(values)))
    }

    /// Adds a tensor and takes ownership of its values.
    ///
    /// # Errors
    /// As [`TensorFile::add`].
    pub fn add_owned<T: Element>(&mut self, name: impl Into<String>, shape: &[usize], values: Vec<T>) -> Result<()> {
        self.push::<T>(name.into(), shape, values.len(), Numbers::Given(Box::new(values)))
    }

    /// Adds a byte tensor that holds `value` as JSON ([`Tensors::json`]).
    ///
    /// # Errors
    /// As [`TensorFile::add`]; `Internal` if the value cannot be serialized as JSON.
    pub fn add_json<T: Serialize>(&mut self, name: &str, value: &T) -> Result<()> {
        let text = serde_json::to_vec(value).map_err(|e| Error::internal(format!("tensor `{name}`: {e}")))?;
        self.add_owned(name, &[text.len()], text)
    }

    /// Adds a tensor whose values follow later ([`TensorFile::write_filled`]); until then they are zeros.
    ///
    /// # Errors
    /// `Internal` if the name is taken.
    pub fn reserve<T: Element>(&mut self, name: impl Into<String>, shape: &[usize]) -> Result<()> {
        let len = shape.iter().product();
        self.push::<T>(name.into(), shape, len, Numbers::Reserved(len * size_of::<T>()))
    }

    fn push<T: Element>(&mut self, name: String, shape: &[usize], len: usize, values: Numbers<'a>) -> Result<()> {
        if shape.iter().product::<usize>() != len {
            return Err(Error::internal(format!("tensor {name}: shape {shape:?} does not hold {len} values")));
        }
        if self.tensors.iter().any(|t| t.name == name) {
            return Err(Error::internal(format!("tensor {name} is added twice")));
        }
        self.tensors.push(Named { name, dtype: T::DTYPE, shape: shape.to_vec(), values });
        Ok(())
    }

    /// Writes the file at `path` (temporary name, sync, rename). Returns its length and checksum for the manifest.
    ///
    /// # Errors
    /// `Io` with the path; `Internal` if a tensor is reserved but has no values.
    pub fn write(&self, path: &Path) -> Result<Checksum> {
        let (text, ordered) = self.arranged();
        let mut values = Vec::with_capacity(ordered.len());
        for Named { name, values: given, .. } in ordered {
            let given = given.given();
            values.push(given.map_err(|_| Error::internal(format!("tensor {name}: reserved but never written")))?);
        }
        write_atomic(path, |out| {
            out.write_all(&(text.len() as u64).to_le_bytes())?;
            out.write_all(&text)?;
            values.iter().try_for_each(|values| out.write_all(values))
        })
    }

    /// Writes the file and calls `fill` to write the values of reserved tensors. The file is read again for its checksum.
    ///
    /// # Errors
    /// `Io` with the path; errors of `fill`. If writing fails, no file remains.
    pub fn write_filled(
        &self,
        path: &Path,
        fill: impl FnOnce(&mut TensorWriter<'_>) -> Result<()>,
    ) -> Result<Checksum> {
        replace(path, |temporary| {
            let io = |e| Error::io(path.display(), e);
            let file = File::create(temporary).map_err(io)?;
            self.fill(self.arranged(), Target::File(&file), fill).map_err(|e| e.within(path.display()))?;
            file.sync_all().map_err(io)?;
            Checksum::of_file(temporary)
        })
    }

    /// Builds the file in memory and opens it there. Errors use `name` in place of a path.
    ///
    /// # Errors
    /// `Overloaded` if the memory cannot be allocated.
    pub fn in_memory(&self, name: &str) -> Result<Tensors> {
        self.in_memory_filled(name, |_| Ok(()))
    }

    /// Builds the file in memory and calls `fill` to write the values of reserved tensors.
    ///
    /// # Errors
    /// As [`TensorFile::in_memory`]; errors of `fill`.
    pub fn in_memory_filled(
        &self,
        name: &str,
        fill: impl FnOnce(&mut TensorWriter<'_>) -> Result<()>,
    ) -> Result<Tensors> {
        let arranged = self.arranged();
        let bytes = 8 + arranged.0.len() + arranged.1.iter().map(|t| t.values.len()).sum::<usize>();
        let mut filled = Ok(());
        let map = Map::filled(bytes, |to| filled = self.fill(arranged, Target::Memory(to), fill))?;
        filled?;
        Tensors::of(Path::new(name), map)
    }

    /// Writes the header and all tensors with values, then calls `fill` for the reserved tensors.
    fn fill(
        &self,
        (text, ordered): (Vec<u8>, Vec<&Named<'a>>),
        to: Target<'_>,
        fill: impl FnOnce(&mut TensorWriter<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut places = TensorWriter { to, tensors: BTreeMap::new() };
        places.write(0, &(text.len() as u64).to_le_bytes())?;
        places.write(8, &text)?;
        let mut at = 8 + text.len();
        for Named { name, dtype, shape, values } in ordered {
            let end = at + values.len();
            if let Ok(values) = values.given() {
                places.write(at, values)?;
            }
            places.tensors.insert(name.clone(), TensorRange { dtype: *dtype, shape: shape.clone(), start: at, end });
            at = end;
        }
        if let Target::File(file) = &places.to {
            file.set_len(at as u64).map_err(|e| Error::io("writing", e))?;
        }
        fill(&mut places)
    }

    /// Returns the header, and the tensors in file order.
    fn arranged(&self) -> (Vec<u8>, Vec<&Named<'a>>) {
        let mut ordered: Vec<&Named<'_>> = self.tensors.iter().collect();
        ordered
            .sort_by_key(|t| (!t.values.len().is_multiple_of(DATA_ALIGN_BYTES), std::cmp::Reverse(t.dtype.bitsize())));
        let mut at = 0usize;
        let mut header = serde_json::Map::new();
        for Named { name, dtype, shape, values } in &ordered {
            let end = at + values.len();
            header.insert(name.clone(), serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}));
            at = end;
        }
        let mut text = serde_json::Value::Object(header).to_string().into_bytes();
        text.resize((8 + text.len()).next_multiple_of(DATA_ALIGN_BYTES) - 8, b' ');
        (text, ordered)
    }
}

/// Tensor file that is being written; values of reserved tensors can be written in any order.
pub struct TensorWriter<'t> {
    to: Target<'t>,
    tensors: BTreeMap<String, TensorRange>,
}

enum Target<'t> {
    File(&'t File),
    Memory(&'t mut [u8]),
}

impl TensorWriter<'_> {
    /// Writes consecutive values of a tensor, starting at its element `first`.
    ///
    /// # Errors
    /// `Io`; `Internal` if the range exceeds the tensor or the element type differs.
    pub fn put<T: Element>(&mut self, tensor: &str, first: usize, values: &[T]) -> Result<()> {
        let place = self.tensors.get(tensor).filter(|place| place.dtype == T::DTYPE);
        let at = place.map(|place| (place.start + first * size_of::<T>(), place.end));
        match at.filter(|(at, end)| at + size_of_val(values) <= *end) {
            Some((at, _)) => self.write(at, bytemuck::cast_slice(values)),
            None => Err(Error::internal(format!(
                "tensor {tensor}: {} values from element {first} on, expected values of its type within the tensor",
                values.len()
            ))),
        }
    }

    fn write(&mut self, at: usize, bytes: &[u8]) -> Result<()> {
        match &mut self.to {
            Target::File(file) => file.write_all_at(bytes, at as u64).map_err(|e| Error::io("writing", e)),
            Target::Memory(memory) => {
                memory[at..at + bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
        }
    }
}

/// Reads a complete file.
///
/// # Errors
/// `NotFound` or `Io` with the path, also if it is not a regular file.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let (mut file, mut bytes) = (map::open(path)?, Vec::new());
    file.read_to_end(&mut bytes).map_err(|e| Error::io(path.display(), e))?;
    Ok(bytes)
}

/// Replaces a file atomically (temporary name, sync, rename, sync of the folder): a reader sees the old file or the new one.
///
/// # Errors
/// `Io` with the path; the temporary file is removed.
pub fn write_atomic(path: &Path, fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<Checksum> {
    replace(path, |temporary| {
        let write = || {
            let mut out = Hashed::new(BufWriter::with_capacity(1 << 20, File::create(temporary)?));
            fill(&mut out)?;
            out.flush()?;
            out.get_ref().get_ref().sync_all()?;
            Ok(out.sum())
        };
        write().map_err(|e| Error::io(path.display(), e))
    })
}

/// Creates a folder atomically: `make` fills a temporary folder, which is renamed to `path` at the end, or removed on failure.
///
/// # Errors
/// Errors of `make`; `Io` or `NoSpace` with the path.
pub fn write_folder<T>(path: &Path, make: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let make = |temporary: &Path| {
        let io = |e| Error::io(path.display(), e);
        fs::create_dir(temporary).map_err(io)?;
        let made = make(temporary)?;
        sync_folder(temporary).map_err(io)?;
        Ok(made)
    };
    replace_with(path, make, |temporary| fs::remove_dir_all(temporary))
}

/// Lets `make` write a temporary file and renames it to `path`. Removes the temporary file on failure.
fn replace<T>(path: &Path, make: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    replace_with(path, make, |temporary| fs::remove_file(temporary))
}

fn replace_with<T>(
    path: &Path,
    make: impl FnOnce(&Path) -> Result<T>,
    remove: impl FnOnce(&Path) -> std::io::Result<()>,
) -> Result<T> {
    may_block();
    let temporary = temporary(path);
    let renamed = |made| {
        // The folder is opened before the rename: running out of descriptors must not turn a completed write into an error.
        let folder = path.parent().map(open_folder).transpose()?;
        fs::rename(&temporary, path)?;
        folder.map_or(Ok(()), |folder| folder.sync_all()).map(|()| made)
    };
    let made = make(&temporary).and_then(|made| renamed(made).map_err(|e| Error::io(path.display(), e)));
    made.inspect_err(|_| {
        let _ = remove(&temporary);
    })
}

/// Returns a temporary name next to `path` that is unique across machines and containers, and that readers of folders skip.
pub fn temporary(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.tmp-{:016x}", RandomState::new().hash_one(std::process::id())))
}

/// Makes renames inside `folder` durable.
///
/// # Errors
/// Those of the operating system.
pub fn sync_folder(folder: &Path) -> std::io::Result<()> {
    open_folder(folder)?.sync_all()
}

/// Opens a folder; a sync of the returned file makes renames inside the folder durable.
///
/// # Errors
/// Those of the operating system.
pub fn open_folder(folder: &Path) -> std::io::Result<File> {
    may_block();
    File::open(if folder.as_os_str().is_empty() { Path::new(".") } else { folder })
}

#[derive(Clone, Debug)]
struct TensorRange {
    dtype: Dtype,
    shape: Vec<usize>,
    start: usize,
    end: usize,
}

/// Tensor file, mapped or in memory.
#[derive(Clone, Debug)]
pub struct Tensors {
    name: String,
    map: Arc<Map>,
    places: BTreeMap<String, TensorRange>,
}

impl Tensors {
    /// Maps a file of a store and validates its header; the data is not read.
    ///
    /// # Errors
    /// `NotFound`, `Io`, or `Corrupt` with the path.
    pub fn open(path: &Path) -> Result<Self> {
        Tensors::of(path, Map::published(path)?)
    }

    /// Reads a file outside of the store into memory, because its owner may change it at any time.
    ///
    /// # Errors
    /// As [`Tensors::open`].
    pub fn read(path: &Path) -> Result<Self> {
        Tensors::of(path, Map::read(path)?)
    }

    fn of(path: &Path, map: Map) -> Result<Self> {
        let map = Arc::new(map);
        let corrupt =
            |e: safetensors::SafeTensorError| Error::corrupt(format!("{}: not a tensor file: {e}", path.display()));
        let (header_bytes, metadata) = SafeTensors::read_metadata(&map).map_err(corrupt)?;
        // `deserialize` also checks the offsets against the length of the file, which `read_metadata` does not.
        SafeTensors::deserialize(&map).map_err(corrupt)?;
        let base = 8 + header_bytes;
        let places = metadata
            .tensors()
            .into_iter()
            .map(|(name, info)| {
                let (start, end) = (base + info.data_offsets.0, base + info.data_offsets.1);
                (name, TensorRange { dtype: info.dtype, shape: info.shape.clone(), start, end })
            })
            .collect();
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok(Tensors { name, map, places })
    }

    /// Returns the bytes of the complete file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Returns the tensor names in sorted order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// Returns true if the file has a tensor of this name.
    pub fn has(&self, tensor: &str) -> bool {
        self.places.contains_key(tensor)
    }

    /// Returns the type and shape of a tensor.
    ///
    /// # Errors
    /// `Corrupt` if there is no such tensor.
    pub fn info(&self, tensor: &str) -> Result<(Dtype, &[usize])> {
        self.place(tensor).map(|p| (p.dtype, p.shape.as_slice()))
    }

    fn place(&self, tensor: &str) -> Result<&TensorRange> {
        self.places.get(tensor).ok_or_else(|| Error::corrupt(format!("{}: tensor `{tensor}` is missing", self.name)))
    }

    /// Returns a tensor of the given type and number of dimensions, with its shape. The tensor is not copied if it is aligned, as
    /// all tensors written by [`TensorFile`] are.
    ///
    /// # Errors
    /// `Corrupt` if the tensor is missing, or its type or number of dimensions differs.
    pub fn get<T: Element>(&self, tensor: &str, dimensions: usize) -> Result<(Buffer<T>, Vec<usize>)> {
        let place = self.place(tensor)?;
        if place.dtype != T::DTYPE || place.shape.len() != dimensions {
            return Err(Error::corrupt(format!(
                "{}: tensor `{tensor}` is {:?} {:?}, expected {:?} with {dimensions} dimensions",
                self.name,
                place.dtype,
                place.shape,
                T::DTYPE
            )));
        }
        let len = (place.end - place.start) / size_of::<T>();
        let buffer = Buffer::mapped(self.map.clone(), place.start, len)
            .map_err(|e| e.within(format!("{}: tensor `{tensor}`", self.name)))?;
        Ok((buffer, place.shape.clone()))
    }

    /// Returns the value of a tensor that [`TensorFile::add_json`] added.
    ///
    /// # Errors
    /// As [`Tensors::get`]; `Corrupt` if the bytes do not decode to the type.
    pub fn json<T: DeserializeOwned>(&self, tensor: &str) -> Result<T> {
        let (text, _) = self.get::<u8>(tensor, 1)?;
        serde_json::from_slice(&text).map_err(|e| Error::corrupt(format!("tensor `{tensor}`: {e}")))
    }

    /// Returns a one-dimensional tensor of a known length.
    ///
    /// # Errors
    /// As [`Tensors::get`], and `Corrupt` if the length differs.
    pub fn vector<T: Element>(&self, tensor: &str, len: usize) -> Result<Buffer<T>> {
        let (buffer, shape) = self.get::<T>(tensor, 1)?;
        if shape != [len] {
            return Err(Error::corrupt(format!(
                "{}: tensor `{tensor}` has {} values, expected {len}",
                self.name, shape[0]
            )));
        }
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn tensors_come_back_as_written_and_aligned() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let mut file = TensorFile::new();
        file.add("codes", &[2, 64], &[7u8; 128]).unwrap();
        file.add_owned("ids", &[3], vec![-1i64, 0, i64::MAX]).unwrap();
        assert!(file.add("ids", &[1], &[1i64]).is_err());
        assert!(file.add("bad", &[2], &[1i64]).is_err());
        let sum = file.write(&path).unwrap();
        let back = Tensors::open(&path).unwrap();
        assert_eq!(Checksum::of(back.bytes()), sum);
        assert_eq!(file.in_memory("a").unwrap().bytes(), back.bytes());
        let (codes, shape) = back.get::<u8>("codes", 2).unwrap();
        assert_eq!((codes.as_ptr() as usize % 64, shape), (0, vec![2, 64]));
        assert_eq!(&*back.vector::<i64>("ids", 3).unwrap(), [-1, 0, i64::MAX]);
        for invalid in [
            back.vector::<i64>("ids", 4).err(),
            back.vector::<f32>("ids", 3).err(),
            back.vector::<i64>("none", 3).err(),
        ] {
            assert_eq!(invalid.unwrap().kind(), sterling_core::error::Kind::Corrupt);
        }
    }

    #[test]
    fn tensors_written_in_any_order_equal_their_input() {
        let folder = tempfile::tempdir().unwrap();
        let (given, filled) = (folder.path().join("a.safetensors"), folder.path().join("b.safetensors"));
        let (bytes, floats): (Vec<u8>, Vec<f32>) = ((0..=255).collect(), (0..77).map(|n| n as f32).collect());
        let mut file = TensorFile::new();
        file.add("bytes", &[4, 64], &bytes).unwrap();
        file.add("floats", &[7, 11], &floats).unwrap();
        file.add("few", &[3], &[1u32, 2, 3]).unwrap();
        let expected = file.write(&given).unwrap();
        let mut file = TensorFile::new();
        file.reserve::<u8>("bytes", &[4, 64]).unwrap();
        file.reserve::<f32>("floats", &[7, 11]).unwrap();
        file.add("few", &[3], &[1u32, 2, 3]).unwrap();
        assert!(file.reserve::<f32>("few", &[3]).is_err());
        let fill = |places: &mut TensorWriter<'_>| {
            places.put("floats", 70, &floats[70..])?;
            (0..4).rev().try_for_each(|n| places.put("bytes", n * 64, &bytes[n * 64..][..64]))?;
            for (tensor, first) in [("floats", 71), ("bytes", 0), ("none", 0)] {
                assert!(places.put(tensor, first, &floats[..7]).is_err(), "{tensor}");
            }
            places.put("floats", 0, &floats[..70])
        };
        assert_eq!(file.write_filled(&filled, fill).unwrap(), expected);
        assert_eq!(fs::read(&filled).unwrap(), fs::read(&given).unwrap());
        assert_eq!(Checksum::of(file.in_memory_filled("b", fill).unwrap().bytes()), expected);
        fs::remove_file(&filled).unwrap();
        assert!(file.write(&filled).unwrap_err().to_string().contains("reserved but never written"));
        let failed = file.write_filled(&filled, |_| Err(Error::invalid("no"))).unwrap_err();
        assert!(failed.to_string().contains("b.safetensors: no"), "{failed}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file remains");
    }

    #[test]
    fn tensors_of_other_writers_need_not_be_aligned() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        for pad in 0..8 {
            let mut header = "{\"x\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,12]}}".to_owned();
            header.extend(std::iter::repeat_n(' ', pad));
            let values = [1.5f32, -2.0, 1e-30];
            let length = header.len() as u64;
            let bytes = [&length.to_le_bytes(), header.as_bytes(), bytemuck::cast_slice(&values)].concat();
            fs::write(&path, bytes).unwrap();
            for tensors in [Tensors::open(&path).unwrap(), Tensors::read(&path).unwrap()] {
                assert_eq!(&*tensors.vector::<f32>("x", 3).unwrap(), values, "{pad} spaces");
            }
        }
    }

    #[test]
    fn broken_files_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let mut file = TensorFile::new();
        file.add("x", &[4], &[1f32, 2.0, 3.0, 4.0]).unwrap();
        file.write(&path).unwrap();
        let complete = fs::read(&path).unwrap();
        for cut in [0, 1, 7, 8, 20, complete.len() - 1] {
            fs::write(&path, &complete[..cut]).unwrap();
            assert!(Tensors::open(&path).is_err(), "a file cut at {cut} bytes was opened");
        }
        assert!(Tensors::open(&folder.path().join("none")).is_err());
    }

    #[test]
    fn special_files_are_rejected_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
        for path in [pipe.as_path(), folder.path(), Path::new("/dev/zero")] {
            let refusals =
                [read(path).unwrap_err(), Tensors::open(path).unwrap_err(), Tensors::read(path).unwrap_err()];
            for refusal in refusals {
                assert_eq!(refusal.to_string(), format!("{}: not a regular file", path.display()));
            }
        }
    }

    #[test]
    fn a_folder_appears_with_all_files_or_not_at_all() {
        let above = tempfile::tempdir().unwrap();
        let path = above.path().join("made");
        let fill = |folder: &Path| write_atomic(&folder.join("file"), |out| out.write_all(b"text")).map(drop);
        let failed = write_folder(&path, |folder| {
            fill(folder)?;
            assert!(!path.exists());
            Err::<(), _>(Error::invalid("no"))
        });
        assert!(failed.unwrap_err().to_string().contains("no"));
        assert_eq!(fs::read_dir(above.path()).unwrap().count(), 0, "no temporary folder remains");
        write_folder(&path, fill).unwrap();
        assert_eq!(fs::read(path.join("file")).unwrap(), b"text");
        // An existing folder with files stays as it is.
        assert!(write_folder(&path, |_| Ok(())).is_err());
        assert_eq!(fs::read(path.join("file")).unwrap(), b"text");
        assert_eq!(fs::read_dir(above.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_write_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        write_atomic(&path, |out| out.write_all(b"old")).unwrap();
        let failed = write_atomic(&path, |out| {
            out.write_all(b"ne")?;
            Err(std::io::Error::other("disk full"))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
