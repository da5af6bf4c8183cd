//! How far kernels are from what memory allows: for a machine with a card, by `scripts/gpu-check.sh`. Asserts nothing of speed, and runs
//! on the emulation with few items, so that it is known to run; on a card that is a model it makes the table of `figures`.
//!
//! `STERLING_FLOORS` names how many items there are, several numbers with commas between; 600 by default.

#![allow(clippy::print_stdout)]

use std::sync::Arc;
use std::time::Instant;

use bytemuck::Pod;
use sterling::cuda::link::fastest_upload;
use sterling::cuda::modelled::{Modelled, Spent};
use sterling::cuda::ops::bags::{IdBags, SumsTo, TableRows, fetch_rows, pool};
use sterling::cuda::ops::looks::{Judged, Lookout, Looks, Schedule};
use sterling::cuda::ops::rows::{CandidateColumns, ItemRows, RowKind, SlotRows};
use sterling::cuda::ops::scan::{BlockLists, Centroids, Collection, Eligible, Order};
use sterling::cuda::ops::steps::{self, FactorAt, NumbersAt, ProductTo, RowsOf};
use sterling::cuda::ops::top::{self, Best, Scored, Ties};
use sterling::cuda::ops::words::{FilterStep, Operation, PlaneIndex, WordProgram};
use sterling::cuda::{Array, Device, Later};
use sterling::error::Result;
use sterling::kernels::buffer::Buffer;
use sterling::kernels::cpu::dense::{Form, PANEL};
use sterling::kernels::cpu::pool::RowFormat;

use crate::emulation::{Random, device};

pub const DIMENSION: usize = 128;
/// About the norm of a random item: 128 codes of 74 on average (the square's), each worth 1/4096.
const NORM_MAX: f32 = 0.25;
/// Batches on a card; those on the emulation, which is slow, are the first two.
const BATCHES: [usize; 4] = [1, 16, 64, 512];

/// What is measured, and on what.
pub struct Bench {
    pub device: Device,
    lane: Device,
    pub runs: usize,
    batches: &'static [usize],
    /// Bytes of a second that a copy reads and writes.
    pub bandwidth: f64,
    /// What keeps the time in place of a clock.
    model: Option<Arc<Modelled>>,
}

/// What a stretch of work took.
#[derive(Clone, Debug, Default)]
pub struct Took {
    pub micros: f64,
    /// Of a model, what it was asked for.
    pub spent: Spent,
}

/// Numbers on the device; a model looks at none.
fn filled<T: Pod>(device: &Device, len: usize, number: impl FnMut(usize) -> T) -> Result<Array<T>> {
    match device.kind() {
        "modelled" => device.room(len),
        _ => device.copy(&(0..len).map(number).collect::<Vec<T>>()),
    }
}

/// Bytes of noise that are written again and again: no whole number of rows, so that no two items are alike.
const NOISE_BYTES: usize = (64 << 20) - 2;

/// Random bytes on the device, or random bf16 between -1 and 1; a model looks at none.
fn noise(device: &Device, bytes: usize, is_bf16: bool) -> Result<Array<u8>> {
    let (all, mut random) = (device.room(bytes)?, Random::new(bytes as u64));
    if device.kind() == "modelled" {
        return Ok(all);
    }
    let number =
        |random: &mut Random| if is_bf16 { (random.number().to_bits() >> 16) as u16 } else { random.next() as u16 };
    let pattern: Vec<u16> = (0..bytes.min(NOISE_BYTES).div_ceil(2)).map(|_| number(&mut random)).collect();
    let pattern: &[u8] = bytemuck::cast_slice(&pattern);
    for first in (0..bytes).step_by(NOISE_BYTES) {
        all.write_at(first, &pattern[..pattern.len().min(bytes - first)])?;
    }
    Ok(all)
}

impl Bench {
    pub fn new(is_tiny: bool) -> Self {
        let (runs, bytes, batches) = if is_tiny { (1, 1 << 16, &BATCHES[..2]) } else { (20, 1 << 30, &BATCHES[..]) };
        let device = device();
        let lane = device.lane().unwrap();
        let mut bench = Bench { device, lane, runs, batches, bandwidth: 1.0, model: None };
        bench.bandwidth = bench.copied(bytes);
        bench
    }

