//! Report of a run: counts by outcome, percentiles, and whether the run is valid.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::bound::{Bound, Seen, ServerResult};
use super::client::End;
use super::latency::{Latencies, Latency};
use super::quality::Quality;
use super::sample::TimedAnswer;

/// Maximum p99 of the sending delay in milliseconds; beyond it, the load differed from the requested one. With a
/// latency bound, half of the bound applies if that is less.
const LATE_MS_MAX: f64 = 10.0;
/// Maximum fraction of requests without a free connection; beyond it, the load differed from the requested one.
const UNSENT_MAX: f64 = 0.01;

/// A completed request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) class: usize,
    pub(super) end: End,
    /// Time from the scheduled sending to the end of the answer.
    pub(super) latency: Duration,
    pub(super) in_time: bool,
}

/// Outcomes of the requests of one class.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ClassReport {
    /// Name of the class.
    pub class: String,
    /// Users per request, if single requests were combined to lists.
    pub batch: usize,
    /// Scheduled requests.
    pub requests: usize,
    /// Scheduled users per second: requests times users per request.
    pub rate: f64,
    /// Users per second answered with status 200 within their deadline.
    pub goodput: f64,
    /// Answers with status 200 within their deadline.
    pub ok: usize,
    /// Answers with status 200 after their deadline.
    pub ok_late: usize,
    /// Answers with status 503.
    pub refused: usize,
    /// Answers with status 504.
    pub timed_out: usize,
    /// Answers with another status.
    pub other: usize,
    /// Failed connections.
    pub errors: usize,
    /// Requests abandoned long after their deadline.
    pub no_answer: usize,
    /// Requests abandoned long after their deadline without an established connection.
    pub no_connection: usize,
    /// Requests without a free connection until their deadline.
    pub unsent: usize,
    /// Answers with status 200 within the latency bound of the run.
    #[serde(skip)]
    pub within_bound: usize,
    /// Latencies of the answers with status 200.
    pub answered_ms: Option<Latency>,
    /// Latencies of the answers with status 503.
    pub refused_ms: Option<Latency>,
    /// Fractions of the answers with status 200 that approach 1, each with the latency in milliseconds that these
    /// answers do not exceed.
    pub answered_curve: Vec<(f64, f64)>,
    /// All latencies of the answers with status 200.
    #[serde(skip)]
    pub answered: Latencies,
}

/// Counts the requests of a class as they complete.
#[derive(Debug)]
pub(super) struct Tally {
    report: ClassReport,
    refused: Latencies,
    bound: Option<Duration>,
}

impl Tally {
    pub(super) fn new(name: &str, batch: usize, bound: Option<Bound>) -> Self {
        let report = ClassReport { class: name.to_owned(), batch, ..ClassReport::default() };
        let bound = bound.map(|bound| Duration::from_secs_f64(bound.latency_ms / 1000.0));
        Tally { report, refused: Latencies::default(), bound }
    }

    pub(super) fn record(&mut self, sample: &Sample) {
        let Sample { end, latency, in_time, .. } = *sample;
        let report = &mut self.report;
        report.requests += 1;
        let count = match end {
            End::Status(200) if in_time => &mut report.ok,
            End::Status(200) => &mut report.ok_late,
            End::Status(503) => &mut report.refused,
            End::Status(504) => &mut report.timed_out,
            End::Status(_) => &mut report.other,
            End::Error => &mut report.errors,
            End::NoAnswer => &mut report.no_answer,
            End::NoConnection => &mut report.no_connection,
            End::Unsent => &mut report.unsent,
        };
        *count += 1;
        match end {
            End::Status(200) => {
                report.answered.record(latency);
                report.within_bound += usize::from(self.bound.is_some_and(|bound| latency <= bound));
            }
            End::Status(503) => self.refused.record(latency),
            _ => {}
        }
    }

    /// Returns the report of requests that were sent over `seconds`.
    pub(super) fn report(self, seconds: f64) -> ClassReport {
        let per_second = |calls: usize| (calls * self.report.batch) as f64 / seconds;
        ClassReport {
            rate: per_second(self.report.requests),
            goodput: per_second(self.report.ok),
            answered_ms: self.report.answered.percentiles(),
            refused_ms: self.refused.percentiles(),
            answered_curve: self.report.answered.curve(),
            ..self.report
        }
    }
}

