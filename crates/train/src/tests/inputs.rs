//! Events and options that cannot be trained on: errors name them, and no value is silently reinterpreted.

use std::io::Write as _;
use std::time::Duration;

use super::*;
use crate::catalogue::Catalogue;
use crate::events::{Checker, Inputs, Outcome};
use crate::requests::RequestSample;
use arrow_array::types::Int64Type;
use arrow_array::{
    Array, Date32Array, ListArray, StructArray, Time64MicrosecondArray, TimestampMicrosecondArray,
    TimestampMillisecondArray, TimestampNanosecondArray, TimestampSecondArray,
};
use sterling_snapshot::items::Items;
use sterling_snapshot::model::Package;

/// Time and weight of an event, or the line, field and reason of its rejection.
type ReadEvent = Result<(u64, f32), (u64, String)>;

/// Reads events with the checker of a run.
fn read(place: &TestFolder, path: &Path) -> sterling_core::error::Result<Vec<ReadEvent>> {
    let package = Package::open(&place.path("package")).unwrap();
    let items = Items::read(&place.path("package/items.jsonl"), None).unwrap();
    let catalogue = Catalogue::new(&items, &package).unwrap();
    let mut checker =
        Checker::new(package.user.as_ref().unwrap(), &catalogue, "click", &[], RequestSample::new(1, &[], &[]));
    let mut all = Vec::new();
    Inputs::open(&[path.to_owned()])?.read(&mut checker, &mut |chunk| {
        all.extend(chunk.outcomes.into_iter().map(|outcome| match outcome {
            Outcome::Event(event) => Ok((event.time, event.weight)),
            Outcome::Refused(line, why) => Err((line, format!("{}: {}", why.field, why.reason))),
        }));
        true
    })?;
    Ok(all)
}

/// Writes three rows of events with further columns.
fn table(place: &TestFolder, more: Vec<(&str, ArrayRef)>) -> PathBuf {
    let installed = ListArray::from_iter_primitive::<Int64Type, _, _>([1, 2, 3].map(|id| Some([Some(id)])));
    let mut columns: Vec<(&str, ArrayRef)> = vec![("item", Arc::new(Int64Array::from(vec![2, 3, 4])))];
    if !more.iter().any(|(name, _)| *name == "user") {
        columns.push(("user.installed", Arc::new(installed)));
    }
    columns.extend(more);
    let field = |(name, array): &(&str, ArrayRef)| Field::new(*name, array.data_type().clone(), true);
    let schema = arrow_schema::Schema::new(columns.iter().map(field).collect::<Vec<_>>());
    let batch = RecordBatch::try_new(schema.into(), columns.into_iter().map(|(_, array)| array).collect()).unwrap();
    let path = place.path("e.parquet");
    let mut writer = ArrowWriter::try_new(fs::File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    path
}

#[test]
fn times_of_parquet_are_converted_by_their_unit() {
    let place = TestFolder::new(TRAIN);
    let seconds = 1_767_225_600i64;
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from(vec![seconds; 3])),
        Arc::new(Float64Array::from(vec![seconds as f64 + 0.5; 3])),
        Arc::new(Date32Array::from(vec![Some((seconds / 86_400) as i32); 3])),
        Arc::new(TimestampSecondArray::from(vec![seconds; 3])),
        Arc::new(TimestampMillisecondArray::from(vec![seconds * 1000 + 999; 3])),
        Arc::new(TimestampMicrosecondArray::from(vec![seconds * 1_000_000 + 1; 3]).with_timezone("+01:00")),
        Arc::new(TimestampNanosecondArray::from(vec![seconds * 1_000_000_000; 3])),
    ];
    for time in columns {
        let kind = time.data_type().clone();
        let read = read(&place, &table(&place, vec![("time", time)])).unwrap();
        assert_eq!(read, vec![Ok((seconds as u64, 1.0)); 3], "{kind}");
    }
    let of_day: ArrayRef = Arc::new(Time64MicrosecondArray::from(vec![1; 3]));
    let error = read(&place, &table(&place, vec![("time", of_day)])).unwrap_err().to_string();
    assert!(error.contains("column `time`: got Time64("), "{error}");
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["2026-01-01"; 3]));
    let read = read(&place, &table(&place, vec![("time", texts)])).unwrap();
    assert_eq!(read[0], Err((1, "time: got Utf8, expected a number".into())));
}

