//! `sterling publish`.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use indicatif::{ProgressBar, ProgressStyle};

use super::output::say;
use super::size::size;
use super::store::{StoreArgs, local_path};
use super::trial::SandboxArgs;
use sterling_core::error::{Error, Kind, Result};
use sterling_embedding::tiers::remote::{Cluster, ClusterOptions};
use sterling_publish::{Output, Plan, Remote, Source, Stage};
use sterling_snapshot::{CALIBRATION_FILE, Calibration, Manifest, PARTS_FILE, Recipe, Store};

/// Arguments of `sterling publish`.
#[derive(Debug, clap::Args)]
pub(super) struct Publish {
    /// Model package, a folder with a model.toml; without it, --name and --items or --faiss publish an embedding-only
    /// model
    #[arg(required_unless_present_any = ["name", "parts"], conflicts_with = "name", value_parser = local_path())]
    package: Option<PathBuf>,
    /// Name of an embedding-only model
    #[arg(long)]
    name: Option<String>,
    /// Items, as Parquet or JSON lines; default: items.parquet or items.jsonl of the package
    #[arg(long, value_parser = local_path())]
    items: Option<PathBuf>,
    /// Item vectors, one row per item, as .npy
    #[arg(long, value_parser = local_path())]
    vectors: Option<PathBuf>,
    /// Faiss IVF index, whose lists are retained; --items then adds attributes by id
    #[arg(long, requires = "name", conflicts_with = "vectors", value_parser = local_path())]
    faiss: Option<PathBuf>,
    /// Index recipe; default: the values of indexes/default.toml
    #[arg(long, value_parser = local_path())]
    index: Option<PathBuf>,
    /// Folder of items embedded and assigned by `sterling parts`, instead of package, items and recipe
    /// (docs/guide/shards.md)
    #[arg(long, value_name = "DIR", conflicts_with_all = ["package", "name", "items", "vectors", "faiss", "index"], value_parser = local_path())]
    parts: Option<PathBuf>,
    /// Calibration queries: vectors as .npy, or one `:retrieve` body per line; default: queries.jsonl of the package,
    /// else items with noise
    #[arg(long, value_name = "FILE", value_parser = local_path())]
    queries: Option<PathBuf>,
    /// Sequence number of the last update contained in the items; the server applies later ones
    /// (docs/guide/updates.md). With --shards one per shard, comma-separated
    #[arg(long, value_name = "N", value_delimiter = ',')]
    position: Vec<u64>,
    /// Number of document shards, by item id; trained once (docs/guide/shards.md)
    #[arg(long, value_name = "S")]
    shards: Option<u32>,
    /// Memory limit, such as 6GiB or 800MB; vectors beyond it are read from disk repeatedly (docs/guide/items.md).
    /// Default: most of the free memory
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    #[command(flatten)]
    sandbox: SandboxArgs,
    #[command(flatten)]
    store: StoreArgs,
    /// Also upload table rows to the Redis or Valkey Cluster of this node, such as redis://10.0.0.1:6379; repeatable
    #[arg(long, value_name = "URL", conflicts_with = "shards")]
    remote: Vec<String>,
    /// Table to upload; repeatable; default: all tables that the user tower reads
    #[arg(long, value_name = "TABLE", requires = "remote")]
    remote_table: Vec<String>,
}

impl Publish {
    pub(super) fn run(self) -> Result<()> {
        sterling_telemetry::start_logs(false);
        let plan = match (&self.parts, self.faiss, self.name) {
            (Some(parts), ..) => sterling_publish::parts::publication(parts)?,
            (None, Some(index), Some(name)) => {
                let source = Source::Faiss { name, index, items: self.items };
                Plan { recipe: recipe(self.index.as_deref())?, ..Plan::new(source) }
            }
            (None, _, name) => {
                let source = Source::of(self.package, name, self.items, self.vectors)?;
                Plan { recipe: recipe(self.index.as_deref())?, ..Plan::new(source) }
            }
        };
        let remote = match self.remote.is_empty() {
            true => None,
            false => Some(Remote { cluster: connect(self.remote)?, tables: self.remote_table }),
        };
        let output = match (self.shards, &self.position[..]) {
            (Some(count), _) => Output::Shards { count, positions: self.position },
            (None, [] | [_]) => Output::Whole { position: self.position.first().copied().unwrap_or(0), remote },
            (None, several) => {
                return Err(Error::invalid(format!("position: got {} positions, expected one", several.len())));
            }
        };
        let plan =
            Plan { queries: self.queries, output, trials: self.sandbox.trials()?, memory_bytes: self.memory, ..plan };
        let store = self.store.open()?;
        let (name, version) = publish(&store, &plan)?;
        let reported = match plan.output {
            Output::Shards { .. } => {
                print_shards(&store, &name, version).and_then(|()| calibrated(&store, &name, version))
            }
            Output::Whole { .. } => {
                print_version(&store, &name, version).and_then(|()| replayed(&store, &name, version))
            }
        };
        match reported {
            // The publication has succeeded even if the version cannot be read back.
            Err(e) if matches!(e.kind(), Kind::NotFound | Kind::NotReady | Kind::Unavailable) => {
                tracing::warn!(error = %e, "the published version could not be read back");
                say(format_args!("published {name} version {version}"))
            }
            reported => reported,
        }
    }
}

