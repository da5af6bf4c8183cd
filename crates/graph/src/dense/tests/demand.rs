//! Parts of values that are read: selected steps of sequences, by a constant index and by an index of the row.

use super::super::demand::narrowed;
use super::super::ir::Op;
use super::*;

const STEPS: usize = 5;
const WIDTH: usize = 4;

/// Returns a graph of a sequence `[1, STEPS, width]` and an index `[1, 1, 1]`, with their values.
fn sequence(width: usize) -> (Graph, Id, Id) {
    let row = |shape: Vec<usize>| GraphInput { side: Side::Pair, shape, rows: Some(0) };
    let mut graph = Graph::new(vec![row(vec![1, STEPS, width]), row(vec![1, 1, 1])]);
    let (x, index) = (graph.input(0).unwrap(), graph.input(1).unwrap());
    (graph, x, index)
}

fn layer(graph: &mut Graph, x: Id) -> Id {
    let depth = graph.shape(x)[2];
    let weights = graph.number(vec![depth, WIDTH], numbers(depth * WIDTH, 3)).unwrap();
    let made = graph.matmul(x, weights).unwrap();
    graph.unary(Unary::Relu, made).unwrap()
}

/// Returns the sum of the steps whose number among `all` equals one of the index.
fn steps_at(graph: &mut Graph, x: Id, index: Id, all: [f32; STEPS]) -> Id {
    let all = graph.number(vec![1, STEPS, 1], all.to_vec()).unwrap();
    let hot = graph.binary(Binary::Equal, all, index).unwrap();
    let kept = graph.binary(Binary::Keep, hot, x).unwrap();
    let ones = graph.number(vec![1, STEPS], vec![1.0; STEPS]).unwrap();
    graph.matmul(ones, kept).unwrap()
}

const COUNT: [f32; STEPS] = [0.0, 1.0, 2.0, 3.0, 4.0];

/// Returns the step that the row selects.
fn step_of_row(graph: &mut Graph, x: Id, index: Id) -> Id {
    steps_at(graph, x, index, COUNT)
}

/// Returns step 3.
fn step_of_file(graph: &mut Graph, x: Id, _: Id) -> Id {
    let width = graph.shape(x)[2];
    let index = (3 * width..4 * width).map(|n| n as u32).collect();
    graph.pick(x, index, vec![1, 1, width], Some(0)).unwrap()
}

fn check(graph: &Graph) {
    let count = graph.inputs[0].shape.iter().product::<usize>();
    let row = |n: usize| [numbers(count, n), vec![n as f32 - 1.0]].concat();
    let both = RowProgram::of(graph, Precision::F32, Kernels::best()).unwrap();
    for plan in [&both.straight, &both.collapsed] {
        let program = RowProgram { straight: plan.clone(), collapsed: plan.clone(), ..both.clone() };
        // The first and the last index name no step.
        for (n, got) in run(&program, STEPS + 2, &[], &row).iter().enumerate() {
            let row = row(n);
            let inputs: [&[f32]; 2] = [&row[..count], &row[count..]];
            let want: Vec<f32> =
                graph.outputs.iter().flat_map(|&output| interpret::row(&graph.values, output, &inputs)).collect();
            near(got, &want, &format!("row {n}"));
        }
    }
}

/// A product of a value with itself needs one row of the left operand, and all of the right one.
#[test]
fn operands_of_different_parts_may_be_the_same_value() {
    for select in [step_of_file, step_of_row] {
        let (mut graph, x, index) = sequence(STEPS);
        let twice = graph.matmul(x, x).unwrap();
        let made = layer(&mut graph, twice);
        graph.outputs = vec![select(&mut graph, made, index)];
        assert!(narrowed(&graph).unwrap().is_some());
        check(&graph);
    }
}

