//! Prepares requests: performs all validation on the host, before the request is queued.
//!
//! Invalid requests are rejected here, against the view that would answer them, and cost no worker time. Preparation also plans
//! the filter and resolves excluded items to slots (step 3 of the pass), since plan and slots depend only on the request and
//! the view.

use std::collections::HashSet;
use std::sync::Arc;

use super::cost;
use super::trace::Trace;
use super::work::{Cost, Prepared, Query, Search, Selection, Task};
use crate::view::View;
use sterling_core::error::{Error, Result, ShortNumber};
use sterling_core::limits;
use sterling_core::request::{
    Embed, EmbeddedUser, Features, Origin, Probes, Rank, Reading, Request, Rerank, Retrieve, Select, User,
};
use sterling_core::units::{ItemId, Slot};
use sterling_graph::tower::Readable;
use sterling_index::ivf::OodProbing;
use sterling_index::search::SearchPlan;
use sterling_index::search::likely;
use sterling_snapshot::model::{QuerySpec, UserInput};
use sterling_snapshot::{Calibration, SearchGoal};

/// Maximum ratio of early reranked candidates to final ones, with a reranker: beyond it, a second call to the shards is cheaper.
const EARLY_RATIO_MAX: f64 = 1.5;

/// Validates a request against a view, and prepares it.
///
/// # Errors
/// `Invalid` with the field, the received and the expected value; `Unsupported` for an operation that the model lacks;
/// `TooCostly` with the cost and the limit.
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
        Request::Embed(Embed { features, on_degraded, whole }) => {
            // A router sends `whole` to embed the users of retrievals and rankings, with all tensors that the reranker needs.
            if view.main().package.user.is_none() && !whole {
                let model = &view.main().manifest.name;
                return Err(Error::unsupported(format!(
                    "model `{model}` has no user tower (`[user]` of its model.toml), which makes the embeddings of `:embed`; \
                     `:retrieve` takes a `vector` of the caller's own"
                )));
            }
            let reading = Reading { on_degraded, ..Reading::default() };
            (features_query(view, features)?, Task::Embed { whole }, reading)
        }
        Request::Select(select) => {
            check_retrieve(view, &select.retrieve)?;
            let task = trace.step("plan", || selection(view, &select), |_| (0, 0))?;
            let Retrieve { user, reading, .. } = select.retrieve;
            (query(view, user)?, task, reading)
        }
        Request::Rerank(Rerank { user, candidates, k, reading }) => {
            between("k", k, limits::RESULTS_MAX)?;
            (query(view, user)?, Task::Rerank { candidates: chosen(view, &candidates)?, k }, reading)
        }
    };
    for column in &reading.columns {
        view.column(column).map_err(|e| e.within("field `columns`"))?;
    }
    let constants = view.value().constants(&reading.constants)?;
    let (view, cost, origin) = (view.clone(), Cost::default(), Origin::default());
    let mut prepared = Prepared { view, query, task, reading, constants, trace, cost, origin };
    prepared.cost = cost::of(&prepared.view, &prepared);
    if prepared.cost.check("the request").is_err() {
        // Selection and early reranking together may exceed the limit of one call: rerank in a separate call.
        prepared = prepared.ranked_apart();
    }
    prepared.cost.check("the request")?;
    Ok(prepared)
}

impl Prepared {
    /// Disables early reranking, if the shard's candidates are reranked by a separate call.
    pub fn ranked_apart(mut self) -> Self {
        if let Task::Select { selection, .. } = &mut self.task
            && selection.ahead.take().is_some()
        {
            self.cost = cost::of(&self.view, &self);
        }
        self
    }
}

/// Rejects numbers of results and candidates out of bounds, which do not depend on a view.
///
/// # Errors
/// `Invalid` with the field, the received and the expected value.
pub fn check_counts(request: &Retrieve) -> Result<()> {
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
    Ok(())
}

