//! Tables cut into shards, looked up as if they were whole.
//!
//! A [`ShardedTable`] is a set of rectangles (rows x columns), each a [`Table`] of its own in whatever tier; the sharding types differ only
//! in which rectangles there are. A lookup takes TorchRec's three steps, the same for every type and tier:
//!
//! 1. [`input_dist`](ShardedEmbeddingBagCollection::input_dist): ids become rows of the whole table (the fate of unseen ids is
//!    decided here, once), and each row goes to the shards that hold it as a row of theirs (bucketise). Where rows travel, each is
//!    asked for once (deduplicate).
//! 2. [`compute`](ShardedEmbeddingBagCollection::compute): each shard pools its rows of each bag. Shards whose rows are fetched are
//!    asked first, and pooled when the answers are there.
//! 3. [`output_dist`](ShardedEmbeddingBagCollection::output_dist): columns are put side by side, parts of the same columns are
//!    added in the order of their rows, and means are divided by the length of the whole bag.
//!
//! A bag whose rows lie in one shard, or in shards of columns, gets the very numbers that the whole table gives; rows added
//! across shards differ from it by the rounding of f32 sums in another order.

mod compute;
mod cut;
mod input;
mod output;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use crate::device::cpu::Kernels;
use crate::embedding::jagged::{JaggedTensor, KeyedJaggedTensor};
use crate::embedding::keyed::{KeyedTensor, Layout};
use crate::embedding::lookup::{BagConfig, Lookup, LookupReport, Pooling, Sequence, SequenceConfig, TableCounts};
use crate::embedding::place::Sharding;
use crate::embedding::table::{Table, TableSpec};
use crate::embedding::uses::{self, Use};
use crate::error::{Error, Result};

pub use compute::Partials;
pub use cut::Cut;
pub use input::{Distinct, Input, Question};
use output::Target;

/// One rectangle of a table.
#[derive(Clone, Debug)]
pub struct Shard {
    /// The rows of the whole table that it holds.
    pub rows: Range<u64>,
    /// The columns of the whole table that it holds.
    pub columns: Range<usize>,
    /// Which copy of the whole table it belongs to; 0 where there is one.
    pub copy: usize,
    /// The device that answers for it, for errors.
    pub device: String,
    /// Its rows.
    pub table: Table,
}

/// Shards that are asked the same: equal rows of the same copy.
#[derive(Clone, Debug)]
struct Group {
    rows: Range<u64>,
    copy: usize,
    shards: Vec<usize>,
}

/// A table cut into shards.
#[derive(Clone, Debug)]
pub struct ShardedTable {
    spec: TableSpec,
    sharding: Sharding,
    copies: usize,
    shards: Vec<Shard>,
    /// By copy, then by first row.
    groups: Vec<Group>,
}

impl ShardedTable {
    /// True where a shard's rows are asked for elsewhere than in this process.
    pub fn is_remote(&self) -> bool {
        self.shards.iter().any(|shard| shard.table.is_remote())
    }

    /// A table of shards.
    ///
    /// # Errors
    /// `Invalid` where a shard is not the rectangle it says it is, or the shards of a copy do not cover every number of the table
    /// exactly once, as ranges of rows each cut into the same way of columns.
    pub fn new(spec: TableSpec, sharding: Sharding, shards: Vec<Shard>) -> Result<Self> {
        let spec = spec.checked()?;
        let place = format!("table `{}`, {}", spec.name, sharding.name());
        for shard in &shards {
            check_shard(&spec, shard).map_err(|e| e.within(&place))?;
        }
        let copies = shards.iter().map(|s| s.copy + 1).max().unwrap_or(0);
        let mut groups: Vec<Group> = Vec::new();
        for (number, shard) in shards.iter().enumerate() {
            match groups.iter_mut().find(|g| g.copy == shard.copy && g.rows == shard.rows) {
                Some(group) => group.shards.push(number),
                None => groups.push(Group { rows: shard.rows.clone(), copy: shard.copy, shards: vec![number] }),
            }
        }
        groups.sort_by_key(|g| (g.copy, g.rows.start));
        for copy in 0..copies.max(1) {
            check_cover(&spec, &shards, groups.iter().filter(|g| g.copy == copy)).map_err(|e| e.within(&place))?;
        }
        Ok(ShardedTable { spec, sharding, copies, shards, groups })
    }

