//! Batches that several hosts share: preparation ahead of the step, and exchange of gradients.

use std::sync::Arc;

use super::{Model, OfLookups, Rows};
use crate::catalogue::Catalogue;
use crate::hosts::{Kind, Mesh};
use crate::weights::Weights;
use sterling_core::error::{Error, Result};
use sterling_embedding::train::{HostBatch, MasterTable};
use sterling_graph::dense::train::TreeSum;
use sterling_graph::tower::FeatureRow;

impl Model {
    /// Prepares a batch that several hosts share.
    pub(super) fn prepare(&self, users: &[&FeatureRow], items: &[&FeatureRow], mesh: &Mesh) -> Result<HostBatch> {
        let any_weights = self.any_weights(users, items);
        let all = self.ids(users, items, any_weights)?;
        let own = self.ids(&users[mesh.own(users.len())], &items[mesh.own(items.len())], any_weights)?;
        let examples = |feature: &str, host: usize| {
            let count = if self.user.has_feature(feature) { users.len() } else { items.len() };
            mesh.share(count, host)
        };
        self.tables.preparer().prepare_on_hosts(own, all, &examples)
    }

    /// Prepares the batch of the next step while the hosts wait for each other. Does nothing without other hosts, or if ids of
    /// the batch may get other rows in this step.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub(crate) fn prepare_next(&mut self, rows: &Rows<'_>, catalogue: &Catalogue) -> Result<()> {
        let Some(mesh) = &self.hosts else { return Ok(()) };
        if self.tables.tables().iter().any(MasterTable::has_ids) {
            return Ok(());
        }
        let batch = self.prepare(rows.users, &self.item_rows(rows.items, catalogue), mesh)?;
        self.ahead = Some((self.moment[0] + 1, batch));
        Ok(())
    }

    /// Returns the number of events or candidates that each graph runs over, in the order of [`Model::weights`].
    pub(super) fn graph_rows(&self, rows: &Rows<'_>) -> impl Iterator<Item = usize> + use<> {
        let item = self.item.is_some().then_some(rows.items.len());
        let reranker = self.reranker.is_some().then_some(rows.users.len());
        std::iter::once(rows.users.len()).chain(item).chain(reranker)
    }

    /// Receives the gradients of this host's rows, and adds the sums of dense gradients of all hosts. Returns the gradients by
    /// the host that they come from, and whether all hosts' gradients are finite.
    pub(super) fn receive(
        &mut self,
        rows: &Rows<'_>,
        batch: &HostBatch,
        own: &OfLookups,
        is_finite: bool,
    ) -> Result<(Vec<Vec<f32>>, bool)> {
        let mesh = self
            .hosts
            .clone()
            .ok_or_else(|| Error::internal("gradients were expected from other hosts, but this run has none"))?;
        let of_graphs: Vec<usize> = self.graph_rows(rows).collect();
        let mut sums = Vec::with_capacity(mesh.count());
        let (mut received, mut all_finite) = (Vec::with_capacity(mesh.count()), is_finite);
        for host in 0..mesh.count() {
            if host == mesh.rank() {
                sums.push(own.sums.clone());
                received.push(self.tables.gradients_for(batch, host, &own.bags, &own.sequences));
                continue;
            }
            let of_graph = |(weights, count): (&Weights, &usize)| {
                weights.sums() * TreeSum::subtrees(mesh.micro_batches(*count, host)).len()
            };
            let count = self.weights().zip(&of_graphs).map(of_graph).sum();
            sums.push(Arc::new(mesh.numbers(host, Kind::Sums, count)?));
            let expected = self.tables.gradients_from(batch, host) + 1;
            let mut gradients = mesh.numbers(host, Kind::Gradients, expected)?;
            all_finite &= gradients.pop() == Some(1.0);
            received.push(gradients);
        }
        let mut rest: Vec<_> = sums.iter().map(|sums| (0..0, sums.as_slice())).collect();
        for (weights, count) in self.weights_mut().zip(of_graphs) {
            for (host, (micro_batches, _)) in rest.iter_mut().enumerate() {
                *micro_batches = mesh.micro_batches(count, host);
            }
            weights.finish(&mut rest)?;
        }
        Ok((received, all_finite))
    }
}