    /// One on a card that is a model.
    pub fn of_model(model: Arc<Modelled>) -> Self {
        let device = Device::over(model.clone());
        let lane = device.lane().unwrap();
        let bandwidth = model.rates().copied;
        Bench { device, lane, runs: 1, batches: &BATCHES, bandwidth, model: Some(model) }
    }

    /// Microseconds of one more of what `work` asks for so many times: without what is around it.
    pub fn of_one_more<T: Pod>(&self, mut work: impl FnMut(&Device, usize) -> Result<Vec<Later<T>>>) -> f64 {
        let [one, three] = [1, 3].map(|times| self.median(|lane| work(lane, times)).micros);
        (three - one) / 2.0
    }

    /// Bytes of a second that copies read and write, many one after the other.
    fn copied(&self, bytes: usize) -> f64 {
        let [from, to] = [(); 2].map(|()| self.device.zeros::<u8>(bytes).unwrap());
        let copies = |count: usize| {
            let start = Instant::now();
            (0..count).for_each(|_| to.copy_from(&from).unwrap());
            self.device.settle().unwrap();
            start.elapsed().as_secs_f64()
        };
        copies(2);
        let fastest = (0..3).map(|_| copies(16)).fold(f64::MAX, f64::min);
        2.0 * 16.0 * bytes as f64 / fastest
    }

    /// The median time of a stretch of work, from writing it down to its results, once it is replayed.
    pub fn median<T: Pod>(&self, mut work: impl FnMut(&Device) -> Result<Vec<Later<T>>>) -> Took {
        let mut all: Vec<Took> = (0..self.runs + 3)
            .map(|_| {
                self.lane.begin().unwrap();
                let start = Instant::now();
                for result in work(&self.lane).unwrap() {
                    result.get().unwrap();
                }
                let (clock, spent) = (start.elapsed().as_secs_f64(), self.model.as_ref().map(|model| model.take()));
                let micros = 1e6 * spent.as_ref().map_or(clock, |spent| spent.seconds);
                Took { micros, spent: spent.unwrap_or_default() }
            })
            .collect();
        all.drain(..3);
        all.sort_unstable_by(|a, b| a.micros.total_cmp(&b.micros));
        all.swap_remove(all.len() / 2)
    }

    /// A line of the table.
    fn line(&self, what: &str, bytes: f64, took: &Took) {
        Bench::line_of(self.bandwidth, what, bytes, took);
    }

    /// One of bytes that come at so many a second.
    fn line_of(bandwidth: f64, what: &str, bytes: f64, took: &Took) {
        let (floor, took) = (bytes / bandwidth * 1e6, took.micros);
        println!("| {what} | {:.1} | {floor:.1} | {took:.1} | {:.0} % |", bytes / 1e6, 100.0 * floor / took);
    }
}

/// A catalogue of random codes in lists of one length.
pub struct Catalogue {
    lists: BlockLists,
    centroids: Centroids,
    wide: Array<u8>,
    planes: PlaneIndex,
    pub items: usize,
}

impl Catalogue {
    fn new(device: &Device, items: usize) -> Result<Self> {
        let lists = ((items as f64).sqrt() as usize / 16 * 16 * 4 / 3).max(16);
        Catalogue::in_lists(device, items, lists)
    }

    /// So many items in so many lists.
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
            items: slots,
        })
    }

    fn rows(&self) -> ItemRows<'_> {
        ItemRows { bytes: &self.wide, scales: &self.lists.scales, kind: RowKind::Bf16, dimension: DIMENSION }
    }

    fn collection(&self, lane: &Device, vectors: &[f32], probes: usize, k: usize) -> Result<Collection> {
        let queries = vectors.len() / DIMENSION;
        let none: Vec<&[u32]> = vec![&[]; queries];
        let collection =
            Collection::new(lane, DIMENSION, probes * self.lists.longest, &vec![k as u32; queries], &none)?;
        collection.quantize(lane, &lane.copy(vectors)?, DIMENSION, NORM_MAX)?;
        Ok(collection)
    }

    /// The best lists of each query.
    fn best_lists(&self, lane: &Device, queries: &Collection, probes: usize) -> Result<Best> {
        let keys = lane.room(queries.queries() * self.centroids.lists)?;
        self.best_of(lane, queries, probes, &keys)
    }

    /// The same; `keys` takes the scores of all lists.
    fn best_of(&self, lane: &Device, queries: &Collection, probes: usize, keys: &Array<u32>) -> Result<Best> {
        self.centroids.score(lane, queries, keys)?;
        let wanted = lane.copy(&vec![probes as u32; queries.queries()])?;
        let scored = Scored { keys, slots: None, counts: None, stride: self.centroids.lists };
        top::select(lane, &scored, &Ties::default(), &wanted, probes)
    }
}

