//! Objects in a bucket: what stores of several machines keep their versions in.
//!
//! [`Objects`] is what is asked of a bucket, and nothing else of it is used: whole objects are listed, read, written where
//! nothing or a known object stands, and removed. [`open`] gives those of S3 and what speaks like it, Google Cloud Storage and
//! Azure (feature `object-store`); [`prove`] refuses a bucket that takes a write under a condition and does not keep to it;
//! [`Health`] says when one that does not answer is asked again. Calls are repeated where that can do no harm; [`replace`] makes
//! a write under a condition certain, whose answer may be lost.

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

/// Most bytes of an object that is read whole.
pub const WHOLE_BYTES_MAX: u64 = 64 << 20;

/// What tells an object from another one under its key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tag {
    /// The entity tag, as HTTP has it.
    pub e_tag: Option<String>,
    /// The number or name of the object's generation, in buckets that have one.
    pub generation: Option<String>,
    /// Bytes of the object.
    pub bytes: u64,
    /// When it was written, in milliseconds since 1970 by the bucket's clock; 0 where that was not told.
    pub modified_ms: i64,
}

impl Tag {
    /// A number that changes with the object's bytes: of its entity tag, or of its length and time where it has none. Some
    /// stores call a tag weak in one answer (`W/"..."`) and strong in another one.
    pub fn mark(&self) -> u64 {
        let text = match &self.e_tag {
            Some(e_tag) => e_tag.trim_start_matches("W/").to_owned(),
            None => format!("{} {}", self.bytes, self.modified_ms),
        };
        xxhash_rust::xxh3::xxh3_64(text.as_bytes())
    }

    /// The entity tag, where a condition can name it: no weak one equals any other (RFC 9110, 8.8.3.2).
    pub fn strong(&self) -> Option<&str> {
        self.e_tag.as_deref().filter(|e_tag| !e_tag.starts_with("W/"))
    }
}

/// What a write may replace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Over {
    /// Whatever is there.
    Anything,
    /// Nothing: there must be no such object.
    Nothing,
    /// This object alone.
    This(Tag),
}

/// A bucket, or what lies in it under a prefix. Keys are names with `/` between them, without one at either end. Calls wait for
/// the answer as long as bytes move, are repeated where they fail for a moment, and may come from any thread.
///
/// # Errors
/// All calls end with `Unavailable` where the bucket does not answer or does not know who calls, and with `Io` where this caller
/// lacks the right.
pub trait Objects: fmt::Debug + Send + Sync {
    /// All objects whose keys begin with `under` and `/`, or all there are where it is empty: their keys, and what they are.
    /// Objects whose keys cannot be ours are skipped.
    ///
    /// # Errors
    /// As all calls.
    fn list(&self, under: &str) -> Result<Vec<(String, Tag)>>;

    /// What an object is.
    ///
    /// # Errors
    /// `NotFound`.
    fn head(&self, key: &str) -> Result<Tag>;

    /// A whole object of at most [`WHOLE_BYTES_MAX`].
    ///
    /// # Errors
    /// `NotFound`; `Corrupt` for one that is larger.
    fn get(&self, key: &str) -> Result<(Vec<u8>, Tag)>;

    /// Bytes of an object, a piece at a time and in their order.
    ///
    /// # Errors
    /// `NotFound`; `Conflict` where it is another one by now; what `take` ends with.
    fn read(&self, key: &str, of: &Tag, range: Range<u64>, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>;

    /// Writes an object. A write under a condition is tried once: [`replace`] repeats it.
    ///
    /// # Errors
    /// `Conflict` where something else stands there than what may be replaced, or did after a write whose answer was lost;
    /// `Unavailable` where it may have been written; `Unsupported` where the bucket tells nothing that a condition could name.
    fn put(&self, key: &str, bytes: Vec<u8>, over: &Over) -> Result<Tag>;

    /// Writes a file as an object, in parts where it is large.
    ///
    /// # Errors
    /// `Io` also where the file cannot be read.
    fn upload(&self, key: &str, file: &Path) -> Result<()>;

    /// Removes an object; one that is not there is none.
    ///
    /// # Errors
    /// As all calls.
    fn remove(&self, key: &str) -> Result<()>;
}

/// True for the name of a bucket, as in `s3://bucket/prefix`; all other names are folders.
pub fn is_url(store: &Path) -> bool {
    store.to_str().is_some_and(|text| text.contains("://"))
}
