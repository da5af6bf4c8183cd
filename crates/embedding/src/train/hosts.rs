//! Training steps that several hosts share: each host has a part of the rows of every table, and of the examples of a batch.
//!
//! Every host knows the ids of the complete batch, so that ids are not sent. In a step, each owner sends the rows that the
//! examples of another host read, without their optimizer state ([`LearningTables::rows_for`]). The hosts send the gradients of
//! their bags and sequences to the owners ([`LearningTables::gradients_for`]). An owner has all occurrences of its rows in the
//! order of the batch, and the gradients of all hosts in that order, so that its sums and updates are bit-identical to those of
//! one host. Both sides derive the order and the number of values from the ids: messages hold values only.

use std::ops::Range;

use crate::jagged::KeyedJaggedTensor;
use crate::keyed::KeyedTensor;
use crate::lookup::{Pooling, Sequence};
use crate::train::batch::{PreparedBatch, Preparer};
use crate::train::report::UpdateReport;
use crate::train::tables::LearningTables;
use sterling_core::error::{Error, Result};
use sterling_kernels::cpu::update::{BLOCK, Occurrences, RowGroups};

/// Returns which examples of the complete batch a host has, for a feature.
pub type Examples<'a> = dyn Fn(&str, usize) -> Range<usize> + Sync + 'a;

/// A batch that several hosts share.
#[derive(Debug)]
pub struct HostBatch {
    /// Lookups of this host's examples.
    own: PreparedBatch,
    /// Rows of all ids. Its groups have this host's rows by their local index, and received gradients as slots.
    all: PreparedBatch,
    shares: Vec<TableShare>,
}

/// Rows and gradients of one table that hosts exchange. All lists are empty for frozen tables, which every host has.
#[derive(Debug, Default)]
struct TableShare {
    /// Per other host, the local indices of this host's rows that the other host's examples read; ascending.
    lent: Vec<Vec<u32>>,
    /// Per lookup of the table and per host, number of gradients that this host receives from it.
    arrivals: Vec<Vec<usize>>,
    /// Per owner of rows, lookup and slot of each gradient that this host sends, in the order of the message.
    departures: Vec<Vec<(usize, usize)>>,
}

impl HostBatch {
    /// Calls `each` with the rows of a table that the complete batch reads on all hosts, in any order, with repetitions.
    pub fn all_rows(&self, table: usize, mut each: impl FnMut(u32)) {
        self.all.occurrences(table, |_, row| row.into_iter().for_each(|row| each(row as u32)));
    }
}

impl Preparer {
    /// Prepares a batch that several hosts share: `own` has the ids of this host's examples, `all` the ids of the complete batch.
    ///
    /// # Errors
    /// As [`Preparer::prepare`]; `Invalid` if trained tables are not spread over hosts, or if `own` is not a part of `all`.
    pub fn prepare_on_hosts(
        &self,
        own: KeyedJaggedTensor,
        all: KeyedJaggedTensor,
        examples: &Examples<'_>,
    ) -> Result<HostBatch> {
        let own = self.prepare(own)?;
        let mut all = self.resolve(all)?;
        let tables = (0..self.features.tables.len()).collect();
        let shares = self.features.threads.run(tables, |table| share_table(&own, &all, table, examples));
        let mut batch = Vec::with_capacity(shares.len());
        for share in shares {
            let (share, groups, skipped) = share?;
            batch.push(share);
            all.groups.push(groups);
            all.skipped.push(skipped);
        }
        Ok(HostBatch { own, all, shares: batch })
    }
}

