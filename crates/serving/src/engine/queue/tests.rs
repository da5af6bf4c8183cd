//! Tests of the queue under a simulated clock: random histories against a model that forgets nothing, and overload.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const CORES: usize = 3;
const WORKERS: usize = CORES + 1;

fn bounds(cores: usize) -> Bounds {
    Bounds { waiting: 64, batch: 8, cores, expensive: Duration::from_millis(20) }
}

fn ms(ms: f64) -> Duration {
    Duration::from_secs_f64(ms / 1000.0)
}

#[derive(Clone, Debug)]
enum Step {
    Push { priority: Priority, flow: u64, group: usize, needs_fetch: bool, cost_ms: f64, timeout_ms: f64 },
    Lend { cost_ms: f64, is_ready: usize },
    Take(usize),
    Finish { worker: usize, share: f64 },
    Fetch,
    Fetched { keep: usize },
    Withdraw(usize),
    Advance { ms: f64 },
}

fn step() -> impl Strategy<Value = Step> {
    let priority = prop_oneof![3 => Just(Priority::Interactive), 1 => Just(Priority::Batch)];
    let cost_ms = prop_oneof![8 => 0.05..8.0, 1 => 8.0..19.0, 1 => 21.0..200.0];
    prop_oneof![
        8 => (priority, 0..4u64, 0..3usize, prop::bool::weighted(0.3), cost_ms, 1.0..1000.0f64).prop_map(
            |(priority, flow, group, needs_fetch, cost_ms, timeout_ms)| Step::Push { priority, flow, group, needs_fetch, cost_ms, timeout_ms }
        ),
        3 => (0.05..40.0, 0..=WORKERS).prop_map(|(cost_ms, is_ready)| Step::Lend { cost_ms, is_ready }),
        6 => (0..WORKERS).prop_map(Step::Take),
        5 => (0..WORKERS, 0.0..1.0).prop_map(|(worker, share)| Step::Finish { worker, share }),
        2 => Just(Step::Fetch),
        2 => (0..9usize).prop_map(|keep| Step::Fetched { keep }),
        1 => (0..40usize).prop_map(Step::Withdraw),
        5 => (0.01..30.0).prop_map(|ms| Step::Advance { ms }),
    ]
}

/// State of each request, recorded apart from the queue.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Fetch,
    Fetching,
    Lane,
    Running,
    Gone,
}

struct Book {
    queue: Queue<u64>,
    now: Instant,
    at: BTreeMap<u64, (At, QueuedRequest)>,
    /// Number of running requests in `at` that use a worker's slot on their caller's thread and never enter the queue.
    lent: u64,
    running: Vec<Vec<u64>>,
    fetching: Vec<Vec<Entry<u64>>>,
}

impl Book {
    fn new() -> Self {
        let now = Instant::now();
        Book {
            queue: Queue::new(bounds(CORES), now),
            now,
            at: BTreeMap::new(),
            lent: 0,
            running: vec![Vec::new(); WORKERS],
            fetching: Vec::new(),
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Push { priority, flow, group, needs_fetch, cost_ms, timeout_ms } => {
                let is_background = priority == Priority::Batch && group == 2;
                let plain = QueuedRequest::plain(ms(cost_ms), self.now, ms(timeout_ms));
                self.push(QueuedRequest { priority, flow: Flow(flow), is_background, group, needs_fetch, ..plain });
            }
            Step::Lend { cost_ms, is_ready } => self.assign_idle_worker(ms(cost_ms), is_ready),
            Step::Take(worker) if self.running[worker].is_empty() => self.take(worker),
            Step::Take(worker) => {
                let NextWork { batch, expired } = self.queue.take(worker, self.now);
                assert!(batch.is_empty() && expired.is_empty(), "taken for a worker whose place is taken");
            }
            Step::Finish { worker, share } if !self.running[worker].is_empty() => self.finish(worker, share),
            Step::Fetch => self.fetch(),
            Step::Fetched { keep } if !self.fetching.is_empty() => self.fetched(keep),
            Step::Withdraw(nth) => self.withdraw(nth as u64),
            Step::Advance { ms: by } => self.now += ms(by),
            Step::Finish { .. } | Step::Fetched { .. } => {}
        }
        self.check();
    }

    fn push(&mut self, ask: QueuedRequest) {
        let number = self.at.len() as u64 - self.lent;
        let place = if ask.needs_fetch { At::Fetch } else { At::Lane };
        let at = match self.queue.admit(&ask, self.now) {
            Ok(latest_start) => {
                assert!(latest_start > self.now && latest_start <= ask.deadline);
                let id = self.queue.push(number, ask, latest_start, self.now);
                // Rejected requests have no number, so the model numbers accepted ones only.
                assert_eq!(id, number);
                place
            }
            Err(_) => return,
        };
        self.at.insert(number, (at, ask));
    }

