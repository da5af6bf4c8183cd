//! Prepared requests: validated, with a cost estimate, and ready for a device.

use std::sync::Arc;

use super::trace::Trace;
use crate::view::{Planned, View};
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_core::request::{EmbeddedUser, LargestNumber, Origin, Probes, Reading};
use sterling_core::units::{ItemId, Slot};
use sterling_graph::tower::{FeatureRow, Pooled};
use sterling_index::filter::{Plan, Route};
use sterling_index::ivf;
use sterling_index::search::{self, SearchPlan};

/// Cost estimate of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// CPU time in nanoseconds, on the machine on which the model's constants were measured.
    pub work_ns: f64,
    /// Bytes of memory from acceptance to answer, without the view.
    pub memory_bytes: usize,
    /// Bytes of the answer, which are part of `memory_bytes` and occupied until the client has read it.
    pub answer_bytes: usize,
    /// Maximum number of items in the answer.
    pub items: usize,
}

impl Cost {
    /// Adds two costs.
    pub fn plus(self, other: Cost) -> Cost {
        Cost {
            work_ns: self.work_ns + other.work_ns,
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            answer_bytes: self.answer_bytes.saturating_add(other.answer_bytes),
            items: self.items.saturating_add(other.items),
        }
    }

    /// Rejects costs above the limits of one call.
    ///
    /// # Errors
    /// `TooCostly` with the cost and the limit.
    pub fn check(self, call: &str) -> Result<()> {
        let (work_ms, work_ms_max) = ((self.work_ns / 1e6).ceil() as u64, limits::WORK_MS_MAX);
        if work_ms > work_ms_max {
            return Err(Error::too_costly(format!(
                "{call}: about {work_ms} ms of one core by its filter, candidates, results and scanned items, expected at most {work_ms_max}"
            )));
        }
        if self.memory_bytes > limits::MEMORY_BYTES_MAX {
            return Err(Error::too_costly(format!(
                "{call}: about {} bytes of memory by its candidates and results, expected at most {}",
                self.memory_bytes,
                limits::MEMORY_BYTES_MAX
            )));
        }
        Ok(())
    }
}

/// Request that was validated against one view, with its cost estimate.
#[derive(Debug)]
pub struct Prepared {
    pub(super) view: Arc<View>,
    pub(super) query: Query,
    pub(super) task: Task,
    pub(super) reading: Reading,
    /// Constants of the value model, with the overrides of the request.
    pub(super) constants: Vec<f32>,
    pub(super) trace: Trace,
    pub(super) cost: Cost,
    /// Id and trace of the call, sent along when rows are fetched from other hosts.
    pub(super) origin: Origin,
}

/// Source of the query embedding.
#[derive(Debug)]
pub(super) enum Query {
    /// Embedding from the caller, `[D]` or `[Tq, D]`.
    Vector(Vec<f32>),
    /// Embedding from the caller, with all other outputs of the user tower.
    Embedded(EmbeddedUser),
    /// Features for the user tower; `fetched` holds pooled embeddings that were looked up before.
    Features { row: FeatureRow, fetched: Option<Result<Pooled>> },
}

/// Returns the error of a graph whose output is not finite. The request is blamed if it has a number for which graphs are
/// not validated at publish, otherwise the model is.
pub(super) fn not_finite(what: &str, largest: Option<LargestNumber>) -> Error {
    largest.map_or_else(|| Error::internal(what), |largest| largest.not_finite(what))
}

impl Prepared {
    /// Returns the largest number of the request that a graph reads, if it may have made an output not finite.
    pub(super) fn largest(&self) -> Option<LargestNumber> {
        match &self.query {
            Query::Vector(vector) => LargestNumber::of_query(vector),
            Query::Embedded(user) => user.largest.clone(),
            Query::Features { row, .. } => row.largest(self.view.main().package.user.as_ref()?.features()),
        }
    }

