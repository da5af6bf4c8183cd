//! Logs to stderr and the metrics that `/metrics` shows.
//!
//! | metric | kind | meaning |
//! |---|---|---|
//! | `sterling_requests_total{call,status}` | counter | answered HTTP requests |
//! | `sterling_request_seconds{call}` | summary | time from the first byte read to the answer |
//! | `sterling_queue_seconds` | summary | time a request waited for a worker |
//! | `sterling_batch_requests` | summary | requests that a worker took together |
//! | `sterling_waiting_requests` | gauge | requests that wait for a worker or for their rows |
//! | `sterling_in_flight_bytes` | gauge | memory that requests hold until they are answered, by their price |
//! | `sterling_pace` | gauge | time that work takes by the time that its price says, over the last moments |
//! | `sterling_refused_total{reason}` | counter | requests refused: `deadline` it could not be met, `expired` nor after waiting, `queue`, `memory`, `closing` |
//! | `sterling_dropped_total` | counter | requests whose caller left before the answer |
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

/// Sends logs to stderr, filtered by `STERLING_LOG` (as `tracing`'s env filter), as JSON where `json` is set. Later calls
/// change nothing.
pub fn start_logs(json: bool) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("STERLING_LOG").unwrap_or_else(|_| "info".into());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let _ = if json { builder.json().try_init() } else { builder.try_init() };
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
