//! Routing of unpinned requests: the desired state in the store, its changes by operators, and the automatic rollback of
//! canaries.

use std::sync::Arc;

use super::entry::Entry;
use super::loaded::Loaded;
use super::registry::Registry;
use super::split::{CanaryVersion, ShadowVersion};
use crate::view::Live;
use sterling_core::error::{Error, Result};
use sterling_core::request::VersionSelector;
use sterling_rollout::{Canary, Stopped, Traffic, TrafficNow, rolled_back};
use sterling_snapshot::Desired;

/// Versions that unpinned requests of a model go to.
pub struct Unpinned<T = Live> {
    /// Version that answers by default.
    pub active: Arc<Loaded<T>>,
    /// Version that answers a share of the requests.
    pub canary: Option<Arc<CanaryVersion<T>>>,
    /// Version that receives copies of a share of the requests.
    pub shadow: Option<Arc<ShadowVersion<T>>>,
}

impl<T: Send + Sync> Registry<T> {
    /// Returns the versions for a request that pins none.
    ///
    /// # Errors
    /// As [`Registry::get`] of the active version.
    pub fn unpinned(&self, name: &str) -> Result<Unpinned<T>> {
        self.entry(name, |entry| {
            let (canary, shadow) = (entry.canary.clone(), entry.shadow.clone());
            Ok(Unpinned { active: entry.get(VersionSelector::Active)?, canary, shadow })
        })
    }

    /// Returns the desired traffic of a model, as last read by this server.
    ///
    /// # Errors
    /// `NotFound` for an unknown model.
    pub fn traffic(&self, name: &str) -> Result<TrafficNow> {
        self.entry(name, |entry| {
            Ok(TrafficNow {
                revision: entry.desired_state.revision,
                setting: entry.desired_state.traffic.clone(),
                active: entry.active,
                canary: entry.canary.as_ref().map(|canary| canary.run.clone()),
                shadow: entry.shadow.as_ref().map(|shadow| shadow.run.clone()),
            })
        })
    }

    /// Changes the desired traffic of a model for all servers of the store, either at the given revision or unconditionally. This
    /// server applies the change immediately, as far as the versions are in memory.
    ///
    /// # Errors
    /// `NotFound` for an unknown model; `Unsupported` if this server does not follow the store; `Conflict` if the revision
    /// differs; as [`Store::change_desired`](sterling_snapshot::Store::change_desired).
    pub fn set_traffic(&self, name: &str, revision: Option<u64>, mut traffic: Traffic) -> Result<()> {
        self.entry(name, |_| Ok(()))?;
        self.check_follows()?;
        if let Some(canary) = &mut traffic.canary {
            canary.stopped = None;
        }
        let before = self.store.desired_state(name)?;
        if let Some(expected) = revision.filter(|revision| *revision != before.revision) {
            let (now, reported) = (before.revision, before.reported());
            return Err(Error::conflict(format!(
                "model `{name}`: expected revision {expected}, it is {now}: {reported}; nothing was changed"
            )));
        }
        self.change_traffic_in_store(name, &before, traffic)
    }

    fn check_follows(&self) -> Result<()> {
        match self.options.follow {
            true => Ok(()),
            false => {
                Err(Error::unsupported("this server does not follow the desired state of its store (`follow = false`)"))
            }
        }
    }

    fn change_traffic_in_store(&self, name: &str, before: &Desired, traffic: Traffic) -> Result<()> {
        self.change_desired(name, before, |desired_state| desired_state.traffic = traffic)
    }

    fn change_desired(&self, name: &str, before: &Desired, change: impl FnOnce(&mut Desired)) -> Result<()> {
        // If the file of the desired state was removed meanwhile, a new file must not have an earlier revision.
        let known = self.entry(name, |entry| Ok(entry.desired_state.revision))?;
        let change = |desired_state: &mut Desired| {
            desired_state.revision = desired_state.revision.max(known);
            change(desired_state);
        };
        let desired_state = self.store.change_desired(name, before, change)?;
        tracing::info!(model = name, wished = desired_state.reported(), "desired state written to the store");
        self.change(name, |entry| entry.receive(desired_state));
        Ok(())
    }

