//! What is asked of a model and what it answers, typed: the language of the pass, the engine, and whatever calls them.
//!
//! Nothing here knows JSON: `http` reads and writes that. A request is any of the three [`Request`]s; an [`Answer`] is
//! columnar, one vector a field, so that a hundred thousand results are a handful of allocations. What goes between machines can be
//! written in a binary format as it is, without the slots, which mean something in one view alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::packed;
use crate::units::{ItemId, Slot};

/// The names that logs and traces have for what a request is made for. Calls to other processes for it carry both, which write them
/// down beside their own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The id of the request (`x-request-id`).
    pub id: Option<Arc<str>>,
    /// The trace that it belongs to, and the caller's span of it (`traceparent`).
    pub trace: Option<Arc<str>>,
}

impl Origin {
    /// The origin of a call that serves several requests, which can name one: the first that is recorded, else the first.
    pub fn of_several<'a>(mut origins: impl Iterator<Item = &'a Origin>) -> Self {
        let first = origins.next();
        let recorded = first.into_iter().chain(origins).find(|origin| origin.is_recorded());
        recorded.or(first).cloned().unwrap_or_default()
    }

    /// True where the flags of the trace say that it is recorded: two hexadecimal digits, in all versions of the header at one place.
    fn is_recorded(&self) -> bool {
        let flags = self.trace.as_ref().and_then(|trace| u8::from_str_radix(trace.get(53..55)?, 16).ok());
        flags.is_some_and(|flags| flags & 1 == 1)
    }
}

/// What to do where rows of a remote table cannot be had in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum OnDegraded {
    /// Answer with an error.
    #[default]
    Fail,
    /// Go on with each table's default row and say so in the answer.
    DefaultRows,
}

/// Who goes first where requests wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Priority {
    /// Somebody is waiting.
    #[default]
    Interactive,
    /// Takes what interactive requests leave.
    Batch,
}

/// The values of one feature as a caller brings them. What they mean, the model's features say: integers may be ids,
/// categories or numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Values {
    /// Whole numbers.
    Integers(#[serde(with = "packed::numbers")] Vec<i64>),
    /// Numbers, one of them at least not whole.
    Numbers(#[serde(with = "packed::numbers")] Vec<f32>),
    /// Texts.
    Texts(#[serde(with = "packed::texts")] Vec<String>),
    /// Ids with a weight each.
    Weighted {
        /// The ids.
        #[serde(with = "packed::numbers")]
        ids: Vec<i64>,
        /// As many weights.
        #[serde(with = "packed::numbers")]
        weights: Vec<f32>,
    },
}

impl Values {
    /// The values as numbers, `None` of texts and of ids with weights.
    pub fn into_numbers(self) -> Option<Vec<f32>> {
        match self {
            Values::Numbers(numbers) => Some(numbers),
            Values::Integers(integers) => Some(integers.into_iter().map(|x| x as f32).collect()),
            Values::Texts(_) | Values::Weighted { .. } => None,
        }
    }

    /// Ids with a weight each.
    ///
    /// # Errors
    /// `Invalid` where they are no ids, or not as many as the weights.
    pub fn weighted(self, weights: Vec<f32>) -> Result<Self> {
        match self {
            Values::Integers(ids) if ids.len() == weights.len() => Ok(Values::Weighted { ids, weights }),
            Values::Integers(ids) => Err(Error::invalid(format!(
                "got {} weights, expected one for each of {} values",
                weights.len(),
                ids.len()
            ))),
            // A list of nothing has the type of nothing.
            Values::Numbers(none) if none.is_empty() && weights.is_empty() => Ok(Values::Integers(Vec::new())),
            _ => Err(Error::invalid("got weights, but values that are no integers")),
        }
    }
}

/// Values by the name of their feature.
pub type Features = BTreeMap<String, Values>;

/// Who asks: features for the user tower, or the query embedding itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum User {
    /// Goes through the user tower.
    Features(Features),
    /// `[D]`; of a model of several queries `[Tq, D]`.
    Vector(#[serde(with = "packed::numbers")] Vec<f32>),
    /// What the user tower made of features before, somewhere else.
    Embedded(EmbeddedUser),
}

/// What the steps after the user tower read of a user.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EmbeddedUser {
    /// The query, `[D]`; of a model of several queries `[Tq, D]`.
    #[serde(with = "packed::numbers")]
    pub query: Vec<f32>,
    /// The tensors of the user that the reranker reads, in its order, each empty where it is the query; none at all where it reads
    /// no others.
    #[serde(with = "packed::lists")]
    pub tensors: Vec<Vec<f32>>,
}

/// Version of a model that a call names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which<'a> {
    /// The active version.
    Active,
    /// The version with this number.
    Version(u64),
    /// The version that a label points to.
    Label(&'a str),
}

/// Asks for the best items of a user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Retrieve {
    /// Who asks.
    pub user: User,
    /// Which items are eligible; see `docs/reference/filter-language.md`. Empty means all.
    pub filter: String,
    /// Items that are not to be returned.
    #[serde(with = "packed::numbers")]
    pub exclude: Vec<ItemId>,
    /// Results, K.
    pub k: usize,
    /// Candidates that are reranked, K0; the model's default where it is not given.
    pub candidates: Option<usize>,
    /// The same of some queries of a user by their names, where the model has several; they go before `candidates`.
    pub query_candidates: BTreeMap<String, usize>,
    /// The share of the true candidates that is to be found; the model's default where it is not given.
    pub recall: Option<f64>,
    /// Lists that are probed, P, in place of a recall.
    pub probes: Option<usize>,
    /// Looks at every item in f32 in place of probing.
    pub exact: bool,
    /// How candidates are read and told of.
    pub reading: Reading,
}

