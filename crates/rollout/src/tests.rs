//! Random histories of a canary: two equal versions must not be distinguished, and a version that fails, is slow or has a lower
//! recall must be detected.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::watch::Watch;
use super::*;

/// Distribution of a version's results.
#[derive(Clone, Copy, Debug)]
struct Version {
    errors: f64,
    /// Median latency in milliseconds, and the standard deviation of its logarithm.
    ms: (f64, f64),
    recall: f64,
}

const GOOD: Version = Version { errors: 0.002, ms: (4.0, 0.6), recall: 0.97 };

/// Simulated requests at a rate per second.
struct History {
    share: f64,
    rate: u64,
    users: u64,
    drawn: u64,
}

impl History {
    fn new(number: u64, share: f64, users: u64) -> Self {
        History { share, rate: 100, users, drawn: number << 40 }
    }

    /// Returns a random number from 0 up to 1.
    fn draw(&mut self) -> f64 {
        self.drawn += 1;
        xxh3_64_with_seed(&self.drawn.to_le_bytes(), 7) as f64 / u64::MAX as f64
    }

    /// Returns the second at which the canary is found worse, and the metric.
    fn run(&mut self, active: Version, canary: Version, seconds: u64) -> Option<(u64, WorseMetric)> {
        let setting = Canary {
            version: Some(8),
            label: None,
            share: self.share,
            sticky: Sticky::User,
            automatic: true,
            margins: CanaryMargins::default(),
            window_seconds: 600,
            stopped: None,
        };
        let (mut watch, seed) = (Watch::new(&setting), seed("m", 8));
        for second in 0..seconds {
            for request in 0..self.rate {
                let now = Duration::from_secs_f64(second as f64 + request as f64 / self.rate as f64);
                let user = (self.draw() * self.users as f64) as u64;
                let place = KeyHash::of(&user.to_le_bytes(), seed);
                let is_canary = place.is_within(self.share);
                let (version, side) = if is_canary { (canary, Side::Canary) } else { (active, Side::Active) };
                let is_failed = self.draw() < version.errors;
                // Approximately normal: sum of uniform numbers.
                let normal = (0..6).map(|_| self.draw() - 0.5).sum::<f64>() * 1.4;
                let took = Duration::from_secs_f64(version.ms.0 * 1e-3 * (normal * version.ms.1).exp());
                watch.ended(now, (place, side), (!is_failed).then_some(took));
                if !is_failed && self.draw() < 0.02 {
                    let found = (0..20).filter(|_| self.draw() < version.recall).count();
                    watch.audited(now, (place, side), found as f64 / 20.0);
                }
            }
            if second % 5 == 4
                && let Some(verdict) = watch.judge(Duration::from_secs(second + 1))
            {
                return Some((second, verdict.behind));
            }
        }
        None
    }
}

#[test]
fn an_equal_canary_is_retained() {
    // Some 60 histories with 120 tests of 400 bounds each; a bound fails with a probability of e^-20.
    for (number, errors) in [0.0, 0.002, 0.05, 0.5, 0.98, 1.0].into_iter().enumerate() {
        for (place, share) in [0.01, 0.1, 0.5, 0.9].into_iter().enumerate() {
            let like = Version { errors, ms: (4.0, [0.1, 0.6, 2.0][place % 3]), recall: 1.0 - errors };
            let mut history = History::new((number * 10 + place) as u64, share, 100_000);
            assert_eq!(history.run(like, like, 600), None, "{share} of {like:?}");
        }
    }
}

#[test]
fn a_canary_within_the_margins_is_retained() {
    for (number, like) in [
        Version { errors: GOOD.errors + 0.005, ..GOOD },
        Version { ms: (GOOD.ms.0 * 1.3, GOOD.ms.1), ..GOOD },
        Version { recall: GOOD.recall - 0.01, ..GOOD },
        Version { errors: 0.0, ms: (1.0, 0.1), recall: 1.0 },
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(History::new(100 + number as u64, 0.5, 100_000).run(GOOD, like, 600), None, "{like:?}");
    }
    // A difference below one millisecond is ignored at any ratio.
    let (quick, slower) = (Version { ms: (0.1, 0.1), ..GOOD }, Version { ms: (0.5, 0.1), ..GOOD });
    assert_eq!(History::new(110, 0.5, 100_000).run(quick, slower, 300), None);
}

