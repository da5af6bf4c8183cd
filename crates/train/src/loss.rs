//! Softmax over sampled items, with its gradients.
//!
//! Candidates are the distinct items of the batch and uniformly sampled items. The score of candidate `c` for event `b` is
//! `<query_b, item_c> / τ - log Q_c`, where `Q_c` is the probability that `c` is among the candidates (Bengio and Senécal 2008;
//! Yi et al. 2019). Duplicates of an event's own item and items excluded by the request are masked. The loss is the weighted mean
//! of the events' cross-entropies.

use std::ops::Range;

use sterling_core::error::Result;
use sterling_graph::dense::train::{MICRO_BATCH, TreeSum};
use sterling_kernels::cpu::Kernels;
use sterling_kernels::cpu::dense::{Fold, MapTarget, Operand, Outer, Unary};
use sterling_kernels::threads::Threads;

use crate::hosts::{Kind, Mesh};
use crate::products::Packed;

/// Score of a masked candidate: its softmax probability is 0.
const MASKED: f32 = -1e30;

/// A batch: B events, C candidates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SampledSoftmax<'a> {
    /// Queries of the events, `[B, D]`; with several hosts, only of this host's events.
    pub(crate) queries: &'a [f32],
    /// Vectors of the candidates, `[C, D]`.
    pub(crate) candidates: &'a [f32],
    /// Width of a query or vector, D.
    pub(crate) dimension: usize,
    /// Catalogue index of each candidate's item, `[C]`.
    pub(crate) items: &'a [u32],
    /// Log of each candidate's probability to be among the candidates, `[C]`.
    pub(crate) log_q: &'a [f32],
    /// Index of each event's item among the candidates, `[B]`.
    pub(crate) targets: &'a [u32],
    /// Weights of the events, `[B]`.
    pub(crate) weights: &'a [f32],
    /// Temperature of the softmax, τ.
    pub(crate) temperature: f32,
    /// Kernels of the products and the softmax.
    pub(crate) kernels: Kernels,
    /// Threads that divide the events and the candidates.
    pub(crate) threads: &'a Threads,
}

/// Gradients of a batch, or of this host's part of the batch.
#[derive(Debug, Default)]
pub(crate) struct Gradients {
    /// Gradients of the queries, `[B, D]`.
    pub(crate) queries: Vec<f32>,
    /// Gradients of the candidates, `[C, D]`.
    pub(crate) candidates: Vec<f32>,
    /// Scores of all candidates for each event, then their gradients, `[B, C]`.
    scores: Vec<f32>,
}

