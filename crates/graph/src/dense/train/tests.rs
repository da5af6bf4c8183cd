//! Gradients compared with central differences, compiled passes with the f64 evaluation of their graphs, and the order of sums.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::dense::interpret;
use crate::dense::ir::{Id, Op};
use sterling_kernels::cpu::dense::{Binary, Fold, Unary};
use sterling_kernels::threads::Threads;

mod file;
mod golden;
mod random;

use random::{Random, graph};

/// Rows of a batch that is compared with differences.
const ROWS: usize = 3;
/// Step of the central differences.
const STEP: f64 = 1e-5;

fn number(n: usize) -> f64 {
    ((n * 7919 + 13) % 1009) as f64 / 504.5 - 1.0
}

fn numbers(count: usize, seed: usize) -> Vec<f64> {
    (0..count).map(|n| number(n * 31 + seed * 101)).collect()
}

/// Numbers that a graph is run with: per shared input, per input of each row, and the loss weight of each output of each row.
#[derive(Clone)]
struct Case {
    shared: Vec<Vec<f64>>,
    rows: Vec<Vec<Vec<f64>>>,
    worth: Vec<Vec<Vec<f64>>>,
}

impl Case {
    fn new(graph: &Graph, rows: usize) -> Case {
        let of = |side: Side, seed: usize| -> Vec<Vec<f64>> {
            let own = graph.inputs.iter().enumerate().filter(|(_, input)| input.side == side);
            own.map(|(n, input)| numbers(input.shape.iter().product(), seed * 17 + n)).collect()
        };
        let worth = |row: usize| {
            let outputs = graph.outputs.iter().enumerate();
            outputs.map(|(n, &output)| numbers(graph.values[output].count(), 7 * row + n)).collect()
        };
        // Rounds all numbers to f32, so that the passes run with the same ones.
        let mut case = Case {
            shared: of(Side::User, 1),
            rows: (0..rows).map(|row| of(Side::Pair, row + 2)).collect(),
            worth: (0..rows).map(worth).collect(),
        };
        let all = case.rows.iter_mut().flatten().chain(case.worth.iter_mut().flatten()).chain(&mut case.shared);
        all.flatten().for_each(|x| *x = f64::from(*x as f32));
        case
    }

    /// Returns the inputs of a row in the graph's order.
    fn inputs<'a>(&'a self, graph: &Graph, row: usize) -> Vec<&'a [f64]> {
        let (mut shared, mut rows) = (self.shared.iter(), self.rows[row].iter());
        let next = |input: &GraphInput| if input.side == Side::Pair { rows.next() } else { shared.next() };
        graph.inputs.iter().map(next).map(|numbers| &numbers.unwrap()[..]).collect()
    }

    /// Returns the weighted sum of a row's outputs, and the distance to each jump and kink of the graph.
    fn weighted_outputs(&self, graph: &Graph, row: usize) -> (f64, Vec<f64>) {
        let all = interpret::all(&graph.values, &self.inputs(graph, row));
        let outputs = graph.outputs.iter().zip(&self.worth[row]);
        let worth = outputs.flat_map(|(&output, worth)| all[output].iter().zip(worth)).map(|(x, w)| x * w).sum();
        let mut distances = Vec::new();
        for value in &graph.values {
            match value.op {
                Op::Unary(Unary::Relu | Unary::Abs, a) => distances.extend(&all[a]),
                Op::Binary(Binary::Max | Binary::Min | Binary::Less | Binary::LessOrEqual | Binary::Equal, a, b) => {
                    let strides = |id: Id| {
                        let strides = crate::dense::ir::broadcast_strides(graph.shape(id), &value.shape);
                        crate::dense::ir::positions(&value.shape, &strides)
                    };
                    let both = strides(a).into_iter().zip(strides(b));
                    distances.extend(both.map(|(a_at, b_at)| all[a][a_at as usize] - all[b][b_at as usize]));
                }
                Op::Fold(Fold::Max | Fold::Min, a) => {
                    let count = all[a].len() / value.count();
                    let made = &all[graph.values.iter().position(|v| std::ptr::eq(v, value)).unwrap()];
                    distances.extend(all[a].iter().enumerate().map(|(n, x)| x - made[n / count]));
                }
                _ => {}
            }
        }
        (worth, distances)
    }

    /// Returns the weighted sum of all outputs, and the side of each jump and kink of the graph that it is on.
    fn total(&self, graph: &Graph) -> (f64, Vec<[bool; 2]>) {
        let rows = (0..self.rows.len()).map(|row| self.weighted_outputs(graph, row));
        let side = |distance: f64| [distance > 0.0, distance == 0.0];
        rows.fold((0.0, Vec::new()), |(sum, mut sides), (worth, distances)| {
            sides.extend(distances.into_iter().map(side));
            (sum + worth, sides)
        })
    }

    /// Returns whether rounding to f32 may move a number across a jump or kink.
    fn is_near_kink(&self, graph: &Graph) -> bool {
        let is_near = |distance: f64| distance != 0.0 && distance.abs() < 1e-5;
        (0..self.rows.len()).any(|row| self.weighted_outputs(graph, row).1.into_iter().any(is_near))
    }

    /// Returns the derivative with respect to the number that `at` selects; none if the graph has a kink nearby.
    fn difference(&self, graph: &Graph, at: &dyn Fn(&mut Case) -> &mut f64) -> Option<f64> {
        let moved = |by: f64| {
            let mut case = self.clone();
            *at(&mut case) += by;
            case.total(graph)
        };
        let [(more, up), (less, down), (twice, far_up), (twice_less, far_down)] =
            [STEP, -STEP, 2.0 * STEP, -2.0 * STEP].map(moved);
        let is_smooth = up == down && up == far_up && up == far_down && up == self.total(graph).1;
        is_smooth.then(|| (8.0 * (more - less) - (twice - twice_less)) / (12.0 * STEP))
    }
}

