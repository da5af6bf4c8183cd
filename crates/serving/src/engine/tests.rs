//! Tests of the engine with a fake backend whose work blocks at gates that the tests open. They assert outcomes, never speed.

#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use futures_util::future::join_all;

use super::engine::{FETCHERS, replace_lost};
use super::*;
use sterling_core::error::{Kind, Result};
use sterling_core::quota::Flow;
use sterling_core::request::{CallOptions, Priority};

/// Gate at which work blocks until a test opens it.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
    reached: AtomicU32,
}

impl Gate {
    fn new() -> Arc<Self> {
        Arc::default()
    }

    fn pass(&self) {
        self.reached.fetch_add(1, Ordering::SeqCst);
        let is_open = self.is_open.lock().unwrap();
        // Bounded, because a failing test would otherwise wait for its own threads forever.
        drop(self.opened.wait_timeout_while(is_open, Duration::from_secs(20), |is_open| !*is_open).unwrap());
    }

    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn wait_for(&self, count: u32) {
        until(|| self.reached.load(Ordering::SeqCst) >= count);
    }
}

/// Polls until a condition holds that other threads establish; a defect fails the test after ten seconds.
fn until(holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(10), "the condition did not hold in time");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[derive(Clone)]
struct Work {
    name: u32,
    cost_estimate: Duration,
    bytes: u64,
    group: usize,
    fetch: Option<Arc<Gate>>,
    gate: Option<Arc<Gate>>,
    sleep: Duration,
    breaks: bool,
    fetch_breaks: bool,
    is_bound: bool,
    /// True if the work stops when it is no longer wanted.
    heeds: bool,
}

fn work(name: u32) -> Work {
    Work {
        name,
        cost_estimate: ms(1),
        bytes: 1,
        group: 0,
        fetch: None,
        gate: None,
        sleep: Duration::ZERO,
        breaks: false,
        fetch_breaks: false,
        is_bound: false,
        heeds: false,
    }
}

#[derive(Default)]
struct Fake {
    /// Names in the order of execution, repeated for repeated runs.
    ran: Mutex<Vec<u32>>,
    /// Threads that ran them.
    ran_on: Mutex<Vec<ThreadId>>,
    fetched: Mutex<Vec<Vec<u32>>>,
    batches: Mutex<Vec<usize>>,
    workers_made: AtomicU32,
    rests: AtomicU32,
    /// True if worker threads end immediately.
    has_no_threads: bool,
}

impl Backend for Fake {
    type Work = Work;
    type Answer = u32;
    type Worker = ();

    fn host(&self, work: &(dyn Fn() + Sync)) {
        if !self.has_no_threads {
            work();
        }
    }

    fn worker(&self) {
        self.workers_made.fetch_add(1, Ordering::SeqCst);
    }

    fn cost(&self, work: &Work) -> Estimate {
        Estimate { time: work.cost_estimate, memory_bytes: work.bytes }
    }

    fn group(&self, work: &Work) -> usize {
        work.group
    }

    fn rest(&self, (): &mut ()) {
        self.rests.fetch_add(1, Ordering::SeqCst);
    }

    fn runs_anywhere(&self, work: &Work) -> bool {
        !work.is_bound
    }

    fn needs_fetch(&self, work: &Work) -> bool {
        work.fetch.is_some()
    }

    fn fetch(&self, jobs: &mut [Job<Work, u32>]) {
        self.fetched.lock().unwrap().push(jobs.iter().map(|job| job.work.name).collect());
        for job in jobs {
            job.work.fetch.as_ref().unwrap().pass();
            assert!(!job.work.fetch_breaks, "broken by intent");
        }
    }

    fn run(&self, (): &mut (), jobs: &mut [Job<Work, u32>]) {
        self.batches.lock().unwrap().push(jobs.len());
        for job in jobs.iter().filter(|job| job.ticket.is_wanted()) {
            self.ran.lock().unwrap().push(job.work.name);
            self.ran_on.lock().unwrap().push(std::thread::current().id());
            if let Some(gate) = &job.work.gate {
                gate.pass();
                if job.work.heeds && !job.ticket.is_wanted() {
                    continue;
                }
            }
            std::thread::sleep(job.work.sleep);
            assert!(!job.work.breaks, "broken by intent");
            job.ticket.answer(Ok(job.work.name));
        }
    }
}

