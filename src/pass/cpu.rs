//! The pass on a CPU, top to bottom: embed, search, score, top.

use std::time::Instant;

use super::batch::{Batch, Pass};
use super::fetch::lookup_each;
use super::scratch::Scratch;
use super::trace::{Step, Trace};
use super::work::{Prepared, Query, Search, Task};
use crate::device::heap;
use crate::error::{Error, Result};
use crate::filter::Route;
use crate::limits::COMPONENT_MAX;
use crate::request::{Answer, Content, Explain, OnDegraded, Ranked};
use crate::search::{self, Found, Sink};
use crate::tower::{self, Candidates, FeatureRow, Pooled, Threads, Tower};
use crate::units::Slot;
use crate::view::View;

/// Memory that grew for more candidates than these is given back: those who ask for so many pay for it each time, and no one
/// else holds it for them.
const KEPT_CANDIDATES_MAX: usize = 20_000;

/// The pass on a CPU: on one thread, but for graphs, which take as many as they are given.
pub struct Cpu {
    threads: Threads,
    searches: search::Scratch,
    scratch: Scratch,
}

/// A request with its query embedding, on its way through the pass.
struct Asked<'a> {
    /// Its place in the batch.
    place: usize,
    prepared: &'a Prepared,
    /// `[D]`
    vector: Vec<f32>,
    degraded_rows: u64,
    trace: Trace,
}

impl Cpu {
    /// A pass whose graphs run on `threads`.
    pub fn new(threads: Threads) -> Self {
        Cpu { threads, searches: search::Scratch::default(), scratch: Scratch::default() }
    }
}

impl Pass for Cpu {
    fn run(&mut self, batch: &dyn Batch) {
        let threads = self.threads.clone();
        threads.run(|| self.run_here(batch));
        let most = (0..batch.len()).map(|n| batch.prepared(n).candidates()).max().unwrap_or(0);
        if most > KEPT_CANDIDATES_MAX {
            (self.searches, self.scratch) = Default::default();
            heap::announce();
        }
    }

    fn rest(&mut self) {
        self.threads.run(heap::give_back);
    }
}

impl Cpu {
    fn run_here(&mut self, batch: &dyn Batch) {
        let wanted: Vec<usize> = (0..batch.len()).filter(|&place| batch.is_wanted(place)).collect();
        let Some(&first) = wanted.first() else { return };
        let view = batch.prepared(first).view().clone();
        let Cpu { threads, searches, scratch } = self;
        let parts = view.parts();
        let catalogue = view.catalogue(&parts);
        let (mut searched, mut ranked) = (Vec::new(), Vec::new());
        for asked in embed(batch, &view, &wanted, threads, &mut scratch.graphs) {
            match &asked.prepared.task {
                Task::Embed => batch.answer(asked.place, Ok(asked.embedding())),
                Task::Rank { slots, .. } => ranked.push((asked, slots)),
                Task::Retrieve(search) => {
                    view.record(&asked.vector);
                    searched.push((asked, search));
                }
            }
        }
        let traces = searched.iter_mut().map(|(asked, _)| std::mem::take(&mut asked.trace)).collect();
        let queries: Vec<search::Query<'_>> =
            searched.iter().map(|(asked, search)| query(&view, &asked.vector, search)).collect();
        let reranker = Reranker { view: &view, threads, scratch };
        let mut replies = Replies { batch, searched: &searched, traces, reranker };
        catalogue.search(&queries, searches, &mut replies);
        let Replies { mut reranker, .. } = replies;
        for (mut asked, slots) in ranked.into_iter().filter(|(asked, _)| batch.is_wanted(asked.place)) {
            let trace = std::mem::take(&mut asked.trace);
            catalogue.score(&asked.vector, slots, searches, &mut |found| {
                batch.answer(asked.place, reranker.answer(batch, &asked, trace.clone(), found));
            });
        }
    }
}

fn query<'a>(view: &'a View, vector: &'a [f32], search: &'a Search) -> search::Query<'a> {
    search::Query {
        vector,
        plan: &search.planned.plan,
        beside: &search.planned.beside,
        excluded: &search.excluded,
        k: search.k,
        k0: search.k0,
        probes: search.probes.probes,
        ending: search.ending(view),
        exact: search.exact,
    }
}

// Steps 1 and 2: from features to query embeddings.