    /// Returns the desired state of a model in its store, as last read by this server, and whether the active version
    /// satisfies the desired state; `None` if this server does not follow the store. Reads the published versions from
    /// the store.
    pub fn desired(&self, name: &str) -> Option<(Desired, bool)> {
        let (desired_state, active) = match self.options.follow {
            true => self.entry(name, |entry| Ok((entry.desired_state.clone(), entry.active))).ok()?,
            false => return None,
        };
        let stands = |active| match desired_state.version {
            Some(wished) => self.store.is_same_or_merged(name, active, wished),
            None => self.store.versions(name).is_ok_and(|published| published.last() == Some(&active)),
        };
        let stands = active.is_some_and(stands);
        Some((desired_state, stands))
    }

    /// Activates a version at all servers of the store, beginning with this one: a version that it cannot load is activated
    /// nowhere.
    ///
    /// # Errors
    /// `Unsupported` if this server does not follow the store; as [`Registry::activate`] and
    /// [`Store::change_desired`](sterling_snapshot::Store::change_desired). The previously active version stays.
    pub fn activate_in_store(&self, name: &str, version: u64) -> Result<Arc<Loaded<T>>> {
        self.check_follows()?;
        let now = |entry: &Entry<T>| Ok((entry.active, entry.is_desired_active, entry.desired_state.revision));
        let (before, was_done, revision) = self.entry(name, now).unwrap_or_default();
        let desired = self.store.desired_state(name)?;
        let loaded = self.activate(name, version)?;
        let changed = match desired.version == Some(version) {
            true => Ok(()),
            false => self.change_desired(name, &desired, |desired_state| desired_state.answer(Some(version))),
        };
        if changed.is_err()
            && let Some(before) = before.filter(|before| *before != version)
            && let Err(error) = self.activate(name, before)
        {
            tracing::warn!(model = name, version = before, %error, "activation in the store failed, and the previous version could not be reactivated");
        }
        // `activate` has set `is_desired_active`. The flag stays set only if no other version is desired, or if it was
        // set before at this revision.
        self.change(name, |entry| {
            let is_met = entry.desired_state.version.is_none_or(|version| entry.active == Some(version));
            entry.is_desired_active = is_met || was_done && entry.desired_state.revision == revision;
        });
        changed.map(|()| loaded)
    }

    /// Evaluates the canaries, and records failed ones in the store.
    pub(super) fn judge_canaries(&self) {
        let entries = self.entries.load_full();
        for (name, canary) in entries.iter().filter_map(|(name, entry)| Some((name, &entry.canary.as_ref()?.run))) {
            canary.judge(self.options.judged_every);
            if let Some(verdict) = canary.verdict()
                && let Err(error) = self.roll_back(name, canary.setting(), &verdict.reason)
            {
                tracing::warn!(model = name, %error, "canary stopped at this server but not yet in the store; retrying");
            }
        }
    }

    /// Sets a canary's share to zero in the store, with a reason for operators, if the desired canary still equals `canary`.
    ///
    /// # Errors
    /// `NotFound` for an unknown model; `Unsupported` if this server does not follow the store; as
    /// [`Store::change_desired`](sterling_snapshot::Store::change_desired).
    pub fn stop_canary(&self, name: &str, canary: &Canary, reason: &str) -> Result<()> {
        self.entry(name, |_| Ok(()))?;
        self.check_follows()?;
        self.roll_back(name, canary, reason)
    }

    fn roll_back(&self, name: &str, canary: &Canary, reason: &str) -> Result<()> {
        let before = self.store.desired_state(name)?;
        if before.traffic.canary.as_ref() != Some(canary) {
            // Another writer has changed the desired state; the next poll reads it.
            return Ok(());
        }
        let mut traffic = before.traffic.clone();
        if let Some(setting) = &mut traffic.canary {
            let (time, share) = (sterling_telemetry::now(), setting.share);
            setting.stopped = Some(Stopped { time, share, reason: reason.to_owned() });
            setting.share = 0.0;
        }
        self.change_traffic_in_store(name, &before, traffic)
    }

    /// Returns one line per part of the desired traffic that is not applied.
    pub(super) fn traffic_troubles(&self) -> Vec<String> {
        let mut troubles = Vec::new();
        for (name, entry) in self.entries.load().iter() {
            for (part, target) in entry.desired_state.traffic.targets() {
                let version = entry.version_of(target).filter(|version| entry.loaded.contains_key(version));
                if version.is_none() {
                    troubles.push(format!("model `{name}`: its {part}, {target}, is not in memory"));
                }
            }
            let stopped = rolled_back(&entry.desired_state.traffic, entry.canary.as_ref().map(|canary| &*canary.run));
            troubles.extend(stopped.map(|what| format!("model `{name}`: {what}")));
        }
        troubles
    }
}
