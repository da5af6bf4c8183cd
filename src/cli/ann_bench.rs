//! `sterling ann-bench`: benchmarks the item index alone on `.npy` files, with one JSON line per measurement.
//!
//! 1. Items (and attributes) become an index in a temporary folder: built, encoded and opened like a snapshot.
//! 2. For each number of results and of probes, and for each filter, all queries run once; the first batch runs twice, and the time
//!    of its first run is discarded. Each thread takes a part of a batch through the production search
//!    ([`sterling_index::search`]), with as many candidates as results. The time includes parsing and planning the filter for each
//!    part.
//! 3. With `--codes` the index has first-pass codes; `--selected` sets how many candidates the codes select without a filter; 0
//!    scans int8 rows instead. For a target recall, the calibration chooses the number.
//! 4. With `--recall` the index is calibrated as in a publication, and the calibration chooses the number of lists per target.
//! 5. With `--cheapest` the smallest number of lists that reaches the same recall, one number for all queries, is found by
//!    bisection.
//! 6. Results are compared with the exact answers: recall is the fraction of the true K items that was returned.

use std::path::{Path, PathBuf};
use std::time::Instant;

use rayon::prelude::*;
use serde_json::json;

use super::output::say;
use sterling_core::error::{Error, Result};
use sterling_core::limits;
use sterling_core::tasks;
use sterling_core::tensor::Matrix;
use sterling_core::units::Slot;
use sterling_index::columns::{self, Columns, ItemColumn, ItemValues};
use sterling_index::filter;
use sterling_index::ivf::{self, CodeKind, FirstPass, Rescore};
use sterling_index::search::{self, Catalogue, Found, Segment, Sink};
use sterling_kernels::priority;
use sterling_publish::calibrate;
use sterling_snapshot::{Calibration, SearchGoal};
use sterling_storage::files::TensorFile;
use sterling_storage::npy;
use sterling_storage::rows::RowStore;

/// Maximum number of search threads.
const THREADS_MAX: usize = 4096;
/// Maximum number of queries searched at once.
const BATCH_MAX: usize = 65_536;
/// Tolerance under a filter: the mean recall of the queries must reach the target, and the recall of the worst query may be below
/// the target by at most this number.
const WORST_BELOW: f64 = 0.05;
/// Factor to which the smallest sufficient number of lists is determined.
const CHEAPEST_STEP: f64 = 1.03;
/// Maximum number of results of a filtered query, which is the length of the exact answers of filters.
const FILTERED_MOST: usize = 1000;

/// Arguments of `sterling ann-bench`.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct AnnBench {
    /// Item vectors, `.npy` `[N, D]`.
    #[arg(long)]
    items: PathBuf,
    /// Query vectors, `.npy` `[Q, D]`.
    #[arg(long)]
    queries: PathBuf,
    /// Exact answers, `.npy` `[Q, at least K]`, best first, padded with -1.
    #[arg(long)]
    truth: PathBuf,
    /// Number of inverted lists; 0: automatic.
    #[arg(long, default_value_t = 0)]
    lists: usize,
    /// Numbers of probed lists (nprobe).
    #[arg(long, value_delimiter = ',', default_value = "8,32")]
    probes: Vec<usize>,
    /// Target recalls, in addition to --probes.
    #[arg(long, value_delimiter = ',')]
    recall: Vec<f64>,
    /// Calibration queries, `.npy` `[Q, D]`; default: items with noise.
    #[arg(long, requires = "recall")]
    calibrate_queries: Option<PathBuf>,
    /// Also measure the fewest lists that reach each recall for these queries: on average, and under a filter for the
    /// worst query within 0.05.
    #[arg(long, requires = "recall")]
    cheapest: bool,
    /// Number of results (K).
    #[arg(long, value_delimiter = ',', default_value = "100,1000")]
    k: Vec<usize>,
    /// Search threads; the build uses all cores.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Queries per batch.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Number of queries; 0: all.
    #[arg(long, default_value_t = 200)]
    queries_count: usize,
    /// Type of the rescoring rows: none, bf16, f16 or f32.
    #[arg(long, default_value = "none", value_parser = rescore)]
    rescore: Rescore,
    /// First-pass codes: none, pq4, rabitq or auto; they need rescoring rows.
    #[arg(long, default_value = "none", value_parser = codes)]
    codes: CodeKind,
    /// Subspaces of the codes, a multiple of 8; 0: automatic.
    #[arg(long, default_value_t = 0, requires = "codes")]
    subspaces: usize,
    /// Candidates that the codes select with --probes: a number, or a multiple of the results (`1.5x`); 0 scans int8
    /// rows.
    #[arg(long, value_delimiter = ',', default_value = "0", requires = "codes", value_parser = selected)]
    selected: Vec<Selected>,
    /// Integer attributes of the items, `.npy` `[N, F]`; the columns are features f0, f1, ...
    #[arg(long, requires = "filters")]
    attributes: Option<PathBuf>,
    /// Filters, `{"NAME": {"expression": "f0:1"}}`; exact answers are read from `truth_NAME.npy` in the folder of
    /// --truth.
    #[arg(long, requires = "attributes")]
    filters: Option<PathBuf>,
    /// Seed of the build.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn rescore(text: &str) -> std::result::Result<Rescore, String> {
    serde_json::from_value(json!(text)).map_err(|_| "expected none, bf16, f16 or f32".into())
}

