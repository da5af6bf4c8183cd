//! Typed values parsed directly from JSON: features, columns, constants, and lists that stop at their maximum length. Every limit
//! is checked while parsing.
//!
//! No intermediate tree of the text is built, so that memory is proportional to the retained values.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use sterling_core::limits;
use sterling_core::request::Values;

/// A list of at most `MOST` entries.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct List<T, const MOST: usize>(pub Vec<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for List<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T, const MOST: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for Entries<T, MOST> {
            type Value = Vec<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
                let mut list = Vec::new();
                while let Some(entry) = entries.next_element()? {
                    if list.len() == MOST {
                        return Err(too_many::<A::Error>(MOST));
                    }
                    list.push(entry);
                }
                Ok(list)
            }
        }
        deserializer.deserialize_seq(Entries::<T, MOST>(PhantomData)).map(List)
    }
}

fn too_many<E: de::Error>(most: usize) -> E {
    E::custom(format_args!("got more than {most} entries, expected at most {most}"))
}

/// A number that is finite as an f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Finite(pub f32);

impl<'de> Deserialize<'de> for Finite {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let x = f64::deserialize(deserializer)?;
        finite(x).map(Finite)
    }
}

fn finite<E: de::Error>(x: f64) -> Result<f32, E> {
    let narrow = x as f32;
    if narrow.is_finite() {
        Ok(narrow)
    } else {
        Err(E::custom(format_args!("got {x:e}, expected a finite 32-bit number")))
    }
}

/// Numbers of a vector, at most `MOST`: a list, or little-endian 32-bit numbers in base64.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Vector<const MOST: usize>(pub Vec<f32>);

impl<'de, const MOST: usize> Deserialize<'de> for Vector<MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Numbers<const MOST: usize>;
        impl<'de, const MOST: usize> Visitor<'de> for Numbers<MOST> {
            type Value = Vec<f32>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of numbers, or a text of base64")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
                let mut numbers = Vec::new();
                while let Some(Finite(x)) = entries.next_element()? {
                    if numbers.len() == MOST {
                        return Err(too_many::<A::Error>(MOST));
                    }
                    numbers.push(x);
                }
                Ok(numbers)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                packed_numbers(text, MOST)
            }
        }
        deserializer.deserialize_any(Numbers::<MOST>).map(Vector)
    }
}

/// Standard base64, with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Decodes base64 to numbers of four bytes each. The length is checked before any allocation.
fn packed_numbers<E: de::Error>(text: &str, most: usize) -> Result<Vec<f32>, E> {
    if text.len() > (4 * most).div_ceil(3) * 4 {
        return Err(too_many(most));
    }
    let bytes = BASE64.decode(text).map_err(|e| E::custom(format_args!("not base64: {e}")))?;
    let (numbers, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(E::custom(format_args!("got {} bytes in base64, expected four for each number", bytes.len())));
    }
    if numbers.len() > most {
        return Err(too_many(most));
    }
    let number = |(place, bytes): (usize, &[u8; 4])| match f32::from_le_bytes(*bytes) {
        x if x.is_finite() => Ok(x),
        x => Err(E::custom(format_args!("got {x} at index {place}, expected a finite 32-bit number"))),
    };
    numbers.iter().enumerate().map(number).collect()
}

/// An object with at most `MOST` distinct names as keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Named<T, const MOST: usize>(pub BTreeMap<String, T>);

impl<T, const MOST: usize> Default for Named<T, MOST> {
    fn default() -> Self {
        Named(BTreeMap::new())
    }
}

/// Reads null as the default value.
pub(super) fn nullable<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for Named<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T, const MOST: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for Entries<T, MOST> {
            type Value = BTreeMap<String, T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
                let mut named = BTreeMap::new();
                while let Some(name) = fields.next_key::<String>()? {
                    if named.contains_key(&name) {
                        return Err(de::Error::custom(format_args!("got `{name}` twice, expected each name once")));
                    }
                    if named.len() == MOST {
                        return Err(too_many::<A::Error>(MOST));
                    }
                    named.insert(name, fields.next_value()?);
                }
                Ok(named)
            }
        }
        deserializer.deserialize_map(Entries::<T, MOST>(PhantomData)).map(Named)
    }
}

/// Values of one feature: a list of integers, numbers or texts, a single one of these, numbers in base64, or ids with weights.
#[derive(Clone, Debug, PartialEq)]
pub struct FeatureValue(pub Values);

const EXPECTED: &str =
    "a whole number, a number, a text, a list of them, {\"base64\": \"..\"}, or {\"values\": [..], \"weights\": [..]}";

impl<'de> Deserialize<'de> for FeatureValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FeatureVisitor).map(FeatureValue)
    }
}

#[derive(Clone, Copy)]
struct FeatureVisitor;

impl<'de> Visitor<'de> for FeatureVisitor {
    type Value = Values;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_i64<E: de::Error>(self, x: i64) -> Result<Values, E> {
        Ok(Values::Integers(vec![x]))
    }