impl SampledSoftmax<'_> {
    /// Returns the loss and writes the gradients to `out`. `excluded(b)` returns the items, ascending, that are not negatives of
    /// event `b`.
    pub(crate) fn run<'e>(&self, excluded: impl Fn(usize) -> &'e [u32] + Sync, out: &mut Gradients) -> f64 {
        let events = 0..self.targets.len();
        let terms = self.score(events.clone(), excluded, out);
        self.query_gradients(out);
        let Gradients { candidates, scores, .. } = out;
        *candidates = self.candidate_gradients(events, 0..self.items.len(), scores, |sums| sums.total().to_vec());
        summed(&terms)
    }

    /// Begins a batch of several hosts, with the queries of this host's events: sends the loss terms of these events, and their
    /// contribution to the gradients of the other hosts' candidates. Writes the gradients of queries; returns the loss terms.
    ///
    /// # Errors
    /// If a host is lost.
    pub(crate) fn begin_on_hosts<'e>(
        &self,
        excluded: impl Fn(usize) -> &'e [u32] + Sync,
        mesh: &Mesh,
        out: &mut Gradients,
    ) -> Result<Vec<f64>> {
        let terms = self.score(mesh.own(self.targets.len()), excluded, out);
        let bytes: Vec<u8> = terms.iter().flat_map(|term| term.to_le_bytes()).collect();
        for host in mesh.others() {
            mesh.send(host, Kind::Losses, bytes.clone())?;
            mesh.send(host, Kind::Candidates, self.for_host(mesh, host, out))?;
        }
        self.query_gradients(out);
        Ok(terms)
    }

    /// Receives the data that [`SampledSoftmax::begin_on_hosts`] sent on the other hosts. Writes the gradients of this
    /// host's candidates; returns the loss of the complete batch. `terms` are this host's loss terms.
    ///
    /// # Errors
    /// If a host is lost.
    pub(crate) fn finish_on_hosts(&self, mesh: &Mesh, terms: &[f64], out: &mut Gradients) -> Result<f64> {
        let (events, own) = (self.targets.len(), mesh.own(self.items.len()));
        let mut own_sums = Some(self.for_host(mesh, mesh.rank(), out));
        let (mut hosts, mut all) = (Vec::with_capacity(mesh.count()), Vec::with_capacity(events));
        for host in 0..mesh.count() {
            let subtrees = TreeSum::subtrees(mesh.micro_batches(events, host));
            if host == mesh.rank() {
                all.extend_from_slice(terms);
                hosts.push((subtrees, own_sums.take().unwrap_or_default()));
                continue;
            }
            let length = mesh.share(events, host).len() * size_of::<f64>();
            let bytes = mesh.bytes(host, Kind::Losses, length, length)?;
            all.extend(bytes.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)));
            let count = subtrees.len() * own.len() * self.dimension;
            hosts.push((subtrees, mesh.numbers(host, Kind::Candidates, count)?));
        }
        let mut rest: Vec<&[f32]> = hosts.iter().map(|(_, sums)| sums.as_slice()).collect();
        let (candidates, mut sums) = (&mut out.candidates, TreeSum::default());
        candidates.clear();
        for some in blocks(own) {
            sums.reset(some.len() * self.dimension);
            for ((subtrees, _), rest) in hosts.iter().zip(&mut rest) {
                let (own, behind) = rest.split_at(subtrees.len() * some.len() * self.dimension);
                sums.push_sums(subtrees, own);
                *rest = behind;
            }
            candidates.extend_from_slice(sums.total());
        }
        Ok(summed(&all))
    }

    /// Returns the contribution of this host's events to the gradients of a host's candidates: per block of candidates, the sums of
    /// each subtree of micro-batches.
    fn for_host(&self, mesh: &Mesh, host: usize, out: &Gradients) -> Vec<f32> {
        let (events, candidates) = (mesh.own(self.targets.len()), mesh.share(self.items.len(), host));
        self.candidate_gradients(events, candidates, &out.scores, |sums| sums.sums().to_vec())
    }

    /// Writes the gradients of the scores of `events`, whose queries are `self.queries`; returns the loss terms of these events.
    fn score<'e>(
        &self,
        events: Range<usize>,
        excluded: impl Fn(usize) -> &'e [u32] + Sync,
        out: &mut Gradients,
    ) -> Vec<f64> {
        let (count, width) = (self.items.len(), self.dimension);
        let mut order: Vec<(u32, u32)> = self.items.iter().copied().zip(0..).collect();
        order.sort_unstable();
        let total: f64 = self.weights.iter().map(|weight| f64::from(*weight)).sum();
        let inverse = 1.0 / self.temperature;
        out.scores.resize(events.len() * count, 0.0);
        let candidates = Packed::transposed(self.candidates, width, count);
        let score_event = |event: usize, row: &mut [f32]| {
            let target = self.targets[event] as usize;
            row.iter_mut().zip(self.log_q).for_each(|(score, log_q)| *score = *score * inverse - log_q);
            mask(&order, self.items[target], target as u32, excluded(event), row);
            let own = row[target];
            let largest = fold(self.kernels, Fold::Max, row);
            row.iter_mut().for_each(|score| *score -= largest);
            exp(self.kernels, row);
            let sum = fold(self.kernels, Fold::Sum, row);
            let weight = f64::from(self.weights[event]) / total;
            let scale = weight as f32 * inverse;
            let share = scale / sum;
            row.iter_mut().for_each(|score| *score *= share);
            row[target] -= scale;
            weight * (f64::from(sum).ln() - f64::from(own - largest))
        };
        let queries = self.queries.chunks(MICRO_BATCH * width);
        let rows = events.step_by(MICRO_BATCH).zip(queries.zip(out.scores.chunks_mut(MICRO_BATCH * count)));
        let terms = self.threads.run(rows.collect(), |(first, (queries, scores)): (usize, (&[f32], &mut [f32]))| {
            candidates.times(self.kernels, queries, scores);
            let rows = (first..).zip(scores.chunks_exact_mut(count));
            rows.map(|(event, row)| score_event(event, row)).collect::<Vec<_>>()
        });
        terms.concat()
    }

    /// Writes the gradients of queries from the gradients of their scores.
    fn query_gradients(&self, out: &mut Gradients) {
        let (count, width) = (self.items.len(), self.dimension);
        out.queries.resize(self.queries.len(), 0.0);
        let candidates = Packed::of(self.candidates, count, width);
        let scores = out.scores.chunks(MICRO_BATCH * count);
        let rows = scores.zip(out.queries.chunks_mut(MICRO_BATCH * width)).collect();
        self.threads.run(rows, |(scores, queries)| candidates.times(self.kernels, scores, queries));
    }

    /// Sums the gradients of each block of `candidates` over `events`, from the gradients of the events' scores. Returns what `of`
    /// returns for the blocks, in order.
    fn candidate_gradients(
        &self,
        events: Range<usize>,
        candidates: Range<usize>,
        scores: &[f32],
        of: impl Fn(&mut TreeSum) -> Vec<f32> + Sync + Send,
    ) -> Vec<f32> {
        let sums = self.threads.run(blocks(candidates).collect(), |some| {
            let mut sums = TreeSum::default();
            self.sum_block(events.clone(), some, scores, &mut sums);
            of(&mut sums)
        });
        sums.concat()
    }

    /// Sums the gradients of the candidates `some` per micro-batch of events.
    fn sum_block(&self, events: Range<usize>, some: Range<usize>, scores: &[f32], sums: &mut TreeSum) {
        let (count, width) = (self.items.len(), self.dimension);
        sums.reset(some.len() * width);
        for first in events.clone().step_by(MICRO_BATCH) {
            let own = first - events.start;
            let outer = Outer {
                rows: MICRO_BATCH.min(events.end - first),
                left: &scores[own * count + some.start..],
                left_stride: count,
                depth: some.len(),
                right: &self.queries[own * width..],
                right_stride: width,
                columns: width,
            };
            let n = first / MICRO_BATCH;
            sums.push(n..n + 1, |to| self.kernels.outer(&outer, to));
        }
    }
}

