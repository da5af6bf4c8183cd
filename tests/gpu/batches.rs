//! Batches of random requests with events between any two of their steps: each answer equals that of the request alone.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::cuda::emulated::Limits;
use sterling::cuda::{Device, Devices};
use sterling::error::{Kind, Result};
use sterling::graph::tower::Threads;
use sterling::index::ivf::Rescore;
use sterling::request::{Answer, Content, Rank, Reading, Request, User};
use sterling::serving::fresh::Fresh;
use sterling::serving::pass::{self, Batch, Cpu, Cuda, Pass, Prepared, Residents};
use sterling::serving::view::{BeforeShown, View};
use sterling::snapshot::PartFormat;
use sterling::units::ItemId;

use crate::emulation::{Random, cards, devices, seeded, sharing};
use crate::updates::{asked, catalogue, changed};
use crate::whole_pass::{agree, both, prepare, vectors};

/// Number of batches, if not the default of the suite.
const COUNT: &str = "STERLING_BATCHES";
const BATCHES: usize = 150;
/// First seed.
const SEED: &str = "STERLING_BATCHES_SEED";

/// Returns a filter that nests `depth` levels around another one.
fn nested(inner: &str, depth: usize) -> String {
    let nest = |filter: String, n: usize| format!("price < {} AND (price > {} OR {filter})", 300 + n, 90 + n);
    (0..depth).fold(inner.to_owned(), nest)
}

/// Requests of a view, with the answers that the CPU and the devices give to each one alone.
struct Requests {
    prepared: Vec<Prepared>,
    alone: Vec<[Answer; 2]>,
}

fn is_of_cpu(answer: &Answer) -> bool {
    !["emulated", "cuda"].contains(&answer.explain.as_ref().unwrap().kernel)
}

impl Requests {
    fn of(view: &Arc<View>, residents: &Arc<Residents>, random: &mut Random) -> Self {
        let mut bodies = asked(random, 14);
        for (inner, depth) in [("price > 1", 2), ("price > 1", 20), ("price > 1", 60), ("shelf:rare", 60)] {
            let filter = nested(inner, depth);
            bodies.push(json!({"vector": random.numbers(12), "k": 9, "candidates": 60, "filter": filter}));
        }
        for probes in [1, 3, 12, 12, 24] {
            bodies.push(json!({"vector": random.numbers(12), "k": 20, "candidates": 60, "probes": probes}));
        }
        bodies.iter_mut().for_each(|body| body["explain"] = true.into());
        let mut prepared = prepare(view, &bodies);
        let items = (0..60).map(|n| ItemId(n * 35 - 900)).collect();
        let reading = Reading { explain: true, ..Reading::default() };
        let rank = Rank { user: User::Vector(random.numbers(12)), items, reading };
        prepared.push(pass::prepare(view, Request::Rank(rank)).unwrap());
        let alone = |pass: &mut dyn Pass, request: &Prepared| -> Answer {
            let batch = Disturbance::plain(std::slice::from_ref(request), &[0]);
            pass.run(&batch);
            batch.answers.into_inner().unwrap().remove(0).unwrap().unwrap()
        };
        let both = |request: &Prepared| {
            let mut passes: [Box<dyn Pass>; 2] =
                [Box::new(Cpu::new(Threads::new(1))), Box::new(Cuda::new(residents.clone(), Threads::new(1)))];
            passes.each_mut().map(|pass| alone(pass.as_mut(), request))
        };
        let alone = prepared.iter().map(both).collect();
        Requests { prepared, alone }
    }
}

/// A batch in which an event hits requests at a termination check of their pass: a deadline passes, a caller disconnects, or the
/// pass panics.
struct Disturbance<'a> {
    requests: Vec<&'a Prepared>,
    looks: AtomicUsize,
    /// Check at which each request is late, or its caller has disconnected.
    late_at: Vec<usize>,
    left_at: Vec<usize>,
    panics_at: usize,
    past: Instant,
    answers: Mutex<Vec<Option<Result<Answer>>>>,
}

const NEVER: usize = usize::MAX;