fn engine(workers: usize) -> Engine<Fake> {
    let options = Options { workers, memory_mb: 1, timeout_ms: 60_000, ..Options::default() };
    Engine::start(Fake::default(), &options).unwrap()
}

fn terms(timeout: Duration) -> CallOptions {
    CallOptions { timeout: Some(timeout), ..CallOptions::default() }
}

fn wait<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
}

/// Submits a request that occupies a worker until its gate opens.
fn blocker(engine: &Engine<Fake>, cost_estimate: Duration) -> (Arc<Gate>, impl Future<Output = Result<u32>> + use<>) {
    blocker_of(Flow::default(), engine, cost_estimate)
}

/// Occupies a worker by a request of a caller.
fn blocker_of(
    flow: Flow,
    engine: &Engine<Fake>,
    cost_estimate: Duration,
) -> (Arc<Gate>, impl Future<Output = Result<u32>> + use<>) {
    let gate = Gate::new();
    let work = Work { gate: Some(gate.clone()), cost_estimate, ..work(1000) };
    let held = engine.submit(work, CallOptions { flow, ..CallOptions::default() });
    gate.wait_for(1);
    (gate, held)
}

fn kind(result: Result<u32>) -> Kind {
    result.expect_err("an error").kind()
}

/// Asserts that nothing is queued, running or reserved.
fn is_clean(engine: &Engine<Fake>) {
    until(|| engine.shared.lock().is_idle());
    assert_eq!(engine.shared.ledger.held_bytes(), 0);
}

#[test]
fn every_request_gets_its_own_answer() {
    let engine = engine(3);
    let answers = wait(join_all((0..500).map(|n| {
        let fetch = (n % 3 == 0).then(|| {
            let gate = Gate::new();
            gate.open();
            gate
        });
        engine.submit(Work { group: n as usize % 4, fetch, ..work(n) }, CallOptions::default())
    })));
    for (n, answer) in answers.into_iter().enumerate() {
        assert_eq!(answer.unwrap(), n as u32);
    }
    is_clean(&engine);
    assert_eq!(engine.backend().ran.lock().unwrap().len(), 500);
}

#[test]
fn workers_share_waiting_requests_and_batches_stay_short() {
    let engine = engine(1);
    let (gate, held) = blocker(&engine, ms(1));
    let waiting: Vec<_> =
        (0..40).map(|n| engine.submit(Work { cost_estimate: ms(2), ..work(n) }, CallOptions::default())).collect();
    gate.open();
    wait(async { (held.await.unwrap(), join_all(waiting).await) });
    is_clean(&engine);
    assert_eq!(*engine.backend().batches.lock().unwrap(), [1, 5, 5, 5, 5, 5, 5, 5, 5], "10 ms each");
}

#[test]
fn a_panic_fails_its_request_and_no_other() {
    let engine = engine(1);
    let (gate, held) = blocker(&engine, ms(1));
    let breaking = |n: u32| engine.submit(Work { breaks: n == 4, ..work(n) }, CallOptions::default());
    let waiting: Vec<_> = (0..8).map(breaking).collect();
    gate.open();
    let answers = wait(async { (held.await.unwrap(), join_all(waiting).await).1 });
    for (n, answer) in answers.into_iter().enumerate() {
        match n {
            4 => assert_eq!(kind(answer), Kind::Internal),
            _ => assert_eq!(answer.unwrap(), n as u32),
        }
    }
    is_clean(&engine);
    let ran = engine.backend().ran.lock().unwrap().clone();
    assert_eq!(ran, [1000, 0, 1, 2, 3, 4, 4, 5, 6, 7], "an answered request is not run again");
    until(|| engine.backend().workers_made.load(Ordering::SeqCst) == 4);
    assert_eq!(wait(engine.submit(work(9), CallOptions::default())).unwrap(), 9);
}

