//! The JSON of requests: one type a call, which is both what is read and what `/openapi.json` describes.
//!
//! Unknown and repeated fields are refused. A field that is wrong is named by its path, with what came and what was
//! expected, and reading stops at the first bound that is passed.

use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use serde::de::value::{MapAccessDeserializer, StringDeserializer};
use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, IntoDeserializer as _, MapAccess, Visitor};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::values::{FeatureValue, Finite, List, Named};
use crate::error::{Error, Result};
use crate::limits::{
    BATCH_REQUESTS_MAX, CANDIDATES_MAX, COLUMNS_MAX, CONSTANTS_MAX, DIMENSION_MAX, EXCLUDE_MAX, FEATURES_MAX,
    LISTS_MAX, RESULTS_MAX, TIMEOUT_MS_MAX,
};
use crate::request::{self, Features, Priority, Reading, User};
use crate::units::ItemId;

type FeatureValues = Named<FeatureValue, FEATURES_MAX>;

/// What to do where rows of a remote table cannot be had in time.
#[derive(serde::Deserialize, ToSchema)]
#[serde(remote = "request::OnDegraded", rename_all = "snake_case")]
#[schema(as = OnDegraded)]
pub enum OnDegradedName {
    /// Answer with a problem.
    Fail,
    /// Go on with each table's default row, zeros, and say so in the reply.
    DefaultRows,
}

/// Who goes first where requests wait.
#[derive(serde::Deserialize, ToSchema)]
#[serde(remote = "request::Priority", rename_all = "snake_case")]
#[schema(as = Priority)]
pub enum PriorityName {
    /// Somebody is waiting.
    Interactive,
    /// Takes what interactive requests leave.
    Batch,
}

/// One retrieval. Exactly one of `features` and `vector` is given; all else has a default.
#[derive(Debug, serde::Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RetrieveRequest {
    /// Values of the user's features by name: a list of ids, `{"values": [..], "weights": [..]}`, a text or integer or a list
    /// of them, or a list of numbers.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    features: Option<FeatureValues>,
    /// The query itself, in place of features, `[D]`.
    #[serde(default)]
    #[schema(value_type = Option<Vec<f32>>, max_items = 8192)]
    vector: Option<List<Finite, DIMENSION_MAX>>,
    /// Which items are eligible; see `docs/FILTERS.md`.
    #[serde(default)]
    filter: String,
    /// Items that are not to be returned.
    #[serde(default)]
    #[schema(value_type = Vec<i64>, max_items = 100_000)]
    exclude: List<i64, EXCLUDE_MAX>,
    /// Results, K.
    #[serde(default = "default_k")]
    #[schema(minimum = 1, maximum = 100_000, default = 20)]
    k: usize,
    /// Candidates that are reranked, K0, at least `k`; the model's default where it is not given.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 200_000)]
    candidates: Option<usize>,
    /// The share of the true candidates that is to be found, which chooses the lists that are probed; the model's default
    /// where it is not given.
    #[serde(default)]
    #[schema(minimum = 0.5, maximum = 0.999)]
    recall: Option<f64>,
    /// Lists that are probed, P, whatever recall they bring.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1_048_576)]
    probes: Option<usize>,
    /// Looks at every item in f32 in place of probing.
    #[serde(default)]
    exact: bool,
    /// Item columns to return, each named once.
    #[serde(default)]
    #[schema(value_type = Vec<String>, max_items = 256)]
    columns: List<String, COLUMNS_MAX>,
    /// Constants of the value model to override.
    #[serde(default)]
    #[schema(value_type = std::collections::BTreeMap<String, f32>)]
    constants: Named<Finite, CONSTANTS_MAX>,
    /// How long the answer is worth waiting for; the server's default where it is not given.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 600_000)]
    timeout_ms: Option<u64>,
    /// Who goes first where requests wait.
    #[serde(default, deserialize_with = "priority")]
    #[schema(value_type = PriorityName)]
    priority: Priority,
    /// Tells what each step did.
    #[serde(default)]
    explain: bool,
    /// What to do where rows of a remote table cannot be had in time.
    #[serde(default, deserialize_with = "on_degraded")]
    #[schema(value_type = OnDegradedName)]
    on_degraded: request::OnDegraded,
}

// Through a text: of a number in place of a name, serde_json says that it is no JSON.
fn priority<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Priority, D::Error> {
    PriorityName::deserialize(String::deserialize(deserializer)?.into_deserializer())
}

fn on_degraded<'de, D: Deserializer<'de>>(deserializer: D) -> Result<request::OnDegraded, D::Error> {
    OnDegradedName::deserialize(String::deserialize(deserializer)?.into_deserializer())
}