    fn assign_idle_worker(&mut self, cost_estimate: Duration, is_ready: usize) {
        let ask = QueuedRequest::plain(cost_estimate, self.now, ms(1000.0));
        let is_idle = self.running.iter().enumerate().any(|(worker, jobs)| jobs.is_empty() && worker >= is_ready);
        let is_short = self.queue.pace.predict(cost_estimate) <= INLINE_TIME_MAX;
        let of_caller = self.queue.running_of(ask.flow).count();
        let is_brief = self.queue.pace.predict(cost_estimate) <= BESIDE_TIME;
        let is_last = of_caller > 0 && self.queue.is_shared(ask.flow, self.now)
            || self.running.iter().filter(|jobs| !jobs.is_empty()).count() >= CORES && !is_brief;
        let is_left = self.queue.choose().is_none() && self.queue.may_occupy_worker(&ask) && !is_last;
        let may = is_idle && is_left && is_short && cost_estimate <= self.queue.bounds.expensive;
        let lent = self.queue.assign_idle_worker(&ask, |worker| worker >= is_ready, self.now);
        assert_eq!(lent.is_some(), may);
        if let Some(worker) = lent {
            assert!(self.running[worker].is_empty() && worker >= is_ready);
            self.lent += 1;
            let number = u64::MAX - self.lent;
            self.at.insert(number, (At::Running, ask));
            self.running[worker].push(number);
        }
    }

    fn take(&mut self, worker: usize) {
        let in_lane: Vec<usize> =
            self.queue.waiting.iter().flat_map(|fair| KINDS.map(|kind| fair.len_of(kind))).collect();
        let NextWork { batch, expired } = self.queue.take(worker, self.now);
        for entry in &expired {
            assert!(self.now > entry.latest_start, "rejected although it could be done");
            assert_eq!(self.at.insert(entry.job, (At::Gone, entry.ask)).unwrap().0, At::Lane);
        }
        for entry in &batch {
            assert!(self.now <= entry.latest_start && self.now < entry.ask.deadline, "run although it comes late");
            assert_eq!(self.at.insert(entry.job, (At::Running, entry.ask)).unwrap().0, At::Lane);
        }
        let Some(first) = batch.first().map(|entry| entry.ask) else {
            let expensive_waits = self.queue.waiting.iter().any(|fair| fair.len_of(Kind::Dear) + expired.len() > 0);
            let background_waits = self.at.values().any(|(at, ask)| *at == At::Lane && ask.is_background);
            let running = || self.queue.running.iter().flatten();
            let is_blocked = self.queue.expensive_running() == self.queue.expensive_slots() && expensive_waits
                // One caller, or long requests, occupy all workers but this one, which is reserved for others.
                || (0..4).any(|flow| running().filter(|running| running.flow == Some(Flow(flow))).count() == CORES)
                || running().filter(|running| running.cost_estimate > INLINE_TIME_MAX).count() == CORES
                || running().count() == CORES && background_waits;
            assert!(self.queue.waiting() == 0 || is_blocked, "a worker idles while it could run something");
            return;
        };
        assert!(batch.iter().all(|entry| (entry.ask.group, entry.ask.priority) == (first.group, first.priority)));
        let longest_lane = in_lane.iter().max().unwrap();
        assert!(batch.len() <= longest_lane.div_ceil(CORES).min(8));
        let cost_estimate: Duration = batch.iter().map(|entry| entry.ask.cost_estimate).sum();
        assert!(batch.len() == 1 || cost_estimate <= BATCH_TIME, "{cost_estimate:?} together");
        self.running[worker] = batch.into_iter().map(|entry| entry.job).collect();
        assert!(self.queue.expensive_running() < CORES);
        for flow in (0..4).map(Flow) {
            assert!(self.queue.running_of(flow).count() <= CORES, "no worker is left for other callers");
        }
    }

    fn finish(&mut self, worker: usize, share: f64) {
        let jobs = std::mem::take(&mut self.running[worker]);
        let cost_estimate: Duration = jobs.iter().map(|job| self.at[job].1.cost_estimate).sum();
        self.queue.finish(worker, cost_estimate.mul_f64(share), None, self.now);
        for job in jobs {
            self.at.get_mut(&job).unwrap().0 = At::Gone;
        }
    }

    fn fetch(&mut self) {
        let entries = self.queue.take_fetch();
        for entry in &entries {
            assert_eq!(entry.ask.group, entries[0].ask.group);
            assert_eq!(self.at.insert(entry.job, (At::Fetching, entry.ask)).unwrap().0, At::Fetch);
        }
        if let Some(first) = entries.first() {
            let left = self.queue.to_fetch.entries.values().filter(|entry| entry.ask.group == first.ask.group);
            assert_eq!(left.count(), 0, "all of a group are fetched together");
            self.fetching.push(entries);
        }
    }

