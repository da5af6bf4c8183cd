//! `sterling train`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::output::say;
use super::publish::{publish, recipe};
use super::store::{StoreArgs, local_path};
use super::trial::SandboxArgs;
use sterling_batch::ProblemLimit;
use sterling_core::error::{Error, Result};
use sterling_cuda::{Choice, Device};
use sterling_publish::{Plan, Source};
use sterling_snapshot::Store;
use sterling_snapshot::model::Package;
use sterling_storage::files;
use sterling_train::{Hosts, Progress, TrainOptions, Trainer, Window};

/// File in the working folder that records the store's newest version before the trained model is published.
const PUBLISHING: &str = "publishing";
/// Interval of progress log lines if stderr is no terminal.
const LOGGED_EVERY: Duration = Duration::from_secs(10);

/// Arguments of `sterling train`.
#[derive(Debug, clap::Args)]
pub(super) struct Train {
    /// The model package, a folder with a model.toml that has [train] (docs/guide/train.md)
    #[arg(value_parser = local_path())]
    package: PathBuf,
    /// Files of events, JSON lines or Parquet, or folders of such, in their order; - reads JSON lines from standard input
    #[arg(long, value_name = "PATH", required = true, num_args = 1.., value_parser = local_path())]
    events: Vec<PathBuf>,
    /// Items, as Parquet or JSON lines; by default the package's items.parquet or items.jsonl
    #[arg(long, value_parser = local_path())]
    items: Option<PathBuf>,
    /// Package to write, which must not exist
    #[arg(long, value_name = "DIR", required_unless_present = "publish", value_parser = local_path())]
    out: Option<PathBuf>,
    /// Publish the trained package to the store
    #[arg(long)]
    publish: bool,
    #[command(flatten)]
    store: StoreArgs,
    /// Index recipe of --publish; indexes/default.toml holds the defaults
    #[arg(long, value_parser = local_path())]
    index: Option<PathBuf>,
    #[command(flatten)]
    sandbox: SandboxArgs,
    /// Folder of checkpoints and rejected events; by default OUT.train, or PACKAGE.train without --out
    #[arg(long, value_name = "DIR", value_parser = local_path())]
    work: Option<PathBuf>,
    /// Passes over the events; only the first pass ranks them
    #[arg(long, value_name = "N", default_value_t = 1)]
    epochs: u64,
    /// Window of events that are shuffled; 0 keeps their order
    #[arg(long, value_name = "N", default_value_t = 0)]
    shuffle: usize,
    /// Seed of negatives and of the order of shuffled events
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Threads of a training step; results do not depend on it
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,
    /// GPU that holds the tables and their optimizer state: cuda:N, auto for a GPU if one works, or cpu. Graphs run on
    /// the CPU
    #[arg(long, default_value = "cpu")]
    device: Choice,
    /// Steps between two checkpoints
    #[arg(long, value_name = "N", default_value_t = 1000)]
    checkpoint_steps: u64,
    /// Rank the events of every N-th batch before training on them; 0 ranks none
    #[arg(long, value_name = "N", default_value_t = 1)]
    judge: u64,
    /// Maximum number of rejected events, or a share such as 0.5%; above it the run ends with exit code 2
    #[arg(long, value_name = "N", default_value = "10%")]
    max_refused: ProblemLimit,
    /// Remove an id from a table with managed ids; repeat the option when the run is resumed
    #[arg(long, value_name = "TABLE=ID", value_parser = forgotten)]
    forget: Vec<(String, i64)>,
    /// Hosts that train together, NAME:PORT each, in the same order on all of them; every host runs the same command. Results do
    /// not depend on their number
    #[arg(long, value_name = "HOST,...", value_delimiter = ',', env = "STERLING_TRAIN_HOSTS")]
    hosts: Vec<String>,
    /// Number of this host among --hosts, from 0; host 0 writes checkpoints and the package
    #[arg(long, value_name = "N", env = "JOB_COMPLETION_INDEX")]
    rank: Option<usize>,
    /// File with a key that all hosts share; without it, every program that reaches the port may join
    #[arg(long, value_name = "FILE", requires = "hosts")]
    hosts_key: Option<PathBuf>,
    /// Seconds of silence after which another host is lost, and the run ends
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    hosts_timeout: u64,
    /// Seconds within which all hosts must have joined
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    join_timeout: u64,
}