fn codes(text: &str) -> std::result::Result<CodeKind, String> {
    serde_json::from_value(json!(text)).map_err(|_| "expected none, pq4, rabitq or auto".into())
}

fn selected(text: &str) -> std::result::Result<Selected, String> {
    let found = match text.strip_suffix('x') {
        Some(times) => times.parse().ok().filter(|times| (1.0..1e4).contains(times)).map(Selected::Times),
        None => text.parse().ok().map(Selected::Count),
    };
    found.ok_or_else(|| "expected a number, or 1 to 10000 with an x, as a multiple of the results".into())
}

/// Number of candidates that codes select.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Selected {
    Count(usize),
    /// A multiple of the number of results.
    Times(f64),
}

impl Selected {
    /// Returns the number of candidates for `k` results.
    fn of(self, k: usize) -> usize {
        match self {
            Selected::Count(count) => count,
            Selected::Times(times) => (k as f64 * times) as usize,
        }
    }
}

/// Matrix of integers.
struct Integers {
    values: Vec<i64>,
    cols: usize,
}

impl Integers {
    fn read(path: &Path, rows: usize) -> Result<Self> {
        let (values, found, cols) = npy::read_i64(path)?;
        if found < rows || cols == 0 {
            return Err(Error::invalid(format!("{}: [{found}, {cols}], expected {rows} rows", path.display())));
        }
        Ok(Integers { values, cols })
    }

    fn row(&self, row: usize) -> &[i64] {
        &self.values[row * self.cols..(row + 1) * self.cols]
    }
}

/// Parts of a snapshot that the benchmark measures.
struct Subject {
    index: ivf::Index,
    order: Vec<u32>,
    columns: Columns,
    filter: filter::Index,
    calibration: Option<Calibration>,
}

/// Search thread with its buffers and the results of its queries.
#[derive(Default)]
struct Searcher {
    scratch: search::Scratch,
    results: Results,
}

/// Result slots per query, and the summed counters of all queries.
#[derive(Default)]
struct Results {
    slots: Vec<Vec<Slot>>,
    counters: ivf::Counters,
}

impl Sink for Results {
    fn is_wanted(&mut self, _: usize) -> bool {
        true
    }

    fn found(&mut self, n: usize, found: Found<'_>) {
        self.slots[n].extend(found.candidates.iter().map(|(_, slot)| *slot));
        self.counters.add(&found.counters);
    }
}

/// Source of the number of probed lists.
#[derive(Clone, Copy)]
enum ProbeSource {
    Probes(usize),
    Recall(f64),
    /// This number of probed lists, also under a filter.
    Just(usize),
    /// This number of probed lists, with candidates selected by codes.
    Codes(usize, Selected),
}

