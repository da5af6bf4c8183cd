//! OverArch against onnxruntime, and graphs that must be refused.

#![allow(clippy::unwrap_used)]

use super::*;

/// A graph of the tiny package that `python/make_test_graphs.py` writes.
fn graph(name: &str) -> Graph {
    let path = format!("{}/tests/golden/tiny/{name}.onnx", env!("CARGO_MANIFEST_DIR"));
    Graph::load(name, std::fs::read(path).unwrap()).unwrap()
}

fn refused<T: std::fmt::Debug>(result: Result<T>, expected: &str) {
    let error = result.expect_err(expected).to_string();
    assert!(error.contains(expected), "got `{error}`, expected `{expected}`");
}

#[test]
fn scores_are_the_sigmoids_of_the_graph_whatever_the_number_of_candidates() {
    let (d, tasks) = (4, 2);
    let overarch = OverArch::new(graph("overarch"), d, tasks).unwrap();
    assert_eq!((overarch.columns(), overarch.tasks()), (&["popularity".to_string()][..], 2));
    let (raw, threads) = (graph("overarch"), Threads::new(1));
    let at = |n: usize| ((n * 37 + 11) % 101) as f32 / 50.0 - 1.0;
    let query: Vec<f32> = (0..d).map(|n| at(n + 5)).collect();
    for count in [0, 1, 3, RUN_CANDIDATES - 1, RUN_CANDIDATES] {
        let items: Vec<f32> = (0..count * d).map(at).collect();
        let popularity: Vec<f32> = (0..count).map(|n| at(n * 3)).collect();
        let columns = [&popularity[..]];
        let run = Candidates { query: &query, items: &items, columns: &columns };
        let scores = overarch.score(&run, &threads).unwrap();
        assert_eq!(scores.shape(), [count, tasks]);
        for n in (0..count).step_by(53).chain(count.checked_sub(1)) {
            let inputs = [
                Input { name: "query", shape: &[1, d], values: &query },
                Input { name: "item", shape: &[1, 1, d], values: &items[n * d..(n + 1) * d] },
                Input { name: "popularity", shape: &[1, 1], values: &popularity[n..=n] },
            ];
            let logits = raw.run(&inputs, "logits", &threads).unwrap();
            for task in 0..tasks {
                let want = 1.0 / (1.0 + (-logits.data()[task]).exp());
                let got = scores.data()[n * tasks + task];
                assert!((got - want).abs() < 1e-5, "{count} candidates, {n}, task {task}: {got} is not {want}");
            }
        }
    }
}

#[test]
fn a_graph_of_another_shape_is_refused() {
    refused(OverArch::new(graph("user"), 4, 2), "user: no input `query`; it has: installed, section, size");
    refused(
        OverArch::new(graph("overarch"), 8, 2),
        "overarch: `query` has shape [?, 4], expected 2 dimensions, the last of size 8",
    );
    refused(
        OverArch::new(graph("overarch"), 4, 3),
        "overarch: `logits` has shape [?, ?, 2], expected 3 dimensions, the last of size 3",
    );
}

#[test]
fn a_missing_column_is_named() {
    let overarch = OverArch::new(graph("overarch"), 4, 2).unwrap();
    let candidates = Candidates { query: &[0.0; 4], items: &[0.0; 8], columns: &[] };
    refused(overarch.score(&candidates, &Threads::new(1)), "overarch: input `popularity` is missing");
}
