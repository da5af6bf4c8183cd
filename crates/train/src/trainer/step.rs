//! One step: the events of a batch are ranked, then trained on.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use serde::Serialize;

use super::{Progress, Trainer, WINDOW};
use crate::catalogue::Catalogue;
use crate::events::Event;
use crate::hosts::Kind;
use crate::judge::{RankedEvent, rank, rank_by_count};
use crate::loss::{Gradients, SampledSoftmax, summed};
use crate::model::{Forward, OfLookups, Rows};
use crate::products::Packed;
use crate::report::Window;
use crate::reranker::Pairs;
use crate::step_random::StepRandom;
use crate::tasks::Labels;
use sterling_core::error::{Error, Result};
use sterling_embedding::Lookup;
use sterling_graph::tower::{FeatureRow, Pooled, Scratch, Threads as TowerThreads, Tower};
use sterling_snapshot::model::{LossKind, Package};

/// The model at the start of the run: the vectors of all items, and buffers for the package's user tower.
#[derive(Debug)]
pub(super) struct Frozen {
    items: Packed,
    /// Queries of the batch that is ranked, `[B, D]`.
    queries: Vec<f32>,
    /// True if the current batch is part of the progressive validation.
    is_judged: bool,
    threads: TowerThreads,
    scratch: Scratch,
}

/// Batch of an epoch that is not trained on yet.
pub(super) struct ReadBatch {
    pub(super) events: Vec<Event>,
    /// Hash of the epoch's events up to the end of the batch.
    pub(super) hash: u64,
    /// Number of the epoch's events up to the end of the batch.
    pub(super) end: u64,
    /// Bytes of events read, in all epochs.
    pub(super) bytes: u64,
}

/// Quarantine entry of a batch that was not trained on.
#[derive(Serialize)]
struct RejectedBatch {
    step: u64,
    events: usize,
    reason: String,
}

