//! Sandbox validation in a child process: the same program, started to validate a folder, with resource limits that the operating
//! system enforces.
//!
//! The child writes a line of JSON before each step, and a final line with the result. If the final line is missing, the last
//! written line names the step that failed, and the exit status gives the reason.

use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, Signal, getpid, kill_process, setrlimit};
use serde::{Deserialize, Serialize};

use super::{rows, validate};
use crate::model::{AskedPrecision, DeclaredTable, MODEL_FILE, ModelSpec, read_graph};
use sterling_core::blocking::may_block;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::tasks;
use sterling_embedding::managed::{map_bytes, tensor_name};
use sterling_storage::files::Tensors;

/// Polling interval of the child process.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Signal by which other programs or the out-of-memory killer end the child.
const KILLED: i32 = Signal::KILL.as_raw();
/// Maximum bytes of the child's output that are retained.
const OUTPUT_BYTES_MAX: u64 = 1 << 20;
/// Signal by which the system ends a process that exceeds its CPU time.
const OUT_OF_TIME: i32 = Signal::XCPU.as_raw();
/// Seconds of CPU time after which a process that ignores the signal is killed.
const GRACE_SECONDS: u64 = 5;
const REASON_CHARS: usize = 2_000;

/// Resource limits of a validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Memory limit of the child in bytes, in addition to eight times the size of files that are read completely and to
    /// the maps of managed ids.
    pub memory_bytes: u64,
    /// CPU time.
    pub cpu: Duration,
    /// Wall-clock time.
    pub clock: Duration,
}

impl Bounds {
    /// Returns these limits with another CPU time limit, and at least five times as much wall-clock time.
    pub fn with_cpu(self, cpu: Duration) -> Self {
        Bounds { cpu, clock: self.clock.max(5 * cpu), ..self }
    }

    /// Returns these limits for the package in `folder`: twice the time for int8, which validates graphs in f32, too.
    fn for_package(self, folder: &Path) -> Self {
        let is_int8 = spec_of(folder).is_some_and(|spec| spec.precision == AskedPrecision::Int8);
        let Bounds { cpu, clock, .. } = self;
        if is_int8 { Bounds { cpu: 2 * cpu, clock: 2 * clock, ..self } } else { self }
    }

    /// Returns the memory limit for the package in `folder`, in bytes.
    fn memory_of(&self, folder: &Path) -> u64 {
        self.memory_bytes.saturating_add(package_bytes(folder).unwrap_or(0))
    }
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds { memory_bytes: 2 << 30, cpu: Duration::from_secs(60), clock: Duration::from_secs(300) }
    }
}

/// Validates graphs in child processes of this program.
#[derive(Clone, Debug)]
pub struct ProcessSandbox {
    /// Executable that calls [`answer`] if its first argument is `trial`.
    pub program: PathBuf,
    /// Resource limits.
    pub bounds: Bounds,
}

/// Line of the child's report.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    At(String),
    NotCompared(String),
    Measured(String),
    Refused { kind: String, reason: String },
    Passed,
}

impl ProcessSandbox {
    /// Uses the executable of this process, even if the executable's file has been replaced since this process started.
    ///
    /// # Errors
    /// `Io` if the system does not report the path of the executable.
    pub fn of_this_program() -> Result<Self> {
        let itself = PathBuf::from("/proc/self/exe");
        let program = match itself.exists() {
            true => itself,
            false => std::env::current_exe().map_err(|e| Error::io("the executable of this program", e))?,
        };
        Ok(ProcessSandbox { program, bounds: Bounds::default() })
    }

    pub(super) fn run(&self, folder: &Path) -> Result<()> {
        ProcessSandbox { bounds: self.bounds.for_package(folder), ..self.clone() }.validate(folder)
    }

