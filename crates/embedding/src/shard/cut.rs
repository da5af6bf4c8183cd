//! Shards a complete table along a plan.
//!
//! Rows in this process's memory stay in place if a shard takes all columns. A shard of some columns is a copy, in which each row
//! has scale and bias of the complete row, so that sharding changes no number. Remote rows arrive complete and are split after
//! that.

use std::ops::Range;
use std::sync::Arc;

use crate::place::{ShardPlan, Sharding, TablePlan, Tier};
use crate::report::Lookup;
use crate::spec::TableSpec;
use crate::table::{Shard, Table};
use crate::tiers::{Fetched, Pending, RowSource, Source};
use sterling_core::error::{Error, Result};
use sterling_kernels::buffer::Buffer;

/// Location of a shard in its table, without its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Rows of the complete table.
    pub rows: Range<u64>,
    /// Columns of the complete table.
    pub columns: Range<usize>,
    /// Index of the table's replica.
    pub copy: usize,
    /// Device that serves the shard.
    pub device: String,
}

impl Cut {
    /// Returns the shards of a planned table.
    pub fn of_plan(plan: &TablePlan) -> Vec<Cut> {
        let cut = |(number, shard): (usize, &ShardPlan)| Cut {
            rows: shard.rows[0]..shard.rows[1],
            columns: shard.columns[0] as usize..shard.columns[1] as usize,
            copy: if plan.sharding == Sharding::DataParallel { number } else { shard.copy },
            device: match (shard.tier, &shard.backing) {
                (Tier::Remote, Some(cluster)) => cluster.clone(),
                _ => shard.device.clone(),
            },
        };
        plan.shards.iter().enumerate().map(cut).collect()
    }

    /// Extracts the shard from `table`.
    ///
    /// # Errors
    /// `Invalid` if the shard exceeds the table or splits a byte of a packed row; `Unsupported` for a table that is already
    /// sharded.
    pub fn take(&self, table: &Table) -> Result<Shard> {
        let complete = table.spec();
        let place = || format!("table `{}`, rows {:?}, columns {:?}", complete.name, self.rows, self.columns);
        if self.rows.is_empty() || self.rows.end > complete.rows {
            return Err(Error::invalid(format!("expected a range within {} rows", complete.rows)).within(place()));
        }
        if self.columns.is_empty() || self.columns.end > complete.width {
            return Err(Error::invalid(format!("expected a range within {} columns", complete.width)).within(place()));
        }
        let [Shard { source, .. }] = table.shards() else {
            return Err(Error::unsupported("the table is already sharded").within(place()));
        };
        let columns = match self.columns.len() == complete.width {
            true => None,
            false => Some(ColumnBytes::of(complete, &self.columns).map_err(|e| e.within(place()))?),
        };
        let source = self.part_of(source, complete.row_bytes()?, columns)?;
        let Cut { rows, columns, copy, device } = self.clone();
        Ok(Shard { rows, columns, copy, device, source })
    }

    fn part_of(&self, complete: &Source, row_bytes: usize, columns: Option<ColumnBytes>) -> Result<Source> {
        let at = |row: u64| row as usize * row_bytes;
        let rows = (self.rows.end - self.rows.start) as usize;
        Ok(match (complete, columns) {
            (Source::Host(bytes), None) => Source::Host(bytes.slice(at(self.rows.start)..at(self.rows.end))?),
            (Source::Host(bytes), Some(columns)) => {
                let bytes = &bytes[at(self.rows.start)..];
                Source::Host(Buffer::filled(rows * columns.part_bytes(), |to| columns.copy(bytes, to))?)
            }
            (Source::Fetched(source), columns) => {
                Source::Fetched(Arc::new(PartSource { source: source.clone(), rows: self.rows.clone(), columns }))
            }
        })
    }
}

impl Table {
    /// Returns the same table, vocabulary and managed ids included, as shards.
    ///
    /// # Errors
    /// As [`Cut::take`] and [`Table::of_shards`].
    pub fn cut(&self, sharding: Sharding, cuts: &[Cut]) -> Result<Self> {
        self.in_shards(sharding, cuts.iter().map(|cut| cut.take(self)).collect::<Result<_>>()?)
    }

    /// Returns the same table, vocabulary and managed ids included, sharded as planned. Shards planned in memory are copied;
    /// shards planned on the cluster are taken from `remote`, which is the same table on the cluster.
    ///
    /// # Errors
    /// As [`Table::cut`]; `Invalid` if the plan is for a table of another name or format, or places rows on a cluster and
    /// `remote` is `None`.
    pub fn planned(&self, plan: &TablePlan, remote: Option<&Table>) -> Result<Self> {
        self.planned_with(plan, remote, |_| None)
    }

