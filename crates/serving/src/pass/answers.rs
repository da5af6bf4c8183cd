//! Converts search results to answers, request by request: merges the results of a user's queries, returns a shard's candidates
//! unchanged, and reranks everything else.

use super::batch::Batch;
use super::embed::EmbeddedRequest;
use super::merge::{self, Part, Parts};
use super::rerank::Reranker;
use super::trace::{Step, Trace};
use super::work::{Search, Selection, Task};
use crate::view::View;
use sterling_core::error::Result;
use sterling_core::request::{Answer, Content, Explain, QueryReport, Ranked, RankedAhead, Selected, ShardSelected};
use sterling_core::units::Slot;
use sterling_index::search::Found;
use sterling_snapshot::model::QuerySpec;

/// Progress of a request of which some queries have returned candidates.
pub(super) struct InProgress {
    trace: Trace,
    /// Results of the queries, if the user has several.
    parts: Option<Parts>,
    /// For a shard: the candidates that the completed queries have selected.
    selected: Vec<Option<Selected>>,
    pub(super) is_answered: bool,
}

impl InProgress {
    /// Starts a request with `queries` queries.
    pub(super) fn new(requested: &EmbeddedRequest<'_>, queries: usize) -> Self {
        let is_part = matches!(requested.prepared.task, Task::Select { .. });
        let parts = (queries > 1 && !is_part).then(|| Parts::new(queries));
        let selected = if is_part { vec![None; queries] } else { Vec::new() };
        InProgress { trace: requested.trace.clone(), parts, selected, is_answered: false }
    }
}

/// Answers the requests of a batch, one after the other.
pub(super) struct BatchAnswers<'a> {
    pub(super) batch: &'a dyn Batch,
    pub(super) view: &'a View,
    pub(super) reranker: Reranker<'a>,
}

