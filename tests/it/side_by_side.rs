//! Parallel publications, as programs: the parts that several workers embed and assign, and one process assembles, equal the
//! publication of one machine.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::builder::{ListBuilder, StringBuilder};
use arrow_array::{ArrayRef, Float64Array, Int64Array, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};
use sterling::snapshot::{Manifest, SHARDS_FILE};
use sterling::storage::files::Checksum;

use crate::contract;
use crate::onnx::Onnx;
use crate::packages::Made;
use crate::support::{root, run, sterling, text, tiny_package};

/// A catalogue in several files, and the folders that are derived from it.
struct Catalogue {
    folder: tempfile::TempDir,
    /// Common arguments of `publish` and `parts embed`.
    given: Vec<String>,
}

fn shown(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// Returns an item with attributes of every kind; some are missing, and `price` is an integer at first.
fn line(id: i64) -> String {
    let number = |n: i64| (n.wrapping_mul(0x9E37_79B9) >> 9 & 0xffff) as f32 / 65536.0 - 0.5;
    let vector: Vec<f32> = (0..6).map(|d| number(id % 13 * 100 + d) + 0.3 * number(id * 131 + d)).collect();
    let price = if id < 100 { json!(id) } else { json!(id as f64 * 0.37) };
    let mut attributes = json!({
        "lang": (["en", "fr", "de", "it"][(id * id % 4) as usize]),
        "tags": ([format!("t{}", id % 7), format!("t{}", id % 11)]),
        "year": (1990 + id * 7 % 30),
        "price": price,
    });
    if id % 5 == 0 {
        attributes.as_object_mut().unwrap().remove("price");
    }
    // No item of the first file has a value.
    attributes["late"] = if id < 60 { Value::Null } else { json!(id % 3) };
    json!({"id": id * 17 % 100_003, "embedding": vector, "attributes": attributes}).to_string()
}

impl Catalogue {
    fn new(package: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("items")).unwrap();
        let mut given: Vec<String> = package.iter().map(|&argument| argument.to_owned()).collect();
        given.extend(["--items".into(), shown(&folder.path().join("items"))]);
        Catalogue { folder, given }
    }

    /// Returns an embedding-only model with these numbers of items per file.
    fn lines(files: &[i64]) -> Self {
        let catalogue = Catalogue::new(&["--name", "m"]);
        let mut first = 0;
        for (number, items) in files.iter().enumerate() {
            let lines: Vec<String> = (first..first + items).map(line).collect();
            catalogue.write(&format!("{number}.jsonl"), lines.join("\n"));
            first += items;
        }
        catalogue
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.path("items").join(name), content).unwrap();
    }

    /// Adds an argument that names a file of the folder.
    fn with(mut self, flag: &str, name: &str) -> Self {
        self.given.extend([flag.into(), shown(&self.path(name))]);
        self
    }

    fn publish(&self, store: &str, more: &[&str]) -> BTreeMap<String, Checksum> {
        let (code, _, log) = self.run(&["publish"], &self.given, &["--store", &shown(&self.path(store))], more);
        assert_eq!(code, 0, "{log}");
        self.files(store)
    }

    fn run(&self, first: &[&str], given: &[String], then: &[&str], more: &[&str]) -> (i32, String, String) {
        let given = given.iter().map(String::as_str);
        run(&first
            .iter()
            .copied()
            .chain(given)
            .chain(then.iter().copied())
            .chain(more.iter().copied())
            .collect::<Vec<_>>())
    }

    fn embed(&self, more: &[&str]) -> (i32, String, String) {
        self.run(&["parts", "embed"], &self.given, &["--out", &shown(&self.path("parts"))], more)
    }

    fn step(&self, step: &str, more: &[&str]) -> (i32, String, String) {
        self.run(&["parts", step, &shown(&self.path("parts"))], &[], &[], more)
    }

    /// Publishes the existing parts.
    fn assemble(&self, store: &str, more: &[&str]) -> (i32, String, String) {
        let (parts, store) = (shown(&self.path("parts")), shown(&self.path(store)));
        self.run(&["publish"], &[], &["--parts", &parts, "--store", &store], more)
    }

    /// Runs all steps after embedding.
    fn finish(&self, store: &str, more: &[&str]) -> BTreeMap<String, Checksum> {
        for reported in [self.step("train", &[]), self.step("assign", &[]), self.assemble(store, more)] {
            assert_eq!(reported.0, 0, "{}", reported.2);
        }
        self.files(store)
    }

    /// Returns the files of the newest version in a store, or of its shards, by their manifests.
    fn files(&self, store: &str) -> BTreeMap<String, Checksum> {
        let model =
            std::fs::read_dir(self.path(store)).unwrap().map(|e| e.unwrap().path()).find(|p| p.is_dir()).unwrap();
        let versions = std::fs::read_dir(model).unwrap().map(|e| e.unwrap().path());
        let number = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().parse::<u64>().unwrap_or(0);
        let newest = versions.max_by_key(number).unwrap();
        let mut folders = vec![newest.clone()];
        if newest.join(SHARDS_FILE).exists() {
            folders = std::fs::read_dir(&newest).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
        }
        let of = |folder: &PathBuf| {
            let manifest = Manifest::read(folder).unwrap();
            manifest.verify(folder).unwrap();
            let name = shown(folder.strip_prefix(&newest).unwrap());
            manifest.files.into_iter().map(move |(file, sum)| (format!("{name}/{file}"), sum)).collect::<Vec<_>>()
        };
        folders.iter().flat_map(of).collect()
    }

    /// Returns the pieces in the folder of parts whose names have this ending.
    fn pieces(&self, ending: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.path("parts")).unwrap().map(|e| e.unwrap().path());
        let is_piece = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            name.starts_with("part-") && name.ends_with(ending) && (!ending.is_empty() || !name.ends_with("-lists"))
        };
        let mut pieces: Vec<PathBuf> = entries.filter(is_piece).collect();
        pieces.sort();
        pieces
    }

    fn spawn(&self, step: &str, more: &[&str]) -> Child {
        let mut command = sterling();
        command.args(["parts", step]);
        match step {
            "embed" => command.args(&self.given).arg("--out").arg(self.path("parts")),
            _ => command.arg(self.path("parts")),
        };
        command.args(more).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

#[test]
fn any_number_of_parts_publishes_the_same_version() {
    for files in [&[230][..], &[60, 170], &[60, 1, 169], &[60, 0, 100, 0, 70]] {
        let catalogue = Catalogue::lines(files);
        for (store, more) in [("whole", &[][..]), ("cut", &["--shards", "3"])] {
            let expected = catalogue.publish(store, more);
            let (code, reported, log) = catalogue.embed(&[]);
            assert_eq!(code, 0, "{log}");
            assert!(
                reported.starts_with(&format!("{} files embedded", if more.is_empty() { files.len() } else { 0 })),
                "{reported}"
            );
            assert_eq!(catalogue.finish(&format!("{store}-parts"), more), expected, "{files:?}");
        }
    }
}

#[test]
fn late_column_types_equal_those_of_one_process() {
    let catalogue = Catalogue::new(&["--name", "m"]);
    let item =
        |id: i64, attributes: Value| json!({"id": id, "embedding": [id, 1 - id], "attributes": attributes}).to_string();
    // Integers, then floats, then integers again; a column that the first file names and only the last fills.
    catalogue.write("a.jsonl", [item(1, json!({"x": null, "n": 3, "y": "u"})), item(2, json!({"n": 4}))].join("\n"));
    catalogue.write("b.jsonl", item(3, json!({"n": 0.5, "z": [1, 2]})));
    catalogue.write("c.jsonl", [item(4, json!({"n": 7, "x": true})), item(5, json!({}))].join("\n"));
    let mut hollow = ListBuilder::new(StringBuilder::new());
    (0..3).for_each(|_| hollow.append(true));
    let rows: Vec<(&str, ArrayRef)> = vec![
        ("hollow", Arc::new(hollow.finish())),
        ("id", Arc::new(Int64Array::from(vec![6, 7, 8]))),
        ("n", Arc::new(Float64Array::from(vec![Some(f64::NAN), None, Some(2.0)]))),
        ("nan", Arc::new(Float64Array::from(vec![f64::NAN; 3]))),
        ("y", Arc::new(StringArray::from(vec![None, Some(""), Some("v")]))),
    ];
    let vectors: ArrayRef = Arc::new(arrow_array::FixedSizeListArray::from_iter_primitive::<
        arrow_array::types::Float32Type,
        _,
        _,
    >((0..3).map(|n| Some([Some(n as f32), Some(0.5)])), 2));
    let batch = RecordBatch::try_from_iter(rows.into_iter().chain([("embedding", vectors)])).unwrap();
    let file = std::fs::File::create(catalogue.path("items/d.parquet")).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let expected = catalogue.publish("whole", &[]);
    assert_eq!(catalogue.embed(&[]).0, 0);
    assert_eq!(catalogue.finish("parts-store", &[]), expected);
}

#[test]
fn packages_with_towers_and_matrices_equal_an_undivided_publication() {
    let lines = text(tiny_package().join("items.jsonl"));
    let lines: Vec<&str> = lines.lines().collect();
    let catalogue = Catalogue::new(&[&shown(&tiny_package())]);
    for (number, chunk) in lines.chunks(lines.len().div_ceil(3)).enumerate() {
        catalogue.write(&format!("{number}.jsonl"), chunk.join("\n"));
    }
    // A file without the inputs of the tower.
    catalogue.write("9.jsonl", json!({"id": 70, "attributes": {"popularity": 0.5, "title": "bare"}}).to_string());
    let expected = catalogue.publish("whole", &["--shards", "2"]);
    assert_eq!(catalogue.embed(&[]).0, 0);
    assert_eq!(catalogue.finish("parts-store", &["--shards", "2"]), expected);
    for model in ["dcn", "sasrec"] {
        let package = root().join("models").join(model);
        let lines = text(package.join("items.jsonl"));
        let lines: Vec<&str> = lines.lines().collect();
        let catalogue = Catalogue::new(&[&shown(&package)]);
        for (number, chunk) in [&lines[..1], &lines[1..150], &lines[150..]].iter().enumerate() {
            catalogue.write(&format!("{number}.jsonl"), chunk.join("\n"));
        }
        let expected = catalogue.publish("whole", &[]);
        assert_eq!(catalogue.embed(&[]).0, 0);
        assert_eq!(catalogue.finish("parts-store", &[]), expected, "{model}");
    }
    let catalogue = Catalogue::new(&["--name", "m"]).with("--vectors", "v.npy");
    matrix(&catalogue.path("v.npy"), 200);
    for (name, ids) in [("a.jsonl", 0..90), ("b.jsonl", 90..91), ("c.jsonl", 91..200)] {
        catalogue.write(name, ids.map(|id| format!("{{\"id\": {id}}}\n\n")).collect::<String>());
    }
    let expected = catalogue.publish("whole", &["--memory", "110MiB"]);
    assert_eq!(catalogue.embed(&["--memory", "110MiB"]).0, 0);
    assert_eq!(catalogue.finish("parts-store", &["--memory", "110MiB"]), expected);
}

/// Writes rows of three numbers.
fn matrix(path: &Path, rows: usize) {
    let mut text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, 3), }}");
    text.push_str(&" ".repeat(117 - text.len()));
    let numbers: Vec<f32> = (0..rows * 3).map(|n| (n * n % 97) as f32 / 16.0 - 3.0).collect();
    let bytes = [b"\x93NUMPY\x01\x00\x76\x00", text.as_bytes(), b"\n", bytemuck::cast_slice(&numbers)].concat();
    std::fs::write(path, bytes).unwrap();
}

