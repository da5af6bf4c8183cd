//! Softmax, layer normalization and biases that are fused, against the same graph without fusion and its evaluation.

use super::*;
use crate::dense::steps::Work;

/// How often each kind of step occurs among the row steps: softmax, normalization, others.
fn kinds(program: &RowProgram) -> [usize; 3] {
    let mut kinds = [0; 3];
    for step in &program.straight.rows {
        kinds[match step.work {
            Work::Softmax { .. } => 0,
            Work::Normalize(_) => 1,
            _ => 2,
        }] += 1;
    }
    kinds
}

/// Returns the graph of `[1, runs, width]` numbers per row.
fn of_runs(runs: usize, width: usize) -> (Graph, Id) {
    let given = GraphInput { side: Side::Pair, shape: vec![1, runs, width], rows: Some(0) };
    let mut graph = Graph::new(vec![given]);
    let x = graph.input(0).unwrap();
    (graph, x)
}

/// Checks all rows of a program against its unfused twin, bit for bit, and against the evaluation of the graph.
fn check(graph: &Graph, program: &RowProgram, numbers_per_row: usize) {
    let row = |n: usize| numbers(numbers_per_row, n);
    let plan = plan::plan(&collapse::collapse(graph, false).unwrap(), Precision::F32, false).unwrap();
    for kernels in Kernels::all() {
        let fused = RowProgram { kernels, collapsed: program.straight.clone(), ..program.clone() };
        let unfused = RowProgram { straight: plan.clone(), collapsed: plan.clone(), ..fused.clone() };
        let made = run(&fused, 5, &[], &row);
        assert_eq!(made, run(&unfused, 5, &[], &row), "{}", kernels.name());
        for (n, made) in made.iter().enumerate() {
            near(made, &interpret::row(&graph.values, graph.outputs[0], &[&row(n)]), kernels.name());
            assert_eq!(&run(&fused, 1, &[], &|_| row(n))[0], made, "{} alone", kernels.name());
        }
    }
}

fn mean(graph: &mut Graph, x: Id) -> Id {
    let width = *graph.shape(x).last().unwrap();
    let sum = graph.fold(Fold::Sum, x, &[2]).unwrap();
    // A factor is fused if its reciprocal is exact.
    let (f, by) = if width == 64 { (Binary::Mul, 1.0 / 64.0) } else { (Binary::Div, width as f32) };
    let by = graph.number(vec![], vec![by]).unwrap();
    graph.binary(f, sum, by).unwrap()
}

/// Builds a layer normalization; returns the centred numbers and the result.
fn layer(graph: &mut Graph, x: Id, is_twice: bool) -> (Id, Id) {
    let mut y = x;
    for _ in 0..1 + usize::from(is_twice) {
        let mean = mean(graph, y);
        y = graph.binary(Binary::Sub, y, mean).unwrap();
    }
    let squares = graph.binary(Binary::Mul, y, y).unwrap();
    let variance = mean(graph, squares);
    let epsilon = graph.number(vec![], vec![1e-5]).unwrap();
    let shifted = graph.binary(Binary::Add, variance, epsilon).unwrap();
    let deviation = graph.unary(Unary::Sqrt, shifted).unwrap();
    (y, graph.binary(Binary::Div, y, deviation).unwrap())
}

#[test]
fn layer_normalization_is_one_step() {
    for (n, (width, is_twice)) in [(64, true), (37, false), (16, true), (100, false)].into_iter().enumerate() {
        let (mut graph, x) = of_runs(7, width);
        let (_, mut made) = layer(&mut graph, x, is_twice);
        if n != 1 {
            let scale = graph.number(vec![width], numbers(width, 3)).unwrap();
            made = graph.binary(Binary::Mul, made, scale).unwrap();
        }
        if n != 2 {
            let bias = graph.number(vec![width], numbers(width, 4)).unwrap();
            made = graph.binary(Binary::Add, made, bias).unwrap();
        }
        graph.outputs = vec![if n == 0 { graph.unary(Unary::Relu, made).unwrap() } else { made }];
        let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
        assert_eq!(kinds(&program), [0, 1, 0], "{program}");
        check(&graph, &program, 7 * width);
    }
}

#[test]
fn softmax_is_one_step() {
    for width in [3, 16, 50, 200] {
        let (mut graph, x) = of_runs(25, width);
        let most = graph.fold(Fold::Max, x, &[2]).unwrap();
        let less = graph.binary(Binary::Sub, x, most).unwrap();
        let each = graph.unary(Unary::Exp, less).unwrap();
        let sum = graph.fold(Fold::Sum, each, &[2]).unwrap();
        graph.outputs = vec![graph.binary(Binary::Div, each, sum).unwrap()];
        let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
        assert_eq!(kinds(&program), [1, 0, 0], "{program}");
        check(&graph, &program, 25 * width);
        #[cfg(feature = "cuda")]
        DeviceProgram::check(&program).unwrap();
    }
}

/// An intermediate value that something else reads is computed.
#[test]
fn normalization_with_other_readers_is_not_fused() {
    let (mut graph, x) = of_runs(5, 32);
    let (centred, made) = layer(&mut graph, x, false);
    graph.outputs = vec![graph.binary(Binary::Max, made, centred).unwrap()];
    let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
    assert_eq!(kinds(&program)[..2], [0, 0], "{program}");
    check(&graph, &program, 5 * 32);
}

