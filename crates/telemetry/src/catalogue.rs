//! Catalogue of all metrics: name, kind, labels and meaning.
//!
//! Counters with known label values are exported as 0 from the start, and those of a model from its first load. A counter that
//! appears only with its first increment shows no increase, so an alert on it would miss the first failure.

use std::collections::BTreeSet;
use std::sync::{PoisonError, RwLock};

use metrics::{counter, describe_counter, describe_gauge, describe_histogram};

/// Kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}
use MetricKind::{Counter, Gauge, Histogram};

#[derive(Clone, Copy, Debug)]
enum Labels {
    /// No labels.
    None,
    /// Label names whose values are not known in advance.
    Open(&'static str),
    /// One label with a fixed set of values.
    Fixed(&'static str, &'static [&'static str]),
    /// The label `model`.
    Model,
    /// The labels `model` and `outcome`, the latter with a fixed set of values.
    ModelOutcome(&'static [&'static str]),
}
use Labels::{Fixed, Model, ModelOutcome, Open};

struct Metric {
    name: &'static str,
    behaves: MetricKind,
    labels: Labels,
    means: &'static str,
}

const fn metric(name: &'static str, behaves: MetricKind, labels: Labels, means: &'static str) -> Metric {
    Metric { name, behaves, labels, means }
}

const METRICS: &[Metric] = &[
    metric(
        "sterling_build_info",
        Gauge,
        Open("version, architecture"),
        "1, with the version and the architecture of the build",
    ),
    metric(
        "sterling_requests_total",
        Counter,
        Open("call, status, model"),
        "answered HTTP requests; without the label `model` for models that the server never had",
    ),
    metric(
        "sterling_request_seconds",
        Histogram,
        Open("call, model"),
        "time from the header of a request to the header of its answer",
    ),
    metric(
        "sterling_failed_total",
        Counter,
        Open("call, reason"),
        "answers with status 500 or higher, and such entries of lists, by error code",
    ),
    metric("sterling_connections", Gauge, Labels::None, "open connections"),
    metric(
        "sterling_connections_waiting",
        Gauge,
        Labels::None,
        "connections with work to do that wait because other connections of their caller run",
    ),
    metric(
        "sterling_connections_cut_total",
        Counter,
        Fixed("reason", &["idle", "header", "stalled", "unread", "resets", "frames", "crowded", "stopping"]),
        "connections closed by the server",
    ),
    metric(
        "sterling_streams_cut_total",
        Counter,
        Labels::None,
        "HTTP/2 requests that ended because the client did not read the answer",
    ),
    metric(
        "sterling_connections_refused_total",
        Counter,
        Labels::None,
        "connections rejected at the limit while all others were busy",
    ),
    metric("sterling_tls_failures_total", Counter, Labels::None, "failed TLS handshakes"),
    metric(
        "sterling_denied_total",
        Counter,
        Fixed("reason", &["no_key", "role", "model", "rate"]),
        "rejected calls: no valid key, insufficient role, model not allowed, rate of the key exceeded",
    ),
    metric(
        "sterling_key_reloads_total",
        Counter,
        Fixed("outcome", &["read", "failed"]),
        "reloads of the file of access keys",
    ),
    metric(
        "sterling_certificate_reloads_total",
        Counter,
        Fixed("outcome", &["read", "failed"]),
        "reloads of the certificates",
    ),
    metric(
        "sterling_certificate_life_ratio",
        Gauge,
        Labels::None,
        "remaining share of the lifetime of the served certificate; negative after it has expired",
    ),
    metric(
        "sterling_clock_jumps_total",
        Counter,
        Fixed("direction", &["back", "forward"]),
        "changes of the machine's clock by at least 2 s",
    ),
    metric(
        "sterling_polls_total",
        Counter,
        Fixed("source", &["store", "servers"]),
        "completed polls: of the store for new versions, of the servers by a router",
    ),
    metric("sterling_audit_log_failures_total", Counter, Labels::None, "lines missing from the audit log"),
    metric(
        "sterling_traces_lost_total",
        Counter,
        Labels::None,
        "calls whose traces the collector did not accept in time",
    ),
    metric("sterling_queue_seconds", Histogram, Labels::None, "time a request waited for a worker"),
    metric("sterling_batch_requests", Histogram, Labels::None, "requests per batch of a worker"),
    metric("sterling_waiting_requests", Gauge, Labels::None, "requests that wait for a worker or for table rows"),
    metric(
        "sterling_in_flight_bytes",
        Gauge,
        Labels::None,
        "estimated memory of the requests that are not answered yet",
    ),
    metric("sterling_pace", Gauge, Labels::None, "recent ratio of actual time to estimated time of the work"),
    metric(
        "sterling_refused_total",
        Counter,
        Fixed("reason", &["deadline", "expired", "queue", "memory", "closing"]),
        "requests rejected by load shedding: deadline not achievable, deadline expired in the queue, queue full, memory full, shutdown",
    ),
    metric("sterling_dropped_total", Counter, Labels::None, "requests whose client disconnected before the answer"),
    metric("sterling_lost_workers_total", Counter, Labels::None, "workers that hung and were abandoned"),
    metric("sterling_step_seconds", Histogram, Open("step"), "time of each step of the pass, warm-up included"),
    metric(
        "sterling_undefined_candidates_total",
        Counter,
        Open("model"),
        "candidates for which the reranker's scores are NaN",
    ),
    metric("sterling_unseen_ids_total", Counter, Open("table"), "looked-up ids that are not in the table"),
    metric(
        "sterling_degraded_rows_total",
        Counter,
        Open("table"),
        "rows replaced by a default because a remote tier or another host did not answer",
    ),
    metric(
        "sterling_remote_rows_total",
        Counter,
        Open("remote_table, outcome"),
        "rows requested from a remote table, by outcome",
    ),
    metric(
        "sterling_remote_unread_total",
        Counter,
        Open("remote_table, cause"),
        "rows that the cluster did not return, by cause: late, down (no node of the shard answers), rejected, missing, corrupt",
    ),
    metric(
        "sterling_remote_unreadable_ratio",
        Gauge,
        Open("remote_table"),
        "share of the most recently checked rows that cannot be read, with and without requests",
    ),
    metric(
        "sterling_remote_nodes",
        Gauge,
        Open("state"),
        "nodes of the cluster: ready, or silent, which do not answer and are bypassed",
    ),
    metric("sterling_remote_cache_hit_rate", Gauge, Open("remote_table"), "share of rows found in the cache"),
    metric(
        "sterling_peer_servers",
        Gauge,
        Open("host, state"),
        "servers of another host: ready, or silent, which return no rows",
    ),
    metric(
        "sterling_peer_rows_total",
        Counter,
        Open("host, outcome"),
        "rows requested from the servers of another host, by outcome",
    ),
    metric(
        "sterling_peer_calls_total",
        Counter,
        Open("host, outcome"),
        "calls for rows to the servers of another host",
    ),
    metric(
        "sterling_peer_call_seconds",
        Histogram,
        Open("host"),
        "time of a call for rows to the servers of another host",
    ),
    metric("sterling_model_version", Gauge, Model, "active version"),
    metric("sterling_loads_total", Counter, ModelOutcome(&["loaded", "refused"]), "loads of versions"),
    metric("sterling_store_available", Gauge, Labels::None, "1 if the last poll of the store succeeded, else 0"),
    metric(
        "sterling_store_stray_objects",
        Gauge,
        Labels::None,
        "objects of the bucket that are skipped because their keys are not valid paths",
    ),
    metric("sterling_store_fetched_bytes_total", Counter, Labels::None, "bytes of versions read from the bucket"),
    metric(
        "sterling_store_cache_bytes",
        Gauge,
        Labels::None,
        "bytes of versions in the local cache, updated with each fetch",
    ),
    metric("sterling_device_info", Gauge, Open("device"), "1, with the device of the pass"),
    metric(
        "sterling_device_fallbacks_total",
        Counter,
        Fixed("kind", &["unavailable", "internal", "overloaded", "unsupported"]),
        "batches that the CPU answered fully or partly because the device did not",
    ),
    metric("sterling_device_bytes", Gauge, Open("device"), "device memory of versions, without requests"),
    metric(
        "sterling_device_request_bytes",
        Gauge,
        Open("device"),
        "device memory of running requests, including memory reserved for reuse",
    ),
    metric(
        "sterling_device_failing",
        Gauge,
        Labels::None,
        "1 while the device fails and the CPU answers instead, else 0",
    ),
    metric(
        "sterling_device_waiting",
        Gauge,
        Labels::None,
        "versions answered by the CPU until the device has room or works again, updated with each batch",
    ),
    metric(
        "sterling_device_table_hit_rate",
        Gauge,
        Open("table"),
        "share of rows found in device memory, of a table that is partly cached there",
    ),
    metric(
        "sterling_device_table_planned_hit_rate",
        Gauge,
        Open("table"),
        "planned share of rows found in device memory, of a table that is partly cached there",
    ),
    metric("sterling_journal_commit_seconds", Histogram, Labels::None, "time until updates were durable"),
    metric(
        "sterling_journal_available",
        Gauge,
        Model,
        "1 while the journal works; 0 if its files were changed, it accepts no more updates, its stream is deleted or rejected the last one, or its broker does not answer",
    ),
    metric(
        "sterling_journal_backlog_updates",
        Gauge,
        Model,
        "updates that a start would replay for the active version",
    ),
    metric(
        "sterling_journal_backlog_bytes",
        Gauge,
        Model,
        "approximate bytes of the updates that a start would replay",
    ),
    metric("sterling_journal_backlog_ratio", Gauge, Model, "size of the backlog relative to the threshold of a merge"),
    metric(
        "sterling_stream_skipped_total",
        Counter,
        Open("stream"),
        "messages of a stream that were skipped because they are not of a journal",
    ),
    metric("sterling_fresh_items", Gauge, Model, "items of the delta"),
    metric("sterling_position", Gauge, Model, "sequence number of the last visible update"),
    metric("sterling_updates_refused_total", Counter, Model, "durable updates that the model could not apply"),
    metric(
        "sterling_attributes_dropped_total",
        Counter,
        Model,
        "attributes of durable updates that do not fit the columns of a version; the items are served without them",
    ),
    metric(
        "sterling_merges_total",
        Counter,
        ModelOutcome(&["merged", "overtaken", "failed"]),
        "merges of updates into a version; another version that was published first supersedes a merge",
    ),
    metric("sterling_merge_seconds", Histogram, Model, "time of a merge"),
    metric(
        "sterling_merge_started_timestamp_seconds",
        Gauge,
        Model,
        "Unix time at which the running merge started; 0 without one",
    ),
    metric("sterling_merge_progress_ratio", Gauge, Model, "share of the steps of the running merge that are done"),
    metric(
        "sterling_stray_ratio",
        Gauge,
        Model,
        "new items of a kind unknown to the coarse quantizer, relative to the items of the snapshot",
    ),
    metric(
        "sterling_audits_total",
        Counter,
        ModelOutcome(&["audited", "too_costly", "no_room", "failed"]),
        "retrievals selected to run again exactly",
    ),
    metric("sterling_audit_wanted_total", Counter, Model, "items of the exact answers"),
    metric(
        "sterling_audit_found_total",
        Counter,
        Model,
        "items of the exact answers that had been served; divided by the wanted items this is the recall",
    ),
    metric(
        "sterling_longest_list_ratio",
        Gauge,
        Model,
        "length of the longest list relative to the mean, updated with each audit",
    ),
    metric(
        "sterling_drift_ratio",
        Gauge,
        Model,
        "share of the snapshot that was changed or added after its publication, updated with each audit",
    ),
    metric("sterling_canary_share", Gauge, Model, "share of the request keys that the canary answers"),
    metric(
        "sterling_canary_rollbacks_total",
        Counter,
        ModelOutcome(&["errors", "latency", "recall"]),
        "automatic rollbacks of a canary, by cause",
    ),
    metric(
        "sterling_traffic_requests_total",
        Counter,
        Open("model, role, outcome"),
        "requests answered by the active version and by the canary while a canary is active",
    ),
    metric(
        "sterling_traffic_seconds",
        Histogram,
        Open("model, role"),
        "time from the choice between active version and canary to the answer",
    ),
    metric("sterling_traffic_recall", Gauge, Open("model, role"), "audited recall in the window of a canary"),
    metric(
        "sterling_shadows_total",
        Counter,
        ModelOutcome(&["compared", "failed", "rate", "busy", "no_room"]),
        "requests sampled for a shadow: compared, failed, or dropped for the rate, the concurrency limit or lack of room",
    ),
    metric("sterling_shadow_wanted_total", Counter, Model, "items of the longer of two compared answers"),
    metric(
        "sterling_shadow_found_total",
        Counter,
        Model,
        "items in both answers; divided by the wanted items this is overlap@K",
    ),
    metric("sterling_shadow_displacement", Histogram, Model, "mean rank displacement of the items in both answers"),
    metric(
        "sterling_shadow_score_difference",
        Gauge,
        Model,
        "largest score change of an item in the most recently compared answers",
    ),
    metric(
        "sterling_shadow_seconds",
        Histogram,
        Open("model, role"),
        "step time of compared answers, of the served version and of the shadow",
    ),
    metric(
        "sterling_route_second_calls_total",
        Counter,
        Fixed("why", &["failed", "late"]),
        "hedged requests: calls that a router also sent to another replica",
    ),
    metric(
        "sterling_route_requeries_total",
        Counter,
        Model,
        "shards that a router queried again because their share of the answer was not proven complete",
    ),
    metric(
        "sterling_route_again_total",
        Counter,
        Model,
        "deprecated name of `sterling_route_requeries_total`, for this release alone",
    ),
    metric("sterling_route_partial_total", Counter, Model, "answers of a router that did not cover all items"),
    metric(
        "sterling_route_coverage_ratio",
        Gauge,
        Model,
        "share of the active version's items whose shards have a server, updated with each health check",
    ),
    metric(
        "sterling_route_servers",
        Gauge,
        Fixed("state", &["ready", "slow", "not_ready", "silent"]),
        "servers of a router; slow: the last three answers took 8 times as long as usual",
    ),
];

/// Registers the help texts of all metrics, and exports the counters with known labels as 0.
pub(super) fn begin() {
    for metric in METRICS {
        let means = match metric.labels {
            Open(labels) => format!("{}, by {labels}", metric.means),
            _ => metric.means.to_owned(),
        };
        match metric.behaves {
            Counter => describe_counter!(metric.name, means),
            Gauge => describe_gauge!(metric.name, means),
            Histogram => describe_histogram!(metric.name, means),
        }
        match (metric.behaves, metric.labels) {
            (Counter, Labels::None) => counter!(metric.name).increment(0),
            (Counter, Fixed(label, values)) => {
                values.iter().for_each(|&value| counter!(metric.name, label => value).increment(0));
            }
            _ => {}
        }
    }
}

/// Models whose counters are exported.
static BEGUN: RwLock<BTreeSet<String>> = RwLock::new(BTreeSet::new());

/// Returns true if this process has loaded the model `model`.
pub fn has_begun(model: &str) -> bool {
    BEGUN.read().unwrap_or_else(PoisonError::into_inner).contains(model)
}

/// Exports the counters of a model as 0.
pub fn begin_model(model: &str) {
    BEGUN.write().unwrap_or_else(PoisonError::into_inner).insert(model.to_owned());
    for metric in METRICS.iter().filter(|metric| metric.behaves == Counter) {
        match metric.labels {
            Model => counter!(metric.name, "model" => model.to_owned()).increment(0),
            ModelOutcome(outcomes) => {
                for &outcome in outcomes {
                    counter!(metric.name, "model" => model.to_owned(), "outcome" => outcome).increment(0);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::path::Path;

    use super::*;

    fn walk(folder: &Path, names: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, names);
            } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("telemetry/src/catalogue.rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                // Skips comment lines: examples in doc comments use metric names that are not in the catalogue.
                let code: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
                let code = code.join("\n");
                for macro_name in ["counter!(", "gauge!(", "histogram!("] {
                    let uses =
                        code.split(macro_name).skip(1).filter_map(|rest| rest.trim_start().strip_prefix("\"sterling_"));
                    names.extend(uses.map(|rest| format!("sterling_{}", rest.split('"').next().unwrap())));
                }
            }
        }
    }

    #[test]
    fn every_metric_is_in_the_catalogue() {
        let mut used = BTreeSet::new();
        for folder in ["crates", "src"] {
            walk(&Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(folder), &mut used);
        }
        let known: BTreeSet<String> = METRICS.iter().map(|metric| metric.name.to_owned()).collect();
        assert_eq!(known.len(), METRICS.len());
        assert_eq!(used, known);
    }

    /// Sections of the page: the first metric of each, and its heading.
    const SECTIONS: [(&str, &str); 9] = [
        ("sterling_build_info", "HTTP and process"),
        ("sterling_queue_seconds", "Engine"),
        ("sterling_unseen_ids_total", "Embedding tables"),
        ("sterling_model_version", "Versions and store"),
        ("sterling_device_info", "GPU"),
        ("sterling_journal_commit_seconds", "Updates"),
        ("sterling_audits_total", "Recall audits"),
        ("sterling_canary_share", "Canary and shadow"),
        ("sterling_route_second_calls_total", "Router"),
    ];
    const PAGE_HEAD: &str = "# Metrics

This page lists the metrics of `GET /metrics`, in the Prometheus text format. It is written from the code:
`STERLING_BLESS=1 cargo test -p sterling-telemetry` regenerates it.

Times are in seconds and sizes in bytes. Histograms have fixed buckets, so those of several servers can be summed. The
endpoint also exports `process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_virtual_memory_bytes`,
`process_threads`, `process_open_fds`, `process_max_fds` and `process_start_time_seconds`, named as in Prometheus client
libraries.
";

    #[test]
    fn the_page_of_metrics_is_the_catalogue() {
        let mut page = PAGE_HEAD.to_owned();
        for metric in METRICS {
            if let Some((_, heading)) = SECTIONS.iter().find(|(first, _)| *first == metric.name) {
                page += &format!("\n## {heading}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n");
            }
            let labels = match metric.labels {
                Labels::None => String::new(),
                Open(labels) => format!("`{labels}`"),
                Fixed(label, values) => format!("`{label}`: `{}`", values.join("`, `")),
                Model => "`model`".into(),
                ModelOutcome(outcomes) => format!("`model`, `outcome`: `{}`", outcomes.join("`, `")),
            };
            let kind = format!("{:?}", metric.behaves).to_lowercase();
            page += &format!("| `{}` | {kind} | {labels} | {} |\n", metric.name, metric.means);
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/metrics.md");
        if std::env::var_os("STERLING_BLESS").is_some() {
            std::fs::write(path, &page).unwrap();
        }
        assert!(
            page == std::fs::read_to_string(path).unwrap_or_default(),
            "the metrics changed: run with STERLING_BLESS=1"
        );
    }
}
