//! The bounded queue and its workers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::Model as _;
use crate::error::{Error, Result};
use crate::registry::Loaded;
use crate::wire::{EmbedRequest, RankRequest, RetrieveRequest, Retrieved};

/// How much may wait and how much is taken together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Requests that may wait; beyond it they are refused.
    pub queue: usize,
    /// Most requests that a worker takes together.
    pub batch: usize,
    /// Worker threads; 0 means one a core.
    pub workers: usize,
    /// Time-out of requests that do not name one, in milliseconds.
    pub timeout_ms: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { queue: 1024, batch: 32, workers: 0, timeout_ms: 1000 }
    }
}

impl Options {
    /// Refuses options that cannot work.
    ///
    /// # Errors
    /// `Invalid` with the option, its value and its range.
    pub fn check(&self) -> Result<()> {
        for (name, value, most) in [
            ("queue", self.queue, 1 << 20),
            ("batch", self.batch, 4096),
            ("timeout_ms", self.timeout_ms as usize, 600_000),
        ] {
            if value == 0 || value > most {
                return Err(Error::invalid(format!("engine.{name}: got {value}, expected 1 to {most}")));
            }
        }
        if self.workers > 1024 {
            return Err(Error::invalid(format!("engine.workers: got {}, expected 0 to 1024", self.workers)));
        }
        Ok(())
    }
}

type Reply<T> = oneshot::Sender<Result<T>>;

enum Work {
    Retrieve(Box<RetrieveRequest>, Reply<Retrieved>),
    Rank(Box<RankRequest>, Reply<Retrieved>),
    Embed(Box<EmbedRequest>, Reply<(Vec<f32>, u64)>),
}

impl Work {
    fn refuse(self, error: Error) {
        // A closed channel means that the caller has gone; nobody is left to tell.
        match self {
            Work::Retrieve(_, reply) | Work::Rank(_, reply) => drop(reply.send(Err(error))),
            Work::Embed(_, reply) => drop(reply.send(Err(error))),
        }
    }
}

struct Job {
    model: Arc<Loaded>,
    work: Work,
    queued: Instant,
    deadline: Instant,
}

/// Workers behind a bounded queue. Dropping it answers what waits and ends the workers.
pub struct Engine {
    jobs: Option<Sender<Job>>,
    workers: Vec<JoinHandle<()>>,
    timeout: Duration,
}

impl Engine {
    /// Starts the workers.
    ///
    /// # Errors
    /// `Invalid` for options that cannot work, `Io` where no thread can be had.
    pub fn start(options: &Options) -> Result<Self> {
        options.check()?;
        let (jobs, waiting) = bounded(options.queue);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let count = if options.workers == 0 { cores } else { options.workers };
        let start = |n: usize| {
            let (waiting, batch) = (waiting.clone(), options.batch);
            std::thread::Builder::new()
                .name(format!("pass-{n}"))
                .spawn(move || work(&waiting, batch))
                .map_err(|e| Error::io("a worker thread", e))
        };
        let workers = (0..count).map(start).collect::<Result<_>>()?;
        Ok(Engine { jobs: Some(jobs), workers, timeout: Duration::from_millis(options.timeout_ms) })
    }

    /// Answers one retrieval.
    ///
    /// # Errors
    /// What the pass returns, `Overloaded` where the queue is full, `DeadlineExceeded`.
    pub async fn retrieve(&self, model: Arc<Loaded>, request: RetrieveRequest) -> Result<Retrieved> {
        request.check()?;
        let timeout_ms = request.timeout_ms;
        self.submit(model, timeout_ms, |reply| Work::Retrieve(Box::new(request), reply)).await
    }

    /// Scores given items.
    ///
    /// # Errors
    /// As [`Engine::retrieve`].
    pub async fn rank(&self, model: Arc<Loaded>, request: RankRequest) -> Result<Retrieved> {
        request.check()?;
        let timeout_ms = request.timeout_ms;
        self.submit(model, timeout_ms, |reply| Work::Rank(Box::new(request), reply)).await
    }