    /// Checks and counts the candidates whose task scores are NaN: there are `undefined` of them among `count`. If other
    /// candidates have scores, the caller omits those with NaN from the answer.
    ///
    /// # Errors
    /// `Invalid` if the request has a huge number. If no candidate has scores: `Invalid` if the request has another
    /// number, else `Internal`, unless another shard may have candidates with scores: then the router returns this error.
    pub(super) fn check_undefined(&self, undefined: usize, count: usize) -> Result<()> {
        if undefined == 0 {
            return Ok(());
        }
        let main = self.view.main();
        let file = main.package.overarch.as_ref().map_or("overarch", |overarch| overarch.graph().0);
        let model = main.manifest.name.clone();
        metrics::counter!("sterling_undefined_candidates_total", "model" => model).increment(undefined as u64);
        let largest = self.largest();
        let is_huge = largest.as_ref().is_some_and(LargestNumber::is_huge);
        if is_huge || (undefined == count && !self.is_share()) {
            return Err(not_finite(&format!("{file}: `logits` holds NaN"), largest));
        }
        Ok(())
    }

    /// Returns whether other shards may have further candidates of the request.
    fn is_share(&self) -> bool {
        match self.task {
            Task::Select { .. } | Task::Rerank { .. } => true,
            Task::Rank { .. } => self.view.main().manifest.shard.is_some_and(|part| part.shards > 1),
            Task::Retrieve(_) | Task::Embed { .. } => false,
        }
    }
}

/// Operation of a request.
#[derive(Debug)]
pub(super) enum Task {
    Retrieve(Search),
    /// Scores named items; `slots` are ascending and distinct.
    Rank {
        slots: Vec<Slot>,
        unknown: Vec<ItemId>,
    },
    /// Computes the query embedding; with `whole`, also the user tensors that later steps read.
    Embed {
        whole: bool,
    },
    /// Selects the candidates of one shard; `k0` of the search is this shard's part of the total.
    Select {
        search: Search,
        selection: Selection,
    },
    /// Best `k` of candidates from the caller. The candidates of each query are ordered by descending retrieval score.
    Rerank {
        candidates: Vec<Vec<(f32, Slot)>>,
        k: usize,
    },
}

/// Numbers of candidates per query of the user, for a search over several shards.
#[derive(Debug)]
pub(super) struct Selection {
    /// Number of candidates across all shards, K0.
    pub(super) candidates: Vec<usize>,
    /// Number of candidates that all shards select; this shard's number is in its plans.
    pub(super) selected: Vec<usize>,
    /// True if the search continues with more lists while it finds too few candidates.
    pub(super) further: bool,
    /// Number of results to rerank early and return with the candidates, if the shard does so.
    pub(super) ahead: Option<usize>,
}

impl Task {
    /// Search that the task begins with, if any.
    pub(super) fn search(&self) -> Option<&Search> {
        match self {
            Task::Retrieve(search) | Task::Select { search, .. } => Some(search),
            Task::Rank { .. } | Task::Embed { .. } | Task::Rerank { .. } => None,
        }
    }
}

/// Search parameters of a retrieval.
#[derive(Debug)]
pub(super) struct Search {
    pub(super) k: usize,
    /// Plan per query of the user; one if the model has a single query.
    pub(super) queries: Vec<SearchPlan>,
    /// Number of probed lists, and its source.
    pub(super) probes: Probes,
    /// Expected share of K0 in unscanned lists at which a filtered search may end; `None` if probes were not calibrated.
    pub(super) left: Option<f64>,
    pub(super) planned: Arc<Planned>,
    /// Excluded slots, ascending.
    pub(super) excluded: Vec<Slot>,
}

impl Search {
    /// Returns the search per query of the user, without vectors.
    pub(super) fn queries<'a>(&'a self, view: &'a View) -> impl Iterator<Item = search::Query<'a>> {
        self.queries.iter().map(|&search| search::Query {
            vector: &[],
            search,
            plan: &self.planned.plan,
            beside: &self.planned.beside,
            excluded: &self.excluded,
            ending: self.ending(view),
        })
    }

    /// Returns the number of results below which a query continues while unscanned lists may hold eligible items.
    pub(super) fn least(&self) -> usize {
        self.queries.iter().map(|query| query.k).max().unwrap_or(0)
    }

    /// Returns the number of candidates of all queries.
    pub(super) fn candidates(&self) -> usize {
        self.queries.iter().map(|query| query.k0).sum()
    }

    /// Returns whether all items are scored; the same for all queries of a user.
    pub(super) fn is_exact(&self) -> bool {
        self.queries.iter().any(|query| query.exact)
    }