/// Random operands of products: a number each, or two in bf16.
fn numbers(device: &Device, form: Form, len: usize) -> Result<Array<f32>> {
    let mut random = Random::new(len as u64);
    filled(device, len, |_| match form {
        Form::Single => random.number(),
        Form::Pairs => f32::from_bits(random.number().to_bits() & 0xffff_0000 | random.number().to_bits() >> 16),
    })
}

/// Layers of a reranker, `256 - 512 - 256`, packed.
pub struct Layers {
    form: Form,
    matrices: [Array<f32>; 2],
}

const WIDTHS: [usize; 3] = [256, 512, 256];

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
fn filter() -> WordProgram {
    let push = FilterStep { plane: 0, ..FilterStep::plain(Operation::Push) };
    let keep = |plane| FilterStep { plane, ..FilterStep::plain(Operation::Keep) };
    WordProgram { steps: vec![push, keep(1), keep(2)], depth: 1, ..WordProgram::default() }
}

fn scans(bench: &Bench, of: &Catalogue, vectors: &[f32], probes: usize) {
    let each = of.lists.longest;
    for &batch in bench.batches {
        let vectors = &vectors[..batch * DIMENSION];
        let bytes = (batch * probes * each * 136) as f64;
        for shared in [false, true] {
            let took = bench.median(|lane| {
                let queries = of.collection(lane, vectors, probes, 1024)?;
                let order = of.best_lists(lane, &queries, probes)?;
                let order = Order::first(&order.slots, &order.counts, order.stride);
                match shared {
                    true => of.lists.scan_shared(lane, &queries, &order, None)?,
                    false => of.lists.scan(lane, &queries, &order, None)?,
                }
                Ok(vec![queries.counts.later(batch)?])
            });
            let how = if shared { "list by list" } else { "by query" };
            let what = format!("probe and scan, batch {batch}, {how}, {probes} of {} lists", of.lists.lists());
            bench.line(&what, bytes, &took);
        }
    }
}

fn filters(bench: &Bench, of: &Catalogue) {
    let words = of.planes.every.len();
    let took = bench.median(|lane| {
        let filters = of.planes.filters(lane, &[filter()], &of.planes.every)?;
        of.planes.evaluate(lane, &filters)?;
        Ok(vec![filters.words.later(1)?])
    });
    bench.line("filter of three planes over all items", (words * 8 * 5) as f64, &took);
}

fn selections(bench: &Bench, items: usize) {
    let (count, mut random) = (items.min(312_000), Random::new(3));
    for batch in [1, 16] {
        let keys = filled(&bench.device, batch * count, |_| random.next() as u32).unwrap();
        bench.device.settle().unwrap();
        let k = (count / 4).min(10_000);
        let scored = Scored { keys: &keys, slots: None, counts: None, stride: count };
        let took = bench.median(|lane| {
            let wanted = lane.copy(&vec![k as u32; batch])?;
            Ok(vec![top::select(lane, &scored, &Ties::default(), &wanted, k)?.counts.later(batch)?])
        });
        let what = format!("exact {k} of {count}, batch {batch}, four readings");
        bench.line(&what, (4 * 4 * batch * count) as f64, &took);
    }
}

/// Bags of 32 rows of 64 numbers: what it takes to pool them from the host's view, what the kernel alone takes, in µs, and the bytes that they move.
pub fn lookup(bench: &Bench, format: RowFormat, (rows, bags): (usize, usize)) -> (Took, f64, usize) {
    let (width, mut random) = (64, Random::new(4));
    let row_bytes = format.row_bytes(width).unwrap();
    let bytes = noise(&bench.device, rows * row_bytes, true).unwrap();
    let table = TableRows { bytes, format, width };
    let ids = filled(&bench.device, bags * 32, |_| random.below(rows) as i64).unwrap();
    let offsets = filled(&bench.device, bags + 1, |bag| (bag * 32) as u32).unwrap();
    bench.device.settle().unwrap();
    let pooled = |lane: &Device, times: usize| {
        let sums = lane.room(bags * width)?;
        let of = IdBags { ids: &ids, offsets: &offsets, weights: None, is_mean: false };
        for _ in 0..times {
            pool(lane, &table, &of, &SumsTo { data: &sums, stride: width, column: 0 })?;
        }
        Ok(vec![sums.later(1)?])
    };
    let took = bench.median(|lane| pooled(lane, 1));
    (took, bench.of_one_more(pooled), bags * 32 * (row_bytes + 8) + bags * width * 4)
}

