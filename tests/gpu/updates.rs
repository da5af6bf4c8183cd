//! Updates on an emulated GPU compared with the answers of the CPU: inserted, changed and deleted items, from any previous state.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::cuda::Device;
use sterling::graph::tower::Threads;
use sterling::index::ivf::Rescore;
use sterling::publish::{Plan, Source, publish};
use sterling::request::{Answer, Content};
use sterling::serving::fresh::{Fresh, Put, Update};
use sterling::serving::pass::{self, Cpu, Cuda, Residents};
use sterling::serving::view::{Attribute, BeforeShown, View};
use sterling::snapshot::{PartFormat, Store};
use sterling::storage::files::TensorFile;

use crate::emulation::{Random, device, emulated};
use crate::onnx::{Onnx, floats, integers, value};
use crate::whole_pass::{TOLERANCE, agree, both, prepare, view_of};

const DIMENSION: usize = 12;
const BRANDS: [&str; 4] = ["acme", "bolt", "cog", "dyn"];
/// Ids of items are drawn from this number.
const IDS: usize = 2400;

/// A row of the catalogue: some shelves, one of them rare, a price and the inputs of a reranker.
struct Row {
    vector: Vec<f32>,
    shelf: String,
    brands: Vec<String>,
    price: f64,
    picture: Vec<f32>,
}

impl Row {
    fn random(random: &mut Random, is_new: bool) -> Self {
        let shelf = match random.below(400) {
            0..2 if is_new => "rare".to_owned(),
            2..50 if is_new => "new".to_owned(),
            _ => format!("s{}", random.below(5)),
        };
        let mut brands: Vec<String> = (0..random.below(4)).map(|_| BRANDS[random.below(4)].to_owned()).collect();
        brands.sort();
        brands.dedup();
        let price = random.below(400) as f64 / 4.0;
        Row { vector: random.numbers(DIMENSION), shelf, brands, price, picture: random.numbers(3) }
    }

    fn line(&self, id: i64) -> String {
        let mut attributes = json!({"shelf": self.shelf, "price": self.price, "picture": self.picture});
        if !self.brands.is_empty() {
            attributes["brand"] = json!(self.brands);
        }
        json!({"id": id, "embedding": self.vector, "attributes": attributes}).to_string()
    }

    fn attributes(&self) -> Vec<(String, Attribute)> {
        vec![
            ("shelf".into(), Attribute::Texts(vec![self.shelf.clone()])),
            ("brand".into(), Attribute::Texts(self.brands.clone())),
            ("price".into(), Attribute::Number(self.price)),
        ]
    }
}

/// Returns random updates: new items and replacements, changes, deletions.
fn update(random: &mut Random, has_pictures: bool) -> Update {
    let (id, row) = (random.below(IDS) as i64 * 5 - 900, Row::random(random, true));
    match random.below(10) {
        0..5 => {
            let dense = if has_pictures { vec![("picture".into(), row.picture.clone())] } else { Vec::new() };
            Update::Put(Put { id, vector: Some(row.vector.clone()), attributes: row.attributes(), dense })
        }
        5..8 => {
            let mut attributes = row.attributes();
            attributes.remove(random.below(3));
            Update::Set { id, attributes }
        }
        _ => Update::Delete { id },
    }
}

/// Publishes a catalogue without a model, or with one that has a reranker.
pub fn catalogue(folder: &Path, items: usize, rescore: Rescore, package: Option<PartFormat>) -> Arc<View> {
    catalogue_in(24, folder, items, rescore, package)
}

/// The same with this number of lists.
fn catalogue_in(lists: usize, folder: &Path, items: usize, rescore: Rescore, package: Option<PartFormat>) -> Arc<View> {
    let mut random = Random::new(31);
    let line = |n: usize| {
        let mut row = Row::random(&mut random, false);
        // So few that a posting list holds them.
        if n == 10 {
            row.shelf = "rare".into();
        }
        row.line(n as i64 * 5 - 900)
    };
    let mut lines: Vec<String> = (0..items).map(line).collect();
    if package.is_none() {
        lines.iter_mut().for_each(|line| {
            let mut item: Value = serde_json::from_str(line).unwrap();
            item["attributes"].as_object_mut().unwrap().remove("picture");
            *line = item.to_string();
        });
    }
    let path = folder.join("items.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    let source = match package {
        Some(_) => Source::Package { folder: write_package(folder), items: Some(path), vectors: None },
        None => Source::Vectors { name: "plain".into(), items: path, vectors: None },
    };
    let mut what = Plan::new(source);
    (what.recipe.index.rescore, what.recipe.index.lists) = (rescore, lists);
    if let Some(format) = package {
        what.recipe.reranking.item_part = format;
    }
    let store = Store::new(folder.join(format!("{rescore:?}-{package:?}")));
    let (name, version) = publish(&store, &what, &|_, _, _| {}).unwrap();
    view_of(&store, &name, version)
}

