//! A shard's candidates: those that its devices selected by codes, in the order in which a router merges them with other shards',
//! and whether there may be more.

use std::cmp::Reverse;

use super::candidates::{Candidate, DeviceAnswer, Found, HostFound, LaterFound, QueryCounters, candidates_of, number};
use super::groups::SeenView;
use crate::pass::work::{Prepared, Search, Selection, Task};
use sterling_core::error::{Error, Result};
use sterling_core::request::{Content, Selected, ShardSelected};
use sterling_cuda::Device;

/// Starts the transfer of the devices' results, without waiting.
pub(super) fn send(lanes: &[Device], found: &[Found]) -> Result<Vec<LaterFound>> {
    let send = |(device, found): (&Device, &Found)| {
        let later = LaterFound::of(found, found.best.counts.len())?;
        device.flush()?;
        Ok(later)
    };
    lanes.iter().zip(found).map(send).collect()
}

/// Reads the candidates of the requests of a group.
pub(super) fn read(found: Vec<LaterFound>, seen: &[SeenView<'_>], requests: &[&Prepared]) -> Result<Vec<DeviceAnswer>> {
    let found = found.into_iter().map(LaterFound::get).collect::<Result<Vec<HostFound>>>()?;
    let queries = seen[0].resident.queries();
    let made = |(n, prepared): (usize, &&Prepared)| {
        let Task::Select { search, selection } = &prepared.task else {
            return Err(Error::internal("a device returned candidates for a request that selects none"));
        };
        let of_query = |query: usize| selected(&found, seen, (n * queries + query, query), (search, selection));
        let (all, of_queries): (Vec<Selected>, Vec<QueryCounters>) = (0..queries).map(of_query).unzip();
        let candidates = of_queries.iter().map(|looked_at| looked_at.candidates).sum();
        let content = Content::Selected(Box::new(ShardSelected { queries: all, ahead: None }));
        Ok(DeviceAnswer { content: Ok(content), candidates, of_queries })
    };
    requests.iter().enumerate().map(made).collect()
}

/// Returns the candidates in row `row` of all devices for one query of a request.
fn selected(
    found: &[HostFound],
    seen: &[SeenView<'_>],
    (row, query): (usize, usize),
    (search, selection): (&Search, &Selection),
) -> (Selected, QueryCounters) {
    let (view, own) = (seen[0].view, search.queries[query].selected.unwrap_or_default());
    let id = |of: &Candidate| view.id(seen[of.device].beside.of_device(of.slot));
    let mut all = candidates_of(found, row);
    // The results of a single device are already sorted.
    if found.len() > 1 {
        all.sort_by(|a, b| Reverse(a.keys[0]).cmp(&Reverse(b.keys[0])).then_with(|| id(a).cmp(&id(b))));
        all.truncate(own);
    }
    let looked_at = QueryCounters::sum(found.iter().map(|found| &found.looked_at[row]));
    let scores = |of: usize| all.iter().map(|candidate| number(candidate.keys[of])).collect();
    let selected = Selected {
        ids: all.iter().map(id).collect(),
        codes: scores(0),
        scores: scores(1),
        is_all: all.len() < own || looked_at.survivors <= own as u64,
        may_go_further: search.may_go_further(view, selection, looked_at.lists),
        selected: selection.selected[query],
        candidates: selection.candidates[query],
    };
    (selected, QueryCounters { candidates: all.len() as u64, ..looked_at })
}