    fn visit_u64<E: de::Error>(self, x: u64) -> Result<Values, E> {
        i64::try_from(x).map_or_else(|_| self.visit_f64(x as f64), |x| self.visit_i64(x))
    }

    fn visit_f64<E: de::Error>(self, x: f64) -> Result<Values, E> {
        Ok(Values::Numbers(vec![finite(x)?]))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Values, E> {
        Ok(Values::Texts(vec![text.to_owned()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Values, A::Error> {
        let mut values = Values::Integers(Vec::new());
        let mut count = 0;
        while entries.next_element_seed(Push(&mut values))?.is_some() {
            count += 1;
            if count > limits::FEATURE_IDS_MAX {
                return Err(too_many(limits::FEATURE_IDS_MAX));
            }
        }
        Ok(values)
    }

    fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Values, A::Error> {
        let bag = Bag::deserialize(de::value::MapAccessDeserializer::new(fields))?;
        let ids = match (bag.values, bag.base64) {
            (Some(List(ids)), None) => ids,
            (None, Some(Packed(numbers))) if bag.weights.is_none() => return Ok(Values::Numbers(numbers)),
            (None, None) => return Err(de::Error::missing_field("values")),
            _ => return Err(de::Error::custom("got `base64` beside other fields, expected it alone")),
        };
        match bag.weights {
            None => Ok(Values::Integers(ids)),
            Some(List(weights)) if weights.len() == ids.len() => {
                Ok(Values::Weighted { ids, weights: weights.into_iter().map(|w| w.0).collect() })
            }
            Some(List(weights)) => Err(de::Error::custom(format_args!(
                "got {} weights, expected one for each of {} values",
                weights.len(),
                ids.len()
            ))),
        }
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Bag {
    #[serde(default)]
    values: Option<List<i64, { limits::FEATURE_IDS_MAX }>>,
    #[serde(default)]
    weights: Option<List<Finite, { limits::FEATURE_IDS_MAX }>>,
    #[serde(default)]
    base64: Option<Packed>,
}

/// Numbers in base64.
struct Packed(Vec<f32>);

impl<'de> Deserialize<'de> for Packed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        packed_numbers(&text, limits::FEATURE_IDS_MAX).map(Packed)
    }
}

/// Adds an entry to a list and determines its type: a fraction makes it a list of numbers, a text a list of texts.
pub(super) struct Push<'a>(pub(super) &'a mut Values);

impl<'de> DeserializeSeed<'de> for Push<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Push<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Values::Texts(_) => "a text or a whole number, as the entries before it",
            Values::Numbers(_) => "a number, as the entries before it",
            _ => "a whole number, a number or a text",
        })
    }

    fn visit_i64<E: de::Error>(self, x: i64) -> Result<(), E> {
        match self.0 {
            Values::Integers(list) => list.push(x),
            Values::Texts(list) => list.push(x.to_string()),
            Values::Numbers(list) => list.push(finite(x as f64)?),
            Values::Weighted { .. } => {}
        }
        Ok(())
    }

    fn visit_u64<E: de::Error>(self, x: u64) -> Result<(), E> {
        match (i64::try_from(x), &mut *self.0) {
            (Ok(x), _) => self.visit_i64(x),
            (Err(_), Values::Texts(list)) => {
                list.push(x.to_string());
                Ok(())
            }
            (Err(_), _) => self.visit_f64(x as f64),
        }
    }

