//! The one forward pass, top to bottom.
//!
//! | # | step | in → out |
//! |---|---|---|
//! | 1 | `lookup` | ids of all requests → pooled embeddings, all tables in one call |
//! | 2 | `tower` | pooled and dense features → query embeddings `[Q, D]` |
//! | 3 | `plan` | filter → operations on bit planes; exclude list → slots |
//! | 4 | `probe` | centroid scores → the best lists |
//! | 5 | `words` | bit words of the probed lists only, 64 items a word |
//! | 6 | `scan` | int8 products of surviving items → the best K0, streamed |
//! | 7 | `verify` | exact check of the filter on the candidates, excluded ones drop out |
//! | 8 | `rescore` | f32 products with the wide rows |
//! | 9 | `overarch` | query × item rows and columns → task scores `[T, K0]` |
//! | 10 | `value` | task scores and columns → one value `[K0]` |
//! | 11 | `top` | ids, values, task scores and columns of the best K |
//!
//! A request is answered from one snapshot. The pass does no I/O but the fetching of remote rows in step 1. A batch goes
//! through steps 1 and 2 together. Its requests with equal filters share their plan and its words, those without a filter
//! are probed and scanned together; all else runs request by request, in memory that the thread keeps.

mod scratch;
mod trace;

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use crate::bloom::{Plan, Route};
use crate::columns::{Cell, Column};
use crate::error::{Error, Result};
use crate::filter;
use crate::ivf::{Counters, Index, Probing, Rows, Search};
use crate::model::Features;
use crate::overarch::Candidates;
use crate::snapshot::Snapshot;
use crate::sparse::{Lookup, LookupReport, OnDegraded};
use crate::topk::{Selector, unkey};
use crate::units::{ItemId, Slot};
use crate::wire::{EmbedRequest, Explain, Item, RankRequest, RetrieveRequest, Retrieved};

use scratch::{Scratch, with_scratch};
use trace::{Step, Trace, record};

/// When an answer stops being worth anything.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(pub Instant);

impl Deadline {
    fn check(self, before: &str) -> Result<()> {
        if Instant::now() < self.0 {
            Ok(())
        } else {
            Err(Error::deadline(format!("the deadline passed before step `{before}`")))
        }
    }
}

/// The query of one request and what its lookup met.
struct Query {
    vector: Vec<f32>,
    degraded_rows: u64,
    trace: Trace,
}

/// Answers a batch of retrievals, each with its own result.
pub fn retrieve(snapshot: &Snapshot, requests: &[&RetrieveRequest], deadline: Deadline) -> Vec<Result<Retrieved>> {
    let users: Vec<User<'_>> = requests
        .iter()
        .map(|r| User { features: r.features.as_ref(), vector: r.vector.as_deref(), on_degraded: r.on_degraded })
        .collect();
    let queries = embed_users(snapshot, &users, deadline);
    let (mut answers, mut asked, mut plans) = (Vec::new(), Vec::new(), BTreeMap::new());
    for (place, (request, query)) in requests.iter().zip(queries).enumerate() {
        answers.push(match query.and_then(|query| Asked::new(snapshot, request, place, query, &mut plans)) {
            Ok(one) => {
                asked.push(one);
                Err(Error::internal("the request was not answered"))
            }
            Err(e) => Err(e),
        });
    }
    with_scratch(|scratch| {
        search_together(snapshot, &mut asked, deadline, scratch);
        asked.sort_by(|a, b| a.planned.filter.cmp(&b.planned.filter));
        for group in asked.chunk_by_mut(|a, b| Rc::ptr_eq(&a.planned, &b.planned)) {
            if group.len() > 1 {
                scratch.words.keep(&group[0].planned.plan);
            }
            for one in group {
                answers[one.place] = answer(snapshot, one, deadline, scratch);
            }
        }
    });
    answers
}

