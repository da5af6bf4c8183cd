//! One update, and its bytes in a journal.

use serde::{Deserialize, Serialize};

use crate::view::Attribute;
use sterling_core::error::{Error, Result};
use sterling_core::request::{Features, Values};
use sterling_graph::tower::FeatureSpec;
use sterling_snapshot::items::ID;

/// Bytes of the fields and reasons of refused items that are remembered of one call.
const REASON_BYTES_MAX: usize = 64 << 10;

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
    /// The same, with the rest of what the caller was answered.
    AnsweredCall {
        /// What the caller knows the call by.
        key: String,
        /// A hash of what was sent.
        digest: u64,
        /// How many updates came in the call.
        count: u32,
        /// What the caller was answered beside the position and the count.
        answer: CallAnswer,
    },
}

/// What the caller of a call with a key was answered beside the position and the number of updates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallAnswer {
    /// Items of a deletion that were there as the call saw it.
    pub matched: u64,
    /// Items of an upsert that were refused.
    pub refused: Vec<RefusedUpdate>,
}

/// An item of an upsert that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedUpdate {
    /// The place of the item in the call, from 0 up.
    pub place: u32,
    /// What is wrong with it.
    pub wrong: Wrong,
}

/// What is wrong with one item of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wrong {
    /// Its id, where it could be read.
    pub id: Option<i64>,
    /// The field as it was sent, such as `attributes.year` or `set.year`; empty where it is the item as a whole.
    pub field: String,
    /// What came and what was expected.
    pub reason: String,
}

impl CallAnswer {
    /// The same, with as many of the reasons as an answer that is remembered may have: fields and reasons of the items after
    /// them are empty, so that a record stays short.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        let mut left = REASON_BYTES_MAX;
        for RefusedUpdate { wrong, .. } in &mut self.refused {
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

    /// Bytes of memory that it takes beside its own.
    pub(super) fn bytes(&self) -> usize {
        let texts = self.refused.iter().map(|RefusedUpdate { wrong, .. }| wrong.field.len() + wrong.reason.len());
        self.refused.len() * size_of::<RefusedUpdate>() + texts.sum::<usize>()
    }
}

impl Update {
    /// The item that it is about, where it is about one.
    pub fn id(&self) -> Option<i64> {
        match self {
            Update::Put(Put { id, .. }) | Update::Set { id, .. } | Update::Delete { id } => Some(*id),
            Update::Call { .. } | Update::AnsweredCall { .. } => None,
        }
    }

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_answer_that_is_remembered_has_all_places_and_a_bounded_number_of_reasons() {
        let wrong = |id| Wrong { id: Some(id), field: "attributes.year".into(), reason: "x".repeat(100) };
        let refused: Vec<RefusedUpdate> =
            (0..10_000).map(|place| RefusedUpdate { place, wrong: wrong(i64::from(place) - (1 << 40)) }).collect();
        let answer = CallAnswer { matched: 0, refused: refused.clone() };
        let bounded = answer.bounded();
        let known = bounded.refused.iter().take_while(|refused| !refused.wrong.reason.is_empty()).count();
        assert_eq!(known, REASON_BYTES_MAX / 115);
        assert_eq!(bounded.refused[..known], refused[..known]);
        for (kept, refused) in bounded.refused.iter().zip(&refused).skip(known) {
            assert_eq!((kept.place, kept.wrong.id), (refused.place, refused.wrong.id));
            assert!(kept.wrong.field.is_empty() && kept.wrong.reason.is_empty());
        }
        let record = Update::AnsweredCall { key: "k".repeat(128), digest: 1, count: 0, answer: bounded };
        assert!(record.encode().unwrap().len() < 256 << 10);
    }
}
