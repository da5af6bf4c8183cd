//! Identity of a call in logs: its id, which the answer also carries, and its trace. Calls to other processes carry id and trace.

use axum::http::Extensions;

use sterling_core::request::Origin;

/// Id and trace of a request, for logs and outgoing calls.
#[derive(Clone)]
pub(super) struct CallId(pub(super) Origin);

impl CallId {
    /// Returns the id of a request that passed `layers::observe`.
    pub(super) fn of(extensions: &Extensions) -> String {
        let id = extensions.get::<CallId>().and_then(|CallId(origin)| origin.id.as_deref());
        id.unwrap_or_default().to_owned()
    }

    /// Returns the id and trace that outgoing calls carry.
    pub(super) fn origin(extensions: &Extensions) -> Origin {
        extensions.get::<CallId>().map_or_else(Origin::default, |CallId(origin)| origin.clone())
    }
}
