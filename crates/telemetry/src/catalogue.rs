//! Every metric: its name, kind, labels and meaning.
//!
//! Counters whose labels are known are told from the start on, and those of a model from its first load: what appears with its first
//! increment cannot be seen to grow, and an alert on it would miss the first failure.

use std::collections::BTreeSet;
use std::sync::{PoisonError, RwLock};

use metrics::{counter, describe_counter, describe_gauge, describe_histogram};

/// How a metric behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behaves {
    Counter,
    Gauge,
    Histogram,
}
use Behaves::{Counter, Gauge, Histogram};

/// The labels of a metric.
#[derive(Clone, Copy, Debug)]
enum Labels {
    /// None.
    None,
    /// These, whose values come up as things happen.
    Open(&'static str),
    /// One, with these values.
    Fixed(&'static str, &'static [&'static str]),
    /// The model.
    Model,
    /// The model, and what came of something.
    ModelOutcome(&'static [&'static str]),
}
use Labels::{Fixed, Model, ModelOutcome, Open};

/// A metric.
struct Metric {
    name: &'static str,
    behaves: Behaves,
    labels: Labels,
    means: &'static str,
}

const fn metric(name: &'static str, behaves: Behaves, labels: Labels, means: &'static str) -> Metric {
    Metric { name, behaves, labels, means }
}

const METRICS: &[Metric] = &[
    metric(
        "sterling_build_info",
        Gauge,
        Open("version, architecture"),
        "1, with the release that runs and what it was built for",
    ),
    metric(
        "sterling_requests_total",
        Counter,
        Open("call, status, model"),
        "answered HTTP requests; those about no model that the server has had are without the label of one",
    ),
    metric(
        "sterling_request_seconds",
        Histogram,
        Open("call, model"),
        "time from the header of a request to that of its answer",
    ),
    metric(
        "sterling_failed_total",
        Counter,
        Open("call, reason"),
        "answers with a status from 500 on, and such entries of lists, by the code of their problem",
    ),
    metric("sterling_connections", Gauge, Labels::None, "open connections"),
    metric(
        "sterling_connections_waiting",
        Gauge,
        Labels::None,
        "connections that are ready and wait for the turn of their caller",
    ),
    metric(
        "sterling_connections_cut_total",
        Counter,
        Fixed("reason", &["idle", "header", "stalled", "unread", "resets", "frames", "crowded", "stopping"]),
        "connections that were closed by the server",
    ),
    metric(
        "sterling_streams_cut_total",
        Counter,
        Labels::None,
        "requests of HTTP/2 that ended because their answers were not read",
    ),
    metric(
        "sterling_connections_refused_total",
        Counter,
        Labels::None,
        "connections beyond the limit while all others were at work",
    ),
    metric("sterling_tls_failures_total", Counter, Labels::None, "connections whose handshake failed"),
    metric(
        "sterling_denied_total",
        Counter,
        Fixed("reason", &["no_key", "role", "model", "rate"]),
        "calls that were not their caller's to make: without a right key, with a role or models that are not enough, beyond the key's rate",
    ),
    metric("sterling_key_reloads_total", Counter, Fixed("outcome", &["read", "failed"]), "changes of the file of keys"),
    metric(
        "sterling_certificate_reloads_total",
        Counter,
        Fixed("outcome", &["read", "failed"]),
        "changes of the certificates",
    ),
    metric(
        "sterling_certificate_life_ratio",
        Gauge,
        Labels::None,
        "share of its life that the certificate has left which is shown; below 0 once it has expired",
    ),
    metric(
        "sterling_clock_jumps_total",
        Counter,
        Fixed("direction", &["back", "forward"]),
        "times that the clock of the machine was set by 2 s or more",
    ),
    metric(
        "sterling_polls_total",
        Counter,
        Fixed("source", &["store", "servers"]),
        "completed polls: of the store for new versions, by a router of its servers",
    ),
    metric("sterling_audit_log_failures_total", Counter, Labels::None, "lines that the audit log lacks"),
    metric(
        "sterling_traces_lost_total",
        Counter,
        Labels::None,
        "calls whose traces the collector did not take in time",
    ),
    metric("sterling_queue_seconds", Histogram, Labels::None, "time a request waited for a worker"),
    metric("sterling_batch_requests", Histogram, Labels::None, "requests that a worker took together"),
    metric("sterling_waiting_requests", Gauge, Labels::None, "requests that wait for a worker or for their rows"),
    metric(
        "sterling_in_flight_bytes",
        Gauge,
        Labels::None,
        "memory that requests hold until they are answered, by their price",
    ),
    metric(
        "sterling_pace",
        Gauge,
        Labels::None,
        "time that work takes by the time that its price says, over the last moments",
    ),
    metric(
        "sterling_refused_total",
        Counter,
        Fixed("reason", &["deadline", "expired", "queue", "memory", "closing"]),
        "requests refused: the deadline could not be met, nor after waiting; queue or memory full; shutting down",
    ),
    metric("sterling_dropped_total", Counter, Labels::None, "requests whose caller left before the answer"),
    metric("sterling_lost_workers_total", Counter, Labels::None, "workers that hung and were given up"),
    metric("sterling_step_seconds", Histogram, Open("step"), "time of each step of the pass, warm-ups included"),
    metric("sterling_unseen_ids_total", Counter, Open("table"), "ids that a table did not hold"),
    metric(
        "sterling_degraded_rows_total",
        Counter,
        Open("table"),
        "rows answered with a default because a remote tier or another host did not",
    ),
    metric(
        "sterling_remote_rows_total",
        Counter,
        Open("remote_table, outcome"),
        "rows asked of a remote table, by what came",
    ),
    metric(
        "sterling_remote_unread_total",
        Counter,
        Open("remote_table, cause"),
        "rows that the cluster did not bring: late, down (no node of the shard answers), refused, missing, corrupt",
    ),
    metric(
        "sterling_remote_unreadable_ratio",
        Gauge,
        Open("remote_table"),
        "share of the rows looked at last that cannot be read, with and without requests",
    ),
    metric(
        "sterling_remote_nodes",
        Gauge,
        Open("state"),
        "nodes of the cluster by their state: ready, or silent, which do not answer and are passed by",
    ),
    metric("sterling_remote_cache_hit_rate", Gauge, Open("remote_table"), "share of rows that the cache had"),
    metric(
        "sterling_peer_servers",
        Gauge,
        Open("host, state"),
        "servers of another host by their state: ready, or silent, which give no rows",
    ),
    metric(
        "sterling_peer_rows_total",
        Counter,
        Open("host, outcome"),
        "rows asked of the servers of another host, by what came",
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
    metric("sterling_model_version", Gauge, Model, "the active version"),
    metric("sterling_loads_total", Counter, ModelOutcome(&["loaded", "refused"]), "snapshots loaded or refused"),
    metric(
        "sterling_store_available",
        Gauge,
        Labels::None,
        "1 where the last look at the store's bucket was answered or at its folder found it, 0 where not",
    ),
    metric(
        "sterling_store_stray_objects",
        Gauge,
        Labels::None,
        "objects of the store's bucket that are skipped, as no path can have their keys",
    ),
    metric(
        "sterling_store_fetched_bytes_total",
        Counter,
        Labels::None,
        "bytes of versions read from the store's bucket",
    ),
    metric(
        "sterling_store_cache_bytes",
        Gauge,
        Labels::None,
        "bytes of versions in the folder that they are fetched to, told with each fetch",
    ),
    metric("sterling_device_info", Gauge, Open("device"), "1, with the device that passes run on"),
    metric(
        "sterling_device_fallbacks_total",
        Counter,
        Fixed("kind", &["unavailable", "internal", "overloaded", "unsupported"]),
        "batches of which the CPU answered some requests or all because the device did not",
    ),
    metric(
        "sterling_device_bytes",
        Gauge,
        Open("device"),
        "memory of a device that versions take, apart from requests",
    ),
    metric(
        "sterling_device_request_bytes",
        Gauge,
        Open("device"),
        "memory of a device that requests under way take, or took and may take again",
    ),
    metric(
        "sterling_device_failing",
        Gauge,
        Labels::None,
        "1 while the device fails and the CPU answers in its place, 0 once it works again",
    ),
    metric(
        "sterling_device_waiting",
        Gauge,
        Labels::None,
        "versions that the CPU answers until there is room on the device or it works again, told with each batch",
    ),
    metric(
        "sterling_device_table_hit_rate",
        Gauge,
        Open("table"),
        "share of rows that were in the memory of the device, of a table of which only some are",
    ),
    metric("sterling_device_table_planned_hit_rate", Gauge, Open("table"), "the same by the plan of placement"),
    metric("sterling_journal_commit_seconds", Histogram, Labels::None, "time until updates were durable"),
    metric(
        "sterling_journal_available",
        Gauge,
        Model,
        "1 while the journal is as it should be; 0 where its files were changed, it takes no more updates, its stream is gone or refused the last one, or its broker does not answer",
    ),
    metric(
        "sterling_journal_backlog_updates",
        Gauge,
        Model,
        "updates that a start would read for the active version's snapshot",
    ),
    metric("sterling_journal_backlog_bytes", Gauge, Model, "their bytes, about"),
    metric("sterling_journal_backlog_ratio", Gauge, Model, "their share of what makes a merge due"),
    metric(
        "sterling_stream_skipped_total",
        Counter,
        Open("stream"),
        "messages of a stream that no journal wrote and that were skipped",
    ),
    metric("sterling_fresh_items", Gauge, Model, "items beside the snapshot"),
    metric("sterling_position", Gauge, Model, "the position of the updates that are seen"),
    metric("sterling_updates_refused_total", Counter, Model, "durable updates that the model could make nothing of"),
    metric(
        "sterling_attributes_dropped_total",
        Counter,
        Model,
        "attributes of durable updates that do not fit the columns of a version: the items are served without them",
    ),
    metric(
        "sterling_merges_total",
        Counter,
        ModelOutcome(&["merged", "overtaken", "failed"]),
        "merges of updates into a version",
    ),
    metric("sterling_merge_seconds", Histogram, Model, "time of a merge"),
    metric(
        "sterling_merge_started_timestamp_seconds",
        Gauge,
        Model,
        "Unix time at which the merge under way began; 0 without one",
    ),
    metric("sterling_merge_progress_ratio", Gauge, Model, "share of the steps of the merge under way that are done"),
    metric(
        "sterling_stray_ratio",
        Gauge,
        Model,
        "new items of a kind that the lists were not trained on, by the items of the snapshot",
    ),
    metric(
        "sterling_audits_total",
        Counter,
        ModelOutcome(&["audited", "too_costly", "no_room", "failed"]),
        "retrievals that were to be run again exactly",
    ),
    metric("sterling_audit_wanted_total", Counter, Model, "items of exact answers"),
    metric(
        "sterling_audit_found_total",
        Counter,
        Model,
        "items of them that had been served; by the wanted ones this is the recall",
    ),
    metric("sterling_longest_list_ratio", Gauge, Model, "items of the longest list by the mean, told with each audit"),
    metric(
        "sterling_drift_ratio",
        Gauge,
        Model,
        "share of the snapshot that has changed or lies beside it, told with each audit",
    ),
    metric("sterling_canary_share", Gauge, Model, "the share of keys that the canary answers"),
    metric(
        "sterling_canary_rollbacks_total",
        Counter,
        ModelOutcome(&["errors", "latency", "recall"]),
        "canaries that were rolled back because they were behind, by what in",
    ),
    metric(
        "sterling_traffic_requests_total",
        Counter,
        Open("model, role, outcome"),
        "requests that the active version or the canary had, while there was one",
    ),
    metric(
        "sterling_traffic_seconds",
        Histogram,
        Open("model, role"),
        "time from the choice of the active version or the canary to its answer",
    ),
    metric("sterling_traffic_recall", Gauge, Open("model, role"), "audited recall in the window of a canary"),
    metric(
        "sterling_shadows_total",
        Counter,
        ModelOutcome(&["compared", "failed", "rate", "busy", "no_room"]),
        "requests drawn for a shadow: compared, or dropped where the rate, the places or the engine had no room",
    ),
    metric("sterling_shadow_wanted_total", Counter, Model, "items of the longer one of two compared answers"),
    metric(
        "sterling_shadow_found_total",
        Counter,
        Model,
        "items of them that are in both; by the wanted ones this is overlap@K",
    ),
    metric("sterling_shadow_displacement", Histogram, Model, "places by which items of both have moved, in the mean"),
    metric(
        "sterling_shadow_score_difference",
        Gauge,
        Model,
        "the greatest change of the score of an item of both, of the last answers compared",
    ),
    metric(
        "sterling_shadow_seconds",
        Histogram,
        Open("model, role"),
        "time of the steps of compared answers, served and of the shadow",
    ),
    metric(
        "sterling_route_second_calls_total",
        Counter,
        Fixed("why", &["failed", "late"]),
        "calls of a router that went to another replica as well",
    ),
    metric(
        "sterling_route_again_total",
        Counter,
        Model,
        "shards that a router asked again, for their part of an answer was not proven",
    ),
    metric("sterling_route_partial_total", Counter, Model, "answers of a router that did not cover all items"),
    metric(
        "sterling_route_coverage_ratio",
        Gauge,
        Model,
        "share of the active version's items whose shards have a server; a router updates it with each health check",
    ),
    metric(
        "sterling_route_servers",
        Gauge,
        Fixed("state", &["ready", "slow", "not_ready", "silent"]),
        "servers of a router by their state: slow are those whose last three answers took 8 times as long as usual",
    ),
];

/// Describes all metrics to whoever reads them, and begins those counters whose labels are known.
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

/// The models whose counters were begun.
static BEGUN: RwLock<BTreeSet<String>> = RwLock::new(BTreeSet::new());

/// Whether this process has had a model.
pub fn has_begun(model: &str) -> bool {
    BEGUN.read().unwrap_or_else(PoisonError::into_inner).contains(model)
}

/// Begins the counters of a model.
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
                // Examples of the documentation count what they like.
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

    #[test]
    fn the_page_of_metrics_is_the_catalogue() {
        let mut page = "# Metrics\n\nWritten from the code: `STERLING_BLESS=1 cargo test -p sterling-telemetry` writes it again. `GET /metrics` shows them in Prometheus' text \
            format;\ntimes are in seconds, sizes in bytes, histograms have fixed buckets, so that those of several servers can be added up. Beside these it shows \
            `process_cpu_seconds_total`,\n`process_resident_memory_bytes`, `process_virtual_memory_bytes`, `process_threads`, `process_open_fds`, `process_max_fds` and \
            `process_start_time_seconds`, as Prometheus' client libraries name them.\n\n\
            | metric | kind | labels | meaning |\n|---|---|---|---|\n"
            .to_owned();
        for metric in METRICS {
            let labels = match metric.labels {
                Labels::None => String::new(),
                Open(labels) => format!("`{labels}`"),
                Fixed(label, values) => format!("`{label}`: {}", values.join(", ")),
                Model => "`model`".into(),
                ModelOutcome(outcomes) => format!("`model`, `outcome`: {}", outcomes.join(", ")),
            };
            let kind = format!("{:?}", metric.behaves).to_lowercase();
            page += &format!("| `{}` | {kind} | {labels} | {} |\n", metric.name, metric.means);
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/METRICS.md");
        if std::env::var_os("STERLING_BLESS").is_some() {
            std::fs::write(path, &page).unwrap();
        }
        assert!(
            page == std::fs::read_to_string(path).unwrap_or_default(),
            "the metrics changed: run with STERLING_BLESS=1"
        );
    }
}
