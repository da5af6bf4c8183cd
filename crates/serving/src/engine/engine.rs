//! The engine: takes requests in or refuses them, and keeps the threads that answer.

use std::cell::LazyCell;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::backend::{Backend, Job, Terms};
use super::lane::Ask;
use super::options::Options;
use super::own::Own;
use super::place::Place;
use super::shared::{Hand, Life, Shared};
use super::ticket::Ticket;
use super::worker;
use crate::quota::Flow;
use sterling_core::error::{Error, Result};
use sterling_core::limits::TIMEOUT_MS_MAX;
use sterling_core::request::Priority;

/// Threads that fetch rows. Each waits for one answer of the cluster at a time.
pub(super) const FETCHERS: usize = 4;
/// How often workers are looked after, and how long after the last deadline of its batch one is lost: rten looks at no clock.
const WATCH: Duration = Duration::from_secs(1);
const LOST_AFTER: Duration = Duration::from_secs(30);
/// Workers that are given up at most: each may hold a core and its memory for ever.
const LOST_MAX: u64 = 16;
/// Least price of a request: nothing is free.
const PRICE_MIN: Duration = Duration::from_micros(1);
/// What costs more is refused all the same, whatever it says.
const PRICE_MAX: Duration = Duration::from_secs(3600);
/// Longest time-out of a request.
const TIMEOUT_MAX: Duration = Duration::from_millis(TIMEOUT_MS_MAX);

/// Workers behind a queue. Dropping it answers what waits and ends the threads.
pub struct Engine<B: Backend> {
    pub(super) shared: Arc<Shared<B>>,
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
        let engine = Engine { shared, workers, timeout: options.timeout() };
        for number in 0..workers {
            hire(&engine.shared, Life { number, lost_before: 0 })?;
        }
        for number in 0..FETCHERS {
            start(&engine.shared, format!("fetch-{number}"), None, |shared| worker::fetch(shared))?;
        }
        start(&engine.shared, "watch".into(), None, |shared| {
            while !shared.wait_for_end(WATCH) {
                if let Some(since) = Instant::now().checked_sub(LOST_AFTER) {
                    replace_lost(shared, since);
                }
            }
        })?;
        Ok(engine)
    }

    /// What the workers run.
    pub fn backend(&self) -> &B {
        &self.shared.backend
    }

    /// Workers, and so the most cores that passes use at once.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Workers that can answer: neither have their threads ended, nor do they hang in requests that nobody waits for.
    pub fn able_workers(&self) -> usize {
        let since = Instant::now().checked_sub(LOST_AFTER);
        let threads = self.shared.threads();
        let is_alive = |number: usize| {
            let of_worker =
                |hand: &&Hand| hand.life.is_some_and(|life| life.number == number && self.shared.is_current(life));
            threads.iter().find(of_worker).is_some_and(|hand| !hand.thread.is_finished())
        };
        let alive: Vec<usize> = (0..self.workers).filter(|&number| is_alive(number)).collect();
        drop(threads);
        let queue = self.shared.lock();
        alive.into_iter().filter(|&worker| since.is_none_or(|since| !queue.hangs(worker, since))).count()
    }

    /// Whether an interactive request of a caller that costs what is usual would be taken in now: the question to ask before a body is
    /// read and parsed. Takes no lock, and looks for the caller only where some have requests waiting. [`Engine::submit`] decides for good, by what the request costs.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn admits(&self, flow: impl FnOnce() -> Flow, timeout: Option<Duration>) -> Result<()> {
        self.shared.admits(flow, timeout.unwrap_or(self.timeout)).map_err(|refused| self.shared.meters.refused(refused))
    }

    /// As [`Engine::admits`], for a request that may name its own time: `longest` bounds that time, given the default, and returns `None`
    /// if it finds no bound. It is called under overload alone.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn admits_within(
        &self,
        flow: impl FnOnce() -> Flow,
        longest: impl FnOnce(Duration) -> Option<Duration>,
    ) -> Result<()> {
        // To find a caller by its key takes a digest.
        let flow = LazyCell::new(flow);
        if self.shared.admits(|| *flow, self.timeout).is_ok() {
            return Ok(());
        }
        self.admits(|| *flow, Some(longest(self.timeout).unwrap_or(TIMEOUT_MAX).min(TIMEOUT_MAX)))
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
        let entered = self.enter(work, terms, false);
        async move { entered?.answer().await }
    }

    /// As [`Engine::submit`], but a short request for which a worker is idle is run by the calling thread in its place: for callers that
    /// ask one thing at a time, and do not leave.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub async fn answer(&self, work: B::Work, terms: Terms) -> Result<B::Answer> {
        self.enter(work, terms, true)?.answer().await
    }

    fn enter(&self, work: B::Work, terms: Terms, may_be_lent: bool) -> Result<Entered<B>> {
        let shared = &self.shared;
        let arrived = Instant::now();
        let cost = shared.backend.cost(&work);
        let deadline = arrived + terms.timeout.unwrap_or(self.timeout).min(TIMEOUT_MAX);
        let ask = Ask {
            priority: terms.priority,
            flow: terms.flow,
            is_background: terms.is_background,
            group: shared.backend.group(&work),
            needs_fetch: shared.backend.needs_fetch(&work),
            price: cost.time.clamp(PRICE_MIN, PRICE_MAX),
            arrived,
            deadline,
        };
        // What may pile up leaves half of the memory to others.
        let may_pile_up = ask.needs_fetch || ask.priority == Priority::Batch;
        let may_be_lent = may_be_lent && shared.backend.runs_anywhere(&work);
        let held = shared.ledger.hold(terms.flow, cost.memory_bytes, may_pile_up);
        let held = held.map_err(|error| shared.meters.memory(error))?;
        let mut queue = shared.lock();
        if queue.overtake(&ask, arrived) {
            shared.overtaken.fetch_add(1, Ordering::Relaxed);
        }
        let latest_start = match queue.admit(&ask, arrived) {
            Ok(latest_start) => latest_start,
            Err(refused) => {
                shared.publish_for(&queue, &ask, arrived);
                drop(queue);
                return Err(shared.meters.refused(refused));
            }
        };
        let (ticket, answer) = Ticket::new(held, arrived, deadline);
        let ticket = if ask.is_background { ticket.until_overtaken(&shared.overtaken) } else { ticket };
        if may_be_lent && let Some(lent) = shared.lend(&mut queue, &ask, arrived) {
            let is_brief = queue.is_brief(&ask);
            shared.publish(&queue);
            drop(queue);
            let job = Job { work, ticket };
            return Ok(Entered::Runs(Own { shared: shared.clone(), lent, price: ask.price, is_brief, job, answer }));
        }
        let id = queue.push(Job { work, ticket }, ask, latest_start, arrived);
        shared.publish(&queue);
        shared.publish_for(&queue, &ask, arrived);
        match ask.needs_fetch {
            true => shared.fetch.notify_one(),
            false => shared.call(&mut queue, 1),
        }
        drop(queue);
        let place = Place { shared: shared.clone(), id, ask, answer, latest_start, timer: None, is_settled: false };
        Ok(Entered::Waits(place))
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
        loop {
            let hand = self.shared.threads().pop();
            let Some(Hand { life, thread }) = hand else { break };
            // What a lost worker waits for may never come.
            if life.is_none_or(|life| self.shared.is_current(life)) {
                let _ = thread.join();
            }
        }
        // What a fetch brought back when no worker was there any more.
        self.shared.drain(Duration::ZERO);
    }
}

