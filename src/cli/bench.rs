//! `sterling bench`: load on a running server.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use super::output::say;
use crate::bench::{self, Arrivals, Body, Class, ClassReport, Load, Report, Target};
use crate::error::{Error, Result};
use crate::limits;

/// Random vectors that are sent in turn where no requests are given.
const VECTORS: usize = 1000;
/// Most requests a second: a thread that sends more than this falls behind.
const RATE_MAX: f64 = 1e6;
/// Longest run.
const SECONDS_MAX: f64 = 86_400.0;

/// Arguments of `sterling bench`.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Bench {
    /// The server
    #[arg(default_value = "http://127.0.0.1:8080")]
    url: String,
    /// A key of the server, where it asks for one
    #[arg(long, env = "STERLING_KEY", hide_env_values = true)]
    key: Option<String>,
    /// Bodies of requests, one a line, sent in a random order; without it random vectors
    #[arg(long, value_name = "FILE")]
    requests: Option<PathBuf>,
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
    /// How long requests are sent
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
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
    /// Raise the rate until fewer than 99 % are answered in time, then halve the gap
    #[arg(long, conflicts_with = "peer")]
    find_peak: bool,
    /// A second server, measured in turns with the first one
    #[arg(long, value_name = "URL")]
    peer: Option<String>,
    /// Runs of each server
    #[arg(long, default_value_t = 3, requires = "peer")]
    rounds: usize,
    /// Of arrivals, orders and vectors
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print JSON, a line a run
    #[arg(long)]
    json: bool,
}

impl Bench {
    /// Runs the load and prints what became of it.
    ///
    /// # Errors
    /// Impossible options, a server that does not answer, and a run that is void.
    pub(super) fn run(self) -> Result<()> {
        self.check()?;
        let target = Target::parse(&self.url)?.with_key(self.key.clone());
        let load = self.load(&target)?;
        if self.find_peak {
            return self.find_peak(&target, &load);
        }
        let Some(peer) = &self.peer else { return self.measure(&target, &load, json!({})).map(drop) };
        self.in_turns(&target, &Target::parse(peer)?.with_key(self.key.clone()), &load)
    }

    fn check(&self) -> Result<()> {
        let several = [("rate", self.rate, RATE_MAX), ("seconds", self.seconds, SECONDS_MAX)];
        for (name, value, most) in several.into_iter().chain(self.beside_rate.map(|r| ("beside-rate", r, RATE_MAX))) {
            // Not a number is no positive number either.
            if !(value > 0.0 && value <= most) {
                return Err(Error::invalid(format!("--{name}: got {value}, expected more than 0, at most {most}")));
            }
        }
        if self.slow_readers > 0 && self.call != "retrieve" {
            return Err(Error::invalid(format!("--slow-readers: got --call {}, expected retrieve", self.call)));
        }
        let whole = [
            ("connections", self.connections as u64, 1 << 20),
            ("timeout-ms", self.timeout_ms, limits::TIMEOUT_MS_MAX),
            ("rounds", self.rounds as u64, 1000),
        ];
        for (name, value, most) in whole {
            if value == 0 || value > most {
                return Err(Error::invalid(format!("--{name}: got {value}, expected 1 to {most}")));
            }
        }
        Ok(())
    }

    fn load(&self, target: &Target) -> Result<Load> {
        let timeout = Duration::from_millis(self.timeout_ms);
        let models = bench::get(target, "/v1/models")?;
        let model = self.model(&models)?;
        let name = model["name"].as_str().unwrap_or_default();
        let class = |name: &str, path: &str, bodies: Vec<Body>, rate| Class {
            name: name.to_owned(),
            path: path.to_owned(),
            bodies,
            rate,
        };
        let path = format!("/v1/models/{name}:{}", self.call);
        let main = match &self.requests {
            Some(file) => bench::read_bodies(file, timeout)?,
            None if self.call == "retrieve" => {
                let dimension = model["dimension"].as_u64().unwrap_or_default() as usize;
                bench::random_vectors(dimension, VECTORS, self.seed, timeout)
            }
            None => return Err(Error::invalid(format!("--call {}: needs --requests", self.call))),
        };
        let mut classes = vec![class("main", &path, main, self.rate)];
        if let Some((file, rate)) = self.beside.as_ref().zip(self.beside_rate) {
            classes.push(class("beside", &path, bench::read_bodies(file, timeout)?, rate));
        }
        Ok(Load {
            classes,
            seconds: self.seconds,
            arrivals: self.arrivals,
            connections: self.connections,
            idle_connections: self.idle_connections,
            slow_readers: self.slow_readers,
            seed: self.seed,
        })
    }

