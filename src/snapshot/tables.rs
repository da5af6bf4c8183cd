//! What publishing does with embedding tables: converts their rows, and brings them to a cluster.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::manifest::Manifest;
use super::placement::rows_on_cluster;
use crate::embedding::tiers::remote::{Cluster, TableVersion, delete};
use crate::embedding::{RowFormat, Table};
use crate::error::{Error, Kind, Result};
use crate::files::{Checksum, TensorFile};
use crate::model::{ModelSpec, Package};

/// The cluster that gets the rows of tables when a version is published.
#[derive(Clone, Debug)]
pub struct Remote {
    /// The cluster.
    pub cluster: Arc<Cluster>,
    /// The tables; none means all that the user tower reads.
    pub tables: Vec<String>,
}

/// The tables of a package in the formats that a recipe asks for, and `model.toml` as it is with them.
pub(super) fn converted(
    package: &Package,
    formats: &BTreeMap<String, RowFormat>,
) -> Result<(ModelSpec, Vec<Arc<Table>>)> {
    let known = || package.tables.iter().map(|t| t.name()).collect::<Vec<_>>().join(", ");
    if let Some(name) = formats.keys().find(|n| package.tables.iter().all(|t| t.name() != *n)) {
        return Err(Error::invalid(format!(
            "tables.{name}: the model has no such table, expected some of: {}",
            known()
        )));
    }
    let mut spec = package.spec.clone();
    let convert = |table: &Arc<Table>| match formats.get(table.name()) {
        Some(format) if *format != table.spec().format => table.converted(*format).map(Arc::new),
        _ => Ok(table.clone()),
    };
    let tables: Vec<Arc<Table>> = package.tables.iter().map(convert).collect::<Result<_>>()?;
    for (spec, table) in spec.tables.iter_mut().zip(&tables) {
        let format = table.spec().format;
        spec.format = format.is_quantised().then(|| format.name().to_owned());
    }
    Ok((spec, tables))
}

/// True where a table of this file of the package has another format by now.
pub(super) fn is_converted(file: &str, package: &Package, tables: &[Arc<Table>]) -> bool {
    in_file(file, package, tables).any(|(before, now)| before.spec().format != now.spec().format)
}

/// Writes the tables that lie in one file of the package.
pub(super) fn write(path: &Path, file: &str, package: &Package, tables: &[Arc<Table>]) -> Result<Checksum> {
    let mut out = TensorFile::new();
    in_file(file, package, tables).try_for_each(|(_, table)| table.encode(&mut out))?;
    out.write(path)
}

/// The tables of one file as the package has them and as they are published.
fn in_file<'a>(
    file: &'a str,
    package: &'a Package,
    tables: &'a [Arc<Table>],
) -> impl Iterator<Item = (&'a Table, &'a Table)> {
    let both = package.tables.iter().zip(tables).map(|(before, now)| (&**before, &**now));
    package.spec.tables.iter().zip(both).filter(move |(spec, _)| spec.file == file).map(|(_, both)| both)
}

/// Brings the rows of `tables` to the cluster for the version of `manifest`, which is about to be published. `progress` is told rows
/// done and rows in all. Returns what was written; it is removed again where a later table cannot be loaded.
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
        true => spec.readers(table.name()).next().is_some(),
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