fn check_retrieve(view: &View, request: &Retrieve) -> Result<()> {
    check_counts(request)?;
    between("least", request.least(), limits::RESULTS_MAX)?;
    let queries = view.main().package.spec.queries();
    for (name, &candidates) in &request.query_candidates {
        let place = |e: Error| e.within(format!("field `query_candidates.{name}`"));
        if queries.iter().all(|query| query.name != *name) {
            let known: Vec<&str> = queries.iter().map(|query| query.name.as_str()).collect();
            let known = if known.is_empty() { "none: this model has one query".into() } else { known.join(", ") };
            return Err(place(Error::invalid(format!("no such query, expected some of: {known}"))));
        }
        // Fewer candidates than `k` are allowed: for a later page, `k` includes the results of earlier pages.
        if candidates == 0 || candidates > limits::CANDIDATES_MAX {
            let most = limits::CANDIDATES_MAX;
            return Err(place(Error::invalid(format!("got {candidates}, expected 1 to {most}"))));
        }
    }
    if let Some(recall) = request.recall.filter(|recall| !limits::RECALLS.contains(recall)) {
        let (least, most) = (limits::RECALLS.start(), limits::RECALLS.end());
        return Err(Error::invalid(format!("field `recall`: got {}, expected {least} to {most}", ShortNumber(recall))));
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

/// Prepares one shard's part of a search, from the totals of all shards.
fn selection(view: &View, select: &Select) -> Result<Task> {
    let &Select { retrieve: ref request, all, further, ahead } = select;
    let search = search(view, request)?;
    let shards = view.main().manifest.shard.map_or(1, |part| part.shards);
    let rows = view.main().index.rows();
    let of_query = |query: &SearchPlan| match query.by_codes {
        Some(selected) => selected.max(query.k0),
        None => rows.selected(query.k0).max(query.by_int8),
    };
    let selected: Vec<usize> = search.queries.iter().map(of_query).collect();
    let share = |k: usize| if all { k } else { likely(k, shards) };
    let selection = Selection {
        candidates: search.queries.iter().map(|query| query.k0).collect(),
        selected,
        further,
        ahead: if ahead && !all && !further { results_ahead(view, &search, shards) } else { None },
    };
    // Too few results in the lists of one shard may be enough across all shards.
    let k = if further { request.least() } else { 0 };
    let own = |(query, &selected): (&SearchPlan, &usize)| SearchPlan {
        k: query.k.min(k),
        k0: share(query.k0),
        selected: Some(share(selected)),
        ..*query
    };
    let queries = search.queries.iter().zip(&selection.selected).map(own).collect();
    let search = Search { k, queries, ..search };
    Ok(Task::Select { search, selection })
}

/// Returns the number of results that a shard reranks early and returns with its candidates, if that is worthwhile: as
/// many as are likely to be among the best, scaled by the share that turns out not to be candidates.
fn results_ahead(view: &View, search: &Search, shards: u32) -> Option<usize> {
    // The queries of a user are merged only after the final candidates are known.
    let &[SearchPlan { k0, .. }] = &search.queries[..] else { return None };
    let valued = likely(k0, shards);
    let of_one = valued as f64 * f64::from(shards) / k0 as f64;
    let is_worth = view.overarch().is_none() || of_one <= EARLY_RATIO_MAX;
    is_worth.then(|| valued.min((likely(search.k, shards) as f64 * of_one).ceil() as usize))
}

/// Resolves candidates that were selected across all shards to slots, best first.
fn chosen(view: &View, candidates: &[Vec<(ItemId, f32)>]) -> Result<Vec<Vec<(f32, Slot)>>> {
    let queries = view.main().package.spec.query_count();
    let count: usize = candidates.iter().map(Vec::len).sum();
    if candidates.len() != queries {
        let got = candidates.len();
        return Err(Error::invalid(format!("field `candidates`: got candidates of {got} queries, expected {queries}")));
    }
    if count > limits::CANDIDATES_MAX * queries {
        let most = limits::CANDIDATES_MAX * queries;
        return Err(Error::invalid(format!("field `candidates`: got {count}, expected at most {most}")));
    }
    if candidates.iter().flatten().any(|(_, score)| !score.is_finite()) {
        return Err(Error::invalid("field `candidates`: got a score that is not finite, expected finite scores"));
    }
    let of_query = |items: &Vec<(ItemId, f32)>| {
        let mut slots: Vec<(f32, Slot)> =
            items.iter().filter_map(|(id, score)| Some((*score, view.slot(*id)?))).collect();
        slots.sort_unstable_by(|a, b| view.best_first(a, b));
        // A duplicate item counts once, with its better score.
        let mut known = HashSet::with_capacity(slots.len());
        slots.retain(|(_, slot)| known.insert(*slot));
        slots
    };
    Ok(candidates.iter().map(of_query).collect())
}

fn search(view: &View, request: &Retrieve) -> Result<Search> {
    let mut excluded: Vec<Slot> = request.exclude.iter().filter_map(|&id| view.slot(id)).collect();
    excluded.sort_unstable();
    // The number of updated items on other shards is unknown here.
    let found_max = if view.main().manifest.shard.is_some() { limits::CANDIDATES_MAX } else { view.items() };
    let k0 = |own: Option<usize>| {
        let candidates = request.candidates.or(own).unwrap_or_else(|| view.main().candidates(request.k));
        candidates.max(request.k).min(found_max)
    };
    let queries = view.main().package.spec.queries();
    let k0_of = |query: &QuerySpec| match request.query_candidates.get(&query.name) {
        Some(&candidates) => candidates.min(found_max),
        None => k0(query.candidates),
    };
    let k0: Vec<usize> = if queries.is_empty() { vec![k0(None)] } else { queries.iter().map(k0_of).collect() };
    let planned = view.plan(&request.filter)?;
    // The calibrated nprobe of the query with most candidates suffices for the other queries.
    let most = k0.iter().copied().max().unwrap_or(0);
    let pass_rate = planned.plan.pass_rate();
    let (probes, left, ood) = probes(view, request, most, pass_rate);
    let probes = Probes { ood_probes: ood.map(|ood| ood.probes), ..probes };
    let (by_codes, by_int8) = if request.exact { (None, 0) } else { selected(view, request, most, pass_rate) };
    // A deep page may want more results than a single one of several queries has candidates.
    let of_query = |k0: usize| SearchPlan {
        k: if queries.is_empty() { request.least() } else { request.least().min(k0) },
        k0,
        selected: None,
        probes: probes.probes,
        ood,
        exact: request.exact,
        by_codes,
        by_int8,
    };
    let queries = k0.into_iter().map(of_query).collect();
    Ok(Search { k: request.k, queries, probes, left, planned, excluded })
}

/// Returns the number of probed lists: that of the request, else the calibrated number for the recall of the request or the
/// recipe, else the recipe's. With a calibration, also returns the share of K0 that a filtered search may leave unscanned, and
/// the setting for queries that are out of distribution.
fn probes(
    view: &View,
    request: &Retrieve,
    candidates: usize,
    pass_rate: f64,
) -> (Probes, Option<f64>, Option<OodProbing>) {
    let main = view.main();
    let (serving, lists) = (&main.recipe.serving, main.index.lists());
    let target = match (request.probes, request.recall) {
        (Some(_), _) => None,
        (None, Some(recall)) => Some(recall),
        (None, None) => (serving.probes == 0).then_some(serving.recall),
    };
    match (target, &main.calibration) {
        (Some(recall), Some(calibration)) => {
            let chosen = choose(view, calibration, request, SearchGoal { candidates, pass_rate, recall });
            let probes = Probes { probes: chosen.probes, target, estimate: Some(chosen.recall), ood_probes: None };
            // Calibrated without a filter; a filtered search does not end before this number of lists.
            let unfiltered = || choose(view, calibration, request, SearchGoal { candidates, pass_rate: 1.0, recall });
            let of_ood = if pass_rate < 1.0 { unfiltered() } else { chosen };
            (probes, Some(chosen.left), calibration.ood(of_ood))
        }
        _ => {
            let probes = request.probes.unwrap_or_else(|| serving.probes_of(lists));
            (Probes { probes, target, estimate: None, ood_probes: None }, None, None)
        }
    }
}

/// Returns how many candidates first-pass codes select for the requested or default recall, if calibration found codes
/// worthwhile; and the minimum number that int8 rows select.
fn selected(view: &View, request: &Retrieve, candidates: usize, pass_rate: f64) -> (Option<usize>, usize) {
    let main = view.main();
    let recall = request.recall.unwrap_or(main.recipe.serving.recall);
    let Some(calibration) = &main.calibration else { return (None, 0) };
    let chosen = choose(view, calibration, request, SearchGoal { candidates, pass_rate, recall });
    (chosen.by_codes, chosen.by_int8)
}

/// Looks up the calibration. Accounts for excluded items, which are most often among the best; all shards count the same ids.
fn choose(view: &View, calibration: &Calibration, request: &Retrieve, wanted: SearchGoal) -> sterling_snapshot::Chosen {
    calibration.choose_beyond(request.exclude.len(), wanted, view.items_of_all(), view.main().index.lists())
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
            check_vector(view, &vector).map_err(|e| e.within("field `vector`"))?;
            Ok(Query::Vector(vector))
        }
        User::Embedded(user) => {
            check_embedded(view, &user).map_err(|e| e.within("the user"))?;
            Ok(Query::Embedded(user))
        }
    }
}

