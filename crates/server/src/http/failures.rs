//! How requests fail: counted by the code of their problem, and told by `/readyz` while one in a hundred of the last ones or more has failed.

use std::array;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use metrics::{Counter, counter};

use super::verb::Verb;
use sterling_api::status;
use sterling_core::error::Error;

/// The codes of problems with a status from 500 on; whatever has none of them is the last.
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
/// The calls whose failures `/readyz` warns of: those that callers live on.
const VITAL: [Verb; 7] = [Verb::Retrieve, Verb::Rank, Verb::Embed, Verb::Pass, Verb::Infer, Verb::Upsert, Verb::Delete];

/// Counts how calls end.
pub(super) struct Failures {
    /// The counters of calls and codes, made when they are needed first.
    counters: [[OnceLock<Counter>; CODES.len()]; Verb::NAMES.len()],
    recent: Recent,
}

impl Default for Failures {
    fn default() -> Self {
        Failures { counters: array::from_fn(|_| Default::default()), recent: Recent::default() }
    }
}

impl Failures {
    /// Takes in how a call ended: with this status, and a problem of this code where it is one.
    pub(super) fn answered(&self, verb: Verb, status: StatusCode, code: Option<&str>) {
        self.ended(verb, status.is_server_error().then(|| code.unwrap_or_default()));
    }

    /// Takes in how one of a list of requests ended that were asked in one call, whose own answer is none.
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

    /// A line for `/readyz` where one in a hundred of the last requests or more has failed.
    pub(super) fn warning(&self) -> Option<String> {
        self.recent.warning()
    }
}

/// How long a window of requests is.
const WINDOW: Duration = Duration::from_secs(60);

/// How the requests of this minute and of the one before ended. What ends while a minute turns may count for neither.
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
        // None of them is of a minute yet.
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
        let said = "2 of the 200 requests of the last two minutes failed: overloaded 1, partial 1";
        assert_eq!(recent.warning_at(at(80)).as_deref(), Some(said));
        let said = "1 of the 1 requests of the last two minutes failed: partial 1";
        assert_eq!(recent.warning_at(at(130)).as_deref(), Some(said), "the first minute is over");
        assert_eq!(recent.warning_at(at(180)), None, "nobody has asked since");
        recent.ended_at(at(190), None);
        assert_eq!(recent.warning_at(at(190)), None, "its counts are of this minute alone");
    }
}
