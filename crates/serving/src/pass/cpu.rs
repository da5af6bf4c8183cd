//! The pass on a CPU; the parent module numbers the steps. `embed` does steps 1 and 2, `prepare` has done step 3, and a
//! search does steps 4 to 8. Search results arrive query by query: `answers` runs steps 9 to 11 (`rerank`) once a
//! request's queries are complete, and answers the request.

use std::time::Instant;

use super::answers::{BatchAnswers, InProgress};
use super::batch::{Batch, Pass, late};
use super::embed::{EmbeddedRequest, embed};
use super::rerank::Reranker;
use super::scratch::Scratch;
use super::work::{Search, Task};
use crate::view::View;
use sterling_core::units::Slot;
use sterling_graph::tower::Threads;
use sterling_index::ivf::Counters;
use sterling_index::search::{self, Catalogue, Found, Sink, Times};
use sterling_kernels::heap;

/// Buffers that grew beyond this number of candidates are released, so that rare large requests do not occupy memory permanently.
const KEPT_CANDIDATES_MAX: usize = 20_000;

/// Pass on a CPU: single-threaded, except for graphs, which use the given threads.
pub struct Cpu {
    threads: Threads,
    searches: search::Scratch,
    scratch: Scratch,
}

impl Cpu {
    /// Creates a pass whose graphs run on `threads`.
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
    /// Embeds all users together, then runs the searches, then ranks named items.
    fn run_here(&mut self, batch: &dyn Batch) {
        let wanted: Vec<usize> = (0..batch.len()).filter(|&place| batch.is_wanted(place)).collect();
        let Some(&first) = wanted.first() else { return };
        let view = batch.prepared(first).view().clone();
        let Cpu { threads, searches, scratch } = self;
        let segments = view.searched();
        let catalogue = view.catalogue(&segments);
        let (mut searched, mut named, mut chosen) = (Vec::new(), Vec::new(), Vec::new());
        for requested in embed(batch, &view, &wanted, threads, &mut scratch.graphs) {
            match &requested.prepared.task {
                Task::Embed { .. } => batch.answer(requested.place, Ok(requested.embedding())),
                Task::Retrieve(search) | Task::Select { search, .. } => {
                    view.record(&requested.vector);
                    searched.push((requested, search));
                }
                Task::Rank { slots, .. } => named.push((requested, slots)),
                Task::Rerank { candidates, .. } => chosen.push((requested, candidates)),
            }
        }
        let reranker = Reranker { batch, view: &view, threads, scratch };
        let mut answers = BatchAnswers { batch, view: &view, reranker };
        search(&catalogue, &searched, searches, &mut answers);
        for (requested, slots) in named.iter().filter(|(requested, _)| batch.is_wanted(requested.place)) {
            rank_named(&catalogue, (requested, slots), searches, &mut answers);
        }
        for (requested, candidates) in chosen.iter().filter(|(requested, _)| batch.is_wanted(requested.place)) {
            rank_chosen((requested, candidates), &mut answers);
        }
    }
}

/// Runs searches: the queries of all requests together; each request is answered after its last query.
fn search<'a>(
    catalogue: &Catalogue<'_>,
    requests: &'a [(EmbeddedRequest<'a>, &'a Search)],
    scratch: &mut search::Scratch,
    answers: &'a mut BatchAnswers<'_>,
) {
    let (mut queries, mut asked_by) = (Vec::new(), Vec::new());
    for (n, (requested, search)) in requests.iter().enumerate() {
        queries.extend(queries_of(answers.view, requested, search));
        asked_by.extend((0..search.queries.len()).map(|query| (n, query)));
    }
    let progress =
        requests.iter().map(|(requested, search)| InProgress::new(requested, search.queries.len())).collect();
    catalogue.search(&queries, scratch, &mut Searching { requests, asked_by, progress, answers });
}

/// Returns the search per query of the user.
fn queries_of<'a>(
    view: &'a View,
    requested: &'a EmbeddedRequest<'_>,
    search: &'a Search,
) -> impl Iterator<Item = search::Query<'a>> {
    let vectors = requested.vector.chunks_exact(view.dimension());
    vectors.zip(search.queries(view)).map(|(vector, query)| search::Query { vector, ..query })
}

/// Passes the results of each query to the answer of its request.
struct Searching<'a, 'b> {
    requests: &'a [(EmbeddedRequest<'a>, &'a Search)],
    /// For each query of the search: the index of its request in `requests`, and the index among that request's queries.
    asked_by: Vec<(usize, usize)>,
    progress: Vec<InProgress>,
    answers: &'a mut BatchAnswers<'b>,
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

/// Scores the items that a request names, in place of a search.
fn rank_named(
    catalogue: &Catalogue<'_>,
    (requested, slots): (&EmbeddedRequest<'_>, &[Slot]),
    scratch: &mut search::Scratch,
    answers: &mut BatchAnswers<'_>,
) {
    let queries = requested.vector.chunks_exact(answers.view.dimension());
    let mut progress = InProgress::new(requested, queries.len());
    for (n, vector) in queries.enumerate() {
        catalogue.score(vector, slots, scratch, &mut |found| answers.take(requested, &mut progress, n, &found));
    }
}

/// Ranks candidates that the request contains together with their retrieval scores.
fn rank_chosen((requested, candidates): (&EmbeddedRequest<'_>, &[Vec<(f32, Slot)>]), answers: &mut BatchAnswers<'_>) {
    let mut progress = InProgress::new(requested, candidates.len());
    for (n, of_query) in candidates.iter().enumerate() {
        let (mut candidates, counters) = (of_query.clone(), Counters::default());
        let times = Times::default();
        let found = Found { candidates: &mut candidates, selected: &[], counters, rescored: 0, times };
        answers.take(requested, &mut progress, n, &found);
    }
}
