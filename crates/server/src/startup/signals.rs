//! Signals that stop a server or a router.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::http::Stop;
use sterling_core::error::{Error, Result};

/// Reports stop signals: SIGTERM and SIGHUP, which orchestrators and a closed terminal send, drain the server; SIGINT, which a
/// person sends, stops it at once. Requires a tokio runtime.
///
/// # Errors
/// `Io` if a handler cannot be installed.
pub fn stop_signals() -> Result<UnboundedReceiver<Stop>> {
    let (reported, stops) = unbounded_channel();
    for (kind, stop) in [
        (SignalKind::terminate(), Stop::Drain),
        (SignalKind::hangup(), Stop::Drain),
        (SignalKind::interrupt(), Stop::Now),
    ] {
        if kind == SignalKind::hangup() && ignores_hangups() {
            continue;
        }
        let mut signals = signal(kind).map_err(|e| Error::io("signal handlers", e))?;
        let reported = reported.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() && reported.send(stop).is_ok() {
                tracing::info!(
                    signal = kind.as_raw_value(),
                    "stopping: finishing running requests, a second signal stops at once"
                );
            }
        });
    }
    Ok(stops)
}

/// Returns whether the process ignores SIGHUP to outlive its terminal, as `nohup` sets up.
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}