#[test]
fn a_hung_worker_is_replaced_and_harmless_when_it_returns() {
    let engine = engine(1);
    let (short, far) = (ms(50), ms(60_000));
    let hang = |name: u32| {
        let gate = Gate::new();
        let requested = Work { gate: Some(gate.clone()), ..work(name) };
        assert_eq!(kind(wait(engine.submit(requested, terms(short)))), Kind::DeadlineExceeded);
        gate.wait_for(1);
        gate
    };
    let first = hang(1);
    replace_lost(&engine.shared, Instant::now() - far);
    assert!(!engine.shared.lock().is_idle(), "it has time left");
    replace_lost(&engine.shared, Instant::now());
    assert_eq!(wait(engine.submit(work(2), CallOptions::default())).unwrap(), 2);
    // The returning thread finds its slot taken while the other runs.
    let (gate, held) = blocker(&engine, ms(1));
    first.open();
    until(|| engine.shared.ledger.held_bytes() == 1);
    assert!(!engine.shared.lock().is_idle(), "the one that came back does not end what the other runs");
    gate.open();
    wait(held).unwrap();
    is_clean(&engine);
    // Not even shutdown waits for a thread that never returns.
    let _second = hang(3);
    replace_lost(&engine.shared, Instant::now());
    assert_eq!(wait(engine.submit(work(4), CallOptions::default())).unwrap(), 4);
    let started = Instant::now();
    drop(engine);
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
fn ended_and_hung_workers_are_reported() {
    let engine = engine(2);
    assert_eq!(engine.available_workers(), 2);
    let gate = Gate::new();
    let requested = Work { gate: Some(gate.clone()), ..work(1) };
    assert_eq!(kind(wait(engine.submit(requested, terms(ms(50))))), Kind::DeadlineExceeded);
    assert_eq!(engine.available_workers(), 2, "it may yet end");
    assert!((0..3).any(|worker| engine.shared.lock().hangs(worker, Instant::now())));
    gate.open();
    is_clean(&engine);
    let options = Options { workers: 3, ..Options::default() };
    let engine = Engine::start(Fake { has_no_threads: true, ..Fake::default() }, &options).unwrap();
    until(|| engine.available_workers() == 0);
}

#[test]
fn callers_preempt_background_work() {
    let engine = engine(1);
    let gate = Gate::new();
    let audit = Work { gate: Some(gate.clone()), cost_estimate: ms(5000), heeds: true, ..work(1) };
    let (priority, timeout) = (Priority::Batch, Some(ms(30_000)));
    let audit = engine.submit(audit, CallOptions { priority, timeout, is_background: true, ..CallOptions::default() });
    gate.wait_for(1);
    let own = engine.submit(Work { cost_estimate: ms(10), ..work(2) }, terms(ms(1000)));
    // The work checks whether it is wanted when it resumes, and ends.
    gate.open();
    let (audit, own) = wait(async { (audit.await, own.await) });
    assert_eq!(own.unwrap(), 2);
    let error = audit.unwrap_err();
    assert_eq!(
        (error.kind(), error.to_string().as_str()),
        (Kind::Overloaded, "a background request was dropped, because requests of callers take precedence")
    );
    is_clean(&engine);
}

#[test]
fn many_requests_of_one_caller_are_rejected_and_others_are_not() {
    let engine = engine(1);
    let flow = |n: u64| Flow(n << 48 | n);
    let (gate, held) = blocker(&engine, ms(1));
    let (second_gate, second_held) = blocker_of(Flow(9), &engine, ms(1));
    let ask = |n: u32| {
        engine.submit(Work { cost_estimate: ms(10), ..work(n) }, CallOptions { flow: flow(1), ..terms(ms(1000)) })
    };
    let waiting: Vec<_> = (0..100).map(ask).collect();
    let admits = |n: u64| engine.admits(|| flow(n), Some(ms(1000)));
    assert_eq!(admits(1).unwrap_err().kind(), Kind::Overloaded);
    assert!(admits(2).is_ok());
    let other = engine.submit(work(500), CallOptions { flow: flow(2), ..terms(ms(60_000)) });
    gate.open();
    let (answers, other) = wait(async { (held.await, (join_all(waiting).await, other.await)) }).1;
    second_gate.open();
    wait(second_held).unwrap();
    assert_eq!(other.unwrap(), 500);
    assert!(answers.iter().filter(|answer| answer.is_ok()).count() > 10);
    is_clean(&engine);
    let ran = engine.backend().ran.lock().unwrap().clone();
    let at = ran.iter().position(|name| *name == 500).unwrap();
    assert!(at <= 3, "the request of the other caller was the {at}th, of {ran:?}");
}

#[test]
fn a_short_request_starts_at_once_beside_those_of_other_callers() {
    for cores in [1, 2] {
        let engine = engine(cores);
        // Long requests of two callers, and queued ones of both.
        let long = |flow: u64| blocker_of(Flow(flow), &engine, ms(6));
        let held: Vec<_> = (0..cores as u64).map(long).collect();
        let queued =
            |flow: u64| engine.submit(work(flow as u32), CallOptions { flow: Flow(flow), ..terms(ms(60_000)) });
        let mut waiting = Vec::new();
        if cores == 1 {
            waiting.extend([queued(0), queued(0)]);
        }
        for n in 10..20 {
            let other = CallOptions { flow: Flow(7), ..terms(ms(60_000)) };
            assert_eq!(wait(engine.submit(work(n), other)).unwrap(), n);
            let other = CallOptions { flow: Flow(8), ..terms(ms(60_000)) };
            let long = Work { cost_estimate: ms(6), ..work(n) };
            waiting.push(engine.submit(long, other));
        }
        let ran: Vec<u32> = (10..20).collect();
        assert_eq!(
            engine.backend().ran.lock().unwrap().split_off(cores),
            ran,
            "no long one, and none of the first caller"
        );
        held.iter().for_each(|(gate, _)| gate.open());
        wait(async { (join_all(held.into_iter().map(|(_, held)| held)).await, join_all(waiting).await) });
        is_clean(&engine);
    }
}

#[test]
fn abandoned_requests_do_not_delay_their_caller() {
    let engine = engine(1);
    let (gate, held) = blocker(&engine, ms(1));
    let (second_gate, second_held) = blocker_of(Flow(9), &engine, ms(1));
    let ask = |n: u32| {
        // Expensive requests would leave the reserved worker to a short one.
        engine.submit(Work { cost_estimate: ms(20), ..work(n) }, CallOptions { flow: Flow(7), ..terms(ms(60_000)) })
    };
    let waiting: Vec<_> = (0..100).map(ask).collect();
    let admits = || engine.admits(|| Flow(7), Some(ms(1000)));
    assert_eq!(admits().unwrap_err().kind(), Kind::Overloaded);
    drop(waiting);
    assert!(admits().is_ok());
    assert_eq!(engine.read_delay(), Duration::ZERO);
    gate.open();
    second_gate.open();
    assert_eq!(wait(async { (held.await.unwrap(), second_held.await.unwrap()) }), (1000, 1000));
    is_clean(&engine);
}

#[test]
fn callers_run_short_requests_if_a_worker_is_idle() {
    let engine = engine(1);
    let here = std::thread::current().id();
    let ran_here = |work: Work| {
        let name = work.name;
        assert_eq!(wait(engine.answer(work, CallOptions::default())).unwrap(), name);
        engine.backend().ran_on.lock().unwrap().pop() == Some(here)
    };
    // The worker's thread has created its state.
    until(|| ran_here(work(1)));
    let fetch = Gate::new();
    fetch.open();
    assert!(!ran_here(Work { cost_estimate: ms(1000), ..work(2) }), "it takes long");
    assert!(!ran_here(Work { fetch: Some(fetch), ..work(3) }), "rows are missing");
    assert!(!ran_here(Work { is_bound: true, ..work(4) }), "its graphs have threads of their own");
    // A worker answers before it is idle again.
    until(|| ran_here(work(5)));
    assert_eq!(wait(engine.submit(work(6), CallOptions::default())).unwrap(), 6);
    assert_ne!(engine.backend().ran_on.lock().unwrap().pop(), Some(here), "a caller of `submit` may leave");
    is_clean(&engine);
    assert!(engine.backend().workers_made.load(Ordering::SeqCst) <= 2, "callers and workers keep the same");
}

#[test]
fn inline_requests_do_not_overtake_waiting_ones() {
    let engine = engine(1);
    let (gate, held) = blocker(&engine, ms(1));
    let waiting = engine.submit(work(1), CallOptions::default());
    let answered = std::thread::scope(|scope| {
        let late = scope.spawn(|| wait(engine.answer(work(2), CallOptions::default())));
        until(|| engine.shared.lock().waiting() == 2);
        gate.open();
        late.join().unwrap()
    });
    assert_eq!(answered.unwrap(), 2);
    wait(async { (held.await.unwrap(), waiting.await.unwrap()) });
    is_clean(&engine);
    assert_eq!(*engine.backend().ran.lock().unwrap(), [1000, 1, 2]);
}

#[test]
fn callers_that_run_inline_leave_the_other_workers_available() {
    for workers in [1, 2, 3] {
        let engine = engine(workers);
        let own = |name, gate: &Arc<Gate>| {
            wait(engine.answer(Work { gate: Some(gate.clone()), ..work(name) }, CallOptions::default()))
        };
        let gate = Gate::new();
        std::thread::scope(|scope| {
            let callers: Vec<_> = (0..workers as u32 - 1)
                .map(|n| {
                    scope.spawn({
                        let gate = &gate;
                        move || own(n, gate)
                    })
                })
                .collect();
            gate.wait_for(workers as u32 - 1);
            for n in 10..200 {
                assert_eq!(wait(engine.submit(work(n), CallOptions::default())).unwrap(), n);
            }
            // If no worker is left, queued requests are answered when a caller finishes.
            let last = scope.spawn(|| own(8, &gate));
            gate.wait_for(workers as u32);
            let waiting: Vec<_> = (200..240).map(|n| engine.submit(work(n), CallOptions::default())).collect();
            gate.open();
            let answers = wait(join_all(waiting));
            assert!(answers.into_iter().zip(200..).all(|(answer, n)| answer.unwrap() == n));
            assert_eq!(last.join().unwrap().unwrap(), 8);
            assert!(callers.into_iter().zip(0..).all(|(caller, n)| caller.join().unwrap().unwrap() == n));
        });
        is_clean(&engine);
    }
}

#[test]
fn callers_and_workers_answer_all_requests() {
    let engine = engine(2);
    let answer = |n: u32| {
        let requested = Work { cost_estimate: ms(u64::from(n % 8)), breaks: n % 97 == 5, ..work(n) };
        let given = match n % 3 {
            0 => wait(engine.submit(requested, CallOptions::default())),
            _ => wait(engine.answer(requested, CallOptions::default())),
        };
        assert_eq!(given.ok(), (n % 97 != 5).then_some(n));
    };
    std::thread::scope(|scope| {
        (0..6).for_each(|caller| drop(scope.spawn(move || (0..500).for_each(|n| answer(caller * 500 + n)))));
    });
    is_clean(&engine);
}

#[test]
fn a_panic_in_an_inline_request_fails_it_alone() {
    let engine = engine(1);
    until(|| engine.shared.kept(0).is_some());
    for n in 0..5 {
        assert_eq!(kind(wait(engine.answer(Work { breaks: true, ..work(n) }, CallOptions::default()))), Kind::Internal);
        assert_eq!(wait(engine.answer(work(n), CallOptions::default())).unwrap(), n);
    }
    is_clean(&engine);
}

#[test]
fn a_hung_caller_does_not_block_others() {
    let engine = engine(1);
    until(|| engine.shared.kept(0).is_some());
    let gate = Gate::new();
    std::thread::scope(|scope| {
        let requested = Work { gate: Some(gate.clone()), ..work(1) };
        let hanging = scope.spawn(|| wait(engine.answer(requested, terms(ms(50)))));
        gate.wait_for(1);
        until(|| {
            replace_lost(&engine.shared, Instant::now());
            engine.shared.lock().is_idle()
        });
        for n in 2..20 {
            assert_eq!(wait(engine.submit(work(n), CallOptions::default())).unwrap(), n);
        }
        gate.open();
        drop(hanging.join().unwrap());
        assert_eq!(wait(engine.submit(work(20), CallOptions::default())).unwrap(), 20);
        assert_eq!(wait(engine.answer(work(21), CallOptions::default())).unwrap(), 21);
    });
    is_clean(&engine);
}

#[test]
fn a_panic_in_a_fetch_fails_its_request_and_no_other() {
    let engine = engine(1);
    let gate = Gate::new();
    let breaking = |n: u32| Work { fetch: Some(gate.clone()), fetch_breaks: n == 5, ..work(n) };
    let waiting: Vec<_> = (0..8).map(|n| engine.submit(breaking(n), CallOptions::default())).collect();
    gate.open();
    for (n, answer) in wait(join_all(waiting)).into_iter().enumerate() {
        match n {
            5 => assert_eq!(kind(answer), Kind::Internal),
            _ => assert_eq!(answer.unwrap(), n as u32),
        }
    }
    is_clean(&engine);
}

#[test]
fn abandoned_waiting_requests_use_no_worker() {
    let engine = engine(1);
    let (gate, held) = blocker(&engine, ms(1));
    let mut waiting: Vec<_> = (0..6).map(|n| Box::pin(engine.submit(work(n), CallOptions::default()))).collect();
    for removed in [4, 2, 1] {
        drop(waiting.remove(removed));
    }
    assert_eq!(engine.shared.lock().waiting(), 3);
    gate.open();
    wait(async { (held.await.unwrap(), join_all(waiting).await) });
    is_clean(&engine);
    assert_eq!(*engine.backend().ran.lock().unwrap(), [1000, 0, 3, 5]);
}

#[test]
fn abandoned_requests_of_a_batch_are_not_run() {
    let engine = engine(1);
    let (first_gate, held) = blocker(&engine, ms(1));
    let gate = Gate::new();
    let mut waiting: Vec<_> = (0..3)
        .map(|n| {
            Box::pin(engine.submit(Work { gate: (n == 0).then(|| gate.clone()), ..work(n) }, CallOptions::default()))
        })
        .collect();
    first_gate.open();
    gate.wait_for(1);
    drop(waiting.remove(1));
    gate.open();
    wait(async { (held.await.unwrap(), join_all(waiting).await) });
    is_clean(&engine);
    assert_eq!(*engine.backend().batches.lock().unwrap(), [1, 3]);
    assert_eq!(*engine.backend().ran.lock().unwrap(), [1000, 0, 2]);
}

#[test]
fn requests_that_wait_beyond_their_deadline_never_run() {
    let engine = engine(1);
    // A request whose cost estimate is far too low.
    let (gate, held) = blocker(&engine, ms(1));
    let error = wait(engine.submit(work(1), terms(ms(40)))).expect_err("refused");
    assert_eq!(error.kind(), Kind::Overloaded);
    assert!(error.retry_wait().is_some());
    gate.open();
    wait(held).unwrap();
    is_clean(&engine);
    assert_eq!(*engine.backend().ran.lock().unwrap(), [1000]);
}

#[test]
fn late_answers_are_reported_as_late() {
    let engine = engine(1);
    let gate = Gate::new();
    let late = engine.submit(Work { gate: Some(gate.clone()), ..work(1) }, terms(ms(500)));
    assert_eq!(kind(wait(late)), Kind::DeadlineExceeded);
    gate.open();
    is_clean(&engine);
}

#[test]
fn unachievable_deadlines_are_rejected_at_once() {
    let engine = engine(1);
    let check = |result: Result<u32>| {
        let error = result.expect_err("refused");
        assert_eq!(error.kind(), Kind::Overloaded, "{error}");
        assert!(error.retry_wait().is_some_and(|wait| wait > Duration::ZERO), "{error}");
    };
    check(wait(engine.submit(Work { cost_estimate: ms(100), ..work(1) }, terms(ms(50)))));
    assert!(engine.admits(Flow::default, Some(ms(50))).is_ok());
    let (gate, held) = blocker(&engine, ms(30_000));
    check(wait(engine.submit(work(2), terms(ms(50)))));
    assert!(engine.admits(|| Flow(1), Some(ms(50))).is_ok(), "a worker is left for other callers");
    // A request that came as a short one holds that worker too.
    let (second_gate, second_held) = blocker_of(Flow(1), &engine, ms(1));
    check(engine.admits(Flow::default, Some(ms(50))).map(|()| 0));
    assert!(engine.admits(Flow::default, Some(ms(600_000))).is_ok());
    gate.open();
    second_gate.open();
    wait(async { (held.await.unwrap(), second_held.await.unwrap()) });
    is_clean(&engine);
    assert!(engine.admits(Flow::default, Some(ms(50))).is_ok());
    assert_eq!(*engine.backend().ran.lock().unwrap(), [1000, 1000]);
}

#[test]
fn no_more_wait_than_may_and_batch_requests_have_their_own_room() {
    let options = Options { queue: 4, workers: 1, timeout_ms: 60_000, ..Options::default() };
    let engine = Engine::start(Fake::default(), &options).unwrap();
    let (gate, held) = blocker(&engine, ms(1));
    let submit = |priority| Box::pin(engine.submit(work(1), CallOptions { priority, ..CallOptions::default() }));
    let batch: Vec<_> = (0..5).map(|_| submit(Priority::Batch)).collect();
    let interactive: Vec<_> = (0..5).map(|_| submit(Priority::Interactive)).collect();
    assert_eq!(kind(engine.admits(Flow::default, None).map(|()| 0)), Kind::Overloaded);
    gate.open();
    for waiting in [batch, interactive] {
        let answers = wait(join_all(waiting));
        assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 4);
        assert_eq!(kind(answers.into_iter().next_back().unwrap()), Kind::Overloaded);
    }
    wait(held).unwrap();
    is_clean(&engine);
}

