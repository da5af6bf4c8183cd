//! JSON types of item updates.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::body::{Misread, object, read_object};
use super::response::Served;
use super::values::{List, Vector};
use super::vector_form::VectorForm;
use sterling_core::error::{Error, Result};
use sterling_core::items::{GivenItem, GivenValues, InvalidItem, UPDATES_MAX, shard_of};
use sterling_core::limits::{DIMENSION_MAX, EXCLUDE_MAX};
use sterling_core::units::{ItemId, Slot};
use sterling_index::columns::{Cell, Stacked};

/// An item to put, or a change of its attributes.
#[derive(Clone, Debug, PartialEq, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ItemUpsert {
    /// Item id.
    pub id: i64,
    /// Vector, `[D]`, for a model without an item tower: a list, or little-endian 32-bit numbers in base64.
    #[serde(default)]
    #[schema(value_type = Option<VectorForm>)]
    embedding: Option<Vector<DIMENSION_MAX>>,
    /// All attributes of the item, each a text, a number, a list of texts or of integers, or null.
    #[serde(default)]
    #[schema(value_type = Object)]
    attributes: Option<Members>,
    /// Alternative to `attributes`: attributes that change, while all others and the vector stay.
    #[serde(default, deserialize_with = "members")]
    #[schema(value_type = Object)]
    set: Option<Members>,
}

/// Parses a present field as an object; null is an error, because null names no attribute to change.
fn members<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Option<Members>, D::Error> {
    Members::deserialize(from).map(Some)
}

/// Id of an invalid item, which is parsed separately for its error.
#[derive(Deserialize)]
struct Identified {
    id: i64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Upserts<'a> {
    #[serde(borrow)]
    items: List<&'a RawValue, UPDATES_MAX>,
}

/// Items to delete: by id, or by a filter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DeleteRequest {
    /// Item ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<i64>>,
    /// Alternative to `ids`: a filter of the items; see `docs/reference/filter-language.md`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
    /// True if items are only counted and not deleted.
    #[serde(default)]
    pub dry_run: bool,
}

/// A rejected item of a call; all others were accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefusedItem {
    /// Index in the call, from 0.
    pub place: usize,
    /// Item id, if it could be parsed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<i64>,
    /// Path of the invalid field as sent, such as `attributes.year` or `set.year`; empty for the complete item.
    pub field: String,
    /// Received and expected value.
    pub reason: String,
}

/// Shard that did not execute its share of a call through a router; all other shards executed theirs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FailedShard {
    /// Shard number.
    pub shard: u32,
    /// Indices, in the call, of the shard's items; empty for a deletion by a filter.
    pub places: Vec<usize>,
    /// Error code, as in problems.
    pub code: String,
    /// Error message.
    pub reason: String,
    /// True if the call may be repeated.
    pub retryable: bool,
    /// True if the updates may have been applied: the connection broke after the call was sent, or its outcome is unknown.
    pub may_be_applied: bool,
    /// Deprecated name of `may_be_applied`, for this release alone.
    pub may_be_done: bool,
}

/// Result of updates, which are durable, and visible from their position on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpdateResponse {
    /// Name of the model.
    pub model: String,
    /// Position after the last update of the call; from a router over several shards, the lowest.
    pub position: u64,
    /// From a router over several shards: position of each shard that it changed after the call, 0 for the others, as
    /// `min_position` accepts them, separated by commas.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub positions: Vec<u64>,
    /// Number of accepted items.
    pub accepted: usize,
    /// Rejected items, with the reasons.
    pub refused: Vec<RefusedItem>,
    /// True if the call was made before with the same idempotency key; it had no further effect.
    pub repeated: bool,
    /// From a router: shards that did not accept their items. If there are any, the answer is a problem that includes
    /// these fields.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<FailedShard>,
}

/// Result of deletions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeleteResponse {
    /// Name of the model.
    pub model: String,
    /// Position after the last deletion; from a router over several shards, the lowest.
    pub position: u64,
    /// From a router over several shards: position of each called shard after the call, 0 for the others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub positions: Vec<u64>,
    /// Deleted items: the distinct ids of the call, whether such items existed or not, or the number of items that
    /// passed the filter; 0 for a dry run.
    pub deleted: usize,
    /// Deleted items that existed when the call was processed; for a dry run, those that would be deleted.
    #[serde(default)]
    pub matched: usize,
    /// True if nothing was deleted.
    pub dry_run: bool,
    /// True if the call was made before with the same idempotency key; it had no further effect.
    #[serde(default)]
    pub repeated: bool,
    /// From a router: shards that failed. If there are any, the answer is a problem that includes these fields.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<FailedShard>,
}

