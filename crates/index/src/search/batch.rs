//! Steps 4 and 6 of the pass for many queries at once.

use std::time::Instant;

use super::{BatchResult, Catalogue, Query, Scratch};
use crate::filter::Route;
use crate::ivf::{Counters, Member, Search, Union};
use crate::topk::Selector;

/// Maximum number of candidates of all searches that run together; a selector reserves about 34 bytes per candidate.
const TOGETHER_MAX: usize = 1 << 18;

impl Catalogue<'_> {
    /// Runs steps 4 and 6 for all queries without a filter, list by list, if there are enough of them to share lists.
    pub(super) fn search_together(&self, queries: &[Query<'_>], scratch: &mut Scratch) -> Vec<Option<BatchResult>> {
        let mut found: Vec<Option<BatchResult>> = queries.iter().map(|_| None).collect();
        let mut left = TOGETHER_MAX;
        let mut taken: Vec<(usize, usize)> = Vec::new();
        for (n, query) in queries.iter().enumerate() {
            let room = self.room_unfiltered(query);
            let has_all = (0..self.segments.len()).all(|segment| matches!(query.plan_of(segment).route(), Route::All));
            if !query.search.exact && has_all && room <= left {
                left -= room;
                taken.push((n, room));
            }
        }
        let probes = taken.iter().map(|(n, _)| queries[*n].search.probes).sum();
        if taken.len() < 2 || !self.main().index.shares_lists(probes) {
            return found;
        }
        // The searches with the most candidates come first: then only the first of the reused selectors grow large.
        taken.sort_by_key(|(_, room)| std::cmp::Reverse(*room));
        let Scratch { selectors, batch, .. } = scratch;
        selectors.resize_with(taken.len().max(selectors.len()), Selector::new);
        let start = Instant::now();
        let each = taken.iter().zip(&mut *selectors);
        let mut searches: Vec<Search<'_>> = each
            .map(|((n, room), selector)| {
                self.begin(selector, *room);
                let query = &queries[*n];
                Search {
                    by_codes: query.search.by_codes.is_some(),
                    ood: query.search.ood,
                    ..Search::new(query.vector, query.search.probes, selector)
                }
            })
            .collect();
        let members: Vec<Member<'_>> = self.segments.iter().map(|segment| segment.member()).collect();
        Union { lists: self.main().index, members: &members }.search_batch(&mut searches, batch);
        let share = u32::try_from(taken.len()).unwrap_or(u32::MAX);
        let took = start.elapsed() / share;
        for (selector, ((n, _), search)) in taken.iter().zip(&searches).enumerate() {
            let counters = Counters { probe_time: search.counters.probe_time / share, ..search.counters };
            found[*n] = Some(BatchResult { selector, counters, took });
        }
        found
    }
}