#[test]
fn expensive_requests_leave_a_worker_to_others() {
    let engine = engine(3);
    let gate = Gate::new();
    let expensive = |n| Work { gate: Some(gate.clone()), cost_estimate: ms(50), ..work(n) };
    let all_expensive: Vec<_> = (0..6).map(|n| engine.submit(expensive(n), CallOptions::default())).collect();
    gate.wait_for(2);
    for n in 10..60 {
        assert_eq!(wait(engine.submit(work(n), CallOptions::default())).unwrap(), n);
    }
    assert_eq!(gate.reached.load(Ordering::SeqCst), 2);
    gate.open();
    assert!(wait(join_all(all_expensive)).into_iter().all(|answer| answer.is_ok()));
    is_clean(&engine);
}

#[test]
fn interactive_requests_go_first() {
    let engine = engine(1);
    let (gate, held) = blocker(&engine, ms(1));
    let submit = |n: u32, priority| engine.submit(work(n), CallOptions { priority, ..CallOptions::default() });
    let batch: Vec<_> = (0..4).map(|n| submit(n, Priority::Batch)).collect();
    let interactive: Vec<_> = (10..14).map(|n| submit(n, Priority::Interactive)).collect();
    gate.open();
    wait(async { (held.await.unwrap(), join_all(batch).await, join_all(interactive).await) });
    assert_eq!(*engine.backend().ran.lock().unwrap(), [1000, 10, 11, 12, 13, 0, 1, 2, 3]);
}

