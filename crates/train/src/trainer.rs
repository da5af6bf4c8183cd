//! A training run, from its events to the written package.

mod failures;
mod joined;
mod options;
mod step;

use std::collections::{BTreeSet, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Instant;

use serde::Serialize;

use crate::catalogue::Catalogue;
use crate::checkpoint::{Base, Checkpoints, EventCounts, Last, Origin, Position};
use crate::events::{self, CHUNK_EVENTS, Checker, Chunk, Event, Inputs, Outcome, RejectionReason};
use crate::hosts::Mesh;
use crate::lock::Lock;
use crate::loss::Gradients;
use crate::managed;
use crate::model::Model;
use crate::package::{self, OPTIMIZER_FILE};
use crate::products::Packed;
use crate::quarantine::Quarantine;
use crate::report::{Report, Window};
use crate::requests::RequestSample;
use crate::state::{self, Content, RunState, Take};
use crate::step_random::{StepRandom, shuffle};
pub use options::TrainOptions;
use step::{Frozen, ReadBatch};
use sterling_core::error::{Error, Result};
use sterling_core::tasks;
use sterling_graph::tower::Tower;
use sterling_kernels::cpu::Kernels;
use sterling_kernels::threads::Threads;
use sterling_snapshot::items::{self, Items};
use sterling_snapshot::model::{LossKind, Package, TrainSpec};
use sterling_storage::files::Checksum;

/// Minimum number of chunks of events that are read ahead.
const CHUNKS_AHEAD: usize = 8;
/// Number of events after which the run ends if the share of rejected events exceeds the limit.
const LIMIT_AFTER: u64 = 10_000;
/// Maximum size of the shuffle buffer in events.
const SHUFFLE_MAX: usize = 100_000_000;
/// Maximum number of threads.
const THREADS_MAX: usize = 1024;
/// Events per window of the report.
const WINDOW: u64 = 10_000;

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

/// A training run.
#[derive(Debug)]
pub struct Trainer {
    options: TrainOptions,
    package: Arc<Package>,
    train: TrainSpec,
    inputs: Inputs,
    origin: Origin,
    catalogue: Arc<Catalogue>,
    kernels: Kernels,
    threads: Threads,
    model: Model,
    carried: RunState,
    gradients: Gradients,
    /// Gradients of the reranker's logits, `[B, T]`.
    of_logits: Vec<f32>,
    /// Weight of each task, `[T]`; empty if the loss does not train them.
    task_weights: Vec<f32>,
    frozen: Option<Frozen>,
    /// Vectors of all items at the last batch that was ranked.
    vectors: Option<Packed>,
    checkpoints: Checkpoints,
    /// Base of the next checkpoint.
    base: Option<Base>,
    quarantine: Quarantine,
    position: Position,
    resumed_from: u64,
    /// Some of the positive labels of events, for error messages.
    labels: BTreeSet<String>,
    /// Sample of the events' requests, once an epoch has ended. Each epoch reads all events, so all samples are the same.
    requests: Option<RequestSample>,
    lock: Lock,
    /// With several hosts, number of rows of this host whose updates were rejected since the last exchange of counts.
    rejected_rows: u64,
}

/// Inputs of a run, before its checkpoint is read.
struct Opened {
    package: Package,
    options: TrainOptions,
    train: TrainSpec,
    inputs: Inputs,
    origin: Origin,
    catalogue: Catalogue,
    lock: Lock,
}

/// Quarantine entry of a rejected event.
#[derive(Serialize)]
struct RejectedEvent<'a> {
    file: &'a str,
    line: u64,
    #[serde(flatten)]
    refusal: &'a RejectionReason,
}

