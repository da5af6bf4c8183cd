//! Steps 4 to 7 of the pass: finds candidates and verifies them, each with the score that selected it.

use std::borrow::Cow;
use std::time::Instant;

use super::{BatchResult, Catalogue, Query, Scratch, Segment, Times, taken};
use crate::columns::evaluate_bits;
use crate::filter::{Plan, Route};
use crate::ivf::{Counters, Member, Probing, Union};
use crate::topk::Selector;
use sterling_core::units::{ListId, Slot};

/// Additional candidates to select if some candidates may be deleted.
const DELETED_ROOM: usize = 64;
/// Growth factor of the selection if too few of the selected items pass verification.
const ROOM_GROWTH: usize = 4;
/// Maximum size of the selection, which limits the memory of a search. Beyond this size, items are verified before they are
/// selected.
const ROOM_MAX: usize = 1 << 16;
/// Number of items between two cancellation checks of an exact search: a filter may take tens of microseconds per item.
pub(super) const CHECK_EVERY: usize = 256;

/// One attempt of a filtered search.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    /// Candidates to select by int8 scores.
    pub(super) room: usize,
    /// Candidates to select first: by first-pass codes, or otherwise by int8 scores.
    pub(super) selected: usize,
    /// True if every item that passes the bitmap is verified before it is selected; the initial number of candidates then
    /// suffices.
    pub(super) is_checked: bool,
}

impl Round {
    pub(super) fn first(catalogue: &Catalogue<'_>, query: &Query<'_>) -> Self {
        Round { room: query.room(catalogue), selected: query.room_at_first(catalogue), is_checked: false }
    }

    /// Returns the next round, after too few of the selected items passed verification.
    pub(super) fn next(self, catalogue: &Catalogue<'_>, query: &Query<'_>) -> Self {
        let room = self.room * ROOM_GROWTH;
        match room < ROOM_MAX.min(catalogue.items()) {
            true => Round { room, selected: self.selected.max(room), is_checked: false },
            false => Round { is_checked: true, ..Round::first(catalogue, query) },
        }
    }
}

/// Segments whose lists a query scans: those for which posting lists do not already determine the eligible items.
pub(super) struct ProbedSegments<'a> {
    /// Segments to search, as members of a union. All other fields of this struct have one entry per member.
    members: Vec<Member<'a>>,
    /// Segment of each member.
    pub(super) segments: Vec<&'a Segment<'a>>,
    /// Index of each member among all segments of the catalogue.
    numbers: Vec<usize>,
    /// Filter plan of each member.
    pub(super) plans: Vec<&'a Plan>,
}

impl<'a> ProbedSegments<'a> {
    pub(super) fn of(catalogue: &Catalogue<'a>, query: &Query<'a>) -> Self {
        let walks = |n: &usize| matches!(query.plan_of(*n).route(), Route::All | Route::Words);
        let numbers: Vec<usize> = (0..catalogue.segments.len()).filter(walks).collect();
        let segments: Vec<_> = numbers.iter().map(|&n| &catalogue.segments[n]).collect();
        let members = segments.iter().map(|segment| segment.member()).collect();
        let plans = numbers.iter().map(|&n| query.plan_of(n)).collect();
        ProbedSegments { members, segments, numbers, plans }
    }

    pub(super) fn has_all(&self) -> bool {
        self.plans.iter().all(|plan| matches!(plan.route(), Route::All))
    }

    pub(super) fn is_exact(&self) -> bool {
        self.plans.iter().all(|plan| plan.is_exact())
    }

    fn has_main(&self) -> bool {
        self.numbers.first() == Some(&0)
    }

    /// Returns the number of passing items with which a filtered search may stop; `room` candidates are selected by int8 scores.
    pub(super) fn enough(&self, query: &Query<'_>, probing: &Probing<'_>, room: usize) -> usize {
        // With exact bitmaps no candidate fails verification.
        if probing.ending.is_some() && self.is_exact() { query.search.k0 } else { room }
    }

    /// Returns the estimated share of the segments' items that pass the filter.
    fn pass_rate(&self) -> f64 {
        if let [plan] = self.plans[..] {
            return plan.pass_rate();
        }
        let items = |member: &Member<'_>| member.index.items() as f64;
        let passing = self.plans.iter().zip(&self.members).map(|(plan, member)| plan.pass_rate() * items(member));
        passing.sum::<f64>() / self.members.iter().map(items).sum::<f64>().max(1.0)
    }
}

