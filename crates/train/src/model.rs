//! The model in training: tables, towers, and their optimizers.
//!
//! Both towers read one set of tables, so that a table that both read has one master table. A batch of B events with C
//! candidates is one lookup of max(B, C) examples: user features have bags in the first B examples, item features in the first C.

mod shared;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use crate::catalogue::Catalogue;
use crate::hosts::{Kind, Mesh, Pulled};
use crate::managed;
use crate::products::Packed;
use crate::reranker::Reranker;
use crate::row_set::RowSet;
use crate::side::Side;
use crate::weights::Weights;
use sterling_core::error::{Error, Result};
use sterling_cuda::Device;
use sterling_embedding::train::{HostBatch, LearningTables, MasterTable, PreparedBatch, Rule};
use sterling_embedding::{JaggedTensor, KeyedJaggedTensor, KeyedTensor, Sequence};
use sterling_graph::tower::FeatureRow;
use sterling_kernels::threads::Threads;
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
    /// Connections to the other hosts of the run; none if this host runs alone.
    hosts: Option<Arc<Mesh>>,
    /// Number of the step and hash of the events, on which all hosts must agree.
    pub(crate) moment: [u64; 2],
    /// The next step and its batch, if the batch is prepared already.
    ahead: Option<(u64, HostBatch)>,
}

/// Ids of a batch, resolved to rows.
#[derive(Debug)]
enum Looked {
    Alone(Box<PreparedBatch>),
    OnHosts(Box<HostBatch>),
}

/// Outputs of the towers for a batch. With several hosts, lookups are only those of this host's events and items.
#[derive(Debug)]
pub(crate) struct Forward {
    batch: Looked,
    pooled: KeyedTensor,
    sequences: Vec<Sequence>,
    /// Queries, `[B, D]`; with several hosts, only of this host's events.
    pub(crate) queries: Vec<f32>,
    /// Candidate vectors, `[C, D]`; with the loss `tasks`, only of this host's events.
    pub(crate) candidates: Vec<f32>,
}

/// Inputs of a batch: features of users, and catalogue indices of candidates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    pub(crate) users: &'a [&'a FeatureRow],
    pub(crate) items: &'a [u32],
}

