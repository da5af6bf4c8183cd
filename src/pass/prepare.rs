//! From a request to work: every check, on the host, before anything waits.
//!
//! What is wrong with a request is found here, against the view that will answer it, and costs no worker. The filter is planned
//! and excluded items become slots too (step 3 of the pass), for both depend on the request and the view alone.

use std::sync::Arc;

use super::cost::{self, Cost};
use super::trace::Trace;
use crate::error::{Error, Result};
use crate::limits;
use crate::request::{Embed, Features, Probes, Rank, Reading, Request, Retrieve, User};
use crate::snapshot::Wanted;
use crate::tower::{FeatureRow, Pooled};
use crate::units::{ItemId, Slot};
use crate::view::{Planned, View};

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
    cost: Cost,
}

/// Where the query embedding comes from.
#[derive(Debug)]
pub(super) enum Query {
    /// Given, `[D]`.
    Vector(Vec<f32>),
    /// Of the user tower over these; `fetched` where their rows were looked up already.
    Features { row: FeatureRow, fetched: Option<Result<Pooled>> },
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
    Embed,
}

/// What a retrieval asks of the search.
#[derive(Debug)]
pub(super) struct Search {
    pub(super) k: usize,
    pub(super) k0: usize,
    pub(super) probes: Probes,
    pub(super) exact: bool,
    pub(super) planned: Arc<Planned>,
    /// Ascending.
    pub(super) excluded: Vec<Slot>,
}

/// Checks a request against a view and makes it ready to run.
///
/// # Errors
/// `Invalid` with the field, what came and what was expected; `Unsupported` for a question that the model has no part for;
/// `TooCostly` with the cost and the bound.
pub fn prepare(view: &Arc<View>, request: Request) -> Result<Prepared> {
    let mut trace = Trace::default();
    let (query, task, reading) = match request {
        Request::Retrieve(retrieve) => {
            check_retrieve(view, &retrieve)?;
            let search = trace.step("plan", || search(view, &retrieve), |_| (0, 0))?;
            (query(view, retrieve.user)?, Task::Retrieve(search), retrieve.reading)
        }
        Request::Rank(Rank { user, items, reading }) => {
            between("items", items.len(), limits::CANDIDATES_MAX)?;
            let (slots, unknown) = slots(view, items);
            (query(view, user)?, Task::Rank { slots, unknown }, reading)
        }
        Request::Embed(Embed { features, on_degraded }) => {
            let reading = Reading { on_degraded, ..Reading::default() };
            (features_query(view, features)?, Task::Embed, reading)
        }
    };
    for column in &reading.columns {
        view.column(column).map_err(|e| e.within("field `columns`"))?;
    }
    let constants = view.value().constants(&reading.constants)?;
    let mut prepared = Prepared { view: view.clone(), query, task, reading, constants, trace, cost: Cost::default() };
    prepared.cost = cost::of(view, &prepared);
    prepared.cost.check("the request")?;
    Ok(prepared)
}

