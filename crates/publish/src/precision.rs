//! Precision of a model that leaves its precision open: bf16 if that hardly changes answers to sample requests, otherwise f32.
//!
//! The version answers each request in both precisions. In bf16 the version must return at least the fraction [`OVERLAP`] of the
//! items that it returns in f32, and the package's golden answers within their tolerance. Without requests, or if the publishing
//! processor does not support bf16 products, f32 is chosen, with the reason.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use super::calibrate::spread;
use crate::warmup;
use sterling_api::{Retrievals, retrievals};
use sterling_core::error::{Error, Result};
use sterling_core::request::{Content, Ranked, Request, Retrieve, User};
use sterling_core::units::Slot;
use sterling_graph::dense::Precision;
use sterling_graph::tower::Threads;
use sterling_kernels::cpu::Kernels;
use sterling_serving::pass::{self, Cpu};
use sterling_serving::view::View;
use sterling_snapshot::model::{AskedPrecision, DecidedPrecision, Decisions, Package, WARMUP_FILE};
use sterling_snapshot::{Manifest, Placement, REQUESTS_FILE, Snapshot};

/// Maximum number of sample requests.
const REQUESTS_MAX: usize = 64;
/// Minimum fraction of the items returned in f32 that must be returned in bf16 too.
const OVERLAP: f64 = 0.98;

/// Sample request: a line of the warm-up or of the sample requests, or an item's vector.
enum Sample {
    Body(String),
    Item(Vec<f32>),
}

/// Comparison of the answers in two precisions.
#[derive(Default)]
struct Compared {
    requests: usize,
    returned: usize,
    kept: usize,
    /// Largest score difference, relative to the largest score of its request.
    largest_difference: f32,
}

/// Chooses the precision of the version in `folder`, which is complete except for its manifest, if the model leaves the precision
/// open.
///
/// # Errors
/// The error in a request, with its line; errors of loading the version.
pub(super) fn decide(
    package: &Package,
    folder: &Path,
    manifest: &Manifest,
    faithful: bool,
) -> Result<Option<DecidedPrecision>> {
    if package.spec.precision != AskedPrecision::Auto {
        return Ok(None);
    }
    let in_f32 = |reason: String| Ok(Some(DecidedPrecision { chosen: Precision::F32, reason }));
    if !Kernels::best().has_bf16() {
        return in_f32(format!("not measured: kernels {} have no products of bf16", Kernels::best().name()));
    }
    let single = load(folder, manifest, Precision::F32)?;
    let samples = samples(package, &single)?;
    if samples.is_empty() {
        return in_f32(format!("not measured: no sample requests, expected {REQUESTS_FILE} or {WARMUP_FILE}"));
    }
    let narrow = load(folder, manifest, Precision::Bf16)?;
    let mut compared = Compared::default();
    for sample in &samples {
        compared.add(&answer(&single, sample)?, &answer(&narrow, sample)?);
    }
    let measured = compared.to_string();
    if manifest.files.contains_key(WARMUP_FILE) {
        let text = warmup::read(&folder.join(WARMUP_FILE))?;
        if let Err(e) = warmup::fill(&text, load_again(folder, manifest, Precision::Bf16)?, faithful) {
            return in_f32(format!("{measured}; a golden answer differs in bf16: {e}"));
        }
    }
    match compared.overlap() >= OVERLAP {
        true => Ok(Some(DecidedPrecision { chosen: Precision::Bf16, reason: measured })),
        false => in_f32(format!("{measured}; expected at least {} % kept", OVERLAP * 100.0)),
    }
}

fn load_again(folder: &Path, manifest: &Manifest, precision: Precision) -> Result<Snapshot> {
    let decided = DecidedPrecision { chosen: precision, reason: String::new() };
    let decisions = Decisions { precision: Some(decided), ..manifest.decisions.clone() };
    Manifest { decisions, ..manifest.clone() }.write(folder)?;
    Snapshot::load(folder, &Placement::default())
}

fn load(folder: &Path, manifest: &Manifest, precision: Precision) -> Result<Arc<View>> {
    Ok(Arc::new(View::new(Arc::new(load_again(folder, manifest, precision)?))))
}

/// Returns the package's sample requests and its warm-up requests; or item vectors, if the model accepts vectors.
fn samples(package: &Package, view: &View) -> Result<Vec<Sample>> {
    let mut samples = Vec::new();
    for file in [WARMUP_FILE, REQUESTS_FILE] {
        let path = package.folder().join(file);
        if !path.exists() {
            continue;
        }
        let text = fs::read_to_string(&path).map_err(|e| Error::io(path.display(), e))?;
        let lines: Vec<&str> = text.lines().collect();
        for n in spread(lines.len(), REQUESTS_MAX) {
            let line = if file == WARMUP_FILE { warmup::request(lines[n]) } else { Ok(lines[n].to_owned()) };
            samples.push(Sample::Body(line.map_err(|e| e.within(format!("{file} line {}", n + 1)))?));
        }
    }
    if samples.is_empty() && !package.needs_features() {
        let index = &view.main().index;
        let slots: Vec<Slot> = index.filled_slots().collect();
        samples.extend(spread(slots.len(), REQUESTS_MAX).map(|n| {
            let mut vector = vec![0.0; index.dimension()];
            index.row(slots[n], &mut vector);
            Sample::Item(vector.repeat(package.spec.query_count()))
        }));
    }
    Ok(samples)
}

fn answer(view: &Arc<View>, sample: &Sample) -> Result<Ranked> {
    let request = match sample {
        Sample::Item(vector) => Retrieve::of(User::Vector(vector.clone())),
        Sample::Body(body) => match retrievals(body.as_bytes())? {
            Retrievals::One(request, ..) => *request,
            Retrievals::Many(_) => return Err(Error::invalid("got a list of requests, expected one request per line")),
        },
    };
    let prepared = [pass::prepare(view, Request::Retrieve(request))?];
    match pass::run(&mut Cpu::new(Threads::new(1)), &prepared, None).pop() {
        Some(Ok(answer)) => match answer.content {
            Content::Items(ranked) => Ok(ranked),
            Content::Embedding(_) | Content::Selected(_) => {
                Err(Error::internal("a retrieval was answered without its items"))
            }
        },
        Some(Err(e)) => Err(e),
        None => Err(Error::internal("the pass did not answer a request")),
    }
}

impl Compared {
    fn add(&mut self, single: &Ranked, narrow: &Ranked) {
        let most = single.scores.iter().fold(f32::MIN_POSITIVE, |most, score| most.max(score.abs()));
        self.requests += 1;
        self.returned += single.ids.len();
        for (id, score) in single.ids.iter().zip(&single.scores) {
            let Some(at) = narrow.ids.iter().position(|other| other == id) else { continue };
            self.kept += 1;
            self.largest_difference = self.largest_difference.max((narrow.scores[at] - score).abs() / most);
        }
    }

    fn overlap(&self) -> f64 {
        if self.returned == 0 { 1.0 } else { self.kept as f64 / self.returned as f64 }
    }
}

impl std::fmt::Display for Compared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "in bf16, {} sample requests keep {:.2} % of the items they return in f32, scores differ by at most {:.2} % of the largest",
            self.requests,
            self.overlap() * 100.0,
            self.largest_difference * 100.0
        )
    }
}