/// Parameters of a search.
struct Probed<'a> {
    probes: usize,
    ending: Option<ivf::Ending<'a>>,
    by_codes: Option<usize>,
    by_int8: usize,
}

/// Parameters of a measurement.
#[derive(Clone, Copy)]
struct Run<'a> {
    asked: ProbeSource,
    /// True to find and measure the smallest number of lists that reaches the recall, in place of the calibrated number.
    cheapest: bool,
    k: usize,
    filter: Option<(&'a str, &'a str)>,
}

impl AnnBench {
    /// Runs the benchmark and writes one JSON line per measurement to standard output.
    ///
    /// # Errors
    /// Unreadable or inconsistent files, invalid options.
    pub(super) fn run(self) -> Result<()> {
        self.check()?;
        let (queries, count, width) = npy::read_f32(&self.queries)?;
        let used = if self.queries_count == 0 { count } else { self.queries_count.min(count) };
        if used == 0 {
            return Err(Error::invalid(format!(
                "{}: the file has no queries, expected at least one",
                self.queries.display()
            )));
        }
        let queries = Matrix::new(&queries[..used * width], width)?;
        let truth = Integers::read(&self.truth, used)?;
        let filters = self.filters.as_deref().map(read_filters).transpose()?.unwrap_or_default();
        let subject = build(&self, width)?;
        let pool = priority::pool(&tasks::ANN_BENCH, self.threads)?;
        let mut searchers: Vec<Searcher> = (0..self.threads).map(|_| Searcher::default()).collect();
        let mut measure = |run: Run<'_>, truth: &Integers| {
            pool.install(|| {
                let mut bench = Bench { arguments: &self, subject: &subject, queries, searchers: &mut searchers };
                let (run, outcome) = match run.asked {
                    ProbeSource::Recall(target) if run.cheapest => bench.cheapest(&run, target, truth)?,
                    _ => (run, bench.outcome(&run, truth)?),
                };
                bench.print_run(&run, &outcome)
            })
        };
        let asked = self.probes.iter().flat_map(|&probes| {
            self.selected.iter().map(move |&selected| match selected {
                Selected::Count(0) => ProbeSource::Probes(probes),
                selected => ProbeSource::Codes(probes, selected),
            })
        });
        let recalls = self.recall.iter().copied().map(ProbeSource::Recall);
        let cheapest = recalls.clone().filter(|_| self.cheapest).map(|asked| (asked, true));
        // Runs with `cheapest` search many times and so warm the caches. They come first, so that the runs with
        // calibrated numbers of lists, to which they are compared, find warm caches too.
        let asked = asked.map(|asked| (asked, false)).chain(cheapest).chain(recalls.map(|asked| (asked, false)));
        let asked: Vec<(ProbeSource, bool)> = asked.collect();
        for &k in &self.k {
            for &(asked, cheapest) in &asked {
                measure(Run { asked, cheapest, k, filter: None }, &truth)?;
            }
        }
        let k = self.k.iter().copied().max().unwrap_or(FILTERED_MOST).min(FILTERED_MOST);
        for (name, expression) in &filters {
            let truth = Integers::read(&self.truth.with_file_name(format!("truth_{name}.npy")), used)?;
            for &(asked, cheapest) in &asked {
                measure(Run { asked, cheapest, k, filter: Some((name, expression)) }, &truth)?;
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        let several = [("probes", &self.probes, limits::LISTS_MAX), ("k", &self.k, limits::RESULTS_MAX)];
        let single = [("threads", self.threads, THREADS_MAX), ("batch", self.batch, BATCH_MAX)];
        let singles = single.map(|(name, value, most)| (name, vec![value], most));
        let all = several.into_iter().chain(singles.iter().map(|(name, values, most)| (*name, values, *most)));
        if let Some(recall) = self.recall.iter().find(|recall| !limits::RECALLS.contains(recall)) {
            let (least, most) = (limits::RECALLS.start(), limits::RECALLS.end());
            return Err(Error::invalid(format!("--recall: got {recall}, expected {least} to {most}")));
        }
        for (name, values, most) in all {
            if let Some(value) = values.iter().find(|&&v| v == 0 || v > most) {
                return Err(Error::invalid(format!("--{name}: got {value}, expected 1 to {most}")));
            }
        }
        Ok(())
    }
}

fn read_filters(path: &Path) -> Result<Vec<(String, String)>> {
    let text = std::fs::read(path).map_err(|e| Error::io(path.display(), e))?;
    let reported: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&text).map_err(|e| Error::invalid(format!("{}: {e}", path.display())).caused_by(e))?;
    reported
        .into_iter()
        .map(|(name, filter)| match filter.get("expression").and_then(|e| e.as_str()) {
            Some(expression) => Ok((name, expression.to_owned())),
            None => Err(Error::invalid(format!("{}: filter `{name}` has no `expression`", path.display()))),
        })
        .collect()
}

