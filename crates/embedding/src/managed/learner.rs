//! Managed ids of a table in training: counts occurrences, and every n steps assigns the rows to the ids with the highest scores.
//!
//! Between two evictions, occurrences of ids that have a row (*held* ids) are counted at the row; other ids are counted as
//! candidates. An eviction ranks both together, as TorchRec does, by score. Among equal scores, held ids precede candidates;
//! held ids are ordered by id, candidates by their count in the interval and then by id. All scores are integers that are
//! compared in a fixed order, so results depend neither on threads nor on restarts.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, PoisonError, RwLock};

use serde::{Deserialize, Serialize};

use super::extended;
use super::map::{FREE, IdMap};
use super::policy::ManagedSpec;
use super::row_ids::{append_rows, map_of};
use super::sketch::Sketch;
use crate::spec::{TableSpec, Unseen};
use sterling_core::error::{Error, Result};
use sterling_core::random::splitmix64;

/// Map from ids to rows of a table in training, which the preparer of batches reads.
#[derive(Debug)]
pub(crate) struct SharedIds {
    state: RwLock<(IdMap, u64)>,
}

impl SharedIds {
    /// Returns the number of changes of the map so far.
    pub(crate) fn edition(&self) -> u64 {
        self.state.read().unwrap_or_else(PoisonError::into_inner).1
    }

    /// Returns the row of each id, -1 for an id without a row.
    pub(crate) fn rows_of(&self, spec: &TableSpec, ids: &[i64]) -> Vec<i64> {
        let mut rows = Vec::new();
        append_rows(&self.state.read().unwrap_or_else(PoisonError::into_inner).0, spec, ids, &mut rows);
        rows
    }
}

/// Occurrences of an id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    count: u64,
    /// Step of the last occurrence.
    step: u64,
    /// Time of the last occurrence, in seconds.
    time: u64,
}

/// Counts of ids and their occurrences since the start of training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdTotals {
    /// Number of occurrences of ids.
    pub occurrences: u64,
    /// Number of occurrences of ids that had no row.
    pub unseen: u64,
    /// Number of ids that got a row.
    pub admitted: u64,
    /// Number of ids that lost their row to another id.
    pub evicted: u64,
    /// Number of ids that lost their row because they did not occur for too long.
    pub expired: u64,
}

/// State of managed ids, as checkpoints store it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdState {
    /// Id of each row, [`FREE`] for a free row.
    pub ids: Vec<i64>,
    /// Counts, steps and times of the rows' ids, `[rows, 3]`.
    pub seen: Vec<u64>,
    /// Ids without a row that occurred since the last eviction, ascending.
    pub new_ids: Vec<i64>,
    /// Counts, steps and times of the new ids, `[n, 3]`.
    pub new_seen: Vec<u64>,
    /// Counters of the admission sketch; empty if every id is admitted.
    pub sketch: Vec<u8>,
    /// Latest time of an event, in seconds.
    pub clock: u64,
    /// Counts of ids and their occurrences since the start of training.
    pub totals: IdTotals,
}

/// Managed ids of a table in training.
#[derive(Debug)]
pub(crate) struct IdLearner {
    /// Settings of the assignment; none if the ids do not change.
    spec: Option<ManagedSpec>,
    shared: Arc<SharedIds>,
    by_row: Vec<i64>,
    seen: Vec<Seen>,
    candidates: HashMap<i64, Seen>,
    sketch: Option<Sketch>,
    /// Row that is never assigned to an id, because unseen ids use it.
    reserved: Option<usize>,
    /// Ids that never get a row.
    barred: BTreeSet<i64>,
    clock: u64,
    totals: IdTotals,
}

impl IdLearner {
    /// Creates the state of a table whose rows have these ids.
    ///
    /// # Errors
    /// As [`super::row_ids::ManagedIds::new`], and [`ManagedSpec::check`].
    pub(crate) fn new(table: &TableSpec, spec: Option<ManagedSpec>, by_row: Vec<i64>) -> Result<Self> {
        spec.map_or(Ok(()), |spec| spec.check())?;
        let map = map_of(table, &by_row)?;
        Ok(IdLearner {
            spec,
            shared: Arc::new(SharedIds { state: RwLock::new((map, 0)) }),
            seen: extended(&[], by_row.len(), Seen::default())?,
            candidates: HashMap::new(),
            sketch: spec.filter(|spec| spec.admit > 1).map(|_| Sketch::new(table.rows)).transpose()?,
            reserved: if let Unseen::Row(row) = table.unseen { Some(row as usize) } else { None },
            barred: BTreeSet::new(),
            clock: 0,
            totals: IdTotals::default(),
            by_row,
        })
    }

