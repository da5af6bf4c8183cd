//! Complete passes on an emulated GPU compared with those of the CPU: the same snapshot, the same requests.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::{Value, json};
use sterling::api::{Retrievals, retrievals};
use sterling::cuda::Device;
use sterling::error::Kind;
use sterling::graph::tower::Threads;
use sterling::index::ivf::Rescore;
use sterling::publish::{Plan, publish, published};
use sterling::request::{Answer, Content, Embed, Features, Rank, Reading, Request, Values};
use sterling::serving::pass::{self, Cpu, Cuda, Pass, Prepared, Residents};
use sterling::serving::view::View;
use sterling::snapshot::{Placement, Recipe, Snapshot, Store};
use sterling::units::ItemId;

use crate::emulation::{Random, device, emulated};

/// Scores that differ by at most this may swap ranks, because a GPU sums in another order.
pub const TOLERANCE: f32 = 2e-4;

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub fn view_of(store: &Store, name: &str, version: u64) -> Arc<View> {
    Arc::new(View::new(Arc::new(Snapshot::load(&store.folder(name, version), &Placement::whole()).unwrap())))
}

/// Writes the Debian model with another reranker, because the GPU supports no sequences: towers, items, columns and tasks stay.
fn package(folder: &Path) -> PathBuf {
    let (from, to) = (root().join("models/debian"), folder.join("card-package"));
    std::fs::create_dir_all(&to).unwrap();
    for entry in std::fs::read_dir(&from).unwrap() {
        let name = entry.unwrap().file_name();
        // The expected answers in these two files do not apply to the other reranker.
        if name != "golden.json" && name != "warmup.jsonl" {
            std::fs::copy(from.join(&name), to.join(&name)).unwrap();
        }
    }
    std::fs::copy(root().join("tests/golden/reranker.onnx"), to.join("overarch.onnx")).unwrap();
    let mut spec: toml::Table = std::fs::read_to_string(from.join("model.toml")).unwrap().parse().unwrap();
    let features = spec["user"]["features"].as_array_mut().unwrap();
    features.retain(|feature| feature["pooling"].as_str() != Some("none"));
    spec["overarch"].as_table_mut().unwrap().remove("features");
    std::fs::write(to.join("model.toml"), spec.to_string()).unwrap();
    to
}

/// Returns that model, published once for all runs and loaded once for all tests.
pub fn debian() -> Arc<View> {
    static LOADED: OnceLock<Arc<View>> = OnceLock::new();
    LOADED.get_or_init(published_and_loaded).clone()
}

fn published_and_loaded() -> Arc<View> {
    let (folder, beside) = (Path::new(env!("CARGO_TARGET_TMPDIR")), tempfile::tempdir().unwrap());
    let (store, package) = (Store::new(folder.join("card-store")), package(beside.path()));
    std::fs::create_dir_all(store.root()).unwrap();
    let (name, version) = published(&store, &package)
        .unwrap()
        .unwrap_or_else(|| publish(&store, &Plan::of_package(package), &|_, _, _| {}).unwrap());
    view_of(&store, &name, version)
}

pub fn gpu(budget_bytes: usize) -> Cuda {
    Cuda::new(Arc::new(Residents::new(device()).with_budget(budget_bytes)), Threads::new(1))
}

pub fn prepare(view: &Arc<View>, bodies: &[Value]) -> Vec<Prepared> {
    let body = json!({"requests": bodies}).to_string();
    let Retrievals::Many(requests) = retrievals(body.as_bytes()).unwrap() else { panic!("{body}") };
    let prepare =
        |request: sterling::error::Result<(_, _, _)>| pass::prepare(view, Request::Retrieve(request.unwrap().0));
    requests.into_iter().map(|request| prepare(request).unwrap()).collect()
}

