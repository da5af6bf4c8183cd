//! Sweeps: values that vary between the measured loads, such as request fields, users per call, and rate.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde_json::{Map, Value};

use super::load::Load;
use super::requests::Body;
use super::schedule::SendTimes;
use sterling_core::error::{Error, Result};

/// Keys that may vary: fields of a retrieval; `batch`, users per call; `rate`, users per second.
const KEYS: [&str; 10] =
    ["k", "candidates", "recall", "probes", "exact", "filter", "priority", "timeout_ms", "batch", "rate"];
/// Maximum number of measured settings.
const SETTINGS_MAX: usize = 1000;
/// Maximum users per call, the limit of the API.
const BATCH_MAX: u64 = 1024;

/// A varying key and the key's values.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    key: String,
    values: Vec<Value>,
}

impl Sweep {
    /// Parses a sweep such as `k=10,100,1000`. Values that parse as JSON are JSON, all others are texts.
    ///
    /// # Errors
    /// Text that is not `KEY=VALUE,...`, an unknown key, or an invalid value of the key.
    pub fn parse(text: &str) -> Result<Self> {
        let invalid = |expected: &str| Error::invalid(format!("sweep `{text}`: expected {expected}"));
        let (key, values) = text.split_once('=').ok_or_else(|| invalid("KEY=VALUE,VALUE,..."))?;
        if !KEYS.contains(&key) {
            return Err(invalid(&format!("one of the keys {}", KEYS.join(", "))));
        }
        let value = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()));
        // Names of filters are always texts, even if they parse as JSON.
        let value = |part: &str| if key == "filter" { Value::String(part.to_owned()) } else { value(part) };
        let values: Vec<Value> = values.split(',').map(|part| value(part.trim())).collect();
        let fits = |value: &Value| match key {
            "batch" => value.as_u64().is_some_and(|users| (1..=BATCH_MAX).contains(&users)),
            "rate" => value.as_f64().is_some_and(|rate| rate > 0.0 && rate <= 1e6),
            "filter" | "priority" => value.as_str().is_some_and(|text| !text.is_empty()),
            "exact" => value.is_boolean(),
            "recall" => value.is_f64(),
            _ => value.is_u64(),
        };
        match values.iter().find(|value| !fits(value)) {
            Some(value) => Err(invalid(&format!("values of the type of `{key}`, got {value}"))),
            None => Ok(Sweep { key: key.to_owned(), values }),
        }
    }

    /// Returns the key that varies.
    pub fn key(&self) -> &str {
        &self.key
    }
}

/// Reads filters by name from a JSON object.
///
/// # Errors
/// A file that cannot be read, or is not a JSON object of texts.
pub fn read_filters(path: &Path) -> Result<BTreeMap<String, String>> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(path.display(), e))?;
    serde_json::from_str(&text)
        .map_err(|e| Error::invalid(format!("{}: {e}, expected an object of filters by name", path.display())))
}

/// A value for each varying key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Setting {
    values: Vec<(String, Value)>,
}

/// Returns every combination of the sweeps' values; the last sweep varies fastest. Without sweeps, returns one empty setting.
///
/// # Errors
/// A key of two sweeps, or too many combinations.
pub fn grid(sweeps: &[Sweep]) -> Result<Vec<Setting>> {
    let mut settings = vec![Setting::default()];
    for Sweep { key, values } in sweeps {
        if settings[0].values.iter().any(|(known, _)| known == key) {
            return Err(Error::invalid(format!("sweep of `{key}`: given twice, expected once")));
        }
        let count = settings.len() * values.len();
        if count > SETTINGS_MAX {
            return Err(Error::invalid(format!("sweeps: got {count} settings, expected at most {SETTINGS_MAX}")));
        }
        let with = |setting: &Setting, value: &Value| {
            let mut setting = setting.clone();
            setting.values.push((key.clone(), value.clone()));
            setting
        };
        settings = settings.iter().flat_map(|s| values.iter().map(move |value| with(s, value))).collect();
    }
    Ok(settings)
}

