//! Managed ids of tables in training: their state in tensor files, the removal of ids, and their counts in the report.
//!
//! | tensor | holds |
//! |---|---|
//! | `managed.NAME.ids` `[rows]`, `managed.NAME.seen` `[rows, 3]` | the id of each row, and its occurrences, last step and last time |
//! | `managed.NAME.new.ids` `[n]`, `managed.NAME.new.seen` `[n, 3]` | the same for ids without a row since the last eviction |
//! | `managed.NAME.sketch` | counters of the admission sketch, if there is one |
//! | `managed.NAME` | clock and totals, as JSON |

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::row_set::RowSet;
use sterling_core::error::{Error, Result};
use sterling_embedding::Table;
use sterling_embedding::managed::{IdState, IdTotals, ManagedSpec};
use sterling_embedding::train::MasterTable;
use sterling_storage::files::{TensorFile, Tensors};

/// Managed ids of a table, at the end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ManagedReport {
    /// Number of rows.
    pub rows: u64,
    /// Ids that have a row.
    pub held: u64,
    /// Counters since training began, including earlier runs.
    #[serde(flatten)]
    pub totals: IdTotals,
}

/// Values that are not tensors.
#[derive(Serialize, Deserialize)]
struct About {
    clock: u64,
    totals: IdTotals,
}

/// Returns the master table with the ids of the package's table; `spec` has the settings by which training changes the ids, if any.
///
/// # Errors
/// As [`MasterTable::with_ids`].
pub(crate) fn with_ids(master: MasterTable, table: &Table, spec: Option<ManagedSpec>) -> Result<MasterTable> {
    match table.ids() {
        Some(ids) => master.with_ids(spec, ids.by_row()),
        None => Ok(master),
    }
}

/// Adds the state of a table's ids to a file.
///
/// # Errors
/// As [`TensorFile::add`].
pub(crate) fn write(file: &mut TensorFile<'_>, table: &MasterTable) -> Result<()> {
    let Some(state) = table.id_state() else { return Ok(()) };
    let name = &table.spec().name;
    let IdState { ids, seen, new_ids, new_seen, sketch, clock, totals } = state;
    let (rows, new) = (ids.len(), new_ids.len());
    file.add_owned(format!("managed.{name}.ids"), &[rows], ids)?;
    file.add_owned(format!("managed.{name}.seen"), &[rows, 3], seen)?;
    file.add_owned(format!("managed.{name}.new.ids"), &[new], new_ids)?;
    file.add_owned(format!("managed.{name}.new.seen"), &[new, 3], new_seen)?;
    if !sketch.is_empty() {
        file.add_owned(format!("managed.{name}.sketch"), &[sketch.len()], sketch)?;
    }
    file.add_json(&format!("managed.{name}"), &About { clock, totals })
}

/// Restores the state of a table's ids. If the state is of another run, the package's ids stay, and counts of other ids are
/// dropped.
///
/// # Errors
/// `Corrupt` if tensors are missing or do not fit the table.
pub(crate) fn read(tensors: &Tensors, is_of_this_run: bool, table: &mut MasterTable) -> Result<()> {
    let tensor = format!("managed.{}", table.spec().name);
    if table.id_totals().is_none() || !(is_of_this_run || tensors.has(&tensor)) {
        return Ok(());
    }
    let ids = |name: &str| tensors.get::<i64>(&format!("{tensor}.{name}"), 1).map(|(ids, _)| ids.to_vec());
    let seen = |name: &str| tensors.get::<u64>(&format!("{tensor}.{name}"), 2).map(|(seen, _)| seen.to_vec());
    let sketch = format!("{tensor}.sketch");
    let sketch = if tensors.has(&sketch) { tensors.get::<u8>(&sketch, 1)?.0.to_vec() } else { Vec::new() };
    let About { clock, totals } = tensors.json(&tensor)?;
    let state = IdState {
        ids: ids("ids")?,
        seen: seen("seen")?,
        new_ids: ids("new.ids")?,
        new_seen: seen("new.seen")?,
        sketch,
        clock,
        totals,
    };
    let package = if is_of_this_run { None } else { table.id_state() };
    table.set_id_state(match package {
        Some(package) => kept_id_state(state, package),
        None => state,
    })
}

/// Returns the part of another run's state that applies to a package: counts of the package's ids, and candidate ids
/// that have no row in the package.
fn kept_id_state(mut other: IdState, package: IdState) -> IdState {
    let mut seen = package.seen;
    let rows = other.ids.iter().zip(&package.ids).zip(other.seen.chunks_exact(3)).zip(seen.chunks_exact_mut(3));
    rows.filter(|(((had, has), _), _)| had == has).for_each(|((_, from), to)| to.copy_from_slice(from));
    let held: HashSet<i64> = package.ids.iter().copied().collect();
    let new = other.new_ids.iter().zip(other.new_seen.chunks_exact(3)).filter(|(id, _)| !held.contains(id));
    let (new_ids, new_seen): (Vec<i64>, Vec<&[u64]>) = new.unzip();
    let new_seen = new_seen.concat();
    if other.sketch.len() != package.sketch.len() {
        other.sketch = package.sketch;
    }
    IdState { ids: package.ids, seen, new_ids, new_seen, ..other }
}

/// Removes ids from tables that learn, and bars them for the rest of the run. The rows of these ids are added to the
/// changed rows.
///
/// # Errors
/// `Invalid` for a table that does not learn or has no managed ids.
pub(crate) fn forget<'a>(
    tables: impl Iterator<Item = (&'a mut MasterTable, &'a mut RowSet)>,
    forgotten: &[(String, i64)],
) -> Result<()> {
    let mut by_table: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for (table, id) in forgotten {
        by_table.entry(table).or_default().push(*id);
    }
    for (table, touched) in tables {
        let Some(ids) = by_table.remove(table.spec().name.as_str()) else { continue };
        let rows = table.forget(&ids).map_err(|e| e.within("forget"))?;
        rows.into_iter().for_each(|row| touched.insert(row));
    }
    match by_table.into_keys().next() {
        None => Ok(()),
        Some(name) => {
            let what = format!("forget: table `{name}` is not trained, expected a trained table with managed ids");
            Err(Error::invalid(what))
        }
    }
}

/// Returns the reports of all tables with managed ids.
pub(crate) fn reports<'a>(tables: impl Iterator<Item = &'a MasterTable>) -> BTreeMap<String, ManagedReport> {
    let report = |table: &MasterTable| {
        let (totals, held) = table.id_totals().zip(table.held_ids())?;
        Some((table.spec().name.clone(), ManagedReport { rows: table.spec().rows, held, totals }))
    };
    tables.filter_map(report).collect()
}
