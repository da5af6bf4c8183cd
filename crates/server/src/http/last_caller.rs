//! Whose requests a connection brings, by which it has its turns.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use axum::http::{Response, StatusCode};

use sterling_serving::quota::Flow;

/// How requests are turned away, that are not looked into.
const TURNED_AWAY: [StatusCode; 4] =
    [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN, StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];

/// The caller of a connection, as far as it is known.
#[derive(Debug)]
pub(super) struct LastCaller {
    /// As a [`Flow`].
    flow: AtomicU64,
    /// Whether a request was turned away.
    is_turned_away: AtomicBool,
}

impl LastCaller {
    /// Whoever is at an address.
    pub(super) fn at(address: IpAddr) -> Self {
        LastCaller { flow: AtomicU64::new(Flow::of_address(address).0), is_turned_away: AtomicBool::new(false) }
    }

    /// The caller of the last request; before the first one whoever is at the address.
    pub(super) fn flow(&self) -> Flow {
        Flow(self.flow.load(Ordering::Relaxed))
    }

    /// Takes in whose request an answer is to; one that was let in by nobody's name says nothing.
    pub(super) fn answers<B>(&self, response: &Response<B>) {
        if let Some(&caller) = response.extensions().get() {
            self.called_by(caller);
        }
        if TURNED_AWAY.contains(&response.status()) {
            self.turn_away();
        }
    }

    /// Takes in that a request was turned away, whatever it asked.
    pub(super) fn turn_away(&self) {
        self.is_turned_away.store(true, Ordering::Relaxed);
    }

    /// Whether a request was turned away since this was asked last.
    pub(super) fn was_turned_away(&self) -> bool {
        self.is_turned_away.load(Ordering::Relaxed) && self.is_turned_away.swap(false, Ordering::Relaxed)
    }

    /// Takes in who calls.
    pub(super) fn called_by(&self, caller: Flow) {
        self.flow.store(caller.0, Ordering::Relaxed);
    }
}
