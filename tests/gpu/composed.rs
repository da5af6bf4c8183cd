//! A catalogue, a reranker and a pass that are composed of the operations of the device; `benches/gpu_floors.rs` measures them.

use std::sync::Arc;

use bytemuck::Pod;
use sterling::cuda::ops::rows::{CandidateColumns, ItemRows, RowKind, SlotRows};
use sterling::cuda::ops::scan::{BlockLists, Centroids, Collection, Eligible, Order};
use sterling::cuda::ops::steps::{self, FactorAt, NumbersAt, ProductTo, RowsOf};
use sterling::cuda::ops::termination::{ProbedLists, RunningSearches, Schedule, TerminationCriteria};
use sterling::cuda::ops::top::{self, Best, Scored, Ties};
use sterling::cuda::ops::words::{FilterStep, Operation, PlaneIndex, WordProgram};
use sterling::cuda::{Array, Device, Later};
use sterling::error::Result;
use sterling::kernels::cpu::dense::{Form, PANEL};

use crate::emulation::Random;

pub const DIMENSION: usize = 128;
/// Approximate norm of a random item: 128 codes of about 74 (root mean square), with a scale of 1/4096.
const NORM_MAX: f32 = 0.25;

/// Fills an array on the device.
pub fn filled<T: Pod>(device: &Device, len: usize, number: impl FnMut(usize) -> T) -> Result<Array<T>> {
    device.copy(&(0..len).map(number).collect::<Vec<T>>())
}

/// Length of the block of noise, in bytes, that is repeated. It is no multiple of a row, so that all items differ.
const NOISE_BYTES: usize = (64 << 20) - 2;

/// Returns random bytes on the device, or random bf16 between -1 and 1.
pub fn noise(device: &Device, bytes: usize, is_bf16: bool) -> Result<Array<u8>> {
    let (all, mut random) = (device.room(bytes)?, Random::new(bytes as u64));
    let number =
        |random: &mut Random| if is_bf16 { (random.number().to_bits() >> 16) as u16 } else { random.next() as u16 };
    let pattern: Vec<u16> = (0..bytes.min(NOISE_BYTES).div_ceil(2)).map(|_| number(&mut random)).collect();
    let pattern: &[u8] = bytemuck::cast_slice(&pattern);
    for first in (0..bytes).step_by(NOISE_BYTES) {
        all.write_at(first, &pattern[..pattern.len().min(bytes - first)])?;
    }
    Ok(all)
}

/// A catalogue of random codes in lists of equal length.
pub struct Catalogue {
    pub lists: BlockLists,
    pub centroids: Centroids,
    wide: Array<u8>,
    pub planes: PlaneIndex,
}

impl Catalogue {
    /// Creates `items` items in `count` lists.
    pub fn in_lists(device: &Device, items: usize, count: usize) -> Result<Self> {
        let mut random = Random::new(items as u64);
        let each = (items / count).next_multiple_of(16).max(16);
        let (slots, centroids) = (count * each, count.next_multiple_of(16));
        let words_each = each.div_ceil(64);
        let words = words_each * count;
        let last = if each.is_multiple_of(64) { u64::MAX } else { (1 << (each % 64)) - 1 };
        Ok(Catalogue {
            lists: BlockLists {
                codes: Arc::new(noise(device, slots * DIMENSION, false)?),
                scales: Arc::new(filled(device, slots, |_| 1.0 / 4096.0)?),
                slots,
                offsets: filled(device, count + 1, |list| (list * each) as u32)?,
                lengths: filled(device, count, |_| each as u32)?,
                groups: DIMENSION / 4,
                longest: each,
            },
            centroids: Centroids {
                codes: filled(device, centroids * DIMENSION, |_| random.next() as u8)?,
                scales: filled(device, centroids, |_| 1.0 / 4096.0)?,
                penalties: None,
                lists: count,
            },
            wide: noise(device, slots * DIMENSION * 2, true)?,
            planes: PlaneIndex {
                planes: filled(device, 3 * words, |_| random.next() ^ random.next() << 31)?,
                every: filled(device, words, |n| if (n + 1) % words_each == 0 { last } else { u64::MAX })?,
                bloom: device.room(0)?,
                bloom_starts: device.zeros(count)?,
                widths: device.zeros(count)?,
                firsts: filled(device, count + 1, |list| (list * words_each) as u32)?,
                word_lists: filled(device, words, |word| (word / words_each) as u32)?,
                word_slots: filled(device, words, |word| (word / words_each * each + word % words_each * 64) as u32)?,
                columns: device.room(0)?,
                hashes: 0,
            },
        })
    }

