//! `sterling remote`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::output::say;
use super::publish::{connect, shown};
use super::store::{StoreArgs, published};
use sterling_core::error::{Error, Result};
use sterling_embedding::tiers::remote::{Cluster, RowSet, TableState, delete, find, sample, verify};
use sterling_publish::{Stage, load_published, prune};

/// Arguments of `sterling remote`.
#[derive(Debug, clap::Args)]
pub(super) struct Remote {
    /// Node of the cluster, such as redis://10.0.0.1:6379; repeatable
    #[arg(required = true)]
    nodes: Vec<String>,
    /// Count unreadable rows by reading one row per chunk, instead of one per partition; any unreadable row is an error
    #[arg(long)]
    verify: bool,
    /// Upload the rows of a published version, or restore lost ones
    #[arg(long, value_name = "STORE/MODEL/VERSION", conflicts_with = "verify")]
    load: Option<PathBuf>,
    /// With --load: table to upload; repeatable; default: all tables that the user tower reads
    #[arg(long, value_name = "TABLE", requires = "load")]
    table: Vec<String>,
    /// Delete rows of this store's models that no version uses; give all stores that share the cluster. Rows loaded
    /// within the last hour stay
    #[arg(long, value_name = "STORE", conflicts_with_all = ["verify", "load"])]
    prune: Vec<PathBuf>,
    /// Delete rows of a model by their name in the list, even if in use; servers that use them then see degraded rows
    #[arg(long, value_name = "MODEL/ROWS", conflicts_with_all = ["verify", "load", "prune"])]
    delete: Option<String>,
}

impl Remote {
    pub(super) fn run(self) -> Result<()> {
        sterling_telemetry::start_logs(false);
        let cluster = connect(self.nodes)?;
        if let Some(version) = &self.load {
            return load_rows(cluster, version, self.table);
        }
        if !self.prune.is_empty() {
            let stores = self.prune.iter().map(|store| StoreArgs::of(store).existing()).collect::<Result<Vec<_>>>()?;
            let removed = prune(&cluster, &stores)?;
            removed.iter().try_for_each(|set| say(format_args!("deleted {} rows {}", set.label(), set.tag())))?;
            return say(format_args!("deleted {} sets of rows", removed.len()));
        }
        match self.delete {
            Some(requested) => remove(&cluster, &requested),
            None => list(&cluster, self.verify),
        }
    }
}

fn list(cluster: &Arc<Cluster>, all: bool) -> Result<()> {
    say(format_args!("{:32} {:>20} {:>12} {:>9} {:>10} state", "table", "rows", "count", "row bytes", "MB"))?;
    let mut lost = 0;
    let tables = cluster.tables()?;
    for set in &tables {
        let Some(m) = find(cluster, set)? else { continue };
        let trouble = match m.state {
            TableState::Complete => if all { verify(cluster, set) } else { sample(cluster, set) }?.trouble(),
            _ => None,
        };
        lost += u32::from(trouble.is_some());
        let state = trouble.map_or(m.state.name().to_owned(), |why| format!("damaged: {why}"));
        let megabytes = m.rows as f64 * m.row_bytes as f64 / 1e6;
        let (name, tag) = (set.label(), set.tag());
        say(format_args!("{name:32} {tag:>20} {:>12} {:>9} {megabytes:>10.1} {state}", m.rows, m.row_bytes))?;
    }
    let troubles = cluster.misconfigured()?;
    troubles.iter().try_for_each(|line| say(format_args!("warning: {line}")))?;
    match lost {
        0 if all && tables.is_empty() => Err(Error::unavailable(
            "the cluster has no sets of rows, expected at least one; `sterling remote NODE --load STORE/MODEL/VERSION` \
             restores lost ones",
        )),
        0 => Ok(()),
        lost if all => Err(Error::unavailable(format!(
            "rows of {lost} sets cannot be read; `sterling remote NODE --load STORE/MODEL/VERSION` restores lost ones"
        ))),
        _ => Ok(()),
    }
}

/// Loads the rows of `STORE/MODEL/VERSION` into the cluster.
fn load_rows(cluster: Arc<Cluster>, version: &Path, tables: Vec<String>) -> Result<()> {
    let text = version.to_string_lossy();
    let invalid = || Error::invalid(format!("--load {text}: expected STORE/MODEL/VERSION, such as store/debian/3"));
    let (store, model, number) = published(&text).ok_or_else(invalid)?;
    let store = StoreArgs::of(Path::new(store.unwrap_or("."))).existing()?;
    let remote = sterling_publish::Remote { cluster, tables };
    shown(|progress| {
        load_published(&remote, &store, model, number, &|done, total| progress(Stage::Loading, done, total))
    })?;
    say(format_args!("loaded the rows of {model} version {number}"))
}

/// Deletes the rows with this name, `MODEL/ROWS`.
fn remove(cluster: &Arc<Cluster>, requested: &str) -> Result<()> {
    let (model, tag) = requested.rsplit_once('/').ok_or_else(|| {
        Error::invalid(format!("--delete {requested}: expected MODEL/ROWS as listed, such as debian/5f02c81a9e4bd376"))
    })?;
    let tables = cluster.tables()?;
    let named: Vec<&RowSet> = tables.iter().filter(|set| set.model() == model && set.tag() == tag).collect();
    if named.is_empty() {
        let known: BTreeSet<String> = tables.iter().map(|set| format!("{}/{}", set.model(), set.tag())).collect();
        return Err(Error::not_found(format!(
            "the cluster has no rows {requested}; there are: {}",
            if known.is_empty() { "none".into() } else { Vec::from_iter(known).join(", ") }
        )));
    }
    for set in named {
        delete(cluster, set)?;
        say(format_args!("deleted {} rows {}", set.label(), set.tag()))?;
    }
    Ok(())
}
