//! Cache slots of rows, and their eviction.
//!
//! The policy is S3-FIFO (Yang et al., SOSP 2023). A new row enters a *small* queue of a tenth of the capacity. When a
//! slot is needed, the oldest row of the small queue moves to the *main* queue if the row was requested at least twice
//! meanwhile. Otherwise the row is evicted, and its fingerprint stays in a *ghost* table; a row whose fingerprint is in the
//! ghost table enters the main queue directly. The main queue reinserts its oldest row once per request since the row's last
//! insertion, at most three times. So a row that is requested once never displaces a frequent row, and a hit writes only one
//! byte, for which readers share the lock.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU8, Ordering};

use sterling_core::random::splitmix64;

const TURNS_MAX: u8 = 3;
const GHOST_WAYS: usize = 4;

/// Counters of a cache since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// Number of requested rows that were cached.
    pub hits: u64,
    /// Number of requested rows that were not cached.
    pub misses: u64,
    /// Number of rows inserted.
    pub inserted: u64,
    /// Number of rows evicted.
    pub evicted: u64,
    /// Number of rows in the cache.
    pub entries: u64,
    /// Capacity in rows.
    pub entries_max: u64,
}

impl CacheCounters {
    /// Returns the fraction of requested rows that were hits, 0 without requests.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / (self.hits + self.misses).max(1) as f64
    }
}

/// Slots of a cache, and the rows in them.
#[derive(Debug)]
pub(crate) struct CacheSlots {
    most: usize,
    small_max: usize,
    index: HashMap<u64, u32, BuildHasherDefault<RowHasher>>,
    rows: Vec<u64>,
    turns: Vec<AtomicU8>,
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    ghost: Ghost,
    inserted: u64,
    evicted: u64,
}

impl CacheSlots {
    /// Creates `most` empty slots.
    pub(crate) fn new(most: usize) -> Self {
        CacheSlots {
            most,
            small_max: most / 10,
            index: HashMap::default(),
            rows: Vec::new(),
            turns: Vec::new(),
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghost: Ghost::new(most),
            inserted: 0,
            evicted: 0,
        }
    }

    /// Returns the number of slots.
    #[cfg(feature = "cuda")]
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Returns the counters of the cache.
    pub(crate) fn counters(&self) -> CacheCounters {
        CacheCounters {
            inserted: self.inserted,
            evicted: self.evicted,
            entries: self.index.len() as u64,
            entries_max: self.most as u64,
            ..CacheCounters::default()
        }
    }

    /// Returns the slot of a requested row, if it is cached.
    pub(crate) fn find(&self, row: u64) -> Option<u32> {
        let place = *self.index.get(&row)?;
        let turns = self.turns[place as usize].load(Ordering::Relaxed);
        if turns < TURNS_MAX {
            // Concurrent hits may count as one hit, because the counter only ranks rows.
            self.turns[place as usize].store(turns + 1, Ordering::Relaxed);
        }
        Some(place)
    }

    /// Assigns a slot to a row, by eviction if all slots are in use. Returns `None` if the row is cached already, or there are no
    /// slots.
    pub(crate) fn insert(&mut self, row: u64) -> Option<u32> {
        if self.most == 0 || self.index.contains_key(&row) {
            return None;
        }
        let place = if self.rows.len() < self.most {
            self.rows.push(row);
            self.turns.push(AtomicU8::new(0));
            self.rows.len() as u32 - 1
        } else {
            self.evict()
        };
        let at = place as usize;
        self.rows[at] = row;
        *self.turns[at].get_mut() = 0;
        self.index.insert(row, place);
        self.inserted += 1;
        if self.ghost.contains(splitmix64(row)) {
            self.main.push_back(place)
        } else {
            self.small.push_back(place)
        }
        Some(place)
    }

    /// Evicts one row and returns its slot. Called only if all slots are in use.
    fn evict(&mut self) -> u32 {
        loop {
            if self.small.len() > self.small_max || self.main.is_empty() {
                let place = self.small.pop_front().expect("a full cache has a row in one of its queues");
                let turns = self.turns[place as usize].get_mut();
                if *turns > 1 {
                    *turns = 0;
                    self.main.push_back(place);
                    continue;
                }
                self.ghost.insert(splitmix64(self.rows[place as usize]));
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

/// Fingerprints of the rows evicted last from the small queue, as many as there are slots. Sets of four words hold a 32-bit
/// fingerprint and the insertion number each; the oldest entry of a set is replaced.
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

    /// Returns the first word of the set of a hash, and its fingerprint, which is never 0.
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

/// Hasher of maps keyed by row numbers; independent of the bits of [`splitmix64`] that select a stripe.
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
        self.0 = splitmix64(self.0.rotate_left(1) ^ value ^ 0x5851_f42d_4c95_7f2d);
    }
}
