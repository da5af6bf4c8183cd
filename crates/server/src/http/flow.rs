//! Flows for fair sharing of workers and memory: one flow per access key or, without keys, per address; with the key of a router,
//! one per client of the router.

use std::net::IpAddr;

use axum::http::Extensions;

use super::access::Caller;
use sterling_core::quota::Flow;

/// Flow by which a connection is scheduled: that of the key or address. A router sends requests of all its clients over the same
/// connections, so the client of the last request says nothing about the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectionFlow(pub(super) Flow);

/// Returns the flow of a request from a caller at an address, and that of its connection. `client` is the value of the header
/// `CLIENT_HEADER`, which counts only with the key of a router: other callers could otherwise pass for many, and take the share of
/// each.
pub(super) fn flows(caller: &Caller, address: Option<IpAddr>, client: Option<&[u8]>) -> (Flow, ConnectionFlow) {
    let own = caller.name().map_or_else(|| address.map_or(Flow::default(), Flow::of_address), Flow::of_key);
    let number = client.filter(|_| caller.is_router()).and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
    (number.map_or(own, |number| own.of_client(number)), ConnectionFlow(own))
}

/// Returns the flow of an admitted request.
pub(super) fn flow_of(extensions: &Extensions) -> Flow {
    extensions.get::<Flow>().copied().unwrap_or_default()
}