/// Returns the columns of a matrix as integer columns f0, f1, ...
fn item_columns(path: &Path, items: usize) -> Result<Vec<ItemColumn>> {
    let attributes = Integers::read(path, items)?;
    let column = |c: usize| ItemColumn {
        name: format!("f{c}"),
        filter: true,
        values: ItemValues::Integers {
            offsets: (0..=items as u32).collect(),
            values: (0..items).map(|row| attributes.row(row)[c]).collect(),
        },
    };
    Ok((0..attributes.cols).map(column).collect())
}

fn build(arguments: &AnnBench, width: usize) -> Result<Subject> {
    let (items, rows, cols) = npy::read_f32(&arguments.items)?;
    if cols != width {
        return Err(Error::invalid(format!(
            "{}: rows of {cols} numbers, expected {width} numbers as in {}",
            arguments.items.display(),
            arguments.queries.display()
        )));
    }
    let attributes =
        arguments.attributes.as_deref().map(|path| item_columns(path, rows)).transpose()?.unwrap_or_default();
    build_subject(Matrix::new(&items, cols)?, &attributes, arguments)
}

/// Builds the index, columns and filter of the items, in memory as in production.
fn build_subject(items: Matrix<'_>, attributes: &[ItemColumn], arguments: &AnnBench) -> Result<Subject> {
    let options = ivf::Options {
        lists: arguments.lists,
        seed: arguments.seed,
        rescore: arguments.rescore,
        first_pass: FirstPass { codes: arguments.codes, subspaces: arguments.subspaces },
        ..ivf::Options::default()
    };
    let items = RowStore::from(items);
    let started = Instant::now();
    let survey = ivf::RowSurvey::of(&items)?;
    let stated = ivf::Sizes::of(&survey, &options)?.bytes();
    let bar = indicatif::ProgressBar::new(ivf::steps(&survey, &options)? as u64);
    let mut built = ivf::build(&items, &survey, &options, &|n| bar.inc(n as u64))?;
    bar.finish_and_clear();
    built.sort_lists(&columns::likeness(attributes, &[], items.rows())?);
    let tensors = built.in_memory(&items, "index")?;
    let build_s = started.elapsed().as_secs_f64();
    let index = ivf::Index::open(&tensors)?;
    drop(tensors);
    let filter_started = Instant::now();
    let mut file = TensorFile::new();
    columns::encode(attributes, &built.order, &mut file)?;
    let columns = Columns::open(&file.in_memory("columns")?, built.order.len())?;
    let mut file = TensorFile::new();
    filter::encode(&columns, &built.list_offsets, &built.list_lengths, &filter::Options::default(), &mut file)?;
    let (offsets, lengths) = (index.list_offsets(), index.list_lengths());
    let filter = filter::Index::open(&file.in_memory("filter")?, offsets, lengths, columns.terms())?;
    let lengths = index.list_lengths();
    // Imbalance as defined by Faiss: the work of a random probe, relative to its work if all lists had equal length.
    let squares: f64 = lengths.iter().map(|&n| f64::from(n).powi(2)).sum();
    let imbalance = squares * lengths.len() as f64 / (index.items() as f64).powi(2);
    say(json!({
        "peer": "sterling", "version": env!("CARGO_PKG_VERSION"), "kernel": index.kernel(), "lists": index.lists(),
        "longest_list": lengths.iter().max(), "imbalance": round(imbalance, 3),
        "build_s": round(build_s, 2), "filter_build_s": round(filter_started.elapsed().as_secs_f64(), 2),
        "stated_bytes": stated, "bytes": index.bytes(),
        "bytes_per_item": round((index.bytes() + filter.bytes()) as f64 / index.items() as f64, 1),
        "filter_bytes_per_item": round(filter.bytes() as f64 / index.items() as f64, 1),
    }))?;
    let calibration = if arguments.recall.is_empty() { None } else { Some(calibrated(&index, arguments)?) };
    Ok(Subject { index, order: built.order, columns, filter, calibration })
}