/// Scores the items that a request names, through steps 1, 2 and 8 to 11.
///
/// # Errors
/// What is wrong with the request, or `DeadlineExceeded`.
pub fn rank(snapshot: &Snapshot, request: &RankRequest, deadline: Deadline) -> Result<Retrieved> {
    let user = User {
        features: request.features.as_ref(),
        vector: request.vector.as_deref(),
        on_degraded: request.on_degraded,
    };
    let mut query = embed_user(snapshot, user, deadline)?;
    let reading = Reading::new(snapshot, &request.columns, &request.constants)?;
    with_scratch(|scratch| {
        let mut unknown = Vec::new();
        scratch.candidates.clear();
        for &id in &request.items {
            match snapshot.ids.slot(ItemId(id)) {
                Some(slot) => scratch.candidates.push((0.0, slot)),
                None => unknown.push(id),
            }
        }
        scratch.candidates.sort_unstable_by_key(|(_, slot)| *slot);
        scratch.candidates.dedup_by_key(|(_, slot)| *slot);
        let trace = &mut query.trace;
        rescore(snapshot, &query.vector, scratch.candidates.len(), trace, scratch);
        score(snapshot, &query.vector, &reading, deadline, trace, scratch)?;
        let items = trace.step("top", || top(snapshot, &reading, request.items.len(), scratch));
        let explain =
            request.explain.then(|| Explain { returned: items.len() as u64, ..query.trace.explain(snapshot) });
        Ok(Retrieved { items, explain, degraded_rows: query.degraded_rows, unknown })
    })
}

/// The query embedding of features, through steps 1 and 2, and the ids that were answered with default rows.
///
/// # Errors
/// What is wrong with the request, or `DeadlineExceeded`.
pub fn embed(snapshot: &Snapshot, request: &EmbedRequest, deadline: Deadline) -> Result<(Vec<f32>, u64)> {
    let query = embed_user(
        snapshot,
        User { features: Some(&request.features), vector: None, on_degraded: request.on_degraded },
        deadline,
    )?;
    Ok((query.vector, query.degraded_rows))
}

/// Steps 4 to 11 for one request.
fn answer(snapshot: &Snapshot, asked: &mut Asked<'_>, deadline: Deadline, scratch: &mut Scratch) -> Result<Retrieved> {
    deadline.check("probe")?;
    let counters = find(snapshot, asked, scratch);
    deadline.check("rescore")?;
    let Asked { request, query: Query { vector, degraded_rows, trace }, reading, wanted, planned, .. } = asked;
    match snapshot.index.rows() {
        _ if wanted.exact => {}
        Rows::None => scratch.candidates.truncate(wanted.k0),
        _ => rescore(snapshot, vector, wanted.k0, trace, scratch),
    }
    score(snapshot, vector, reading, deadline, trace, scratch)?;
    let candidates = scratch.candidates.len() as u64;
    let items = trace.step("top", || top(snapshot, reading, request.k, scratch));

    let explain = request.explain.then(|| Explain {
        route: route_name(planned, wanted).into(),
        filter: planned.filter.clone(),
        pass_rate: planned.plan.pass_rate(),
        probed: counters.lists,
        scanned: counters.items,
        survivors: counters.survivors,
        candidates,
        returned: items.len() as u64,
        ..trace.explain(snapshot)
    });
    Ok(Retrieved { items, explain, degraded_rows: *degraded_rows, unknown: Vec::new() })
}

// Steps 1 and 2: from features to the query embedding.

/// Who asks: features for the user tower, or the query itself.
#[derive(Clone, Copy)]
struct User<'a> {
    features: Option<&'a Map<String, Value>>,
    vector: Option<&'a [f32]>,
    on_degraded: OnDegraded,
}

fn embed_user(snapshot: &Snapshot, user: User<'_>, deadline: Deadline) -> Result<Query> {
    embed_users(snapshot, &[user], deadline).pop().unwrap_or_else(|| Err(Error::internal("a user without a query")))
}

