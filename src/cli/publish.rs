//! `sterling publish`.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use indicatif::{ProgressBar, ProgressStyle};

use super::output::say;
use crate::embedding::tiers::remote::{Cluster, ClusterOptions};
use crate::error::{Error, Result};
use crate::publish::{self, Stage, Vectors};
use crate::snapshot::{Manifest, Recipe, Store};
use crate::telemetry;
use crate::trial::{Apart, Trials};

/// Arguments of `sterling publish`.
#[derive(Debug, clap::Args)]
pub(super) struct Publish {
    /// The model package, a folder with a model.toml; without it, --name and --items or --faiss publish an embedding-only
    /// model
    #[arg(required_unless_present = "name", conflicts_with = "name")]
    package: Option<PathBuf>,
    /// The name of an embedding-only model
    #[arg(long)]
    name: Option<String>,
    /// Items, as Parquet or JSON lines; the package's items.parquet where it is not given
    #[arg(long)]
    items: Option<PathBuf>,
    /// Vectors of the items, one row an item, as .npy
    #[arg(long)]
    vectors: Option<PathBuf>,
    /// An IVF index that Faiss wrote: its items keep their lists; --items then adds attributes by id
    #[arg(long, requires = "name", conflicts_with = "vectors")]
    faiss: Option<PathBuf>,
    /// The index recipe; indexes/default.toml holds what is used where it is not given
    #[arg(long)]
    index: Option<PathBuf>,
    /// Queries that tell how many lists a recall takes: vectors as .npy, or a `:retrieve` body a line; the package's
    /// queries.jsonl where it is not given, else items with some noise
    #[arg(long, value_name = "FILE")]
    queries: Option<PathBuf>,
    /// The items contain the updates up to this position; the server applies those after it (docs/UPDATES.md)
    #[arg(long, value_name = "N", default_value_t = 0)]
    position: u64,
    /// Where versions are published
    #[arg(long, default_value = "store")]
    store: PathBuf,
    /// Also bring rows of embedding tables to the Redis or Valkey Cluster of this node, such as redis://10.0.0.1:6379; several
    /// nodes may be given
    #[arg(long, value_name = "URL")]
    remote: Vec<String>,
    /// A table whose rows are brought there; all that the user tower reads where none is given
    #[arg(long, value_name = "TABLE", requires = "remote")]
    remote_table: Vec<String>,
}

impl Publish {
    pub(super) fn run(self) -> Result<()> {
        telemetry::start_logs(false);
        let recipe = self.index.as_deref().map(Recipe::read).transpose()?.unwrap_or_default();
        let what = publish::Publish {
            package: self.package,
            name: self.name,
            items: self.items,
            vectors: self.vectors.map(Vectors::Npy).or(self.faiss.map(Vectors::Faiss)),
            queries: self.queries,
            position: self.position,
            recipe,
            remote: match self.remote.is_empty() {
                true => None,
                false => Some(publish::Remote { cluster: connect(self.remote)?, tables: self.remote_table }),
            },
            trials: Trials::Apart(Apart::of_this_program()?),
        };
        let (name, version, manifest) = publish(&Store::new(self.store), &what)?;
        say(format_args!(
            "published {name} version {version}: {} items in {} lists, {:.1} MB, {:.1} s",
            manifest.items,
            manifest.lists,
            manifest.bytes() as f64 / 1e6,
            manifest.provenance.seconds,
        ))?;
        manifest.graphs.iter().flatten().try_for_each(|(file, record)| say(format_args!("  {file} {record}")))
    }
}

/// The cluster that these nodes are of.
pub(super) fn connect(nodes: Vec<String>) -> Result<Arc<Cluster>> {
    Cluster::connect(ClusterOptions::new(nodes))
}

/// Publishes with a progress bar on stderr.
pub(super) fn publish(store: &Store, what: &publish::Publish) -> Result<(String, u64, Manifest)> {
    let bar = Progress::new();
    let published = publish::publish(store, what, &|stage, done, total| bar.show(stage, done, total));
    bar.bar.finish_and_clear();
    let (name, version) = published?;
    let manifest = Manifest::read(&store.folder(&name, version))?;
    Ok((name, version, manifest))
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
        if let Stage::Sized(sizes) = stage {
            // Beside the bar; a stderr that is closed keeps nothing from being published.
            let _ = self.bar.suspend(|| writeln!(std::io::stderr().lock(), "index: {sizes}"));
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

/// Refuses a store that is not there: most often a typing error, and an empty store would never get ready.
pub(super) fn existing(store: PathBuf) -> Result<Store> {
    match std::fs::metadata(&store) {
        Ok(found) if found.is_dir() => Ok(Store::new(store)),
        Ok(_) => Err(Error::invalid(format!("store {}: expected a folder", store.display()))),
        Err(e) => Err(Error::io(format!("store {}", store.display()), e)),
    }
}
