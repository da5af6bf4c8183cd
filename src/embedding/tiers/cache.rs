//! A bounded cache of rows with frequency-aware admission: what stands in host memory before a remote tier.
//!
//! The policy is S3-FIFO (Yang et al., SOSP 2023). A new row enters a *small* queue of a tenth of the capacity. When room is
//! needed, the oldest row of the small queue moves to the *main* queue if it was asked for at least twice meanwhile, else it
//! leaves and only its fingerprint stays, in a *ghost* table; a row whose fingerprint is found there goes to the main queue
//! at once. The main queue gives its oldest row another turn for each time it was asked for, three at most. So a row that is
//! seen once never displaces one that is seen often, and a hit writes one byte: readers share the lock.
//!
//! Rows are spread over stripes by a hash of their number. A stripe holds its rows in one block of `capacity × row_bytes`,
//! mapped by the operating system as it fills.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use crate::error::{Error, Result};

/// Bytes that a cached row costs beside its own: index, key, counter, queue place and fingerprint.
pub const ENTRY_OVERHEAD_BYTES: usize = 64;

const STRIPES: usize = 16;
const STRIPE_ENTRIES_MIN: usize = 64;
const TURNS_MAX: u8 = 3;
const GHOST_WAYS: usize = 4;

/// What a cache has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// Rows asked for and found.
    pub hits: u64,
    /// Rows asked for and not found.
    pub misses: u64,
    /// Rows taken in.
    pub inserted: u64,
    /// Rows that left for others.
    pub evicted: u64,
    /// Rows held now.
    pub entries: u64,
    /// Most rows that can be held.
    pub entries_max: u64,
}

impl CacheCounters {
    /// Share of the rows asked for that were found, 0 where none was asked for.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / (self.hits + self.misses).max(1) as f64
    }
}

/// Rows of one table, all of `row_bytes` bytes, in at most the given bytes of memory.
#[derive(Debug)]
pub struct RowCache {
    row_bytes: usize,
    stripes: Vec<RwLock<Stripe>>,
    hits: AtomicU64,
    misses: AtomicU64,
}

impl RowCache {
    /// An empty cache that takes at most `capacity_bytes`, overhead included.
    ///
    /// # Errors
    /// Where not one row fits.
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

    /// Copies the row into `out`, `row_bytes` long, and is true where the row is held.
    pub fn get(&self, row: u64, out: &mut [u8]) -> bool {
        let found = self.peek(row, out);
        (if found { &self.hits } else { &self.misses }).fetch_add(1, Ordering::Relaxed);
        found
    }

    /// As [`RowCache::get`], uncounted: a second look for a row that was counted as missed.
    pub fn peek(&self, row: u64, out: &mut [u8]) -> bool {
        self.stripe(mix(row)).read().unwrap_or_else(PoisonError::into_inner).get(row, out)
    }