/// Writes a reranker that reads the row of an item, a vector that is stored for it, its brands and its id in tables, and its
/// price.
fn write_package(folder: &Path) -> std::path::PathBuf {
    let package = folder.join("package");
    std::fs::create_dir_all(&package).unwrap();
    let model = r#"
name = "reranked"
dimension = 12
[[tables]]
name = "brands"
file = "tables.safetensors"
vocabulary = "brands.txt"
[[tables]]
name = "ids"
file = "tables.safetensors"
[[item.vectors]]
name = "picture"
column = "picture"
width = 3
format = "f16"
[[item.columns]]
name = "brand"
[[item.columns]]
name = "price"
[[item.columns]]
name = "shelf"
[[tasks]]
name = "click"
[overarch]
graph = "overarch.onnx"
[[overarch.features]]
name = "item_brand"
kind = "category"
table = "brands"
pooling = "mean"
column = "brand"
[[overarch.features]]
name = "item_row"
kind = "ids"
table = "ids"
column = "id"
[value]
expression = "click + 0.01 * price"
"#;
    std::fs::write(package.join("model.toml"), model).unwrap();
    std::fs::write(package.join("brands.txt"), BRANDS.join("\n")).unwrap();
    let mut random = Random::new(32);
    let (brands, ids) = (random.numbers(4 * 2), random.numbers(5000 * 3));
    let mut file = TensorFile::new();
    file.add("brands", &[4, 2], &brands).unwrap();
    file.add("ids", &[5000, 3], &ids).unwrap();
    file.write(&package.join("tables.safetensors")).unwrap();
    let mut matrix = |name: &str, rows: i64, columns: i64| {
        let numbers = random.numbers((rows * columns) as usize);
        floats(name, &[rows, columns], &numbers.iter().map(|x| x * 0.4).collect::<Vec<f32>>())
    };
    let widths = [("item", 12), ("picture", 3), ("item_brand", 2), ("item_row", 3)];
    let mut inputs: Vec<_> = widths.iter().map(|(name, width)| value(name, &[0, 0, *width])).collect();
    inputs.extend([value("query", &[0, 12]), value("price", &[0, 0]), value("similarity", &[0, 0])]);
    let graph = Onnx::new(&inputs, &[value("logits", &[0, 0, 1])], &["one_price = Unsqueeze(price, last)"])
        .and("scaled = Mul(one_price, hundredth)")
        .and("of_item = Concat(item, picture, item_brand, item_row, scaled)")
        .attribute("axis", -1)
        .and("first = MatMul(of_item, w1)")
        .and("rectified = Relu(first)")
        .and("out = MatMul(rectified, w2)")
        .and("one_query = Unsqueeze(query, middle)")
        .and("product = Mul(out, one_query)")
        .and("sum = ReduceSum(product, last)")
        .attribute("keepdims", 1)
        .and("one_similarity = Unsqueeze(similarity, last)")
        .and("logits = Add(sum, one_similarity)")
        .with(&[matrix("w1", 21, 32), matrix("w2", 32, 12), floats("hundredth", &[1], &[0.01])])
        .with(&[integers("last", &[-1]), integers("middle", &[1])]);
    std::fs::write(package.join("overarch.onnx"), graph.bytes()).unwrap();
    package
}

/// Returns requests of all kinds: with filters by posting lists and by bitmaps and without filters, over few lists and over all,
/// and exact ones.
pub fn asked(random: &mut Random, count: usize) -> Vec<Value> {
    let filters = [
        "",
        "",
        "shelf:s3",
        "shelf:rare",
        "shelf:new",
        "NOT shelf:s0",
        "shelf:s1 OR price < 20",
        "brand:acme",
        "price >= 50",
        "shelf:nowhere",
        "NOT shelf:nowhere",
        "shelf:new OR shelf:rare",
    ];
    let body = |n: usize| {
        let filter = filters[(n + random.below(2)) % filters.len()];
        let probes = if filter.is_empty() { 1 + random.below(24) } else { 24 };
        let k = 1 + random.below(50);
        let exclude: Vec<i64> = (0..random.below(60) as i64).map(|_| random.below(IDS) as i64 * 5 - 900).collect();
        json!({"vector": random.numbers(DIMENSION), "filter": filter, "probes": probes, "k": k, "candidates": k + 50,
               "exclude": exclude, "exact": n % 5 == 4})
    };
    (0..count).map(body).collect()
}