    fn fetched(&mut self, keep: usize) {
        let mut ready = self.fetching.remove(0);
        let removed = ready.split_off(keep.min(ready.len()));
        for entry in &ready {
            self.at.get_mut(&entry.job).unwrap().0 = At::Lane;
        }
        for entry in &removed {
            self.at.get_mut(&entry.job).unwrap().0 = At::Gone;
        }
        self.queue.fetched(ready, removed.len(), self.now);
    }

    fn withdraw(&mut self, id: u64) {
        let was = self.at.get(&id).map(|(at, _)| *at);
        let waits = matches!(was, Some(At::Fetch | At::Lane));
        let any = QueuedRequest::plain(ms(1.0), self.now, Duration::ZERO);
        let entry = self.queue.withdraw(id, &self.at.get(&id).map_or(any, |(_, ask)| *ask));
        assert_eq!(entry.map(|entry| entry.job), waits.then_some(id));
        if waits {
            self.at.get_mut(&id).unwrap().0 = At::Gone;
        }
    }

    /// Asserts that the counters of the queue equal those of the model.
    fn check(&self) {
        let count = |at: At| self.at.values().filter(|(is, _)| *is == at).count();
        assert_eq!(self.queue.waiting(), count(At::Lane));
        assert_eq!(self.queue.fetching(), count(At::Fetch) + count(At::Fetching));
        assert_eq!(self.queue.running.iter().flatten().count(), self.running.iter().filter(|r| !r.is_empty()).count());
        let to_fetch = &self.queue.to_fetch;
        assert_eq!(
            to_fetch.cost_estimate,
            to_fetch.entries.values().map(|entry| entry.ask.cost_estimate).sum::<Duration>()
        );
        self.queue.waiting.iter().for_each(Fair::check);
        // Bursts of fetched requests are accepted above the bound of each priority.
        assert!(self.queue.waiting() <= 3 * 64 && self.queue.fetching() <= 64);
        let factor = self.queue.pace.factor();
        assert!(factor.is_finite() && factor > 0.0);
    }

    /// Runs everything to its end.
    fn empty(&mut self) {
        self.queue.close();
        let ask = QueuedRequest::plain(ms(1.0), self.now, ms(1000.0));
        assert_eq!(self.queue.admit(&ask, self.now), Err(RejectionReason::Closed));
        for _ in 0..10_000 {
            self.fetch();
            while !self.fetching.is_empty() {
                self.fetched(usize::MAX);
            }
            for worker in 0..WORKERS {
                if self.running[worker].is_empty() {
                    self.take(worker);
                } else {
                    self.finish(worker, 1.0);
                }
            }
            self.now += ms(5.0);
            self.check();
            if self.queue.is_idle() {
                break;
            }
        }
        assert!(self.queue.is_idle(), "something is stuck");
        assert!(self.at.values().all(|(at, _)| *at == At::Gone), "something is lost");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn nothing_is_lost_doubled_or_run_in_vain(steps in prop::collection::vec(step(), 1..200)) {
        let mut book = Book::new();
        for step in &steps {
            book.step(step);
        }
        book.empty();
    }

    #[test]
    fn the_service_rate_follows_measurements_within_a_second_and_a_half(
        truth in 0.05..20.0f64,
        cost_ms in 0.5..10.0f64,
        before in prop::collection::vec(0.01..100.0f64, 0..50),
    ) {
        let mut now = Instant::now();
        let mut pace = ServiceRate::new(now);
        let mut learn = |factor: f64, pace: &mut ServiceRate| {
            now += ms(cost_ms * factor);
            pace.learn(ms(cost_ms), ms(cost_ms * factor), now);
        };
        for factor in before {
            learn(factor, &mut pace);
        }
        for _ in 0..400 + (1500.0 / (cost_ms * truth)) as usize {
            learn(truth, &mut pace);
        }
        prop_assert!((pace.factor() / truth - 1.0).abs() < 0.1, "{} for {truth}", pace.factor());
    }

    #[test]
    fn work_is_spread_to_one_level(mut free in prop::collection::vec(0.0..10.0f64, 1..9), work in 0.0..50.0f64) {
        free.sort_unstable_by(f64::total_cmp);
        let at = level(&free, work);
        prop_assert!(at >= free[0]);
        let poured: f64 = free.iter().map(|free| (at - free).max(0.0)).sum();
        prop_assert!((poured - work).abs() < 1e-9, "{poured} poured of {work}");
    }
}

/// Load on workers that share cores, simulated event by event.
struct SimulatedLoad {
    cores: usize,
    /// Requests per second of each kind: cost estimate, priority, timeout, in milliseconds.
    loads: Vec<(f64, Load)>,
    /// Ratio of real run time to the cost estimate, by second.
    truth: fn(f64) -> f64,
    seconds: f64,
}

#[derive(Clone, Copy)]
struct Load {
    flow: Flow,
    cost_ms: f64,
    priority: Priority,
    timeout_ms: f64,
}

const PLAIN: Load = Load { flow: Flow(0), cost_ms: 2.0, priority: Priority::Interactive, timeout_ms: 1000.0 };

#[derive(Clone, Debug, Default)]
struct Outcome {
    offered: usize,
    good: usize,
    late: usize,
    refused_at_once: usize,
    refused_later: usize,
    /// Latencies in milliseconds, sorted.
    latencies_ms: Vec<f64>,
}

impl Outcome {
    fn counts(&self) -> String {
        let Outcome { offered, good, late, refused_at_once, refused_later, .. } = self;
        format!("{good} good, {late} late, {refused_at_once} rejected at once and {refused_later} later, of {offered}")
    }

