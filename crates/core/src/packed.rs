//! Serde helpers that encode lists of numbers as little-endian bytes, for messages between machines in a binary format.
//!
//! Use them as `#[serde(with = "packed::numbers")]`: a list then costs one copy instead of one serializer call per number. Input
//! is validated before it is used, and takes at most a few times its own size in memory.

use serde::de::{Error as _, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

// Numbers are written in memory order.
const _: () = assert!(cfg!(target_endian = "little"));

struct Bytes;

impl<'de> Visitor<'de> for Bytes {
    type Value = &'de [u8];

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("bytes")
    }

    fn visit_borrowed_bytes<E>(self, bytes: &'de [u8]) -> Result<&'de [u8], E> {
        Ok(bytes)
    }
}

fn read<'de, T: bytemuck::AnyBitPattern, D: Deserializer<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    let bytes = from.deserialize_bytes(Bytes)?;
    if bytes.len() % size_of::<T>() != 0 {
        let (got, width) = (bytes.len(), size_of::<T>());
        return Err(D::Error::custom(format_args!("got {got} bytes, expected a multiple of {width}")));
    }
    Ok(bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
}

/// Lists of numbers of one width: `Vec<f32>`, `Vec<i64>`, `Vec<ItemId>`.
pub mod numbers {
    use super::{Deserializer, Serializer};

    /// Encodes a list.
    ///
    /// # Errors
    /// Errors of the serializer.
    pub fn serialize<T: bytemuck::NoUninit, S: Serializer>(list: &[T], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(bytemuck::cast_slice(list))
    }

    /// Decodes a list.
    ///
    /// # Errors
    /// Errors of the deserializer; a length that is not a multiple of the element size.
    pub fn deserialize<'de, T, D>(from: D) -> Result<Vec<T>, D::Error>
    where
        T: bytemuck::AnyBitPattern,
        D: Deserializer<'de>,
    {
        super::read(from)
    }
}

/// Splits the concatenated entries `all` at the end offsets `ends`.
fn cut<T: Clone, E: serde::de::Error>(ends: &[u32], all: &[T]) -> Result<Vec<Vec<T>>, E> {
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let list = |(start, end): (u32, &u32)| all.get(start as usize..*end as usize).map(<[T]>::to_vec);
    let lists: Option<Vec<Vec<T>>> = starts.zip(ends).map(list).collect();
    lists.ok_or_else(|| E::custom("a list ends outside of the data"))
}

fn ends<T>(lists: &[Vec<T>]) -> Vec<u32> {
    let end = |end: &mut u32, list: &Vec<T>| {
        *end += list.len() as u32;
        Some(*end)
    };
    lists.iter().scan(0, end).collect()
}

/// Lists of lists of numbers.
pub mod lists {
    use bytemuck::{AnyBitPattern, NoUninit};

    use super::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(bound(serialize = "T: NoUninit", deserialize = "T: AnyBitPattern"))]
    struct Lists<T> {
        #[serde(with = "super::numbers")]
        ends: Vec<u32>,
        #[serde(with = "super::numbers")]
        all: Vec<T>,
    }

    /// Encodes the lists.
    ///
    /// # Errors
    /// Errors of the serializer.
    pub fn serialize<T: NoUninit, S: Serializer>(lists: &[Vec<T>], to: S) -> Result<S::Ok, S::Error> {
        Lists { ends: super::ends(lists), all: lists.concat() }.serialize(to)
    }

    /// Decodes the lists.
    ///
    /// # Errors
    /// Errors of the deserializer; list ends out of range.
    pub fn deserialize<'de, T: AnyBitPattern, D: Deserializer<'de>>(from: D) -> Result<Vec<Vec<T>>, D::Error> {
        let Lists { ends, all } = Lists::<T>::deserialize(from)?;
        super::cut(&ends, &all)
    }
}

/// Lists of lists of items with their scores.
pub mod scored {
    use super::{Deserialize, Deserializer, Serialize, Serializer};
    use crate::units::ItemId;

    #[derive(Serialize, Deserialize)]
    struct Scored {
        #[serde(with = "super::numbers")]
        ends: Vec<u32>,
        #[serde(with = "super::numbers")]
        ids: Vec<ItemId>,
        #[serde(with = "super::numbers")]
        scores: Vec<f32>,
    }

