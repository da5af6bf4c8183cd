//! `sterling bench`: load on a running server.

mod prepare;
mod told;

use std::path::PathBuf;

use serde::Serialize;
use serde_json::json;

use crate::bench::{self, Arrivals, Contender, Load, Measured, Report, Timing};
use crate::error::{Error, Result};
use crate::limits;
use prepare::Prepared;
use told::Told;

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
pub(super) struct Bench {
    /// The server
    #[arg(default_value = "http://127.0.0.1:8080")]
    url: String,
    /// A key of the server, where it asks for one
    #[arg(long, env = "STERLING_KEY", hide_env_values = true)]
    #[serde(skip)]
    key: Option<String>,
    /// Bodies of requests, one a line, sent in a random order; without it random vectors
    #[arg(long, value_name = "FILE")]
    requests: Option<PathBuf>,
    /// Requests with the times at which they came, a line each, sent at these times again
    #[arg(long, value_name = "FILE", conflicts_with_all = ["requests", "rate", "arrivals", "seconds", "find_peak"])]
    recording: Option<PathBuf>,
    /// How many times as fast as they came
    #[arg(long, default_value_t = 1.0, requires = "recording")]
    speed: f64,
    /// The model; without it the first one that is served
    #[arg(long)]
    model: Option<String>,
    /// What is asked of it
    #[arg(long, default_value = "retrieve", value_parser = ["retrieve", "rank", "embed"])]
    call: String,
    /// Requests a second, whatever becomes of them; where the search for the peak begins
    #[arg(long, default_value_t = 100.0)]
    rate: f64,
    /// How they follow one another
    #[arg(long, value_enum, default_value_t = Arrivals::Poisson)]
    arrivals: Arrivals,
    /// How long requests are sent, 10 seconds; a recording is sent to its end
    #[arg(long)]
    seconds: Option<f64>,
    /// Most connections that ask at a time
    #[arg(long, default_value_t = 4096)]
    connections: usize,
    /// The time-out put into each request that names none; a later answer is none
    #[arg(long, default_value_t = 1000)]
    timeout_ms: u64,
    /// Requests of a second kind, reported apart
    #[arg(long, value_name = "FILE", requires = "beside_rate")]
    beside: Option<PathBuf>,
    /// Of them in a second
    #[arg(long, requires = "beside")]
    beside_rate: Option<f64>,
    /// Further connections that ask nothing
    #[arg(long, default_value_t = 0)]
    idle_connections: usize,
    /// Further connections that ask for 1,000 results and read the answer at 1 KiB a second
    #[arg(long, default_value_t = 0)]
    slow_readers: usize,
    /// Raise the rate until fewer than 99 % are answered in time, or the bound is broken, then halve the gap
    #[arg(long, conflicts_with = "peer")]
    find_peak: bool,
    /// The latency that a quantile of all requests must keep to: what a run shows of it is told in MLPerf's terms
    #[arg(long, value_name = "MS")]
    bound_ms: Option<f64>,
    /// The share of requests that must keep to the bound
    #[arg(long, default_value_t = 0.99, requires = "bound_ms")]
    quantile: f64,
    /// So many of the answers that were timed are asked for again, exactly, after the run: their recall, and whether they kept to their filters
    #[arg(long, default_value_t = 0, value_name = "ANSWERS")]
    check: usize,
    /// What varies from run to run, such as `k=10,100,1000`; several are a grid
    #[arg(long, value_name = "KEY=VALUE,...")]
    sweep: Vec<String>,
    /// A JSON object of filters by name, for `--sweep filter=NAME,...`
    #[arg(long, value_name = "FILE", requires = "sweep")]
    filters: Option<PathBuf>,
    /// A second server, measured in turns with the first one
    #[arg(long, value_name = "URL")]
    peer: Option<String>,
    /// Runs of each server and setting: 3 with a peer, else 1
    #[arg(long)]
    rounds: Option<usize>,
    /// Of arrivals, orders and vectors
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print JSON, a line a run
    #[arg(long)]
    json: bool,
    /// A folder for a report in JSON and its charts in SVG
    #[arg(long, value_name = "FOLDER")]
    report: Option<PathBuf>,
}

impl Bench {
    /// Runs the load and prints what became of it.
    ///
    /// # Errors
    /// Impossible options, a server that does not answer, and a run that is void.
    pub(super) fn run(self) -> Result<()> {
        self.check()?;
        let prepared = self.prepare()?;
        let mut told = Told::new(self.json, self.report.clone(), json!(self))?;
        let mut reports = vec![Vec::new(); prepared.contenders.len()];
        let done = match self.find_peak {
            true => self.find_peaks(&prepared, &mut told, &mut reports),
            false => self.in_turns(&prepared, &mut told, &mut reports),
        };
        // What was measured is written whatever ended it.
        let measured =
            prepared.contenders.iter().zip(&reports).map(|(contender, all)| Measured { contender, reports: all });
        let written = told.finish(&measured.collect::<Vec<_>>(), self.find_peak);
        done.and(written)
    }