/// The steps lie between other axes, and a constant has all of them.
#[test]
fn steps_of_constants_are_selected_along_any_axis() {
    for select in [step_of_file, step_of_row] {
        let (mut graph, x, index) = sequence(WIDTH);
        let turned = graph.transpose(x, &[2, 1, 0]).unwrap();
        let bias = graph.number(vec![WIDTH, STEPS, 1], numbers(WIDTH * STEPS, 7)).unwrap();
        let sum = graph.binary(Binary::Add, turned, bias).unwrap();
        let back = graph.transpose(sum, &[2, 1, 0]).unwrap();
        let made = graph.unary(Unary::Relu, back).unwrap();
        graph.outputs = vec![select(&mut graph, made, index)];
        assert!(narrowed(&graph).unwrap().is_some());
        check(&graph);
    }
}

#[test]
fn several_steps_are_not_selected_before_layers() {
    let (mut graph, x, index) = sequence(WIDTH);
    let made = layer(&mut graph, x);
    // Two steps have the same number.
    graph.outputs = vec![steps_at(&mut graph, made, index, [0.0, 1.0, 1.0, 2.0, 3.0])];
    check(&graph);
    // Each step has an index of its own.
    let (mut graph, x, _) = sequence(WIDTH);
    let made = layer(&mut graph, x);
    let each = graph.pick(x, (0..STEPS).map(|n| (n * WIDTH) as u32).collect(), vec![1, STEPS, 1], Some(0)).unwrap();
    let own = graph.unary(Unary::Trunc, each).unwrap();
    graph.outputs = vec![steps_at(&mut graph, made, own, [0.0; STEPS])];
    check(&graph);
    let (mut graph, x, _) = sequence(WIDTH);
    let made = layer(&mut graph, x);
    let each = graph.pick(x, (0..STEPS).map(|n| (n * WIDTH) as u32).collect(), vec![1, STEPS, 1], Some(0)).unwrap();
    let same = graph.binary(Binary::Sub, each, each).unwrap();
    let all = graph.number(vec![1, STEPS, 1], COUNT.to_vec()).unwrap();
    let own = graph.binary(Binary::Add, same, all).unwrap();
    graph.outputs = vec![steps_at(&mut graph, made, own, COUNT)];
    check(&graph);
}

/// A step selected from a completely computed value is already zeros if the index names no step.
#[test]
fn steps_of_complete_values_are_selected_as_in_the_file() {
    let (mut graph, x, index) = sequence(WIDTH);
    let made = layer(&mut graph, x);
    graph.outputs = vec![step_of_row(&mut graph, x, index), step_of_row(&mut graph, made, index)];
    check(&graph);
    let narrow = narrowed(&graph).unwrap().unwrap();
    let folds = narrow.values.iter().filter(|value| matches!(value.op, Op::Fold(..))).count();
    assert_eq!(folds, 1, "of the layer's step");
}

#[test]
fn operands_that_do_not_fit_their_result_are_rejected() {
    let (mut graph, x, index) = sequence(WIDTH);
    let deep = graph.reshape(index, vec![1, 1, 1, 1], Some(0)).unwrap();
    let ops = [
        (Op::Binary(Binary::Add, x, deep), vec![1, STEPS, WIDTH]),
        (Op::Binary(Binary::Add, x, index), vec![1, 1, WIDTH]),
        (Op::MatMul(deep, x), vec![1, STEPS, WIDTH]),
        (Op::MatMul(x, x), vec![1, STEPS, WIDTH]),
        (Op::Unary(Unary::Relu, x), vec![1, 1, WIDTH]),
        (Op::Fold(Fold::Sum, x), vec![1, 1, 1]),
        (Op::Pick(x, [0, 1].into()), vec![1, 1, 1]),
        (Op::Reshape(x), vec![1, 1, WIDTH]),
    ];
    for (op, shape) in ops {
        let text = format!("{op:?}");
        let error = graph.add(op, shape, Some(0)).unwrap_err();
        assert_eq!(error.kind(), sterling_core::error::Kind::Internal, "{text}: {error}");
    }
}