fn embed_users(snapshot: &Snapshot, users: &[User<'_>], deadline: Deadline) -> Vec<Result<Query>> {
    let mut queries: Vec<Result<Query>> = Vec::with_capacity(users.len());
    let mut towered: Vec<(usize, Features)> = Vec::new();
    for (n, user) in users.iter().enumerate() {
        queries.push(match (user.vector, user.features, &snapshot.package.user) {
            (Some(vector), None, _) => given_vector(vector, &snapshot.index),
            (None, Some(features), Some(tower)) => match tower.read(features) {
                Ok(features) => {
                    towered.push((n, features));
                    Err(Error::internal("the tower has not run"))
                }
                Err(e) => Err(e),
            },
            (None, Some(_), None) => {
                Err(Error::invalid("field `features`: this model has no user tower, expected `vector`"))
            }
            (Some(_), Some(_), _) => {
                Err(Error::invalid("fields `features` and `vector`: got both, expected one of them"))
            }
            (None, None, Some(_)) => {
                Err(Error::invalid("field `features`: got neither it nor `vector`, expected one of them"))
            }
            (None, None, None) => Err(Error::invalid("field `vector` is missing, expected the query's numbers")),
        });
    }
    // Requests that treat missing rows alike are looked up together; one that is wrong must not fail the others.
    for on_degraded in [OnDegraded::Fail, OnDegraded::DefaultRows] {
        let (of_kind, features): (Vec<usize>, Vec<Features>) =
            towered.iter().filter(|(n, _)| users[*n].on_degraded == on_degraded).cloned().unzip();
        match run_tower(snapshot, &features, on_degraded, deadline) {
            Ok(made) => of_kind.iter().zip(made).for_each(|(&n, query)| queries[n] = Ok(query)),
            Err(e) if features.len() == 1 => queries[of_kind[0]] = Err(e),
            Err(_) => {
                for (&n, features) in of_kind.iter().zip(&features) {
                    let alone = run_tower(snapshot, std::slice::from_ref(features), on_degraded, deadline);
                    queries[n] =
                        alone.and_then(|mut made| made.pop().ok_or_else(|| Error::internal("the tower made no query")));
                }
            }
        }
    }
    queries
}

fn given_vector(vector: &[f32], index: &Index) -> Result<Query> {
    index.check_query(vector).map_err(|e| e.within("field `vector`"))?;
    Ok(Query { vector: vector.to_vec(), degraded_rows: 0, trace: Trace::default() })
}

fn run_tower(
    snapshot: &Snapshot,
    features: &[Features],
    on_degraded: OnDegraded,
    deadline: Deadline,
) -> Result<Vec<Query>> {
    let Some(tower) = snapshot.package.user.as_ref().filter(|_| !features.is_empty()) else {
        return Ok(Vec::new());
    };
    deadline.check("lookup")?;
    let mut trace = Trace::default();
    let (pooled, report) =
        trace.step("lookup", || tower.lookup(features, &Lookup { deadline: Some(deadline.0), on_degraded }))?;
    let row_bytes = |name: &str| snapshot.package.table(name).map_or(0, |t| t.spec().row_bytes().unwrap_or(0) as u64);
    trace.count(report.iter().map(|t| t.ids).sum(), report.iter().map(|t| t.ids * row_bytes(&t.table)).sum());
    count_ids(&report);
    let made = trace.step("tower", || tower.run(&pooled))?;
    trace.count(features.len() as u64, 0);
    let degraded_rows = |n: usize| report.iter().filter_map(|t| t.degraded_of.get(n)).sum();
    let query = |(n, row): (usize, &[f32])| match snapshot.index.check_query(row) {
        Ok(()) => Ok(Query { vector: row.to_vec(), degraded_rows: degraded_rows(n), trace: trace.clone() }),
        Err(e) => Err(Error::internal(format!("the query of the user tower: {e}"))),
    };
    made.data().chunks_exact(snapshot.index.dimension()).enumerate().map(query).collect()
}

fn count_ids(report: &LookupReport) {
    for table in report {
        let labels = [("table", table.table.clone())];
        metrics::counter!("sterling_unseen_ids_total", &labels).increment(table.unseen);
        metrics::counter!("sterling_degraded_rows_total", &labels).increment(table.degraded);
    }
}

// Step 3: what is eligible.

/// A request on its way through the pass.
struct Asked<'a> {
    request: &'a RetrieveRequest,
    /// Where it stands in its batch.
    place: usize,
    query: Query,
    reading: Reading<'a>,
    wanted: Wanted,
    planned: Rc<Planned>,
    /// Ascending.
    excluded: Vec<Slot>,
    /// Where it was searched together with others: which of the thread's selectors holds what it found.
    searched: Option<(usize, Counters)>,
}

