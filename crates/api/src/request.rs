//! JSON types of requests, one per call. The same type is parsed, described in `/openapi.json`, and converted to a typed request.

use std::time::Duration;

use serde::de::value::StringDeserializer;
use serde::de::{Deserialize as _, Deserializer, IntoDeserializer as _};
use utoipa::ToSchema;

use super::values::{FeatureValue, Finite, List, Named, Vector, nullable};
use super::vector_form::VectorForm;
use sterling_core::error::{Error, Result};
use sterling_core::limits::{
    CANDIDATES_MAX, COLUMNS_MAX, CONSTANTS_MAX, DIMENSION_MAX, EXCLUDE_MAX, FEATURES_MAX, LISTS_MAX, QUERIES_MAX,
    RESULTS_MAX, TIMEOUT_MS_MAX,
};
use sterling_core::request::{self, CallOptions, Features, Priority, Reading, User};
use sterling_core::units::ItemId;

/// Features by name; null means that the feature is absent.
pub(super) type FeatureValues = Named<Option<FeatureValue>, FEATURES_MAX>;

/// Behaviour if rows of a remote table do not arrive in time.
#[derive(serde::Deserialize, ToSchema)]
#[serde(remote = "request::OnDegraded", rename_all = "snake_case")]
#[schema(as = OnDegraded)]
pub(crate) enum OnDegradedName {
    /// Answer with a problem.
    Fail,
    /// Continue with the table's default row, zeros, and report it in the reply.
    DefaultRows,
}

/// Priority class in the queue.
#[derive(serde::Deserialize, ToSchema)]
#[serde(remote = "request::Priority", rename_all = "snake_case")]
#[schema(as = Priority)]
pub(crate) enum PriorityName {
    /// For users who wait for the answer.
    Interactive,
    /// Uses capacity that interactive requests leave.
    Batch,
}

/// JSON layout of items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Format)]
pub(crate) enum FormatName {
    /// One object per item, in `items`.
    #[default]
    Items,
    /// One list per column, in `table`.
    Columns,
}

/// Layout of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// True if the JSON lists the items column by column.
    pub is_table: bool,
    /// Requested page: `Some` if pages are requested; empty for the first, else the cursor of the page.
    pub cursor: Option<String>,
}

/// One retrieval. Exactly one of `features` and `vector` is required; all other fields have a default, which null selects as
/// well.
#[derive(Clone, Debug, serde::Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RetrieveRequest {
    /// Values of the user's features by name: a list of ids, `{"values": [..], "weights": [..]}`, a text or integer or a list of
    /// them, a list of numbers, or numbers as `{"base64": ".."}`.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    features: Option<FeatureValues>,
    /// Query vector, in place of features, `[D]`: a list, or little-endian 32-bit numbers in base64.
    #[serde(default)]
    #[schema(value_type = Option<VectorForm>)]
    vector: Option<Vector<DIMENSION_MAX>>,
    /// Filter of eligible items; see `docs/reference/filter-language.md`.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<String>)]
    filter: String,
    /// Items that must not be returned.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<Vec<i64>>, max_items = 100_000)]
    exclude: List<i64, EXCLUDE_MAX>,
    /// Number of results, K.
    #[serde(default = "default_k", deserialize_with = "k")]
    #[schema(value_type = Option<usize>, minimum = 1, maximum = 100_000, default = 20)]
    k: usize,
    /// Candidates that are reranked, K0, at least `k`; default: the model's.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 200_000)]
    candidates: Option<usize>,
    /// Candidates by query name for models with several queries per user, each at least `k`; takes precedence over `candidates`.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<std::collections::BTreeMap<String, usize>>)]
    query_candidates: Named<usize, QUERIES_MAX>,
    /// Recall to reach among the true candidates, which determines the number of probed lists; default: the model's.
    #[serde(default)]
    #[schema(minimum = 0.5, maximum = 0.999)]
    recall: Option<f64>,
    /// Number of probed lists, nprobe, in place of a recall.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1_048_576)]
    probes: Option<usize>,
    /// True if every item is scored in f32 instead of probing lists (exact search).
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<bool>)]
    exact: bool,
    /// Item columns to return, each once.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<Vec<String>>, max_items = 256)]
    columns: List<String, COLUMNS_MAX>,
    /// Constants of the value model to override.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<std::collections::BTreeMap<String, f32>>)]
    constants: Named<Finite, CONSTANTS_MAX>,
    /// Timeout after which the answer is useless, in milliseconds; default: the server's.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 600_000)]
    timeout_ms: Option<u64>,
    /// Priority class in the queue.
    #[serde(default, deserialize_with = "priority")]
    #[schema(value_type = Option<PriorityName>)]
    priority: Priority,
    /// True if the answer describes each step of the pass.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<bool>)]
    explain: bool,
    /// Behaviour if rows of a remote table do not arrive in time.
    #[serde(default, deserialize_with = "on_degraded")]
    #[schema(value_type = Option<OnDegradedName>)]
    on_degraded: request::OnDegraded,
    /// JSON layout of the items.
    #[serde(default, deserialize_with = "format")]
    #[schema(value_type = Option<FormatName>)]
    format: FormatName,
    /// Requests pages of `k` results: `""` for the first, then the cursor of the previous answer with all other fields unchanged.
    #[serde(default)]
    #[schema(max_length = 256)]
    cursor: Option<String>,
}

