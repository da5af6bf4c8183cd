//! Offline scoring as a program: its output equals the answers of a server, complete and without duplicates, after any
//! interruption.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Int64Type};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};
use sterling::serving::view::View;
use sterling::snapshot::{Placement, Snapshot, Store};

use crate::support::{put, retrieve, run, sterling, text, vectors};

struct Job {
    folder: tempfile::TempDir,
    inputs: Vec<PathBuf>,
}

fn user(id: i64) -> Value {
    let (a, b) = ((id as f64 * 0.7).sin(), (id as f64 * 1.3).cos());
    json!({"id": id, "vector": [a, b, 0.25], "exclude": [id % 50]})
}

impl Job {
    /// Returns a store with one model, and files with `rows` users each.
    fn new(files: usize, rows: i64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let job = Job { inputs: (0..files).map(|n| folder.path().join(format!("users-{n}.jsonl"))).collect(), folder };
        job.publish();
        for (n, path) in (0..).zip(&job.inputs) {
            let lines: Vec<String> = (n * rows..(n + 1) * rows).map(|id| user(id).to_string()).collect();
            std::fs::write(path, lines.join("\n")).unwrap();
        }
        job
    }

    fn publish(&self) {
        let line = |id: i64| {
            let embedding = [(id as f64 * 0.3).sin(), (id as f64 * 0.11).cos(), (id % 7) as f64 * 0.1];
            json!({"id": id, "embedding": embedding, "attributes": {"name": format!("n{id}"), "size": id % 5}})
                .to_string()
        };
        let text = (0..300).map(line).collect::<Vec<_>>().join("\n");
        put(&self.path("store"), &vectors(self.folder.path(), &text)).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn arguments(&self, out: &str, request: &str) -> Vec<String> {
        let path = |path: &Path| path.to_str().unwrap().to_owned();
        let mut arguments = vec!["score".to_owned(), "--model".into(), "vectors".into(), "--in".into()];
        arguments.extend(self.inputs.iter().map(|input| path(input)));
        let more = ["--out", &path(&self.path(out)), "--store", &path(&self.path("store")), "--request", request];
        arguments.extend(more.map(str::to_owned));
        arguments
    }

    fn score(&self, out: &str, request: &str) -> (i32, String, String) {
        run(&self.arguments(out, request).iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Scores by [`REQUEST`], with a limit of rows that may have a problem.
    fn score_allowing(&self, problems: &str, out: &str) -> (i32, String, String) {
        let arguments = self.arguments(out, REQUEST);
        let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        arguments.extend(["--max-problems", problems]);
        run(&arguments)
    }

    /// Returns the output files: names and bytes.
    fn files(&self, out: &str) -> BTreeMap<String, Vec<u8>> {
        let entries = std::fs::read_dir(self.path(out)).unwrap().map(|entry| entry.unwrap());
        entries
            .map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap()))
            .filter(|(name, _)| name.starts_with("part-") || name.starts_with("_part-"))
            .collect()
    }

    fn view(&self) -> std::sync::Arc<View> {
        let folder = Store::new(self.path("store")).folder("vectors", 1);
        std::sync::Arc::new(View::new(std::sync::Arc::new(Snapshot::load(&folder, &Placement::whole()).unwrap())))
    }
}

const REQUEST: &str = r#"{"k": 7, "columns": ["name", "size"]}"#;

/// A row of an output: id, items, scores, names.
type Row = (i64, Vec<i64>, Vec<f32>, Vec<String>);

fn rows(path: &Path) -> Vec<Row> {
    let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap().build().unwrap();
    let mut rows = Vec::new();
    for batch in reader {
        let batch = batch.unwrap();
        let list = |name: &str, row: usize| batch.column_by_name(name).unwrap().as_list::<i32>().value(row);
        for row in 0..batch.num_rows() {
            let id = batch.column_by_name("id").unwrap().as_primitive::<Int64Type>().value(row);
            let items = list("items", row).as_primitive::<Int64Type>().values().to_vec();
            let scores = list("scores", row).as_primitive::<Float32Type>().values().to_vec();
            let names = list("column_name", row);
            let names = names.as_string::<i32>().iter().map(|name| name.unwrap().to_owned()).collect();
            rows.push((id, items, scores, names));
        }
    }
    rows
}

#[test]
fn batch_inference_equals_the_server() {
    let job = Job::new(2, 150);
    // Rows with different problems among valid ones; an empty line does not count.
    let invalid = [
        "{",
        "[]",
        r#"{"vector": [1, 2, 3]}"#,
        r#"{"id": "x", "vector": [1, 2, 3]}"#,
        r#"{"id": 1}"#,
        r#"{"id": 2, "vector": [1, 2]}"#,
        r#"{"id": 3, "vector": [1, 2, 3], "k": 0}"#,
        r#"{"id": 4, "vector": [1, 2, 3], "filter": "nothing:1"}"#,
        r#"{"id": 5, "vector": [1, 2, 3], "columns": []}"#,
        r#"{"id": 6, "features": {"a": [1]}}"#,
        r#"{"id": 7, "vector": [1, 2, 3], "more": 1}"#,
        r#"{"id": 8, "requests": []}"#,
        r#"{"id": 9, "vector": [1, 2, 3], "k": 8}"#,
    ];
    let mut text = std::fs::read_to_string(&job.inputs[1]).unwrap();
    text = format!(
        "\u{feff}{}\n\n{}\n",
        text.replacen('\n', &format!("\n{}\n", invalid[..6].join("\n")), 1),
        invalid[6..].join("\n")
    );
    std::fs::write(&job.inputs[1], text).unwrap();
    let (code, said, log) = job.score_allowing("13", "out");
    assert_eq!(code, 0, "{log}");
    assert_eq!(said.trim(), "313 rows: 300 scored, 13 with a problem");
    let view = job.view();
    let files = job.files("out");
    let outputs: Vec<&String> = files.keys().filter(|name| name.ends_with(".parquet")).collect();
    assert_eq!((files.len(), outputs.len()), (3, 2));
    let found: Vec<Row> = outputs.iter().flat_map(|name| rows(&job.path("out").join(name))).collect();
    assert_eq!(found.iter().map(|row| row.0).collect::<Vec<_>>(), (0..300).collect::<Vec<_>>());
    for chunk in found.chunks(100) {
        let bodies: Vec<Value> = chunk
            .iter()
            .map(|row| {
                let mut body = user(row.0);
                body.as_object_mut().unwrap().remove("id");
                body["k"] = json!(7);
                body
            })
            .collect();
        for (row, answer) in chunk.iter().zip(retrieve(&view, &bodies)) {
            let ranked = answer.unwrap().0;
            assert_eq!(row.1, ranked.ids.iter().map(|id| id.0).collect::<Vec<_>>());
            assert_eq!(row.2, ranked.scores);
            assert_eq!(row.3, row.1.iter().map(|id| format!("n{id}")).collect::<Vec<_>>());
        }
    }
    let problems: String = files
        .iter()
        .filter(|(name, _)| name.ends_with(".jsonl"))
        .map(|(_, text)| String::from_utf8_lossy(text))
        .collect();
    let problems: Vec<Value> = problems.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of_rows: Vec<u64> = problems.iter().map(|p| p["row"].as_u64().unwrap()).collect();
    assert_eq!(of_rows, [1, 2, 3, 4, 5, 6, 156, 157, 158, 159, 160, 161, 162]);
    assert!(
        problems.iter().all(|p| p["code"] == "invalid" && p["reason"].as_str().unwrap().len() > 10),
        "{problems:?}"
    );
    let success: Value = serde_json::from_str(&crate::support::text(job.path("out").join("_SUCCESS.json"))).unwrap();
    assert_eq!(success, json!({"rows": 313, "scored": 300, "problems": {"invalid": 13}}));
}

#[test]
#[ignore = "long: kills workers again and again"]
fn a_killed_job_resumes_and_produces_the_same_bytes() {
    let job = Job::new(6, 800);
    assert_eq!(job.score("undisturbed", REQUEST).0, 0);
    let expected = job.files("undisturbed");
    let mut kills = 0;
    for _ in 0..40 {
        let mut process =
            sterling().args(job.arguments("out", REQUEST)).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let start = Instant::now();
        let before = std::fs::read_dir(job.path("out")).map_or(0, Iterator::count);
        // It is running: there is one more file than before, possibly still being written.
        while std::fs::read_dir(job.path("out")).map_or(0, Iterator::count) <= before
            && start.elapsed() < Duration::from_secs(30)
            && process.try_wait().unwrap().is_none()
        {
            std::thread::sleep(Duration::from_millis(3));
        }
        std::thread::sleep(Duration::from_millis(20 * kills));
        let was_running = process.try_wait().unwrap().is_none();
        let _ = process.kill();
        process.wait().unwrap();
        kills += u64::from(was_running);
        // The existing files are complete.
        let found = if job.path("out").exists() { job.files("out") } else { BTreeMap::new() };
        assert!(found.iter().all(|(name, bytes)| expected[name] == *bytes));
        if kills == 3 || !was_running {
            break;
        }
    }
    assert!(kills >= 1, "nothing was killed");
    let (code, said, log) = job.score("out", REQUEST);
    assert_eq!((code, said.trim()), (0, "4800 rows: 4800 scored, 0 with a problem"), "{log}");
    assert!(job.files("out") == expected);
    // The same files as a folder are another job, with as many rows.
    let mut folder = job.arguments("folder", REQUEST);
    std::fs::create_dir(job.path("users")).unwrap();
    std::fs::write(job.path("users/_note"), "no rows").unwrap();
    for input in &job.inputs {
        std::fs::copy(input, job.path("users").join(input.file_name().unwrap())).unwrap();
    }
    drop(folder.splice(4..4 + job.inputs.len(), [job.path("users").to_str().unwrap().to_owned()]));
    let (code, said, log) = run(&folder.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!((code, said.trim()), (0, "4800 rows: 4800 scored, 0 with a problem"), "{log}");
    // A completed job has nothing to do.
    assert_eq!(job.score("out", REQUEST).1.trim(), "4800 rows: 4800 scored, 0 with a problem");
}

#[test]
fn texts_beyond_a_batch_are_written_in_several() {
    // 299 texts of 4 kB for each of 64 rows, 76 MB: more than a batch holds.
    let job = Job::new(1, 64);
    let name = |id: i64| format!("{id}{}", "n".repeat(4000));
    let line = |id: i64| json!({"id": id, "embedding": [id % 7, 1, id], "attributes": {"name": name(id)}}).to_string();
    let text = (0..300).map(line).collect::<Vec<_>>().join("\n");
    put(&job.path("store"), &vectors(job.folder.path(), &text)).unwrap();
    let (code, _, err) = job.score("out", r#"{"k": 299, "columns": ["name"]}"#);
    assert_eq!(code, 0, "{err}");
    let output = job.files("out").into_keys().find(|name| name.ends_with(".parquet")).unwrap();
    let rows = rows(&job.path("out").join(output));
    assert_eq!(rows.iter().map(|(id, ..)| *id).collect::<Vec<_>>(), (0..64).collect::<Vec<_>>());
    for (_, items, _, names) in rows {
        assert_eq!(items.len(), 299);
        assert!(items.iter().zip(names).all(|(id, found)| found == name(*id)));
    }
}

#[test]
fn another_job_in_the_same_folder_is_rejected() {
    let job = Job::new(2, 5);
    assert_eq!(job.score("out", REQUEST).0, 0);
    let refused = |said: (i32, String, String), what: &str| {
        assert!(
            said.0 == 2 && said.2.contains("another job was started in this folder") && said.2.contains(what),
            "{said:?}"
        );
    };
    refused(job.score("out", "{\"k\": 8}"), "the other job's request is");
    job.publish();
    refused(job.score("out", REQUEST), "the other job's version is (1, ");
    let mut pinned = job.arguments("out", REQUEST);
    pinned[2] = "vectors@1".into();
    assert_eq!(run(&pinned.iter().map(String::as_str).collect::<Vec<_>>()).0, 0);
    std::fs::write(&job.inputs[0], user(77).to_string()).unwrap();
    refused(run(&pinned.iter().map(String::as_str).collect::<Vec<_>>()), "users-0.jsonl, in bytes, is");
    for (at, with, expected) in [
        (2, "nobody", "versions of `nobody`: none"),
        (2, "vectors@9", "versions of `vectors`: 1, 2"),
        (2, "vectors@x", "versions of `vectors`: 1, 2"),
    ] {
        let mut invalid = job.arguments("other", REQUEST);
        invalid[at] = with.into();
        let (code, _, log) = run(&invalid.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(code == 2 && log.contains(expected), "{log}");
    }
    for (request, expected) in [
        ("[]", "not a JSON object"),
        ("{\"vector\": [1]}", "belongs to each row"),
        ("{\"k\": 0}", "field `k`"),
        ("{\"columns\": [\"x\"]}", "`x`"),
    ] {
        let (code, _, log) = job.score("another", request);
        assert!(code == 2 && log.contains(expected), "{request}: {log}");
    }
}

#[test]
fn a_worker_processes_the_files_from_its_input() {
    let job = Job::new(3, 20);
    let worker = |lines: &str| {
        let mut command: Command = sterling();
        let mut process = command
            .args(job.arguments("out", REQUEST))
            .args(["--units", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        process.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        let output = process.wait_with_output().unwrap();
        let lines = String::from_utf8(output.stdout).unwrap();
        let mut lines = lines.lines().map(|line| serde_json::from_str(line).unwrap());
        assert_eq!(lines.next(), Some(json!({"ready": true, "units": 3})));
        (output.status.code().unwrap(), lines.collect::<Vec<Value>>())
    };
    let (code, reported) = worker("2\n0\n2\n");
    assert_eq!((code, reported.len()), (0, 3));
    assert_eq!((&reported[0]["unit"], &reported[0]["counts"]["rows"]), (&json!(2), &json!(20)));
    assert_eq!(reported[2], json!({"unit": 2, "done": true}), "it is done already");
    assert!(!job.path("out").join("_SUCCESS.json").exists());
    let (code, reported) = worker(&format!("7\none\n\n  \n-1\n0x1\n{}\n0", "9".repeat(1 << 20)));
    assert_eq!((code, reported.len()), (2, 6));
    assert!(reported[..5].iter().all(|line| line["done"] == false && line["code"] == "invalid"), "{reported:?}");
    assert!(reported[0]["error"].as_str().unwrap().contains("0 to 2") && reported[0]["unit"] == 7);
    assert_eq!(reported[5], json!({"unit": 0, "done": true}), "the last line needs no end");
    let mut last = job.arguments("out", REQUEST);
    last.extend(["--unit".into(), "1".into()]);
    let (code, said, log) = run(&last.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!((code, said.trim()), (0, "60 rows: 60 scored, 0 with a problem"), "{log}");
}

/// A row that is no text, or longer than the limit, is a problem of that row.
#[test]
fn unreadable_rows_do_not_stop_a_job() {
    let job = Job::new(1, 3);
    let mut text = std::fs::read(&job.inputs[0]).unwrap();
    text.extend(b"\n\xff\xfe\n{\"id\": 7, \"vector\": [");
    text.resize(text.len() + (9 << 20), b'0');
    text.extend(b"]}\r\n  \n");
    text.extend(user(4).to_string().into_bytes());
    std::fs::write(&job.inputs[0], text).unwrap();
    let (code, said, log) = job.score_allowing("2", "out");
    assert_eq!((code, said.trim()), (0, "6 rows: 4 scored, 2 with a problem"), "{log}");
    let files = job.files("out");
    let (_, problems) = files.iter().find(|(name, _)| name.ends_with(".jsonl")).unwrap();
    let problems = String::from_utf8(problems.clone()).unwrap();
    assert!(problems.contains("not UTF-8") && problems.contains("longer than 8388608 bytes"), "{problems}");
}

#[test]
fn more_problems_than_allowed_end_with_an_error() {
    let job = Job::new(2, 5);
    let text = std::fs::read_to_string(&job.inputs[0]).unwrap();
    std::fs::write(&job.inputs[0], format!("{text}\n{{\"id\": 7}}\n{{\"id\": 8}}\n")).unwrap();
    let success = job.path("out/_SUCCESS.json");
    for (allowed, expected) in [("0", 2), ("16.6%", 2), ("2", 0), ("1", 2), ("16.7%", 0)] {
        let (code, said, log) = job.score_allowing(allowed, "out");
        assert_eq!((code, success.exists()), (expected, expected == 0), "{allowed}: {said}{log}");
        assert!(code == 0 || log.contains("2 of 12 rows have a problem"), "{log}");
    }
    // The default limit is 0; all outputs are written.
    let (code, _, log) = job.score("default", REQUEST);
    assert!(code == 2 && log.contains("expected at most 0"), "{log}");
    assert!(job.files("default") == job.files("out"));
    let (code, _, log) = job.score_allowing("few", "out");
    assert!(code == 2 && log.contains("expected a number of rows"), "{log}");
    // Workers of an engine: the last one to end reports the counts.
    let unit = |n: &str| sterling().args(job.arguments("units", REQUEST)).args(["--unit", n]).output().unwrap();
    assert!(unit("0").status.success());
    assert_eq!(unit("1").status.code(), Some(2));
}

/// Readers of data sets take every file of a folder whose name does not begin with an underscore.
#[test]
fn the_visible_files_of_an_output_folder_are_parquet() {
    let job = Job::new(2, 5);
    std::fs::write(&job.inputs[1], format!("{}\n{{\"id\": 7}}\n", user(1))).unwrap();
    assert_eq!(job.score_allowing("1", "out").0, 0);
    let names = || -> Vec<String> {
        let entries =
            std::fs::read_dir(job.path("out")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = entries.collect();
        names.sort();
        names
    };
    let (hidden, visible): (Vec<_>, Vec<_>) = names().into_iter().partition(|name| name.starts_with(['_', '.']));
    assert!(visible.len() == 2 && visible.iter().all(|name| name.ends_with(".parquet")), "{visible:?}");
    let problems = format!("_{}", visible[1].replace(".parquet", ".problems.jsonl"));
    let mut expected = vec!["_SUCCESS.json".to_owned(), "_job.json".into(), problems.clone()];
    expected.sort();
    assert_eq!(hidden, expected);
    // A missing file of problems is detected, because its rows would not be counted.
    std::fs::remove_file(job.path("out").join(&problems)).unwrap();
    let (code, _, log) = job.score_allowing("1", "out");
    assert!(code != 0 && log.contains(&problems), "{log}");
    std::fs::remove_file(job.path("out").join(&visible[1])).unwrap();
    assert_eq!(job.score_allowing("1", "out").0, 0);
}

#[test]
fn folders_of_users_are_scored_with_their_subfolders() {
    let job = Job::new(2, 5);
    let users = job.path("users");
    std::fs::create_dir_all(users.join("day=2")).unwrap();
    std::fs::copy(&job.inputs[0], users.join("a.jsonl")).unwrap();
    std::fs::copy(&job.inputs[1], users.join("day=2/b.jsonl")).unwrap();
    let score = |out: &str| {
        let mut arguments = job.arguments(out, REQUEST);
        drop(arguments.splice(4..4 + job.inputs.len(), [users.to_str().unwrap().to_owned()]));
        run(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let (code, said, log) = score("out");
    assert_eq!((code, said.trim()), (0, "10 rows: 10 scored, 0 with a problem"), "{log}");
    // A folder named like a field of rows, which its files lack.
    std::fs::create_dir(users.join("k=3")).unwrap();
    std::fs::rename(users.join("a.jsonl"), users.join("k=3/a.jsonl")).unwrap();
    let (code, _, log) = score("field");
    assert!(code == 2 && log.contains("partition folder `k=3`: `score` does not read the field `k`"), "{log}");
    std::os::unix::fs::symlink("/nowhere/c.jsonl", users.join("c.jsonl")).unwrap();
    let (code, _, log) = score("link");
    assert!(code == 2 && log.contains("c.jsonl"), "{log}");
}

/// Scores inputs by paths relative to the job's folder.
fn score_here(job: &Job, inputs: &[&str], out: &str) -> (i32, String) {
    let mut arguments = job.arguments(out, REQUEST);
    drop(arguments.splice(4..4 + job.inputs.len(), inputs.iter().map(|input| (*input).to_owned())));
    let output = sterling().args(&arguments).current_dir(job.path(".")).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn outputs_are_not_written_next_to_inputs() {
    let job = Job::new(1, 5);
    std::fs::create_dir(job.path("users")).unwrap();
    std::fs::copy(&job.inputs[0], job.path("users/a.jsonl")).unwrap();
    std::os::unix::fs::symlink(job.path("users"), job.path("link")).unwrap();
    for (input, out) in [
        ("users", "users"),
        ("users", "users/2024/out"),
        ("users/a.jsonl", "users"),
        ("link", "users/out"),
        ("users", "link"),
    ] {
        let (code, log) = score_here(&job, &[input], out);
        assert!(
            code == 2 && log.contains(&format!("in the folder of the input {}", job.path(input).display())),
            "{input}, {out}: {log}"
        );
        assert_eq!(std::fs::read_dir(job.path("users")).unwrap().count(), 1, "{input}, {out}");
    }
    assert_eq!(score_here(&job, &["users"], "users-out").0, 0);
}

#[test]
fn an_input_is_the_same_by_any_path() {
    let job = Job::new(2, 5);
    assert_eq!(score_here(&job, &["users-0.jsonl", "./users-1.jsonl"], "out").0, 0);
    assert_eq!(job.score("out", REQUEST).1.trim(), "10 rows: 10 scored, 0 with a problem");
    // A job of an older release, which wrote paths unchanged.
    let file = job.path("out/_job.json");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace(&format!("{}/", job.path("").display()).replace("//", "/"), "")).unwrap();
    assert_ne!(std::fs::read_to_string(&file).unwrap(), text);
    let (code, log) = score_here(&job, &["users-0.jsonl", "users-1.jsonl"], "out");
    assert!(!log.contains("this job's is"), "{code}: {log}");
    let (code, log) = score_here(&job, &["users-0.jsonl", "./users-0.jsonl"], "twice");
    assert!(code == 2 && log.contains("users-0.jsonl: given twice"), "{log}");
}

#[test]
fn a_job_with_an_unreadable_input_does_not_start() {
    let job = Job::new(1, 5);
    let gzip = |text: &[u8]| {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut out, text).unwrap();
        out.finish().unwrap()
    };
    for (name, bytes, expected) in [
        ("users.csv", b"7\n8\n".to_vec(), "a CSV file"),
        ("users.txt", b"\xef\xbb\xbfid,\"installed\";section\n7,[1],web\n".to_vec(), "a CSV file"),
        ("users.gz", gzip(b"id\tinstalled\n7\t1\n"), "a CSV file"),
        ("users.json", b"\n [{\"id\": 7}]\n".to_vec(), "a JSON list"),
        ("users.feather", b"ARROW1\0\0".to_vec(), "a Feather (Arrow) file"),
        ("users.fea", b"FEA1".to_vec(), "a Feather (Arrow) file"),
        ("users.arrows", b"\xff\xff\xff\xff\0\0\0\0".to_vec(), "an Arrow stream"),
        ("users.npy", b"\x93NUMPY\x01\0".to_vec(), "a NumPy matrix (.npy)"),
        ("users.npz", b"PK\x03\x04".to_vec(), "a ZIP archive, such as .npz"),
        ("users.h5", b"\x89HDF\r\n".to_vec(), "an HDF5 file"),
        ("users.zst", b"\x28\xb5\x2f\xfd".to_vec(), "compressed by zstd"),
    ] {
        std::fs::write(job.path(name), bytes).unwrap();
        let (code, log) = score_here(&job, &["users-0.jsonl", name], "out");
        let reported = format!("{}: {expected}, expected ", job.path(name).display());
        assert!(code == 2 && log.contains(&reported), "{name}: {log}");
        assert!(!job.path("out").exists(), "{name}");
    }
    let made = std::process::Command::new("mkfifo").arg(job.path("pipe")).status().unwrap();
    assert!(made.success());
    for name in ["pipe", "/dev/null"] {
        let (code, log) = score_here(&job, &["users-0.jsonl", name], "out");
        assert!(code == 2 && log.contains(name) && log.contains("neither a file nor a folder"), "{log}");
        assert!(!job.path("out").exists(), "{name}");
    }
    let (code, log) = score_here(&job, &["users-0.jsonl", "nowhere.jsonl"], "out");
    assert!(code == 2 && log.contains("nowhere.jsonl") && !job.path("out").exists(), "{log}");
}

#[test]
fn buckets_are_rejected_as_inputs_and_outputs() {
    let job = Job::new(1, 5);
    for (at, url) in [(4, "s3://users/today"), (6, "s3://recommendations/today")] {
        let mut arguments = job.arguments("out", REQUEST);
        arguments[at] = url.into();
        let output = sterling().args(&arguments).current_dir(job.path(".")).output().unwrap();
        let log = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && log.contains(url) && log.contains("a URL"), "{log}");
        assert!(!job.path("s3:").exists());
    }
}

#[test]
fn an_input_that_changed_is_not_scored() {
    let job = Job::new(2, 5);
    let unit = |n: &str| sterling().args(job.arguments("out", REQUEST)).args(["--unit", n]).output().unwrap();
    assert!(unit("0").status.success());
    // Same length as before.
    let text = std::fs::read_to_string(&job.inputs[1]).unwrap().replace("0.25", "0.75");
    std::fs::write(&job.inputs[1], text).unwrap();
    let (code, _, log) = job.score("out", REQUEST);
    assert!(code == 2 && log.contains("users-1.jsonl had") && log.contains("another job"), "{log}");
    let log = String::from_utf8(unit("1").stderr).unwrap();
    assert!(log.contains("users-1.jsonl had") && job.files("out").len() == 1, "{log}");
}

#[test]
fn an_input_replaced_after_the_start_is_not_scored() {
    let job = Job::new(2, 200);
    let changed = std::fs::read_to_string(&job.inputs[1]).unwrap().replace("0.25", "0.75");
    let mut command = sterling();
    let child = command.args(job.arguments("out", REQUEST)).stderr(Stdio::piped()).stdout(Stdio::piped());
    let child = child.spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while !job.path("out/_job.json").exists() && Instant::now() < until {
        std::thread::yield_now();
    }
    std::fs::write(&job.inputs[1], changed).unwrap();
    let output = child.wait_with_output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && log.contains("users-1.jsonl had"), "{log}");
    assert!(job.files("out").len() == 1 && !job.path("out/_SUCCESS.json").exists());
}

#[test]
fn a_job_with_missing_outputs_is_not_reported_as_done() {
    let job = Job::new(2, 5);
    assert_eq!(job.score("out", REQUEST).0, 0);
    let success = job.path("out/_SUCCESS.json");
    assert!(success.exists());
    let output = job.files("out").into_keys().find(|name| name.ends_with(".parquet")).unwrap();
    std::fs::remove_file(job.path("out").join(&output)).unwrap();
    let text = std::fs::read(&job.inputs[0]).unwrap();
    std::fs::write(&job.inputs[0], "{\"id\": 1}").unwrap();
    assert_ne!(job.score("out", REQUEST).0, 0);
    // Inputs are checked when the job is opened; missing ones are reported before.
    std::fs::write(&job.inputs[0], &text[..text.len() - 1]).unwrap();
    std::fs::write(&job.inputs[0], [&text[..text.len() - 1], b" "].concat()).unwrap();
    assert_ne!(job.score("out", REQUEST).0, 0);
    assert!(!success.exists());
    std::fs::write(&job.inputs[0], text).unwrap();
    assert_eq!(job.score("out", REQUEST).0, 0);
    assert!(success.exists() && job.files("out").contains_key(&output));
}

#[test]
fn leftovers_are_removed_and_foreign_files_are_rejected() {
    let job = Job::new(2, 5);
    assert_eq!(job.score("out", REQUEST).0, 0);
    let parquet = |out: &str| job.files(out).into_keys().find(|name| name.ends_with(".parquet")).unwrap();
    let leftover = job.path("out").join(format!(".{}.tmp-0123456789abcdef", parquet("out")));
    std::fs::write(&leftover, "half").unwrap();
    assert_eq!(job.score("out", REQUEST).0, 0);
    assert!(!leftover.exists());
    // The output of a job with another request under the same name.
    assert_eq!(job.score("other", r#"{"k": 3, "columns": ["name", "size"]}"#).0, 0);
    std::fs::copy(job.path("other").join(parquet("other")), job.path("out").join(parquet("out"))).unwrap();
    let (code, _, log) = job.score("out", REQUEST);
    assert!(code != 0 && log.contains("the output of another job"), "{log}");
}

/// Workers that start together agree on the job, and those that score the same files write the same bytes.
#[test]
fn duplicate_workers_produce_the_same_output() {
    let job = Job::new(4, 200);
    assert_eq!(job.score("alone", REQUEST).0, 0);
    let start = |_| {
        let mut command = sterling();
        command.args(job.arguments("out", REQUEST)).args(["--units", "-"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        process.stdin.take().unwrap().write_all(b"0\n1\n2\n3\n").unwrap();
        process
    };
    let workers: Vec<_> = (0..3).map(start).collect();
    for worker in workers {
        let output = worker.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(String::from_utf8(output.stdout).unwrap().matches("\"done\":true").count(), 4);
    }
    assert!(job.files("out") == job.files("alone"));
    let names =
        |out: &str| -> Vec<_> { std::fs::read_dir(job.path(out)).unwrap().map(|e| e.unwrap().file_name()).collect() };
    assert_eq!(names("out").len(), names("alone").len(), "{:?}", names("out"));
}

/// Simulates an Indexed Job: one process per index, in any order, one of them lost and restarted, one run twice.
#[test]
fn indexed_workers_produce_the_output_of_one_process() {
    let job = Job::new(5, 300);
    assert_eq!(job.score("alone", REQUEST).0, 0);
    let unit = |index: usize| {
        let mut command = sterling();
        command.args(job.arguments("out", REQUEST)).args(["--unit", &index.to_string()]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let mut lost = unit(3);
    let _ = lost.kill();
    lost.wait().unwrap();
    let mut running: Vec<_> = [4, 1].map(unit).into();
    running.extend([1, 0, 3, 2].map(unit));
    for mut process in running {
        assert!(process.wait().unwrap().success());
    }
    assert!(job.files("out") == job.files("alone"));
}

#[test]
fn workers_exit_with_their_driver() {
    let job = Job::new(3, 50);
    let mut command = sterling();
    command.args(job.arguments("out", REQUEST)).args(["--units", "-"]);
    let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    drop(process.stdout.take());
    process.stdin.take().unwrap().write_all(b"0\n1\n2\n").unwrap();
    assert!(!process.wait().unwrap().success());
    assert!(job.files("out").len() <= 1, "it continued without a client");
}

#[test]
fn the_kubernetes_job_uses_existing_flags() {
    let help = run(&["score", "--help"]).1;
    let manifest = text(crate::support::root().join("deploy/score-job.yaml"));
    let flags: Vec<&str> = manifest.split_whitespace().filter(|word| word.starts_with("--")).collect();
    assert!(flags.len() >= 7);
    for flag in flags {
        let name = flag.split('=').next().unwrap();
        assert!(help.contains(&format!("{name} ")), "{name}: {help}");
    }
}
