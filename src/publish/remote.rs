//! Rows of embedding tables that publishing brings to a cluster.

use std::sync::Arc;

use crate::embedding::Table;
use crate::embedding::tiers::remote::{Cluster, TableVersion, delete};
use crate::error::{Error, Kind, Result};
use crate::model::ModelSpec;
use crate::snapshot::{Manifest, rows_on_cluster};

/// The cluster that gets the rows of tables when a version is published.
#[derive(Clone, Debug)]
pub struct Remote {
    /// The cluster.
    pub cluster: Arc<Cluster>,
    /// The tables; none means all that the user tower reads.
    pub tables: Vec<String>,
}

/// Brings the rows of `tables` to the cluster for the version of `manifest`, which is about to be published. `progress` is told
/// rows done and rows in all. Returns what was written; it is removed again where a later table cannot be loaded.
pub(super) fn load(
    remote: &Remote,
    spec: &ModelSpec,
    manifest: &Manifest,
    tables: &[Arc<Table>],
    progress: &dyn Fn(usize, usize),
) -> Result<Vec<TableVersion>> {
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
        match table.load(&remote.cluster, &named, |p| told(p.rows_done)) {
            // What was there already is perhaps served from another store.
            Ok(report) => loaded.extend((report.progress.bytes_written > 0).then_some(named)),
            Err(error) => {
                // Rows of another load under the same version are not ours to remove.
                loaded.extend((error.kind() != Kind::Conflict).then_some(named));
                unload(remote, &loaded);
                return Err(error);
            }
        }
        before += table.rows();
    }
    Ok(loaded)
}

/// Removes rows of a version that was not published after all.
pub(super) fn unload(remote: &Remote, loaded: &[TableVersion]) {
    for named in loaded {
        if let Err(error) = delete(&remote.cluster, named) {
            tracing::warn!(table = %named, %error, "rows of a version that was not published stay in the cluster");
        }
    }
}