/// Random rows of a table of the host, of 64 numbers each; the bytes that come over the link.
pub fn fetched(bench: &Bench, format: RowFormat, (rows, wanted): (usize, usize)) -> (Took, usize) {
    let row_bytes = format.row_bytes(64).unwrap();
    let table = bench.device.register(Buffer::filled(rows * row_bytes, |_| ()).unwrap()).unwrap();
    let mut random = Random::new(6);
    let wanted: Vec<i64> = (0..wanted).map(|_| random.below(rows) as i64).collect();
    let took = bench.median(|lane| Ok(vec![fetch_rows(lane, &table, &wanted, row_bytes)?.later(1)?]));
    (took, wanted.len() * row_bytes)
}

/// A reranker 256-512-256 over so many candidates of each request of a batch; its multiply-adds.
pub fn reranked(bench: &Bench, form: Form, (batch, candidates): (usize, usize)) -> (Took, usize) {
    let layers = Layers::new(&bench.device, form).unwrap();
    let input = numbers(&bench.device, form, batch * candidates * form.room(WIDTHS[0])).unwrap();
    bench.device.settle().unwrap();
    let took = bench.median(|lane| {
        let counts = lane.copy(&vec![candidates as u32; batch])?;
        Ok(vec![layers.run(lane, RowsOf { counts: &counts, most: candidates }, &input)?.later(1)?])
    });
    (took, batch * candidates * (WIDTHS[0] * WIDTHS[1] + WIDTHS[1] * WIDTHS[2]))
}

/// What is asked of every query of a batch.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    pub probes: usize,
    pub k0: usize,
    pub k: usize,
    /// Different filters of the batch; none where nothing is filtered.
    pub filters: usize,
    pub layers: Option<&'a Layers>,
}

impl Catalogue {
    /// Filter, probe, scan, select, rescore, gather, rerank, select and sort by operations, as a pass asks for them.
    pub fn pass(&self, lane: &Device, vectors: &[f32], asked: &Asked<'_>) -> Result<Vec<Later<u32>>> {
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
        // What a pass takes back: the best with their columns, and what was looked at.
        let all = [&top.slots, &top.keys, &top.keys, &top.keys];
        let columns = all.into_iter().map(|column| column.later(column.len()));
        let each = [&top.counts, &best.counts, &queries.survivors, &looked_at];
        columns.chain(each.into_iter().map(|counts| counts.later(batch))).collect()
    }