/// Calibrates the index as a publication does.
fn calibrated(index: &ivf::Index, arguments: &AnnBench) -> Result<Calibration> {
    let started = Instant::now();
    let queries = match &arguments.calibrate_queries {
        Some(path) => calibrate::Queries::of_matrix(path, index)?,
        None => calibrate::Queries::of_items(index, arguments.seed),
    };
    let calibration = calibrate::measure(index, &queries, arguments.seed, &|_, _| ());
    say(json!({
        "calibrate_s": round(started.elapsed().as_secs_f64(), 2), "queries": calibration.queries,
        "source": calibration.source, "curves": calibration.curves,
    }))?;
    Ok(calibration)
}

fn round(x: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (x * scale).round() / scale
}

/// Benchmark with its inputs and threads.
struct Bench<'a> {
    arguments: &'a AnnBench,
    subject: &'a Subject,
    queries: Matrix<'a>,
    searchers: &'a mut [Searcher],
}

/// Result of a measurement.
#[derive(Default)]
struct Outcome {
    /// Search time of each batch in seconds.
    seconds: Vec<f64>,
    hits: usize,
    wanted: usize,
    /// Recall of the worst query.
    worst: f64,
    counters: ivf::Counters,
}

impl Outcome {
    fn recall(&self) -> f64 {
        self.hits as f64 / self.wanted.max(1) as f64
    }

    /// Returns whether the queries reach a recall; with a filter, also whether each query nearly reaches it.
    fn reaches(&self, target: f64, filtered: bool) -> bool {
        self.recall() >= target && (!filtered || self.worst >= target - WORST_BELOW)
    }
}