    /// The model that is asked, as the server describes it.
    fn model<'a>(&self, models: &'a Value) -> Result<&'a Value> {
        let all = models["models"].as_array().map(Vec::as_slice).unwrap_or_default();
        let names: Vec<&str> = all.iter().filter_map(|model| model["name"].as_str()).collect();
        let found = match &self.model {
            Some(wanted) => all.iter().find(|model| model["name"] == wanted.as_str()),
            None => all.first(),
        };
        found.ok_or_else(|| {
            let wanted = self.model.as_deref().unwrap_or("of any name");
            Error::not_found(format!("a model {wanted}: {} serves {names:?}", self.url))
        })
    }

    /// One run, printed with `more` fields; a void one is an error.
    fn measure(&self, target: &Target, load: &Load, more: Value) -> Result<Report> {
        let report = self.measure_and_say(target, load, more)?;
        match &report.void {
            Some(reason) => Err(Error::unavailable(format!("the run is void: {reason}"))),
            None => Ok(report),
        }
    }

    fn measure_and_say(&self, target: &Target, load: &Load, more: Value) -> Result<Report> {
        let report = bench::run(target, load)?;
        if self.json {
            let mut line = json!(report);
            if let (Some(fields), Value::Object(more)) = (line.as_object_mut(), more) {
                fields.extend(more);
            }
            say(line)?;
        } else {
            say(format_args!("{}\n{report}\n", report.url))?;
        }
        Ok(report)
    }

    fn find_peak(&self, target: &Target, load: &Load) -> Result<()> {
        let peak = bench::find_peak(self.rate, |rate| {
            let mut load = load.clone();
            load.classes[0].rate = rate;
            self.measure_and_say(target, &load, json!({"tried_rate": rate}))
        })?;
        match self.json {
            true => say(json!({"peak": peak})),
            false => say(format_args!(
                "peak: follows {:.1} requests a second; most answered in time {:.1}/s",
                peak.rate, peak.goodput
            )),
        }
    }

    fn in_turns(&self, target: &Target, peer: &Target, load: &Load) -> Result<()> {
        let (mut own, mut others) = (Vec::new(), Vec::new());
        for round in 1..=self.rounds {
            // The same requests for both, others in each round.
            let load = Load { seed: self.seed.wrapping_add(round as u64), ..load.clone() };
            own.push(self.measure(target, &load, json!({"round": round}))?);
            others.push(self.measure(peer, &load, json!({"round": round}))?);
        }
        for number in 0..load.classes.len() {
            let class = &load.classes[number].name;
            for (name, figure) in FIGURES {
                let of = |reports: &[Report]| {
                    bench::median(reports.iter().filter_map(|report| figure(&report.classes[number])))
                };
                let Some((own, other)) = of(&own).zip(of(&others)) else { continue };
                let ratio = own / other;
                match self.json {
                    true => say(json!({"class": class, "median_of": name, "own": own, "peer": other, "ratio": ratio}))?,
                    false => {
                        say(format_args!("{class:8} {name:18} {own:>10.3}  peer {other:>10.3}  ratio {ratio:.3}"))?
                    }
                }
            }
        }
        Ok(())
    }
}

/// A figure of a report, nothing where no request gave it.
type Figure = fn(&ClassReport) -> Option<f64>;

/// What two servers are compared by.
const FIGURES: [(&str, Figure); 4] = [
    ("goodput", |class| Some(class.goodput)),
    ("answered p50 ms", |class| class.answered_ms.as_ref().map(|l| l.p50)),
    ("answered p99 ms", |class| class.answered_ms.as_ref().map(|l| l.p99)),
    ("refused p50 ms", |class| class.refused_ms.as_ref().map(|l| l.p50)),
];

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