impl BatchAnswers<'_> {
    /// Accepts the results of query `n` of a request, and answers the request after its last query.
    pub(super) fn take(
        &mut self,
        requested: &EmbeddedRequest<'_>,
        progress: &mut InProgress,
        n: usize,
        found: &Found<'_>,
    ) {
        if let Some(answer) = self.after(requested, progress, n, found).transpose() {
            progress.is_answered = true;
            self.batch.answer(requested.place, answer);
        }
    }

    /// Returns the answer if query `n` was the last one of the request.
    fn after(
        &mut self,
        requested: &EmbeddedRequest<'_>,
        progress: &mut InProgress,
        n: usize,
        found: &Found<'_>,
    ) -> Result<Option<Answer>> {
        if let Task::Select { search, selection } = &requested.prepared.task {
            return self.select(requested, progress, (n, search, selection), found);
        }
        let Some(parts) = &mut progress.parts else {
            let trace = std::mem::take(&mut progress.trace);
            return self.rerank(requested, trace, found, &[]).map(Some);
        };
        let Some(parts) = parts.take(n, found) else { return Ok(None) };
        let mut trace = std::mem::take(&mut progress.trace);
        let (counters, rescored, times) = merge::totals(&parts);
        let (main, specs) = (self.view.main(), self.view.main().package.spec.queries());
        let how = main.package.spec.user.as_ref().and_then(|user| user.merge).unwrap_or_default();
        let id = |slot| self.view.id(slot);
        let products = |query: &[f32], slots: &[Slot], out: &mut [f32]| self.view.products(query, slots, out);
        let merged = || merge::merge((how, specs), &parts, &requested.vector, &products, &id);
        let mut candidates = trace.step("merge", merged, |merged| (merged.len() as u64, 0));
        let found = Found { candidates: &mut candidates, selected: &[], counters, rescored, times };
        self.rerank(requested, trace, &found, &parts).map(Some)
    }

    /// Reranks candidates; `parts` holds the results per query, if the user has several.
    fn rerank(
        &mut self,
        requested: &EmbeddedRequest<'_>,
        mut trace: Trace,
        found: &Found<'_>,
        parts: &[Part],
    ) -> Result<Answer> {
        self.trace_search(&mut trace, found);
        let (k, unknown) = match &requested.prepared.task {
            Task::Retrieve(search) => (search.k, Vec::new()),
            Task::Rank { slots, unknown } => (slots.len(), unknown.clone()),
            Task::Rerank { k, .. } => (*k, Vec::new()),
            Task::Embed { .. } | Task::Select { .. } => (0, Vec::new()),
        };
        let ranked = Ranked { unknown, ..self.reranker.ranked(requested, &mut trace, found.candidates, k)? };
        let explain =
            requested.prepared.reading.explain.then(|| self.explain(requested, &trace, found, parts, &ranked));
        Ok(Answer { content: Content::Items(ranked), degraded_rows: requested.degraded_rows, explain })
    }

    /// Accepts the candidates that query `n` of a shard selected; returns the answer after the last query.
    fn select(
        &mut self,
        requested: &EmbeddedRequest<'_>,
        progress: &mut InProgress,
        (n, search, selection): (usize, &Search, &Selection),
        found: &Found<'_>,
    ) -> Result<Option<Answer>> {
        self.trace_search(&mut progress.trace, found);
        progress.selected[n] = Some(self.selected((n, search, selection), found));
        let queries = progress.selected.iter().cloned().collect::<Option<Vec<Selected>>>();
        let Some(queries) = queries else { return Ok(None) };
        let mut trace = std::mem::take(&mut progress.trace);
        let ahead = match selection.ahead {
            Some(k) => self.ahead(requested, &mut trace, found.candidates, (search.queries[n].k0, k))?,
            None => None,
        };
        let explain = requested.prepared.reading.explain;
        let explain = explain.then(|| self.explain(requested, &trace, found, &[], &Ranked::default()));
        let content = Content::Selected(Box::new(ShardSelected { queries, ahead }));
        Ok(Some(Answer { content, degraded_rows: requested.degraded_rows, explain }))
    }

    /// Returns the candidates that query `n` of a shard selected, ordered by first-pass scores, with the scores of the rows.
    fn selected(&self, (n, search, selection): (usize, &Search, &Selection), found: &Found<'_>) -> Selected {
        let mut by_slot: Vec<(Slot, f32)> = found.candidates.iter().map(|&(score, slot)| (slot, score)).collect();
        by_slot.sort_unstable_by_key(|(slot, _)| *slot);
        let score = |slot: Slot| by_slot.binary_search_by_key(&slot, |(slot, _)| *slot).ok().map(|at| by_slot[at].1);
        let own = search.queries[n].selected.unwrap_or_default();
        let mut selected = Selected {
            // If fewer results than requested were found, there are no more.
            is_all: found.selected.len() < own || found.counters.survivors <= own as u64,
            may_go_further: search.may_go_further(self.view, selection, found.counters.lists),
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
        selected
    }

    /// Reranks the shard's `k0` best candidates early and returns the best `k` by value; empty without candidates.
    fn ahead(
        &mut self,
        requested: &EmbeddedRequest<'_>,
        trace: &mut Trace,
        found: &[(f32, Slot)],
        (k0, k): (usize, usize),
    ) -> Result<Option<RankedAhead>> {
        let mut candidates = found.to_vec();
        candidates.sort_unstable_by(|a, b| self.view.best_first(a, b));
        candidates.truncate(k0);
        let Some(&(score, slot)) = candidates.last() else { return Ok(None) };
        let ranked = self.reranker.ranked(requested, trace, &candidates, k)?;
        // If fewer results than requested were ranked, no other candidate has scores.
        let is_all = candidates.len() <= k || ranked.ids.len() < k;
        Ok(Some(RankedAhead { is_all, last: (self.view.id(slot), score), ranked }))
    }

    /// Adds the steps of a search to the trace.
    fn trace_search(&self, trace: &mut Trace, found: &Found<'_>) {
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

    fn explain(
        &self,
        requested: &EmbeddedRequest<'_>,
        trace: &Trace,
        found: &Found<'_>,
        parts: &[Part],
        ranked: &Ranked,
    ) -> Explain {
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
        let Some(search) = requested.prepared.task.search() else { return explain };
        Explain {
            route: search.route(),
            filter: search.planned.canonical.clone(),
            pass_rate: search.planned.plan.pass_rate(),
            probes: search.reported_probes(),
            probed: found.counters.lists,
            scanned: found.counters.items,
            survivors: found.counters.survivors,
            candidates: found.candidates.len() as u64,
            ..explain
        }
    }
}