/// Gradients of a batch's lookups.
#[derive(Debug)]
pub(crate) struct OfLookups {
    bags: KeyedTensor,
    sequences: Vec<Vec<f32>>,
    /// With several hosts, sums of this host's dense gradients.
    sums: Arc<Vec<f32>>,
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
    /// Creates the master tables of the tables that the towers read, on `device` if it is set, and the trainable graphs.
    ///
    /// # Errors
    /// `Invalid` if the package has no `[train]` or no user tower; `Unsupported` with the operator's name if a graph cannot be
    /// trained, or with the table's name if the device cannot train it; `Overloaded` if the device has not enough memory.
    pub(crate) fn new(
        package: &Package,
        train: &TrainSpec,
        items: &Items,
        threads: &Threads,
        device: Option<&Device>,
        hosts: Option<Arc<Mesh>>,
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
        let user = read(TowerSide::User)?.ok_or_else(|| Error::internal("the package has no user tower"))?;
        let item = read(TowerSide::Item)?;
        let sides = || std::iter::once(&user).chain(&item);
        let read: BTreeSet<&str> = sides().flat_map(Side::tables).collect();
        let read_tables = || package.tables.iter().filter(|table| read.contains(table.name()));
        let learns = |name: &str| !train.table(name).is_some_and(|table| table.frozen);
        let names = read_tables().map(|table| table.name()).filter(|name| learns(name)).map(str::to_owned).collect();
        let others = hosts.clone().map(|mesh| (mesh.rows(), Arc::new(Pulled { mesh, tables: names })));
        let masters = read_tables().map(|table| {
            let differs = train.table(table.name());
            let rule = Rule { rate: differs.and_then(|t| t.rate).unwrap_or(train.optimizer.rate), ..train.optimizer };
            let rule = learns(table.name()).then_some(rule);
            let master = MasterTable::from_table(table, rule)?;
            let master = managed::with_ids(master, table, differs.and_then(|t| t.managed))?;
            match others.clone().filter(|_| rule.is_some()) {
                Some((share, others)) => master.on_host(share, others),
                None => Ok(master),
            }
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
        let dimension = package.spec.dimension;
        Ok(Model { tables, touched, stale, user, item, reranker, dimension, hosts, moment: [0; 2], ahead: None })
    }

    /// Returns the connections to the other hosts of the run, if there are any.
    pub(crate) fn hosts(&self) -> Option<&Arc<Mesh>> {
        self.hosts.as_ref()
    }

    /// Returns the tables that are not frozen, and their rows that changed since the last checkpoint with all rows.
    pub(crate) fn learning_tables(&self) -> impl Iterator<Item = (&MasterTable, &RowSet)> {
        self.tables.tables().iter().zip(&self.touched).filter(|(table, _)| table.rule().is_some())
    }

    /// Returns mutable references to the tables that are not frozen, with their changed rows.
    pub(crate) fn learning_tables_mut(&mut self) -> impl Iterator<Item = (&mut MasterTable, &mut RowSet)> {
        let all = self.tables.tables_mut().iter_mut().zip(&mut self.touched);
        all.filter(|(table, _)| table.rule().is_some())
    }

    /// Returns the reranker that learns.
    ///
    /// # Errors
    /// `Internal` if no reranker is trained.
    pub(crate) fn reranker(&mut self) -> Result<&mut Reranker> {
        self.reranker.as_mut().ok_or_else(|| Error::internal("the reranker is not trained"))
    }

    /// Returns the weights of all graphs: the towers and, if it is trained, the reranker.
    pub(crate) fn weights(&self) -> impl Iterator<Item = &Weights> {
        let towers = std::iter::once(&self.user).chain(&self.item).map(|side| &side.weights);
        towers.chain(self.reranker.iter().map(|reranker| &reranker.weights))
    }

    /// Returns mutable references to the weights of all graphs.
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

    /// Returns the ids of a batch.
    fn ids(&self, users: &[&FeatureRow], items: &[&FeatureRow], any_weights: bool) -> Result<KeyedJaggedTensor> {
        let examples = users.len().max(items.len());
        let mut parts: Vec<(String, JaggedTensor<i64>)> = self.user.ids(users, examples, any_weights)?;
        if let Some(item) = &self.item {
            parts.extend(item.ids(items, examples, any_weights)?);
        }
        KeyedJaggedTensor::from_jagged(parts)
    }

    fn any_weights(&self, users: &[&FeatureRow], items: &[&FeatureRow]) -> bool {
        users.iter().any(|row| self.user.has_weights(row))
            || self.item.iter().any(|side| items.iter().any(|row| side.has_weights(row)))
    }

    /// Returns the features of candidates, if the item tower reads any.
    fn item_rows<'c>(&self, items: &[u32], catalogue: &'c Catalogue) -> Vec<&'c FeatureRow> {
        match &self.item {
            Some(_) => items.iter().map(|item| &catalogue.rows()[*item as usize]).collect(),
            None => Vec::new(),
        }
    }

    /// Looks up the features of a batch, or of this host's part of it. `ahead` is that part if it is prepared already.
    fn lookup(
        &self,
        users: &[&FeatureRow],
        items: &[&FeatureRow],
        ahead: Option<HostBatch>,
    ) -> Result<(Looked, KeyedTensor, Vec<Sequence>)> {
        let Some(mesh) = &self.hosts else {
            let batch = self.tables.prepare(self.ids(users, items, self.any_weights(users, items))?)?;
            let (pooled, sequences) = self.tables.forward(&batch)?;
            return Ok((Looked::Alone(Box::new(batch)), pooled, sequences));
        };
        let batch = ahead.map_or_else(|| self.prepare(users, items, mesh), Ok)?;
        let moment: Vec<u8> = self.moment.iter().flat_map(|number| number.to_le_bytes()).collect();
        for host in mesh.others() {
            mesh.send(host, Kind::Step, moment.clone())?;
            mesh.send(host, Kind::Rows, self.tables.rows_for(&batch, host))?;
        }
        let mut received = vec![Vec::new(); mesh.count()];
        for host in mesh.others() {
            let other = mesh.bytes(host, Kind::Step, moment.len(), moment.len())?;
            if other != moment {
                let number = |at: usize| other[8 * at..8 * at + 8].iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
                let (step, [own, _]) = (number(0), self.moment);
                let what = if step == own { format!("different events at step {own}") } else { format!("step {step}") };
                return Err(Error::conflict(format!(
                    "host {host} has {what}, expected step {own} with the events of this host"
                )));
            }
            received[host] = mesh.numbers(host, Kind::Rows, self.tables.rows_from(&batch, host))?;
        }
        let (pooled, sequences) = self.tables.forward_on_hosts(&batch, &received)?;
        Ok((Looked::OnHosts(Box::new(batch)), pooled, sequences))
    }