impl Trainer {
    /// Opens a package for training, and resumes from the last checkpoint in the working folder, if there is one. With
    /// several hosts, waits for the others; the checkpoint is that of host 0, and each other host works in the
    /// subfolder `host-N` of its working folder.
    ///
    /// # Errors
    /// Errors of the package, its `[train]`, the items or the events; `Conflict` for a checkpoint of another run, if
    /// another run uses the folder, or if another host belongs to another run; `Corrupt` for a damaged checkpoint;
    /// `Unavailable` if another host does not connect, or is lost.
    pub fn open(folder: &Path, mut options: TrainOptions) -> Result<Self> {
        if let Some(hosts) = &options.hosts {
            hosts.check()?;
            if hosts.rank > 0 {
                options.work = options.work.join(format!("host-{}", hosts.rank));
            }
        }
        let package = Package::open_with_progress(folder, &|_| ())?;
        let train = package.spec.train.clone().ok_or_else(|| {
            Error::invalid(format!("{}: model.toml has no [train], expected `label` at least", folder.display()))
        })?;
        if options.epochs == 0 {
            return Err(Error::invalid("epochs: got 0, expected at least 1"));
        }
        for (option, got, most) in
            [("shuffle", options.shuffle, SHUFFLE_MAX), ("threads", options.threads, THREADS_MAX)]
        {
            if got > most {
                return Err(Error::invalid(format!("{option}: got {got}, expected at most {most}")));
            }
        }
        if options.device.is_some() && options.hosts.is_some() {
            return Err(Error::unsupported("device: got a GPU for one of several hosts, expected the CPU"));
        }
        let inputs = Inputs::open(&options.events)?;
        if options.epochs > 1 && !inputs.is_rereadable() {
            let what = format!("epochs: got {}, expected 1, because standard input is read once", options.epochs);
            return Err(Error::invalid(what));
        }
        if options.hosts.is_some() && !inputs.is_rereadable() {
            return Err(Error::invalid(
                "events: got standard input for one of several hosts, expected files, which all of them read",
            ));
        }
        let items = options.items.clone().map_or_else(|| items::file_of(folder), Ok)?;
        let read = Items::read(&items, None)?;
        let catalogue = Catalogue::new(&read, &package)?;
        let origin = Origin {
            package: package::digest(&package, &items)?,
            train: digest(&train)?,
            events: digest(&(&inputs, options.shuffle, options.seed, options.judge))?,
        };
        std::fs::create_dir_all(&options.work).map_err(|e| Error::io(options.work.display(), e))?;
        let lock = Lock::take(&options.work)?;
        let join = |hosts| Mesh::join(hosts, joined::identity(&options, hosts, &origin)?);
        let hosts = options.hosts.as_ref().map(join);
        let hosts = hosts.transpose()?.map(Arc::new);
        let opened = Opened { package, options, train, inputs, origin, catalogue, lock };
        joined::report_failure(hosts.as_deref(), opened.restore(read, hosts.clone()))
    }
}

impl Opened {
    /// Restores the last checkpoint, if there is one.
    fn restore(self, items: Items, hosts: Option<Arc<Mesh>>) -> Result<Trainer> {
        let Opened { package, options, train, inputs, origin, catalogue, lock } = self;
        let task_weights = package.spec.trained_tasks().map(|(_, weight)| weight).collect();
        let threads = Threads::new(options.threads)?;
        let mut model = Model::new(&package, &train, &items, &threads, options.device.as_ref(), hosts.clone())?;
        drop(items);
        let checkpoints = Checkpoints::new(&options.work);
        let optimizer = package.folder().join(OPTIMIZER_FILE);
        let mut carried = RunState::new(catalogue.len(), train.batch);
        let mut restore = |path: &Path, take| state::read(path, take, &mut model, &mut carried, &catalogue);
        let last = match hosts.as_deref() {
            None => checkpoints.last(&origin)?,
            Some(mesh) => joined::last(mesh, &checkpoints, &origin, &options.work)?,
        };
        // Rows that are in no checkpoint keep the values of the package.
        if optimizer.exists() {
            package::check_optimizer(package.folder())
                .and_then(|()| restore(&optimizer, Take::OptimizersOnly))
                .map_err(|e| {
                    Error::new(e.kind(), format!("{e}; remove the optimizer file to start without optimizer state"))
                })?;
        }
        let (position, base) = match last {
            Some(Last { position, states, base }) => {
                states.iter().try_for_each(|state| restore(state, Take::All))?;
                (position, base)
            }
            None => (Position::default(), None),
        };
        managed::forget(model.learning_tables_mut(), &options.forget)?;
        // Only host 0 has the quarantine file, whose length the checkpoint records.
        let is_first = hosts.as_ref().is_none_or(|mesh| mesh.rank() == 0);
        let quarantined = if is_first { position.quarantined.1 } else { 0 };
        let frozen = (options.judge > 0).then(|| Frozen::of(&package, &catalogue, options.threads)).transpose()?;
        let mut trainer = Trainer {
            quarantine: Quarantine::open(&options.work, quarantined)?,
            options,
            package: Arc::new(package),
            train,
            inputs,
            origin,
            catalogue: Arc::new(catalogue),
            kernels: Kernels::detect()?,
            threads,
            model,
            carried,
            gradients: Gradients::default(),
            of_logits: Vec::new(),
            task_weights,
            frozen,
            vectors: None,
            checkpoints,
            base,
            resumed_from: position.step,
            position,
            labels: BTreeSet::new(),
            requests: None,
            lock,
            rejected_rows: 0,
        };
        if trainer.resumed_from > 0 && !trainer.options.forget.is_empty() {
            // Earlier checkpoints still contain the removed ids and their rows, so a complete checkpoint replaces them.
            trainer.write_checkpoint(true)?;
            trainer.checkpoints.remove_before(trainer.position.step)?;
        }
        Ok(trainer)
    }
}

