//! Recordings: requests with their original times, in a JSON lines file with one request per line:
//!
//! ```json
//! {"time": 1732281600.250, "body": {"features": {"installed": [832]}, "k": 10}}
//! ```
//!
//! `time` is in seconds from any origin. Lines may be in any order, as in a log that is written when requests end.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::requests::{Body, read_lines};
use super::schedule::SendTimes;
use sterling_core::error::{Error, Result};

/// Maximum duration of a replayed recording in seconds.
const SECONDS_MAX: f64 = 86_400.0;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Recorded {
    time: f64,
    body: Map<String, Value>,
}

/// Reads the requests of a recording in order of time. Times start at 0 and are divided by `speed`.
///
/// # Errors
/// An unreadable file; an invalid line, with its number; requests that are all at the same time, or more than a day apart.
pub fn read_recording(path: &Path, speed: f64, timeout: Duration) -> Result<(Vec<Body>, SendTimes)> {
    let mut requests = read_lines(path, |line| {
        let Recorded { time, body } = serde_json::from_str(line).map_err(|e| e.to_string())?;
        Ok((time, Body::new(body, timeout)))
    })?;
    requests.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    let (first, last) = (requests[0].0, requests[requests.len() - 1].0);
    let seconds = (last - first) / speed;
    // The comparison also rejects NaN.
    if !(seconds > 0.0 && seconds <= SECONDS_MAX) {
        let named = format!("{}: the requests of the recording span {seconds} s at this speed", path.display());
        return Err(Error::invalid(format!("{named}, expected more than 0, at most {SECONDS_MAX}")));
    }
    let times: Arc<[Duration]> =
        requests.iter().map(|(time, _)| Duration::from_secs_f64((time - first) / speed)).collect();
    Ok((requests.into_iter().map(|(_, body)| body).collect(), SendTimes::Recorded(times)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(text: &str, speed: f64) -> Result<(Vec<Body>, SendTimes)> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("recording.jsonl");
        std::fs::write(&path, text).unwrap();
        read_recording(&path, speed, Duration::from_secs(1))
    }

    #[test]
    fn requests_come_in_the_order_of_their_times_from_the_first_one_on() {
        let text = "{\"time\": 1732281602.5, \"body\": {\"k\": 3}}\n\n{\"body\": {\"k\": 1}, \"time\": 1732281600}\n\
                    {\"time\": 1732281600.5, \"body\": {\"k\": 2, \"timeout_ms\": 7}}\n";
        for (speed, expected) in [(1.0, [0, 500, 2500]), (2.0, [0, 250, 1250]), (0.5, [0, 1000, 5000])] {
            let (bodies, timing) = read(text, speed).unwrap();
            assert_eq!(timing, SendTimes::Recorded(expected.map(Duration::from_millis).into()));
            let bodies: Vec<&[u8]> = bodies.iter().map(|body| body.bytes.as_ref()).collect();
            let [first, second, third] =
                ["{\"k\":1,\"timeout_ms\":1000}", "{\"k\":2,\"timeout_ms\":7}", "{\"k\":3,\"timeout_ms\":1000}"];
            assert_eq!(bodies, [first, second, third].map(str::as_bytes));
        }
    }

    #[test]
    fn invalid_recordings_are_rejected_with_the_line() {
        for (text, reason) in [
            ("", "no requests"),
            ("{\"time\": 1, \"body\": {}}\n{\"k\": 1}", "line 2: unknown field `k`"),
            ("{\"time\": \"now\", \"body\": {}}", "line 1: invalid type"),
            ("{\"time\": 1e999, \"body\": {}}", "line 1: number out of range"),
            ("{\"time\": 1, \"body\": []}", "line 1: invalid type"),
            ("{\"time\": 1}", "line 1: missing field `body`"),
            ("{\"time\": 1, \"body\": {}}", "span 0 s"),
            ("{\"time\": 1, \"body\": {}}\n{\"time\": 90000, \"body\": {}}", "span 89999 s"),
            ("{\"time\": -1e308, \"body\": {}}\n{\"time\": 1e308, \"body\": {}}", "span inf s"),
        ] {
            let error = read(text, 1.0).unwrap_err().to_string();
            assert!(error.contains("recording.jsonl") && error.contains(reason), "{text}: {error}");
        }
    }
}