pub(super) fn priority<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Priority, D::Error> {
    named(deserializer, PriorityName::deserialize)
}

pub(super) fn on_degraded<'de, D: Deserializer<'de>>(deserializer: D) -> Result<request::OnDegraded, D::Error> {
    named(deserializer, OnDegradedName::deserialize)
}

fn format<'de, D: Deserializer<'de>>(deserializer: D) -> Result<FormatName, D::Error> {
    named(deserializer, FormatName::deserialize)
}

/// Parses one of several names; null selects the default. Reads a text first, because serde_json reports a number in place of a
/// name as invalid JSON.
fn named<'de, D: Deserializer<'de>, T: Default>(
    deserializer: D,
    read: impl FnOnce(StringDeserializer<D::Error>) -> Result<T, D::Error>,
) -> Result<T, D::Error> {
    Option::<String>::deserialize(deserializer)?.map_or_else(|| Ok(T::default()), |name| read(name.into_deserializer()))
}

fn k<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_else(default_k))
}

fn default_k() -> usize {
    request::Retrieve::K_DEFAULT
}

/// Scores for items that the caller names.
#[derive(Debug, serde::Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RankRequest {
    /// Same as the field of this name in a retrieval.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    features: Option<FeatureValues>,
    /// Same as the field of this name in a retrieval.
    #[serde(default)]
    #[schema(value_type = Option<VectorForm>)]
    vector: Option<Vector<DIMENSION_MAX>>,
    /// Items to score.
    #[schema(value_type = Vec<i64>, min_items = 1, max_items = 200_000)]
    items: List<i64, CANDIDATES_MAX>,
    /// Same as the field of this name in a retrieval.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<Vec<String>>, max_items = 256)]
    columns: List<String, COLUMNS_MAX>,
    /// Same as the field of this name in a retrieval.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<std::collections::BTreeMap<String, f32>>)]
    constants: Named<Finite, CONSTANTS_MAX>,
    /// Same as the field of this name in a retrieval.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 600_000)]
    timeout_ms: Option<u64>,
    /// Same as the field of this name in a retrieval.
    #[serde(default, deserialize_with = "priority")]
    #[schema(value_type = Option<PriorityName>)]
    priority: Priority,
    /// Same as the field of this name in a retrieval.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<bool>)]
    explain: bool,
    /// Same as the field of this name in a retrieval.
    #[serde(default, deserialize_with = "on_degraded")]
    #[schema(value_type = Option<OnDegradedName>)]
    on_degraded: request::OnDegraded,
    /// Same as the field of this name in a retrieval.
    #[serde(default, deserialize_with = "format")]
    #[schema(value_type = Option<FormatName>)]
    format: FormatName,
}

/// Computes a query embedding from features.
#[derive(Debug, serde::Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EmbedRequest {
    /// Same as the field of this name in a retrieval.
    #[schema(value_type = Object)]
    features: FeatureValues,
    /// Same as the field of this name in a retrieval.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 600_000)]
    timeout_ms: Option<u64>,
    /// Same as the field of this name in a retrieval.
    #[serde(default, deserialize_with = "priority")]
    #[schema(value_type = Option<PriorityName>)]
    priority: Priority,
    /// Same as the field of this name in a retrieval.
    #[serde(default, deserialize_with = "on_degraded")]
    #[schema(value_type = Option<OnDegradedName>)]
    on_degraded: request::OnDegraded,
}

/// Fields of a table row, in place of the fields shared by all rows.
#[derive(Debug, Default)]
pub(super) struct RequestRow {
    pub(super) features: Option<FeatureValues>,
    pub(super) vector: Option<Vector<DIMENSION_MAX>>,
    pub(super) filter: Option<String>,
    pub(super) exclude: Option<List<i64, EXCLUDE_MAX>>,
    pub(super) k: Option<usize>,
}

