//! Request bodies, parsed directly into typed requests.
//!
//! Unknown and repeated fields are rejected. An error names the path of the field, the received and the expected value. Parsing
//! stops at the first exceeded limit.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::{MapAccessDeserializer, StringDeserializer};
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer as _, IntoDeserializer as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::request::{EmbedRequest, RankRequest, RetrieveRequest, Shape};
use super::values::List;
use sterling_core::error::{Error, Result};
use sterling_core::limits::BATCH_REQUESTS_MAX;
use sterling_core::request;
use sterling_core::request::CallOptions;

/// Prefix of the reason for a text that is not JSON.
const NOT_JSON: &str = "not JSON";

/// Contents of a retrieval body.
#[derive(Debug)]
pub enum Retrievals {
    /// A single request.
    One(Box<request::Retrieve>, CallOptions, Shape),
    /// Requests of `{"requests": [..]}`. An invalid request fails alone: its entry of the list holds the error.
    Many(Vec<Result<(request::Retrieve, CallOptions, Shape)>>),
}

/// Parses the body of a `:retrieve`.
///
/// # Errors
/// `Invalid` with the location in the text or the path of the field. An invalid entry of a list fails alone: its place
/// in the result holds the error.
pub fn retrievals(body: &[u8]) -> Result<Retrievals> {
    match parse(body, OneOrMany, "")? {
        RetrieveBody::One(request) => {
            let (request, terms, shape) = request.typed()?;
            Ok(Retrievals::One(Box::new(request), terms, shape))
        }
        RetrieveBody::Many(entries) if entries.is_empty() => {
            Err(Error::invalid(format!("field `requests`: got 0 requests, expected 1 to {BATCH_REQUESTS_MAX}")))
        }
        RetrieveBody::Many(entries) => {
            let entry = |(n, entry): (usize, &RawValue)| {
                let place = format!("requests[{n}]");
                let request: RetrieveRequest = parse(entry.get().as_bytes(), Object(PhantomData), &place)?;
                request.typed().map_err(|e| e.within(place))
            };
            Ok(Retrievals::Many(entries.into_iter().enumerate().map(entry).collect()))
        }
    }
}

/// Parses the body of a `:rank`.
///
/// # Errors
/// As [`retrievals`].
pub fn rank(body: &[u8]) -> Result<(request::Rank, CallOptions, Shape)> {
    parse::<_, RankRequest>(body, Object(PhantomData), "")?.typed()
}

/// Parses the body of an `:embed`.
///
/// # Errors
/// As [`retrievals`].
pub fn embed(body: &[u8]) -> Result<(request::Embed, CallOptions)> {
    parse::<_, EmbedRequest>(body, Object(PhantomData), "")?.typed()
}

/// Parses the body of a call other than `:retrieve`, `:rank` and `:embed`.
///
/// # Errors
/// As [`retrievals`].
pub fn object<'de, T: Deserialize<'de>>(body: &'de [u8]) -> Result<T> {
    read_object(body).map_err(|misread| misread.error(""))
}

/// Parses a text within a body as [`object`] does.
///
/// # Errors
/// The field and the reason.
pub fn read_object<'de, T: Deserialize<'de>>(text: &'de [u8]) -> Result<T, Misread> {
    // Only an invalid text is parsed again, with tracking of the field path for the error.
    match serde_json::from_slice(text) {
        Ok(read) if text.trim_ascii_start().starts_with(b"{") => Ok(read),
        _ => read(text, Object(PhantomData)),
    }
}

/// Parse error of a text.
#[derive(Debug)]
pub struct Misread {
    /// Path of the field; empty for the complete text.
    pub field: String,
    /// Received and expected value, with the location in the text.
    pub reason: String,
}

