//! How much longer work takes here than its price says.
//!
//! A price is what a backend believes of a machine it has never seen. The pace is the factor between both, over the
//! last moments: time taken by time priced, each sum forgetting half of itself every half second. For whoever waits it is
//! time on the clock, not of the core: what others steal from the workers makes them wait longer too.

use std::time::{Duration, Instant};

/// Half of what is known is forgotten after this long.
const HALF_LIFE: Duration = Duration::from_millis(500);
/// Priced seconds that the pace rests on at most: more would make it slow to follow, less would make it jump.
const MEMORY_S: f64 = 0.25;
/// Priced seconds that one batch may add: a single dear one does not outvote all others.
const SAMPLE_S: f64 = 0.025;
/// Priced seconds that the belief in the prices counts for: a few requests tell more than it.
const BELIEF_S: f64 = 0.005;
/// A batch that took more times its prediction than this counts as this: the machine slept, or the process was stopped.
const SURPRISE_MAX: f64 = 8.0;
/// The pace stays within this factor of what the prices say, either way.
const FACTOR_MAX: f64 = 1000.0;
/// Without a batch for this long, the pace is a memory and no measurement.
const STALE: Duration = Duration::from_secs(1);

/// Time taken by time priced.
#[derive(Debug)]
pub(super) struct Pace {
    taken_s: f64,
    priced_s: f64,
    learned: Instant,
}

impl Pace {
    /// Believes the prices, until it learns otherwise.
    pub(super) fn new(now: Instant) -> Self {
        Pace { taken_s: BELIEF_S, priced_s: BELIEF_S, learned: now }
    }

    pub(super) fn factor(&self) -> f64 {
        (self.taken_s / self.priced_s).clamp(1.0 / FACTOR_MAX, FACTOR_MAX)
    }

    /// What work of this price takes here.
    pub(super) fn predict(&self, price: Duration) -> Duration {
        price.mul_f64(self.factor())
    }

    /// Takes in that work of a price took this long.
    pub(super) fn learn(&mut self, price: Duration, taken: Duration, now: Instant) {
        let (priced_s, taken_s) = (price.as_secs_f64(), taken.as_secs_f64());
        if priced_s <= 0.0 {
            return;
        }
        let believable_s = taken_s.min(priced_s * self.factor() * SURPRISE_MAX);
        let weight = (SAMPLE_S / priced_s).min(1.0);
        let age = now.saturating_duration_since(self.learned).as_secs_f64() / HALF_LIFE.as_secs_f64();
        // Something always stays, so that the first batch after a long silence does not stand for all.
        let kept = (-age).exp2().max(SAMPLE_S / MEMORY_S).min((MEMORY_S / self.priced_s).min(1.0));
        self.taken_s = self.taken_s * kept + believable_s * weight;
        self.priced_s = self.priced_s * kept + priced_s * weight;
        self.learned = now;
    }

    /// True where no batch has confirmed the pace for a while.
    pub(super) fn is_stale(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.learned) > STALE
    }
}