/// Rejects embeddings that no user tower of this version can have made.
fn check_embedded(view: &View, user: &EmbeddedUser) -> Result<()> {
    let main = view.main();
    let package = &main.package;
    let width = package.spec.query_count() * view.dimension();
    if user.query.len() != width {
        return Err(Error::invalid(format!("a query of {} numbers, expected {width}", user.query.len())));
    }
    user.query.chunks(view.dimension().max(1)).try_for_each(|query| main.index.check_query(query))?;
    let reads = package.overarch.as_ref().filter(|_| package.needs_features()).map_or(&[][..], |o| o.user());
    let count = |(input, readable): (&UserInput, &Readable)| match input {
        UserInput::Query => 0,
        UserInput::Output(_) | UserInput::Feature(_) => readable.count(),
    };
    let expected: Vec<usize> = package.user_inputs.iter().zip(reads).map(count).collect();
    let got: Vec<usize> = user.tensors.iter().map(Vec::len).collect();
    if got != expected {
        return Err(Error::invalid(format!("tensors of {got:?} numbers, expected {expected:?}")));
    }
    Ok(())
}

fn check_vector(view: &View, vector: &[f32]) -> Result<()> {
    let package = &view.main().package;
    if package.needs_features() {
        return Err(Error::invalid("the reranker of this model reads features of the user, expected `features`"));
    }
    let (queries, width) = (package.spec.queries().len(), view.dimension());
    if queries > 0 && vector.len() != queries * width {
        let expected = queries * width;
        return Err(Error::invalid(format!(
            "got {} numbers, expected {expected}: {queries} queries of {width}",
            vector.len()
        )));
    }
    let mut queries = vector.chunks(if queries == 0 { vector.len().max(1) } else { width });
    match vector.is_empty() {
        true => view.main().index.check_query(vector),
        false => queries.try_for_each(|query| view.main().index.check_query(query)),
    }
}

fn features_query(view: &View, features: Features) -> Result<Query> {
    let Some(tower) = &view.main().package.user else {
        let model = &view.main().manifest.name;
        return Err(Error::invalid(format!("field `features`: model `{model}` has no user tower, expected `vector`")));
    };
    Ok(Query::Features { row: tower.read(features).map_err(|e| e.within("field `features`"))?, fetched: None })
}
