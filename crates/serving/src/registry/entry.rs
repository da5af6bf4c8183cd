//! State of one model in the registry: plain data that is replaced atomically.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::loaded::{Loaded, VersionRejection};
use super::split::{CanaryVersion, ShadowVersion};
use sterling_core::error::{Error, Result};
use sterling_core::request::VersionSelector;
use sterling_rollout::TrafficTarget;
use sterling_snapshot::{Desired, Stamp};

/// Version that was rejected.
#[derive(Clone, Debug)]
pub(super) struct Rejection {
    pub(super) what: VersionRejection,
    /// Stamp of the version's folder when the version was rejected.
    pub(super) stamp: Stamp,
    /// Time of the next attempt if nothing changes.
    pub(super) again: Option<Instant>,
    /// Number of loads that hit a defect.
    pub(super) broken: u32,
}

impl Rejection {
    /// Returns whether the version must not be tried again yet.
    pub(super) fn waits(&self, stamp: Stamp, now: Instant) -> bool {
        self.stamp == stamp && self.again.is_none_or(|at| now < at)
    }

    pub(super) fn reported(&self, now: Instant) -> VersionRejection {
        VersionRejection { retry_in: self.again.map(|at| at.saturating_duration_since(now)), ..self.what.clone() }
    }
}

/// State of one model.
pub(super) struct Entry<T> {
    pub(super) loaded: BTreeMap<u64, Arc<Loaded<T>>>,
    pub(super) active: Option<u64>,
    /// Previously active version.
    previous: Option<u64>,
    pub(super) labels: BTreeMap<String, u64>,
    /// Desired state of the model in its store, as last read by this server.
    pub(super) desired_state: Desired,
    /// Error if the desired state cannot be read now; the last state read stays in effect.
    pub(super) wish_unread: Option<String>,
    /// True if the desired version has been activated, or if no version is desired.
    pub(super) is_desired_active: bool,
    /// True if the active version is no longer in the store.
    pub(super) is_missing: bool,
    /// Desired labels that are not applied yet.
    pub(super) labels_left: BTreeSet<String>,
    /// Desired canary, if it and another version that answers are in memory.
    pub(super) canary: Option<Arc<CanaryVersion<T>>>,
    /// Desired shadow, if it is in memory and not active.
    pub(super) shadow: Option<Arc<ShadowVersion<T>>>,
    /// Versions that were loaded manually and not active since.
    held: BTreeSet<u64>,
    /// Published versions that were loaded, rejected or skipped, with the digest if it is known. Versions in this map are no
    /// longer activated automatically: a rollback stays until another version is published.
    settled: BTreeMap<u64, (Stamp, Option<String>)>,
    pub(super) refused: BTreeMap<u64, Rejection>,
    /// Version that is being loaded.
    pub(super) loading: Option<u64>,
    /// Locked while a version of this model is loaded.
    pub(super) gate: Arc<Mutex<()>>,
}

impl<T> Default for Entry<T> {
    fn default() -> Self {
        Entry {
            loaded: BTreeMap::new(),
            active: None,
            previous: None,
            labels: BTreeMap::new(),
            desired_state: Desired::default(),
            wish_unread: None,
            is_desired_active: true,
            is_missing: false,
            labels_left: BTreeSet::new(),
            canary: None,
            shadow: None,
            held: BTreeSet::new(),
            settled: BTreeMap::new(),
            refused: BTreeMap::new(),
            loading: None,
            gate: Arc::default(),
        }
    }
}

impl<T> Clone for Entry<T> {
    fn clone(&self) -> Self {
        Entry {
            loaded: self.loaded.clone(),
            active: self.active,
            previous: self.previous,
            labels: self.labels.clone(),
            desired_state: self.desired_state.clone(),
            wish_unread: self.wish_unread.clone(),
            is_desired_active: self.is_desired_active,
            is_missing: self.is_missing,
            labels_left: self.labels_left.clone(),
            canary: self.canary.clone(),
            shadow: self.shadow.clone(),
            held: self.held.clone(),
            settled: self.settled.clone(),
            refused: self.refused.clone(),
            loading: self.loading,
            gate: self.gate.clone(),
        }
    }
}

impl<T> Entry<T> {
    pub(super) fn is_settled(&self, version: u64, stamp: Stamp) -> bool {
        self.settled.get(&version).is_some_and(|(at, _)| *at == stamp)
    }

