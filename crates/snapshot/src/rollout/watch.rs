//! What is seen of a canary and of the active version beside it.

use std::time::Duration;

use super::judge::{Verdict, quantile, verdict};
use super::place::Place;
use super::setting::Canary;
use super::window::{Counts, Window, step_of};

/// Which of the two versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that answers where nothing is said.
    Active,
    /// The one that answers a share.
    Canary,
}

impl Side {
    /// Its name, in metrics and answers.
    pub fn name(self) -> &'static str {
        match self {
            Side::Active => "active",
            Side::Canary => "canary",
        }
    }
}

/// What was seen of a version in the window.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SideSeen {
    /// Requests that ended.
    pub requests: u64,
    /// Those that failed.
    pub errors: u64,
    /// What half of the answers and what 99 of 100 took at most, to a step of the grid.
    pub times: Option<(Duration, Duration)>,
    /// Answers that were held against exact ones.
    pub audits: u64,
    /// The mean share of the exact items in them.
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

/// What was seen of both.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BothSeen {
    /// Of the active version.
    pub active: SideSeen,
    /// Of the canary.
    pub canary: SideSeen,
}

/// What is seen of both, and what follows from it. Times are those since it began.
#[derive(Debug)]
pub struct Watch {
    setting: Canary,
    window: Window,
}

impl Watch {
    /// Nothing was seen yet.
    pub fn new(setting: &Canary) -> Self {
        Watch { setting: setting.clone(), window: Window::new(setting.window()) }
    }

    fn counts(&mut self, now: Duration, place: Place, side: Side) -> &mut Counts {
        let both = self.window.now(now);
        match side {
            Side::Active => &mut both.active,
            Side::Canary => &mut both.canary[place.group()],
        }
    }

    /// Counts a request that ended: with the time of its answer, or with none where it failed.
    pub fn ended(&mut self, now: Duration, (place, side): (Place, Side), took: Option<Duration>) {
        let counts = self.counts(now, place, side);
        counts.requests += 1;
        match took {
            Some(took) => counts.answered[step_of(took)] += 1,
            None => counts.errors += 1,
        }
    }

    /// Counts an answer of which this share of the exact items was served.
    pub fn audited(&mut self, now: Duration, (place, side): (Place, Side), recall: f64) {
        let counts = self.counts(now, place, side);
        counts.audits += 1;
        counts.lost += (1.0 - recall).clamp(0.0, 1.0);
    }

    /// Whether the canary is behind.
    pub fn judge(&self, now: Duration) -> Option<Verdict> {
        verdict(&self.window.total(now), &self.setting.margins)
    }

    /// What is in the window.
    pub fn observed(&self, now: Duration) -> BothSeen {
        let both = self.window.total(now);
        BothSeen { active: SideSeen::of(&both.active), canary: SideSeen::of(&Counts::sum(&both.canary)) }
    }
}
