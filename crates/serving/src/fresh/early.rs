//! Embeddings of items whose updates are not applied yet.
//!
//! The item tower runs before an update is acknowledged, because its result decides whether the item can be accepted. The version
//! whose tower ran applies the update a moment later with the embedding stored here, so that the tower runs once per item.
//! Other versions, and servers that only read the journal, run their towers when they apply the update.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_128;

use super::embed::Embedded;
use super::update::Put;
use sterling_core::locks::locked;
use sterling_snapshot::Snapshot;

/// Maximum bytes of all embeddings; further items are embedded again when their updates are applied.
const BYTES_MAX: usize = 64 << 20;
/// Time after which an embedding is dropped; if its call failed, the update never follows.
const EMBEDDING_LIFETIME: Duration = Duration::from_secs(60);

/// Number of entries in `order`, beyond twice the embeddings, at which it is compacted.
const COMPACTED_MIN: usize = 1024;

/// Embeddings by content of the item, each computed for a snapshot (`T`).
pub(super) struct EarlyEmbeddings<T = Snapshot>(Mutex<Waiting<T>>);

struct Waiting<T> {
    by_put: HashMap<u128, Entry<T>>,
    /// Entries in order of insertion.
    order: VecDeque<(Instant, u128)>,
    bytes: usize,
}

struct Entry<T> {
    main: Weak<T>,
    embedded: Embedded,
    since: Instant,
}

impl<T> Default for EarlyEmbeddings<T> {
    fn default() -> Self {
        EarlyEmbeddings(Mutex::new(Waiting { by_put: HashMap::new(), order: VecDeque::new(), bytes: 0 }))
    }
}

/// Hashes the complete content of an item.
fn name(put: &Put) -> Option<u128> {
    postcard::to_allocvec(put).ok().map(|bytes| xxh3_128(&bytes))
}

fn bytes(embedded: &Embedded) -> usize {
    size_of::<Entry<Snapshot>>() + size_of_val(embedded.vector.as_slice()) + embedded.kept.len()
}

impl<T> EarlyEmbeddings<T> {
    /// Stores embeddings of a snapshot's tower, as far as there is room.
    pub(super) fn keep(&self, main: &Arc<T>, made: Vec<(&Put, Embedded)>) {
        let named = made.into_iter().filter_map(|(put, embedded)| Some((name(put)?, embedded)));
        let named: Vec<(u128, Embedded)> = named.collect();
        let since = Instant::now();
        let mut waiting = self.waiting();
        waiting.forget(since);
        waiting.compact();
        for (name, embedded) in named {
            waiting.remove(name);
            if waiting.bytes + bytes(&embedded) > BYTES_MAX {
                return;
            }
            waiting.bytes += bytes(&embedded);
            waiting.order.push_back((since, name));
            waiting.by_put.insert(name, Entry { main: Arc::downgrade(main), embedded, since });
        }
    }

    /// Takes the stored embeddings of a snapshot's tower; `None` for items that were not stored.
    pub(super) fn take(&self, main: &Arc<T>, puts: &[&Put]) -> Vec<Option<Embedded>> {
        if self.waiting().by_put.is_empty() {
            return Vec::new();
        }
        let names: Vec<Option<u128>> = puts.iter().map(|put| name(put)).collect();
        let mut waiting = self.waiting();
        let is_of = |entry: &Entry<T>| entry.main.as_ptr() == Arc::as_ptr(main);
        let mut take = |name: u128| {
            let is_there = waiting.by_put.get(&name).is_some_and(is_of);
            if is_there { waiting.remove(name) } else { None }
        };
        names.into_iter().map(|name| take(name?)).collect()
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting<T>> {
        // A panic can at most lose one embedding.
        locked(&self.0)
    }
}

impl<T> Waiting<T> {
    fn remove(&mut self, name: u128) -> Option<Embedded> {
        let Entry { embedded, .. } = self.by_put.remove(&name)?;
        self.bytes -= bytes(&embedded);
        Some(embedded)
    }

    /// Removes expired embeddings, and order entries of embeddings that were taken.
    fn forget(&mut self, now: Instant) {
        while let Some(&(since, name)) = self.order.front() {
            let is_there = self.by_put.get(&name).is_some_and(|entry| entry.since == since);
            if is_there && now.duration_since(since) < EMBEDDING_LIFETIME {
                return;
            }
            self.order.pop_front();
            if is_there {
                self.remove(name);
            }
        }
    }

    /// Removes entries of `order` whose embeddings were taken, once most entries are of this kind.
    fn compact(&mut self) {
        if self.order.len() > 2 * self.by_put.len() + COMPACTED_MIN {
            let Waiting { by_put, order, .. } = self;
            order.retain(|(since, name)| by_put.get(name).is_some_and(|entry| entry.since == *since));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn put(id: i64) -> Put {
        Put { id, ..Put::default() }
    }

    fn embedded(width: usize) -> Embedded {
        Embedded { vector: vec![0.5; width], kept: vec![7] }
    }

    #[test]
    fn an_embedding_is_taken_once_and_for_its_snapshot_alone() {
        let (early, one, other) = (EarlyEmbeddings::default(), Arc::new("one"), Arc::new("other"));
        let (a, b) = (put(1), put(2));
        assert!(early.take(&one, &[&a]).is_empty());
        early.keep(&one, vec![(&a, embedded(3)), (&b, embedded(4))]);
        assert_eq!(early.take(&other, &[&a, &b]), [None, None]);
        let changed = Put { dense: vec![("image".into(), vec![1.0])], ..put(1) };
        assert_eq!(early.take(&one, &[&changed, &b, &a]), [None, Some(embedded(4)), Some(embedded(3))]);
        assert!(early.take(&one, &[&a]).is_empty());
        assert_eq!(early.waiting().bytes, 0);
    }

    #[test]
    fn unclaimed_embeddings_stay_within_their_bounds() {
        let (early, main) = (EarlyEmbeddings::default(), Arc::new(()));
        let width = BYTES_MAX / 4 / 4;
        let large: Vec<Put> = (0..6).map(put).collect();
        early.keep(&main, large.iter().map(|put| (put, embedded(width))).collect());
        let all: Vec<&Put> = large.iter().collect();
        let kept = early.take(&main, &all).iter().flatten().count();
        assert!((1..=4).contains(&kept) && early.waiting().bytes == 0, "{kept}");
        // One entry remains; later entries are added and taken.
        let first = put(-1);
        early.keep(&main, vec![(&first, embedded(1))]);
        for id in 0..10_000 {
            let put = put(id);
            early.keep(&main, vec![(&put, embedded(1))]);
            assert!(early.take(&main, &[&put])[0].is_some());
        }
        let places = early.waiting().order.len();
        assert!(places <= COMPACTED_MIN + 4, "{places}");
        // Expired embeddings are removed with the next insertion.
        let mut waiting = early.waiting();
        waiting.forget(Instant::now() + EMBEDDING_LIFETIME);
        assert_eq!((waiting.by_put.len(), waiting.bytes), (0, 0));
    }
}
