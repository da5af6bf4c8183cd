//! Flows for fair sharing of workers and memory: one flow per access key or, without keys, per address; with the key of a router,
//! one per client of the router.

use std::net::IpAddr;

use axum::http::Extensions;

use super::access::Caller;
use sterling_core::quota::Flow;

/// Returns the flow of a caller at an address. `client` is the value of the header `CLIENT_HEADER`, which counts only with the key of
/// a router: other callers could otherwise pass for many, and take the share of each.
pub(super) fn flow(caller: &Caller, address: Option<IpAddr>, client: Option<&[u8]>) -> Flow {
    let own = caller.name().map_or_else(|| address.map_or(Flow::default(), Flow::of_address), Flow::of_key);
    let number = client.filter(|_| caller.is_router()).and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
    number.map_or(own, |number| own.of_client(number))
}

/// Returns the flow of an admitted request.
pub(super) fn flow_of(extensions: &Extensions) -> Flow {
    extensions.get::<Flow>().copied().unwrap_or_default()
}
