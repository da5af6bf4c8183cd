//! Products in int8: which ones they are, their error, and that a row's result depends on nothing else.

use super::*;
use crate::dense::steps::{Plan, Work};

/// Returns the shapes of the int8 products among the row steps, `[runs, depth, columns]`, and the functions of their
/// results.
fn products(plan: &Plan) -> Vec<([usize; 3], Option<Unary>)> {
    let product = |step: &steps::Step| match &step.work {
        Work::Int8Product { parts, runs, columns, map, .. } => {
            Some(([*runs, parts.iter().map(|part| part.matrix.depth()).sum(), *columns], *map))
        }
        _ => None,
    };
    plan.rows.iter().filter_map(product).collect()
}

fn program(graph: &Graph) -> RowProgram {
    RowProgram::of(graph, Precision::Int8, Kernels::best()).unwrap()
}

fn of_runs(runs: usize, width: usize) -> (Graph, Id) {
    let given = GraphInput { side: Side::Pair, shape: vec![1, runs, width], rows: Some(0) };
    let mut graph = Graph::new(vec![given]);
    let x = graph.input(0).unwrap();
    (graph, x)
}

fn linear(graph: &mut Graph, x: Id, columns: usize, seed: usize) -> Id {
    let depth = *graph.shape(x).last().unwrap();
    let scale = (depth as f32).sqrt();
    let weights = numbers(depth * columns, seed).iter().map(|w| w / scale).collect();
    let weights = graph.number(vec![depth, columns], weights).unwrap();
    let product = graph.matmul(x, weights).unwrap();
    let bias = graph.number(vec![columns], numbers(columns, seed + 1)).unwrap();
    graph.binary(Binary::Add, product, bias).unwrap()
}

/// A feed-forward block over `runs` positions, with a residual connection.
fn block(runs: usize) -> Graph {
    let (mut graph, x) = of_runs(runs, 64);
    let up = linear(&mut graph, x, 128, 1);
    let active = graph.unary(Unary::Gelu, up).unwrap();
    let down = linear(&mut graph, active, 64, 3);
    graph.outputs = vec![graph.binary(Binary::Add, x, down).unwrap()];
    graph
}

#[test]
fn blocks_of_encoders_are_computed_in_int8() {
    for runs in [1, 9, 200] {
        let graph = block(runs);
        let program = program(&graph);
        let expected = [([runs, 64, 128], Some(Unary::Gelu)), ([runs, 128, 64], None)];
        // The input of a single position is a row of features.
        let expected = &expected[usize::from(runs == 1)..];
        assert_eq!(products(&program.straight), expected, "{program}");
        let described = format!("int8 product in[{runs}, 64] x [64, 128]");
        assert_eq!(program.to_string().contains(&described), runs > 1, "{program}");
        #[cfg(feature = "cuda")]
        DeviceProgram::check(&program).unwrap();
        let row = |n: usize| numbers(runs * 64, n);
        for kernels in Kernels::tried() {
            let program = RowProgram { kernels, ..program.clone() };
            let rows = 200usize.div_ceil(runs);
            for (n, made) in run(&program, rows, &[], &row).iter().enumerate() {
                let want = interpret::row(&graph.values, graph.outputs[0], &[&row(n)]);
                let off = made.iter().zip(&want).map(|(x, y)| (x - y).powi(2)).sum::<f32>();
                let scale = want.iter().map(|x| x * x).sum::<f32>();
                assert!(off > 0.0 && off < (0.02f32).powi(2) * scale, "{}, row {n}: {off} of {scale}", kernels.name());
                assert_eq!(&run(&program, 1, &[], &|_| row(n))[0], made, "{}, row {n} alone", kernels.name());
            }
        }
    }
}

