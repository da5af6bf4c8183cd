//! Divides unpinned requests of a model: the desired traffic that servers report from their store, as far as every shard has the
//! versions.
//!
//! A router has no store and keeps no state. Each server reports the desired traffic of its store with a revision that counts
//! changes, and the last change counts. So routers that see the same servers divide requests alike, regardless of their history.

use std::sync::Arc;

use super::offering::ShardedVersion;
use super::protocol::DesiredTraffic;
use sterling_core::error::{Error, Result};
use sterling_rollout::{CanaryRun, ShadowRun, Traffic, TrafficNow, TrafficTarget, rolled_back};

/// Returns the desired traffic of a model and its revision, from the reports of several servers.
///
/// # Errors
/// `Unsupported` if two servers report different settings of one revision, because they use different stores; `Unavailable` for
/// settings that this router cannot parse.
pub(super) fn received<'a>(reported: impl IntoIterator<Item = &'a DesiredTraffic>) -> Result<(u64, Traffic)> {
    let mut last: Option<&DesiredTraffic> = None;
    for wished in reported {
        match last {
            Some(other) if other.revision > wished.revision => {}
            Some(other) if other.revision == wished.revision && other.setting != wished.setting => {
                return Err(Error::unsupported(format!(
                    "the servers report different desired states at revision {}, expected servers of one store",
                    wished.revision
                )));
            }
            _ => last = Some(wished),
        }
    }
    let Some(DesiredTraffic { revision, setting, .. }) = last else { return Ok((0, Traffic::default())) };
    let strange = |why: &dyn std::fmt::Display| {
        Error::unavailable(format!("the desired state that the servers report cannot be applied: {why}"))
    };
    let setting: Traffic = serde_json::from_str(setting).map_err(|e| strange(&e))?;
    setting.check().map_err(|e| strange(&e))?;
    Ok((*revision, setting))
}

/// Canary and shadow of a model besides its active version.
#[derive(Default)]
pub(super) struct Split {
    revision: u64,
    setting: Traffic,
    pub(super) canary: Option<(Arc<CanaryRun>, Arc<ShardedVersion>)>,
    pub(super) shadow: Option<(Arc<ShadowRun>, Arc<ShardedVersion>)>,
    /// Reason why requests are not divided, if the desired traffic is unknown.
    pub(super) undivided: Option<String>,
}

impl Split {
    /// Applies the desired traffic to the versions that every shard has. Running canaries and shadows of `before` continue if
    /// nothing they depend on has changed.
    pub(super) fn of<'a>(
        model: &str,
        received: Result<(u64, Traffic)>,
        before: Option<&Split>,
        (active, complete): (
            Option<&Arc<ShardedVersion>>,
            impl Fn(TrafficTarget<'_>) -> Option<&'a Arc<ShardedVersion>>,
        ),
    ) -> Self {
        let (revision, setting, undivided) = match received {
            Ok((revision, setting)) => (revision, setting, None),
            Err(error) => (0, Traffic::default(), Some(error.to_string())),
        };
        let beside = |target: Result<TrafficTarget<'_>>| {
            let (served, active) = (complete(target.ok()?)?, active?);
            (served.version() != active.version()).then_some((served, active))
        };
        let canary = setting.canary.as_ref().and_then(|setting| {
            let (served, active) = beside(setting.target())?;
            let active = (active.version(), active.digest());
            let same = before.and_then(|before| before.canary.as_ref());
            let same = same.filter(|(run, of)| run.is_of(setting, active) && of.is_same(served));
            let new = || Arc::new(CanaryRun::new(setting, (model, served.version()), active));
            Some((same.map_or_else(new, |(run, _)| run.clone()), served.clone()))
        });
        let shadow = setting.shadow.as_ref().and_then(|setting| {
            let (served, _) = beside(setting.target())?;
            let same = before.and_then(|before| before.shadow.as_ref());
            let same = same.filter(|(run, of)| run.setting() == setting && of.is_same(served));
            let new = || Arc::new(ShadowRun::new(setting, (model, served.version())));
            Some((same.map_or_else(new, |(run, _)| run.clone()), served.clone()))
        });
        if let (Some((ended, _)), None) = (before.and_then(|before| before.canary.as_ref()), &canary) {
            ended.end();
        }
        if let Some(reason) = &undivided
            && before.is_none_or(|before| before.undivided != undivided)
        {
            tracing::warn!(model, reason, "desired traffic unknown; the active version answers all unpinned requests");
        }
        Split { revision, setting, canary, shadow, undivided }
    }

    /// Returns the desired traffic and its current state.
    pub(super) fn now(&self, active: Option<u64>) -> TrafficNow {
        TrafficNow {
            revision: self.revision,
            setting: self.setting.clone(),
            active,
            canary: self.canary.as_ref().map(|(run, _)| run.clone()),
            shadow: self.shadow.as_ref().map(|(run, _)| run.clone()),
        }
    }

    /// Lists differences between desired and current traffic, one line each.
    pub(super) fn troubles(&self) -> Vec<String> {
        let mut troubles: Vec<String> = self.undivided.iter().cloned().collect();
        for (part, target) in self.setting.targets() {
            let is_there = if part == "canary" { self.canary.is_some() } else { self.shadow.is_some() };
            if !is_there {
                troubles.push(format!("the {part}, {target}, is not at every shard that has the active version"));
            }
        }
        troubles.extend(rolled_back(&self.setting, self.canary.as_ref().map(|(run, _)| &**run)));
        troubles
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::error::Kind;

    fn wished(revision: u64, share: Option<f64>) -> DesiredTraffic {
        let setting = match share {
            Some(share) => format!("{{\"canary\": {{\"version\": 2, \"share\": {share}}}}}"),
            None => "{}".into(),
        };
        DesiredTraffic { model: "m".into(), revision, setting }
    }

    #[test]
    fn the_latest_revision_applies() {
        let share = |reported: &[&DesiredTraffic]| {
            let (revision, setting) = received(reported.iter().copied()).unwrap();
            (revision, setting.canary.map(|canary| canary.share))
        };
        assert_eq!(share(&[]), (0, None));
        let (older, newer, ended) = (wished(3, Some(0.1)), wished(4, Some(0.5)), wished(5, None));
        for reported in [[&older, &newer, &newer], [&newer, &older, &newer], [&newer, &newer, &older]] {
            assert_eq!(share(&reported), (4, Some(0.5)));
        }
        assert_eq!(share(&[&newer, &ended, &older]), (5, None));
    }

    #[test]
    fn inconsistent_traffic_is_not_divided() {
        let apart = received(&[wished(4, Some(0.5)), wished(4, Some(0.6))]).unwrap_err();
        assert!(apart.kind() == Kind::Unsupported && apart.to_string().contains("different desired states"), "{apart}");
        // Earlier revisions are ignored.
        assert!(received(&[wished(4, Some(0.5)), wished(5, None), wished(4, Some(0.6))]).is_ok());
        for setting in ["", "[7]", "{\"mirror\": {}}", "{\"canary\": {\"version\": 2, \"share\": 7}}"] {
            let strange = DesiredTraffic { setting: setting.into(), ..wished(1, None) };
            assert_eq!(received([&strange]).unwrap_err().kind(), Kind::Unavailable, "{setting}");
        }
    }
}
