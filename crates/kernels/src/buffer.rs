//! Number buffers: shared and read-only (mapped from a file, or allocated with huge pages), or writable by a single owner.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::sync::Arc;

use bytemuck::Pod;

use crate::map::{HUGE_PAGE_BYTES, Map};
use sterling_core::error::{Error, Result};

#[derive(Debug)]
enum Backing {
    Mapped(Arc<Map>),
    Owned(memmap2::MmapMut),
    Empty,
}

/// Shared, read-only array of `T` that is cheap to clone. Allocated buffers start at a page boundary, mapped ones at a
/// multiple of `T`'s alignment.
pub struct Buffer<T> {
    backing: Arc<Backing>,
    offset: usize,
    len: usize,
    kind: PhantomData<T>,
}

impl<T> Clone for Buffer<T> {
    fn clone(&self) -> Self {
        Buffer { backing: self.backing.clone(), offset: self.offset, len: self.len, kind: PhantomData }
    }
}

impl<T> Default for Buffer<T> {
    fn default() -> Self {
        Buffer { backing: Arc::new(Backing::Empty), offset: 0, len: 0, kind: PhantomData }
    }
}

impl<T: Pod> Buffer<T> {
    /// Allocates a buffer of `len` zeros, and lets `fill` write it before it is shared.
    ///
    /// # Errors
    /// `Overloaded` if memory cannot be allocated.
    pub fn filled(len: usize, fill: impl FnOnce(&mut [T])) -> Result<Self> {
        let Some(mut map) = anonymous(len, size_of::<T>())? else {
            fill(&mut []);
            return Ok(Buffer::default());
        };
        fill(bytemuck::cast_slice_mut(&mut map));
        Ok(Buffer { backing: Arc::new(Backing::Owned(map)), offset: 0, len, kind: PhantomData })
    }

    /// Allocates a copy of `values`.
    ///
    /// # Errors
    /// `Overloaded` if memory cannot be allocated.
    pub fn copied(values: &[T]) -> Result<Self> {
        Buffer::filled(values.len(), |to| to.copy_from_slice(values))
    }

    /// Returns `len` numbers of a mapped file from a byte offset on; copies them if the offset does not suit the
    /// alignment of `T`.
    ///
    /// # Errors
    /// `Corrupt` if the range exceeds the file; as [`Buffer::filled`].
    pub fn mapped(map: Arc<Map>, offset_bytes: usize, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).and_then(|b| b.checked_add(offset_bytes));
        let range = bytes.and_then(|end| map.get(offset_bytes..end)).ok_or_else(|| {
            Error::corrupt(format!(
                "{len} items of {} bytes at offset {offset_bytes} exceed the file of {} bytes",
                size_of::<T>(),
                map.len()
            ))
        })?;
        if bytemuck::try_cast_slice::<u8, T>(range).is_err() {
            return Buffer::filled(len, |to| bytemuck::cast_slice_mut(to).copy_from_slice(range));
        }
        Ok(Buffer { backing: Arc::new(Backing::Mapped(map)), offset: offset_bytes, len, kind: PhantomData })
    }

    /// Returns the size of the buffer in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Returns the numbers of `range` as a view of the same memory.
    ///
    /// # Errors
    /// `Invalid` if the range exceeds the buffer.
    pub fn slice(&self, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.len {
            return Err(Error::invalid(format!("buffer: range {range:?} exceeds the buffer of {} items", self.len)));
        }
        let offset = self.offset + range.start * size_of::<T>();
        Ok(Buffer { backing: self.backing.clone(), offset, len: range.len(), kind: PhantomData })
    }

    /// Returns the numbers in allocated memory, so that later changes of a mapped file have no effect.
    ///
    /// # Errors
    /// As [`Buffer::filled`]; `Io` if the file has changed since it was mapped.
    pub fn in_memory(&self) -> Result<Self> {
        match &*self.backing {
            Backing::Mapped(map) => {
                let mut read = Ok(());
                let copy =
                    Buffer::filled(self.len, |to| read = map.copy_to(self.offset, bytemuck::cast_slice_mut(to)))?;
                read.map(|()| copy)
            }
            Backing::Owned(_) | Backing::Empty => Ok(self.clone()),
        }
    }

    /// Returns the same memory as bytes.
    pub fn into_bytes(self) -> Buffer<u8> {
        Buffer { len: self.bytes(), backing: self.backing, offset: self.offset, kind: PhantomData }
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        let all: &[u8] = match &*self.backing {
            Backing::Mapped(map) => map,
            Backing::Owned(map) => map,
            Backing::Empty => return &[],
        };
        bytemuck::cast_slice(&all[self.offset..self.offset + self.bytes()])
    }
}

