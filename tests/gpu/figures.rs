//! The figures that a card is to be held against, as a model has them: the launches that a pass asks for, with what they say that they
//! move and compute, over the rates of cards. `docs/GPU.md` holds the table; `STERLING_BLESS=1` writes it anew.

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

use sterling::device::cpu::dense::Form;
use sterling::device::cpu::pool::RowFormat;
use sterling::device::cuda::Demand;
use sterling::device::cuda::modelled::{CardRates, Modelled};
use sterling::device::cuda::ops::steps::RowsOf;

use crate::emulation::{Random, emulated};
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

fn searched(model: &Arc<Modelled>, case: &Case) -> Took {
    let bench = Bench::of_model(model.clone());
    let of = Catalogue::in_lists(&bench.device, case.items, case.lists).unwrap();
    let layers = Layers::new(&bench.device, Form::Pairs).unwrap();
    let vectors = Random::new(2).numbers(case.batch * DIMENSION);
    let &Case { probes, k0, k, filters, reranks, .. } = case;
    let asked = Asked { probes, k0, k, filters, layers: reranks.then_some(&layers) };
    bench.median(|lane| of.pass(lane, &vectors, &asked))
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

fn of_searches(model: &Arc<Modelled>) -> Vec<Figure> {
    let scan =
        Case { items: 20_000_000, lists: 8192, probes: 32, batch: 16, k0: 2048, k: 2048, filters: 1, reranks: false };
    let pass = Case { items: 10_000_000, lists: 4096, probes: 24, k0: 1024, k: 100, filters: 0, reranks: true, ..scan };
    let many = Case { items: 80_000_000, lists: 16_384, probes: 64, batch: 64, filters: 64, ..pass };
    let some = Case { items: 10_000_000, lists: 4096, ..many };
    let mut figures = Vec::new();

    let took = searched(model, &scan);
    let of_kernel = took.spent.kernels["scan_lists"];
    let share = 100.0 * of_kernel.demand.bytes as f64 / model.rates().copied / of_kernel.seconds;
    figures.push(Figure {
        what: format!("scan behind a filter alone: {}", named(&scan)),
        aim: "70 % of the bandwidth of a copy",
        said: format!("{share:.0} %"),
        is_reached: share >= 70.0,
        demand: of_kernel.demand,
        asked: [of_kernel.launches, 0],
    });
    for (case, aim, most) in [(&pass, "p50 below 1 ms", 1000.0), (&scan, "0.25 ms", 250.0)] {
        let took = searched(model, case);
        let (said, is_reached) = (format!("{:.0} µs", took.micros), took.micros <= most);
        figures.push(Figure::of(format!("whole pass: {}", named(case)), aim, (said, is_reached), &took));
    }
    for (case, aim, least) in [(&many, "10,000 queries/s", 1e4), (&some, "40,000 queries/s", 4e4)] {
        let took = searched(model, case);
        let rate = 1e6 * case.batch as f64 / took.micros;
        let (said, is_reached) = (format!("{} queries/s", grouped(rate as u64)), rate >= least);
        figures.push(Figure::of(format!("whole pass: {}", named(case)), aim, (said, is_reached), &took));
    }
    figures
}

fn of_parts(model: &Arc<Modelled>) -> Vec<Figure> {
    let bench = Bench::of_model(model.clone());
    let mut figures = Vec::new();
    for (form, aim, most) in [(Form::Pairs, "60 µs a query", 60.0), (Form::Single, "", f64::MAX)] {
        let (took, _) = reranked(&bench, form, (16, 10_000));
        let each = took.micros / 16.0;
        let how = if form == Form::Pairs { "bf16" } else { "f32" };
        let what = format!("reranker 256-512-256 in {how} of K0 = 10,000, batch 16");
        figures.push(Figure::of(what, aim, (format!("{each:.0} µs a query"), each <= most), &took));
    }
    for format in [RowFormat::F32, RowFormat::Int8] {
        let (took, moved) = lookup(&bench, format, (4_000_000, 65_536));
        let of_kernel = took.spent.kernels.values().next().unwrap();
        let share = 100.0 * moved as f64 / model.rates().copied / of_kernel.seconds;
        let what = format!("pooled lookups, 65,536 bags of 32 rows of 64 numbers, {format:?}");
        let aim = "70 % of the bandwidth of a copy";
        figures.push(Figure::of(what, aim, (format!("{share:.0} %"), share >= 70.0), &took));
    }
    for (wanted, format) in [(3_000, RowFormat::Int8), (65_536, RowFormat::F32)] {
        let (took, _) = fetched(&bench, format, (4_000_000, wanted));
        let what = format!("{} rows of 64 numbers from the host, {format:?}", grouped(wanted as u64));
        figures.push(Figure::of(what, "", (format!("{:.0} µs", took.micros), true), &took));
    }
    figures
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

fn table() -> String {
    let models = [CardRates::H100, CardRates::H200].map(|rates| Arc::new(Modelled::new(rates)));
    let [of_h100, of_h200] =
        [&models[0], &models[1]].map(|model| of_searches(model).into_iter().chain(of_parts(model)).collect::<Vec<_>>());
    let mut table = String::from(
        "| figure | MB moved | million multiply-adds | launches, copies | H100, model | H200, model | aim | measured |\n|---|---|---|---|---|---|---|---|\n",
    );
    for (a, b) in of_h100.iter().zip(&of_h200) {
        let (Demand { bytes, again, .. }, [launches, copies]) = (b.demand, b.asked);
        let operations = operations(&b.demand);
        let reached = |figure: &Figure| if figure.is_reached { "" } else { ", missed" };
        writeln!(
            table,
            "| {} | {} and {} from caches | {} | {}, {} | {}{} | {}{} | {} | not run on a GPU |",
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
    writeln!(table, "| a version that comes under load, by what its bytes take of the memory's | | | | {a} | {b} | p99 at most 1.2 × steady | not run on a GPU |")
        .unwrap();
    table
}

fn operations(demand: &Demand) -> u64 {
    demand.dp4a + demand.tensor_int8 + demand.tensor_bf16 + demand.tensor_tf32 + demand.single
}

#[test]
fn the_model_of_every_figure_stands_in_the_documents() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/GPU.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let table = table();
    let begin = page.find("| figure |").expect("docs/GPU.md holds the table of figures");
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
    let device = sterling::device::cuda::Device::over(driver.clone());
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
