//! What is kept for how long.
//!
//! A journal keeps the updates that a version may still have to follow: those after the lowest position among the versions in
//! memory (the active one, the one before it, those with a label or loaded by hand) and those that were published since.
//! Versions that were merged are kept as long as they are in memory or newer than one that is; published ones are never removed.

use crate::error::Result;
use crate::fresh::Feed;
use crate::registry::Registry;
use crate::snapshot::Store;

/// Lets go of updates and merged versions of a model that no version needs any more.
///
/// # Errors
/// `Io` where a file cannot be read or removed; what is left goes the next time.
pub fn release(registry: &Registry, store: &Store, feed: &Feed, model: &str) -> Result<()> {
    let loaded = registry.all_in_memory(model);
    let numbers = loaded.iter().map(|loaded| loaded.version());
    let (Some(oldest), Some(newest)) = (numbers.clone().min(), numbers.clone().max()) else { return Ok(()) };
    let mut lowest = loaded.iter().map(|loaded| loaded.view().main().manifest.position).min().unwrap_or(0);
    for version in store.versions(model)? {
        let manifest = || store.manifest(model, version);
        if version > newest {
            lowest = lowest.min(manifest()?.position);
        } else if version < oldest && manifest()?.merged.is_some() {
            store.remove(model, version)?;
            tracing::info!(model, version, "removed: later versions have its updates");
        }
    }
    feed.release(lowest)
}
