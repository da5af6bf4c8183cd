//! Service rate: measured run time relative to the cost estimates.
//!
//! A backend estimates costs for a machine that it has never seen. The service rate is the recent ratio of measured to estimated
//! time; both sums decay by half every half second. The rate uses wall-clock time instead of CPU time, because time that other
//! processes steal from the workers delays requests too.

use std::time::{Duration, Instant};

/// Half-life of past measurements.
const HALF_LIFE: Duration = Duration::from_millis(500);
/// Maximum weight of the past, in estimated seconds: more would react slowly, less would fluctuate.
const MEMORY_S: f64 = 0.25;
/// Maximum weight of one batch, in estimated seconds, so that an expensive one does not dominate.
const SAMPLE_S: f64 = 0.025;
/// Weight of the initial assumption that estimates are right, in estimated seconds. The initial value has the weight of
/// a few requests.
const PRIOR_WEIGHT_S: f64 = 0.005;
/// Maximum ratio of measured to predicted time of a batch; larger ones are clamped, since the machine slept or the process was
/// stopped.
const RATIO_MAX: f64 = 8.0;
/// Bound of the service rate in both directions.
const FACTOR_MAX: f64 = 1000.0;
/// Time without a batch after which the service rate counts as stale.
const STALE: Duration = Duration::from_secs(1);

/// Decaying sums of measured and estimated time.
#[derive(Debug)]
pub(super) struct ServiceRate {
    taken_s: f64,
    estimated_s: f64,
    learned: Instant,
}

impl ServiceRate {
    /// Starts with rate 1: cost estimates are assumed to be correct.
    pub(super) fn new(now: Instant) -> Self {
        ServiceRate { taken_s: PRIOR_WEIGHT_S, estimated_s: PRIOR_WEIGHT_S, learned: now }
    }

    pub(super) fn factor(&self) -> f64 {
        (self.taken_s / self.estimated_s).clamp(1.0 / FACTOR_MAX, FACTOR_MAX)
    }

    /// Predicts the run time of work from its cost estimate.
    pub(super) fn predict(&self, cost_estimate: Duration) -> Duration {
        cost_estimate.mul_f64(self.factor())
    }

    /// Records that work with this cost estimate took `taken`.
    pub(super) fn learn(&mut self, cost_estimate: Duration, taken: Duration, now: Instant) {
        let (estimated_s, taken_s) = (cost_estimate.as_secs_f64(), taken.as_secs_f64());
        if estimated_s <= 0.0 {
            return;
        }
        let believable_s = taken_s.min(estimated_s * self.factor() * RATIO_MAX);
        let weight = (SAMPLE_S / estimated_s).min(1.0);
        let age = now.saturating_duration_since(self.learned).as_secs_f64() / HALF_LIFE.as_secs_f64();
        // A rest always remains, so that the first batch after a pause does not decide alone.
        let retained = (-age).exp2().max(SAMPLE_S / MEMORY_S).min((MEMORY_S / self.estimated_s).min(1.0));
        self.taken_s = self.taken_s * retained + believable_s * weight;
        self.estimated_s = self.estimated_s * retained + estimated_s * weight;
        self.learned = now;
    }

    /// Returns whether no recent batch has confirmed the service rate.
    pub(super) fn is_stale(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.learned) > STALE
    }
}