#[test]
fn a_slow_fetch_delays_those_that_need_it_alone_and_they_go_together() {
    let engine = engine(1);
    let gate = Gate::new();
    let remote = |n, group| {
        Box::pin(engine.submit(Work { fetch: Some(gate.clone()), group, ..work(n) }, CallOptions::default()))
    };
    let mut first: Vec<_> = Vec::new();
    for n in 0..FETCHERS as u32 {
        first.push(remote(n, 0));
        gate.wait_for(n + 1);
    }
    let rest: Vec<_> = (10..20).map(|n| remote(n, n as usize % 2)).collect();
    for n in 30..60 {
        assert_eq!(wait(engine.submit(work(n), CallOptions::default())).unwrap(), n);
    }
    // A request whose rows do not arrive is rejected in time, and neither fetched nor run.
    let late = engine.submit(Work { fetch: Some(gate.clone()), ..work(99) }, terms(ms(30)));
    assert_eq!(kind(wait(late)), Kind::Overloaded);
    gate.open();
    assert!(wait(join_all(first.into_iter().chain(rest))).into_iter().all(|answer| answer.is_ok()));
    is_clean(&engine);
    let mut fetched = engine.backend().fetched.lock().unwrap().clone();
    fetched[FETCHERS..].sort();
    assert_eq!(fetched[FETCHERS..], [vec![10, 12, 14, 16, 18], vec![11, 13, 15, 17, 19]]);
}