    fn rows(&self) -> ItemRows<'_> {
        ItemRows { bytes: &self.wide, scales: &self.lists.scales, kind: RowKind::Bf16, dimension: DIMENSION }
    }

    pub fn collection(&self, lane: &Device, vectors: &[f32], probes: usize, k: usize) -> Result<Collection> {
        let queries = vectors.len() / DIMENSION;
        let none: Vec<&[u32]> = vec![&[]; queries];
        let collection =
            Collection::new(lane, DIMENSION, probes * self.lists.longest, &vec![k as u32; queries], &none)?;
        collection.quantize(lane, &lane.copy(vectors)?, DIMENSION, NORM_MAX)?;
        Ok(collection)
    }

    /// Returns the best lists of each query; `keys` receives the scores of all lists.
    pub fn best_of(&self, lane: &Device, queries: &Collection, probes: usize, keys: &Array<u32>) -> Result<Best> {
        self.centroids.score(lane, queries, keys)?;
        let wanted = lane.copy(&vec![probes as u32; queries.queries()])?;
        let scored = Scored { keys, slots: None, counts: None, stride: self.centroids.lists };
        top::select(lane, &scored, &Ties::default(), &wanted, probes)
    }
}

/// Returns random operands of products: one number each, or two in bf16.
pub fn numbers(device: &Device, form: Form, len: usize) -> Result<Array<f32>> {
    let mut random = Random::new(len as u64);
    filled(device, len, |_| match form {
        Form::Single => random.number(),
        Form::Pairs => f32::from_bits(random.number().to_bits() & 0xffff_0000 | random.number().to_bits() >> 16),
    })
}

/// Packed layers of a reranker, `256 - 512 - 256`.
pub struct Layers {
    form: Form,
    matrices: [Array<f32>; 2],
}

pub const WIDTHS: [usize; 3] = [256, 512, 256];

impl Layers {
    pub fn new(device: &Device, form: Form) -> Result<Self> {
        let made = |n: usize| numbers(device, form, form.room(WIDTHS[n]) * WIDTHS[n + 1] + PANEL);
        Ok(Layers { form, matrices: [made(0)?, made(1)?] })
    }

    pub fn run(&self, lane: &Device, rows: RowsOf<'_>, input: &Array<f32>) -> Result<Array<f32>> {
        let (requests, form) = (rows.counts.len(), self.form);
        let mut from: Option<Array<f32>> = None;
        for n in 0..2 {
            let (depth, columns) = (form.room(WIDTHS[n]), WIDTHS[n + 1]);
            let out = lane.room(requests * rows.most * form.room(columns))?;
            let rows_at = NumbersAt::of(from.as_ref().unwrap_or(input), 0, rows.most * depth, depth);
            let matrix = NumbersAt::of(&self.matrices[n], 0, 0, 0);
            let factor = FactorAt::new(rows_at, matrix, depth, (PANEL, PANEL * depth));
            let stride = form.room(columns);
            let to = ProductTo {
                bias: NumbersAt::default(),
                out: NumbersAt::of(&out, 0, rows.most * stride, stride),
                runs: 1,
                columns,
                relu: true,
                factors: form,
                result: form,
            };
            steps::product(lane, rows, &[factor], &to)?;
            from = Some(out);
        }
        Ok(from.unwrap_or_else(|| unreachable!("two layers")))
    }
}

/// Pushes and joins three planes.
pub fn filter() -> WordProgram {
    let push = FilterStep { plane: 0, ..FilterStep::plain(Operation::Push) };
    let keep = |plane| FilterStep { plane, ..FilterStep::plain(Operation::Keep) };
    WordProgram { steps: vec![push, keep(1), keep(2)], depth: 1, ..WordProgram::default() }
}

/// Parameters of all queries of a batch.
#[derive(Clone, Copy)]
pub struct QueryParameters<'a> {
    pub probes: usize,
    pub k0: usize,
    pub k: usize,
    /// Number of different filters of the batch; 0 for unfiltered queries.
    pub filters: usize,
    pub layers: Option<&'a Layers>,
}