impl<T: Pod + fmt::Debug> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer[{} x {}]", self.len, std::any::type_name::<T>())
    }
}

/// Writable array of `T` with a single owner, in huge pages if it is long and the system supports them.
pub struct Owned<T> {
    /// `None` if the array has no bytes.
    map: Option<memmap2::MmapMut>,
    kind: PhantomData<T>,
}

impl<T: Pod> Owned<T> {
    /// Returns `len` zeros; their pages take memory only when they are written.
    ///
    /// # Errors
    /// `Overloaded` if memory cannot be allocated; `Invalid` if its size overflows.
    pub fn zeros(len: usize) -> Result<Self> {
        Ok(Owned { map: anonymous(len, size_of::<T>())?, kind: PhantomData })
    }
}

impl<T: Pod> Deref for Owned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.map.as_ref().map_or(&[], |map| bytemuck::cast_slice(map))
    }
}

impl<T: Pod> std::ops::DerefMut for Owned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.map.as_mut().map_or(&mut [], |map| bytemuck::cast_slice_mut(map))
    }
}

impl<T: Pod> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owned[{} x {}]", self.len(), std::any::type_name::<T>())
    }
}

/// Allocates memory for `len` items of `size` bytes; `None` if that is 0 bytes.
fn anonymous(len: usize, size: usize) -> Result<Option<memmap2::MmapMut>> {
    let bytes =
        len.checked_mul(size).ok_or_else(|| Error::invalid(format!("buffer: {len} items of {size} bytes overflow")))?;
    if bytes == 0 {
        return Ok(None);
    }
    let map = memmap2::MmapMut::map_anon(bytes)
        .map_err(|e| Error::overloaded(format!("buffer: cannot allocate {bytes} bytes: {e}")).caused_by(e))?;
    if bytes >= HUGE_PAGE_BYTES {
        // The call fails if the system has no huge pages; small pages are slower but work as well.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
    }
    Ok(Some(map))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owned_buffers_hold_what_was_copied_and_are_aligned() {
        let b = Buffer::copied(&[1u32, 2, 3]).expect("twelve bytes");
        assert_eq!(&*b, [1, 2, 3]);
        assert_eq!(b.as_ptr() as usize % 64, 0);
        assert!(Buffer::<u64>::default().is_empty());
        let part = b.slice(1..3).expect("inside");
        assert_eq!((&*part, &*part.slice(1..2).expect("inside")), (&[2, 3][..], &[3][..]));
        assert!(part.slice(1..3).is_err() && b.slice(4..4).is_err() && part.slice(2..2).expect("nothing").is_empty());
    }

    #[test]
    fn owned_runs_are_zeros_until_they_are_written() {
        let mut run = Owned::<f32>::zeros(3).expect("twelve bytes");
        run[1] = 2.0;
        assert_eq!(&*run, [0.0, 2.0, 0.0]);
        assert!(Owned::<f32>::zeros(0).expect("nothing").is_empty() && Owned::<u64>::zeros(usize::MAX).is_err());
    }

    #[test]
    fn absurd_sizes_are_errors() {
        assert!(Buffer::<u64>::filled(usize::MAX, |_| ()).is_err());
        assert!(Buffer::<u64>::filled(usize::MAX / 16, |_| ()).is_err());
    }
}