/// Current state of an item.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ItemResponse {
    /// Snapshot that answered.
    #[serde(flatten)]
    pub served: Served,
    /// Item id.
    pub id: i64,
    /// Attributes of the item that the model keeps.
    #[schema(value_type = Object)]
    pub attributes: BTreeMap<String, Value>,
}

/// Progress of updates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PositionResponse {
    /// Snapshot that answers, and its visible position.
    #[serde(flatten)]
    pub served: Served,
    /// Position of the last durable update.
    pub durable: u64,
    /// Items that are searched.
    pub items: usize,
    /// Items that are searched but not in the snapshot (delta).
    pub fresh_items: usize,
    /// From a router over several shards: progress of each shard.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shards: Vec<ShardPosition>,
}

/// Progress of the updates of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ShardPosition {
    /// Shard number.
    pub shard: u32,
    /// Visible position.
    pub position: u64,
    /// Position of the shard's last durable update.
    pub durable: u64,
    /// Number of items of the shard that are searched.
    pub items: usize,
    /// Number of items of the shard that are searched but not in its snapshot (delta).
    pub fresh_items: usize,
}

/// A published and active version that includes the updates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MergeResponse {
    /// Name of the model.
    pub model: String,
    /// Version number.
    pub version: u64,
    /// Position of the last update that the version includes.
    pub position: u64,
    /// Number of items of the version.
    pub items: usize,
}

/// Members of an object in order; a map would drop the first of two members with the same name.
#[derive(Clone, Debug, Default, PartialEq)]
struct Members(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Members;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of attributes")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> std::result::Result<Members, A::Error> {
                let mut read = Members::default();
                while let Some(member) = members.next_entry()? {
                    read.0.push(member);
                    if read.0.len() > sterling_core::limits::FEATURES_MAX {
                        return Err(de::Error::custom(format_args!(
                            "an object of more than {} attributes",
                            sterling_core::limits::FEATURES_MAX
                        )));
                    }
                }
                Ok(read)
            }
        }
        from.deserialize_map(Read)
    }
}

/// Parses the items of an upsert: an object with a list of items or, for `lines`, one item per line. An invalid item fails
/// alone: its entry of the list holds the error.
///
/// # Errors
/// `Invalid` for a body without items, or with too many.
pub fn upserts(body: &[u8], lines: bool) -> Result<Vec<Result<GivenItem, InvalidItem>>> {
    Ok(texts(body, lines)?.into_iter().map(upsert).collect())
}

/// Divides the items of an upsert by shard: returns, per shard, the indices of its items in the call and a body with
/// these items. Unreadable items belong to no shard.
///
/// # Errors
/// As [`upserts`].
pub fn divided(body: &[u8], lines: bool, shards: usize) -> Result<(Vec<PlacedItems>, Vec<RefusedItem>)> {
    let mut parts: Vec<PlacedItems> = vec![(Vec::new(), Vec::new()); shards];
    let mut refused = Vec::new();
    for (place, text) in texts(body, lines)?.into_iter().enumerate() {
        let id = match upsert(text) {
            Ok(item) => item.id,
            Err(InvalidItem { id, field, reason }) => {
                refused.push(RefusedItem { place, id, field, reason });
                continue;
            }
        };
        let (places, body) = &mut parts[shard_of(ItemId(id), shards as u32) as usize];
        body.extend_from_slice(if places.is_empty() { &b"{\"items\":["[..] } else { b"," });
        body.extend_from_slice(text);
        places.push(place);
    }
    for (places, body) in &mut parts {
        if !places.is_empty() {
            body.extend_from_slice(b"]}");
        }
    }
    Ok((parts, refused))
}

/// Indices of items in a call, and a body with these items.
pub(crate) type PlacedItems = (Vec<usize>, Vec<u8>);