impl Setting {
    /// Returns the value of a key; `None` if the key does not vary.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.values.iter().find(|(known, _)| known == key).map(|(_, value)| value)
    }

    /// Returns the setting without one of its keys.
    pub fn without(&self, key: &str) -> Self {
        Setting { values: self.values.iter().filter(|(known, _)| known != key).cloned().collect() }
    }

    /// Returns whether no key varies.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Returns the setting as a JSON object.
    pub fn fields(&self) -> Map<String, Value> {
        self.values.iter().cloned().collect()
    }

    /// Applies the setting to the first class of requests of a load; the values of `filter` are names in `filters`.
    /// Rates count users, so calls with lists are sent less often.
    ///
    /// # Errors
    /// An unknown filter name, a rate or lists for a recording, or a `batch` of requests that are lists already.
    pub fn of(&self, load: &Load, filters: &BTreeMap<String, String>) -> Result<Load> {
        let mut load = load.clone();
        let class = &mut load.classes[0];
        let mut fields = Vec::new();
        for (key, value) in &self.values {
            match (key.as_str(), value) {
                ("batch" | "rate", _) => {}
                ("filter", Value::String(name)) => {
                    let known = || filters.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                    let filter = filters.get(name);
                    let filter = filter
                        .ok_or_else(|| Error::invalid(format!("filter `{name}`: expected one of: {}", known())))?;
                    fields.push((key.clone(), Value::String(filter.clone())));
                }
                _ => fields.push((key.clone(), value.clone())),
            }
        }
        if !fields.is_empty() {
            class.bodies = class.bodies.iter().map(|body| body.with(&fields)).collect();
        }
        if let Some(users) = self.value("batch").and_then(Value::as_u64) {
            class.batch = users as usize;
            class.bodies = lists(&class.bodies, users as usize)?;
        }
        class.timing = match (self.value("rate").and_then(Value::as_f64), &class.timing) {
            (None, SendTimes::Rate(rate)) => SendTimes::Rate(rate / class.batch as f64),
            (Some(rate), SendTimes::Rate(_)) => SendTimes::Rate(rate / class.batch as f64),
            (None, recorded) if class.batch == 1 => recorded.clone(),
            _ => {
                return Err(Error::invalid("a recording sets rate and calls, expected no sweep of `rate` or `batch`"));
            }
        };
        Ok(load)
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (key, value)) in self.values.iter().enumerate() {
            let space = if number > 0 { " " } else { "" };
            match value {
                Value::String(text) => write!(f, "{space}{key}={text}")?,
                other => write!(f, "{space}{key}={other}")?,
            }
        }
        Ok(())
    }
}

