//! A training run, from its events to the written package.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Instant;

use serde::Serialize;

use crate::catalogue::Catalogue;
use crate::checkpoint::{Checkpoints, Met, Origin, Position, STATE_FILE};
use crate::draws::{Draws, shuffle};
use crate::events::{Checker, Chunk, Event, Inputs, Outcome, Refusal};
use crate::judge::{Wanted, rank, rank_by_count};
use crate::loss::{Gradients, SampledSoftmax};
use crate::model::{Model, Rows};
use crate::package::{self, OPTIMIZER_FILE};
use crate::products::Packed;
use crate::quarantine::Quarantine;
use crate::report::{Report, Window};
use crate::state::{self, Carried, Take};
use sterling_batch::ProblemLimit;
use sterling_core::error::{Error, Result};
use sterling_embedding::Lookup;
use sterling_graph::tower::{FeatureRow, Pooled, Scratch, Threads, Tower};
use sterling_kernels::cpu::Kernels;
use sterling_snapshot::items::{self, Items};
use sterling_snapshot::model::{Package, TrainSpec};
use sterling_storage::files::Checksum;

/// Chunks of events that are read ahead.
const CHUNKS_AHEAD: usize = 8;
/// Number of events from which the share of rejected ones may end the run.
const LIMIT_AFTER: u64 = 10_000;
/// Events per window of the report.
const WINDOW: u64 = 10_000;

/// Options of a run.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// Event files, folders of such files, or `-` for standard input.
    pub events: Vec<PathBuf>,
    /// Items file; none means the package's own.
    pub items: Option<PathBuf>,
    /// Working folder for checkpoints and rejected events.
    pub work: PathBuf,
    /// Number of passes over the events.
    pub epochs: u64,
    /// Size of the shuffle buffer in events; 0 keeps the order.
    pub shuffle: usize,
    /// Seed of the sampled negatives and of the shuffled order.
    pub seed: u64,
    /// Threads of lookups, graphs and updates.
    pub threads: usize,
    /// Steps between checkpoints.
    pub checkpoint_steps: u64,
    /// Progressive validation of every n-th batch; 0 turns it off.
    pub judge: u64,
    /// Limit of rejected events.
    pub max_refused: ProblemLimit,
}

impl TrainOptions {
    /// Returns the default working folder of a run that writes or trains a package: `NAME.train` beside it.
    pub fn work_beside(package: &Path) -> PathBuf {
        let name = package.file_name().unwrap_or_default().to_string_lossy();
        package.with_file_name(format!("{name}.train"))
    }

    /// Creates options with default values.
    pub fn new(events: Vec<PathBuf>, work: impl Into<PathBuf>) -> Self {
        TrainOptions {
            events,
            items: None,
            work: work.into(),
            epochs: 1,
            shuffle: 0,
            seed: 1,
            threads: 1,
            checkpoint_steps: 1000,
            judge: 1,
            max_refused: ProblemLimit::Percent(10.0),
        }
    }
}

/// Progress of a run.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Events trained on.
    pub events: u64,
    /// Bytes of events read, in all epochs.
    pub bytes: u64,
    /// Bytes to be read in all epochs; none for standard input.
    pub bytes_all: Option<u64>,
    /// Window of the report that has just ended, if any.
    pub window: Option<&'a Window>,
}

/// A run of training.
#[derive(Debug)]
pub struct Trainer {
    options: TrainOptions,
    package: Arc<Package>,
    train: TrainSpec,
    inputs: Inputs,
    origin: Origin,
    catalogue: Arc<Catalogue>,
    kernels: Kernels,
    model: Model,
    carried: Carried,
    gradients: Gradients,
    frozen: Option<Frozen>,
    checkpoints: Checkpoints,
    quarantine: Quarantine,
    position: Position,
    resumed_from: u64,
}

/// The model at the start of the run: the vectors of all items, and buffers for the package's user tower.
#[derive(Debug)]
struct Frozen {
    items: Packed,
    threads: Threads,
    scratch: Scratch,
}

