//! Runs on the test package, from event files to the written package.

#![allow(clippy::unwrap_used)]

mod hosts;
mod inputs;
mod managed;
mod resumed;
mod state;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{Int64Builder, ListBuilder};
use arrow_array::{ArrayRef, Float64Array, Int64Array, ListArray, RecordBatch, StringArray, StructArray};
use arrow_schema::{DataType, Field};
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};

use crate::{Report, TrainOptions, Trainer};
use sterling_core::error::Kind;

const TRAIN: &str = "\n[train]\nlabel = \"click\"\nbatch = 16\nuniform = 8\ntemperature = 0.2\n";

/// A folder with the test package, whose `[train]` is `train`.
struct TestFolder {
    folder: tempfile::TempDir,
}

impl TestFolder {
    fn new(train: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny");
        let to = folder.path().join("package");
        fs::create_dir(&to).unwrap();
        for name in [
            "item.onnx",
            "items.jsonl",
            "model.toml",
            "overarch.onnx",
            "sections.txt",
            "tables.safetensors",
            "user.onnx",
        ] {
            fs::copy(golden.join(name), to.join(name)).unwrap();
        }
        let place = TestFolder { folder };
        let model = fs::read_to_string(to.join("model.toml")).unwrap();
        let model = if train.contains("managed") { managed::declare(&to, &model) } else { model };
        fs::write(to.join("model.toml"), model + train).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes events as JSON lines.
    fn events(&self, name: &str, lines: &[Value]) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
        path
    }

    fn options(&self, events: &Path, work: &str) -> TrainOptions {
        TrainOptions { checkpoint_steps: 3, ..TrainOptions::new(vec![events.to_owned()], self.path(work)) }
    }

    fn open(&self, options: TrainOptions) -> sterling_core::error::Result<Trainer> {
        Trainer::open(&self.path("package"), options)
    }

    /// Runs to the end; returns the report and the files of the resulting package.
    fn run(&self, options: TrainOptions, out: &str) -> (Report, BTreeMap<String, Vec<u8>>) {
        let mut trainer = self.open(options).unwrap();
        let report = trainer.run(&|_| ()).unwrap();
        trainer.write(&self.path(out)).unwrap();
        (report, files(&self.path(out)))
    }
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap())).collect()
}

fn copied(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (path, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        if path.is_dir() { copied(&path, &to) } else { assert!(fs::copy(&path, &to).is_ok()) }
    }
}

/// Event `n`: a user who has installed a package takes the next one.
fn event(n: u64) -> Value {
    let had = (n * 7 + n / 11) % 11;
    json!({
        "id": n, "time": 1000 + n, "user": {"installed": [had], "size": [0.5, 0.25, 0.125], "section": "games"},
        "item": had + 1, "type": "click", "context": {"exclude": [had], "k": 10}
    })
}

fn events(count: u64) -> Vec<Value> {
    (0..count).map(event).collect()
}

#[test]
fn a_trained_model_ranks_better_than_its_frozen_copy() {
    let place = TestFolder::new(TRAIN);
    let path = place.events("e.jsonl", &events(4000));
    let (report, out) = place.run(TrainOptions { checkpoint_steps: 1000, ..place.options(&path, "work") }, "out");
    assert_eq!((report.events, report.judged, report.read, report.refused, report.steps), (4000, 4000, 4000, 0, 250));
    let ndcg = |ranked: crate::Ranked| ranked.ndcg.unwrap();
    assert!(ndcg(report.learned) > 0.6, "{report:?}");
    assert!(ndcg(report.learned) > 1.3 * ndcg(report.frozen), "{report:?}");
    assert!(ndcg(report.learned) > 1.2 * ndcg(report.popularity), "{report:?}");
    // Another run starts from the trained package, which is then its frozen twin.
    fs::remove_dir_all(place.path("package")).unwrap();
    copied(&place.path("out"), &place.path("package"));
    let next = place.events("f.jsonl", &(4000..4400).map(event).collect::<Vec<_>>());
    let (again, _) = place.run(place.options(&next, "work2"), "out2");
    assert!(ndcg(again.frozen) > 0.6 && again.frozen.ndcg.unwrap() > 1.2 * ndcg(report.learned) - 0.4, "{again:?}");
    assert!(
        out.contains_key("optimizer.safetensors") && out["sections.txt"] == files(&place.path("out2"))["sections.txt"]
    );
}

