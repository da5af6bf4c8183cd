//! Logs to stderr and the metrics that `/metrics` shows.
//!
//! | metric | kind | meaning |
//! |---|---|---|
//! | `sterling_requests_total{call,status}` | counter | answered HTTP requests |
//! | `sterling_request_seconds{call}` | summary | time from the first byte read to the answer |
//! | `sterling_queue_seconds` | summary | time a request waited for a worker |
//! | `sterling_batch_requests` | summary | requests that a worker took together |
//! | `sterling_step_seconds{step}` | summary | time of each step of the pass |
//! | `sterling_unseen_ids_total` | counter | ids that no table held |
//! | `sterling_degraded_rows_total` | counter | rows answered with a default because a remote tier did not |
//! | `sterling_remote_rows_total{table,outcome}` | counter | rows asked of a remote table, by what came |
//! | `sterling_remote_cache_hit_rate{table}` | gauge | share of rows that the cache had |
//! | `sterling_model_version{model}` | gauge | the active version |
//! | `sterling_loads_total{model,outcome}` | counter | snapshots loaded or refused |

use std::io::IsTerminal as _;
use std::sync::OnceLock;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

/// What is logged where `STERLING_LOG` says nothing.
const FILTER: &str = "info";

/// Sends logs to stderr, filtered by `STERLING_LOG` (as `tracing`'s env filter), as JSON where `json` is set. A filter that
/// cannot be is not taken, with a warning. Later calls change nothing.
pub fn start_logs(json: bool) {
    let asked = std::env::var("STERLING_LOG").unwrap_or_default();
    let (filter, wrong) = match filter(&asked) {
        Ok(filter) => (filter, None),
        Err(why) => (EnvFilter::new(FILTER), Some(why)),
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let _ = if json { builder.json().try_init() } else { builder.try_init() };
    if let Some(why) = wrong {
        tracing::warn!("STERLING_LOG: {why}; logging `{FILTER}`");
    }
}

fn filter(text: &str) -> std::result::Result<EnvFilter, String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let text = if text.trim().is_empty() { FILTER } else { text };
    // A word alone names what is to be traced, so that a mistyped level would silence everything else.
    let known = |word: &str| {
        word.is_empty()
            || word.contains(['=', '['])
            || LEVELS.iter().any(|level| word.eq_ignore_ascii_case(level))
            || word.starts_with(env!("CARGO_PKG_NAME"))
    };
    match text.split(',').map(str::trim).find(|word| !known(word)) {
        Some(word) => Err(format!("got `{word}`, expected one of {}, or TARGET=LEVEL", LEVELS.join(", "))),
        None => EnvFilter::try_new(text).map_err(|e| format!("got `{text}`: {e}")),
    }
}

/// The metrics of this process; the first call starts collecting them.
pub fn metrics() -> &'static PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE.get_or_init(|| {
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        // Another recorder can only be one that a program embedding this library has set; then its metrics are its own.
        let _ = metrics::set_global_recorder(recorder);
        handle
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_that_mean_nothing_are_refused() {
        for text in
            ["", " ", "info", "WARN", "sterling=debug,info", "sterling::engine", "tower_http=trace, error", "off"]
        {
            assert!(filter(text).is_ok(), "{text}");
        }
        for (text, expected) in [
            ("verbose", "`verbose`, expected one of off"),
            ("info,inof", "`inof`"),
            ("sterling=loud", "`sterling=loud`"),
        ] {
            let why = filter(text).expect_err(text);
            assert!(why.contains(expected), "{text}: {why}");
        }
    }
}
