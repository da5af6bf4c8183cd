//! Items as callers send them, and the partition function of items over shards.
//!
//! The crates `api` and `batch` parse bodies and files into a [`GivenItem`]; the crate `serving` checks it against a model and applies
//! it.
//!
//! ```
//! use sterling_core::items::{GivenItem, GivenValues, shard_of};
//! use sterling_core::units::ItemId;
//!
//! let attributes = vec![("year".to_owned(), GivenValues::Integers(vec![2024]))];
//! let item = GivenItem { id: 7, embedding: None, attributes, whole: false };
//! let invalid = item.invalid(GivenItem::field(item.whole, "year"), "got 2024, expected a text");
//! assert_eq!((invalid.id, invalid.field.as_str()), (Some(7), "set.year"));
//! assert!(shard_of(ItemId(7), 3) < 3);
//! ```

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::units::ItemId;

/// Name of the item ids in item files, request bodies and Arrow columns.
pub const ID: &str = "id";
/// Name of the item vectors in item files, request bodies and Arrow columns.
pub const EMBEDDING: &str = "embedding";

/// Maximum number of updates per call.
pub const UPDATES_MAX: usize = 10_000;

/// Maximum bytes of received text that the reason of an [`InvalidItem`] repeats.
const SHOWN_BYTES: usize = 40;

/// Returns the shard of an item, of `shards`: the 64-bit XXH3 hash, seed 0, of the id's eight bytes, little-endian, scaled to the
/// number of shards.
pub fn shard_of(item: ItemId, shards: u32) -> u32 {
    let hash = xxh3_64(&item.0.to_le_bytes());
    ((u128::from(hash) * u128::from(shards)) >> 64) as u32
}

/// Values of one attribute as a caller sends them; their meaning depends on the model's columns.
#[derive(Clone, Debug, PartialEq)]
pub enum GivenValues {
    /// No value, which removes the attribute.
    Missing,
    /// Integers.
    Integers(Vec<i64>),
    /// Numbers, at least one of them not an integer.
    Numbers(Vec<f64>),
    /// Strings.
    Texts(Vec<String>),
}

/// Item as a caller sends it.
#[derive(Clone, Debug, PartialEq)]
pub struct GivenItem {
    /// Item id, as the caller defines it.
    pub id: i64,
    /// Embedding of the item.
    pub embedding: Option<Vec<f32>>,
    /// Attributes of the item: all of them for a complete item, otherwise the ones that change.
    pub attributes: Vec<(String, GivenValues)>,
    /// True for a complete item, false for a change of some attributes of an existing one.
    pub whole: bool,
}

/// Validation error of one item of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InvalidItem {
    /// Item id, if it could be read.
    pub id: Option<i64>,
    /// Field as it was sent, such as `attributes.year` or `set.year`; empty for the item as a whole.
    pub field: String,
    /// Received and expected values.
    pub reason: String,
}

impl GivenItem {
    /// Returns an error of a field of this item.
    pub fn invalid(&self, field: impl Into<String>, reason: impl Into<String>) -> InvalidItem {
        InvalidItem { id: Some(self.id), field: field.into(), reason: reason.into() }
    }

    /// Returns the name of an attribute's field in the call, or of the parent field if `name` is empty.
    pub fn field(whole: bool, name: &str) -> String {
        let of = if whole { "attributes" } else { "set" };
        if name.is_empty() { of.into() } else { format!("{of}.{name}") }
    }
}

impl GivenValues {
    /// Returns the bytes of memory of the values.
    pub fn bytes(&self) -> usize {
        match self {
            GivenValues::Missing => 0,
            GivenValues::Integers(values) => size_of_val(values.as_slice()),
            GivenValues::Numbers(values) => size_of_val(values.as_slice()),
            GivenValues::Texts(values) => values.iter().map(|text| size_of::<String>() + text.len()).sum(),
        }
    }

    /// Describes the values for an error message.
    pub fn shown(&self) -> String {
        match self {
            GivenValues::Missing => "nothing".into(),
            GivenValues::Integers(values) if values.len() == 1 => values[0].to_string(),
            // A number is printed with a decimal point to show that it is not an integer.
            GivenValues::Numbers(values) if values.len() == 1 => format!("{:?}", values[0]),
            GivenValues::Integers(values) => format!("{} integers", values.len()),
            GivenValues::Numbers(values) => format!("{} numbers", values.len()),
            GivenValues::Texts(values) => match &values[..] {
                [one] if one.len() <= SHOWN_BYTES => format!("the text `{one}`"),
                _ => format!("{} texts", values.len()),
            },
        }
    }
}