fn residents() -> Arc<Residents> {
    Arc::new(Residents::new(device()).with_budget(64 << 20).with_updates())
}

pub fn changed(fresh: &mut Fresh, random: &mut Random, updates: usize, has_pictures: bool) -> Arc<View> {
    let updates: Vec<Update> = (0..updates).map(|_| update(random, has_pictures)).collect();
    assert!(fresh.apply(&updates).unwrap().is_empty());
    Arc::new(fresh.view().unwrap())
}

/// Returns whether each score of an answer is at least that of another one.
fn is_no_worse(answer: &Answer, other: &Answer, what: &str) {
    let (Content::Items(answer), Content::Items(other)) = (&answer.content, &other.content) else { panic!("{what}") };
    assert_eq!(answer.ids.len(), other.ids.len(), "{what}");
    let pairs = answer.scores.iter().zip(&other.scores);
    pairs.for_each(|(score, least)| {
        assert!(score >= &(least - TOLERANCE * least.abs().max(1.0)), "{what}: {score}, {least}")
    });
}

fn agree_all(view: &Arc<View>, gpu: &mut Cuda, bodies: &[Value], what: &str) -> BTreeSet<&'static str> {
    let mut routes = BTreeSet::new();
    for ([cpu, gpu], body) in both(view, gpu, bodies).iter().zip(bodies) {
        let (of_cpu, of_gpu) = (cpu.explain.as_ref().unwrap(), gpu.explain.as_ref().unwrap());
        // If too few results were found, a GPU scans more lists before it checks for enough results.
        let goes_on = of_gpu.probed > of_cpu.probed;
        match goes_on {
            true => is_no_worse(gpu, cpu, &format!("{what}: {body}")),
            false => agree(cpu, gpu, &format!("{what}: {body}")),
        }
        assert_eq!(of_cpu.route, of_gpu.route, "{what}: {body}");
        let candidates = [of_cpu.candidates, of_gpu.candidates];
        assert!(
            candidates[0] == candidates[1] || goes_on && candidates[0] < candidates[1],
            "{what}: {body}: {candidates:?}"
        );
        routes.insert(of_gpu.route);
    }
    routes
}

#[test]
fn whole_pass_sees_updates_as_the_cpu_does() {
    let folder = tempfile::tempdir().unwrap();
    let mut routes = BTreeSet::new();
    for rescore in [Rescore::None, Rescore::F16, Rescore::F32] {
        let main = catalogue(folder.path(), 1500, rescore, None).main().clone();
        let mut random = Random::new(33);
        let (mut fresh, mut gpu) = (Fresh::new(main, 0), Cuda::new(residents(), Threads::new(1)));
        for (turn, updates) in [0, 1, 30, 700, 1, 1500, 900, 5].into_iter().enumerate() {
            let view = changed(&mut fresh, &mut random, updates, false);
            assert_eq!(view.is_bare(), updates == 0);
            let bodies = asked(&mut random, 24);
            routes.extend(agree_all(&view, &mut gpu, &bodies, &format!("{rescore:?}, turn {turn}")));
            // Batches without filters that share lists, and single requests.
            let plain: Vec<Value> = (0..20)
                .map(|_| json!({"vector": random.numbers(DIMENSION), "k": 20, "candidates": 60, "probes": 12}))
                .collect();
            agree_all(&view, &mut gpu, &plain, &format!("{rescore:?}, turn {turn}, together"));
            agree_all(&view, &mut gpu, &plain[..1], &format!("{rescore:?}, turn {turn}, alone"));
        }
    }
    assert_eq!(routes, BTreeSet::from(["all", "exact", "few", "none", "words"]));
}

