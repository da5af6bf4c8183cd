//! The options of `sterling bench`, and which of them cannot be.

use std::path::PathBuf;

use serde::Serialize;

use sterling_bench::Arrivals;
use sterling_core::error::{Error, Result, ShortNumber};
use sterling_core::limits;

/// Most requests a second: a thread that sends more than this falls behind.
const RATE_MAX: f64 = 1e6;
/// Longest run.
const SECONDS_MAX: f64 = 86_400.0;
/// Rounds of servers that are measured in turns.
const ROUNDS: usize = 3;
/// Most answers that are asked for again.
const CHECK_MAX: u64 = 10_000;

/// Arguments of `sterling bench`.
#[derive(Clone, Debug, clap::Args, Serialize)]
pub(crate) struct Bench {
    /// The server
    #[arg(default_value = "http://127.0.0.1:8080")]
    pub(super) url: String,
    /// A key of the server, where it asks for one
    #[arg(long, env = "STERLING_KEY", hide_env_values = true)]
    #[serde(skip)]
    pub(super) key: Option<String>,
    /// Bodies of requests, one a line, sent in a random order; without it random vectors
    #[arg(long, value_name = "FILE")]
    pub(super) requests: Option<PathBuf>,
    /// Requests with the times at which they came, a line each, sent at these times again
    #[arg(long, value_name = "FILE", conflicts_with_all = ["requests", "rate", "arrivals", "seconds", "find_peak"])]
    pub(super) recording: Option<PathBuf>,
    /// How many times as fast as they came
    #[arg(long, default_value_t = 1.0, requires = "recording")]
    pub(super) speed: f64,
    /// The model; without it the first one that is served
    #[arg(long)]
    pub(super) model: Option<String>,
    /// What is asked of it
    #[arg(long, default_value = "retrieve", value_parser = ["retrieve", "rank", "embed"])]
    pub(super) call: String,
    /// Requests a second, whatever becomes of them; where the search for the peak begins
    #[arg(long, default_value_t = 100.0)]
    pub(super) rate: f64,
    /// How they follow one another
    #[arg(long, value_enum, default_value_t = Arrivals::Poisson)]
    pub(super) arrivals: Arrivals,
    /// How long requests are sent, 10 seconds; a recording is sent to its end
    #[arg(long)]
    pub(super) seconds: Option<f64>,
    /// Most connections that ask at a time
    #[arg(long, default_value_t = 4096)]
    pub(super) connections: usize,
    /// The time-out put into each request that names none; a later answer is none
    #[arg(long, default_value_t = 1000)]
    pub(super) timeout_ms: u64,
    /// Requests of a second kind, reported apart
    #[arg(long, value_name = "FILE", requires = "beside_rate")]
    pub(super) beside: Option<PathBuf>,
    /// Of them in a second
    #[arg(long, requires = "beside")]
    pub(super) beside_rate: Option<f64>,
    /// Further connections that ask nothing
    #[arg(long, default_value_t = 0)]
    pub(super) idle_connections: usize,
    /// Further connections that ask for 1,000 results and read the answer at 1 KiB a second
    #[arg(long, default_value_t = 0)]
    pub(super) slow_readers: usize,
    /// Raise the rate until fewer than 99 % are answered in time, or the bound is broken, then halve the gap
    #[arg(long, conflicts_with = "peer")]
    pub(super) find_peak: bool,
    /// The latency that a quantile of all requests must keep to: what a run shows of it is told in MLPerf's terms
    #[arg(long, value_name = "MS")]
    pub(super) bound_ms: Option<f64>,
    /// The share of requests that must keep to the bound
    #[arg(long, default_value_t = 0.99, requires = "bound_ms")]
    pub(super) quantile: f64,
    /// So many of the answers that were timed are asked for again, exactly, after the run: their recall, and whether they kept to their filters
    #[arg(long, default_value_t = 0, value_name = "ANSWERS")]
    pub(super) check: usize,
    /// What varies from run to run, such as `k=10,100,1000`; several are a grid
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub(super) sweep: Vec<String>,
    /// A JSON object of filters by name, for `--sweep filter=NAME,...`
    #[arg(long, value_name = "FILE", requires = "sweep")]
    pub(super) filters: Option<PathBuf>,
    /// A second server, measured in turns with the first one
    #[arg(long, value_name = "URL")]
    pub(super) peer: Option<String>,
    /// Runs of each server and setting: 3 with a peer, else 1
    #[arg(long)]
    pub(super) rounds: Option<usize>,
    /// Of arrivals, orders and vectors
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u64,
    /// Print JSON, a line a run
    #[arg(long)]
    pub(super) json: bool,
    /// A folder for a report in JSON and its charts in SVG
    #[arg(long, value_name = "FOLDER")]
    pub(super) report: Option<PathBuf>,
}

impl Bench {
    /// # Errors
    /// Options that cannot work, alone or together.
    pub(super) fn check_options(&self) -> Result<()> {
        let several = [
            Some(("rate", self.rate, RATE_MAX)),
            Some(("speed", self.speed, 1000.0)),
            self.seconds.map(|seconds| ("seconds", seconds, SECONDS_MAX)),
            self.beside_rate.map(|rate| ("beside-rate", rate, RATE_MAX)),
            self.bound_ms.map(|ms| ("bound-ms", ms, limits::TIMEOUT_MS_MAX as f64)),
        ];
        for (name, value, most) in several.into_iter().flatten() {
            // Not a number is no positive number either.
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
            return Err(Error::invalid("--sweep of rate: cannot be used with --find-peak, which varies it"));
        }
        if self.rounds.is_some() && (self.find_peak || (self.peer.is_none() && self.sweep.is_empty())) {
            return Err(Error::invalid("--rounds: needs --peer or --sweep, without --find-peak"));
        }
        let whole = [
            ("connections", self.connections as u64, 1, 1 << 20),
            ("timeout-ms", self.timeout_ms, 1, limits::TIMEOUT_MS_MAX),
            ("rounds", self.rounds() as u64, 1, 1000),
            ("check", self.check as u64, 0, CHECK_MAX),
        ];
        for (name, value, least, most) in whole {
            if value < least || value > most {
                return Err(Error::invalid(format!("--{name}: got {value}, expected {least} to {most}")));
            }
        }
        Ok(())
    }

    /// Runs of each server and setting.
    pub(super) fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.peer.is_some() { ROUNDS } else { 1 })
    }
}
