//! Lookups of all features of a batch in one call.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use crate::device::cpu::Kernels;
use crate::device::cpu::pool::{self, Bags, Pooled};
use crate::embedding::jagged::{Feature, JaggedTensor, KeyedJaggedTensor};
use crate::embedding::keyed::{KeyedTensor, Layout};
use crate::embedding::shard::{ShardedEmbeddingBagCollection, ShardedEmbeddingCollection, ShardedTable};
use crate::embedding::table::{Source, Table};
use crate::embedding::uses::{self, Use};
use crate::error::Result;
pub use crate::request::OnDegraded;

/// How the rows of a bag become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// Their sum, each times its id's weight where there are weights.
    #[default]
    Sum,
    /// That sum divided by the number of ids (not by the sum of the weights, as TorchRec does it).
    Mean,
}

/// One pooled feature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BagConfig {
    /// The key of the ids.
    pub feature: String,
    /// The name of the table.
    pub table: String,
    /// How its rows become one.
    pub pooling: Pooling,
}

/// One feature whose rows are kept apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceConfig {
    /// The key of the ids.
    pub feature: String,
    /// The name of the table.
    pub table: String,
}

/// The terms of one lookup.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lookup {
    /// Rows not there by then are degraded.
    pub deadline: Option<Instant>,
    /// What that means: the lookup fails, or goes on with zeros in the row's place and counts it.
    pub on_degraded: OnDegraded,
}

/// What became of the ids of one table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableCounts {
    /// The table's name.
    pub table: String,
    /// Ids looked up.
    pub ids: u64,
    /// Those that are no row of the table and met its policy.
    pub unseen: u64,
    /// Those whose row is missing at its source.
    pub unknown: u64,
    /// Those whose row did not come in time.
    pub degraded: u64,
    /// Of each example, those whose row did not come in time; empty where all came.
    pub degraded_of: Vec<u64>,
}

/// What became of the ids of a lookup, one entry a table.
pub type LookupReport = Vec<TableCounts>;

/// The rows of one feature: its key and one run of rows an example.
pub type Sequence = (String, JaggedTensor<f32>);

/// Pooled lookups over a set of tables.
#[derive(Clone, Debug)]
pub struct EmbeddingBagCollection {
    tables: Vec<Arc<Table>>,
    uses: Vec<Use>,
    layout: Arc<Layout>,
    kernels: Kernels,
    /// The same over shards, where a table is cut or its rows are fetched.
    sharded: Option<ShardedEmbeddingBagCollection>,
}

impl EmbeddingBagCollection {
    /// The features of `bags` over `tables`. The output's keys are the features in the order of `bags`; a feature that several
    /// tables serve becomes `feature@table`.
    ///
    /// # Errors
    /// `Invalid` for a table that is not there or comes twice, or a feature that comes twice with the same table;
    /// `Unsupported` where the kernels asked for do not run here.
    pub fn new(tables: Vec<Arc<Table>>, bags: &[BagConfig]) -> Result<Self> {
        let (uses, layout) = uses::of_bags(tables.iter().map(|t| t.spec()), bags)?;
        let sharded = in_shards(&tables).map(|t| ShardedEmbeddingBagCollection::new(t, bags)).transpose()?;
        Ok(EmbeddingBagCollection { tables, uses, layout, kernels: Kernels::detect()?, sharded })
    }

    /// The same collection with other kernels.
    pub fn with_kernels(mut self, kernels: Kernels) -> Self {
        self.kernels = kernels;
        self.sharded = self.sharded.map(|s| s.with_kernels(kernels));
        self
    }

    /// Keys and columns of the output.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The tables.
    pub fn tables(&self) -> &[Arc<Table>] {
        &self.tables
    }

    /// The pooled embeddings of all examples of `ids`, and what became of the ids.
    ///
    /// # Errors
    /// `Invalid` where a feature is missing in `ids`; `Unavailable` or `DeadlineExceeded` where rows could not be fetched and
    /// the terms refuse that.
    pub fn lookup(&self, ids: &KeyedJaggedTensor, terms: &Lookup) -> Result<(KeyedTensor, LookupReport)> {
        if let Some(sharded) = &self.sharded {
            return sharded.lookup(ids, terms);
        }
        let mut out = KeyedTensor::zeros(self.layout.clone(), ids.stride());
        let mut report = new_report(&self.tables);
        for (k, used) in self.uses.iter().enumerate() {
            let feature = used.of(ids)?;
            let table = &self.tables[used.table];
            let resolved = resolve(table, &feature, &mut report[used.table]);
            let bags = Bags {
                ids: &resolved,
                offsets: feature.offsets(),
                weights: feature.weights(),
                mean: used.pooling == Pooling::Mean,
            };
            let rows = table.host_rows().expect("without shards all rows are in memory");
            let (stride, column) = (self.layout.width(), self.layout.columns(k).start);
            pool::pool(self.kernels, &rows, &bags, &mut Pooled { data: out.values_mut(), stride, column });
        }
        Ok((out, report))
    }
}

/// Sequence lookups over a set of tables: every id keeps its own row.
#[derive(Clone, Debug)]
pub struct EmbeddingCollection {
    tables: Vec<Arc<Table>>,
    uses: Vec<Use>,
    kernels: Kernels,
    /// As in [`EmbeddingBagCollection`].
    sharded: Option<ShardedEmbeddingCollection>,
}

