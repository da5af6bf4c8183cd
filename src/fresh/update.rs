//! One update, and its bytes in a journal.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::items::ID;
use crate::request::{Features, Values};
use crate::tower::FeatureSpec;
use crate::view::Attribute;

/// A whole item.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Put {
    /// The user's id.
    pub id: i64,
    /// Its vector, for a model without an item tower.
    pub vector: Option<Vec<f32>>,
    /// Its attributes; those that it does not name it does not have.
    pub attributes: Vec<(String, Attribute)>,
    /// Vectors that an item tower reads.
    pub dense: Vec<(String, Vec<f32>)>,
}

/// What happens to one item. The order of the variants is part of the format of journals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Update {
    /// It is there, in the place of an earlier one of the id.
    Put(Put),
    /// Some attributes change; nothing happens where there is no such item.
    Set {
        /// The user's id.
        id: i64,
        /// The attributes that change, each to these values.
        attributes: Vec<(String, Attribute)>,
    },
    /// It is gone.
    Delete {
        /// The user's id.
        id: i64,
    },
    /// Nothing happens to items: so many updates before this record came in one call.
    Call {
        /// What the caller knows the call by.
        key: String,
        /// A hash of what was sent.
        digest: u64,
        /// How many they are.
        count: u32,
    },
}

impl Update {
    /// The bytes of a record: as the `postcard` format has them.
    ///
    /// # Errors
    /// `Internal` where memory cannot be had.
    pub fn encode(&self) -> Result<Vec<u8>> {
        postcard::to_allocvec(self).map_err(|e| Error::internal(format!("an update: {e}")))
    }

    /// Reads what [`Update::encode`] wrote.
    ///
    /// # Errors
    /// `Corrupt` for other bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        match postcard::take_from_bytes(bytes) {
            Ok((update, [])) => Ok(update),
            Ok((_, rest)) => Err(Error::corrupt(format!("an update has {} bytes too many", rest.len()))),
            Err(e) => Err(Error::corrupt(format!("an update: {e}"))),
        }
    }
}

impl Put {
    /// What an item tower with these inputs takes of the item.
    pub fn features(&self, specs: &[FeatureSpec]) -> Features {
        let mut features = Features::new();
        for source in specs.iter().map(FeatureSpec::source) {
            let dense = self.dense.iter().find(|(name, _)| name == source);
            let attribute = self.attributes.iter().find(|(name, _)| name == source);
            let values = match (dense, attribute) {
                _ if source == ID => Values::Integers(vec![self.id]),
                (Some((_, numbers)), _) => Values::Numbers(numbers.clone()),
                (None, Some((_, Attribute::Integers(values)))) => Values::Integers(values.clone()),
                (None, Some((_, Attribute::Texts(values)))) => Values::Texts(values.clone()),
                (None, Some((_, Attribute::Number(number)))) => Values::Numbers(vec![*number as f32]),
                (None, Some((_, Attribute::Missing)) | None) => continue,
            };
            features.insert(source.into(), values);
        }
        features
    }
}