/// Returns the gradients of a case by the adjoint graphs in f64: of the inputs of each row, and of the shared ones.
fn exact(graph: &Graph, adjoint: &Adjoint, case: &Case) -> (Vec<Vec<Vec<f64>>>, Vec<Vec<f64>>) {
    let mut sums: Vec<Vec<f64>> = adjoint.sums.iter().map(|sum| vec![0.0; sum.count()]).collect();
    let mut of_rows = Vec::new();
    for row in 0..case.rows.len() {
        let inputs: Vec<&[f64]> =
            case.inputs(graph, row).into_iter().chain(case.worth[row].iter().map(|w| &w[..])).collect();
        let all = interpret::all(&adjoint.rows.values, &inputs);
        let output = |n: usize| &all[adjoint.rows.outputs[n]];
        let zeros = |n: usize| vec![0.0; case.rows[row][n].len()];
        of_rows.push(
            adjoint.inputs.iter().enumerate().map(|(n, of)| of.map_or(zeros(n), |of| output(of).clone())).collect(),
        );
        for (sum, total) in adjoint.sums.iter().zip(&mut sums) {
            for run in 0..sum.runs {
                let right = &output(sum.right)[run * sum.columns..][..sum.columns];
                let ones = [1.0];
                let left = sum.left.map_or(&ones[..], |left| &output(left)[run * sum.depth..][..sum.depth]);
                for (out, x) in total.chunks_exact_mut(sum.columns).zip(left) {
                    out.iter_mut().zip(right).for_each(|(out, y)| *out += x * y);
                }
            }
        }
    }
    let own = adjoint.shared.iter().map(|&n| &case.shared[n]).chain(&sums).map(|numbers| &numbers[..]);
    let all = interpret::all(&adjoint.totals.values, &own.collect::<Vec<_>>());
    let zeros = |n: usize| vec![0.0; case.shared[n].len()];
    let gradient = |(n, of): (usize, &Option<usize>)| of.map_or(zeros(n), |of| all[adjoint.totals.outputs[of]].clone());
    (of_rows, adjoint.gradients.iter().enumerate().map(gradient).collect())
}

fn largest<'a>(all: impl Iterator<Item = &'a f64>) -> f64 {
    all.fold(0.0, |most, x| most.max(x.abs()))
}

