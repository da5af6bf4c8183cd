//! Cutting a whole table along a plan.
//!
//! Rows in this process's memory stay where they are as long as a shard takes all columns; a shard of some columns is copied, each row
//! with the scale and bias of the whole row, so that a cut changes no number. Rows that are fetched come whole, and are cut then.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::{Shard, ShardedTable};
use crate::device::buffer::Buffer;
use crate::embedding::place::{ShardPlan, Sharding, TablePlan, Tier};
use crate::embedding::table::{Source, Table, TableSpec};
use crate::embedding::tiers::{Fetched, Pending, RowSource};
use crate::error::{Error, Result};

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
            copy: if plan.sharding == Sharding::DataParallel { number } else { 0 },
            device: match (shard.tier, &shard.backing) {
                (Tier::Remote, Some(cluster)) => cluster.clone(),
                _ => shard.device.clone(),
            },
        };
        plan.shards.iter().enumerate().map(cut).collect()
    }

    fn shard(&self, table: &Table) -> Result<Shard> {
        let Cut { rows, columns, copy, device } = self.clone();
        Ok(Shard { rows, columns, copy, device, table: self.take(table)? })
    }

    /// The part of `table` inside this cut.
    ///
    /// # Errors
    /// `Invalid` where the cut leaves the table or splits a byte of a packed row; `Unsupported` for a table that is cut already.
    pub fn take(&self, table: &Table) -> Result<Table> {
        let whole = table.spec();
        let place = || format!("table `{}`, rows {:?}, columns {:?}", whole.name, self.rows, self.columns);
        if self.rows.is_empty() || self.rows.end > whole.rows {
            return Err(Error::invalid(format!("expected rows of {}", whole.rows)).within(place()));
        }
        if self.columns.is_empty() || self.columns.end > whole.width {
            return Err(Error::invalid(format!("expected columns of {}", whole.width)).within(place()));
        }
        let rows = self.rows.end - self.rows.start;
        let spec = TableSpec { rows, width: self.columns.len(), unseen: Default::default(), ..whole.clone() };
        let all_columns = self.columns.len() == whole.width;
        match table.source() {
            Source::Host(bytes) if all_columns => {
                let row_bytes = whole.row_bytes()?;
                let at = |row: u64| row as usize * row_bytes;
                Table::host(spec, bytes.slice(at(self.rows.start)..at(self.rows.end))?)
            }
            Source::Host(bytes) => {
                let columns = Columns::of(whole, &self.columns).map_err(|e| e.within(place()))?;
                let bytes = &bytes[self.rows.start as usize * columns.row_bytes..];
                let part_bytes = rows as usize * columns.part_bytes();
                Table::host(spec, Buffer::filled(part_bytes, |to| columns.copy(bytes, to))?)
            }
            Source::Fetched(source) => {
                let columns = match all_columns {
                    true => None,
                    false => Some(Columns::of(whole, &self.columns).map_err(|e| e.within(place()))?),
                };
                Table::fetched(spec, Arc::new(Part { source: source.clone(), rows: self.rows.clone(), columns }))
            }
            Source::Sharded(_) => Err(Error::unsupported("a table that is cut already").within(place())),
        }
    }
}

impl ShardedTable {
    /// A whole table, cut.
    ///
    /// # Errors
    /// As [`Cut::take`] and [`ShardedTable::new`].
    pub fn cut(table: &Table, sharding: Sharding, cuts: &[Cut]) -> Result<Self> {
        let shards = cuts.iter().map(|cut| cut.shard(table)).collect::<Result<_>>()?;
        ShardedTable::new(table.spec().clone(), sharding, shards)
    }

    /// A whole table, cut as planned. Parts planned on the cluster are those of `remote`, the same table there.
    ///
    /// # Errors
    /// As [`ShardedTable::cut`]; `Invalid` where the plan is about a table of another name or format, or places rows on a
    /// cluster and `remote` is none.
    pub fn planned(table: &Table, plan: &TablePlan, remote: Option<&Table>) -> Result<Self> {
        if plan.table != table.name() || plan.format != table.spec().format {
            return Err(Error::invalid(format!(
                "a plan for table `{}` in {}, expected `{}` in {}",
                plan.table,
                plan.format.name(),
                table.name(),
                table.spec().format.name()
            )));
        }
        let on_cluster = |tier| tier == Tier::Remote;
        let shard = |(part, cut): (&ShardPlan, Cut)| match (on_cluster(part.tier), remote) {
            (false, _) => cut.shard(table),
            (true, Some(remote)) => cut.shard(remote),
            (true, None) => Err(Error::invalid(format!("table `{}` is planned on a cluster, got none", plan.table))),
        };
        let shards = plan.shards.iter().zip(Cut::of_plan(plan)).map(shard).collect::<Result<_>>()?;
        ShardedTable::new(table.spec().clone(), plan.sharding, shards)
    }
}

/// Where the bytes of some columns stand in a row.
#[derive(Clone, Debug)]
struct Columns {
    row_bytes: usize,
    /// Bytes of scale and bias, which every part of a row keeps.
    head: usize,
    codes: Range<usize>,
}

impl Columns {
    fn of(whole: &TableSpec, columns: &Range<usize>) -> Result<Self> {
        let format = whole.format;
        if !(columns.start * format.bits()).is_multiple_of(8) {
            let per_byte = 8 / format.bits();
            return Err(Error::invalid(format!("expected a first column that is a multiple of {per_byte}")));
        }
        let head = format.head_bytes();
        let first = head + columns.start * format.bits() / 8;
        let codes = first..first + format.row_bytes(columns.len())? - head;
        Ok(Columns { row_bytes: whole.row_bytes()?, head, codes })
    }

    fn part_bytes(&self) -> usize {
        self.head + self.codes.len()
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
struct Part {
    source: Arc<dyn RowSource>,
    rows: Range<u64>,
    columns: Option<Columns>,
}

impl RowSource for Part {
    fn row_bytes(&self) -> usize {
        self.columns.as_ref().map_or_else(|| self.source.row_bytes(), Columns::part_bytes)
    }

    fn rows(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    fn begin(&self, mut rows: Vec<u64>, deadline: Option<Instant>) -> Box<dyn Pending + '_> {
        rows.iter_mut().for_each(|row| *row += self.rows.start);
        let pending = self.source.begin(rows, deadline);
        match &self.columns {
            None => pending,
            Some(columns) => Box::new(Cutting { pending, columns }),
        }
    }
}

/// Whole rows on their way, of which some columns are wanted.
struct Cutting<'a> {
    pending: Box<dyn Pending + 'a>,
    columns: &'a Columns,
}

impl Pending for Cutting<'_> {
    fn wait(self: Box<Self>) -> Result<Fetched> {
        let whole = self.pending.wait()?;
        let mut bytes = vec![0; whole.states.len() * self.columns.part_bytes()];
        self.columns.copy(&whole.bytes, &mut bytes);
        Ok(Fetched { bytes, states: whole.states })
    }
}