    /// A table in one piece.
    pub fn whole(table: &Table) -> Self {
        let spec = table.spec().clone();
        let (rows, columns) = (0..spec.rows, 0..spec.width);
        let groups = vec![Group { rows: rows.clone(), copy: 0, shards: vec![0] }];
        let shards = vec![Shard { rows, columns, copy: 0, device: "here".into(), table: table.clone() }];
        ShardedTable { spec, sharding: Sharding::TableWise, copies: 1, shards, groups }
    }

    /// What the whole table is.
    pub fn spec(&self) -> &TableSpec {
        &self.spec
    }

    /// How it is cut.
    pub fn sharding(&self) -> Sharding {
        self.sharding
    }

    /// Its shards.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }
}

fn check_shard(spec: &TableSpec, shard: &Shard) -> Result<()> {
    let Shard { rows, columns, table, .. } = shard;
    let wrong = |what: String| Err(Error::invalid(format!("shard of rows {rows:?}, columns {columns:?}: {what}")));
    if rows.is_empty() || rows.end > spec.rows || columns.is_empty() || columns.end > spec.width {
        return wrong(format!("expected a part of {} rows of {}", spec.rows, spec.width));
    }
    let held = table.spec();
    if held.rows != rows.end - rows.start || held.width != columns.len() || held.format != spec.format {
        return wrong(format!(
            "it holds {} rows of {} in {}, expected {} of {} in {}",
            held.rows,
            held.width,
            held.format.name(),
            rows.end - rows.start,
            columns.len(),
            spec.format.name()
        ));
    }
    Ok(())
}

/// Checks that the groups of one copy, in the order of their rows, cover all rows, and each of them all columns.
fn check_cover<'a>(spec: &TableSpec, shards: &[Shard], groups: impl Iterator<Item = &'a Group>) -> Result<()> {
    let mut row = 0;
    for group in groups {
        if group.rows.start != row {
            let what = if group.rows.start > row { "no shard holds" } else { "two shards hold" };
            return Err(Error::invalid(format!("{what} row {}, expected one", row.min(group.rows.start))));
        }
        row = group.rows.end;
        let mut columns: Vec<&Range<usize>> = group.shards.iter().map(|s| &shards[*s].columns).collect();
        columns.sort_by_key(|c| c.start);
        let mut column = 0;
        for range in columns {
            if range.start != column {
                let what = if range.start > column { "no shard holds" } else { "two shards hold" };
                let column = column.min(range.start);
                return Err(Error::invalid(format!("{what} column {column} of rows {:?}, expected one", group.rows)));
            }
            column = range.end;
        }
        if column != spec.width {
            return Err(Error::invalid(format!(
                "no shard holds column {column} of rows {:?}, expected one",
                group.rows
            )));
        }
    }
    match row == spec.rows {
        true => Ok(()),
        false => Err(Error::invalid(format!("no shard holds row {row}, expected one"))),
    }
}

/// Pooled lookups over sharded tables: answers as [`EmbeddingBagCollection`](crate::embedding::EmbeddingBagCollection) does.
#[derive(Clone, Debug)]
pub struct ShardedEmbeddingBagCollection {
    tables: Vec<Arc<ShardedTable>>,
    uses: Vec<Use>,
    layout: Arc<Layout>,
    kernels: Kernels,
}

impl ShardedEmbeddingBagCollection {
    /// The features of `bags` over `tables`, with the keys that
    /// [`EmbeddingBagCollection::new`](crate::embedding::EmbeddingBagCollection::new) gives them.
    ///
    /// # Errors
    /// As there.
    pub fn new(tables: Vec<Arc<ShardedTable>>, bags: &[BagConfig]) -> Result<Self> {
        let (uses, layout) = uses::of_bags(tables.iter().map(|t| &t.spec), bags)?;
        Ok(ShardedEmbeddingBagCollection { tables, uses, layout, kernels: Kernels::detect()? })
    }

    /// The same collection with other kernels.
    pub fn with_kernels(mut self, kernels: Kernels) -> Self {
        self.kernels = kernels;
        self
    }

    /// Keys and columns of the output.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The tables.
    pub fn tables(&self) -> &[Arc<ShardedTable>] {
        &self.tables
    }

    /// The three steps, one after the other.
    ///
    /// # Errors
    /// `Invalid` where a feature is missing in `ids`; `Unavailable` or `DeadlineExceeded` where rows could not be fetched and
    /// the terms refuse that.
    pub fn lookup(&self, ids: &KeyedJaggedTensor, terms: &Lookup) -> Result<(KeyedTensor, LookupReport)> {
        let input = self.input_dist(ids)?;
        let (partials, report) = self.compute(&input, terms)?;
        Ok((self.output_dist(&input, &partials), report))
    }