impl Bench<'_> {
    fn outcome(&mut self, run: &Run<'_>, truth: &Integers) -> Result<Outcome> {
        let Bench { arguments, subject, queries, .. } = *self;
        let mut outcome = Outcome { worst: 1.0, ..Outcome::default() };
        let (mut at, mut warm) = (0, false);
        while at < queries.rows() {
            let end = (at + arguments.batch).min(queries.rows());
            let part = Matrix::new(&queries.data()[at * queries.cols()..end * queries.cols()], queries.cols())?;
            let started = Instant::now();
            search(subject, part, run, self.searchers)?;
            let took = started.elapsed().as_secs_f64();
            if !warm {
                warm = true;
                continue;
            }
            outcome.seconds.push(took);
            self.searchers.iter().for_each(|searcher| outcome.counters.add(&searcher.results.counters));
            for (query, slots) in (at..end).zip(self.searchers.iter().flat_map(|searcher| &searcher.results.slots)) {
                let row = truth.row(query);
                let mut wanted: Vec<i64> = row[..run.k.min(row.len())].iter().copied().filter(|&t| t >= 0).collect();
                wanted.sort_unstable();
                let found = |s: &&Slot| wanted.binary_search(&i64::from(subject.order[s.index()])).is_ok();
                let right = slots.iter().filter(found).count();
                outcome.worst = outcome.worst.min(right as f64 / wanted.len().max(1) as f64);
                outcome.hits += right;
                outcome.wanted += wanted.len();
            }
            at = end;
        }
        Ok(outcome)
    }

    /// Finds the smallest number of lists, the same for all queries, that reaches a recall.
    fn cheapest<'r>(&mut self, run: &Run<'r>, target: f64, truth: &Integers) -> Result<(Run<'r>, Outcome)> {
        let just = |lists| Run { asked: ProbeSource::Just(lists), ..*run };
        let (mut fewer, mut enough) = (0, self.subject.index.lists());
        let mut found = self.outcome(&just(enough), truth)?;
        while enough > fewer + 1 && enough as f64 > fewer as f64 * CHEAPEST_STEP {
            let middle = (((fewer.max(1) * enough) as f64).sqrt() as usize).clamp(fewer + 1, enough - 1);
            let outcome = self.outcome(&just(middle), truth)?;
            if outcome.reaches(target, run.filter.is_some()) {
                (enough, found) = (middle, outcome);
            } else {
                fewer = middle;
            }
        }
        Ok((just(enough), found))
    }

    fn print_run(&self, run: &Run<'_>, outcome: &Outcome) -> Result<()> {
        let (arguments, index) = (self.arguments, &self.subject.index);
        let (probes, target) = match run.asked {
            ProbeSource::Probes(probes) | ProbeSource::Just(probes) | ProbeSource::Codes(probes, _) => {
                (Some(probes), None)
            }
            ProbeSource::Recall(recall) => (None, Some(recall)),
        };
        let count = self.queries.rows();
        let mean = |n: u64| round(n as f64 / count as f64, 1);
        let mut seconds = outcome.seconds.clone();
        let complete: f64 = seconds.iter().sum();
        seconds.sort_by(f64::total_cmp);
        let percentile = |p: f64| round(1e3 * seconds[((seconds.len() - 1) as f64 * p).round() as usize], 3);
        let kind = match index.rows() {
            ivf::WideRows::None => "int8",
            ivf::WideRows::Bf16(_) => "int8+bf16",
            ivf::WideRows::F16(_) => "int8+f16",
            ivf::WideRows::F32(_) => "int8+f32",
        };
        let counters = &outcome.counters;
        say(json!({
            "peer": "sterling", "kind": kind, "kernel": index.kernel(), "lists": index.lists(), "probes": probes, "target": target,
            "cheapest": run.cheapest, "k": run.k, "threads": arguments.threads, "batch": arguments.batch,
            "filter": run.filter.map(|f| f.0), "qps": round(count as f64 / complete, 1),
            "p50_ms": percentile(0.5), "p99_ms": percentile(0.99), "recall": round(outcome.recall(), 4),
            "worst_recall": round(outcome.worst, 4),
            "mask_ms": 0, "bytes_per_item": round(index.bytes() as f64 / index.items() as f64, 1),
            "lists_probed": mean(counters.lists), "items_scanned": mean(counters.items),
            "selected_by_codes": self.subject.searched(run)?.by_codes, "survivors": mean(counters.survivors), "bytes_read": mean(counters.bytes),
        }))
    }
}

/// Searches a batch, split over the threads; each thread stores the results of its queries in their order.
fn search(subject: &Subject, queries: Matrix<'_>, run: &Run<'_>, searchers: &mut [Searcher]) -> Result<()> {
    searchers.iter_mut().for_each(|searcher| searcher.results = Results::default());
    let numbers = queries.rows().div_ceil(searchers.len()) * queries.cols();
    let parts = queries.data().par_chunks(numbers).zip(searchers);
    parts.try_for_each(|(part, searcher)| searcher.search(subject, Matrix::new(part, queries.cols())?, run))
}

