//! A prepared batch: ids resolved to rows, and each table's occurrences of ids sorted by row.

use std::borrow::Cow;
use std::sync::Arc;

use crate::jagged::{Feature, KeyedJaggedTensor};
use crate::keyed::Layout;
use crate::lookup::{BagConfig, Pooling, SequenceConfig};
use crate::managed::SharedIds;
use crate::spec::TableSpec;
use crate::train::master::MasterTable;
use crate::train::parts::Remote;
use crate::train::share::HostShare;
use crate::train::staged::{Recent, Travelling};
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::update::{Occurrences, RowGroups};
use sterling_kernels::threads::Threads;

/// One feature that reads one of the tables.
#[derive(Clone, Debug)]
pub(super) struct Use {
    pub(super) feature: String,
    pub(super) table: usize,
    /// `Pooling::None` for a sequence.
    pub(super) pooling: Pooling,
}

/// Which features read which table. Preparing a batch needs these settings, but no rows.
#[derive(Debug)]
pub(super) struct Features {
    pub(super) tables: Vec<TableSpec>,
    /// Per table, whether its occurrences are sorted for the update of its rows.
    is_sorted: Vec<bool>,
    /// Per table, the rows that this host has; none if all rows are in this process.
    pub(super) shares: Vec<Option<HostShare>>,
    /// Per table, the state of its partitions; none for an unpartitioned table.
    pub(super) in_parts: Vec<Option<PartitionState>>,
    /// Per table, the map of managed ids.
    ids: Vec<Option<Arc<SharedIds>>>,
    /// Lookups: bags, then sequences.
    pub(super) uses: Vec<Use>,
    pub(super) bags: usize,
    pub(super) layout: Arc<Layout>,
    pub(super) threads: Threads,
}

/// State of a partitioned table for the preparation of a batch.
#[derive(Debug, Default)]
pub(super) struct PartitionState {
    pub(super) recent: Recent,
    remotes: Vec<Remote>,
}

/// Prepares batches of [`super::LearningTables`], also while the tables process another batch.
#[derive(Clone, Debug)]
pub struct Preparer {
    pub(super) features: Arc<Features>,
}

/// A batch whose ids are resolved and sorted.
#[derive(Debug)]
pub struct PreparedBatch {
    pub(super) features: Arc<Features>,
    pub(super) ids: KeyedJaggedTensor,
    /// Per lookup, the rows of its ids, -1 for an id without a row; none if the ids are row numbers already. If `is_placed`, for
    /// tables whose rows are copied ([`Features::is_staged`]), indices into the distinct rows of the batch instead.
    resolved: Vec<Option<Vec<i64>>>,
    is_placed: bool,
    /// Per table, its occurrences by row; empty for a frozen unpartitioned table, and for tables on a device.
    pub(super) groups: Vec<RowGroups>,
    /// Per table, the rows requested from remote partitions, if the table is partitioned.
    pub(super) travelling: Vec<Option<Travelling>>,
    /// Per table, number of ids without a row.
    pub(super) skipped: Vec<u64>,
    /// Per table, the edition of the managed ids with which ids were resolved to rows.
    editions: Vec<u64>,
}

impl Features {
    pub(super) fn new(
        masters: &[MasterTable],
        bags: &[BagConfig],
        sequences: &[SequenceConfig],
        threads: Threads,
    ) -> Result<Self> {
        let tables: Vec<TableSpec> = masters.iter().map(|table| table.spec().clone()).collect();
        let is_sorted = masters
            .iter()
            .map(|table| table.rule().is_some() || table.parts().is_some() || table.share().is_some())
            .collect();
        let in_parts = |table: &MasterTable| {
            table.parts().map(|parts| PartitionState { recent: Recent::default(), remotes: parts.sources() })
        };
        let in_parts = masters.iter().map(in_parts).collect();
        let ids = masters.iter().map(|table| table.ids().map(|ids| ids.shared().clone())).collect();
        let shares = masters.iter().map(MasterTable::share).collect();
        let used = |feature: &str, table: &str, pooling| {
            let mut found = tables.iter().enumerate().filter(|(_, t)| t.name == table).map(|(at, _)| at);
            match (found.next(), found.next()) {
                (Some(table), None) => Ok(Use { feature: feature.to_owned(), table, pooling }),
                (None, _) => Err(Error::invalid(format!("no table is named `{table}`"))),
                _ => Err(Error::invalid(format!("table `{table}` occurs twice"))),
            }
        };
        if let Some(bag) = bags.iter().find(|b| b.pooling == Pooling::None) {
            return Err(Error::invalid(format!("feature `{}` has no pooling, expected sum or mean", bag.feature)));
        }
        let mut uses: Vec<Use> =
            bags.iter().map(|bag| used(&bag.feature, &bag.table, bag.pooling)).collect::<Result<_>>()?;
        let keys = bags.iter().map(|b| match bags.iter().filter(|o| o.feature == b.feature).count() {
            1 => b.feature.clone(),
            _ => format!("{}@{}", b.feature, b.table),
        });
        let widths: Vec<usize> = uses.iter().map(|u| tables[u.table].width).collect();
        let layout = Arc::new(Layout::new(keys.collect(), &widths)?);
        for sequence in sequences {
            uses.push(used(&sequence.feature, &sequence.table, Pooling::None)?);
        }
        // `Layout::new` rejects duplicate names: no two sequences may share a feature.
        Layout::new(sequences.iter().map(|s| s.feature.clone()).collect(), &vec![1; sequences.len()])?;
        Ok(Features { tables, is_sorted, shares, in_parts, ids, uses, bags: bags.len(), layout, threads })
    }