    pub(super) fn waits(&self, version: u64, stamp: Stamp, now: Instant) -> bool {
        self.refused.get(&version).is_some_and(|r| r.waits(stamp, now))
    }

    /// Marks these published versions as handled: loaded, rejected or skipped.
    pub(super) fn settle(&mut self, versions: Vec<(u64, Stamp, Option<String>)>) {
        self.settled.extend(versions.into_iter().map(|(version, stamp, digest)| (version, (stamp, digest))));
    }

    /// Returns the digest of a handled version, if it is known.
    pub(super) fn settled_digest(&self, version: u64) -> Option<&str> {
        self.settled.get(&version)?.1.as_deref()
    }

    /// Returns whether no version of this number was handled before with this stamp or digest.
    pub(super) fn is_new_digest(&self, loaded: &Loaded<T>) -> bool {
        let settled = self.settled.get(&loaded.version);
        settled.is_none_or(|(at, digest)| Some(*at) != loaded.stamp && digest.as_deref() != Some(&loaded.digest))
    }

    /// Adds a version to memory; replaces a version of the same number.
    pub(super) fn insert(&mut self, loaded: Arc<Loaded<T>>) {
        self.refused.remove(&loaded.version);
        self.loaded.insert(loaded.version, loaded);
    }

    /// Keeps a version in memory until it is unloaded, or has been active and was replaced.
    pub(super) fn hold(&mut self, version: u64) {
        if self.active != Some(version) {
            self.held.insert(version);
        }
    }

    /// Activates a version in memory.
    pub(super) fn activate(&mut self, version: u64) {
        if self.active != Some(version) {
            self.previous = self.active.replace(version);
        }
        self.held.remove(&version);
        self.drop_idle();
    }

    /// Drops versions that are neither active nor previous, have no label, are not held, and are no canary or shadow.
    fn drop_idle(&mut self) {
        let Entry { loaded, active, previous, labels, held, desired_state, .. } = self;
        loaded.retain(|v, _| {
            [*active, *previous].contains(&Some(*v))
                || held.contains(v)
                || labels.values().any(|of| of == v)
                || desired_state.traffic.targets().any(|(_, target)| target == TrafficTarget::Version(*v))
        });
    }

    /// Resolves the target of traffic by the labels of this server.
    pub(super) fn version_of(&self, target: TrafficTarget<'_>) -> Option<u64> {
        match target {
            TrafficTarget::Version(version) => Some(version),
            TrafficTarget::Label(label) => self.labels.get(label).copied(),
        }
    }

