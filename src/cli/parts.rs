//! `sterling parts`.

use std::path::PathBuf;

use super::output::say;
use super::publish::{recipe, shown};
use super::size::size;
use super::store::local_path;
use super::trial::SandboxArgs;
use sterling_batch::jobs;
use sterling_core::error::Result;
use sterling_publish::parts::{self, Assigning, Cutting, Embedding, PartCounts};
use sterling_publish::{Plan, Progress, Source};

/// Arguments of `sterling parts`.
#[derive(Debug, clap::Args)]
pub(super) struct Parts {
    #[command(subcommand)]
    step: Step,
}

#[derive(Debug, clap::Subcommand)]
enum Step {
    /// Step 1: embed the items of each file; one file is one unit.
    Embed(Embed),
    /// Step 2, once: train the centroids on a sample of all units.
    Train(Train),
    /// Step 3: assign each item to a list, unit by unit; then `publish --parts`.
    Assign(Assign),
    /// Step 4, for shards: build each shard as one unit; then `publish --parts --shards`.
    Cut(Cut),
}

#[derive(Debug, clap::Args)]
struct Embed {
    /// Model package, as for `publish`; without it, --name publishes an embedding-only model
    #[arg(required_unless_present = "name", conflicts_with = "name", value_parser = local_path())]
    package: Option<PathBuf>,
    /// Name of an embedding-only model
    #[arg(long)]
    name: Option<String>,
    /// Items: a folder of Parquet or JSON-lines files, one unit each; default: items.parquet or items.jsonl of the
    /// package
    #[arg(long, value_parser = local_path())]
    items: Option<PathBuf>,
    /// Item vectors of all files, one row per item, as .npy
    #[arg(long, value_parser = local_path())]
    vectors: Option<PathBuf>,
    /// Index recipe; default: the values of indexes/default.toml
    #[arg(long, value_parser = local_path())]
    index: Option<PathBuf>,
    /// Memory for vectors and columns of a file, such as 6GiB; default: most of the free memory
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    /// Folder of the parts, shared by all workers
    #[arg(long, value_name = "DIR", value_parser = local_path())]
    out: PathBuf,
    #[command(flatten)]
    sandbox: SandboxArgs,
    #[command(flatten)]
    which: UnitArgs,
}

#[derive(Debug, clap::Args)]
struct Train {
    /// Folder of the parts
    #[arg(value_parser = local_path())]
    parts: PathBuf,
}

#[derive(Debug, clap::Args)]
struct Assign {
    /// Folder of the parts
    #[arg(value_parser = local_path())]
    parts: PathBuf,
    #[command(flatten)]
    which: UnitArgs,
}

#[derive(Debug, clap::Args)]
struct Cut {
    /// Folder of the parts
    #[arg(value_parser = local_path())]
    parts: PathBuf,
    /// Number of shards
    #[arg(long, value_name = "S")]
    shards: u32,
    /// Calibration queries, the same as for `publish`
    #[arg(long, value_name = "FILE", value_parser = local_path())]
    queries: Option<PathBuf>,
    /// Memory limit, such as 6GiB; default: most of the free memory
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    #[command(flatten)]
    which: UnitArgs,
}

/// Selection of the units that a worker processes.
#[derive(Debug, clap::Args)]
struct UnitArgs {
    /// Process only this unit, from 0; for one of several workers
    #[arg(long, value_name = "N", conflicts_with = "units")]
    unit: Option<usize>,
    /// Read unit numbers from standard input and answer each with a line on standard output, as a worker of a
    /// processing engine
    #[arg(long, value_name = "-", value_parser = ["-"])]
    units: Option<String>,
}

impl Parts {
    pub(super) fn run(self) -> Result<()> {
        sterling_telemetry::start_logs(false);
        match self.step {
            Step::Embed(step) => {
                let plan = Plan {
                    recipe: recipe(step.index.as_deref())?,
                    memory_bytes: step.memory,
                    trials: step.sandbox.trials()?,
                    ..Plan::new(Source::of(step.package, step.name, step.items, step.vectors)?)
                };
                let worker = Embedding::open(&step.out, &plan)?;
                step.which.run(("file", "embedded"), worker.units(), |unit, progress| worker.embed(unit, progress))
            }
            Step::Train(step) => {
                let is_new = shown(|progress| parts::train(&step.parts, progress))?;
                say(format_args!("{}", if is_new { "trained" } else { "trained before" }))
            }
            Step::Assign(step) => {
                let worker = Assigning::open(&step.parts)?;
                step.which.run(("file", "assigned"), worker.units(), |unit, progress| worker.assign(unit, progress))
            }
            Step::Cut(step) => {
                let worker = Cutting::open(&step.parts, step.shards, step.queries, step.memory)?;
                step.which.run(("shard", "cut"), worker.units(), |unit, progress| worker.cut(unit, progress))
            }
        }
    }
}

impl UnitArgs {
    /// Processes the selected units, or all units, and prints the results.
    fn run(
        &self,
        (unit, done): (&str, &str),
        units: usize,
        step: impl Fn(usize, &Progress<'_>) -> Result<Option<PartCounts>>,
    ) -> Result<()> {
        if self.units.is_some() {
            let order = |unit| step(unit, &|_, _, _| ());
            return jobs::serve(units, order, std::io::stdin().lock(), std::io::stdout().lock());
        }
        let chosen: Vec<usize> = self.unit.map_or_else(|| (0..units).collect(), |unit| vec![unit]);
        let (mut made, mut items, mut failed, of) = (0, 0, None, chosen.len());
        for number in chosen {
            match shown(|progress| step(number, progress)) {
                Ok(counts) => {
                    made += usize::from(counts.is_some());
                    items += counts.map_or(0, |counts| counts.items);
                }
                // A failed unit does not stop the other units.
                Err(e) => {
                    if of > 1 {
                        tracing::error!("{unit} {} of {units}: {e}", number + 1);
                    }
                    failed.get_or_insert(e);
                }
            }
        }
        match failed {
            Some(e) => Err(e),
            None => say(format_args!("{made} {unit}s {done}, {items} items; {} were done before", of - made)),
        }
    }
}
