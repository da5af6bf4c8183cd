//! Single flight: concurrent calls share one request per row.
//!
//! A *flight* is one request for rows. A call that misses the cache registers its flight for the rows that no other flight is
//! fetching, and joins other flights for the remaining rows. The tier's threads settle a flight shard by shard as answers arrive,
//! so no call depends on another call's thread.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::BuildHasherDefault;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::super::RowState;
use super::super::cache_slots::RowHasher;

use sterling_core::blocking::may_block;
use sterling_core::locks::locked;
use sterling_core::random::splitmix64;

/// Rows that one call has requested from the cluster.
#[derive(Debug)]
pub(super) struct Flight {
    rows: Vec<u64>,
    row_bytes: usize,
    pub(super) deadline: Instant,
    answers: Mutex<Answers>,
    settled: Condvar,
}

/// Answers to a request that were received until now.
#[derive(Debug)]
pub(super) struct Answers {
    bytes: Vec<u8>,
    states: Vec<Option<RowState>>,
    outstanding: usize,
}

impl Flight {
    /// Creates a flight for `rows`, sorted and distinct.
    pub(super) fn new(rows: Vec<u64>, row_bytes: usize, deadline: Instant) -> Self {
        let answers =
            Answers { bytes: vec![0; rows.len() * row_bytes], states: vec![None; rows.len()], outstanding: rows.len() };
        Flight { rows, row_bytes, deadline, answers: Mutex::new(answers), settled: Condvar::new() }
    }

    pub(super) fn rows(&self) -> &[u64] {
        &self.rows
    }

    /// Records the answers for rows, given by their index in the flight: bytes, or `None` for a degraded row. A row is
    /// settled once.
    pub(super) fn settle<'b>(&self, answers: impl Iterator<Item = (usize, Option<&'b [u8]>)>) {
        let mut held = self.lock();
        for (index, bytes) in answers {
            if held.states[index].is_some() {
                continue;
            }
            held.states[index] = Some(if bytes.is_some() { RowState::Hit } else { RowState::Degraded });
            held.outstanding -= 1;
            if let Some(bytes) = bytes {
                held.bytes[index * self.row_bytes..][..self.row_bytes].copy_from_slice(bytes);
            }
        }
        if held.outstanding == 0 {
            self.settled.notify_all();
        }
    }

    /// Waits until every row is settled or `until` is reached.
    pub(super) fn wait(&self, until: Instant) -> MutexGuard<'_, Answers> {
        may_block();
        let mut held = self.lock();
        while held.outstanding > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            held = self.settled.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        held
    }

    /// Marks unsettled rows as degraded, so that later answers are ignored. Returns the number of these rows.
    pub(super) fn give_up(&self) -> u64 {
        let mut held = self.lock();
        if held.outstanding == 0 {
            return 0;
        }
        let mut late = 0;
        for state in held.states.iter_mut().filter(|state| state.is_none()) {
            *state = Some(RowState::Degraded);
            late += 1;
        }
        held.outstanding = 0;
        self.settled.notify_all();
        late
    }

    /// Returns, for each of these row indexes, whether the row is unsettled.
    pub(super) fn unsettled(&self, indices: &[usize]) -> Vec<bool> {
        let held = self.lock();
        indices.iter().map(|index| held.states[*index].is_none()).collect()
    }

    /// Returns the index of a row in this flight.
    pub(super) fn index_of(&self, row: u64) -> Option<usize> {
        self.rows.binary_search(&row).ok()
    }

    /// Copies a settled row and returns its outcome; an unsettled row is degraded.
    pub(super) fn copy(&self, answers: &Answers, index: usize, out: &mut [u8]) -> RowState {
        let state = answers.states[index].unwrap_or(RowState::Degraded);
        if state == RowState::Hit {
            out.copy_from_slice(&answers.bytes[index * self.row_bytes..][..self.row_bytes]);
        }
        state
    }

    fn lock(&self) -> MutexGuard<'_, Answers> {
        locked(&self.answers)
    }
}

const STRIPES: usize = 16;

type Flights = HashMap<u64, Arc<Flight>, BuildHasherDefault<RowHasher>>;

/// Flights in progress, by row.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    stripes: [Mutex<Flights>; STRIPES],
}

impl InFlight {
    /// Returns the flight that already fetches the row, or registers `flight` for the row.
    pub(super) fn join_or_lead(&self, row: u64, flight: &Arc<Flight>) -> Option<Arc<Flight>> {
        match self.stripe(row).entry(row) {
            Entry::Occupied(other) => Some(other.get().clone()),
            Entry::Vacant(place) => {
                place.insert(flight.clone());
                None
            }
        }
    }

    /// Removes the row's registration.
    pub(super) fn unregister(&self, row: u64, flight: &Arc<Flight>) {
        let mut stripe = self.stripe(row);
        if stripe.get(&row).is_some_and(|f| Arc::ptr_eq(f, flight)) {
            stripe.remove(&row);
        }
    }

    fn stripe(&self, row: u64) -> MutexGuard<'_, Flights> {
        locked(&self.stripes[(splitmix64(row) >> 60) as usize % STRIPES])
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_second_call_joins_and_gets_the_first_ones_answer() {
        let later = Instant::now() + Duration::from_secs(60);
        let in_flight = InFlight::default();
        let first = Arc::new(Flight::new(vec![3, 8], 2, later));
        let second = Arc::new(Flight::new(vec![8, 9], 2, later));
        assert!(in_flight.join_or_lead(3, &first).is_none() && in_flight.join_or_lead(8, &first).is_none());
        let joined = in_flight.join_or_lead(8, &second).unwrap();
        assert!(Arc::ptr_eq(&joined, &first));
        std::thread::scope(|scope| {
            scope.spawn(|| first.settle([(0, None), (1, Some(&[7u8, 7][..]))].into_iter()));
            let answers = joined.wait(later);
            let mut out = [0; 2];
            assert_eq!(joined.copy(&answers, joined.index_of(8).unwrap(), &mut out), RowState::Hit);
            assert_eq!(out, [7, 7]);
            assert_eq!(joined.copy(&answers, 0, &mut out), RowState::Degraded);
        });
        in_flight.unregister(8, &second);
        assert!(in_flight.join_or_lead(8, &second).is_some(), "only its own flight takes a row off");
        in_flight.unregister(8, &first);
        assert!(in_flight.join_or_lead(8, &second).is_none());
    }

    #[test]
    fn waiting_ends_at_the_given_time_and_what_is_not_there_is_degraded() {
        let flight = Flight::new(vec![1], 1, Instant::now());
        let answers = flight.wait(Instant::now() + Duration::from_millis(5));
        assert_eq!(flight.copy(&answers, 0, &mut [0]), RowState::Degraded);
        drop(answers);
        assert_eq!(flight.unsettled(&[0]), [true]);
        assert_eq!((flight.give_up(), flight.give_up()), (1, 0));
        assert_eq!(flight.unsettled(&[0]), [false]);
        flight.settle([(0, Some(&[1u8][..]))].into_iter());
        assert_eq!(flight.copy(&flight.wait(Instant::now()), 0, &mut [0]), RowState::Degraded, "settled once");
    }
}