    /// Returns the queries of users and the vectors of candidates.
    ///
    /// # Errors
    /// Errors of lookups and graphs.
    pub(crate) fn forward(&mut self, rows: &Rows<'_>, catalogue: &Catalogue) -> Result<Forward> {
        let items = self.item_rows(rows.items, catalogue);
        if let Some(mesh) = self.hosts.clone() {
            let counts: Vec<usize> = self.graph_rows(rows).collect();
            for (weights, count) in self.weights_mut().zip(counts) {
                weights.first_micro_batch = Some(mesh.micro_batches(count, mesh.rank()).start);
            }
        }
        let ahead = self.ahead.take().filter(|(step, _)| *step == self.moment[0]).map(|(_, batch)| batch);
        let (batch, pooled, sequences) = self.lookup(rows.users, &items, ahead)?;
        let (own_users, own_items) = (&rows.users[self.own(rows.users.len())], &items[self.own(items.len())]);
        let shared = self.hosts.as_ref().filter(|_| self.reranker.is_none());
        let mut candidates = match &mut self.item {
            Some(item) => item.forward(own_items, (&pooled, &sequences))?,
            None => {
                let vector = |item: &u32| &catalogue.vectors()[*item as usize * self.dimension..][..self.dimension];
                let some = if shared.is_some() { rows.items } else { &rows.items[self.own(rows.items.len())] };
                some.iter().flat_map(vector).copied().collect()
            }
        };
        // The item vectors are in transit while the user tower runs.
        let gathered = shared.filter(|_| self.item.is_some());
        gathered.map_or(Ok(()), |mesh| mesh.send_all(Kind::Vectors, candidates.clone()))?;
        let queries = self.user.forward(own_users, (&pooled, &sequences))?;
        if let Some(mesh) = gathered {
            let count = |host: usize| mesh.share(items.len(), host).len() * self.dimension;
            candidates = mesh.receive_numbers(Kind::Vectors, candidates, count)?.concat();
        }
        Ok(Forward { batch, pooled, sequences, queries, candidates })
    }

    /// Returns which of `count` events or items belong to this host: all of them if there are no other hosts.
    pub(crate) fn own(&self, count: usize) -> Range<usize> {
        self.hosts.as_ref().map_or(0..count, |mesh| mesh.own(count))
    }

    /// Begins the backward pass with the gradients of queries `[B, D]`; with several hosts, only of this host's queries.
    ///
    /// # Errors
    /// Errors of graphs.
    pub(crate) fn begin_backward(&mut self, rows: &Rows<'_>, forward: &Forward, queries: &[f32]) -> Result<OfLookups> {
        let Forward { pooled, sequences, .. } = forward;
        let bags = KeyedTensor::zeros(self.tables.layout().clone(), pooled.examples());
        let of_sequences = sequences.iter().map(|(_, rows)| vec![0.0; rows.values().len()]).collect();
        let mut made = OfLookups { bags, sequences: of_sequences, sums: Arc::default() };
        let own = &rows.users[self.own(rows.users.len())];
        self.user.backward(own, (pooled, sequences), queries, &mut made.bags, &mut made.sequences)?;
        Ok(made)
    }

