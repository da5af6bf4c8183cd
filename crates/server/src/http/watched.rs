//! Observes a request while a canary is active, to compare it with the active version.

use std::sync::Arc;
use std::time::Instant;

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;

use sterling_core::error::{Error, Kind};
use sterling_rollout::{CanaryRun, KeyHash, Side};

/// Header that reports whether the canary or the active version answered.
const ROLE: HeaderName = HeaderName::from_static("x-sterling-role");

/// Request that is observed for the comparison of canary and active version.
#[derive(Clone)]
pub(super) struct Watched {
    run: Arc<CanaryRun>,
    by: (KeyHash, Side),
    begun: Instant,
}

impl Watched {
    /// Starts the observation of a request with this key.
    pub(super) fn of(run: &Arc<CanaryRun>, key: &[u8]) -> Self {
        Watched { run: run.clone(), by: run.side(key), begun: Instant::now() }
    }

    /// Records the outcome of the observed request. Rejections for lack of capacity say nothing about a version.
    pub(super) fn ended(&self, failure: Option<&Error>) {
        match failure.map(Error::kind) {
            Some(Kind::Overloaded | Kind::NotReady) => {}
            Some(_) => self.run.ended(self.by, None),
            None => self.run.ended(self.by, Some(self.begun.elapsed())),
        }
    }

    /// Records the recall of the served answer.
    pub(super) fn audited(&self, wanted: usize, found: usize) {
        if wanted > 0 {
            self.run.audited(self.by, found as f64 / wanted as f64);
        }
    }

    /// Returns the factor by which the audit samples this version more often.
    pub(super) fn audited_times(&self) -> f64 {
        self.run.audited_times(self.by.1)
    }

    /// Returns the version that answers the request.
    pub(super) fn side(&self) -> Side {
        self.by.1
    }
}

/// Sets the role header of an answer, while a canary is active.
pub(super) fn set_role_header(watched: Option<&Watched>, response: &mut Response) {
    if let Some(watched) = watched {
        response.headers_mut().insert(ROLE, HeaderValue::from_static(watched.side().name()));
    }
}
