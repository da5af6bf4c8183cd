//! Location of updates, as configured or given on the command line.

use std::path::Path;

use sterling_core::error::{Error, Result};
use sterling_journal::{Logs, StreamOptions};
use sterling_serving::fresh::UpdateFeeds;
use sterling_snapshot::Store;
use sterling_storage::objects;

/// Folder of checkpoints. The name is invalid for models and journals.
const FOLDS: &str = ".folded";

/// Returns whether updates are in streams of a NATS cluster rather than in a folder.
pub fn are_streams(updates: &Path) -> bool {
    ["nats://", "tls://"].iter().any(|scheme| updates.to_string_lossy().starts_with(scheme))
}

/// Rejects a location of updates that is neither a folder nor the URL of streams.
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
        // A missing folder is created.
        _ => Ok(()),
    }
}

/// Opens the updates of a folder, or of streams. Positions of consumed streams are stored in the store's folder.
///
/// # Errors
/// `Unavailable` if no server of the cluster answers; `Unsupported` if this build has no streams, or the brokers do not support
/// the options.
pub fn open_updates(updates: &Path, options: &StreamOptions, store: &Store) -> Result<UpdateFeeds> {
    match are_streams(updates) {
        true => streams(updates.to_string_lossy().into_owned(), options.clone(), store.root()),
        false => Ok(UpdateFeeds::new(Logs::below(updates))),
    }
}

/// Returns the store with the checkpoint folder of a shard. Checkpoints replace truncated journal entries, so they are stored in
/// the journals' folder. Checkpoints of streams are stored in the store's folder, because all servers that share the store follow
/// the same streams.
pub fn with_checkpoints(updates: &Path, store: Store) -> Store {
    let folder = if are_streams(updates) { store.root().to_owned() } else { updates.to_owned() };
    store.with_checkpoints(folder.join(FOLDS))
}

#[cfg(feature = "nats")]
fn streams(servers: String, streams: StreamOptions, notes: &Path) -> Result<UpdateFeeds> {
    use sterling_journal::nats::{Nats, NatsOptions};
    Ok(UpdateFeeds::new(Nats::connect(NatsOptions { servers, streams, notes: Some(notes.to_owned()) })?))
}

#[cfg(not(feature = "nats"))]
fn streams(_servers: String, _streams: StreamOptions, _notes: &Path) -> Result<UpdateFeeds> {
    // The address may contain a password.
    let what = "updates: this program was built without streams, expected a folder, or a build with the feature `nats`";
    Err(Error::unsupported(what))
}