/// Parses `TABLE=ID`.
fn forgotten(text: &str) -> std::result::Result<(String, i64), String> {
    let parsed = text.rsplit_once('=').and_then(|(table, id)| Some((table.to_owned(), id.parse().ok()?)));
    parsed.ok_or_else(|| format!("got `{text}`, expected the name of a table, `=` and an id"))
}

impl Train {
    pub(super) fn run(self) -> Result<()> {
        sterling_telemetry::start_logs(false);
        let work = self
            .work
            .clone()
            .unwrap_or_else(|| TrainOptions::work_folder_for(self.out.as_deref().unwrap_or(&self.package)));
        let options = TrainOptions {
            items: self.items.clone(),
            epochs: self.epochs,
            shuffle: self.shuffle,
            seed: self.seed,
            threads: self.threads,
            device: self.device()?,
            checkpoint_steps: self.checkpoint_steps,
            judge: self.judge,
            max_refused: self.max_refused,
            forget: self.forget.clone(),
            hosts: self.hosts()?,
            ..TrainOptions::new(self.events.clone(), &work)
        };
        let is_first = self.rank.is_none_or(|rank| rank == 0) || self.hosts.is_empty();
        if let Some(out) = self.out.as_ref().filter(|_| is_first) {
            options.check_out(out).map_err(|e| Error::conflict(format!("--out {e}")))?;
        }
        let mut trainer = Trainer::open(&self.package, options)?;
        if trainer.resumed_from() > 0 {
            tracing::info!("resuming at step {} from the checkpoint in {}", trainer.resumed_from(), work.display());
        }
        let shown = TrainProgress::new();
        let report = trainer.run(&|progress| shown.show(progress));
        shown.bar.finish_and_clear();
        let report = report?;
        if !is_first {
            // Host 0 writes the package; this call serves the rows of this host to host 0.
            trainer.write(&work)?;
            trainer.clear()?;
            return Ok(());
        }
        if let Some(out) = &self.out {
            trainer.write(out)?;
        }
        if self.publish {
            self.publish(&trainer, &work)?;
        }
        trainer.clear()?;
        if self.publish {
            let mark = work.join(PUBLISHING);
            std::fs::remove_file(&mark).map_err(|e| Error::io(mark.display(), e))?;
            // Removing fails for a folder that is not empty, which therefore stays.
            let _ = std::fs::remove_dir(&work);
        }
        let text = serde_json::to_string(&report).map_err(|e| Error::internal(format!("report: {e}")))?;
        say(text)
    }

    /// Opens the GPU that trains the tables: the GPU that `--device` names, otherwise any GPU that works.
    fn device(&self) -> Result<Option<Device>> {
        let chosen = self.device.clone().open().map_err(|e| e.within("--device"))?;
        let Some(devices) = &chosen.device else {
            chosen.reason.iter().for_each(|reason| tracing::info!("training on the CPU: {reason}"));
            return Ok(None);
        };
        match devices.all() {
            [device] => Ok(Some(device.clone())),
            all => Err(Error::unsupported(format!("--device: got {} GPUs, expected one for training", all.len()))),
        }
    }

    /// Returns the hosts that train together.
    fn hosts(&self) -> Result<Option<Hosts>> {
        if self.hosts.is_empty() {
            return Ok(None);
        }
        let rank = self
            .rank
            .ok_or_else(|| Error::invalid("--hosts without --rank, expected the number of this host among --hosts"))?;
        let key = self.hosts_key.as_ref().map(|path| {
            let text = std::fs::read_to_string(path).map_err(|e| Error::io(path.display(), e))?;
            Ok(text.trim().to_owned())
        });
        Ok(Some(Hosts {
            key: key.transpose()?,
            timeout: Duration::from_secs(self.hosts_timeout),
            join_timeout: Duration::from_secs(self.join_timeout),
            ..Hosts::new(self.hosts.clone(), rank)
        }))
    }

