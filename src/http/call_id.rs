//! The id of a call, which its answer and its lines in the log have.

use axum::extract::Request;
use axum::http::HeaderValue;

/// The id of a request, for those who write it down.
#[derive(Clone)]
pub(super) struct CallId(pub(super) HeaderValue);

impl CallId {
    /// That of a request which `layers::observe` has seen.
    pub(super) fn of(request: &Request) -> String {
        let id = request.extensions().get::<CallId>().and_then(|CallId(id)| id.to_str().ok());
        id.unwrap_or_default().to_owned()
    }
}
