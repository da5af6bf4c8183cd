//! Where updates are kept, as the command line and the configuration name it.

use std::path::Path;

use sterling_core::error::{Error, Result};
use sterling_journal::{Logs, StreamOptions};
use sterling_serving::fresh::Feeds;
use sterling_snapshot::Store;
use sterling_storage::objects;

/// The folder of folds. No model and no journal has such a name.
const FOLDS: &str = ".folded";

/// Whether updates are kept in streams of a cluster, and in no folder.
pub fn are_streams(updates: &Path) -> bool {
    ["nats://", "tls://"].iter().any(|scheme| updates.to_string_lossy().starts_with(scheme))
}

/// Refuses a place of updates that is there and is no folder, and URLs of anything but streams.
pub(super) fn check(updates: &Path) -> Result<()> {
    if are_streams(updates) {
        return Ok(());
    }
    if objects::is_url(updates) {
        let what = "expected a folder, or streams as nats://HOST:PORT";
        return Err(Error::invalid(format!("updates {}: {what}", updates.display())));
    }
    match std::fs::metadata(updates) {
        Ok(found) if !found.is_dir() => {
            Err(Error::invalid(format!("updates {}: expected a folder", updates.display())))
        }
        // One that is not there is made.
        _ => Ok(()),
    }
}

/// The updates of a folder, or of streams, how far which came is noted in the folder of the store.
///
/// # Errors
/// `Unavailable` where no server of the cluster answers; `Unsupported` where this build has no streams, or the brokers do not keep
/// to what the options ask for.
pub fn open_updates(updates: &Path, options: &StreamOptions, store: &Store) -> Result<Feeds> {
    match are_streams(updates) {
        true => streams(updates.to_string_lossy().into_owned(), options.clone(), store.root()),
        false => Ok(Feeds::new(Logs::below(updates))),
    }
}

/// The store of a shard, with the folder where its updates are folded in: in that of the journals, for folds are what these let go of;
/// of streams in that of the store, for all servers that share it follow the same ones.
pub fn with_folds(updates: &Path, store: Store) -> Store {
    let folder = if are_streams(updates) { store.root().to_owned() } else { updates.to_owned() };
    store.with_folds(folder.join(FOLDS))
}

#[cfg(feature = "nats")]
fn streams(servers: String, streams: StreamOptions, notes: &Path) -> Result<Feeds> {
    use sterling_journal::nats::{Nats, NatsOptions};
    Ok(Feeds::new(Nats::connect(NatsOptions { servers, streams, notes: Some(notes.to_owned()) })?))
}

#[cfg(not(feature = "nats"))]
fn streams(_servers: String, _streams: StreamOptions, _notes: &Path) -> Result<Feeds> {
    // The address may hold a password.
    let what = "updates: this program was built without streams, expected a folder, or a build with the feature `nats`";
    Err(Error::unsupported(what))
}