/// Asks for the scores of items that the caller names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rank {
    /// Who asks.
    pub user: User,
    /// The items to score.
    #[serde(with = "packed::numbers")]
    pub items: Vec<ItemId>,
    /// How they are read and told of.
    pub reading: Reading,
}

/// Asks for the query embedding of features.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Embed {
    /// Who asks.
    pub features: Features,
    /// What to do where rows of a remote table cannot be had in time.
    pub on_degraded: OnDegraded,
    /// Asks for all that later steps read of the user, not for the query alone.
    pub whole: bool,
}

/// Asks one shard for what it has among the best candidates of all shards: steps 3 to 8 of a retrieval. Of a version that was
/// not cut, it asks the only one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Select {
    /// The retrieval, as all shards are asked.
    pub retrieve: Retrieve,
    /// Asks for as many as all shards together may need of this one, in place of as many as they are likely to.
    pub all: bool,
    /// Probes on where it finds too few: the lists that all shards were asked for hold fewer items than results.
    pub further: bool,
    /// Ranks what it finds at once, where that is worth its while ([`RankedAhead`]): most of it will count, and then nobody has to ask for
    /// a [`Rerank`].
    pub ahead: bool,
}

/// Asks one shard for the best of its items among candidates that are chosen: steps 9 to 11 of a retrieval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rerank {
    /// Who asks.
    pub user: User,
    /// Of each query of the user the items with their retrieval scores. Those that are gone meanwhile drop out.
    #[serde(with = "packed::scored")]
    pub candidates: Vec<Vec<(ItemId, f32)>>,
    /// Results, K.
    pub k: usize,
    /// How they are read and told of.
    pub reading: Reading,
}

/// How items are read and told of: shared by [`Retrieve`] and [`Rank`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// Item columns to return.
    #[serde(with = "packed::texts")]
    pub columns: Vec<String>,
    /// Constants of the value model to override.
    pub constants: BTreeMap<String, f32>,
    /// Tells what each step did.
    pub explain: bool,
    /// What to do where rows of a remote table cannot be had in time.
    pub on_degraded: OnDegraded,
}

/// Anything that can be asked of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// The best items of a user.
    Retrieve(Retrieve),
    /// The scores of given items.
    Rank(Rank),
    /// A query embedding.
    Embed(Embed),
    /// A shard's part of the candidates.
    Select(Box<Select>),
    /// A shard's part of the results.
    Rerank(Rerank),
}

impl Retrieve {
    /// Results of a request that does not say.
    pub const K_DEFAULT: usize = 20;

    /// A retrieval for a user, all else at its default.
    pub fn of(user: User) -> Self {
        Retrieve {
            user,
            filter: String::new(),
            exclude: Vec::new(),
            k: Retrieve::K_DEFAULT,
            candidates: None,
            query_candidates: BTreeMap::new(),
            recall: None,
            probes: None,
            exact: false,
            reading: Reading::default(),
        }
    }
}

/// What a step of the pass did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// The step's name, as `crates/serving/src/pass` lists them.
    pub name: &'static str,
    /// Time in microseconds.
    pub micros: u64,
    /// Bytes that it read.
    pub bytes: u64,
    /// Items (or ids, or lists) that it handled.
    pub items: u64,
}

/// How the number of lists came about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probes {
    /// Lists to probe; more where a filter goes against their order.
    pub probes: usize,
    /// The recall that was asked for, where one was.
    pub target: Option<f64>,
    /// The recall that was measured there when the version was published, where it was.
    pub estimate: Option<f64>,
}