    pub(crate) fn shared(&self) -> &Arc<SharedIds> {
        &self.shared
    }

    /// Returns the id of each row.
    pub(crate) fn by_row(&self) -> &[i64] {
        &self.by_row
    }

    pub(crate) fn totals(&self) -> IdTotals {
        self.totals
    }

    /// Sets the time of the next occurrences, in seconds. Event times that go back are ignored.
    pub(crate) fn set_clock(&mut self, seconds: u64) {
        self.clock = self.clock.max(seconds);
    }

    /// Counts an occurrence at a step; `row` is the row that the lookup used, the id's row or the row of unseen ids.
    pub(crate) fn count(&mut self, id: i64, row: Option<usize>, step: u64) {
        self.totals.occurrences += 1;
        let now = |count: u64| Seen { count, step, time: self.clock };
        if let Some(row) = row.filter(|row| self.by_row[*row] == id && id != FREE) {
            self.seen[row] = now(self.seen[row].count + 1);
            return;
        }
        self.totals.unseen += 1;
        if id == FREE || self.barred.contains(&id) {
            return;
        }
        if let Some(seen) = self.candidates.get_mut(&id) {
            *seen = now(seen.count + 1);
            return;
        }
        let count = self.sketch.as_mut().map_or(1, |sketch| sketch.add(id));
        if self.spec.is_some_and(|spec| count >= spec.admit) {
            self.candidates.insert(id, now(u64::from(count)));
        }
    }

    /// Returns whether training changes which ids have rows.
    pub(crate) fn changes(&self) -> bool {
        self.spec.is_some()
    }