#[test]
fn memory_is_bounded_and_all_of_it_comes_back() {
    let engine = engine(2);
    let mib = 1u64 << 20;
    let error =
        wait(engine.submit(Work { bytes: mib + 1, ..work(1) }, CallOptions::default())).expect_err("too costly");
    assert_eq!(error.kind(), Kind::TooCostly);
    assert!(error.to_string().contains("1048577") && error.to_string().contains("1048576"), "{error}");
    let gate = Gate::new();
    let large = |bytes, priority| {
        let work = Work { bytes, gate: Some(gate.clone()), ..work(1) };
        engine.submit(work, CallOptions { priority, ..CallOptions::default() })
    };
    let held = large(mib / 2, Priority::Interactive);
    let error = wait(large(1, Priority::Batch)).expect_err("batch requests get half of it");
    assert_eq!((error.kind(), error.retry_wait().is_some()), (Kind::Overloaded, true));
    let also_held = large(mib / 2, Priority::Interactive);
    assert_eq!(kind(wait(large(1, Priority::Interactive))), Kind::Overloaded);
    gate.open();
    wait(async { (held.await.unwrap(), also_held.await.unwrap()) });
    is_clean(&engine);
    assert_eq!(wait(large(mib, Priority::Batch)).unwrap(), 1);
}