    fn p99_ms(&self) -> f64 {
        self.latencies_ms[(self.latencies_ms.len() * 99 / 100).min(self.latencies_ms.len() - 1)]
    }
}

/// Deterministic pseudo-random numbers.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn exponential(&mut self) -> f64 {
        -(1.0 - self.roll()).ln()
    }
}

impl SimulatedLoad {
    fn run(&self) -> Vec<Outcome> {
        self.run_and_count_from(0.0)
    }

    /// Returns the outcomes of requests that arrived from `from_s` on.
    fn run_and_count_from(&self, from_s: f64) -> Vec<Outcome> {
        let start = Instant::now();
        let at = |s: f64| start + Duration::from_secs_f64(s);
        let is_counted = |ask: &QueuedRequest| ask.arrived >= at(from_s);
        let mut dice = Dice(7);
        let mut queue = Queue::new(Bounds { waiting: 4096, ..bounds(self.cores) }, start);
        let mut outcomes = vec![Outcome::default(); self.loads.len()];
        let mut next: Vec<f64> = self.loads.iter().map(|(rate, _)| dice.exponential() / rate).collect();
        // Remaining run time of each batch on a core of its own.
        let mut busy: Vec<Option<(f64, Vec<Entry<usize>>)>> = (0..=self.cores).map(|_| None).collect();
        let mut now_s = 0.0;
        loop {
            let (load, arrival_s) = next.iter().copied().enumerate().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
            let speed = (self.cores as f64 / busy.iter().flatten().count().max(1) as f64).min(1.0);
            let ended = busy.iter().enumerate().filter_map(|(w, b)| Some((w, now_s + b.as_ref()?.0 / speed)));
            let ended = ended.min_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, s)| *s <= arrival_s);
            let until_s = ended.map_or(arrival_s, |(_, s)| s);
            busy.iter_mut().flatten().for_each(|(left_s, _)| *left_s -= (until_s - now_s) * speed);
            now_s = until_s;
            let now = at(now_s);
            if let Some((worker, _)) = ended {
                let (_, batch) = busy[worker].take().unwrap();
                queue.finish(worker, batch.iter().map(|entry| entry.ask.cost_estimate).sum(), None, now);
                for entry in batch.into_iter().filter(|entry| is_counted(&entry.ask)) {
                    let outcome = &mut outcomes[entry.job];
                    if now <= entry.ask.deadline {
                        outcome.good += 1;
                        outcome.latencies_ms.push(now.duration_since(entry.ask.arrived).as_secs_f64() * 1000.0);
                    } else {
                        outcome.late += 1;
                    }
                }
            } else if now_s > self.seconds {
                break;
            } else {
                let (rate, Load { flow, cost_ms, priority, timeout_ms }) = self.loads[load];
                next[load] += dice.exponential() / rate;
                let ask = QueuedRequest { priority, flow, ..QueuedRequest::plain(ms(cost_ms), now, ms(timeout_ms)) };
                outcomes[load].offered += usize::from(is_counted(&ask));
                match queue.admit(&ask, now) {
                    Ok(latest_start) => drop(queue.push(load, ask, latest_start, now)),
                    Err(_) => outcomes[load].refused_at_once += usize::from(is_counted(&ask)),
                }
            }
            for (worker, slot) in busy.iter_mut().enumerate().filter(|(_, slot)| slot.is_none()) {
                let NextWork { batch, expired } = queue.take(worker, now);
                for entry in expired.into_iter().filter(|entry| is_counted(&entry.ask)) {
                    outcomes[entry.job].refused_later += 1;
                }
                if !batch.is_empty() {
                    let price_s: f64 = batch.iter().map(|entry| entry.ask.cost_estimate.as_secs_f64()).sum();
                    let noise = 0.5 + dice.exponential() / 2.0;
                    *slot = Some((price_s * (self.truth)(now_s) * noise, batch));
                }
            }
        }
        for outcome in &mut outcomes {
            outcome.latencies_ms.sort_unstable_by(f64::total_cmp);
        }
        outcomes
    }
}