    /// Ends the backward pass with the gradients of candidates `[C, D]`; with several hosts, only of this host's candidates.
    /// Sends gradients to the other hosts; `is_finite` says whether this host's gradients are finite.
    ///
    /// # Errors
    /// Errors of graphs; `Unavailable` if a host is lost.
    pub(crate) fn end_backward(
        &mut self,
        rows: &Rows<'_>,
        catalogue: &Catalogue,
        forward: &Forward,
        made: &mut OfLookups,
        candidates: &[f32],
        is_finite: bool,
    ) -> Result<()> {
        let Forward { batch, pooled, sequences, .. } = forward;
        let items = self.item_rows(&rows.items[self.own(rows.items.len())], catalogue);
        if let Some(item) = &mut self.item {
            item.backward(&items, (pooled, sequences), candidates, &mut made.bags, &mut made.sequences)?;
        }
        let (Some(mesh), Looked::OnHosts(batch)) = (&self.hosts, batch) else { return Ok(()) };
        let own: Vec<&[f32]> = self.weights().map(Weights::own_sums).collect();
        made.sums = Arc::new(own.concat());
        mesh.send_all(Kind::Sums, made.sums.clone())?;
        for host in mesh.others() {
            let mut gradients = self.tables.gradients_for(batch, host, &made.bags, &made.sequences);
            // The last number says whether the sender's gradients are finite.
            gradients.push(f32::from(u8::from(is_finite)));
            mesh.send(host, Kind::Gradients, gradients)?;
        }
        Ok(())
    }

    /// Updates weights and rows by the gradients of a backward pass. With several hosts, receives the gradients of the others.
    ///
    /// # Errors
    /// Errors of graphs and tables; `Unavailable` if a host is lost.
    pub(crate) fn update(
        &mut self,
        rows: &Rows<'_>,
        forward: Forward,
        made: OfLookups,
        is_finite: bool,
    ) -> Result<Stepped> {
        let (batch, received) = match forward.batch {
            Looked::OnHosts(batch) => {
                let (received, is_finite) = self.receive(rows, &batch, &made, is_finite)?;
                if !is_finite {
                    return Ok(Stepped { is_rejected: true, ..Stepped::default() });
                }
                (Looked::OnHosts(batch), received)
            }
            batch => (batch, Vec::new()),
        };
        // Weights and rows are updated together or not at all.
        if !self.weights().all(Weights::is_finite) {
            return Ok(Stepped { is_rejected: true, ..Stepped::default() });
        }
        self.weights_mut().try_for_each(Weights::step)?;
        let report = match batch {
            Looked::Alone(batch) => self.tables.backward(*batch, &made.bags, &made.sequences)?,
            Looked::OnHosts(batch) => {
                // Rows that other hosts have changed are among the rows of the batch.
                for (number, stale) in self.stale.iter_mut().enumerate() {
                    batch.all_rows(number, |row| stale.insert(row));
                }
                self.tables.backward_on_hosts(&batch, &received)?
            }
        };
        for ((touched, stale), table) in self.touched.iter_mut().zip(&mut self.stale).zip(&report.tables) {
            for row in &table.rows {
                touched.insert(*row);
                stale.insert(*row);
            }
        }
        let rejected_rows = report.tables.iter().map(|table| table.rejected_rows.len() as u64).sum();
        Ok(Stepped { is_rejected: false, rejected_rows })
    }

    /// Updates the vectors of all items, one column per item. Computes only vectors that may differ from `before`: those of
    /// items whose rows changed, or all vectors if the weights of the item tower are trained or ids may lose their rows.
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
            let (_, pooled, sequences) = self.lookup(&[], &rows, None)?;
            let own = self.own(rows.len());
            if let Some(item) = &mut self.item {
                let mut vectors = item.forward(&rows[own], (&pooled, &sequences))?;
                if let Some(mesh) = &self.hosts {
                    let count = |host: usize| mesh.share(rows.len(), host).len() * self.dimension;
                    vectors = mesh.gather_numbers(Kind::Vectors, vectors, count)?.concat();
                }
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
        // An item whose id lost its row belongs to none of the changed rows, so all items are stale.
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