/// A filter's plan, and its canonical text.
struct Planned {
    plan: Plan,
    filter: String,
}

/// What a request asks of the search.
struct Wanted {
    k: usize,
    k0: usize,
    probes: usize,
    exact: bool,
}

impl<'a> Asked<'a> {
    fn new(
        snapshot: &'a Snapshot,
        request: &'a RetrieveRequest,
        place: usize,
        mut query: Query,
        plans: &mut BTreeMap<String, Rc<Planned>>,
    ) -> Result<Self> {
        let reading = Reading::new(snapshot, &request.columns, &request.constants)?;
        let wanted = Wanted::new(snapshot, request)?;
        let (planned, excluded) = query.trace.step("plan", || {
            let mut excluded: Vec<Slot> =
                request.exclude.iter().filter_map(|&id| snapshot.ids.slot(ItemId(id))).collect();
            excluded.sort_unstable();
            Ok::<_, Error>((Planned::of(snapshot, &request.filter, plans)?, excluded))
        })?;
        Ok(Asked { request, place, query, reading, wanted, planned, excluded, searched: None })
    }

    /// Candidates that a search without words collects: some of them may be excluded.
    fn room_unfiltered(&self, snapshot: &Snapshot) -> usize {
        self.wanted.room(snapshot) + self.excluded.len()
    }
}

impl Planned {
    /// Plans a filter, unless an equal one is among the `plans` of the batch.
    fn of(snapshot: &Snapshot, filter: &str, plans: &mut BTreeMap<String, Rc<Planned>>) -> Result<Rc<Planned>> {
        let canonical = filter::parse(filter)?.canonical();
        let filter = canonical.to_string();
        if let Some(planned) = plans.get(&filter) {
            return Ok(planned.clone());
        }
        let plan = Plan::new(&canonical, &snapshot.columns, &snapshot.filter)?;
        let planned = Rc::new(Planned { plan, filter: filter.clone() });
        plans.insert(filter, planned.clone());
        Ok(planned)
    }
}

impl Wanted {
    fn new(snapshot: &Snapshot, request: &RetrieveRequest) -> Result<Self> {
        let lists = snapshot.index.lists();
        let serving = &snapshot.recipe.serving;
        let probes = match request.probes {
            Some(probes) if probes > lists => {
                return Err(Error::invalid(format!(
                    "field `probes`: got {probes}, expected 1 to {lists}, the lists of the index"
                )));
            }
            Some(probes) => probes,
            None => serving.probes_of(lists),
        };
        let k0 = request.candidates.unwrap_or(serving.candidates.max(request.k)).min(snapshot.index.items());
        Ok(Wanted { k: request.k, k0, probes, exact: request.exact })
    }

    /// Candidates that a search collects. The int8 scores choose who is rescored: some more than K0, so that rounding at
    /// the edge costs nothing.
    fn room(&self, snapshot: &Snapshot) -> usize {
        match snapshot.index.rows() {
            Rows::None => self.k0,
            _ => self.k0 + self.k0 / 4 + 64,
        }
    }
}

fn route_name(plan: &Planned, wanted: &Wanted) -> &'static str {
    match (wanted.exact, plan.plan.route()) {
        (_, Route::Nothing) => "none",
        (true, _) => "exact",
        (_, Route::All) => "all",
        (_, Route::Slots(_)) => "postings",
        (_, Route::Words) => "words",
    }
}

