//! Tables in training with managed ids: reassigned rows get the initial value of their new id.

use super::batch::PreparedBatch;
use super::master::{MasterRows, MasterTable};
use super::tables::LearningTables;
use crate::managed::{FREE, IdLearner, IdState, IdTotals, ManagedSpec, extended, initial_row};
use sterling_core::error::{Error, Result};

impl MasterTable {
    /// Assigns ids to the rows, [`FREE`] for a free row. With `spec`, ids are managed and the table grows to `spec.rows`; without
    /// `spec`, ids never change.
    ///
    /// # Errors
    /// `Invalid` for a frozen table, invalid settings, fewer rows than the table has, or ids that are no assignment
    /// ([`crate::managed::ManagedIds::new`]); `Unsupported` for a table that is partitioned or on a device; `Overloaded` if
    /// memory cannot be allocated.
    pub fn with_ids(self, spec: Option<ManagedSpec>, by_row: &[i64]) -> Result<Self> {
        let place = |e: Error| e.within(format!("table `{}`", self.spec().name));
        if self.rule().is_none() && spec.is_some() {
            return Err(place(Error::invalid(
                "got `frozen` and managed ids, expected at most one of them: managed ids change the table",
            )));
        }
        if self.whole().is_none() {
            return Err(place(Error::unsupported(
                "the table is already partitioned or on a device, expected managed ids to be set before",
            )));
        }
        let (has, rows) = (self.spec().rows, spec.and_then(|spec| spec.rows).unwrap_or(self.spec().rows));
        if rows < has {
            return Err(place(Error::invalid(format!(
                "managed.rows: got {rows}, expected at least the {has} rows of the package"
            ))));
        }
        let mut table = if rows == has {
            self
        } else {
            let (old, rule) = (self.spec(), self.rule().copied());
            let mut grown = MasterTable::zeros(&old.name, rows, old.width, old.unseen, rule)?;
            grown.import(&self.export(0..has as u32)?)?;
            grown
        };
        let place = |e: Error| e.within(format!("table `{}`", table.spec().name));
        let by_row = extended(by_row, by_row.len() + (rows - has) as usize, FREE).map_err(place)?;
        let ids = IdLearner::new(table.spec(), spec, by_row).map_err(place)?;
        table.set_ids(ids);
        Ok(table)
    }

    /// Returns the state of managed ids for a checkpoint; none if training does not change the ids.
    pub fn id_state(&self) -> Option<IdState> {
        self.ids().filter(|ids| ids.changes()).map(IdLearner::export)
    }

    /// Restores the state of managed ids. Rows and optimizer state stay unchanged.
    ///
    /// # Errors
    /// `Corrupt` if the state does not fit the table.
    pub fn set_id_state(&mut self, state: IdState) -> Result<()> {
        let spec = self.spec().clone();
        let ids = self.ids_mut().ok_or_else(|| {
            Error::corrupt("got a state of managed ids, expected none: the ids of this table are row numbers")
        });
        ids.and_then(|ids| ids.import(&spec, state)).map_err(|e| e.within(format!("table `{}`", spec.name)))
    }

    /// Returns counts of managed ids since the start of training; none if training does not change the ids.
    pub fn id_totals(&self) -> Option<IdTotals> {
        self.ids().filter(|ids| ids.changes()).map(IdLearner::totals)
    }

    /// Returns the id of each row, [`FREE`] for a free row; none if ids are row numbers.
    pub fn id_by_row(&self) -> Option<&[i64]> {
        self.ids().map(IdLearner::by_row)
    }

    /// Returns whether ids are managed; if not, ids are row numbers.
    pub fn has_ids(&self) -> bool {
        self.ids().is_some()
    }

    /// Returns the number of rows that have an id; none if ids are row numbers.
    pub fn held_ids(&self) -> Option<u64> {
        self.ids().map(|ids| ids.by_row().iter().filter(|id| **id != FREE).count() as u64)
    }

    /// Counts the occurrences of a batch at a step, and reassigns rows to other ids if the step is due.
    pub(super) fn step_ids(&mut self, number: usize, batch: &PreparedBatch, step: u64) -> Result<Vec<(u32, i64)>> {
        let Some(ids) = self.ids_mut().filter(|ids| ids.changes()) else { return Ok(Vec::new()) };
        batch.occurrences(number, |id, row| ids.count(id, row, step));
        if !ids.is_due(step) {
            return Ok(Vec::new());
        }
        let assigned = ids.turn(step);
        self.reset(&assigned)?;
        Ok(assigned)
    }

    /// Removes ids and bars them from the table: their rows and optimizer state become zeros. Returns the rows of the
    /// removed ids, ascending.
    ///
    /// # Errors
    /// `Invalid` if ids are row numbers; errors of the source of remote rows.
    pub fn forget(&mut self, forgotten: &[i64]) -> Result<Vec<u32>> {
        let name = self.spec().name.clone();
        let ids = self
            .ids_mut()
            .ok_or_else(|| Error::invalid(format!("table `{name}`: its ids are row numbers, expected managed ids")))?;
        let released = ids.forget(forgotten);
        self.reset(&released)?;
        Ok(released.into_iter().map(|(row, _)| row).collect())
    }

    /// Writes the initial values of newly assigned ids to their rows, with zeros as optimizer state.
    fn reset(&mut self, rows: &[(u32, i64)]) -> Result<()> {
        let (width, all) = (self.spec().width, self.spec().rows);
        let mut values = vec![0.0; rows.len() * width];
        for ((_, id), row) in rows.iter().zip(values.chunks_exact_mut(width)) {
            initial_row(*id, all, row);
        }
        let state = vec![0.0; rows.len() * self.state_width()];
        self.import(&MasterRows { rows: rows.iter().map(|(row, _)| *row).collect(), values, state })
    }
}

impl LearningTables {
    /// Sets the time of the next steps in seconds, by which ids expire. Time does not go back.
    pub fn set_clock(&mut self, seconds: u64) {
        self.tables_mut().iter_mut().filter_map(MasterTable::ids_mut).for_each(|ids| ids.set_clock(seconds));
    }
}