#[test]
fn the_package_has_requests_of_the_events() {
    let place = TestFolder::new(TRAIN);
    let mut lines = events(1000);
    // A rejected event is no sample: its user has an unknown feature.
    lines.insert(500, json!({"user": {"unknown": [1]}, "item": 3}));
    let path = place.events("e.jsonl", &lines);
    fs::write(place.path("package/queries.jsonl"), "earlier\n".repeat(300)).unwrap();
    let options = |work: &str, seed| TrainOptions { seed, epochs: 2, shuffle: 40, ..place.options(&path, work) };
    let (_, out) = place.run(options("work", 1), "out");
    let text = String::from_utf8(out["queries.jsonl"].clone()).unwrap();
    let bodies: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(bodies.len(), 256);
    let request = |n: u64| {
        let mut features = event(n)["user"].take();
        // Single values become lists.
        features["section"] = json!([features["section"]]);
        json!({"features": features, "exclude": event(n)["context"]["exclude"]})
    };
    let requests: Vec<Value> = (0..1000).map(request).collect();
    assert!(bodies.iter().all(|body| requests.contains(body)), "{text}");
    assert!(place.run(options("work2", 2), "out2").1["queries.jsonl"] != out["queries.jsonl"], "other seed");
    // With fewer events than sampled requests, requests of the package fill up the file.
    let few = place.events("few.jsonl", &events(100));
    let (_, out) = place.run(place.options(&few, "work3"), "out3");
    let text = String::from_utf8(out["queries.jsonl"].clone()).unwrap();
    assert_eq!((text.lines().count(), text.lines().filter(|line| *line == "earlier").count()), (256, 156));
}

#[test]
fn a_killed_run_resumes_to_the_same_bits() {
    // Checkpoints with all rows, as each step changes most of them.
    let resumed =
        ends_with_the_same_bits(TRAIN, TrainOptions { epochs: 3, shuffle: 40, ..TrainOptions::new(vec![], "") });
    assert!(resumed.len() > 10, "{resumed:?}");
    // Checkpoints with the changed rows, and a base now and then. Item vectors are reused, which those of a resumed run are not.
    let train = TRAIN.replace("batch = 16", "batch = 2").replace("uniform = 8", "uniform = 1") + "dense = [\"user\"]\n";
    let resumed =
        ends_with_the_same_bits(&train, TrainOptions { checkpoint_steps: 1, ..TrainOptions::new(vec![], "") });
    assert!(resumed.len() > 6, "{resumed:?}");
}

/// Resumes a run from copies of its working folder, as a killed run would leave it, and compares each end with that of the run.
/// Returns the steps from which runs resumed.
fn ends_with_the_same_bits(train: &str, of: TrainOptions) -> std::collections::BTreeSet<u64> {
    let place = TestFolder::new(train);
    let (count, every) = if of.checkpoint_steps == 1 { (60, 4) } else { (200, 1) };
    let mut lines = events(count);
    lines.insert(count as usize * 9 / 20, json!({"item": 3}));
    lines.insert(count as usize * 3 / 20, json!({"user": {}, "item": 99}));
    let path = place.events("e.jsonl", &lines);
    let options = |work: &str| TrainOptions {
        epochs: of.epochs,
        shuffle: of.shuffle,
        checkpoint_steps: of.checkpoint_steps.min(3),
        ..place.options(&path, work)
    };
    let mut complete = place.open(options("work")).unwrap();
    let (work, moments) = (place.path("work"), std::cell::RefCell::new(Vec::new()));
    let report = complete.run(&|progress| {
        let number = moments.borrow().len();
        let to = place.path(&format!("moment{number}"));
        copied(&work, &to);
        // Temporary folder of an interrupted write.
        fs::create_dir_all(to.join("checkpoints/.99.tmp-1")).unwrap();
        moments.borrow_mut().push((progress.events, to));
    });
    let report = report.unwrap();
    complete.write(&place.path("out")).unwrap();
    let expected = files(&place.path("out"));
    let quarantine = fs::read_to_string(work.join("quarantine.jsonl")).unwrap();
    assert_eq!(quarantine.lines().count(), 2, "{quarantine}");
    let moments = moments.into_inner();
    assert_eq!(moments.len() as u64, report.steps);
    let mut resumed = std::collections::BTreeSet::new();
    for (n, (trained, at)) in moments.iter().enumerate().step_by(every) {
        let out = format!("out{n}");
        let (again, files) = place.run(options(at.file_name().unwrap().to_str().unwrap()), &out);
        assert!(files == expected, "killed after {trained} events: other bits");
        let reported = |report: &Report| Report { events_per_second: 0.0, resumed_from: 0, ..report.clone() };
        assert_eq!(reported(&again), reported(&report), "killed after {trained} events");
        assert_eq!(fs::read_to_string(at.join("quarantine.jsonl")).unwrap(), quarantine);
        resumed.insert(again.resumed_from);
    }
    resumed
}

