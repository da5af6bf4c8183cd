//! Chooses the version that answers a routed call: the pinned one, the active one or, for a share of keys, the canary.

use std::sync::Arc;

use axum::http::request::Parts;
use tokio::time::Instant;

use super::super::call_id::CallId;
use super::super::choice::{CanaryChoice, Choice, Chosen, key_in_header};
use super::super::parameters::{min_coverage, parameter};
use super::super::paths::Target;
use super::super::position::positions;
use super::app::RouterApp;
use crate::route::{ShardedVersion, UnpinnedShardedVersion};
use sterling_core::error::{Error, Result};
use sterling_core::request::VersionSelector;

/// Versions that may answer.
pub(super) type RoutedChoice = Choice<Arc<ShardedVersion>, Arc<ShardedVersion>>;
/// Version that answers.
pub(super) type RoutedChosen = Chosen<Arc<ShardedVersion>, Arc<ShardedVersion>>;

/// Versions that may answer a call, and the call's path and parameters.
pub(in crate::http) struct Versions {
    pub(super) choice: RoutedChoice,
    pub(super) call: RoutedCall,
}

/// Path and parameters of a call.
pub(super) struct RoutedCall {
    pub(super) target: Target,
    pub(super) arrived: Instant,
    /// Least share of the items that an answer must cover.
    pub(super) at_least: f64,
    /// Update position per shard that must be visible.
    pub(super) seen: Option<Arc<[u64]>>,
}

impl Versions {
    /// Determines the versions that may answer a call.
    ///
    /// # Errors
    /// As [`Fleet::get`](crate::route::Fleet::get); `Invalid` for invalid parameters.
    pub(super) fn of(app: &RouterApp, target: &Target, head: &Parts) -> Result<Self> {
        let choice = choice(app, target, head)?;
        let seen = positions(&head.uri, "min_position", choice.version().shards())?.map(Arc::from);
        let options = app.fleet().options();
        let at_least = min_coverage(&head.uri)?.unwrap_or(options.min_coverage);
        if at_least < options.least_coverage {
            let least = options.least_coverage;
            let what = format!("min_coverage: got {at_least}, expected {least} to 1: the router's `least_coverage`");
            return Err(Error::invalid(what));
        }
        Ok(Versions { choice, call: RoutedCall { target: target.clone(), arrived: Instant::now(), at_least, seen } })
    }
}

fn choice(app: &RouterApp, target: &Target, head: &Parts) -> Result<RoutedChoice> {
    let (model, selected_version) = (&*target.model, target.selected_version());
    if selected_version != VersionSelector::Active {
        return Ok(Choice::only(app.fleet().get(model, selected_version)?));
    }
    let UnpinnedShardedVersion { active, canary, shadow } = app.fleet().unpinned(model)?;
    // Positions belong to the shards of the answering version, so a canary needs the same number of shards.
    let has_positions = parameter::<String>(&head.uri, "min_position", "one list")?.is_some();
    let canary =
        canary.filter(|(run, version)| run.share() > 0.0 && (!has_positions || version.shards() == active.shards()));
    let canary = canary.map(|(run, version)| CanaryChoice { key: key_in_header(run.sticky(), head), run, version });
    let id = if shadow.is_some() { CallId::of(&head.extensions) } else { String::new() };
    Ok(Choice::only(active).beside(canary, shadow, id))
}
