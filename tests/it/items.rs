//! Item files as other programs write them.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;
use sterling::index::columns::ItemValues;
use sterling::items::EMBEDDING;
use sterling::snapshot::items::Items;

use crate::support::{json, root, run};

fn golden() -> PathBuf {
    root().join("tests/golden/items")
}

/// Returns the values of one item in a column, as JSON shows them.
fn cell(items: &Items, name: &str, row: usize) -> Value {
    let column = items.columns.iter().find(|c| c.name == name).unwrap_or_else(|| panic!("no column {name}"));
    let range = |offsets: &[u32]| offsets[row] as usize..offsets[row + 1] as usize;
    match &column.values {
        ItemValues::Floats(values) if values[row].is_nan() => Value::Null,
        ItemValues::Floats(values) => values[row].into(),
        ItemValues::Integers { offsets, values } => match &values[range(offsets)] {
            [one] => (*one).into(),
            many => many.into(),
        },
        ItemValues::Texts { offsets, values } => values[range(offsets)].into(),
    }
}

/// Returns the expected value of an item in a column by the golden files, like [`cell`].
fn expected(item: &Value, name: &str, file: &str) -> Value {
    match (&item[name], name) {
        (Value::Null, "year") => Value::Array(Vec::new()),
        (Value::String(text), "cost") => text.parse::<f64>().unwrap().into(),
        (Value::String(text), _) => vec![text.clone()].into(),
        (Value::Bool(truth), _) => vec![truth.to_string()].into(),
        // The old timestamps of Spark count nanoseconds.
        (value, "seen") if file == "spark" => (value.as_i64().unwrap() * 1000).into(),
        (value, _) => value.clone(),
    }
}

#[test]
fn files_of_every_writer_are_read_alike() {
    let wanted = json(golden().join("expected.json"));
    let wanted = wanted.as_array().unwrap();
    let files = std::fs::read_dir(golden()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let files: Vec<String> = files.filter(|name| name != "expected.json").collect();
    assert!(files.len() >= 14, "{files:?}");
    for file in &files {
        let items = Items::read(&golden().join(file), None).unwrap_or_else(|e| panic!("{file}: {e}"));
        assert_eq!(items.len(), wanted.len(), "{file}");
        assert!(items.columns.iter().all(|c| c.name != "note"), "{file}");
        let names = ["lang", "year", "owner", "price", "cost", "late", "section", "seen"];
        assert_eq!(items.columns.len(), names.len() - usize::from(file == "pyarrow"), "{file}");
        let vectors = items.dense[EMBEDDING].all().unwrap();
        for (row, item) in wanted.iter().enumerate() {
            assert_eq!(item["id"], items.ids[row], "{file}");
            let vector: Vec<f64> = vectors[row * 3..][..3].iter().map(|&x| x.into()).collect();
            assert_eq!(item["embedding"], Value::from(vector), "{file}");
            for name in names.iter().filter(|name| file != "pyarrow" || **name != "cost") {
                assert_eq!(cell(&items, name, row), expected(item, name, file), "{file}: {name} of item {row}");
            }
        }
    }
}

fn refused(items: &Path) -> String {
    let store = tempfile::tempdir().unwrap();
    let store = store.path().to_str().unwrap();
    let (code, _, said) = run(&["publish", "--name", "m", "--items", items.to_str().unwrap(), "--store", store]);
    assert_eq!(code, 2, "{said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

#[test]
fn invalid_item_files_are_rejected_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let parquet = std::fs::read(golden().join("pandas-snappy.parquet")).unwrap();
    let line = b"{\"id\": 1, \"embedding\": [1, 2]}\n";
    let gzip = |bytes: &[u8]| {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(bytes).unwrap();
        packed.finish().unwrap()
    };
    put("spark/part-0.jsonl", line);
    put("spark/_SUCCESS", b"");
    put("spark/part-1.parquet", b"{}");
    std::fs::create_dir(folder.path().join("empty")).unwrap();
    for (path, expected) in [
        (put("cut.pq", &parquet[..parquet.len() / 2]), "cut.pq: not a readable Parquet file"),
        (put("text.PQ", line), "text.PQ: not a readable Parquet file"),
        (put("a.jsonl.gz", &gzip(b"{\"id\": 1}\n{\"id\": \"x\"}")), "a.jsonl.gz: line 2: not an item"),
        (put("cut.gz", &gzip(&line.repeat(99))[..30]), "cut.gz: line 1: "),
        (put("z.jsonl.zst", b"\x28\xb5\x2f\xfd rest"), "z.jsonl.zst: compressed by zstd, expected gzip"),
        (folder.path().join("spark"), "spark: part-1.parquet: not a readable Parquet file"),
        (folder.path().join("empty"), "empty: no items"),
        (
            put("lists.jsonl", b"{\"id\": 1, \"embedding\": [1], \"attributes\": {\"pca\": [0.5, 1]}}"),
            "column `pca`: got vectors of 2",
        ),
        (
            put("similar.jsonl", b"{\"id\": 1, \"embedding\": [1], \"attributes\": {\"similarity\": 1}}"),
            "column `similarity`: this is the retrieval score",
        ),
        (
            put("large.jsonl", b"{\"id\": 1, \"embedding\": [1]}\n{\"id\": 2, \"embedding\": [-1e30]}"),
            "item 2: number 1 of its vector is -1e30",
        ),
    ] {
        let said = refused(&path);
        assert!(said.contains(expected), "expected {expected}: {said}");
    }
}

#[test]
fn omitted_and_converted_columns_are_reported() {
    let store = tempfile::tempdir().unwrap();
    let store = store.path().to_str().unwrap();
    for (file, notes) in [
        (
            "pandas-lz4.parquet",
            &["column `note` left out: no item has a value", "column `seen`: Timestamp", "microseconds since 1970"][..],
        ),
        ("spark", &["nanoseconds since 1970-01-01"]),
        ("lines.jsonl.gz", &["column `note` left out: no item has a value"]),
    ] {
        let path = golden().join(file);
        let (code, _, said) = run(&["publish", "--name", "m", "--items", path.to_str().unwrap(), "--store", store]);
        assert_eq!(code, 0, "{said}");
        for note in notes {
            assert!(said.contains(note), "{file}: expected {note}: {said}");
        }
    }
}