impl<'a> Catalogue<'a> {
    /// Returns the number of candidates to select without a filter, some of which may be excluded or deleted.
    pub(super) fn room_unfiltered(&self, query: &Query<'_>) -> usize {
        let room = query.room_at_first(self) + query.excluded.len();
        match self.segments.iter().filter_map(|segment| segment.tombstones).map(|tombstones| tombstones.len()).sum() {
            0usize => room,
            // Adds one and a half times the expected number of deleted items among the selected ones.
            tombstones => {
                room + (room as f64 * (tombstones as f64 / self.items().max(1) as f64) * 1.5) as usize + DELETED_ROOM
            }
        }
    }

    /// Fills `scratch.candidates` with verified slots and the int8 scores that selected them, best first if the order matters.
    /// Fills `scratch.scored` with slots that are already scored by rows.
    pub(super) fn find(
        &self,
        query: &Query<'_>,
        together: Option<BatchResult>,
        scratch: &mut Scratch,
        times: &mut Times,
        is_wanted: &mut dyn FnMut() -> bool,
    ) -> Counters {
        scratch.candidates.clear();
        scratch.scored.clear();
        let walked = ProbedSegments::of(self, query);
        if query.search.exact || walked.segments.is_empty() {
            return self.find_by_rows(query, scratch, times, is_wanted);
        }
        let mut counters = match walked.segments.len() < self.segments.len() {
            true => self.find_by_rows(query, scratch, times, is_wanted),
            false => Counters::default(),
        };
        counters.add(&self.find_by_lists(query, &walked, together, scratch, times));
        counters
    }

    fn find_by_lists(
        &self,
        query: &Query<'_>,
        walked: &ProbedSegments<'_>,
        together: Option<BatchResult>,
        scratch: &mut Scratch,
        times: &mut Times,
    ) -> Counters {
        if !walked.has_all() {
            return self.find_filtered(query, walked, self.probing(query, walked), scratch, times);
        }
        let counters = self.find_unfiltered(query, walked, together, scratch, times);
        // Without a filter, the first P lists suffice unless they hold too few items; then the search continues as with a filter.
        let has_probed_all = counters.lists == self.main().index.lists() as u64;
        let enough = scratch.candidates.len() + scratch.scored.len() >= query.search.k || has_probed_all;
        // More of the selected items were deleted than expected: repeat with bitmaps, which exclude deleted items beforehand.
        let crowded_out = walked.segments.iter().any(|segment| segment.tombstones.is_some())
            && counters.survivors > self.room_unfiltered(query) as u64
            && scratch.candidates.len() < query.room_at_first(self);
        if enough && !crowded_out {
            return counters;
        }
        // Scans at least as many lists as before: more than `probes` if the query is out of distribution.
        let probing = Probing { probes: counters.lists as usize, ..self.probing(query, walked) };
        self.find_filtered(query, walked, probing, scratch, times)
    }

    /// Fills `scratch.scored` with the best items scored by rows: all in an exact search, else items of posting lists.
    /// An exact search ends early if it is cancelled: with a long filter it takes seconds.
    fn find_by_rows(
        &self,
        query: &Query<'_>,
        scratch: &mut Scratch,
        times: &mut Times,
        is_wanted: &mut dyn FnMut() -> bool,
    ) -> Counters {
        let start = Instant::now();
        let (mut looked_at, mut goes_on) = (0usize, true);
        let mut counters = Counters::default();
        let Scratch { selector, scored, .. } = scratch;
        self.begin(selector, query.kept());
        for (n, segment) in self.segments.iter().enumerate() {
            let plan = query.plan_of(n);
            let is_there = |slot: Slot| !segment.is_deleted(slot) && !query.is_excluded(segment.member().name(slot));
            match plan.route() {
                Route::Slots(slots) => {
                    let eligible: Vec<Slot> = slots.iter().copied().filter(|&slot| is_there(slot)).collect();
                    counters.add(&segment.member().search_slots(query.vector, &eligible, selector));
                }
                Route::All | Route::Words if query.search.exact => {
                    let eligible = |slot| {
                        looked_at += 1;
                        if looked_at.is_multiple_of(CHECK_EVERY) {
                            goes_on = goes_on && is_wanted();
                        }
                        goes_on && is_there(slot) && plan.passes(slot)
                    };
                    counters.add(&segment.member().search_exact(query.vector, eligible, selector));
                    counters.lists = self.main().index.lists() as u64;
                }
                Route::All | Route::Words | Route::Nothing => {}
            }
        }
        scored.extend(taken(selector));
        times.scan += start.elapsed();
        counters
    }