impl<'a> Disturbance<'a> {
    fn plain(requests: &'a [Prepared], chosen: &[usize]) -> Self {
        Disturbance {
            requests: chosen.iter().map(|&n| &requests[n]).collect(),
            looks: AtomicUsize::new(0),
            late_at: vec![NEVER; chosen.len()],
            left_at: vec![NEVER; chosen.len()],
            panics_at: NEVER,
            past: Instant::now(),
            answers: Mutex::new(chosen.iter().map(|_| None).collect()),
        }
    }

    fn look(&self) -> usize {
        let look = self.looks.fetch_add(1, Ordering::Relaxed);
        assert!(look != self.panics_at, "an intended panic");
        look
    }
}

impl Batch for Disturbance<'_> {
    fn len(&self) -> usize {
        self.requests.len()
    }

    fn prepared(&self, n: usize) -> &Prepared {
        self.requests[n]
    }

    fn deadline(&self, n: usize) -> Option<Instant> {
        let is_late = self.look() >= self.late_at[n];
        Some(if is_late { self.past } else { self.past + Duration::from_secs(3600) })
    }

    fn is_wanted(&self, n: usize) -> bool {
        self.look() < self.left_at[n] && self.answers.lock().unwrap()[n].is_none()
    }

    fn answer(&self, n: usize, answer: Result<Answer>) {
        self.look();
        let before = self.answers.lock().unwrap()[n].replace(answer);
        assert!(before.is_none(), "request {n} is answered twice");
    }
}

/// Counts of the results of batches.
#[derive(Debug, Default)]
struct Found {
    by_device: usize,
    by_cpu: usize,
    late: usize,
    left: usize,
    panics: usize,
}

/// Runs a batch of some of the requests; each must be answered as if it were alone.
fn run(of: &Requests, gpu: &mut Cuda, random: &mut Random, found: &mut Found, what: &str) -> bool {
    let chosen: Vec<usize> = (0..1 + random.below(8)).map(|_| random.below(of.prepared.len())).collect();
    let mut batch = Disturbance::plain(&of.prepared, &chosen);
    let looks = 1 + 5 * chosen.len();
    // Some requests are late or abandoned together, like requests that arrived together.
    let (late_at, left_at) = (random.below(looks), random.below(looks));
    for n in 0..chosen.len() {
        match random.below(8) {
            0 | 1 => batch.late_at[n] = late_at,
            2 => batch.late_at[n] = random.below(looks),
            3 => batch.left_at[n] = left_at,
            _ => {}
        }
    }
    if random.below(25) == 0 {
        batch.panics_at = random.below(looks);
    }
    let panicked = catch_unwind(AssertUnwindSafe(|| gpu.run(&batch))).is_err();
    assert!(!panicked || batch.panics_at != NEVER, "{what}: an unintended panic");
    found.panics += usize::from(panicked);
    let Disturbance { late_at, left_at, answers, .. } = batch;
    for (n, answer) in answers.into_inner().unwrap().into_iter().enumerate() {
        let request = chosen[n];
        let what = format!("{what}, request {n} of {}: {request}", chosen.len());
        match answer {
            Some(Ok(answer)) => {
                let is_of_cpu = is_of_cpu(&answer);
                agree(&of.alone[request][usize::from(!is_of_cpu)], &answer, &what);
                *(if is_of_cpu { &mut found.by_cpu } else { &mut found.by_device }) += 1;
            }
            Some(Err(e)) => {
                assert!(e.kind() == Kind::DeadlineExceeded && late_at[n] != NEVER, "{what}: {e}");
                found.late += 1;
            }
            None => {
                assert!(panicked || left_at[n] != NEVER, "{what}: no answer");
                found.left += 1;
            }
        }
    }
    panicked
}