/// Only delta items are left, or none.
#[test]
fn whole_pass_over_deleted_items_finds_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let main = catalogue(folder.path(), 300, Rescore::F16, None).main().clone();
    let ids: Vec<i64> = main.ids.slots().map(|slot| main.ids.item(slot).0).collect();
    let mut random = Random::new(34);
    let (mut fresh, mut gpu) = (Fresh::new(main, 0), Cuda::new(residents(), Threads::new(1)));
    let deleted: Vec<Update> = ids.iter().skip(3).map(|&id| Update::Delete { id }).collect();
    fresh.apply(&deleted).unwrap();
    let few = Arc::new(fresh.view().unwrap());
    agree_all(&few, &mut gpu, &asked(&mut random, 12), "three are left");
    let row = Row::random(&mut random, true);
    let put = Put { id: 7, vector: Some(row.vector.clone()), attributes: row.attributes(), dense: Vec::new() };
    let last: Vec<Update> = ids.iter().take(3).map(|&id| Update::Delete { id }).collect();
    fresh.apply(&[last, vec![Update::Put(put)]].concat()).unwrap();
    let one = Arc::new(fresh.view().unwrap());
    agree_all(&one, &mut gpu, &asked(&mut random, 12), "a fresh one is left");
    fresh.apply(&[Update::Delete { id: 7 }]).unwrap();
    let none = Arc::new(fresh.view().unwrap());
    agree_all(&none, &mut gpu, &asked(&mut random, 12), "none is left");
}

/// Values of delta items follow those of the snapshot, whose last item ends where its last list does.
#[test]
fn whole_pass_keeps_the_values_of_the_last_item_at_every_length_of_the_last_list() {
    let row = |id: i64, brands: &[&str]| {
        let brands = brands.iter().map(|&brand| brand.to_owned()).collect();
        let row = Row { vector: vec![0.1; DIMENSION], shelf: "s1".into(), brands, price: 3.0, picture: vec![0.5; 3] };
        let dense = vec![("picture".into(), row.picture.clone())];
        Update::Put(Put { id, vector: Some(row.vector.clone()), attributes: row.attributes(), dense })
    };
    let bodies = [json!({"vector": vec![0.5; DIMENSION], "k": 64, "candidates": 64, "probes": 1})];
    for items in 49..=64 {
        let folder = tempfile::tempdir().unwrap();
        let main = catalogue_in(1, folder.path(), items, Rescore::F32, Some(PartFormat::None)).main().clone();
        let (residents, mut fresh) = (residents(), Fresh::new(main, 0));
        let mut gpu = Cuda::new(residents.clone(), Threads::new(1));
        // Each segment takes the first free slot, including that of the first segment after its removal.
        let mut views: Vec<Arc<View>> = Vec::new();
        for (n, brands) in [&[][..], &["acme", "bolt", "cog"], &["dyn"]].into_iter().enumerate() {
            assert!(fresh.apply(&[row(100_001 + n as i64, brands)]).unwrap().is_empty());
            views.push(Arc::new(fresh.view().unwrap()));
            residents.before_shown(&views[views.len() - 1]);
            for (at, view) in views.iter().enumerate() {
                agree_all(view, &mut gpu, &bodies, &format!("{items} items, view {at} after {n}"));
            }
            if views.len() == 2 {
                views.remove(0);
            }
        }
    }
}

/// Inputs of a reranker for delta items: rows, vectors, table rows by their values and ids, precomputed item parts.
#[test]
fn whole_pass_reranks_updated_items() {
    let folder = tempfile::tempdir().unwrap();
    for format in [PartFormat::None, PartFormat::F32] {
        let main = catalogue(folder.path(), 500, Rescore::F16, Some(format)).main().clone();
        assert_eq!(main.package.overarch.as_ref().unwrap().part().is_some(), format != PartFormat::None);
        let mut random = Random::new(35);
        let (mut fresh, mut gpu) = (Fresh::new(main, 0), Cuda::new(residents(), Threads::new(1)));
        for (turn, updates) in [3, 200, 1300, 40].into_iter().enumerate() {
            let view = changed(&mut fresh, &mut random, updates, true);
            let mut bodies = asked(&mut random, 10);
            // All of them are reranked, because borderline candidates may differ.
            bodies.iter_mut().for_each(|body| body["candidates"] = 4000.into());
            agree_all(&view, &mut gpu, &bodies, &format!("{format:?}, turn {turn}"));
        }
    }
}

