//! Update, and its encoding in a journal.

use serde::{Deserialize, Serialize};

use crate::view::Attribute;
use sterling_core::error::{Error, Result};
use sterling_core::items::{ID, InvalidItem};
use sterling_core::request::{Features, Values};
use sterling_graph::tower::FeatureSpec;

/// Maximum bytes of the fields and reasons of rejected items that are remembered per call.
const REASON_BYTES_MAX: usize = 64 << 10;

/// Complete item.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Put {
    /// Id of the item, as callers name it.
    pub id: i64,
    /// Embedding, for a model without item tower.
    pub vector: Option<Vec<f32>>,
    /// Attributes; columns that are not named have no value.
    pub attributes: Vec<(String, Attribute)>,
    /// Vectors that the item tower reads.
    pub dense: Vec<(String, Vec<f32>)>,
}

/// Change of one item. The order of the variants is part of the journal format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Update {
    /// Inserts an item, or replaces the item with the same id.
    Put(Put),
    /// Changes some attributes; has no effect if the item does not exist.
    Set {
        /// Id of the item, as callers name it.
        id: i64,
        /// Changed attributes with their new values.
        attributes: Vec<(String, Attribute)>,
    },
    /// Deletes an item.
    Delete {
        /// Id of the item, as callers name it.
        id: i64,
    },
    /// Marks the preceding `count` updates as one call; changes no items.
    Call {
        /// Idempotency key.
        key: String,
        /// Hash of the request.
        digest: u64,
        /// Number of updates.
        count: u32,
    },
    /// Marks the preceding `count` updates as one call, like `Call`, and stores the other fields of its answer.
    AnsweredCall {
        /// Idempotency key.
        key: String,
        /// Hash of the request.
        digest: u64,
        /// Number of updates of the call.
        count: u32,
        /// Answer apart from the position and the count.
        answer: CallAnswer,
    },
}

/// Answer of a call with a key, apart from the position and the number of updates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallAnswer {
    /// Number of items that a deletion matched when the call ran.
    pub matched: u64,
    /// Rejected items of an upsert.
    pub refused: Vec<UpdateRejection>,
}

/// Rejected item of an upsert.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateRejection {
    /// Index of the item in the call, from 0.
    pub place: u32,
    /// Reason for the rejection.
    pub wrong: InvalidItem,
}

impl CallAnswer {
    /// Limits the reasons to the size that a remembered answer may have: fields and reasons of later items become empty, so that
    /// the record stays short.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        let mut left = REASON_BYTES_MAX;
        for UpdateRejection { wrong, .. } in &mut self.refused {
            match left.checked_sub(wrong.field.len() + wrong.reason.len()) {
                Some(rest) => left = rest,
                None => {
                    left = 0;
                    (wrong.field, wrong.reason) = (String::new(), String::new());
                }
            }
        }
        self
    }

    /// Returns the heap bytes of the answer.
    pub(super) fn bytes(&self) -> usize {
        let texts = self.refused.iter().map(|UpdateRejection { wrong, .. }| wrong.field.len() + wrong.reason.len());
        self.refused.len() * size_of::<UpdateRejection>() + texts.sum::<usize>()
    }
}

impl Update {
    /// Returns the item id of the update, if it concerns an item.
    pub fn id(&self) -> Option<i64> {
        match self {
            Update::Put(Put { id, .. }) | Update::Set { id, .. } | Update::Delete { id } => Some(*id),
            Update::Call { .. } | Update::AnsweredCall { .. } => None,
        }
    }

    /// Encodes the record in the `postcard` format.
    ///
    /// # Errors
    /// `Internal` if memory is exhausted.
    pub fn encode(&self) -> Result<Vec<u8>> {
        postcard::to_allocvec(self).map_err(|e| Error::internal(format!("cannot encode an update: {e}")))
    }

    /// Decodes the output of [`Update::encode`].
    ///
    /// # Errors
    /// `Corrupt` for other bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        match postcard::take_from_bytes(bytes) {
            Ok((update, [])) => Ok(update),
            Ok((_, rest)) => {
                Err(Error::corrupt(format!("an update has {} bytes after its end, expected none", rest.len())))
            }
            Err(e) => Err(Error::corrupt(format!("cannot decode an update: {e}"))),
        }
    }
}

impl Put {
    /// Returns the features of the item for an item tower with these inputs.
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn remembered_answers_hold_all_positions_and_bounded_reasons() {
        let wrong = |id| InvalidItem { id: Some(id), field: "attributes.year".into(), reason: "x".repeat(100) };
        let refused: Vec<UpdateRejection> =
            (0..10_000).map(|place| UpdateRejection { place, wrong: wrong(i64::from(place) - (1 << 40)) }).collect();
        let answer = CallAnswer { matched: 0, refused: refused.clone() };
        let bounded = answer.bounded();
        let known = bounded.refused.iter().take_while(|refused| !refused.wrong.reason.is_empty()).count();
        assert_eq!(known, REASON_BYTES_MAX / 115);
        assert_eq!(bounded.refused[..known], refused[..known]);
        for (retained, refused) in bounded.refused.iter().zip(&refused).skip(known) {
            assert_eq!((retained.place, retained.wrong.id), (refused.place, refused.wrong.id));
            assert!(retained.wrong.field.is_empty() && retained.wrong.reason.is_empty());
        }
        let record = Update::AnsweredCall { key: "k".repeat(128), digest: 1, count: 0, answer: bounded };
        assert!(record.encode().unwrap().len() < 256 << 10);
    }
}