/// Without functions of floating-point numbers, all instruction sets compute the same bits.
#[test]
fn int8_programs_give_the_same_bits_on_every_processor() {
    let (mut graph, x) = of_runs(5, 70);
    let made = linear(&mut graph, x, 90, 1);
    let made = graph.unary(Unary::Relu, made).unwrap();
    let made = linear(&mut graph, made, 50, 2);
    graph.outputs = vec![graph.unary(Unary::Abs, made).unwrap()];
    let program = program(&graph);
    assert_eq!(products(&program.straight), [([5, 70, 90], Some(Unary::Relu)), ([5, 90, 50], None)]);
    let row = |n: usize| numbers(5 * 70, n);
    let first = run(&program, 40, &[], &row);
    for kernels in Kernels::tried() {
        let program = RowProgram { kernels, ..program.clone() };
        assert_eq!(run(&program, 40, &[], &row), first, "{}", kernels.name());
    }
}

#[test]
fn small_products_outputs_and_products_of_activations_stay_in_f32() {
    // An output, and a product whose result something else reads before its function.
    let (mut graph, x) = of_runs(4, 64);
    let inner = linear(&mut graph, x, 64, 1);
    let active = graph.unary(Unary::Gelu, inner).unwrap();
    let both = graph.binary(Binary::Mul, inner, active).unwrap();
    let output = linear(&mut graph, both, 64, 2);
    graph.outputs = vec![output];
    assert_eq!(products(&program(&graph).straight), [([4, 64, 64], None)]);
    // Too few columns, too shallow, and too few weights.
    for (width, columns) in [(400, 31), (31, 400), (64, 63)] {
        let (mut graph, x) = of_runs(4, width);
        let made = linear(&mut graph, x, columns, 1);
        graph.outputs = vec![graph.unary(Unary::Abs, made).unwrap()];
        assert_eq!(products(&program(&graph).straight), [], "{width} x {columns}");
    }
    // Both factors depend on the row.
    let (mut graph, x) = of_runs(64, 64);
    let product = graph.matmul(x, x).unwrap();
    graph.outputs = vec![graph.unary(Unary::Abs, product).unwrap()];
    assert_eq!(products(&program(&graph).straight), []);
    // An infinite weight.
    let (mut graph, x) = of_runs(4, 64);
    let mut weights = numbers(64 * 64, 1);
    weights[77] = f32::INFINITY;
    let weights = graph.number(vec![64, 64], weights).unwrap();
    let product = graph.matmul(x, weights).unwrap();
    graph.outputs = vec![graph.unary(Unary::Abs, product).unwrap()];
    assert_eq!(products(&program(&graph).straight), []);
}

fn pair(shape: &[usize]) -> GraphInput {
    GraphInput { side: Side::Pair, shape: [&[1], shape].concat(), rows: Some(0) }
}

/// An embedding beside a price, whose rows of one scale would leave the embedding one code.
#[test]
fn rows_with_inputs_of_any_magnitude_stay_in_f32() {
    let mut graph = Graph::new(vec![pair(&[64]), pair(&[1])]);
    let [embedding, price] = [0, 1].map(|n| graph.input(n).unwrap());
    let [mean, deviation] = [1000.0, 600.0].map(|x| graph.number(vec![1], vec![x]).unwrap());
    let centred = graph.binary(Binary::Sub, price, mean).unwrap();
    let standard = graph.binary(Binary::Div, centred, deviation).unwrap();
    let joined = graph.concat(1, &[embedding, standard]).unwrap();
    let hidden = linear(&mut graph, joined, 64, 1);
    let hidden = graph.unary(Unary::Relu, hidden).unwrap();
    graph.outputs = vec![linear(&mut graph, hidden, 64, 2)];
    let program = program(&graph);
    assert_eq!(products(&program.straight), [], "{program}");
    let exact = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
    let row =
        |n: usize| -> Vec<f32> { numbers(64, n).iter().map(|x| x / 10.0).chain([2000.0 - 50.0 * n as f32]).collect() };
    for (made, want) in run(&program, 40, &[], &row).iter().zip(&run(&exact, 40, &[], &row)) {
        assert!(made.iter().zip(want).all(|(x, y)| (x - y).abs() <= 1e-5), "{made:?} is not {want:?}");
    }
}