fn default_k() -> usize {
    request::Retrieve::K_DEFAULT
}

/// Scores for items that the caller names.
#[derive(Debug, serde::Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RankRequest {
    /// As in a retrieval.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    features: Option<FeatureValues>,
    /// As in a retrieval.
    #[serde(default)]
    #[schema(value_type = Option<Vec<f32>>, max_items = 8192)]
    vector: Option<List<Finite, DIMENSION_MAX>>,
    /// The items to score.
    #[schema(value_type = Vec<i64>, min_items = 1, max_items = 200_000)]
    items: List<i64, CANDIDATES_MAX>,
    /// As in a retrieval.
    #[serde(default)]
    #[schema(value_type = Vec<String>, max_items = 256)]
    columns: List<String, COLUMNS_MAX>,
    /// As in a retrieval.
    #[serde(default)]
    #[schema(value_type = std::collections::BTreeMap<String, f32>)]
    constants: Named<Finite, CONSTANTS_MAX>,
    /// As in a retrieval.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 600_000)]
    timeout_ms: Option<u64>,
    /// As in a retrieval.
    #[serde(default, deserialize_with = "priority")]
    #[schema(value_type = PriorityName)]
    priority: Priority,
    /// As in a retrieval.
    #[serde(default)]
    explain: bool,
    /// As in a retrieval.
    #[serde(default, deserialize_with = "on_degraded")]
    #[schema(value_type = OnDegradedName)]
    on_degraded: request::OnDegraded,
}

/// A query embedding for features.
#[derive(Debug, serde::Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EmbedRequest {
    /// As in a retrieval.
    #[schema(value_type = Object)]
    features: FeatureValues,
    /// As in a retrieval.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 600_000)]
    timeout_ms: Option<u64>,
    /// As in a retrieval.
    #[serde(default, deserialize_with = "priority")]
    #[schema(value_type = PriorityName)]
    priority: Priority,
    /// As in a retrieval.
    #[serde(default, deserialize_with = "on_degraded")]
    #[schema(value_type = OnDegradedName)]
    on_degraded: request::OnDegraded,
}

/// What a caller says of the waiting, beside what is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// How long the answer is worth waiting for; the server's default where it is `None`.
    pub timeout: Option<Duration>,
    /// Who goes first.
    pub priority: Priority,
}

/// What the body of a retrieval holds.
#[derive(Debug)]
pub enum Retrievals {
    /// One request.
    One(Box<request::Retrieve>, Terms),
    /// The requests of `{"requests": [..]}`. A wrong one is wrong alone.
    Many(Vec<Result<(request::Retrieve, Terms)>>),
}

