//! Inputs and outputs of offline scoring: users as Parquet, given pairs, items; results equal the answers of the server.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Int16Type, Int32Type, Int64Type, UInt64Type};
use arrow_array::*;
use arrow_schema::{Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};
use sterling::batch::jobs::JobFolder;
use sterling::batch::{Counts, JobSettings, Questions, Scorer, Task};
use sterling::graph::tower::Threads;
use sterling::request::{Content, Request};
use sterling::serving::view::View;
use sterling::snapshot::{Placement, Snapshot, Store};

use crate::support::{put, retrieve, text, tiny, tiny_package, vectors};

struct Shop {
    folder: tempfile::TempDir,
    view: Arc<View>,
}

impl Shop {
    /// The tiny model: features of users, an item tower, two tasks.
    fn tiny() -> Self {
        Shop::of("tiny", |store, _| put(store, &tiny()))
    }

    /// Vectors of three numbers, without a model.
    fn vectors() -> Self {
        let line = |id: i64| json!({"id": id, "embedding": [(id as f64).sin(), (id as f64).cos(), 0.5]}).to_string();
        let lines = (0..200).map(line).collect::<Vec<_>>().join("\n");
        Shop::of("vectors", |store, folder| put(store, &vectors(folder, &lines)))
    }

    fn of(name: &str, publish: impl Fn(&Path, &Path) -> sterling::error::Result<u64>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = folder.path().join("store");
        publish(&store, folder.path()).unwrap();
        let snapshot = Snapshot::load(&Store::new(store).folder(name, 1), &Placement::whole()).unwrap();
        Shop { folder, view: Arc::new(View::new(Arc::new(snapshot))) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn lines(&self, name: &str, rows: &[Value]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
        path
    }

    fn table(&self, name: &str, columns: Vec<(&str, ArrayRef)>) -> PathBuf {
        let path = self.path(name);
        let field = |(name, array): &(&str, ArrayRef)| Field::new(*name, array.data_type().clone(), true);
        let schema = Schema::new(columns.iter().map(field).collect::<Vec<_>>());
        let batch = RecordBatch::try_new(schema.into(), columns.into_iter().map(|(_, a)| a).collect()).unwrap();
        let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        path
    }

    /// Scores one file; returns the counts of its rows, and the folder.
    fn score(&self, task: Task, request: &str, input: PathBuf) -> sterling::error::Result<Scored> {
        let questions = Questions::parse(task, request)?;
        let (model, digest, request) = ("m".into(), "d".into(), questions.canonical());
        let requested = JobSettings { task, model, version: 1, digest, request };
        let out = tempfile::tempdir().unwrap();
        let job = JobFolder::open(out.path(), requested, vec![input])?;
        let counts = Scorer::new(self.view.clone(), questions, 2)?.score(&job, 0, &|_| ())?;
        let problems = std::fs::read_to_string(job.problems(0)).unwrap_or_default();
        let problems = problems.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let file = File::open(job.output(0)).unwrap();
        let reader = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().with_batch_size(1 << 20).build().unwrap();
        let batches: Vec<RecordBatch> = reader.map(Result::unwrap).collect();
        assert!(batches.len() <= 1);
        Ok(Scored { counts, problems, rows: batches.into_iter().next() })
    }

    fn invalid(&self, task: Task, request: &str, input: PathBuf) -> String {
        self.score(task, request, input).map(|scored| scored.counts).expect_err("it was scored").to_string()
    }
}

struct Scored {
    counts: Counts,
    problems: Vec<Value>,
    rows: Option<RecordBatch>,
}

impl Scored {
    fn ids(&self) -> Vec<i64> {
        self.rows.as_ref().unwrap()["id"].as_primitive::<Int64Type>().values().to_vec()
    }

    fn list(&self, name: &str, row: usize) -> ArrayRef {
        self.rows.as_ref().unwrap()[name].as_list::<i32>().value(row)
    }

    fn integers(&self, name: &str, row: usize) -> Vec<i64> {
        self.list(name, row).as_primitive::<Int64Type>().values().to_vec()
    }

    fn floats(&self, name: &str, row: usize) -> Vec<f32> {
        self.list(name, row).as_primitive::<Float32Type>().values().to_vec()
    }

    fn vector(&self, row: usize) -> Vec<f32> {
        let vectors = self.rows.as_ref().unwrap()["vector"].as_fixed_size_list().value(row);
        vectors.as_primitive::<Float32Type>().values().to_vec()
    }
}

fn lists<T: ArrowPrimitiveType>(rows: Vec<Option<Vec<T::Native>>>) -> ArrayRef {
    let rows = rows.into_iter().map(|row| row.map(|row| row.into_iter().map(Some).collect::<Vec<_>>()));
    Arc::new(ListArray::from_iter_primitive::<T, _, _>(rows))
}

/// Returns users of the tiny model: as JSON lines, and as columns of the types that programs write.
fn users(count: usize) -> (Vec<Value>, Vec<(&'static str, ArrayRef)>) {
    const SECTIONS: [&str; 4] = ["admin", "games", "python", "unknown section"];
    let installed = |n: usize| {
        (!n.is_multiple_of(5)).then(|| (0..n % 4).map(|i| ((n * 7 + i * 3) % 40) as i64).collect::<Vec<_>>())
    };
    let section = |n: usize| (!n.is_multiple_of(3)).then(|| SECTIONS[n % 4]);
    let size = |n: usize| [n as f32 * 0.25, 1.5 - n as f32, (n % 7) as f32];
    let row = |n: usize| {
        let mut features = json!({"size": size(n)});
        installed(n).into_iter().for_each(|ids| features["installed"] = json!(ids));
        section(n).into_iter().for_each(|name| features["section"] = json!(name));
        let mut row = json!({"id": n as i64 - 3, "features": features, "exclude": [n % 9]});
        if n.is_multiple_of(2) {
            row["k"] = json!(2);
            row["filter"] = json!("popularity > 0.5");
        }
        row
    };
    let all = 0..count;
    let sizes = all.clone().map(|n| Some(size(n).map(Some)));
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("size", Arc::new(FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(sizes, 3))),
        ("id", Arc::new(Int16Array::from_iter_values(all.clone().map(|n| n as i16 - 3)))),
        (
            "installed",
            lists::<UInt64Type>(all.clone().map(|n| Some(installed(n)?.iter().map(|&x| x as u64).collect())).collect()),
        ),
        ("section", Arc::new(all.clone().map(section).collect::<DictionaryArray<Int32Type>>())),
        ("exclude", lists::<Int16Type>(all.clone().map(|n| Some(vec![(n % 9) as i16])).collect())),
        ("k", Arc::new(Int32Array::from_iter(all.clone().map(|n| n.is_multiple_of(2).then_some(2))))),
        (
            "filter",
            Arc::new(LargeStringArray::from_iter(all.map(|n| n.is_multiple_of(2).then_some("popularity > 0.5")))),
        ),
    ];
    (all_rows(count, row), columns)
}

fn all_rows(count: usize, row: impl Fn(usize) -> Value) -> Vec<Value> {
    (0..count).map(row).collect()
}

#[test]
fn users_of_parquet_are_answered_as_those_of_json_lines() {
    let shop = Shop::tiny();
    let (rows, columns) = users(150);
    let request = r#"{"k": 5, "candidates": 20, "columns": ["title"]}"#;
    let by_line = shop.score(Task::Retrieve, request, shop.lines("users.jsonl", &rows)).unwrap();
    let by_row = shop.score(Task::Retrieve, request, shop.table("users.parquet", columns)).unwrap();
    assert_eq!(
        (by_line.counts.scored, &by_line.counts),
        (150, &by_row.counts),
        "{:?} {:?}",
        by_line.problems,
        by_row.problems
    );
    assert_eq!(by_line.rows, by_row.rows);
    // And as the pass answers them.
    let bodies: Vec<Value> = rows
        .iter()
        .map(|row| {
            let mut body = json!({"k": 5, "candidates": 20});
            row.as_object()
                .unwrap()
                .iter()
                .filter(|(name, _)| *name != "id")
                .for_each(|(name, value)| body[name] = value.clone());
            body
        })
        .collect();
    for (n, answer) in retrieve(&shop.view, &bodies).into_iter().enumerate() {
        let ranked = answer.unwrap().0;
        assert_eq!(by_row.ids()[n], n as i64 - 3);
        assert_eq!(by_row.integers("items", n), ranked.ids.iter().map(|id| id.0).collect::<Vec<_>>());
        assert_eq!(by_row.floats("scores", n), ranked.scores);
        assert_eq!([by_row.floats("task_click", n), by_row.floats("task_buy", n)].concat(), ranked.tasks);
        assert!(
            !bodies[n]["exclude"]
                .as_array()
                .unwrap()
                .iter()
                .any(|id| by_row.integers("items", n).contains(&id.as_i64().unwrap()))
        );
    }
    // The format is detected by content: compressed lines, and a Parquet file by any other name.
    let zipped = shop.path("users.json");
    let mut writer = flate2::write::GzEncoder::new(File::create(&zipped).unwrap(), flate2::Compression::fast());
    writer.write_all(&std::fs::read(shop.path("users.jsonl")).unwrap()).unwrap();
    writer.finish().unwrap();
    std::fs::copy(shop.path("users.parquet"), shop.path("users")).unwrap();
    for input in [zipped, shop.path("users")] {
        assert_eq!(shop.score(Task::Retrieve, request, input).unwrap().rows, by_line.rows);
    }
}

#[test]
fn weights_of_ids_stand_in_a_column_of_their_own() {
    let shop = Shop::tiny();
    let line =
        json!({"id": 1, "features": {"installed": {"values": [3, 4], "weights": [0.5, 2.0]}, "size": [1, 2, 3]}});
    let columns = |weights: Vec<f32>| -> Vec<(&str, ArrayRef)> {
        vec![
            ("id", Arc::new(Int64Array::from(vec![1]))),
            ("installed.weights", lists::<Float32Type>(vec![Some(weights)])),
            ("installed", lists::<Int64Type>(vec![Some(vec![3, 4])])),
            ("size", lists::<Int32Type>(vec![Some(vec![1, 2, 3])])),
        ]
    };
    let by_line = shop.score(Task::Retrieve, "{}", shop.lines("a.jsonl", &[line])).unwrap();
    let by_row = shop.score(Task::Retrieve, "{}", shop.table("a.parquet", columns(vec![0.5, 2.0]))).unwrap();
    assert_eq!(by_line.problems, by_row.problems);
    assert_eq!((by_row.counts.scored, by_line.rows), (1, by_row.rows));
    let invalid = shop.score(Task::Retrieve, "{}", shop.table("b.parquet", columns(vec![0.5]))).unwrap();
    assert!(invalid.problems[0]["reason"].as_str().unwrap().contains("1 weights"), "{:?}", invalid.problems);
    let mut none = columns(vec![0.5, 2.0]);
    none[2].1 = lists::<Int64Type>(vec![None]);
    let invalid = shop.score(Task::Retrieve, "{}", shop.table("c.parquet", none)).unwrap();
    let expected = "column `installed.weights`: got weights, but no values in `installed`";
    assert_eq!(invalid.problems[0]["reason"], expected, "{:?}", invalid.problems);
}

#[test]
fn rows_of_parquet_that_are_wrong_are_wrong_alone() {
    let shop = Shop::vectors();
    let nested = |rows: Vec<Option<Vec<Option<f32>>>>| -> ArrayRef {
        Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(rows))
    };
    let good = Some(vec![Some(1.0), Some(0.5), Some(0.0)]);
    let columns: Vec<(&str, ArrayRef)> = vec![
        (
            "id",
            Arc::new(UInt64Array::from(vec![
                Some(1),
                None,
                Some(u64::MAX),
                Some(4),
                Some(5),
                Some(6),
                Some(7),
                Some(8),
                Some(9),
            ])),
        ),
        (
            "vector",
            nested(vec![
                good.clone(),
                good.clone(),
                good.clone(),
                None,
                Some(vec![Some(1.0), None, Some(2.0)]),
                Some(vec![Some(1.0)]),
                Some(vec![Some(f32::NAN), Some(1.0), Some(1.0)]),
                good.clone(),
                good,
            ]),
        ),
        ("k", Arc::new(Int64Array::from(vec![None, None, None, None, None, None, None, Some(21), Some(20)]))),
    ];
    let scored = shop.score(Task::Retrieve, "{}", shop.table("users.parquet", columns)).unwrap();
    assert_eq!((scored.ids(), scored.counts.rows, scored.counts.scored), (vec![1, 9], 9, 2));
    let reported: Vec<(u64, Option<i64>, &str)> = scored
        .problems
        .iter()
        .map(|p| (p["row"].as_u64().unwrap(), p["id"].as_i64(), p["reason"].as_str().unwrap()))
        .collect();
    for ((row, id, reason), (expected_row, expected_id, expected)) in reported.iter().zip([
        (1, None, "column `id`"),
        (2, None, "column `id`: row 3: got 18446744073709551615"),
        (3, Some(4), "column `vector`: got null"),
        (4, Some(5), "column `vector`: got a null inside a list"),
        (5, Some(6), "expected 3"),
        (6, Some(7), "NaN"),
        (7, Some(8), "field `k`: got 21, expected at most 20"),
    ]) {
        assert!((*row, *id) == (expected_row, expected_id) && reason.contains(expected), "{reported:?}: {expected}");
    }
    assert_eq!(reported.len(), 7);
}

#[test]
fn files_with_other_columns_are_rejected() {
    let shop = Shop::tiny();
    let id = || ("id", Arc::new(Int64Array::from(vec![1])) as ArrayRef);
    let numbers = || lists::<Float32Type>(vec![Some(vec![1.0, 2.0, 3.0])]);
    let texts = || Arc::new(StringArray::from(vec!["admin"])) as ArrayRef;
    for (task, columns, expected) in [
        (Task::Retrieve, vec![("size", numbers())], "column `id` is missing"),
        (
            Task::Retrieve,
            vec![id(), ("size", numbers()), ("sektion", texts())],
            "column `sektion`: no such field of a request",
        ),
        (Task::Retrieve, vec![id(), ("size", numbers()), ("size", numbers())], "column `size`: it occurs twice"),
        (Task::Retrieve, vec![id(), ("size", numbers()), ("vector", numbers())], "beside `vector`"),
        (Task::Retrieve, vec![id(), ("filter", texts())], "nor a column of a feature: installed, section, size"),
        (Task::Retrieve, vec![id(), ("size", numbers()), ("items", numbers())], "column `items`: no such field"),
        (Task::Rank, vec![id(), ("size", numbers())], "column `items` is missing"),
        (Task::Rank, vec![id(), ("size", numbers()), ("filter", texts())], "column `filter`: no such field"),
        (Task::Items, vec![id(), ("popularity", numbers())], "no column `section`, which the item tower reads"),
    ] {
        let reported = shop.invalid(task, "{}", shop.table("users.parquet", columns));
        assert!(reported.contains(expected) && reported.contains("users.parquet"), "{reported}");
    }
    for (bytes, expected) in [
        (b"PAR1 and then something else".to_vec(), "not a readable Parquet file"),
        (Vec::new(), "not a readable Parquet file"),
        (b"\x28\xb5\x2f\xfd".to_vec(), "compressed by zstd"),
    ] {
        let path = shop.path("broken.parquet");
        std::fs::write(&path, bytes).unwrap();
        let reported = shop.invalid(Task::Retrieve, "{}", path);
        assert!(reported.contains(expected), "{reported}");
    }
    // A truncated file fails completely.
    let whole = shop.table("users.parquet", users(500).1);
    let bytes = std::fs::read(&whole).unwrap();
    for end in [8, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&whole, &bytes[..end]).unwrap();
        assert!(shop.invalid(Task::Retrieve, "{}", whole.clone()).contains("not a readable Parquet file"));
    }
    for (task, request, expected) in [
        (Task::Rank, r#"{"k": 3}"#, "unknown field `k`"),
        (Task::Rank, r#"{"items": [1]}"#, "belongs to each row"),
        (Task::Items, r#"{"k": 3}"#, "got a field for the task `items`"),
    ] {
        let reported = Questions::parse(task, request).unwrap_err().to_string();
        assert!(reported.contains(expected), "{reported}");
    }
    let towerless = Shop::vectors().invalid(Task::Items, "{}", shop.lines("items.jsonl", &[json!({"id": 1})]));
    assert!(towerless.contains("no item tower"), "{towerless}");
}

#[test]
fn given_items_are_scored_as_rank_scores_them() {
    let shop = Shop::tiny();
    let given = |n: i64| vec![n % 5, 900 + n, (n * 3) % 7, n % 5];
    let size = |n: i64| vec![n as f32, 0.5, -1.0];
    let row = |n: i64| json!({"id": n, "features": {"size": size(n)}, "items": given(n)});
    let lines = shop.lines("pairs.jsonl", &(0..70).map(row).collect::<Vec<_>>());
    let table = shop.table(
        "pairs.parquet",
        vec![
            ("id", Arc::new(Int64Array::from_iter_values(0..70))),
            ("size", lists::<Float32Type>((0..70).map(|n| Some(size(n))).collect())),
            ("items", lists::<Int64Type>((0..70).map(|n| Some(given(n))).collect())),
        ],
    );
    let request = r#"{"constants": {"w_buy": 0.5}, "columns": ["title"]}"#;
    let by_line = shop.score(Task::Rank, request, lines).unwrap();
    let by_row = shop.score(Task::Rank, request, table).unwrap();
    assert_eq!((by_line.counts.scored, &by_line.rows), (70, &by_row.rows), "{:?}", by_line.problems);
    for n in 0..70 {
        let body = json!({"features": {"size": size(n)}, "items": given(n), "constants": {"w_buy": 0.5}}).to_string();
        let rank = sterling::api::rank(body.as_bytes()).unwrap().0;
        let prepared = sterling::serving::pass::prepare(&shop.view, Request::Rank(rank)).unwrap();
        let mut pass = sterling::serving::pass::Cpu::new(Threads::new(1));
        let answer = sterling::serving::pass::run(&mut pass, &[prepared], None).remove(0).unwrap();
        let Content::Items(ranked) = answer.content else { panic!("no items") };
        assert_eq!(by_row.integers("items", n as usize), ranked.ids.iter().map(|id| id.0).collect::<Vec<_>>());
        assert_eq!(by_row.floats("scores", n as usize), ranked.scores);
        assert_eq!(by_row.integers("unknown", n as usize), [900 + n]);
    }
    let invalid =
        shop.lines("wrong.jsonl", &[json!({"id": 1, "features": {}}), json!({"id": 2, "features": {}, "items": []})]);
    let invalid = shop.score(Task::Rank, "{}", invalid).unwrap();
    assert_eq!((invalid.counts.rows, invalid.counts.scored, invalid.problems.len()), (2, 0, 2));
}

#[test]
fn items_have_the_vectors_that_were_published() {
    let shop = Shop::tiny();
    let path = tiny_package().join("items.jsonl");
    let by_line = shop.score(Task::Items, "{}", path.clone()).unwrap();
    let lines: Vec<Value> = text(&path).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(by_line.counts.scored as usize, lines.len(), "{:?}", by_line.problems);
    let mut expected = vec![0.0; shop.view.dimension()];
    for (n, line) in lines.iter().enumerate() {
        let id = line["id"].as_i64().unwrap();
        shop.view.row(shop.view.slot(sterling::units::ItemId(id)).unwrap(), &mut expected);
        assert_eq!((by_line.ids()[n], by_line.vector(n)), (id, expected.clone()));
    }
    // As Parquet, with a column that the tower does not read.
    let sections = lines.iter().map(|line| line["attributes"]["section"].as_str().map(str::to_owned));
    let table = shop.table(
        "items.parquet",
        vec![
            ("section", Arc::new(StringArray::from_iter(sections))),
            ("price", Arc::new(Float64Array::from_iter_values(lines.iter().map(|_| 1.5)))),
            ("id", Arc::new(Int64Array::from_iter_values(lines.iter().map(|line| line["id"].as_i64().unwrap())))),
        ],
    );
    assert_eq!(shop.score(Task::Items, "{}", table).unwrap().rows, by_line.rows);
    let invalid = shop.lines(
        "wrong.jsonl",
        &[
            json!({"id": 1, "set": {"section": "admin"}}),
            json!({"id": 2, "attributes": {"section": 0.5}}),
            json!({"id": 3, "more": 1}),
            json!({"attributes": {}}),
            json!({"id": 4, "attributes": {"section": {"a": 1}}}),
            json!({"id": 5, "attributes": {"section": "games"}}),
        ],
    );
    let invalid = shop.score(Task::Items, "{}", invalid).unwrap();
    assert_eq!((invalid.counts.rows, invalid.ids(), invalid.problems.len()), (6, vec![5], 5), "{:?}", invalid.problems);
}