/// A request that was taken in.
enum Entered<B: Backend> {
    Waits(Place<B>),
    Runs(Own<B>),
}

impl<B: Backend> Entered<B> {
    async fn answer(self) -> Result<B::Answer> {
        match self {
            Entered::Waits(place) => place.await,
            Entered::Runs(own) => own.run(),
        }
    }
}

/// Starts a thread of the engine.
fn start<B: Backend>(
    shared: &Arc<Shared<B>>,
    name: String,
    life: Option<Life>,
    run: impl FnOnce(&Arc<Shared<B>>) + Send + 'static,
) -> Result<()> {
    let its_own = shared.clone();
    let thread = std::thread::Builder::new().name(name).spawn(move || run(&its_own));
    let thread = thread.map_err(|e| Error::io("a thread of the engine", e))?;
    shared.threads().push(Hand { life, thread });
    Ok(())
}

/// Starts a worker.
fn hire<B: Backend>(shared: &Arc<Shared<B>>, life: Life) -> Result<()> {
    let name = format!("pass-{}", life.number);
    start(shared, name, Some(life), move |shared| shared.backend.host(&|| worker::work(shared, life)))
}

/// Puts others in the place of workers that run what nobody has waited for since `since`: a graph or a device that hangs
/// costs a thread, not a worker.
pub(super) fn replace_lost<B: Backend>(shared: &Arc<Shared<B>>, since: Instant) {
    for life in shared.lose(since, LOST_MAX) {
        shared.meters.lost();
        tracing::error!(
            worker = life.number,
            "a worker hangs in a request that nobody waits for; another takes its place"
        );
        if let Err(error) = hire(shared, life) {
            tracing::error!(worker = life.number, %error, "there is no thread for another worker");
        }
    }
}
