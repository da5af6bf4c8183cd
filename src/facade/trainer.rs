//! Training from a Rust program.

use std::path::{Path, PathBuf};

use sterling_core::error::Result;
use sterling_train::{Report, TrainOptions};

/// Trains a model package on events, as `sterling train` does (`docs/guide/train.md`).
///
/// Each event is ranked before the model is trained on it (progressive validation). The report compares the learning model, the
/// unchanged model and ranking by popularity. An interrupted run resumes from its last checkpoint with bit-identical results.
///
/// ```no_run
/// use sterling::Trainer;
///
/// let report = Trainer::new("models/shop").events("events").train("packages/shop")?;
/// println!("NDCG@10 {:?}, {:?} without learning", report.learned.ndcg, report.frozen.ndcg);
/// # Ok::<(), sterling::error::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Trainer {
    package: PathBuf,
    options: TrainOptions,
    work: Option<PathBuf>,
}

impl Trainer {
    /// Creates a trainer of a package folder whose `model.toml` has `[train]`.
    pub fn new(package: impl Into<PathBuf>) -> Self {
        Trainer { package: package.into(), options: TrainOptions::new(Vec::new(), ""), work: None }
    }

    /// Adds a file of events (JSON lines or Parquet), or all files of a folder, after those that were added before.
    pub fn events(mut self, path: impl Into<PathBuf>) -> Self {
        self.options.events.push(path.into());
        self
    }

    /// Reads the items from this file in place of the package's item file.
    pub fn items(mut self, file: impl Into<PathBuf>) -> Self {
        self.options.items = Some(file.into());
        self
    }

    /// Sets the number of epochs; only the first epoch is evaluated (progressive validation).
    pub fn epochs(mut self, epochs: u64) -> Self {
        self.options.epochs = epochs;
        self
    }

    /// Sets the size of the shuffle buffer, in events.
    pub fn shuffle(mut self, events: usize) -> Self {
        self.options.shuffle = events;
        self
    }

    /// Sets the random seed of negatives and of the shuffled order.
    pub fn seed(mut self, seed: u64) -> Self {
        self.options.seed = seed;
        self
    }

    /// Sets the number of threads, which does not affect results.
    pub fn threads(mut self, threads: usize) -> Self {
        self.options.threads = threads;
        self
    }

    /// Sets the folder of checkpoints and rejected events; by default it is in the folder of the written package.
    pub fn work(mut self, folder: impl Into<PathBuf>) -> Self {
        self.work = Some(folder.into());
        self
    }

    /// Trains the model, and writes it to the package folder `out`.
    ///
    /// # Errors
    /// `Invalid` and similar errors of package, items or events; `Conflict` if `out` exists or if the working folder belongs to
    /// another run; `NoSpace` or `Io` with the step. After an error the last checkpoint stays in the working folder.
    pub fn train(&self, out: impl AsRef<Path>) -> Result<Report> {
        let out = out.as_ref();
        let work = self.work.clone().unwrap_or_else(|| TrainOptions::work_folder_for(out));
        let options = TrainOptions { work, ..self.options.clone() };
        options.check_out(out)?;
        let mut trainer = sterling_train::Trainer::open(&self.package, options)?;
        let report = trainer.run(&|_| ())?;
        trainer.write(out)?;
        trainer.clear()?;
        Ok(report)
    }
}