/// Returns the JSON text of each item of an upsert.
fn texts(body: &[u8], lines: bool) -> Result<Vec<&[u8]>> {
    let texts: Vec<&[u8]> = if lines {
        let lines = body.split(|&byte| byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
        lines.take(UPDATES_MAX + 1).collect()
    } else {
        match object(body) {
            Ok(Upserts { items: List(items) }) => items.into_iter().map(|item| item.get().as_bytes()).collect(),
            Err(e) => apart(body).ok_or(e)?,
        }
    };
    if texts.is_empty() || texts.len() > UPDATES_MAX {
        let many = if texts.is_empty() { "no items".into() } else { format!("more than {UPDATES_MAX} items") };
        return Err(Error::invalid(format!("body: {many}, expected 1 to {UPDATES_MAX}")));
    }
    Ok(texts)
}

/// Splits the items of a body that is not JSON because of invalid contents within items, such as NaN or bytes that are not UTF-8.
fn apart(body: &[u8]) -> Option<Vec<&[u8]>> {
    let mut list = body;
    for mark in [&b"{"[..], b"\"items\"", b":", b"["] {
        list = list.trim_ascii_start().strip_prefix(mark)?;
    }
    let (mut items, mut first, mut depth) = (Vec::new(), 0, 0usize);
    let (mut is_text, mut is_escaped) = (false, false);
    for (at, &byte) in list.iter().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_text => is_escaped = true,
            b'"' => is_text = !is_text,
            _ if is_text => {}
            b'{' | b'[' => depth += 1,
            b',' | b']' if depth == 0 => {
                items.push(Some(list[first..at].trim_ascii()).filter(|item| !item.is_empty())?);
                first = at + 1;
                if items.len() > UPDATES_MAX {
                    return Some(items);
                }
                if byte == b']' {
                    let end = list[first..].trim_ascii_start().strip_prefix(b"}")?;
                    return end.trim_ascii().is_empty().then_some(items);
                }
            }
            b'}' | b']' => depth = depth.checked_sub(1)?,
            _ => {}
        }
    }
    None
}

fn upsert(text: &[u8]) -> Result<GivenItem, InvalidItem> {
    let ItemUpsert { id, embedding, attributes, set } = read_object(text).map_err(|Misread { field, reason }| {
        let id = serde_json::from_slice(text).ok().map(|Identified { id }| id);
        InvalidItem { id, field, reason }
    })?;
    let (whole, members) = match (attributes, set) {
        (Some(_), Some(_)) => {
            let reason = "beside `attributes`: expected the attributes that change, or all of them".into();
            return Err(InvalidItem { id: Some(id), field: "set".into(), reason });
        }
        (None, Some(set)) => (false, set),
        (attributes, None) => (true, attributes.unwrap_or_default()),
    };
    let read = |(name, value): (String, Value)| match values(&value) {
        Ok(values) => Ok((name, values)),
        Err(reason) => Err(InvalidItem { id: Some(id), field: GivenItem::field(whole, &name), reason }),
    };
    let attributes = members.0.into_iter().map(read).collect::<Result<_, _>>()?;
    let embedding = embedding.map(|Vector(numbers)| numbers);
    Ok(GivenItem { id, embedding, attributes, whole })
}

/// Parses the values of an attribute; the error is the reason.
fn values(value: &Value) -> Result<GivenValues, String> {
    let list = match value {
        Value::Null => return Ok(GivenValues::Missing),
        Value::Array(list) if list.is_empty() => return Ok(GivenValues::Missing),
        Value::Array(list) => list.as_slice(),
        one => std::slice::from_ref(one),
    };
    let text = |value: &Value| match value {
        Value::Bool(value) => Some(value.to_string()),
        Value::String(text) => Some(text.clone()),
        _ => None,
    };
    // serde_json parses `-0` as a float, but it is an integer.
    let integer = |value: &Value| value.as_i64().or_else(|| (value.as_f64() == Some(0.0)).then_some(0));
    let texts = || list.iter().map(text).collect::<Option<_>>().map(GivenValues::Texts);
    let integers = || list.iter().map(integer).collect::<Option<_>>().map(GivenValues::Integers);
    let numbers = || list.iter().map(Value::as_f64).collect::<Option<_>>().map(GivenValues::Numbers);
    if let Some(large) = list.iter().find(|value| value.is_u64() && !value.is_i64()) {
        return Err(format!("got {large}, expected an integer of at most {}", i64::MAX));
    }
    let odd = || "expected a text, a number, a list of texts or of numbers, or null".to_owned();
    texts().or_else(integers).or_else(numbers).ok_or_else(odd)
}