    fn check(&self) -> Result<()> {
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
                return Err(Error::invalid(format!("--{name}: got {value}, expected more than 0, at most {most}")));
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

    fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.peer.is_some() { ROUNDS } else { 1 })
    }

    fn measure(&self, prepared: &Prepared, contender: &Contender, load: &Load) -> Result<Report> {
        let report = bench::run(&contender.target, load)?;
        // The peak's answers alone are worth asking for again.
        if self.check == 0 || self.find_peak { Ok(report) } else { self.checked(prepared, contender, report) }
    }

    /// A run whose answers are held against the exact ones.
    fn checked(&self, prepared: &Prepared, contender: &Contender, mut report: Report) -> Result<Report> {
        let answers = std::mem::take(&mut report.kept);
        report.quality = Some(bench::check(&contender.target, &prepared.model, &answers, self.seed)?);
        Ok(report)
    }

    fn find_peaks(&self, prepared: &Prepared, told: &mut Told, reports: &mut [Vec<Report>]) -> Result<()> {
        for (contender, reports) in prepared.contenders.iter().zip(reports) {
            let calls = match contender.load.classes[0].timing {
                Timing::Rate(rate) => rate,
                Timing::Recorded(_) => return Err(Error::invalid("a recording has no rate to raise")),
            };
            let batch = contender.load.classes[0].batch as f64;
            let mut peak = bench::find_peak(calls * batch, |users| {
                let mut load = contender.load.clone();
                load.classes[0].timing = Timing::Rate(users / batch);
                let report = self.measure(prepared, contender, &load)?;
                told.run(contender, &report, json!({"tried_rate": users}))?;
                reports.extend(report.void.is_none().then(|| Report { kept: Vec::new(), ..report.clone() }));
                Ok(report)
            })?;
            if self.check > 0 {
                peak.report = peak.report.map(|report| self.checked(prepared, contender, report)).transpose()?;
            }
            told.peak(contender, &peak)?;
        }
        Ok(())
    }

    fn in_turns(&self, prepared: &Prepared, told: &mut Told, reports: &mut [Vec<Report>]) -> Result<()> {
        let Prepared { contenders, servers, .. } = prepared;
        if let ([only], 1) = (&contenders[..], self.rounds()) {
            let report = self.measure(prepared, only, &only.load)?;
            told.run(only, &report, json!({}))?;
            let void = report.void.as_ref().map(|reason| Error::unavailable(format!("the run is void: {reason}")));
            reports[0].push(report);
            return void.map_or(Ok(()), Err);
        }
        let found = bench::in_turns(contenders, self.rounds(), |round, contender, load| {
            let report = self.measure(prepared, contender, load)?;
            told.run(contender, &report, json!({"round": round}))?;
            Ok(report)
        })?;
        reports.clone_from_slice(&found);
        for number in 0..contenders.len() {
            // With a peer each setting against that of the peer, else each against the first one.
            let (measured, baseline) = if *servers == 2 { (number, number + 1) } else { (number, 0) };
            if measured == baseline || number % servers != 0 {
                continue;
            }
            for comparison in bench::compare(&found[measured], &found[baseline], self.seed) {
                told.comparison(&contenders[measured].name, &contenders[baseline].name, &comparison)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Bench,
    }

    #[test]
    fn options_that_cannot_work_are_refused_with_the_reason() {
        for (rest, reason) in [
            (&["--rate", "0"][..], "--rate: got 0"),
            (&["--rate", "NaN"], "--rate: got NaN"),
            (&["--seconds", "inf"], "--seconds: got inf"),
            (&["--connections", "0"], "--connections: got 0"),
            (&["--timeout-ms", "600001"], "--timeout-ms: got 600001"),
            (&["--beside", "x"], "--beside-rate"),
            (&["--beside", "x", "--beside-rate=-1"], "--beside-rate: got -1"),
            (&["--find-peak", "--peer", "http://127.0.0.1:1"], "cannot be used with"),
            (&["--rounds", "2"], "--peer"),
            (&["--rounds", "0", "--peer", "http://127.0.0.1:1"], "--rounds: got 0"),
            (&["--rounds", "2", "--sweep", "k=1", "--find-peak"], "--rounds: needs --peer or --sweep"),
            (&["--speed", "2"], "--recording"),
            (&["--recording", "x", "--speed", "0"], "--speed: got 0"),
            (&["--recording", "x", "--rate", "10"], "cannot be used with"),
            (&["--recording", "x", "--find-peak"], "cannot be used with"),
            (&["--bound-ms", "0"], "--bound-ms: got 0"),
            (&["--quantile", "0.9"], "--bound-ms"),
            (&["--bound-ms", "5", "--quantile", "1"], "--quantile: got 1"),
            (&["--check", "10001"], "--check: got 10001"),
            (&["--check", "1", "--call", "rank"], "--check: got --call rank"),
            (&["--filters", "x"], "--sweep"),
            (&["--sweep", "filter=x"], "needs --filters"),
            (&["--sweep", "batch=2", "--call", "rank"], "--sweep of batch or filter: got --call rank"),
            (&["--sweep", "rate=2,4", "--find-peak"], "--sweep of rate"),
            (&["--sweep", "k"], "sweep `k`: expected KEY=VALUE"),
            (&["--call", "delete"], "delete"),
            (&["--slow-readers", "1", "--call", "embed"], "--slow-readers: got --call embed"),
            (&["nowhere"], "url `nowhere`"),
        ] {
            let line = Line::try_parse_from([&["bench"][..], rest].concat());
            let error = line.map_err(|e| e.to_string()).and_then(|l| l.arguments.run().map_err(|e| e.to_string()));
            assert!(error.as_ref().is_err_and(|e| e.contains(reason)), "{rest:?}: {error:?}");
        }
    }
}
