//! Chooses the version that answers an unpinned call: the active one or, for a share of keys, the canary.
//!
//! Calls that pin a version or a label, and pages that a cursor pins, are never divided. One version answers a whole list of
//! requests, selected by the key in the call's header or by the call id. If the key would be part of the requests themselves, the
//! active version answers.

use std::sync::Arc;

use axum::http::Uri;
use axum::http::request::Parts;
use serde::Serialize;

use super::app::App;
use super::call_id::CallId;
use super::parameters::{min_coverage, number};
use super::position::seen;
use super::shadow::Shadowed;
use super::watched::Watched;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::request::{Features, User};
use sterling_graph::tower::FeatureKind;
use sterling_rollout::{CanaryRun, ShadowRun, Side, Sticky};
use sterling_serving::registry::{Loaded, Unpinned};
use sterling_serving::view::View;

/// Version of a model, with the read view that answers.
#[derive(Clone)]
pub(super) struct Version {
    pub(super) model: Arc<Loaded>,
    pub(super) view: Arc<View>,
    /// Least share of the items that an answer must cover.
    pub(super) min_coverage: Option<f64>,
}

impl Version {
    /// Waits until a view of the version contains the updates that the call requires.
    async fn asked(app: &App, model: Arc<Loaded>, uri: &Uri) -> Result<Self> {
        let view = seen(app, &model, uri).await?;
        Ok(Version { model, view, min_coverage: min_coverage(uri)? })
    }

    /// Returns the current view of a version if it contains the updates that the call requires.
    fn shown(model: Arc<Loaded>, uri: &Uri) -> Result<Option<Self>> {
        let (view, min_coverage) = (model.view(), min_coverage(uri)?);
        let is_seen = number(uri, "min_position")?.is_none_or(|position| view.position() >= position);
        Ok(is_seen.then_some(Version { model, view, min_coverage }))
    }

    /// Rejects a view with less coverage than the call requires. Later pages use the view of the first page, so that view is
    /// checked.
    pub(super) fn check_coverage(&self, app: &App) -> Result<()> {
        let Some(least) = self.min_coverage else { return Ok(()) };
        let covered = app.coverage(&self.model, &self.view);
        if covered < least {
            let what = format!("an answer would cover {covered} of the items, less than the {least} of `min_coverage`");
            return Err(Error::new(Kind::Partial, what));
        }
        Ok(())
    }
}

/// Versions `V` that may answer a call, and a shadow `S` that repeats it: versions of a server, or those of a router's shards.
pub(super) struct Choice<V = Version, S = Arc<Loaded>> {
    version: V,
    canary: Option<CanaryChoice<V>>,
    shadow: Option<(Arc<ShadowRun>, S)>,
    /// Id of the call, if it has a shadow.
    id: String,
}

/// Canary that may answer instead of the active version.
pub(super) struct CanaryChoice<V> {
    pub(super) run: Arc<CanaryRun>,
    pub(super) version: V,
    /// Key that decides whether the canary answers, if a request header sets it; otherwise it is derived from the user.
    pub(super) key: Option<Vec<u8>>,
}