#[test]
fn overload_keeps_goodput_and_admitted_requests_are_in_time() {
    for (times, truth, slower) in [
        (0.9, (|_| 1.0) as fn(f64) -> f64, 1.0),
        (3.0, |_| 1.0, 1.0),
        (10.0, |_| 1.0, 1.0),
        (10.0, |_| 6.0, 6.0),
        (10.0, |_| 0.2, 0.2),
    ] {
        let capacity = 2.0 * 500.0 / slower;
        let storm = SimulatedLoad { cores: 2, loads: vec![(capacity * times, PLAIN)], truth, seconds: 10.0 };
        let outcome = &storm.run()[0];
        // Requests that are queued at the end are not counted.
        let expected = 9.5 * capacity * f64::min(times, 1.0);
        assert!(
            outcome.good as f64 > 0.95 * expected,
            "{times} times, {slower} slower: {} of {expected}",
            outcome.good
        );
        assert!(outcome.late as f64 <= 0.002 * outcome.good as f64, "{times} times, {slower} slower: {}", outcome.late);
        assert!(outcome.refused_later as f64 <= 0.02 * outcome.offered as f64, "{}", outcome.refused_later);
        assert!(outcome.p99_ms() < 900.0, "{times} times, {slower} slower: p99 {} ms", outcome.p99_ms());
    }
}

#[test]
fn goodput_recovers_with_a_machine_that_slows_down_and_recovers() {
    // Ten times slower for two seconds out of ten.
    let truth = |s: f64| if s % 10.0 < 2.0 { 10.0 } else { 1.0 };
    let storm = SimulatedLoad { cores: 2, loads: vec![(3000.0, PLAIN)], truth, seconds: 20.0 };
    let outcome = &storm.run()[0];
    let capacity = 20.0 * 1000.0 * (0.8 + 0.2 * 0.1);
    assert!(outcome.good as f64 > 0.85 * capacity, "{} of {capacity}", outcome.good);
    assert!(outcome.late as f64 <= 0.02 * outcome.good as f64, "late {}", outcome.late);
}

#[test]
fn the_queue_recovers_as_soon_as_a_disturbance_ends() {
    // Work slows down by a factor from the third second to the fifth, or everything stops for two seconds.
    let truths: [fn(f64) -> f64; 4] = [
        |s| if (3.0..5.0).contains(&s) { 2.0 } else { 1.0 },
        |s| if (3.0..5.0).contains(&s) { 4.0 } else { 1.0 },
        |s| if (3.0..5.0).contains(&s) { 10.0 } else { 1.0 },
        |s| if (3.0..3.02).contains(&s) { 100.0 } else { 1.0 },
    ];
    for times in [1.5, 3.0, 10.0] {
        for (n, truth) in truths.into_iter().enumerate() {
            let storm = SimulatedLoad { cores: 2, loads: vec![(1000.0 * times, PLAIN)], truth, seconds: 15.0 };
            let outcome = &storm.run_and_count_from(6.5)[0];
            let case = format!("{times} times, disturbance {n}: {}", outcome.counts());
            assert!(outcome.good as f64 > 0.93 * 8500.0, "{case}");
            // As without them: first come, first served, and no accepted request is rejected later.
            assert!(outcome.refused_later == 0 && outcome.late == 0, "{case}");
            assert!((350.0..450.0).contains(&outcome.latencies_ms[outcome.latencies_ms.len() / 2]), "{case}");
        }
    }
}

#[test]
fn short_deadlines_are_met_or_rejected_at_once() {
    let load = Load { timeout_ms: 25.0, ..PLAIN };
    let storm = SimulatedLoad { cores: 2, loads: vec![(3000.0, load)], truth: |_| 1.0, seconds: 20.0 };
    let outcome = &storm.run()[0];
    assert!(outcome.good as f64 > 0.8 * 20_000.0, "{}", outcome.good);
    // Some run several times as long as estimated, which is unpredictable.
    assert!(outcome.late as f64 <= 0.02 * outcome.good as f64, "{} late", outcome.late);
    assert!(outcome.refused_later as f64 <= 0.03 * outcome.good as f64, "{} expired", outcome.refused_later);
}

