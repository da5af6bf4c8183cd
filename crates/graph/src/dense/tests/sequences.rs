//! Sequences within each row, with a mask: compares attention over them with a naive evaluation, complete and split in halves.

use super::super::split::{best_cut, split};
use super::*;

/// Attention of a query over `length` rows plus a layer over each of them; `far` is added to the logits of masked
/// rows.
fn attention(length: usize, width: usize, hidden: usize, far: f32) -> Result<Graph> {
    let pair = |shape: Vec<usize>| GraphInput { side: Side::Pair, shape, rows: Some(1) };
    let inputs = vec![input(Side::User, width), pair(vec![1, 1, length, width]), pair(vec![1, 1, length])];
    let mut graph = Graph::new(inputs);
    let (query, rows, mask) = (graph.input(0)?, graph.input(1)?, graph.input(2)?);
    let scale = 1.0 / width as f32;
    let weights = numbers(width * hidden, 3).iter().map(|x| x * scale).collect();
    let weights = graph.number(vec![width, hidden], weights)?;
    let keys = graph.matmul(rows, weights)?;
    let requested = graph.matmul(query, weights)?;
    let requested = graph.reshape(requested, vec![1, 1, 1, hidden], None)?;
    let products = graph.binary(Binary::Mul, keys, requested)?;
    let scores = graph.fold(Fold::Sum, products, &[3])?;
    let scores = graph.reshape(scores, vec![1, 1, length], Some(1))?;
    let (one, far) = (graph.number(vec![], vec![1.0])?, graph.number(vec![], vec![far])?);
    let missing = graph.binary(Binary::Sub, one, mask)?;
    let less = graph.binary(Binary::Mul, missing, far)?;
    let masked = graph.binary(Binary::Add, scores, less)?;
    let most = graph.fold(Fold::Max, masked, &[2])?;
    let below = graph.binary(Binary::Sub, masked, most)?;
    let each = graph.unary(Unary::Exp, below)?;
    let total = graph.fold(Fold::Sum, each, &[2])?;
    let shares = graph.binary(Binary::Div, each, total)?;
    let shares = graph.reshape(shares, vec![1, 1, 1, length], Some(1))?;
    let attended = graph.matmul(shares, rows)?;
    let attended = graph.reshape(attended, vec![1, 1, width], Some(1))?;
    let layer = graph.unary(Unary::Relu, keys)?;
    let of_rows = graph.fold(Fold::Sum, layer, &[2])?;
    let of_rows = graph.reshape(of_rows, vec![1, 1, hidden], Some(1))?;
    graph.outputs = vec![graph.concat(2, &[attended, of_rows])?];
    Ok(graph)
}

/// Returns the sequence of row `n`, whose length depends on `n`, and its mask.
fn of_row(n: usize, length: usize, width: usize) -> (Vec<f32>, Vec<f32>) {
    let there = n * 7 % (length + 1);
    let mut rows = numbers(there * width, n);
    rows.resize(length * width, 0.0);
    let mask = (0..length).map(|place| if place < there { 1.0 } else { 0.0 }).collect();
    (rows, mask)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn compiled_sequence_graphs_compute_what_their_files_define(
        length in 1usize..70, width in 1usize..40, hidden in 1usize..40, rows in 1usize..130,
        far in prop_oneof![Just(-1e4f32), Just(-1e9), Just(f32::MIN / 4.0)],
    ) {
        let graph = attention(length, width, hidden, far).unwrap();
        let query = numbers(width, 5);
        let given = |n: usize| { let (rows, mask) = of_row(n, length, width); [rows, mask].concat() };
        let want: Vec<Vec<f32>> = (0..rows).map(|n| {
            let (of_row, mask) = of_row(n, length, width);
            interpret::row(&graph.values, graph.outputs[0], &[&query, &of_row, &mask])
        }).collect();
        let both = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
        for plan in [&both.straight, &both.collapsed] {
            for kernels in Kernels::all() {
                let program = RowProgram { kernels, straight: plan.clone(), collapsed: plan.clone(), ..both.clone() };
                let made = run(&program, rows, &[&query], &given);
                for (n, (got, want)) in made.iter().zip(&want).enumerate() {
                    near(got, want, &format!("{} row {n}", kernels.name()));
                    if n % 9 == 0 {
                        prop_assert_eq!(&run(&program, 1, &[&query], &|_| given(n))[0], got);
                    }
                }
            }
        }
        // The layer over each row is the item's: after a cut there, the other half reads its results.
        let is_item = [false, true, true];
        let Some(cut) = best_cut(&graph, &is_item, &[0, 1 << 20, 0]).unwrap() else { return Ok(()) };
        let parts = split(&graph, &is_item, &cut).unwrap();
        let item = RowProgram::of(&parts.item.graph, Precision::F32, Kernels::best()).unwrap();
        let candidates = RowProgram::of(&parts.candidates.graph, Precision::F32, Kernels::best()).unwrap();
        let some = |n: usize, inputs: &[usize]| -> Vec<f32> {
            let (rows, mask) = of_row(n, length, width);
            inputs.iter().filter(|n| **n > 0).flat_map(|&n| if n == 1 { rows.clone() } else { mask.clone() }).collect()
        };
        let retained = run(&item, rows, &[], &|n| some(n, &parts.item.inputs));
        let left = |n: usize| [retained[n].clone(), some(n, &parts.candidates.inputs)].concat();
        for (n, (got, want)) in run(&candidates, rows, &[&query], &left).iter().zip(&want).enumerate() {
            near(got, want, &format!("halves, row {n}"));
        }
    }
}