    /// Encodes the lists.
    ///
    /// # Errors
    /// Errors of the serializer.
    pub fn serialize<S: Serializer>(lists: &[Vec<(ItemId, f32)>], to: S) -> Result<S::Ok, S::Error> {
        let (ids, scores) = lists.iter().flatten().copied().unzip();
        Scored { ends: super::ends(lists), ids, scores }.serialize(to)
    }

    /// Decodes the lists.
    ///
    /// # Errors
    /// Errors of the deserializer; list ends out of range.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Vec<(ItemId, f32)>>, D::Error> {
        let Scored { ends, ids, scores } = Scored::deserialize(from)?;
        if ids.len() != scores.len() {
            return Err(serde::de::Error::custom("items and scores differ in number, expected one score per item"));
        }
        let all: Vec<(ItemId, f32)> = ids.into_iter().zip(scores).collect();
        super::cut(&ends, &all)
    }
}

#[derive(Serialize, Deserialize)]
struct Run<'a> {
    #[serde(with = "numbers")]
    ends: Vec<u32>,
    text: &'a str,
}

/// Lists of strings: their concatenation, and the end of each string in it.
pub mod texts {
    use super::{Deserialize, Deserializer, Run, Serialize, Serializer};

    /// Encodes a list.
    ///
    /// # Errors
    /// Errors of the serializer.
    pub fn serialize<S: Serializer>(list: &[String], to: S) -> Result<S::Ok, S::Error> {
        let mut end = 0;
        let ends = list.iter().map(|text| {
            end += text.len() as u32;
            end
        });
        Run { ends: ends.collect(), text: &list.concat() }.serialize(to)
    }

    /// Decodes a list.
    ///
    /// # Errors
    /// Errors of the deserializer; ends outside of the text or inside a character.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
        let run = Run::deserialize(from)?;
        let starts = std::iter::once(0).chain(run.ends.iter().copied());
        let text = |(start, end): (u32, &u32)| run.text.get(start as usize..*end as usize).map(str::to_owned);
        let texts: Option<Vec<String>> = starts.zip(&run.ends).map(text).collect();
        texts.ok_or_else(|| serde::de::Error::custom("a text ends outside of the data or inside a character"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;
    use crate::units::ItemId;

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct All {
        #[serde(with = "numbers")]
        ids: Vec<ItemId>,
        #[serde(with = "numbers")]
        scores: Vec<f32>,
        #[serde(with = "texts")]
        names: Vec<String>,
        #[serde(with = "lists")]
        tensors: Vec<Vec<f32>>,
        #[serde(with = "scored")]
        candidates: Vec<Vec<(ItemId, f32)>>,
    }

    proptest! {
        #[test]
        fn lists_round_trip_and_broken_ones_are_rejected(
            ids in prop::collection::vec(any::<i64>(), 0..20),
            scores in prop::collection::vec(-1e30f32..1e30, 0..20),
            names in prop::collection::vec(".{0,5}", 0..6),
            cut in 0usize..200,
            flip in 0usize..200,
        ) {
            let ids: Vec<ItemId> = ids.into_iter().map(ItemId).collect();
            let candidates = names.iter().map(|name| {
                let many = name.len().min(ids.len()).min(scores.len());
                ids.iter().copied().zip(scores.iter().copied()).take(many).collect()
            });
            let tensors = vec![scores.clone(), Vec::new(), scores.iter().map(|x| x * 0.5).collect()];
            let all = All { candidates: candidates.collect(), tensors, ids, scores, names };
            let bytes = postcard::to_allocvec(&all).unwrap();
            prop_assert_eq!(&postcard::from_bytes::<All>(&bytes).unwrap(), &all);
            // Decoding damaged bytes may return anything, but must not panic.
            prop_assert!(postcard::from_bytes::<All>(&bytes[..cut.min(bytes.len() - 1)]).is_err());
            let mut broken = bytes.clone();
            broken[flip % bytes.len()] ^= 0x81;
            let _ = postcard::from_bytes::<All>(&broken);
        }
    }

    #[test]
    fn text_offsets_ascend_within_the_text() {
        for ends in [vec![3u32], vec![2, 1], vec![1], vec![u32::MAX]] {
            let bytes = postcard::to_allocvec(&Run { ends, text: "ü" }).unwrap();
            let read = |bytes: &[u8]| texts::deserialize(&mut postcard::Deserializer::from_bytes(bytes));
            assert!(read(&bytes).is_err());
        }
    }
}