impl fmt::Display for ClassReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {} requests, {:.1}/s; {:.1}/s answered in time",
            self.class, self.requests, self.rate, self.goodput
        )?;
        for (name, count, latency) in [
            ("200 in time", self.ok, None),
            ("200 late", self.ok_late, None),
            ("200", self.ok + self.ok_late, self.answered_ms.as_ref()),
            ("503", self.refused, self.refused_ms.as_ref()),
            ("504", self.timed_out, None),
            ("other status", self.other, None),
            ("connection errors", self.errors, None),
            ("no answer", self.no_answer, None),
            ("no connection", self.no_connection, None),
            ("not sent", self.unsent, None),
        ] {
            if count > 0 {
                let share = 100.0 * count as f64 / self.requests.max(1) as f64;
                let latency = latency.map(Latency::to_string).unwrap_or_default();
                writeln!(f, "  {name:18} {count:>9} {share:>6.2} %  {latency}")?;
            }
        }
        Ok(())
    }
}

/// Statistics of the generator itself.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Generator {
    /// Processor cores that the generator used, if the system reports that.
    pub cores: Option<f64>,
    /// p99 of the delays with which requests were sent, in milliseconds.
    pub late_ms_p99: f64,
    /// Idle connections and slow readers that the server closed.
    pub closed_by_server: usize,
}

/// Report of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// URL of the server.
    pub url: String,
    /// Duration of sending, in seconds.
    pub seconds: f64,
    /// One entry per class.
    pub classes: Vec<ClassReport>,
    /// Statistics of the generator.
    pub generator: Generator,
    /// Reason why the run is void, if it is.
    pub void: Option<String>,
    /// Result for the latency bound, in MLPerf's terms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<ServerResult>,
    /// Quality of the answers, if a sample of them was repeated with exact search.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quality: Option<Quality>,
    /// Sampled answers to the first of the `classes` of requests.
    #[serde(skip)]
    pub kept: Vec<TimedAnswer>,
}

impl Report {
    pub(super) fn new(
        url: String,
        seconds: f64,
        classes: Vec<ClassReport>,
        generator: Generator,
        bound: Option<Bound>,
    ) -> Self {
        let unsent: usize = classes.iter().map(|class| class.unsent).sum();
        let requests: usize = classes.iter().map(|class| class.requests).sum();
        let late = generator.late_ms_p99;
        let late_max = bound.map_or(LATE_MS_MAX, |bound| LATE_MS_MAX.min(bound.latency_ms / 2.0));
        let void = if late > late_max {
            Some(format!("the generator fell behind: p99 of delays is {late:.1} ms, expected at most {late_max} ms"))
        } else if unsent as f64 > requests as f64 * UNSENT_MAX {
            Some(format!("{unsent} of {requests} requests found no free connection: expected more --connections"))
        } else {
            None
        };
        let seen = |class: &ClassReport| Seen {
            queries: class.requests as u64,
            within: class.within_bound as u64,
            scheduled_per_second: class.rate,
            completed_per_second: ((class.ok + class.ok_late) * class.batch) as f64 / seconds,
        };
        let server = bound.zip(classes.first()).map(|(bound, class)| bound.judge(&seen(class), void.as_deref()));
        Report { url, seconds, classes, generator, void, server, quality: None, kept: Vec::new() }
    }

