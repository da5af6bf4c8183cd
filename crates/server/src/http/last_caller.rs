//! Caller of a connection's last request, by which the connection is scheduled.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use axum::http::{Response, StatusCode};

use super::flow::ConnectionFlow;
use sterling_core::quota::Flow;

/// Status codes of requests that are rejected before their content matters.
const REJECTION_STATUSES: [StatusCode; 4] =
    [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN, StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];

/// Last known caller of a connection.
#[derive(Debug)]
pub(super) struct LastCaller {
    /// The number of a [`Flow`].
    flow: AtomicU64,
    /// True if a request was rejected since the last check.
    is_rejected: AtomicBool,
}

impl LastCaller {
    /// Creates the state of a new connection, whose caller is only known by its address.
    pub(super) fn at(address: IpAddr) -> Self {
        LastCaller { flow: AtomicU64::new(Flow::of_address(address).0), is_rejected: AtomicBool::new(false) }
    }

    /// Returns the caller of the last request, or the address' caller before the first request.
    pub(super) fn flow(&self) -> Flow {
        Flow(self.flow.load(Ordering::Relaxed))
    }

    /// Records the caller of an answered request, if the answer names one, and whether the request was rejected.
    pub(super) fn answers<B>(&self, response: &Response<B>) {
        if let Some(&ConnectionFlow(caller)) = response.extensions().get() {
            self.called_by(caller);
        }
        if REJECTION_STATUSES.contains(&response.status()) {
            self.record_rejection();
        }
    }

    /// Records that a request was rejected.
    pub(super) fn record_rejection(&self) {
        self.is_rejected.store(true, Ordering::Relaxed);
    }

    /// Returns whether a request was rejected since the last call.
    pub(super) fn was_rejected(&self) -> bool {
        self.is_rejected.load(Ordering::Relaxed) && self.is_rejected.swap(false, Ordering::Relaxed)
    }

    /// Records the caller of a request.
    pub(super) fn called_by(&self, caller: Flow) {
        self.flow.store(caller.0, Ordering::Relaxed);
    }
}
