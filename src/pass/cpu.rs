//! The pass on a CPU, top to bottom: embed, search, score, top.

use std::time::Instant;

use super::batch::{Batch, Pass};
use super::embed::{Asked, embed};
use super::merge::{self, Part, Parts};
use super::scratch::Scratch;
use super::trace::{Step, Trace};
use super::work::{Search, Selection, Task};
use crate::device::heap;
use crate::error::{Error, Result};
use crate::filter::Route;
use crate::ivf::Counters;
use crate::model::{QuerySpec, SIMILARITY};
use crate::request::{Answer, Content, Explain, QueryReport, Ranked, RankedAhead, Selected, ShardSelected};
use crate::search::{self, Found, Sink, Times};
use crate::tower::{Candidates, Threads};
use crate::units::{Slot, by_score};
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

impl Cpu {
    /// A pass whose graphs run on `threads`.
    pub fn new(threads: Threads) -> Self {
        Cpu { threads, searches: search::Scratch::default(), scratch: Scratch::default() }
    }
}

impl Pass for Cpu {
    fn run(&mut self, batch: &dyn Batch) {
        match batch.is_empty() || !batch.prepared(0).view().main().package.runs_graphs() {
            true => self.run_here(batch),
            false => self.threads.clone().run(|| self.run_here(batch)),
        }
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
        let (mut searched, mut ranked, mut chosen) = (Vec::new(), Vec::new(), Vec::new());
        for asked in embed(batch, &view, &wanted, threads, &mut scratch.graphs) {
            match &asked.prepared.task {
                Task::Embed { .. } => batch.answer(asked.place, Ok(asked.embedding())),
                Task::Rank { slots, .. } => ranked.push((asked, slots)),
                Task::Retrieve(search) | Task::Select { search, .. } => {
                    view.record(&asked.vector);
                    searched.push((asked, search));
                }
                Task::Rerank { candidates, .. } => chosen.push((asked, candidates)),
            }
        }
        let width = view.dimension();
        let (mut queries, mut asked_by) = (Vec::new(), Vec::new());
        for (n, (asked, search)) in searched.iter().enumerate() {
            queries.extend(queries_of(&view, asked, search));
            asked_by.extend((0..search.k0.len()).map(|query| (n, query)));
        }
        let states = searched.iter().map(|(asked, search)| State::new(asked, search.k0.len())).collect();
        let reranker = Reranker { view: &view, threads, scratch };
        let mut replies = Replies { batch, searched: &searched, asked_by, states, reranker };
        catalogue.search(&queries, searches, &mut replies);
        let Replies { mut reranker, .. } = replies;
        for (asked, slots) in ranked.iter().filter(|(asked, _)| batch.is_wanted(asked.place)) {
            let queries = asked.vector.chunks_exact(width);
            let mut state = State::new(asked, queries.len());
            for (n, vector) in queries.enumerate() {
                catalogue.score(vector, slots, searches, &mut |found| {
                    if let Some(answer) = reranker.found(batch, asked, &mut state, n, found) {
                        batch.answer(asked.place, answer);
                    }
                });
            }
        }
        for (asked, candidates) in chosen.iter().filter(|(asked, _)| batch.is_wanted(asked.place)) {
            let mut state = State::new(asked, candidates.len());
            for (n, of_query) in candidates.iter().enumerate() {
                let (mut candidates, counters) = (of_query.clone(), Counters::default());
                let times = Times::default();
                let found = Found { candidates: &mut candidates, selected: &[], counters, rescored: 0, times };
                if let Some(answer) = reranker.found(batch, asked, &mut state, n, found) {
                    batch.answer(asked.place, answer);
                }
            }
        }
    }
}

/// How a search finds eligible items, as an explanation says it.
pub(super) fn route_of(search: &Search) -> &'static str {
    match (search.exact, search.planned.plan.route()) {
        (_, Route::Nothing) => "none",
        (true, _) => "exact",
        (_, Route::All) => "all",
        (_, Route::Slots(_)) => "postings",
        (_, Route::Words) => "words",
    }
}

/// Whether a shard's search, which looked at so many lists, could probe on for more.
pub(super) fn may_go_further(view: &View, (search, selection): (&Search, &Selection), lists: u64) -> bool {
    !selection.further && route_of(search) == "all" && lists < view.main().index.lists() as u64
}