/// Parses the body of a deletion.
///
/// # Errors
/// `Invalid` with the field, including a body with neither ids nor a filter, or with both.
pub fn deletion(body: &[u8]) -> Result<DeleteRequest> {
    let request: DeleteRequest = object(body)?;
    match (&request.ids, &request.filter) {
        (Some(ids), None) if ids.len() > EXCLUDE_MAX => {
            Err(Error::invalid(format!("field `ids`: got {}, expected at most {EXCLUDE_MAX}", ids.len())))
        }
        (None, Some(filter)) if filter.trim().is_empty() => Err(Error::invalid(
            "field `filter`: got an empty filter, which selects every item; to delete all items, name their ids",
        )),
        (Some(_), None) | (None, Some(_)) => Ok(request),
        _ => Err(Error::invalid("body: expected either `ids` or `filter`")),
    }
}

/// Returns the attributes of the item in a slot, by name.
pub fn attributes(columns: &Stacked, slot: Slot) -> BTreeMap<String, Value> {
    let names = columns.first().list().enumerate();
    names.map(|(n, column)| (column.name().to_owned(), cell(columns.cell(n, slot)))).collect()
}

/// Converts a cell to JSON.
pub fn cell(cell: Cell<'_>) -> Value {
    match cell {
        Cell::Missing => Value::Null,
        Cell::Integer(value) => value.into(),
        Cell::Integers(values) => values.into(),
        Cell::Float(value) => value.into(),
        Cell::Text(text) => text.into(),
        Cell::Texts(texts) => texts.into(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_item_that_is_invalid_is_rejected_alone() {
        let body = br#"{"items": [
            {"id": 1, "embedding": [1, 0.5], "attributes": {"a": "x", "b": [1, 2], "c": 1.5, "d": null, "e": true}},
            {"id": 2, "set": {"a": []}},
            {"id": "x"}, {"id": 4, "colour": 1}, [], {"id": 5, "set": {}, "attributes": {}},
            {"id": 6, "attributes": {"a": {"b": 1}}}, {"id": 7, "attributes": {"a": 9223372036854775808}},
            {"id": 8, "attributes": {"a": [1, "x"]}}
        ]}"#;
        let read = upserts(body, false).unwrap();
        let texts = |texts: &[&str]| GivenValues::Texts(texts.iter().map(|t| t.to_string()).collect());
        let attributes = vec![
            ("a".to_owned(), texts(&["x"])),
            ("b".to_owned(), GivenValues::Integers(vec![1, 2])),
            ("c".to_owned(), GivenValues::Numbers(vec![1.5])),
            ("d".to_owned(), GivenValues::Missing),
            ("e".to_owned(), texts(&["true"])),
        ];
        let whole = GivenItem { id: 1, embedding: Some(vec![1.0, 0.5]), attributes, whole: true };
        assert_eq!(read[0], Ok(whole));
        let set = vec![("a".to_owned(), GivenValues::Missing)];
        assert_eq!(read[1], Ok(GivenItem { id: 2, embedding: None, attributes: set, whole: false }));
        let invalid: Vec<_> = read[2..].iter().map(|item| item.clone().unwrap_err()).collect();
        assert_eq!(
            invalid.iter().map(|w| w.id).collect::<Vec<_>>(),
            [None, Some(4), None, Some(5), Some(6), Some(7), Some(8)]
        );
        assert!(invalid[1].reason.contains("colour") && invalid[4].field == "attributes.a", "{invalid:?}");
    }

    #[test]
    fn a_line_that_is_not_json_fails_alone() {
        let places = |body: &[u8]| {
            let read = upserts(body, false).map_err(|e| e.to_string())?;
            Ok(read
                .into_iter()
                .map(|item| item.map(|item| item.id).map_err(|invalid| invalid.field))
                .collect::<Vec<_>>())
        };
        let of =
            |fields: &[Result<i64, &str>]| Ok::<_, String>(fields.iter().map(|f| f.map_err(str::to_owned)).collect());
        let text = br#" { "items" : [ {"id": 1, "embedding": [0.5, NaN]}, {"id": 2, "set": {"a": "],}\""}} , {"id": 3, "set": {"b": -Infinity}}] } "#;
        assert_eq!(places(text), of(&[Err("embedding[1]"), Ok(2), Err("set.b")]));
        assert_eq!(
            places(b"{\"items\": [{\"id\": 1}, {\"id\": 2, \"set\": {\"a\": \"\xff\"}}]}"),
            of(&[Ok(1), Err("set.a")])
        );
        let deep = format!("{{\"items\": [{{\"id\": 1}}, {}{}]}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(places(deep.as_bytes()), of(&[Ok(1), Err("")]));
        for whole in [
            "{\"items\": [{\"id\": 1}, NaN",
            "{\"items\": [NaN,]}",
            "{\"items\": [,NaN]}",
            "{\"items\": [NaN]}]",
            "{\"items\": [NaN], \"x\": 1}",
            "{\"items\": [NaN}]",
            "{\"items\": [{\"id\": NaN]}",
            "{\"items\": \"[NaN]\"}",
            "{\"items\": [\"NaN]}",
            "[NaN]",
            "NaN",
            "{NaN",
        ] {
            assert!(places(whole.as_bytes()).is_err(), "{whole}");
        }
        let many = format!("{{\"items\": [{}NaN]}}", "1,".repeat(UPDATES_MAX));
        assert!(places(many.as_bytes()).unwrap_err().contains("more than 10000 items"));
    }

    #[test]
    fn lines_are_items_and_bodies_without_items_are_rejected() {
        let read = upserts(b"{\"id\": 1}\n\n  \r\n{\"id\": 2\n{\"id\": 3}", true).unwrap();
        assert_eq!(read.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true]);
        for body in
            [&b""[..], b"{}", b"{\"items\": []}", b"{\"items\": 3}", b"[]", b"{\"items\": [{\"id\": 1}], \"x\": 1}"]
        {
            assert!(upserts(body, false).is_err(), "{}", String::from_utf8_lossy(body));
        }
        let many = "{\"id\": 1}\n".repeat(UPDATES_MAX + 1);
        assert!(upserts(many.as_bytes(), true).unwrap_err().to_string().contains("more than 10000 items"));
    }

    #[test]
    fn items_are_divided_by_the_shards_that_they_belong_to() {
        let one = |id: i64| format!("{{\"id\": {id}, \"set\": {{\"a\": [{id}, \"x\"]}}}}");
        let texts: Vec<String> = (0..40)
            .map(|id| {
                if id % 9 == 4 {
                    "{\"id\": \"x\"}".into()
                } else {
                    format!("{{\"id\": {id}, \"set\": {{\"a\": {id}}}}}")
                }
            })
            .collect();
        for (body, lines) in [(format!("{{\"items\": [{}]}}", texts.join(", ")), false), (texts.join("\n\n"), true)] {
            for shards in [1, 2, 7] {
                let (parts, refused) = divided(body.as_bytes(), lines, shards).unwrap();
                assert_eq!(refused.iter().map(|item| item.place).collect::<Vec<_>>(), [4, 13, 22, 31]);
                let mut seen: Vec<usize> = refused.iter().map(|item| item.place).collect();
                for (shard, (places, body)) in parts.iter().enumerate().filter(|(_, (places, _))| !places.is_empty()) {
                    let items = upserts(body, false).unwrap();
                    assert_eq!(items.len(), places.len());
                    for (place, item) in places.iter().zip(items) {
                        let id = item.unwrap().id;
                        assert_eq!((id as usize, shard_of(ItemId(id), shards as u32) as usize), (*place, shard));
                    }
                    seen.extend(places);
                }
                seen.sort_unstable();
                assert!(seen.into_iter().eq(0..40));
            }
        }
        let (parts, refused) = divided(format!("{{\"items\": [{}]}}", one(3)).as_bytes(), false, 2).unwrap();
        assert!(parts.iter().all(|(places, body)| places.is_empty() && body.is_empty()) && refused.len() == 1);
        assert!(divided(b"{}", false, 2).is_err());
    }

    #[test]
    fn a_deletion_names_ids_or_a_filter() {
        assert_eq!(deletion(b"{\"ids\": [1, 2]}").unwrap().ids, Some(vec![1, 2]));
        assert!(deletion(b"{\"filter\": \"a:b\", \"dry_run\": true}").unwrap().dry_run);
        for body in
            ["{}", "{\"ids\": [1], \"filter\": \"a:b\"}", "{\"filter\": \" \"}", "{\"ids\": [\"x\"]}", "{\"id\": 1}"]
        {
            assert!(deletion(body.as_bytes()).is_err(), "{body}");
        }
    }
}