/// Prints a version that was published without shards.
fn print_version(store: &Store, name: &str, version: u64) -> Result<()> {
    let manifest = store.manifest(name, version)?;
    say(format_args!(
        "published {name} version {version}: {} items in {} lists, {:.1} MB, {:.1} s",
        manifest.items,
        manifest.lists,
        manifest.bytes() as f64 / 1e6,
        manifest.provenance.seconds,
    ))?;
    manifest.graphs.iter().flatten().try_for_each(|(file, record)| say(format_args!("  {file} {record}")))?;
    decisions(&manifest)?;
    calibrated(store, name, version)
}

/// Prints a note if the new version states that it contains no updates of the log, but an earlier version contains
/// some.
fn replayed(store: &Store, name: &str, version: u64) -> Result<()> {
    if store.manifest(name, version)?.position > 0 {
        return Ok(());
    }
    let earlier = store.versions(name)?.into_iter().rev().filter(|&other| other < version);
    // The position of an earlier version that cannot be read is unknown, so that version is skipped.
    let position = earlier.filter_map(|other| store.manifest(name, other).ok()).map(|m| m.position).find(|at| *at > 0);
    match position {
        Some(position) => say(format_args!(
            "  contains no updates of the log (an earlier version contains updates up to {position}): a server applies \
             all retained updates over these items; if the items contain these updates, publish with --position"
        )),
        None => Ok(()),
    }
}

/// Prints the source of a version's calibration.
fn calibrated(store: &Store, name: &str, version: u64) -> Result<()> {
    let Some(text) = store.small_file(name, version, CALIBRATION_FILE)? else { return Ok(()) };
    let reported: Calibration =
        serde_json::from_slice(&text).map_err(|e| Error::corrupt(format!("{CALIBRATION_FILE}: {e}")))?;
    say(format_args!("  recall calibrated by {} queries: {}", reported.queries, reported.source))
}

/// Prints a line for a version in shards, and a line for each shard.
pub(super) fn print_shards(store: &Store, name: &str, version: u64) -> Result<()> {
    let (shards, manifests) = store.shards(name, version)?;
    let (count, items) = (shards.shards.len(), shards.items);
    say(format_args!(
        "{name} version {}: {items} items in {count} shards, digest {}",
        shards.version,
        shards.digest()
    ))?;
    shards.shards.iter().zip(&manifests).enumerate().try_for_each(|(shard, (entry, manifest))| {
        let megabytes = manifest.bytes() as f64 / 1e6;
        say(format_args!("  shard {shard}: {} items, {megabytes:.1} MB, digest {}", entry.items, entry.digest))
    })
}

/// Prints the serving decisions that were made at publish time.
pub(super) fn decisions(manifest: &Manifest) -> Result<()> {
    if let Some(decided) = &manifest.decisions.precision {
        say(format_args!("  precision {}: {}", decided.chosen, decided.reason))?;
    }
    if let Some(part) = &manifest.decisions.item_part {
        let bytes = manifest.files.get(PARTS_FILE).map_or(0, |sum| sum.bytes);
        say(format_args!(
            "  item-side values: {} numbers of the reranker in {}, {:.1} MB, by the compiled graph {}",
            part.width,
            part.format.name(),
            bytes as f64 / 1e6,
            part.digest
        ))?;
    }
    Ok(())
}

/// Returns the recipe in a file, or the default recipe.
pub(super) fn recipe(file: Option<&Path>) -> Result<Recipe> {
    Ok(file.map(Recipe::read).transpose()?.unwrap_or_default())
}

/// Connects to the cluster of these nodes.
pub(super) fn connect(nodes: Vec<String>) -> Result<Arc<Cluster>> {
    Cluster::connect(ClusterOptions::new(nodes))
}

/// Publishes a version, with a progress bar on stderr.
pub(super) fn publish(store: &Store, plan: &Plan) -> Result<(String, u64)> {
    shown(|progress| sterling_publish::publish(store, plan, progress))
}

/// Runs an operation with a progress bar on stderr.
pub(super) fn shown<T>(run: impl FnOnce(&sterling_publish::Progress<'_>) -> T) -> T {
    let bar = Progress::new();
    let made = run(&|stage, done, total| bar.show(stage, done, total));
    bar.bar.finish_and_clear();
    made
}

struct Progress {
    bar: ProgressBar,
    stage: Mutex<Option<Stage>>,
}

impl Progress {
    fn new() -> Self {
        let style = ProgressStyle::with_template("{msg:10} {wide_bar} {percent:>3}% {elapsed}");
        let bar = ProgressBar::new(1);
        if let Ok(style) = style {
            bar.set_style(style);
        }
        Progress { bar, stage: Mutex::new(None) }
    }

    fn show(&self, stage: Stage, done: usize, total: usize) {
        let line = match stage {
            Stage::Sized(sizes) => Some(format!("index: {sizes}")),
            Stage::Planned(plan) => Some(format!("memory: {plan}")),
            _ => None,
        };
        if let Some(line) = line {
            // The line is printed above the progress bar; a closed stderr does not prevent the publication.
            let _ = self.bar.suspend(|| writeln!(std::io::stderr().lock(), "{line}"));
            return;
        }
        if let Ok(mut now) = self.stage.lock()
            && *now != Some(stage)
        {
            *now = Some(stage);
            self.bar.reset();
            self.bar.set_length(total as u64);
            self.bar.set_message(format!("{stage:?}").to_lowercase());
        }
        self.bar.set_position(done as u64);
    }
}