/// The requests with their query embeddings; those that have none are answered with the reason.
fn embed<'a>(
    batch: &'a dyn Batch,
    view: &View,
    wanted: &[usize],
    threads: &Threads,
    graphs: &mut tower::Scratch,
) -> Vec<Asked<'a>> {
    let mut embedded = Vec::with_capacity(wanted.len());
    let mut towered: Vec<(usize, &FeatureRow)> = Vec::new();
    for &place in wanted {
        let prepared = batch.prepared(place);
        match &prepared.query {
            Query::Features { row, .. } => towered.push((place, row)),
            Query::Vector(vector) => {
                let trace = prepared.trace.clone();
                embedded.push(Asked { place, prepared, vector: vector.clone(), degraded_rows: 0, trace });
            }
        }
    }
    let Some(tower) = view.main().package.user.as_ref().filter(|_| !towered.is_empty()) else { return embedded };
    let mut trace = Trace::default();
    let ids = towered.iter().map(|(_, row)| row.ids() as u64).sum();
    let bytes = towered.iter().map(|(_, row)| tower.row_bytes(row)).sum();
    let pooled = trace.step("lookup", || lookup(batch, tower, &towered), |_| (ids, bytes));
    let mut ready: Vec<(usize, &FeatureRow, Pooled)> = Vec::new();
    for (&(place, row), pooled) in towered.iter().zip(pooled) {
        match pooled {
            Ok(pooled) => ready.push((place, row, pooled)),
            Err(e) => batch.answer(place, Err(e)),
        }
    }
    let rows: Vec<(&FeatureRow, &Pooled)> = ready.iter().map(|(_, row, pooled)| (*row, pooled)).collect();
    let count = rows.len() as u64;
    let vectors = trace.step("tower", || run_each(tower, &rows, threads, graphs), |_| (count, 0));
    for ((place, _, pooled), vector) in ready.iter().zip(vectors) {
        let prepared = batch.prepared(*place);
        match vector {
            Ok(vector) => {
                let trace = trace.and(&prepared.trace);
                embedded.push(Asked { place: *place, prepared, vector, degraded_rows: pooled.degraded_rows, trace });
            }
            Err(e) => batch.answer(*place, Err(e)),
        }
    }
    embedded
}

/// The pooled embeddings of all rows; those that were not fetched before are looked up now, together.
fn lookup(batch: &dyn Batch, tower: &Tower, towered: &[(usize, &FeatureRow)]) -> Vec<Result<Pooled>> {
    let fetched = |&(place, _): &(usize, &FeatureRow)| match &batch.prepared(place).query {
        Query::Features { fetched: Some(Ok(pooled)), .. } => Some(Ok(pooled.clone())),
        Query::Features { fetched: Some(Err(e)), .. } => Some(Err(e.again())),
        _ => None,
    };
    let mut pooled: Vec<Option<Result<Pooled>>> = towered.iter().map(fetched).collect();
    let missing: Vec<usize> = (0..towered.len()).filter(|n| pooled[*n].is_none()).collect();
    let alike = |n: &usize| (towered[*n].1, batch.prepared(towered[*n].0).reading.on_degraded);
    let rows: Vec<(&FeatureRow, OnDegraded)> = missing.iter().map(alike).collect();
    let deadline = missing.iter().map(|&n| batch.deadline(towered[n].0)).max().flatten();
    for (n, found) in missing.into_iter().zip(lookup_each(tower, &rows, deadline)) {
        pooled[n] = Some(found);
    }
    let missing = || Err(Error::internal("a row without a lookup"));
    pooled.into_iter().map(|pooled| pooled.unwrap_or_else(missing)).collect()
}

/// The query embedding of each row: all through the graph together, or, where that fails, each alone.
fn run_each(
    tower: &Tower,
    rows: &[(&FeatureRow, &Pooled)],
    threads: &Threads,
    graphs: &mut tower::Scratch,
) -> Vec<Result<Vec<f32>>> {
    let mut run = |rows: &[(&FeatureRow, &Pooled)]| -> Result<Vec<Result<Vec<f32>>>> {
        let made = tower.run(rows, threads, graphs)?;
        let vector = |row: &[f32]| match row.iter().all(|x| x.abs() <= COMPONENT_MAX) {
            true => Ok(row.to_vec()),
            false => Err(Error::internal("the user tower made a query that is not finite or too large")),
        };
        Ok(made.data().chunks_exact(made.shape()[1]).map(vector).collect())
    };
    match run(rows) {
        Ok(vectors) => vectors,
        Err(e) if rows.len() <= 1 => rows.iter().map(|_| Err(e.again())).collect(),
        Err(_) => rows.iter().map(|row| run(&[*row]).and_then(|mut vectors| vectors.swap_remove(0))).collect(),
    }
}

