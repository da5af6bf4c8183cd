//! Publications with vectors on disk and in memory produce the same files.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::PathBuf;

use super::*;
use sterling_core::error::Error;
use sterling_index::ivf::Rescore;
use sterling_snapshot::model::VectorSpec;
use sterling_snapshot::{Manifest, Recipe, SHARDS_FILE};
use sterling_storage::files::Checksum;
use sterling_storage::rows::Spill;

/// Budget without memory for vectors, and buckets of a few slots.
fn on_the_disk(bucket_bytes_min: u64) -> Budget {
    Budget { bytes: 0, is_bound: false, bucket_bytes_min }
}

/// Returns the files of a version, or of its shards, with their checksums in the manifests.
fn files(store: &Store, (name, version): &(String, u64)) -> Vec<(String, Checksum)> {
    let root = store.root().join(name).join(version.to_string());
    let mut folders = vec![root.clone()];
    if root.join(SHARDS_FILE).exists() {
        folders = fs::read_dir(&root).unwrap().map(|e| e.unwrap().path()).filter(|path| path.is_dir()).collect();
        folders.sort();
    }
    let of_folder = |folder: &PathBuf| {
        let manifest = Manifest::read(folder).unwrap();
        manifest.verify(folder).unwrap();
        let name = folder.strip_prefix(&root).unwrap().display().to_string();
        manifest.files.into_iter().map(move |(file, sum)| (format!("{name}/{file}"), sum)).collect::<Vec<_>>()
    };
    folders.iter().flat_map(of_folder).collect()
}

/// Publishes from memory and from disk with several numbers of passes, and compares all of them.
fn check(what: &Plan, dimension: u64) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path().join("store"));
    let place = |e: Error| -> Error { e.within(format!("{what:?}")) };
    let expected = files(&store, &publish(&store, what, &|_, _, _| ()).map_err(place).unwrap());
    let mut seen = std::collections::BTreeSet::new();
    for blocks in [1, 3, 1000] {
        let plans = std::sync::Mutex::new(Vec::new());
        let reported = |stage: Stage, _: usize, _: usize| {
            if let Stage::Planned(plan) = stage {
                plans.lock().unwrap().push(plan);
            }
        };
        let published = publish_within(&store, what, on_the_disk(blocks * 64 * dimension), &reported).map_err(place);
        assert_eq!(files(&store, &published.unwrap()), expected, "{what:?}");
        let plans = plans.into_inner().unwrap();
        assert!(plans[0].bucket_bytes.is_some() && plans.len() == 1, "{plans:?}");
        seen.insert(plans[0].passes);
    }
    assert!(seen.len() > 1, "{seen:?}");
    let beside = fs::read_dir(store.root()).unwrap().count();
    assert_eq!(beside, 1, "nothing but the model's folder is left");
}

fn golden(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join("tests/golden").join(name)
}

fn items(folder: &Path, count: usize, dimension: usize) -> PathBuf {
    let number = |n: usize| (n.wrapping_mul(0x9E37_79B9) >> 9 & 0xffff) as f32 / 65536.0 - 0.5;
    let line = |id: usize| {
        let vector: Vec<f32> = (0..dimension).map(|d| number(id % 13 * 100 + d) + 0.3 * number(id * 131 + d)).collect();
        let attributes = serde_json::json!({
            "lang": (["en", "fr", "de", "it"][id * id % 4]),
            "tags": ([format!("t{}", id % 7), format!("t{}", id % 11)]),
            "year": (1990 + id * 7 % 30),
            "price": (if id.is_multiple_of(5) { serde_json::Value::Null } else { (id as f64 * 0.37).into() }),
        });
        serde_json::json!({"id": id * 17 % 100_003, "embedding": vector, "attributes": attributes}).to_string()
    };
    let path = folder.join("items.jsonl");
    fs::write(&path, (0..count).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    path
}

fn matrix(path: &Path, descr: &str, shape: [usize; 2], bytes: &[u8]) {
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}, {}), }}", shape[0], shape[1]);
    text.push_str(&" ".repeat(118 - text.len() - 1));
    let length = (text.len() as u16 + 1).to_le_bytes();
    fs::write(path, [b"\x93NUMPY\x01\x00", &length[..], text.as_bytes(), b"\n", bytes].concat()).unwrap();
}

fn named(items: PathBuf) -> Plan {
    Plan::of_vectors("m", items)
}