impl Trainer {
    /// Trains on the first of the waiting batches, and writes a checkpoint if one is due.
    pub(super) fn train_next(
        &mut self,
        waiting: &mut VecDeque<ReadBatch>,
        tower: &Tower,
        reported: &dyn Fn(&Progress<'_>),
    ) -> Result<()> {
        let Some(ReadBatch { events, hash, end, bytes }) = waiting.pop_front() else { return Ok(()) };
        self.position.hash = hash;
        self.position.events = end;
        let next = waiting.front().map(|next| next.events.as_slice());
        let ended = self.threads.clone().install(|| self.step(&events, next, tower))?;
        reported(&Progress {
            events: self.position.trained,
            bytes,
            bytes_all: self.inputs.bytes().map(|all| all.saturating_mul(self.options.epochs)),
            window: ended.as_ref(),
        });
        match self.position.step.is_multiple_of(self.options.checkpoint_steps.max(1)) {
            true => self.write_checkpoint(false),
            false => Ok(()),
        }
    }

    /// Ranks the events of a batch, then trains on them. Returns the window that ended with this batch, if any. `next` are the
    /// events of the next batch, if they are known.
    fn step(&mut self, events: &[Event], next: Option<&[Event]>, tower: &Tower) -> Result<Option<Window>> {
        self.position.step += 1;
        self.model.moment = [self.position.step, self.position.hash];
        self.model.tables.set_clock(events.iter().map(|event| event.time).max().unwrap_or(0));
        let window = match self.train.loss {
            LossKind::Softmax => self.softmax_step(events, next, tower)?,
            LossKind::Tasks => self.tasks_step(events, next, tower)?,
        };
        let positives = events.iter().filter(|event| event.is_positive);
        positives.for_each(|event| self.carried.counts[event.item as usize] += 1);
        Ok(window)
    }

    /// Runs a step with the loss `softmax`, over the batch's items and sampled items.
    fn softmax_step(&mut self, events: &[Event], next: Option<&[Event]>, tower: &Tower) -> Result<Option<Window>> {
        let (items, positives) = self.candidates(events, self.position.step);
        self.carried.frequency.count(&items[..positives], events.len());
        let (all, uniform) = (self.catalogue.len() as u64, self.train.uniform as u64);
        let log_q: Vec<f32> = match self.train.log_q {
            false => vec![0.0; items.len()],
            true => {
                let of_uniform = (uniform as f32 / all as f32).ln();
                let drawn = (0..uniform).map(|_| of_uniform);
                let of_batch = |item: &u32| self.carried.frequency.log_q(*item, events.len());
                items[..positives].iter().map(of_batch).chain(drawn).collect()
            }
        };
        let users: Vec<&FeatureRow> = events.iter().map(|event| &event.user).collect();
        let rows = Rows { users: &users, items: &items };
        let forward = self.model.forward(&rows, &self.catalogue)?;
        let window = self.judge(events, &users, &forward.queries, tower)?;
        let of_item = |event: &Event| items[..positives].partition_point(|item| *item < event.item) as u32;
        let targets: Vec<u32> = events.iter().map(of_item).collect();
        let weights: Vec<f32> = events.iter().map(|event| event.weight).collect();
        let softmax = SampledSoftmax {
            queries: &forward.queries,
            candidates: &forward.candidates,
            dimension: self.model.dimension(),
            items: &items,
            log_q: &log_q,
            targets: &targets,
            weights: &weights,
            temperature: self.train.temperature,
            kernels: self.kernels,
            threads: &self.threads,
        };
        let excluded = |event: usize| events[event].exclude.as_slice();
        let mesh = self.model.hosts().cloned();
        let mut made = std::mem::take(&mut self.gradients);
        let (begun, loss) = match mesh {
            None => {
                let loss = softmax.run(excluded, &mut made);
                (self.model.begin_backward(&rows, &forward, &made.queries)?, loss)
            }
            Some(mesh) => {
                let terms = softmax.begin_on_hosts(excluded, &mesh, &mut made)?;
                // This host computes while the gradients of the candidates are in transit.
                let begun = self.model.begin_backward(&rows, &forward, &made.queries)?;
                (begun, softmax.finish_on_hosts(&mesh, &terms, &mut made)?)
            }
        };
        self.gradients = made;
        self.update(&rows, forward, begun, loss, next)?;
        Ok(window)
    }

    /// Returns the candidates of a step with the loss `softmax`, which are the distinct items of its events, ascending, and sampled
    /// items; and the number of distinct items.
    fn candidates(&self, events: &[Event], step: u64) -> (Vec<u32>, usize) {
        let mut items: Vec<u32> = events.iter().map(|event| event.item).collect();
        items.sort_unstable();
        items.dedup();
        let positives = items.len();
        let draws = StepRandom::new(self.options.seed, step);
        let all = self.catalogue.len() as u64;
        items.extend((0..self.train.uniform as u64).map(|n| draws.below(n, all) as u32));
        (items, positives)
    }

    /// Prepares the next batch for its step.
    fn prepare_next(&mut self, next: &[Event]) -> Result<()> {
        let users: Vec<&FeatureRow> = next.iter().map(|event| &event.user).collect();
        let items = match self.train.loss {
            LossKind::Softmax => self.candidates(next, self.position.step + 1).0,
            LossKind::Tasks => next.iter().map(|event| event.item).collect(),
        };
        self.model.prepare_next(&Rows { users: &users, items: &items }, &self.catalogue)
    }

    /// Runs a step with the loss `tasks`, the cross-entropy of the reranker's tasks, with one item per event.
    fn tasks_step(&mut self, events: &[Event], next: Option<&[Event]>, tower: &Tower) -> Result<Option<Window>> {
        let users: Vec<&FeatureRow> = events.iter().map(|event| &event.user).collect();
        let items: Vec<u32> = events.iter().map(|event| event.item).collect();
        let rows = Rows { users: &users, items: &items };
        let forward = self.model.forward(&rows, &self.catalogue)?;
        let own = self.model.own(events.len());
        let pairs = Pairs { queries: &forward.queries, vectors: &forward.candidates, items: &items[own.clone()] };
        let labels: Vec<f32> = events.iter().flat_map(|event| &event.labels).copied().collect();
        let weights: Vec<f32> = events.iter().map(|event| self.weight(event)).collect();
        let logits = self.model.reranker()?.logits(&pairs)?;
        let tasks = self.task_weights.clone();
        let labels = Labels { labels: &labels, weights: &weights, tasks: &tasks };
        let window = self.judge(events, &users, &forward.queries, tower)?;
        self.judge_tasks(&logits, &labels, &items)?;
        let mut of_logits = std::mem::take(&mut self.of_logits);
        let mut terms = labels.terms(own, &logits, &mut of_logits);
        if let Some(mesh) = self.model.hosts() {
            let own = terms.iter().map(|term| term.to_bits()).collect();
            let count = |host: usize| mesh.share(events.len(), host).len() * tasks.len();
            terms = mesh.gather(Kind::Losses, own, count)?.concat().into_iter().map(f64::from_bits).collect();
        }
        let loss = summed(&terms);
        let Gradients { queries, candidates, .. } = &mut self.gradients;
        self.model.reranker()?.backward(&pairs, &of_logits, queries, candidates)?;
        self.of_logits = of_logits;
        let begun = self.model.begin_backward(&rows, &forward, queries)?;
        self.update(&rows, forward, begun, loss, next)?;
        Ok(window)
    }

    /// Returns the weight of an event's loss: a sampled negative also stands for negatives that were not sampled.
    fn weight(&self, event: &Event) -> f32 {
        if event.has_positive_task() { event.weight } else { event.weight / self.train.negatives }
    }

    /// Updates weights and rows by the gradients of queries and candidates, or rejects the batch if a gradient is not finite.
    fn update(
        &mut self,
        rows: &Rows<'_>,
        forward: Forward,
        mut made: OfLookups,
        loss: f64,
        next: Option<&[Event]>,
    ) -> Result<()> {
        let Gradients { queries, candidates, .. } = &self.gradients;
        let events = rows.users.len();
        let is_finite = loss.is_finite() && queries.iter().chain(candidates).all(|x| x.is_finite());
        // Another host may have gradients that are not finite, so all hosts exchange their gradients.
        let stepped = match is_finite || (loss.is_finite() && self.model.hosts().is_some()) {
            true => {
                self.model.end_backward(rows, &self.catalogue, &forward, &mut made, candidates, is_finite)?;
                // This host computes while the gradients of other hosts are in transit.
                next.map_or(Ok(()), |next| self.prepare_next(next))?;
                Some(self.model.update(rows, forward, made, is_finite)?)
            }
            false => None,
        };
        match stepped.filter(|stepped| !stepped.is_rejected) {
            Some(stepped) => {
                self.position.loss += loss;
                self.position.trained += events as u64;
                match self.model.hosts() {
                    None => self.position.rejected_rows += stepped.rejected_rows,
                    Some(_) => self.rejected_rows += stepped.rejected_rows,
                }
            }
            None => {
                self.position.rejected_batches += 1;
                let reason = format!("the loss ({loss}) or a gradient is not finite");
                self.quarantine.add(&RejectedBatch { step: self.position.step, events, reason })?;
            }
        }
        Ok(())
    }

    /// Ranks the positives of a batch by the learning model, the frozen twin and popularity.
    fn judge(
        &mut self,
        events: &[Event],
        users: &[&FeatureRow],
        queries: &[f32],
        tower: &Tower,
    ) -> Result<Option<Window>> {
        let is_judged = self.position.epoch == 0 && (self.position.step - 1).is_multiple_of(self.options.judge.max(1));
        let Some(frozen) = &mut self.frozen else { return Ok(None) };
        frozen.is_judged = is_judged;
        if !is_judged {
            return Ok(None);
        }
        let own = self.model.own(events.len());
        frozen.queries = run(tower, &users[own.clone()], &frozen.threads, &mut frozen.scratch)?;
        let dimension = self.model.dimension();
        let positives = |queries: &[f32]| -> Vec<f32> {
            let rows = queries.chunks_exact(dimension).zip(&events[own.clone()]);
            rows.filter(|(_, event)| event.is_positive).flat_map(|(query, _)| query).copied().collect()
        };
        let ranked = events[own.clone()].iter().filter(|event| event.is_positive);
        let wanted: Vec<RankedEvent<'_>> =
            ranked.map(|event| RankedEvent { item: event.item, exclude: &event.exclude }).collect();
        let items = self.model.vectors(&self.catalogue, self.vectors.take())?;
        let mut rankings = [
            rank(self.kernels, &positives(queries), &items, &wanted),
            rank(self.kernels, &positives(&frozen.queries), &frozen.items, &wanted),
            rank_by_count(&self.carried.counts, &wanted),
        ];
        if let Some(mesh) = self.model.hosts() {
            let ends = |ranks: &RangeInclusive<usize>| [*ranks.start() as u64, *ranks.end() as u64];
            let own = rankings.iter().flatten().flat_map(ends).collect();
            let ranked =
                |host: usize| events[mesh.share(events.len(), host)].iter().filter(|event| event.is_positive).count();
            let gathered = mesh.gather(Kind::Ranks, own, |host| 2 * rankings.len() * ranked(host))?;
            let of = |number: usize| {
                let of_host = |(host, all): (usize, &Vec<u64>)| {
                    all.as_chunks::<2>().0.iter().skip(number * ranked(host)).take(ranked(host)).copied().collect()
                };
                let all: Vec<Vec<[u64; 2]>> = gathered.iter().enumerate().map(of_host).collect();
                all.into_iter().flatten().map(|[first, last]| first as usize..=last as usize).collect()
            };
            rankings = [of(0), of(1), of(2)];
        }
        let judged = &mut self.position.judged;
        let figures = [&mut judged.learned, &mut judged.frozen, &mut judged.popularity];
        figures
            .into_iter()
            .zip(&rankings)
            .for_each(|(figures, ranks)| ranks.iter().for_each(|ranks| figures.add(ranks)));
        self.vectors = Some(items);
        let ended = self.position.windows.last().copied().unwrap_or_default();
        if judged.learned.events() - ended.learned.events() < WINDOW {
            return Ok(None);
        }
        self.position.windows.push(*judged);
        Ok(Some(Window::between(&ended, judged)))
    }

    /// Adds the predictions of a batch by the learning model and the frozen twin, if [`Trainer::judge`] ranked it.
    fn judge_tasks(&mut self, logits: &[f32], labels: &Labels<'_>, items: &[u32]) -> Result<()> {
        let Some(frozen) = self.frozen.as_mut().filter(|frozen| frozen.is_judged) else { return Ok(()) };
        let queries = std::mem::take(&mut frozen.queries);
        let own = self.model.own(items.len());
        let vectors: Vec<f32> =
            items[own.clone()].iter().flat_map(|item| frozen.items.column(*item as usize)).collect();
        let pairs = Pairs { queries: &queries, vectors: &vectors, items: &items[own] };
        let mut as_it_was = self.model.reranker()?.logits_of_initial_weights(&pairs)?;
        let mut logits = logits.to_vec();
        if let Some(mesh) = self.model.hosts() {
            let count = |host: usize| 2 * mesh.share(items.len(), host).len() * labels.tasks.len();
            let gathered = mesh.gather_numbers(Kind::Ranks, [logits, as_it_was].concat(), count)?;
            let halves = || gathered.iter().map(|all| all.split_at(all.len() / 2));
            logits = halves().flat_map(|(learned, _)| learned).copied().collect();
            as_it_was = halves().flat_map(|(_, frozen)| frozen).copied().collect();
        }
        let tasks = labels.tasks.len();
        self.position.tasks.resize_with(tasks, Default::default);
        for (n, (label, (learned, frozen))) in labels.labels.iter().zip(logits.iter().zip(&as_it_was)).enumerate() {
            // A batch with non-finite logits is rejected, and the JSON of a checkpoint cannot represent NaN.
            if !(learned.is_finite() && frozen.is_finite()) {
                continue;
            }
            let (judged, weight) = (&mut self.position.tasks[n % tasks], labels.weights[n / tasks]);
            judged.learned.add(*learned, *label, weight);
            judged.frozen.add(*frozen, *label, weight);
        }
        Ok(())
    }
}

impl Frozen {
    pub(super) fn of(package: &Package, catalogue: &Catalogue, threads: usize) -> Result<Self> {
        let (threads, mut scratch) = (TowerThreads::new(threads), Scratch::default());
        let vectors = match &package.item {
            None => catalogue.vectors().to_vec(),
            Some(tower) => {
                let mut all = Vec::with_capacity(catalogue.len() * package.spec.dimension);
                for rows in catalogue.rows().chunks(tower.run_rows()) {
                    all.extend(run(tower, &rows.iter().collect::<Vec<_>>(), &threads, &mut scratch)?);
                }
                all
            }
        };
        let items = Packed::transposed(&vectors, package.spec.dimension, catalogue.len());
        Ok(Frozen { items, queries: Vec::new(), is_judged: false, threads, scratch })
    }
}

/// Runs a tower on rows; returns its first output, which is the query or the item vector.
fn run(tower: &Tower, rows: &[&FeatureRow], threads: &TowerThreads, scratch: &mut Scratch) -> Result<Vec<f32>> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let (pooled, _) = tower.lookup(rows, &Lookup::default())?;
    let pairs: Vec<(&FeatureRow, &Pooled)> = rows.iter().copied().zip(&pooled).collect();
    let made = tower.run(&pairs, threads, scratch)?;
    let made = made.into_iter().next().ok_or_else(|| Error::internal("the tower has no outputs"))?;
    Ok(made.into_data())
}
