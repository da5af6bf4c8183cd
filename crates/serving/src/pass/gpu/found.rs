//! What a group found on a device, and the same on its way to the host.

use super::embedded::Users;
use sterling_core::error::Result;
use sterling_core::request::Content;
use sterling_cuda::ops::top::Best;
use sterling_cuda::{Array, Later};
use sterling_index::topk::unkey;

/// What a group found.
pub(super) struct Found {
    pub(super) users: Users,
    /// Candidates with their ordered scores; in no order, but where they are a shard's part of those of a search.
    pub(super) best: Best,
    /// Where another device's may be better: their scores by the widest rows, `best` having those of codes by which they were selected.
    pub(super) wide: Option<Array<u32>>,
    pub(super) counters: Counters,
}

/// What the search looked at, `[queries]` each; empty where it did not look at lists.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) lists: Option<Array<u32>>,
    /// Those of each part.
    pub(super) items: Vec<Array<u64>>,
    pub(super) survivors: Option<Array<u32>>,
}

impl Counters {
    /// The same on their way to the host.
    pub(super) fn later(&self, count: usize) -> Result<LaterCounters> {
        let later = |counts: &Option<Array<u32>>| counts.as_ref().map(|counts| counts.later(count)).transpose();
        Ok(LaterCounters {
            lists: later(&self.lists)?,
            items: self.items.iter().map(|items| items.later(count)).collect::<Result<_>>()?,
            survivors: later(&self.survivors)?,
        })
    }
}

/// [`Counters`] that are on their way.
pub(super) struct LaterCounters {
    lists: Option<Later<u32>>,
    /// Those of each part.
    items: Vec<Later<u64>>,
    survivors: Option<Later<u32>>,
}

/// What a query of a request looked at.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LookedAt {
    pub(super) candidates: u64,
    pub(super) lists: u64,
    pub(super) items: u64,
    pub(super) survivors: u64,
}

impl LaterCounters {
    /// What each of `count` queries looked at.
    pub(super) fn get(self, count: usize) -> Result<Vec<LookedAt>> {
        let counted = |counts: Option<Later<u32>>| counts.map_or(Ok(vec![0; count]), Later::get);
        let (lists, survivors) = (counted(self.lists)?, counted(self.survivors)?);
        let mut items = vec![0; count];
        for part in self.items {
            items.iter_mut().zip(part.get()?).for_each(|(sum, of_part)| *sum += of_part);
        }
        let of_query = |n: usize| LookedAt {
            candidates: 0,
            lists: u64::from(lists[n]),
            items: items[n],
            survivors: u64::from(survivors[n]),
        };
        Ok((0..count).map(of_query).collect())
    }
}

impl LookedAt {
    /// Adds what was looked at elsewhere.
    pub(super) fn add(&mut self, other: &LookedAt) {
        self.candidates += other.candidates;
        self.lists += other.lists;
        self.items += other.items;
        self.survivors += other.survivors;
    }

    pub(super) fn sum<'a>(all: impl IntoIterator<Item = &'a LookedAt>) -> LookedAt {
        let mut sum = LookedAt::default();
        all.into_iter().for_each(|one| sum.add(one));
        sum
    }
}

/// What a device found, on its way.
pub(super) struct LaterFound {
    stride: usize,
    keys: Later<u32>,
    wide: Option<Later<u32>>,
    slots: Later<u32>,
    counts: Later<u32>,
    counted: LaterCounters,
}

/// What a device found.
pub(super) struct HostFound {
    stride: usize,
    /// Ordered scores, `[queries, stride]`.
    keys: Vec<u32>,
    /// Those by the widest rows, where `keys` are those of codes.
    pub(super) wide: Option<Vec<u32>>,
    /// As the device counts them.
    slots: Vec<u32>,
    counts: Vec<u32>,
    pub(super) looked_at: Vec<LookedAt>,
}

impl LaterFound {
    pub(super) fn of(found: &Found, queries: usize) -> Result<Self> {
        let Found { best, wide, counters, .. } = found;
        Ok(LaterFound {
            stride: best.stride,
            keys: best.keys.later(best.keys.len())?,
            wide: wide.as_ref().map(|wide| wide.later(wide.len())).transpose()?,
            slots: best.slots.later(best.slots.len())?,
            counts: best.counts.later(queries)?,
            counted: counters.later(queries)?,
        })
    }

    pub(super) fn get(self) -> Result<HostFound> {
        let counts = self.counts.get()?;
        Ok(HostFound {
            stride: self.stride,
            keys: self.keys.get()?,
            wide: self.wide.map(Later::get).transpose()?,
            slots: self.slots.get()?,
            looked_at: self.counted.get(counts.len())?,
            counts,
        })
    }
}

/// What devices made of a request.
pub(super) struct Made {
    pub(super) content: Result<Content>,
    /// Candidates of all its queries together.
    pub(super) candidates: u64,
    pub(super) of_queries: Vec<LookedAt>,
}

/// The number that a kernel wrote as an ordered one.
pub(super) fn number(key: u32) -> f32 {
    unkey(u64::from(key) << 32).0
}

/// One candidate of a query.
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    pub(super) device: usize,
    /// As the device counts it.
    pub(super) slot: u32,
    /// By codes, or by rows where these alone select, and by rows.
    pub(super) keys: [u32; 2],
}

/// What all devices found for query `n`, one device after the other.
pub(super) fn candidates_of(of_devices: &[HostFound], n: usize) -> Vec<Candidate> {
    let of_device = |(device, found): (usize, &HostFound)| {
        let first = n * found.stride;
        let candidate = |at: usize| {
            let wide = found.wide.as_ref().map_or(found.keys[at], |wide| wide[at]);
            Candidate { device, slot: found.slots[at], keys: [found.keys[at], wide] }
        };
        (first..first + found.counts[n] as usize).map(candidate).collect::<Vec<Candidate>>()
    };
    of_devices.iter().enumerate().flat_map(of_device).collect()
}