#[test]
#[ignore = "long: kills workers again and again"]
fn concurrent_and_killed_workers_produce_the_same_version() {
    let catalogue = Catalogue::lines(&[1500; 5]);
    let expected = catalogue.publish("whole", &[]);
    let mut kills = 0;
    for step in ["embed", "assign"] {
        let ending = if step == "embed" { "" } else { "-lists" };
        for wait in [0, 2, 8, 20, 50] {
            kills += usize::from(killed_while_it_writes(&catalogue, (step, &[]), wait));
        }
        assert!(kills >= 1, "{step}: nothing was killed while it wrote");
        kills = 0;
        let done = catalogue.pieces(ending).len();
        // Three workers continue at once, on all units each.
        let workers: Vec<Child> = (0..3)
            .map(|_| {
                let mut process = catalogue.spawn(step, &["--units", "-"]);
                process.stdin.take().unwrap().write_all(b"4\n0\n1\n2\n3\n").unwrap();
                process
            })
            .collect();
        let mut made = 0;
        for worker in workers {
            let output = worker.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let reported = String::from_utf8(output.stdout).unwrap();
            assert_eq!(reported.matches("\"done\":true").count(), 5, "{reported}");
            made += reported.matches("\"items\":1500").count();
        }
        assert!(made + done >= 5 && catalogue.pieces(ending).len() == 5, "{made} made, {done} before");
        if step == "embed" {
            assert_eq!(catalogue.step("train", &[]).1.trim(), "trained");
            assert_eq!(catalogue.step("train", &[]).1.trim(), "trained before");
        }
    }
    let leftover = catalogue.path("parts/.trained.tmp-0123456789abcdef");
    std::fs::create_dir(&leftover).unwrap();
    std::fs::write(leftover.join("centroids.npy"), "half").unwrap();
    assert_eq!(catalogue.assemble("parts-store", &[]).0, 0);
    assert_eq!(catalogue.files("parts-store"), expected);
    let names = std::fs::read_dir(catalogue.path("parts")).unwrap().map(|e| e.unwrap().file_name());
    let left: Vec<_> = names.filter(|name| name.to_str().unwrap().starts_with('.')).collect();
    assert!(left.is_empty(), "{left:?}");
}

