//! Compares rerankers with onnxruntime, and checks that invalid graphs are rejected.

#![allow(clippy::unwrap_used)]

use super::*;

/// Loads a graph of the tiny package that `python/make_test_graphs.py` writes.
fn graph(name: &str) -> Graph {
    let path = format!("{}/tests/golden/tiny/{name}.onnx", concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    Graph::load(name, std::fs::read(path).unwrap()).unwrap()
}

/// Inputs that every package offers to its reranker.
fn readable(d: usize) -> Vec<Readable> {
    let of = |name: &str, whose| Readable { name: name.into(), whose, shape: vec![d] };
    vec![of("query", TensorOwner::User), of("item", TensorOwner::Candidate)]
}

fn refused<T: std::fmt::Debug>(result: Result<T>, expected: &str) {
    let error = result.expect_err(expected).to_string();
    assert!(error.contains(expected), "got `{error}`, expected `{expected}`");
}

#[test]
fn scores_are_sigmoids_of_the_logits_for_any_number_of_candidates() {
    let (d, tasks) = (4, 2);
    let overarch = OverArch::new(graph("overarch"), &readable(d), tasks).unwrap();
    assert_eq!((overarch.declared().columns().collect::<Vec<_>>(), overarch.tasks()), (vec!["popularity"], 2));
    let (raw, threads) = (graph("overarch"), Threads::new(1));
    let at = |n: usize| ((n * 37 + 11) % 101) as f32 / 50.0 - 1.0;
    let query: Vec<f32> = (0..d).map(|n| at(n + 5)).collect();
    assert!(matches!(overarch.graph(), ("overarch", Runs::Program(_))));
    // The same graph, run by `rten`.
    let runs = Runs::Runtime("to compare".into());
    let whole = OverArch::new(graph("overarch"), &readable(d), tasks).unwrap();
    let by_rten = OverArch { runs, graph: graph("overarch"), ..whole };
    let mut scratch = Scratch::default();
    for (overarch, count) in
        [0, 1, 3, 57, RUN_CANDIDATES - 1, RUN_CANDIDATES + 1].into_iter().flat_map(|n| [(&overarch, n), (&by_rten, n)])
    {
        let items: Vec<f32> = (0..count * d).map(at).collect();
        let popularity: Vec<f32> = (0..count).map(|n| at(n * 3)).collect();
        let columns = [&popularity[..]];
        let row = |n: usize, row: &mut [f32]| row.copy_from_slice(&items[n * d..(n + 1) * d]);
        let rows = |given: InputRows<'_>| given.each(row);
        let run = Candidates { user: &[&query], count, rows: &rows, numbers: &columns };
        let mut scores = vec![0.0; tasks * count];
        overarch.score(&run, &threads, &mut scratch, &mut || Ok(()), &mut scores).unwrap();
        for n in (0..count).step_by(53).chain(count.checked_sub(1)) {
            let inputs = [
                Input { name: "query", shape: &[1, d], values: &query },
                Input { name: "item", shape: &[1, 1, d], values: &items[n * d..(n + 1) * d] },
                Input { name: "popularity", shape: &[1, 1], values: &popularity[n..=n] },
            ];
            let logits = raw.run(&inputs, "logits", &threads).unwrap();
            for task in 0..tasks {
                let want = 1.0 / (1.0 + (-logits.data()[task]).exp());
                let got = scores[task * count + n];
                assert!((got - want).abs() < 1e-5, "{count} candidates, {n}, task {task}: {got} is not {want}");
            }
        }
    }
}

#[test]
fn blocks_of_wide_rows_have_few_rows() {
    for (width, candidates) in [(0, RUN_CANDIDATES), (64, RUN_CANDIDATES), (1 << 20, 16), (1 << 25, 1)] {
        assert_eq!(run_of(width), candidates, "{width}");
    }
}

#[test]
fn a_graph_of_another_shape_is_rejected() {
    refused(OverArch::new(graph("user"), &readable(4), 2), "user: no output `logits`, expected one of: query");
    refused(OverArch::new(graph("overarch"), &readable(8), 2), "overarch: `query` has shape [?, 4], expected [?, 8]");
    refused(
        OverArch::new(graph("overarch"), &readable(4), 3),
        "overarch: `logits` has shape [?, ?, 2], expected [?, ?, 3]",
    );
}

#[test]
fn a_missing_column_is_named() {
    let overarch = OverArch::new(graph("overarch"), &readable(4), 2).unwrap();
    let rows = |given: InputRows<'_>| given.each(|_, row| row.fill(0.0));
    let candidates = Candidates { user: &[&[0.0; 4]], count: 2, rows: &rows, numbers: &[] };
    let mut scratch = Scratch::default();
    let scored = overarch.score(&candidates, &Threads::new(1), &mut scratch, &mut || Ok(()), &mut [0.0; 4]);
    refused(scored, "overarch: input `popularity` is missing");
}

#[test]
fn nan_scores_are_reported_and_an_error_between_blocks_ends_the_run() {
    let overarch = OverArch::new(graph("overarch"), &readable(4), 2).unwrap();
    let (threads, mut scratch) = (Threads::new(1), Scratch::default());
    let columns = [&[0.5; 200][..]];
    let mut scores = vec![0.0; 400];
    let spoilt = |n: usize, row: &mut [f32]| row.fill(if n == 130 { f32::NAN } else { 0.5 });
    let spoilt = |given: InputRows<'_>| given.each(spoilt);
    let candidates = Candidates { user: &[&[0.5; 4]], count: 200, rows: &spoilt, numbers: &columns };
    assert!(!overarch.score(&candidates, &threads, &mut scratch, &mut || Ok(()), &mut scores).unwrap());
    let nan: Vec<usize> = (0..400).filter(|&n| scores[n].is_nan()).collect();
    assert_eq!(nan, [130, 330], "the scores of one candidate");
    let whole = |given: InputRows<'_>| given.each(|_, row| row.fill(0.5));
    let candidates = Candidates { rows: &whole, ..candidates };
    let mut left = 2;
    let mut between = || {
        left -= 1;
        if left > 0 { Ok(()) } else { Err(Error::deadline("too late")) }
    };
    refused(overarch.score(&candidates, &threads, &mut scratch, &mut between, &mut scores), "too late");
    assert_eq!(left, 0);
    assert!(overarch.score(&candidates, &threads, &mut scratch, &mut || Ok(()), &mut scores).unwrap());
    assert!(scores.iter().all(|score| (0.0..=1.0).contains(score)));
}
