//! The figures that a card is to be held against, as a model has them: the launches that a pass asks for, with what they say that they
//! move and compute, over the rates of cards. `docs/GPU.md` holds the table; `STERLING_BLESS=1` writes it anew.

#![allow(clippy::print_stdout)]

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use sterling::cuda::Demand;
use sterling::cuda::modelled::{CardRates, Modelled};
use sterling::cuda::ops::steps::RowsOf;
use sterling::kernels::cpu::dense::Form;
use sterling::kernels::cpu::pool::RowFormat;

use crate::emulation::{Random, device, emulated};
use crate::floors::{Asked, Bench, Catalogue, DIMENSION, Layers, Took, fetched, lookup, reranked};

/// A figure on one card.
struct Figure {
    what: String,
    aim: &'static str,
    demand: Demand,
    /// Launches, and copies to and from the host.
    asked: [u64; 2],
    /// What is made of the time.
    said: String,
    /// Whether that is what it was to be.
    is_reached: bool,
}

impl Figure {
    /// What a stretch of work took, and what is said of it.
    fn of(what: String, aim: &'static str, (said, is_reached): (String, bool), took: &Took) -> Self {
        let spent = &took.spent;
        Figure { what, aim, demand: spent.demand, asked: [spent.launches, spent.copies], said, is_reached }
    }
}

/// What is searched, and how.
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
    fn asked<'a>(&self, layers: &'a Layers) -> Asked<'a> {
        let &Case { probes, k0, k, filters, reranks, .. } = self;
        Asked { probes, k0, k, filters, layers: reranks.then_some(layers) }
    }

    /// The same over so few items that the emulation goes through it.
    fn shrunk(self) -> Self {
        Case { items: 64 * 16, lists: 64, probes: 8, batch: 3, k0: 32, k: 16, filters: self.filters.min(2), ..self }
    }
}

const SCAN: Case =
    Case { items: 20_000_000, lists: 8192, probes: 32, batch: 16, k0: 2048, k: 2048, filters: 1, reranks: false };
const PASS: Case =
    Case { items: 10_000_000, lists: 4096, probes: 24, k0: 1024, k: 100, filters: 0, reranks: true, ..SCAN };
const SOME: Case = Case { probes: 64, batch: 64, filters: 64, ..PASS };
const MANY: Case = Case { items: 80_000_000, lists: 16_384, ..SOME };

