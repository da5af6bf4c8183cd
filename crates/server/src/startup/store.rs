//! Opens the store of a starting server.

use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use super::updates::{self, with_checkpoints};
use crate::config::Config;
use sterling_core::error::{Error, Kind, Result};
use sterling_core::tasks;
use sterling_snapshot::Store;
use sterling_storage::objects;

/// Longest wait of a starting server for its store if it has fetched versions to serve.
const STORE_TIMEOUT: Duration = Duration::from_secs(2);

/// Opens the store of this configuration, without accessing it.
///
/// # Errors
/// `NotFound` or `Invalid` with the folder of the store or of the updates.
pub fn store(config: &Config) -> Result<Store> {
    check_folder(&config.store)?;
    config.updates.as_deref().map_or(Ok(()), updates::check)?;
    let store = Store::open(&config.store, &config.cache)?;
    Ok(match config.shard {
        Some(shard) => store.of_shard(shard),
        None => store,
    })
}

/// Opens the store of a starting server. A store without working conditional writes is rejected. An unreachable store is waited
/// for only if no version was fetched before.
fn asked(config: &Config) -> Result<Store> {
    let store = store(config)?;
    let asked = {
        let store = store.clone();
        move || -> Result<()> {
            prove(&store)?;
            // If the store does not answer, previously fetched versions are served.
            let _ = store.renew();
            Ok(())
        }
    };
    if !store.has_copies(config.model.as_deref()) {
        asked()?;
        return Ok(store);
    }
    let (tell, reported) = sync_channel(1);
    let ask = move || {
        let answer = asked();
        if let Err(error) = &answer {
            tracing::error!(%error, "store check failed; do not publish to this store");
        }
        // The receiver may have timed out.
        let _ = tell.send(answer);
    };
    tasks::STORE_CHECK.start(ask)?;
    match reported.recv_timeout(STORE_TIMEOUT) {
        Ok(answer) => answer?,
        Err(_) => {
            tracing::warn!(store = store.name(), "the store has not answered yet; serving previously fetched versions")
        }
    }
    Ok(store)
}

/// Rejects a store whose conditional writes do not exclude concurrent publishers. A store that does not answer is accepted.
///
/// # Errors
/// As [`Store::prove`].
pub fn prove(store: &Store) -> Result<()> {
    match store.prove() {
        Err(e) if e.kind() == Kind::Unavailable => {
            tracing::warn!(error = %e, "the store does not answer yet");
            Ok(())
        }
        other => other,
    }
}

/// Opens the store, with the checkpoints of its shard if updates are configured.
pub(super) fn open(config: &Config) -> Result<Store> {
    let store = asked(config)?;
    let store = match (&config.updates, config.shard) {
        (Some(updates), Some(_)) => with_checkpoints(updates, store),
        _ => store,
    };
    if let Some(model) = config.model.as_deref().filter(|m| store.versions(m).map_or(true, |v| v.is_empty())) {
        let what = config.shard.map_or("version".into(), |shard| format!("version with a shard {shard}"));
        tracing::warn!("model `{model}` has no {what} in {} yet, waiting for one", config.store.display());
    }
    Ok(store)
}

/// Rejects a store whose folder does not exist: most often a typing error, and an empty store would never get ready.
///
/// # Errors
/// `NotFound` or `Io` with the folder; `Invalid` for a file.
pub fn check_folder(store: &Path) -> Result<()> {
    match std::fs::metadata(store) {
        _ if objects::is_url(store) => Ok(()),
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => Err(Error::invalid(format!("store {}: expected a folder", store.display()))),
        Err(e) => Err(Error::io(format!("store {}", store.display()), e)),
    }
}