    fn validate(&self, folder: &Path) -> Result<()> {
        may_block();
        let mut command = Command::new(&self.program);
        command.arg("trial").arg(folder);
        command.args(["--memory-bytes", &self.bounds.memory_bytes.to_string()]);
        command.args(["--cpu-seconds", &self.bounds.cpu.as_secs().max(1).to_string()]);
        // The child ends when its standard input is closed, at the latest when this process ends.
        command.arg("--until-input-ends");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|e| Error::io("the sandbox validation process", e))?;
        let (said, cried) = (read_keeping_start(child.stdout.take())?, read_keeping_start(child.stderr.take())?);
        let ended = self.wait(&mut child)?;
        let text =
            |thread: JoinHandle<Vec<u8>>| String::from_utf8_lossy(&thread.join().unwrap_or_default()).into_owned();
        self.judge(ended, &|| self.bounds.memory_of(folder), &text(said), &text(cried))
    }

    /// Returns the child's exit status; `None` if it had to be killed.
    fn wait(&self, child: &mut Child) -> Result<Option<ExitStatus>> {
        let failed = |e| Error::io("the sandbox validation process", e);
        let started = Instant::now();
        loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                return Ok(Some(status));
            }
            if started.elapsed() > self.bounds.clock {
                child.kill().and_then(|()| child.wait()).map_err(failed)?;
                return Ok(None);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the verdict of a child with this exit status, memory limit in bytes, and output. The limit is computed only for an
    /// error message, because that requires reading the graphs.
    fn judge(&self, ended: Option<ExitStatus>, allowed: &dyn Fn() -> u64, said: &str, cried: &str) -> Result<()> {
        let mut at = "its graphs".to_owned();
        for line in said.lines() {
            match serde_json::from_str(line) {
                Ok(Line::At(place)) => at = place,
                Ok(Line::NotCompared(what)) => tracing::warn!("{what}"),
                Ok(Line::Measured(what)) => tracing::info!("{what}"),
                Ok(Line::Passed) => return Ok(()),
                Ok(Line::Refused { kind, reason }) => {
                    let kinds = [Kind::NotFound, Kind::Io, Kind::Corrupt, Kind::Unsupported];
                    let kind = kinds.into_iter().find(|k| k.name() == kind).unwrap_or(Kind::Invalid);
                    return Err(Error::new(kind, reason));
                }
                Err(_) => {}
            }
        }
        let mut why = self.why(ended, allowed, cried);
        // A panic's message is followed by notes on backtraces, which are skipped.
        let is_note = |line: &str| line.trim().is_empty() || line.starts_with("note: ");
        if let Some(last) = cried.lines().rfind(|line| !is_note(line))
            && failed_allocation(cried).is_none()
        {
            why = format!("{why}; its output: {}", cut(last));
        }
        // A kill by the system does not prove a fault of the graph, which may pass when time and memory are available.
        let is_by_machine = ended.is_none_or(|status| status.signal() == Some(KILLED));
        let kind = if is_by_machine { Kind::Unavailable } else { Kind::Invalid };
        Err(Error::new(kind, format!("{at}: {why}")))
    }

    fn why(&self, ended: Option<ExitStatus>, allowed: &dyn Fn() -> u64, cried: &str) -> String {
        let Bounds { cpu, clock, .. } = self.bounds;
        let Some(status) = ended else {
            return format!("the sandbox validation was not done after {} s of wall-clock time", clock.as_secs());
        };
        let signal = status.signal();
        match (signal, failed_allocation(cried)) {
            (_, Some(more)) => format!(
                "the sandbox validation needs more than {} MB of memory, its limit: {} MB more were requested; --sandbox-memory raises \
                 the limit",
                allowed() >> 20,
                more.div_ceil(1 << 20)
            ),
            (Some(OUT_OF_TIME), None) => format!(
                "the sandbox validation was not done after {} s of CPU time; --sandbox-seconds raises the limit",
                cpu.as_secs()
            ),
            (Some(KILLED), None) => "the sandbox validation was killed, as the system does if memory runs out".into(),
            (Some(signal), None) => format!("the sandbox validation ended by signal {signal}"),
            (None, None) => format!("the sandbox validation ended with code {}", status.code().unwrap_or(-1)),
        }
    }
}

/// Returns the bytes of the allocation that ended the child, as Rust reports it before it aborts.
fn failed_allocation(cried: &str) -> Option<u64> {
    let (_, rest) = cried.split_once("memory allocation of ")?;
    rest.split_once(' ')?.0.parse().ok()
}

/// Reads the child's output to the end, and retains the first [`OUTPUT_BYTES_MAX`] bytes.
fn read_keeping_start(from: Option<impl Read + Send + 'static>) -> Result<JoinHandle<Vec<u8>>> {
    tasks::SANDBOX.start(move || {
        let mut retained = Vec::new();
        if let Some(mut from) = from {
            // A broken pipe is treated like the end of the output.
            let _ = from.by_ref().take(OUTPUT_BYTES_MAX).read_to_end(&mut retained);
            let _ = std::io::copy(&mut from, &mut std::io::sink());
        }
        retained
    })
}

fn cut(text: &str) -> String {
    text.chars().take(REASON_CHARS).collect()
}

/// Kills this process, without a report, as soon as its standard input ends.
///
/// # Errors
/// `Io` if a thread cannot be created.
pub fn end_with_input() -> Result<()> {
    let watch = || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        // Killing this process leaves nothing behind: it has no temporary files.
        let _ = kill_process(getpid(), Signal::KILL);
    };
    tasks::SANDBOX.start(watch).map(drop)
}

/// Runs in the child: limits this process, validates the graphs of `folder` and writes the report to `out`.
///
/// # Errors
/// `Io` if the limits cannot be set, or if `out` is closed.
pub fn answer(folder: &Path, bounds: &Bounds, out: &mut dyn Write) -> Result<()> {
    bound(folder, bounds)?;
    let out = std::cell::RefCell::new(out);
    let say = |line: &Line| {
        let text = serde_json::to_string(line).map_err(|e| Error::internal(e.to_string()))?;
        let mut out = out.borrow_mut();
        writeln!(out, "{text}").and_then(|()| out.flush()).map_err(|e| Error::io("the sandbox validation's report", e))
    };
    let tried = validate::run(folder, &|reported| {
        drop(say(&match reported {
            rows::ValidationProgress::Next(at) => Line::At(cut(&at)),
            rows::ValidationProgress::NotCompared(what) => Line::NotCompared(cut(&what)),
            rows::ValidationProgress::Measured(what) => Line::Measured(cut(&what)),
        }));
    });
    match tried {
        Ok(()) => say(&Line::Passed),
        Err(e) => say(&Line::Refused { kind: e.kind().name().into(), reason: cut(&e.to_string()) }),
    }
}