/// A vector added to a product of many rows, and the `Relu` of the sum, take no step.
#[test]
fn added_vectors_are_biases_of_products() {
    let (mut graph, x) = of_runs(9, 20);
    let weights = graph.number(vec![20, 33], numbers(20 * 33, 2)).unwrap();
    let product = graph.matmul(x, weights).unwrap();
    let bias = graph.number(vec![33], numbers(33, 5)).unwrap();
    let sum = graph.binary(Binary::Add, bias, product).unwrap();
    graph.outputs = vec![graph.unary(Unary::Relu, sum).unwrap()];
    let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
    assert_eq!(program.straight.rows.len(), 1, "{program}");
    check(&graph, &program, 9 * 20);
    // The sum is an output, too.
    graph.outputs.push(sum);
    let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
    assert_eq!(program.straight.rows.len(), 2, "{program}");
}

/// A vector of the user that is repeated for all rows is multiplied once per request, even if another step reads it per row.
#[test]
fn repeated_vectors_are_multiplied_once() {
    let mut graph = Graph::new(vec![input(Side::User, 24), input(Side::Pair, 24)]);
    let [query, item] = [0, 1].map(|n| graph.input(n).unwrap());
    let repeated = graph.pick(query, (0..24).collect(), vec![1, 1, 24], Some(1)).unwrap();
    let both = graph.concat(2, &[repeated, item]).unwrap();
    let crossed = graph.binary(Binary::Mul, both, both).unwrap();
    let weights = graph.number(vec![48, 40], numbers(48 * 40, 1)).unwrap();
    let layer = graph.matmul(both, weights).unwrap();
    let layer = graph.unary(Unary::Relu, layer).unwrap();
    graph.outputs = vec![graph.concat(2, &[crossed, layer]).unwrap()];
    let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
    let depths = |step: &steps::Step| match &step.work {
        Work::Product { parts, .. } => parts.iter().map(|part| part.depth).sum(),
        _ => 0,
    };
    assert_eq!(program.straight.rows.iter().map(depths).sum::<usize>(), 24, "{program}");
    let query = numbers(24, 9);
    let row = |n: usize| numbers(24, n);
    for (n, made) in run(&program, 5, &[&query], &row).iter().enumerate() {
        near(made, &interpret::row(&graph.values, graph.outputs[0], &[&query, &row(n)]), "a row");
    }
}

/// Products of a layer after a `Relu` skip zeros, unless a weight is infinite: a zero times infinity is NaN.
#[test]
fn layers_after_a_relu_skip_zeros() {
    for is_finite in [true, false] {
        let (mut graph, x) = of_runs(1, 64);
        let mut last = numbers(128 * 96, 2);
        last[500] = if is_finite { 0.5 } else { f32::INFINITY };
        let first = graph.number(vec![64, 128], numbers(64 * 128, 1)).unwrap();
        let last = graph.number(vec![128, 96], last).unwrap();
        let layer = graph.matmul(x, first).unwrap();
        let layer = graph.unary(Unary::Relu, layer).unwrap();
        graph.outputs = vec![graph.matmul(layer, last).unwrap()];
        let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
        let skips = |step: &steps::Step| matches!(step.work, Work::Product { skips_zeros: true, .. });
        assert_eq!(program.straight.rows.iter().map(skips).collect::<Vec<bool>>(), [false, is_finite], "{program}");
        let row = |n: usize| numbers(64, n);
        for kernels in Kernels::all() {
            let program = RowProgram { kernels, ..program.clone() };
            for (n, made) in run(&program, 60, &[], &row).iter().enumerate() {
                let alone = run(&program, 1, &[], &|_| row(n));
                let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
                assert_eq!(bits(&alone[0]), bits(made), "{} alone", kernels.name());
                if is_finite {
                    near(made, &interpret::row(&graph.values, graph.outputs[0], &[&row(n)]), kernels.name());
                }
            }
        }
    }
}

/// Inputs of a row are adjacent, so that a concatenation of several is read in place, if each contributes one run.
#[test]
fn adjacent_inputs_are_concatenated_in_place() {
    for (axis, order, steps) in [(1, [0, 1], 1), (1, [1, 0], 2), (2, [0, 1], 2)] {
        let given = GraphInput { side: Side::Pair, shape: vec![1, 3, 8], rows: Some(0) };
        let mut graph = Graph::new(vec![given.clone(), given]);
        let parts = order.map(|n| graph.input(n).unwrap());
        let both = graph.concat(axis, &parts).unwrap();
        let depth = graph.shape(both)[2];
        let weights = graph.number(vec![depth, 5], numbers(depth * 5, 1)).unwrap();
        graph.outputs = vec![graph.matmul(both, weights).unwrap()];
        let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
        assert_eq!(program.straight.rows.len(), steps, "{program}");
        let row = |n: usize| numbers(48, n);
        for (n, made) in run(&program, 20, &[], &row).iter().enumerate() {
            let row = row(n);
            near(made, &interpret::row(&graph.values, graph.outputs[0], &[&row[..24], &row[24..]]), "a row");
        }
    }
}
