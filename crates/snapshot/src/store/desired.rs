//! Desired state of a model: active version, labels and rollout. The state is one small file of the store, which all servers
//! apply.
//!
//! A change is a compare-and-swap with the previous state: of two concurrent changes one succeeds, and the other fails with an
//! error that contains the current state.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

use serde::{Deserialize, Serialize};

use super::{Store, check_model, check_name};
use sterling_core::error::{Error, Kind, Result};
use sterling_rollout::{Traffic, TrafficTarget};

/// File of a model's desired state.
pub const DESIRED_FILE: &str = "wish.json";
/// Format version of the file.
const FORMAT: u32 = 1;
const LABELS_MAX: usize = 256;

/// Desired state of a model: the active version, labels and the rollout.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Desired {
    /// Format version of the file.
    format: u32,
    /// Number of changes of the desired state so far.
    pub revision: u64,
    /// Version that answers unpinned requests; the newest if unset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// Versions that labels point to.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, u64>,
    /// Versions that take part in unpinned requests besides the active one.
    #[serde(default, skip_serializing_if = "Traffic::is_empty")]
    pub traffic: Traffic,
    /// Random text that distinguishes this state from another state of the same revision.
    nonce: String,
}

impl Desired {
    /// Describes the state for operators.
    pub fn reported(&self) -> String {
        let version = self.version.map_or("the newest version".into(), |version| format!("version {version}"));
        let labels: Vec<String> = self.labels.iter().map(|(label, version)| format!("`{label}` = {version}")).collect();
        let labels = (!labels.is_empty()).then(|| format!("labels {}", labels.join(", ")));
        let all: Vec<String> = [version].into_iter().chain(labels).chain(self.traffic.reported()).collect();
        all.join(", ")
    }

    /// Sets the active version; `None` stands for the newest version. Ends a canary of the same version, and a canary that would
    /// run while the active version changes automatically.
    pub fn answer(&mut self, version: Option<u64>) {
        self.version = version;
        let canary = self.traffic.canary.as_ref().and_then(|canary| self.version_of(canary.target().ok()?));
        if version.is_none() || canary == version {
            self.traffic.canary = None;
        }
    }

    /// Returns the version that a target refers to.
    pub fn version_of(&self, target: TrafficTarget<'_>) -> Option<u64> {
        match target {
            TrafficTarget::Version(version) => Some(version),
            TrafficTarget::Label(label) => self.labels.get(label).copied(),
        }
    }

    fn parse(place: &str, bytes: &[u8]) -> Result<Self> {
        let corrupt = |why: String| Error::corrupt(format!("{place}: {why}"));
        let desired_state: Desired =
            serde_json::from_slice(bytes).map_err(|e| corrupt(format!("not a desired state: {e}")))?;
        if desired_state.format != FORMAT {
            return Err(Error::unsupported(format!("{place}: format {}, expected {FORMAT}", desired_state.format)));
        }
        if desired_state.labels.len() > LABELS_MAX {
            return Err(corrupt(format!("{} labels, expected at most {LABELS_MAX}", desired_state.labels.len())));
        }
        desired_state
            .labels
            .keys()
            .try_for_each(|label| check_name("label", label))
            .map_err(|e| corrupt(e.to_string()))?;
        desired_state.traffic.check().map_err(|e| corrupt(e.to_string()))?;
        Ok(desired_state)
    }
}

impl Store {
    /// Returns the desired state of a model; the default if nothing was set.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported` with the fault of the file; `Io`, `Unavailable`.
    pub fn desired_state(&self, model: &str) -> Result<Desired> {
        check_model(model)?;
        self.parsed(model, self.shelf().read(model, DESIRED_FILE)).map(|(desired_state, _)| desired_state)
    }

    /// Returns the desired state as of the last listing.
    ///
    /// # Errors
    /// As [`Store::desired_state`].
    pub fn seen_desired(&self, model: &str) -> Result<Desired> {
        check_model(model)?;
        self.parsed(model, self.shelf().glance(model, DESIRED_FILE)).map(|(desired_state, _)| desired_state)
    }

    fn parsed(&self, model: &str, read: Result<Vec<u8>>) -> Result<(Desired, Option<Vec<u8>>)> {
        match read {
            Ok(bytes) => {
                let desired_state = Desired::parse(&format!("{}/{model}/{DESIRED_FILE}", self.name()), &bytes)?;
                Ok((desired_state, Some(bytes)))
            }
            Err(e) if e.kind() == Kind::NotFound => Ok((Desired::default(), None)),
            Err(e) => Err(e),
        }
    }