/// Data of later items is exact on the host, and on a GPU has the format of the snapshot.
#[test]
fn whole_pass_stores_updated_items_in_the_format_of_the_snapshot() {
    let folder = tempfile::tempdir().unwrap();
    let main = catalogue(folder.path(), 500, Rescore::F16, Some(PartFormat::Int8)).main().clone();
    let mut random = Random::new(40);
    let (mut fresh, mut gpu) = (Fresh::new(main, 0), Cuda::new(residents(), Threads::new(1)));
    for updates in [3, 400] {
        let view = changed(&mut fresh, &mut random, updates, true);
        let bodies = [json!({"vector": random.numbers(DIMENSION), "k": 4000, "candidates": 4000, "exact": true})];
        let [[cpu, gpu]] = &both(&view, &mut gpu, &bodies)[..] else { panic!() };
        let (Content::Items(cpu), Content::Items(gpu)) = (&cpu.content, &gpu.content) else { panic!() };
        assert_eq!((cpu.ids.len(), gpu.ids.len()), (view.items(), view.items()));
        for (id, score) in gpu.ids.iter().zip(&gpu.scores) {
            let at = cpu.ids.iter().position(|known| known == id).unwrap();
            assert!((cpu.scores[at] - score).abs() < 0.02, "item {id}: {score}, expected about {}", cpu.scores[at]);
        }
    }
}

/// A request sees the view that it was prepared for, even if the GPU has loaded others since.
#[test]
fn whole_pass_sees_one_position() {
    let folder = tempfile::tempdir().unwrap();
    let main = catalogue(folder.path(), 800, Rescore::F16, None).main().clone();
    let (mut fresh, mut random, residents) = (Fresh::new(main, 0), Random::new(36), residents());
    let mut gpu = Cuda::new(residents.clone(), Threads::new(1));
    let views: Vec<Arc<View>> = [100, 300, 800, 20, 1].map(|n| changed(&mut fresh, &mut random, n, false)).into();
    // Every view exists before its first request; then the last and the first alternate, and one is loaded without notice.
    views.iter().filter(|view| view.position() != 1200).for_each(|view| residents.before_shown(view));
    let bodies = asked(&mut random, 8);
    for view in [4, 0, 2, 3, 1, 0].map(|n| &views[n]) {
        agree_all(view, &mut gpu, &bodies, &format!("position {}", view.position()));
    }
}

/// Updates arrive while passes run: each is answered by the GPU for its own view.
#[test]
fn whole_pass_answers_while_updates_come() {
    let folder = tempfile::tempdir().unwrap();
    let main = catalogue(folder.path(), 600, Rescore::F16, None).main().clone();
    let (mut fresh, residents) = (Fresh::new(main, 0), residents());
    let shown = Mutex::new(Arc::new(fresh.view().unwrap()));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = |seed: u64| {
            let (mut gpu, mut random) = (Cuda::new(residents.clone(), Threads::new(1)), Random::new(seed));
            let mut positions = BTreeSet::new();
            while !is_over.load(Ordering::Relaxed) || positions.len() < 2 {
                let view = shown.lock().unwrap().clone();
                agree_all(&view, &mut gpu, &asked(&mut random, 4), &format!("reader {seed}"));
                positions.insert(view.position());
            }
            positions.len()
        };
        let readers = [1, 2].map(|seed| scope.spawn(move || reader(seed)));
        let mut random = Random::new(37);
        for _ in 0..25 {
            let view = changed(&mut fresh, &mut random, 90, false);
            residents.before_shown(&view);
            *shown.lock().unwrap() = view;
        }
        is_over.store(true, Ordering::Relaxed);
        let seen: Vec<usize> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
        assert!(seen.iter().all(|&positions| positions > 1), "{seen:?}");
    });
}

