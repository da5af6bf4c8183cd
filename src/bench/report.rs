//! What became of the requests: counts by answer, exact percentiles, and whether the run is worth anything.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

/// The p99 of how late requests were sent, beyond which the load was not the one asked for.
const LATE_MS_MAX: f64 = 10.0;
/// The share of requests that found no connection, beyond which it was not either.
const UNSENT_MAX: f64 = 0.01;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The status of a whole answer.
    Status(u16),
    /// The connection failed.
    Error,
    /// Nothing came long after the deadline.
    NoAnswer,
    /// The server had not taken the connection in by then.
    NoConnection,
    /// All connections were busy to its deadline.
    Unsent,
}

/// One request that has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) class: usize,
    pub(super) end: End,
    /// From the time at which it was to be sent.
    pub(super) latency: Duration,
    pub(super) in_time: bool,
}

/// Exact percentiles of latencies in milliseconds, each from the time at which the request was to be sent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Latency {
    /// The median.
    pub p50: f64,
    /// Nine of ten are at most this.
    pub p90: f64,
    /// 99 of a hundred.
    pub p99: f64,
    /// 999 of a thousand.
    pub p999: f64,
    /// The longest.
    pub max: f64,
}

impl Latency {
    /// Nothing where there are no latencies.
    pub(super) fn of(latencies: impl Iterator<Item = Duration>) -> Option<Self> {
        let mut sorted: Vec<Duration> = latencies.collect();
        sorted.sort_unstable();
        let last = sorted.last()?;
        let millis = |time: Duration| time.as_nanos() as f64 / 1e6;
        // The smallest latency that at least this share of all does not exceed.
        let at = |share: f64| millis(sorted[((sorted.len() as f64 * share).ceil() as usize).max(1) - 1]);
        Some(Latency { p50: at(0.5), p90: at(0.9), p99: at(0.99), p999: at(0.999), max: millis(*last) })
    }
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Latency { p50, p90, p99, p999, max } = self;
        write!(f, "p50 {p50:.2}  p90 {p90:.2}  p99 {p99:.2}  p99.9 {p999:.2}  max {max:.2} ms")
    }
}

/// What became of the requests of one class.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassReport {
    /// The name of the class.
    pub class: String,
    /// Requests of the schedule.
    pub requests: usize,
    /// Of them in a second.
    pub rate: f64,
    /// Answers with 200 within their deadline, in a second.
    pub goodput: f64,
    /// Answers with 200 within their deadline.
    pub ok: usize,
    /// Answers with 200 after it.
    pub ok_late: usize,
    /// Answers with 503.
    pub refused: usize,
    /// Answers with 504.
    pub timed_out: usize,
    /// Answers with another status.
    pub other: usize,
    /// Connections that failed.
    pub errors: usize,
    /// Requests that were given up long after their deadline.
    pub no_answer: usize,
    /// Requests that were given up then because their connection was never there.
    pub no_connection: usize,
    /// Requests for which no connection was free to their deadline.
    pub unsent: usize,
    /// Latencies of the answers with 200.
    pub answered_ms: Option<Latency>,
    /// Latencies of the answers with 503.
    pub refused_ms: Option<Latency>,
}

