//! Distance of GPU kernels from the memory bound, and the figures of `docs/benchmarks/gpu.md`. Runs on the GPU that
//! `STERLING_TEST_DEVICE` names, by `scripts/gpu-check.sh`; or on the emulation with few items, whose times mean nothing.
//!
//! `cargo bench --bench gpu_floors -- floors` prints the table of kernels, `training` that of training steps of embedding tables,
//! and `figures` that of complete passes. `once` runs each figure a few times, for a kernel profiler, which slows everything down. `STERLING_FLOORS` sets the numbers of items,
//! separated by commas; the default is 600.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use bytemuck::Pod;
use sterling::cuda::link::fastest_upload;
use sterling::cuda::ops::bags::{IdBags, SumsTo, TableRows, fetch_rows, pool};
use sterling::cuda::ops::scan::{Collection, Eligible, Order};
use sterling::cuda::ops::steps::RowsOf;
use sterling::cuda::ops::top::{self, Best, Scored, Ties};
use sterling::cuda::{Device, Later};
use sterling::error::Result;
use sterling::kernels::buffer::Buffer;
use sterling::kernels::cpu::dense::Form;
use sterling::kernels::cpu::pool::RowFormat;

#[path = "../tests/gpu/composed.rs"]
mod composed;
#[allow(dead_code)]
#[path = "../tests/gpu/emulation.rs"]
mod emulation;
#[path = "gpu/training.rs"]
mod training;

use composed::{Catalogue, DIMENSION, Layers, QueryParameters, WIDTHS, filled, filter, noise, numbers};
use emulation::{Random, device};

/// Batch sizes on a GPU; the emulation, which is slow, uses the first two.
const BATCHES: [usize; 4] = [1, 16, 64, 512];

/// Device and settings of the measurements.
struct Bench {
    device: Device,
    lane: Device,
    runs: usize,
    batches: &'static [usize],
    /// Bytes per second that a copy reads and writes.
    bandwidth: f64,
}

impl Bench {
    fn new(is_tiny: bool) -> Self {
        let (runs, bytes, batches) = if is_tiny { (1, 1 << 16, &BATCHES[..2]) } else { (20, 1 << 30, &BATCHES[..]) };
        let device = device();
        let lane = device.lane().unwrap();
        let mut bench = Bench { device, lane, runs, batches, bandwidth: 1.0 };
        bench.bandwidth = bench.copied(bytes);
        bench
    }

    /// Returns the microseconds of one more repetition of `work`, without the overhead around it.
    fn of_one_more<T: Pod>(&self, mut work: impl FnMut(&Device, usize) -> Result<Vec<Later<T>>>) -> f64 {
        let [one, three] = [1, 3].map(|times| self.median(|lane| work(lane, times)));
        (three - one) / 2.0
    }

    /// Returns the bytes per second that copies read and write, many in sequence.
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

    /// Returns the median time of `work` in microseconds, from recording to results, once it is replayed as a CUDA graph.
    fn median<T: Pod>(&self, mut work: impl FnMut(&Device) -> Result<Vec<Later<T>>>) -> f64 {
        let mut all: Vec<f64> = (0..self.runs + 3)
            .map(|_| {
                self.lane.begin().unwrap();
                let start = Instant::now();
                for result in work(&self.lane).unwrap() {
                    result.get().unwrap();
                }
                1e6 * start.elapsed().as_secs_f64()
            })
            .collect();
        all.drain(..3);
        all.sort_unstable_by(f64::total_cmp);
        all[all.len() / 2]
    }

    /// Prints a line of the table.
    fn line(&self, what: &str, bytes: f64, took: f64) {
        Bench::line_of(self.bandwidth, what, bytes, took);
    }

    /// Prints a line for bytes that arrive at `bandwidth`.
    fn line_of(bandwidth: f64, what: &str, bytes: f64, took: f64) {
        let floor = bytes / bandwidth * 1e6;
        println!("| {what} | {:.1} | {floor:.1} | {took:.1} | {:.0} % |", bytes / 1e6, 100.0 * floor / took);
    }
}

/// Creates a catalogue of `items` items, in about as many lists as an index would have.
fn catalogue(device: &Device, items: usize) -> Result<Catalogue> {
    let lists = ((items as f64).sqrt() as usize / 16 * 16 * 4 / 3).max(16);
    Catalogue::in_lists(device, items, lists)
}

/// Returns the best lists of each query.
fn best_lists(of: &Catalogue, lane: &Device, queries: &Collection, probes: usize) -> Result<Best> {
    let keys = lane.room(queries.queries() * of.centroids.lists)?;
    of.best_of(lane, queries, probes, &keys)
}