fn searched(bench: &Bench, of: &Catalogue, case: &Case) -> Took {
    let layers = Layers::new(&bench.device, Form::Pairs).unwrap();
    bench.device.settle().unwrap();
    let vectors = vectors(case.batch);
    bench.median(|lane| of.pass(lane, &vectors, &case.asked(&layers)))
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

/// Figures over catalogues of which there is one at a time.
fn of_searches(bench: &Bench, shape: impl Fn(Case) -> Case, mut told: impl FnMut(Figure)) {
    let [scan, pass, some, many] = [SCAN, PASS, SOME, MANY].map(shape);
    let made = |case: &Case| {
        let of = Catalogue::in_lists(&bench.device, case.items, case.lists).unwrap();
        bench.device.settle().unwrap();
        of
    };
    let in_time = |of: &Catalogue, case: &Case, aim, most| {
        let took = searched(bench, of, case);
        let (said, is_reached) = (format!("{:.0} µs", took.micros), took.micros <= most);
        Figure::of(format!("whole pass: {}", named(case)), aim, (said, is_reached), &took)
    };
    let at_rate = |of: &Catalogue, case: &Case, aim, least| {
        let took = searched(bench, of, case);
        let rate = 1e6 * case.batch as f64 / took.micros;
        let (said, is_reached) = (format!("{} queries/s", grouped(rate as u64)), rate >= least);
        Figure::of(format!("whole pass: {}", named(case)), aim, (said, is_reached), &took)
    };

    let of = made(&scan);
    let (micros, took) = of.scan_alone(bench, &vectors(3 * scan.batch), (scan.probes, scan.k0));
    let of_kernel = took.spent.kernels.get("scan_lists").copied().unwrap_or_default();
    let share = 1e8 * of.scanned_bytes(scan.batch, scan.probes) / bench.bandwidth / micros;
    told(Figure {
        what: format!("scan behind a filter alone: {}", named(&scan)),
        aim: "70 % of the bandwidth of a copy",
        said: format!("{share:.0} %"),
        is_reached: share >= 70.0,
        demand: of_kernel.demand,
        asked: [of_kernel.launches, 0],
    });
    told(in_time(&of, &scan, "0.25 ms", 250.0));
    drop(of);
    let of = made(&pass);
    told(in_time(&of, &pass, "p50 below 1 ms", 1000.0));
    told(at_rate(&of, &some, "40,000 queries/s", 4e4));
    drop(of);
    told(at_rate(&made(&many), &many, "10,000 queries/s", 1e4));
}

fn of_parts(bench: &Bench, is_tiny: bool, mut told: impl FnMut(Figure)) {
    let small = |count: usize, few: usize| if is_tiny { few } else { count };
    for (form, aim, most) in [(Form::Pairs, "60 µs a query", 60.0), (Form::Single, "", f64::MAX)] {
        let (took, _) = reranked(bench, form, (16, small(10_000, 20)));
        let each = took.micros / 16.0;
        let how = if form == Form::Pairs { "bf16" } else { "f32" };
        let what = format!("reranker 256-512-256 in {how} of K0 = 10,000, batch 16");
        told(Figure::of(what, aim, (format!("{each:.0} µs a query"), each <= most), &took));
    }
    for format in [RowFormat::F32, RowFormat::Int8] {
        let (took, micros, moved) = lookup(bench, format, (small(4_000_000, 500), small(65_536, 16)));
        let share = 1e8 * moved as f64 / bench.bandwidth / micros;
        let what = format!("pooled lookups, 65,536 bags of 32 rows of 64 numbers, {format:?}");
        let aim = "70 % of the bandwidth of a copy";
        told(Figure::of(what, aim, (format!("{share:.0} %"), share >= 70.0), &took));
    }
    for (wanted, format) in [(3_000, RowFormat::Int8), (65_536, RowFormat::F32)] {
        let (took, _) = fetched(bench, format, (small(4_000_000, 500), small(wanted, 64)));
        let what = format!("{} rows of 64 numbers from the host, {format:?}", grouped(wanted as u64));
        told(Figure::of(what, "", (format!("{:.0} µs", took.micros), true), &took));
    }
}

/// A version that comes while another answers takes the bandwidth of the way to the card, and adds nothing else.
fn of_a_swap(rates: &CardRates) -> (String, bool) {
    let slower = 1.0 / (1.0 - rates.host / rates.memory);
    (format!("{slower:.3} × steady"), slower <= 1.2)
}

fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let parts: Vec<&str> = digits.as_bytes().rchunks(3).rev().map(|part| std::str::from_utf8(part).unwrap()).collect();
    parts.join(",")
}

fn figures(bench: &Bench, is_tiny: bool, mut told: impl FnMut(Figure)) {
    let shape = |case: Case| if is_tiny { case.shrunk() } else { case };
    of_searches(bench, shape, &mut told);
    of_parts(bench, is_tiny, told);
}

fn table() -> String {
    let models = [CardRates::H100, CardRates::H200].map(|rates| Arc::new(Modelled::new(rates)));
    let [of_h100, of_h200] = models.map(|model| {
        let mut all = Vec::new();
        figures(&Bench::of_model(model), false, |figure| all.push(figure));
        all
    });
    let mut table = String::from(
        "| figure | MB moved | million multiply-adds | launches, copies | H100, model | H200, model | aim |\n|---|---|---|---|---|---|---|\n",
    );
    for (a, b) in of_h100.iter().zip(&of_h200) {
        let (Demand { bytes, again, .. }, [launches, copies]) = (b.demand, b.asked);
        let operations = operations(&b.demand);
        let reached = |figure: &Figure| if figure.is_reached { "" } else { ", missed" };
        writeln!(
            table,
            "| {} | {} and {} from caches | {} | {}, {} | {}{} | {}{} | {} |",
            b.what,
            grouped(bytes / 1_000_000),
            grouped(again / 1_000_000),
            grouped(operations / 1_000_000),
            launches,
            copies,
            a.said,
            reached(a),
            b.said,
            reached(b),
            b.aim
        )
        .unwrap();
    }
    let [a, b] = [CardRates::H100, CardRates::H200].map(|rates| of_a_swap(&rates).0);
    writeln!(table, "| a version that comes under load, by what its bytes take of the memory's | | | | {a} | {b} | p99 at most 1.2 × steady |")
        .unwrap();
    table
}

