//! Typed requests and answers: the interface between the serving pass, the engine and their callers.
//!
//! These types are independent of JSON, which the crate `api` reads and writes. An [`Answer`] is columnar, one vector per
//! field, so that a hundred thousand results take a handful of allocations. Messages between machines use these types as
//! they are, in a binary format. Messages omit slots, because a slot is valid within one view only.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::packed;
use crate::quota::Flow;
use crate::units::{ItemId, Slot};

/// Identifiers that connect log lines and traces to a request. Calls to other processes carry them, and those processes
/// log them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// Id of the request (`x-request-id`).
    pub id: Option<Arc<str>>,
    /// Trace context: the trace and the caller's span (`traceparent`).
    pub trace: Option<Arc<str>>,
}

impl Origin {
    /// Returns the origin for a call that serves several requests: the first one with a recorded trace, else the first.
    pub fn of_several<'a>(mut origins: impl Iterator<Item = &'a Origin>) -> Self {
        let first = origins.next();
        let recorded = first.into_iter().chain(origins).find(|origin| origin.is_recorded());
        recorded.or(first).cloned().unwrap_or_default()
    }

    /// Returns true if the trace flags have the bit `recorded`. The flags are two hexadecimal digits, at the same
    /// offset in all versions of the `traceparent` header.
    fn is_recorded(&self) -> bool {
        let flags = self.trace.as_ref().and_then(|trace| u8::from_str_radix(trace.get(53..55)?, 16).ok());
        flags.is_some_and(|flags| flags & 1 == 1)
    }
}

/// Behaviour if rows of a remote table cannot be read in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum OnDegraded {
    /// Answers with an error.
    #[default]
    Fail,
    /// Uses the default row of each table and reports it in the answer.
    DefaultRows,
}

/// Priority class in the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Priority {
    /// A client waits for the answer.
    #[default]
    Interactive,
    /// Runs on capacity that interactive requests do not use.
    Batch,
}

/// Deadline, priority and caller of a submitted request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallOptions {
    /// Time for which the answer is useful; `None` means the server's default.
    pub timeout: Option<Duration>,
    /// Priority class in the queue.
    pub priority: Priority,
    /// Caller that is charged: queued callers share workers and memory evenly.
    pub flow: Flow,
    /// Marks background work that no caller waits for. A background request ends without an answer if it would cause
    /// the rejection of a caller's request.
    pub is_background: bool,
}

impl CallOptions {
    /// Returns the options of background work that may wait and run for `timeout`.
    pub fn background(timeout: Duration) -> Self {
        CallOptions { timeout: Some(timeout), priority: Priority::Batch, is_background: true, ..CallOptions::default() }
    }
}

/// Values of one feature of a request. The model's feature declares their meaning: integers may be ids, categories or numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Values {
    /// Integers.
    Integers(#[serde(with = "packed::numbers")] Vec<i64>),
    /// Numbers, at least one of them not an integer.
    Numbers(#[serde(with = "packed::numbers")] Vec<f32>),
    /// Strings.
    Texts(#[serde(with = "packed::texts")] Vec<String>),
    /// Ids with one weight each.
    Weighted {
        /// Ids.
        #[serde(with = "packed::numbers")]
        ids: Vec<i64>,
        /// Weights, one per id.
        #[serde(with = "packed::numbers")]
        weights: Vec<f32>,
    },
}

impl Values {
    /// Returns the values as numbers; `None` for strings and for ids with weights.
    pub fn into_numbers(self) -> Option<Vec<f32>> {
        match self {
            Values::Numbers(numbers) => Some(numbers),
            Values::Integers(integers) => Some(integers.into_iter().map(|x| x as f32).collect()),
            Values::Texts(_) | Values::Weighted { .. } => None,
        }
    }

    /// Adds one weight per id.
    ///
    /// # Errors
    /// `Invalid` if the values are not integers, or if the number of weights differs.
    pub fn weighted(self, weights: Vec<f32>) -> Result<Self> {
        match self {
            Values::Integers(ids) if ids.len() == weights.len() => Ok(Values::Weighted { ids, weights }),
            Values::Integers(ids) => Err(Error::invalid(format!(
                "got {} weights, expected one for each of {} values",
                weights.len(),
                ids.len()
            ))),
            // An empty list is parsed as `Numbers`, because it has no entry that shows a type.
            Values::Numbers(none) if none.is_empty() && weights.is_empty() => Ok(Values::Integers(Vec::new())),
            _ => Err(Error::invalid("got weights for values that are not integers")),
        }
    }
}

/// Values by feature name.
pub type Features = BTreeMap<String, Values>;

/// The user of a request: features for the user tower, or the query embedding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum User {
    /// Input of the user tower.
    Features(Features),
    /// Query embedding, `[D]`; `[Tq, D]` for a model with several queries.
    Vector(#[serde(with = "packed::numbers")] Vec<f32>),
    /// Output of the user tower that another process computed.
    Embedded(EmbeddedUser),
}

/// Outputs of the user tower that later steps read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EmbeddedUser {
    /// Query embedding, `[D]`; `[Tq, D]` for a model with several queries.
    #[serde(with = "packed::numbers")]
    pub query: Vec<f32>,
    /// User tensors that the reranker reads, in its input order. An entry is empty if that input is the query itself; the list is
    /// empty if the reranker reads only the query.
    #[serde(with = "packed::lists")]
    pub tensors: Vec<Vec<f32>>,
    /// Largest number of the features, for the error of an output that is not finite.
    pub largest: Option<LargestNumber>,
}

/// Number of a request with the largest magnitude among those outside of 0 to 1. Graphs are validated at publish for
/// numbers between 0 and 1: if one of those makes an output infinite, the model is to blame, not the request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LargestNumber {
    /// Field or feature of the request, as errors name it.
    pub place: String,
    /// The number.
    pub number: f32,
}

