//! Objects in a bucket, the storage of versions that several machines share.
//!
//! [`Objects`] is the interface of a bucket: it lists, reads, writes and removes complete objects, and writes can be conditional.
//! [`open`] opens buckets of S3 (and compatible services), Google Cloud Storage and Azure (feature `object-store`). [`prove`]
//! rejects a bucket that accepts conditional writes without enforcing the condition. [`Health`] schedules retries of a bucket
//! that does not answer. Calls that are safe to repeat are retried; [`replace`] also retries conditional writes whose answer was
//! lost.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use sterling_core::error::Result;

#[cfg(feature = "object-store")]
mod bucket;
mod health;
#[cfg(not(feature = "object-store"))]
mod none;
mod prove;
mod settled;
#[cfg(feature = "object-store")]
mod strays;
#[cfg(feature = "object-store")]
mod transport;

#[cfg(feature = "object-store")]
pub use bucket::open;
pub use health::{Health, back_off};
#[cfg(not(feature = "object-store"))]
pub use none::open;
pub use prove::{Proof, prove};
pub use settled::{found, read_twice, replace};

/// Maximum size of an object that is read at once.
pub const WHOLE_BYTES_MAX: u64 = 64 << 20;

/// Identity of an object's content under its key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tag {
    /// Entity tag, as HTTP defines it.
    pub e_tag: Option<String>,
    /// Generation number or name, in buckets with generations.
    pub generation: Option<String>,
    /// Size of the object in bytes.
    pub bytes: u64,
    /// Time of the write in milliseconds since 1970, by the bucket's clock; 0 if unknown.
    pub modified_ms: i64,
}

impl Tag {
    /// Hashes the entity tag, or size and write time if there is no tag, so the number changes with the content. Ignores the weak
    /// prefix (`W/"..."`), because some stores report the same tag as weak in one answer and strong in another.
    pub fn mark(&self) -> u64 {
        let text = match &self.e_tag {
            Some(e_tag) => e_tag.trim_start_matches("W/").to_owned(),
            None => format!("{} {}", self.bytes, self.modified_ms),
        };
        xxhash_rust::xxh3::xxh3_64(text.as_bytes())
    }

    /// Returns the entity tag if a condition can use it: a weak tag never matches in `If-Match` (RFC 9110, 8.8.3.2).
    pub fn strong(&self) -> Option<&str> {
        self.e_tag.as_deref().filter(|e_tag| !e_tag.starts_with("W/"))
    }
}

/// Condition of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteCondition {
    /// Unconditional.
    Anything,
    /// The write succeeds only if no object has this key.
    Nothing,
    /// The write succeeds only if the stored object still has this tag.
    This(Tag),
}

/// A bucket, or its objects under a prefix. Keys are names separated by `/`; they neither begin nor end with `/`. Calls block
/// until they are done, are retried after transient failures, and may come from any thread.
///
/// # Errors
/// All calls return `Unavailable` if the bucket does not answer or does not know the caller, and `Io` if the caller lacks
/// permission.
pub trait Objects: fmt::Debug + Send + Sync {
    /// Lists all objects whose keys begin with `under` and `/`, or all objects if `under` is empty. Skips objects whose keys are
    /// not valid paths.
    ///
    /// # Errors
    /// Only those of all calls ([`Objects`]).
    fn list(&self, under: &str) -> Result<Vec<(String, Tag)>>;

    /// Returns the tag of an object.
    ///
    /// # Errors
    /// `NotFound`.
    fn head(&self, key: &str) -> Result<Tag>;

    /// Reads a complete object of at most [`WHOLE_BYTES_MAX`].
    ///
    /// # Errors
    /// `NotFound`; `Corrupt` for a larger object.
    fn get(&self, key: &str) -> Result<(Vec<u8>, Tag)>;

    /// Streams a byte range of an object to `take`, in order.
    ///
    /// # Errors
    /// `NotFound`; `Conflict` if the object was replaced; errors of `take`.
    fn read(&self, key: &str, of: &Tag, range: Range<u64>, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>;

    /// Writes an object. A conditional write is tried once; [`replace`] retries it.
    ///
    /// # Errors
    /// `Conflict` if the condition does not hold, which may also follow a write whose answer was lost; `Unavailable` if the
    /// object may have been written; `Unsupported` if the bucket reports no tag that a condition could use.
    fn put(&self, key: &str, bytes: Vec<u8>, over: &WriteCondition) -> Result<Tag>;

    /// Uploads a file, in parts if it is large.
    ///
    /// # Errors
    /// Those of all calls ([`Objects`]); `Io` also if the file cannot be read.
    fn upload(&self, key: &str, file: &Path) -> Result<()>;

    /// Removes an object; succeeds if it does not exist.
    ///
    /// # Errors
    /// Only those of all calls ([`Objects`]).
    fn remove(&self, key: &str) -> Result<()>;
}

/// Returns true for the URL of a bucket, as in `s3://bucket/prefix`; all other names are folders.
pub fn is_url(store: &Path) -> bool {
    store.to_str().is_some_and(|text| text.contains("://"))
}
