//! A table with managed ids gives the answers of a table whose ids are row numbers, for each location of the rows and
//! each version.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use sterling::embedding::Table;
use sterling::embedding::managed::FREE;
use sterling::embedding::place::{Sharding, Tier};
use sterling::publish::{Plan, Source};
use sterling::request::Ranked;
use sterling::serving::view::View;
use sterling::snapshot::model::Package;
use sterling::snapshot::{Placement, PlacementOptions, Snapshot};
use sterling::storage::files::TensorFile;

use crate::placement::{plan_file, planned};
use crate::support::{Server, put, retrieve, tiny, tiny_package, until};

/// Rows of the table, four of which have no id.
const ROWS: usize = 16;

/// Copies the tiny package. The ids 0 to 11 of its table `packages`, which were row numbers, become managed ids in
/// other rows, which `shift` selects. Row numbers that are not ids have the rows of other ids, so that a lookup that
/// ignores the map gives other
/// answers.
fn managed(folder: &Path, shift: usize) -> Plan {
    std::fs::create_dir_all(folder).unwrap();
    for entry in std::fs::read_dir(tiny_package()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
    let package = Package::open(folder).unwrap();
    let table = package.table("packages").unwrap();
    let (rows, width) = (table.host_rows().unwrap(), table.width());
    let (mut ids, mut values) = ([FREE; ROWS], vec![9.0; ROWS * width]);
    for id in 0..12 {
        let row = (id * 5 + shift) % ROWS;
        ids[row] = id as i64;
        rows.decode(id, &mut values[row * width..][..width]);
    }
    let mut file = TensorFile::new();
    package.tables.iter().filter(|t| t.name() != "packages").for_each(|t| t.encode(&mut file).unwrap());
    file.add("packages", &[ROWS, width], &values).unwrap();
    file.add("ids.packages", &[ROWS], &ids).unwrap();
    file.write(&folder.join("tables.safetensors")).unwrap();
    let model = folder.join("model.toml");
    let text = std::fs::read_to_string(&model).unwrap();
    std::fs::write(&model, text.replacen("name = \"packages\"\n", "name = \"packages\"\nmanaged = true\n", 1)).unwrap();
    Plan { source: Source::Package { folder: folder.into(), items: None, vectors: None }, ..tiny() }
}

fn requests() -> Vec<Value> {
    let user = |n: i64| json!({"installed": [n, n + 3, n - 2], "section": "games", "size": [0.5, -0.25, 1.0]});
    // Ids from -2 to 17, of which 0 to 11 have a row.
    (0..15).map(|n| json!({"features": user(n), "k": 10})).collect()
}

fn answers(folder: &Path, placement: &Placement) -> Vec<Vec<(i64, f32)>> {
    let view = Arc::new(View::new(Arc::new(Snapshot::load(folder, placement).unwrap())));
    let pairs = |(ranked, _): (Ranked, _)| ranked.ids.iter().map(|id| id.0).zip(ranked.scores).collect();
    retrieve(&view, &requests()).into_iter().map(|answer| pairs(answer.unwrap())).collect()
}

#[test]
fn managed_ids_answer_as_row_numbers_do_wherever_rows_lie() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    put(&store, &tiny()).unwrap();
    let expected = answers(&store.join("tiny/1"), &Placement::whole());
    put(&store, &managed(&folder.path().join("package"), 3)).unwrap();
    let version = store.join("tiny/2");
    assert!(answers(&version, &Placement::whole()) == expected);
    let package = Package::open(&version).unwrap();
    let table: &Table = package.table("packages").unwrap();
    assert_eq!((table.ids().unwrap().held(), table.resolve(4).0, table.resolve(12)), (12, Some(7), (None, true)));
    let (rows, columns) = (ROWS as u64, table.width() as u32);
    let by_rows = [([0, 5], [0, columns], Tier::Host), ([5, rows], [0, columns], Tier::Host)];
    let by_columns = [([0, rows], [0, 2], Tier::Host), ([0, rows], [2, columns], Tier::Host)];
    for (sharding, parts) in [(Sharding::RowWise, by_rows), (Sharding::ColumnWise, by_columns)] {
        let plan = Some(plan_file(folder.path(), vec![planned(table, sharding, &parts)]));
        let placement = Placement::open(&PlacementOptions { plan, ..PlacementOptions::default() }).unwrap();
        assert!(answers(&version, &placement) == expected, "{sharding:?}");
    }
    // Another format of the rows keeps the ids.
    let int8 = table.converted(sterling::embedding::RowFormat::Int8).unwrap();
    assert_eq!((int8.resolve(4), int8.resolve(12)), (table.resolve(4), table.resolve(12)));
}

#[test]
fn no_request_meets_the_ids_of_one_version_with_the_rows_of_another() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    put(&store, &managed(&folder.path().join("package0"), 0)).unwrap();
    let server = Server::start(&store);
    // All versions give the same answers.
    let ask = || {
        let requests = requests().into_iter().map(|request| server.ask("/v1/models/tiny:retrieve", request));
        let of = |answer: Value| (answer["version"].as_u64().unwrap(), answer["items"].clone());
        requests.map(of).collect::<Vec<_>>()
    };
    let expected: Vec<Value> = ask().into_iter().map(|(_, items)| items).collect();
    let (is_done, versions) = (AtomicBool::new(false), std::sync::Mutex::new(std::collections::BTreeSet::new()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                for ((version, items), expected) in ask().into_iter().zip(&expected) {
                    assert_eq!(items, *expected, "version {version}");
                    versions.lock().unwrap().insert(version);
                }
            }
        });
        for shift in 1..4 {
            put(&store, &managed(&folder.path().join(format!("package{shift}")), shift * 3)).unwrap();
            let request = requests().remove(0);
            until("the next version", || server.ask("/v1/models/tiny:retrieve", &request)["version"] == 1 + shift);
        }
        is_done.store(true, Ordering::Relaxed);
    });
    assert!(versions.into_inner().unwrap().len() > 1);
    let unseen = server.metric("sterling_unseen_ids_total{table=\"packages\"}").unwrap();
    assert!(unseen > 0.0, "{unseen}");
}

#[test]
fn packages_whose_ids_do_not_fit_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str, from: &str, to: &str| {
        let package = folder.path().join(name);
        managed(&package, 1);
        let model = package.join("model.toml");
        let text = std::fs::read_to_string(&model).unwrap();
        assert!(text.contains(from));
        std::fs::write(&model, text.replacen(from, to, 1)).unwrap();
        Package::open(&package).unwrap_err().to_string()
    };
    for (name, from, to, expected) in [
        ("plain", "managed = true\n", "", "the file has ids of table `packages`, expected `managed = true`"),
        ("both", "managed = true\n", "managed = true\nvocabulary = \"sections.txt\"\n", "a vocabulary and managed ids"),
        ("row", "unseen = \"zero\"", "unseen = \"row:1\"", "row 1 is reserved for unseen ids, expected no id, got 0"),
    ] {
        let reported = refused(name, from, to);
        assert!(reported.contains(expected), "{name}: {reported}");
    }
}