impl Subject {
    /// Returns the parameters of a search without filter.
    fn searched(&self, run: &Run<'_>) -> Result<Probed<'_>> {
        self.probing(run.asked, run.k.min(self.index.items()), if run.filter.is_some() { 0.0 } else { 1.0 })
    }

    /// Returns the number of lists for `candidates` candidates, the termination rule of a filtered search, and the number of
    /// candidates that codes select.
    fn probing(&self, asked: ProbeSource, candidates: usize, pass_rate: f64) -> Result<Probed<'_>> {
        let probed = |probes, by_codes| Probed { probes, ending: None, by_codes, by_int8: 0 };
        match (asked, &self.calibration) {
            (ProbeSource::Probes(probes) | ProbeSource::Just(probes), _) => Ok(probed(probes, None)),
            (ProbeSource::Codes(probes, selected), _) => Ok(probed(probes, Some(selected.of(candidates)))),
            (ProbeSource::Recall(recall), Some(calibration)) => {
                let wanted = SearchGoal { candidates, pass_rate, recall };
                let chosen = calibration.choose(wanted, self.index.items(), self.index.lists());
                let ending = ivf::Ending { margins: &calibration.margins, recall, left: chosen.left };
                let (by_codes, by_int8) = (chosen.by_codes, chosen.by_int8);
                Ok(Probed { probes: chosen.probes, ending: Some(ending), by_codes, by_int8 })
            }
            (ProbeSource::Recall(_), None) => Err(Error::internal("a recall target needs a calibration")),
        }
    }
}

impl Searcher {
    fn search(&mut self, subject: &Subject, queries: Matrix<'_>, run: &Run<'_>) -> Result<()> {
        let Subject { index, columns, filter, .. } = subject;
        let expression = run.filter.map_or("", |(_, expression)| expression);
        let plan = filter::Plan::new(&filter::parse(expression)?.canonical(), columns, filter, index.slots_max())?;
        let k0 = run.k.min(index.items());
        let Probed { probes, ending, by_codes, by_int8 } = subject.probing(run.asked, k0, plan.pass_rate())?;
        let query = |n: usize| search::Query {
            vector: queries.row(n),
            search: search::SearchPlan { k: run.k, k0, by_codes, by_int8, probes, ..search::SearchPlan::default() },
            plan: &plan,
            beside: &[],
            excluded: &[],
            ending,
        };
        let queries: Vec<search::Query<'_>> = (0..queries.rows()).map(query).collect();
        self.results.slots.resize(queries.len(), Vec::new());
        let probes_max = if let ProbeSource::Just(_) = run.asked { probes } else { index.lists() };
        let segment = Segment { index, filter, ids: None, tombstones: None, first_slot: 0 };
        let catalogue = Catalogue { segments: &[segment], probes_max };
        catalogue.search(&queries, &mut self.scratch, &mut self.results);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        arguments: AnnBench,
    }