impl ClassReport {
    pub(super) fn of(class: usize, name: &str, seconds: f64, samples: &[Sample]) -> Self {
        let own = || samples.iter().filter(|sample| sample.class == class);
        let count = |is_so: &dyn Fn(&Sample) -> bool| own().filter(|sample| is_so(sample)).count();
        let ended = |end| own().filter(move |sample| sample.end == end);
        let latency = |end| Latency::of(ended(end).map(|sample| sample.latency));
        let [ok, ok_late] = [true, false].map(|t| ended(End::Status(200)).filter(|sample| sample.in_time == t).count());
        let known = [200, 503, 504].map(End::Status);
        let requests = own().count();
        ClassReport {
            class: name.to_owned(),
            requests,
            rate: requests as f64 / seconds,
            goodput: ok as f64 / seconds,
            ok,
            ok_late,
            refused: ended(End::Status(503)).count(),
            timed_out: ended(End::Status(504)).count(),
            other: count(&|sample| matches!(sample.end, End::Status(_)) && !known.contains(&sample.end)),
            errors: ended(End::Error).count(),
            no_answer: ended(End::NoAnswer).count(),
            no_connection: ended(End::NoConnection).count(),
            unsent: ended(End::Unsent).count(),
            answered_ms: latency(End::Status(200)),
            refused_ms: latency(End::Status(503)),
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

/// How the generator itself fared.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Generator {
    /// Processors that it used, where the system tells.
    pub cores: Option<f64>,
    /// The p99 of how late requests were sent, in milliseconds.
    pub late_ms_p99: f64,
    /// Idle connections and slow readers that the server closed.
    pub closed_by_server: usize,
}

/// What came of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The server.
    pub url: String,
    /// How long requests were sent.
    pub seconds: f64,
    /// One entry a class.
    pub classes: Vec<ClassReport>,
    /// The generator.
    pub generator: Generator,
    /// Why the run is worth nothing, where it is.
    pub void: Option<String>,
}

impl Report {
    pub(super) fn new(url: String, seconds: f64, classes: Vec<ClassReport>, generator: Generator) -> Self {
        let unsent: usize = classes.iter().map(|class| class.unsent).sum();
        let requests: usize = classes.iter().map(|class| class.requests).sum();
        let late = generator.late_ms_p99;
        let void = if late > LATE_MS_MAX {
            Some(format!(
                "the generator fell behind: p99 of its delays {late:.1} ms, expected at most {LATE_MS_MAX} ms"
            ))
        } else if unsent as f64 > requests as f64 * UNSENT_MAX {
            Some(format!("{unsent} of {requests} requests found no free connection: more --connections are needed"))
        } else {
            None
        };
        Report { url, seconds, classes, generator, void }
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
        write!(f, "p99 of its delays {late_ms_p99:.2} ms")?;
        if *closed_by_server > 0 {
            write!(f, ", {closed_by_server} idle or slow connections closed by the server")?;
        }
        self.void.iter().try_for_each(|reason| write!(f, "\nVOID: {reason}"))
    }
}

/// The middle of the values, or nothing without values.
pub fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_sorted_values() {
        let of = |values: &[u64]| Latency::of(values.iter().map(|&n| Duration::from_millis(n)));
        assert_eq!(of(&[]), None);
        let all: Vec<u64> = (1..=1000).rev().collect();
        let Latency { p50, p90, p99, p999, max } = of(&all).unwrap();
        assert_eq!([p50, p90, p99, p999, max], [500.0, 900.0, 990.0, 999.0, 1000.0]);
        let Latency { p50, p99, max, .. } = of(&[7]).unwrap();
        assert_eq!([p50, p99, max], [7.0; 3]);
        // The definition itself, on sizes where rounding could go wrong.
        for count in 1..200u64 {
            let all: Vec<u64> = (1..=count).collect();
            let p99 = of(&all).unwrap().p99;
            let least = (1..=count).find(|n| *n * 100 >= count * 99).unwrap();
            assert_eq!(p99, least as f64, "{count} values");
        }
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
        let sample = |n: usize, class| {
            let (end, in_time) = ends[n % ends.len()];
            Sample { class, end, latency: Duration::from_millis(n as u64), in_time }
        };
        let samples: Vec<Sample> = (0..100).map(|n| sample(n, usize::from(n >= 50))).collect();
        let report = ClassReport::of(1, "beside", 2.0, &samples);
        let ClassReport { ok, ok_late, refused, timed_out, other, errors, no_answer, no_connection, unsent, .. } =
            report;
        assert_eq!([ok, ok_late, refused, timed_out, other, errors], [5, 5, 5, 5, 10, 5]);
        assert_eq!([no_answer, no_connection, unsent], [5, 5, 5]);
        assert_eq!((report.requests, report.rate, report.goodput), (50, 25.0, 2.5));
        assert_eq!(report.answered_ms.unwrap().max, 91.0);
        assert_eq!(report.refused_ms.unwrap().p50, 72.0);
    }

    #[test]
    fn a_run_is_void_where_the_load_was_another() {
        let sample = |end| Sample { class: 0, end, latency: Duration::ZERO, in_time: true };
        let void = |unsent: usize, late_ms_p99| {
            let samples: Vec<Sample> =
                (0..200).map(|n| sample(if n < unsent { End::Unsent } else { End::Status(200) })).collect();
            let generator = Generator { cores: None, late_ms_p99, closed_by_server: 0 };
            Report::new(String::new(), 1.0, vec![ClassReport::of(0, "main", 1.0, &samples)], generator).void
        };
        assert_eq!(void(0, 0.1), None);
        assert_eq!(void(2, 9.9), None);
        assert!(void(3, 0.1).unwrap().contains("3 of 200 requests found no free connection"));
        assert!(void(0, 10.1).unwrap().contains("10.1 ms"));
    }

    #[test]
    fn the_median_is_the_middle() {
        for (values, expected) in
            [(&[][..], None), (&[3.0], Some(3.0)), (&[9.0, 1.0, 4.0], Some(4.0)), (&[4.0, 1.0, 2.0, 9.0], Some(3.0))]
        {
            assert_eq!(median(values.iter().copied()), expected);
        }
    }
}