/// How an answer came about.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Explain {
    /// The steps in their order.
    pub steps: Vec<StepReport>,
    /// How eligible items were found: `all`, `none`, `few`, `words` or `exact`; `""` where none were looked for.
    pub route: &'static str,
    /// The filter in canonical form.
    pub filter: String,
    /// Estimated share of items that pass the filter.
    pub pass_rate: f64,
    /// Of a search by lists: how many were to be probed, and why.
    pub probes: Option<Probes>,
    /// Lists that were probed.
    pub probed: u64,
    /// Items in the probed lists.
    pub scanned: u64,
    /// Items of them that passed the filter's words.
    pub survivors: u64,
    /// Candidates that were left after verification.
    pub candidates: u64,
    /// Items returned.
    pub returned: u64,
    /// The kernels in use.
    pub kernel: &'static str,
    /// What a card did otherwise than it was asked, and why: nothing at all, for the CPU answered, or a scan of other rows.
    pub note: Option<String>,
    /// Where a user has several queries, each of them; the numbers above are then their sums, and `candidates` those of all
    /// together.
    pub queries: Vec<QueryReport>,
}

/// What one of several queries of a user found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueryReport {
    /// Its name in the model.
    pub name: String,
    /// Lists that were probed.
    pub probed: u64,
    /// Items in the probed lists.
    pub scanned: u64,
    /// Items of them that passed the filter's words.
    pub survivors: u64,
    /// Candidates that were left after verification.
    pub candidates: u64,
}

/// The best items, best first: field `n` of each vector belongs to the same item.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ranked {
    /// Where the items lie in the view that answered, `[K]`; columns are read there.
    #[serde(skip)]
    pub slots: Vec<Slot>,
    /// `[K]`
    #[serde(with = "packed::numbers")]
    pub ids: Vec<ItemId>,
    /// The value model's scores, by which items are ordered; equal ones by id, `[K]`.
    #[serde(with = "packed::numbers")]
    pub scores: Vec<f32>,
    /// The retrieval scores, `[K]`.
    #[serde(with = "packed::numbers")]
    pub similarities: Vec<f32>,
    /// Task scores, task after task, `[T, K]`.
    #[serde(with = "packed::numbers")]
    pub tasks: Vec<f32>,
    /// Of a [`Rank`]: items that the model does not hold.
    #[serde(with = "packed::numbers")]
    pub unknown: Vec<ItemId>,
}

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// What was asked for.
    pub content: Content,
    /// Ids of remote tables that were answered with default rows.
    pub degraded_rows: u64,
    /// Given where it was asked for.
    pub explain: Option<Explain>,
}

/// What an answer holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Content {
    /// Of a [`Retrieve`] or a [`Rank`].
    Items(Ranked),
    /// Of an [`Embed`]; without the tensors where it did not ask for them.
    Embedding(EmbeddedUser),
    /// Of a [`Select`].
    Selected(Box<ShardSelected>),
}

/// What one shard has among the best candidates of all.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ShardSelected {
    /// Of each query of the user.
    pub queries: Vec<Selected>,
    /// The results among them, where the shard ranked ahead.
    pub ahead: Option<RankedAhead>,
}

/// The results of a shard among its candidates before it is known which of these are candidates of all shards: steps 9 to 11 of a
/// retrieval, done in the call that selects.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankedAhead {
    /// The best by value, best first.
    pub ranked: Ranked,
    /// True where all that were valued are among them.
    pub is_all: bool,
    /// The last candidate that was valued: those with better retrieval scores were, equal ones by id.
    pub last: (ItemId, f32),
}

/// What one shard has among the best candidates of a query, in the order in which they were selected, the best first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Selected {
    /// The items.
    #[serde(with = "packed::numbers")]
    pub ids: Vec<ItemId>,
    /// By which they were selected: products with codes, or with rows where those were read at once. Equal ones by id.
    #[serde(with = "packed::numbers")]
    pub codes: Vec<f32>,
    /// Their retrieval scores.
    #[serde(with = "packed::numbers")]
    pub scores: Vec<f32>,
    /// True where the shard has looked at no others: what it did not send is worse than the last one that it did.
    pub is_all: bool,
    /// True where it could probe on for more.
    pub may_go_further: bool,
    /// How many all shards together select.
    pub selected: usize,
    /// How many of them are candidates, K0: the best by retrieval score.
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
            (Values::Texts(vec!["a".into()]), vec![1.0], "values that are no integers"),
            (Values::Numbers(vec![1.0]), vec![1.0], "values that are no integers"),
            (Values::Numbers(Vec::new()), vec![1.0], "values that are no integers"),
        ] {
            let error = values.weighted(weights).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