    /// Changes the desired state of a model if it is still `before`; returns the new state.
    ///
    /// # Errors
    /// `Conflict` with the current state if it was changed meanwhile, or if the rollout needs a version or label that would be
    /// removed. `Invalid` for an invalid label, for more than 256 labels, and for an invalid rollout. `NotFound` for a version
    /// that is not published or a missing label; as [`Store::desired_state`].
    pub fn change_desired(&self, model: &str, before: &Desired, change: impl FnOnce(&mut Desired)) -> Result<Desired> {
        check_name("model name", model)?;
        let (now, bytes) = self.parsed(model, self.shelf().read(model, DESIRED_FILE))?;
        let overtaken = |now: &Desired| {
            let reported = now.reported();
            Error::conflict(format!(
                "model `{model}`: the desired state was changed meanwhile, to {reported}; this change was not applied"
            ))
        };
        if now != *before {
            return Err(overtaken(&now));
        }
        let mut desired_state = now;
        change(&mut desired_state);
        self.check_desired(model, before, &desired_state)?;
        desired_state.format = FORMAT;
        desired_state.revision += 1;
        desired_state.nonce = format!("{:016x}", RandomState::new().hash_one(std::process::id()));
        let text =
            serde_json::to_vec_pretty(&desired_state).map_err(|e| Error::internal(format!("desired state: {e}")))?;
        match self.shelf().swap(model, DESIRED_FILE, bytes.as_deref(), &text)? {
            true => Ok(desired_state),
            false => Err(overtaken(&self.desired_state(model)?)),
        }
    }

    /// Rejects invalid changes of a desired state.
    fn check_desired(&self, model: &str, before: &Desired, desired_state: &Desired) -> Result<()> {
        desired_state.labels.keys().try_for_each(|label| check_name("label", label))?;
        if desired_state.labels.len() > LABELS_MAX {
            return Err(Error::invalid(format!(
                "{} labels, expected at most {LABELS_MAX}",
                desired_state.labels.len()
            )));
        }
        check_traffic(model, desired_state)?;
        let mut published = self.versions(model)?;
        published.extend(self.sharded_versions(model)?);
        let labelled =
            desired_state.labels.iter().filter(|(label, version)| before.labels.get(*label) != Some(*version));
        let answering = desired_state.version.filter(|version| before.version != Some(*version));
        let targets =
            |of: &'_ Desired| of.traffic.targets().filter_map(|(_, target)| of.version_of(target)).collect::<Vec<_>>();
        let known = targets(before);
        let taking_part = targets(desired_state).into_iter().filter(|version| !known.contains(version));
        let mut new = answering.into_iter().chain(labelled.map(|(_, version)| *version)).chain(taking_part);
        match new.find(|version| !published.contains(version)) {
            Some(version) => {
                published.sort_unstable();
                published.dedup();
                let known = published.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
                let known = if known.is_empty() { "none".into() } else { known };
                let what = format!("version {version} of model `{model}`: not in {}; there are: {known}", self.name());
                Err(Error::not_found(what))
            }
            None => Ok(()),
        }
    }
}

/// Rejects a rollout that contradicts the rest of the desired state.
fn check_traffic(model: &str, desired_state: &Desired) -> Result<()> {
    desired_state.traffic.check()?;
    let missing = desired_state.traffic.targets().find(|(_, target)| desired_state.version_of(*target).is_none());
    if let Some((part, target)) = missing {
        let labels: Vec<String> = desired_state.labels.keys().map(|label| format!("`{label}`")).collect();
        let labels = if labels.is_empty() { "none".into() } else { labels.join(", ") };
        let what = format!(
            "model `{model}`: its {part} is {target}, which the store does not have; the model's labels are: {labels}"
        );
        return Err(Error::not_found(what));
    }
    let Some(canary) = &desired_state.traffic.canary else { return Ok(()) };
    match (desired_state.version, desired_state.version_of(canary.target()?)) {
        (None, _) => Err(Error::conflict(format!(
            "model `{model}`: its newest version becomes active automatically, so that a canary would have no active \
             version to compare with; activate one first: `sterling activate {model} VERSION`"
        ))),
        (answering, canary) if answering == canary => {
            let version = canary.unwrap_or_default();
            Err(Error::conflict(format!(
                "model `{model}`: version {version} is the active version, expected another version as canary"
            )))
        }
        _ => Ok(()),
    }
}
