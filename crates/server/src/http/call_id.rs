//! What names a call in the log: its id, which its answer has too, and its trace. What is asked of other processes for it is sent along with both.

use axum::http::Extensions;

use sterling_core::request::Origin;

/// The id and the trace of a request, for those who write them down or pass them on.
#[derive(Clone)]
pub(super) struct CallId(pub(super) Origin);

impl CallId {
    /// The id of a request which `layers::observe` has seen.
    pub(super) fn of(extensions: &Extensions) -> String {
        let id = extensions.get::<CallId>().and_then(|CallId(origin)| origin.id.as_deref());
        id.unwrap_or_default().to_owned()
    }

    /// What calls to other processes for a request carry.
    pub(super) fn origin(extensions: &Extensions) -> Origin {
        extensions.get::<CallId>().map_or_else(Origin::default, |CallId(origin)| origin.clone())
    }
}
