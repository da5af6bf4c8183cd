//! Whose requests are whose, where callers share workers and memory: those of a key, or, without keys, of an address.

use std::net::IpAddr;

use axum::http::Extensions;

use super::access::Caller;
use sterling_serving::quota::Flow;

/// The flow of a caller at an address.
pub(super) fn flow(caller: &Caller, address: Option<IpAddr>) -> Flow {
    caller.name().map_or_else(|| address.map_or(Flow::default(), Flow::of_address), Flow::of_key)
}

/// The flow of a request that was let in.
pub(super) fn flow_of(extensions: &Extensions) -> Flow {
    extensions.get::<Flow>().copied().unwrap_or_default()
}
