//! Trains a model package on events, publishes the trained package, and queries it.
//!
//! `cargo run --example train`

#![allow(clippy::print_stdout)]

use std::fmt::Write as _;
use std::path::Path;

use sterling::{Publisher, Retrieve, Retriever, Snapshot, Trainer, User, Values};

/// Training settings that are added to the test package; other packages have them in their `model.toml`.
const TRAIN: &str = "\n[train]\nlabel = \"click\"\nbatch = 16\nuniform = 8\ntemperature = 0.2\n";

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let (package, events) = (folder.path().join("package"), folder.path().join("events.jsonl"));
    std::fs::create_dir(&package)?;
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tiny"))? {
        let path = entry?.path();
        std::fs::copy(&path, package.join(path.file_name().unwrap_or_default()))?;
    }
    let model = std::fs::read_to_string(package.join("model.toml"))? + TRAIN;
    std::fs::write(package.join("model.toml"), model)?;

    // Generates events: a user who has one package clicks on the package with the next number.
    let mut lines = String::new();
    for n in 0..4000 {
        let has = (n * 7 + n / 11) % 11;
        let user = serde_json::json!({"installed": [has], "section": "games", "size": [0.5, 0.25, 0.125]});
        let event = serde_json::json!({"id": n, "user": user, "item": has + 1, "labels": {"click": 1}});
        writeln!(lines, "{event}")?;
    }
    std::fs::write(&events, lines)?;

    let learned = folder.path().join("learned");
    let report = Trainer::new(&package).events(&events).seed(7).train(&learned)?;
    let (now, before) = (report.learned.ndcg.unwrap_or(0.0), report.frozen.ndcg.unwrap_or(0.0));
    println!("{} events: NDCG@10 {now:.3}, and {before:.3} without learning", report.events);
    assert!(now > 1.3 * before, "{report:?}");

    let store = folder.path().join("store");
    let published = Publisher::new(&store).package(&learned).publish()?;
    let snapshot = Snapshot::open(&store, &published.model)?;
    let features = [
        ("installed".to_owned(), Values::Integers(vec![4])),
        ("section".to_owned(), Values::Texts(vec!["games".into()])),
        ("size".to_owned(), Values::Numbers(vec![0.5, 0.25, 0.125])),
    ];
    let request = Retrieve { k: 5, ..Retrieve::of(User::Features(features.into())) };
    let found = Retriever::new(&snapshot).retrieve(&request)?;
    println!("after package 4: {:?}", found.items.iter().map(|item| item.id).collect::<Vec<_>>());
    assert_eq!(found.items.len(), 5);
    Ok(())
}