    fn find_unfiltered(
        &self,
        query: &Query<'_>,
        walked: &ProbedSegments<'_>,
        together: Option<BatchResult>,
        scratch: &mut Scratch,
        times: &mut Times,
    ) -> Counters {
        let Scratch { selector, selectors, alone, candidates, .. } = scratch;
        let (selector, counters, took) = match together {
            Some(found) => (&mut selectors[found.selector], found.counters, found.took),
            None => {
                let (start, room) = (Instant::now(), self.room_unfiltered(query));
                self.begin(selector, room);
                let union = Union { lists: self.main().index, members: &walked.members };
                let probing = self.probing(query, walked);
                let counters = union.search(query.vector, probing, None, selector, room, alone);
                (&mut *selector, counters, start.elapsed())
            }
        };
        times.add_search(took, &counters);
        self.verify(query, selector, candidates, times);
        counters
    }

    fn find_filtered(
        &self,
        query: &Query<'_>,
        walked: &ProbedSegments<'_>,
        mut probing: Probing<'_>,
        scratch: &mut Scratch,
        times: &mut Times,
    ) -> Counters {
        let Scratch { selector, alone, words, candidates, .. } = scratch;
        let (mut round, mut again) = (Round::first(self, query), 0u64);
        let own = |segment: &&Segment<'_>| match segment.first_slot {
            0 => Cow::Borrowed(query.excluded),
            _ => Cow::Owned(segment.take(query.excluded)),
        };
        let excluded: Vec<Cow<'_, [Slot]>> = walked.segments.iter().map(own).collect();
        let union = Union { lists: self.main().index, members: &walked.members };
        let is_exact = walked.is_exact();
        let most_lists = union.most_lists(&probing) as u64;
        loop {
            let Round { room, selected, is_checked } = round;
            if is_checked {
                probing = Probing { probes: probing.most(self.main().index.lists()), ending: None, ..probing };
            }
            self.begin(selector, selected);
            let start = Instant::now();
            let mut fill = |member: usize, list: ListId, out: &mut [u64]| {
                let (segment, plan) = (walked.segments[member], walked.plans[member]);
                plan.words(segment.filter, list, &mut words[walked.numbers[member]], out);
                segment.filter.exclude(list, &excluded[member], out);
                if let Some(tombstones) = segment.tombstones {
                    tombstones.clear(segment.filter.first_slot(list), &mut out[..segment.filter.words(list)]);
                }
                if is_checked && !plan.is_exact() {
                    let first = segment.filter.first_slot(list);
                    for (word, slots) in out[..segment.filter.words(list)].iter_mut().zip((first..).step_by(64)) {
                        *word = evaluate_bits(*word, |bit| plan.passes(Slot(slots + bit)));
                    }
                }
            };
            let enough = walked.enough(query, &probing, room).min(selected);
            let counters = union.search(query.vector, probing, Some(&mut fill), selector, enough, alone);
            let counters = Counters { again, ..counters };
            times.add_search(start.elapsed(), &counters);
            self.verify(query, selector, candidates, times);
            // Too few passing items were verified: examine more, both unselected items and items of further lists.
            let all_seen = counters.survivors <= selected as u64 && counters.lists >= most_lists;
            if candidates.len() >= query.kept() || all_seen || is_exact || is_checked {
                return counters;
            }
            round = round.next(self, query);
            again += 1;
        }
    }

    pub(super) fn probing<'q>(&self, query: &Query<'q>, walked: &ProbedSegments<'_>) -> Probing<'q> {
        // The calibration and `probes_max` refer to the lists of the first segment.
        let (probes_max, ending) = match walked.has_main() {
            true => (self.probes_max, query.ending),
            false => (self.main().index.lists(), None),
        };
        let by_codes = query.search.by_codes.is_some();
        let (pass_rate, least) = (walked.pass_rate(), query.search.k);
        let ood = query.search.ood;
        Probing { pass_rate, ood, ending, least, by_codes, ..Probing::of(query.search.probes, probes_max) }
    }

    /// Step 7: removes selected items that are excluded, deleted, or false positives of the filter.
    fn verify(&self, query: &Query<'_>, selected: &mut Selector, candidates: &mut Vec<(f32, Slot)>, times: &mut Times) {
        let start = Instant::now();
        let is_sure = |segment: usize| self.segments[segment].tombstones.is_none() && query.plan_of(segment).is_exact();
        let all_hold = query.excluded.is_empty() && (0..self.segments.len()).all(is_sure);
        let holds = |slot: Slot| {
            if all_hold {
                return true;
            }
            let (segment, own) = self.segment_of(slot);
            let plan = query.plan_of(segment);
            !query.is_excluded(slot) && !self.segments[segment].is_deleted(own) && (plan.is_exact() || plan.passes(own))
        };
        candidates.clear();
        match self.ranks_by_rows(query) {
            true => candidates.extend(selected.kept().filter(|(_, slot)| holds(*slot))),
            false => candidates.extend(taken(selected).filter(|(_, slot)| holds(*slot))),
        }
        times.verify += start.elapsed();
    }
}