    /// Applies the desired canary and shadow, as far as they are in memory.
    pub(super) fn divide(&mut self) {
        let active = self.active.and_then(|version| self.loaded.get(&version)).cloned();
        let beside = |target: TrafficTarget<'_>| {
            let (loaded, active) = (self.loaded.get(&self.version_of(target)?)?, active.as_ref()?);
            (loaded.version() != active.version()).then(|| (loaded.clone(), active.clone()))
        };
        let canary = self.desired_state.traffic.canary.as_ref().and_then(|setting| {
            let (loaded, active) = beside(setting.target().ok()?)?;
            let same = self.canary.clone().filter(|run| run.is_of(setting, &loaded, &active));
            Some(same.unwrap_or_else(|| Arc::new(CanaryVersion::new(setting, loaded, &active))))
        });
        let shadow = self.desired_state.traffic.shadow.as_ref().and_then(|setting| {
            let (loaded, _) = beside(setting.target().ok()?)?;
            let same = self.shadow.clone().filter(|run| run.is_of(setting, &loaded));
            Some(same.unwrap_or_else(|| Arc::new(ShadowVersion::new(setting, loaded))))
        });
        if let (Some(before), None) = (&self.canary, &canary) {
            before.run.end();
        }
        (self.canary, self.shadow) = (canary, shadow);
    }

    /// Drops the previously active version, unless it has another role.
    pub(super) fn drop_previous(&mut self) {
        self.previous = None;
        self.drop_idle();
    }

    pub(super) fn label(&mut self, label: &str, version: u64) -> Result<()> {
        self.find(version).map_err(|e| e.within("label: expected a version in memory"))?;
        self.labels.insert(label.to_owned(), version);
        self.drop_idle();
        Ok(())
    }

    pub(super) fn unlabel(&mut self, label: &str) -> Result<()> {
        self.labelled(label)?;
        self.labels.remove(label);
        self.drop_idle();
        Ok(())
    }

    /// Records the desired state. New settings are only recorded; the next poll applies them. Labels that are no longer
    /// desired are removed if they still point to their desired version. An older revision than the known one changes
    /// nothing: the store may return a state from before this server's own write.
    pub(super) fn receive(&mut self, desired_state: Desired) {
        if desired_state.revision < self.desired_state.revision {
            let (seen, known) = (desired_state.revision, self.desired_state.revision);
            self.wish_unread =
                Some(format!("the store shows revision {seen}, expected revision {known} or a later one"));
            return;
        }
        self.wish_unread = None;
        let before = std::mem::replace(&mut self.desired_state, desired_state);
        if before.version != self.desired_state.version {
            self.is_desired_active = self.desired_state.version.is_none();
            if self.is_desired_active {
                // The newest version must be activated again, although it was handled while another version was
                // desired.
                self.settled.clear();
            }
        }
        let Entry { labels, labels_left, desired_state, .. } = self;
        let is_gone = |label: &String, version: &u64| {
            before.labels.get(label) == Some(version) && !desired_state.labels.contains_key(label)
        };
        labels.retain(|label, version| !is_gone(label, version));
        labels_left.retain(|label| desired_state.labels.contains_key(label));
        let is_new = |(label, version): &(&String, &u64)| before.labels.get(*label) != Some(version);
        labels_left.extend(desired_state.labels.iter().filter(is_new).map(|(label, _)| label.clone()));
        self.drop_idle();
    }

    pub(super) fn unload(&mut self, version: u64) -> Result<()> {
        self.find(version)?;
        if self.active == Some(version) {
            return Err(Error::conflict(format!("version {version} is active, activate another version first")));
        }
        if let Some((label, _)) = self.labels.iter().find(|(_, of)| **of == version) {
            return Err(Error::conflict(format!("version {version} has the label `{label}`, move the label first")));
        }
        let part = self.desired_state.traffic.targets().find(|(_, target)| *target == TrafficTarget::Version(version));
        if let Some((part, _)) = part {
            return Err(Error::conflict(format!(
                "version {version} is the {part}, remove it from the desired traffic first"
            )));
        }
        self.held.remove(&version);
        self.previous = self.previous.filter(|v| *v != version);
        self.drop_idle();
        Ok(())
    }

    pub(super) fn get(&self, which: VersionSelector<'_>) -> Result<Arc<Loaded<T>>> {
        match which {
            VersionSelector::Active => {
                self.active.and_then(|v| self.loaded.get(&v)).cloned().ok_or_else(|| self.not_ready())
            }
            _ if self.loaded.is_empty() => Err(self.not_ready()),
            VersionSelector::Version(version) => self.find(version),
            VersionSelector::Label(label) => self.find(self.labelled(label)?),
        }
    }

    fn find(&self, version: u64) -> Result<Arc<Loaded<T>>> {
        self.loaded.get(&version).cloned().ok_or_else(|| {
            let known = self.loaded.keys();
            Error::not_found(format!("version {version} is not in memory; there are: {}", listed(known)))
        })
    }

    fn labelled(&self, label: &str) -> Result<u64> {
        self.labels.get(label).copied().ok_or_else(|| {
            Error::not_found(format!("no version has the label `{label}`; there are: {}", listed(self.labels.keys())))
        })
    }

    fn not_ready(&self) -> Error {
        match (self.loading, self.refused.values().next_back()) {
            (Some(version), _) => {
                Error::not_ready(format!("version {version} is being loaded")).retry_after(Duration::from_secs(1))
            }
            (None, Some(_)) => {
                let reasons: Vec<&str> = self.refused.values().map(|r| r.what.reason.as_str()).collect();
                Error::not_ready(format!("no version could be loaded: {}", reasons.join("; ")))
            }
            (None, None) => Error::not_ready(match self.desired_state.version.filter(|_| !self.is_desired_active) {
                Some(version) => format!("desired version {version} is not in memory yet"),
                None => "no version is in memory yet".into(),
            }),
        }
    }
}

/// Formats names for a message.
pub(super) fn listed<N: ToString>(names: impl IntoIterator<Item = N>) -> String {
    let names: Vec<String> = names.into_iter().map(|n| n.to_string()).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}