#[test]
fn threads_and_files_change_no_bit() {
    // Several micro-batches and blocks of candidates per step, the last ones incomplete.
    let place = TestFolder::new(&TRAIN.replace("batch = 16\nuniform = 8", "batch = 200\nuniform = 100"));
    let lines = events(450);
    let path = place.events("e.jsonl", &lines);
    let (_, expected) = place.run(place.options(&path, "work"), "out");
    let state = |files: &BTreeMap<String, Vec<u8>>| (files["tables.safetensors"].clone(), files["user.onnx"].clone());
    for threads in 2..=4 {
        let options = TrainOptions { threads, ..place.options(&path, &format!("work{threads}")) };
        assert!(place.run(options, &format!("out{threads}")).1 == expected, "{threads} threads");
    }
    // The same events, split into other files.
    let folder = place.path("folder");
    fs::create_dir(&folder).unwrap();
    place.events("folder/a.jsonl", &lines[..37]);
    let mut gzip =
        flate2::write::GzEncoder::new(fs::File::create(folder.join("b.jsonl.gz")).unwrap(), Default::default());
    lines[37..60].iter().for_each(|line| writeln!(gzip, "{line}").unwrap());
    gzip.finish().unwrap();
    write_parquet(&folder.join("c.parquet"), &lines[60..80], false);
    write_parquet(&folder.join("d.parquet"), &lines[80..], true);
    let (report, files) = place.run(place.options(&folder, "work5"), "out5");
    assert_eq!((report.read, report.refused), (450, 0));
    assert!(state(&files) == state(&expected));
}