impl Prepared {
    /// The view that answers it.
    pub fn view(&self) -> &Arc<View> {
        &self.view
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

    /// Candidates that it reranks at most, K0.
    pub(super) fn candidates(&self) -> usize {
        match &self.task {
            Task::Retrieve(search) => search.k0,
            Task::Rank { slots, .. } => slots.len(),
            Task::Embed => 0,
        }
    }

    /// The item columns that its answer tells.
    pub fn columns(&self) -> &[String] {
        &self.reading.columns
    }

    pub(super) fn features(&self) -> Option<&FeatureRow> {
        match &self.query {
            Query::Features { row, .. } => Some(row),
            Query::Vector(_) => None,
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
            Query::Features { row, .. } => row.bytes(),
        };
        let task = match &self.task {
            Task::Retrieve(search) => search.excluded.len() * 4,
            Task::Rank { slots, unknown } => slots.len() * 4 + unknown.len() * 8,
            Task::Embed => 0,
        };
        std::mem::size_of::<Prepared>() + query + task
    }
}

fn check_retrieve(view: &View, request: &Retrieve) -> Result<()> {
    between("k", request.k, limits::RESULTS_MAX)?;
    if let Some(candidates) = request.candidates {
        between("candidates", candidates, limits::CANDIDATES_MAX)?;
        if candidates < request.k {
            return Err(Error::invalid(format!(
                "field `candidates`: got {candidates}, expected at least k = {}",
                request.k
            )));
        }
    }
    if let Some(recall) = request.recall.filter(|recall| !limits::RECALLS.contains(recall)) {
        let (least, most) = (limits::RECALLS.start(), limits::RECALLS.end());
        return Err(Error::invalid(format!("field `recall`: got {recall}, expected {least} to {most}")));
    }
    let lists = view.main().index.lists();
    match request.probes {
        Some(probes) if probes == 0 || probes > lists => {
            Err(Error::invalid(format!("field `probes`: got {probes}, expected 1 to {lists}, the lists of the index")))
        }
        _ => Ok(()),
    }
}

fn between(field: &str, value: usize, most: usize) -> Result<()> {
    match value {
        0 => Err(Error::invalid(format!("field `{field}`: got 0, expected 1 to {most}"))),
        value if value > most => Err(Error::invalid(format!("field `{field}`: got {value}, expected 1 to {most}"))),
        _ => Ok(()),
    }
}

fn search(view: &View, request: &Retrieve) -> Result<Search> {
    let mut excluded: Vec<Slot> = request.exclude.iter().filter_map(|&id| view.slot(id)).collect();
    excluded.sort_unstable();
    let k0 = request.candidates.unwrap_or_else(|| view.main().candidates(request.k)).min(view.items());
    let planned = view.plan(&request.filter)?;
    let probes = probes(view, request, k0, planned.plan.pass_rate());
    Ok(Search { k: request.k, k0, probes, exact: request.exact, planned, excluded })
}

/// The request's number of lists, else what its recall or the recipe's takes, else the recipe's number.
fn probes(view: &View, request: &Retrieve, candidates: usize, pass_rate: f64) -> Probes {
    let main = view.main();
    let (serving, lists) = (&main.recipe.serving, main.index.lists());
    let target = match (request.probes, request.recall) {
        (Some(_), _) => None,
        (None, Some(recall)) => Some(recall),
        (None, None) => (serving.probes == 0).then_some(serving.recall),
    };
    match (target, &main.calibration) {
        (Some(recall), Some(calibration)) => {
            let chosen = calibration.choose(Wanted { candidates, pass_rate, recall }, view.items(), lists);
            Probes { probes: chosen.probes, target, estimate: Some(chosen.recall) }
        }
        _ => {
            let probes = request.probes.unwrap_or_else(|| serving.probes_of(lists));
            Probes { probes, target, estimate: None }
        }
    }
}

fn slots(view: &View, items: Vec<ItemId>) -> (Vec<Slot>, Vec<ItemId>) {
    let (mut slots, mut unknown) = (Vec::with_capacity(items.len()), Vec::new());
    for id in items {
        match view.slot(id) {
            Some(slot) => slots.push(slot),
            None => unknown.push(id),
        }
    }
    slots.sort_unstable();
    slots.dedup();
    (slots, unknown)
}

fn query(view: &View, user: User) -> Result<Query> {
    match user {
        User::Features(features) => features_query(view, features),
        User::Vector(vector) => {
            view.main().index.check_query(&vector).map_err(|e| e.within("field `vector`"))?;
            Ok(Query::Vector(vector))
        }
    }
}

fn features_query(view: &View, features: Features) -> Result<Query> {
    let Some(tower) = &view.main().package.user else {
        return Err(Error::invalid("field `features`: this model has no user tower, expected `vector`"));
    };
    Ok(Query::Features { row: tower.read(features).map_err(|e| e.within("field `features`"))?, fetched: None })
}
