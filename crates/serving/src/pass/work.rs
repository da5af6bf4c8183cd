//! What was prepared: all that a device needs to know of a request, checked and priced.

use std::sync::Arc;

use super::trace::Trace;
use crate::view::{Planned, View};
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_core::request::{EmbeddedUser, Origin, Probes, Reading};
use sterling_core::units::{ItemId, Slot};
use sterling_graph::tower::{FeatureRow, Pooled};
use sterling_index::filter::{Plan, Route};
use sterling_index::ivf;
use sterling_index::search::{self, SearchPlan};

/// What a request costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Nanoseconds on one core of the machine that the model's constants were measured on.
    pub work_ns: f64,
    /// Bytes of memory that it takes from when it is taken in until it is answered, besides its view.
    pub memory_bytes: usize,
    /// Those of them that its answer takes, until the client has read it.
    pub answer_bytes: usize,
    /// Items of its answer at most.
    pub items: usize,
}

impl Cost {
    /// The cost of two together.
    pub fn plus(self, other: Cost) -> Cost {
        Cost {
            work_ns: self.work_ns + other.work_ns,
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            answer_bytes: self.answer_bytes.saturating_add(other.answer_bytes),
            items: self.items.saturating_add(other.items),
        }
    }

    /// Refuses what is more than one call may ask for.
    ///
    /// # Errors
    /// `TooCostly` with the cost and the bound.
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

/// A request that was checked against one view, priced and bound to it.
#[derive(Debug)]
pub struct Prepared {
    pub(super) view: Arc<View>,
    pub(super) query: Query,
    pub(super) task: Task,
    pub(super) reading: Reading,
    /// The value model's constants with those that the request overrides.
    pub(super) constants: Vec<f32>,
    pub(super) trace: Trace,
    pub(super) cost: Cost,
    /// What rows of other hosts are asked for.
    pub(super) origin: Origin,
}

/// Where the query embedding comes from.
#[derive(Debug)]
pub(super) enum Query {
    /// Given, `[D]` or `[Tq, D]`.
    Vector(Vec<f32>),
    /// Given with all else that the user tower made.
    Embedded(EmbeddedUser),
    /// Of the user tower over these; `fetched` where their rows were looked up already.
    Features { row: FeatureRow, fetched: Option<Result<Pooled>> },
}

/// Largest number of a request that a model is expected to be defined for: beyond, f32 overflows in a layer or two.
const NUMBER_MAX: f32 = 4_294_967_296.0;

impl Query {
    /// What is wrong where a graph makes no finite numbers of the request.
    pub(super) fn not_finite(&self, what: &str) -> Error {
        let of = |numbers: &[f32]| numbers.iter().fold(0f32, |most, x| most.max(x.abs()));
        not_finite(
            what,
            match self {
                Query::Vector(vector) => of(vector),
                Query::Embedded(user) => user.tensors.iter().map(|tensor| of(tensor)).fold(of(&user.query), f32::max),
                Query::Features { row, .. } => row.largest(),
            },
        )
    }
}

/// The same for a request whose largest number is known: the request is wrong if that is huge, else the model.
pub(super) fn not_finite(what: &str, largest: f32) -> Error {
    match largest > NUMBER_MAX {
        true => Error::invalid(format!("{what}: got the number {largest:e}, expected at most {NUMBER_MAX:e}")),
        false => Error::internal(what),
    }
}

/// What is asked.
#[derive(Debug)]
pub(super) enum Task {
    Retrieve(Search),
    /// `slots` ascending, each once.
    Rank {
        slots: Vec<Slot>,
        unknown: Vec<ItemId>,
    },
    /// `whole` where the tensors of the user are asked for beside the query.
    Embed {
        whole: bool,
    },
    /// A shard's part of the candidates of a search, whose `k0` are this shard's share.
    Select {
        search: Search,
        selection: Selection,
    },
    /// The best `k` of candidates that are given, of each query of the user those with the best retrieval scores first.
    Rerank {
        candidates: Vec<Vec<(f32, Slot)>>,
        k: usize,
    },
}

/// How many candidates all shards look for, and how many of these one is asked for; of each query of the user.
#[derive(Debug)]
pub(super) struct Selection {
    /// K0 of all shards.
    pub(super) candidates: Vec<usize>,
    /// What all shards together select; what this one does stands in its plans.
    pub(super) selected: Vec<usize>,
    /// True where it probes on as long as it finds too few.
    pub(super) further: bool,
    /// Where it ranks ahead, the results that it tells of its share of K0.
    pub(super) ahead: Option<usize>,
}

impl Task {
    /// The search that it begins with, where it does with one.
    pub(super) fn search(&self) -> Option<&Search> {
        match self {
            Task::Retrieve(search) | Task::Select { search, .. } => Some(search),
            Task::Rank { .. } | Task::Embed { .. } | Task::Rerank { .. } => None,
        }
    }
}

/// What a retrieval asks of the search.
#[derive(Debug)]
pub(super) struct Search {
    pub(super) k: usize,
    /// How each query of the user is searched; one, where the model has no several.
    pub(super) queries: Vec<SearchPlan>,
    /// How many lists are probed, and why.
    pub(super) probes: Probes,
    /// What the search may leave ahead where it has a filter, as a share of K0; none where its probes were not measured.
    pub(super) left: Option<f64>,
    pub(super) planned: Arc<Planned>,
    /// Ascending.
    pub(super) excluded: Vec<Slot>,
}

impl Search {
    /// What is searched for, of each query of the user: all but its vector.
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

