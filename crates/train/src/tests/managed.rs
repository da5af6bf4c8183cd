//! Runs with managed ids: the written package holds them, killed runs resume with the same bits, removed ids leave no byte.

use super::*;
use sterling_embedding::managed::FREE;
use sterling_snapshot::model::Package;
use sterling_storage::files::TensorFile;

pub(super) const MANAGED: &str =
    "[[train.tables]]\nname = \"packages\"\nmanaged = { rows = 20, every = 3, admit = 2, ttl_hours = 0.02 }\n";

/// Returns the model file of a package with the ids of its table `packages` managed, and writes that no row has one.
pub(super) fn declare(folder: &Path, model: &str) -> String {
    let tables = Package::open(folder).unwrap().tables;
    let mut file = TensorFile::new();
    tables.iter().for_each(|table| table.encode(&mut file).unwrap());
    file.add("ids.packages", &[12], &[FREE; 12]).unwrap();
    file.write(&folder.join("tables.safetensors")).unwrap();
    model.replacen("name = \"packages\"\n", "name = \"packages\"\nmanaged = true\n", 1)
}

/// An id of 64 bits, for the package that event `n` says is installed.
fn installed(n: u64) -> i64 {
    sterling_core::random::splitmix64(n % 31) as i64
}

pub(super) fn with_ids(count: u64) -> Vec<Value> {
    let with_ids = |n| {
        let mut event = event(n);
        event["user"]["installed"] = json!([installed(n * n), installed(n / 40)]);
        event
    };
    (0..count).map(with_ids).collect()
}

#[test]
fn the_package_has_the_ids_and_later_runs_go_on_with_them() {
    let place = TestFolder::new(&(TRAIN.to_owned() + MANAGED));
    let path = place.events("e.jsonl", &with_ids(400));
    let (report, out) = place.run(place.options(&path, "work"), "out");
    let managed = report.managed["packages"];
    assert!(managed.rows == 20 && managed.held > 10 && managed.totals.evicted > 0, "{managed:?}");
    assert!(managed.totals.unseen < managed.totals.occurrences, "{managed:?}");
    let package = Package::open(&place.path("out")).unwrap();
    let table = package.table("packages").unwrap();
    assert_eq!((table.rows(), table.ids().unwrap().held()), (20, managed.held));
    assert!((0..31).any(|n| table.resolve(installed(n)).0.is_some()));
    for threads in 2..=3 {
        let options = TrainOptions { threads, ..place.options(&path, &format!("work{threads}")) };
        assert!(place.run(options, &format!("out{threads}")).1 == out, "{threads} threads");
    }
    fs::remove_dir_all(place.path("package")).unwrap();
    copied(&place.path("out"), &place.path("package"));
    let (again, _) = place.run(place.options(&path, "again"), "next");
    let again = again.managed["packages"].totals;
    assert_eq!(again.occurrences, 2 * managed.totals.occurrences);
}

#[test]
fn a_killed_run_with_managed_ids_resumes_to_the_same_bits() {
    let train = TRAIN.replace("batch = 16", "batch = 2").replace("uniform = 8", "uniform = 1");
    let options = TrainOptions { checkpoint_steps: 1, ..TrainOptions::new(vec![], "") };
    let resumed = ends_with_the_same_bits(&(train + MANAGED), options);
    assert!(resumed.len() > 6, "{resumed:?}");
}

fn holds(folder: &Path, bytes: &[u8]) -> bool {
    fs::read_dir(folder).unwrap().any(|entry| {
        let path = entry.unwrap().path();
        if path.is_dir() {
            return holds(&path, bytes);
        }
        fs::read(&path).unwrap().windows(bytes.len()).any(|window| window == bytes)
    })
}

#[test]
fn a_removed_id_leaves_no_byte_in_checkpoints_and_package() {
    let place = TestFolder::new(&(TRAIN.to_owned() + &MANAGED.replace(", ttl_hours = 0.02", "")));
    let path = place.events("e.jsonl", &with_ids(400));
    let mut first = place.open(place.options(&path, "work")).unwrap();
    let killed = place.path("killed");
    let _ = first.run(&|progress| {
        if progress.events == 320 {
            copied(&place.path("work"), &killed);
        }
    });
    first.write(&place.path("first")).unwrap();
    let package = Package::open(&place.path("first")).unwrap();
    let table = package.table("packages").unwrap();
    let id = (0..31).map(installed).find(|id| table.resolve(*id).0.is_some() && holds(&killed, &id.to_le_bytes()));
    let id = id.unwrap();
    let rows = table.host_rows().unwrap();
    let mut row = [0f32; 4];
    rows.decode(table.resolve(id).0.unwrap() as usize, &mut row);
    let row: Vec<u8> = row.iter().flat_map(|x| x.to_le_bytes()).collect();
    assert!(holds(&place.path("first"), &id.to_le_bytes()) && holds(&place.path("first"), &row));
    // The run resumes without the id: its checkpoints and its package have neither id nor row.
    let options = || TrainOptions { forget: vec![("packages".into(), id)], ..place.options(&path, "killed") };
    let mut second = place.open(options()).unwrap();
    assert!(second.resumed_from() > 0 && !holds(&killed, &id.to_le_bytes()));
    second.run(&|_| ()).unwrap();
    second.write(&place.path("second")).unwrap();
    assert!(!holds(&killed, &id.to_le_bytes()) && !holds(&place.path("second"), &id.to_le_bytes()));
    assert!(!holds(&place.path("second"), &row));
    // Requests have ids as decimal numbers.
    assert!(holds(&place.path("first"), id.to_string().as_bytes()));
    assert!(!holds(&place.path("second"), id.to_string().as_bytes()));
    drop(second);
    let mut invalid = options();
    invalid.forget[0].0 = "sections".into();
    let reported = place.open(invalid).unwrap_err().to_string();
    assert!(reported.contains("forget: table `sections`: its ids are row numbers, expected managed ids"), "{reported}");
}
