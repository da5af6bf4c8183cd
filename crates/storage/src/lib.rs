//! Files and object stores: memory-mapped tensor files with checksums ([`files`]), NumPy arrays ([`npy`]), matrices that may
//! exceed memory ([`rows`]) and buckets ([`objects`]).
//!
//! ```
//! use sterling_storage::files::{TensorFile, Tensors};
//!
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("rows.safetensors");
//! let mut file = TensorFile::new();
//! file.add("rows", &[2, 3], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
//! let checksum = file.write(&path)?;
//!
//! let tensors = Tensors::open(&path)?;
//! let (rows, shape) = tensors.get::<f32>("rows", 2)?;
//! assert_eq!((rows[5], shape), (6.0, vec![2, 3]));
//! assert_eq!(checksum.bytes, tensors.bytes().len() as u64);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

#[cfg(feature = "arrow")]
pub mod arrow;
pub mod files;
pub mod npy;
pub mod objects;
pub mod rows;
