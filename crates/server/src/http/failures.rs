//! Counts failed requests by problem code, and reports on `/readyz` if at least 1 % of recent requests failed.

use std::array;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use metrics::{Counter, counter};

use super::verb::Verb;
use sterling_api::status;
use sterling_core::error::Error;

/// Codes of problems with a status of at least 500; other codes count as the last entry.
const CODES: [&str; 10] = [
    "overloaded",
    "not_ready",
    "unavailable",
    "partial",
    "deadline_exceeded",
    "insufficient_storage",
    "io",
    "corrupt",
    "internal",
    "other",
];
/// Calls whose failures `/readyz` reports: those that production traffic depends on.
const VITAL: [Verb; 7] = [Verb::Retrieve, Verb::Rank, Verb::Embed, Verb::Pass, Verb::Infer, Verb::Upsert, Verb::Delete];

/// Counts outcomes of calls.
pub(super) struct Failures {
    /// Counters per call and code, created on first use.
    counters: [[OnceLock<Counter>; CODES.len()]; Verb::NAMES.len()],
    recent: Recent,
}

impl Default for Failures {
    fn default() -> Self {
        Failures { counters: array::from_fn(|_| Default::default()), recent: Recent::default() }
    }
}

impl Failures {
    /// Records the status of a call, and its problem code if it has one.
    pub(super) fn answered(&self, verb: Verb, status: StatusCode, code: Option<&str>) {
        self.ended(verb, status.is_server_error().then(|| code.unwrap_or_default()));
    }

    /// Records the outcome of one request of a list, whose errors do not show in the status of the call.
    pub(super) fn ended_in_list(&self, verb: Verb, error: Option<&Error>) {
        let failed = error.filter(|error| status(error.kind()).0 >= 500);
        self.ended(verb, failed.map(|error| error.kind().name()));
    }

    fn ended(&self, verb: Verb, failure: Option<&str>) {
        let code = failure.map(|code| CODES.iter().position(|known| *known == code).unwrap_or(CODES.len() - 1));
        if let Some(code) = code {
            let count = || counter!("sterling_failed_total", "call" => verb.name(), "reason" => CODES[code]);
            self.counters[verb as usize][code].get_or_init(count).increment(1);
        }
        if VITAL.contains(&verb) {
            self.recent.ended(code);
        }
    }

    /// Returns a warning for `/readyz` if at least 1 % of recent requests failed.
    pub(super) fn warning(&self) -> Option<String> {
        self.recent.warning()
    }
}

/// Length of a window of requests.
const WINDOW: Duration = Duration::from_secs(60);

/// Outcomes of requests in this minute and the previous one. Outcomes that are recorded while the minute changes may be lost.
struct Recent {
    start: Instant,
    minutes: [Minute; 3],
}

#[derive(Default)]
struct Minute {
    number: AtomicU64,
    requests: AtomicU64,
    failed: [AtomicU64; CODES.len()],
}

impl Default for Recent {
    fn default() -> Self {
        let minutes: [Minute; 3] = Default::default();
        // At the start, no slot belongs to any minute.
        minutes.iter().for_each(|minute| minute.number.store(u64::MAX, Ordering::Relaxed));
        Recent { start: Instant::now(), minutes }
    }
}

impl Recent {
    fn ended(&self, failure: Option<usize>) {
        self.ended_at(self.start.elapsed(), failure);
    }

    fn ended_at(&self, since: Duration, failure: Option<usize>) {
        let number = since.as_secs() / WINDOW.as_secs();
        let minute = &self.minutes[(number % 3) as usize];
        let is_over = minute.number.load(Ordering::Relaxed) != number;
        if is_over && minute.number.swap(number, Ordering::Relaxed) != number {
            minute.requests.store(0, Ordering::Relaxed);
            minute.failed.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        }
        minute.requests.fetch_add(1, Ordering::Relaxed);
        if let Some(code) = failure {
            minute.failed[code].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn warning(&self) -> Option<String> {
        self.warning_at(self.start.elapsed())
    }

    fn warning_at(&self, since: Duration) -> Option<String> {
        let number = since.as_secs() / WINDOW.as_secs();
        let is_recent = |minute: &&Minute| {
            let of = minute.number.load(Ordering::Relaxed);
            of == number || of.wrapping_add(1) == number
        };
        let (mut requests, mut failed) = (0, [0; CODES.len()]);
        for minute in self.minutes.iter().filter(is_recent) {
            requests += minute.requests.load(Ordering::Relaxed);
            failed.iter_mut().zip(&minute.failed).for_each(|(sum, count)| *sum += count.load(Ordering::Relaxed));
        }
        let all: u64 = failed.iter().sum();
        if all == 0 || all * 100 < requests {
            return None;
        }
        let by_code = CODES.iter().zip(failed).filter(|(_, count)| *count > 0);
        let by_code: Vec<String> = by_code.map(|(code, count)| format!("{code} {count}")).collect();
        Some(format!("{all} of the {requests} requests of the last two minutes failed: {}", by_code.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterling_core::error::Kind;

    #[test]
    fn every_kind_of_failure_has_its_code() {
        let kinds = [
            Kind::Overloaded,
            Kind::NotReady,
            Kind::Unavailable,
            Kind::Partial,
            Kind::DeadlineExceeded,
            Kind::NoSpace,
            Kind::Io,
            Kind::Corrupt,
            Kind::Internal,
        ];
        for kind in kinds {
            assert!(status(kind).0 >= 500 && CODES.contains(&kind.name()), "{kind:?}");
        }
    }

    #[test]
    fn failures_of_the_last_two_minutes_are_warned_of() {
        let (recent, at) = (Recent::default(), |seconds| Duration::from_secs(seconds));
        assert_eq!(recent.warning_at(at(0)), None);
        (0..198).for_each(|_| recent.ended_at(at(10), None));
        recent.ended_at(at(10), Some(0));
        assert_eq!(recent.warning_at(at(10)), None, "fewer than one in a hundred");
        recent.ended_at(at(70), Some(3));
        let reported = "2 of the 200 requests of the last two minutes failed: overloaded 1, partial 1";
        assert_eq!(recent.warning_at(at(80)).as_deref(), Some(reported));
        let reported = "1 of the 1 requests of the last two minutes failed: partial 1";
        assert_eq!(recent.warning_at(at(130)).as_deref(), Some(reported), "the first minute is over");
        assert_eq!(recent.warning_at(at(180)), None, "no request came since");
        recent.ended_at(at(190), None);
        assert_eq!(recent.warning_at(at(190)), None, "its counts are of this minute alone");
    }
}
