//! State of an active canary, at a server or at a router over the shards of both versions; and the sampling of shadow traffic.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use metrics::{Counter, Histogram, counter, gauge, histogram};

use super::judge::Verdict;
use super::key_hash::{KeyHash, seed};
use super::setting::{Canary, Shadow, Sticky, Traffic};
use super::watch::{BothSeen, Side, Watch};
use sterling_core::locks::locked;
use sterling_core::sampler::Sampler;

/// An active canary and its measurements. If a version or the setting changes, a new record replaces this one, because
/// measurements of other files or of another setting do not count.
pub struct CanaryRun {
    model: String,
    version: u64,
    /// Number and digest of the active version with which the canary is compared.
    active: (u64, String),
    setting: Canary,
    seed: u64,
    began: Instant,
    watch: Mutex<Watch>,
    /// Time of the last test, in microseconds since `began`.
    judged: AtomicU64,
    is_stopped: AtomicBool,
    /// Result of the test that stopped the canary on this server; none before.
    verdict: Mutex<Option<Verdict>>,
    meters: [SideMeters; 2],
}

/// Metrics of one version.
struct SideMeters {
    answered: Counter,
    failed: Counter,
    seconds: Histogram,
}

impl SideMeters {
    fn new(model: &str, side: Side) -> Self {
        let count = |outcome: &'static str| counter!("sterling_traffic_requests_total", "model" => model.to_owned(), "role" => side.name(), "outcome" => outcome);
        let seconds = histogram!("sterling_traffic_seconds", "model" => model.to_owned(), "role" => side.name());
        SideMeters { answered: count("answered"), failed: count("failed"), seconds }
    }
}

impl CanaryRun {
    /// Starts a canary of a model. The active version, with which it is compared, has the given number and digest.
    pub fn new(setting: &Canary, (model, version): (&str, u64), active: (u64, &str)) -> Self {
        gauge!("sterling_canary_share", "model" => model.to_owned()).set(setting.share);
        CanaryRun {
            seed: seed(model, version),
            meters: [Side::Active, Side::Canary].map(|side| SideMeters::new(model, side)),
            model: model.to_owned(),
            version,
            active: (active.0, active.1.to_owned()),
            setting: setting.clone(),
            began: Instant::now(),
            watch: Mutex::new(Watch::new(setting)),
            judged: AtomicU64::new(0),
            is_stopped: AtomicBool::new(false),
            verdict: Mutex::new(None),
        }
    }

    /// Returns true if this run has this setting and compares the canary with this active version.
    pub fn is_of(&self, setting: &Canary, active: (u64, &str)) -> bool {
        self.setting == *setting && (self.active.0, self.active.1.as_str()) == active
    }

    /// Returns the version number of the canary.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the source of a request's sticky key, which decides the version that answers.
    pub fn sticky(&self) -> &Sticky {
        &self.setting.sticky
    }

    /// Returns the operators' setting.
    pub fn setting(&self) -> &Canary {
        &self.setting
    }

    /// Returns the current share of keys that the canary answers.
    pub fn share(&self) -> f64 {
        if self.is_stopped.load(Ordering::Relaxed) { 0.0 } else { self.setting.share }
    }

    /// Returns the hash of a key, and the version that answers requests with this key.
    pub fn side(&self, key: &[u8]) -> (KeyHash, Side) {
        let place = KeyHash::of(key, self.seed);
        (place, if place.is_within(self.share()) { Side::Canary } else { Side::Active })
    }

    /// Returns the factor by which the audit rate of a version is multiplied, so that both versions get equally many
    /// audits.
    pub fn audited_times(&self, side: Side) -> f64 {
        let share = match side {
            Side::Canary => self.setting.share,
            Side::Active => 1.0 - self.setting.share,
        };
        ((1.0 - share) / share.max(f64::MIN_POSITIVE)).max(1.0)
    }

    /// Records a completed request; `took` is the time to its answer, or `None` for a failed request.
    pub fn ended(&self, by: (KeyHash, Side), took: Option<Duration>) {
        locked(&self.watch).ended(self.began.elapsed(), by, took);
        let meters = &self.meters[usize::from(by.1 == Side::Canary)];
        match took {
            Some(took) => {
                meters.answered.increment(1);
                meters.seconds.record(took.as_secs_f64());
            }
            None => meters.failed.increment(1),
        }
    }

    /// Records the recall of an audited answer.
    pub fn audited(&self, by: (KeyHash, Side), recall: f64) {
        locked(&self.watch).audited(self.began.elapsed(), by, recall);
    }