#[test]
fn batch_requests_use_idle_capacity_and_never_starve() {
    let batch = Load { cost_ms: 8.0, priority: Priority::Batch, timeout_ms: 60_000.0, ..PLAIN };
    for (interactive_per_s, least_share, most_share) in [(1500.0, 0.04, 0.09), (400.0, 0.5, 0.65)] {
        let loads = vec![(interactive_per_s, PLAIN), (2000.0, batch)];
        let outcomes = SimulatedLoad { cores: 2, loads, truth: |_| 1.0, seconds: 20.0 }.run();
        let share = outcomes[1].good as f64 * 8.0 / (2.0 * 20_000.0);
        assert!((least_share..most_share).contains(&share), "batch requests had {share} of the time");
        let interactive = &outcomes[0];
        assert!(interactive.late == 0 && interactive.good as f64 > 0.9 * 20.0 * f64::min(interactive_per_s, 1000.0));
    }
}

#[test]
fn expensive_requests_do_not_delay_cheap_ones() {
    let expensive = Load { cost_ms: 900.0, timeout_ms: 10_000.0, ..PLAIN };
    let alone = SimulatedLoad { cores: 2, loads: vec![(200.0, PLAIN)], truth: |_| 1.0, seconds: 30.0 }.run();
    let loads = vec![(200.0, PLAIN), (20.0, expensive)];
    let beside = SimulatedLoad { cores: 2, loads, truth: |_| 1.0, seconds: 30.0 }.run();
    assert!(beside[0].offered - beside[0].good < 5, "every cheap one is answered, but for the last");
    let (alone_ms, beside_ms) = (alone[0].p99_ms(), beside[0].p99_ms());
    assert!(beside_ms < 3.0 * alone_ms, "p99 {beside_ms} ms next to expensive ones, {alone_ms} ms alone");
    // The expensive requests have the other worker to themselves.
    assert!(beside[1].good > 20, "{}", beside[1].good);
}

#[test]
fn one_callers_storm_delays_that_caller() {
    // Requests of each cost up to the limit of expensive ones, at thirty times the capacity.
    let calm = Load { flow: Flow(1), ..PLAIN };
    let alone = &SimulatedLoad { cores: 2, loads: vec![(50.0, calm)], truth: |_| 1.0, seconds: 20.0 }.run()[0];
    for cost_ms in [2.0, 8.0, 19.0] {
        let storm = Load { cost_ms, ..PLAIN };
        let loads = vec![(50.0, calm), (30.0 * 2000.0 / cost_ms, storm)];
        let outcomes = SimulatedLoad { cores: 2, loads, truth: |_| 1.0, seconds: 20.0 }.run();
        let (beside, storm) = (&outcomes[0], &outcomes[1]);
        let case = format!("{cost_ms} ms: {}, p99 {} ms, {} alone", beside.counts(), beside.p99_ms(), alone.p99_ms());
        assert!(beside.good as f64 >= 0.99 * beside.offered as f64, "{case}");
        assert!(beside.p99_ms() <= 3.0 * alone.p99_ms(), "{case}");
        // The remaining capacity is not left idle.
        let share = storm.good as f64 * cost_ms / (2.0 * 20_000.0);
        assert!(share > 0.45, "{cost_ms} ms: the storm had {share} of the workers");
    }
}

#[test]
fn a_callers_own_long_request_does_not_block_its_short_ones() {
    let now = Instant::now();
    let mut queue = Queue::new(bounds(1), now);
    let send = |queue: &mut Queue<u64>, n: u64, flow: u64, cost_ms: f64| {
        let ask = QueuedRequest { flow: Flow(flow), ..QueuedRequest::plain(ms(cost_ms), now, ms(60_000.0)) };
        let wait = queue.wait_estimate(&ask, now);
        let latest_start = queue.admit(&ask, now).unwrap();
        queue.push(n, ask, latest_start, now);
        wait
    };
    send(&mut queue, 0, 1, 10_000.0);
    assert_eq!(queue.take(0, now).batch[0].job, 0);
    assert!(send(&mut queue, 1, 2, 10.0) > ms(5000.0));
    assert!(queue.call().is_none() && queue.take(1, now).batch.is_empty(), "the last worker is not for a long one");
    assert_eq!(send(&mut queue, 2, 2, 1.0), Duration::ZERO);
    assert_eq!(queue.take(1, now).batch[0].job, 2);
    queue.finish(0, ms(10_000.0), None, now);
    queue.finish(1, ms(1.0), None, now);
    assert_eq!(queue.take(1, now).batch[0].job, 1);
}