/// Returns the bytes that a filtered scan reads: the codes of blocks with an eligible item (the filter has three random bits),
/// all scales and all bitmap words.
fn scanned_bytes(of: &Catalogue, batch: usize, probes: usize) -> f64 {
    let read = 1.0 - 0.875f64.powi(16);
    (batch * probes * of.lists.longest) as f64 * (read * DIMENSION as f64 + 4.0 + 0.125)
}

fn scans(bench: &Bench, of: &Catalogue, vectors: &[f32], probes: usize) {
    let each = of.lists.longest;
    for &batch in bench.batches {
        let vectors = &vectors[..batch * DIMENSION];
        let bytes = (batch * probes * each * 136) as f64;
        for shared in [false, true] {
            let took = bench.median(|lane| {
                let queries = of.collection(lane, vectors, probes, 1024)?;
                let order = best_lists(of, lane, &queries, probes)?;
                let order = Order::first(&order.slots, &order.counts, order.stride);
                match shared {
                    true => of.lists.scan_shared(lane, &queries, &order, None)?,
                    false => of.lists.scan(lane, &queries, &order, None)?,
                }
                Ok(vec![queries.counts.later(batch)?])
            });
            let how = if shared { "list by list" } else { "by query" };
            let what = format!("probe and scan, batch {batch}, {how}, {probes} of {} lists", of.lists.lists());
            bench.line(&what, bytes, took);
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
    bench.line("filter of three planes over all items", (words * 8 * 5) as f64, took);
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
        bench.line(&what, (4 * 4 * batch * count) as f64, took);
    }
}

/// Pools bags of 32 rows of 64 numbers. Returns the time as seen by the host and of the kernel alone, in µs, and the bytes moved.
fn lookup(bench: &Bench, format: RowFormat, (rows, bags): (usize, usize)) -> (f64, f64, usize) {
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

/// Fetches random rows of 64 numbers from a table in host memory; returns the bytes that cross the link.
fn fetched(bench: &Bench, format: RowFormat, (rows, wanted): (usize, usize)) -> (f64, usize) {
    let row_bytes = format.row_bytes(64).unwrap();
    let table = bench.device.register(Buffer::filled(rows * row_bytes, |_| ()).unwrap()).unwrap();
    let mut random = Random::new(6);
    let wanted: Vec<i64> = (0..wanted).map(|_| random.below(rows) as i64).collect();
    let took = bench.median(|lane| Ok(vec![fetch_rows(lane, &table, &wanted, row_bytes)?.later(1)?]));
    (took, wanted.len() * row_bytes)
}

/// Runs a reranker 256-512-256 over the candidates of each request of a batch; returns its multiply-adds.
fn reranked(bench: &Bench, form: Form, (batch, candidates): (usize, usize)) -> (f64, usize) {
    let layers = Layers::new(&bench.device, form).unwrap();
    let input = numbers(&bench.device, form, batch * candidates * form.room(WIDTHS[0])).unwrap();
    bench.device.settle().unwrap();
    let took = bench.median(|lane| {
        let counts = lane.copy(&vec![candidates as u32; batch])?;
        Ok(vec![layers.run(lane, RowsOf { counts: &counts, most: candidates }, &input)?.later(1)?])
    });
    (took, batch * candidates * (WIDTHS[0] * WIDTHS[1] + WIDTHS[1] * WIDTHS[2]))
}

/// Returns the time of scanning lists behind one filter alone, in µs. Takes the vectors of three batches, which scan different
/// lists.
fn scan_alone(of: &Catalogue, bench: &Bench, vectors: &[f32], (probes, k0): (usize, usize)) -> f64 {
    bench.of_one_more(|lane, times| {
        let batches = vectors.chunks(vectors.len() / 3).map(|vectors| {
            let queries = of.collection(lane, vectors, probes, k0)?;
            let order = best_lists(of, lane, &queries, probes)?;
            Ok((queries, order))
        });
        let batches = batches.collect::<Result<Vec<(Collection, Best)>>>()?;
        let filters = of.planes.filters(lane, &[filter()], &of.planes.every)?;
        of.planes.evaluate(lane, &filters)?;
        let words = lane.copy(&vec![filters.address(0); batches[0].0.queries()])?;
        let eligible = Eligible { words: &words, firsts: &of.planes.firsts };
        for (queries, order) in &batches[..times] {
            let order = Order::first(&order.slots, &order.counts, order.stride);
            of.lists.scan(lane, queries, &order, Some(&eligible))?;
        }
        batches.iter().map(|(queries, _)| queries.counts.later(queries.queries())).collect()
    })
}

fn passes(bench: &Bench, of: &Catalogue, vectors: &[f32], (probes, k0): (usize, usize)) {
    let layers = Layers::new(&bench.device, Form::Pairs).unwrap();
    bench.device.settle().unwrap();
    for (&batch, filters) in bench.batches.iter().flat_map(|batch| [(batch, 0), (batch, 1)]) {
        let vectors = &vectors[..batch * DIMENSION];
        let requested = QueryParameters { probes, k0, k: 100.min(k0), filters, layers: Some(&layers) };
        let took = bench.median(|lane| of.pass(lane, vectors, &requested));
        let bytes = (batch * (probes * of.lists.longest * 136 + k0 * 2 * DIMENSION * 2)) as f64;
        let how = if filters == 0 { "" } else { ", one filter" };
        bench.line(&format!("whole pass by operations, batch {batch}{how}, {probes} probes, K0 = {k0}"), bytes, took);
        println!("| queries a second at batch {batch}{how} | | | {:.0} | |", 1e6 * batch as f64 / took);
    }
}

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
        let of = catalogue(&bench.device, items).unwrap();
        bench.device.settle().unwrap();
        let vectors = Random::new(2).numbers(BATCHES[BATCHES.len() - 1] * DIMENSION);
        let (probes, k0) = if is_tiny { (2, 16) } else { (24, 1024) };
        scans(&bench, &of, &vectors, probes);
        filters(&bench, &of);
        selections(&bench, of.lists.slots);
        for format in [RowFormat::F32, RowFormat::Int8] {
            let (rows, bags) = (of.lists.slots.min(4_000_000), (of.lists.slots / 16).clamp(8, 16_384));
            let (took, _, moved) = lookup(&bench, format, (rows, bags));
            bench.line(&format!("{bags} bags of 32 rows, {format:?} x 64"), moved as f64, took);
        }
        let (start, bytes) = (Instant::now(), if is_tiny { 1 << 16 } else { 1 << 28 });
        let copied = fastest_upload(&bench.device, bytes, 8, &|| start.elapsed().as_secs_f64()).unwrap();
        for format in [RowFormat::F32, RowFormat::Int8, RowFormat::Int4] {
            let (rows, wanted) = (of.lists.slots.min(4_000_000), (of.lists.slots / 16).clamp(8, 65_536));
            let (took, moved) = fetched(&bench, format, (rows, wanted));
            let what = format!("{wanted} rows of the host, {format:?} x 64, of its link");
            Bench::line_of(bytes as f64 / copied, &what, moved as f64, took);
        }
        let candidates = if is_tiny { 8 } else { 10_000 };
        for (batch, form) in [(1, Form::Pairs), (16, Form::Pairs), (1, Form::Single), (16, Form::Single)] {
            let (took, operations) = reranked(&bench, form, (batch, candidates));
            let (micros, rate) = (took / batch as f64, 2e-6 * operations as f64 / took);
            let what = format!("reranker 256-512-256 {form:?}, K0 = {candidates}, batch {batch}");
            println!("| {what} | | | {micros:.1} a query | {rate:.1} T/s |");
        }
        passes(&bench, &of, &vectors, (probes, k0));
    }
}