    fn visit_f64<E: de::Error>(self, x: f64) -> Result<(), E> {
        let x32 = finite(x)?;
        match self.0 {
            Values::Numbers(list) => list.push(x32),
            Values::Integers(list) => {
                let mut numbers: Vec<f32> = list.iter().map(|&n| n as f64 as f32).collect();
                numbers.push(x32);
                *self.0 = Values::Numbers(numbers);
            }
            _ => return Err(E::invalid_type(de::Unexpected::Float(x), &self)),
        }
        Ok(())
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<(), E> {
        match self.0 {
            Values::Texts(list) => list.push(text.to_owned()),
            Values::Integers(list) => {
                let mut texts: Vec<String> = list.iter().map(i64::to_string).collect();
                texts.push(text.to_owned());
                *self.0 = Values::Texts(texts);
            }
            _ => return Err(E::invalid_type(de::Unexpected::Str(text), &self)),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn values(text: &str) -> Result<Values, String> {
        serde_json::from_str::<FeatureValue>(text).map(|v| v.0).map_err(|e| e.to_string())
    }

    #[test]
    fn the_entries_decide_the_type_of_a_list() {
        let texts = |list: &[&str]| Values::Texts(list.iter().map(|t| t.to_string()).collect());
        for (text, expected) in [
            ("7", Values::Integers(vec![7])),
            ("-0.5", Values::Numbers(vec![-0.5])),
            ("\"de\"", texts(&["de"])),
            ("[]", Values::Integers(vec![])),
            ("[1, -9223372036854775808, 9223372036854775807]", Values::Integers(vec![1, i64::MIN, i64::MAX])),
            ("[1, 2, 0.5, 3]", Values::Numbers(vec![1.0, 2.0, 0.5, 3.0])),
            ("[1.0]", Values::Numbers(vec![1.0])),
            ("[9223372036854775808]", Values::Numbers(vec![9223372036854775808.0])),
            ("[\"a\", 3, 18446744073709551615]", texts(&["a", "3", "18446744073709551615"])),
            ("[3, \"a\"]", texts(&["3", "a"])),
            ("{\"values\": [4]}", Values::Integers(vec![4])),
            ("{\"base64\": \"AACAPwAAAMA=\"}", Values::Numbers(vec![1.0, -2.0])),
            ("{\"base64\": \"\"}", Values::Numbers(vec![])),
            ("{\"weights\": [0.5], \"values\": [4]}", Values::Weighted { ids: vec![4], weights: vec![0.5] }),
        ] {
            assert_eq!(values(text).as_ref(), Ok(&expected), "{text}");
        }
    }

    #[test]
    fn invalid_values_are_reported() {
        let long = format!("[{}0]", "0,".repeat(limits::FEATURE_IDS_MAX));
        for (text, expected) in [
            ("null", "invalid type: null, expected a whole number, a number, a text, a list"),
            ("true", "invalid type: boolean"),
            ("[[1]]", "invalid type: sequence, expected a whole number, a number or a text"),
            ("[{}]", "invalid type: map"),
            ("[1, null]", "invalid type: null"),
            (
                "[\"a\", 0.5]",
                "invalid type: floating point `0.5`, expected a text or a whole number, as the entries before it",
            ),
            ("[0.5, \"a\"]", "invalid type: string \"a\", expected a number, as the entries before it"),
            ("[1e39]", "got 1e39, expected a finite 32-bit number"),
            ("{\"values\": [1], \"weights\": [1, 2]}", "got 2 weights, expected one for each of 1 values"),
            ("{\"values\": [1], \"weight\": [1]}", "unknown field `weight`"),
            ("{\"values\": [1], \"values\": [1]}", "duplicate field `values`"),
            ("{\"values\": [0.5]}", "invalid type: floating point"),
            ("{\"weights\": [1]}", "missing field `values`"),
            ("{\"base64\": \"AACAPwAAAMA=\", \"values\": [1]}", "got `base64` beside other fields"),
            ("{\"base64\": \"AACAPwAAAMA=\", \"weights\": [1]}", "got `base64` beside other fields"),
            ("{\"base64\": [1]}", "invalid type: sequence, expected a string"),
            ("{}", "missing field `values`"),
            (&long, "got more than 100000 entries"),
        ] {
            let error = values(text).expect_err(text);
            assert!(error.contains(expected), "{text:.60}: {error}");
        }
    }

    #[test]
    fn a_vector_is_a_list_or_base64_and_nothing_else() {
        let read = |text: &str| serde_json::from_str::<Vector<3>>(text).map(|v| v.0).map_err(|e| e.to_string());
        for (text, expected) in [
            ("[1, -2.5]", vec![1.0, -2.5]),
            ("\"AACAPwAAIMA=\"", vec![1.0, -2.5]),
            ("\"AACAPwAAIMA\"", vec![1.0, -2.5]),
            ("\"AACAP\\u0077AAIMA=\"", vec![1.0, -2.5]),
            ("\"\"", vec![]),
        ] {
            assert_eq!(read(text), Ok(expected), "{text}");
        }
        for (text, expected) in [
            ("[1, 2, 3, 4]", "got more than 3 entries"),
            ("\"AACAPwAAgD8AAIA/AACAPw==\"", "got more than 3 entries"),
            ("\"AACAPwAA\"", "got 6 bytes in base64, expected four for each number"),
            ("\"AACAfw==\"", "got inf at index 0, expected a finite 32-bit number"),
            ("\"AADAfw==\"", "got NaN at index 0"),
            ("\"AAC-Pw==\"", "not base64"),
            ("\"AACA Pw==\"", "not base64"),
            ("\"AACAPx==\"", "not base64"),
            ("3", "invalid type: integer `3`, expected a list of numbers, or a text of base64"),
            ("null", "invalid type: null"),
        ] {
            let error = read(text).expect_err(text);
            assert!(error.contains(expected), "{text}: {error}");
        }
        let long = format!("\"{}\"", "A".repeat(1 << 20));
        assert!(read(&long).unwrap_err().contains("got more than 3 entries"));
    }

    #[test]
    fn names_stand_once_and_are_counted() {
        let read = |text: &str| serde_json::from_str::<Named<Finite, 2>>(text).map_err(|e| e.to_string());
        assert_eq!(read("{\"a\": 1, \"b\": 0.5}").unwrap().0["b"], Finite(0.5));
        assert!(read("{\"a\": 1, \"a\": 1}").unwrap_err().contains("got `a` twice"));
        assert!(read("{\"a\": 1, \"b\": 1, \"c\": 1}").unwrap_err().contains("more than 2 entries"));
        assert!(read("{\"a\": 1e39}").unwrap_err().contains("finite"));
    }
}