fn learns(width: usize, steps: &[Random]) -> std::result::Result<(), TestCaseError> {
    let graph = graph(width, steps);
    let case = Case::new(&graph, ROWS);
    prop_assume!(case.total(&graph).0.is_finite());
    let adjoint = adjoint::adjoint(&graph, &vec![true; graph.inputs.len()]).unwrap();
    let (of_rows, of_shared) = exact(&graph, &adjoint, &case);
    let most = largest(of_rows.iter().flatten().flatten().chain(of_shared.iter().flatten())).max(1.0);
    // Tests each input at a few indices.
    for (n, gradients) in of_shared.iter().enumerate() {
        for at in (0..gradients.len()).step_by(gradients.len() / 3 + 1) {
            if let Some(want) = case.difference(&graph, &|case| &mut case.shared[n][at]) {
                let got = gradients[at];
                prop_assert!((got - want).abs() <= 1e-6 * most, "shared {n}, number {at}: {got} is not {want}");
            }
        }
    }
    for (row, n) in (0..ROWS).flat_map(|row| (0..2).map(move |n| (row, n))) {
        for at in (0..of_rows[row][n].len()).step_by(5) {
            if let Some(want) = case.difference(&graph, &|case| &mut case.rows[row][n][at]) {
                let got = of_rows[row][n][at];
                prop_assert!((got - want).abs() <= 1e-6 * most, "row {row}, input {n}, {at}: {got} is not {want}");
            }
        }
    }
    passes_agree(&graph, &case, (&of_rows, &of_shared), most)
}

/// Compares the passes in f32 with the adjoint graphs in f64.
fn passes_agree(
    graph: &Graph,
    case: &Case,
    (of_rows, of_shared): (&[Vec<Vec<f64>>], &[Vec<f64>]),
    most: f64,
) -> std::result::Result<(), TestCaseError> {
    if case.is_near_kink(graph) {
        return Ok(());
    }
    for kernels in Kernels::all() {
        let adjoint = adjoint::adjoint(graph, &vec![true; graph.inputs.len()]).unwrap();
        let names = vec![String::new(); graph.inputs.len()];
        let compiled = TrainableGraph::compile(graph, adjoint, names, 0, kernels).unwrap();
        let (outputs, gradients) = run(&compiled, case, 1);
        for (n, &output) in graph.outputs.iter().enumerate() {
            let want = (0..ROWS).flat_map(|row| interpret::row(&graph.values, output, &case.inputs(graph, row)));
            for (got, want) in outputs[n].iter().zip(want) {
                prop_assert!((f64::from(*got) - want).abs() <= 1e-5 * want.abs().max(1.0), "output {n}: {got}, {want}");
            }
        }
        let near = |got: &[f32], want: &mut dyn Iterator<Item = f64>, place: &str| {
            for (n, (got, want)) in got.iter().zip(want).enumerate() {
                let is_near = (f64::from(*got) - want).abs() <= 2e-5 * most;
                prop_assert!(is_near, "{}: {place}, number {n}: {got} is not {want}", kernels.name());
            }
            Ok(())
        };
        for (n, got) in gradients.inputs.iter().enumerate() {
            near(got, &mut of_rows.iter().flat_map(|row| row[n].iter().copied()), &format!("input {n}"))?;
        }
        for (n, got) in gradients.shared.iter().enumerate() {
            near(got, &mut of_shared[n].iter().copied(), &format!("shared {n}"))?;
        }
    }
    Ok(())
}

/// Runs both passes over a case.
fn run(graph: &TrainableGraph, case: &Case, threads: usize) -> (Vec<Vec<f32>>, Gradients) {
    let narrow = |numbers: &Vec<f64>| numbers.iter().map(|&x| x as f32).collect::<Vec<f32>>();
    let shared: Vec<Vec<f32>> = case.shared.iter().map(narrow).collect();
    let shared: Vec<&[f32]> = shared.iter().map(|numbers| &numbers[..]).collect();
    let rows: Vec<Vec<f32>> = case.rows.iter().map(|row| narrow(&row.concat())).collect();
    let fill = |given: InputRows<'_>| given.each(|n, row| row.copy_from_slice(&rows[n]));
    let batch = Batch { rows: rows.len(), shared: &shared, fill: &fill };
    let worth = |n: usize| case.worth.iter().flat_map(|row| narrow(&row[n])).collect::<Vec<f32>>();
    let worth: Vec<Vec<f32>> = (0..case.worth[0].len()).map(worth).collect();
    let worth: Vec<&[f32]> = worth.iter().map(|numbers| &numbers[..]).collect();
    let (mut workspace, mut outputs, mut gradients) =
        (Workspace::new(&Threads::new(threads).unwrap()), Vec::new(), Gradients::default());
    graph.forward(&[], &batch, &mut workspace, &mut outputs).unwrap();
    graph.backward(&[], &batch, &worth, &mut workspace, &mut gradients).unwrap();
    (outputs, gradients)
}