fn operations(demand: &Demand) -> u64 {
    demand.dp4a + demand.tensor_int8 + demand.tensor_bf16 + demand.tensor_tf32 + demand.single
}

/// The figures themselves, for a machine with a card, by `scripts/gpu-check.sh`; on the emulation over few items, so that it is known to run.
#[test]
fn floors_of_the_figures() {
    let is_tiny = device().kind() == "emulated";
    let bench = Bench::new(is_tiny);
    println!("\n| figure | aim | {} |\n|---|---|---|", bench.device.name());
    figures(&bench, is_tiny, |Figure { what, aim, said, is_reached, .. }| {
        println!("| {what} | {aim} | {said}{} |", if is_reached { "" } else { ", missed" });
    });
    side_by_side(&bench, if is_tiny { PASS.shrunk() } else { PASS }, if is_tiny { 2 } else { 1000 });
}

/// Each figure a few times, for a profiler of kernels, under which all takes long.
#[test]
fn floors_once() {
    let is_tiny = device().kind() == "emulated";
    let mut bench = Bench::new(is_tiny);
    bench.runs = 1;
    figures(&bench, is_tiny, |_| {});
}

/// Passes on two lanes at once, and passes while a version comes.
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
            of.pass(&lane, &vectors, &case.asked(&layers))
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
        "| {} | p50 below 1 ms | p50 {:.0} µs, p99 {:.0} µs; two lanes at once {:.0} queries/s |",
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

#[test]
fn the_model_of_every_figure_stands_in_the_documents() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/GPU.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let table = table();
    let begin = page.find("| figure | MB moved |").expect("docs/GPU.md holds the table of figures");
    let end = page[begin..].find("\n\n").map_or(page.len(), |end| begin + end + 1);
    if std::env::var_os("STERLING_BLESS").is_some() {
        std::fs::write(&path, [&page[..begin], &table, &page[end..]].concat()).unwrap();
    } else {
        assert_eq!(page[begin..end], table, "STERLING_BLESS=1 writes docs/GPU.md anew");
    }
}

/// What launches say that they compute is about what kernels do, as the emulation counts it, where lists and candidates are as many as the
/// host takes them to be.
#[test]
fn launches_compute_what_they_say() {
    let driver = emulated();
    let device = sterling::cuda::Device::over(driver.clone());
    let of = Catalogue::in_lists(&device, 64 * 64, 64).unwrap();
    let layers = Layers::new(&device, Form::Pairs).unwrap();
    let vectors = Random::new(2).numbers(20 * DIMENSION);
    for (probes, filters, batch) in [(16, 0, 3), (64, 0, 20)] {
        let asked = Asked { probes, k0: 128, k: 50, filters, layers: Some(&layers) };
        let [said_before, did_before] = driver.demand();
        of.pass(&device, &vectors[..batch * DIMENSION], &asked).unwrap();
        let [said, did] = driver.demand();
        type Kind = fn(&Demand) -> u64;
        // Of single precision it is not said what bins of scores take.
        let kinds: [(Kind, &str, f64); 4] = [
            (|t| t.dp4a, "dp4a", 1.0),
            (|t| t.tensor_int8, "bytes by tensor cores", 1.0),
            (|t| t.tensor_bf16, "bf16 by tensor cores", 1.0),
            (|t| t.single, "single precision", 2.0),
        ];
        for (kind, what, more) in kinds {
            let (said, did) = (kind(&said) - kind(&said_before), kind(&did) - kind(&did_before));
            let is_near = did as f64 <= more * said as f64 && said as f64 <= 1.3 * did as f64;
            assert!(is_near, "{what}, {probes} probes: {said} said, {did} counted");
            assert!(did > 0 || (probes < 64 && what == "bytes by tensor cores"), "{what} is not among them");
        }
    }
    let (single, count) = (Layers::new(&device, Form::Single).unwrap(), 130);
    let input = device.zeros(2 * count * 256).unwrap();
    let counts = device.copy(&[count as u32; 2]).unwrap();
    let [said_before, did_before] = driver.demand();
    single.run(&device, RowsOf { counts: &counts, most: count }, &input).unwrap();
    let [said, did] = driver.demand();
    assert!(did.tensor_tf32 > did_before.tensor_tf32);
    assert_eq!(said.tensor_tf32 - said_before.tensor_tf32, did.tensor_tf32 - did_before.tensor_tf32);
}
