//! Cutting a whole table along a plan.
//!
//! Rows in this process's memory stay where they are as long as a shard takes all columns; a shard of some columns is copied, each row
//! with the scale and bias of the whole row, so that a cut changes no number. Rows that are fetched are cut by rows only.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::{Shard, ShardedTable};
use crate::device::buffer::Buffer;
use crate::error::{Error, Result};
use crate::sparse::planner::Sharding;
use crate::sparse::planner::plan::TablePlan;
use crate::sparse::table::{Source, Table, TableSpec};
use crate::sparse::tiers::{Pending, RowSource};

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
        let cut = |(number, shard): (usize, &crate::sparse::planner::plan::Shard)| Cut {
            rows: shard.rows[0]..shard.rows[1],
            columns: shard.columns[0] as usize..shard.columns[1] as usize,
            copy: if plan.sharding == Sharding::DataParallel { number } else { 0 },
            device: shard.device.clone(),
        };
        plan.shards.iter().enumerate().map(cut).collect()
    }

    /// The part of `table` inside this cut.
    ///
    /// # Errors
    /// `Invalid` where the cut leaves the table or splits a byte of a packed row; `Unsupported` for some columns of rows that are
    /// fetched.
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
                let part = columns_of(whole, bytes, self).map_err(|e| e.within(place()))?;
                Table::host(spec, part)
            }
            Source::Fetched(source) if all_columns => {
                let part = RowRange { source: source.clone(), rows: self.rows.clone() };
                Table::fetched(spec, Arc::new(part))
            }
            Source::Fetched(_) => {
                Err(Error::unsupported("some columns of rows that are fetched whole").within(place()))
            }
        }
    }
}

impl ShardedTable {
    /// A whole table, cut.
    ///
    /// # Errors
    /// As [`Cut::take`] and [`ShardedTable::new`].
    pub fn cut(table: &Table, sharding: Sharding, cuts: &[Cut]) -> Result<Self> {
        let shard = |cut: &Cut| {
            let Cut { rows, columns, copy, device } = cut.clone();
            Ok(Shard { rows, columns, copy, device, table: cut.take(table)? })
        };
        ShardedTable::new(table.spec().clone(), sharding, cuts.iter().map(shard).collect::<Result<_>>()?)
    }

    /// A whole table, cut as planned.
    ///
    /// # Errors
    /// As [`ShardedTable::cut`]; `Invalid` where the plan is about a table of another name or format.
    pub fn planned(table: &Table, plan: &TablePlan) -> Result<Self> {
        if plan.table != table.name() || plan.format != table.spec().format {
            return Err(Error::invalid(format!(
                "a plan for table `{}` in {}, expected `{}` in {}",
                plan.table,
                plan.format.name(),
                table.name(),
                table.spec().format.name()
            )));
        }
        ShardedTable::cut(table, plan.sharding, &Cut::of_plan(plan))
    }
}

/// The bytes of a cut of some columns.
fn columns_of(whole: &TableSpec, bytes: &[u8], cut: &Cut) -> Result<Buffer<u8>> {
    let (format, row_bytes) = (whole.format, whole.row_bytes()?);
    if !(cut.columns.start * format.bits()).is_multiple_of(8) {
        let per_byte = 8 / format.bits();
        return Err(Error::invalid(format!("expected a first column that is a multiple of {per_byte}")));
    }
    let part_bytes = format.row_bytes(cut.columns.len())?;
    let head = format.head_bytes();
    let first = head + cut.columns.start * format.bits() / 8;
    let rows = (cut.rows.end - cut.rows.start) as usize;
    Buffer::filled(rows * part_bytes, |to| {
        let from = bytes[cut.rows.start as usize * row_bytes..].chunks_exact(row_bytes);
        for (to, row) in to.chunks_exact_mut(part_bytes).zip(from) {
            to[..head].copy_from_slice(&row[..head]);
            to[head..].copy_from_slice(&row[first..][..part_bytes - head]);
        }
    })
}

/// Some rows of a source, counted from the first of them.
#[derive(Debug)]
struct RowRange {
    source: Arc<dyn RowSource>,
    rows: Range<u64>,
}

impl RowSource for RowRange {
    fn row_bytes(&self) -> usize {
        self.source.row_bytes()
    }

    fn rows(&self) -> u64 {
        self.rows.end - self.rows.start
    }

    fn begin(&self, mut rows: Vec<u64>, deadline: Option<Instant>) -> Box<dyn Pending + '_> {
        rows.iter_mut().for_each(|row| *row += self.rows.start);
        self.source.begin(rows, deadline)
    }
}