    /// Candidates of all queries together.
    pub(super) fn candidates(&self) -> usize {
        self.queries.iter().map(|query| query.k0).sum()
    }

    /// True where every item is looked at: all queries of a user are searched alike.
    pub(super) fn is_exact(&self) -> bool {
        self.queries.iter().any(|query| query.exact)
    }

    /// How it finds eligible items, as an explanation says it.
    pub(super) fn route(&self) -> &'static str {
        match (self.is_exact(), self.planned.plan.route()) {
            (_, Route::Nothing) => "none",
            (true, _) => "exact",
            (_, Route::All) => "all",
            (_, Route::Slots(_)) => "few",
            (_, Route::Words) => "words",
        }
    }

    /// How many lists were to be probed and why, where it goes by lists.
    pub(super) fn told_probes(&self) -> Option<Probes> {
        let by_lists = matches!(self.planned.plan.route(), Route::All | Route::Words) && !self.is_exact();
        by_lists.then_some(self.probes)
    }

    /// Whether a shard that looked at `probed` lists could probe on for more.
    pub(super) fn may_go_further(&self, view: &View, selection: &Selection, probed: u64) -> bool {
        let (main, by_lists) = (view.main(), |plan: &Plan| matches!(plan.route(), Route::All | Route::Words));
        let lists = main.index.lists();
        let segments = view.segments().map(|(_, segment, _)| segment.index().lists());
        // Segments of a single list are scanned whole at once.
        let has_lists = by_lists(&self.planned.plan)
            || segments.zip(&self.planned.beside).any(|(of, plan)| of == lists && by_lists(plan));
        let most = main.recipe.serving.probes_max_of(lists).max(self.probes.probes.min(lists));
        !selection.further && !self.is_exact() && has_lists && probed < most as u64
    }

    /// When a search with a filter ends, where its probes were measured.
    pub(super) fn ending<'a>(&self, view: &'a View) -> Option<ivf::Ending<'a>> {
        let calibration = view.main().calibration.as_ref()?;
        Some(ivf::Ending { margins: &calibration.margins, recall: self.probes.target?, left: self.left? })
    }
}

impl Prepared {
    /// The view that answers it.
    pub fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// The same, made for a request that has these names.
    pub fn asked_for(self, origin: Origin) -> Self {
        Prepared { origin, ..self }
    }

    /// The same, which tells how its answer comes about, and whether that was asked for.
    pub fn explained(mut self) -> (Self, bool) {
        let asked = std::mem::replace(&mut self.reading.explain, true);
        (self, asked)
    }

    /// What it will cost.
    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// True where rows of a cluster must be fetched before it can run without waiting.
    pub fn needs_fetch(&self) -> bool {
        match (&self.query, &self.view.main().package.user) {
            (Query::Features { row, fetched: None }, Some(tower)) => tower.needs_fetch(row),
            _ => false,
        }
    }

    /// Candidates that it reranks at most, K0, of all queries together.
    pub(super) fn candidates(&self) -> usize {
        match &self.task {
            Task::Retrieve(search) => search.candidates(),
            Task::Rank { slots, .. } => slots.len(),
            Task::Embed { .. } => 0,
            Task::Select { search, .. } => search.queries.iter().filter_map(|query| query.selected).sum(),
            Task::Rerank { candidates, .. } => candidates.iter().map(Vec::len).sum(),
        }
    }

    /// The item columns that its answer tells.
    pub fn columns(&self) -> &[String] {
        &self.reading.columns
    }

    pub(super) fn features(&self) -> Option<&FeatureRow> {
        match &self.query {
            Query::Features { row, .. } => Some(row),
            Query::Vector(_) | Query::Embedded(_) => None,
        }
    }

    /// Ids of its features.
    pub(super) fn ids(&self) -> usize {
        self.features().map_or(0, FeatureRow::ids)
    }

    /// Bytes that it holds while it waits.
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