impl Catalogue {
    /// Composes a pass of operations: filter, probe, scan, select, rescore, gather, rerank, select and sort.
    pub fn pass(&self, lane: &Device, vectors: &[f32], asked: &QueryParameters<'_>) -> Result<Vec<Later<u32>>> {
        let (batch, selected) = (vectors.len() / DIMENSION, asked.k0 + asked.k0 / 4);
        let queries = self.collection(lane, vectors, asked.probes, selected)?;
        let looked_at = self.scan(lane, vectors, &queries, asked)?;
        let (slots, counts) = (Some(&queries.slots), Some(&queries.counts));
        let scored = Scored { keys: &queries.keys, slots, counts, stride: queries.room() };
        let chosen = top::select(lane, &scored, &Ties::default(), &queries.wanted, selected)?;
        let rows = SlotRows { slots: &chosen.slots, counts: &chosen.counts, stride: chosen.stride };
        let keys = lane.room(batch * chosen.stride)?;
        self.rows().products(lane, (&lane.copy(vectors)?, None), &rows, &keys)?;
        let scored =
            Scored { keys: &keys, slots: Some(&chosen.slots), counts: Some(&chosen.counts), stride: chosen.stride };
        let best = top::select(lane, &scored, &Ties::default(), &lane.copy(&vec![asked.k0 as u32; batch])?, asked.k0)?;
        if let Some(layers) = asked.layers {
            self.rerank(lane, &best, layers)?;
        }
        let scored =
            Scored { keys: &best.keys, slots: Some(&best.slots), counts: Some(&best.counts), stride: best.stride };
        let wanted = lane.copy(&vec![asked.k as u32; batch])?;
        let top = top::select(lane, &scored, &Ties::default(), &wanted, asked.k)?;
        let top = top::sort(lane, top, &Ties::default())?;
        // Results of a pass: the best items with their columns, and the counts of scanned items.
        let all = [&top.slots, &top.keys, &top.keys, &top.keys];
        let columns = all.into_iter().map(|column| column.later(column.len()));
        let each = [&top.counts, &best.counts, &queries.survivors, &looked_at];
        columns.chain(each.into_iter().map(|counts| counts.later(batch))).collect()
    }

    /// Scans the lists of a batch; with filters, checks after half of them whether enough results were found. Returns the lists
    /// of each query.
    fn scan(
        &self,
        lane: &Device,
        vectors: &[f32],
        queries: &Collection,
        asked: &QueryParameters<'_>,
    ) -> Result<Array<u32>> {
        let (batch, probes) = (queries.queries(), asked.probes);
        let keys = lane.room(batch * self.centroids.lists)?;
        let order = self.best_of(lane, queries, probes, &keys)?;
        if asked.filters == 0 {
            let first = Order::first(&order.slots, &order.counts, order.stride);
            match batch * probes >= 4 * self.lists.lists() {
                true => self.lists.scan_shared(lane, queries, &first, None)?,
                false => self.lists.scan(lane, queries, &first, None)?,
            }
            self.lists.items(lane, &first)?;
            return Ok(order.counts);
        }
        let order = top::sort(lane, order, &Ties::default())?;
        let filters = self.planes.filters(lane, &vec![filter(); asked.filters], &self.planes.every)?;
        let of_queries: Vec<u32> = (0..batch).map(|n| (n % asked.filters) as u32).collect();
        let words: Vec<u64> = of_queries.iter().map(|&filter| filters.address(filter as usize)).collect();
        let of_queries = lane.copy(&of_queries)?;
        let (words, vectors, margins) = (lane.copy(&words)?, lane.copy(vectors)?, lane.copy(&[])?);
        let eligible = Eligible { words: &words, firsts: &self.planes.firsts };
        let judged = TerminationCriteria { enough: u32::MAX, is_gain: 1, ..TerminationCriteria::default() };
        let looks = vec![probes.div_ceil(2) as u32, probes as u32];
        let looks =
            RunningSearches::new(lane, &vec![Schedule { judged, gains: vec![0.0; looks.len()], looks }; batch])?;
        let of = ProbedLists {
            keys: &keys,
            order: &order.slots,
            stride: order.stride,
            lengths: &self.lists.lengths,
            vectors: &vectors,
            margins: &margins,
            slope: 1.0,
        };
        for (round, &most) in looks.rounds().iter().enumerate() {
            let begins = Some(&looks.begins);
            let next = Order { order: &order.slots, begins, ends: &looks.ends, stride: order.stride, most };
            self.planes.evaluate_lists(lane, (&filters, &of_queries), &next)?;
            self.lists.scan(lane, queries, &next, Some(&eligible))?;
            looks.look(lane, round, &queries.kept(), &of)?;
        }
        Ok(looks.ends)
    }

    fn rerank(&self, lane: &Device, best: &Best, layers: &Layers) -> Result<Array<f32>> {
        let (rows, batch) =
            (SlotRows { slots: &best.slots, counts: &best.counts, stride: best.stride }, best.counts.len());
        let gathered = lane.zeros(batch * best.stride * WIDTHS[0])?;
        let columns = CandidateColumns { addresses: &lane.room(0)?, similarity: &best.keys, at: DIMENSION };
        self.rows().gather(lane, &rows, Some(0), &columns, (&gathered, WIDTHS[0]))?;
        let of_rows = RowsOf { counts: &best.counts, most: best.stride };
        let narrowed = lane.room(batch * best.stride * WIDTHS[0] / 2)?;
        let (from, to) = (
            NumbersAt::of(&gathered, 0, best.stride * WIDTHS[0], WIDTHS[0]),
            NumbersAt::of(&narrowed, 0, best.stride * WIDTHS[0] / 2, WIDTHS[0] / 2),
        );
        steps::narrow(lane, of_rows, from, WIDTHS[0], to)?;
        layers.run(lane, of_rows, &narrowed)
    }
}