#[test]
fn draining_finishes_waiting_requests_and_accepts_none() {
    let engine = engine(1);
    let waiting: Vec<_> = (0..20).map(|n| engine.submit(work(n), CallOptions::default())).collect();
    engine.drain(Duration::from_secs(10));
    assert_eq!(kind(wait(engine.submit(work(99), CallOptions::default()))), Kind::NotReady);
    assert_eq!(kind(engine.admits(Flow::default, None).map(|()| 0)), Kind::NotReady);
    assert!(wait(join_all(waiting)).into_iter().all(|answer| answer.is_ok()));
    is_clean(&engine);
}

#[test]
fn draining_ends_within_its_bound_and_so_does_dropping() {
    let engine = engine(1);
    let (gate, held) = blocker(&engine, ms(1));
    let fetch_gate = Gate::new();
    let waiting = engine.submit(work(1), CallOptions::default());
    let fetching = engine.submit(Work { fetch: Some(fetch_gate.clone()), ..work(2) }, CallOptions::default());
    engine.drain(ms(20));
    assert_eq!(kind(wait(waiting)), Kind::NotReady);
    fetch_gate.open();
    gate.open();
    drop(engine);
    assert_eq!(kind(wait(fetching)), Kind::NotReady);
    // The running request is answered if its answer was made nevertheless.
    assert_eq!(wait(held).unwrap(), 1000);
}