    /// Offers a row; a row that is held already stays as it is.
    ///
    /// # Panics
    /// Where `bytes` is not `row_bytes` long.
    pub fn insert(&self, row: u64, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.row_bytes, "bytes of the row");
        let hash = mix(row);
        self.stripe(hash).write().unwrap_or_else(PoisonError::into_inner).insert(row, hash, bytes);
    }

    /// Share of the rows asked for until now that were found, 0 where none was asked for.
    pub fn hit_rate(&self) -> f64 {
        let (hits, misses) = (self.hits.load(Ordering::Relaxed), self.misses.load(Ordering::Relaxed));
        CacheCounters { hits, misses, ..CacheCounters::default() }.hit_rate()
    }

    /// What the cache has done until now.
    pub fn counters(&self) -> CacheCounters {
        let mut counters = CacheCounters {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            ..CacheCounters::default()
        };
        for stripe in &self.stripes {
            let stripe = stripe.read().unwrap_or_else(PoisonError::into_inner);
            counters.inserted += stripe.inserted;
            counters.evicted += stripe.evicted;
            counters.entries += stripe.index.len() as u64;
            counters.entries_max += stripe.entries_max as u64;
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
    entries_max: usize,
    small_max: usize,
    index: HashMap<u64, u32, BuildHasherDefault<RowHasher>>,
    rows: Vec<u64>,
    turns: Vec<AtomicU8>,
    bytes: Vec<u8>,
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    ghost: Ghost,
    inserted: u64,
    evicted: u64,
}

impl Stripe {
    fn new(row_bytes: usize, entries_max: usize) -> Self {
        Stripe {
            row_bytes,
            entries_max,
            small_max: entries_max / 10,
            index: HashMap::default(),
            rows: Vec::new(),
            turns: Vec::new(),
            bytes: vec![0; entries_max * row_bytes],
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghost: Ghost::new(entries_max),
            inserted: 0,
            evicted: 0,
        }
    }

    fn get(&self, row: u64, out: &mut [u8]) -> bool {
        let Some(&place) = self.index.get(&row) else { return false };
        let place = place as usize;
        let turns = self.turns[place].load(Ordering::Relaxed);
        if turns < TURNS_MAX {
            // Two readers may count as one: the counter only ranks rows.
            self.turns[place].store(turns + 1, Ordering::Relaxed);
        }
        out.copy_from_slice(&self.bytes[place * self.row_bytes..][..self.row_bytes]);
        true
    }

    fn insert(&mut self, row: u64, hash: u64, bytes: &[u8]) {
        if self.index.contains_key(&row) {
            return;
        }
        let place = if self.rows.len() < self.entries_max {
            self.rows.push(row);
            self.turns.push(AtomicU8::new(0));
            self.rows.len() as u32 - 1
        } else {
            self.evict()
        };
        let at = place as usize;
        self.rows[at] = row;
        *self.turns[at].get_mut() = 0;
        self.bytes[at * self.row_bytes..][..self.row_bytes].copy_from_slice(bytes);
        self.index.insert(row, place);
        self.inserted += 1;
        if self.ghost.contains(hash) { self.main.push_back(place) } else { self.small.push_back(place) }
    }

    /// Frees the place of one row of a full stripe.
    fn evict(&mut self) -> u32 {
        loop {
            if self.small.len() > self.small_max || self.main.is_empty() {
                let place = self.small.pop_front().expect("a full stripe has a row in one of its queues");
                let turns = self.turns[place as usize].get_mut();
                if *turns > 1 {
                    *turns = 0;
                    self.main.push_back(place);
                    continue;
                }
                self.ghost.insert(mix(self.rows[place as usize]));
                return self.leave(place);
            }
            let place = self.main.pop_front().expect("the main queue was seen to hold a row");
            let turns = self.turns[place as usize].get_mut();
            if *turns == 0 {
                return self.leave(place);
            }
            *turns -= 1;
            self.main.push_back(place);
        }
    }

    fn leave(&mut self, place: u32) -> u32 {
        self.index.remove(&self.rows[place as usize]);
        self.evicted += 1;
        place
    }
}

/// Fingerprints of the rows that left the small queue last, as many as the stripe has rows: sets of four words of a 32-bit
/// fingerprint and the number of the insertion, the oldest of a set giving way.
#[derive(Debug)]
struct Ghost {
    words: Vec<u64>,
    remembered: u32,
    insertions: u32,
}

impl Ghost {
    fn new(entries: usize) -> Self {
        let sets = entries.div_ceil(GHOST_WAYS).next_power_of_two();
        Ghost { words: vec![0; sets * GHOST_WAYS], remembered: entries as u32, insertions: 0 }
    }

    /// The first word of the set of a hash, and its fingerprint, which is never 0.
    fn set(&self, hash: u64) -> (usize, u32) {
        let sets = self.words.len() / GHOST_WAYS;
        ((hash as usize & (sets - 1)) * GHOST_WAYS, (hash >> 28) as u32 | 1)
    }

    fn insert(&mut self, hash: u64) {
        let (at, fingerprint) = self.set(hash);
        self.insertions = self.insertions.wrapping_add(1);
        let now = self.insertions;
        let set = &mut self.words[at..at + GHOST_WAYS];
        let oldest = set.iter_mut().max_by_key(|w| if **w == 0 { u32::MAX } else { now.wrapping_sub(**w as u32) });
        *oldest.expect("a set has four words") = u64::from(fingerprint) << 32 | u64::from(now);
    }

    fn contains(&self, hash: u64) -> bool {
        let (at, fingerprint) = self.set(hash);
        self.words[at..at + GHOST_WAYS].iter().any(|&word| {
            (word >> 32) as u32 == fingerprint && self.insertions.wrapping_sub(word as u32) < self.remembered
        })
    }
}

/// Spreads row numbers, which are dense, over all 64 bits (the finaliser of splitmix64).
pub(super) fn mix(row: u64) -> u64 {
    let x = row.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The hasher of maps whose keys are row numbers; independent of the bits of [`mix`] that pick a stripe.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RowHasher(u64);

impl Hasher for RowHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = mix(self.0.rotate_left(1) ^ value ^ 0x5851_f42d_4c95_7f2d);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const ROW_BYTES: usize = 20;

    fn bytes_of(row: u64) -> Vec<u8> {
        (0..ROW_BYTES as u64).map(|i| mix(row ^ (i << 40)) as u8).collect()
    }

    fn cache_of(entries: usize) -> RowCache {
        RowCache::new(ROW_BYTES, entries * (ROW_BYTES + ENTRY_OVERHEAD_BYTES)).unwrap()
    }

    /// Row numbers from a Zipf law of exponent 1 over `0..rows`, by inverting its continuous form.
    fn zipf(rows: u64, seed: u64, count: usize) -> Vec<u64> {
        let mut state = seed;
        (0..count)
            .map(|_| {
                state = mix(state);
                let uniform = (state >> 11) as f64 / (1u64 << 53) as f64;
                ((rows as f64).powf(uniform) as u64 - 1).min(rows - 1)
            })
            .collect()
    }

    #[test]
    fn a_found_row_has_its_own_bytes_and_the_bound_holds() {
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
    fn a_scan_does_not_displace_what_is_asked_for_often() {
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
        let kept = (0..1000).filter(|&row| ask(row)).count();
        assert!(kept > 950, "{kept} of 1000 often used rows outlived a scan of 50000");
    }

    #[test]
    fn it_finds_more_than_least_recently_used_does_on_a_skewed_trace() {
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
    fn threads_share_it() {
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
    fn a_cache_without_room_for_a_row_is_refused() {
        assert!(RowCache::new(100, 100 + ENTRY_OVERHEAD_BYTES - 1).is_err());
        assert!(RowCache::new(0, 1 << 20).is_err());
        assert!(RowCache::new(100, 100 + ENTRY_OVERHEAD_BYTES).is_ok());
    }
}