    /// As [`Table::planned`]; `elsewhere` has the sources of shards that other servers hold, by shard number.
    ///
    /// # Errors
    /// As [`Table::planned`].
    pub fn planned_with(
        &self,
        plan: &TablePlan,
        remote: Option<&Table>,
        elsewhere: impl Fn(usize) -> Option<Arc<dyn RowSource>>,
    ) -> Result<Self> {
        if plan.table != self.name() || plan.format != self.spec().format {
            return Err(Error::invalid(format!(
                "the plan is for table `{}` in format {}, expected table `{}` in format {}",
                plan.table,
                plan.format.name(),
                self.name(),
                self.spec().format.name()
            )));
        }
        let shard = |(number, (part, cut)): (usize, (&ShardPlan, Cut))| match (part.tier, remote, elsewhere(number)) {
            (Tier::Remote, Some(remote), _) => cut.take(remote),
            (Tier::Remote, None, _) => {
                Err(Error::invalid(format!("table `{}` is planned on a cluster, got none", plan.table)))
            }
            (_, _, Some(source)) => {
                let Cut { rows, columns, copy, device } = cut;
                Ok(Shard { rows, columns, copy, device, source: Source::Fetched(source) })
            }
            (_, _, None) => cut.take(self).and_then(Shard::in_memory),
        };
        let parts = plan.shards.iter().zip(Cut::of_plan(plan)).enumerate();
        self.in_shards(plan.sharding, parts.map(shard).collect::<Result<_>>()?)
    }
}

/// Byte range of some columns in a row.
#[derive(Clone, Debug)]
pub(super) struct ColumnBytes {
    row_bytes: usize,
    /// Bytes of scale and bias, which every shard of a row repeats.
    head: usize,
    codes: Range<usize>,
}

impl ColumnBytes {
    pub(super) fn of(complete: &TableSpec, columns: &Range<usize>) -> Result<Self> {
        let format = complete.format;
        if !(columns.start * format.bits()).is_multiple_of(8) {
            let per_byte = 8 / format.bits();
            return Err(Error::invalid(format!(
                "first column {}, expected a multiple of {per_byte} ({} columns per byte)",
                columns.start, per_byte
            )));
        }
        let head = format.head_bytes();
        let first = head + columns.start * format.bits() / 8;
        let codes = first..first + format.row_bytes(columns.len())? - head;
        Ok(ColumnBytes { row_bytes: complete.row_bytes()?, head, codes })
    }

    pub(super) fn part_bytes(&self) -> usize {
        self.head + self.codes.len()
    }

    /// Copies the columns of a shard into the complete row.
    pub(super) fn put(&self, part: &[u8], row: &mut [u8]) {
        row[..self.head].copy_from_slice(&part[..self.head]);
        row[self.codes.clone()].copy_from_slice(&part[self.head..]);
    }

    /// Copies the columns out of complete rows, for as many rows as `to` holds.
    fn copy(&self, rows: &[u8], to: &mut [u8]) {
        for (to, row) in to.chunks_exact_mut(self.part_bytes()).zip(rows.chunks_exact(self.row_bytes)) {
            to[..self.head].copy_from_slice(&row[..self.head]);
            to[self.head..].copy_from_slice(&row[self.codes.clone()]);
        }
    }
}

/// A range of rows of a source, optionally only some columns of the rows.
#[derive(Debug)]
struct PartSource {
    source: Arc<dyn RowSource>,
    rows: Range<u64>,
    columns: Option<ColumnBytes>,
}

impl RowSource for PartSource {
    fn row_bytes(&self) -> usize {
        self.columns.as_ref().map_or_else(|| self.source.row_bytes(), ColumnBytes::part_bytes)
    }

    fn rows(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    fn begin(&self, mut rows: Vec<u64>, terms: &Lookup) -> Box<dyn Pending + '_> {
        rows.iter_mut().for_each(|row| *row += self.rows.start);
        let pending = self.source.begin(rows, terms);
        match &self.columns {
            None => pending,
            Some(columns) => Box::new(Cutting { pending, columns }),
        }
    }

    fn send(&self) {
        self.source.send();
    }
}

/// Request for complete rows in progress, of which some columns are needed.
struct Cutting<'a> {
    pending: Box<dyn Pending + 'a>,
    columns: &'a ColumnBytes,
}

impl Pending for Cutting<'_> {
    fn wait(self: Box<Self>) -> Result<Fetched> {
        let complete = self.pending.wait()?;
        let mut bytes = vec![0; complete.states.len() * self.columns.part_bytes()];
        self.columns.copy(&complete.bytes, &mut bytes);
        Ok(Fetched { bytes, states: complete.states })
    }
}