fn steps() -> impl Strategy<Value = Vec<Random>> {
    prop::collection::vec((any::<u8>(), 0usize..32, 0usize..32, 1usize..20), 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(50))]

    #[test]
    fn gradients_match_central_differences(width in 1usize..13, steps in steps()) {
        learns(width, &steps)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    #[ignore = "long: 500 random graphs"]
    fn gradients_of_many_graphs_match_central_differences(width in 1usize..30, steps in steps()) {
        learns(width, &steps)?;
    }
}

/// A graph of several normalised layers over sequences: its parameters have every kind of sum.
fn layered() -> Graph {
    let steps: Vec<Random> = vec![
        (3, 1, 0, 32),
        (16, 3, 0, 1),
        (17, 1, 0, 7),
        (17, 1, 0, 6),
        (18, 1, 0, 4),
        (13, 3, 2, 1),
        (23, 5, 1, 2),
        (19, 0, 0, 4),
        (0, 4, 0, 17),
    ];
    let mut graph = graph(10, &steps);
    let values: Vec<Id> = (3..graph.values.len())
        .filter(|&id| {
            graph.values[id].rows == Some(1) && graph.shape(id).len() == 3 && graph.values[id].side == Side::Pair
        })
        .collect();
    let all = graph.concat(2, &values).unwrap();
    graph.outputs = vec![graph.unary(Unary::Tanh, all).unwrap()];
    graph
}

fn compiled(graph: &Graph, kernels: Kernels) -> TrainableGraph {
    let adjoint = adjoint::adjoint(graph, &vec![true; graph.inputs.len()]).unwrap();
    TrainableGraph::compile(graph, adjoint, vec![String::new(); graph.inputs.len()], 0, kernels).unwrap()
}

#[test]
fn sums_have_the_same_bits_for_any_block_and_any_number_of_threads() {
    let graph = layered();
    let case = Case::new(&graph, 300);
    for kernels in Kernels::all() {
        let mut compiled = compiled(&graph, kernels);
        assert!(compiled.adjoint.sums.iter().filter(|sum| sum.left.is_some()).count() >= 3);
        let (outputs, gradients) = run(&compiled, &case, 1);
        for (block, threads) in [(1, 1), (8, 2), (64, 3), (16, 7), (32, 1)] {
            compiled.forward.set_block(block);
            compiled.backward.set_block(block);
            let (again, others) = run(&compiled, &case, threads);
            assert_eq!(again, outputs);
            assert_eq!(others.inputs, gradients.inputs, "{} by {block} on {threads}", kernels.name());
            assert_eq!(others.shared, gradients.shared, "{} by {block} on {threads}", kernels.name());
        }
        // Sum of the five micro-batches, in pairs.
        let own = |n: usize| {
            let rows = n * MICRO_BATCH..300.min((n + 1) * MICRO_BATCH);
            let part = |all: &[Vec<Vec<f64>>]| all[rows.clone()].to_vec();
            let part = Case { shared: case.shared.clone(), rows: part(&case.rows), worth: part(&case.worth) };
            run(&compiled, &part, 1).1.shared
        };
        let add = |left: Vec<Vec<f32>>, right: Vec<Vec<f32>>| -> Vec<Vec<f32>> {
            let sum = |(left, right): (Vec<f32>, Vec<f32>)| left.iter().zip(right).map(|(x, y)| x + y).collect();
            left.into_iter().zip(right).map(sum).collect()
        };
        let sums = add(add(add(own(0), own(1)), add(own(2), own(3))), own(4));
        // Only gradients that `totals` returns unchanged: further linear operations round, so their sums differ in the last bits.
        let totals = &compiled.adjoint.totals;
        let linear = |n: usize| {
            compiled.adjoint.gradients[n].is_some_and(|of| {
                let mut id = totals.outputs[of];
                while let Op::Reshape(a) | Op::Pick(a, _) = totals.values[id].op {
                    id = a;
                }
                matches!(totals.values[id].op, Op::Inputs(_))
            })
        };
        let same = (0..sums.len()).filter(|&n| linear(n) && sums[n] == gradients.shared[n]).count();
        assert_eq!(same, (0..sums.len()).filter(|&n| linear(n)).count());
        assert!(same > 2);
    }
}

