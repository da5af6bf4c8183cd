//! `sterling score`.

use std::path::PathBuf;
use std::thread::available_parallelism;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use super::output::say;
use super::store::{StoreArgs, local_path};
use sterling_batch::jobs::{self, JobFolder};
use sterling_batch::{JobSettings, ProblemLimit, Questions, Scorer, Task};
use sterling_core::error::{Error, Result};
use sterling_kernels::priority::Background;
use sterling_serving::registry::{Loader as _, Snapshots};
use sterling_snapshot::sandbox::{ProcessSandbox, SandboxMode};
use sterling_snapshot::{Manifest, Placement, Store};

/// Arguments of `sterling score`.
#[derive(Debug, clap::Args)]
pub(super) struct Score {
    /// Model, or a version as NAME@VERSION; default: the newest
    #[arg(long)]
    model: String,
    /// Files or folders of users, JSON lines or Parquet: an `id` and the fields of a `:retrieve` body each
    /// (docs/guide/offline-scoring.md)
    #[arg(long = "in", value_name = "PATH", required = true, num_args = 1.., value_parser = local_path())]
    inputs: Vec<PathBuf>,
    /// Output folder: one Parquet file per file of users
    #[arg(long, value_name = "DIR", value_parser = local_path())]
    out: PathBuf,
    /// Default fields of rows, as a JSON object such as {"k": 50, "columns": ["name"]}
    #[arg(long, value_name = "JSON", default_value = "{}")]
    request: String,
    /// Rank the items of each row (fields of a `:rank` body) instead of retrieving
    #[arg(long, conflicts_with = "items")]
    rank: bool,
    /// Rows are items, as for `publish`: write the vectors of the item tower
    #[arg(long)]
    items: bool,
    #[command(flatten)]
    store: StoreArgs,
    /// Tolerated invalid rows, as a number or a share such as 0.5%; with more, the job fails with exit code 2 and
    /// without _SUCCESS.json
    #[arg(long, value_name = "N", default_value = "0")]
    max_problems: ProblemLimit,
    /// Threads; default: one per core
    #[arg(long)]
    threads: Option<usize>,
    /// Score only this file, by number from 0; for one of several workers
    #[arg(long, value_name = "N", conflicts_with = "units")]
    unit: Option<usize>,
    /// Read file numbers from standard input and answer each with a line on standard output, as a worker of a
    /// processing engine
    #[arg(long, value_name = "-", value_parser = ["-"])]
    units: Option<String>,
}

impl Score {
    pub(super) fn run(self) -> Result<()> {
        sterling_telemetry::start_logs(false);
        let store = self.store.existing()?;
        let (model, version) = chosen(&store, &self.model)?;
        let held = store.ensure_local(&model, version)?;
        let folder = held.folder();
        let task = match (self.rank, self.items) {
            (true, _) => Task::Rank,
            (_, true) => Task::Items,
            _ => Task::Retrieve,
        };
        let questions = Questions::parse(task, &self.request)?;
        let digest = Manifest::read(folder)?.digest();
        let requested = JobSettings { task, model, version, digest, request: questions.canonical() };
        let job = JobFolder::open(&self.out, requested, self.inputs)?;
        job.reopen()?;
        let is_whole = self.unit.is_none() && self.units.is_none();
        if is_whole {
            job.check_all()?;
        }
        let trials = SandboxMode::ProcessSandbox(ProcessSandbox::of_this_program()?);
        let loader = Snapshots { placement: Placement::default(), trials, recorded: 0 };
        let view = loader.load(folder, Background::Steady)?.view();
        let threads = self.threads.unwrap_or_else(|| available_parallelism().map_or(1, usize::from));
        let scorer = Scorer::new(view, questions, threads)?;
        if let Some(unit) = self.unit {
            scorer.order(&job, unit)?;
        } else if self.units.is_some() {
            let order = |unit| scorer.order(&job, unit);
            let served = jobs::serve(job.units().len(), order, std::io::stdin().lock(), std::io::stdout().lock());
            // The worker that finishes last finds no units left and completes the job.
            return served.and(job.finish(self.max_problems).map(drop));
        } else {
            all(&job, &scorer)?;
        }
        match job.finish(self.max_problems)? {
            Some(counts) => {
                let (rows, scored, invalid) = (counts.rows, counts.scored, counts.invalid());
                say(format_args!("{rows} rows: {scored} scored, {invalid} with a problem"))
            }
            None => say(format_args!("{} files are left", job.left().len())),
        }
    }
}

/// Resolves `NAME` or `NAME@VERSION` to a version.
fn chosen(store: &Store, text: &str) -> Result<(String, u64)> {
    let (name, version) = text.split_once('@').map_or((text, None), |(name, version)| (name, Some(version)));
    let published = store.versions(name)?;
    let wanted = match version {
        Some(version) => version.parse().ok(),
        None => published.last().copied(),
    };
    wanted.filter(|version| published.contains(version)).map(|version| (name.to_owned(), version)).ok_or_else(|| {
        let known = published.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let known = if known.is_empty() { "none".into() } else { known };
        Error::not_found(format!("model `{text}`: not in {}; versions of `{name}`: {known}", store.name()))
    })
}

/// Scores the remaining files. A failed file does not stop the scoring of other files.
fn all(job: &JobFolder<JobSettings>, scorer: &Scorer) -> Result<()> {
    let (units, left) = (job.units(), job.left());
    let total: u64 = left.iter().map(|&unit| units[unit].sum.bytes).sum();
    let bar = ProgressBar::new(total);
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {percent:>3}% {elapsed} left {eta}") {
        bar.set_style(style);
    }
    let (mut before, mut failed, start) = (0, Vec::new(), Instant::now());
    for &unit in &left {
        bar.set_message(format!("file {} of {}", unit + 1, units.len()));
        let scored = scorer.score(job, unit, &|bytes| bar.set_position(before + bytes));
        before += units[unit].sum.bytes;
        match scored {
            Ok(counts) if bar.is_hidden() => {
                let seconds = start.elapsed().as_secs_f64();
                let to_go = seconds * (total - before) as f64 / before.max(1) as f64;
                let (rows, scored) = (counts.rows, counts.scored);
                tracing::info!(
                    "file {} of {}: {scored} of {rows} rows scored, {to_go:.0} s left",
                    unit + 1,
                    units.len()
                );
            }
            Ok(_) => {}
            Err(e) => {
                tracing::error!("file {} of {}: {e}", unit + 1, units.len());
                failed.push(e);
            }
        }
    }
    bar.finish_and_clear();
    let (count, of) = (failed.len(), left.len());
    match failed.into_iter().next() {
        Some(e) if count > 1 => Err(e.within(format!("{count} of {of} files failed, first"))),
        Some(e) => Err(e),
        None => Ok(()),
    }
}