impl RetrieveRequest {
    /// Returns whether the request has a user: features or a vector.
    pub(super) fn has_user(&self) -> bool {
        self.features.is_some() || self.vector.is_some()
    }

    /// Returns the request of a row.
    pub(super) fn with(&self, row: RequestRow) -> Self {
        let RequestRow { features, vector, filter, exclude, k } = row;
        let mut request = RetrieveRequest { features, vector, ..self.clone() };
        request.filter = filter.unwrap_or(request.filter);
        request.exclude = exclude.unwrap_or(request.exclude);
        request.k = k.unwrap_or(request.k);
        request
    }

    pub(super) fn typed(self) -> Result<(request::Retrieve, CallOptions, Shape)> {
        between("k", Some(self.k as u64), RESULTS_MAX)?;
        between("candidates", self.candidates.map(|n| n as u64), CANDIDATES_MAX)?;
        between("probes", self.probes.map(|n| n as u64), LISTS_MAX)?;
        if let Some(candidates) = self.candidates.filter(|n| *n < self.k) {
            return Err(Error::invalid(format!(
                "field `candidates`: got {candidates}, expected at least k = {}",
                self.k
            )));
        }
        // `k` is only the size of a page; whether the page's offset is within the candidates of a query is not checked here.
        if let Some((name, candidates)) = self.query_candidates.0.iter().find(|(_, candidates)| **candidates < self.k) {
            return Err(Error::invalid(format!(
                "field `query_candidates.{name}`: got {candidates}, expected k = {} to {CANDIDATES_MAX}",
                self.k
            )));
        }
        let reading = reading(self.columns, self.constants, self.explain, self.on_degraded)?;
        let retrieve = request::Retrieve {
            user: user(self.features, self.vector)?,
            filter: self.filter,
            exclude: items(self.exclude),
            k: self.k,
            least: None,
            candidates: self.candidates,
            query_candidates: self.query_candidates.0.into_iter().collect(),
            recall: self.recall,
            probes: self.probes,
            exact: self.exact,
            reading,
        };
        let shape = Shape { is_table: self.format == FormatName::Columns, cursor: self.cursor };
        Ok((retrieve, terms(self.timeout_ms, self.priority)?, shape))
    }
}

impl RankRequest {
    pub(super) fn typed(self) -> Result<(request::Rank, CallOptions, Shape)> {
        between("items", Some(self.items.0.len() as u64), CANDIDATES_MAX)?;
        let reading = reading(self.columns, self.constants, self.explain, self.on_degraded)?;
        let rank = request::Rank { user: user(self.features, self.vector)?, items: items(self.items), reading };
        let shape = Shape { is_table: self.format == FormatName::Columns, cursor: None };
        Ok((rank, terms(self.timeout_ms, self.priority)?, shape))
    }
}

impl EmbedRequest {
    pub(super) fn typed(self) -> Result<(request::Embed, CallOptions)> {
        let (features, on_degraded) = (features(self.features), self.on_degraded);
        let embed = request::Embed { features, on_degraded, whole: false };
        Ok((embed, terms(self.timeout_ms, self.priority)?))
    }
}

fn user(given: Option<FeatureValues>, vector: Option<Vector<DIMENSION_MAX>>) -> Result<User> {
    match (given, vector) {
        (Some(given), None) => Ok(User::Features(features(given))),
        (None, Some(Vector(vector))) => Ok(User::Vector(vector)),
        (Some(_), Some(_)) => Err(Error::invalid("fields `features` and `vector`: got both, expected one of them")),
        (None, None) => Err(Error::invalid("fields `features` and `vector`: got neither, expected one of them")),
    }
}

fn features(given: FeatureValues) -> Features {
    given.0.into_iter().filter_map(|(name, value)| Some((name, value?.0))).collect()
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

pub(super) fn terms(timeout_ms: Option<u64>, priority: Priority) -> Result<CallOptions> {
    between("timeout_ms", timeout_ms, TIMEOUT_MS_MAX as usize)?;
    Ok(CallOptions { timeout: timeout_ms.map(Duration::from_millis), priority, ..CallOptions::default() })
}

fn between(field: &str, value: Option<u64>, most: usize) -> Result<()> {
    match value {
        Some(value) if value == 0 || value > most as u64 => {
            Err(Error::invalid(format!("field `{field}`: got {value}, expected 1 to {most}")))
        }
        _ => Ok(()),
    }
}