#[test]
fn lines_with_filters_and_columns_are_published_alike() {
    let folder = tempfile::tempdir().unwrap();
    for (count, dimension, lists, rescore, shards) in [
        (300, 10, 0, Rescore::F16, None),
        (400, 3, 20, Rescore::F32, None),
        (201, 8, 9, Rescore::Bf16, Some(3)),
        (40, 5, 1, Rescore::None, Some(1)),
    ] {
        let mut what = Plan {
            output: shards.map_or_else(Output::default, Output::shards),
            ..named(items(folder.path(), count, dimension))
        };
        (what.recipe.index.lists, what.recipe.index.rescore) = (lists, rescore);
        check(&what, dimension as u64);
    }
}

#[test]
fn vectors_in_a_separate_file_publish_the_same_version() {
    let folder = tempfile::tempdir().unwrap();
    let (lines, path) = (folder.path().join("ids.jsonl"), folder.path().join("v.npy"));
    let ids: Vec<String> = (0..200).map(|n| format!("{{\"id\": {}}}", 3 * n - 700)).collect();
    fs::write(&lines, ids.join("\n")).unwrap();
    let numbers: Vec<f32> = (0..200 * 6).map(|n: usize| (n * n % 97) as f32 / 16.0 - 3.0).collect();
    let halves: Vec<half::f16> = numbers.iter().map(|n| half::f16::from_f32(*n)).collect();
    let doubles: Vec<f64> = numbers.iter().map(|n| f64::from(*n)).collect();
    let bytes: [(&str, &[u8]); 3] = [
        ("<f4", bytemuck::cast_slice(&numbers)),
        ("<f2", bytemuck::cast_slice(&halves)),
        ("<f8", bytemuck::cast_slice(&doubles)),
    ];
    let beside = |items: &PathBuf| {
        Plan::new(Source::Vectors { name: "m".into(), items: items.clone(), vectors: Some(path.clone()) })
    };
    for (descr, bytes) in bytes {
        matrix(&path, descr, [200, 6], bytes);
        check(&beside(&lines), 6);
    }
    // A number in the last row that half precision cannot represent.
    let mut large = numbers;
    large[200 * 6 - 1] = 1e6;
    matrix(&path, "<f4", [200, 6], bytemuck::cast_slice(&large));
    check(&beside(&lines), 6);
}

#[test]
fn files_of_every_kind_and_towers_are_published_alike() {
    for file in ["lines.jsonl.gz", "pandas-zstd.parquet", "spark"] {
        check(&named(golden("items").join(file)), 1);
    }
    let faiss = Source::Faiss { name: "m".into(), index: golden("faiss/sq8_ip.index"), items: None };
    check(&Plan::new(faiss), 24);
    let mut recipe = Recipe::default();
    recipe.index.rescore = Rescore::F32;
    let package = golden("tiny");
    check(&Plan { recipe, ..Plan::of_package(package) }, 4);
}

#[test]
fn item_side_tensors_on_disk_equal_those_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = items(folder.path(), 5000, 5);
    let mut package = Package::open(&golden("tiny")).unwrap();
    package.item = None;
    (package.spec.dimension, package.spec.item.vectors) = (
        5,
        ["one", "other"]
            .map(|name| VectorSpec {
                name: name.into(),
                width: 5,
                column: Some(sterling_core::items::EMBEDDING.into()),
                format: sterling_embedding::RowFormat::F16,
            })
            .to_vec(),
    );
    let embedded = |spill: Spill| {
        let mut items = sterling_snapshot::items::Items::read_spilling(&path, None, &spill).unwrap();
        embed::embed(Some(&package), &mut items, None, &spill, &|_, _, _| ()).unwrap()
    };
    let (memory, disk) = (embedded(Spill::never()), embedded(Spill::new(0, folder.path())));
    assert!(memory.vectors.in_memory().is_some() && disk.vectors.in_memory().is_none());
    assert_eq!(memory.vectors.all().unwrap(), disk.vectors.all().unwrap());
    assert_eq!((memory.kept.len(), &memory.kept), (5000 * 2 * 10, &disk.kept));
}

#[test]
fn columns_above_the_memory_limit_are_rejected_while_reading() {
    let folder = tempfile::tempdir().unwrap();
    let what = Plan { memory_bytes: Some(100_000), ..named(items(folder.path(), 1000, 4)) };
    let error = publish(&Store::new(folder.path().join("store")), &what, &|_, _, _| ()).unwrap_err();
    assert_eq!(error.kind(), sterling_core::error::Kind::NoSpace);
    assert!(error.to_string().contains("ids and columns need more than"), "{error}");
    // Few items, but still less memory than the program needs.
    let what = Plan { memory_bytes: Some(1 << 20), ..what };
    let error = publish(&Store::new(folder.path().join("store")), &what, &|_, _, _| ()).unwrap_err();
    assert!(error.to_string().contains("memory: 1000 items take at least 0.1"), "{error}");
    assert!(!folder.path().join("store").exists(), "a rejected publication makes nothing");
}
