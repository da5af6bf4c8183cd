//! `sterling score`.

use std::io::{BufRead, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::available_parallelism;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use super::output::say;
use super::publish::existing;
use crate::error::{Error, Result};
use crate::registry::{Loader as _, Snapshots};
use crate::scoring::{Counts, Defaults, Job, JobFolder, Scorer, Unit};
use crate::snapshot::{Manifest, Placement, Store};
use crate::telemetry;
use crate::trial::{Apart, Trials};

/// Arguments of `sterling score`.
#[derive(Debug, clap::Args)]
pub(super) struct Score {
    /// The model, or one version of it, as NAME@VERSION; the newest one where none is named
    #[arg(long)]
    model: String,
    /// Files of users, JSON lines: an `id` and the fields of a `:retrieve` body each (docs/SCORE.md)
    #[arg(long = "in", value_name = "FILE", required = true, num_args = 1..)]
    inputs: Vec<PathBuf>,
    /// Where the recommendations go: a Parquet file for each file of users
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Fields that rows get that do not say, as a JSON object such as {"k": 50, "columns": ["name"]}
    #[arg(long, value_name = "JSON", default_value = "{}")]
    request: String,
    /// Where versions are published
    #[arg(long, default_value = "store")]
    store: PathBuf,
    /// Threads that run passes; one a core where it is not given
    #[arg(long)]
    threads: Option<usize>,
    /// Score only the file of this number, from 0 up: what one of several workers does
    #[arg(long, value_name = "N", conflicts_with = "units")]
    unit: Option<usize>,
    /// Read the numbers of files from standard input, and answer each with a line on standard output: the worker of an engine
    #[arg(long, value_name = "-", value_parser = ["-"])]
    units: Option<String>,
}

impl Score {
    pub(super) fn run(self) -> Result<()> {
        telemetry::start_logs(false);
        let store = existing(self.store)?;
        let (name, version) = chosen(&store, &self.model)?;
        let folder = store.folder(&name, version);
        let defaults = Defaults::parse(&self.request)?;
        let units = self.inputs.into_iter().map(Unit::of).collect::<Result<Vec<_>>>()?;
        let job = Job {
            model: name,
            version,
            digest: Manifest::read(&folder)?.digest(),
            defaults: defaults.canonical(),
            units,
        };
        let folder_of_job = JobFolder::open(&self.out, job)?;
        let trials = Trials::Apart(Apart::of_this_program()?);
        let loader = Snapshots { placement: Placement::default(), trials, recorded: 0 };
        let view = loader.load(&folder)?.view();
        let threads = self.threads.unwrap_or_else(|| available_parallelism().map_or(1, usize::from));
        let scorer = Scorer::new(view, defaults, threads)?;
        match (self.unit, self.units) {
            (Some(unit), _) => one(&folder_of_job, &scorer, unit).map(drop)?,
            (None, Some(_)) => return serve_units(&folder_of_job, &scorer),
            (None, None) => all(&folder_of_job, &scorer)?,
        }
        finish(&folder_of_job)
    }
}

/// The version that `NAME` or `NAME@VERSION` means.
fn chosen(store: &Store, text: &str) -> Result<(String, u64)> {
    let (name, version) = text.split_once('@').map_or((text, None), |(name, version)| (name, Some(version)));
    let published = store.versions(name)?;
    let wanted = match version {
        Some(version) => version.parse().ok(),
        None => published.last().copied(),
    };
    wanted.filter(|version| published.contains(version)).map(|version| (name.to_owned(), version)).ok_or_else(|| {
        let known = published.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        Error::not_found(format!("model `{text}`: not in {}; versions of `{name}`: {known}", store.root().display()))
    })
}

/// Scores a unit that has no output yet; the counts of what was done now.
fn one(folder: &JobFolder, scorer: &Scorer, unit: usize) -> Result<Option<Counts>> {
    let count = folder.job().units.len();
    if unit >= count {
        return Err(Error::invalid(format!("unit {unit}: there are {count} files, expected 0 to {}", count - 1)));
    }
    match folder.left().contains(&unit) {
        true => scorer.score(folder, unit, &|_| ()).map(Some),
        false => Ok(None),
    }
}

fn all(folder: &JobFolder, scorer: &Scorer) -> Result<()> {
    let units = &folder.job().units;
    let left = folder.left();
    let total: u64 = left.iter().map(|&unit| units[unit].sum.bytes).sum();
    let bar = Arc::new(ProgressBar::new(total));
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {percent:>3}% {elapsed} left {eta}") {
        bar.set_style(style);
    }
    let mut before = 0;
    for unit in left {
        bar.set_message(format!("file {} of {}", unit + 1, units.len()));
        scorer.score(folder, unit, &|bytes| bar.set_position(before + bytes))?;
        before += units[unit].sum.bytes;
    }
    bar.finish_and_clear();
    Ok(())
}

/// Scores the units whose numbers come in, a line each, until there are no more.
fn serve_units(folder: &JobFolder, scorer: &Scorer) -> Result<()> {
    let mut failed = None;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| Error::io("standard input", e))?;
        let wrong = |_| Error::invalid(format!("unit `{line}`: expected the number of a file"));
        let scored = line.trim().parse().map_err(wrong).and_then(|unit| Ok((unit, one(folder, scorer, unit)?)));
        let told = match &scored {
            Ok((unit, Some(counts))) => json!({"unit": unit, "done": true, "counts": counts}),
            Ok((unit, None)) => json!({"unit": unit, "done": true}),
            Err(e) => json!({"unit": line.trim(), "done": false, "error": e.to_string()}),
        };
        say(&told)?;
        std::io::stdout().flush().map_err(|e| Error::io("standard output", e))?;
        failed = scored.err().or(failed);
    }
    failed.map_or(Ok(()), Err)
}

fn finish(folder: &JobFolder) -> Result<()> {
    match folder.finish()? {
        Some(Counts { rows, scored, problems }) => {
            let wrong: u64 = problems.values().sum();
            say(format_args!("{rows} rows: {scored} scored, {wrong} with a problem"))
        }
        None => say(format_args!("{} files are left", folder.left().len())),
    }
}
