//! The model in training: tables, towers, and their optimizers.
//!
//! Both towers read one set of tables, so that a table that both read has one master. A batch of B events with C candidates is
//! one lookup of max(B, C) examples: user features have bags in the first B of them, item features in the first C.

use std::collections::BTreeSet;

use crate::catalogue::Catalogue;
use crate::managed;
use crate::products::Packed;
use crate::reranker::Reranker;
use crate::side::Side;
use crate::touched::RowSet;
use crate::weights::Weights;
use sterling_core::error::{Error, Result};
use sterling_cuda::Device;
use sterling_embedding::train::{LearningTables, MasterTable, PreparedBatch, Rule};
use sterling_embedding::{JaggedTensor, KeyedJaggedTensor, KeyedTensor, Sequence};
use sterling_graph::tower::FeatureRow;
use sterling_snapshot::items::Items;
use sterling_snapshot::model::{LossKind, Package, TowerSide, TrainSpec};

/// Items per batch when all item vectors are computed.
const ITEMS_TOGETHER: usize = 1024;

/// Tables and towers of a package, trained together.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) tables: LearningTables,
    /// Per table, the rows that changed since the last checkpoint with all rows.
    touched: Vec<RowSet>,
    /// Per table, the rows that changed since the vectors of all items were computed.
    stale: Vec<RowSet>,
    pub(crate) user: Side,
    pub(crate) item: Option<Side>,
    /// The reranker; none if the loss does not train it.
    reranker: Option<Reranker>,
    dimension: usize,
}

/// Outputs of the towers for a batch.
#[derive(Debug)]
pub(crate) struct Forward {
    batch: PreparedBatch,
    pooled: KeyedTensor,
    sequences: Vec<Sequence>,
    /// `[B, D]`
    pub(crate) queries: Vec<f32>,
    /// `[C, D]`
    pub(crate) candidates: Vec<f32>,
}

/// Inputs of a batch: features of users, and catalogue indices of candidates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    pub(crate) users: &'a [&'a FeatureRow],
    pub(crate) items: &'a [u32],
}

/// Outcome of a step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stepped {
    /// True if nothing changed because a gradient of the weights was not finite.
    pub(crate) is_rejected: bool,
    /// Rows whose update was rejected because its result would not have been finite.
    pub(crate) rejected_rows: u64,
}

impl Model {
    /// Creates the masters of the tables that the towers read, on a device if there is one, and the trainable graphs.
    ///
    /// # Errors
    /// `Invalid` if the package has no `[train]` or no user tower; `Unsupported` with the operator's name if a graph cannot be
    /// trained, or with the table's name if the device cannot train it; `Overloaded` if the device has not enough memory.
    pub(crate) fn new(
        package: &Package,
        train: &TrainSpec,
        items: &Items,
        threads: usize,
        device: Option<&Device>,
    ) -> Result<Self> {
        let user = package.user.as_ref().ok_or_else(|| Error::invalid("model.toml: [user] is missing"))?;
        let read = |side: TowerSide| {
            let optimizer = train.learns(side).then_some(&train.dense_optimizer);
            match side {
                TowerSide::User => Side::read(package, user, "user", "query", optimizer, threads).map(Some),
                TowerSide::Item => {
                    let tower = package.item.as_ref();
                    tower.map(|tower| Side::read(package, tower, "item", "item", optimizer, threads)).transpose()
                }
            }
        };
        let user = read(TowerSide::User)?.ok_or_else(|| Error::internal("a package without its user tower"))?;
        let item = read(TowerSide::Item)?;
        let sides = || std::iter::once(&user).chain(&item);
        let read: BTreeSet<&str> = sides().flat_map(Side::tables).collect();
        let masters = package.tables.iter().filter(|table| read.contains(table.name())).map(|table| {
            let differs = train.table(table.name());
            let rule = Rule { rate: differs.and_then(|t| t.rate).unwrap_or(train.optimizer.rate), ..train.optimizer };
            let rule = (!differs.is_some_and(|t| t.frozen)).then_some(rule);
            managed::with_ids(MasterTable::from_table(table, rule)?, table, differs.and_then(|t| t.managed))
        });
        let masters = masters.collect::<Result<Vec<_>>>()?;
        let bags: Vec<_> = sides().flat_map(Side::bags).collect();
        let sequences: Vec<_> = sides().flat_map(Side::sequences).collect();
        let mut tables = LearningTables::new(masters, &bags, &sequences, threads)?;
        if let Some(device) = device {
            tables = tables.on_device(device)?;
        }
        let (mut user, mut item) = (user, item);
        let names: Vec<String> = sequences.into_iter().map(|s| s.feature).collect();
        user.connect(tables.layout(), &names)?;
        item.as_mut().map_or(Ok(()), |item| item.connect(tables.layout(), &names))?;
        let reranker = (train.loss == LossKind::Tasks).then(|| Reranker::read(package, train, items, threads));
        let reranker = reranker.transpose()?;
        let sets = || tables.tables().iter().map(|table| RowSet::new(table.spec().rows)).collect::<Result<Vec<_>>>();
        let (touched, stale) = (sets()?, sets()?);
        Ok(Model { tables, touched, stale, user, item, reranker, dimension: package.spec.dimension })
    }