/// Returns the int8 products of a layer over the value that `read` makes of the inputs.
fn products_over(inputs: &[&[usize]], read: impl Fn(&mut Graph, &[Id]) -> Id) -> Vec<[usize; 3]> {
    let mut graph = Graph::new(inputs.iter().map(|shape| pair(shape)).collect());
    let read_inputs: Vec<Id> = (0..inputs.len()).map(|n| graph.input(n).unwrap()).collect();
    let x = read(&mut graph, &read_inputs);
    let made = linear(&mut graph, x, 64, 1);
    graph.outputs = vec![graph.unary(Unary::Abs, made).unwrap()];
    products(&program(&graph).straight).into_iter().map(|(shape, _)| shape).collect()
}

#[test]
fn only_rows_of_a_single_sequence_or_of_results_are_quantized() {
    let (sequence, row, mask): (&[usize], &[usize], &[usize]) = (&[4, 64], &[1, 64], &[4]);
    let binary = |f| move |graph: &mut Graph, x: &[Id]| graph.binary(f, x[0], x[1]).unwrap();
    let masked = |f| {
        move |graph: &mut Graph, x: &[Id]| {
            let mask = graph.reshape(x[0], vec![1, 4, 1], Some(0)).unwrap();
            graph.binary(f, mask, x[1]).unwrap()
        }
    };
    let beside = |graph: &mut Graph, x: &[Id]| graph.concat(2, x).unwrap();
    let below = |graph: &mut Graph, x: &[Id]| graph.concat(1, x).unwrap();
    // Masks, sums of sequences, and steps of several sequences keep the rows of one sequence.
    assert_eq!(products_over(&[mask, sequence], masked(Binary::Mul)), [[4, 64, 64]]);
    assert_eq!(products_over(&[mask, sequence], masked(Binary::Keep)), [[4, 64, 64]]);
    assert_eq!(products_over(&[sequence, sequence], binary(Binary::Add)), [[4, 64, 64]]);
    assert_eq!(products_over(&[sequence, sequence], below), [[8, 64, 64]]);
    assert_eq!(products_over(&[sequence], |graph, x| graph.unary(Unary::Tanh, x[0]).unwrap()), [[4, 64, 64]]);
    // A row, a row or a number that is added to a sequence, and two sequences in one row.
    assert_eq!(products_over(&[row], |_, x| x[0]), [] as [[usize; 3]; 0]);
    assert_eq!(products_over(&[sequence, row], binary(Binary::Add)), [] as [[usize; 3]; 0]);
    assert_eq!(products_over(&[mask, sequence], masked(Binary::Add)), [] as [[usize; 3]; 0]);
    assert_eq!(products_over(&[sequence, sequence], beside), [] as [[usize; 3]; 0]);
    // The same, where the sequences are flattened, so that their products are separate parts of a sum.
    let flat = |graph: &mut Graph, x: &[Id]| {
        let flat: Vec<Id> = x.iter().map(|&x| graph.reshape(x, vec![1, 256], Some(0)).unwrap()).collect();
        graph.concat(1, &flat).unwrap()
    };
    assert_eq!(products_over(&[sequence], flat), [[1, 256, 64]]);
    assert_eq!(products_over(&[sequence, sequence], flat), [] as [[usize; 3]; 0]);
}

/// Normalizes rows without a learned scale.
fn normalized(graph: &mut Graph, x: Id) -> Id {
    let share = graph.number(vec![], vec![1.0 / *graph.shape(x).last().unwrap() as f32]).unwrap();
    let mean = |graph: &mut Graph, x: Id| {
        let sum = graph.fold(Fold::Sum, x, &[2]).unwrap();
        graph.binary(Binary::Mul, sum, share).unwrap()
    };
    let average = mean(graph, x);
    let centred = graph.binary(Binary::Sub, x, average).unwrap();
    let squares = graph.binary(Binary::Mul, centred, centred).unwrap();
    let variance = mean(graph, squares);
    let epsilon = graph.number(vec![], vec![1e-5]).unwrap();
    let shifted = graph.binary(Binary::Add, variance, epsilon).unwrap();
    let deviation = graph.unary(Unary::Sqrt, shifted).unwrap();
    graph.binary(Binary::Div, centred, deviation).unwrap()
}