#[test]
fn a_worse_canary_is_always_detected() {
    for (number, (share, worse, expected, within)) in [
        (0.05, Version { errors: 1.0, ..GOOD }, WorseMetric::Errors, 15),
        (0.05, Version { errors: 0.3, ..GOOD }, WorseMetric::Errors, 60),
        (0.1, Version { errors: 0.05, ..GOOD }, WorseMetric::Errors, 300),
        (0.01, Version { errors: 0.5, ..GOOD }, WorseMetric::Errors, 180),
        (0.05, Version { ms: (40.0, 0.6), ..GOOD }, WorseMetric::Latency, 60),
        (0.1, Version { ms: (12.0, 0.6), ..GOOD }, WorseMetric::Latency, 120),
        // As fast as the active version for most requests, but slower in the tail.
        (0.2, Version { ms: (4.0, 1.8), ..GOOD }, WorseMetric::Latency, 300),
        (0.5, Version { recall: 0.6, ..GOOD }, WorseMetric::Recall, 400),
        (0.5, Version { recall: 0.75, ..GOOD }, WorseMetric::Recall, 600),
    ]
    .into_iter()
    .enumerate()
    {
        for again in 0..5 {
            let mut history = History::new(1000 + number as u64 * 10 + again, share, 100_000);
            let found = history.run(GOOD, worse, within);
            assert!(found.is_some_and(|(_, behind)| behind == expected), "{found:?} of {share} of {worse:?}");
        }
    }
}

#[test]
fn no_single_user_decides() {
    // One of few users fails with every request, at either version; here the canary has this user.
    let (setting, seed) = (Canary { share: 0.5, ..canary() }, seed("m", 8));
    let mut watch = Watch::new(&setting);
    let users: Vec<KeyHash> = (0..200_u64).map(|user| KeyHash::of(&user.to_le_bytes(), seed)).collect();
    let bad = users.iter().position(|place| place.is_within(0.5)).unwrap();
    for round in 0..200_u64 {
        let now = Duration::from_millis(round * 500);
        for (user, place) in users.iter().enumerate() {
            let side = if place.is_within(0.5) { Side::Canary } else { Side::Active };
            let took = Duration::from_millis(5);
            watch.ended(now, (*place, side), (user != bad).then_some(took));
        }
        // This user sends as many requests as all other users together.
        (0..200).for_each(|_| watch.ended(now, (users[bad], Side::Canary), None));
        assert_eq!(watch.judge(now), None);
    }
    let seen = watch.observed(Duration::from_secs(100));
    assert!(seen.canary.errors > 40_000 && seen.active.errors == 0, "{seen:?}");
    // Failures of many users are detected.
    for user in &users {
        (0..20).for_each(|_| watch.ended(Duration::from_secs(100), (*user, Side::Canary), None));
    }
    let verdict = watch.judge(Duration::from_secs(100)).unwrap();
    assert!(verdict.reason.contains("failed requests") && verdict.reason.contains("active version"), "{verdict:?}");
}

fn canary() -> Canary {
    serde_json::from_str("{\"version\": 8, \"share\": 0.1}").unwrap()
}

#[test]
fn old_windows_do_not_count() {
    let (mut watch, seed) = (Watch::new(&canary()), seed("m", 8));
    let place = |user: u64| KeyHash::of(&user.to_le_bytes(), seed);
    for user in 0..1000 {
        watch.ended(Duration::from_secs(1), (place(user), Side::Canary), None);
        watch.ended(Duration::from_secs(1), (place(user), Side::Active), Some(Duration::from_millis(5)));
    }
    assert!(watch.judge(Duration::from_secs(2)).is_some());
    assert_eq!(watch.judge(Duration::from_secs(700)), None);
    assert_eq!(watch.observed(Duration::from_secs(700)), BothSeen::default());
}