/// Log entry of a batch that was not trained on.
#[derive(Serialize)]
struct RejectedBatch {
    step: u64,
    events: usize,
    reason: String,
}

/// Quarantine entry of a rejected event.
#[derive(Serialize)]
struct RefusedEvent<'a> {
    file: &'a str,
    line: u64,
    #[serde(flatten)]
    refusal: &'a Refusal,
}

impl Trainer {
    /// Opens a package for training, and resumes from the last checkpoint in the working folder, if there is one.
    ///
    /// # Errors
    /// Errors of the package, its `[train]`, the items or the events; `Conflict` for a checkpoint of another run, `Corrupt` for a
    /// damaged one.
    pub fn open(folder: &Path, options: TrainOptions) -> Result<Self> {
        let package = Package::open_told(folder, &|_| ())?;
        let train = package.spec.train.clone().ok_or_else(|| {
            Error::invalid(format!("{}: model.toml has no [train], expected `label` at least", folder.display()))
        })?;
        if options.epochs == 0 {
            return Err(Error::invalid("epochs: got 0, expected at least 1"));
        }
        let inputs = Inputs::open(&options.events)?;
        if options.epochs > 1 && !inputs.can_be_read_again() {
            let what = format!("epochs: got {}, expected 1 of standard input, which is read once", options.epochs);
            return Err(Error::invalid(what));
        }
        let items = options.items.clone().map_or_else(|| items::file_of(folder), Ok)?;
        let catalogue = Catalogue::new(&Items::read(&items, None)?, &package)?;
        let mut model = Model::new(&package, &train, options.threads)?;
        let origin = Origin {
            package: package::digest(&package, &items)?,
            train: digest(&train)?,
            events: digest(&(&inputs, options.shuffle, options.seed, options.judge))?,
        };
        std::fs::create_dir_all(&options.work).map_err(|e| Error::io(options.work.display(), e))?;
        let checkpoints = Checkpoints::new(&options.work);
        let optimizer = folder.join(OPTIMIZER_FILE);
        let mut carried = Carried::new(catalogue.len(), train.batch);
        let mut restore = |path: &Path, take| state::read(path, take, &mut model, &mut carried, &catalogue);
        let position = match checkpoints.last(&origin)? {
            Some((position, folder)) => {
                restore(&folder.join(STATE_FILE), Take::All)?;
                position
            }
            None => {
                if optimizer.exists() {
                    restore(&optimizer, Take::OptimizersOnly).map_err(|e| {
                        Error::new(e.kind(), format!("{e}; remove it to begin without the optimizers' state"))
                    })?;
                }
                Position::default()
            }
        };
        let frozen = (options.judge > 0).then(|| Frozen::of(&package, &catalogue, options.threads)).transpose()?;
        Ok(Trainer {
            quarantine: Quarantine::open(&options.work, position.quarantined.1)?,
            options,
            package: Arc::new(package),
            train,
            inputs,
            origin,
            catalogue: Arc::new(catalogue),
            kernels: Kernels::detect()?,
            model,
            carried,
            gradients: Gradients::default(),
            frozen,
            checkpoints,
            resumed_from: position.step,
            position,
        })
    }

    /// Returns the step that the run resumes from; 0 for a new run.
    pub fn resumed_from(&self) -> u64 {
        self.resumed_from
    }