    /// Sorts no occurrences on the CPU, because the device sorts them.
    #[cfg(feature = "cuda")]
    pub(super) fn sort_nothing(&mut self) {
        self.is_sorted.fill(false);
    }

    /// Returns, per table, how often its map from managed ids to rows has changed so far; 0 without such a map.
    fn editions(&self) -> impl Iterator<Item = u64> {
        self.ids.iter().map(|ids| ids.as_ref().map_or(0, |ids| ids.edition()))
    }

    /// Returns whether a step copies the rows that a batch reads, because not all rows of the table are in one array.
    pub(super) fn is_staged(&self, table: usize) -> bool {
        self.in_parts[table].is_some() || self.shares[table].is_some()
    }

    /// Returns the lookups of a table with their indices, in the order in which their gradients are summed.
    pub(super) fn of_table(&self, table: usize) -> impl Iterator<Item = (usize, &Use)> {
        self.uses.iter().enumerate().filter(move |(_, used)| used.table == table)
    }
}

impl Preparer {
    /// Resolves the ids of a batch and sorts them by row.
    ///
    /// # Errors
    /// `Invalid` if a feature is missing in `ids`; `Unsupported` if a table has 2^32 ids or gradients or more; `Overloaded` if
    /// threads for fetching rows cannot be started.
    pub fn prepare(&self, ids: KeyedJaggedTensor) -> Result<PreparedBatch> {
        let mut batch = self.resolve(ids)?;
        let features = self.features.clone();
        let tables = (0..features.tables.len()).collect();
        for grouped in features.threads.run(tables, |table| batch.group(table)) {
            let (groups, skipped) = grouped?;
            batch.groups.push(groups);
            batch.skipped.push(skipped);
        }
        for (number, used) in features.uses.iter().enumerate() {
            if features.is_staged(used.table) {
                batch.resolved[number] = Some(batch.places(number, used.table));
            }
        }
        batch.is_placed = true;
        for (groups, in_parts) in batch.groups.iter().zip(&features.in_parts) {
            let begin =
                |parts: &PartitionState| Travelling::begin(&parts.recent, &parts.remotes, &groups.rows().into());
            batch.travelling.push(in_parts.as_ref().map(begin).transpose()?);
        }
        Ok(batch)
    }

    /// Resolves the ids of a batch to rows.
    pub(super) fn resolve(&self, ids: KeyedJaggedTensor) -> Result<PreparedBatch> {
        let features = self.features.clone();
        for used in &features.uses {
            if ids.get(&used.feature).is_none() {
                let what = format!("feature `{}` is missing, got {:?}", used.feature, ids.keys());
                return Err(Error::invalid(what));
            }
        }
        let mut batch = PreparedBatch {
            features: features.clone(),
            ids,
            resolved: Vec::new(),
            is_placed: false,
            groups: Vec::new(),
            travelling: Vec::new(),
            skipped: Vec::new(),
            // Read before the first id is resolved: rows that are reassigned meanwhile make the batch invalid.
            editions: features.editions().collect(),
        };
        batch.resolved = features.threads.run((0..features.uses.len()).collect(), |number| batch.resolve(number));
        Ok(batch)
    }
}

impl PreparedBatch {
    /// Returns the ids of the batch.
    pub fn ids(&self) -> &KeyedJaggedTensor {
        &self.ids
    }

    /// Returns the distinct rows that the batch reads in the table with index `table`, ascending. May be empty for a frozen
    /// table, and is empty for a table on a device.
    pub fn rows(&self, table: usize) -> &[u32] {
        self.groups[table].rows()
    }

