//! Threads of the engine: workers that run batches, and fetchers that fetch rows before a request takes a worker.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::backend::{Backend, Job, JobOf};
use super::lane::Entry;
use super::queue::NextWork;
use super::shared::{HeldSlot, Shared, WorkerEpoch};
use sterling_core::error::{Error, panic_message};

/// Runs batches until the engine ends or replaces this worker.
pub(super) fn work<B: Backend>(shared: &Shared<B>, life: WorkerEpoch) {
    let kept = guarded(|| shared.backend.worker());
    *shared.kept(life.number) = kept;
    while let Some(batch) = next_batch(shared, life) {
        let wanted = batch.into_iter().filter(|entry| entry.job.ticket.is_wanted());
        let (prices, mut jobs): (Vec<Duration>, Vec<_>) =
            wanted.map(|entry| (entry.ask.cost_estimate, entry.job)).unzip();
        let mut lent = HeldSlot { life, kept: shared.kept(life.number).take() };
        run(shared, &mut lent.kept, &mut jobs);
        let done = prices
            .iter()
            .zip(&jobs)
            .filter(|(_, job)| job.ticket.is_answered())
            .map(|(cost_estimate, _)| *cost_estimate)
            .sum();
        drop(jobs);
        shared.finish(lent, done, None);
    }
}

/// Runs jobs of one group with the state of a worker.
pub(super) fn run<B: Backend>(shared: &Shared<B>, kept: &mut Option<B::Worker>, jobs: &mut [JobOf<B>]) {
    shared.meters.took(jobs);
    isolate_failing_jobs(jobs, |jobs| {
        let ran = guarded(|| shared.backend.run(kept.get_or_insert_with(|| shared.backend.worker()), jobs));
        if ran.is_none() {
            // A panic may leave the state inconsistent.
            *kept = None;
        }
        ran.is_some()
    });
}

/// Fetches rows until the engine ends.
pub(super) fn fetch<B: Backend>(shared: &Shared<B>) {
    while let Some(entries) = next_fetch(shared) {
        let taken = entries.len();
        let wanted = entries.into_iter().filter(|entry| entry.job.ticket.is_wanted());
        let (frames, mut jobs): (Vec<_>, Vec<_>) = wanted.map(Entry::split).unzip();
        isolate_failing_jobs(&mut jobs, |jobs| guarded(|| shared.backend.fetch(jobs)).is_some());
        let fetched = frames.into_iter().zip(jobs).map(|(frame, job)| frame.join(job));
        let (ready, removed): (Vec<_>, Vec<_>) = fetched.partition(|entry| entry.job.ticket.is_wanted());
        drop(removed);
        let removed = taken - ready.len();
        shared.fetched(ready, removed);
    }
}

/// Runs a batch of jobs. If one panics, runs each unanswered job alone, so that only the faulty one fails. Log lines of
/// a job that runs alone carry its request id.
fn isolate_failing_jobs<W, A>(jobs: &mut [Job<W, A>], mut run: impl FnMut(&mut [Job<W, A>]) -> bool) {
    let mut run = |jobs: &mut [Job<W, A>]| match jobs {
        [job] => job.ticket.span().clone().in_scope(|| run(std::slice::from_mut(job))),
        jobs => run(jobs),
    };
    if jobs.is_empty() || run(jobs) {
        return;
    }
    let is_alone = jobs.len() == 1;
    for job in jobs {
        if job.ticket.is_wanted() && (is_alone || !run(std::slice::from_mut(job))) {
            let error = Error::internal("the pass panicked at this request; this is a defect, the log holds more");
            job.ticket.answer(Err(error));
        }
    }
}

/// Waits for a batch; `None` if the engine ends or replaces this worker.
fn next_batch<B: Backend>(shared: &Shared<B>, life: WorkerEpoch) -> Option<Vec<Entry<JobOf<B>>>> {
    loop {
        let mut queue = shared.lock();
        let NextWork { batch, expired } = loop {
            if !shared.is_current(life) {
                return None;
            }
            let taken = queue.take(life.number, Instant::now());
            if !taken.batch.is_empty() || !taken.expired.is_empty() {
                break taken;
            }
            if shared.is_ending() {
                return None;
            }
            let (woken, is_idle) = shared.wait_for_work(queue, life);
            queue = woken;
            if is_idle {
                drop(queue);
                rest(shared, life);
                queue = shared.lock();
            }
        };
        shared.publish(&queue);
        // Another request may start now that an idle worker had to leave.
        shared.call(&mut queue, 1);
        drop(queue);
        for entry in expired {
            entry.job.ticket.answer(Err(shared.meters.expired(&entry.ask)));
        }
        if !batch.is_empty() {
            return Some(batch);
        }
    }
}

/// Releases memory of an idle worker.
fn rest<B: Backend>(shared: &Shared<B>, life: WorkerEpoch) {
    // A caller that takes the slot meanwhile finds no state there, and waits for a worker.
    let Some(mut worker) = shared.kept(life.number).take() else { return };
    let rested = guarded(|| shared.backend.rest(&mut worker));
    let _queue = shared.lock();
    if rested.is_some() && shared.is_current(life) {
        *shared.kept(life.number) = Some(worker);
    }
}

/// Waits for requests whose rows must be fetched; `None` if the engine ends.
fn next_fetch<B: Backend>(shared: &Shared<B>) -> Option<Vec<Entry<JobOf<B>>>> {
    let mut queue = shared.lock();
    loop {
        let entries = queue.take_fetch();
        if !entries.is_empty() {
            return Some(entries);
        }
        if shared.is_ending() {
            return None;
        }
        queue = shared.wait_for_fetch(queue);
    }
}

/// Runs `f`; returns `None` if it panics.
fn guarded<T>(f: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(value) => Some(value),
        Err(panic) => {
            tracing::error!(panic = panic_message(&*panic), "panic while running a request");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;

    use super::*;
    use crate::engine::ticket::{Ledger, Ticket};
    use sterling_core::quota::Flow;

    #[test]
    fn the_log_of_a_panic_names_its_request() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let log = Arc::new(file.reopen().unwrap());
        let subscriber = tracing_subscriber::fmt().with_writer(log).with_ansi(false).finish();
        tracing::subscriber::with_default(subscriber, || {
            let job = |n: usize| {
                let _span = tracing::info_span!("request", id = format!("number-{n}")).entered();
                let held = Ledger::new(1).hold(Flow::default(), 0, false).unwrap();
                let later = Instant::now() + Duration::from_secs(60);
                let (ticket, answer) = Ticket::<()>::new(held, Instant::now(), later);
                (Job { work: n, ticket }, answer)
            };
            for count in [1, 3] {
                let (mut jobs, _answers): (Vec<_>, Vec<_>) = (0..count).map(job).unzip();
                let run = |jobs: &mut [Job<usize, ()>]| {
                    guarded(|| assert!(jobs.iter().all(|job| job.work != 0), "not this one")).is_some()
                };
                isolate_failing_jobs(&mut jobs, run);
            }
        });
        let log = std::fs::read_to_string(file.path()).unwrap();
        let lines: Vec<&str> = log.lines().filter(|line| line.contains("panic while running a request")).collect();
        assert_eq!(lines.len(), 3, "alone, together, and then alone: {log}");
        assert_eq!(lines.iter().filter(|line| line.contains("number-0")).count(), 2, "{log}");
        assert!(!log.contains("number-1") && !log.contains("number-2"), "{log}");
    }
}