    /// Adds sampled answers.
    pub(super) fn keeping(self, kept: Vec<TimedAnswer>) -> Self {
        Report { kept, ..self }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.classes.iter().try_for_each(|class| class.fmt(f))?;
        let Generator { cores, late_ms_p99, closed_by_server } = &self.generator;
        write!(f, "generator: ")?;
        if let Some(cores) = cores {
            write!(f, "{cores:.2} cores, ")?;
        }
        write!(f, "p99 of sending delays {late_ms_p99:.2} ms")?;
        if *closed_by_server > 0 {
            write!(f, ", {closed_by_server} idle or slow connections closed by the server")?;
        }
        self.server.iter().try_for_each(|server| write!(f, "\n{server}"))?;
        self.quality.iter().try_for_each(|quality| write!(f, "\n{quality}"))?;
        self.void.iter().try_for_each(|reason| write!(f, "\nVOID: {reason}"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn tallied(name: &str, batch: usize, bound: Option<Bound>, samples: impl Iterator<Item = Sample>) -> ClassReport {
        let mut tally = Tally::new(name, batch, bound);
        samples.for_each(|sample| tally.record(&sample));
        tally.report(2.0)
    }

    #[test]
    fn every_request_is_counted_once() {
        let ends = [
            (End::Status(200), true),
            (End::Status(200), false),
            (End::Status(503), true),
            (End::Status(504), false),
            (End::Status(400), true),
            (End::Status(500), true),
            (End::Error, false),
            (End::NoAnswer, false),
            (End::NoConnection, false),
            (End::Unsent, false),
        ];
        let sample = |n: usize| {
            let (end, in_time) = ends[n % ends.len()];
            Sample { class: 0, end, latency: Duration::from_millis(n as u64), in_time }
        };
        let report = tallied("beside", 1, None, (50..100).map(sample));
        let ClassReport { ok, ok_late, refused, timed_out, other, errors, no_answer, no_connection, unsent, .. } =
            report;
        assert_eq!([ok, ok_late, refused, timed_out, other, errors], [5, 5, 5, 5, 10, 5]);
        assert_eq!([no_answer, no_connection, unsent], [5, 5, 5]);
        assert_eq!((report.requests, report.rate, report.goodput), (50, 25.0, 2.5));
        assert_eq!(report.answered_ms.unwrap().max, 91.0);
        assert!((report.refused_ms.unwrap().p50 - 72.0).abs() < 0.1);
        assert_eq!(report.answered_curve.last(), Some(&(1.0, 91.0)));
        // Lists of eight users: calls are counted, and rates count users. Calls with status 200 within 60 ms are within the
        // bound.
        let bound = Bound { latency_ms: 60.0, quantile: 0.9 };
        let lists = tallied("lists", 8, Some(bound), (50..100).map(sample));
        assert_eq!((lists.requests, lists.ok, lists.rate, lists.goodput), (50, 5, 200.0, 20.0));
        assert_eq!(lists.within_bound, 3, "50, 51 and 60 ms");
        let generator = Generator { cores: None, late_ms_p99: 0.1, closed_by_server: 0 };
        let server = Report::new(String::new(), 2.0, vec![lists], generator, Some(bound)).server.unwrap();
        assert_eq!((server.queries, server.overlatency_queries), (50, 47));
        assert_eq!((server.scheduled_samples_per_second, server.completed_samples_per_second), (200.0, 40.0));
    }

    #[test]
    fn runs_with_a_different_load_are_void() {
        let sample = |end| Sample { class: 0, end, latency: Duration::ZERO, in_time: true };
        let void = |unsent: usize, late_ms_p99, bound| {
            let samples = (0..200).map(|n| sample(if n < unsent { End::Unsent } else { End::Status(200) }));
            let generator = Generator { cores: None, late_ms_p99, closed_by_server: 0 };
            Report::new(String::new(), 1.0, vec![tallied("main", 1, bound, samples)], generator, bound)
        };
        assert_eq!(void(0, 0.1, None).void, None);
        assert_eq!(void(2, 9.9, None).void, None);
        assert!(void(3, 0.1, None).void.unwrap().contains("3 of 200 requests found no free connection"));
        assert!(void(0, 10.1, None).void.unwrap().contains("10.1 ms"));
        // A generator that is late by as much as the bound proves nothing about the server.
        let bound = |latency_ms| Some(Bound { latency_ms, quantile: 0.9 });
        let late = void(0, 2.1, bound(4.0));
        assert!(late.void.unwrap().contains("2.1 ms, expected at most 2 ms"));
        assert!(!late.server.unwrap().is_valid());
        assert!(void(0, 2.1, bound(4.4)).server.unwrap().is_valid());
        assert!(void(0, 10.1, bound(1000.0)).void.is_some());
    }
}
