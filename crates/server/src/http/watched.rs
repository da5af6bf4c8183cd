//! A request that went to the canary or to the active version beside it, and what is to be known of its end.

use std::sync::Arc;
use std::time::Instant;

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;

use sterling_core::error::{Error, Kind};
use sterling_snapshot::rollout::{CanaryRun, Place, Side};

/// Says of an answer whether the canary gave it, where a model has one.
const ROLE: HeaderName = HeaderName::from_static("x-sterling-role");

/// A request that is looked at beside those of the other version.
#[derive(Clone)]
pub(super) struct Watched {
    run: Arc<CanaryRun>,
    by: (Place, Side),
    begun: Instant,
}

impl Watched {
    /// A request of a key, from now on.
    pub(super) fn of(run: &Arc<CanaryRun>, key: &[u8]) -> Self {
        Watched { run: run.clone(), by: run.side(key), begun: Instant::now() }
    }

    /// Takes note of how the request ended. A refusal for want of room says nothing of a version.
    pub(super) fn ended(&self, failure: Option<&Error>) {
        match failure.map(Error::kind) {
            Some(Kind::Overloaded | Kind::NotReady) => {}
            Some(_) => self.run.ended(self.by, None),
            None => self.run.ended(self.by, Some(self.begun.elapsed())),
        }
    }

    /// Takes note of how much of the exact answer was served.
    pub(super) fn audited(&self, wanted: usize, found: usize) {
        if wanted > 0 {
            self.run.audited(self.by, found as f64 / wanted as f64);
        }
    }

    /// How many times as often as others it is audited.
    pub(super) fn audited_times(&self) -> f64 {
        self.run.audited_times(self.by.1)
    }

    /// Which version answers it.
    pub(super) fn side(&self) -> Side {
        self.by.1
    }
}

/// Says in an answer which version gave it, where there was a choice.
pub(super) fn tell(watched: Option<&Watched>, response: &mut Response) {
    if let Some(watched) = watched {
        response.headers_mut().insert(ROLE, HeaderValue::from_static(watched.side().name()));
    }
}