#[test]
fn nan_and_null_users_of_parquet_are_rejected_and_other_nulls_are_missing() {
    let place = TestFolder::new(TRAIN);
    for name in ["weight", "time", "value", "labels.click", "user.size", "id"] {
        let numbers: ArrayRef = Arc::new(Float64Array::from(vec![Some(f64::NAN), None, Some(f64::NAN)]));
        let read = read(&place, &table(&place, vec![(name, numbers)])).unwrap();
        let nan = |row| Err((row, format!("{name}: got NaN, expected a finite number")));
        assert_eq!(read, [nan(1), Ok((0, 1.0)), nan(3)]);
    }
    let infinite: ArrayRef = Arc::new(Float64Array::from(vec![f64::INFINITY, f64::NEG_INFINITY, 2.0]));
    let rows = read(&place, &table(&place, vec![("weight", infinite)])).unwrap();
    assert!(rows[0].is_err() && rows[1].is_err() && rows[2] == Ok((0, 2.0)), "{rows:?}");
    let installed = ListArray::from_iter_primitive::<Int64Type, _, _>([1, 2, 3].map(|id| Some([Some(id)])));
    let fields = vec![Arc::new(Field::new("installed", installed.data_type().clone(), true))];
    let nulls = Int64Array::from(vec![Some(1), None, Some(1)]).nulls().cloned();
    let user: ArrayRef = Arc::new(StructArray::new(fields.into(), vec![Arc::new(installed)], nulls));
    let read = read(&place, &table(&place, vec![("user", user)])).unwrap();
    let null = Err((2, "user: got null, expected the features of the request".to_owned()));
    assert_eq!(read, [Ok((0, 1.0)), null, Ok((0, 1.0))]);
}

#[test]
fn ids_are_texts_or_integers() {
    let place = TestFolder::new(TRAIN);
    let ids = ["18446744073709551616", "9223372036854775808", "true", "1.5", "[1]", "{}", "-0.0"];
    let good = ["7", "\"7b\"", "-9223372036854775808", "null", "\"\\u00e9\""];
    let line = |id: &&str| format!("{{\"id\": {id}, \"user\": {{}}, \"item\": 3}}\n");
    let path = place.path("e.jsonl");
    fs::write(&path, ids.iter().chain(&good).map(line).collect::<String>()).unwrap();
    let read = read(&place, &path).unwrap();
    for (id, read) in ids.iter().zip(&read) {
        let (_, reason) = read.as_ref().unwrap_err();
        let got = ["id: invalid ", "expected a text or a whole number of 64 bits"];
        assert!(got.iter().all(|part| reason.contains(part)), "{id}: {reason}");
        let is_told = ["[1]", "{}", "-0.0"].contains(id) || reason.contains(&format!("`{id}`"));
        assert!(is_told || reason.contains("`1.8446744073709552e+19`"), "{id}: {reason}");
    }
    assert!(read[ids.len()..].iter().all(Result::is_ok), "{read:?}");
}

#[test]
fn rejected_lines_are_numbered_with_blank_ones() {
    let place = TestFolder::new(TRAIN);
    let path = place.path("e.jsonl");
    let good = event(1);
    fs::write(&path, format!("\n{good}\n\n   \n{{\"bad\": 1}}\n\r\n{{}}")).unwrap();
    let read = read(&place, &path).unwrap();
    let lines: Vec<u64> = read.iter().filter_map(|read| read.as_ref().err()).map(|(line, _)| *line).collect();
    assert_eq!(lines, [5, 7]);
}

