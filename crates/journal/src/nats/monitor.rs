//! Sync setting of a broker, queried at its monitoring port, because clients cannot query it.

use std::time::Duration;

use serde::Deserialize;

use sterling_core::error::{Error, Result};

/// Timeout of a request to a monitor.
const ANSWER: Duration = Duration::from_secs(5);

/// Fields read from `/varz`.
#[derive(Deserialize)]
struct About {
    #[serde(default)]
    version: String,
    #[serde(default)]
    jetstream: Streams,
}

#[derive(Default, Deserialize)]
struct Streams {
    #[serde(default)]
    config: Syncs,
}

#[derive(Default, Deserialize)]
struct Syncs {
    #[serde(default)]
    sync_always: bool,
}

/// Checks that a broker syncs messages before it acknowledges them; `monitor` is the broker's monitoring address
/// (`http://HOST:8222`).
///
/// # Errors
/// `Unavailable` if the monitor does not answer, `Unsupported` if the broker does not sync.
pub(super) fn check(monitor: &str) -> Result<()> {
    let silent = |e: &dyn std::fmt::Display| Error::unavailable(format!("streams.monitors: {monitor}: {e}"));
    let agent: ureq::Agent = ureq::Agent::config_builder().timeout_global(Some(ANSWER)).build().into();
    let answer = agent.get(format!("{}/varz", monitor.trim_end_matches('/'))).call();
    let text = answer.and_then(|mut answer| answer.body_mut().read_to_string()).map_err(|e| silent(&e))?;
    let About { version, jetstream } = serde_json::from_str(&text).map_err(|e| silent(&e))?;
    match jetstream.config.sync_always {
        true => Ok(()),
        false => Err(Error::unsupported(format!(
            "streams.monitors: {monitor}: this broker (version {version}) acknowledges updates before it syncs them, expected `sync_interval: always` in its `jetstream` block (2.10 or later)"
        ))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{Read as _, Write as _};

    use super::*;
    use sterling_core::error::Kind;

    /// Returns the result for a monitor with this answer.
    fn result_of(answer: &'static str) -> Result<()> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}/", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut requested = [0; 1024];
            let read = stream.read(&mut requested).unwrap();
            assert!(requested[..read].starts_with(b"GET /varz "));
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", answer.len());
            stream.write_all((head + answer).as_bytes()).unwrap();
        });
        let reported = check(&address);
        server.join().unwrap();
        reported
    }

    #[test]
    fn brokers_that_do_not_sync_or_do_not_answer_are_rejected() {
        let always =
            r#"{"version": "2.15.1", "jetstream": {"config": {"sync_interval": 120000000000, "sync_always": true}}}"#;
        assert!(result_of(always).is_ok());
        for (answer, kind) in [
            (r#"{"version": "2.9.10", "jetstream": {"config": {"max_memory": 1}}}"#, Kind::Unsupported),
            (r#"{"version": "2.15.1", "jetstream": {"config": {"sync_always": false}}}"#, Kind::Unsupported),
            (r#"{"version": "2.15.1"}"#, Kind::Unsupported),
            ("hello", Kind::Unavailable),
            (r#"{"jetstream": 1}"#, Kind::Unavailable),
        ] {
            assert_eq!(result_of(answer).unwrap_err().kind(), kind, "{answer}");
        }
        assert_eq!(check("http://127.0.0.1:1").unwrap_err().kind(), Kind::Unavailable);
    }
}