impl LargestNumber {
    /// Returns the number with the largest magnitude outside of 0 to 1.
    pub fn of(numbers: &[f32], place: impl FnOnce() -> String) -> Option<Self> {
        let outside = numbers.iter().copied().filter(|number| !(0.0..=1.0).contains(number));
        let number = outside.max_by(|x, y| x.abs().total_cmp(&y.abs()))?;
        Some(LargestNumber { place: place(), number })
    }

    /// Returns the largest component of a query from the caller if it is above 1: smaller ones are validated at publish.
    pub fn of_query(vector: &[f32]) -> Option<Self> {
        LargestNumber::of(vector, || "field `vector`".into()).filter(|largest| largest.number.abs() > 1.0)
    }

    /// Returns the error of a graph whose output is not finite for a request with this number; `what` describes it.
    pub fn not_finite(&self, what: &str) -> Error {
        let LargestNumber { place, number } = self;
        let expected = match number.abs() > NUMBER_MAX {
            true => format!("at most {NUMBER_MAX:e}"),
            false => "numbers for which it is finite".into(),
        };
        Error::invalid(format!("{place}: got the number {number:e}: {what}, expected {expected}"))
    }

    /// Returns whether graphs are not expected to be defined for the number.
    pub fn is_huge(&self) -> bool {
        self.number.abs() > NUMBER_MAX
    }
}

/// Largest number in a request for which a model is expected to be defined: beyond it, f32 overflows within a layer or
/// two.
const NUMBER_MAX: f32 = 4_294_967_296.0;

impl User {
    /// Returns the number of an embedded user or of a query that may have made an output not finite.
    pub fn largest(&self) -> Option<LargestNumber> {
        match self {
            User::Features(_) => None,
            User::Vector(vector) => LargestNumber::of_query(vector),
            User::Embedded(user) => user.largest.clone(),
        }
    }
}

/// Version of a model that a call names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionSelector<'a> {
    /// The active version.
    Active,
    /// The version with this number.
    Version(u64),
    /// The version that a label points to.
    Label(&'a str),
}

/// Retrieves the best items for a user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Retrieve {
    /// The user.
    pub user: User,
    /// Filter expression that selects eligible items; see `docs/reference/filter-language.md`. An empty expression
    /// selects all items.
    pub filter: String,
    /// Items that must not be returned.
    #[serde(with = "packed::numbers")]
    pub exclude: Vec<ItemId>,
    /// Number of results, K.
    pub k: usize,
    /// Minimum number of results: a search with fewer results continues while unscanned lists may hold eligible items.
    /// `None` means `k`. All pages of a ranking set the same number, so that they search the same lists.
    pub least: Option<usize>,
    /// Number of reranked candidates, K0; the model's default if `None`.
    pub candidates: Option<usize>,
    /// K0 per query name, for models with several queries; takes precedence over `candidates`.
    pub query_candidates: BTreeMap<String, usize>,
    /// Recall target: share of the true candidates to find; the model's default if `None`.
    pub recall: Option<f64>,
    /// Number of probed lists, nprobe (P), in place of a recall target.
    pub probes: Option<usize>,
    /// Exact search: scores every item in f32 instead of probing lists.
    pub exact: bool,
    /// Output options.
    pub reading: Reading,
}

/// Scores the items that the client names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rank {
    /// The user.
    pub user: User,
    /// The items to score.
    #[serde(with = "packed::numbers")]
    pub items: Vec<ItemId>,
    /// Output options.
    pub reading: Reading,
}