impl Misread {
    /// Converts to the error of a body; `place` is the path of the text within the body.
    fn error(self, place: &str) -> Error {
        let Misread { field, reason } = self;
        match (place, field.as_str()) {
            _ if reason.starts_with(NOT_JSON) => Error::invalid(format!("body: {reason}")),
            ("", "") => Error::invalid(format!("body: {reason}")),
            ("", "requests") if reason.starts_with("unknown") => {
                Error::invalid("field `requests` beside other fields: expected these inside each request")
            }
            (place, "") => Error::invalid(format!("field `{place}`: {reason}")),
            ("", field) => Error::invalid(format!("field `{field}`: {reason}")),
            (place, field) => Error::invalid(format!("field `{place}.{field}`: {reason}")),
        }
    }
}

fn parse<'de, V: Visitor<'de, Value = T>, T>(body: &'de [u8], visitor: V, place: &str) -> Result<T> {
    read(body, visitor).map_err(|misread| misread.error(place))
}

fn read<'de, V: Visitor<'de, Value = T>, T>(text: &'de [u8], visitor: V) -> Result<T, Misread> {
    let mut track = serde_path_to_error::Track::new();
    let mut json = serde_json::Deserializer::from_slice(text);
    let read = serde_path_to_error::Deserializer::new(&mut json, &mut track).deserialize_map(visitor);
    read.and_then(|value| json.end().map(|()| value)).map_err(|e| {
        let path = track.path().to_string();
        let field = if path == "." { String::new() } else { path };
        let reason = if e.is_data() { readable(&e) } else { format!("{NOT_JSON}: {e}") };
        Misread { field, reason }
    })
}

/// Formats a serde error with JSON types in place of Rust types.
fn readable(e: &serde_json::Error) -> String {
    let text = e.to_string();
    let Some((reported, (kind, place))) =
        text.rsplit_once(", expected ").and_then(|(reported, rest)| Some((reported, rest.split_once(" at line ")?)))
    else {
        return text;
    };
    let kind = match kind {
        "u64" | "usize" | "u32" => "a whole number from 0 up",
        "i64" => "a whole number from -2^63 to 2^63 - 1",
        "i32" => "a whole number",
        "f64" | "f32" => "a number",
        other => other,
    };
    format!("{reported}, expected {kind} at line {place}")
}

/// Accepts an object only; a derived `Deserialize` would accept a list as well.
struct Object<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Object<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<T, A::Error> {
        T::deserialize(MapAccessDeserializer::new(fields))
    }
}

enum RetrieveBody<'de> {
    One(Box<RetrieveRequest>),
    Many(Vec<&'de RawValue>),
}

/// A single request or a list, distinguished by the first field.
struct OneOrMany;

impl<'de> Visitor<'de> for OneOrMany {
    type Value = RetrieveBody<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let first = fields.next_key::<String>()?;
        if first.as_deref() != Some("requests") {
            let fields = MapAccessDeserializer::new(Resumed { first, rest: fields });
            return RetrieveRequest::deserialize(fields).map(|r| RetrieveBody::One(Box::new(r)));
        }
        let List(requests) = fields.next_value::<List<&RawValue, BATCH_REQUESTS_MAX>>()?;
        match fields.next_key::<String>()? {
            None => Ok(RetrieveBody::Many(requests)),
            Some(other) => Err(de::Error::custom(format_args!(
                "field `{other}` beside `requests`, expected it inside each request"
            ))),
        }
    }
}