/// Returns the rows and gradients of a table that hosts exchange, the occurrences of this host's rows, and the number
/// of ids without a row.
fn share_table(
    own: &PreparedBatch,
    all: &PreparedBatch,
    table: usize,
    examples: &Examples<'_>,
) -> Result<(TableShare, RowGroups, u64)> {
    let features = &all.features;
    let Some(share) = features.shares[table] else {
        let skipped = |(number, _)| all.rows_of(number).iter().filter(|row| **row < 0).count() as u64;
        let skipped = features.of_table(table).map(skipped).sum();
        return Ok((TableShare::default(), Occurrences::default().sort(), skipped));
    };
    let hosts = share.hosts as usize;
    let mut made =
        TableShare { lent: vec![Vec::new(); hosts], arrivals: Vec::new(), departures: vec![Vec::new(); hosts] };
    let mut lent: Vec<Occurrences> = vec![Occurrences::default(); hosts];
    let (mut occurrences, mut slot, mut skipped) = (Occurrences::default(), 0u32, 0);
    for (number, used) in features.of_table(table) {
        let (feature, rows) = (all.feature(number), all.rows_of(number));
        let (offsets, base) = (feature.offsets(), feature.base());
        let mut arrivals = vec![0; hosts];
        for host in 0..hosts {
            let range = examples(&used.feature, host);
            if range.start > range.end || range.end >= offsets.len() {
                return Err(Error::invalid(format!(
                    "got examples {range:?}, expected a range within the {} examples",
                    offsets.len() - 1
                )));
            }
            let is_own = host == share.host as usize;
            let first = offsets[range.start] - base;
            if is_own && own.feature(number).values().len() != offsets[range.end] - base - first {
                let what = format!(
                    "feature `{}` of examples {range:?}: the ids differ from the ids of the complete batch",
                    used.feature
                );
                return Err(Error::invalid(what));
            }
            // Per owner, the last example (or id of a sequence) whose gradient is already in the owner's message.
            let mut sent = vec![usize::MAX; hosts];
            for example in range.clone() {
                let mut is_needed = false;
                for at in offsets[example] - base..offsets[example + 1] - base {
                    let Ok(row) = u32::try_from(rows[at]) else {
                        skipped += 1;
                        continue;
                    };
                    let own_slot = if used.pooling == Pooling::None { at - first } else { example - range.start };
                    let owner = share.owner(row);
                    if is_own && std::mem::replace(&mut sent[owner], own_slot) != own_slot {
                        made.departures[owner].push((number, own_slot));
                    }
                    if owner != share.host as usize {
                        continue;
                    }
                    let local = share.local(row);
                    if !is_own {
                        lent[host].push(local, 0);
                    }
                    match (used.pooling, feature.weights()) {
                        (Pooling::None, _) => {
                            occurrences.push(local, slot);
                            slot += 1;
                            arrivals[host] += 1;
                        }
                        (_, Some(weights)) => occurrences.push_weighted(local, slot, weights[at]),
                        (_, None) => occurrences.push(local, slot),
                    }
                    is_needed = true;
                }
                if is_needed && used.pooling != Pooling::None {
                    slot += 1;
                    arrivals[host] += 1;
                }
            }
        }
        made.arrivals.push(arrivals);
    }
    made.lent = lent.into_iter().map(|rows| rows.sort().rows().to_vec()).collect();
    Ok((made, occurrences.sort(), skipped))
}

/// Returns the factor by which the gradient of an example's bag is multiplied: 1 / length for a mean.
fn factor(batch: &PreparedBatch, number: usize, example: usize) -> f32 {
    let offsets = batch.feature(number).offsets();
    match offsets[example + 1] - offsets[example] {
        length if length > 1 && batch.features.uses[number].pooling == Pooling::Mean => 1.0 / length as f32,
        _ => 1.0,
    }
}

impl LearningTables {
    fn width(&self, table: usize) -> usize {
        self.tables()[table].spec().width
    }

    /// Returns this host's rows that the examples of another host read, table after table.
    pub fn rows_for(&self, batch: &HostBatch, host: usize) -> Vec<f32> {
        let mut rows = Vec::new();
        for (table, share) in self.tables().iter().zip(&batch.shares) {
            let (Some(own), Some(lent)) = (table.own(), share.lent.get(host)) else { continue };
            for local in lent {
                rows.extend_from_slice(&own[*local as usize * table.stride()..][..table.spec().width]);
            }
        }
        rows
    }

    /// Returns the number of values of [`LearningTables::rows_for`] that another host sends to this host.
    pub fn rows_from(&self, batch: &HostBatch, host: usize) -> usize {
        let of_table = |table: usize| {
            let share = batch.own.features.shares[table]?;
            let rows = batch.own.groups[table].rows().iter().filter(|row| share.owner(**row) == host).count();
            Some(rows * self.width(table))
        };
        (0..self.tables().len()).filter_map(of_table).sum()
    }