    /// Returns the ids of a lookup.
    pub(super) fn feature(&self, number: usize) -> Feature<'_> {
        self.ids.get(&self.features.uses[number].feature).expect("checked when the batch was prepared")
    }

    /// Returns the rows of the ids of a lookup, -1 for an id without a row.
    pub(super) fn rows_of(&self, number: usize) -> Cow<'_, [i64]> {
        match &self.resolved[number] {
            Some(rows) => Cow::Borrowed(rows),
            None => Cow::Borrowed(self.feature(number).values()),
        }
    }

    /// Returns the number of gradient rows of a lookup: one per bag, or one per id of a sequence.
    pub(super) fn slots(&self, number: usize) -> usize {
        match self.features.uses[number].pooling {
            Pooling::None => self.feature(number).values().len(),
            Pooling::Sum | Pooling::Mean => self.ids.stride(),
        }
    }

    /// Returns the index of the first table whose rows have been reassigned since the batch was prepared.
    pub(super) fn outdated(&self) -> Option<usize> {
        self.editions.iter().zip(self.features.editions()).position(|(had, now)| *had != now)
    }

    /// Calls `each` with the ids of a table and their rows, none for an id without a row, in the order of the lookups.
    pub(super) fn occurrences(&self, table: usize, mut each: impl FnMut(i64, Option<usize>)) {
        let is_placed = self.is_placed && self.features.is_staged(table);
        let distinct = is_placed.then(|| self.groups[table].rows());
        for (number, _) in self.features.of_table(table) {
            for (&id, &row) in self.feature(number).values().iter().zip(&*self.rows_of(number)) {
                let row = usize::try_from(row).ok();
                each(id, row.map(|row| distinct.map_or(row, |rows| rows[row] as usize)));
            }
        }
    }

    fn resolve(&self, number: usize) -> Option<Vec<i64>> {
        let table = self.features.uses[number].table;
        let (spec, ids) = (&self.features.tables[table], self.feature(number).values());
        if let Some(managed) = &self.features.ids[table] {
            return Some(managed.rows_of(spec, ids));
        }
        // As u64, a negative id is larger than any number of rows.
        let is_row = |id: &i64| (*id as u64) < spec.rows;
        let row = |id: &i64| spec.resolve(*id).0.map_or(-1, |row| row as i64);
        (!ids.iter().all(is_row)).then(|| ids.iter().map(row).collect())
    }

    /// Returns the indices of a lookup's rows among the distinct rows of its table, -1 for an id without a row.
    fn places(&self, number: usize, table: usize) -> Vec<i64> {
        let distinct = self.groups[table].rows();
        let place = |row: &i64| u32::try_from(*row).map_or(-1, |row| distinct.partition_point(|r| *r < row) as i64);
        self.rows_of(number).iter().map(place).collect()
    }

    /// Returns the occurrences of a table, sorted by row, and the number of ids without a row.
    fn group(&self, table: usize) -> Result<(RowGroups, u64)> {
        let uses = || self.features.of_table(table);
        let count: usize = uses().map(|(number, _)| self.feature(number).values().len()).sum();
        let slots: usize = uses().map(|(number, _)| self.slots(number)).sum();
        if u32::try_from(count.max(slots)).is_err() {
            let what = format!("{count} ids and {slots} gradients in a batch, expected fewer than 2^32");
            return Err(Error::unsupported(what).within(format!("table `{}`", self.features.tables[table].name)));
        }
        let mut skipped = 0;
        let is_sorted = self.features.is_sorted[table];
        let mut occurrences = Occurrences::with_capacity(if is_sorted { count } else { 0 });
        let mut first_slot = 0;
        for (number, used) in uses() {
            let (feature, rows) = (self.feature(number), self.rows_of(number));
            skipped += rows.iter().filter(|row| **row < 0).count() as u64;
            if is_sorted && used.pooling == Pooling::None {
                let rows = (first_slot..).zip(rows.iter());
                rows.filter(|(_, row)| **row >= 0).for_each(|(slot, row)| occurrences.push(*row as u32, slot));
            } else if is_sorted {
                let bags = feature.offsets().windows(2).map(|o| o[0] - feature.base()..o[1] - feature.base());
                for (slot, bag) in (first_slot..).zip(bags) {
                    let Some(weights) = feature.weights() else {
                        occurrences.push_bag(&rows[bag], slot);
                        continue;
                    };
                    for at in bag.filter(|at| rows[*at] >= 0) {
                        occurrences.push_weighted(rows[at] as u32, slot, weights[at]);
                    }
                }
            }
            first_slot += self.slots(number) as u32;
        }
        Ok((occurrences.sort(), skipped))
    }
}