    fn write<T: bytemuck::Pod>(folder: &Path, name: &str, descr: &str, cols: usize, values: &[T]) {
        let rows = values.len() / cols;
        let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({rows}, {cols}), }}\n");
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((text.len() as u16).to_le_bytes());
        bytes.extend(text.as_bytes());
        bytes.extend(bytemuck::cast_slice::<T, u8>(values));
        std::fs::write(folder.join(name), bytes).unwrap();
    }

    /// Writes 300 unit vectors in a quarter of the circle, eight of them as queries, with exact answers over all items
    /// and over every third item.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let vector = |n: usize| [(n as f32 / 200.0).cos(), (n as f32 / 200.0).sin()];
        let items: Vec<f32> = (0..300).flat_map(vector).collect();
        let queries: Vec<f32> = (0..8).flat_map(|q| vector(q * 37)).collect();
        let best = |keep: &dyn Fn(usize) -> bool| -> Vec<i32> {
            let of_query = |query: usize| {
                let mut order: Vec<usize> = (0..300).filter(|&n| keep(n)).collect();
                order.sort_by_key(|&n| n.abs_diff(query * 37));
                order.into_iter().take(20).map(|n| n as i32).collect::<Vec<_>>()
            };
            (0..8).flat_map(of_query).collect()
        };
        let attributes: Vec<i8> = (0..300).flat_map(|n| [(n % 3) as i8, (n % 7) as i8]).collect();
        write(folder.path(), "items.npy", "<f4", 2, &items);
        write(folder.path(), "queries.npy", "<f4", 2, &queries);
        write(folder.path(), "truth.npy", "<i4", 20, &best(&|_| true));
        write(folder.path(), "truth_third.npy", "<i4", 20, &best(&|n| n % 3 == 0));
        write(folder.path(), "attributes.npy", "|i1", 2, &attributes);
        std::fs::write(folder.path().join("filters.json"), r#"{"third": {"expression": "f0:0"}}"#).unwrap();
        std::fs::write(folder.path().join("broken.json"), r#"{"third": {"expression": "f0:0 AND"}}"#).unwrap();
        std::fs::write(folder.path().join("nameless.json"), r#"{"third": {}}"#).unwrap();
        folder
    }

    fn run(folder: &Path, rest: &[&str]) -> Result<()> {
        let mut line = vec!["ann-bench".to_owned()];
        for name in ["items", "queries", "truth"] {
            line.extend([format!("--{name}"), folder.join(format!("{name}.npy")).display().to_string()]);
        }
        // An argument that is a file name in the folder is replaced by its path.
        line.extend(rest.iter().map(|&word| match folder.join(word) {
            path if path.is_file() => path.display().to_string(),
            _ => word.to_owned(),
        }));
        Line::try_parse_from(line).map_err(|e| Error::invalid(e.to_string()))?.arguments.run()
    }

    #[test]
    fn measurements_run_with_every_option() {
        let folder = folder();
        let filters = ["--attributes", "attributes.npy", "--filters", "filters.json"];
        for more in [
            &["--lists", "4", "--probes", "1,4", "--k", "3,500"][..],
            &["--batch", "3", "--threads", "2", "--rescore", "f16"],
            &["--batch", "5", "--queries-count", "0", "--rescore", "none"],
            &["--lists", "16", "--recall", "0.9", "--cheapest"],
            &["--lists", "8", "--rescore", "f16", "--codes", "rabitq", "--selected", "2x"],
            &["--lists", "8", "--rescore", "f16", "--codes", "pq4", "--selected", "0,20,400,1.5x", "--recall", "0.9"],
        ] {
            run(folder.path(), more).unwrap();
            run(folder.path(), &[more, &filters].concat()).unwrap();
        }
    }

    #[test]
    fn unmeasurable_options_are_rejected_with_the_reason() {
        let folder = folder();
        for (rest, reason) in [
            (&["--probes", "0"][..], "--probes: got 0"),
            (&["--k", "0"], "--k: got 0"),
            (&["--k", "100001"], "--k: got 100001"),
            (&["--threads", "0"], "--threads: got 0"),
            (&["--batch", "0"], "--batch: got 0"),
            (&["--lists", "301"], "301 lists for 300 items"),
            (&["--cheapest"], "--recall"),
            (&["--rescore", "f8"], "expected none, bf16, f16 or f32"),
            (&["--codes", "pq8"], "expected none, pq4, rabitq or auto"),
            (&["--codes", "pq4"], "expected rows to rescore the candidates that the codes find"),
            (&["--codes", "pq4", "--selected", "0.5x"], "expected a number, or 1 to 10000 with an x"),
            (&["--codes", "pq4", "--rescore", "f16", "--subspaces", "16"], "subspaces: got 16 for 2 dimensions"),
            (&["--attributes", "attributes.npy"], "--filters"),
            (&["--attributes", "truth.npy", "--filters", "filters.json"], "expected 300 rows"),
            (&["--attributes", "attributes.npy", "--filters", "items.npy"], "items.npy"),
            (&["--attributes", "attributes.npy", "--filters", "nameless.json"], "`third` has no `expression`"),
            (&["--attributes", "attributes.npy", "--filters", "broken.json"], "filter"),
        ] {
            let error = run(folder.path(), rest).unwrap_err().to_string();
            assert!(error.contains(reason), "{rest:?}: {error}");
        }
    }
}