/// An object whose first key has already been read.
struct Resumed<A> {
    first: Option<String>,
    rest: A,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Resumed<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, A::Error> {
        match self.first.take() {
            Some(first) => {
                let key: StringDeserializer<A::Error> = first.into_deserializer();
                seed.deserialize(key).map(Some)
            }
            None => self.rest.next_key_seed(seed),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.rest.next_value_seed(seed)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use serde_json::json;
    use utoipa::PartialSchema;

    use super::super::vector_form::VectorForm;
    use super::*;
    use sterling_core::error::Kind;
    use sterling_core::limits::{
        CANDIDATES_MAX, COLUMNS_MAX, DIMENSION_MAX, EXCLUDE_MAX, LISTS_MAX, RESULTS_MAX, TIMEOUT_MS_MAX,
    };
    use sterling_core::request::{Features, OnDegraded, Priority, Reading, User, Values};
    use sterling_core::units::ItemId;

    fn one(body: &str) -> Result<(request::Retrieve, CallOptions)> {
        match retrievals(body.as_bytes())? {
            Retrievals::One(request, terms, _) => Ok((*request, terms)),
            Retrievals::Many(_) => panic!("{body}: a list"),
        }
    }

    #[test]
    fn request_fields_are_read_in_any_order() {
        let fields = [
            ("features", "{\"installed\": [3, 1], \"bag\": {\"values\": [7], \"weights\": [0.5]}}"),
            ("filter", "\"a:b\""),
            ("exclude", "[-1, 9223372036854775807]"),
            ("k", "7"),
            ("candidates", "70"),
            ("query_candidates", "{\"like\": 30}"),
            ("recall", "0.9"),
            ("probes", "3"),
            ("exact", "true"),
            ("columns", "[\"name\", \"n\\u0061\"]"),
            ("constants", "{\"w\": 0.25}"),
            ("timeout_ms", "250"),
            ("priority", "\"batch\""),
            ("explain", "true"),
            ("on_degraded", "\"default_rows\""),
        ];
        let mut bag = Features::new();
        bag.insert("installed".into(), Values::Integers(vec![3, 1]));
        bag.insert("bag".into(), Values::Weighted { ids: vec![7], weights: vec![0.5] });
        let expected = request::Retrieve {
            user: User::Features(bag),
            filter: "a:b".into(),
            exclude: vec![ItemId(-1), ItemId(i64::MAX)],
            k: 7,
            least: None,
            candidates: Some(70),
            query_candidates: [("like".into(), 30)].into(),
            recall: Some(0.9),
            probes: Some(3),
            exact: true,
            reading: Reading {
                columns: vec!["name".into(), "na".into()],
                constants: [("w".into(), 0.25)].into(),
                explain: true,
                on_degraded: OnDegraded::DefaultRows,
            },
        };
        for turn in 0..fields.len() {
            let mut fields = fields;
            fields.rotate_left(turn);
            let body: Vec<String> = fields.iter().map(|(name, value)| format!("\"{name}\": {value}")).collect();
            let (request, terms) = one(&format!(" {{{}}} ", body.join(", "))).unwrap();
            assert_eq!(request, expected);
            let wanted = CallOptions {
                timeout: Some(Duration::from_millis(250)),
                priority: Priority::Batch,
                ..CallOptions::default()
            };
            assert_eq!(terms, wanted);
        }
        let (request, terms) = one("{\"vector\": [1, 0.5]}").unwrap();
        assert_eq!(request, request::Retrieve::of(User::Vector(vec![1.0, 0.5])));
        assert_eq!(terms, CallOptions::default());
        let (request, ..) = rank(b"{\"vector\": [1], \"items\": [4, -4]}").unwrap();
        assert_eq!(request.items, [ItemId(4), ItemId(-4)]);
        let (request, _) = embed(b"{\"features\": {\"installed\": 4}}").unwrap();
        assert_eq!(request.features["installed"], Values::Integers(vec![4]));
    }

    #[test]
    fn invalid_bodies_name_the_field() {
        let deep = format!("{{\"features\": {{\"a\": {}", "[".repeat(100_000));
        let many = format!("{{\"requests\": [{{}}{}]}}", ",{}".repeat(BATCH_REQUESTS_MAX));
        let excluded = format!("{{\"vector\": [1], \"exclude\": [0{}]}}", ",0".repeat(EXCLUDE_MAX));
        let wide = format!("{{\"vector\": [0{}]}}", ",0".repeat(DIMENSION_MAX));
        let columns: Vec<String> = (0..=COLUMNS_MAX).map(|n| format!("\"c{n}\"")).collect();
        let columns = format!("{{\"vector\": [1], \"columns\": [{}]}}", columns.join(","));
        for (body, expected) in [
            ("", "body: not JSON: EOF"),
            ("{\"k\": 3", "body: not JSON: EOF while parsing an object at line 1 column 7"),
            ("{\"vector\": [1]} x", "body: not JSON: trailing characters"),
            ("{\"vector\": [1],}", "body: not JSON: trailing comma"),
            ("\u{feff}{\"vector\": [1]}", "body: not JSON: expected value at line 1 column 1"),
            ("{'vector': [1]}", "body: not JSON: key must be a string"),
            ("{\"vector\": [01]}", "body: not JSON: invalid number"),
            ("{\"vector\": [NaN]}", "body: not JSON: expected value"),
            ("{\"filter\": \"\\ud800\", \"vector\": [1]}", "body: not JSON:"),
            ("{\"filter\": \"\u{1}\", \"vector\": [1]}", "body: not JSON: control character"),
            (&deep, "field `features.a[0]`: invalid type: sequence"),
            ("[]", "body: invalid type: sequence, expected a JSON object"),
            ("null", "body: invalid type: null, expected a JSON object"),
            ("3", "expected a JSON object"),
            ("{\"k\": \"ten\"}", "field `k`: invalid type: string \"ten\", expected a whole number from 0 up at"),
            ("{\"k\": -1}", "field `k`: invalid value: integer `-1`"),
            ("{\"k\": 1e2}", "field `k`: invalid type: floating point `100.0`"),
            ("{\"k\": 99999999999999999999999}", "field `k`: invalid type: floating point"),
            ("{\"kk\": 1}", "unknown field `kk`, expected one of `features`, `vector`"),
            ("{\"k\": 1, \"kk\": 1}", "unknown field `kk`"),
            ("{\"k\": 1, \"k\": 1}", "duplicate field `k`"),
            ("{\"vector\": [1], \"vector\": [1]}", "duplicate field `vector`"),
            ("{\"features\": {\"a\": 1, \"a\": 1}}", "field `features`: got `a` twice"),
            ("{\"features\": {\"a\": [1, 2, null]}}", "field `features.a[2]`: invalid type: null"),
            ("{\"features\": {\"a\": [[1]]}}", "field `features.a[0]`: invalid type: sequence"),
            ("{\"features\": {\"a\": {\"values\": [1, \"x\"]}}}", "field `features.a.values[1]`: invalid type: string"),
            ("{\"features\": [1]}", "field `features`: invalid type: sequence, expected an object"),
            ("{\"vector\": [1, \"a\"]}", "field `vector[1]`: invalid type: string"),
            ("{\"vector\": [1, null]}", "field `vector[1]`: invalid type: null"),
            ("{\"vector\": [1e999]}", "number out of range"),
            ("{\"vector\": [0, 1e39]}", "field `vector[1]`: got 1e39, expected a finite 32-bit number"),
            ("{\"vector\": [1], \"exclude\": [0.5]}", "field `exclude[0]`: invalid type: floating point"),
            ("{\"vector\": [1], \"columns\": [\"a\", \"b\", \"a\"]}", "field `columns[2]`: got `a` twice"),
            ("{\"vector\": [1], \"constants\": {\"w\": null}}", "field `constants.w`: invalid type: null"),
            (
                "{\"vector\": [1], \"priority\": \"high\"}",
                "field `priority`: unknown variant `high`, expected `interactive` or `batch`",
            ),
            ("{\"vector\": [1], \"on_degraded\": 3}", "field `on_degraded`: invalid type: integer `3`"),
            ("{}", "got neither"),
            ("{\"vector\": [1], \"features\": {}}", "got both"),
            (&excluded, "field `exclude"),
            (&wide, "field `vector"),
            (&columns, "field `columns"),
            ("{\"requests\": 3}", "field `requests`: invalid type: integer `3`, expected a list"),
            ("{\"requests\": []}", "field `requests`: got 0 requests"),
            ("{\"requests\": [{}], \"k\": 3}", "field `k` beside `requests`"),
            ("{\"k\": 3, \"requests\": [{}]}", "field `requests` beside other fields"),
            ("{\"requests\": [{}], \"requests\": [{}]}", "field `requests` beside `requests`"),
            ("{\"requests\": [{]}", "body: not JSON"),
            (&many, "field `requests"),
        ] {
            let error = retrievals(body.as_bytes()).expect_err(body);
            assert_eq!(error.kind(), Kind::Invalid);
            assert!(error.to_string().contains(expected), "{body:.80}: {error}");
        }
        assert!(retrievals(b"{\"filter\": \"\xff\"}").unwrap_err().to_string().contains("not JSON: invalid unicode"));
        assert!(rank(b"[null, [1.0], [1]]").unwrap_err().to_string().contains("expected a JSON object"));
        assert!(rank(b"{\"vector\": [1]}").unwrap_err().to_string().contains("missing field `items`"));
        assert!(rank(b"{\"vector\": [1], \"items\": []}").unwrap_err().to_string().contains("field `items`: got 0"));
    }

    #[test]
    fn null_is_as_if_a_field_were_left_out() {
        let nulls = |names: &[&str]| names.iter().map(|name| format!(", \"{name}\": null")).collect::<String>();
        let shared = nulls(&["columns", "constants", "timeout_ms", "priority", "explain", "on_degraded", "format"]);
        let own = nulls(&[
            "features",
            "filter",
            "exclude",
            "k",
            "candidates",
            "query_candidates",
            "recall",
            "probes",
            "exact",
            "cursor",
        ]);
        let bare = one("{\"vector\": [1]}").unwrap();
        assert_eq!(one(&format!("{{\"vector\": [1]{own}{shared}}}")).unwrap(), bare);
        let ranked = |more: &str| rank(format!("{{\"vector\": [1], \"items\": [4]{more}}}").as_bytes()).unwrap();
        assert_eq!(ranked(&format!("{}{shared}", nulls(&["features"]))), ranked(""));
        let error = one("{\"vector\": [1], \"priority\": 3}").unwrap_err().to_string();
        assert!(error.contains("`priority`") && error.contains("expected a string"), "{error}");
        assert!(rank(b"{\"vector\": [1], \"items\": null}").is_err(), "fields without a default are required");
    }

    #[test]
    fn an_invalid_list_entry_is_rejected_alone() {
        let body = b"{\"requests\": [{\"vector\": [1], \"k\": 1}, {\"k\": []}, [], {\"k\": 0, \"vector\": [1]}, {\"vector\": [2]}]}";
        let Retrievals::Many(entries) = retrievals(body).unwrap() else { panic!() };
        let invalid = |n: usize| entries[n].as_ref().unwrap_err().to_string();
        assert_eq!(entries[0].as_ref().unwrap().0.k, 1);
        assert!(invalid(1).starts_with("field `requests[1].k`: invalid type: sequence"), "{}", invalid(1));
        assert!(invalid(2).starts_with("field `requests[2]`: invalid type: sequence"), "{}", invalid(2));
        assert_eq!(invalid(3), "requests[3]: field `k`: got 0, expected 1 to 100000");
        assert_eq!(entries[4].as_ref().unwrap().0.user, User::Vector(vec![2.0]));
    }

    #[test]
    fn numbers_out_of_range_name_the_range() {
        for (fields, expected) in [
            ("\"k\": 0", "field `k`: got 0, expected 1 to 100000"),
            ("\"k\": 100001", "field `k`: got 100001"),
            ("\"candidates\": 0", "field `candidates`: got 0"),
            ("\"candidates\": 200001", "field `candidates`: got 200001, expected 1 to 200000"),
            ("\"candidates\": 10, \"k\": 11", "expected at least k = 11"),
            ("\"probes\": 0", "field `probes`: got 0"),
            ("\"timeout_ms\": 0", "field `timeout_ms`: got 0"),
            ("\"timeout_ms\": 18446744073709551615", "field `timeout_ms`: got 18446744073709551615"),
        ] {
            let error = one(&format!("{{\"vector\": [1], {fields}}}")).expect_err(fields).to_string();
            assert!(error.contains(expected), "{fields}: {error}");
        }
    }

    #[test]
    fn hostile_bodies_cost_little_memory() {
        const BYTES: usize = 4 << 20;
        let filled = |head: &str, unit: &str, tail: &str| format!("{head}{}{tail}", unit.repeat(BYTES / unit.len()));
        for body in [
            filled("{\"k\":[", "{\"\":0},", "0]}"),
            filled("{\"features\":{\"a\":[", "\"\",", "0]}}"),
            filled("{\"features\":{\"a\":[", "[],", "0]}}"),
            filled("{\"features\":{\"a\":1,", "\"\":0,", "\"\":0}}"),
            filled("{\"vector\":[", "0,", "0]}"),
            filled("{\"exclude\":[", "0,", "0]}"),
            filled("{\"columns\":[", "\"\",", "\"\"]}"),
            filled("{\"requests\":[", "{},", "{}]}"),
            filled("{\"requests\":[", "{\"k\":{\"\":0}},", "{}]}"),
            filled("{", "\"k\":0,", "\"k\":0}"),
            filled("", "[", ""),
            filled("{\"", "\\u0000", "\":0}"),
        ] {
            let used = allocation_counter::measure(|| assert!(retrievals(body.as_bytes()).is_err(), "{body:.40}"));
            // The error may contain the invalid text, and a growing list doubles.
            assert!(used.bytes_max < 3 * BYTES as u64, "{:.40}: {} bytes", body, used.bytes_max);
        }
        let full: Vec<String> = (0..40).map(|n| format!("\"f{n}\":[0{}]", ",0".repeat(49_999))).collect();
        let body = format!("{{\"features\":{{{}}}}}", full.join(","));
        let used = allocation_counter::measure(|| assert!(retrievals(body.as_bytes()).is_ok()));
        assert!(used.bytes_max < 8 * body.len() as u64, "{} bytes for {}", used.bytes_max, body.len());
    }

    #[test]
    fn a_null_feature_equals_an_absent_one() {
        let user = |body: &str| match retrievals(body.as_bytes()).unwrap() {
            Retrievals::One(request, ..) => request.user,
            Retrievals::Many(_) => panic!("a list"),
        };
        let bare = user("{\"features\": {\"b\": [1]}}");
        assert_eq!(user("{\"features\": {\"a\": null, \"b\": [1], \"c\": null}}"), bare);
        assert!(retrievals(b"{\"features\": {\"a\": [null]}}").is_err());
    }

    #[test]
    fn schemas_describe_the_accepted_fields() {
        fn names<T: PartialSchema>() -> Vec<String> {
            let schema = serde_json::to_value(T::schema()).unwrap();
            schema["properties"].as_object().unwrap().keys().cloned().collect()
        }
        fn accepted(error: Error) -> Vec<String> {
            let text = error.to_string();
            let list = text.split_once("expected one of ").unwrap().1.split(" at line").next().unwrap().to_owned();
            list.split(", ").map(|name| name.trim_matches('`').to_owned()).collect()
        }
        let invalid = b"{\"\": 0}";
        let mut read = accepted(retrievals(invalid).unwrap_err());
        assert_eq!(names::<RetrieveRequest>(), read);
        read = accepted(rank(invalid).unwrap_err());
        assert_eq!(names::<RankRequest>(), read);
        read = accepted(embed(invalid).unwrap_err());
        assert_eq!(names::<EmbedRequest>(), read);
        let limits = serde_json::to_value(RetrieveRequest::schema()).unwrap();
        let rank = serde_json::to_value(RankRequest::schema()).unwrap();
        let vector = serde_json::to_value(VectorForm::schema()).unwrap();
        for (described, limit) in [
            (&limits["properties"]["exclude"]["maxItems"], EXCLUDE_MAX),
            (&limits["properties"]["columns"]["maxItems"], COLUMNS_MAX),
            (&vector["oneOf"][0]["maxItems"], DIMENSION_MAX),
            (&limits["properties"]["k"]["maximum"], RESULTS_MAX),
            (&limits["properties"]["candidates"]["maximum"], CANDIDATES_MAX),
            (&limits["properties"]["probes"]["maximum"], LISTS_MAX),
            (&limits["properties"]["timeout_ms"]["maximum"], TIMEOUT_MS_MAX as usize),
            (&rank["properties"]["items"]["maxItems"], CANDIDATES_MAX),
        ] {
            assert_eq!(described, &json!(limit), "{limits} {rank}");
        }
    }
}