#[test]
fn a_run_without_a_trained_event_fails_and_says_why() {
    let place = TestFolder::new(&TRAIN.replace("label = \"click\"", "label = \"clik\""));
    let mut lines = events(30);
    lines[3] = json!({"user": {}, "item": 3, "labels": {"buy": 1, "seen": 0}});
    let reported = |path: &Path, work: &str| {
        let mut trainer = place.open(place.options(path, work)).unwrap();
        let error = trainer.run(&|_| ()).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        error.to_string()
    };
    let text = reported(&place.events("e.jsonl", &lines), "work");
    let expected = "no event was trained: 30 read, 30 skipped because none is a positive of label `clik` ([train]); \
                    labels seen: buy, click";
    assert!(text.contains(expected), "{text}");
    assert!(reported(&place.events("none.jsonl", &[]), "work2").contains("no event was trained: 0 read"));
    lines[7] = json!({"item": 3});
    let options = TrainOptions {
        max_refused: "100%".parse().unwrap(),
        ..place.options(&place.events("f.jsonl", &lines[7..8]), "work3")
    };
    let text = place.open(options).unwrap().run(&|_| ()).unwrap_err().to_string();
    assert!(text.contains("1 read, 1 rejected: ") && text.contains("quarantine.jsonl"), "{text}");
}

#[test]
fn options_out_of_bounds_and_contradictions_are_rejected() {
    let place = TestFolder::new(TRAIN);
    let path = place.events("e.jsonl", &events(3));
    let error = |options: TrainOptions| place.open(options).unwrap_err().to_string();
    let shuffle = error(TrainOptions { shuffle: usize::MAX, ..place.options(&path, "w") });
    assert!(shuffle.contains(&format!("shuffle: got {}, expected at most 100000000", usize::MAX)), "{shuffle}");
    let threads = error(TrainOptions { threads: 1_000_000, ..place.options(&path, "w") });
    assert!(threads.contains("threads: got 1000000, expected at most 1024"), "{threads}");
    let hosts = Some(crate::Hosts::new(vec!["127.0.0.1:1".into(), "127.0.0.1:2".into()], 0));
    let stdin = error(TrainOptions { hosts, ..place.options(Path::new("-"), "w") });
    assert!(stdin.contains("events: got standard input for one of several hosts, expected files"), "{stdin}");
    assert!(!place.path("w").exists());
    let table = "[[train.tables]]\nname = \"packages\"\nfrozen = true\nrate = 0.1\n";
    let place = TestFolder::new(&(TRAIN.to_owned() + table));
    let path = place.events("e.jsonl", &events(3));
    let text = place.open(place.options(&path, "w")).unwrap_err().to_string();
    assert!(text.contains("tables `packages`") && text.contains("`frozen = true` with `rate`"), "{text}");
}

/// A pipe whose writer stays silent, as standard input may.
#[test]
fn an_error_of_training_does_not_wait_for_a_silent_input() {
    let place = TestFolder::new(TRAIN);
    let pipe = place.path("pipe.jsonl");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let (ended, silence) = std::sync::mpsc::channel::<()>();
    let text: String = events(300).iter().map(|line| format!("{line}\n")).collect();
    let to = pipe.clone();
    let writer = std::thread::spawn(move || {
        let mut pipe = fs::OpenOptions::new().write(true).open(to).unwrap();
        pipe.write_all(text.as_bytes()).unwrap();
        // Ends the input after all if the run waits for it.
        silence.recv_timeout(Duration::from_secs(60))
    });
    let mut trainer = place.open(TrainOptions { checkpoint_steps: 1, ..place.options(&pipe, "work") }).unwrap();
    let work = place.path("work");
    let error = trainer.run(&|_| {
        // No checkpoint can be written any more.
        let _ = fs::remove_dir_all(&work);
        fs::write(&work, "").unwrap();
    });
    let _ = ended.send(());
    assert_eq!(error.unwrap_err().kind(), Kind::Io);
    assert_eq!(writer.join().unwrap(), Ok(()), "the run waited for the end of its input");
}