// Steps 4 to 7: eligible candidates, at least K0 of them where there are as many.

/// Most candidates of all searches that run together; a selector takes about 34 bytes for each and keeps them.
const TOGETHER_MAX: usize = 1 << 18;

/// Steps 4 and 6 for all requests without a filter, list by list, where they are so many that they share lists.
fn search_together(snapshot: &Snapshot, asked: &mut [Asked<'_>], deadline: Deadline, scratch: &mut Scratch) {
    let index = &snapshot.index;
    let Scratch { selectors, batch, .. } = scratch;
    let mut left = TOGETHER_MAX;
    let mut together: Vec<(&mut Asked<'_>, usize)> = Vec::new();
    for one in asked.iter_mut().filter(|a| !a.wanted.exact && matches!(a.planned.plan.route(), Route::All)) {
        let room = one.room_unfiltered(snapshot);
        if room <= left {
            left -= room;
            together.push((one, room));
        }
    }
    // The largest first: then the first selectors alone grow large, and stay so.
    together.sort_by_key(|(_, room)| std::cmp::Reverse(*room));
    let probes = together.iter().map(|(one, _)| one.wanted.probes).sum();
    if together.len() < 2 || !index.shares_lists(probes) || deadline.check("probe").is_err() {
        return;
    }
    selectors.resize_with(together.len().max(selectors.len()), Selector::new);
    let start = Instant::now();
    let each = together.iter().zip(&mut *selectors);
    let mut searches: Vec<Search<'_>> = each
        .map(|((one, room), selector)| {
            selector.reset_by_id(*room, snapshot.ids.of_slots());
            Search::new(&one.query.vector, one.wanted.probes, selector)
        })
        .collect();
    index.search_batch(&mut searches, batch);
    let took = start.elapsed();
    let counters: Vec<Counters> = searches.iter().map(|s| s.counters).collect();
    search_steps(snapshot, took, Duration::ZERO, &counters[0]).iter().for_each(record);
    for (n, ((one, _), counters)) in together.into_iter().zip(counters).enumerate() {
        search_steps(snapshot, took, Duration::ZERO, &counters).into_iter().for_each(|s| one.query.trace.note(s));
        one.searched = Some((n, counters));
    }
}

/// What a search took, by the steps of the pass.
fn search_steps(snapshot: &Snapshot, took: Duration, words: Duration, counters: &Counters) -> [Step; 3] {
    let (lists, dimension) = (snapshot.index.lists() as u64, snapshot.index.dimension() as u64);
    let scan = took.saturating_sub(words + counters.probe_time);
    [
        ("probe", counters.probe_time, lists, lists * dimension),
        ("words", words, counters.items, 0),
        ("scan", scan, counters.survivors, counters.bytes),
    ]
}

/// Fills `scratch.candidates` with eligible slots and their int8 scores.
fn find(snapshot: &Snapshot, asked: &mut Asked<'_>, scratch: &mut Scratch) -> Counters {
    let unfiltered = asked.room_unfiltered(snapshot);
    let Asked { query: Query { vector, trace, .. }, wanted, planned, excluded, searched, .. } = asked;
    let (index, plan) = (&snapshot.index, &planned.plan);
    let Scratch { selector, selectors, search, words, candidates, .. } = scratch;
    candidates.clear();
    let is_excluded = |slot: Slot| excluded.binary_search(&slot).is_ok();
    if wanted.exact || matches!(plan.route(), Route::Slots(_)) {
        selector.reset_by_id(wanted.k0, snapshot.ids.of_slots());
        let counters = trace.step("scan", || match plan.route() {
            Route::Slots(slots) => {
                let eligible: Vec<Slot> = slots.iter().copied().filter(|&s| !is_excluded(s)).collect();
                index.search_slots(vector, &eligible, selector)
            }
            _ => index.search_exact(vector, |slot| plan.passes(slot) && !is_excluded(slot), selector),
        });
        trace.count(counters.survivors, counters.bytes);
        candidates.extend(selector.finish().iter().map(|&key| unkey(key)));
        return counters;
    }
    let probing = Probing {
        probes: wanted.probes,
        probes_max: snapshot.recipe.serving.probes_max_of(index.lists()),
        pass_rate: plan.pass_rate(),
    };
    let mut verify = |found: &mut Selector, trace: &mut Trace| {
        trace.step("verify", || {
            let checked = !plan.is_exact();
            let found = found.finish().iter().map(|&key| unkey(key));
            candidates.clear();
            candidates.extend(found.filter(|(_, slot)| !is_excluded(*slot) && (!checked || plan.passes(*slot))));
        });
        trace.count(candidates.len() as u64, 0);
        candidates.len()
    };
    // Without a filter the first P lists do, unless they hold too few: then the pass probes on, as it does with one.
    if matches!(plan.route(), Route::All) {
        let (counters, found) = match searched.take() {
            Some((n, counters)) => (counters, &mut selectors[n]),
            None => {
                let start = Instant::now();
                selector.reset_by_id(unfiltered, snapshot.ids.of_slots());
                let counters = index.search(vector, probing, None, selector, unfiltered, search);
                trace.add_all(search_steps(snapshot, start.elapsed(), Duration::ZERO, &counters));
                (counters, &mut *selector)
            }
        };
        if verify(found, trace) >= wanted.k || counters.lists == index.lists() as u64 {
            return counters;
        }
    }
    let mut room = wanted.room(snapshot);
    loop {
        selector.reset_by_id(room, snapshot.ids.of_slots());
        let start = Instant::now();
        let mut words_time = Duration::ZERO;
        let mut fill = |list, out: &mut [u64]| {
            let start = Instant::now();
            plan.words(&snapshot.filter, list, words, out);
            snapshot.filter.exclude(list, excluded, out);
            words_time += start.elapsed();
        };
        let counters = match plan.route() {
            Route::Nothing => Counters::default(),
            _ => index.search(vector, probing, Some(&mut fill), selector, room, search),
        };
        trace.add_all(search_steps(snapshot, start.elapsed(), words_time, &counters));
        let held = verify(selector, trace);
        // Where "maybe" bits filled the selection and too few of them held, more of the survivors are looked at.
        let all_seen = counters.survivors <= room as u64;
        if held >= wanted.k0 || all_seen || plan.is_exact() {
            return counters;
        }
        room = (room * 4).min(index.items());
    }
}

// Step 8: the scores that count.

/// Scores the candidates with the widest rows, read in their order, and keeps the best K0, best first.
fn rescore(snapshot: &Snapshot, vector: &[f32], k0: usize, trace: &mut Trace, scratch: &mut Scratch) {
    let Scratch { candidates, selector, slots, products, .. } = scratch;
    trace.step("rescore", || {
        slots.clear();
        slots.extend(candidates.iter().map(|(_, slot)| slot.0));
        slots.sort_unstable();
        products.resize(slots.len(), 0.0);
        snapshot.index.products(vector, slots, products);
        selector.reset_by_id(k0, snapshot.ids.of_slots());
        slots.iter().zip(&*products).for_each(|(&slot, &score)| selector.push(score, Slot(slot)));
        candidates.clear();
        candidates.extend(selector.finish().iter().map(|&key| unkey(key)));
    });
    trace.count(slots.len() as u64, slots.len() as u64 * snapshot.index.row_bytes());
}

// Steps 9 and 10: task scores and values.

/// What a request reads off its candidates.
struct Reading<'a> {
    columns: Vec<&'a Column>,
    constants: Vec<f32>,
}

impl<'a> Reading<'a> {
    fn new(snapshot: &'a Snapshot, columns: &[String], constants: &BTreeMap<String, f32>) -> Result<Self> {
        let columns = columns.iter().map(|name| snapshot.columns.column(name).map_err(|e| e.within("field `columns`")));
        Ok(Reading { columns: columns.collect::<Result<_>>()?, constants: snapshot.value.constants(constants)? })
    }
}

/// Fills `scratch.tasks` `[T, K0]` and `scratch.values` `[K0]`.
fn score(
    snapshot: &Snapshot,
    vector: &[f32],
    reading: &Reading<'_>,
    deadline: Deadline,
    trace: &mut Trace,
    scratch: &mut Scratch,
) -> Result<()> {
    let Scratch { candidates, rows, columns, tasks, values, similarity, program, .. } = scratch;
    let count = candidates.len();
    columns.resize_with(snapshot.numbers.len(), Vec::new);
    for (column, (_, numbers)) in columns.iter_mut().zip(&snapshot.numbers) {
        column.clear();
        column.extend(candidates.iter().map(|(_, slot)| numbers[slot.index()]));
    }
    let column = |name: &str| snapshot.numbers.iter().position(|(n, _)| n == name).map(|n| columns[n].as_slice());
    tasks.clear();
    if let Some(overarch) = snapshot.package.overarch.as_ref().filter(|_| count > 0) {
        deadline.check("overarch")?;
        let dimension = snapshot.index.dimension();
        tasks.resize(overarch.tasks() * count, 0.0);
        trace.step("overarch", || {
            rows.resize(count * dimension, 0.0);
            rows.chunks_exact_mut(dimension)
                .zip(&*candidates)
                .for_each(|(row, (_, slot))| snapshot.index.row(*slot, row));
            let read: Vec<&[f32]> = overarch.columns().iter().filter_map(|name| column(name)).collect();
            overarch.score(&Candidates { query: vector, items: rows, columns: &read }, tasks)
        })?;
        trace.count(count as u64, (count * dimension * 4) as u64);
    }
    trace.step("value", || {
        similarity.clear();
        similarity.extend(candidates.iter().map(|(score, _)| *score));
        values.resize(count, 0.0);
        let names = &snapshot.package.spec.tasks;
        let input = |name: &String| match names.iter().position(|t| t.name == *name) {
            Some(task) => &tasks[task * count..(task + 1) * count],
            None => column(name).unwrap_or(similarity),
        };
        let inputs: Vec<&[f32]> = snapshot.value.inputs().iter().map(input).collect();
        snapshot.value.evaluate(&inputs, &reading.constants, program, values);
    });
    trace.count(count as u64, 0);
    Ok(())
}

// Step 11: what goes back.

/// The best K candidates by value; equal values by the lower item id.
fn top(snapshot: &Snapshot, reading: &Reading<'_>, k: usize, scratch: &mut Scratch) -> Vec<Item> {
    let Scratch { candidates, tasks, values, order, .. } = scratch;
    let count = candidates.len();
    let id = |n: &u32| snapshot.ids.item(candidates[*n as usize].1);
    let better = |a: &u32, b: &u32| values[*b as usize].total_cmp(&values[*a as usize]).then_with(|| id(a).cmp(&id(b)));
    order.clear();
    order.extend(0..count as u32);
    if k < count {
        order.select_nth_unstable_by(k, better);
        order.truncate(k);
    }
    order.sort_unstable_by(better);
    let names = &snapshot.package.spec.tasks;
    let item = |&n: &u32| {
        let at = n as usize;
        let (similarity, slot) = candidates[at];
        let of_task = |(task, spec): (usize, &crate::model::TaskSpec)| (spec.name.clone(), tasks[task * count + at]);
        Item {
            id: snapshot.ids.item(slot).0,
            score: values[at],
            similarity,
            tasks: names.iter().enumerate().map(of_task).collect(),
            columns: reading.columns.iter().map(|c| (c.name().to_owned(), json(c.cell(slot)))).collect(),
        }
    };
    order.iter().map(item).collect()
}

fn json(cell: Cell<'_>) -> Value {
    match cell {
        Cell::Missing => Value::Null,
        Cell::Integer(x) => x.into(),
        Cell::Integers(many) => many.into(),
        Cell::Float(x) => x.into(),
        Cell::Text(text) => text.into(),
        Cell::Texts(many) => many.into(),
    }
}
