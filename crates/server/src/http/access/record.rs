//! Audit log: one JSON line per change, with key, client and outcome; appended and never rewritten.
//!
//! A line is written after the call has ended and before its answer is sent. The line is also written if the client has
//! disconnected, because the change may have been made. If the file was renamed or removed, as `logrotate` does, it is opened
//! again. Threads that drive connections do not wait for the disk.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde::Serialize;
use tokio::runtime::Handle;

use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::tasks;

/// Longest logged path, in bytes.
const PATH_BYTES_MAX: usize = 1024;

/// Open audit log, if a file is configured.
#[derive(Debug, Default)]
pub(super) struct AuditLog(Option<Mutex<Appended>>);

#[derive(Debug)]
struct Appended {
    path: PathBuf,
    file: File,
    /// True if the file ends within a line, because a disk was full or the process ended.
    is_torn: bool,
}

/// Call as logged.
#[derive(Serialize)]
pub(in crate::http) struct LoggedCall {
    pub(in crate::http) id: String,
    /// Name of the caller's key.
    pub(in crate::http) key: Option<String>,
    pub(in crate::http) peer: Option<SocketAddr>,
    pub(in crate::http) method: String,
    pub(in crate::http) path: String,
    pub(in crate::http) call: &'static str,
}

#[derive(Serialize)]
struct Line<'a> {
    time: String,
    #[serde(flatten)]
    asked: &'a LoggedCall,
    /// Status of the answer; `None` if the client disconnected before the answer.
    status: Option<u16>,
    ms: f64,
}

/// Returns whether a file ends within a line; false for empty files and for non-regular files such as pipes.
fn ends_within_line(path: &Path, file: &File) -> std::io::Result<bool> {
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() == 0 {
        return Ok(false);
    }
    let mut last = [0];
    File::open(path)?.read_exact_at(&mut last, metadata.len() - 1)?;
    Ok(last != *b"\n")
}

impl AuditLog {
    /// Opens the file for appending.
    ///
    /// # Errors
    /// `Io` or `NotFound` if the file cannot be opened for appending.
    pub(super) fn open(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else { return Ok(AuditLog::default()) };
        let log = Appended::open(path).map_err(|e| {
            let got = format!(
                "access.audit_log: got `{}`, expected a file to append to, in a folder that exists",
                path.display()
            );
            Error::io(got, e)
        })?;
        Ok(AuditLog(Some(Mutex::new(log))))
    }

    fn write(&self, text: &[u8]) {
        let Some(log) = &self.0 else { return };
        let mut log = locked(log);
        if let Err(error) = log.append(text) {
            metrics::counter!("sterling_audit_log_failures_total").increment(1);
            tracing::error!(%error, path = %log.path.display(), "the audit log cannot be written");
        }
    }
}

impl Appended {
    fn open(path: &Path) -> std::io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).mode(0o640).open(path)?;
        let is_torn = ends_within_line(path, &file).unwrap_or(false);
        Ok(Appended { path: path.to_owned(), file, is_torn })
    }

    fn append(&mut self, text: &[u8]) -> std::io::Result<()> {
        let here = self.file.metadata()?;
        let is_there = std::fs::metadata(&self.path).is_ok_and(|m| (m.dev(), m.ino()) == (here.dev(), here.ino()));
        if !is_there {
            *self = Appended::open(&self.path)?;
        }
        // A partial line is ended here, so that it does not corrupt the next one.
        if self.is_torn {
            self.file.write_all(b"\n")?;
        }
        let written = self.file.write_all(text);
        self.is_torn = written.is_err() && ends_within_line(&self.path, &self.file).unwrap_or(true);
        written
    }
}

/// A call that changes something. Dropping this value writes the audit record.
pub(in crate::http) struct Change {
    log: Arc<AuditLog>,
    begun: Instant,
    /// Fields of the audit record; `None` after the record was written.
    asked: Option<LoggedCall>,
    status: Option<u16>,
}

/// Line that is written on drop, also by a runtime that shuts down before the write task ran.
struct Unwritten {
    log: Arc<AuditLog>,
    text: Vec<u8>,
}

impl Drop for Unwritten {
    fn drop(&mut self) {
        self.log.write(&self.text);
    }
}

impl Change {
    pub(super) fn new(log: Arc<AuditLog>, mut asked: LoggedCall) -> Self {
        asked.path.truncate(asked.path.floor_char_boundary(PATH_BYTES_MAX));
        Change { log, begun: Instant::now(), asked: Some(asked), status: None }
    }