    /// Returns the tables that are not frozen, and their rows that changed since the last checkpoint with all rows.
    pub(crate) fn learning_tables(&self) -> impl Iterator<Item = (&MasterTable, &RowSet)> {
        self.tables.tables().iter().zip(&self.touched).filter(|(table, _)| table.rule().is_some())
    }

    /// Returns the same, mutable.
    pub(crate) fn learning_tables_mut(&mut self) -> impl Iterator<Item = (&mut MasterTable, &mut RowSet)> {
        let all = self.tables.tables_mut().iter_mut().zip(&mut self.touched);
        all.filter(|(table, _)| table.rule().is_some())
    }

    /// Returns the reranker that learns.
    ///
    /// # Errors
    /// `Internal` if no reranker is trained.
    pub(crate) fn reranker(&mut self) -> Result<&mut Reranker> {
        self.reranker.as_mut().ok_or_else(|| Error::internal("a reranker that is not trained"))
    }

    /// Returns the weights of all graphs: the towers and the reranker, as far as there are any.
    pub(crate) fn weights(&self) -> impl Iterator<Item = &Weights> {
        let towers = std::iter::once(&self.user).chain(&self.item).map(|side| &side.weights);
        towers.chain(self.reranker.iter().map(|reranker| &reranker.weights))
    }

    /// Returns the same, mutable.
    pub(crate) fn weights_mut(&mut self) -> impl Iterator<Item = &mut Weights> {
        let towers = std::iter::once(&mut self.user).chain(&mut self.item).map(|side| &mut side.weights);
        towers.chain(self.reranker.iter_mut().map(|reranker| &mut reranker.weights))
    }

    /// Returns whether more than half of all rows, by their size, changed since the last checkpoint with all rows.
    pub(crate) fn is_mostly_touched(&self) -> bool {
        let size = |table: &MasterTable, rows: usize| rows * (table.spec().width + table.state_width());
        let touched: usize = self.learning_tables().map(|(table, touched)| size(table, touched.len())).sum();
        let all: usize = self.learning_tables().map(|(table, _)| size(table, table.spec().rows as usize)).sum();
        2 * touched > all
    }

    /// Forgets which rows changed, after a checkpoint with all rows.
    pub(crate) fn forget_touched(&mut self) {
        self.touched.iter_mut().for_each(RowSet::clear);
    }

    /// Returns the width of queries and items, D.
    pub(crate) fn dimension(&self) -> usize {
        self.dimension
    }

    /// Looks up the features of a batch.
    fn lookup(
        &self,
        users: &[&FeatureRow],
        items: &[&FeatureRow],
    ) -> Result<(PreparedBatch, KeyedTensor, Vec<Sequence>)> {
        let examples = users.len().max(items.len());
        let any_weights = users.iter().any(|row| self.user.has_weights(row))
            || self.item.iter().any(|side| items.iter().any(|row| side.has_weights(row)));
        let mut parts: Vec<(String, JaggedTensor<i64>)> = self.user.ids(users, examples, any_weights)?;
        if let Some(item) = &self.item {
            parts.extend(item.ids(items, examples, any_weights)?);
        }
        let batch = self.tables.prepare(KeyedJaggedTensor::from_jagged(parts)?)?;
        let (pooled, sequences) = self.tables.forward(&batch)?;
        Ok((batch, pooled, sequences))
    }

    /// Returns the queries of users and the vectors of candidates.
    ///
    /// # Errors
    /// Errors of lookups and graphs.
    pub(crate) fn forward(&mut self, rows: &Rows<'_>, catalogue: &Catalogue) -> Result<Forward> {
        let items: Vec<&FeatureRow> = match &self.item {
            Some(_) => rows.items.iter().map(|item| &catalogue.rows()[*item as usize]).collect(),
            None => Vec::new(),
        };
        let (batch, pooled, sequences) = self.lookup(rows.users, &items)?;
        let queries = self.user.forward(rows.users, (&pooled, &sequences))?;
        let candidates = match &mut self.item {
            Some(item) => item.forward(&items, (&pooled, &sequences))?,
            None => {
                let vector = |item: &u32| &catalogue.vectors()[*item as usize * self.dimension..][..self.dimension];
                rows.items.iter().flat_map(vector).copied().collect()
            }
        };
        Ok(Forward { batch, pooled, sequences, queries, candidates })
    }