    /// Step 1: what each shard is asked.
    ///
    /// # Errors
    /// `Invalid` where a feature is missing in `ids`.
    pub fn input_dist(&self, ids: &KeyedJaggedTensor) -> Result<Input> {
        let mut asked = Vec::with_capacity(self.uses.len());
        for used in &self.uses {
            let feature = used.of(ids)?;
            let offsets: Vec<usize> = feature.offsets().iter().map(|o| o - feature.base()).collect();
            let (ids, weights) = (feature.values(), feature.weights());
            asked.push(input::Asked { table: used.table, ids, offsets, weights });
        }
        Ok(input::distribute(&self.tables, &asked, ids.stride()))
    }

    /// Step 2: what each shard answers, and what became of the ids.
    ///
    /// # Errors
    /// `Unavailable` or `DeadlineExceeded` where rows could not be fetched and the terms refuse that; `Corrupt` where a source
    /// answers with other rows than it was asked for.
    pub fn compute(&self, input: &Input, terms: &Lookup) -> Result<(Partials, LookupReport)> {
        compute::compute(&self.tables, input, terms, self.kernels)
    }

    /// Step 3: one embedding a key and example.
    pub fn output_dist(&self, input: &Input, partials: &Partials) -> KeyedTensor {
        let mut out = KeyedTensor::zeros(self.layout.clone(), input.examples());
        let stride = self.layout.width();
        for (number, used) in self.uses.iter().enumerate() {
            let column = self.layout.columns(number).start;
            let mean = used.pooling == Pooling::Mean;
            let mut target = Target { data: out.values_mut(), stride, column };
            output::assemble(&self.tables[used.table], input, partials, number, mean, &mut target);
        }
        out
    }
}

/// Sequence lookups over sharded tables: answers as [`EmbeddingCollection`](crate::embedding::EmbeddingCollection) does, by the same
/// three steps with each id as a bag of its own.
#[derive(Clone, Debug)]
pub struct ShardedEmbeddingCollection {
    tables: Vec<Arc<ShardedTable>>,
    uses: Vec<Use>,
    kernels: Kernels,
}

impl ShardedEmbeddingCollection {
    /// The features of `sequences` over `tables`.
    ///
    /// # Errors
    /// As [`ShardedEmbeddingBagCollection::new`]; a feature may come once.
    pub fn new(tables: Vec<Arc<ShardedTable>>, sequences: &[SequenceConfig]) -> Result<Self> {
        let uses = uses::of_sequences(tables.iter().map(|t| &t.spec), sequences)?;
        Ok(ShardedEmbeddingCollection { tables, uses, kernels: Kernels::detect()? })
    }

    /// One jagged tensor of rows a feature, in the order of the configuration.
    ///
    /// # Errors
    /// As [`ShardedEmbeddingBagCollection::lookup`].
    pub fn lookup(&self, ids: &KeyedJaggedTensor, terms: &Lookup) -> Result<(Vec<Sequence>, LookupReport)> {
        let features: Vec<_> = self.uses.iter().map(|u| u.of(ids)).collect::<Result<_>>()?;
        let asked = self.uses.iter().zip(&features).map(|(used, feature)| input::Asked {
            table: used.table,
            ids: feature.values(),
            offsets: (0..=feature.values().len()).collect(),
            weights: None,
        });
        let asked: Vec<input::Asked<'_>> = asked.collect();
        let input = input::distribute(&self.tables, &asked, ids.stride());
        let (partials, report) = compute::compute(&self.tables, &input, terms, self.kernels)?;
        let mut found = Vec::with_capacity(self.uses.len());
        for (number, (used, feature)) in self.uses.iter().zip(&features).enumerate() {
            let table = &self.tables[used.table];
            let width = table.spec.width;
            let mut values = vec![0f32; feature.values().len() * width];
            let mut target = Target { data: &mut values, stride: width, column: 0 };
            output::assemble(table, &input, &partials, number, false, &mut target);
            let offsets = feature.offsets().iter().map(|o| o - feature.base()).collect();
            found.push((used.feature.clone(), JaggedTensor::of_rows(values, width, offsets)));
        }
        Ok((found, report))
    }
}

fn new_report(tables: &[Arc<ShardedTable>]) -> LookupReport {
    tables.iter().map(|t| TableCounts { table: t.spec.name.clone(), ..TableCounts::default() }).collect()
}
