//! What is seen of a canary while it is one, wherever its requests are divided: at a server, or at a router over the shards of both versions; and
//! which requests a shadow is asked.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use metrics::{Counter, Histogram, counter, gauge, histogram};

use super::judge::Verdict;
use super::place::{Place, seed};
use super::setting::{Canary, Shadow, Sticky, Traffic};
use super::watch::{BothSeen, Side, Watch};
use sterling_core::draws::Draws;
use sterling_core::locks::locked;

/// A canary beside the active version. It is made anew where a version or the setting changes: what was seen of other bytes, or under another
/// setting, is not held against these.
pub struct CanaryRun {
    model: String,
    version: u64,
    /// Number and digest of the version that it is held against.
    active: (u64, String),
    setting: Canary,
    seed: u64,
    began: Instant,
    watch: Mutex<Watch>,
    /// When it was judged last, in microseconds since it began.
    judged: AtomicU64,
    is_stopped: AtomicBool,
    /// Why, where that is not in the store yet.
    verdict: Mutex<Option<Verdict>>,
    meters: [SideMeters; 2],
}

/// The metrics of one version.
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
    /// A version of a model beside the active one, of this number and digest. Nothing was seen yet.
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

    /// True where it is of this setting, beside the version of this number and digest.
    pub fn is_of(&self, setting: &Canary, active: (u64, &str)) -> bool {
        self.setting == *setting && (self.active.0, self.active.1.as_str()) == active
    }

    /// The version's number.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// What sticks requests to a version.
    pub fn sticky(&self) -> &Sticky {
        &self.setting.sticky
    }

    /// What operators have said.
    pub fn setting(&self) -> &Canary {
        &self.setting
    }

    /// The share of keys that it answers at this moment.
    pub fn share(&self) -> f64 {
        if self.is_stopped.load(Ordering::Relaxed) { 0.0 } else { self.setting.share }
    }

    /// Which version a key belongs to.
    pub fn side(&self, key: &[u8]) -> (Place, Side) {
        let place = Place::of(key, self.seed);
        (place, if place.is_within(self.share()) { Side::Canary } else { Side::Active })
    }

    /// How many times as often as others requests of a side are audited, so that both are as often.
    pub fn audited_times(&self, side: Side) -> f64 {
        let share = match side {
            Side::Canary => self.setting.share,
            Side::Active => 1.0 - self.setting.share,
        };
        ((1.0 - share) / share.max(f64::MIN_POSITIVE)).max(1.0)
    }

    /// Takes note of a request that ended: with the time of its answer, or with none where it failed.
    pub fn ended(&self, by: (Place, Side), took: Option<Duration>) {
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

    /// Takes note of an answer of which this share of the exact items was served.
    pub fn audited(&self, by: (Place, Side), recall: f64) {
        locked(&self.watch).audited(self.began.elapsed(), by, recall);
    }

    /// What was seen of it and of the active version.
    pub fn observed(&self) -> BothSeen {
        locked(&self.watch).observed(self.began.elapsed())
    }

    /// Why it answers no more, where that is so here.
    pub fn verdict(&self) -> Option<Verdict> {
        locked(&self.verdict).clone()
    }

    /// Judges it, where that was so long ago; one that is behind answers nobody from here on.
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

    /// Nobody asks for it any more.
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
            "the canary is behind and answers no more"
        );
        self.end();
        counter!("sterling_canary_rollbacks_total", "model" => model.clone(), "outcome" => verdict.behind.name())
            .increment(1);
        *locked(&self.verdict) = Some(verdict);
        self.is_stopped.store(true, Ordering::Relaxed);
    }
}

/// Which requests a shadow is asked as well.
pub struct ShadowRun {
    model: String,
    version: u64,
    setting: Shadow,
    draws: Draws,
    /// What is left of the rate, and when that was.
    left: Mutex<(f64, Instant)>,
}

impl ShadowRun {
    /// A version of a model that is a shadow by this setting.
    pub fn new(setting: &Shadow, (model, version): (&str, u64)) -> Self {
        let left = Mutex::new((setting.per_second.max(1.0), Instant::now()));
        ShadowRun { model: model.to_owned(), version, setting: setting.clone(), draws: Draws::default(), left }
    }

    /// The model.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The version's number.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// What operators have said.
    pub fn setting(&self) -> &Shadow {
        &self.setting
    }

    /// Whether a request is of the share.
    pub fn is_drawn(&self) -> bool {
        self.draws.draw(self.setting.share)
    }

    /// Takes one of the requests of this second, where any is left.
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

/// What people are told of a canary that was rolled back: everywhere, as the store says, or so far where it runs.
pub fn rolled_back(wished: &Traffic, run: Option<&CanaryRun>) -> Option<String> {
    let everywhere = wished.canary.as_ref().and_then(|canary| canary.stopped.as_ref());
    let here = || run.and_then(CanaryRun::verdict).map(|verdict| verdict.reason);
    let reason = everywhere.map(|stopped| stopped.reason.clone()).or_else(here)?;
    Some(format!("its canary was rolled back: {reason}"))
}

/// What is wished of a model's traffic, and what of it is so.
pub struct TrafficNow {
    /// How often what is wished of the model was changed.
    pub revision: u64,
    /// What is wished.
    pub setting: Traffic,
    /// The version that answers where nothing is pinned.
    pub active: Option<u64>,
    /// The canary, where it is in memory and does not answer anyway.
    pub canary: Option<Arc<CanaryRun>>,
    /// The shadow, likewise.
    pub shadow: Option<Arc<ShadowRun>>,
}
