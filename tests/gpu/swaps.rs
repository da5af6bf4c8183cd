//! Versions that do not fit into GPU memory together. Each request is answered by its version: by the CPU until the GPU has room,
//! and by the GPU from then on.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::cuda::emulated::Emulated;
use sterling::cuda::{Devices, Driver};
use sterling::graph::tower::Threads;
use sterling::index::ivf::Rescore;
use sterling::publish::{Plan, publish};
use sterling::request::Content;
use sterling::serving::pass::{self, Cuda, Residents};
use sterling::serving::view::View;
use sterling::snapshot::Store;

use crate::emulation::{Random, cards, devices};
use crate::whole_pass::{agree, both, prepare, view_of};

const DIMENSION: usize = 128;
const BUDGET: usize = 1 << 20;
/// Ids of a version's items start at its number times this constant.
const IDS: i64 = 1_000_000;

/// Returns versions with these numbers of items, with no item in common.
fn versions(folder: &Path, items: &[usize]) -> Vec<Arc<View>> {
    let version = |(n, &items): (usize, &usize)| {
        let mut random = Random::new(n as u64 + 61);
        let line =
            |id: usize| json!({"id": n as i64 * IDS + id as i64, "embedding": random.numbers(DIMENSION)}).to_string();
        let path = folder.join("items.jsonl");
        std::fs::write(&path, (0..items).map(line).collect::<Vec<String>>().join("\n")).unwrap();
        let mut what = Plan::of_vectors("plain", path);
        (what.recipe.index.rescore, what.recipe.index.lists) = (Rescore::F32, 40);
        let store = Store::new(folder);
        let (name, version) = publish(&store, &what, &|_, _, _| {}).unwrap();
        view_of(&store, &name, version)
    };
    items.iter().enumerate().map(version).collect()
}

fn bodies(random: &mut Random) -> Vec<Value> {
    (0..3)
        .map(|_| json!({"vector": random.numbers(DIMENSION), "k": 9, "candidates": 20, "probes": 2, "explain": true}))
        .collect()
}

/// Returns the bytes that each of `count` devices needs for the largest of these versions, for requests, and for the memory of
/// streams, which is less than any version needs.
fn room_for_one(count: usize, views: &[Arc<View>]) -> u64 {
    let residents = Residents::new(devices(&cards(&vec![1 << 30; count]))).with_budget(BUDGET);
    let bytes: Vec<usize> = views.iter().map(|view| residents.bytes_of(view.main()).unwrap()[0]).collect();
    let (least, most) = (bytes.iter().min().unwrap(), bytes.iter().max().unwrap());
    (most + BUDGET + least * 2 / 3) as u64
}

struct Served {
    residents: Arc<Residents>,
    gpu: Cuda,
    random: Random,
}

impl Served {
    fn new(devices: Devices) -> Self {
        Served::over(&Arc::new(Residents::new(devices).with_budget(BUDGET)), 51)
    }

    /// Returns one of several passes that share the data on the GPU.
    fn over(residents: &Arc<Residents>, seed: u64) -> Self {
        let gpu = Cuda::new(residents.clone(), Threads::new(1));
        Served { gpu, residents: residents.clone(), random: Random::new(seed) }
    }

    /// Returns one version on a GPU, and another one that does not fit beside it.
    fn first_of_two(folder: &Path) -> (Self, Vec<Arc<View>>, Arc<Emulated>) {
        let views = versions(folder, &[9000, 8800]);
        let cards = cards(&[room_for_one(1, &views)]);
        let mut served = Served::new(devices(&cards));
        served.until_on_card(&views[0]);
        (served, views, cards[0].clone())
    }

    /// Returns the kernel that answers a version. The items must be those of the version.
    fn kernel(&mut self, view: &Arc<View>) -> &'static str {
        let answer = pass::run(&mut self.gpu, &prepare(view, &bodies(&mut self.random)), None).remove(0).unwrap();
        let Content::Items(items) = &answer.content else { panic!() };
        let version = view.main().manifest.version as i64 - 1;
        assert!(items.ids.len() == 9 && items.ids.iter().all(|id| id.0 / IDS == version), "{:?}", items.ids);
        let explain = answer.explain.unwrap();
        let reported = explain.note.as_ref().is_some_and(|note| note.contains("the CPU answered"));
        assert_eq!(reported, explain.kernel != "emulated", "{explain:?}");
        explain.kernel
    }

    /// Sends requests for a version until the GPU answers.
    fn until_on_card(&mut self, view: &Arc<View>) {
        let start = Instant::now();
        while self.kernel(view) != "emulated" {
            assert!(start.elapsed() < Duration::from_secs(120), "the CPU answers for ever");
            std::thread::sleep(Duration::from_millis(20));
        }
        let bodies = bodies(&mut self.random);
        for ([cpu, gpu], body) in both(view, &mut self.gpu, &bodies).iter().zip(&bodies) {
            agree(cpu, gpu, &body.to_string());
        }
    }
}