    /// Trains on all remaining events.
    ///
    /// # Errors
    /// Errors of reading; `Invalid` if the limit of rejected events is exceeded; `NoSpace` or `Io` with the step of a checkpoint
    /// that cannot be written. Earlier checkpoints stay.
    pub fn run(&mut self, told: &dyn Fn(&Progress<'_>)) -> Result<Report> {
        let (start, trained_before) = (Instant::now(), self.position.trained);
        while self.position.epoch < self.options.epochs {
            self.epoch(told)?;
            self.position.epoch += 1;
            self.position.events = 0;
        }
        self.checkpoint()?;
        let seconds = start.elapsed().as_secs_f64();
        let rate = (self.position.trained - trained_before) as f64 / seconds.max(1e-9);
        Ok(Report::of(&self.position, self.resumed_from, rate))
    }

    /// Writes the trained model as a package, together with the state of the optimizers.
    ///
    /// # Errors
    /// `Conflict` if `out` exists; `NoSpace` or `Io` with the path.
    pub fn write(&self, out: &Path) -> Result<()> {
        let optimizer = |path: &Path| state::write(path, &self.model, &self.carried, &self.catalogue);
        package::write(out, &self.package, &self.model, optimizer)
    }

    /// Removes the checkpoints of a finished run, and the working folder if no event was rejected.
    ///
    /// # Errors
    /// `Io` with the path.
    pub fn clear(&self) -> Result<()> {
        self.checkpoints.clear()?;
        // `remove_dir` fails for a folder that is not empty, which then stays.
        let _ = std::fs::remove_dir(&self.options.work);
        Ok(())
    }

    fn checkpoint(&mut self) -> Result<()> {
        self.position.quarantined = (self.position.met.refused, self.quarantine.sync()?);
        let state = |path: &Path| state::write(path, &self.model, &self.carried, &self.catalogue);
        self.checkpoints.write(&self.origin, &self.position, state)
    }

    /// Reads all events once, and trains on those that it has not trained on yet.
    fn epoch(&mut self, told: &dyn Fn(&Progress<'_>)) -> Result<()> {
        let (package, catalogue) = (self.package.clone(), self.catalogue.clone());
        let tower = package.user.as_ref().ok_or_else(|| Error::internal("a package without its user tower"))?;
        let (inputs, label) = (self.inputs.clone(), self.train.label.clone());
        std::thread::scope(|scope| {
            let (send, receive) = sync_channel::<Result<Chunk>>(CHUNKS_AHEAD);
            let (inputs, catalogue, label) = (&inputs, &catalogue, &label);
            scope.spawn(move || {
                let mut checker = Checker::new(tower, catalogue, label);
                if let Err(e) = inputs.read(&mut checker, &mut |chunk| send.send(Ok(chunk)).is_ok()) {
                    // If the receiver was dropped, the consumer has already failed with its own error.
                    let _ = send.send(Err(e));
                }
            });
            self.consume(&receive, tower, told)
        })
    }

    /// Consumes the events of an epoch in blocks of complete batches, shuffled if the options ask for it.
    fn consume(&mut self, chunks: &Receiver<Result<Chunk>>, tower: &Tower, told: &dyn Fn(&Progress<'_>)) -> Result<()> {
        let batch = self.train.batch;
        let block_events = self.options.shuffle.max(batch).next_multiple_of(batch);
        let is_first = self.position.epoch == 0;
        let bytes_before = self.inputs.bytes().unwrap_or(0) * self.position.epoch;
        // Numbers of trained and of quarantined events at the start: those were already processed before the run was resumed.
        let (trained, quarantined) = (self.position.events, self.position.quarantined.0);
        if is_first {
            self.position.met = Default::default();
        }
        let (mut block, mut first) = (Vec::new(), 0u64);
        let mut bytes = 0;
        let mut take = |trainer: &mut Trainer, block: &mut Vec<Event>, bytes: u64| {
            if trainer.options.shuffle > 0 {
                let number = (trainer.position.epoch << 32) + first / block_events as u64;
                shuffle(block, Draws::new(!trainer.options.seed, number));
            }
            for events in block.chunks(batch) {
                if first >= trained {
                    trainer.position.events = first + events.len() as u64;
                    let ended = trainer.step(events, tower)?;
                    told(&Progress {
                        events: trainer.position.trained,
                        bytes: bytes_before + bytes,
                        bytes_all: trainer.inputs.bytes().map(|all| all * trainer.options.epochs),
                        window: ended.as_ref(),
                    });
                    if trainer.position.step.is_multiple_of(trainer.options.checkpoint_steps.max(1)) {
                        trainer.checkpoint()?;
                    }
                }
                first += events.len() as u64;
            }
            block.clear();
            Ok::<_, Error>(())
        };
        for chunk in chunks {
            let chunk = chunk?;
            bytes = chunk.bytes;
            for outcome in chunk.outcomes {
                if is_first {
                    self.meet(chunk.file, &outcome, quarantined)?;
                }
                let Outcome::Event(event) = outcome else { continue };
                if event.is_positive {
                    block.push(event);
                }
                if block.len() == block_events {
                    take(self, &mut block, bytes)?;
                }
            }
        }
        take(self, &mut block, bytes)?;
        let met = self.position.met;
        match is_first && met.refused > self.options.max_refused.most(met.read) {
            true => Err(self.too_many_refused()),
            false => Ok(()),
        }
    }

    /// Counts a line or row, and writes a rejected one to the quarantine.
    fn meet(&mut self, file: usize, outcome: &Outcome, quarantined: u64) -> Result<()> {
        self.position.met.read += 1;
        match outcome {
            Outcome::Event(event) => self.position.met.skipped += u64::from(!event.is_positive),
            Outcome::Refused(line, refusal) => {
                self.position.met.refused += 1;
                if self.position.met.refused > quarantined {
                    let file = &self.inputs.name(file);
                    self.quarantine.add(&RefusedEvent { file, line: *line, refusal })?;
                }
                let Met { read, refused, .. } = self.position.met;
                if refused > self.options.max_refused.most(read.max(LIMIT_AFTER)) {
                    return Err(self.too_many_refused());
                }
            }
        }
        Ok(())
    }

    fn too_many_refused(&mut self) -> Error {
        // The quarantine names the reasons, so it is made durable before the run ends.
        let synced = self.quarantine.sync().err().map_or(String::new(), |e| format!("; {e}"));
        let Met { read, refused, .. } = self.position.met;
        let most = self.options.max_refused.most(read);
        let work = self.options.work.display();
        Error::invalid(format!(
            "{refused} of {read} events were refused, expected at most {most}: {work}/quarantine.jsonl says why{synced}"
        ))
    }

    /// Ranks the events of a batch, then trains on them. Returns the window that ended with this batch, if any.
    fn step(&mut self, events: &[Event], tower: &Tower) -> Result<Option<Window>> {
        self.position.step += 1;
        let mut items: Vec<u32> = events.iter().map(|event| event.item).collect();
        items.sort_unstable();
        items.dedup();
        self.carried.frequency.count(&items, events.len());
        let positives = items.len();
        let (all, uniform) = (self.catalogue.len() as u64, self.train.uniform as u64);
        let draws = Draws::new(self.options.seed, self.position.step);
        items.extend((0..uniform).map(|n| draws.below(n, all) as u32));
        let log_q: Vec<f32> = match self.train.log_q {
            false => vec![0.0; items.len()],
            true => {
                let of_uniform = (uniform as f32 / all as f32).ln();
                let drawn = (0..uniform).map(|_| of_uniform);
                let of_batch = |item: &u32| self.carried.frequency.log_q(*item, events.len());
                items[..positives].iter().map(of_batch).chain(drawn).collect()
            }
        };
        let users: Vec<&FeatureRow> = events.iter().map(|event| &event.user).collect();
        let rows = Rows { users: &users, items: &items };
        let forward = self.model.forward(&rows, &self.catalogue)?;
        let window = self.judge(events, &users, &forward.queries, tower)?;
        let of_item = |event: &Event| items[..positives].partition_point(|item| *item < event.item) as u32;
        let targets: Vec<u32> = events.iter().map(of_item).collect();
        let weights: Vec<f32> = events.iter().map(|event| event.weight).collect();
        let softmax = SampledSoftmax {
            queries: &forward.queries,
            candidates: &forward.candidates,
            dimension: self.model.dimension(),
            items: &items,
            log_q: &log_q,
            targets: &targets,
            weights: &weights,
            temperature: self.train.temperature,
        };
        let loss = softmax.run(self.kernels, |event| &events[event].exclude, &mut self.gradients);
        let Gradients { queries, candidates, .. } = &self.gradients;
        let is_finite = loss.is_finite() && queries.iter().chain(candidates).all(|x| x.is_finite());
        let stepped = match is_finite {
            true => Some(self.model.backward(&rows, &self.catalogue, forward, queries, candidates)?),
            false => None,
        };
        match stepped.filter(|stepped| !stepped.is_rejected) {
            Some(stepped) => {
                self.position.loss += loss;
                self.position.trained += events.len() as u64;
                self.position.rejected_rows += stepped.rejected_rows;
            }
            None => {
                self.position.rejected_batches += 1;
                let reason = format!("loss {loss}, or a gradient that is not finite");
                self.quarantine.add(&RejectedBatch { step: self.position.step, events: events.len(), reason })?;
            }
        }
        events.iter().for_each(|event| self.carried.counts[event.item as usize] += 1);
        Ok(window)
    }

    /// Ranks the events of a batch by the learning model, the frozen twin and popularity.
    fn judge(
        &mut self,
        events: &[Event],
        users: &[&FeatureRow],
        queries: &[f32],
        tower: &Tower,
    ) -> Result<Option<Window>> {
        let Some(frozen) = &mut self.frozen else { return Ok(None) };
        if self.position.epoch > 0 || !(self.position.step - 1).is_multiple_of(self.options.judge) {
            return Ok(None);
        }
        let wanted: Vec<Wanted<'_>> =
            events.iter().map(|event| Wanted { item: event.item, exclude: &event.exclude }).collect();
        let vectors = self.model.vectors(&self.catalogue)?;
        let items = Packed::transposed(&vectors, self.model.dimension(), self.catalogue.len());
        let judged = &mut self.position.judged;
        rank(self.kernels, queries, &items, &wanted, &mut judged.learned);
        rank(self.kernels, &frozen.queries(tower, users)?, &frozen.items, &wanted, &mut judged.frozen);
        rank_by_count(&self.carried.counts, &wanted, &mut judged.popularity);
        let ended = self.position.windows.last().copied().unwrap_or_default();
        if judged.learned.events() - ended.learned.events() < WINDOW {
            return Ok(None);
        }
        self.position.windows.push(*judged);
        Ok(Some(Window::between(&ended, judged)))
    }
}

impl Frozen {
    fn of(package: &Package, catalogue: &Catalogue, threads: usize) -> Result<Self> {
        let (threads, mut scratch) = (Threads::new(threads), Scratch::default());
        let vectors = match &package.item {
            None => catalogue.vectors().to_vec(),
            Some(tower) => {
                let mut all = Vec::with_capacity(catalogue.len() * package.spec.dimension);
                for rows in catalogue.rows().chunks(tower.run_rows()) {
                    all.extend(run(tower, &rows.iter().collect::<Vec<_>>(), &threads, &mut scratch)?);
                }
                all
            }
        };
        let items = Packed::transposed(&vectors, package.spec.dimension, catalogue.len());
        Ok(Frozen { items, threads, scratch })
    }

    fn queries(&mut self, tower: &Tower, users: &[&FeatureRow]) -> Result<Vec<f32>> {
        run(tower, users, &self.threads, &mut self.scratch)
    }
}

/// Runs a tower on rows; returns its first output, which is the query or the item vector.
fn run(tower: &Tower, rows: &[&FeatureRow], threads: &Threads, scratch: &mut Scratch) -> Result<Vec<f32>> {
    let (pooled, _) = tower.lookup(rows, &Lookup::default())?;
    let pairs: Vec<(&FeatureRow, &Pooled)> = rows.iter().copied().zip(&pooled).collect();
    let made = tower.run(&pairs, threads, scratch)?;
    let made = made.into_iter().next().ok_or_else(|| Error::internal("a tower without outputs"))?;
    Ok(made.into_data())
}

/// Returns the digest of a value's JSON.
fn digest<T: Serialize>(value: &T) -> Result<String> {
    let text = serde_json::to_vec(value).map_err(|e| Error::internal(format!("digest: {e}")))?;
    Ok(Checksum::of(&text).xxh3)
}