/// Routes, deadlines that pass and callers that disconnect between any two steps, panics, views that come and go, another
/// version, budgets from one request per group on, one device and several, two workers.
#[test]
fn whole_pass_answers_each_request_of_random_batches_as_alone() {
    let number = |name: &str, or: usize| std::env::var(name).map_or(or, |count| count.parse().unwrap());
    let (batches, first) = (number(COUNT, BATCHES), number(SEED, 1));
    // Batches for each of two workers on the same devices.
    let batches_each = (batches / 6).clamp(25, 250);
    let folder = tempfile::tempdir().unwrap();
    let plain = catalogue(folder.path(), 400, Rescore::F16, None).main().clone();
    let reranked = catalogue(folder.path(), 300, Rescore::F32, Some(PartFormat::None)).main().clone();
    let mut found = Found::default();
    for seed in first..first + batches.div_ceil(2 * batches_each) {
        let mut random = Random::new(seed as u64);
        let devices = sharing(&vec![1 << 30; 1 + seed % 3]);
        let budget = [1, 1 << 16, 1 << 18, 64 << 20][random.below(4)];
        let residents = Arc::new(Residents::new(devices.clone()).with_budget(budget).with_updates());
        // One request alone exceeds the budget if it collects many candidates.
        if random.below(3) == 0 {
            devices.all().iter().for_each(|device| device.lanes().set_most(4 << 20));
        }
        let (snapshot, has_pictures) = if random.below(2) == 0 { (&plain, false) } else { (&reranked, true) };
        let mut fresh = Fresh::new(snapshot.clone(), 0);
        let mut views: Vec<(Arc<View>, Requests)> = Vec::new();
        for updates in [0, 5, 60] {
            let view = changed(&mut fresh, &mut random, updates, has_pictures);
            residents.before_shown(&view);
            let requests = Requests::of(&view, &residents, &mut random);
            views.push((view, requests));
        }
        let worker = |number: u64| {
            let (mut random, mut found) = (Random::new(seed as u64 * 1000 + number), Found::default());
            let mut gpu = Cuda::new(residents.clone(), Threads::new(1));
            for batch in 0..batches_each {
                let (_, requests) = &views[random.below(views.len())];
                let what = format!("seed {seed}, worker {number}, batch {batch}");
                if run(requests, &mut gpu, &mut random, &mut found, &what) || random.below(40) == 0 {
                    // As a worker does after a panic or an idle time.
                    gpu.rest();
                    gpu = Cuda::new(residents.clone(), Threads::new(1));
                }
            }
            found
        };
        let of_workers = std::thread::scope(|scope| {
            [1, 2].map(|number| scope.spawn(move || worker(number))).map(|worker| worker.join().unwrap())
        });
        for of_worker in of_workers {
            found.by_device += of_worker.by_device;
            found.by_cpu += of_worker.by_cpu;
            found.late += of_worker.late;
            found.left += of_worker.left;
            found.panics += of_worker.panics;
        }
    }
    assert!(found.by_device > 4 * found.by_cpu && found.by_cpu > 0 && found.late > 0 && found.left > 0, "{found:?}");
    assert!(found.panics > 0, "{found:?}");
}

