//! Cutting a whole table along a plan.
//!
//! Rows in this process's memory stay where they are as long as a shard takes all columns; a shard of some columns is copied, each row
//! with the scale and bias of the whole row, so that a cut changes no number. Rows that are fetched come whole, and are cut then.

use std::ops::Range;
use std::sync::Arc;

use crate::place::{ShardPlan, Sharding, TablePlan, Tier};
use crate::report::Lookup;
use crate::spec::TableSpec;
use crate::table::{Shard, Table};
use crate::tiers::{Fetched, Pending, RowSource, Source};
use sterling_core::error::{Error, Result};
use sterling_kernels::buffer::Buffer;

/// Where a shard lies in its table, before its rows are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The rows of the whole table.
    pub rows: Range<u64>,
    /// The columns of the whole table.
    pub columns: Range<usize>,
    /// Which copy of the whole table.
    pub copy: usize,
    /// The device that answers for it.
    pub device: String,
}

impl Cut {
    /// The cuts of a planned table.
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

    /// The part of `table` inside this cut.
    ///
    /// # Errors
    /// `Invalid` where the cut leaves the table or splits a byte of a packed row; `Unsupported` for a table that is cut already.
    pub fn take(&self, table: &Table) -> Result<Shard> {
        let whole = table.spec();
        let place = || format!("table `{}`, rows {:?}, columns {:?}", whole.name, self.rows, self.columns);
        if self.rows.is_empty() || self.rows.end > whole.rows {
            return Err(Error::invalid(format!("expected rows of {}", whole.rows)).within(place()));
        }
        if self.columns.is_empty() || self.columns.end > whole.width {
            return Err(Error::invalid(format!("expected columns of {}", whole.width)).within(place()));
        }
        let [Shard { source, .. }] = table.shards() else {
            return Err(Error::unsupported("a table that is cut already").within(place()));
        };
        let columns = match self.columns.len() == whole.width {
            true => None,
            false => Some(ColumnBytes::of(whole, &self.columns).map_err(|e| e.within(place()))?),
        };
        let source = self.part_of(source, whole.row_bytes()?, columns)?;
        let Cut { rows, columns, copy, device } = self.clone();
        Ok(Shard { rows, columns, copy, device, source })
    }

    fn part_of(&self, whole: &Source, row_bytes: usize, columns: Option<ColumnBytes>) -> Result<Source> {
        let at = |row: u64| row as usize * row_bytes;
        let rows = (self.rows.end - self.rows.start) as usize;
        Ok(match (whole, columns) {
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
    /// The same table, vocabulary included, cut.
    ///
    /// # Errors
    /// As [`Cut::take`] and [`Table::of_shards`].
    pub fn cut(&self, sharding: Sharding, cuts: &[Cut]) -> Result<Self> {
        self.in_shards(sharding, cuts.iter().map(|cut| cut.take(self)).collect::<Result<_>>()?)
    }

    /// The same table, vocabulary included, cut as planned. Parts planned in memory are copied there, parts planned on the cluster
    /// are those of `remote`, the same table there.
    ///
    /// # Errors
    /// As [`Table::cut`]; `Invalid` where the plan is about a table of another name or format, or places rows on a
    /// cluster and `remote` is none.
    pub fn planned(&self, plan: &TablePlan, remote: Option<&Table>) -> Result<Self> {
        self.planned_beside(plan, remote, |_| None)
    }

    /// The same, where `elsewhere` has the rows of parts that other servers hold, by their number.
    ///
    /// # Errors
    /// As [`Table::planned`].
    pub fn planned_beside(
        &self,
        plan: &TablePlan,
        remote: Option<&Table>,
        elsewhere: impl Fn(usize) -> Option<Arc<dyn RowSource>>,
    ) -> Result<Self> {
        if plan.table != self.name() || plan.format != self.spec().format {
            return Err(Error::invalid(format!(
                "a plan for table `{}` in {}, expected `{}` in {}",
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

/// Where the bytes of some columns stand in a row.
#[derive(Clone, Debug)]
pub(super) struct ColumnBytes {
    row_bytes: usize,
    /// Bytes of scale and bias, which every part of a row keeps.
    head: usize,
    codes: Range<usize>,
}

impl ColumnBytes {
    pub(super) fn of(whole: &TableSpec, columns: &Range<usize>) -> Result<Self> {
        let format = whole.format;
        if !(columns.start * format.bits()).is_multiple_of(8) {
            let per_byte = 8 / format.bits();
            return Err(Error::invalid(format!("expected a first column that is a multiple of {per_byte}")));
        }
        let head = format.head_bytes();
        let first = head + columns.start * format.bits() / 8;
        let codes = first..first + format.row_bytes(columns.len())? - head;
        Ok(ColumnBytes { row_bytes: whole.row_bytes()?, head, codes })
    }

    pub(super) fn part_bytes(&self) -> usize {
        self.head + self.codes.len()
    }

    /// Copies a part of a row to its place in the whole one.
    pub(super) fn put(&self, part: &[u8], row: &mut [u8]) {
        row[..self.head].copy_from_slice(&part[..self.head]);
        row[self.codes.clone()].copy_from_slice(&part[self.head..]);
    }

    /// Copies the columns out of whole rows, as many as `to` holds.
    fn copy(&self, rows: &[u8], to: &mut [u8]) {
        for (to, row) in to.chunks_exact_mut(self.part_bytes()).zip(rows.chunks_exact(self.row_bytes)) {
            to[..self.head].copy_from_slice(&row[..self.head]);
            to[self.head..].copy_from_slice(&row[self.codes.clone()]);
        }
    }
}

/// Some rows of a source, counted from the first of them, and maybe some of their columns.
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

/// Whole rows on their way, of which some columns are wanted.
struct Cutting<'a> {
    pending: Box<dyn Pending + 'a>,
    columns: &'a ColumnBytes,
}

impl Pending for Cutting<'_> {
    fn wait(self: Box<Self>) -> Result<Fetched> {
        let whole = self.pending.wait()?;
        let mut bytes = vec![0; whole.states.len() * self.columns.part_bytes()];
        self.columns.copy(&whole.bytes, &mut bytes);
        Ok(Fetched { bytes, states: whole.states })
    }
}