#[test]
fn no_more_workers_are_woken_than_can_run() {
    let now = Instant::now();
    let mut queue = Queue::new(bounds(2), now);
    (0..3).for_each(|worker| queue.sleeps(worker, true));
    let push = |queue: &mut Queue<u64>, flow: u64| {
        let ask = QueuedRequest { flow: Flow(flow), ..QueuedRequest::plain(ms(4.0), now, ms(1000.0)) };
        queue.push(flow, ask, now + ms(900.0), now);
    };
    (0..4).for_each(|_| push(&mut queue, 1));
    assert_eq!([(); 3].map(|()| queue.call()), [Some(0), Some(1), None]);
    assert_eq!(queue.take(0, now).batch.len(), 2);
    assert_eq!(queue.call(), None, "the other one is awake");
    assert_eq!(queue.take(1, now).batch.len(), 1);
    assert_eq!(queue.call(), None, "the last one is for others");
    // A worker that finished takes the next request itself.
    queue.finish(0, ms(4.0), None, now);
    assert_eq!(queue.call(), None);
    assert_eq!(queue.take(0, now).batch.len(), 1);
    push(&mut queue, 2);
    assert_eq!(queue.call(), Some(2));
    assert_eq!(queue.take(2, now).batch[0].job, 2);
}

#[test]
fn background_work_leaves_the_last_worker_to_callers() {
    let now = Instant::now();
    let mut queue = Queue::new(bounds(1), now);
    let ask = |is_background: bool| {
        let priority = if is_background { Priority::Batch } else { Priority::Interactive };
        QueuedRequest { is_background, priority, ..QueuedRequest::plain(ms(1.0), now, ms(1000.0)) }
    };
    let push =
        |queue: &mut Queue<u64>, n: u64, is_background: bool| queue.push(n, ask(is_background), now + ms(900.0), now);
    push(&mut queue, 0, true);
    push(&mut queue, 1, true);
    assert_eq!(queue.take(0, now).batch[0].job, 0);
    assert!(queue.take(1, now).batch.is_empty());
    assert_eq!(queue.assign_idle_worker(&ask(true), |_| true, now), None);
    // Nor does it count for the caller in whose name it runs.
    assert_eq!(queue.wait_estimate(&ask(false), now), Duration::ZERO);
    push(&mut queue, 2, false);
    assert_eq!(queue.take(1, now).batch[0].job, 2);
}

#[test]
fn callers_with_equal_load_get_equal_service() {
    let of = |flow: u64, cost_ms: f64| (20_000.0 / cost_ms, Load { flow: Flow(flow), cost_ms, ..PLAIN });
    let loads = vec![of(1, 1.0), of(2, 4.0), of(3, 4.0)];
    let outcomes = SimulatedLoad { cores: 2, loads: loads.clone(), truth: |_| 1.0, seconds: 10.0 }.run();
    let shares: Vec<f64> =
        outcomes.iter().zip(&loads).map(|(of, (_, load))| of.good as f64 * load.cost_ms / 20_000.0).collect();
    assert!(shares.iter().all(|share| (0.27..0.39).contains(share)), "{shares:?}");
}

#[test]
fn one_caller_leaves_room_in_a_full_queue() {
    let now = Instant::now();
    let mut queue = Queue::new(Bounds { waiting: 340, ..bounds(2) }, now);
    let ask = |flow: u64| QueuedRequest { flow: Flow(flow), ..QueuedRequest::plain(ms(0.01), now, ms(1000.0)) };
    let mut push =
        |flow: u64| queue.admit(&ask(flow), now).map(|latest_start| queue.push(flow, ask(flow), latest_start, now));
    let taken = (0..1000).filter(|_| push(1).is_ok()).count();
    assert_eq!(taken, 320, "16 of 17 places");
    assert_eq!((0..1000).filter(|_| push(2).is_ok()).count(), 19);
    assert_eq!(push(3), Ok(339));
    assert_eq!(push(4), Err(RejectionReason::Full(340)));
}

