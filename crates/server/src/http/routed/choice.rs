//! Which version answers a call to a router: the pinned one, the active one, or, for a share of keys, the canary.

use std::sync::Arc;

use axum::extract::Request;

use super::super::call_id::CallId;
use super::super::choice::{BesideActive, Choice, Chosen, key_in_header};
use super::super::parameters::parameter;
use super::app::RouterApp;
use crate::route::{Offering, Pin, UnpinnedOffering};
use sterling_core::error::Result;

/// What may answer.
pub(super) type RoutedChoice = Choice<Arc<Offering>, Arc<Offering>>;
/// What answers.
pub(super) type RoutedChosen = Chosen<Arc<Offering>, Arc<Offering>>;

/// What may answer a call.
///
/// # Errors
/// As [`Fleet::get`](crate::route::Fleet::get).
pub(super) fn choice(app: &RouterApp, model: &str, pin: Pin<'_>, request: &Request) -> Result<RoutedChoice> {
    if pin != Pin::Active {
        return Ok(Choice::only(app.fleet().get(model, pin)?));
    }
    let UnpinnedOffering { active, canary, shadow } = app.fleet().unpinned(model)?;
    // Positions are of the shards of the version that answers.
    let has_positions = parameter::<String>(request.uri(), "min_position", "one list")?.is_some();
    let canary =
        canary.filter(|(run, version)| run.share() > 0.0 && (!has_positions || version.shards() == active.shards()));
    let canary = canary.map(|(run, version)| BesideActive { key: key_in_header(run.sticky(), request), run, version });
    let id = if shadow.is_some() { CallId::of(request) } else { String::new() };
    Ok(Choice::only(active).beside(canary, shadow, id))
}
