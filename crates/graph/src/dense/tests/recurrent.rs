//! Recurrent layers within each row, with lengths and initial states, against their equations.

use super::super::ir::Recurrent;
use super::*;
use sterling_kernels::cpu::dense::Cell;

const CELLS: [Cell; 4] = [Cell::Rnn, Cell::Lstm, Cell::Gru, Cell::GruResetFirst];

#[derive(Clone, Copy, Debug)]
struct Sizes {
    runs: usize,
    steps: usize,
    depth: usize,
    hidden: usize,
}

/// Builds a layer over a sequence; inputs are the sequence, the states and the lengths.
fn layer(cell: Cell, sizes: Sizes, is_reverse: bool, has_states: bool, has_lengths: bool, side: Side) -> Graph {
    let Sizes { runs, steps, depth, hidden } = sizes;
    let given = |shape: Vec<usize>, side: Side| GraphInput { side, shape, rows: (side == Side::Pair).then_some(0) };
    let mut graph = Graph::new(vec![
        given(vec![runs, steps, depth], side),
        given(vec![runs, hidden], Side::Pair),
        given(vec![runs, hidden], Side::Pair),
        given(vec![runs], Side::Pair),
    ]);
    let width = cell.gates() * hidden;
    let mut weights = |rows: usize, columns: usize, seed: usize| {
        let scale = 1.0 / (rows as f32).sqrt();
        let all = numbers(rows * columns, seed).iter().map(|x| x * scale).collect();
        graph.number(vec![rows, columns], all).unwrap()
    };
    let is_apart = cell == Cell::GruResetFirst;
    let of_input = weights(depth, width, 1);
    let recurrence = weights(hidden, if is_apart { 2 * hidden } else { width }, 2);
    let candidate = is_apart.then(|| weights(hidden, hidden, 3));
    let biases = [5, 6].map(|seed| graph.number(vec![width], numbers(width, seed)).unwrap());
    let [x, h, c, lengths] = [0, 1, 2, 3].map(|n| graph.input(n).unwrap());
    let initial = [has_states.then_some(h), (has_states && cell == Cell::Lstm).then_some(c)];
    let lengths = has_lengths.then_some(lengths);
    let of = Recurrent { cell, is_reverse, x, weights: of_input, recurrence, candidate, biases, initial, lengths };
    let made = graph.recurrent(of).unwrap();
    let made = if graph.values[made].side == Side::Pair {
        made
    } else {
        // Repeats the result of a user's sequence for every row, because outputs are row values.
        let (shape, count) = (graph.shape(made).to_vec(), graph.values[made].count());
        graph.pick(made, (0..count as u32).collect(), shape, Some(0)).unwrap()
    };
    graph.outputs = vec![graph.unary(Unary::Neg, made).unwrap()];
    graph
}

fn check(graph: &Graph, sizes: Sizes, rows: usize, side: Side) {
    let Sizes { runs, steps, depth, hidden } = sizes;
    let count = runs * steps * depth;
    let sequence = |n: usize| numbers(count, n);
    let beside = |n: usize| {
        let lengths = (0..runs).map(|run| ((n + run) % (steps + 1)) as f32);
        numbers(2 * runs * hidden, n + 3).into_iter().chain(lengths).collect::<Vec<f32>>()
    };
    let is_user = side == Side::User;
    let row = |n: usize| if is_user { beside(n) } else { [sequence(n), beside(n)].concat() };
    let of_user = sequence(7);
    let user: Vec<&[f32]> = if is_user { vec![&of_user] } else { Vec::new() };
    let both = RowProgram::of(graph, Precision::F32, Kernels::best()).unwrap();
    for kernels in Kernels::all() {
        let program = RowProgram { kernels, ..both.clone() };
        for (n, got) in run(&program, rows, &user, &row).iter().enumerate() {
            let (x, rest) = (if is_user { of_user.clone() } else { sequence(n) }, beside(n));
            let (states, lengths) = rest.split_at(2 * runs * hidden);
            let (h, c) = states.split_at(runs * hidden);
            let place = format!("{} row {n}", kernels.name());
            near(got, &interpret::row(&graph.values, graph.outputs[0], &[&x, h, c, lengths]), &place);
            if n % 5 == 0 {
                assert_eq!(&run(&program, 1, &user, &|_| row(n))[0], got, "{place} alone");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_recurrent_layer_computes_its_equations(
        cell in 0usize..4, runs in 1usize..3, steps in 1usize..9, depth in 1usize..20,
        hidden in prop_oneof![4 => 1usize..20, 1 => 30usize..40], rows in 1usize..70,
        is_reverse in any::<bool>(), has_states in any::<bool>(), has_lengths in any::<bool>(), is_user in any::<bool>(),
    ) {
        let sizes = Sizes { runs, steps, depth, hidden };
        let side = if is_user { Side::User } else { Side::Pair };
        check(&layer(CELLS[cell], sizes, is_reverse, has_states, has_lengths, side), sizes, rows, side);
    }
}

/// Long sequences are multiplied in several chunks of steps, and in blocks of rows.
#[test]
fn a_row_among_many_equals_the_row_alone() {
    let sizes = Sizes { runs: 1, steps: 60, depth: 8, hidden: 48 };
    for cell in CELLS {
        let graph = layer(cell, sizes, cell == Cell::Lstm, false, true, Side::Pair);
        check(&graph, sizes, 7, Side::Pair);
        let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
        let row = |n: usize| [numbers(480, n % 10), numbers(96, 1), vec![(n % 10 * 7 % 61) as f32]].concat();
        let many = run(&program, 500, &[], &row);
        let few = run(&program, 10, &[], &row);
        assert!(many.iter().enumerate().all(|(n, got)| *got == few[n % 10]));
        assert!(program.straight.block_rows > 14, "{}", program.straight.block_rows);
    }
}

#[test]
fn recurrent_layers_of_other_shapes_are_rejected() {
    let sizes = Sizes { runs: 1, steps: 2, depth: 3, hidden: 4 };
    let graph = layer(Cell::Gru, sizes, false, true, true, Side::Pair);
    let of = graph.values.iter().find_map(|value| match &value.op {
        ir::Op::Recurrent(layer) => Some((**layer).clone()),
        _ => None,
    });
    let of = of.unwrap();
    for invalid in [
        Recurrent { cell: Cell::Lstm, ..of.clone() },
        Recurrent { weights: of.recurrence, ..of.clone() },
        Recurrent { weights: of.x, ..of.clone() },
        Recurrent { x: of.weights, ..of.clone() },
        Recurrent { biases: [of.weights; 2], ..of.clone() },
        Recurrent { initial: [Some(of.x), None], ..of.clone() },
        Recurrent { lengths: Some(of.x), ..of.clone() },
        Recurrent { candidate: Some(of.recurrence), ..of.clone() },
    ] {
        assert!(graph.clone().recurrent(invalid).is_err());
    }
}

/// Operands are replaced in the order in which they are listed.
#[test]
fn operands_of_a_layer_have_one_order() {
    let layer = Recurrent {
        cell: Cell::GruResetFirst,
        is_reverse: false,
        x: 0,
        weights: 1,
        recurrence: 2,
        candidate: Some(3),
        biases: [4, 5],
        initial: [Some(6), Some(7)],
        lengths: Some(8),
    };
    let mut seen = Vec::new();
    let over = layer.over(&mut |id| {
        seen.push(id);
        Ok(id)
    });
    assert_eq!(over.unwrap().reads(), layer.reads());
    assert_eq!(seen, layer.reads());
}