impl Asked<'_> {
    fn embedding(&self) -> Answer {
        let content = Content::Embedding(self.vector.clone());
        Answer { content, degraded_rows: self.degraded_rows, explain: None }
    }
}

// Steps 4 to 8 are a search, whose findings come here one by one.

/// Reranks what each search found and answers its request.
struct Replies<'a> {
    batch: &'a dyn Batch,
    searched: &'a [(Asked<'a>, &'a Search)],
    traces: Vec<Trace>,
    reranker: Reranker<'a>,
}

impl Sink for Replies<'_> {
    fn is_wanted(&mut self, n: usize) -> bool {
        let place = self.searched[n].0.place;
        if self.batch.deadline(place).is_some_and(|deadline| Instant::now() >= deadline) {
            self.batch.answer(place, Err(late("probe")));
            return false;
        }
        self.batch.is_wanted(place)
    }

    fn found(&mut self, n: usize, found: Found<'_>) {
        let asked = &self.searched[n].0;
        let trace = std::mem::take(&mut self.traces[n]);
        self.batch.answer(asked.place, self.reranker.answer(self.batch, asked, trace, found));
    }
}

fn late(before: &str) -> Error {
    Error::deadline(format!("the deadline passed before step `{before}`"))
}

/// Steps 9 to 11 for one request after the other.
struct Reranker<'a> {
    view: &'a View,
    threads: &'a Threads,
    scratch: &'a mut Scratch,
}

