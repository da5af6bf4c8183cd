//! Retention of updates and merged versions.
//!
//! A journal retains the updates that a version may still need: those after the lowest position among the versions in memory
//! (active, previous, labelled and manually loaded versions) and newer published versions. For a shard with a checkpoint, the
//! position of the previous checkpoint counts; while a label points to the shard, everything is retained.
//!
//! Merged versions and checkpoints are retained while they, or an older version, are in memory; published versions are never
//! deleted.

use std::collections::BTreeMap;

use sterling_core::error::{Kind, Result};
use sterling_journal::Topic;
use sterling_serving::fresh::UpdateFeeds;
use sterling_serving::registry::Registry;
use sterling_snapshot::Store;

/// Truncates updates and deletes merged versions of a model that no version needs any more.
///
/// # Errors
/// `Io` if a file cannot be read or deleted; remaining files are deleted by the next call.
pub fn release(registry: &Registry, store: &Store, feeds: &UpdateFeeds, model: &str) -> Result<()> {
    let loaded = registry.all_in_memory(model);
    let numbers = loaded.iter().map(|loaded| loaded.version());
    let (Some(oldest), Some(newest)) = (numbers.clone().min(), numbers.clone().max()) else { return Ok(()) };
    let labels = registry.labels(model)?;
    // Versions with different shard counts have different journals.
    let mut needed: BTreeMap<Topic, u64> = BTreeMap::new();
    let mut need = |topic: Topic, position: u64| {
        let lowest = needed.entry(topic).or_insert(position);
        *lowest = position.min(*lowest);
    };
    for loaded in &loaded {
        let main = loaded.view().main().clone();
        let (topic, position) = (main.manifest.topic(), main.manifest.position);
        let behind = store.position_after_checkpoint(model, loaded.version())?.unwrap_or(position);
        // A label on a version with shards retains its complete journal, regardless of checkpoints.
        let is_held = topic.shard.is_some() && labels.values().any(|version| *version == loaded.version());
        need(topic, if is_held { 0 } else { behind.min(position) });
    }
    for version in store.versions(model)?.into_iter().filter(|version| *version > newest || *version < oldest) {
        let manifest = match store.manifest(model, version) {
            // No server can load this version: it is damaged, or its files are being deleted or copied.
            Err(error) if matches!(error.kind(), Kind::Corrupt | Kind::NotFound) => {
                tracing::warn!(model, version, %error, "version cannot be read; no updates are retained for it, and its files stay");
                continue;
            }
            other => other?,
        };
        if version > newest {
            need(manifest.topic(), manifest.position);
        } else if manifest.merged.is_some() {
            store.remove(model, version)?;
            tracing::info!(model, version, "merged version deleted; later versions contain its updates");
        }
    }
    store.delete_checkpoints(model, oldest)?;
    needed
        .iter()
        .filter_map(|(topic, position)| Some((feeds.of(topic)?, position)))
        .try_for_each(|(feed, position)| feed.release(*position))
}