/// What a search asks, of each query of the user.
fn queries_of<'a>(view: &'a View, asked: &'a Asked<'_>, search: &'a Search) -> impl Iterator<Item = search::Query<'a>> {
    let selected = |n: usize| match &asked.prepared.task {
        Task::Select { selection, .. } => Some(selection.own[n]),
        _ => None,
    };
    let vectors = asked.vector.chunks_exact(view.dimension());
    vectors.zip(search.queries(view)).enumerate().map(move |(n, (vector, query))| search::Query {
        vector,
        selected: selected(n),
        ..query
    })
}

// Steps 4 to 8 are a search, whose findings come here one by one.

/// Reranks what each search found and answers its request.
struct Replies<'a> {
    batch: &'a dyn Batch,
    searched: &'a [(Asked<'a>, &'a Search)],
    /// Of each query of the search whose it is, by its place among `searched`, and which of that one's.
    asked_by: Vec<(usize, usize)>,
    states: Vec<State>,
    reranker: Reranker<'a>,
}

/// How far a request has come whose queries are searched.
struct State {
    trace: Trace,
    /// Where there are several queries, what they have found.
    parts: Option<Parts>,
    /// Of a shard's part of the candidates, what the queries have found so far.
    selected: Vec<Option<Selected>>,
    is_answered: bool,
}

impl State {
    fn new(asked: &Asked<'_>, queries: usize) -> Self {
        let is_part = matches!(asked.prepared.task, Task::Select { .. });
        let parts = (queries > 1 && !is_part).then(|| Parts::new(queries));
        let selected = if is_part { vec![None; queries] } else { Vec::new() };
        State { trace: asked.trace.clone(), parts, selected, is_answered: false }
    }
}

impl Sink for Replies<'_> {
    fn is_wanted(&mut self, n: usize) -> bool {
        let (request, _) = self.asked_by[n];
        let place = self.searched[request].0.place;
        if self.states[request].is_answered {
            return false;
        }
        if self.batch.deadline(place).is_some_and(|deadline| Instant::now() >= deadline) {
            self.states[request].is_answered = true;
            self.batch.answer(place, Err(late("probe")));
            return false;
        }
        self.batch.is_wanted(place)
    }

    fn found(&mut self, n: usize, found: Found<'_>) {
        let (request, query) = self.asked_by[n];
        let (asked, state) = (&self.searched[request].0, &mut self.states[request]);
        if let Some(answer) = self.reranker.found(self.batch, asked, state, query, found) {
            state.is_answered = true;
            self.batch.answer(asked.place, answer);
        }
    }
}

pub(super) fn late(before: &str) -> Error {
    Error::deadline(format!("the deadline passed before step `{before}`"))
}

/// Steps 9 to 11 for one request after the other.
struct Reranker<'a> {
    view: &'a View,
    threads: &'a Threads,
    scratch: &'a mut Scratch,
}