/// Computes the query embedding of a user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Embed {
    /// Features of the user.
    pub features: Features,
    /// Behaviour if rows of a remote table cannot be read in time.
    pub on_degraded: OnDegraded,
    /// Also returns the other user tensors that later steps read, not only the query.
    pub whole: bool,
}

/// Selects one shard's items among the best candidates of all shards: steps 3 to 8 of the pass. An unsharded version counts as
/// one shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Select {
    /// The retrieval, the same for all shards.
    pub retrieve: Retrieve,
    /// Requests as many items as the merge may need at most, instead of the number that most likely suffices.
    pub all: bool,
    /// Probes more lists. Set in a second call if the lists that were probed on all shards hold too few eligible items
    /// for the results.
    pub further: bool,
    /// Also ranks the selected items in the same call if few of them are likely to be ranked in vain
    /// ([`RankedAhead`]). If most of these items remain candidates of all shards, no [`Rerank`] call is needed.
    pub ahead: bool,
}

/// Ranks one shard's items among the chosen candidates: steps 9 to 11 of a retrieval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rerank {
    /// The user.
    pub user: User,
    /// Items with their retrieval scores, per query of the user. Items that were deleted after their selection are skipped.
    #[serde(with = "packed::scored")]
    pub candidates: Vec<Vec<(ItemId, f32)>>,
    /// Number of results, K.
    pub k: usize,
    /// Output options.
    pub reading: Reading,
}

/// Output options of [`Retrieve`] and [`Rank`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// Item columns to return.
    #[serde(with = "packed::texts")]
    pub columns: Vec<String>,
    /// Value-model constants to override.
    pub constants: BTreeMap<String, f32>,
    /// Returns a report of each step.
    pub explain: bool,
    /// Behaviour if rows of a remote table cannot be read in time.
    pub on_degraded: OnDegraded,
}

/// Any request to a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// Best items of a user.
    Retrieve(Retrieve),
    /// Scores of named items.
    Rank(Rank),
    /// Query embedding of a user.
    Embed(Embed),
    /// Candidates of one shard.
    Select(Box<Select>),
    /// Results of one shard.
    Rerank(Rerank),
}

impl Retrieve {
    /// Default number of results.
    pub const K_DEFAULT: usize = 20;

    /// Creates a retrieval for a user, with defaults for all other fields.
    pub fn of(user: User) -> Self {
        Retrieve {
            user,
            filter: String::new(),
            exclude: Vec::new(),
            k: Retrieve::K_DEFAULT,
            least: None,
            candidates: None,
            query_candidates: BTreeMap::new(),
            recall: None,
            probes: None,
            exact: false,
            reading: Reading::default(),
        }
    }

    /// Returns the minimum number of results, below which a search continues while unscanned lists may hold eligible
    /// items.
    pub fn least(&self) -> usize {
        self.least.map_or(self.k, |least| least.max(self.k))
    }
}

/// Report of one step of the pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Name of the step, as `crates/serving/src/pass` lists them.
    pub name: &'static str,
    /// Time in microseconds.
    pub micros: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Items (or ids, or lists) processed.
    pub items: u64,
}

/// Choice of the number of probed lists.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probes {
    /// Number of lists to probe (nprobe). If the passing items of a filter lie in low-ranked lists, more lists may be
    /// probed.
    pub probes: usize,
    /// Recall target of the request or the model, if there was one.
    pub target: Option<f64>,
    /// Recall measured at this nprobe when the version was published; `None` without a measurement.
    pub estimate: Option<f64>,
    /// nprobe of a query that is out of the distribution of the calibration queries, if that nprobe differs.
    pub ood_probes: Option<usize>,
}

/// Report of how an answer was computed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Explain {
    /// The steps in their order.
    pub steps: Vec<StepReport>,
    /// How eligible items were found: `all`, `none`, `few` (listed before the search), `words` (filter bitmaps of the probed
    /// lists) or `exact` (every item is tested); `""` without a search.
    pub route: &'static str,
    /// The filter in canonical form.
    pub filter: String,
    /// Estimated share of items that pass the filter.
    pub pass_rate: f64,
    /// The chosen nprobe and its reason, if the search used inverted lists.
    pub probes: Option<Probes>,
    /// Number of probed lists.
    pub probed: u64,
    /// Items in the probed lists.
    pub scanned: u64,
    /// Scanned items that passed the filter bitmap.
    pub survivors: u64,
    /// Candidates left after exact verification of the filter.
    pub candidates: u64,
    /// Items returned.
    pub returned: u64,
    /// Name of the CPU kernels in use.
    pub kernel: &'static str,
    /// Difference between the request and what the GPU did, with the reason: the CPU answered instead, or another row
    /// format was scanned.
    pub note: Option<String>,
    /// One report per query if the user has several queries. In that case all other counts are sums; `candidates`
    /// counts the merged candidates.
    pub queries: Vec<QueryReport>,
}