    /// Updates weights and rows by the gradients of queries `[B, D]` and candidates `[C, D]`.
    ///
    /// # Errors
    /// Errors of graphs and tables.
    pub(crate) fn backward(
        &mut self,
        rows: &Rows<'_>,
        catalogue: &Catalogue,
        forward: Forward,
        queries: &[f32],
        candidates: &[f32],
    ) -> Result<Stepped> {
        let Forward { batch, pooled, sequences, .. } = forward;
        let mut of_bags = KeyedTensor::zeros(self.tables.layout().clone(), pooled.examples());
        let mut of_sequences: Vec<Vec<f32>> =
            sequences.iter().map(|(_, rows)| vec![0.0; rows.values().len()]).collect();
        let inputs = (&pooled, sequences.as_slice());
        self.user.backward(rows.users, inputs, queries, &mut of_bags, &mut of_sequences)?;
        if let Some(item) = &mut self.item {
            let items: Vec<&FeatureRow> = rows.items.iter().map(|item| &catalogue.rows()[*item as usize]).collect();
            item.backward(&items, inputs, candidates, &mut of_bags, &mut of_sequences)?;
        }
        // Weights and rows are updated together or not at all.
        if !self.weights().all(Weights::is_finite) {
            return Ok(Stepped { is_rejected: true, ..Stepped::default() });
        }
        self.weights_mut().try_for_each(Weights::step)?;
        let report = self.tables.backward(batch, &of_bags, &of_sequences)?;
        for ((touched, stale), table) in self.touched.iter_mut().zip(&mut self.stale).zip(&report.tables) {
            for row in &table.rows {
                touched.insert(*row);
                stale.insert(*row);
            }
        }
        let rejected_rows = report.tables.iter().map(|table| table.rejected_rows.len() as u64).sum();
        Ok(Stepped { is_rejected: false, rejected_rows })
    }

    /// Updates the vectors of all items, a column each. Only those are computed that differ from `before`: of items
    /// whose rows changed, or all of them if the weights of the item tower learn.
    ///
    /// # Errors
    /// Errors of lookups and graphs.
    pub(crate) fn vectors(&mut self, catalogue: &Catalogue, before: Option<Packed>) -> Result<Packed> {
        let (mut packed, stale) = match before {
            Some(packed) => (packed, self.stale_items(catalogue)),
            None if self.item.is_none() => {
                return Ok(Packed::transposed(catalogue.vectors(), self.dimension, catalogue.len()));
            }
            None => (Packed::zeros(self.dimension, catalogue.len()), (0..catalogue.len() as u32).collect()),
        };
        for items in stale.chunks(ITEMS_TOGETHER) {
            let rows: Vec<&FeatureRow> = items.iter().map(|item| &catalogue.rows()[*item as usize]).collect();
            let (_, pooled, sequences) = self.lookup(&[], &rows)?;
            if let Some(item) = &mut self.item {
                let vectors = item.forward(&rows, (&pooled, &sequences))?;
                let vectors = vectors.chunks_exact(self.dimension);
                items.iter().zip(vectors).for_each(|(item, vector)| packed.set_column(*item as usize, vector));
            }
        }
        self.stale.iter_mut().for_each(RowSet::clear);
        Ok(packed)
    }

    /// Returns the items whose vectors may have changed since [`Model::vectors`] computed them.
    fn stale_items(&self, catalogue: &Catalogue) -> Vec<u32> {
        let Some(item) = &self.item else { return Vec::new() };
        let all = 0..catalogue.len() as u32;
        // An item whose id lost its row is of no row that changed.
        let has_ids = |name: &str| self.tables.table(name).is_some_and(MasterTable::has_ids);
        if item.weights.optimizer.is_some() || item.lookups().any(|(_, table)| has_ids(table)) {
            return all.collect();
        }
        let specs: Vec<_> = self.tables.tables().iter().map(|table| table.spec()).collect();
        let features: Vec<_> = item
            .lookups()
            .filter_map(|(n, table)| {
                let at = specs.iter().position(|spec| spec.name == table)?;
                Some((n, specs[at], &self.stale[at]))
            })
            .collect();
        let is_stale = |item: &u32| {
            let row = &catalogue.rows()[*item as usize];
            features.iter().any(|(n, spec, stale)| {
                let ids = row.ids_of(*n).map_or(&[][..], |(ids, _)| ids);
                ids.iter().any(|id| spec.resolve(*id).0.is_some_and(|row| stale.contains(row as u32)))
            })
        };
        all.filter(is_stale).collect()
    }
}