/// Returns both answers to each request; that of the GPU must come from the GPU.
pub fn both(view: &Arc<View>, gpu: &mut Cuda, bodies: &[Value]) -> Vec<[Answer; 2]> {
    let explained: Vec<Value> = bodies
        .iter()
        .cloned()
        .map(|mut body| {
            body["explain"] = true.into();
            body
        })
        .collect();
    let prepared = prepare(view, &explained);
    let answers = |pass: &mut dyn Pass| pass::run(pass, &prepared, None).into_iter().map(|answer| answer.unwrap());
    let pairs = answers(&mut Cpu::new(Threads::new(1))).zip(answers(gpu)).map(|(cpu, gpu)| [cpu, gpu]);
    let pairs: Vec<[Answer; 2]> = pairs.collect();
    for [_, gpu] in &pairs {
        let kernel = gpu.explain.as_ref().unwrap().kernel;
        assert!(["emulated", "cuda"].contains(&kernel), "the CPU answered: {kernel}");
    }
    pairs
}

/// Checks for the same items in the same order, except that nearly equal scores may have swapped ranks.
pub fn agree(cpu: &Answer, gpu: &Answer, what: &str) {
    let (Content::Items(cpu), Content::Items(gpu)) = (&cpu.content, &gpu.content) else { panic!("{what}") };
    assert_eq!(cpu.ids.len(), gpu.ids.len(), "{what}");
    let near = |a: f32, b: f32| (a - b).abs() <= TOLERANCE * a.abs().max(1.0);
    for n in 0..cpu.ids.len() {
        assert!(
            near(cpu.scores[n], gpu.scores[n]),
            "{what}: score {n} is {}, expected {}",
            gpu.scores[n],
            cpu.scores[n]
        );
        match cpu.ids.iter().position(|id| *id == gpu.ids[n]) {
            Some(at) => {
                assert!(near(cpu.scores[at], gpu.scores[n]), "{what}: {} at {n}, expected at {at}", gpu.ids[n]);
                assert!(near(cpu.similarities[at], gpu.similarities[n]), "{what}: similarity {n}");
                let (all, tasks) = (cpu.ids.len(), cpu.tasks.len() / cpu.ids.len());
                assert!((0..tasks).all(|t| near(cpu.tasks[t * all + at], gpu.tasks[t * all + n])), "{what}: tasks {n}");
            }
            // The last ranks may hold an item that the other list just missed.
            None => {
                let last = cpu.scores[cpu.scores.len() - 1];
                assert!(near(last, gpu.scores[n]), "{what}: {} at {n} is not in the answer", gpu.ids[n]);
            }
        }
    }
    assert_eq!(cpu.unknown, gpu.unknown);
}

pub fn heldout(every: usize) -> Vec<Value> {
    let text = std::fs::read_to_string(root().join("models/debian/heldout.jsonl")).unwrap();
    text.lines().step_by(every).map(|line| serde_json::from_str(line).unwrap()).collect()
}

pub fn request(user: &Value, more: &Value) -> Value {
    let mut body = json!({"features": user["features"], "exclude": user["exclude"]});
    more.as_object().unwrap().iter().for_each(|(key, value)| body[key] = value.clone());
    body
}