    /// Returns the measurements of the canary and of the active version.
    pub fn observed(&self) -> BothSeen {
        locked(&self.watch).observed(self.began.elapsed())
    }

    /// Returns the reason for a rollback on this server, if there was one.
    pub fn verdict(&self) -> Option<Verdict> {
        locked(&self.verdict).clone()
    }

    /// Tests the canary if the last test was at least `every` ago. If the setting is `automatic` and the canary is
    /// worse, stops the canary on this server.
    pub fn judge(&self, every: Duration) {
        let now = self.began.elapsed();
        let judged = Duration::from_micros(self.judged.load(Ordering::Relaxed));
        if self.share() <= 0.0 || now < judged + every {
            return;
        }
        self.judged.store(now.as_micros() as u64, Ordering::Relaxed);
        let (observed, verdict) = {
            let watch = locked(&self.watch);
            (watch.observed(now), watch.judge(now))
        };
        for (side, seen) in [(Side::Active, observed.active), (Side::Canary, observed.canary)] {
            if let Some(recall) = seen.recall {
                gauge!("sterling_traffic_recall", "model" => self.model.clone(), "role" => side.name()).set(recall);
            }
        }
        if let Some(verdict) = verdict.filter(|_| self.setting.automatic) {
            self.stop(verdict);
        }
    }

    /// Sets the metric of the canary's share to 0; called when the canary has ended.
    pub fn end(&self) {
        gauge!("sterling_canary_share", "model" => self.model.clone()).set(0.0);
    }

    fn stop(&self, verdict: Verdict) {
        let (model, version, active, reason) = (&self.model, self.version, self.active.0, &verdict.reason);
        tracing::error!(
            model,
            version,
            active,
            share = self.setting.share,
            reason,
            "the canary is worse than the active version and was rolled back on this server"
        );
        self.end();
        counter!("sterling_canary_rollbacks_total", "model" => model.clone(), "outcome" => verdict.behind.name())
            .increment(1);
        *locked(&self.verdict) = Some(verdict);
        self.is_stopped.store(true, Ordering::Relaxed);
    }
}

/// Sampling of the requests that are repeated at a shadow version.
pub struct ShadowRun {
    model: String,
    version: u64,
    setting: Shadow,
    draws: Sampler,
    /// Tokens left in the rate limiter, and the time of its last update.
    left: Mutex<(f64, Instant)>,
}

impl ShadowRun {
    /// Starts shadow traffic to a version of a model.
    pub fn new(setting: &Shadow, (model, version): (&str, u64)) -> Self {
        let left = Mutex::new((setting.per_second.max(1.0), Instant::now()));
        ShadowRun { model: model.to_owned(), version, setting: setting.clone(), draws: Sampler::default(), left }
    }

    /// Returns the name of the model.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Returns the version number of the shadow.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the operators' setting.
    pub fn setting(&self) -> &Shadow {
        &self.setting
    }

    /// Decides by sampling whether a request is repeated at the shadow version.
    pub fn is_drawn(&self) -> bool {
        self.draws.draw(self.setting.share)
    }

    /// Takes a token of the rate limiter; returns whether one was left.
    pub fn is_in_time(&self) -> bool {
        let mut left = locked(&self.left);
        let (rate, now) = (self.setting.per_second, Instant::now());
        let filled = left.0 + now.duration_since(left.1).as_secs_f64() * rate;
        *left = (filled.min(rate.max(1.0)), now);
        let is_left = left.0 >= 1.0;
        if is_left {
            left.0 -= 1.0;
        }
        is_left
    }
}

/// Returns the message about a rolled-back canary: from the store, or from this server before it reaches the store.
pub fn rolled_back(desired: &Traffic, run: Option<&CanaryRun>) -> Option<String> {
    let everywhere = desired.canary.as_ref().and_then(|canary| canary.stopped.as_ref());
    let here = || run.and_then(CanaryRun::verdict).map(|verdict| verdict.reason);
    let reason = everywhere.map(|stopped| stopped.reason.clone()).or_else(here)?;
    Some(format!("its canary was rolled back: {reason}"))
}

/// Desired rollout of a model, and its current state on this server.
pub struct TrafficNow {
    /// Number of changes to the desired state of the model.
    pub revision: u64,
    /// Desired rollout.
    pub setting: Traffic,
    /// Version that answers unpinned requests.
    pub active: Option<u64>,
    /// Canary version, if it is in memory and is not the active version.
    pub canary: Option<Arc<CanaryRun>>,
    /// Shadow version, if it is in memory and is not the active version.
    pub shadow: Option<Arc<ShadowRun>>,
}