fn entries(folder: &Path) -> usize {
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

/// Kills a worker `wait` milliseconds after it began to write; returns false if it ended before.
fn killed_while_it_writes(catalogue: &Catalogue, (step, more): (&str, &[&str]), wait: u64) -> bool {
    let before = entries(&catalogue.path("parts"));
    let mut process = catalogue.spawn(step, more);
    let start = Instant::now();
    // It is writing: there is one more entry than before, possibly still incomplete.
    while entries(&catalogue.path("parts")) <= before
        && start.elapsed() < Duration::from_secs(60)
        && process.try_wait().unwrap().is_none()
    {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(wait));
    let was_running = process.try_wait().unwrap().is_none();
    let _ = process.kill();
    process.wait().unwrap();
    was_running
}

fn refused(reported: (i32, String, String), what: &str) {
    assert!(reported.0 == 2 && reported.2.contains(what), "expected {what}: {reported:?}");
}

#[test]
fn steps_out_of_order_and_missing_parts_are_rejected() {
    let catalogue = Catalogue::lines(&[40, 40, 40]);
    refused(catalogue.step("train", &[]), "no job was started in this folder");
    refused(catalogue.step("assign", &[]), "no job was started in this folder");
    refused(catalogue.assemble("store", &[]), "no job was started in this folder");
    assert_eq!(catalogue.embed(&["--unit", "1"]).1.trim(), "1 files embedded, 40 items; 0 were done before");
    refused(catalogue.embed(&["--unit", "3"]), "unit 3: expected the number of a file, 0 to 2");
    for reported in [catalogue.step("train", &[]), catalogue.step("assign", &[]), catalogue.assemble("store", &[])] {
        assert!(reported.2.contains("0.jsonl") && reported.2.contains("2.jsonl"), "{reported:?}");
        refused(reported, "2 of 3 units are not embedded: 0 (");
    }
    assert_eq!(catalogue.embed(&[]).1.trim(), "2 files embedded, 80 items; 1 were done before");
    refused(catalogue.step("assign", &[]), "the centroids have not been trained yet");
    assert_eq!(catalogue.step("train", &[]).0, 0);
    assert_eq!(catalogue.step("assign", &["--unit", "0"]).0, 0);
    refused(catalogue.assemble("store", &[]), "2 of 3 units are not assigned: 1 (");
    assert!(!catalogue.path("store").exists() || catalogue.path("store").read_dir().unwrap().next().is_none());
    refused(catalogue.assemble("store", &["--items", "x"]), "cannot be used with");
    refused(run(&["parts", "embed", "--out", "x"]), "required");
}

#[test]
fn damage_is_rejected_with_its_file_and_repaired_by_the_same_steps() {
    let catalogue = Catalogue::lines(&[50, 50]);
    let expected = catalogue.publish("whole", &[]);
    assert_eq!(catalogue.embed(&[]).0, 0);
    assert_eq!(catalogue.finish("parts-store", &[]), expected);
    let mut files: Vec<PathBuf> = Vec::new();
    for piece in catalogue
        .pieces("")
        .into_iter()
        .take(1)
        .chain([catalogue.path("parts/trained"), catalogue.pieces("-lists")[1].clone()])
    {
        files.extend(std::fs::read_dir(piece).unwrap().map(|e| e.unwrap().path()));
    }
    assert_eq!(files.len(), 3 + 2 + 2);
    for file in files {
        let whole = std::fs::read(&file).unwrap();
        for at in [0, whole.len() / 3, whole.len() / 2, whole.len() - 3] {
            let mut bytes = whole.clone();
            bytes[at] ^= 4;
            std::fs::write(&file, bytes).unwrap();
            let (code, _, log) = catalogue.assemble("damaged", &[]);
            let named = shown(file.parent().unwrap());
            assert!(code == 2 && log.contains(&named), "{} at {at}: {log}", file.display());
        }
        std::fs::write(&file, &whole[..whole.len() - 1]).unwrap();
        assert_eq!(catalogue.assemble("damaged", &[]).0, 2);
        std::fs::remove_file(&file).unwrap();
        let reported = catalogue.assemble("damaged", &[]);
        assert!(reported.2.contains(&shown(file.parent().unwrap())), "{reported:?}");
        assert_eq!(reported.0, 2);
        std::fs::write(&file, &whole).unwrap();
    }
    // Damaged vectors are used neither for training nor for assignment.
    let vectors = catalogue.pieces("")[1].join("vectors.npy");
    let mut flipped = std::fs::read(&vectors).unwrap();
    *flipped.last_mut().unwrap() ^= 1;
    std::fs::write(&vectors, flipped).unwrap();
    std::fs::remove_dir_all(&catalogue.pieces("-lists")[1]).unwrap();
    refused(catalogue.step("assign", &[]), "vectors.npy");
    std::fs::remove_dir_all(catalogue.path("parts/trained")).unwrap();
    refused(catalogue.step("train", &[]), "vectors.npy");
    // Deleted parts are made again, with the same bytes.
    std::fs::remove_dir_all(vectors.parent().unwrap()).unwrap();
    assert_eq!(catalogue.embed(&[]).1.trim(), "1 files embedded, 50 items; 1 were done before");
    assert_eq!(catalogue.finish("mended", &[]), expected);
}

#[test]
fn parts_of_another_publication_are_rejected() {
    let catalogue = Catalogue::lines(&[50, 50]);
    assert_eq!(catalogue.embed(&[]).0, 0);
    let other = catalogue.path("other.toml");
    std::fs::write(&other, "[index]\nlists = 3\n").unwrap();
    refused(catalogue.embed(&["--index", &shown(&other)]), "in this folder: the other job's recipe is");
    let started = |catalogue: &Catalogue, what: &str| refused(catalogue.embed(&[]), what);
    // Another recipe in its own folder, whose parts are copied here.
    let others = Catalogue { folder: tempfile::tempdir().unwrap(), given: catalogue.given.clone() };
    assert_eq!(others.embed(&["--index", &shown(&other)]).0, 0);
    assert_eq!(others.step("train", &[]).0, 0);
    let part = catalogue.pieces("")[0].clone();
    let foreign = others.pieces("")[0].clone();
    for name in ["note.json", "items.parquet", "vectors.npy"] {
        std::fs::copy(foreign.join(name), part.join(name)).unwrap();
    }
    started(&catalogue, "made from other files, centroids or queries");
    refused(catalogue.step("train", &[]), "made from other files, centroids or queries");
    std::fs::remove_dir_all(&part).unwrap();
    assert_eq!(catalogue.embed(&[]).0, 0);
    assert_eq!(catalogue.step("train", &[]).0, 0);
    for name in ["note.json", "centroids.npy"] {
        std::fs::copy(others.path("parts/trained").join(name), catalogue.path("parts/trained").join(name)).unwrap();
    }
    refused(catalogue.step("assign", &[]), "made from other files, centroids or queries");
    // Changed inputs, with the same length or not.
    let lines = text(catalogue.path("items/1.jsonl"));
    catalogue.write("1.jsonl", lines.replacen("\"lang\":\"en\"", "\"lang\":\"xx\"", 1));
    std::fs::remove_dir_all(&catalogue.pieces("")[1]).unwrap();
    refused(catalogue.embed(&["--unit", "1"]), "1.jsonl had");
    catalogue.write("1.jsonl", format!("{lines}\n\n"));
    started(&catalogue, "1.jsonl, in bytes,");
    catalogue.write("1.jsonl", &lines);
    catalogue.write("2.jsonl", line(5000));
    started(&catalogue, "the other job's number of inputs is 2, this job's is 3");
}

#[test]
fn changed_packages_are_rejected() {
    let package = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(tiny_package()).unwrap().map(|e| e.unwrap().path()).filter(|path| path.is_file()) {
        std::fs::copy(&entry, package.path().join(entry.file_name().unwrap())).unwrap();
    }
    let catalogue = Catalogue::new(&[&shown(package.path())]);
    catalogue.write("0.jsonl", text(tiny_package().join("items.jsonl")));
    assert_eq!(catalogue.embed(&[]).0, 0);
    assert_eq!(catalogue.step("train", &[]).0, 0);
    assert_eq!(catalogue.step("assign", &[]).0, 0);
    let model = package.path().join("model.toml");
    std::fs::write(&model, format!("{}\n# changed\n", text(&model))).unwrap();
    refused(catalogue.assemble("store", &[]), "the other job's package, by the checksum of its files, is");
    refused(catalogue.embed(&[]), "the other job's package, by the checksum of its files, is");
}

#[test]
fn bad_items_are_rejected_with_their_file() {
    let cases: [(&str, &str); 5] = [
        (
            "{\"id\": 900, \"embedding\": [1, 2]}\n{\"id\": 900, \"embedding\": [1, 3]}",
            "id 900 occurs at items 1 and 2",
        ),
        ("{\"id\": 900, \"embedding\": [1, 2]}\n{\"id\": \"x\"}", "line 2"),
        ("{\"id\": 900, \"embedding\": [1, 1e30]}", "number 2 of its vector"),
        ("{\"id\": 900}", "no column `embedding`"),
        ("not items", "line 1"),
    ];
    for (content, expected) in cases {
        let catalogue = Catalogue::lines(&[20]);
        catalogue.write("1.jsonl", content);
        let reported = catalogue.embed(&[]);
        assert!(reported.2.contains("1.jsonl"), "{reported:?}");
        refused(reported, expected);
        assert_eq!(catalogue.pieces("").len(), 1, "the other file is done");
        assert!(entries(&catalogue.path("parts")) == 2, "nothing half is left");
    }
    // Errors that only all files together show.
    for (content, expected) in [
        (line(3).replace("\"late\":null", "\"late\":7"), "id 51 occurs at items 4 and 21"),
        (
            json!({"id": 900, "embedding": [0, 1, 2, 3, 4, 5], "attributes": {"year": "long ago"}}).to_string(),
            "1.jsonl: row 1: column `year`: got texts, expected integers as in earlier items",
        ),
        (json!({"id": 900, "embedding": [0, 1]}).to_string(), "1.jsonl, expected vectors of 6 numbers as in "),
    ] {
        let catalogue = Catalogue::lines(&[20]);
        catalogue.write("1.jsonl", content);
        assert_eq!(catalogue.embed(&[]).0, 0);
        let mut reported = catalogue.step("train", &[]);
        if reported.0 == 0 {
            assert_eq!(catalogue.step("assign", &[]).0, 0);
            reported = catalogue.assemble("store", &[]);
        }
        refused(reported, expected);
    }
    // All files are empty.
    let catalogue = Catalogue::lines(&[0, 0]);
    assert_eq!(catalogue.embed(&[]).0, 0);
    refused(catalogue.step("train", &[]), "no rows, expected at least one");
    // Vectors for fewer or more items than there are.
    for (rows, expected) in
        [(19, "rows 11 to 20 are outside of the 19 rows"), (21, "21 vectors, expected one for each of the 20 items of")]
    {
        let catalogue = Catalogue::new(&["--name", "m"]).with("--vectors", "v.npy");
        matrix(&catalogue.path("v.npy"), rows);
        for (name, ids) in [("a.jsonl", 0..10), ("b.jsonl", 10..20)] {
            catalogue.write(name, ids.map(|id| format!("{{\"id\": {id}}}\n")).collect::<String>());
        }
        refused(catalogue.embed(&[]), expected);
    }
}

#[test]
fn vectors_stay_with_their_items() {
    let catalogue = Catalogue::new(&["--name", "m"]).with("--vectors", "v.npy");
    matrix(&catalogue.path("v.npy"), 30);
    for (name, ids) in [("a.jsonl", 10..20), ("b.jsonl", 20..30), ("c.jsonl", 30..40)] {
        catalogue.write(name, ids.map(|id| format!("{{\"id\": {id}}}\n")).collect::<String>());
    }
    let expected = catalogue.publish("whole", &[]);
    assert_eq!((catalogue.embed(&["--unit", "0"]).0, catalogue.embed(&["--unit", "2"]).0), (0, 0));
    // Same length as before, and one item less.
    let lines = text(catalogue.path("items/a.jsonl"));
    catalogue.write("a.jsonl", lines.replacen("{\"id\": 11}\n", "          \n", 1));
    assert_eq!(catalogue.embed(&["--unit", "1"]).0, 0);
    refused(catalogue.step("train", &[]), "10 items precede ");
    catalogue.write("a.jsonl", &lines);
    std::fs::remove_dir_all(&catalogue.pieces("")[1]).unwrap();
    assert_eq!(catalogue.embed(&[]).0, 0);
    assert_eq!(catalogue.finish("parts-store", &[]), expected);
    // Rewritten with the same numbers.
    std::fs::remove_dir_all(&catalogue.pieces("")[1]).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    matrix(&catalogue.path("v.npy"), 30);
    refused(catalogue.embed(&[]), "the other job's file of vectors is");
}

/// A package whose item tower reads a number and a vector of each item, with an operator that programs do not support.
fn dense_package() -> Made {
    let model = r#"
name = "dense"
dimension = 2

[user]
tower = "user.onnx"

[[user.features]]
name = "x"
kind = "dense"
width = 2

[item]
tower = "item.onnx"

[[item.features]]
name = "price"
kind = "dense"
width = 1

[[item.features]]
name = "image"
kind = "dense"
width = 3
"#;
    let user = Onnx::default()
        .input("x", &[-1, 2])
        .numbers("same", &[2, 2], &[1.0, 0.0, 0.0, 1.0])
        .node("MatMul", &["x", "same"], "query")
        .output("query", &[-1, 2]);
    let item = Onnx::default()
        .input("price", &[-1, 1])
        .input("image", &[-1, 3])
        .numbers("of_price", &[1, 2], &[0.3, -0.7])
        .numbers("of_image", &[3, 2], &[0.1, 0.9, -0.4, 0.35, 0.77, -0.2])
        .node("MatMul", &["price", "of_price"], "priced")
        .node("Floor", &["priced"], "floored")
        .node("MatMul", &["image", "of_image"], "seen")
        .node("Add", &["floored", "seen"], "item")
        .output("item", &[-1, 2]);
    Made::new(model, &[]).graph("user.onnx", user).graph("item.onnx", item)
}

fn dense_item(id: i64, price: Value) -> String {
    let image = [id as f64 * 0.37 % 1.0, id as f64 * 0.11 % 1.0, 0.5];
    json!({"id": id, "attributes": {"price": price, "image": image}}).to_string()
}

#[test]
fn towers_see_the_same_inputs_in_parts() {
    let package = dense_package();
    let catalogue = Catalogue::new(&[&shown(&package.path(""))]);
    let lines = |ids: std::ops::Range<i64>, price: &dyn Fn(i64) -> Value| -> String {
        ids.map(|id| dense_item(id, price(id)) + "\n").collect()
    };
    catalogue.write("a.jsonl", lines(0..1, &|_| json!(2.5)));
    catalogue.write("b.jsonl", lines(1..600, &|_| Value::Null));
    catalogue.write("c.jsonl", lines(600..1300, &|id| if id % 9 == 0 { Value::Null } else { json!(id as f64 / 7.0) }));
    let expected = catalogue.publish("whole", &[]);
    assert_eq!(catalogue.embed(&[]).0, 0);
    assert_eq!(catalogue.finish("parts-store", &[]), expected);
    // A column of integral prices has integers in its file, and floats in the complete catalogue; a vector exists in every file
    // or in none.
    for (line, expected) in [
        (dense_item(2000, json!(3)), "column `price`: integers in "),
        (r#"{"id": 2000, "attributes": {"price": 1.5}}"#.into(), "column `image`: no values in "),
    ] {
        let catalogue = Catalogue::new(&[&shown(&package.path(""))]);
        catalogue.write("a.jsonl", lines(0..20, &|id| json!(id as f64 / 7.0)));
        catalogue.write("b.jsonl", line);
        assert_eq!(catalogue.embed(&[]).0, 0);
        let mut reported = catalogue.step("train", &[]);
        if reported.0 == 0 {
            assert_eq!(catalogue.step("assign", &[]).0, 0);
            reported = catalogue.assemble("store", &[]);
        }
        assert!(reported.2.contains("b.jsonl"), "{reported:?}");
        refused(reported, expected);
    }
    // A column that no file has.
    let catalogue = Catalogue::new(&[&shown(&package.path(""))]);
    catalogue.write("a.jsonl", r#"{"id": 1, "attributes": {"image": [0.5, 1, 2]}}"#);
    assert_eq!(catalogue.embed(&[]).0, 0);
    assert_eq!((catalogue.step("train", &[]).0, catalogue.step("assign", &[]).0), (0, 0));
    refused(catalogue.assemble("store", &[]), "no column `price`, which the item tower reads");
}

#[test]
fn item_side_tensors_equal_those_of_an_undivided_publication() {
    let package = contract::package("last", "f16", true);
    let catalogue = Catalogue::new(&[&shown(&package.path(""))]);
    for (number, chunk) in contract::lines().chunks(4).enumerate() {
        catalogue.write(&format!("{number}.jsonl"), chunk.iter().map(|line| format!("{line}\n")).collect::<String>());
    }
    let expected = catalogue.publish("whole", &["--shards", "2"]);
    assert_eq!(catalogue.embed(&[]).0, 0);
    assert_eq!(catalogue.finish("parts-store", &["--shards", "2"]), expected);
    assert!(expected.keys().any(|name| name.ends_with("vectors.safetensors")), "{expected:?}");
    let retained = catalogue.pieces("")[2].join("kept.bin");
    let mut bytes = std::fs::read(&retained).unwrap();
    bytes[3] ^= 1;
    std::fs::write(&retained, bytes).unwrap();
    refused(catalogue.assemble("store", &[]), "kept.bin");
}

/// A version in shards, without its timings.
#[derive(Debug, PartialEq)]
struct Sharded {
    manifests: Vec<Manifest>,
    /// Output that names the shards.
    named: String,
}

impl Catalogue {
    /// Runs the steps before shards are written.
    fn assigned(&self) {
        for reported in [self.embed(&[]), self.step("train", &[]), self.step("assign", &[])] {
            assert_eq!(reported.0, 0, "{}", reported.2);
        }
    }

    /// Checks and returns the first version in a store, which has shards.
    fn sharded(&self, store: &str) -> Sharded {
        let model =
            std::fs::read_dir(self.path(store)).unwrap().map(|e| e.unwrap().path()).find(|p| p.is_dir()).unwrap();
        let named = text(model.join("1").join(SHARDS_FILE));
        let folders =
            (0..).map(|shard| model.join("1").join(format!("shard-{shard}"))).take_while(|path| path.exists());
        let manifests = folders.map(|folder| {
            let mut manifest = Manifest::read(&folder).unwrap();
            manifest.verify(&folder).unwrap();
            assert_eq!(entries(&folder), manifest.files.len() + 1, "{manifest:?}");
            manifest.provenance.seconds = 0.0;
            manifest
        });
        let manifests = manifests.collect();
        assert_eq!(entries(&model), 2, "a version and the lock");
        Sharded { manifests, named }
    }

    /// Publishes `shards` shards on one machine.
    fn published(&self, shards: &str, more: &[&str]) -> Sharded {
        let store = format!("whole-{shards}");
        self.publish(&store, &[&["--shards", shards], more].concat());
        self.sharded(&store)
    }

    /// Publishes shards that are already written.
    fn named(&self, shards: &str, more: &[&str]) -> Sharded {
        let store = format!("cut-{shards}");
        let reported = self.assemble(&store, &[&["--shards", shards], more].concat());
        assert_eq!(reported.0, 0, "{}", reported.2);
        self.sharded(&store)
    }

    /// Returns the folder of a written shard.
    fn shard(&self, shard: u32, shards: u32) -> PathBuf {
        self.path(&format!("parts/shard-{shard}-of-{shards}"))
    }
}

#[test]
fn shards_written_separately_equal_those_written_together() {
    for (files, recipe) in [
        (&[60, 1, 169][..], ""),
        (&[900, 1300], "[index.first_pass]\ncodes = \"pq4\"\n"),
        (&[700, 0, 650], "rescore = \"none\"\n[filter]\ntogether = [\"lang\"]\n"),
        // One list: there is nothing to calibrate.
        (&[40], "lists = 1\n"),
    ] {
        let catalogue = Catalogue::lines(files);
        std::fs::write(catalogue.path("recipe.toml"), format!("[index]\n{recipe}")).unwrap();
        let catalogue = catalogue.with("--index", "recipe.toml");
        catalogue.assigned();
        for (shards, order) in [("1", &["0"][..]), ("3", &["2", "0", "1"])] {
            let expected = catalogue.published(shards, &[]);
            assert_eq!(expected.manifests.len(), order.len());
            for unit in order {
                let (code, reported, log) = catalogue.step("cut", &["--shards", shards, "--unit", unit]);
                assert_eq!(code, 0, "{log}");
                assert!(
                    reported.starts_with("1 shards cut, ") && reported.ends_with("; 0 were done before\n"),
                    "{reported}"
                );
            }
            assert_eq!(catalogue.named(shards, &[]), expected, "{files:?} {recipe} in {shards}");
            let reported = catalogue.step("cut", &["--shards", shards]).1;
            assert_eq!(reported.trim(), format!("0 shards cut, 0 items; {shards} were done before"));
        }
    }
}

#[test]
fn shards_of_packages_and_queries_equal_those_written_together() {
    let contract = contract::package("last", "f16", true);
    for (package, lines, shards) in [
        (tiny_package(), text(tiny_package().join("items.jsonl")), "2"),
        (root().join("models/sasrec"), text(root().join("models/sasrec/items.jsonl")), "3"),
        (root().join("models/dcn"), text(root().join("models/dcn/items.jsonl")), "3"),
        (contract.path(""), contract::lines().iter().map(|line| format!("{line}\n")).collect::<String>(), "2"),
    ] {
        let catalogue = Catalogue::new(&[&shown(&package)]);
        let lines: Vec<&str> = lines.lines().collect();
        for (number, chunk) in lines.chunks(lines.len().div_ceil(2)).enumerate() {
            catalogue.write(&format!("{number}.jsonl"), chunk.join("\n"));
        }
        catalogue.assigned();
        assert_eq!(catalogue.step("cut", &["--shards", shards]).0, 0);
        assert_eq!(catalogue.named(shards, &[]), catalogue.published(shards, &[]), "{}", package.display());
    }
    // Vectors beyond the memory limit, queries from a file, positions of the shards.
    let catalogue = Catalogue::new(&["--name", "m"]).with("--vectors", "v.npy");
    matrix(&catalogue.path("v.npy"), 900);
    matrix(&catalogue.path("q.npy"), 70);
    for (name, ids) in [("a.jsonl", 0..400), ("b.jsonl", 400..900)] {
        catalogue.write(name, ids.map(|id| format!("{{\"id\": {id}}}\n")).collect::<String>());
    }
    catalogue.assigned();
    let queries = shown(&catalogue.path("q.npy"));
    let more = ["--queries", &queries];
    assert_eq!(catalogue.step("cut", &[&["--shards", "2", "--memory", "110MiB"], &more[..]].concat()).0, 0);
    let refused_without = catalogue.assemble("none", &["--shards", "2"]);
    refused(refused_without, "shard-0-of-2: made from other files, centroids or queries");
    let more = [&more[..], &["--position", "7,9"]].concat();
    let expected = catalogue.published("2", &more);
    assert_eq!(expected.manifests.iter().map(|manifest| manifest.position).collect::<Vec<_>>(), [7, 9]);
    assert!(expected.manifests[0].files.contains_key("queries.safetensors"), "{expected:?}");
    assert_eq!(catalogue.named("2", &more), expected);
}

#[test]
#[ignore = "long: kills workers again and again"]
fn shards_written_by_duplicate_and_killed_workers_equal_those_of_one() {
    let catalogue = Catalogue::lines(&[1500; 2]);
    let expected = catalogue.published("3", &[]);
    catalogue.assigned();
    let mut kills = 0;
    for wait in [0, 5, 20, 60, 200] {
        kills += usize::from(killed_while_it_writes(&catalogue, ("cut", &["--shards", "3"]), wait));
    }
    assert!(kills >= 1, "nothing was killed while it wrote");
    let workers: Vec<Child> = (0..2)
        .map(|_| {
            let mut process = catalogue.spawn("cut", &["--shards", "3", "--units", "-"]);
            process.stdin.take().unwrap().write_all(b"2\n0\n1\n").unwrap();
            process
        })
        .collect();
    for worker in workers {
        let output = worker.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let reported = String::from_utf8(output.stdout).unwrap();
        assert_eq!(reported.matches("\"done\":true").count(), 3, "{reported}");
    }
    assert_eq!(catalogue.named("3", &[]), expected);
    let names = std::fs::read_dir(catalogue.path("parts")).unwrap().map(|e| e.unwrap().file_name());
    let left: Vec<_> = names.filter(|name| name.to_str().unwrap().starts_with('.')).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn missing_damaged_and_foreign_shards_are_rejected() {
    let catalogue = Catalogue::lines(&[150, 150]);
    let expected = catalogue.published("3", &[]);
    let cut = |more: &[&str]| catalogue.step("cut", &[&["--shards", "3"], more].concat());
    let assemble = || catalogue.assemble("refused", &["--shards", "3"]);
    refused(cut(&[]), "no job was started in this folder");
    assert_eq!((catalogue.embed(&[]).0, catalogue.step("train", &[]).0), (0, 0));
    assert_eq!(catalogue.step("assign", &["--unit", "1"]).0, 0);
    refused(cut(&[]), "1 of 2 units are not assigned: 0 (");
    assert_eq!(catalogue.step("assign", &[]).0, 0);
    refused(cut(&["--unit", "3"]), "unit 3: expected the number of a shard, 0 to 2");
    refused(catalogue.step("cut", &["--shards", "0"]), "shards: got 0, expected 1 to");
    refused(catalogue.step("cut", &["--shards", "300"]), "gets none of 300 items");
    assert_eq!(cut(&["--unit", "1"]).0, 0);
    refused(assemble(), "2 of 3 shards do not exist yet: 0, 2");
    assert_eq!((cut(&["--unit", "0"]).0, cut(&["--unit", "2"]).0), (0, 0));
    // Files of a shard that are truncated, missing, or have damaged results.
    for (name, is_read) in
        [("index.safetensors", false), ("columns.safetensors", false), ("findings.safetensors", true)]
    {
        let file = catalogue.shard(1, 3).join(name);
        let whole = std::fs::read(&file).unwrap();
        std::fs::write(&file, &whole[..whole.len() - 1]).unwrap();
        refused(assemble(), &format!("{}: {} bytes, expected", file.display(), whole.len() - 1));
        std::fs::remove_file(&file).unwrap();
        refused(assemble(), &format!("{}: missing", file.display()));
        let mut flipped = whole.clone();
        *flipped.last_mut().unwrap() ^= 1;
        std::fs::write(&file, &flipped).unwrap();
        if is_read {
            refused(assemble(), &format!("{}: ", file.display()));
        }
        std::fs::write(&file, &whole).unwrap();
    }
    // A damaged part makes no shard; a shard of other parts cannot be published.
    std::fs::remove_dir_all(catalogue.shard(0, 3)).unwrap();
    let vectors = catalogue.pieces("")[1].join("vectors.npy");
    let whole = std::fs::read(&vectors).unwrap();
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    std::fs::write(&vectors, flipped).unwrap();
    refused(cut(&[]), "vectors.npy");
    std::fs::write(&vectors, whole).unwrap();
    assert_eq!(cut(&[]).1.split("; ").last().unwrap().trim(), "2 were done before");
    let others = Catalogue::lines(&[150, 151]);
    others.assigned();
    assert_eq!(others.step("cut", &["--shards", "3", "--unit", "2"]).0, 0);
    std::fs::rename(catalogue.shard(2, 3), catalogue.path("aside")).unwrap();
    for file in std::fs::read_dir(others.shard(2, 3)).unwrap().map(|e| e.unwrap().path()) {
        std::fs::create_dir_all(catalogue.shard(2, 3)).unwrap();
        std::fs::copy(&file, catalogue.shard(2, 3).join(file.file_name().unwrap())).unwrap();
    }
    refused(assemble(), "shard-2-of-3: made from other files, centroids or queries");
    refused(cut(&[]), "shard-2-of-3: made from other files, centroids or queries");
    std::fs::remove_dir_all(catalogue.shard(2, 3)).unwrap();
    refused(assemble(), "1 of 3 shards do not exist yet: 2");
    std::fs::rename(catalogue.path("aside"), catalogue.shard(2, 3)).unwrap();
    assert!(!catalogue.path("refused/m").exists() || entries(&catalogue.path("refused/m")) <= 1);
    assert_eq!(catalogue.named("3", &[]), expected);
    // Another number of shards has its own; if none is written the publication writes all.
    assert_eq!(catalogue.named("2", &[]), catalogue.published("2", &[]));
}

#[test]
fn packages_with_golden_requests_are_not_sharded_separately() {
    for (file, content, expected) in [
        ("warmup.jsonl", "", "the package has golden answers"),
        ("model.toml", "precision = \"auto\"\n", "the package leaves its precision to a measurement"),
    ] {
        let package = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(tiny_package()).unwrap().map(|e| e.unwrap().path()).filter(|path| path.is_file())
        {
            std::fs::copy(&entry, package.path().join(entry.file_name().unwrap())).unwrap();
        }
        let path = package.path().join(file);
        let before = if path.exists() { text(&path) } else { String::new() };
        std::fs::write(&path, format!("{content}{before}")).unwrap();
        let catalogue = Catalogue::new(&[&shown(package.path())]);
        catalogue.write("0.jsonl", text(tiny_package().join("items.jsonl")));
        catalogue.assigned();
        refused(catalogue.step("cut", &["--shards", "2"]), expected);
        // The publication writes them all.
        assert_eq!(catalogue.named("2", &[]), catalogue.published("2", &[]));
    }
}
