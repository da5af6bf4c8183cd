//! The pass on a CPU, top to bottom. Steps 1 and 2 are `embed`'s, step 3 was done by `prepare`, steps 4 to 8 are a search, whose findings
//! come back one query after the other: `answers` takes each through the steps 9 to 11 (`rerank`) and answers.

use std::time::Instant;

use super::answers::{Answering, InProgress};
use super::batch::{Batch, Pass, late};
use super::embed::{Asked, embed};
use super::rerank::Reranker;
use super::scratch::Scratch;
use super::work::{Search, Task};
use crate::view::View;
use sterling_core::units::Slot;
use sterling_graph::tower::Threads;
use sterling_index::ivf::Counters;
use sterling_index::search::{self, Catalogue, Found, Sink, Times};
use sterling_kernels::heap;

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
    /// Embeds all users together, then searches for those that search, then ranks what the others name.
    fn run_here(&mut self, batch: &dyn Batch) {
        let wanted: Vec<usize> = (0..batch.len()).filter(|&place| batch.is_wanted(place)).collect();
        let Some(&first) = wanted.first() else { return };
        let view = batch.prepared(first).view().clone();
        let Cpu { threads, searches, scratch } = self;
        let parts = view.parts();
        let catalogue = view.catalogue(&parts);
        let (mut searched, mut named, mut chosen) = (Vec::new(), Vec::new(), Vec::new());
        for asked in embed(batch, &view, &wanted, threads, &mut scratch.graphs) {
            match &asked.prepared.task {
                Task::Embed { .. } => batch.answer(asked.place, Ok(asked.embedding())),
                Task::Retrieve(search) | Task::Select { search, .. } => {
                    view.record(&asked.vector);
                    searched.push((asked, search));
                }
                Task::Rank { slots, .. } => named.push((asked, slots)),
                Task::Rerank { candidates, .. } => chosen.push((asked, candidates)),
            }
        }
        let reranker = Reranker { batch, view: &view, threads, scratch };
        let mut answers = Answering { batch, view: &view, reranker };
        search(&catalogue, &searched, searches, &mut answers);
        for (asked, slots) in named.iter().filter(|(asked, _)| batch.is_wanted(asked.place)) {
            rank_named(&catalogue, (asked, slots), searches, &mut answers);
        }
        for (asked, candidates) in chosen.iter().filter(|(asked, _)| batch.is_wanted(asked.place)) {
            rank_chosen((asked, candidates), &mut answers);
        }
    }
}

/// Requests that search: the queries of all of them together, each request answered as soon as its last one has found.
fn search<'a>(
    catalogue: &Catalogue<'_>,
    requests: &'a [(Asked<'a>, &'a Search)],
    scratch: &mut search::Scratch,
    answers: &'a mut Answering<'_>,
) {
    let (mut queries, mut asked_by) = (Vec::new(), Vec::new());
    for (n, (asked, search)) in requests.iter().enumerate() {
        queries.extend(queries_of(answers.view, asked, search));
        asked_by.extend((0..search.queries.len()).map(|query| (n, query)));
    }
    let progress = requests.iter().map(|(asked, search)| InProgress::new(asked, search.queries.len())).collect();
    catalogue.search(&queries, scratch, &mut Searching { requests, asked_by, progress, answers });
}

/// What a search asks, of each query of the user.
fn queries_of<'a>(view: &'a View, asked: &'a Asked<'_>, search: &'a Search) -> impl Iterator<Item = search::Query<'a>> {
    let vectors = asked.vector.chunks_exact(view.dimension());
    vectors.zip(search.queries(view)).map(|(vector, query)| search::Query { vector, ..query })
}

/// Gives what each query of a search found to the answer of its request.
struct Searching<'a, 'b> {
    requests: &'a [(Asked<'a>, &'a Search)],
    /// Of each query of the search whose it is, by its place among `requests`, and which of that one's.
    asked_by: Vec<(usize, usize)>,
    progress: Vec<InProgress>,
    answers: &'a mut Answering<'b>,
}

impl Sink for Searching<'_, '_> {
    fn is_wanted(&mut self, n: usize) -> bool {
        let (request, _) = self.asked_by[n];
        let (batch, place) = (self.answers.batch, self.requests[request].0.place);
        if self.progress[request].is_answered {
            return false;
        }
        if batch.deadline(place).is_some_and(|deadline| Instant::now() >= deadline) {
            self.progress[request].is_answered = true;
            batch.answer(place, Err(late("probe")));
            return false;
        }
        batch.is_wanted(place)
    }

    fn found(&mut self, n: usize, found: Found<'_>) {
        let (request, query) = self.asked_by[n];
        self.answers.take(&self.requests[request].0, &mut self.progress[request], query, &found);
    }
}

/// A request that names its items: their retrieval scores take the place of a search.
fn rank_named(
    catalogue: &Catalogue<'_>,
    (asked, slots): (&Asked<'_>, &[Slot]),
    scratch: &mut search::Scratch,
    answers: &mut Answering<'_>,
) {
    let queries = asked.vector.chunks_exact(answers.view.dimension());
    let mut progress = InProgress::new(asked, queries.len());
    for (n, vector) in queries.enumerate() {
        catalogue.score(vector, slots, scratch, &mut |found| answers.take(asked, &mut progress, n, &found));
    }
}

/// A request that brings its candidates with their retrieval scores.
fn rank_chosen((asked, candidates): (&Asked<'_>, &[Vec<(f32, Slot)>]), answers: &mut Answering<'_>) {
    let mut progress = InProgress::new(asked, candidates.len());
    for (n, of_query) in candidates.iter().enumerate() {
        let (mut candidates, counters) = (of_query.clone(), Counters::default());
        let times = Times::default();
        let found = Found { candidates: &mut candidates, selected: &[], counters, rescored: 0, times };
        answers.take(asked, &mut progress, n, &found);
    }
}