    /// Records the status of the answer, and waits until the line is written.
    pub(in crate::http) async fn ended(mut self, status: u16) {
        self.status = Some(status);
        if let Some(writing) = self.write() {
            // A write failure is already logged and counted.
            let _ = writing.await;
        }
    }

    /// Writes the line on a blocking thread if a runtime is available.
    fn write(&mut self) -> Option<impl Future<Output = Result<()>> + use<>> {
        let (time, ms) = (sterling_telemetry::now(), (self.begun.elapsed().as_secs_f64() * 1e6).round() / 1e3);
        let (asked, status) = (&self.asked.take()?, self.status);
        let LoggedCall { id, key, peer, method, path, call } = asked;
        tracing::info!(target: "sterling::audit", id, key, ?peer, method, path, call, status, ms, "audited call");
        self.log.0.as_ref()?;
        let mut text = serde_json::to_vec(&Line { time, asked, status, ms }).unwrap_or_default();
        text.push(b'\n');
        let unwritten = Unwritten { log: self.log.clone(), text };
        Handle::try_current().ok()?;
        Some(tasks::blocking(move || {
            drop(unwritten);
            Ok(())
        }))
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        drop(self.write());
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use futures_util::FutureExt as _;

    #[test]
    fn an_invalid_file_is_reported_with_its_setting() {
        let folder = tempfile::tempdir().unwrap();
        for (path, reason) in
            [(folder.path().join("none/audit.jsonl"), "No such file"), (folder.path().into(), "Is a directory")]
        {
            let error = AuditLog::open(Some(&path)).err().unwrap().to_string();
            let expected = format!(
                "access.audit_log: got `{}`, expected a file to append to, in a folder that exists: {reason}",
                path.display()
            );
            assert!(error.starts_with(&expected), "{error}");
        }
    }

    #[test]
    fn every_change_is_a_line_also_in_a_file_that_was_moved_and_of_a_caller_that_left() {
        let folder = tempfile::tempdir().unwrap();
        let (path, moved) = (folder.path().join("audit.jsonl"), folder.path().join("audit.jsonl.1"));
        let log = Arc::new(AuditLog::open(Some(&path)).unwrap());
        let change = |id: &str| {
            let (id, key, method) = (id.to_owned(), Some("ops".to_owned()), "POST".to_owned());
            let path = format!("/v1/models/a\"{}", "x".repeat(5000));
            Change::new(log.clone(), LoggedCall { id, key, peer: None, method, path, call: "load" })
        };
        change("1").ended(200).now_or_never().unwrap();
        drop(change("2"));
        std::fs::rename(&path, &moved).unwrap();
        change("3").ended(409).now_or_never().unwrap();
        let lines = |path: &Path| {
            let text = std::fs::read_to_string(path).unwrap();
            let line = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
            text.lines().map(line).collect::<Vec<_>>()
        };
        let (first, second) = (lines(&moved), lines(&path));
        assert_eq!((first.len(), second.len()), (2, 1));
        assert_eq!((&first[0]["id"], &first[0]["status"], &first[0]["key"]), (&"1".into(), &200.into(), &"ops".into()));
        assert!(first[1]["status"].is_null() && first[1]["id"] == "2");
        assert!(second[0]["status"] == 409 && second[0]["path"].as_str().unwrap().len() == PATH_BYTES_MAX);
        assert!(first[0]["time"].as_str().unwrap().ends_with('Z'), "{}", first[0]["time"]);
        assert!(AuditLog::open(Some(folder.path())).is_err());
        // A line that was truncated by a full disk, while the server ran or before it started.
        std::fs::write(&path, "{\"id\": \"torn").unwrap();
        let log = Arc::new(AuditLog::open(Some(&path)).unwrap());
        let write = |id: &str| {
            let asked = LoggedCall {
                id: id.to_owned(),
                key: None,
                peer: None,
                method: "POST".to_owned(),
                path: "/".to_owned(),
                call: "load",
            };
            Change::new(log.clone(), asked).ended(200).now_or_never().unwrap();
        };
        write("4");
        if let Some(log) = &log.0 {
            let mut log = log.lock().unwrap();
            log.file.write_all(b"{\"id\": \"torn too").unwrap();
            log.is_torn = true;
        }
        write("5");
        write("6");
        let text = std::fs::read_to_string(&path).unwrap();
        let ids: Vec<_> = text
            .lines()
            .map(|line| serde_json::from_str(line).ok().map(|l: serde_json::Value| l["id"].clone()))
            .collect();
        assert_eq!(ids, [None, Some("4".into()), None, Some("5".into()), Some("6".into())], "{text}");
    }
}
