//! The engine: takes requests in or refuses them, and keeps the threads that answer.

use std::future::Future;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::backend::{Backend, Job, Terms};
use super::options::Options;
use super::place::Place;
use super::queue::Ask;
use super::shared::Shared;
use super::ticket::Ticket;
use super::worker;
use crate::error::{Error, Result};
use crate::limits::TIMEOUT_MS_MAX;
use crate::request::Priority;

/// Threads that fetch rows. Each waits for one answer of the cluster at a time.
pub(super) const FETCHERS: usize = 4;
/// Least price of a request: nothing is free.
const PRICE_MIN: Duration = Duration::from_micros(1);
/// What costs more is refused all the same, whatever it says.
const PRICE_MAX: Duration = Duration::from_secs(3600);
/// Longest time-out of a request.
const TIMEOUT_MAX: Duration = Duration::from_millis(TIMEOUT_MS_MAX);

/// Workers behind a queue. Dropping it answers what waits and ends the threads.
pub struct Engine<B: Backend> {
    pub(super) shared: Arc<Shared<B>>,
    threads: Vec<JoinHandle<()>>,
    workers: usize,
    timeout: Duration,
}

impl<B: Backend> Engine<B> {
    /// Starts the threads. Metrics go to the recorder that is set by then.
    ///
    /// # Errors
    /// `Invalid` for options that cannot work, `Io` where no thread can be had.
    pub fn start(backend: B, options: &Options) -> Result<Self> {
        options.check()?;
        let workers = options.worker_count();
        let shared = Arc::new(Shared::new(backend, options, workers));
        let mut engine = Engine { shared, threads: Vec::new(), workers, timeout: options.timeout() };
        for number in 0..workers {
            engine.thread(format!("pass-{number}"), move |shared| {
                shared.backend.host(&|| worker::work(shared, number))
            })?;
        }
        for number in 0..FETCHERS {
            engine.thread(format!("fetch-{number}"), worker::fetch)?;
        }
        Ok(engine)
    }

    fn thread(&mut self, name: String, run: impl FnOnce(&Shared<B>) + Send + 'static) -> Result<()> {
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name(name).spawn(move || run(&shared));
        self.threads.push(thread.map_err(|e| Error::io("a worker thread", e))?);
        Ok(())
    }

    /// What the workers run.
    pub fn backend(&self) -> &B {
        &self.shared.backend
    }

    /// Workers, and so the most cores that passes use at once.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Whether a cheap interactive request would be taken in now: the question to ask before a body is read and parsed.
    /// Takes no lock. [`Engine::submit`] decides for good, by what the request costs.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn admits(&self, timeout: Option<Duration>) -> Result<()> {
        self.shared.admits(timeout.unwrap_or(self.timeout)).map_err(|refused| self.shared.meters.refused(refused))
    }

    /// How long whoever reads requests should let them gather: zero but under overload. Each request that is read as soon as
    /// it comes takes a core from a worker and gives it back, which costs both more than the refusal itself.
    pub fn swarm(&self) -> Duration {
        self.shared.swarm(self.timeout)
    }

    /// Takes a request in, or refuses it, at once; the future waits for its answer. Dropping the future is leaving.
    ///
    /// # Errors
    /// What the backend answers; `Overloaded`, with the time to wait, where it cannot be done by its deadline, or where
    /// too much waits or is held; `TooCostly` where it needs more memory than all requests may hold; `DeadlineExceeded`
    /// where work had begun and came late; `NotReady` where the engine ends.
    pub fn submit(&self, work: B::Work, terms: Terms) -> impl Future<Output = Result<B::Answer>> + Send + use<B> {
        let place = self.enter(work, terms);
        async move { place?.await }
    }

    fn enter(&self, work: B::Work, terms: Terms) -> Result<Place<B>> {
        let shared = &self.shared;
        let arrived = Instant::now();
        let cost = shared.backend.cost(&work);
        let deadline = arrived + terms.timeout.unwrap_or(self.timeout).min(TIMEOUT_MAX);
        let ask = Ask {
            priority: terms.priority,
            group: shared.backend.group(&work),
            needs_fetch: shared.backend.needs_fetch(&work),
            price: cost.time.clamp(PRICE_MIN, PRICE_MAX),
            arrived,
            deadline,
        };
        // What may pile up leaves half of the memory to others.
        let may_pile_up = ask.needs_fetch || ask.priority == Priority::Batch;
        let held = shared.ledger.hold(cost.memory_bytes, may_pile_up).map_err(|error| shared.meters.memory(error))?;
        let mut queue = shared.lock();
        let latest_start = match queue.admit(&ask, arrived) {
            Ok(latest_start) => latest_start,
            Err(refused) => {
                drop(queue);
                return Err(shared.meters.refused(refused));
            }
        };
        let (ticket, answer) = Ticket::new(held, arrived, deadline);
        let id = queue.push(Job { work, ticket }, ask, latest_start, arrived);
        shared.publish(&queue);
        drop(queue);
        if ask.needs_fetch { &shared.fetch } else { &shared.work }.notify_one();
        Ok(Place { shared: shared.clone(), id, ask, answer, latest_start, timer: None, is_settled: false })
    }

    /// Takes nothing in any more and waits until all is answered; what then still waits after `bound` is refused, and
    /// what runs is not wanted any more. Blocks.
    pub fn drain(&self, bound: Duration) {
        self.shared.drain(bound);
    }
}

impl<B: Backend> Drop for Engine<B> {
    fn drop(&mut self) {
        self.shared.drain(Duration::ZERO);
        self.shared.end();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        // What a fetch brought back when no worker was there any more.
        self.shared.drain(Duration::ZERO);
    }
}