/// An encoder layer as in SASRec, over a masked history with positions.
#[test]
fn products_of_an_encoder_layer_are_in_int8() {
    let (steps, width) = (10, 64);
    let mut graph = Graph::new(vec![pair(&[steps, width]), pair(&[steps])]);
    let [history, mask] = [0, 1].map(|n| graph.input(n).unwrap());
    let positions = graph.number(vec![1, steps, width], numbers(steps * width, 9)).unwrap();
    let of_steps = graph.reshape(mask, vec![1, steps, 1], Some(0)).unwrap();
    let all = (0..steps * width).map(|n| (n / width) as u32).collect();
    let expanded = graph.pick(of_steps, all, vec![1, steps, width], Some(0)).unwrap();
    let placed = graph.binary(Binary::Add, history, positions).unwrap();
    let x = graph.binary(Binary::Mul, placed, expanded).unwrap();
    let before = normalized(&mut graph, x);
    let [queries, keys, values] = [1, 2, 3].map(|seed| linear(&mut graph, before, width, seed));
    let transposed = (0..width * steps).map(|n| (n % steps * width + n / steps) as u32).collect();
    let keys = graph.pick(keys, transposed, vec![1, width, steps], Some(0)).unwrap();
    let scores = graph.matmul(queries, keys).unwrap();
    let of_keys = graph.reshape(mask, vec![1, 1, steps], Some(0)).unwrap();
    let scores = graph.binary(Binary::Add, scores, of_keys).unwrap();
    let each = graph.unary(Unary::Sigmoid, scores).unwrap();
    let attended = graph.matmul(each, values).unwrap();
    let attended = linear(&mut graph, attended, width, 4);
    let x = graph.binary(Binary::Add, x, attended).unwrap();
    let before = normalized(&mut graph, x);
    let up = linear(&mut graph, before, 2 * width, 5);
    let active = graph.unary(Unary::Gelu, up).unwrap();
    let down = linear(&mut graph, active, width, 6);
    let x = graph.binary(Binary::Add, x, down).unwrap();
    graph.outputs = vec![graph.unary(Unary::Abs, x).unwrap()];
    let program = program(&graph);
    assert_eq!(program.to_string().matches("int8 product").count(), 6, "{program}");
    let exact = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
    let row = |n: usize| [numbers(steps * width, n), (0..steps).map(|s| f32::from(s >= n % steps)).collect()].concat();
    for (made, want) in run(&program, 20, &[], &row).iter().zip(&run(&exact, 20, &[], &row)) {
        let off = made.iter().zip(want).map(|(x, y)| (x - y).powi(2)).sum::<f32>();
        assert!(off > 0.0 && off < (0.02f32).powi(2) * want.iter().map(|x| x * x).sum::<f32>(), "{off}");
    }
}

#[test]
fn int8_rerankers_score_a_candidate_alike_in_every_batch() {
    let (bytes, inputs, output) = reranker();
    let graph = import::import(&bytes, &inputs, &[made(output.0, &output.1)]).unwrap();
    let (program, exact) = (program(&graph), RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap());
    let query: Vec<f32> = numbers(64, 1).iter().map(|x| x / 8.0).collect();
    let row = |n: usize| numbers(69, n).iter().map(|x| x / 8.0).collect::<Vec<f32>>();
    let want = run(&exact, 300, &[&query], &row);
    let scale = want.iter().flatten().fold(0f32, |most, x| most.max(x.abs()));
    for (n, (got, want)) in run(&program, 300, &[&query], &row).iter().zip(&want).enumerate() {
        let off = got.iter().zip(want).fold(0f32, |most, (x, y)| most.max((x - y).abs()));
        assert!(off <= 0.02 * scale, "row {n}: {got:?} is not {want:?}");
        assert_eq!(&run(&program, 1, &[&query], &|_| row(n))[0], got, "row {n} alone");
    }
}