struct Figure {
    what: String,
    aim: &'static str,
    /// Text derived from the time.
    said: String,
    /// True if the target is reached.
    is_reached: bool,
}

impl Figure {
    fn of(what: String, aim: &'static str, (said, is_reached): (String, bool)) -> Self {
        Figure { what, aim, said, is_reached }
    }
}

#[derive(Clone, Copy)]
struct Case {
    items: usize,
    lists: usize,
    probes: usize,
    batch: usize,
    k0: usize,
    k: usize,
    filters: usize,
    reranks: bool,
}

impl Case {
    fn requested<'a>(&self, layers: &'a Layers) -> QueryParameters<'a> {
        let &Case { probes, k0, k, filters, reranks, .. } = self;
        QueryParameters { probes, k0, k, filters, layers: reranks.then_some(layers) }
    }

    /// Shrinks the case to a size that the emulation can run.
    fn handle_shrunk_stream(self) -> Self {
        Case { items: 64 * 16, lists: 64, probes: 8, batch: 3, k0: 32, k: 16, filters: self.filters.min(2), ..self }
    }
}

const SCAN: Case =
    Case { items: 20_000_000, lists: 8192, probes: 32, batch: 16, k0: 2048, k: 2048, filters: 1, reranks: false };
const PASS: Case =
    Case { items: 10_000_000, lists: 4096, probes: 24, k0: 1024, k: 100, filters: 0, reranks: true, ..SCAN };