/// The previous version stays in memory, and may answer again.
#[test]
#[ignore = "long: soak"]
fn whole_pass_of_a_waiting_version_starts_when_another_has_no_requests() {
    let folder = tempfile::tempdir().unwrap();
    let views = versions(folder.path(), &[9000, 8000, 9500]);
    for (count, order) in [(1, &[1, 0, 2][..]), (2, &[2])] {
        let cards = cards(&vec![room_for_one(count, &views); count]);
        let mut served = Served::new(devices(&cards));
        served.residents.upload_version(views[0].main());
        served.until_on_card(&views[0]);
        // Loads the next version, then the previous one, then another one.
        for &next in order {
            served.residents.upload_version(views[next].main());
            assert_ne!(served.kernel(&views[next]), "emulated");
            served.until_on_card(&views[next]);
            assert!(served.residents.waiting().is_empty());
        }
        // The evicted version is answered by the CPU, and reported at its next request.
        let start = Instant::now();
        while served.residents.waiting().is_empty() {
            assert!(start.elapsed() < Duration::from_secs(60), "no warning is left");
            assert_ne!(served.kernel(&views[0]), "emulated");
            // The other one gets as many requests.
            assert_eq!(served.kernel(&views[2]), "emulated");
            std::thread::sleep(Duration::from_millis(20));
        }
        let reported = served.residents.waiting().remove(0);
        assert!(reported.contains("the CPU answers until there is room on the device"), "{reported}");
    }
}

/// Once the previous version is dropped, the next one is loaded immediately, without further requests.
#[test]
fn whole_pass_of_a_version_starts_when_another_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let mut views = versions(folder.path(), &[9000, 8000]);
    let cards = cards(&[room_for_one(1, &views)]);
    let mut served = Served::new(devices(&cards));
    let (last, first) = (views.pop().unwrap(), views.pop().unwrap());
    served.until_on_card(&first);
    assert_ne!(served.kernel(&last), "emulated");
    drop(first);
    served.until_on_card(&last);
    drop(served);
    drop(last);
    let start = Instant::now();
    while cards[0].memory().is_ok_and(|(free, all)| free < all) {
        assert!(start.elapsed() < Duration::from_secs(60), "memory is left behind");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Versions with equal request rates do not replace each other, and one that never fits replaces none.
#[test]
#[ignore = "long: soak"]
fn whole_pass_of_a_version_keeps_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let views = versions(folder.path(), &[9000, 8900, 17_000]);
    let cards = cards(&[room_for_one(1, &views[..2])]);
    let mut served = Served::new(devices(&cards));
    served.until_on_card(&views[0]);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(4) {
        assert_eq!(served.kernel(&views[0]), "emulated");
        assert_ne!(served.kernel(&views[1]), "emulated");
    }
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(4) {
        assert_ne!(served.kernel(&views[2]), "emulated");
    }
    assert_eq!(served.kernel(&views[0]), "emulated");
    let reported = served.residents.waiting();
    assert!(reported.len() == 2 && reported[1].contains("are missing"), "{reported:?}");
}

/// Requests of both versions while one replaces the other: none fails, and each is answered by its own version.
#[test]
fn whole_pass_answers_while_versions_alternate() {
    let folder = tempfile::tempdir().unwrap();
    let (first, views, _) = Served::first_of_two(folder.path());
    let residents = first.residents.clone();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = |seed: u64, view: &Arc<View>| {
            let mut served = Served::over(&residents, seed);
            let mut kernels = BTreeMap::new();
            while !is_over.load(Ordering::Relaxed) {
                *kernels.entry(served.kernel(view)).or_insert(0) += 1;
                std::thread::sleep(Duration::from_millis(if seed == 1 { 400 } else { 10 }));
            }
            kernels
        };
        let readers = [(1, &views[0]), (2, &views[1])].map(|(seed, view)| scope.spawn(move || reader(seed, view)));
        Served::over(&residents, 51).until_on_card(&views[1]);
        is_over.store(true, Ordering::Relaxed);
        let [before, after] = readers.map(|reader| reader.join().unwrap());
        assert!(
            before.contains_key("emulated") && after.keys().any(|kernel| *kernel != "emulated"),
            "{before:?} {after:?}"
        );
    });
}

/// The GPU is lost while the next version is loaded: the CPU answers both.
#[test]
#[ignore = "long: soak"]
fn whole_pass_of_versions_continues_if_the_gpu_is_lost_between_them() {
    let folder = tempfile::tempdir().unwrap();
    let (mut served, views, card) = Served::first_of_two(folder.path());
    assert_ne!(served.kernel(&views[1]), "emulated");
    // The GPU computes the largest norm of each version, which is its first launch.
    card.lose_after(0);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(6) {
        assert_ne!(served.kernel(&views[1]), "emulated");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_ne!(served.kernel(&views[0]), "emulated");
    let reported = served.residents.warnings();
    let is_told = |line: &String| line.contains("version 2: the CPU answers until the device takes it");
    assert!(reported.iter().any(|line| is_told(line) && line.contains("the GPU is lost")), "{reported:?}");
    // The GPU is back without a request for it: the next version is loaded after all.
    card.find_again();
    served.until_on_card(&views[1]);
    let reported = served.residents.warnings();
    assert!(!reported.iter().any(is_told), "{reported:?}");
}
