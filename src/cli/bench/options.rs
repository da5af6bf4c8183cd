//! Options of `sterling bench`, and their validation.

use std::path::PathBuf;

use serde::Serialize;

use sterling_bench::Arrivals;
use sterling_core::error::{Error, Result, ShortNumber};
use sterling_core::limits;

/// Maximum requests per second: a thread that should send more would fall behind.
const RATE_MAX: f64 = 1e6;
/// Maximum duration of a run in seconds.
const SECONDS_MAX: f64 = 86_400.0;
/// Number of rounds of interleaved servers.
const ROUNDS: usize = 3;
/// Maximum number of answers to check.
const CHECK_MAX: u64 = 10_000;

/// Arguments of `sterling bench`.
#[derive(Clone, Debug, clap::Args, Serialize)]
pub(crate) struct Bench {
    /// Address of the server
    #[arg(default_value = "http://127.0.0.1:8080")]
    pub(super) url: String,
    /// Access key of the server
    #[arg(long, env = "STERLING_KEY", hide_env_values = true)]
    #[serde(skip)]
    pub(super) key: Option<String>,
    /// Request bodies, one per line, sent in random order; default: random vectors
    #[arg(long, value_name = "FILE")]
    pub(super) requests: Option<PathBuf>,
    /// Recorded requests with their times, one per line, replayed at these times
    #[arg(long, value_name = "FILE", conflicts_with_all = ["requests", "rate", "arrivals", "seconds", "find_peak"])]
    pub(super) recording: Option<PathBuf>,
    /// Speed of the replay relative to the recording
    #[arg(long, default_value_t = 1.0, requires = "recording")]
    pub(super) speed: f64,
    /// Model; default: the first one
    #[arg(long)]
    pub(super) model: Option<String>,
    /// Measured call
    #[arg(long, default_value = "retrieve", value_parser = ["retrieve", "rank", "embed"])]
    pub(super) call: String,
    /// Requests per second (open loop); start rate of --find-peak
    #[arg(long, default_value_t = 100.0)]
    pub(super) rate: f64,
    /// Distribution of arrival times
    #[arg(long, value_enum, default_value_t = Arrivals::Poisson)]
    pub(super) arrivals: Arrivals,
    /// Duration in seconds; default: 10, or the complete recording
    #[arg(long)]
    pub(super) seconds: Option<f64>,
    /// Maximum number of concurrent connections
    #[arg(long, default_value_t = 4096)]
    pub(super) connections: usize,
    /// Timeout of requests that set none; later answers do not count as goodput
    #[arg(long, default_value_t = 1000)]
    pub(super) timeout_ms: u64,
    /// Second class of requests, reported separately
    #[arg(long, value_name = "FILE", requires = "beside_rate")]
    pub(super) beside: Option<PathBuf>,
    /// Requests per second of the second class
    #[arg(long, requires = "beside")]
    pub(super) beside_rate: Option<f64>,
    /// Additional connections without requests
    #[arg(long, default_value_t = 0)]
    pub(super) idle_connections: usize,
    /// Additional connections that request 1,000 results and read them at 1 KiB per second
    #[arg(long, default_value_t = 0)]
    pub(super) slow_readers: usize,
    /// Increase the rate until fewer than 99 % are answered in time, or the bound is violated, then bisect
    #[arg(long, conflicts_with = "peer")]
    pub(super) find_peak: bool,
    /// Latency bound for a quantile of the requests, reported in MLPerf's terms
    #[arg(long, value_name = "MS")]
    pub(super) bound_ms: Option<f64>,
    /// Share of the requests that must meet the bound
    #[arg(long, default_value_t = 0.99, requires = "bound_ms")]
    pub(super) quantile: f64,
    /// Number of timed answers that are compared with exact answers after the run: recall, and items that fail their
    /// filter
    #[arg(long, default_value_t = 0, value_name = "ANSWERS")]
    pub(super) check: usize,
    /// Swept key, such as `k=10,100,1000`; several form a grid
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub(super) sweep: Vec<String>,
    /// JSON object of filters by name, for `--sweep filter=NAME,...`
    #[arg(long, value_name = "FILE", requires = "sweep")]
    pub(super) filters: Option<PathBuf>,
    /// Second server, interleaved with the first one
    #[arg(long, value_name = "URL")]
    pub(super) peer: Option<String>,
    /// Runs per server and setting; default: 3 with a peer, else 1
    #[arg(long)]
    pub(super) rounds: Option<usize>,
    /// Seed of arrivals, orders and vectors
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u64,
    /// Print JSON, one line per run
    #[arg(long)]
    pub(super) json: bool,
    /// Folder for a JSON report and SVG charts
    #[arg(long, value_name = "FOLDER")]
    pub(super) report: Option<PathBuf>,
}

impl Bench {
    /// # Errors
    /// `Invalid` with an option that is invalid alone or in combination with another one.
    pub(super) fn check_options(&self) -> Result<()> {
        let several = [
            Some(("rate", self.rate, RATE_MAX)),
            Some(("speed", self.speed, 1000.0)),
            self.seconds.map(|seconds| ("seconds", seconds, SECONDS_MAX)),
            self.beside_rate.map(|rate| ("beside-rate", rate, RATE_MAX)),
            self.bound_ms.map(|ms| ("bound-ms", ms, limits::TIMEOUT_MS_MAX as f64)),
        ];
        for (name, value, most) in several.into_iter().flatten() {
            // Written so that NaN is rejected too.
            if !(value > 0.0 && value <= most) {
                return Err(Error::invalid(format!(
                    "--{name}: got {}, expected more than 0, at most {most}",
                    ShortNumber(value)
                )));
            }
        }
        if !(0.5..=0.9999).contains(&self.quantile) {
            return Err(Error::invalid(format!("--quantile: got {}, expected 0.5 to 0.9999", self.quantile)));
        }
        for (name, is_asked) in [("slow-readers", self.slow_readers > 0), ("check", self.check > 0)] {
            if is_asked && self.call != "retrieve" {
                return Err(Error::invalid(format!("--{name}: got --call {}, expected retrieve", self.call)));
            }
        }
        let sweeps = |key: &str| self.sweep.iter().any(|sweep| sweep.starts_with(&format!("{key}=")));
        if self.call != "retrieve" && (sweeps("batch") || sweeps("filter")) {
            return Err(Error::invalid(format!(
                "--sweep of batch or filter: got --call {}, expected retrieve",
                self.call
            )));
        }
        if self.find_peak && sweeps("rate") {
            return Err(Error::invalid("--sweep of rate: cannot be used with --find-peak, which varies the rate"));
        }
        if self.rounds.is_some() && (self.find_peak || (self.peer.is_none() && self.sweep.is_empty())) {
            return Err(Error::invalid("--rounds: needs --peer or --sweep, without --find-peak"));
        }
        let complete = [
            ("connections", self.connections as u64, 1, 1 << 20),
            ("timeout-ms", self.timeout_ms, 1, limits::TIMEOUT_MS_MAX),
            ("rounds", self.rounds() as u64, 1, 1000),
            ("check", self.check as u64, 0, CHECK_MAX),
        ];
        for (name, value, least, most) in complete {
            if value < least || value > most {
                return Err(Error::invalid(format!("--{name}: got {value}, expected {least} to {most}")));
            }
        }
        Ok(())
    }

    /// Returns the number of runs per server and setting.
    pub(super) fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.peer.is_some() { ROUNDS } else { 1 })
    }
}