/// Returns blocks of candidates whose sums fit the caches; each host has complete blocks.
fn blocks(candidates: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = candidates.end;
    candidates.step_by(MICRO_BATCH).map(move |first| first..end.min(first + MICRO_BATCH))
}

/// Returns the sum of the terms of a loss, in order.
pub(crate) fn summed(terms: &[f64]) -> f64 {
    terms.iter().fold(0.0, |sum, term| sum + term)
}

/// Masks duplicates of an event's own item other than `target`, and excluded items. `order` has (item, candidate) sorted by item.
fn mask(order: &[(u32, u32)], own: u32, target: u32, excluded: &[u32], row: &mut [f32]) {
    let mut of_item = |item: u32| {
        let first = order.partition_point(|(other, _)| *other < item);
        for (_, candidate) in order[first..].iter().take_while(|(other, _)| *other == item) {
            if *candidate != target {
                row[*candidate as usize] = MASKED;
            }
        }
    };
    of_item(own);
    if excluded.len() * 4 < order.len() {
        return excluded.iter().for_each(|item| of_item(*item));
    }
    let mut left = excluded;
    for (item, candidate) in order {
        let passed = left.iter().take_while(|other| *other < item).count();
        left = &left[passed..];
        if left.first() == Some(item) {
            row[*candidate as usize] = MASKED;
        }
    }
}

fn fold(kernels: Kernels, f: Fold, row: &[f32]) -> f32 {
    let mut made = [0.0];
    let input = Operand { numbers: row, row: 0, outer: 0, inner: 1 };
    let mut target = MapTarget { numbers: &mut made, stride: 1, rows: 1, outer: 1, inner: 1 };
    kernels.fold(f, &input, row.len(), &mut target);
    made[0]
}