    /// The query embedding of features.
    ///
    /// # Errors
    /// As [`Engine::retrieve`].
    pub async fn embed(&self, model: Arc<Loaded>, request: EmbedRequest) -> Result<(Vec<f32>, u64)> {
        crate::wire::check_timeout(request.timeout_ms)?;
        let timeout_ms = request.timeout_ms;
        self.submit(model, timeout_ms, |reply| Work::Embed(Box::new(request), reply)).await
    }

    async fn submit<T>(
        &self,
        model: Arc<Loaded>,
        timeout_ms: Option<u64>,
        work: impl FnOnce(Reply<T>) -> Work,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        let queued = Instant::now();
        let deadline = queued + timeout_ms.map_or(self.timeout, Duration::from_millis);
        let job = Job { model, work: work(reply), queued, deadline };
        let jobs = self.jobs.as_ref().ok_or_else(|| Error::not_ready("the server is shutting down"))?;
        match jobs.try_send(job) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                return Err(Error::overloaded(format!("{} requests wait already, try again later", jobs.len())));
            }
            Err(TrySendError::Disconnected(_)) => return Err(Error::not_ready("the server is shutting down")),
        }
        match tokio::time::timeout_at(deadline.into(), answer).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(Error::internal("the worker ended without an answer")),
            Err(_) => Err(late(queued, deadline)),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.jobs = None;
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn late(queued: Instant, deadline: Instant) -> Error {
    Error::deadline(format!("no answer within {} ms", deadline.duration_since(queued).as_millis()))
}

fn work(waiting: &Receiver<Job>, batch: usize) {
    while let Ok(first) = waiting.recv() {
        let mut jobs = vec![first];
        while jobs.len() < batch {
            match waiting.try_recv() {
                Ok(job) => jobs.push(job),
                Err(_) => break,
            }
        }
        metrics::histogram!("sterling_batch_requests").record(jobs.len() as f64);
        let now = Instant::now();
        let (ready, expired): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.deadline > now);
        for job in expired {
            let error = late(job.queued, job.deadline);
            job.work.refuse(error);
        }
        for job in &ready {
            metrics::histogram!("sterling_queue_seconds").record(now.duration_since(job.queued).as_secs_f64());
        }
        let mut rest = ready;
        while let Some(model) = rest.first().map(|job| job.model.clone()) {
            let (same, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(|job| Arc::ptr_eq(&job.model, &model));
            answer(&model, same);
            rest = others;
        }
    }
}

fn answer(model: &Loaded, jobs: Vec<Job>) {
    let mut requests = Vec::new();
    let mut replies = Vec::new();
    let mut deadline: Option<Instant> = None;
    for job in jobs {
        match job.work {
            Work::Retrieve(request, reply) => {
                requests.push(request);
                replies.push(reply);
                // Together they are worth waiting for as long as the most patient one is.
                deadline = deadline.max(Some(job.deadline));
            }
            Work::Rank(request, reply) => {
                let _ = reply.send(guarded(|| model.snapshot().rank(&request, job.deadline)));
            }
            Work::Embed(request, reply) => {
                let _ = reply.send(guarded(|| model.snapshot().embed(&request, job.deadline)));
            }
        }
    }
    let Some(deadline) = deadline else { return };
    let of_all: Vec<&RetrieveRequest> = requests.iter().map(|r| &**r).collect();
    match guarded(|| Ok(model.snapshot().retrieve(&of_all, deadline))) {
        Ok(results) => {
            for (reply, result) in replies.into_iter().zip(results) {
                let _ = reply.send(result);
            }
        }
        // One of them broke the pass: each is tried alone, so that the others are answered.
        Err(_) => {
            for (reply, request) in replies.into_iter().zip(&of_all) {
                let alone = guarded(|| {
                    model
                        .snapshot()
                        .retrieve(&[*request], deadline)
                        .pop()
                        .unwrap_or_else(|| Err(Error::internal("no result")))
                });
                let _ = reply.send(alone);
            }
        }
    }
}

/// Runs `f`; a panic becomes an error, and the worker goes on.
fn guarded<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let what = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or(panic.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        tracing::error!(panic = what, "a request broke the pass");
        Err(Error::internal("the request broke the pass; this is a defect, the log holds more"))
    })
}
