//! Candidates of a group on a device, and their transfer to the host.

use super::embedded::Users;
use sterling_core::error::Result;
use sterling_core::request::Content;
use sterling_cuda::ops::top::Best;
use sterling_cuda::{Array, Later};
use sterling_index::topk::unkey;

/// Search results of a group.
pub(super) struct Found {
    pub(super) users: Users,
    /// Candidates with their scores as ordered keys; unsorted, except for a shard's candidates.
    pub(super) best: Best,
    /// Scores by the most precise rows, if other devices may have better candidates; `best` then holds the scores of
    /// quantized codes, by which the candidates were selected.
    pub(super) wide: Option<Array<u32>>,
    pub(super) counters: Counters,
}

/// Search counters, `[queries]` each; empty if no lists were searched.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) lists: Option<Array<u32>>,
    /// Items per part (snapshot or segment).
    pub(super) items: Vec<Array<u64>>,
    pub(super) survivors: Option<Array<u32>>,
}

impl Counters {
    /// Starts copying the counters to the host.
    pub(super) fn later(&self, count: usize) -> Result<LaterCounters> {
        let later = |counts: &Option<Array<u32>>| counts.as_ref().map(|counts| counts.later(count)).transpose();
        Ok(LaterCounters {
            lists: later(&self.lists)?,
            items: self.items.iter().map(|items| items.later(count)).collect::<Result<_>>()?,
            survivors: later(&self.survivors)?,
        })
    }
}

/// [`Counters`] that are being copied to the host.
pub(super) struct LaterCounters {
    lists: Option<Later<u32>>,
    /// Number of items per snapshot or segment.
    items: Vec<Later<u64>>,
    survivors: Option<Later<u32>>,
}

/// Search counters of one query.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QueryCounters {
    pub(super) candidates: u64,
    pub(super) lists: u64,
    pub(super) items: u64,
    pub(super) survivors: u64,
}

impl LaterCounters {
    /// Waits for the counters of `count` queries.
    pub(super) fn get(self, count: usize) -> Result<Vec<QueryCounters>> {
        let counted = |counts: Option<Later<u32>>| counts.map_or(Ok(vec![0; count]), Later::get);
        let (lists, survivors) = (counted(self.lists)?, counted(self.survivors)?);
        let mut items = vec![0; count];
        for part in self.items {
            items.iter_mut().zip(part.get()?).for_each(|(sum, of_part)| *sum += of_part);
        }
        let of_query = |n: usize| QueryCounters {
            candidates: 0,
            lists: u64::from(lists[n]),
            items: items[n],
            survivors: u64::from(survivors[n]),
        };
        Ok((0..count).map(of_query).collect())
    }
}

impl QueryCounters {
    /// Adds the counters of another device.
    pub(super) fn add(&mut self, other: &QueryCounters) {
        self.candidates += other.candidates;
        self.lists += other.lists;
        self.items += other.items;
        self.survivors += other.survivors;
    }

    pub(super) fn sum<'a>(all: impl IntoIterator<Item = &'a QueryCounters>) -> QueryCounters {
        let mut sum = QueryCounters::default();
        all.into_iter().for_each(|one| sum.add(one));
        sum
    }
}

/// Results of a device that are being copied to the host.
pub(super) struct LaterFound {
    stride: usize,
    keys: Later<u32>,
    wide: Option<Later<u32>>,
    slots: Later<u32>,
    counts: Later<u32>,
    counted: LaterCounters,
}

/// Results of a device.
pub(super) struct HostFound {
    stride: usize,
    /// Scores as ordered keys, `[queries, stride]`.
    keys: Vec<u32>,
    /// Scores by the most precise rows, if `keys` are scores of quantized codes.
    pub(super) wide: Option<Vec<u32>>,
    /// Slots in the numbering of the device.
    slots: Vec<u32>,
    counts: Vec<u32>,
    pub(super) looked_at: Vec<QueryCounters>,
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

/// Answer of the devices to a request.
pub(super) struct DeviceAnswer {
    pub(super) content: Result<Content>,
    /// Number of candidates of all queries of the request.
    pub(super) candidates: u64,
    pub(super) of_queries: Vec<QueryCounters>,
}

/// Decodes a score from the ordered key of a kernel.
pub(super) fn number(key: u32) -> f32 {
    unkey(u64::from(key) << 32).0
}

/// Candidate of a query.
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    pub(super) device: usize,
    /// Slot in the numbering of the device.
    pub(super) slot: u32,
    /// Score keys by quantized codes and by the most precise rows; equal if only the rows select.
    pub(super) keys: [u32; 2],
}

/// Returns the candidates of all devices for query `n`, one device after the other.
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