/// Report of one of several queries of a user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueryReport {
    /// Name of the query in the model.
    pub name: String,
    /// Number of probed lists.
    pub probed: u64,
    /// Items in the probed lists.
    pub scanned: u64,
    /// Scanned items that passed the filter bitmap.
    pub survivors: u64,
    /// Candidates left after exact verification of the filter.
    pub candidates: u64,
}

/// The best items, best first: field `n` of each vector belongs to the same item.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ranked {
    /// Slots of the items in the view that answered, `[K]`; columns are read by slot.
    #[serde(skip)]
    pub slots: Vec<Slot>,
    /// Item ids, `[K]`.
    #[serde(with = "packed::numbers")]
    pub ids: Vec<ItemId>,
    /// Value-model scores, `[K]`, by which the items are ordered; ties by id.
    #[serde(with = "packed::numbers")]
    pub scores: Vec<f32>,
    /// Retrieval scores, `[K]`.
    #[serde(with = "packed::numbers")]
    pub similarities: Vec<f32>,
    /// Task scores, grouped by task, `[T, K]`.
    #[serde(with = "packed::numbers")]
    pub tasks: Vec<f32>,
    /// For a [`Rank`]: requested items that the model does not have.
    #[serde(with = "packed::numbers")]
    pub unknown: Vec<ItemId>,
    /// Number of candidates that are omitted because a task score is NaN.
    pub undefined: usize,
}

/// Answer of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The requested result.
    pub content: Content,
    /// Number of ids of remote tables that were replaced by default rows.
    pub degraded_rows: u64,
    /// Report, if the request sets `explain`.
    pub explain: Option<Explain>,
}

/// Result of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Content {
    /// Answer to a [`Retrieve`] or a [`Rank`].
    Items(Ranked),
    /// Answer to an [`Embed`]; `tensors` is empty unless requested.
    Embedding(EmbeddedUser),
    /// Answer to a [`Select`].
    Selected(Box<ShardSelected>),
}

/// One shard's items among the best candidates of all shards.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ShardSelected {
    /// Selected items, per query of the user.
    pub queries: Vec<Selected>,
    /// Ranked items, if the shard also ranked them in this call.
    pub ahead: Option<RankedAhead>,
}

/// A shard's ranking of its own candidates, computed in the call that selects them (steps 9 to 11), when it is not
/// known yet which of these candidates are also candidates of all shards.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankedAhead {
    /// The best items by value, best first.
    pub ranked: Ranked,
    /// True if `ranked` holds all items that were scored.
    pub is_all: bool,
    /// Last candidate that was scored. Exactly the candidates with better retrieval scores were scored too (ties by id).
    pub last: (ItemId, f32),
}

/// One shard's items among the best candidates of a query, in selection order, best first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Selected {
    /// Ids of the items.
    #[serde(with = "packed::numbers")]
    pub ids: Vec<ItemId>,
    /// Scores by which the items were selected: of the quantized vectors, or of the rows if these were read directly.
    /// Ties by id.
    #[serde(with = "packed::numbers")]
    pub codes: Vec<f32>,
    /// Retrieval scores of the items.
    #[serde(with = "packed::numbers")]
    pub scores: Vec<f32>,
    /// True if the list has all items that the shard examined. If false, every omitted item scores worse than the last
    /// listed one.
    pub is_all: bool,
    /// True if the shard could find more items by probing more lists.
    pub may_go_further: bool,
    /// Number of items that all shards select together.
    pub selected: usize,
    /// Number of selected items that become candidates, K0: the best by retrieval score.
    pub candidates: usize,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn weights_go_with_as_many_ids() {
        let ids = Values::Integers(vec![3, 4]);
        let weighted = Values::Weighted { ids: vec![3, 4], weights: vec![0.5, 2.0] };
        assert_eq!(ids.clone().weighted(vec![0.5, 2.0]).unwrap(), weighted);
        assert_eq!(Values::Numbers(Vec::new()).weighted(Vec::new()).unwrap(), Values::Integers(Vec::new()));
        for (values, weights, expected) in [
            (ids, vec![1.0], "got 1 weights, expected one for each of 2 values"),
            (Values::Texts(vec!["a".into()]), vec![1.0], "values that are not integers"),
            (Values::Numbers(vec![1.0]), vec![1.0], "values that are not integers"),
            (Values::Numbers(Vec::new()), vec![1.0], "values that are not integers"),
        ] {
            let error = values.weighted(weights).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