impl EmbeddingCollection {
    /// The features of `sequences` over `tables`.
    ///
    /// # Errors
    /// As [`EmbeddingBagCollection::new`]; a feature may come once.
    pub fn new(tables: Vec<Arc<Table>>, sequences: &[SequenceConfig]) -> Result<Self> {
        let uses = uses::of_sequences(tables.iter().map(|t| t.spec()), sequences)?;
        let sharded = in_shards(&tables).map(|t| ShardedEmbeddingCollection::new(t, sequences)).transpose()?;
        Ok(EmbeddingCollection { tables, uses, kernels: Kernels::detect()?, sharded })
    }

    /// The tables.
    pub fn tables(&self) -> &[Arc<Table>] {
        &self.tables
    }

    /// One jagged tensor of rows a feature, in the order of the configuration. Ids without a row are rows of zeros; weights
    /// are not applied.
    ///
    /// # Errors
    /// As [`EmbeddingBagCollection::lookup`].
    pub fn lookup(&self, ids: &KeyedJaggedTensor, terms: &Lookup) -> Result<(Vec<Sequence>, LookupReport)> {
        if let Some(sharded) = &self.sharded {
            return sharded.lookup(ids, terms);
        }
        let mut report = new_report(&self.tables);
        let mut found = Vec::with_capacity(self.uses.len());
        for used in &self.uses {
            let feature = used.of(ids)?;
            let table = &self.tables[used.table];
            let resolved = resolve(table, &feature, &mut report[used.table]);
            let each: Vec<usize> = (0..=resolved.len()).collect();
            let rows = table.host_rows().expect("without shards all rows are in memory");
            let mut values = vec![0f32; resolved.len() * table.width()];
            let bags = Bags { ids: &resolved, offsets: &each, weights: None, mean: false };
            pool::pool(self.kernels, &rows, &bags, &mut Pooled { data: &mut values, stride: table.width(), column: 0 });
            let offsets = feature.offsets().iter().map(|o| o - feature.base()).collect();
            found.push((used.feature.clone(), JaggedTensor::of_rows(values, table.width(), offsets)));
        }
        Ok((found, report))
    }
}

/// All tables in shards, one where a table is whole; none where every table lies whole in memory.
fn in_shards(tables: &[Arc<Table>]) -> Option<Vec<Arc<ShardedTable>>> {
    let shards = |table: &Arc<Table>| match table.source() {
        Source::Sharded(shards) => shards.clone(),
        Source::Host(_) | Source::Fetched(_) => Arc::new(ShardedTable::whole(table)),
    };
    let whole = tables.iter().all(|t| matches!(t.source(), Source::Host(_)));
    (!whole).then(|| tables.iter().map(shards).collect())
}

fn new_report(tables: &[Arc<Table>]) -> LookupReport {
    tables.iter().map(|t| TableCounts { table: t.name().to_owned(), ..TableCounts::default() }).collect()
}

/// The rows that the ids of a feature take, -1 for none. Ids that are all rows are taken as they are.
fn resolve<'a>(table: &Table, feature: &Feature<'a>, counts: &mut TableCounts) -> Cow<'a, [i64]> {
    let ids = feature.values();
    counts.ids += ids.len() as u64;
    // A negative id is a large one without its sign; without an early exit the comparison runs in vectors.
    let unseen = ids.iter().filter(|&&id| id as u64 >= table.rows()).count();
    if unseen == 0 {
        return Cow::Borrowed(ids);
    }
    counts.unseen += unseen as u64;
    Cow::Owned(ids.iter().map(|&id| table.resolve(id).0.map_or(-1, |row| row as i64)).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::device::cpu::pool::RowFormat;
    use crate::embedding::table::Unseen;

    #[test]
    fn a_small_collection_pools_by_hand() {
        let items =
            Arc::new(Table::from_f32("items", 2, &[1., 2., 3., 4., 5., 6.], RowFormat::F32, Unseen::Zero).unwrap());
        let tags = Arc::new(Table::from_f32("tags", 1, &[10., 20.], RowFormat::F16, Unseen::Row(1)).unwrap());
        let bag =
            |feature: &str, table: &str, pooling| BagConfig { feature: feature.into(), table: table.into(), pooling };
        let bags = [bag("a", "items", Pooling::Sum), bag("b", "tags", Pooling::Mean), bag("c", "items", Pooling::Mean)];
        let ebc = EmbeddingBagCollection::new(vec![items, tags], &bags).unwrap();
        let ids =
            KeyedJaggedTensor::from_lengths(["c", "a", "b"], vec![0, 1, 2, 2, 7, 0, 99], &[2, 0, 1, 2, 2, 0], None)
                .unwrap();
        let (out, report) = ebc.lookup(&ids, &Lookup::default()).unwrap();
        assert_eq!(out.keys(), ["a", "b", "c"]);
        assert_eq!(out.values(), [5., 6., 15., 2., 3., 5., 6., 0., 0., 0.]);
        assert_eq!((report[0].ids, report[0].unseen, report[1].unseen), (5, 1, 1));
        assert!(ebc.lookup(&ids.permute(&[0]).unwrap(), &Lookup::default()).is_err());
    }
}