/// Writes events of one installed package as rows, with structs or with flat columns.
fn write_parquet(path: &Path, lines: &[Value], structs: bool) {
    let list = |of: &dyn Fn(&Value) -> i64| {
        let mut lists = ListBuilder::new(Int64Builder::new());
        lines.iter().for_each(|line| lists.append_value([Some(of(line))]));
        Arc::new(lists.finish()) as ArrayRef
    };
    let sizes: Vec<Option<Vec<Option<f64>>>> =
        lines.iter().map(|_| Some(vec![Some(0.5), Some(0.25), Some(0.125)])).collect();
    let mut size = ListBuilder::new(arrow_array::builder::Float64Builder::new());
    sizes.into_iter().for_each(|row| size.append_option(row));
    let size: ListArray = size.finish();
    let integers = |name: &str| {
        let of: Vec<i64> = lines.iter().map(|line| line[name].as_i64().unwrap()).collect();
        Arc::new(Int64Array::from(of)) as ArrayRef
    };
    let texts = |text: &str| Arc::new(StringArray::from(vec![text; lines.len()])) as ArrayRef;
    let installed = list(&|line| line["user"]["installed"][0].as_i64().unwrap());
    let exclude = list(&|line| line["context"]["exclude"][0].as_i64().unwrap());
    let user = [("installed", installed), ("size", Arc::new(size) as ArrayRef), ("section", texts("games"))];
    let labels = [("click", Arc::new(Float64Array::from(vec![1.0; lines.len()])) as ArrayRef)];
    let context = [("exclude", exclude), ("page", texts("front"))];
    let mut columns =
        vec![("id".to_owned(), integers("id")), ("item".into(), integers("item")), ("time".into(), integers("time"))];
    for (name, parts) in [("user", user.to_vec()), ("labels", labels.to_vec()), ("context", context.to_vec())] {
        if structs {
            let field = |(name, array): &(&str, ArrayRef)| {
                (Arc::new(Field::new(*name, array.data_type().clone(), true)), array.clone())
            };
            let complete = StructArray::from(parts.iter().map(field).collect::<Vec<_>>());
            assert!(matches!(arrow_array::Array::data_type(&complete), DataType::Struct(_)));
            columns.push((name.into(), Arc::new(complete)));
        } else {
            columns.extend(parts.into_iter().map(|(part, array)| (format!("{name}.{part}"), array)));
        }
    }
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut writer = ArrowWriter::try_new(fs::File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

#[test]
fn invalid_events_are_rejected_alone() {
    let place = TestFolder::new(TRAIN);
    let good = |n: u64| event(n).to_string().into_bytes();
    let user = json!({"installed": [1]});
    let with = |field: &str, value: Value| {
        let mut event = event(500);
        event[field] = value;
        event.to_string().into_bytes()
    };
    let of_user = |name: &str, value: Value| with("user", json!({name: value}));
    let mut long = br#"{"id": ""#.to_vec();
    long.resize((8 << 20) + 10, b'x');
    let bad: Vec<(Vec<u8>, &str, &str)> = vec![
        (b"\xff\xfe{}".to_vec(), "", "not UTF-8"),
        (long, "", "longer than 8388608 bytes"),
        (br#"{"user": {}, "item": 3"#.to_vec(), "", "JSON"),
        (b"[1]".to_vec(), "", "expected a JSON object"),
        (json!({"user": user}).to_string().into_bytes(), "", "missing field `item`"),
        (json!({"item": 1}).to_string().into_bytes(), "", "missing field `user`"),
        (with("itme", json!(3)), "itme", "unknown field `itme`"),
        (with("item", json!("three")), "item", "expected a whole number"),
        (with("item", json!(99)), "item", "got 99, expected the id of one of the items"),
        (of_user("instaled", json!([1])), "user", "unknown feature `instaled`"),
        (of_user("installed", json!([0.5])), "user", "feature `installed`: got numbers such as 0.5"),
        (of_user("size", json!([1.0])), "user", "feature `size`: got 1 numbers, expected 3"),
        (of_user("installed", json!([1, 2, 3, 4, 5, 6, 7, 8, 9])), "user", "got 9 values, expected at most 8"),
        (with("weight", json!(0)), "weight", "got 0, expected a number above 0"),
        (with("weight", json!(-1)), "weight", "got -1, expected a number above 0"),
        (with("time", json!(-5)), "time", "got -5, expected seconds since 1970"),
        (with("labels", json!({"click": "yes"})), "labels.click", "expected a number"),
        (with("context", json!({"exclude": [9, event(500)["item"]]})), "item", "which `context.exclude` lists"),
        (with("id", json!(1)), "id", "got `1` again, expected each event once"),
    ];
    let mut text = Vec::new();
    for (n, (line, ..)) in (0..).zip(&bad) {
        [good(n), line.clone()].iter().for_each(|line| text.extend([line.as_slice(), b"\n"].concat()));
    }
    let path = place.path("e.jsonl");
    fs::write(&path, text).unwrap();
    let options = TrainOptions { max_refused: "100%".parse().unwrap(), ..place.options(&path, "work") };
    let (report, refused) = place.run(options.clone(), "out");
    let count = bad.len() as u64;
    assert_eq!((report.read, report.events, report.refused), (2 * count, count, count));
    let reported = fs::read_to_string(place.path("work/quarantine.jsonl")).unwrap();
    let reported: Vec<Value> = reported.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(reported.len(), bad.len());
    for (n, (reported, (_, field, reason))) in reported.iter().zip(&bad).enumerate() {
        assert_eq!(
            (reported["line"].as_u64().unwrap(), reported["field"].as_str().unwrap()),
            (2 * n as u64 + 2, *field),
            "{reported}"
        );
        assert!(reported["reason"].as_str().unwrap().contains(reason), "{reason}: {reported}");
        assert!(reported["file"].as_str().unwrap().ends_with("e.jsonl"));
    }
    // Invalid events do not change the results of the others.
    let alone = place.events("alone.jsonl", &(0..count).map(event).collect::<Vec<_>>());
    let (_, expected) = place.run(place.options(&alone, "work2"), "out2");
    assert!(refused["tables.safetensors"] == expected["tables.safetensors"]);
    // Too many invalid events are an error.
    let options = TrainOptions { max_refused: "10%".parse().unwrap(), work: place.path("work3"), ..options };
    let error = place.open(options).unwrap().run(&|_| ()).unwrap_err().to_string();
    assert!(error.contains("19 of 38 events were rejected, expected at most 3"), "{error}");
}

#[test]
fn changed_bytes_are_valid_events_or_rejected() {
    let place = TestFolder::new(TRAIN);
    let mut text = Vec::new();
    for n in 0..4000 {
        let (mut line, draws) = (event(n).to_string().into_bytes(), crate::step_random::StepRandom::new(3, n));
        for change in 0..draws.below(0, 4) {
            if line.is_empty() {
                break;
            }
            let at = draws.below(10 + change, line.len() as u64) as usize;
            match draws.below(20 + change, 3) {
                0 => line[at] ^= 1 << draws.below(30 + change, 8),
                1 => drop(line.remove(at)),
                _ => line.truncate(at.max(1)),
            }
        }
        line.retain(|byte| *byte != b'\n');
        text.extend([line.as_slice(), b"\n"].concat());
    }
    let path = place.path("e.jsonl");
    fs::write(&path, text).unwrap();
    let options = TrainOptions {
        max_refused: "100%".parse().unwrap(),
        checkpoint_steps: 1000,
        judge: 0,
        ..place.options(&path, "work")
    };
    let (report, _) = place.run(options, "out");
    assert!(report.refused > 800 && report.events > 800, "{report:?}");
    assert_eq!(report.read, report.events + report.refused + report.skipped, "{report:?}");
}

#[test]
fn damaged_checkpoints_and_other_runs_are_rejected_by_name() {
    let place = TestFolder::new(TRAIN);
    let path = place.events("e.jsonl", &events(100));
    let mut trainer = place.open(place.options(&path, "work")).unwrap();
    trainer.run(&|_| ()).unwrap();
    drop(trainer);
    let refused = |options: TrainOptions, expected: &str| {
        let error = place.open(options).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("checkpoint ") && text.contains(expected), "{text}");
        error.kind()
    };
    let (state, about) =
        (place.path("work/checkpoints/6/state.safetensors"), place.path("work/checkpoints/6/learn.json"));
    for file in [&state, &about] {
        let bytes = fs::read(file).unwrap();
        for at in (0..bytes.len()).step_by(bytes.len() / 40) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << (at % 8);
            fs::write(file, &damaged).unwrap();
            match place.open(place.options(&path, "work")) {
                Ok(_) => panic!("byte {at} of {} is not covered", file.display()),
                Err(e) => assert!(e.to_string().contains("checkpoint "), "{e}"),
            }
        }
        fs::write(file, &bytes[..bytes.len() / 2]).unwrap();
        refused(place.options(&path, "work"), file.file_name().unwrap().to_str().unwrap());
        fs::write(file, bytes).unwrap();
    }
    let other = |change: &dyn Fn(&mut TrainOptions)| {
        let mut options = place.options(&path, "work");
        change(&mut options);
        refused(options, "it was made with other")
    };
    assert_eq!(other(&|o| o.seed = 2), Kind::Conflict);
    assert_eq!(other(&|o| o.shuffle = 64), Kind::Conflict);
    let more = place.events("more.jsonl", &events(101));
    assert_eq!(other(&|o| o.events = vec![more.clone()]), Kind::Conflict);
    let model = place.path("package/model.toml");
    let text = fs::read_to_string(&model).unwrap();
    fs::write(&model, text.replace("uniform = 8", "uniform = 9")).unwrap();
    assert_eq!(other(&|_| ()), Kind::Conflict);
    // Without the damaged checkpoint, the run resumes from the one before.
    fs::write(&model, text).unwrap();
    fs::remove_file(&about).unwrap();
    assert_eq!(refused(place.options(&path, "work"), "learn.json"), Kind::Corrupt);
    fs::remove_dir_all(place.path("work/checkpoints/6")).unwrap();
    assert_eq!(place.open(place.options(&path, "work")).unwrap().resumed_from(), 3);
}

#[test]
fn checkpoints_hold_the_changed_rows_and_need_their_base() {
    let place = TestFolder::new(&TRAIN.replace("batch = 16", "batch = 2").replace("uniform = 8", "uniform = 1"));
    let path = place.events("e.jsonl", &events(200));
    let options = TrainOptions { checkpoint_steps: 1, ..place.options(&path, "work") };
    let about = |step: u64| -> Value {
        let file = place.path(&format!("work/checkpoints/{step}/learn.json"));
        serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
    };
    let (mut full, mut some) = (0, 0);
    let mut trainer = place.open(options.clone()).unwrap();
    trainer
        .run(&|_| {
            let folders = files_of(&place.path("work/checkpoints"));
            assert!(folders.len() <= 4, "{folders:?}");
        })
        .unwrap();
    drop(trainer);
    for step in [99, 100] {
        match about(step)["base"]["step"].as_u64() {
            Some(base) => {
                some += 1;
                assert!(about(base)["is_full"].as_bool().unwrap() && base < step, "{base}");
            }
            None => full += 1,
        }
    }
    assert_eq!((full + some, some > 0), (2, true), "a checkpoint of a step has few of the rows");
    // Without its base, a checkpoint is rejected by both names.
    let (step, base) = (100, about(100)["base"]["step"].as_u64());
    let Some(base) = base else { return };
    let state = place.path(&format!("work/checkpoints/{base}/state.safetensors"));
    let bytes = fs::read(&state).unwrap();
    for damaged in [None, Some(&bytes[..bytes.len() - 1])] {
        fs::remove_file(&state).unwrap();
        damaged.map_or(Ok(()), |bytes| fs::write(&state, bytes)).unwrap();
        let error = place.open(options.clone()).unwrap_err();
        let text = error.to_string();
        let names = [format!("checkpoints/{step}"), format!("base checkpoint {base} of this checkpoint")];
        assert!(error.kind() == Kind::Corrupt && names.iter().all(|name| text.contains(name)), "{text}");
        fs::write(&state, &bytes).unwrap();
    }
    assert_eq!(place.open(options).unwrap().resumed_from(), 100);
}

/// Impression `n`: a user who has installed a package is shown one, and takes the next one only.
fn impression(n: u64) -> Value {
    let draws = crate::step_random::StepRandom::new(5, n);
    let (had, shown) = (draws.below(0, 11), draws.below(1, 12));
    let shown = if draws.below(2, 3) == 0 { had + 1 } else { shown };
    let labels = json!({"click": u8::from(shown == had + 1), "buy": u8::from(shown == had + 1 && had % 2 == 0)});
    let user = json!({"installed": [had], "size": [0.5, 0.25, 0.125], "section": "games"});
    json!({"id": n, "user": user, "item": shown, "labels": labels})
}

#[test]
fn a_reranker_learns_tasks_from_impressions_with_and_without_clicks() {
    let train = "\n[train]\nlabel = \"click\"\nloss = \"tasks\"\nbatch = 32\ntasks = { buy = 2.0 }\n\
                 optimizer = { kind = \"rowwise_adagrad\", rate = 0.05 }\n\
                 dense_optimizer = { kind = \"adam\", rate = 0.01 }\n";
    let place = TestFolder::new(train);
    let lines: Vec<Value> = (0..12_000).map(impression).collect();
    let path = place.events("e.jsonl", &lines);
    let options = |work: &str| TrainOptions { checkpoint_steps: 100, ..place.options(&path, work) };
    let (report, out) = place.run(options("work"), "out");
    assert_eq!((report.events, report.skipped), (12_000, 0));
    let clicks = lines.iter().filter(|line| line["labels"]["click"] == 1).count() as u64;
    assert_eq!(report.judged, clicks, "positives are ranked");
    let before = files(&place.path("package"));
    assert!(out["overarch.onnx"] != before["overarch.onnx"] && out["user.onnx"] != before["user.onnx"]);
    for task in ["click", "buy"] {
        let (learned, frozen) = (report.tasks[task].learned, report.tasks[task].frozen);
        assert!(learned.auc.unwrap() > frozen.auc.unwrap() + 0.2 && learned.auc.unwrap() > 0.8, "{task}: {report:?}");
        assert!(learned.log_loss < frozen.log_loss && learned.normalized_entropy.unwrap() < 0.9, "{task}: {report:?}");
    }
    // The trained package ranks as well from the start, and its predictions sum up to the labels.
    fs::remove_dir_all(place.path("package")).unwrap();
    copied(&place.path("out"), &place.path("package"));
    let next = place.events("f.jsonl", &(12_000..16_000).map(impression).collect::<Vec<_>>());
    let (again, _) = place.run(place.options(&next, "work2"), "out2");
    let frozen = again.tasks["click"].frozen;
    assert!(frozen.auc.unwrap() > report.tasks["click"].learned.auc.unwrap(), "{again:?}");
    assert!((frozen.calibration.unwrap() - 1.0).abs() < 0.1, "{again:?}");
}

#[test]
fn sampled_negatives_leave_predictions_calibrated() {
    let train = "\n[train]\nlabel = \"click\"\nloss = \"tasks\"\nbatch = 32\nnegatives = 0.25\n\
                 dense_optimizer = { kind = \"adam\", rate = 0.01 }\n";
    let place = TestFolder::new(train);
    let lines: Vec<Value> = (0..12_000).map(impression).collect();
    let path = place.events("e.jsonl", &lines);
    let options = |work: &str| TrainOptions { checkpoint_steps: 100, ..place.options(&path, work) };
    let (report, expected) = place.run(options("work"), "out");
    let negatives = lines.iter().filter(|line| line["labels"]["click"] == 0).count() as f64;
    let retained = negatives - report.skipped as f64;
    assert!((retained / negatives - 0.25).abs() < 0.03, "{report:?}");
    let calibration = report.tasks["click"].learned.calibration.unwrap();
    assert!((calibration - 1.0).abs() < 0.1, "{report:?}");
    // Resumed, and with other threads, the same bits.
    let work = place.path("work/checkpoints");
    let last = files_of(&work).iter().map(|step| step.parse::<u64>().unwrap()).max().unwrap();
    let again = place.run(options("work"), "out2");
    assert!(again.0.resumed_from == last && again.1 == expected);
    assert_eq!(again.0.tasks, report.tasks);
    let threads = TrainOptions { threads: 3, ..options("work3") };
    assert!(place.run(threads, "out3").1 == expected);
}

#[test]
fn a_run_without_any_accepted_batch_fails() {
    let place = TestFolder::new(TRAIN);
    let overflowing = |n| {
        let mut event = event(n);
        event["user"]["size"] = json!([3e38, 3e38, 3e38]);
        event
    };
    let path = place.events("e.jsonl", &(0..40).map(overflowing).collect::<Vec<_>>());
    let error = place.open(place.options(&path, "work")).unwrap().run(&|_| ()).unwrap_err().to_string();
    assert!(error.contains("all 3 batches were rejected") && error.contains("quarantine.jsonl"), "{error}");
    let entries = fs::read_to_string(place.path("work/quarantine.jsonl")).unwrap();
    assert_eq!(entries.lines().filter(|line| line.contains("\"step\":")).count(), 3, "{entries}");
    // One batch that is accepted makes a run.
    let path = place.events("f.jsonl", &(0..40).map(overflowing).chain((40..80).map(event)).collect::<Vec<_>>());
    let report = place.open(place.options(&path, "work2")).unwrap().run(&|_| ()).unwrap();
    assert!(report.rejected_batches >= 2 && report.events > 0, "{report:?}");
}

#[test]
fn two_runs_do_not_share_a_working_folder() {
    let place = TestFolder::new(TRAIN);
    let path = place.events("e.jsonl", &events(40));
    let first = place.open(place.options(&path, "work")).unwrap();
    let error = place.open(place.options(&path, "work")).unwrap_err();
    assert!(
        error.kind() == Kind::Conflict && error.to_string().contains("another run uses this working folder"),
        "{error}"
    );
    drop(first);
    let mut next = place.open(place.options(&path, "work")).unwrap();
    next.run(&|_| ()).unwrap();
    next.clear().unwrap();
    assert!(!place.path("work").exists());
}

/// Names of a folder's entries.
fn files_of(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn untrainable_input_is_rejected_with_the_reason() {
    let place = TestFolder::new("");
    let path = place.events("e.jsonl", &events(3));
    let error = |options: TrainOptions| place.open(options).unwrap_err().to_string();
    assert!(error(place.options(&path, "work")).contains("has no [train]"));
    let place = TestFolder::new(TRAIN);
    let path = place.events("e.jsonl", &events(3));
    let error = |options: TrainOptions| place.open(options).unwrap_err().to_string();
    assert!(error(TrainOptions { epochs: 0, ..place.options(&path, "w") }).contains("epochs: got 0"));
    assert!(error(TrainOptions { epochs: 2, ..place.options(Path::new("-"), "w") }).contains("standard input"));
    assert!(error(place.options(&place.path("nowhere"), "w")).contains("nowhere"));
    assert!(
        error(TrainOptions { items: Some(place.path("no.jsonl")), ..place.options(&path, "w") }).contains("no.jsonl")
    );
    let csv = place.path("e.csv");
    fs::write(&csv, "id,item\n1,2\n").unwrap();
    let error = place.open(place.options(&csv, "w")).unwrap().run(&|_| ()).unwrap_err().to_string();
    assert!(error.contains("e.csv") && error.contains("a CSV file"), "{error}");
}