#[test]
fn item_side_values_are_not_stored_if_too_wide() {
    let is_item = [false, true, true];
    let work = |length: usize| [0, length * 1000, 0];
    let retained = |length: usize, hidden: usize| {
        let graph = attention(length, 8, hidden, -1e4).unwrap();
        let cut = best_cut(&graph, &is_item, &work(length)).unwrap();
        cut.map(|cut| split(&graph, &is_item, &cut).unwrap().width)
    };
    for (length, hidden) in [(4, 16), (64, 16), (200, 64), (512, 8)] {
        assert!(retained(length, hidden).is_none_or(|width| width <= 1024), "{length} rows");
    }
}

/// Two causal convolutions with padding: the last step needs three steps of the first one.
#[test]
fn steps_that_no_window_covers_are_not_computed() {
    let (steps, width) = (32, 8);
    let inputs = vec![GraphInput { side: Side::Pair, shape: vec![1, steps, width], rows: Some(0) }];
    let mut graph = Graph::new(inputs);
    let zero = graph.number(vec![1], vec![0.0]).unwrap();
    let first = graph.input(0).unwrap();
    let mut x = first;
    for dilation in [1, 4] {
        let before = 2 * dilation;
        let nothing = graph.pick(zero, vec![0; before * width], vec![1, before, width], Some(0)).unwrap();
        let padded = graph.concat(1, &[nothing, x]).unwrap();
        let taps = |step: usize| (0..3).map(move |tap| step + tap * dilation);
        let index = (0..steps).flat_map(taps).flat_map(|at| (at * width..(at + 1) * width).map(|n| n as u32)).collect();
        let windows = graph.pick(padded, index, vec![1, steps, 3 * width], Some(0)).unwrap();
        let weights = numbers(3 * width * width, dilation).iter().map(|x| x / 24.0).collect();
        let weights = graph.number(vec![3 * width, width], weights).unwrap();
        let made = graph.matmul(windows, weights).unwrap();
        x = graph.unary(Unary::Relu, made).unwrap();
    }
    let both = graph.binary(Binary::Add, x, first).unwrap();
    let index = ((steps - 1) * width..steps * width).map(|n| n as u32).collect();
    graph.outputs = vec![graph.pick(both, index, vec![1, width], Some(0)).unwrap()];
    let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
    let row = |n: usize| numbers(steps * width, n);
    for (n, got) in run(&program, 5, &[], &row).iter().enumerate() {
        near(got, &interpret::row(&graph.values, graph.outputs[0], &[&row(n)]), &format!("row {n}"));
    }
    let flops = program.figures()[0].row_flops;
    assert!(flops < (5 * 2 * 3 * width * width) as u64, "{flops}: {program}");
}