/// A view uploads only its changes: never the snapshot, and each segment once.
#[test]
fn whole_pass_uploads_changes_only() {
    let folder = tempfile::tempdir().unwrap();
    let main = catalogue(folder.path(), 3000, Rescore::F16, None).main().clone();
    let driver = emulated();
    let residents = Residents::new(Device::over(driver.clone())).with_budget(64 << 20).with_updates();
    let complete = residents.bytes_of(&main).unwrap()[0] as u64;
    let mut fresh = Fresh::new(main.clone(), 0);
    let mut random = Random::new(38);
    let brought = |fresh: &mut Fresh| {
        let view = Arc::new(fresh.view().unwrap());
        let before = driver.counts().uploaded;
        residents.before_shown(&view);
        (driver.counts().uploaded - before, view)
    };
    let (snapshot, _bare) = brought(&mut fresh);
    assert!(snapshot > complete / 2, "the snapshot: {snapshot} bytes");
    let mut put = |id: i64| {
        let row = Row::random(&mut random, true);
        Update::Put(Put { id, vector: Some(row.vector.clone()), attributes: row.attributes(), dense: Vec::new() })
    };
    // Codes, scales, rows, ids, columns and planes of a row, in blocks and lists; plus the fixed size of a segment.
    let of_rows = |rows: usize| 200 * (rows + 16 * 24) as u64 + 4096;
    let of_gone = |removed: usize| 16 * removed as u64;

    fresh.apply(&[put(100_000)]).unwrap();
    let (one, first) = brought(&mut fresh);
    assert!(0 < one && one <= 4096 + 16 * 200, "one item: {one} bytes");
    let ids: Vec<i64> = main.ids.slots().map(|slot| main.ids.item(slot).0).collect();
    for deleted in [1, 40, 300] {
        let removed: Vec<Update> = ids[deleted..2 * deleted].iter().map(|&id| Update::Delete { id }).collect();
        fresh.apply(&removed).unwrap();
        let (bytes, _view) = brought(&mut fresh);
        assert!(0 < bytes && bytes <= of_gone(deleted), "{deleted} that go: {bytes} bytes");
    }
    // An item of the snapshot with another price: its row in the table, and a bitmap word.
    fresh.apply(&[Update::Set { id: ids[2000], attributes: vec![("price".into(), Attribute::Number(2.5))] }]).unwrap();
    let (bytes, _view) = brought(&mut fresh);
    assert!(0 < bytes && bytes <= 4096 + 16 * 200 + of_gone(1), "a change: {bytes} bytes");

    let many: Vec<Update> = (0..1500).map(|n| put(200_000 + n)).collect();
    fresh.apply(&many).unwrap();
    let (bytes, _many) = brought(&mut fresh);
    assert!(bytes > 100 * 1500 && bytes <= of_rows(1100) + of_rows(500), "1,500 items: {bytes} bytes");
    // The segment that these became stays in place.
    fresh.apply(&[put(300_000)]).unwrap();
    let (bytes, last) = brought(&mut fresh);
    let table = 1502 + 1 - 1024;
    assert!(0 < bytes && bytes <= of_rows(table), "one more: {bytes} bytes");
    let before = driver.counts().uploaded;
    residents.before_shown(&last);
    residents.before_shown(&first);
    assert_eq!(driver.counts().uploaded, before, "a view that is there");
}

/// Without room, the CPU answers; once other views are dropped, the GPU does.
#[test]
fn whole_pass_without_room_for_updates_is_answered_by_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let main = catalogue(folder.path(), 700, Rescore::F16, None).main().clone();
    let (mut fresh, mut random) = (Fresh::new(main, 0), Random::new(39));
    let kernel = |residents: &Arc<Residents>, view: &Arc<View>| {
        let bodies = [json!({"vector": vec![0.5; DIMENSION], "k": 9, "explain": true, "exact": true})];
        let prepared = prepare(view, &bodies);
        let answers = |pass: &mut dyn pass::Pass| pass::run(pass, &prepared, None).remove(0).unwrap();
        let (cpu, gpu) =
            (answers(&mut Cpu::new(Threads::new(1))), answers(&mut Cuda::new(residents.clone(), Threads::new(1))));
        agree(&cpu, &gpu, "either device");
        let explain = gpu.explain.unwrap();
        let reported = explain.note.is_some_and(|note| note.contains("the CPU answered: the device has no memory"));
        assert!(reported != ["emulated", "cuda"].contains(&explain.kernel), "{}", explain.kernel);
        explain.kernel
    };
    let of_card = |kernel: &str| ["emulated", "cuda"].contains(&kernel);
    let without = Arc::new(Residents::new(device()).with_budget(64 << 20));
    let view = changed(&mut fresh, &mut random, 50, false);
    assert!(!of_card(kernel(&without, &view)), "no room was kept");
    let with = residents();
    // Each view has its own table, which occupies memory until the view is dropped.
    let held: Vec<Arc<View>> = (0..60).map(|_| changed(&mut fresh, &mut random, 700, false)).collect();
    let answered: Vec<bool> = held.iter().map(|view| of_card(kernel(&with, view))).collect();
    assert!(answered[0] && !answered[59], "{answered:?}");
    drop(held);
    // A merge in progress holds its segments until it is installed; later updates wait in their own segments.
    let start = Instant::now();
    while !of_card(kernel(&with, &Arc::new(fresh.view().unwrap()))) {
        assert!(start.elapsed() < Duration::from_secs(600), "the CPU answers for ever");
        std::thread::sleep(Duration::from_millis(20));
        fresh.tidy().unwrap();
    }
}
