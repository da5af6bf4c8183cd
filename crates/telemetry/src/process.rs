//! Process metrics with the names that Prometheus client libraries use.

use std::fmt::Write as _;
use std::sync::LazyLock;

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use sterling_core::clock::unix_time;

/// Start of metrics collection, in seconds of Unix time.
static STARTED: LazyLock<f64> = LazyLock::new(|| unix_time().as_secs_f64());

/// Exports the build information and records the start time.
pub(super) fn begin() {
    LazyLock::force(&STARTED);
    let (version, architecture) = (env!("CARGO_PKG_VERSION"), std::env::consts::ARCH);
    metrics::gauge!("sterling_build_info", "version" => version, "architecture" => architecture).set(1.0);
}

/// Renders the current process metrics in the Prometheus text format. Values that the system does not report are left out.
pub fn process() -> String {
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let reported = |name: &str, unit: f64| {
        let text = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(text.split_whitespace().next()?.parse::<f64>().ok()? * unit)
    };
    let open = std::fs::read_dir("/proc/self/fd").ok().map(|all| all.count() as f64);
    let metrics = [
        ("cpu_seconds_total", "counter", "CPU time", Some(cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9)),
        ("resident_memory_bytes", "gauge", "resident memory", reported("VmRSS", 1024.0)),
        ("virtual_memory_bytes", "gauge", "mapped memory", reported("VmSize", 1024.0)),
        ("threads", "gauge", "threads", reported("Threads", 1.0)),
        ("open_fds", "gauge", "open file descriptors", open),
        (
            "max_fds",
            "gauge",
            "limit of open file descriptors",
            getrlimit(Resource::Nofile).current.map(|most| most as f64),
        ),
        ("start_time_seconds", "gauge", "Unix time at which the process started", Some(*STARTED)),
    ];
    let mut text = String::with_capacity(1024);
    for (name, kind, means, value) in metrics {
        if let Some(value) = value {
            // Writing to a string cannot fail.
            let _ =
                write!(text, "# HELP process_{name} {means}\n# TYPE process_{name} {kind}\nprocess_{name} {value}\n\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_metrics_of_this_process_are_exported() {
        let text = process();
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(&format!("process_{name} ")));
            line.and_then(|value| value.parse::<f64>().ok()).unwrap_or(f64::NAN)
        };
        assert!(value("cpu_seconds_total") > 0.0, "{text}");
        assert!(value("resident_memory_bytes") > 1e6 && value("virtual_memory_bytes") > value("resident_memory_bytes"));
        assert!(value("threads") >= 1.0 && value("open_fds") >= 3.0, "{text}");
        assert!(value("max_fds") >= value("open_fds") && value("start_time_seconds") > 1.6e9, "{text}");
        assert!(text.contains("# TYPE process_cpu_seconds_total counter\n"), "{text}");
    }
}
