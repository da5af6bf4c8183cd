//! Logs to stderr and the metrics of `/metrics`.
//!
//! Times are in seconds, sizes in bytes. Histograms have fixed buckets (`SECONDS`, `COUNTS`), so the histograms of
//! several servers can be summed. Recorded values are buffered until [`sort_in`] sorts them into buckets. Sorting
//! happens at each scrape, and several times per second in a server, so that memory stays bounded without a scraper.
//! The module `catalogue` lists all metrics; `docs/reference/metrics.md` is generated from it.
//!
//! ```
//! metrics::with_local_recorder(&metrics::NoopRecorder, || metrics::counter!("sterling_example_total").increment(1));
//! assert!(sterling_telemetry::now().ends_with('Z'));
//! ```

#![cfg_attr(not(test), deny(unreachable_pub))]

mod catalogue;
mod process;

use std::io::IsTerminal as _;
use std::sync::OnceLock;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use sterling_core::logging::printable;

pub use catalogue::{begin_model, has_begun};
pub use process::process;

/// Upper bounds of the time buckets in seconds: four per factor of ten in the range of usual response times.
const SECONDS: [f64; 21] = [
    0.00001, 0.000025, 0.00005, 0.0001, 0.000175, 0.00025, 0.0005, 0.001, 0.00175, 0.0025, 0.005, 0.01, 0.0175, 0.025,
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
];
/// Upper bounds of the buckets of counts.
const COUNTS: [f64; 11] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0, 4096.0];

/// Default log filter, used if `STERLING_LOG` is not set.
const FILTER: &str = "info";

/// Sends logs to stderr, filtered by `STERLING_LOG` (levels, and levels per target), as JSON if `json` is set. An invalid filter
/// is ignored with a warning. Later calls have no effect.
pub fn start_logs(json: bool) {
    let requested = std::env::var("STERLING_LOG").unwrap_or_default();
    let (filter, invalid) = match filter(&requested) {
        Ok(filter) => (filter, None),
        Err(why) => (FILTER.parse().unwrap_or_default(), Some(why)),
    };
    let lines =
        tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    let filtered = tracing_subscriber::registry().with(filter);
    let _ = if json {
        filtered.with(lines.json()).try_init()
    } else {
        filtered.with(lines.fmt_fields(OneLine(DefaultFields::new()))).try_init()
    };
    if let Some(why) = invalid {
        tracing::warn!("STERLING_LOG: {why}; using `{FILTER}`");
    }
}

fn filter(text: &str) -> std::result::Result<Targets, String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let text = if text.trim().is_empty() { FILTER } else { text };
    // A single word is parsed as a target, so a mistyped level would silence everything else.
    let known = |word: &str| {
        word.is_empty()
            || word.contains('=')
            || LEVELS.iter().any(|level| word.eq_ignore_ascii_case(level))
            || word.starts_with("sterling")
    };
    match text.split(',').map(str::trim).find(|word| !known(word)) {
        Some(word) => Err(format!("got `{word}`, expected one of {}, or TARGET=LEVEL", LEVELS.join(", "))),
        None => text.parse().map_err(|e| format!("got `{text}`: {e}")),
    }
}

/// Formats the message and fields of an event on one line of the text log. Clients control some of the fields (names,
/// reasons). A line break in such a field could forge a log line, and an escape sequence would reach the operator's
/// terminal.
struct OneLine(DefaultFields);

impl<'w> FormatFields<'w> for OneLine {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'w>, fields: R) -> std::fmt::Result {
        let mut text = String::new();
        self.0.format_fields(Writer::new(&mut text), fields)?;
        writer.write_str(&printable(&text))
    }
}

/// Returns the current UTC time in the format of the log.
pub fn now() -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text
}

/// Returns the metrics of this process; the first call starts collecting them.
pub fn metrics() -> &'static PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE.get_or_init(|| {
        let recorder = recorder();
        let handle = recorder.handle();
        // The call fails if a program that embeds this library has set its own recorder; that recorder then gets the
        // metrics.
        let _ = metrics::set_global_recorder(recorder);
        catalogue::begin();
        process::begin();
        handle
    })
}

/// Sorts recorded values into buckets and frees the buffers.
pub fn sort_in() {
    metrics().run_upkeep();
}

fn recorder() -> PrometheusRecorder {
    let times = Matcher::Suffix("_seconds".into());
    let builder = PrometheusBuilder::new().set_buckets(&COUNTS);
    match builder.and_then(|b| b.set_buckets_for_metric(times, &SECONDS)) {
        Ok(builder) => builder.build_recorder(),
        // The builder fails only for an empty list of buckets, and both lists have entries.
        Err(_) => PrometheusBuilder::new().build_recorder(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_wait_for_no_reader() {
        let recorder = recorder();
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            let record = || {
                for n in 0..20_000 {
                    if n % 1000 == 0 {
                        handle.run_upkeep();
                    }
                    metrics::histogram!("a_seconds", "call" => "x").record(f64::from(n) * 1e-5);
                    metrics::histogram!("a_requests").record(f64::from(n % 40));
                }
            };
            record();
            let used = allocation_counter::measure(record);
            // At most two thousand samples of 8 bytes are buffered, plus their containers.
            assert!(used.bytes_current < 100_000, "{} bytes stay", used.bytes_current);
        });
        let text = handle.render();
        assert!(
            text.contains("# TYPE a_seconds histogram") && text.contains("a_seconds_count{call=\"x\"} 40000"),
            "{text}"
        );
        assert!(text.contains("a_requests_bucket{le=\"32\"}"), "{text}");
    }

    #[test]
    fn events_are_one_line_for_any_field() {
        use std::sync::{Arc, Mutex};

        #[derive(Clone, Default)]
        struct Kept(Arc<Mutex<Vec<u8>>>);
        impl std::io::Write for Kept {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.lock().expect("no test panics here").extend_from_slice(bytes);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }

        let retained = Kept::default();
        let writer = retained.clone();
        let lines = tracing_subscriber::fmt::layer().with_writer(move || writer.clone()).with_ansi(false);
        let lines = tracing_subscriber::registry().with(lines.fmt_fields(OneLine(DefaultFields::new())));
        tracing::subscriber::with_default(lines, || {
            let forged = "x\n2026-01-01T00:00:00Z INFO forged\r\u{1b}[31mred\u{9b}";
            tracing::warn!(error = %forged, model = forged, "model {forged}");
            tracing::info!("plain");
        });
        let text = String::from_utf8(retained.0.lock().expect("no test panics here").clone()).expect("UTF-8");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines.iter().all(|line| !line.contains(char::is_control)), "{text}");
        assert!(lines[0].contains("\\n2026-01-01T00:00:00Z INFO forged\\r\\u{1b}[31mred"), "{text}");
        assert!(lines[1].ends_with("plain"), "{text}");
    }

    #[test]
    fn invalid_filters_are_rejected() {
        for text in [
            "",
            " ",
            "info",
            "WARN",
            "sterling=debug,info",
            "sterling_serving::engine",
            "tower_http=trace, error",
            "off",
        ] {
            assert!(filter(text).is_ok(), "{text}");
        }
        for (text, expected) in [
            ("verbose", "`verbose`, expected one of off"),
            ("info,inof", "`inof`"),
            ("sterling=loud", "`sterling=loud`"),
            ("[pass]", "`[pass]`, expected one of off"),
        ] {
            let why = filter(text).expect_err(text);
            assert!(why.contains(expected), "{text}: {why}");
        }
    }
}