#[test]
fn whole_pass_of_debian_answers_as_on_the_cpu() {
    let view = debian();
    let mut gpu = gpu(256 << 20);
    let lists = view.main().index.lists();
    let users = heldout(97);
    // Routes that scan the same items on both devices: the best lists, every list, every item, posting lists, none.
    let alike = [
        json!({"k": 20}),
        json!({"k": 1, "candidates": 1}),
        json!({"k": 100, "candidates": 100, "probes": 3}),
        json!({"k": 10, "candidates": 3000, "probes": lists / 2}),
        json!({"k": 50, "probes": lists}),
        json!({"k": 30, "exact": true, "candidates": 200}),
        json!({"k": 30, "exact": true, "filter": "section:python AND NOT priority:optional"}),
        json!({"k": 25, "probes": lists, "filter": "NOT section:python AND installed_kb < 1000"}),
        json!({"k": 25, "probes": lists, "filter": "section IN (games, zope) OR priority:required"}),
        json!({"k": 40, "filter": "priority:required"}),
        json!({"k": 40, "filter": "section:nowhere"}),
        json!({"k": 15, "constants": {"w_depends": 1.5, "w_similarity": 2.0}}),
    ];
    let bodies: Vec<Value> = alike.iter().zip(users.iter().cycle()).map(|(more, user)| request(user, more)).collect();
    for ([cpu, gpu], body) in both(&view, &mut gpu, &bodies).iter().zip(&bodies) {
        agree(cpu, gpu, &body.to_string());
        let (of_cpu, of_gpu) = (cpu.explain.as_ref().unwrap(), gpu.explain.as_ref().unwrap());
        assert_eq!(
            (of_cpu.route, &of_cpu.filter, of_cpu.probed),
            (of_gpu.route, &of_gpu.filter, of_gpu.probed),
            "{body}"
        );
        assert_eq!((of_cpu.scanned, of_cpu.candidates), (of_gpu.scanned, of_gpu.candidates), "{body}");
    }
}

#[test]
fn whole_pass_of_debian_takes_thousands_of_candidates() {
    let view = debian();
    let mut gpu = gpu(256 << 20);
    let users = heldout(211);
    let bodies = [
        request(&users[0], &json!({"k": 5000, "candidates": 10_000, "exact": true})),
        request(&users[1], &json!({"k": 100, "candidates": 4000, "probes": view.main().index.lists()})),
    ];
    for ([cpu, gpu], body) in both(&view, &mut gpu, &bodies).iter().zip(&bodies) {
        agree(cpu, gpu, &body.to_string());
    }
}

