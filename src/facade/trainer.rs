//! Training from a program.

use std::path::{Path, PathBuf};

use sterling_core::error::{Error, Result};
use sterling_train::{Report, TrainOptions};

/// Trains a model package on events, as `sterling train` does (`docs/guide/train.md`).
///
/// Each event is ranked before it is trained on; the report says how well the model that learns, the model as it was and popularity
/// did. A run that was ended goes on from its last checkpoint, to the same bits.
///
/// ```no_run
/// use sterling::Trainer;
///
/// let report = Trainer::new("models/shop").events("events").train("packages/shop")?;
/// println!("NDCG@10 {:?}, {:?} if it had not learned", report.learned.ndcg, report.frozen.ndcg);
/// # Ok::<(), sterling::error::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Trainer {
    package: PathBuf,
    options: TrainOptions,
    work: Option<PathBuf>,
}

impl Trainer {
    /// A trainer of this package folder, whose `model.toml` has `[train]`.
    pub fn new(package: impl Into<PathBuf>) -> Self {
        Trainer { package: package.into(), options: TrainOptions::new(Vec::new(), ""), work: None }
    }

    /// Reads events from this file of JSON lines or Parquet, or all files of this folder, after those that were named before.
    pub fn events(mut self, path: impl Into<PathBuf>) -> Self {
        self.options.events.push(path.into());
        self
    }

    /// Reads the items from this file, in place of the package's own.
    pub fn items(mut self, file: impl Into<PathBuf>) -> Self {
        self.options.items = Some(file.into());
        self
    }

    /// Goes through the events several times; they are ranked the first time alone.
    pub fn epochs(mut self, epochs: u64) -> Self {
        self.options.epochs = epochs;
        self
    }

    /// Shuffles so many events among each other.
    pub fn shuffle(mut self, events: usize) -> Self {
        self.options.shuffle = events;
        self
    }

    /// Draws negatives and the order of shuffled events by this number.
    pub fn seed(mut self, seed: u64) -> Self {
        self.options.seed = seed;
        self
    }

    /// Runs on so many threads, which change no number.
    pub fn threads(mut self, threads: usize) -> Self {
        self.options.threads = threads;
        self
    }

    /// Keeps checkpoints and refused events here, in place of a folder beside the package that is written.
    pub fn work(mut self, folder: impl Into<PathBuf>) -> Self {
        self.work = Some(folder.into());
        self
    }

    /// Trains, and writes the package `out`.
    ///
    /// # Errors
    /// What is wrong with package, items or events; `Conflict` where `out` exists or the working folder is of another run; `NoSpace` or
    /// `Io` with the step. What was learned up to the last checkpoint stays in the working folder.
    pub fn train(&self, out: impl AsRef<Path>) -> Result<Report> {
        let out = out.as_ref();
        if out.exists() {
            return Err(Error::conflict(format!("{}: it exists, expected a name that is free", out.display())));
        }
        let beside = || out.with_file_name(format!("{}.train", out.file_name().unwrap_or_default().to_string_lossy()));
        let work = self.work.clone().unwrap_or_else(beside);
        let options = TrainOptions { work, ..self.options.clone() };
        let mut trainer = sterling_train::Trainer::open(&self.package, options)?;
        let report = trainer.run(&|_| ())?;
        trainer.write(out)?;
        trainer.clear()?;
        Ok(report)
    }
}
