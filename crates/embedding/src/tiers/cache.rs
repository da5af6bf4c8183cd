//! Bounded row cache with frequency-aware admission, in host memory in front of a remote tier.
//!
//! `cache_slots` decides which rows are cached. A hash of the row number selects a stripe; each stripe holds its rows in one
//! block of `capacity × row_bytes`, which the operating system maps as it fills.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

pub use super::cache_slots::CacheCounters;
use super::cache_slots::CacheSlots;
use sterling_core::error::{Error, Result};
use sterling_core::random::splitmix64;

/// Overhead per cached row in bytes: index, key, counter, queue entry and fingerprint.
pub const ENTRY_OVERHEAD_BYTES: usize = 64;

const STRIPES: usize = 16;
const STRIPE_ENTRIES_MIN: usize = 64;

/// Rows of one table, `row_bytes` bytes each, within a memory limit.
#[derive(Debug)]
pub struct RowCache {
    row_bytes: usize,
    stripes: Vec<RwLock<Stripe>>,
    hits: AtomicU64,
    misses: AtomicU64,
}

impl RowCache {
    /// Creates an empty cache that takes at most `capacity_bytes`, overhead included.
    ///
    /// # Errors
    /// `Invalid` if the capacity is below one row.
    pub fn new(row_bytes: usize, capacity_bytes: usize) -> Result<Self> {
        let entry_bytes = row_bytes + ENTRY_OVERHEAD_BYTES;
        let entries = (capacity_bytes / entry_bytes).min(u32::MAX as usize);
        if row_bytes == 0 || entries == 0 {
            return Err(Error::invalid(format!(
                "row cache: got {capacity_bytes} bytes, expected at least {entry_bytes} for one row of {row_bytes} bytes"
            )));
        }
        let stripes = if entries >= STRIPES * STRIPE_ENTRIES_MIN { STRIPES } else { 1 };
        let stripe = |_| RwLock::new(Stripe::new(row_bytes, entries / stripes));
        Ok(RowCache {
            row_bytes,
            stripes: (0..stripes).map(stripe).collect(),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        })
    }

    /// Copies the row into `out`, `row_bytes` long, and returns whether the row is cached.
    pub fn get(&self, row: u64, out: &mut [u8]) -> bool {
        let found = self.peek(row, out);
        (if found { &self.hits } else { &self.misses }).fetch_add(1, Ordering::Relaxed);
        found
    }

    /// As [`RowCache::get`], without counting; for a second lookup of a row that was counted as a miss.
    pub fn peek(&self, row: u64, out: &mut [u8]) -> bool {
        self.stripe(splitmix64(row)).read().unwrap_or_else(PoisonError::into_inner).get(row, out)
    }

    /// Offers a row; a row that is already cached is left unchanged.
    ///
    /// # Panics
    /// If `bytes` is not `row_bytes` long.
    pub fn insert(&self, row: u64, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.row_bytes, "expected as many bytes as the cache stores per row");
        self.stripe(splitmix64(row)).write().unwrap_or_else(PoisonError::into_inner).insert(row, bytes);
    }

    /// Returns the fraction of requested rows that were hits, 0 without requests.
    pub fn hit_rate(&self) -> f64 {
        let (hits, misses) = (self.hits.load(Ordering::Relaxed), self.misses.load(Ordering::Relaxed));
        CacheCounters { hits, misses, ..CacheCounters::default() }.hit_rate()
    }

    /// Returns the counters since creation.
    pub fn counters(&self) -> CacheCounters {
        let mut counters = CacheCounters {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            ..CacheCounters::default()
        };
        for stripe in &self.stripes {
            let places = stripe.read().unwrap_or_else(PoisonError::into_inner).places.counters();
            counters.inserted += places.inserted;
            counters.evicted += places.evicted;
            counters.entries += places.entries;
            counters.entries_max += places.entries_max;
        }
        counters
    }

    fn stripe(&self, hash: u64) -> &RwLock<Stripe> {
        &self.stripes[(hash >> 60) as usize % self.stripes.len()]
    }
}

#[derive(Debug)]
struct Stripe {
    row_bytes: usize,
    places: CacheSlots,
    bytes: Vec<u8>,
}

impl Stripe {
    fn new(row_bytes: usize, entries_max: usize) -> Self {
        Stripe { row_bytes, places: CacheSlots::new(entries_max), bytes: vec![0; entries_max * row_bytes] }
    }

    fn get(&self, row: u64, out: &mut [u8]) -> bool {
        let Some(place) = self.places.find(row) else { return false };
        out.copy_from_slice(&self.bytes[place as usize * self.row_bytes..][..self.row_bytes]);
        true
    }