/// A pass that panics leaves no work behind on its streams, which would read memory of the batch that is freed by then.
#[test]
fn whole_pass_waits_for_its_streams_after_a_panic_at_any_check() {
    let folder = tempfile::tempdir().unwrap();
    let view = catalogue(folder.path(), 600, Rescore::F16, None);
    let mut random = Random::new(83);
    let mut body = |more: Value| {
        let mut body = json!({"vector": random.numbers(12), "k": 5, "candidates": 60});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let bodies = [json!({"probes": 12}), json!({"filter": "price >= 50"}), json!({"exact": true})].map(&mut body);
    let prepared = prepare(&view, &bodies);
    let mut panics = 0;
    for round in 0..12 {
        let residents = Arc::new(Residents::new(sharing(&vec![1 << 30; 1 + round % 3])).with_budget(64 << 20));
        let mut gpu = Cuda::new(residents.clone(), Threads::new(1));
        for panics_at in 0.. {
            let batch = Disturbance { panics_at, ..Disturbance::plain(&prepared, &[0, 1, 2]) };
            if catch_unwind(AssertUnwindSafe(|| gpu.run(&batch))).is_ok() {
                break;
            }
            panics += 1;
            drop(batch);
            gpu = Cuda::new(residents.clone(), Threads::new(1));
        }
    }
    assert!(panics > 12 * 8, "{panics}");
}

/// All requests of one group are late; the groups before and after it are not.
#[test]
fn whole_pass_skips_a_group_that_is_late_and_answers_those_around_it() {
    let folder = tempfile::tempdir().unwrap();
    let view = catalogue(folder.path(), 600, Rescore::F16, None);
    let mut random = Random::new(79);
    let residents = Arc::new(Residents::new(sharing(&[1 << 30])).with_budget(64 << 20));
    let mut gpu = Cuda::new(residents.clone(), Threads::new(1));
    let mut bodies: Vec<Value> = (0..3)
        .map(|_| json!({"vector": random.numbers(12), "k": 5, "candidates": 60, "probes": 12, "explain": true}))
        .collect();
    let filtered = |random: &mut Random| json!({"vector": random.numbers(12), "k": 5, "candidates": 60, "filter": "price >= 50", "explain": true});
    bodies.extend((0..2).map(|_| filtered(&mut random)));
    bodies.push(json!({"vector": random.numbers(12), "k": 5, "candidates": 60, "exact": true, "explain": true}));
    let prepared = prepare(&view, &bodies);
    let alone = pass::run(&mut Cpu::new(Threads::new(1)), &prepared, None);
    // On streams that were used before, and on new ones.
    for turn in 0..4 {
        let mut batch = Disturbance::plain(&prepared, &[0, 1, 2, 3, 4, 5]);
        (3..5).for_each(|n| batch.late_at[n] = if turn == 1 { NEVER } else { 0 });
        gpu.run(&batch);
        for (n, (answer, alone)) in batch.answers.into_inner().unwrap().into_iter().zip(&alone).enumerate() {
            match answer.unwrap() {
                Err(e) => assert!((3..5).contains(&n) && e.kind() == Kind::DeadlineExceeded, "{n}: {e}"),
                Ok(answer) if !(3..5).contains(&n) => {
                    assert!(!is_of_cpu(&answer), "{n}");
                    agree(alone.as_ref().unwrap(), &answer, &format!("turn {turn}, request {n}"));
                }
                Ok(_) => assert_eq!(turn, 1),
            }
        }
        if turn == 2 {
            gpu = Cuda::new(residents.clone(), Threads::new(1));
        }
    }
}

/// Only the one request that a device cannot compute goes to the CPU.
#[test]
fn whole_pass_leaves_a_request_to_the_cpu_and_not_its_batch() {
    let folder = tempfile::tempdir().unwrap();
    let view = catalogue(folder.path(), 600, Rescore::F16, None);
    let mut random = Random::new(78);
    let devices = sharing(&[1 << 30]);
    let residents = Arc::new(Residents::new(devices.clone()).with_budget(64 << 20));
    let mut gpu = Cuda::new(residents.clone(), Threads::new(1));
    let plain = |random: &mut Random| json!({"vector": random.numbers(12), "k": 20, "candidates": 60, "probes": 2, "explain": true});
    let mut bodies: Vec<Value> = (0..4).map(|_| plain(&mut random)).collect();
    let kernels = |gpu: &mut Cuda, bodies: &[Value]| -> Vec<(bool, Option<String>)> {
        let answers = pass::run(gpu, &prepare(&view, bodies), None).into_iter().map(|answer| answer.unwrap());
        answers.map(|answer| (is_of_cpu(&answer), answer.explain.unwrap().note)).collect()
    };
    // Deeper than a block of 256 threads has memory for on the narrowest device.
    bodies[2]["filter"] = nested("price > 1", 60).into();
    let all = kernels(&mut gpu, &bodies);
    assert!(all.iter().all(|(is_of_cpu, _)| !is_of_cpu), "{all:?}");
    // Deeper than the nesting limit of filters that are evaluated per item.
    bodies[2]["filter"] = nested("shelf:rare", 60).into();
    for _ in 0..2 {
        let all = kernels(&mut gpu, &bodies);
        assert_eq!(
            all.iter().map(|(is_of_cpu, _)| *is_of_cpu).collect::<Vec<_>>(),
            [false, false, true, false],
            "{all:?}"
        );
        let note = all[2].1.as_ref().unwrap();
        assert!(note.contains("the CPU answered: the filter nests"), "{note}");
    }
    devices.all()[0].lanes().set_most(1);
    let all = kernels(&mut gpu, &bodies[..2]);
    for (is_of_cpu, note) in all {
        let note = note.unwrap();
        assert!(is_of_cpu && note.contains("the request takes") && note.contains("expected at most 1"), "{note}");
    }
}

/// A lost device is reported and skipped, and answers again once it is back.
#[test]
fn whole_pass_goes_back_to_a_device_that_is_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let view = catalogue(folder.path(), 300, Rescore::F16, None);
    let card = cards(&[1 << 30]).remove(0);
    let residents = Arc::new(Residents::new(devices(std::slice::from_ref(&card))).with_budget(64 << 20));
    let mut gpu = Cuda::new(residents.clone(), Threads::new(1));
    let body = json!({"vector": vec![0.3; 12], "k": 9, "candidates": 60, "probes": 12, "explain": true});
    let prepared = prepare(&view, &[body]);
    let mut by_cpu = || is_of_cpu(pass::run(&mut gpu, &prepared, None)[0].as_ref().unwrap());
    assert!(!by_cpu() && residents.warnings().is_empty());
    card.lose_after(1);
    assert!(by_cpu());
    let reported = residents.warnings();
    assert!(
        reported.len() == 1 && reported[0].contains("has failed for") && reported[0].contains("the GPU is lost"),
        "{reported:?}"
    );
    card.find_again();
    let start = Instant::now();
    while by_cpu() {
        assert!(start.elapsed() < Duration::from_secs(60), "the device is never tried again");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(residents.warnings().is_empty());
}

/// Wide vectors and deep filters return the same results on every kind of device, by another kernel if a block has too little
/// shared memory.
#[test]
#[ignore = "long: every kind of device"]
fn whole_pass_of_wide_vectors_runs_on_every_device() {
    let folder = tempfile::tempdir().unwrap();
    for dimension in [3136, 5200, 8192] {
        let folder = folder.path().join(dimension.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        let view = vectors(&folder, 130, dimension, Rescore::None);
        let mut random = Random::new(dimension as u64);
        let lists = view.main().index.lists();
        let bodies: Vec<Value> = (0..6)
            .map(|_| json!({"vector": random.numbers(dimension), "k": 9, "candidates": 40, "probes": lists}))
            .collect();
        for limits in Limits::ALL {
            let device: Devices = Device::over(Arc::new(seeded(1).with_limits(limits))).into();
            let mut gpu = Cuda::new(Arc::new(Residents::new(device).with_budget(64 << 20)), Threads::new(1));
            for [cpu, gpu] in both(&view, &mut gpu, &bodies) {
                agree(&cpu, &gpu, &format!("{dimension} numbers on {}", limits.name));
                assert!(matches!(gpu.content, Content::Items(_)));
            }
        }
    }
}

/// The shared memory that a launch needs does not affect a concurrent launch of another thread.
#[test]
fn whole_pass_of_two_widths_runs_in_two_threads() {
    let folder = tempfile::tempdir().unwrap();
    let residents = Arc::new(Residents::new(sharing(&[1 << 30])).with_budget(64 << 20));
    let of_width = |dimension: usize| {
        let folder = folder.path().join(dimension.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        let view = vectors(&folder, 60, dimension, Rescore::None);
        let lists = view.main().index.lists();
        let mut random = Random::new(dimension as u64);
        let body = |_| json!({"vector": random.numbers(dimension), "k": 9, "candidates": 40, "probes": lists});
        (view, (0..5).map(body).collect::<Vec<Value>>())
    };
    let of_widths = [1600, 3000].map(of_width);
    let run = |(view, bodies): &(Arc<View>, Vec<Value>)| {
        let mut gpu = Cuda::new(residents.clone(), Threads::new(1));
        for turn in 0..20 {
            for [cpu, gpu] in both(view, &mut gpu, bodies) {
                agree(&cpu, &gpu, &format!("turn {turn}"));
            }
        }
    };
    std::thread::scope(|scope| of_widths.each_ref().map(|of| scope.spawn(move || run(of))).map(|t| t.join().unwrap()));
}