impl Reranker<'_> {
    fn answer(&mut self, batch: &dyn Batch, asked: &Asked<'_>, mut trace: Trace, found: Found<'_>) -> Result<Answer> {
        self.note_search(&mut trace, &found);
        let candidates: &[(f32, Slot)] = found.candidates;
        self.read_columns(candidates);
        self.score(batch, asked, candidates, &mut trace)?;
        let count = candidates.len() as u64;
        trace.step("value", || self.value(&asked.prepared.constants, candidates), |_| (count, 0));
        let (k, unknown) = match &asked.prepared.task {
            Task::Retrieve(search) => (search.k, Vec::new()),
            Task::Rank { slots, unknown } => (slots.len(), unknown.clone()),
            Task::Embed => (0, Vec::new()),
        };
        let ranked = trace.step("top", || self.top(k, candidates), |_| (0, 0));
        let ranked = Ranked { unknown, ..ranked };
        let explain = asked.prepared.reading.explain.then(|| self.explain(asked, &trace, &found, &ranked));
        Ok(Answer { content: Content::Items(ranked), degraded_rows: asked.degraded_rows, explain })
    }

    fn note_search(&self, trace: &mut Trace, found: &Found<'_>) {
        let index = &self.view.main().index;
        let (lists, counters) = (index.lists() as u64, &found.counters);
        let steps = [
            ("probe", found.times.probe, lists, lists * index.dimension() as u64),
            ("words", found.times.words, counters.items, 0),
            ("scan", found.times.scan, counters.survivors, counters.bytes),
            ("verify", found.times.verify, found.candidates.len() as u64, 0),
            ("rescore", found.times.rescore, found.rescored, found.rescored * index.row_bytes()),
        ];
        let steps = steps.into_iter().filter(|(_, took, ..)| !took.is_zero());
        trace.add(steps.map(|(name, took, items, bytes)| Step { name, took, items, bytes }));
    }

    /// The snapshot's numeric columns at the candidates.
    fn read_columns(&mut self, candidates: &[(f32, Slot)]) {
        let columns = &mut self.scratch.columns;
        columns.resize_with(self.view.numbers().len(), Vec::new);
        for (number, column) in columns.iter_mut().enumerate() {
            column.clear();
            self.view.read_numbers(number, candidates.iter().map(|(_, slot)| *slot), column);
        }
    }

    fn column(&self, name: &str) -> Option<&[f32]> {
        let place = self.view.numbers().position(|n| n == name)?;
        Some(&self.scratch.columns[place])
    }

    /// Step 9: task scores `[T, K0]`, a run of candidates at a time.
    fn score(
        &mut self,
        batch: &dyn Batch,
        asked: &Asked<'_>,
        candidates: &[(f32, Slot)],
        trace: &mut Trace,
    ) -> Result<()> {
        let mut tasks = std::mem::take(&mut self.scratch.tasks);
        let mut graphs = std::mem::take(&mut self.scratch.graphs);
        tasks.clear();
        let mut scored = Ok(());
        if let Some(overarch) = self.view.overarch().filter(|_| !candidates.is_empty()) {
            let count = candidates.len();
            tasks.resize(overarch.tasks() * count, 0.0);
            let columns: Vec<&[f32]> = overarch.columns().iter().filter_map(|name| self.column(name)).collect();
            let row = |n: usize, row: &mut [f32]| self.view.row(candidates[n].1, row);
            let run = Candidates { query: &asked.vector, count, row: &row, columns: &columns };
            let deadline = batch.deadline(asked.place);
            let mut between = || match deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                true => Err(late("overarch")),
                false => Ok(()),
            };
            let bytes = (count * self.view.dimension() * 4) as u64;
            let run = || overarch.score(&run, self.threads, &mut graphs, &mut between, &mut tasks);
            scored = trace.step("overarch", run, |_| (count as u64, bytes));
        }
        (self.scratch.tasks, self.scratch.graphs) = (tasks, graphs);
        scored
    }

    /// Step 10: one value a candidate, `[K0]`.
    fn value(&mut self, constants: &[f32], candidates: &[(f32, Slot)]) {
        let mut values = std::mem::take(&mut self.scratch.values);
        let mut similarity = std::mem::take(&mut self.scratch.similarity);
        let mut program = std::mem::take(&mut self.scratch.program);
        let count = candidates.len();
        similarity.clear();
        similarity.extend(candidates.iter().map(|(score, _)| *score));
        values.resize(count, 0.0);
        let names = &self.view.main().package.spec.tasks;
        let input = |name: &String| match names.iter().position(|task| task.name == *name) {
            Some(task) => &self.scratch.tasks[task * count..(task + 1) * count],
            None => self.column(name).unwrap_or(&similarity),
        };
        let model = self.view.value();
        let inputs: Vec<&[f32]> = model.inputs().iter().map(input).collect();
        model.evaluate(&inputs, constants, &mut program, &mut values);
        (self.scratch.values, self.scratch.similarity, self.scratch.program) = (values, similarity, program);
    }

    /// Step 11: the best K candidates by value; equal values by the lower item id.
    fn top(&mut self, k: usize, candidates: &[(f32, Slot)]) -> Ranked {
        let Scratch { tasks, values, order, .. } = &mut *self.scratch;
        let count = candidates.len();
        let id = |n: u32| self.view.id(candidates[n as usize].1);
        // Sums with +0 make -0 and 0 equal in the total order.
        let value = |n: u32| values[n as usize] + 0.0;
        let better = |a: &u32, b: &u32| value(*b).total_cmp(&value(*a)).then_with(|| id(*a).cmp(&id(*b)));
        order.clear();
        order.extend(0..count as u32);
        if k < count {
            order.select_nth_unstable_by(k, better);
            order.truncate(k);
        }
        order.sort_unstable_by(better);
        let of_task = |task: usize| order.iter().map(move |&n| task * count + n as usize);
        Ranked {
            slots: order.iter().map(|&n| candidates[n as usize].1).collect(),
            ids: order.iter().map(|&n| id(n)).collect(),
            scores: order.iter().map(|&n| value(n)).collect(),
            similarities: order.iter().map(|&n| candidates[n as usize].0).collect(),
            tasks: (0..tasks.len() / count.max(1)).flat_map(of_task).map(|at| tasks[at]).collect(),
            unknown: Vec::new(),
        }
    }

    fn explain(&self, asked: &Asked<'_>, trace: &Trace, found: &Found<'_>, ranked: &Ranked) -> Explain {
        let explain = Explain {
            steps: trace.reports(),
            kernel: self.view.main().index.kernel(),
            returned: ranked.ids.len() as u64,
            ..Explain::default()
        };
        let Task::Retrieve(search) = &asked.prepared.task else { return explain };
        Explain {
            route: match (search.exact, search.planned.plan.route()) {
                (_, Route::Nothing) => "none",
                (true, _) => "exact",
                (_, Route::All) => "all",
                (_, Route::Slots(_)) => "postings",
                (_, Route::Words) => "words",
            },
            filter: search.planned.canonical.clone(),
            pass_rate: search.planned.plan.pass_rate(),
            probes: matches!(search.planned.plan.route(), Route::All | Route::Words)
                .then_some(search.probes)
                .filter(|_| !search.exact),
            probed: found.counters.lists,
            scanned: found.counters.items,
            survivors: found.counters.survivors,
            candidates: found.candidates.len() as u64,
            ..explain
        }
    }
}
