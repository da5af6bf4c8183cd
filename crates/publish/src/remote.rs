//! Rows of embedding tables in a cluster: brought there when a version is published or later, and removed once no version has them.

use std::collections::BTreeSet;
use std::sync::Arc;

use sterling_core::clock::unix_time;
use sterling_core::error::{Error, Result};
use sterling_embedding::Table;
use sterling_embedding::tiers::remote::{Cluster, RowSet, delete, find, stored};
use sterling_snapshot::model::{ModelSpec, Package};
use sterling_snapshot::{Manifest, Store, content_of, rows_on_cluster};
use sterling_storage::files::Checksum;

/// Rows that were loaded within so many seconds are kept: their publication may be under way.
const KEPT_SECONDS: u64 = 3600;

/// The cluster that gets the rows of tables when a version is published.
#[derive(Clone, Debug)]
pub struct Remote {
    /// The cluster.
    pub cluster: Arc<Cluster>,
    /// The tables; none means all that the user tower reads.
    pub tables: Vec<String>,
}

/// Brings the rows of `remote` to the cluster for the version of `manifest`, which is about to be published. `progress` is told
/// rows done and rows in all. Returns the sets that were not there before; they are removed again where a later table cannot be loaded.
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
            "remote table `{name}`: the model has none, expected some of: {}",
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
        let told = |rows: u64| progress((before + rows) as usize, total as usize);
        // Other versions may have what was there already: it is not ours to remove.
        let is_new = stored(&remote.cluster, &named)?.is_none();
        loaded.extend(is_new.then(|| named.clone()));
        if let Err(error) = table.load(&remote.cluster, &named, |p| told(p.rows_done)) {
            unload(remote, &loaded);
            return Err(error);
        }
        before += table.rows();
    }
    Ok(loaded)
}

/// Removes rows of a version that was not published after all.
pub(super) fn unload(remote: &Remote, loaded: &[RowSet]) {
    for named in loaded {
        if let Err(error) = delete(&remote.cluster, named) {
            tracing::warn!(table = %named, %error, "rows of a version that was not published stay in the cluster");
        }
    }
}

/// Brings the rows of a published version to the cluster, or back to where they were lost. What is there stays. `progress` is told
/// rows done and rows in all.
///
/// # Errors
/// `NotFound` for a version that is not published, `Corrupt` where a file is not what its manifest says, `Invalid` for a table that the
/// model does not have; as [`Table::load`].
pub fn load_published(
    remote: &Remote,
    store: &Store,
    model: &str,
    version: u64,
    progress: &dyn Fn(usize, usize),
) -> Result<()> {
    let held = store.bring(model, version)?;
    let manifest = Manifest::read(held.folder())?;
    let package = Package::open(held.folder())?;
    let files: BTreeSet<&String> = package.spec.tables.iter().map(|table| &table.file).collect();
    for file in files {
        let path = held.folder().join(file);
        // Rows are keyed by this checksum, so that damaged ones would be taken for right ones.
        if manifest.files.get(file) != Some(&Checksum::of_file(&path)?) {
            return Err(Error::corrupt(format!("{}: not what the manifest says", path.display())));
        }
    }
    load(remote, &package.spec, &manifest, &package.tables, progress).map(drop)
}

/// Removes the sets of rows that no version of these stores has, of the models that are in these stores. Sets that were loaded within the last
/// hour stay. Returns those that were removed.
///
/// # Errors
/// Where a store or one of its manifests cannot be read, before anything is removed; where the cluster does not answer.
pub fn prune(cluster: &Arc<Cluster>, stores: &[Store]) -> Result<Vec<RowSet>> {
    let mut models = BTreeSet::new();
    let mut contents = BTreeSet::new();
    for store in stores {
        let (whole, cut) = (store.models()?, store.cut_models()?);
        for model in whole.into_iter().chain(cut).collect::<BTreeSet<_>>() {
            for version in store.versions(&model)? {
                contents.extend(contents_of(&store.manifest(&model, version)?));
            }
            for version in store.cut_versions(&model)? {
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
        let is_young = find(cluster, &set)?.is_some_and(|found| now.saturating_sub(found.loaded) < KEPT_SECONDS);
        if !is_young && delete(cluster, &set)? {
            removed.push(set);
        }
    }
    Ok(removed)
}

/// What rows of the files of a version may be keyed by.
fn contents_of(manifest: &Manifest) -> Vec<u64> {
    manifest.files.values().filter_map(|sum| content_of(&sum.xxh3)).collect()
}