    /// Returns how eligible items are found, as explanations name it.
    pub(super) fn route(&self) -> &'static str {
        match (self.is_exact(), self.planned.plan.route()) {
            (_, Route::Nothing) => "none",
            (true, _) => "exact",
            (_, Route::All) => "all",
            (_, Route::Slots(_)) => "few",
            (_, Route::Words) => "words",
        }
    }

    /// Returns the planned number of probed lists, if the search uses lists.
    pub(super) fn reported_probes(&self) -> Option<Probes> {
        let by_lists = matches!(self.planned.plan.route(), Route::All | Route::Words) && !self.is_exact();
        by_lists.then_some(self.probes)
    }

    /// Returns whether a shard that has probed `probed` lists could probe more.
    pub(super) fn may_go_further(&self, view: &View, selection: &Selection, probed: u64) -> bool {
        let (main, by_lists) = (view.main(), |plan: &Plan| matches!(plan.route(), Route::All | Route::Words));
        let lists = main.index.lists();
        let segments = view.segments().map(|(_, segment, _)| segment.index().lists());
        // Segments with a single list are scanned completely in the first round.
        let has_lists = by_lists(&self.planned.plan)
            || segments.zip(&self.planned.beside).any(|(of, plan)| of == lists && by_lists(plan));
        let most = main.recipe.serving.probes_max_of(lists).max(self.probes.probes.min(lists));
        !selection.further && !self.is_exact() && has_lists && probed < most as u64
    }

    /// Returns the termination rule of a filtered search, if its probes were calibrated.
    pub(super) fn ending<'a>(&self, view: &'a View) -> Option<ivf::Ending<'a>> {
        let calibration = view.main().calibration.as_ref()?;
        Some(ivf::Ending { margins: &calibration.margins, recall: self.probes.target?, left: self.left? })
    }
}

impl Prepared {
    /// View that answers the request.
    pub fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// Sets the id and trace that are sent along to other hosts.
    pub fn asked_for(self, origin: Origin) -> Self {
        Prepared { origin, ..self }
    }

    /// Enables the explanation, and returns whether it was already requested.
    pub fn explained(mut self) -> (Self, bool) {
        let requested = std::mem::replace(&mut self.reading.explain, true);
        (self, requested)
    }

    /// Returns the cost estimate of the request.
    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// Returns whether rows of a cluster must be fetched before the request can run without waiting.
    pub fn needs_fetch(&self) -> bool {
        match (&self.query, &self.view.main().package.user) {
            (Query::Features { row, fetched: None }, Some(tower)) => tower.needs_fetch(row),
            _ => false,
        }
    }

    /// Returns the maximum number of candidates to rerank (K0), over all queries.
    pub(super) fn candidates(&self) -> usize {
        match &self.task {
            Task::Retrieve(search) => search.candidates(),
            Task::Rank { slots, .. } => slots.len(),
            Task::Embed { .. } => 0,
            Task::Select { search, .. } => search.queries.iter().filter_map(|query| query.selected).sum(),
            Task::Rerank { candidates, .. } => candidates.iter().map(Vec::len).sum(),
        }
    }

    /// Returns the item columns of the answer.
    pub fn columns(&self) -> &[String] {
        &self.reading.columns
    }

    pub(super) fn features(&self) -> Option<&FeatureRow> {
        match &self.query {
            Query::Features { row, .. } => Some(row),
            Query::Vector(_) | Query::Embedded(_) => None,
        }
    }

    /// Returns the number of ids in the request's features.
    pub(super) fn ids(&self) -> usize {
        self.features().map_or(0, FeatureRow::ids)
    }

    /// Returns the bytes that the request occupies while queued.
    pub(super) fn bytes(&self) -> usize {
        let query = match &self.query {
            Query::Vector(vector) => vector.len() * 4,
            Query::Embedded(user) => (user.query.len() + user.tensors.iter().map(Vec::len).sum::<usize>()) * 4,
            Query::Features { row, .. } => row.bytes() + 4 * self.view.main().package.user_numbers(),
        };
        let task = match &self.task {
            Task::Retrieve(search) | Task::Select { search, .. } => search.excluded.len() * 4,
            Task::Rank { slots, unknown } => slots.len() * 4 + unknown.len() * 8,
            Task::Embed { .. } => 0,
            Task::Rerank { candidates, .. } => candidates.iter().map(|of_query| of_query.len() * 8).sum(),
        };
        std::mem::size_of::<Prepared>() + query + task
    }
}