    /// Scans the lists of a batch: with filters after half of them is looked whether there is enough. Returns the lists of each query.
    fn scan(&self, lane: &Device, vectors: &[f32], queries: &Collection, asked: &Asked<'_>) -> Result<Array<u32>> {
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
        let judged = Judged { enough: u32::MAX, is_gain: 1, ..Judged::default() };
        let looks = vec![probes.div_ceil(2) as u32, probes as u32];
        let looks = Looks::new(lane, &vec![Schedule { judged, gains: vec![0.0; looks.len()], looks }; batch])?;
        let of = Lookout {
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

    /// What scanning lists behind one filter takes by itself, in µs, and all of one such search up to its candidates. Takes the vectors of
    /// three batches, of which each scans other lists.
    pub fn scan_alone(&self, bench: &Bench, vectors: &[f32], (probes, k0): (usize, usize)) -> (f64, Took) {
        let scanned = |lane: &Device, times: usize| {
            let batches = vectors.chunks(vectors.len() / 3).map(|vectors| {
                let queries = self.collection(lane, vectors, probes, k0)?;
                let order = self.best_lists(lane, &queries, probes)?;
                Ok((queries, order))
            });
            let batches = batches.collect::<Result<Vec<(Collection, Best)>>>()?;
            let filters = self.planes.filters(lane, &[filter()], &self.planes.every)?;
            self.planes.evaluate(lane, &filters)?;
            let words = lane.copy(&vec![filters.address(0); batches[0].0.queries()])?;
            let eligible = Eligible { words: &words, firsts: &self.planes.firsts };
            for (queries, order) in &batches[..times] {
                let order = Order::first(&order.slots, &order.counts, order.stride);
                self.lists.scan(lane, queries, &order, Some(&eligible))?;
            }
            batches.iter().map(|(queries, _)| queries.counts.later(queries.queries())).collect()
        };
        (bench.of_one_more(scanned), bench.median(|lane| scanned(lane, 1)))
    }

    /// Bytes that such a scan reads: codes of blocks that hold an item of which the filter's three random bits are set, all scales and words.
    pub fn scanned_bytes(&self, batch: usize, probes: usize) -> f64 {
        let read = 1.0 - 0.875f64.powi(16);
        (batch * probes * self.lists.longest) as f64 * (read * DIMENSION as f64 + 4.0 + 0.125)
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

fn passes(bench: &Bench, of: &Catalogue, vectors: &[f32], (probes, k0): (usize, usize)) {
    let layers = Layers::new(&bench.device, Form::Pairs).unwrap();
    bench.device.settle().unwrap();
    for (&batch, filters) in bench.batches.iter().flat_map(|batch| [(batch, 0), (batch, 1)]) {
        let vectors = &vectors[..batch * DIMENSION];
        let asked = Asked { probes, k0, k: 100.min(k0), filters, layers: Some(&layers) };
        let took = bench.median(|lane| of.pass(lane, vectors, &asked));
        let bytes = (batch * (probes * of.lists.longest * 136 + k0 * 2 * DIMENSION * 2)) as f64;
        let how = if filters == 0 { "" } else { ", one filter" };
        bench.line(&format!("whole pass by operations, batch {batch}{how}, {probes} probes, K0 = {k0}"), bytes, &took);
        println!("| queries a second at batch {batch}{how} | | | {:.0} | |", 1e6 * batch as f64 / took.micros);
    }
}

#[test]
fn floors() {
    let named = std::env::var("STERLING_FLOORS").unwrap_or_else(|_| "600".into());
    for items in named.split(',').map(|n| n.trim().parse::<usize>().unwrap()) {
        let is_tiny = items < 1_000_000;
        let bench = Bench::new(is_tiny);
        println!(
            "\n{}, {items} items x {DIMENSION}, copies at {:.0} GB/s\n",
            bench.device.name(),
            bench.bandwidth / 1e9
        );
        println!("| what | MB | floor µs | median µs | of the floor |\n|---|---|---|---|---|");
        let of = Catalogue::new(&bench.device, items).unwrap();
        bench.device.settle().unwrap();
        let vectors = Random::new(2).numbers(BATCHES[BATCHES.len() - 1] * DIMENSION);
        let (probes, k0) = if is_tiny { (2, 16) } else { (24, 1024) };
        scans(&bench, &of, &vectors, probes);
        filters(&bench, &of);
        selections(&bench, of.items);
        for format in [RowFormat::F32, RowFormat::Int8] {
            let (rows, bags) = (of.items.min(4_000_000), (of.items / 16).clamp(8, 16_384));
            let (took, _, moved) = lookup(&bench, format, (rows, bags));
            bench.line(&format!("{bags} bags of 32 rows, {format:?} x 64"), moved as f64, &took);
        }
        let (start, bytes) = (Instant::now(), if is_tiny { 1 << 16 } else { 1 << 28 });
        let copied = fastest_upload(&bench.device, bytes, 8, &|| start.elapsed().as_secs_f64()).unwrap();
        for format in [RowFormat::F32, RowFormat::Int8, RowFormat::Int4] {
            let (rows, wanted) = (of.items.min(4_000_000), (of.items / 16).clamp(8, 65_536));
            let (took, moved) = fetched(&bench, format, (rows, wanted));
            let what = format!("{wanted} rows of the host, {format:?} x 64, of its link");
            Bench::line_of(bytes as f64 / copied, &what, moved as f64, &took);
        }
        let candidates = if is_tiny { 8 } else { 10_000 };
        for (batch, form) in [(1, Form::Pairs), (16, Form::Pairs), (1, Form::Single), (16, Form::Single)] {
            let (took, operations) = reranked(&bench, form, (batch, candidates));
            let (micros, rate) = (took.micros / batch as f64, 2e-6 * operations as f64 / took.micros);
            let what = format!("reranker 256-512-256 {form:?}, K0 = {candidates}, batch {batch}");
            println!("| {what} | | | {micros:.1} a query | {rate:.1} T/s |");
        }
        passes(&bench, &of, &vectors, (probes, k0));
    }
}
