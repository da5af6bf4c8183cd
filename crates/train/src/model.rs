//! The model in training: tables, towers, and their optimizers.
//!
//! Both towers read one set of tables, so that a table that both read has one master. A batch of B events with C candidates is
//! one lookup of max(B, C) examples: user features have bags in the first B of them, item features in the first C.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use crate::catalogue::Catalogue;
use crate::hosts::{Kind, Mesh, Pulled};
use crate::managed;
use crate::products::Packed;
use crate::reranker::Reranker;
use crate::side::Side;
use crate::touched::RowSet;
use crate::weights::Weights;
use sterling_core::error::{Error, Result};
use sterling_cuda::Device;
use sterling_embedding::train::{HostBatch, LearningTables, MasterTable, PreparedBatch, Rule};
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
    /// The other hosts of the run; none if there are none.
    hosts: Option<Arc<Mesh>>,
    /// Step and hash of the events, which all hosts must agree on.
    pub(crate) moment: [u64; 2],
}

/// Ids of a batch, resolved to rows.
#[derive(Debug)]
enum Looked {
    Alone(Box<PreparedBatch>),
    OnHosts(Box<HostBatch>),
}

/// Outputs of the towers for a batch. With several hosts, lookups are those of this host's share.
#[derive(Debug)]
pub(crate) struct Forward {
    batch: Looked,
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

/// Gradients of queries and candidates, and whether they are finite.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairGradients<'a> {
    pub(crate) queries: &'a [f32],
    pub(crate) candidates: &'a [f32],
    pub(crate) is_finite: bool,
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
        let user = read(TowerSide::User)?.ok_or_else(|| Error::internal("a package without its user tower"))?;
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
        let mut model = Model { tables, touched, stale, user, item, reranker, dimension, hosts, moment: [0; 2] };
        let is_shared = model.hosts.is_some();
        model.weights_mut().for_each(|weights| weights.is_shared = is_shared);
        Ok(model)
    }

    /// Returns the other hosts of the run.
    pub(crate) fn hosts(&self) -> Option<&Arc<Mesh>> {
        self.hosts.as_ref()
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

    /// Looks up the features of a batch, or of this host's share of it.
    fn lookup(&self, users: &[&FeatureRow], items: &[&FeatureRow]) -> Result<(Looked, KeyedTensor, Vec<Sequence>)> {
        let any_weights = users.iter().any(|row| self.user.has_weights(row))
            || self.item.iter().any(|side| items.iter().any(|row| side.has_weights(row)));
        let ids = |users: &[&FeatureRow], items: &[&FeatureRow]| {
            let examples = users.len().max(items.len());
            let mut parts: Vec<(String, JaggedTensor<i64>)> = self.user.ids(users, examples, any_weights)?;
            if let Some(item) = &self.item {
                parts.extend(item.ids(items, examples, any_weights)?);
            }
            KeyedJaggedTensor::from_jagged(parts)
        };
        let all = ids(users, items)?;
        let Some(mesh) = &self.hosts else {
            let batch = self.tables.prepare(all)?;
            let (pooled, sequences) = self.tables.forward(&batch)?;
            return Ok((Looked::Alone(Box::new(batch)), pooled, sequences));
        };
        let own = ids(&users[mesh.own(users.len())], &items[mesh.own(items.len())])?;
        let examples = |feature: &str, host: usize| {
            let count = if self.user.has_feature(feature) { users.len() } else { items.len() };
            mesh.share(count, host)
        };
        let batch = self.tables.preparer().prepare_on_hosts(own, all, &examples)?;
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
                let what = if step == own { format!("other events at step {own}") } else { format!("step {step}") };
                return Err(Error::conflict(format!("host {host} has {what}, expected those of step {own} here")));
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
        let items: Vec<&FeatureRow> = match &self.item {
            Some(_) => rows.items.iter().map(|item| &catalogue.rows()[*item as usize]).collect(),
            None => Vec::new(),
        };
        let (batch, pooled, sequences) = self.lookup(rows.users, &items)?;
        let (own_users, own_items) = (&rows.users[self.own(rows.users.len())], &items[self.own(items.len())]);
        let mut queries = self.user.forward(own_users, (&pooled, &sequences))?;
        let candidates = match &mut self.item {
            Some(item) => item.forward(own_items, (&pooled, &sequences))?,
            None => {
                let vector = |item: &u32| &catalogue.vectors()[*item as usize * self.dimension..][..self.dimension];
                rows.items.iter().flat_map(vector).copied().collect()
            }
        };
        let Some(mesh) = &self.hosts else { return Ok(Forward { batch, pooled, sequences, queries, candidates }) };
        // One message with the queries and the candidates of each host.
        let (width, users) = (self.dimension, rows.users.len());
        let queries_of = |host: usize| mesh.share(users, host).len() * width;
        let is_gathered = self.item.is_some();
        let of = |host: usize| queries_of(host) + mesh.share(items.len(), host).len() * width;
        if is_gathered {
            queries.extend(&candidates);
        }
        let gathered = mesh.gather_numbers(Kind::Vectors, queries, of)?;
        let parts = || gathered.iter().enumerate().map(|(host, of_host)| of_host.split_at(queries_of(host)));
        let queries = parts().flat_map(|(queries, _)| queries).copied().collect();
        let candidates = match is_gathered {
            true => parts().flat_map(|(_, candidates)| candidates).copied().collect(),
            false => candidates,
        };
        Ok(Forward { batch, pooled, sequences, queries, candidates })
    }

    /// Returns this host's share of `count` events or items: all of them if there are no other hosts.
    pub(crate) fn own(&self, count: usize) -> Range<usize> {
        self.hosts.as_ref().map_or(0..count, |mesh| mesh.own(count))
    }

    /// Updates weights and rows by the gradients of queries `[B, D]` and candidates `[C, D]`, or of this host's share of them. With
    /// several hosts, `is_finite` says whether these gradients are finite here.
    ///
    /// # Errors
    /// Errors of graphs and tables.
    pub(crate) fn backward(
        &mut self,
        rows: &Rows<'_>,
        catalogue: &Catalogue,
        forward: Forward,
        gradients: &PairGradients<'_>,
    ) -> Result<Stepped> {
        let PairGradients { queries, candidates, is_finite } = *gradients;
        let Forward { batch, pooled, sequences, .. } = forward;
        let mut of_bags = KeyedTensor::zeros(self.tables.layout().clone(), pooled.examples());
        let mut of_sequences: Vec<Vec<f32>> =
            sequences.iter().map(|(_, rows)| vec![0.0; rows.values().len()]).collect();
        let inputs = (&pooled, sequences.as_slice());
        let (own_users, own_items) = (&rows.users[self.own(rows.users.len())], &rows.items[self.own(rows.items.len())]);
        self.user.backward(own_users, inputs, queries, &mut of_bags, &mut of_sequences)?;
        if let Some(item) = &mut self.item {
            let items: Vec<&FeatureRow> = own_items.iter().map(|item| &catalogue.rows()[*item as usize]).collect();
            item.backward(&items, inputs, candidates, &mut of_bags, &mut of_sequences)?;
        }
        let (batch, received) = match batch {
            Looked::OnHosts(batch) => {
                let (received, is_finite) = self.exchange(&batch, &of_bags, &of_sequences, is_finite)?;
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
            Looked::Alone(batch) => self.tables.backward(*batch, &of_bags, &of_sequences)?,
            Looked::OnHosts(batch) => {
                // Rows that other hosts have changed are among those of the batch.
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

    /// Sends gradients to the owners of their rows, and adds the sums of dense gradients of all hosts. Returns the gradients of
    /// this host's rows by the host that they come from, and whether all hosts' gradients are finite.
    fn exchange(
        &mut self,
        batch: &HostBatch,
        of_bags: &KeyedTensor,
        of_sequences: &[Vec<f32>],
        is_finite: bool,
    ) -> Result<(Vec<Vec<f32>>, bool)> {
        let mesh = self.hosts.clone().ok_or_else(|| Error::internal("gradients of no other host"))?;
        let of = |host: usize| self.tables.gradients_for(batch, host, of_bags, of_sequences);
        for host in mesh.others() {
            // The last number says whether gradients are finite.
            let mut gradients = of(host);
            gradients.push(f32::from(u8::from(is_finite)));
            mesh.send(host, Kind::Gradients, gradients)?;
        }
        let count: usize = self.weights().map(Weights::sums).sum();
        let add = |model: &Model, total: &mut [f32]| {
            let mut rest = total;
            for weights in model.weights() {
                let (own, behind) = std::mem::take(&mut rest).split_at_mut(weights.sums());
                weights.add_sums(own);
                rest = behind;
            }
        };
        let mut total = vec![0.0; count];
        if mesh.rank() == 0 {
            add(self, &mut total);
            if mesh.count() > 1 {
                mesh.send(1, Kind::Sums, total.clone())?;
            }
        }
        let (mut received, mut all_finite) = (Vec::with_capacity(mesh.count()), is_finite);
        for host in 0..mesh.count() {
            if host == mesh.rank() {
                received.push(of(host));
                continue;
            }
            let expected = self.tables.gradients_from(batch, host) + 1;
            let mut gradients = mesh.numbers(host, Kind::Gradients, expected)?;
            all_finite &= gradients.pop() == Some(1.0);
            received.push(gradients);
        }
        if mesh.count() > 1 {
            total = mesh.total(count, |total| add(self, total))?;
        }
        let mut rest = total.as_slice();
        for weights in self.weights_mut() {
            let (own, behind) = rest.split_at(weights.sums());
            weights.finish(own)?;
            rest = behind;
        }
        Ok((received, all_finite))
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