/// User data of a call, from which a key may be derived.
pub(super) enum CallUser<'a> {
    User(&'a User),
    /// Features of one user.
    Features(&'a Features),
    Several,
}

/// Version chosen for a request.
pub(super) struct Chosen<V = Version, S = Arc<Loaded>> {
    pub(super) version: V,
    /// Observation of the choice, while a canary is active.
    pub(super) watched: Option<Watched>,
    /// Shadow that repeats the request.
    pub(super) shadow: Option<Shadowed<S>>,
}

/// Returns whether requests of a view may have texts, which are tokenized.
pub(super) fn has_texts(view: &View) -> bool {
    let features = view.main().package.spec.user.iter().flat_map(|user| &user.features);
    features.into_iter().any(|feature| feature.kind == FeatureKind::Text)
}

impl Choice {
    /// Returns whether requests may have texts at one of the versions.
    pub(super) fn has_texts(&self) -> bool {
        let canary = self.canary.as_ref().map(|canary| &canary.version);
        canary.into_iter().chain([&self.version]).any(|version| has_texts(&version.view))
    }

    /// Returns the choice of a call that pins its version.
    pub(super) async fn pinned(app: &App, model: Arc<Loaded>, uri: &Uri) -> Result<Self> {
        Version::asked(app, model, uri).await.map(Choice::only)
    }

    /// Returns the choice of an unpinned call.
    pub(super) async fn unpinned(app: &App, unpinned: Unpinned, head: &Parts) -> Result<Self> {
        let Unpinned { active, canary, shadow } = unpinned;
        let shadow = shadow.map(|shadow| (shadow.run.clone(), shadow.loaded.clone()));
        let id = if shadow.is_some() { CallId::of(&head.extensions) } else { String::new() };
        let choice = Choice::pinned(app, active, &head.uri).await?;
        let Some(canary) = canary.filter(|canary| canary.run.share() > 0.0) else {
            return Ok(choice.beside(None, shadow, id));
        };
        let key = key_in_header(canary.run.sticky(), head);
        // A canary may lag in its updates. Calls that require a position that the canary lacks go to the active version, and
        // wait for the active version only.
        let version = Version::shown(canary.loaded.clone(), &head.uri)?;
        let version = version.filter(|version| version.check_coverage(app).is_ok());
        let canary = version.map(|version| CanaryChoice { run: canary.run.clone(), version, key });
        Ok(choice.beside(canary, shadow, id))
    }
}

impl<V: Clone, S: Clone> Choice<V, S> {
    /// Returns the choice of a single version.
    pub(super) fn only(version: V) -> Self {
        Choice { version, canary: None, shadow: None, id: String::new() }
    }

    /// Adds a canary and a shadow for the call with this id.
    pub(super) fn beside(
        self,
        canary: Option<CanaryChoice<V>>,
        shadow: Option<(Arc<ShadowRun>, S)>,
        id: String,
    ) -> Self {
        Choice { canary, shadow, id, ..self }
    }

    /// Returns the default version, without regard to a canary.
    pub(super) fn version(&self) -> &V {
        &self.version
    }

    /// Chooses the version for a request of this user.
    pub(super) fn of(&self, asker: &CallUser<'_>) -> Chosen<V, S> {
        let chosen = self.canary.as_ref().and_then(|canary| {
            let key = match &canary.key {
                Some(key) => key.clone(),
                None => key_of(canary.run.sticky(), asker)?,
            };
            let watched = Watched::of(&canary.run, &key);
            Some((if watched.side() == Side::Canary { &canary.version } else { &self.version }, watched))
        });
        let is_canary = chosen.as_ref().is_some_and(|(_, watched)| watched.side() == Side::Canary);
        let shadow = self.shadow.as_ref().filter(|_| !is_canary && !matches!(asker, CallUser::Several));
        let (version, watched) = chosen.map_or((&self.version, None), |(version, watched)| (version, Some(watched)));
        let shadow =
            shadow.map(|(run, version)| Shadowed { run: run.clone(), version: version.clone(), id: self.id.clone() });
        Chosen { version: version.clone(), watched, shadow }
    }
}

/// Returns the key that is known before the body is read.
pub(super) fn key_in_header(sticky: &Sticky, head: &Parts) -> Option<Vec<u8>> {
    match sticky {
        Sticky::Request => Some(CallId::of(&head.extensions).into_bytes()),
        sticky => sticky.header().and_then(|name| Some(head.headers.get(name)?.as_bytes().to_vec())),
    }
}

/// Derives the key from the features or vector of a user.
fn key_of(sticky: &Sticky, asker: &CallUser<'_>) -> Option<Vec<u8>> {
    let features = match asker {
        CallUser::User(User::Features(features)) => Some(features),
        CallUser::Features(features) => Some(*features),
        CallUser::User(User::Vector(_) | User::Embedded(_)) => None,
        CallUser::Several => return None,
    };
    if let (Sticky::Feature(name), Some(features)) = (sticky, features)
        && let Some(values) = features.get(name)
    {
        return bytes(values);
    }
    match (asker, features) {
        (_, Some(features)) => bytes(features),
        (CallUser::User(user), None) => bytes(*user),
        _ => None,
    }
}

fn bytes(of: &impl Serialize) -> Option<Vec<u8>> {
    postcard::to_allocvec(of).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::request::Values;

    #[test]
    fn a_user_has_one_key_for_all_calls() {
        let features = |user: i64, age: f32| -> Features {
            [("user".into(), Values::Integers(vec![user])), ("age".into(), Values::Numbers(vec![age]))].into()
        };
        let of = |sticky: &Sticky, features: Features| {
            let by_features = key_of(sticky, &CallUser::Features(&features)).unwrap();
            assert_eq!(key_of(sticky, &CallUser::User(&User::Features(features))).unwrap(), by_features);
            by_features
        };
        let by_user = Sticky::Feature("user".into());
        assert_eq!(of(&by_user, features(7, 0.5)), of(&by_user, features(7, 0.75)));
        assert_ne!(of(&by_user, features(7, 0.5)), of(&by_user, features(8, 0.5)));
        assert_ne!(of(&Sticky::User, features(7, 0.5)), of(&Sticky::User, features(7, 0.75)));
        // Without the feature, the key falls back to all data of the user.
        let other = Sticky::Feature("session".into());
        assert_eq!(of(&other, features(7, 0.5)), of(&Sticky::User, features(7, 0.5)));
        let vector = |x| User::Vector(vec![x, 1.0]);
        assert_ne!(key_of(&by_user, &CallUser::User(&vector(1.0))), key_of(&by_user, &CallUser::User(&vector(2.0))));
        assert_eq!(key_of(&Sticky::User, &CallUser::Several), None);
    }
}
