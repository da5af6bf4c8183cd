//! Measurements of a canary and of the active version.

use std::time::Duration;

use super::judge::{Verdict, quantile, verdict};
use super::key_hash::KeyHash;
use super::setting::Canary;
use super::window::{Counts, Window, step_of};

/// One of the two versions of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The version that answers by default.
    Active,
    /// The version that answers a fraction of the keys.
    Canary,
}

impl Side {
    /// Returns the name of this side in metrics and answers.
    pub fn name(self) -> &'static str {
        match self {
            Side::Active => "active",
            Side::Canary => "canary",
        }
    }
}

/// Measurements of a version in the window.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SideSeen {
    /// Completed requests.
    pub requests: u64,
    /// Failed requests.
    pub errors: u64,
    /// Latency p50 and p99, rounded up to a step of the latency grid.
    pub times: Option<(Duration, Duration)>,
    /// Number of answers that were compared with exact search.
    pub audits: u64,
    /// Mean recall of the audited answers.
    pub recall: Option<f64>,
}

impl SideSeen {
    fn of(counts: &Counts) -> Self {
        SideSeen {
            requests: counts.requests,
            errors: counts.errors,
            times: quantile(counts, 0.5).zip(quantile(counts, 0.99)),
            audits: counts.audits,
            recall: (counts.audits > 0).then(|| 1.0 - counts.lost / counts.audits as f64),
        }
    }
}

/// Measurements of both versions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BothSeen {
    /// Measurements of the active version.
    pub active: SideSeen,
    /// Measurements of the canary.
    pub canary: SideSeen,
}

/// Measurements of both versions, and the test that compares them. Times are relative to the start of the canary.
#[derive(Debug)]
pub(super) struct Watch {
    setting: Canary,
    window: Window,
}

impl Watch {
    /// Creates a watch without measurements.
    pub(super) fn new(setting: &Canary) -> Self {
        Watch { setting: setting.clone(), window: Window::new(setting.window()) }
    }

    fn counts(&mut self, now: Duration, place: KeyHash, side: Side) -> &mut Counts {
        let both = self.window.now(now);
        match side {
            Side::Active => &mut both.active,
            Side::Canary => &mut both.canary[place.group()],
        }
    }

    /// Counts a completed request; `took` is the latency of its answer, or `None` for a failed request.
    pub(super) fn ended(&mut self, now: Duration, (place, side): (KeyHash, Side), took: Option<Duration>) {
        let counts = self.counts(now, place, side);
        counts.requests += 1;
        match took {
            Some(took) => counts.answered[step_of(took)] += 1,
            None => counts.errors += 1,
        }
    }

    /// Counts an audited answer with its recall.
    pub(super) fn audited(&mut self, now: Duration, (place, side): (KeyHash, Side), recall: f64) {
        let counts = self.counts(now, place, side);
        counts.audits += 1;
        counts.lost += (1.0 - recall).clamp(0.0, 1.0);
    }

    /// Tests whether the canary is worse.
    pub(super) fn judge(&self, now: Duration) -> Option<Verdict> {
        verdict(&self.window.total(now), &self.setting.margins)
    }

    /// Returns the measurements in the window.
    pub(super) fn observed(&self, now: Duration) -> BothSeen {
        let both = self.window.total(now);
        BothSeen { active: SideSeen::of(&both.active), canary: SideSeen::of(&Counts::sum(&both.canary)) }
    }
}
