//! Embedding table rows in a Redis Cluster: loaded when a version is published or later, and deleted once no version refers to the
//! rows.

use std::collections::BTreeSet;
use std::sync::Arc;

use sterling_core::clock::unix_time;
use sterling_core::error::{Error, Result};
use sterling_embedding::Table;
use sterling_embedding::tiers::remote::{Cluster, RowSet, delete, find, stored};
use sterling_snapshot::model::{ModelSpec, Package};
use sterling_snapshot::{Manifest, Store, content_of, rows_on_cluster};
use sterling_storage::files::Checksum;

/// Age in seconds below which rows are retained, because the publication that loaded them may still be running.
const RETAINED_SECONDS: u64 = 3600;

/// Cluster that receives the rows of tables when a version is published.
#[derive(Clone, Debug)]
pub struct Remote {
    /// Cluster client.
    pub cluster: Arc<Cluster>,
    /// Names of the tables; empty means all tables that the user tower reads.
    pub tables: Vec<String>,
}

/// Loads the rows of `remote` into the cluster for the version of `manifest`, which is about to be published. `progress` receives
/// the numbers of finished and of all rows. Returns the newly loaded row sets; deletes these sets again if a later table cannot be
/// loaded.
pub(super) fn load(
    remote: &Remote,
    spec: &ModelSpec,
    manifest: &Manifest,
    tables: &[Arc<Table>],
    progress: &dyn Fn(usize, usize),
) -> Result<Vec<RowSet>> {
    let known = || tables.iter().map(|t| t.name()).collect::<Vec<_>>().join(", ");
    if let Some(name) = remote.tables.iter().find(|n| tables.iter().all(|t| t.name() != *n)) {
        return Err(Error::invalid(format!(
            "remote table `{name}`: the model has no such table, expected some of: {}",
            known()
        )));
    }
    let wanted = |table: &&Arc<Table>| match remote.tables.is_empty() {
        true => spec.readers(table.name()).next().is_some() && !spec.serves_candidates(table.name()),
        false => remote.tables.iter().any(|n| n == table.name()),
    };
    let tables: Vec<&Arc<Table>> = tables.iter().filter(wanted).collect();
    let total: u64 = tables.iter().map(|t| t.rows()).sum();
    let mut before = 0;
    let mut loaded = Vec::new();
    for table in tables {
        let named = rows_on_cluster(spec, manifest, table.name())?;
        let reported = |rows: u64| progress((before + rows) as usize, total as usize);
        // Other versions may use rows that exist already: such rows must not be deleted.
        let is_new = stored(&remote.cluster, &named)?.is_none();
        loaded.extend(is_new.then(|| named.clone()));
        if let Err(error) = table.load(&remote.cluster, &named, |p| reported(p.rows_done)) {
            unload(remote, &loaded);
            return Err(error);
        }
        before += table.rows();
    }
    Ok(loaded)
}

/// Deletes rows of a version that was not published after all.
pub(super) fn unload(remote: &Remote, loaded: &[RowSet]) {
    for named in loaded {
        if let Err(error) = delete(&remote.cluster, named) {
            tracing::warn!(table = %named, %error, "rows of a version that was not published stay in the cluster");
        }
    }
}

/// Loads the rows of a published version into the cluster, or restores lost rows. Existing rows stay. `progress` receives the
/// numbers of finished and of all rows.
///
/// # Errors
/// `NotFound` for a version that is not published, `Corrupt` if a file does not match its manifest, `Invalid` for a table that
/// the model does not have; as [`Table::load`].
pub fn load_published(
    remote: &Remote,
    store: &Store,
    model: &str,
    version: u64,
    progress: &dyn Fn(usize, usize),
) -> Result<()> {
    let held = store.ensure_local(model, version)?;
    let manifest = Manifest::read(held.folder())?;
    let package = Package::open(held.folder())?;
    let files: BTreeSet<&String> = package.spec.tables.iter().map(|table| &table.file).collect();
    for file in files {
        let path = held.folder().join(file);
        // Rows are keyed by this checksum, so damaged rows would be accepted as valid.
        if manifest.files.get(file) != Some(&Checksum::of_file(&path)?) {
            return Err(Error::corrupt(format!("{}: differs from the manifest", path.display())));
        }
    }
    load(remote, &package.spec, &manifest, &package.tables, progress).map(drop)
}

/// Deletes the row sets of models in these stores that no version refers to. Row sets that were loaded within the
/// last hour are kept. Returns the deleted row sets.
///
/// # Errors
/// Fails if a store or one of its manifests cannot be read, before anything is deleted; if the cluster does not respond.
pub fn prune(cluster: &Arc<Cluster>, stores: &[Store]) -> Result<Vec<RowSet>> {
    let mut models = BTreeSet::new();
    let mut contents = BTreeSet::new();
    for store in stores {
        let (complete, cut) = (store.models()?, store.sharded_models()?);
        for model in complete.into_iter().chain(cut).collect::<BTreeSet<_>>() {
            for version in store.versions(&model)? {
                contents.extend(contents_of(&store.manifest(&model, version)?));
            }
            for version in store.sharded_versions(&model)? {
                contents.extend(store.shards(&model, version)?.1.iter().flat_map(contents_of));
            }
            models.insert(model);
        }
    }
    let now = unix_time().as_secs();
    let mut removed = Vec::new();
    for set in cluster.tables()? {
        if !models.contains(set.model()) || contents.contains(&set.content()) {
            continue;
        }
        let is_young = find(cluster, &set)?.is_some_and(|found| now.saturating_sub(found.loaded) < RETAINED_SECONDS);
        if !is_young && delete(cluster, &set)? {
            removed.push(set);
        }
    }
    Ok(removed)
}

/// Returns the keys that the rows of a version's files may have in a cluster.
fn contents_of(manifest: &Manifest) -> Vec<u64> {
    manifest.files.values().filter_map(|sum| content_of(&sum.xxh3)).collect()
}
