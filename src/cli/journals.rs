//! Where updates are kept, as the command line and the configuration name it.

use std::path::Path;

use crate::error::Result;
use crate::fresh::Feeds;
use crate::journal::Logs;

/// Whether updates are kept in streams of a cluster, and in no folder.
pub(super) fn are_streams(updates: &Path) -> bool {
    ["nats://", "tls://"].iter().any(|scheme| updates.to_string_lossy().starts_with(scheme))
}

/// The updates of a folder, or of streams, of which those that are made keep so many copies.
///
/// # Errors
/// `Unavailable` where no server of the cluster answers; `Unsupported` where this build has no streams.
pub(super) fn open(updates: &Path, replicas: usize) -> Result<Feeds> {
    match are_streams(updates) {
        true => streams(updates.to_string_lossy().into_owned(), replicas),
        false => Ok(Feeds::new(Logs::below(updates))),
    }
}

#[cfg(feature = "nats")]
fn streams(servers: String, replicas: usize) -> Result<Feeds> {
    use crate::journal::nats::{Nats, NatsOptions};
    Ok(Feeds::new(Nats::connect(NatsOptions { servers, replicas })?))
}

#[cfg(not(feature = "nats"))]
fn streams(servers: String, _replicas: usize) -> Result<Feeds> {
    let what =
        format!("updates: {servers}: this program was built without streams, expected a build with the feature `nats`");
    Err(crate::error::Error::unsupported(what))
}