const SOME: Case = Case { probes: 64, batch: 64, filters: 64, ..PASS };
const MANY: Case = Case { items: 80_000_000, lists: 16_384, ..SOME };

fn searched(bench: &Bench, of: &Catalogue, case: &Case) -> f64 {
    let layers = Layers::new(&bench.device, Form::Pairs).unwrap();
    bench.device.settle().unwrap();
    let vectors = vectors(case.batch);
    bench.median(|lane| of.pass(lane, &vectors, &case.requested(&layers)))
}

fn vectors(count: usize) -> Vec<f32> {
    Random::new(2).numbers(count * DIMENSION)
}

fn named(case: &Case) -> String {
    let Case { items, lists, probes, batch, k0, filters, .. } = case;
    let filter = match filters {
        0 => String::new(),
        1 => ", one filter".into(),
        filters => format!(", {filters} filters"),
    };
    let reranked = if case.reranks { ", 256-512-256 in bf16" } else { "" };
    format!(
        "{} M x 128 in {} lists, {probes} probes, batch {batch}{filter}, K0 = {k0}{reranked}",
        items / 1_000_000,
        grouped(*lists as u64)
    )
}

/// Figures over catalogues, of which one exists at a time.
fn of_searches(bench: &Bench, shape: impl Fn(Case) -> Case, mut reported: impl FnMut(Figure)) {
    let [scan, pass, some, many] = [SCAN, PASS, SOME, MANY].map(shape);
    let made = |case: &Case| {
        let of = Catalogue::in_lists(&bench.device, case.items, case.lists).unwrap();
        bench.device.settle().unwrap();
        of
    };
    let in_time = |of: &Catalogue, case: &Case, aim, most| {
        let took = searched(bench, of, case);
        let (said, is_reached) = (format!("{:.0} µs", took), took <= most);
        Figure::of(format!("whole pass: {}", named(case)), aim, (said, is_reached))
    };
    let at_rate = |of: &Catalogue, case: &Case, aim, least| {
        let took = searched(bench, of, case);
        let rate = 1e6 * case.batch as f64 / took;
        let (said, is_reached) = (format!("{} queries/s", grouped(rate as u64)), rate >= least);
        Figure::of(format!("whole pass: {}", named(case)), aim, (said, is_reached))
    };

    let of = made(&scan);
    let micros = scan_alone(&of, bench, &vectors(3 * scan.batch), (scan.probes, scan.k0));
    let share = 1e8 * scanned_bytes(&of, scan.batch, scan.probes) / bench.bandwidth / micros;
    reported(Figure {
        what: format!("scan behind a filter alone: {}", named(&scan)),
        aim: "70 % of the bandwidth of a copy",
        said: format!("{share:.0} %"),
        is_reached: share >= 70.0,
    });
    reported(in_time(&of, &scan, "0.25 ms", 250.0));
    drop(of);
    let of = made(&pass);
    reported(in_time(&of, &pass, "p50 below 1 ms", 1000.0));
    reported(at_rate(&of, &some, "40,000 queries/s", 4e4));
    drop(of);
    reported(at_rate(&made(&many), &many, "10,000 queries/s", 1e4));
}

fn of_parts(bench: &Bench, is_tiny: bool, mut reported: impl FnMut(Figure)) {
    let small = |count: usize, few: usize| if is_tiny { few } else { count };
    for (form, aim, most) in [(Form::Pairs, "60 µs a query", 60.0), (Form::Single, "", f64::MAX)] {
        let (took, _) = reranked(bench, form, (16, small(10_000, 20)));
        let each = took / 16.0;
        let how = if form == Form::Pairs { "bf16" } else { "f32" };
        let what = format!("reranker 256-512-256 in {how} of K0 = 10,000, batch 16");
        reported(Figure::of(what, aim, (format!("{each:.0} µs a query"), each <= most)));
    }
    for format in [RowFormat::F32, RowFormat::Int8] {
        let (_, micros, moved) = lookup(bench, format, (small(4_000_000, 500), small(65_536, 16)));
        let share = 1e8 * moved as f64 / bench.bandwidth / micros;
        let what = format!("pooled lookups, 65,536 bags of 32 rows of 64 numbers, {format:?}");
        let aim = "70 % of the bandwidth of a copy";
        reported(Figure::of(what, aim, (format!("{share:.0} %"), share >= 70.0)));
    }
    for (wanted, format) in [(3_000, RowFormat::Int8), (65_536, RowFormat::F32)] {
        let (took, _) = fetched(bench, format, (small(4_000_000, 500), small(wanted, 64)));
        let what = format!("{} rows of 64 numbers from the host, {format:?}", grouped(wanted as u64));
        reported(Figure::of(what, "", (format!("{:.0} µs", took), true)));
    }
}

fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let parts: Vec<&str> = digits.as_bytes().rchunks(3).rev().map(|part| std::str::from_utf8(part).unwrap()).collect();
    parts.join(",")
}

fn figures(bench: &Bench, is_tiny: bool, mut reported: impl FnMut(Figure)) {
    let shape = |case: Case| if is_tiny { case.handle_shrunk_stream() } else { case };
    of_searches(bench, shape, &mut reported);
    of_parts(bench, is_tiny, reported);
}

/// Runs passes on two streams concurrently, and passes during the load of a version.
fn side_by_side(bench: &Bench, case: Case, passes: usize) {
    let of = Catalogue::in_lists(&bench.device, case.items, case.lists).unwrap();
    let layers = Layers::new(&bench.device, Form::Pairs).unwrap();
    bench.device.settle().unwrap();
    let vectors = vectors(case.batch);
    let timed = || {
        let lane = bench.device.lane().unwrap();
        let pass = || {
            let start = Instant::now();
            lane.begin().unwrap();
            of.pass(&lane, &vectors, &case.requested(&layers))
                .unwrap()
                .into_iter()
                .for_each(|result| drop(result.get().unwrap()));
            start.elapsed().as_secs_f64()
        };
        let mut took: Vec<f64> = (0..passes + 3).map(|_| pass()).skip(3).collect();
        took.sort_unstable_by(f64::total_cmp);
        [took.iter().sum::<f64>(), took[passes / 2], took[passes * 99 / 100]]
    };
    let [_, p50, p99] = timed();
    let both: Vec<[f64; 3]> =
        std::thread::scope(|scope| [(); 2].map(|()| scope.spawn(timed)).map(|lane| lane.join().unwrap()).to_vec());
    let rate: f64 = both.iter().map(|[sum, ..]| (passes * case.batch) as f64 / sum).sum();
    println!(
        "| {} | p50 below 1 ms | p50 {:.0} µs, p99 {:.0} µs; two streams at once {:.0} queries/s |",
        named(&case),
        1e6 * p50,
        1e6 * p99,
        rate
    );
    let (version, is_over) = (vec![1u8; if passes > 2 { 1 << 30 } else { 1 << 16 }], AtomicBool::new(false));
    let (brought, [_, _, beside]) = std::thread::scope(|scope| {
        let bringing = scope.spawn(|| {
            let (start, mut bytes) = (Instant::now(), 0);
            while !is_over.load(Ordering::Relaxed) {
                bench.device.make(|device| device.copy(&version), |_| Ok(())).unwrap();
                bench.device.settle().unwrap();
                bytes += version.len();
            }
            bytes as f64 / start.elapsed().as_secs_f64()
        });
        let took = timed();
        is_over.store(true, Ordering::Relaxed);
        (bringing.join().unwrap(), took)
    });
    let what = format!("p99 while versions come at {:.1} GB/s", brought / 1e9);
    println!("| {what} | at most 1.2 × steady | {:.0} µs, {:.2} × |", 1e6 * beside, beside / p99);
}

fn main() {
    let part = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_else(|| "floors".into());
    let is_tiny = device().kind() == "emulated";
    match part.as_str() {
        "floors" => floors(),
        "training" => {
            let bench = Bench::new(is_tiny);
            println!("\n| {} | MB | floor µs | µs | of the floor |\n|---|---|---|---|---|", bench.device.name());
            training::training(&bench, is_tiny);
        }
        "figures" => {
            let bench = Bench::new(is_tiny);
            println!("\n| figure | aim | {} |\n|---|---|---|", bench.device.name());
            figures(&bench, is_tiny, |Figure { what, aim, said, is_reached }| {
                println!("| {what} | {aim} | {said}{} |", if is_reached { "" } else { ", missed" });
            });
            side_by_side(
                &bench,
                if is_tiny { PASS.handle_shrunk_stream() } else { PASS },
                if is_tiny { 2 } else { 1000 },
            );
        }
        "once" => {
            let mut bench = Bench::new(is_tiny);
            bench.runs = 1;
            figures(&bench, is_tiny, |_| {});
        }
        other => panic!("got the part `{other}`, expected `floors`, `training`, `figures` or `once`"),
    }
}
