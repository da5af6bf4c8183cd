//! Files and object stores: mapped tensor files with checksums ([`files`]), NumPy arrays ([`npy`]), rows of vectors ([`rows`]) and
//! buckets ([`objects`]).

pub mod files;
pub mod npy;
pub mod objects;
pub mod rows;