/// Reads the body of a `:retrieve`.
///
/// # Errors
/// `Invalid` with the place in the text or the path of the field. A wrong entry of a list is an error in its place only.
pub fn retrievals(body: &[u8]) -> Result<Retrievals> {
    match parse(body, OneOrMany, "")? {
        RetrieveBody::One(request) => {
            let (request, terms) = request.typed()?;
            Ok(Retrievals::One(Box::new(request), terms))
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

/// Reads the body of a `:rank`.
///
/// # Errors
/// As [`retrievals`].
pub fn rank(body: &[u8]) -> Result<(request::Rank, Terms)> {
    parse::<_, RankRequest>(body, Object(PhantomData), "")?.typed()
}

/// Reads the body of an `:embed`.
///
/// # Errors
/// As [`retrievals`].
pub fn embed(body: &[u8]) -> Result<(request::Embed, Terms)> {
    parse::<_, EmbedRequest>(body, Object(PhantomData), "")?.typed()
}

/// Reads the body of any other call.
///
/// # Errors
/// As [`retrievals`].
pub fn object<'de, T: Deserialize<'de>>(body: &'de [u8]) -> Result<T> {
    parse(body, Object(PhantomData), "")
}

fn parse<'de, V: Visitor<'de, Value = T>, T>(body: &'de [u8], visitor: V, place: &str) -> Result<T> {
    let mut track = serde_path_to_error::Track::new();
    let mut json = serde_json::Deserializer::from_slice(body);
    let read = serde_path_to_error::Deserializer::new(&mut json, &mut track).deserialize_map(visitor);
    read.and_then(|value| json.end().map(|()| value)).map_err(|e| {
        if !e.is_data() {
            return Error::invalid(format!("body: not JSON: {e}"));
        }
        let path = track.path().to_string();
        match (place, path.as_str()) {
            ("", ".") => Error::invalid(format!("body: {e}")),
            (place, ".") => Error::invalid(format!("field `{place}`: {e}")),
            ("", "requests") if e.to_string().starts_with("unknown") => {
                Error::invalid("field `requests` beside others: expected them inside each request")
            }
            ("", path) => Error::invalid(format!("field `{path}`: {e}")),
            (place, path) => Error::invalid(format!("field `{place}.{path}`: {e}")),
        }
    })
}

/// An object, and not the list that a derived `Deserialize` would take for one.
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

/// One request, or a list of them, which the first field tells.
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

/// An object whose first key has been read already.
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

impl RetrieveRequest {
    fn typed(self) -> Result<(request::Retrieve, Terms)> {
        between("k", Some(self.k as u64), RESULTS_MAX)?;
        between("candidates", self.candidates.map(|n| n as u64), CANDIDATES_MAX)?;
        between("probes", self.probes.map(|n| n as u64), LISTS_MAX)?;
        if let Some(candidates) = self.candidates.filter(|n| *n < self.k) {
            return Err(Error::invalid(format!(
                "field `candidates`: got {candidates}, expected at least k = {}",
                self.k
            )));
        }
        let reading = reading(self.columns, self.constants, self.explain, self.on_degraded)?;
        let retrieve = request::Retrieve {
            user: user(self.features, self.vector)?,
            filter: self.filter,
            exclude: items(self.exclude),
            k: self.k,
            candidates: self.candidates,
            recall: self.recall,
            probes: self.probes,
            exact: self.exact,
            reading,
        };
        Ok((retrieve, terms(self.timeout_ms, self.priority)?))
    }
}

impl RankRequest {
    fn typed(self) -> Result<(request::Rank, Terms)> {
        between("items", Some(self.items.0.len() as u64), CANDIDATES_MAX)?;
        let reading = reading(self.columns, self.constants, self.explain, self.on_degraded)?;
        let rank = request::Rank { user: user(self.features, self.vector)?, items: items(self.items), reading };
        Ok((rank, terms(self.timeout_ms, self.priority)?))
    }
}

impl EmbedRequest {
    fn typed(self) -> Result<(request::Embed, Terms)> {
        let embed = request::Embed { features: features(self.features), on_degraded: self.on_degraded };
        Ok((embed, terms(self.timeout_ms, self.priority)?))
    }
}

fn user(given: Option<FeatureValues>, vector: Option<List<Finite, DIMENSION_MAX>>) -> Result<User> {
    match (given, vector) {
        (Some(given), None) => Ok(User::Features(features(given))),
        (None, Some(List(vector))) => Ok(User::Vector(vector.into_iter().map(|x| x.0).collect())),
        (Some(_), Some(_)) => Err(Error::invalid("fields `features` and `vector`: got both, expected one of them")),
        (None, None) => Err(Error::invalid("fields `features` and `vector`: got neither, expected one of them")),
    }
}

fn features(given: FeatureValues) -> Features {
    given.0.into_iter().map(|(name, value)| (name, value.0)).collect()
}

fn items<const MOST: usize>(ids: List<i64, MOST>) -> Vec<ItemId> {
    ids.0.into_iter().map(ItemId).collect()
}

fn reading(
    columns: List<String, COLUMNS_MAX>,
    constants: Named<Finite, CONSTANTS_MAX>,
    explain: bool,
    on_degraded: request::OnDegraded,
) -> Result<Reading> {
    let List(columns) = columns;
    if let Some((n, twice)) = columns.iter().enumerate().find(|(n, name)| columns[..*n].contains(name)) {
        return Err(Error::invalid(format!("field `columns[{n}]`: got `{twice}` twice, expected each column once")));
    }
    let constants = constants.0.into_iter().map(|(name, x)| (name, x.0)).collect();
    Ok(Reading { columns, constants, explain, on_degraded })
}

fn terms(timeout_ms: Option<u64>, priority: Priority) -> Result<Terms> {
    between("timeout_ms", timeout_ms, TIMEOUT_MS_MAX as usize)?;
    Ok(Terms { timeout: timeout_ms.map(Duration::from_millis), priority })
}

fn between(field: &str, value: Option<u64>, most: usize) -> Result<()> {
    match value {
        Some(value) if value == 0 || value > most as u64 => {
            Err(Error::invalid(format!("field `{field}`: got {value}, expected 1 to {most}")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;
    use utoipa::PartialSchema;

    use super::*;
    use crate::error::Kind;
    use crate::request::{OnDegraded, Values};

    fn one(body: &str) -> Result<(request::Retrieve, Terms)> {
        match retrievals(body.as_bytes())? {
            Retrievals::One(request, terms) => Ok((*request, terms)),
            Retrievals::Many(_) => panic!("{body}: a list"),
        }
    }

    #[test]
    fn a_whole_request_is_read_in_any_order_of_fields() {
        let fields = [
            ("features", "{\"installed\": [3, 1], \"bag\": {\"values\": [7], \"weights\": [0.5]}}"),
            ("filter", "\"a:b\""),
            ("exclude", "[-1, 9223372036854775807]"),
            ("k", "7"),
            ("candidates", "70"),
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
            candidates: Some(70),
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
            let wanted = Terms { timeout: Some(Duration::from_millis(250)), priority: Priority::Batch };
            assert_eq!(terms, wanted);
        }
        let (request, terms) = one("{\"vector\": [1, 0.5]}").unwrap();
        assert_eq!(request, request::Retrieve::of(User::Vector(vec![1.0, 0.5])));
        assert_eq!(terms, Terms::default());
        let (request, _) = rank(b"{\"vector\": [1], \"items\": [4, -4]}").unwrap();
        assert_eq!(request.items, [ItemId(4), ItemId(-4)]);
        let (request, _) = embed(b"{\"features\": {\"installed\": 4}}").unwrap();
        assert_eq!(request.features["installed"], Values::Integers(vec![4]));
    }

    #[test]
    fn wrong_bodies_name_the_field() {
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
            ("{\"k\": \"ten\"}", "field `k`: invalid type: string \"ten\", expected usize"),
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
            ("{\"k\": 3, \"requests\": [{}]}", "field `requests` beside others"),
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
    fn a_wrong_entry_of_a_list_is_wrong_alone() {
        let body = b"{\"requests\": [{\"vector\": [1], \"k\": 1}, {\"k\": []}, [], {\"k\": 0, \"vector\": [1]}, {\"vector\": [2]}]}";
        let Retrievals::Many(entries) = retrievals(body).unwrap() else { panic!() };
        let wrong = |n: usize| entries[n].as_ref().unwrap_err().to_string();
        assert_eq!(entries[0].as_ref().unwrap().0.k, 1);
        assert!(wrong(1).starts_with("field `requests[1].k`: invalid type: sequence"), "{}", wrong(1));
        assert!(wrong(2).starts_with("field `requests[2]`: invalid type: sequence"), "{}", wrong(2));
        assert_eq!(wrong(3), "requests[3]: field `k`: got 0, expected 1 to 100000");
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
            // The error may show the text that was wrong, and a growing list doubles.
            assert!(used.bytes_max < 3 * BYTES as u64, "{:.40}: {} bytes", body, used.bytes_max);
        }
        let full: Vec<String> = (0..40).map(|n| format!("\"f{n}\":[0{}]", ",0".repeat(49_999))).collect();
        let body = format!("{{\"features\":{{{}}}}}", full.join(","));
        let used = allocation_counter::measure(|| assert!(retrievals(body.as_bytes()).is_ok()));
        assert!(used.bytes_max < 8 * body.len() as u64, "{} bytes for {}", used.bytes_max, body.len());
    }

    /// Every field of the described schema is read, and every field that is read is described.
    #[test]
    fn the_schemas_are_what_is_read() {
        fn names<T: PartialSchema>() -> Vec<String> {
            let schema = serde_json::to_value(T::schema()).unwrap();
            schema["properties"].as_object().unwrap().keys().cloned().collect()
        }
        fn accepted(error: Error) -> Vec<String> {
            let text = error.to_string();
            let list = text.split_once("expected one of ").unwrap().1.split(" at line").next().unwrap().to_owned();
            list.split(", ").map(|name| name.trim_matches('`').to_owned()).collect()
        }
        let wrong = b"{\"\": 0}";
        let mut read = accepted(retrievals(wrong).unwrap_err());
        assert_eq!(names::<RetrieveRequest>(), read);
        read = accepted(rank(wrong).unwrap_err());
        assert_eq!(names::<RankRequest>(), read);
        read = accepted(embed(wrong).unwrap_err());
        assert_eq!(names::<EmbedRequest>(), read);
        let limits = serde_json::to_value(RetrieveRequest::schema()).unwrap();
        let rank = serde_json::to_value(RankRequest::schema()).unwrap();
        for (described, limit) in [
            (&limits["properties"]["exclude"]["maxItems"], EXCLUDE_MAX),
            (&limits["properties"]["columns"]["maxItems"], COLUMNS_MAX),
            (&limits["properties"]["vector"]["maxItems"], DIMENSION_MAX),
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