    /// Publishes the trained model, from the package of `--out` or from a temporary package.
    fn publish(&self, trainer: &Trainer, work: &Path) -> Result<()> {
        let passing = work.join("package");
        if self.out.is_none() {
            if passing.exists() {
                std::fs::remove_dir_all(&passing).map_err(|e| Error::io(passing.display(), e))?;
            }
            trainer.write(&passing)?;
        }
        let folder = self.out.clone().unwrap_or_else(|| passing.clone());
        let store = self.store.open()?;
        let (name, version) = match interrupted(&store, &folder, work)? {
            Some(published) => published,
            None => self.publish_folder(&store, &folder)?,
        };
        if self.out.is_none() {
            std::fs::remove_dir_all(&passing).map_err(|e| Error::io(passing.display(), e))?;
        }
        say(format_args!("published {name} version {version}"))
    }

    fn publish_folder(&self, store: &Store, folder: &Path) -> Result<(String, u64)> {
        let folder = folder.to_owned();
        let plan = Plan {
            recipe: recipe(self.index.as_deref())?,
            trials: self.sandbox.trials()?,
            ..Plan::new(Source::Package { folder, items: self.items.clone(), vectors: None })
        };
        publish(store, &plan)
    }
}

/// Returns the version that an earlier attempt of this run published before it was interrupted: a version of the same files with a
/// higher number than the newest version that the attempt recorded in `work`. Without an earlier attempt, records the store's
/// newest version.
fn interrupted(store: &Store, folder: &Path, work: &Path) -> Result<Option<(String, u64)>> {
    let mark = work.join(PUBLISHING);
    let noted = files::read(&mark).ok().and_then(|text| String::from_utf8(text).ok()?.trim().parse::<u64>().ok());
    if let Some(before) = noted {
        let published = sterling_publish::published(store, folder)?.filter(|(_, version)| *version > before);
        if let Some((name, version)) = &published {
            tracing::info!("{name} version {version} was published by the interrupted run, and is not published again");
        }
        if published.is_some() {
            return Ok(published);
        }
    }
    let name = Package::open(folder)?.spec.name;
    let newest = store.versions(&name)?.pop().unwrap_or(0);
    files::write_atomic(&mark, |out| out.write_all(format!("{newest}\n").as_bytes()))?;
    Ok(None)
}

/// Progress output: a bar on a terminal, otherwise log lines.
struct TrainProgress {
    bar: ProgressBar,
    start: Instant,
    logged: std::cell::Cell<(Instant, u64)>,
}

impl TrainProgress {
    fn new() -> Self {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {percent:>3}% {elapsed} left {eta}") {
            bar.set_style(style);
        }
        let start = Instant::now();
        TrainProgress { bar, start, logged: std::cell::Cell::new((start, 0)) }
    }

    fn show(&self, progress: &Progress<'_>) {
        let Progress { events, bytes, bytes_all, window } = *progress;
        let rate = events as f64 / self.start.elapsed().as_secs_f64().max(1e-9);
        if let Some(Window { events: of, learned, frozen, popularity }) = window {
            self.bar.suspend(|| {
                tracing::info!(
                    "NDCG@10 of the last {of} events: learned {learned:.4}, frozen {frozen:.4}, popularity {popularity:.4}"
                );
            });
        }
        match bytes_all {
            Some(all) => {
                self.bar.set_length(all);
                self.bar.set_position(bytes);
            }
            None => self.bar.tick(),
        }
        self.bar.set_message(format!("{events} events, {rate:.0} per second"));
        let (last, had) = self.logged.get();
        if self.bar.is_hidden() && last.elapsed() >= LOGGED_EVERY {
            let lately = (events - had) as f64 / last.elapsed().as_secs_f64();
            let left =
                bytes_all.map(|all| self.start.elapsed().as_secs_f64() * (all - bytes) as f64 / bytes.max(1) as f64);
            let left = left.map_or(String::new(), |seconds| format!(", {seconds:.0} s left"));
            tracing::info!("{events} events, {lately:.0} per second{left}");
            self.logged.set((Instant::now(), events));
        }
    }
}