fn exp(kernels: Kernels, row: &mut [f32]) {
    const RUN: usize = 256;
    let mut made = [0.0; RUN];
    for run in row.chunks_mut(RUN) {
        let input = Operand { numbers: run, row: 0, outer: 0, inner: 1 };
        let count = run.len();
        let mut target = MapTarget { numbers: &mut made, stride: count, rows: 1, outer: 1, inner: count };
        kernels.map1(Unary::Exp, &input, &mut target);
        run.copy_from_slice(&made[..count]);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::step_random::StepRandom;

    fn numbers(seed: u64, count: usize) -> Vec<f32> {
        let draws = StepRandom::new(seed, 0);
        (0..count as u64).map(|n| draws.below(n, 2001) as f32 / 1000.0 - 1.0).collect()
    }

    /// The loss in f64, straight from its formula.
    fn naive(batch: &SampledSoftmax<'_>, excluded: &[Vec<u32>]) -> f64 {
        let dot = |b: usize, c: usize| -> f64 {
            let of = |numbers: &[f32], n: usize| numbers[n * batch.dimension..][..batch.dimension].to_vec();
            let (query, item) = (of(batch.queries, b), of(batch.candidates, c));
            query.iter().zip(&item).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
        };
        let score = |b: usize, c: usize| dot(b, c) / f64::from(batch.temperature) - f64::from(batch.log_q[c]);
        let total: f64 = batch.weights.iter().map(|w| f64::from(*w)).sum();
        let loss = |b: usize| {
            let target = batch.targets[b] as usize;
            let is_negative =
                |c: usize| batch.items[c] != batch.items[target] && !excluded[b].contains(&batch.items[c]);
            let all = (0..batch.items.len()).filter(|&c| c == target || is_negative(c));
            let sum: f64 = all.map(|c| score(b, c).exp()).sum();
            f64::from(batch.weights[b]) / total * (sum.ln() - score(b, target))
        };
        (0..batch.targets.len()).map(loss).sum()
    }

    #[test]
    fn loss_and_gradients_are_those_of_the_formula() {
        for (seed, (events, width, uniform)) in
            [(1, 1, 1), (5, 3, 7), (17, 8, 40), (33, 65, 70), (150, 4, 90)].into_iter().enumerate()
        {
            let seed = seed as u64;
            let draws = StepRandom::new(seed, 1);
            let positives: Vec<u32> = (0..events as u32).map(|n| n * 3).collect();
            let drawn = (0..uniform as u64).map(|n| draws.below(n, 3 * events as u64 + 2) as u32);
            let items: Vec<u32> = positives.iter().copied().chain(drawn).collect();
            let targets: Vec<u32> = (0..events as u64).map(|n| draws.below(99 + n, events as u64) as u32).collect();
            let excluded: Vec<Vec<u32>> = (0..events)
                .map(|b| {
                    let all =
                        (0..3 * events as u32 + 2).filter(|i| draws.below(u64::from(*i) + 7000, 3) == b as u64 % 3);
                    all.filter(|i| *i != items[targets[b] as usize]).collect()
                })
                .collect();
            let weights: Vec<f32> = (0..events).map(|b| 0.5 + b as f32).collect();
            let (queries, candidates) = (numbers(seed, events * width), numbers(seed + 9, items.len() * width));
            let log_q = numbers(seed + 5, items.len());
            let batch = SampledSoftmax {
                queries: &queries,
                candidates: &candidates,
                dimension: width,
                items: &items,
                log_q: &log_q,
                targets: &targets,
                weights: &weights,
                temperature: 0.7,
                kernels: Kernels::best(),
                threads: &Threads::default(),
            };
            let mut made = Gradients::default();
            let loss = batch.run(|b| &excluded[b], &mut made);
            for count in 2..5 {
                let (threads, mut others) = (Threads::new(count).unwrap(), Gradients::default());
                let other = SampledSoftmax { threads: &threads, ..batch }.run(|b| &excluded[b], &mut others);
                assert_eq!((other.to_bits(), &others.queries), (loss.to_bits(), &made.queries));
                assert_eq!(others.candidates, made.candidates);
            }
            let expected = naive(&batch, &excluded);
            assert!((loss - expected).abs() < 1e-5, "{loss} {expected}");
            let step = 1e-3;
            let slope = |of_queries: bool, at: usize| {
                let moved = |by: f32| {
                    let (mut queries, mut candidates) = (queries.clone(), candidates.clone());
                    let numbers = if of_queries { &mut queries } else { &mut candidates };
                    numbers[at] += by;
                    naive(&SampledSoftmax { queries: &queries, candidates: &candidates, ..batch }, &excluded)
                };
                (moved(step) - moved(-step)) / f64::from(2.0 * step)
            };
            for at in (0..queries.len()).step_by(1 + queries.len() / 40) {
                let (got, expected) = (f64::from(made.queries[at]), slope(true, at));
                assert!((got - expected).abs() < 1e-4, "query {at}: {got} {expected}");
            }
            for at in (0..candidates.len()).step_by(1 + candidates.len() / 40) {
                let (got, expected) = (f64::from(made.candidates[at]), slope(false, at));
                assert!((got - expected).abs() < 1e-4, "candidate {at}: {got} {expected}");
            }
        }
    }
}
