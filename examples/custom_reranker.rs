//! Retrieves candidates and reranks them in the program: maximal marginal relevance, so that no author dominates the list.
//!
//! A reranker that is a model is an ONNX graph in the package instead (`models/README.md`).
//!
//! `cargo run --example custom_reranker`

#![allow(clippy::print_stdout)]

use std::collections::HashMap;
use std::fmt::Write as _;

use sterling::api::Item;
use sterling::{Publisher, Reading, Retrieve, Retriever, Snapshot, User};

/// Penalty per earlier item of the same author.
const PENALTY: f32 = 0.02;

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let (store, file) = (folder.path().join("store"), folder.path().join("items.jsonl"));
    let mut lines = String::new();
    for id in 0..2_000 {
        let angle = id as f32 / 1_000.0;
        let (embedding, author) = ([angle.cos(), angle.sin()], id / 8 % 5);
        let attributes = serde_json::json!({"author": format!("author {author}")});
        writeln!(lines, "{}", serde_json::json!({"id": id, "embedding": embedding, "attributes": attributes}))?;
    }
    std::fs::write(&file, lines)?;
    Publisher::new(&store).name("articles").items(&file).publish()?;

    let retriever = Retriever::new(&Snapshot::open(&store, "articles")?);
    let request = Retrieve {
        k: 100,
        reading: Reading { columns: vec!["author".into()], ..Reading::default() },
        ..Retrieve::of(User::Vector(vec![1.0, 0.0]))
    };
    let candidates = retriever.retrieve(&request)?.items;
    let best = rerank(candidates.clone(), 10);
    for item in &best {
        println!("{:>4}  {:.4}  {}", item.id, item.score, item.columns["author"]);
    }
    assert!(authors(&candidates[..10]) < authors(&best), "more authors are at the top after reranking");
    Ok(())
}

/// Selects one item after another: the best by its score minus a penalty for each selected item of the same author.
fn rerank(mut candidates: Vec<Item>, count: usize) -> Vec<Item> {
    let mut picked: Vec<Item> = Vec::new();
    let mut of_author: HashMap<String, usize> = HashMap::new();
    while picked.len() < count {
        let value = |item: &Item| {
            let earlier = of_author.get(&item.columns["author"].to_string()).copied().unwrap_or(0);
            item.score - PENALTY * earlier as f32
        };
        let places = 0..candidates.len();
        let Some(best) = places.max_by(|&a, &b| value(&candidates[a]).total_cmp(&value(&candidates[b]))) else { break };
        let item = candidates.swap_remove(best);
        *of_author.entry(item.columns["author"].to_string()).or_default() += 1;
        picked.push(item);
    }
    picked
}

fn authors(items: &[Item]) -> usize {
    let authors: std::collections::HashSet<String> =
        items.iter().map(|item| item.columns["author"].to_string()).collect();
    authors.len()
}