impl Reranker<'_> {
    /// Takes what query `n` of a request found; the request's answer where it was the last one.
    fn found(
        &mut self,
        batch: &dyn Batch,
        asked: &Asked<'_>,
        state: &mut State,
        n: usize,
        found: Found<'_>,
    ) -> Option<Result<Answer>> {
        if let Task::Select { search, selection } = &asked.prepared.task {
            return self.select(batch, asked, state, (n, search, selection), &found).transpose();
        }
        let Some(parts) = &mut state.parts else {
            let trace = std::mem::take(&mut state.trace);
            return Some(self.answer(batch, asked, trace, &found, &[]));
        };
        let parts = parts.take(n, &found)?;
        let mut trace = std::mem::take(&mut state.trace);
        let (counters, rescored, times) = merge::totals(&parts);
        let (main, specs) = (self.view.main(), self.view.main().package.spec.queries());
        let how = main.package.spec.user.as_ref().and_then(|user| user.merge).unwrap_or_default();
        let id = |slot| self.view.id(slot);
        let products = |query: &[f32], slots: &[Slot], out: &mut [f32]| self.view.products(query, slots, out);
        let merged = || merge::merge((how, specs), &parts, &asked.vector, &products, &id);
        let mut candidates = trace.step("merge", merged, |merged| (merged.len() as u64, 0));
        let found = Found { candidates: &mut candidates, selected: &[], counters, rescored, times };
        Some(self.answer(batch, asked, trace, &found, &parts))
    }

    /// Takes what query `n` of a shard's part selected; the request's answer where it was the last one.
    fn select(
        &mut self,
        batch: &dyn Batch,
        asked: &Asked<'_>,
        state: &mut State,
        (n, search, selection): (usize, &Search, &Selection),
        found: &Found<'_>,
    ) -> Result<Option<Answer>> {
        self.note_search(&mut state.trace, found);
        let mut by_slot: Vec<(Slot, f32)> = found.candidates.iter().map(|&(score, slot)| (slot, score)).collect();
        by_slot.sort_unstable_by_key(|(slot, _)| *slot);
        let score = |slot: Slot| by_slot.binary_search_by_key(&slot, |(slot, _)| *slot).ok().map(|at| by_slot[at].1);
        let mut selected = Selected {
            is_all: found.counters.survivors <= selection.own[n] as u64,
            may_go_further: may_go_further(self.view, (search, selection), found.counters.lists),
            selected: selection.selected[n],
            candidates: selection.candidates[n],
            ..Selected::default()
        };
        for &(code, slot) in found.selected {
            if let Some(score) = score(slot) {
                selected.ids.push(self.view.id(slot));
                selected.codes.push(code);
                selected.scores.push(score);
            }
        }
        state.selected[n] = Some(selected);
        let Some(queries) = state.selected.iter().cloned().collect::<Option<Vec<Selected>>>() else { return Ok(None) };
        let mut trace = std::mem::take(&mut state.trace);
        let ahead = match selection.ahead {
            Some(k) => self.ahead(batch, asked, &mut trace, found.candidates, (search.k0[n], k))?,
            None => None,
        };
        let explain = asked.prepared.reading.explain;
        let explain = explain.then(|| self.explain(asked, &trace, found, &[], &Ranked::default()));
        let content = Content::Selected(Box::new(ShardSelected { queries, ahead }));
        Ok(Some(Answer { content, degraded_rows: asked.degraded_rows, explain }))
    }

    /// The best `k` by value of the `k0` best that a shard found; none where it found nothing.
    fn ahead(
        &mut self,
        batch: &dyn Batch,
        asked: &Asked<'_>,
        trace: &mut Trace,
        found: &[(f32, Slot)],
        (k0, k): (usize, usize),
    ) -> Result<Option<RankedAhead>> {
        let mut candidates = found.to_vec();
        candidates.sort_unstable_by(|a, b| self.view.best_first(a, b));
        candidates.truncate(k0);
        let Some(&(score, slot)) = candidates.last() else { return Ok(None) };
        let ranked = self.ranked(batch, asked, trace, &candidates, k)?;
        Ok(Some(RankedAhead { is_all: candidates.len() <= k, last: (self.view.id(slot), score), ranked }))
    }

    fn answer(
        &mut self,
        batch: &dyn Batch,
        asked: &Asked<'_>,
        mut trace: Trace,
        found: &Found<'_>,
        parts: &[Part],
    ) -> Result<Answer> {
        self.note_search(&mut trace, found);
        let (k, unknown) = match &asked.prepared.task {
            Task::Retrieve(search) => (search.k, Vec::new()),
            Task::Rank { slots, unknown } => (slots.len(), unknown.clone()),
            Task::Rerank { k, .. } => (*k, Vec::new()),
            Task::Embed { .. } | Task::Select { .. } => (0, Vec::new()),
        };
        let ranked = Ranked { unknown, ..self.ranked(batch, asked, &mut trace, found.candidates, k)? };
        let explain = asked.prepared.reading.explain.then(|| self.explain(asked, &trace, found, parts, &ranked));
        Ok(Answer { content: Content::Items(ranked), degraded_rows: asked.degraded_rows, explain })
    }

    /// Steps 9 to 11 for candidates.
    fn ranked(
        &mut self,
        batch: &dyn Batch,
        asked: &Asked<'_>,
        trace: &mut Trace,
        candidates: &[(f32, Slot)],
        k: usize,
    ) -> Result<Ranked> {
        let read = Instant::now();
        self.read_columns(candidates);
        let read = read.elapsed();
        self.score(batch, asked, candidates, trace)?;
        let valued = Instant::now();
        self.value(&asked.prepared.constants, candidates);
        let items = candidates.len() as u64;
        trace.add([Step { name: "value", took: read + valued.elapsed(), items, bytes: 0 }]);
        Ok(trace.step("top", || self.top(k, candidates), |_| (0, 0)))
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

    /// The retrieval score and the snapshot's numeric columns at the candidates.
    fn read_columns(&mut self, candidates: &[(f32, Slot)]) {
        let columns = &mut self.scratch.columns;
        columns.resize_with(self.view.numbers().len(), Vec::new);
        for (number, column) in columns.iter_mut().enumerate() {
            column.clear();
            self.view.read_numbers(number, candidates.iter().map(|(_, slot)| *slot), column);
        }
        self.scratch.similarity.clear();
        self.scratch.similarity.extend(candidates.iter().map(|(score, _)| *score));
    }

    fn column(&self, name: &str) -> Option<&[f32]> {
        if name == SIMILARITY {
            return Some(&self.scratch.similarity);
        }
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
            let main = self.view.main();
            let user = asked.user_tensors(&main.package.user_inputs);
            let numbers: Vec<&[f32]> = overarch.numbers().filter_map(|name| self.column(name)).collect();
            let row = |n: usize, row: &mut [f32]| self.view.write_candidate(candidates[n].1, row);
            let run = Candidates { user: &user, count, row: &row, numbers: &numbers };
            let deadline = batch.deadline(asked.place);
            let mut between = || match deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                true => Err(late("overarch")),
                false => Ok(()),
            };
            let bytes = count as u64 * main.candidates.bytes(&main.index);
            let run = || overarch.score(&run, self.threads, &mut graphs, &mut between, &mut tasks);
            scored = trace.step("overarch", run, |_| (count as u64, bytes));
        }
        (self.scratch.tasks, self.scratch.graphs) = (tasks, graphs);
        scored
    }

    /// Step 10: one value a candidate, `[K0]`.
    fn value(&mut self, constants: &[f32], candidates: &[(f32, Slot)]) {
        let mut values = std::mem::take(&mut self.scratch.values);
        let mut program = std::mem::take(&mut self.scratch.program);
        let count = candidates.len();
        values.resize(count, 0.0);
        let names = &self.view.main().package.spec.tasks;
        let input = |name: &String| match names.iter().position(|task| task.name == *name) {
            Some(task) => &self.scratch.tasks[task * count..(task + 1) * count],
            None => self.column(name).unwrap_or(&self.scratch.similarity),
        };
        let model = self.view.value();
        let inputs: Vec<&[f32]> = model.inputs().iter().map(input).collect();
        model.evaluate(&inputs, constants, &mut program, &mut values);
        (self.scratch.values, self.scratch.program) = (values, program);
    }

    /// Step 11: the best K candidates by value; equal values by the lower item id.
    fn top(&mut self, k: usize, candidates: &[(f32, Slot)]) -> Ranked {
        let Scratch { tasks, values, order, .. } = &mut *self.scratch;
        let count = candidates.len();
        let id = |n: u32| self.view.id(candidates[n as usize].1);
        // One zero in answers too.
        let value = |n: u32| values[n as usize] + 0.0;
        let better = |a: &u32, b: &u32| by_score(value(*a), value(*b)).then_with(|| id(*a).cmp(&id(*b)));
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

    fn explain(&self, asked: &Asked<'_>, trace: &Trace, found: &Found<'_>, parts: &[Part], ranked: &Ranked) -> Explain {
        let report = |(spec, part): (&QuerySpec, &Part)| QueryReport {
            name: spec.name.clone(),
            probed: part.counters.lists,
            scanned: part.counters.items,
            survivors: part.counters.survivors,
            candidates: part.candidates.len() as u64,
        };
        let explain = Explain {
            steps: trace.reports(),
            kernel: self.view.main().index.kernel(),
            returned: ranked.ids.len() as u64,
            queries: self.view.main().package.spec.queries().iter().zip(parts).map(report).collect(),
            ..Explain::default()
        };
        let Some(search) = asked.prepared.task.search() else { return explain };
        Explain {
            route: route_of(search),
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
