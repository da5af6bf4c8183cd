//! Publishes a catalogue of vectors with attributes and retrieves from it in this process.
//!
//! `cargo run --example publish_and_search`

#![allow(clippy::print_stdout)]

use std::fmt::Write as _;

use sterling::{Publisher, Reading, Retrieve, Retriever, Snapshot, User};

const ITEMS: i64 = 5_000;
const DIMENSION: usize = 16;

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let (store, file) = (folder.path().join("store"), folder.path().join("items.jsonl"));
    let mut lines = String::new();
    for id in 0..ITEMS {
        let language = ["de", "en", "fr"][id as usize % 3];
        let attributes = serde_json::json!({"language": language, "year": 2000 + id % 25});
        let item = serde_json::json!({"id": id, "embedding": embedding(id), "attributes": attributes});
        writeln!(lines, "{item}")?;
    }
    std::fs::write(&file, lines)?;

    let published = Publisher::new(&store).name("books").items(&file).publish()?;
    let snapshot = Snapshot::open(&store, &published.model)?;
    println!("{} version {}: {} items", snapshot.model(), snapshot.version(), snapshot.items());

    let request = Retrieve {
        filter: "language:fr AND year >= 2010".into(),
        k: 5,
        reading: Reading { columns: vec!["language".into(), "year".into()], ..Reading::default() },
        ..Retrieve::of(User::Vector(embedding(2_021)))
    };
    let found = Retriever::new(&snapshot).retrieve(&request)?;
    for item in &found.items {
        println!("{:>5}  {:.3}  {} {}", item.id, item.score, item.columns["language"], item.columns["year"]);
        assert_eq!(item.columns["language"], "fr");
    }
    assert_eq!(found.items[0].id, 2_021, "an item is nearest to its own vector");
    Ok(())
}

/// Returns a unit vector that depends on the id alone.
fn embedding(id: i64) -> Vec<f32> {
    let numbers: Vec<f32> = (0..DIMENSION).map(|n| ((id + 1) as f32 * (0.37 + 0.113 * n as f32)).sin()).collect();
    let length = numbers.iter().map(|x| x * x).sum::<f32>().sqrt();
    numbers.iter().map(|x| x / length).collect()
}
