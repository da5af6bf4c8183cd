//! Prepares a measurement from its options: the load, and a contender for each server and setting.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use super::options::Bench;
use sterling_bench::{Body, Bound, Class, Contender, Load, SendTimes, Setting, Sweep, Target};
use sterling_core::error::{Error, Result};

/// Number of random vectors that are sent in rotation if no requests are given.
const VECTORS: usize = 1000;
/// Maximum number of runs of a measurement: the latencies of every run, some 100 kB, are retained to the end.
const RUNS_MAX: usize = 2000;
/// Default duration of a run at a given rate, in seconds.
const SECONDS: f64 = 10.0;

/// Prepared measurement.
pub(super) struct Prepared {
    /// Name of the tested model.
    pub(super) model: String,
    /// Server, and its peer if there is one, for each setting.
    pub(super) contenders: Vec<Contender>,
    /// Number of contenders per setting: 1, or 2 with a peer.
    pub(super) servers: usize,
}

impl Bench {
    /// # Errors
    /// Unreadable files, invalid settings, and a server that does not respond or lacks the model.
    pub(super) fn prepare(&self) -> Result<Prepared> {
        let sweeps = self.sweep.iter().map(|text| Sweep::parse(text)).collect::<Result<Vec<Sweep>>>()?;
        let settings = sterling_bench::grid(&sweeps)?;
        let filters = self.filters.as_deref().map(sterling_bench::read_filters).transpose()?.unwrap_or_default();
        if sweeps.iter().any(|sweep| sweep.key() == "filter") && filters.is_empty() {
            return Err(Error::invalid("--sweep filter: needs --filters FILE with the filters by name"));
        }
        let target = |url: &str| Ok::<_, Error>(Target::parse(url)?.with_key(self.key.clone()));
        let mut targets = vec![target(&self.url)?];
        targets.extend(self.peer.as_deref().map(target).transpose()?);
        let models = sterling_bench::get(&targets[0], "/v1/models")?;
        let model = self.model(&models)?;
        let load = self.load(model)?;
        if self.recording.is_none() && self.requests.is_none() {
            let class = &load.classes[0];
            for target in &targets {
                sterling_bench::accepts(target, &class.path, &class.bodies[0])
                    .map_err(|e| e.within("the model takes no random vectors, expected --requests FILE"))?;
            }
        }
        let mut contenders = Vec::new();
        for setting in &settings {
            for target in &targets {
                contenders.push(self.contender(target, setting, &load, &filters)?);
            }
        }
        let runs = contenders.len() * self.rounds();
        if runs > RUNS_MAX {
            return Err(Error::invalid(format!("sweeps and rounds: got {runs} runs, expected at most {RUNS_MAX}")));
        }
        self.check_length(&contenders)?;
        let model = model["name"].as_str().unwrap_or_default().to_owned();
        Ok(Prepared { model, contenders, servers: targets.len() })
    }

    fn contender(
        &self,
        target: &Target,
        setting: &Setting,
        load: &Load,
        filters: &BTreeMap<String, String>,
    ) -> Result<Contender> {
        let filter = setting.value("filter").and_then(Value::as_str).and_then(|name| filters.get(name));
        let load_of_setting = setting.of(load, filters)?;
        let Class { path, bodies, .. } = &load.classes[0];
        let selectivity = match filter.zip(bodies.first()) {
            Some((filter, first)) => sterling_bench::selectivity(target, path, first, filter)?,
            None => None,
        };
        let name = format!("{} {setting}", target.url()).trim_end().to_owned();
        Ok(Contender { name, target: target.clone(), setting: setting.clone(), selectivity, load: load_of_setting })
    }

    fn load(&self, model: &Value) -> Result<Load> {
        let timeout = Duration::from_millis(self.timeout_ms);
        let path = format!("/v1/models/{}:{}", model["name"].as_str().unwrap_or_default(), self.call);
        let class = |name: &str, bodies: Vec<Body>, timing: SendTimes| Class {
            name: name.to_owned(),
            path: path.clone(),
            bodies,
            timing,
            batch: 1,
        };
        let rate = SendTimes::Rate(self.rate);
        let (bodies, timing) = match (&self.recording, &self.requests) {
            (Some(file), _) => sterling_bench::read_recording(file, self.speed, timeout)?,
            (None, Some(file)) => (sterling_bench::read_bodies(file, timeout)?, rate),
            (None, None) if self.call == "retrieve" => {
                let dimension = model["dimension"].as_u64().unwrap_or_default() as usize;
                (sterling_bench::random_vectors(dimension, VECTORS, self.seed, timeout), rate)
            }
            (None, None) => return Err(Error::invalid(format!("--call {}: needs --requests", self.call))),
        };
        let seconds = timing.seconds().or(self.seconds).unwrap_or(SECONDS);
        let mut classes = vec![class("main", bodies, timing)];
        if let Some((file, rate)) = self.beside.as_ref().zip(self.beside_rate) {
            classes.push(class("beside", sterling_bench::read_bodies(file, timeout)?, SendTimes::Rate(rate)));
        }
        Ok(Load {
            classes,
            seconds,
            arrivals: self.arrivals,
            connections: self.connections,
            idle_connections: self.idle_connections,
            slow_readers: self.slow_readers,
            bound: self.bound_ms.map(|latency_ms| Bound { latency_ms, quantile: self.quantile }),
            kept: self.check,
            seed: self.seed,
        })
    }

    /// Returns the server's description of the tested model.
    fn model<'a>(&self, models: &'a Value) -> Result<&'a Value> {
        let all = models["models"].as_array().map(Vec::as_slice).unwrap_or_default();
        let names: Vec<&str> = all.iter().filter_map(|model| model["name"].as_str()).collect();
        let found = match &self.model {
            Some(wanted) => all.iter().find(|model| model["name"] == wanted.as_str()),
            None => all.first(),
        };
        found.ok_or_else(|| {
            let wanted = self.model.as_deref().unwrap_or("of any name");
            Error::not_found(format!("model {wanted} was not found, {} serves {names:?}", self.url))
        })
    }

    /// Checks that runs at the start rate of a peak search are long enough to estimate the quantile that the latency bound refers
    /// to.
    fn check_length(&self, contenders: &[Contender]) -> Result<()> {
        for Contender { name, load, .. } in contenders.iter().filter(|_| self.find_peak) {
            let Some((bound, SendTimes::Rate(rate))) = load.bound.zip(Some(&load.classes[0].timing)) else { continue };
            let (queries, least) = (rate * load.seconds, bound.queries_min());
            if queries < least as f64 {
                return Err(Error::invalid(format!(
                    "{name}: {rate} calls per second for {} s are {queries:.0}, expected at least {least} to measure a \
                     quantile of {}: more --seconds or a higher --rate",
                    load.seconds, bound.quantile
                )));
            }
        }
        Ok(())
    }
}