#[test]
fn background_work_is_dropped_before_a_caller_is_rejected() {
    let start = Instant::now();
    let ask = |is_background: bool, cost_ms: f64, now: Instant| QueuedRequest {
        priority: if is_background { Priority::Batch } else { Priority::Interactive },
        flow: Flow(u64::from(is_background)),
        is_background,
        ..QueuedRequest::plain(ms(cost_ms), now, ms(if is_background { 30_000.0 } else { 1000.0 }))
    };
    for (cores, background_ms, own_ms, after_ms, overtakes) in [
        // Expensive requests have one worker on two cores: that of the audit.
        (2, 3000.0, 600.0, 10.0, true),
        (1, 3000.0, 600.0, 10.0, true),
        (1, 3000.0, 15.0, 10.0, true),
        // Work that ends in time is worth waiting for, and nothing has to end while another worker is idle.
        (1, 100.0, 15.0, 10.0, false),
        (1, 3000.0, 1.0, 10.0, false),
        (2, 3000.0, 15.0, 10.0, false),
        // The end of work that overran its prediction is unknown.
        (1, 100.0, 15.0, 200.0, true),
    ] {
        let mut queue = Queue::new(bounds(cores), start);
        let background = ask(true, background_ms, start);
        let latest_start = queue.admit(&background, start).unwrap();
        queue.push(0, background, latest_start, start);
        assert_eq!(queue.take(0, start).batch.len(), 1);
        let now = start + ms(after_ms);
        assert_eq!(queue.wait(Priority::Interactive, false, None, now), Duration::ZERO, "the door stays open");
        let own = ask(false, own_ms, now);
        let case = format!("{cores} cores, {background_ms} ms behind {own_ms} ms");
        assert!(!queue.must_preempt_background(&ask(true, own_ms, now), now), "{case}: neither is waited for");
        assert_eq!(queue.must_preempt_background(&own, now), overtakes, "{case}");
        assert!(queue.admit(&own, now).is_ok(), "{case}");
    }
    // One preemption is enough, and a useless one does not happen.
    let mut queue = Queue::new(bounds(1), start);
    let background = ask(true, 3000.0, start);
    let latest_start = queue.admit(&background, start).unwrap();
    queue.push(0, background, latest_start, start);
    assert_eq!(queue.take(0, start).batch.len(), 1);
    for n in 1.. {
        let own = ask(false, 15.0, start);
        let overtakes = queue.must_preempt_background(&own, start);
        assert_eq!(overtakes, n == 1);
        let Ok(latest_start) = queue.admit(&own, start) else { break };
        queue.push(n, own, latest_start, start);
    }
}

#[test]
fn a_wrong_service_rate_recovers_even_if_all_requests_are_rejected() {
    let start = Instant::now();
    let mut queue: Queue<()> = Queue::new(bounds(2), start);
    let mut now = start;
    // All batches of one second were a hundred times slower.
    for _ in 0..1000 {
        now += ms(100.0);
        queue.pace.learn(ms(1.0), ms(100.0), now);
    }
    let mut taken_in = 0;
    for _ in 0..3000 {
        now += ms(10.0);
        let cost_estimate = ms(1.0);
        let ask = QueuedRequest::plain(cost_estimate, now, ms(20.0));
        let Ok(latest_start) = queue.admit(&ask, now) else { continue };
        taken_in += 1;
        queue.push((), ask, latest_start, now);
        assert_eq!(queue.take(0, now).batch.len(), 1);
        queue.finish(0, cost_estimate, None, now + cost_estimate);
    }
    assert!(taken_in > 1500, "{taken_in} of 3000 accepted, service rate {}", queue.pace.factor());
}

#[test]
fn short_requests_are_classified_by_core_time() {
    let mut now = Instant::now();
    let mut queue = Queue::<u64>::new(bounds(1), now);
    let of = |cost_estimate: Duration, now: Instant| QueuedRequest::plain(cost_estimate, now, ms(1000.0));
    let (short, long) = (of(BRIEF_TIME / 2, now), of(BRIEF_TIME * 2, now));
    assert!(queue.is_brief(&short) && !queue.is_brief(&long));
    let mut run = |queue: &mut Queue<u64>, took: Duration, ran: Duration| {
        for _ in 0..200 {
            let worker = queue.assign_idle_worker(&of(short.cost_estimate, now), |_| true, now).unwrap();
            now += took;
            queue.finish(worker, short.cost_estimate, Some(ran), now);
        }
        now
    };
    // Contention by other processes does not make a request less brief, even at ten times its estimate.
    let later = run(&mut queue, short.cost_estimate * 10, short.cost_estimate);
    assert!(queue.pace.factor() > 5.0 && queue.is_brief(&of(short.cost_estimate, later)));
    // Ten times the CPU time does.
    let later = run(&mut queue, short.cost_estimate * 10, short.cost_estimate * 10);
    assert!(!queue.is_brief(&of(short.cost_estimate, later)));
}

#[test]
fn a_request_that_gets_no_slot_is_not_charged() {
    let now = Instant::now();
    let mut queue = Queue::new(bounds(2), now);
    let ask = |flow: u64| QueuedRequest { flow: Flow(flow), ..QueuedRequest::plain(ms(0.5), now, ms(1000.0)) };
    for flow in [1; 3] {
        queue.push(flow, ask(flow), now + ms(900.0), now);
    }
    assert_eq!([0, 1].map(|worker| queue.take(worker, now).batch.len()), [2, 1]);
    queue.push(1, ask(1), now + ms(900.0), now);
    assert_eq!(queue.assign_idle_worker(&ask(2), |_| false, now), None, "no worker is ready");
    queue.push(2, ask(2), now + ms(900.0), now);
    queue.push(3, ask(3), now + ms(900.0), now);
    assert_eq!(queue.take(2, now).batch[0].job, 2, "it came before");
}