/// Combines requests to lists of `users` requests; each request is in at least one list.
fn lists(bodies: &[Body], users: usize) -> Result<Vec<Body>> {
    if bodies.iter().any(Body::is_list) {
        return Err(Error::invalid("batch: got requests that are lists already, expected single requests"));
    }
    let calls = bodies.len().div_ceil(users);
    let call = |number: usize| {
        let all: Vec<&Body> = (0..users).map(|n| &bodies[(number * users + n) % bodies.len()]).collect();
        Body::list(&all)
    };
    Ok((0..calls).map(call).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::super::load::Class;
    use super::*;

    fn load() -> Load {
        let bodies = super::super::random_vectors(1, 5, 1, Duration::from_secs(1));
        let timing = SendTimes::Rate(80.0);
        Load::of(vec![Class { name: "main".into(), path: String::new(), bodies, timing, batch: 1 }])
    }

    fn settings(sweeps: &[&str]) -> Result<Vec<Setting>> {
        grid(&sweeps.iter().map(|text| Sweep::parse(text)).collect::<Result<Vec<_>>>()?)
    }

    fn bodies(load: &Load) -> Vec<Value> {
        load.classes[0].bodies.iter().map(|body| serde_json::from_slice(&body.bytes).unwrap()).collect()
    }

    #[test]
    fn every_setting_of_the_grid_comes_once() {
        let all = settings(&["k=10,100", "filter=rare,2024", "exact=true"]).unwrap();
        let reported: Vec<String> = all.iter().map(Setting::to_string).collect();
        let expected = ["k=10 filter=rare", "k=10 filter=2024", "k=100 filter=rare", "k=100 filter=2024"];
        assert_eq!(reported, expected.map(|setting| format!("{setting} exact=true")));
        assert_eq!(all[0].without("filter").to_string(), "k=10 exact=true");
        assert!(settings(&[]).unwrap()[0].is_empty());
    }

    #[test]
    fn invalid_sweeps_are_rejected() {
        for (sweep, reason) in [
            ("k", "KEY=VALUE"),
            ("vector=1", "expected one of the keys k,"),
            ("k=", "got \"\""),
            ("k=1,,2", "got \"\""),
            ("k=-1", "got -1"),
            ("k=ten", "got \"ten\""),
            ("recall=1", "got 1"),
            ("rate=0", "got 0"),
            ("rate=1e9", "got 1000000000.0"),
            ("batch=0", "got 0"),
            ("batch=1025", "got 1025"),
            ("exact=yes", "got \"yes\""),
            ("filter=", "got \"\""),
        ] {
            let error = Sweep::parse(sweep).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains(sweep), "{sweep}: {error}");
        }
        assert!(settings(&["k=1", "k=2"]).unwrap_err().to_string().contains("twice"));
        let many = (0..40).map(|n| n.to_string()).collect::<Vec<_>>().join(",");
        let sweeps = [format!("k={many}"), format!("probes={many}")];
        assert!(settings(&[&sweeps[0], &sweeps[1]]).unwrap_err().to_string().contains("1600 settings"));
    }

    #[test]
    fn a_setting_changes_requests_calls_and_rate() {
        let filters = BTreeMap::from([("rare".to_owned(), "lang:he".to_owned())]);
        let of = |sweep: &[&str]| settings(sweep).unwrap()[0].of(&load(), &filters);
        let changed = of(&["k=7", "filter=rare", "timeout_ms=20"]).unwrap();
        for body in bodies(&changed) {
            assert_eq!((&body["k"], &body["filter"], &body["timeout_ms"]), (&7.into(), &"lang:he".into(), &20.into()));
        }
        assert_eq!(changed.classes[0].bodies[0].timeout, Duration::from_millis(20));
        // Five requests in calls of four: two calls, with three users repeated.
        let lists = of(&["batch=4"]).unwrap();
        let users: Vec<usize> = bodies(&lists).iter().map(|b| b["requests"].as_array().unwrap().len()).collect();
        assert_eq!((users, &lists.classes[0].timing), (vec![4, 4], &SendTimes::Rate(20.0)));
        assert_eq!(bodies(&lists)[1]["requests"][1], bodies(&load())[0]);
        assert_eq!(of(&["batch=4", "rate=8"]).unwrap().classes[0].timing, SendTimes::Rate(2.0));
        assert!(of(&["filter=no"]).unwrap_err().to_string().contains("expected one of: rare"));
        let listed = settings(&["batch=2"]).unwrap()[0].of(&lists, &filters);
        assert!(listed.unwrap_err().to_string().contains("lists already"));
        let mut recorded = load();
        recorded.classes[0].timing = SendTimes::Recorded([Duration::ZERO].into());
        for (sweep, is_fine) in [("k=1", true), ("rate=3", false), ("batch=2", false)] {
            assert_eq!(settings(&[sweep]).unwrap()[0].of(&recorded, &filters).is_ok(), is_fine, "{sweep}");
        }
    }
}