/// If a filtered search chooses its lists, devices choose differently: a GPU must find as much as the CPU, and nothing wrong.
#[test]
fn whole_pass_of_debian_loses_nothing_behind_filters() {
    let view = debian();
    let mut gpu = gpu(256 << 20);
    let filters = ["section:libs", "NOT priority:optional", "installed_kb > 500 AND architecture:any"];
    let (mut of_cpu, mut of_gpu, mut wanted) = (0, 0, 0);
    for (n, user) in heldout(301).iter().enumerate() {
        let filter = filters[n % filters.len()];
        let more = json!({"k": 50, "candidates": 100, "filter": filter, "columns": []});
        let mut exact = more.clone();
        exact["exact"] = true.into();
        let answers = both(&view, &mut gpu, &[request(user, &more), request(user, &exact)]);
        let ids = |answer: &Answer| match &answer.content {
            Content::Items(ranked) => ranked.ids.iter().copied().collect::<BTreeSet<ItemId>>(),
            other => panic!("{other:?}"),
        };
        let best = ids(&answers[1][0]);
        wanted += best.len();
        of_cpu += ids(&answers[0][0]).intersection(&best).count();
        of_gpu += ids(&answers[0][1]).intersection(&best).count();
        let plan = view.plan(filter).unwrap();
        let Content::Items(ranked) = &answers[0][1].content else { panic!("an embedding") };
        assert!(ranked.slots.iter().all(|&slot| plan.plan.passes(slot)), "`{filter}` lets something through");
        let excluded: Vec<i64> = user["exclude"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
        assert!(ranked.ids.iter().all(|id| !excluded.contains(&id.0)));
    }
    let (cpu, gpu) = (of_cpu as f64 / wanted as f64, of_gpu as f64 / wanted as f64);
    assert!(gpu >= cpu - 0.01 && gpu > 0.9, "recall {gpu} on the device, {cpu} on the CPU, of {wanted}");
}

#[test]
fn whole_pass_ranks_and_embeds_as_on_the_cpu() {
    let view = debian();
    let user = &heldout(151)[2];
    let features = || -> Features {
        let ids = user["features"]["installed"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
        let text = |name: &str| Values::Texts(vec![user["features"][name].as_str().unwrap().to_owned()]);
        Features::from_iter([
            ("installed".to_owned(), Values::Integers(ids)),
            ("section".to_owned(), text("section")),
            ("maintainer".to_owned(), text("maintainer")),
        ])
    };
    let items = (0..700).step_by(3).chain([10_000_000]).map(ItemId).collect();
    let rank = Rank { user: sterling::request::User::Features(features()), items, reading: Reading::default() };
    let embed = Embed { features: features(), on_degraded: Default::default(), whole: false };
    let prepared = [Request::Rank(rank), Request::Embed(embed)].map(|r| pass::prepare(&view, r).unwrap());
    let of_cpu = pass::run(&mut Cpu::new(Threads::new(1)), &prepared, None);
    let of_gpu = pass::run(&mut gpu(256 << 20), &prepared, None);
    let (of_cpu, of_gpu): (Vec<_>, Vec<_>) =
        of_cpu.into_iter().zip(of_gpu).map(|(a, b)| (a.unwrap(), b.unwrap())).unzip();
    agree(&of_cpu[0], &of_gpu[0], "rank");
    let (Content::Embedding(a), Content::Embedding(b)) = (&of_cpu[1].content, &of_gpu[1].content) else { panic!() };
    assert!(a.query.iter().zip(&b.query).all(|(a, b)| (a - b).abs() < 1e-5), "{a:?} {b:?}");
}

/// Publishes a small catalogue of vectors with attributes.
pub fn vectors(folder: &Path, items: usize, dimension: usize, rescore: Rescore) -> Arc<View> {
    let mut random = Random::new(8);
    let lines: Vec<String> = (0..items)
        .map(|id| {
            let shelf = random.below(9);
            let vector: Vec<f32> =
                (0..dimension).map(|d| random.number() + if d == shelf { 2.0 } else { 0.0 }).collect();
            let price = random.below(1000);
            let attributes = json!({"shelf": format!("s{shelf}"), "price": price});
            json!({"id": id as i64 * 7 - 3000, "embedding": vector, "attributes": attributes}).to_string()
        })
        .collect();
    let path = folder.join("items.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    let mut recipe = Recipe::default();
    (recipe.index.rescore, recipe.index.lists) = (rescore, 40.min(items));
    let store = Store::new(folder.join(format!("{rescore:?}")));
    let what = Plan { recipe, ..Plan::of_vectors("vectors", path) };
    let (name, version) = publish(&store, &what, &|_, _, _| {}).unwrap();
    view_of(&store, &name, version)
}

/// Returns requests of all kinds with vectors as queries.
pub fn mixed(random: &mut Random, count: usize, dimension: usize) -> Vec<Value> {
    let body = |n: usize| {
        let vector = random.numbers(dimension);
        let filter = ["", "shelf:s3", "shelf:s1 OR price < 300", "NOT shelf:s0"][n % 4];
        let probes = if n.is_multiple_of(4) { 1 + random.below(40) } else { 40 };
        let k = 1 + random.below(60);
        let exclude: Vec<i64> = (0..n as i64 * 3).map(|i| i * 7 - 3000).collect();
        json!({"vector": vector, "filter": filter, "probes": probes, "k": k, "candidates": k + 40,
               "exclude": exclude, "exact": n % 5 == 4})
    };
    (0..count).map(body).collect()
}

/// Small catalogues of every kind of row, with vectors as queries and many of them in one batch.
#[test]
fn whole_pass_over_vectors_answers_as_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    for rescore in [Rescore::None, Rescore::F32, Rescore::F16] {
        let view = vectors(folder.path(), 1500, 20, rescore);
        // One group of all requests, and groups of one request.
        for budget in [64 << 20, 1] {
            let mut gpu = gpu(budget);
            let bodies = mixed(&mut Random::new(9), 24, 20);
            for ([cpu, gpu], body) in both(&view, &mut gpu, &bodies).iter().zip(&bodies) {
                agree(cpu, gpu, &format!("{rescore:?} {budget}: {body}"));
            }
        }
    }
}

/// Items in half of the dimensions, and queries in the other half, for which no calibration query stands.
#[test]
fn whole_pass_of_queries_out_of_distribution_probes_as_many_lists_as_the_cpu() {
    const WIDTH: usize = 24;
    let (folder, mut random) = (tempfile::tempdir().unwrap(), Random::new(12));
    let centers = random.numbers(30 * WIDTH);
    let mut vector = |small: std::ops::Range<usize>| {
        let center = &centers[random.below(30) * WIDTH..][..WIDTH];
        let number = |d: usize| (center[d] + 0.3 * random.number()) * if small.contains(&d) { 0.1 } else { 1.0 };
        (0..WIDTH).map(number).collect::<Vec<f32>>()
    };
    let items = (0..3000).map(|id| json!({"id": id, "embedding": vector(WIDTH / 2..WIDTH)}).to_string());
    let path = folder.path().join("items.jsonl");
    std::fs::write(&path, items.collect::<Vec<String>>().join("\n")).unwrap();
    let store = Store::new(folder.path().join("store"));
    let (name, version) = publish(&store, &Plan::of_vectors("halves", path), &|_, _, _| {}).unwrap();
    let view = view_of(&store, &name, version);
    let of = |n: usize| if n.is_multiple_of(2) { WIDTH / 2..WIDTH } else { 0..WIDTH / 2 };
    let bodies: Vec<Value> = (0..24).map(|n| json!({"vector": vector(of(n)), "k": 10})).collect();
    let mut further = 0;
    for (n, [cpu, gpu]) in both(&view, &mut gpu(64 << 20), &bodies).iter().enumerate() {
        agree(cpu, gpu, &bodies[n].to_string());
        let [cpu, gpu] = [cpu, gpu].map(|answer| answer.explain.as_ref().unwrap());
        assert_eq!((cpu.probes, cpu.probed, cpu.scanned), (gpu.probes, gpu.probed, gpu.scanned), "{}", bodies[n]);
        let probes = cpu.probes.unwrap();
        assert!([Some(probes.probes), probes.ood_probes].contains(&Some(cpu.probed as usize)), "{probes:?}");
        further += usize::from(cpu.probed > probes.probes as u64);
    }
    assert!((6..=14).contains(&further), "{further} of 24 queries");
}

/// Batches with the same launches again are replayed, with one wait per group and one for the queries.
#[test]
fn whole_pass_that_comes_again_is_replayed_and_answers_alike() {
    let folder = tempfile::tempdir().unwrap();
    let view = vectors(folder.path(), 900, 16, Rescore::F16);
    let driver = emulated();
    let residents = Arc::new(Residents::new(Device::over(driver.clone())).with_budget(64 << 20));
    residents.upload_version(view.main());
    let mut gpu = Cuda::new(residents, Threads::new(1));
    let mut random = Random::new(10);
    let body = |random: &mut Random, filter: &str, probes: usize| json!({"vector": random.numbers(16), "filter": filter, "probes": probes, "k": 10, "candidates": 50});
    let mut replayed = Vec::new();
    for turn in 0..5 {
        let bodies: Vec<Value> =
            (0..6).map(|n| body(&mut random, ["", "NOT shelf:s0"][n % 2], [7, 40][n % 2])).collect();
        let before = driver.counts();
        let answers = both(&view, &mut gpu, &bodies);
        let after = driver.counts();
        assert_eq!(after.waits - before.waits, 3, "turn {turn}: two groups and the queries");
        for ([cpu, gpu], body) in answers.iter().zip(&bodies) {
            agree(cpu, gpu, &format!("turn {turn}: {body}"));
        }
        replayed.push(after.replayed - before.replayed);
    }
    assert_eq!(replayed[3..], [3, 3], "{replayed:?}");
}

/// The memory of a version is known before anything is allocated, is allocated at once, and is no more than its parts: per slot
/// its code, scale, row and id, and the planes; some words per list and a word per 64 slots, plus the rounding of arrays. The
/// real GPU, which allocates in large steps, is tested with more items.
#[test]
fn whole_pass_takes_the_memory_of_its_parts() {
    let folder = tempfile::tempdir().unwrap();
    let device = device();
    let is_card = device.kind() == "cuda";
    let (items, dimension) = (if is_card { 400_000 } else { 4000 }, 32);
    let lines: Vec<String> = (0..items)
        .map(|id| json!({"id": id, "embedding": Random::new(id + 1).numbers(dimension)}).to_string())
        .collect();
    let path = folder.path().join("items.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    for (rescore, of_row) in [(Rescore::None, 0), (Rescore::F16, 2 * dimension), (Rescore::F32, 4 * dimension)] {
        let mut recipe = Recipe::default();
        (recipe.index.rescore, recipe.index.lists) = (rescore, 20);
        let store = Store::new(folder.path().join(format!("{rescore:?}")));
        let what = Plan { recipe, ..Plan::of_vectors("plain", path.clone()) };
        let (name, version) = publish(&store, &what, &|_, _, _| {}).unwrap();
        let view = view_of(&store, &name, version);
        let index = &view.main().index;
        let residents = Residents::new(device.clone());
        let [taken] = residents.bytes_of(view.main()).unwrap()[..] else { panic!("one device") };
        let (slots, lists) = (index.slots(), index.lists());
        let words: usize = (0..lists)
            .map(|l| (index.list_offsets()[l + 1] - index.list_offsets()[l]) as usize)
            .map(|n| n.div_ceil(64))
            .sum();
        let of_slots = slots * (dimension + 4 + of_row + 8);
        let of_lists = lists.next_multiple_of(16) * (dimension + 4) + (lists + 1) * 32;
        let arrays = 40 * 256;
        assert!(taken >= of_slots, "{taken} bytes for {slots} slots of {rescore:?}");
        let most = of_slots + words * 16 + of_lists + arrays;
        assert!(taken <= most, "{rescore:?}: {taken} bytes, expected at most {most}");
        let free = || device.memory().unwrap().0;
        device.settle().unwrap();
        let before = free();
        residents.upload_version(view.main());
        device.settle().unwrap();
        let (used, step) = ((before - free()) as usize, if is_card { 32 << 20 } else { 1 });
        let range = of_slots..=most.next_multiple_of(step) + step;
        assert!(range.contains(&used), "{rescore:?}: {used} bytes by the device's own count, expected {range:?}");
        let mut gpu = Cuda::new(Arc::new(residents), Threads::new(1));
        let bodies = [json!({"vector": vec![0.5; dimension], "k": 5, "candidates": 20})];
        let [[cpu, gpu]] = &both(&view, &mut gpu, &bodies)[..] else { panic!() };
        agree(cpu, gpu, "planned");
    }
}

#[test]
fn whole_pass_that_does_not_fit_is_answered_by_the_cpu() {
    let view = debian();
    // The emulated GPU has 8 GiB, far less than this budget.
    let residents = Arc::new(Residents::new(device()).with_budget(1 << 50));
    let prepared = prepare(&view, &[request(&heldout(500)[0], &json!({"k": 5, "explain": true}))]);
    for _ in 0..2 {
        let answers = pass::run(&mut Cuda::new(residents.clone(), Threads::new(1)), &prepared, None);
        let kernel = answers[0].as_ref().unwrap().explain.as_ref().unwrap().kernel;
        assert!(!["emulated", "cuda"].contains(&kernel), "{kernel}");
    }
    let past = Some(std::time::Instant::now());
    let late = pass::run(&mut gpu(256 << 20), &prepared, past);
    assert_eq!(late[0].as_ref().unwrap_err().kind(), Kind::DeadlineExceeded);
}