impl Trainer {
    /// Returns the step that the run resumes from; 0 for a new run.
    pub fn resumed_from(&self) -> u64 {
        self.resumed_from
    }

    /// Trains on all remaining events.
    ///
    /// # Errors
    /// Errors of reading; `Invalid` if the limit of rejected events is exceeded, or if no event was trained; `Conflict`
    /// if the run was resumed and the events are others; `NoSpace` or `Io` with the step of a checkpoint that cannot be
    /// written. Earlier checkpoints stay. No checkpoint is written at the end of the run: if the package cannot be
    /// written, the run resumes from the last one.
    pub fn run(&mut self, reported: &dyn Fn(&Progress<'_>)) -> Result<Report> {
        let ran = self.run_all(reported);
        joined::report_failure(self.model.hosts().map(Arc::as_ref), ran)
    }

    fn run_all(&mut self, reported: &dyn Fn(&Progress<'_>)) -> Result<Report> {
        let (start, trained_before) = (Instant::now(), self.position.trained);
        while self.position.epoch < self.options.epochs {
            self.epoch(reported)?;
            self.position.epoch += 1;
            self.position.events = 0;
            self.position.hash = 0;
        }
        self.quarantine.sync()?;
        self.add_rejected_rows()?;
        if self.position.trained == 0 {
            return Err(self.nothing_trained());
        }
        let seconds = start.elapsed().as_secs_f64();
        let rate = (self.position.trained - trained_before) as f64 / seconds.max(1e-9);
        let tasks = self.package.spec.trained_tasks().map(|(name, _)| name);
        let managed = managed::reports(self.model.tables.tables().iter());
        Ok(Report { managed, ..Report::of(&self.position, tasks, self.resumed_from, rate) })
    }

    /// Writes the trained model as a package, together with the state of the optimizers. If `out` is this package already,
    /// because the run was killed after it was written, it stays.
    ///
    /// # Errors
    /// `Conflict` if `out` is anything else; `NoSpace` or `Io` with the path; `Unavailable` if another host is lost.
    pub fn write(&self, out: &Path) -> Result<()> {
        let hosts = self.model.hosts().map(Arc::as_ref);
        let written = match hosts {
            Some(mesh) if mesh.rank() > 0 => joined::serve(mesh, &self.model).map(drop),
            _ => self.write_package(out),
        };
        let written = written.and_then(|()| self.others().map_or(Ok(()), |others| others.end(false)));
        joined::report_failure(hosts, written)
    }

    fn write_package(&self, out: &Path) -> Result<()> {
        self.lock.record(out)?;
        let write = |path: &Path| state::write(path, Content::Optimizers, &self.model, &self.carried, &self.catalogue);
        package::write(out, &self.package, &self.model, self.requests.as_ref(), write)
    }

    /// Removes the checkpoints of a finished run, and the working folder if no event was rejected. With several hosts, the others
    /// wait until host 0 has done so.
    ///
    /// # Errors
    /// `Io` with the path; `Unavailable` on other hosts if host 0 is lost.
    pub fn clear(&self) -> Result<()> {
        let hosts = self.model.hosts().map(Arc::as_ref);
        let cleared = match hosts {
            Some(mesh) if mesh.rank() > 0 => joined::serve(mesh, &self.model).and_then(|_| self.remove_own()),
            _ => self.remove(),
        };
        if let Some(others) = self.others().filter(|_| cleared.is_ok()) {
            // The package is complete: if another host is lost now, this one has not failed.
            let _ = others.end(false);
        }
        joined::report_failure(hosts, cleared)
    }

    fn remove(&self) -> Result<()> {
        self.checkpoints.clear()?;
        self.lock.remove()?;
        // `remove_dir` fails for a folder that is not empty, which then stays.
        let _ = std::fs::remove_dir(&self.options.work);
        Ok(())
    }

    /// Writes a checkpoint, with all rows if `is_full` or if most of them changed.
    fn write_checkpoint(&mut self, is_full: bool) -> Result<()> {
        self.add_rejected_rows()?;
        if let Some(mesh) = self.model.hosts().filter(|mesh| mesh.rank() > 0) {
            if joined::serve(mesh, &self.model)? {
                self.model.forget_touched();
            }
            return Ok(());
        }
        if let Some(others) = self.others() {
            joined::add_touched(&others, &mut self.model)?;
        }
        let is_full = is_full || self.model.is_mostly_touched();
        let synced = self.quarantine.sync().map_err(|e| e.within(format!("checkpoint at step {}", self.position.step)));
        self.position.quarantined = (self.position.met.refused, synced?);
        let content = if is_full { Content::All } else { Content::Touched };
        let state = |path: &Path| state::write(path, content, &self.model, &self.carried, &self.catalogue);
        self.base = self.checkpoints.write(&self.origin, &self.position, self.base.clone(), is_full, state)?;
        if is_full {
            self.model.forget_touched();
        }
        self.others().map_or(Ok(()), |others| others.end(is_full))
    }

    /// Reads all events once, and trains on those that it has not trained on yet.
    fn epoch(&mut self, reported: &dyn Fn(&Progress<'_>)) -> Result<()> {
        let (package, catalogue) = (self.package.clone(), self.catalogue.clone());
        let tower = package.user.as_ref().ok_or_else(|| Error::internal("the package has no user tower"))?;
        let (inputs, label) = (self.inputs.clone(), self.train.label.clone());
        let (package_read, catalogue_read) = (package.clone(), catalogue);
        let requests = RequestSample::new(self.options.seed, &self.options.forget, tower.features());
        // The reader continues while this host waits for other hosts, so the queue must hold at least one batch.
        let ahead = CHUNKS_AHEAD.max(self.train.batch.div_ceil(CHUNK_EVENTS));
        let (send, receive) = sync_channel::<Result<Chunk>>(ahead);
        let reader = tasks::EVENTS.start(move || {
            let trained: Vec<&str> = package_read.spec.trained_tasks().map(|(name, _)| name).collect();
            let mut checker = Checker::new(package_read.user.as_ref()?, &catalogue_read, &label, &trained, requests);
            if let Err(e) = inputs.read(&mut checker, &mut |chunk| send.send(Ok(chunk)).is_ok()) {
                // If the receiver was dropped, the consumer has already failed with its own error.
                let _ = send.send(Err(e));
            }
            Some(checker.finish())
        })?;
        let consumed = self.consume(receive, tower, reported);
        // A read of standard input, or of a file that hangs, cannot be cancelled and must not delay an error.
        if consumed.is_ok() || reader.is_finished() {
            let read = reader.join().map_err(|_| Error::internal("the thread that reads events panicked"))?;
            if let Some((labels, requests)) = read {
                self.labels = labels;
                self.requests = Some(requests);
            }
        }
        consumed
    }

    /// Consumes the events of an epoch in blocks of complete batches, shuffled if the options ask for it.
    fn consume(
        &mut self,
        chunks: Receiver<Result<Chunk>>,
        tower: &Tower,
        reported: &dyn Fn(&Progress<'_>),
    ) -> Result<()> {
        let batch = self.train.batch;
        let block_events = self.options.shuffle.max(batch).next_multiple_of(batch);
        let is_first = self.position.epoch == 0;
        let bytes_before = self.inputs.bytes().unwrap_or(0).saturating_mul(self.position.epoch);
        // Numbers of trained and of quarantined events at the start: those were already processed before the run was resumed.
        let (trained, quarantined) = (self.position.events, self.position.quarantined.0);
        let checkpoint = self.position.hash;
        let mut hash = 0;
        if is_first {
            self.position.met = Default::default();
        }
        let (mut block, mut first) = (Vec::new(), 0u64);
        let (mut bytes, mut read) = (0, 0u64);
        // Several hosts prepare the next batch while they wait for each other. Standard input is excluded, because its
        // next events may arrive late.
        let ahead = usize::from(self.model.hosts().is_some() && self.inputs.is_rereadable());
        let mut waiting = VecDeque::new();
        let mut take = |trainer: &mut Trainer, block: &mut Vec<Event>, bytes: u64, is_last: bool| {
            if trainer.options.shuffle > 0 {
                let number = (trainer.position.epoch << 32) + first / block_events as u64;
                shuffle(block, StepRandom::new(!trainer.options.seed, number));
            }
            let mut rest = block.drain(..).peekable();
            while rest.peek().is_some() {
                let events: Vec<Event> = rest.by_ref().take(batch).collect();
                hash = events::hash(hash, &events);
                let count = events.len() as u64;
                if first >= trained {
                    waiting.push_back(ReadBatch { events, hash, end: first + count, bytes: bytes_before + bytes });
                }
                while waiting.len() > ahead {
                    trainer.train_next(&mut waiting, tower, reported)?;
                }
                let is_before = first < trained;
                first += count;
                if is_before && first >= trained && (first, hash) != (trained, checkpoint) {
                    return Err(trainer.other_events(match first == trained {
                        true => format!("the first {trained} events differ from those of the checkpoint"),
                        false => format!("the events continue after event {trained}, the last one of the checkpoint"),
                    }));
                }
            }
            while is_last && !waiting.is_empty() {
                trainer.train_next(&mut waiting, tower, reported)?;
            }
            Ok(first)
        };
        for chunk in chunks {
            let chunk = chunk?;
            bytes = chunk.bytes;
            for outcome in chunk.outcomes {
                let is_taken = matches!(&outcome, Outcome::Event(event) if self.takes(event, read));
                read += 1;
                if is_first {
                    self.meet(chunk.file, &outcome, is_taken, quarantined)?;
                }
                let Outcome::Event(event) = outcome else { continue };
                if is_taken {
                    block.push(event);
                }
                if block.len() == block_events {
                    take(self, &mut block, bytes, false)?;
                }
            }
        }
        let taken = take(self, &mut block, bytes, true)?;
        if taken < trained {
            return Err(self.other_events(format!(
                "the input ends after event {taken}, but the checkpoint contains {trained} events"
            )));
        }
        let met = self.position.met;
        match is_first && met.refused > self.options.max_refused.most(met.read) {
            true => Err(self.too_many_rejected()),
            false => Ok(()),
        }
    }

    /// Returns whether an event is trained on: for the softmax, positives; for tasks, events with a positive label, and a sample of
    /// the others. `number` counts lines and rows from the start of the epoch.
    fn takes(&self, event: &Event, number: u64) -> bool {
        const DRAWS: u64 = 1 << 32;
        match self.train.loss {
            LossKind::Softmax => event.is_positive,
            LossKind::Tasks if event.has_positive_task() => true,
            LossKind::Tasks => {
                // This seed differs from those of the steps and of shuffling, so the random numbers do too.
                let draws = StepRandom::new(self.options.seed.rotate_left(32), self.position.epoch);
                draws.below(number, DRAWS) < (f64::from(self.train.negatives) * DRAWS as f64) as u64
            }
        }
    }

    /// Counts a line or row; writes a rejected line or row to the quarantine file.
    fn meet(&mut self, file: usize, outcome: &Outcome, is_taken: bool, quarantined: u64) -> Result<()> {
        self.position.met.read += 1;
        match outcome {
            Outcome::Event(_) => self.position.met.skipped += u64::from(!is_taken),
            Outcome::Refused(line, refusal) => {
                self.position.met.refused += 1;
                if self.position.met.refused > quarantined {
                    let file = &self.inputs.name(file);
                    self.quarantine.add(&RejectedEvent { file, line: *line, refusal })?;
                }
                let EventCounts { read, refused, .. } = self.position.met;
                if refused > self.options.max_refused.most(read.max(LIMIT_AFTER)) {
                    return Err(self.too_many_rejected());
                }
            }
        }
        Ok(())
    }
}

/// Returns the digest of a value's JSON.
fn digest<T: Serialize>(value: &T) -> Result<String> {
    let text = serde_json::to_vec(value).map_err(|e| Error::internal(format!("digest: {e}")))?;
    Ok(Checksum::of(&text).xxh3)
}