    /// Returns the pooled embeddings and sequences of this host's examples, as [`LearningTables::forward`]. `received` has the
    /// rows from each host; the entry of this host is empty.
    ///
    /// # Errors
    /// `Invalid` for a batch that other tables prepared, or if rows are missing.
    pub fn forward_on_hosts(&self, batch: &HostBatch, received: &[Vec<f32>]) -> Result<(KeyedTensor, Vec<Sequence>)> {
        let mut rest: Vec<&[f32]> = received.iter().map(Vec::as_slice).collect();
        let mut staged = Vec::with_capacity(self.tables().len());
        for (number, table) in self.tables().iter().enumerate() {
            let (Some(share), Some(own)) = (table.share(), table.own()) else {
                staged.push(None);
                continue;
            };
            let (rows, width) = (batch.own.groups[number].rows(), self.width(number));
            let mut values = Vec::with_capacity(rows.len() * width);
            for row in rows {
                if share.owns(*row) {
                    values.extend_from_slice(&own[share.local(*row) as usize * table.stride()..][..width]);
                    continue;
                }
                let owner = share.owner(*row);
                let received = rest.get(owner).and_then(|rest| rest.split_at_checked(width));
                let missing = || Error::invalid(format!("rows of host {owner} are missing"));
                let (row, behind) = received.ok_or_else(missing)?;
                values.extend_from_slice(row);
                rest[owner] = behind;
            }
            staged.push(Some(values));
        }
        self.forward_staged(&batch.own, &staged)
    }

    /// Returns the gradients of this host's bags and sequences that host `host`, the owner of rows, needs, in the batch's order.
    /// Gradients of a mean are divided by the length of the bag.
    pub fn gradients_for(
        &self,
        batch: &HostBatch,
        host: usize,
        pooled: &KeyedTensor,
        sequences: &[Vec<f32>],
    ) -> Vec<f32> {
        let features = &batch.own.features;
        let mut out = Vec::new();
        for (table, share) in batch.shares.iter().enumerate() {
            let width = self.width(table);
            for &(number, slot) in share.departures.get(host).into_iter().flatten() {
                if features.uses[number].pooling == Pooling::None {
                    out.extend_from_slice(&sequences[number - features.bags][slot * width..][..width]);
                    continue;
                }
                let column = features.layout.columns(number).start;
                let from = &pooled.values()[slot * pooled.width() + column..][..width];
                match factor(&batch.own, number, slot) {
                    1.0 => out.extend_from_slice(from),
                    factor => out.extend(from.iter().map(|x| x * factor)),
                }
            }
        }
        out
    }

    /// Returns the number of values of [`LearningTables::gradients_for`] that another host sends to this host.
    pub fn gradients_from(&self, batch: &HostBatch, host: usize) -> usize {
        let of_table = |(table, share): (usize, &TableShare)| {
            let count: usize = share.arrivals.iter().map(|arrivals| arrivals[host]).sum();
            count * self.width(table)
        };
        batch.shares.iter().enumerate().map(of_table).sum()
    }

    /// Updates this host's rows by the gradients of all hosts, including this host ([`LearningTables::gradients_for`]). The
    /// report has the changed rows of this host, but the skipped ids and managed ids of the complete batch.
    ///
    /// # Errors
    /// `Invalid` for a batch that other tables prepared, or if gradients are missing; in these cases no row has changed.
    pub fn backward_on_hosts(&mut self, batch: &HostBatch, received: &[Vec<f32>]) -> Result<UpdateReport> {
        for (host, received) in received.iter().enumerate() {
            let expected = self.gradients_from(batch, host);
            if received.len() != expected {
                return Err(Error::invalid(format!(
                    "got {} gradient values from host {host}, expected {expected}",
                    received.len()
                )));
            }
        }
        let mut rest: Vec<&[f32]> = received.iter().map(Vec::as_slice).collect();
        let gradients = batch.shares.iter().enumerate().map(|(table, share)| {
            let width = self.width(table);
            let padding = width.next_multiple_of(BLOCK) - width;
            let slots: usize = share.arrivals.iter().flatten().sum();
            let mut side_by_side = Vec::with_capacity(slots * (width + padding));
            for arrivals in &share.arrivals {
                for (rest, count) in rest.iter_mut().zip(arrivals) {
                    let (here, behind) = rest.split_at(count * width);
                    for row in here.chunks_exact(width) {
                        side_by_side.extend_from_slice(row);
                        side_by_side.resize(side_by_side.len() + padding, 0.0);
                    }
                    *rest = behind;
                }
            }
            side_by_side.as_chunks::<BLOCK>().0.to_vec()
        });
        let gradients = gradients.collect();
        let mut report = self.update_own(&batch.all, gradients)?;
        for (update, share) in report.tables.iter_mut().zip(&batch.all.features.shares) {
            let Some(share) = share else { continue };
            let rows = update.rows.iter_mut().chain(&mut update.rejected_rows);
            rows.for_each(|row| *row = share.global(*row));
        }
        self.step_ids(&batch.all, &mut report)?;
        Ok(report)
    }
}