#[test]
fn triple_overload_is_answered_or_rejected_completely() {
    let engine = engine(2);
    let offered = 1500;
    let answers = wait(async {
        let mut ticks = tokio::time::interval(ms(1));
        let mut calls = Vec::new();
        for n in 0..offered {
            if n % 3 == 0 {
                ticks.tick().await;
            }
            let request = Work { cost_estimate: ms(2), sleep: ms(2), ..work(n) };
            calls.push(tokio::spawn(engine.submit(request, terms(ms(300)))));
        }
        join_all(calls).await
    });
    let mut answered = 0;
    for answer in answers {
        match answer.unwrap() {
            Ok(_) => answered += 1,
            Err(error) if error.kind() == Kind::Overloaded => assert!(error.retry_wait().is_some()),
            // A busy machine may sleep through a deadline.
            Err(error) => assert_eq!(error.kind(), Kind::DeadlineExceeded),
        }
    }
    assert!((50..offered).contains(&answered), "{answered} of {offered} answered");
    is_clean(&engine);
    assert!(engine.backend().ran.lock().unwrap().len() < offered as usize, "a rejected request was not run");
    assert_eq!(wait(engine.submit(work(7), CallOptions::default())).unwrap(), 7);
}

#[test]
fn options_that_cannot_work_are_named() {
    let invalid = |options: Options| options.check().expect_err("refused").to_string();
    assert!(invalid(Options { queue: 0, ..Options::default() }).contains("engine.queue: got 0"));
    assert!(invalid(Options { batch: 5000, ..Options::default() }).contains("engine.batch: got 5000"));
    assert!(invalid(Options { workers: 1025, ..Options::default() }).contains("engine.workers: got 1025"));
    assert!(invalid(Options { timeout_ms: 0, ..Options::default() }).contains("engine.timeout_ms: got 0"));
    assert!(
        invalid(Options { expensive_request_ms: 0, ..Options::default() })
            .contains("engine.expensive_request_ms: got 0")
    );
    assert!(invalid(Options { memory_mb: 0, ..Options::default() }).contains("engine.memory_mb: got 0"));
    assert!(Options::default().check().is_ok());
}

#[test]
fn idle_workers_sleep() {
    let engine = engine(1);
    let rests = || engine.backend().rests.load(Ordering::SeqCst);
    until(|| rests() > 1);
    assert_eq!(wait(engine.submit(work(1), CallOptions::default())).unwrap(), 1, "and wakes");
}