/// Returns the gradients of a function's inputs if the gradient of each of its outputs is 1.
fn slopes(make: &dyn Fn(&mut Graph, [Id; 2]) -> Result<Id>, inputs: [[f64; 4]; 2]) -> Vec<Vec<f32>> {
    let input = GraphInput { side: Side::Pair, shape: vec![1, 4], rows: Some(0) };
    let mut graph = Graph::new(vec![input.clone(), input]);
    let inputs_of = [graph.input(0).unwrap(), graph.input(1).unwrap()];
    let output = make(&mut graph, inputs_of).unwrap();
    let worth = vec![vec![vec![1.0; graph.values[output].count()]]];
    graph.outputs = vec![output];
    let case = Case { shared: Vec::new(), rows: vec![inputs.map(|x| x.to_vec()).to_vec()], worth };
    run(&compiled(&graph, Kernels::best()), &case, 1).1.inputs
}

/// At a kink, the derivative is the one that PyTorch chooses.
#[test]
fn subgradients_match_pytorch() {
    let unary = |f: Unary, of: [f64; 4]| slopes(&|graph, [a, _]| graph.unary(f, a), [of, [0.0; 4]]).swap_remove(0);
    let ties = [0.0, 0.0, 1.0, -1.0];
    assert_eq!(unary(Unary::Relu, ties), [0.0, 0.0, 1.0, 0.0]);
    assert_eq!(unary(Unary::Abs, ties), [0.0, 0.0, 1.0, -1.0]);
    assert_eq!(unary(Unary::Sqrt, [0.0, 4.0, 1.0, 0.25]), [0.0, 0.25, 0.5, 1.0]);
    assert_eq!(unary(Unary::Trunc, ties), [0.0; 4]);
    assert_eq!(unary(Unary::Not, ties), [0.0; 4]);
    let both = |f: Binary| slopes(&|graph, [a, b]| graph.binary(f, a, b), [ties, [0.0; 4]]);
    assert_eq!(both(Binary::Max), [[0.5, 0.5, 1.0, 0.0], [0.5, 0.5, 0.0, 1.0]]);
    assert_eq!(both(Binary::Min), [[0.5, 0.5, 0.0, 1.0], [0.5, 0.5, 1.0, 0.0]]);
    assert_eq!(both(Binary::Less), [[0.0; 4], [0.0; 4]]);
    let clamped = |f: Binary| {
        let clamp = |graph: &mut Graph, [a, _]: [Id; 2]| {
            let zero = graph.number(vec![], vec![0.0])?;
            graph.binary(f, a, zero)
        };
        slopes(&clamp, [ties, [0.0; 4]]).swap_remove(0)
    };
    assert_eq!(clamped(Binary::Max), [1.0, 1.0, 1.0, 0.0]);
    assert_eq!(clamped(Binary::Min), [1.0, 1.0, 0.0, 1.0]);
    let fold = |f: Fold, of: [f64; 4]| slopes(&|graph, [a, _]| graph.fold(f, a, &[1]), [of, [0.0; 4]]).swap_remove(0);
    assert_eq!(fold(Fold::Max, [3.0, 1.0, 3.0, 2.0]), [0.5, 0.0, 0.5, 0.0]);
    assert_eq!(fold(Fold::Min, [3.0, 1.0, 2.0, 1.0]), [0.0, 0.5, 0.0, 0.5]);
}