    fn insert(&mut self, row: u64, bytes: &[u8]) {
        if let Some(place) = self.places.insert(row) {
            self.bytes[place as usize * self.row_bytes..][..self.row_bytes].copy_from_slice(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::HashMap;

    use super::*;

    const ROW_BYTES: usize = 20;

    fn bytes_of(row: u64) -> Vec<u8> {
        (0..ROW_BYTES as u64).map(|i| splitmix64(row ^ (i << 40)) as u8).collect()
    }

    fn cache_of(entries: usize) -> RowCache {
        RowCache::new(ROW_BYTES, entries * (ROW_BYTES + ENTRY_OVERHEAD_BYTES)).unwrap()
    }

    /// Draws row numbers from a Zipf distribution with exponent 1 over `0..rows`, by inverting its continuous form.
    fn zipf(rows: u64, seed: u64, count: usize) -> Vec<u64> {
        let mut state = seed;
        (0..count)
            .map(|_| {
                state = splitmix64(state);
                let uniform = (state >> 11) as f64 / (1u64 << 53) as f64;
                ((rows as f64).powf(uniform) as u64 - 1).min(rows - 1)
            })
            .collect()
    }

    #[test]
    fn cached_rows_keep_their_bytes_within_the_memory_bound() {
        for entries in [1, 3, 100, 5000] {
            let cache = cache_of(entries);
            let mut out = vec![0; ROW_BYTES];
            let mut found = 0;
            for row in zipf(20_000, 7, 60_000) {
                if cache.get(row, &mut out) {
                    assert_eq!(out, bytes_of(row), "row {row}");
                    found += 1;
                } else {
                    cache.insert(row, &bytes_of(row));
                }
                let counters = cache.counters();
                assert!(counters.entries <= counters.entries_max && counters.entries_max <= entries as u64);
            }
            let counters = cache.counters();
            assert_eq!((counters.hits, counters.misses), (found, 60_000 - found));
            assert_eq!(counters.entries, counters.inserted - counters.evicted);
        }
    }

    #[test]
    fn a_scan_does_not_evict_frequent_rows() {
        let cache = cache_of(2000);
        let mut out = vec![0; ROW_BYTES];
        let mut ask = |row: u64| {
            let found = cache.get(row, &mut out);
            if !found {
                cache.insert(row, &bytes_of(row));
            }
            found
        };
        for row in (0..5).flat_map(|_| 0..1000) {
            ask(row);
        }
        for row in 100_000..150_000 {
            ask(row);
        }
        let retained = (0..1000).filter(|&row| ask(row)).count();
        assert!(retained > 950, "{retained} of 1000 often used rows outlived a scan of 50000");
    }

    #[test]
    fn hit_rate_exceeds_lru_on_a_skewed_trace() {
        let trace = zipf(100_000, 11, 300_000);
        let cache = cache_of(3200);
        let entries = cache.counters().entries_max as usize;
        let mut out = vec![0; ROW_BYTES];
        let (mut recency, mut used) = (std::collections::BTreeMap::new(), HashMap::new());
        let mut hits_recency = 0;
        for (time, &row) in trace.iter().enumerate() {
            if !cache.get(row, &mut out) {
                cache.insert(row, &bytes_of(row));
            }
            if let Some(before) = used.insert(row, time) {
                recency.remove(&before);
                hits_recency += 1;
            }
            recency.insert(time, row);
            if recency.len() > entries {
                let (_, oldest) = recency.pop_first().unwrap();
                used.remove(&oldest);
            }
        }
        let hits = cache.counters().hits;
        assert!(hits > hits_recency, "S3-FIFO {hits}, LRU {hits_recency} of {}", trace.len());
    }

    #[test]
    fn threads_share_the_cache() {
        let cache = cache_of(3000);
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let cache = &cache;
                scope.spawn(move || {
                    let mut out = vec![0; ROW_BYTES];
                    for row in zipf(10_000, seed, 20_000) {
                        if cache.get(row, &mut out) {
                            assert_eq!(out, bytes_of(row));
                        } else {
                            cache.insert(row, &bytes_of(row));
                        }
                    }
                });
            }
        });
        assert!(cache.counters().hit_rate() > 0.5);
    }

    #[test]
    fn a_cache_too_small_for_one_row_is_rejected() {
        assert!(RowCache::new(100, 100 + ENTRY_OVERHEAD_BYTES - 1).is_err());
        assert!(RowCache::new(0, 1 << 20).is_err());
        assert!(RowCache::new(100, 100 + ENTRY_OVERHEAD_BYTES).is_ok());
    }
}
