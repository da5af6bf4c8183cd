//! Converts the device results of a group to answers, with their explanations.

use std::time::Instant;

use super::candidates::{LaterFound, QueryCounters};
use super::embedded::Embedded;
use super::groups::{Group, SeenView};
use super::rerank::{self, LaterColumns};
use super::select;
use crate::pass::batch::Batch;
use crate::pass::trace::Step;
use crate::pass::work::Prepared;
use sterling_core::error::Result;
use sterling_core::request::{Answer, Content, Explain, QueryReport};
use sterling_cuda::Device;
use sterling_snapshot::model::QuerySpec;

/// Work that was submitted to each device.
pub(super) enum SubmittedWork {
    /// Reranking of candidates; with the search counters of the queries, if they are known.
    Columns(Vec<LaterColumns>, Vec<QueryCounters>),
    /// Selection of a shard's candidates.
    Found(Vec<LaterFound>),
}

/// Group whose work is submitted to one device or several.
pub(super) struct SubmittedGroup {
    kind: &'static str,
    group: Group,
    sent: SubmittedWork,
    /// Names of the devices that share the items.
    shared_by: Option<String>,
}

impl SubmittedGroup {
    pub(super) fn new(lanes: &[Device], group: Group, sent: SubmittedWork) -> Self {
        let names = || lanes.iter().map(Device::name).collect::<Vec<String>>().join(", ");
        SubmittedGroup { kind: lanes[0].kind(), group, sent, shared_by: (lanes.len() > 1).then(names) }
    }

    /// Waits for the results of the devices, and answers the requests of the group.
    pub(super) fn answer(
        self,
        seen: &[SeenView<'_>],
        batch: &dyn Batch,
        embedded: &Embedded<'_>,
        start: Instant,
    ) -> Result<()> {
        let requests: Vec<&Prepared> = self.group.requests.iter().map(|&n| embedded.requests[n].1).collect();
        let made = match self.sent {
            SubmittedWork::Columns(columns, before) => rerank::read(columns, &before, seen, &requests)?,
            SubmittedWork::Found(found) => select::read(found, seen, &requests)?,
        };
        let took = start.elapsed();
        for ((made, prepared), &request) in made.into_iter().zip(requests).zip(&self.group.requests) {
            let place = embedded.requests[request].0;
            let all = QueryCounters { candidates: made.candidates, ..QueryCounters::sum(&made.of_queries) };
            let content = match made.content {
                Ok(content) => content,
                Err(e) => {
                    batch.answer(place, Err(e));
                    continue;
                }
            };
            let mut trace = prepared.trace.clone();
            trace.add([Step { name: "device", took, items: all.items, bytes: 0 }]);
            let explain = prepared.reading.explain.then(|| {
                let mut explain = explain((&all, &made.of_queries), prepared, &content);
                let shared = self.shared_by.as_ref().map(|names| format!("the items are partitioned over {names}"));
                explain.note = match (explain.note, shared) {
                    (Some(note), Some(shared)) => Some(format!("{note}; {shared}")),
                    (note, shared) => note.or(shared),
                };
                Explain { steps: trace.reports(), kernel: self.kind, ..explain }
            });
            let degraded_rows = embedded.degraded_rows[request];
            batch.answer(place, Ok(Answer { content, degraded_rows, explain }));
        }
        Ok(())
    }
}

/// Note in the explanation of a search that would scan first-pass codes on the CPU.
const INT8_FOR_CODES: &str = "the GPU scanned int8 rows instead of first-pass codes, which only the host has";

fn explain((all, of_queries): (&QueryCounters, &[QueryCounters]), prepared: &Prepared, content: &Content) -> Explain {
    let search = prepared.task.search();
    let report = |(spec, looked_at): (&QuerySpec, &QueryCounters)| {
        let QueryCounters { candidates, lists, items, survivors } = *looked_at;
        let looked_for = QueryReport { probed: lists, scanned: items, survivors, ..QueryReport::default() };
        QueryReport { name: spec.name.clone(), candidates, ..search.map_or_else(QueryReport::default, |_| looked_for) }
    };
    let (returned, queries) = match content {
        Content::Items(ranked) => {
            let specs = prepared.view().main().package.spec.queries();
            (ranked.ids.len() as u64, specs.iter().zip(of_queries).map(report).collect())
        }
        Content::Selected(_) | Content::Embedding(_) => (0, Vec::new()),
    };
    let explain = Explain { returned, queries, ..Explain::default() };
    let Some(search) = search else { return explain };
    let QueryCounters { candidates, lists, items, survivors } = *all;
    Explain {
        route: search.route(),
        filter: search.planned.canonical.clone(),
        pass_rate: search.planned.plan.pass_rate(),
        probes: search.reported_probes(),
        probed: lists,
        scanned: items,
        survivors,
        candidates,
        note: search.queries[0].by_codes.map(|_| INT8_FOR_CODES.into()),
        ..explain
    }
}
