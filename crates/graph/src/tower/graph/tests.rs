//! Compares towers with onnxruntime, and checks that invalid graphs are rejected.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::dense::tests::{Case, Named};

/// Loads a file of the tiny package that `python/make_test_graphs.py` writes.
fn tiny(file: &str) -> Vec<u8> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tiny/");
    std::fs::read(format!("{path}{file}")).unwrap_or_else(|e| panic!("{file}: {e}"))
}

fn graph(name: &str) -> Graph {
    Graph::load(name, tiny(&format!("{name}.onnx"))).unwrap()
}

fn inputs(named: &[Named]) -> Vec<Input<'_>> {
    named.iter().map(|n| Input { name: &n.name, shape: &n.shape, values: &n.values }).collect()
}

fn refused<T: std::fmt::Debug>(result: Result<T>, expected: &str) {
    let error = result.expect_err(expected).to_string();
    assert!(error.contains(expected), "got `{error}`, expected `{expected}`");
}

#[test]
fn graphs_answer_as_onnxruntime_does() {
    let cases = Case::all();
    for case in &cases {
        let made = graph(&case.graph).run(&inputs(&case.inputs), &case.output.name, &Threads::new(1)).unwrap();
        assert_eq!(made.shape(), case.output.shape, "{}", case.graph);
        for (got, want) in made.data().iter().zip(&case.output.values) {
            assert!((got - want).abs() <= 1e-5 * want.abs().max(1.0), "{}: {got} is not {want}", case.graph);
        }
    }
    assert_eq!(cases.len(), 4);
}

#[test]
fn a_graph_reports_its_inputs_and_outputs() {
    let users = graph("users");
    let names: Vec<&str> = users.inputs().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["installed", "section"]);
    assert_eq!(shown(users.input("installed").unwrap().shape.as_ref().unwrap()), "[?, 4]");
    assert_eq!(users.output("query").unwrap().shape, Some(vec![None, Some(2), Some(4)]));
    refused(users.input("query"), "users: no input `query`, expected one of: installed, section");
    refused(users.output("item"), "users: no output `item`, expected one of: query");
}

#[test]
fn no_rows_give_no_rows() {
    let made = graph("item")
        .run(
            &[
                Input { name: "package", shape: &[0, 4], values: &[] },
                Input { name: "section", shape: &[0, 2], values: &[] },
            ],
            "item",
            &Threads::new(1),
        )
        .unwrap();
    assert_eq!(made.shape(), [0, 4]);
}

#[test]
fn invalid_files_are_rejected_at_load() {
    refused(Graph::load("a.onnx", Vec::new()), "a.onnx: ");
    refused(Graph::load("a.onnx", b"no graph".to_vec()), "a.onnx: not a usable ONNX graph");
    refused(graph("wrong_operator").runtime().map(drop), "Frobnicate");
    refused(
        Graph::load("wrong", tiny("wrong_type.onnx")),
        "wrong: output: `query` is tensor(int64), expected tensor(float)",
    );
    let whole = tiny("user.onnx");
    for length in 0..whole.len() {
        let _ = Graph::load("user.onnx", whole[..length].to_vec());
    }
}

#[test]
fn invalid_inputs_are_rejected_with_their_shape() {
    let item = graph("item");
    let package = Input { name: "package", shape: &[2, 4], values: &[0.5; 8] };
    let section = Input { name: "section", shape: &[2, 2], values: &[0.5; 4] };
    assert!(item.run(&[section, package], "item", &Threads::new(1)).is_ok());
    refused(item.run(&[package], "item", &Threads::new(1)), "item: input `section` is missing");
    refused(
        item.run(&[package, section, Input { name: "size", ..section }], "item", &Threads::new(1)),
        "no input `size`",
    );
    refused(item.run(&[package, section], "query", &Threads::new(1)), "no output `query`");
    refused(
        item.run(&[package, Input { name: "section", shape: &[1, 4], values: &[0.5; 4] }], "item", &Threads::new(1)),
        "item: input `section` has shape [1, 4], expected [?, 2]",
    );
    refused(
        item.run(&[package, Input { name: "section", shape: &[4], values: &[0.5; 4] }], "item", &Threads::new(1)),
        "has shape [4], expected [?, 2]",
    );
    refused(
        item.run(&[package, Input { name: "section", shape: &[2, 2], values: &[0.5; 3] }], "item", &Threads::new(1)),
        "shape [2, 2] does not hold 3 numbers",
    );
    refused(item.run(&[package, package, section], "item", &Threads::new(1)), "item: input `package` is given twice");
    // The two inputs differ in rows, which is only detected at run time.
    refused(
        item.run(&[package, Input { name: "section", shape: &[3, 2], values: &[0.5; 6] }], "item", &Threads::new(1)),
        "item: the graph failed",
    );
}

#[test]
fn a_graph_that_cannot_run_reports_why() {
    let rows = graph("wrong_rows");
    assert!(rows.run(&[Input { name: "size", shape: &[3, 3], values: &[1.0; 9] }], "query", &Threads::new(1)).is_ok());
    refused(
        rows.run(&[Input { name: "size", shape: &[2, 3], values: &[1.0; 6] }], "query", &Threads::new(1)),
        "the graph failed",
    );
}

#[test]
fn a_flipped_byte_never_panics() {
    let cases = Case::all();
    let threads = Threads::new(1);
    for case in cases.iter().filter(|c| ["user", "overarch"].contains(&c.graph.as_str())) {
        let whole = tiny(&format!("{}.onnx", case.graph));
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            if let Ok(graph) = Graph::load("flipped", bytes) {
                let _ = graph.run(&inputs(&case.inputs), &case.output.name, &threads);
            }
        }
    }
}