    /// Returns whether rows are reassigned to other ids after this step.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        self.spec.is_some_and(|spec| step.is_multiple_of(spec.every))
    }

    /// Assigns the rows to the ids with the highest scores. Returns the rows whose id changed, ascending, with their new id or
    /// [`FREE`].
    pub(crate) fn turn(&mut self, step: u64) -> Vec<(u32, i64)> {
        let mut changed = BTreeSet::new();
        if let Some(ttl) = self.spec.and_then(|spec| spec.ttl_seconds()) {
            for row in 0..self.by_row.len() {
                // An id of the package has no time of occurrence yet: it gets the current time.
                if self.seen[row].time == 0 {
                    self.seen[row].time = self.clock;
                }
                if self.by_row[row] != FREE && self.seen[row].time.saturating_add(ttl) < self.clock {
                    self.release(row);
                    self.totals.expired += 1;
                    changed.insert(row);
                }
            }
        }
        let mut new: Vec<(i64, Seen)> = std::mem::take(&mut self.candidates).into_iter().collect();
        new.sort_by_key(|(id, seen)| (Reverse(seen.count), *id));
        if let Some(sketch) = &mut self.sketch {
            sketch.clear();
        }
        let is_free = |row: &usize| self.by_row[*row] == FREE && Some(*row) != self.reserved;
        let mut vacant: Vec<usize> = (0..self.by_row.len()).filter(is_free).take(new.len()).collect();
        let most = new.len() - vacant.len();
        if most > 0 {
            let (lowest_scored, evicted) = self.lowest_scored(&new, most, step);
            for row in evicted {
                self.release(row);
                self.totals.evicted += 1;
                vacant.push(row);
            }
            let mut rank = 0..new.len();
            new.retain(|_| rank.next().is_none_or(|rank| !lowest_scored.contains(&rank)));
            vacant.sort_unstable();
        }
        self.totals.admitted += new.len() as u64;
        for (row, (id, seen)) in vacant.into_iter().zip(new) {
            (self.by_row[row], self.seen[row]) = (id, seen);
            self.with_map(|map| map.insert(id, row as u32));
            changed.insert(row);
        }
        changed.into_iter().map(|row| (row as u32, self.by_row[row])).collect()
    }

    /// Returns the `most` ids with the lowest scores among held and new ids: the ranks of new ids, and the rows of held ids.
    fn lowest_scored(&self, new: &[(i64, Seen)], most: usize, step: u64) -> (BTreeSet<usize>, Vec<usize>) {
        /// Score; among equal scores, new ids are evicted first, from the last index in `new` down, then ids with a row,
        /// from the largest id down.
        type Order = (i64, bool, Reverse<i64>, usize);
        let held = self.by_row.iter().zip(&self.seen).enumerate().filter(|(_, (id, _))| **id != FREE);
        let score = |seen: &Seen| self.spec.map_or(0, |spec| spec.score(seen.count, seen.step, step));
        let held = held.map(|(row, (id, seen))| (score(seen), true, Reverse(*id), row));
        let new = new.iter().enumerate().map(|(rank, (_, seen))| (score(seen), false, Reverse(rank as i64), rank));
        let mut all: Vec<Order> = held.chain(new).collect();
        if most < all.len() {
            all.select_nth_unstable(most);
            all.truncate(most);
        }
        let (rows, ranks): (Vec<Order>, Vec<Order>) = all.into_iter().partition(|(_, is_held, ..)| *is_held);
        (ranks.into_iter().map(|(.., rank)| rank).collect(), rows.into_iter().map(|(.., row)| row).collect())
    }

    /// Bars ids permanently from the table. Returns the rows that these ids had, ascending.
    pub(crate) fn forget(&mut self, ids: &[i64]) -> Vec<(u32, i64)> {
        for id in ids {
            self.candidates.remove(id);
            self.barred.insert(*id);
        }
        let held = |row: &usize| self.by_row[*row] != FREE && self.barred.contains(&self.by_row[*row]);
        let rows: Vec<usize> = (0..self.by_row.len()).filter(held).collect();
        rows.iter().for_each(|row| self.release(*row));
        rows.into_iter().map(|row| (row as u32, FREE)).collect()
    }

    /// Frees a row that an id had.
    fn release(&mut self, row: usize) {
        let id = std::mem::replace(&mut self.by_row[row], FREE);
        self.seen[row] = Seen::default();
        self.with_map(|map| map.remove(id));
    }

    /// Changes the map from ids to rows. Batches that were prepared before the change are no longer valid.
    fn with_map<T>(&self, change: impl FnOnce(&mut IdMap) -> T) -> T {
        let mut state = self.shared.state.write().unwrap_or_else(PoisonError::into_inner);
        state.1 += 1;
        change(&mut state.0)
    }

    /// Returns the state for a checkpoint.
    pub(crate) fn export(&self) -> IdState {
        let flat = |seen: &Seen| [seen.count, seen.step, seen.time];
        let mut new: Vec<(i64, Seen)> = self.candidates.iter().map(|(id, seen)| (*id, *seen)).collect();
        new.sort_unstable_by_key(|(id, _)| *id);
        IdState {
            ids: self.by_row.clone(),
            seen: self.seen.iter().flat_map(flat).collect(),
            new_ids: new.iter().map(|(id, _)| *id).collect(),
            new_seen: new.iter().flat_map(|(_, seen)| flat(seen)).collect(),
            sketch: self.sketch.as_ref().map_or_else(Vec::new, |sketch| sketch.counters().to_vec()),
            clock: self.clock,
            totals: self.totals,
        }
    }

    /// Restores a state.
    ///
    /// # Errors
    /// `Corrupt` if the state does not fit the table.
    pub(crate) fn import(&mut self, table: &TableSpec, state: IdState) -> Result<()> {
        let rows = self.by_row.len();
        let sizes = [
            ("ids", state.ids.len(), rows),
            ("counts", state.seen.len(), 3 * rows),
            ("counts of new ids", state.new_seen.len(), 3 * state.new_ids.len()),
            ("counters", state.sketch.len(), self.sketch.as_ref().map_or(0, |sketch| sketch.counters().len())),
        ];
        if let Some((what, got, expected)) = sizes.into_iter().find(|(_, got, expected)| got != expected) {
            return Err(Error::corrupt(format!("managed ids: got {got} {what}, expected {expected}")));
        }
        let map = map_of(table, &state.ids).map_err(|e| Error::corrupt(e.to_string()))?;
        let seen = |flat: &[u64]| {
            flat.as_chunks::<3>().0.iter().map(|&[count, step, time]| Seen { count, step, time }).collect::<Vec<_>>()
        };
        self.by_row = state.ids;
        self.seen = seen(&state.seen);
        self.candidates = state.new_ids.into_iter().zip(seen(&state.new_seen)).collect();
        if let Some(sketch) = &mut self.sketch {
            sketch.counters_mut().copy_from_slice(&state.sketch);
        }
        (self.clock, self.totals) = (state.clock, state.totals);
        self.with_map(|old| *old = map);
        Ok(())
    }
}

/// Writes the initial row of an id: uniform in ±1/√rows, as TorchRec initializes a table, from a hash of the id alone.
pub(crate) fn initial_row(id: i64, rows: u64, out: &mut [f32]) {
    let (bound, seed) = ((rows as f32).sqrt().recip(), splitmix64(id as u64));
    for (column, x) in (0..).zip(out) {
        // 24 bits: exact in f32.
        let uniform = (splitmix64(seed ^ column) >> 40) as f32 / (1u32 << 24) as f32;
        *x = if id == FREE { 0.0 } else { (2.0 * uniform - 1.0) * bound };
    }
}