fn bound(folder: &Path, bounds: &Bounds) -> Result<()> {
    let limits = [
        (Resource::Core, 0, 0),
        (Resource::Cpu, bounds.cpu.as_secs(), GRACE_SECONDS),
        // Limits the memory that the process writes to; mapped tables do not count.
        (Resource::Data, bounds.memory_of(folder), 0),
    ];
    for (resource, limit, grace) in limits {
        let limit = Rlimit { current: Some(limit), maximum: Some(limit.saturating_add(grace)) };
        setrlimit(resource, limit).map_err(|e| Error::io("resource limits of the sandbox validation", e.into()))?;
    }
    Ok(())
}

fn spec_of(folder: &Path) -> Option<ModelSpec> {
    ModelSpec::parse(&std::fs::read_to_string(folder.join(MODEL_FILE)).ok()?).ok()
}

/// Returns the bytes that opening a package may take: eight times the size of the files that are read completely, and the maps of
/// managed ids.
fn package_bytes(folder: &Path) -> Option<u64> {
    let spec = spec_of(folder)?;
    let graphs = [spec.user.map(|u| u.tower), spec.item.tower, spec.overarch.map(|o| o.graph)];
    let graphs = graphs.into_iter().flatten().filter_map(|file| Some(read_graph(folder, &file).ok()?.len() as u64));
    let texts = spec.tables.iter().flat_map(|table| [&table.vocabulary, &table.tokenizer]).flatten();
    let texts = texts.filter_map(|file| Some(std::fs::metadata(folder.join(file)).ok()?.len()));
    let read = graphs.chain(texts).fold(0, u64::saturating_add).saturating_mul(8);
    Some(spec.tables.iter().filter_map(|table| map_bytes_of(folder, table)).fold(read, u64::saturating_add))
}

/// Returns the bytes of the map of a table's managed ids, which is built when the table is opened.
fn map_bytes_of(folder: &Path, table: &DeclaredTable) -> Option<u64> {
    let file = table.managed.then(|| folder.join(&table.file))?;
    // Maps the file, so that the table's rows are not read.
    let tensors = Tensors::open(&file).ok()?;
    let (_, shape) = tensors.info(&tensor_name(&table.name)).ok()?;
    Some(map_bytes(*shape.first()? as u64))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn validations_of_int8_get_twice_the_time() {
        let folder = tempfile::tempdir().unwrap();
        for (precision, seconds) in [("f32", [60, 300]), ("int8", [120, 600]), ("bf16", [60, 300])] {
            let spec = format!("name = \"m\"\ndimension = 4\nprecision = \"{precision}\"\n");
            std::fs::write(folder.path().join(MODEL_FILE), spec).unwrap();
            let Bounds { cpu, clock, .. } = Bounds::default().for_package(folder.path());
            assert_eq!([cpu.as_secs(), clock.as_secs()], seconds, "{precision}");
        }
    }

    #[test]
    fn failures_of_the_machine_are_not_attributed_to_the_graph() {
        let apart = ProcessSandbox { program: "sterling".into(), bounds: Bounds::default() };
        let said = "{\"at\":\"user.onnx: 7 rows\"}\n";
        let judged = |ended: Option<i32>, cried: &str| {
            let error = apart.judge(ended.map(ExitStatus::from_raw), &|| 3 << 30, said, cried).unwrap_err();
            (error.kind(), error.to_string())
        };
        for (ended, cried, kind, expected) in [
            (Some(KILLED), "", Kind::Unavailable, "user.onnx: 7 rows: the sandbox validation was killed"),
            (None, "", Kind::Unavailable, "user.onnx: 7 rows: the sandbox validation was not done after 300 s"),
            (
                Some(OUT_OF_TIME),
                "",
                Kind::Invalid,
                "user.onnx: 7 rows: the sandbox validation was not done after 60 s of CPU time",
            ),
            (
                Some(6),
                "memory allocation of 9000000 bytes failed\nnote: run with `RUST_BACKTRACE=full`",
                Kind::Invalid,
                "the sandbox validation needs more than 3072 MB of memory, its limit: 9 MB more were requested; --sandbox-memory \
                 raises the limit",
            ),
            (
                Some(6),
                "thread 'main' panicked at a.rs:1:2:\nindex out of range\n\nnote: run with `RUST_BACKTRACE=1`\n",
                Kind::Invalid,
                "the sandbox validation ended by signal 6; its output: index out of range",
            ),
            (Some(11), "", Kind::Invalid, "the sandbox validation ended by signal 11"),
            (Some(1 << 8), "", Kind::Invalid, "the sandbox validation ended with code 1"),
        ] {
            let (got, text) = judged(ended, cried);
            assert!(got == kind && text.contains(expected), "{ended:?}: {got:?}: {text}");
            assert!(!text.contains("note:"), "{text}");
        }
    }
}
