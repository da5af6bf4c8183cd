//! Flows for fair sharing of workers and memory: one flow per access key or, without keys, per address.

use std::net::IpAddr;

use axum::http::Extensions;

use super::access::Caller;
use sterling_core::quota::Flow;

/// Returns the flow of a caller at an address.
pub(super) fn flow(caller: &Caller, address: Option<IpAddr>) -> Flow {
    caller.name().map_or_else(|| address.map_or(Flow::default(), Flow::of_address), Flow::of_key)
}

/// Returns the flow of an admitted request.
pub(super) fn flow_of(extensions: &Extensions) -> Flow {
    extensions.get::<Flow>().copied().unwrap_or_default()
}
