//! Compares programs with a naive evaluation of their graphs, and checks that invalid graphs are rejected.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use rten_onnx::onnx::{AttributeProto, ModelProto};
use serde::Deserialize;

mod attention;
mod demand;
mod exported;
mod fused;
mod quantized;
mod recurrent;
mod separate;
mod sequences;
mod split;

use super::graph::Graph;
use super::ir::{GraphInput, Id, Side};
use super::*;
use sterling_kernels::cpu::dense::{Binary, Fold, Form, Unary};

fn number(n: usize) -> f32 {
    ((n * 37 + 11) % 101) as f32 / 50.0 - 1.0
}

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|n| number(n * 3 + seed * 17)).collect()
}

fn near(got: &[f32], want: &[f32], place: &str) {
    let scale = want.iter().fold(1f32, |most, x| most.max(x.abs()));
    assert_eq!(got.len(), want.len(), "{place}");
    for (n, (got, want)) in got.iter().zip(want).enumerate() {
        let is_near = (got - want).abs() <= 1e-5 * scale || got == want;
        assert!(is_near, "{place}, number {n}: {got} is not {want}");
    }
}

/// Runs all rows through a program and returns the concatenated outputs per row.
fn run(program: &RowProgram, rows: usize, user: &[&[f32]], row: &dyn Fn(usize) -> Vec<f32>) -> Vec<Vec<f32>> {
    let mut made = Vec::new();
    let fill = &mut |given: InputRows<'_>| given.each(|n, given| given.copy_from_slice(&row(n)));
    let done = &mut |_: usize, count: usize, block: Block<'_>| {
        let outputs = |n: usize| (0..program.widths.len()).flat_map(move |o| block.output(o).row(n).to_vec()).collect();
        made.extend((0..count).map(outputs));
        Ok(())
    };
    program.run(rows, user, &mut Scratch::default(), fill, done).unwrap();
    made
}

/// Step of a random graph: operation, indexes of its operands, and width.
type Random = (u8, usize, usize, usize);

fn input(side: Side, width: usize) -> GraphInput {
    let rows = (side == Side::Pair).then_some(1);
    GraphInput { side, shape: vec![1, 1, width], rows }
}

/// Functions that keep small numbers small. Discontinuous ones (comparisons, truncation) would amplify rounding differences.
const FUNCTIONS: [Unary; 9] = [
    Unary::Relu,
    Unary::Sigmoid,
    Unary::Tanh,
    Unary::Neg,
    Unary::Abs,
    Unary::Erf,
    Unary::Gelu,
    Unary::Silu,
    Unary::Softplus,
];
const FUNCTIONS_OF_TWO: [Binary; 2] = [Binary::Max, Binary::Min];

/// Reductions of a query's values whose keys equal a row's; some products have other readers, too.
fn beside_keys(graph: &mut Graph, [query, column]: [Id; 2], size: usize) -> Result<Id> {
    let three = graph.number(vec![], vec![3.0])?;
    let mut key_of = |a: Id| {
        let wide = graph.binary(Binary::Mul, a, three)?;
        graph.unary(Unary::Trunc, wide)
    };
    let (keys, key) = (key_of(query)?, key_of(column)?);
    let (a, b) = if size.is_multiple_of(2) { (key, keys) } else { (keys, key) };
    let equal = graph.binary(Binary::Equal, a, b)?;
    let others = graph.unary(Unary::Abs, query)?;
    let first = graph.binary(Binary::Mul, equal, query)?;
    let second = graph.binary(Binary::Mul, others, equal)?;
    let mut made = Vec::new();
    for f in [Fold::Sum, Fold::Max, Fold::Min].into_iter().take(1 + size % 3) {
        made.push(graph.fold(f, first, &[2])?);
        made.push(graph.fold(f, second, &[2])?);
    }
    made.extend(size.is_multiple_of(5).then_some(first));
    let all = graph.concat(2, &made)?;
    let share = graph.number(vec![], vec![1.0 / graph.shape(query)[2] as f32])?;
    graph.binary(Binary::Mul, all, share)
}

/// Builds a graph of a query, a row and a column from random operations that keep numbers small.
fn graph(width: usize, steps: &[Random]) -> Graph {
    let mut graph = Graph::new(vec![input(Side::User, width), input(Side::Pair, width), input(Side::Pair, 1)]);
    let mut values: Vec<Id> = (0..3).map(|n| graph.input(n).unwrap()).collect();
    for &(kind, a, b, size) in steps {
        let (a, b) = (values[a % values.len()], values[b % values.len()]);
        let last = *graph.shape(a).last().unwrap();
        let scale = 1.0 / last as f32;
        let mut weights = |rows: usize, columns: usize| {
            let all = numbers(rows * columns, size).iter().map(|x| x * scale).collect();
            graph.number(vec![rows, columns], all)
        };
        let made = match kind % 21 {
            0..=3 => weights(last, size).and_then(|w| graph.matmul(a, w)),
            4 => graph.binary(Binary::Add, a, b),
            5 => graph.binary(Binary::Sub, a, b),
            6 | 7 => graph.binary(Binary::Mul, a, b),
            8 | 14 => graph.unary(FUNCTIONS[size % FUNCTIONS.len()], a),
            9 => graph.fold([Fold::Sum, Fold::Max, Fold::Min][size % 3], a, &[2]),
            10 => graph.concat(2, &[a, b, a]),
            11 | 15 => graph.binary(FUNCTIONS_OF_TWO[size % FUNCTIONS_OF_TWO.len()], a, b),
            // A softmax, and L2 normalization.
            16 => (|| {
                let most = graph.fold(Fold::Max, a, &[2])?;
                let less = graph.binary(Binary::Sub, a, most)?;
                let each = graph.unary(Unary::Exp, less)?;
                let sum = graph.fold(Fold::Sum, each, &[2])?;
                graph.binary(Binary::Div, each, sum)
            })(),
            17 => (|| {
                let squares = graph.binary(Binary::Mul, a, a)?;
                let sum = graph.fold(Fold::Sum, squares, &[2])?;
                let one = graph.number(vec![], vec![1.0])?;
                let sum = graph.binary(Binary::Add, sum, one)?;
                let length = graph.unary(Unary::Sqrt, sum)?;
                graph.binary(Binary::Div, a, length)
            })(),
            // Some neighbouring numbers, a single number, and every second number of a concatenation.
            18 => {
                let first = size % last;
                let index: Vec<u32> = (first..last.min(first + 1 + size % 7)).map(|n| n as u32).collect();
                let shape = vec![1, 1, index.len()];
                graph.pick(a, index, shape, graph.values[a].rows)
            }
            19 => graph.pick(a, vec![(size % last) as u32], vec![1, 1, 1], graph.values[a].rows),
            20 => graph.concat(2, &[b, a, b]).and_then(|all| {
                let index: Vec<u32> = (0..graph.shape(all)[2] as u32).skip(size % last).step_by(1 + size % 3).collect();
                let shape = vec![1, 1, index.len()];
                graph.pick(all, index, shape, graph.values[all].rows)
            }),
            // Several rows within a row, transposed and multiplied with the original matrix.
            12 if last.is_multiple_of(2) => (|| {
                let rows = graph.values[a].rows;
                let matrix = graph.reshape(a, vec![1, 1, 2, last / 2], rows)?;
                let turned = graph.transpose(matrix, &[0, 1, 3, 2])?;
                let product = graph.matmul(matrix, turned)?;
                let added = graph.binary(Binary::Add, product, turned);
                let made = added.unwrap_or(product);
                let width = graph.values[made].count();
                let made = graph.reshape(made, vec![1, 1, width], rows)?;
                let share = graph.number(vec![], vec![1.0 / last as f32])?;
                graph.binary(Binary::Mul, made, share)
            })(),
            12 => graph.unary(Unary::Sigmoid, a),
            13 => beside_keys(&mut graph, [values[0], values[2]], size),
            _ => weights(1, last).and_then(|w| graph.binary(Binary::Mul, a, w)),
        };
        values.extend(made.ok().filter(|&id| graph.values[id].count() <= 600));
    }
    let pairs = values.iter().copied().filter(|&id| graph.values[id].side == Side::Pair).collect::<Vec<_>>();
    let retained: Vec<Id> = pairs.iter().rev().take(3).copied().collect();
    let all = graph.concat(2, &retained).unwrap();
    graph.outputs = vec![graph.unary(Unary::Sigmoid, all).unwrap()];
    graph.outputs.extend(retained);
    graph
}

/// Maximum numbers of all rows of an input.
const ROOM: usize = 1 << 13;

/// Sizes from 1 to 513, mostly small ones.
fn widths() -> impl Strategy<Value = usize> {
    prop_oneof![6 => 1usize..70, 2 => 70usize..140, 1 => 500usize..514]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn compiled_graphs_compute_what_their_files_define(
        width in widths(), rows in widths(),
        steps in prop::collection::vec((any::<u8>(), 0usize..32, 0usize..32, 1usize..130), 1..14),
    ) {
        // Few wide rows, because the reference is naive.
        let rows = rows.min(ROOM / width).max(1);
        let graph = graph(width, &steps);
        let query = numbers(width, 5);
        let row = |n: usize| numbers(width + 1, n);
        let want: Vec<Vec<f32>> = (0..rows).map(|n| {
            let row = row(n);
            let output = |&id: &Id| interpret::row(&graph.values, id, &[&query, &row[..width], &row[width..]]);
            graph.outputs.iter().flat_map(output).collect()
        }).collect();
        prop_assume!(want.iter().flatten().all(|x| x.is_finite()));
        let apart = super::separate::separated(&graph).unwrap();
        let both = RowProgram::of(apart.as_ref().unwrap_or(&graph), Precision::F32, Kernels::best()).unwrap();
        for plan in [&both.straight, &both.collapsed] {
            let program = RowProgram { straight: plan.clone(), collapsed: plan.clone(), ..both.clone() };
            for (n, (got, want)) in run(&program, rows, &[&query], &row).iter().zip(&want).enumerate() {
                near(got, want, &format!("separated, row {n}"));
            }
        }
        let both = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
        for is_eager in [false, true] {
            let plan = if is_eager { both.collapsed.clone() } else { both.straight.clone() };
            for kernels in Kernels::all() {
                let program = RowProgram { kernels, straight: plan.clone(), collapsed: plan.clone(), ..both.clone() };
                let made = run(&program, rows, &[&query], &row);
                for (n, (got, want)) in made.iter().zip(&want).enumerate() {
                    near(got, want, &format!("{} eager {is_eager} row {n}", kernels.name()));
                    if n % 5 == 0 {
                        let alone = run(&program, 1, &[&query], &|_| row(n));
                        prop_assert_eq!(&alone[0], got);
                    }
                }
            }
        }
    }
}

/// Comparison, products and reductions become one step that writes each result to its reader; the wide intermediates use no
/// memory.
#[test]
fn keyed_reductions_are_fused_into_one_step() {
    let mut graph = Graph::new(vec![input(Side::User, 100), input(Side::Pair, 100), input(Side::Pair, 1)]);
    let values: Vec<Id> = (0..3).map(|n| graph.input(n).unwrap()).collect();
    for (size, equal, wide) in [(2, 2, 0), (5, 1, 2)] {
        let mut graph = graph.clone();
        graph.outputs = vec![beside_keys(&mut graph, [values[0], values[2]], size).unwrap()];
        let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
        let steps = &program.straight.rows;
        assert_eq!(
            steps.iter().filter(|s| matches!(s.work, steps::Work::FoldEqual { .. })).count(),
            equal,
            "{program:?}"
        );
        let strides = &program.straight.strides;
        let is_wide =
            |s: &&steps::Step| strides[s.out] > 64 && matches!(s.work, steps::Work::Map2 { f, .. } if f != Binary::Add);
        assert!(steps.iter().filter(is_wide).count() >= wide, "{program:?}");
    }
}

/// Devices require that an output has its own buffer, for every kind of step.
#[test]
fn scalar_outputs_have_buffers_of_their_own() {
    let mut graph = Graph::new(vec![input(Side::User, 20), input(Side::Pair, 20), input(Side::Pair, 1)]);
    let [keys, wide, key] = [0, 1, 2].map(|n| graph.input(n).unwrap());
    let equal = graph.binary(Binary::Equal, keys, key).unwrap();
    let beside = graph.binary(Binary::Mul, equal, keys).unwrap();
    let folds = [Fold::Sum, Fold::Max].map(|f| graph.fold(f, beside, &[2]).unwrap());
    let root = graph.unary(Unary::Sqrt, key).unwrap();
    let size = graph.unary(Unary::Abs, root).unwrap();
    let second = graph.pick(wide, vec![1, 2], vec![1, 1, 2], Some(1)).unwrap();
    graph.outputs = vec![folds[0], folds[1], root, size, graph.unary(Unary::Exp, second).unwrap()];
    let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
    #[cfg(feature = "cuda")]
    DeviceProgram::check(&program).unwrap();
    let row: Vec<f32> = (0..21).map(|n| n as f32 / 4.0).collect();
    let made = run(&program, 1, &[&row[1..]], &|_| row.clone());
    let want =
        graph.outputs.iter().flat_map(|&id| interpret::row(&graph.values, id, &[&row[1..], &row[..20], &row[20..]]));
    near(&made[0], &want.collect::<Vec<_>>(), "the row");
}

/// Single numbers between wide values are computed in one step per side, and slices of a value are read in place.
#[test]
fn scalars_are_computed_in_chains() {
    let mut graph = Graph::new(vec![input(Side::Pair, 3), input(Side::Pair, 1), input(Side::User, 1)]);
    let given: Vec<Id> = (0..3).map(|n| graph.input(n).unwrap()).collect();
    let wide = graph.unary(Unary::Exp, given[0]).unwrap();
    let second = graph.pick(wide, vec![1], vec![1, 1, 1], Some(1)).unwrap();
    let sum = graph.binary(Binary::Add, second, given[1]).unwrap();
    let root = graph.unary(Unary::Sqrt, sum).unwrap();
    let times = graph.binary(Binary::Max, root, given[2]).unwrap();
    let spread = graph.binary(Binary::Mul, times, wide).unwrap();
    let size = graph.unary(Unary::Abs, root).unwrap();
    let less = graph.binary(Binary::Min, size, given[1]).unwrap();
    graph.outputs = vec![graph.binary(Binary::Div, spread, less).unwrap()];
    let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
    let links: Vec<usize> = program
        .straight
        .rows
        .iter()
        .filter_map(|s| if let steps::Work::Chain { links, .. } = &s.work { Some(links.len()) } else { None })
        .collect();
    assert_eq!((links, program.straight.rows.len()), (vec![5], 4), "{program:?}");
    let made = run(&program, 1, &[&[9.0]], &|_| vec![0.5, 1.0, -1.0, 2.0]);
    near(&made[0], &interpret::row(&graph.values, graph.outputs[0], &[&[0.5, 1.0, -1.0], &[2.0], &[9.0]]), "the row");
}

/// A difference of flags or times is computed before it is multiplied by a large factor; a quotient stays a quotient.
#[test]
fn sums_of_large_terms_are_made_before_they_are_multiplied() {
    let mut graph = Graph::new(vec![input(Side::User, 1), input(Side::Pair, 1), input(Side::Pair, 1)]);
    let [mine, column, score] = [0, 1, 2].map(|n| graph.input(n).unwrap());
    let away = graph.binary(Binary::Sub, mine, column).unwrap();
    let far = graph.number(vec![], vec![-1e9]).unwrap();
    let masked = graph.binary(Binary::Mul, away, far).unwrap();
    let masked = graph.binary(Binary::Add, score, masked).unwrap();
    let weights = graph.number(vec![1, 4], vec![0.125, -0.1, 3.0, 0.3]).unwrap();
    let layer = graph.matmul(away, weights).unwrap();
    let share = graph.binary(Binary::Div, score, mine).unwrap();
    graph.outputs = vec![masked, layer, share];
    let both = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
    for plan in [&both.straight, &both.collapsed] {
        let program = RowProgram { straight: plan.clone(), collapsed: plan.clone(), ..both.clone() };
        let one = |mine: f32, column: f32, score: f32| run(&program, 1, &[&[mine]], &|_| vec![column, score]).remove(0);
        assert_eq!(one(1.0, 1.0, 0.3)[0], 0.3, "{program:?}");
        let hours = one(490_000.0, 489_997.0, 0.0);
        near(&hours[1..5], &[0.375, -0.3, 9.0, 0.9], "three hours");
        // The reciprocal of such a small number is infinite.
        assert_eq!(one(1e-40, 0.0, 1e-40)[5], 1.0);
        assert_eq!(one(1e-40, 0.0, 0.0)[5], 0.0);
    }
}

/// Columns of different deviations: the smallest divisor decides.
#[test]
fn sums_are_made_before_they_are_divided_by_a_small_number() {
    let mut graph = Graph::new(vec![input(Side::Pair, 2)]);
    let column = graph.input(0).unwrap();
    let offset = graph.number(vec![2], vec![50.0, 0.0]).unwrap();
    let deviation = graph.number(vec![2], vec![1e-3, 1.0]).unwrap();
    let sum = graph.binary(Binary::Add, column, offset).unwrap();
    graph.outputs = vec![graph.binary(Binary::Div, sum, deviation).unwrap()];
    let both = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
    for plan in [&both.straight, &both.collapsed] {
        let program = RowProgram { straight: plan.clone(), collapsed: plan.clone(), ..both.clone() };
        let made = run(&program, 1, &[], &|_| vec![-50.001, 3.0]).remove(0);
        near(&made, &[(50.0 - 50.001) / 1e-3, 3.0], "near the mean");
    }
}

#[test]
fn only_numbers_that_lie_in_memory_are_limited() {
    let wide = || Graph::new(vec![input(Side::Pair, 1 << 20)]);
    // As many numbers as a text encoder of 512 tokens computes, of which two values at a time lie in memory.
    let mut graph = wide();
    let mut last = graph.input(0).unwrap();
    for _ in 0..200 {
        last = graph.unary(Unary::Neg, last).unwrap();
    }
    graph.outputs = vec![last];
    plan::plan(&graph, Precision::F32, true).unwrap();
    // Values that are all read at the end.
    let mut graph = wide();
    let first = graph.input(0).unwrap();
    let each: Vec<Id> = (0..70)
        .map(|n| {
            let number = graph.number(vec![1, 1], vec![n as f32]).unwrap();
            graph.binary(Binary::Add, first, number).unwrap()
        })
        .collect();
    let mut sum = first;
    for &one in each.iter().rev() {
        sum = graph.binary(Binary::Max, sum, one).unwrap();
    }
    graph.outputs = vec![sum];
    let error = plan::plan(&graph, Precision::F32, true).unwrap_err().to_string();
    assert!(error.contains("numbers in the buffers of a request"), "{error}");
    // A rejected value leaves room for others.
    let mut graph = wide();
    let first = graph.input(0).unwrap();
    graph.number(vec![1 << 25], vec![1.0; 1 << 25]).unwrap();
    assert!(graph.number(vec![1 << 26], vec![1.0; 1 << 26]).is_err());
    graph.unary(Unary::Neg, first).unwrap();
    // Indices, and one value.
    let mut graph = wide();
    let first = graph.input(0).unwrap();
    let mut picked = |n: u32| {
        graph.pick(first, (n..n + (1 << 20)).rev().map(|n| n % (1 << 20)).collect(), vec![1, 1 << 20], Some(0))
    };
    let error = (0..70).find_map(|n| picked(n).err()).unwrap().to_string();
    assert!(error.contains("in constants and indices"), "{error}");
    let mut graph = wide();
    let first = graph.input(0).unwrap();
    let column = graph.reshape(first, vec![1, 1 << 20, 1], Some(0)).unwrap();
    let matrix = graph.number(vec![1, 1, 100], vec![1.0; 100]).unwrap();
    let error = graph.matmul(column, matrix).unwrap_err().to_string();
    assert!(error.contains("expected 1 to 67108864 numbers"), "{error}");
}

/// Of a concatenation, only values that another value selects are computed.
#[test]
fn unselected_values_are_not_computed() {
    let mut graph = Graph::new((0..3).map(|_| input(Side::Pair, 2)).collect());
    let given: Vec<Id> = (0..3).map(|n| graph.input(n).unwrap()).collect();
    let parts = [Unary::Exp, Unary::Sqrt, Unary::Tanh]
        .iter()
        .zip(&given)
        .map(|(f, &a)| graph.unary(*f, a).unwrap())
        .collect::<Vec<_>>();
    let all = graph.concat(2, &parts).unwrap();
    let [two, behind, whole] = [vec![5u32, 0, 1], vec![3], (0..6).collect()].map(|index: Vec<u32>| {
        let shape = vec![1, 1, index.len()];
        graph.pick(all, index, shape, Some(1)).unwrap()
    });
    let reads = |id: Id| {
        graph
            .needed(&[id], &[])
            .into_iter()
            .zip(0..)
            .filter_map(|(needed, id)| needed.then_some(id))
            .collect::<Vec<_>>()
    };
    assert!(parts.iter().map(|part| reads(two).contains(part)).eq([true, false, true]));
    assert!(parts.iter().map(|part| reads(behind).contains(part)).eq([false, true, false]));
    assert!(parts.iter().all(|part| reads(whole).contains(part)));
    let inputs: [&[f32]; 3] = [&[0.0, 1.0], &[4.0, 9.0], &[0.0, 20.0]];
    assert_eq!(interpret::row(&graph.values, two, &inputs), [1.0, 1.0, 1f32.exp()]);
    assert_eq!(interpret::row(&graph.values, behind, &inputs), [3.0]);
}

fn file(path: &str) -> Vec<u8> {
    std::fs::read(format!("{}/{path}", concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))).unwrap()
}

fn given(name: &str, is_pair: bool, shape: &[Size]) -> DeclaredInput {
    DeclaredInput { name: name.into(), is_pair, shape: shape.to_vec() }
}

const ROWS: Size = Size::Rows;

fn fixed(n: i64) -> Size {
    Size::Fixed(n)
}

/// Loads a graph of the tiny package with its inputs.
fn tiny(name: &str) -> (Vec<u8>, Vec<DeclaredInput>, (&'static str, Vec<Size>)) {
    let rows = |name: &str, width: i64| given(name, true, &[ROWS, fixed(width)]);
    let (inputs, output) = match name {
        "user" => (vec![rows("installed", 4), rows("section", 2), rows("size", 3)], ("query", vec![ROWS, fixed(4)])),
        "users" => (vec![rows("installed", 4), rows("section", 2)], ("query", vec![ROWS, fixed(2), fixed(4)])),
        "item" => (vec![rows("package", 4), rows("section", 2)], ("item", vec![ROWS, fixed(4)])),
        _ => (
            vec![
                given("query", false, &[fixed(1), fixed(4)]),
                given("item", true, &[fixed(1), ROWS, fixed(4)]),
                given("popularity", true, &[fixed(1), ROWS]),
            ],
            ("logits", vec![fixed(1), ROWS, fixed(2)]),
        ),
    };
    (file(&format!("tests/golden/tiny/{name}.onnx")), inputs, output)
}

fn made(name: &str, shape: &[Size]) -> DeclaredOutput {
    DeclaredOutput { name: name.into(), shape: shape.to_vec() }
}

fn lower(bytes: &[u8], given: &[DeclaredInput], output: &(&'static str, Vec<Size>)) -> Result<RowProgram> {
    RowProgram::lower(bytes, given, &[made(output.0, &output.1)])
}

/// Tensor of a golden file.
#[derive(Deserialize)]
pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f32>,
}

/// Results of ONNX Runtime for a graph of the tiny package.
#[derive(Deserialize)]
pub(crate) struct Case {
    pub(crate) graph: String,
    pub(crate) inputs: Vec<Named>,
    pub(crate) output: Named,
}

impl Case {
    pub(crate) fn all() -> Vec<Case> {
        serde_json::from_slice(&file("tests/golden/tiny/cases.json")).unwrap()
    }
}

#[test]
fn the_graphs_of_the_tiny_package_answer_as_onnxruntime_does() {
    let cases = Case::all();
    for case in &cases {
        let (bytes, inputs, output) = tiny(&case.graph);
        let program = lower(&bytes, &inputs, &output).unwrap();
        let is_reranker = case.graph == "overarch";
        // The first query of a reranker's case.
        let rows = if is_reranker { case.inputs[1].shape[1] } else { case.output.shape[0] };
        let user: Vec<&[f32]> = if is_reranker { vec![&case.inputs[0].values[..4]] } else { Vec::new() };
        let pairs = &case.inputs[usize::from(is_reranker)..];
        let first = if is_reranker { case.inputs[0].shape[0] } else { 1 };
        let row = |n: usize| {
            let of = |named: &Named| {
                let width = named.values.len() / (rows * first);
                named.values[n * width..(n + 1) * width].to_vec()
            };
            pairs.iter().flat_map(of).collect()
        };
        for (n, got) in run(&program, rows, &user, &row).iter().enumerate() {
            near(got, &case.output.values[n * got.len()..(n + 1) * got.len()], &format!("{} row {n}", case.graph));
        }
    }
    assert_eq!(cases.len(), 4);
}

#[derive(Deserialize)]
struct GoldenInput {
    name: String,
    is_pair: bool,
    shape: Vec<usize>,
    values: Vec<f32>,
}

#[derive(Deserialize)]
struct GoldenOutput {
    name: String,
    shape: Vec<usize>,
    values: Vec<f32>,
}

#[derive(Deserialize)]
struct GoldenCase {
    graph: String,
    inputs: Vec<GoldenInput>,
    outputs: Vec<GoldenOutput>,
}

/// Graphs that `python/make_dense_golden.py` and `python/make_import_golden.py` wrote: models of PyTorch's exporters, and each
/// operator of the table.
fn golden() -> Vec<GoldenCase> {
    let of = |(folder, file_name): (&str, &str)| {
        let cases: Vec<GoldenCase> =
            serde_json::from_slice(&file(&format!("tests/golden/{folder}/{file_name}.json"))).unwrap();
        cases
            .into_iter()
            .map(|case| GoldenCase { graph: format!("{folder}/{}", case.graph), ..case })
            .collect::<Vec<_>>()
    };
    [("dense", "cases"), ("dense", "sequences"), ("import", "cases")].into_iter().flat_map(of).collect()
}

impl GoldenCase {
    /// Returns the rows axis and the number of rows.
    fn rows(&self) -> (usize, usize) {
        let axis = usize::from(self.inputs.iter().any(|i| i.name == "item"));
        (axis, self.inputs.iter().find(|i| i.is_pair).unwrap().shape[axis])
    }

    fn lower(&self) -> Result<RowProgram> {
        self.lower_bytes(&file(&format!("tests/golden/{}.onnx", self.graph)))
    }

    fn lower_bytes(&self, bytes: &[u8]) -> Result<RowProgram> {
        let (axis, _) = self.rows();
        let size = |n: usize, d: usize, is_pair: bool| if is_pair && n == axis { ROWS } else { fixed(d as i64) };
        let sizes = |shape: &[usize], is_pair: bool| {
            shape.iter().enumerate().map(|(n, &d)| size(n, d, is_pair)).collect::<Vec<_>>()
        };
        let inputs: Vec<DeclaredInput> =
            self.inputs.iter().map(|i| given(&i.name, i.is_pair, &sizes(&i.shape, i.is_pair))).collect();
        // Some outputs of `operators` have their rows on a later axis.
        let of_output = |o: &GoldenOutput| {
            let axis = if o.shape[axis] == self.rows().1 { axis } else { o.shape.len() - 2 };
            let size = |(n, &d): (usize, &usize)| if n == axis { ROWS } else { fixed(d as i64) };
            made(&o.name, &o.shape.iter().enumerate().map(size).collect::<Vec<_>>())
        };
        let outputs: Vec<DeclaredOutput> = self.outputs.iter().map(of_output).collect();
        RowProgram::lower(bytes, &inputs, &outputs)
    }

    /// Returns the numbers of row `n` in a tensor.
    fn row(&self, n: usize, shape: &[usize], values: &[f32]) -> Vec<f32> {
        let (axis, rows) = self.rows();
        let axis = if shape[axis] == rows { axis } else { shape.len() - 2 };
        let inner: usize = shape[axis + 1..].iter().product();
        let outer: usize = shape[..axis].iter().product();
        (0..outer).flat_map(|o| values[(o * rows + n) * inner..][..inner].to_vec()).collect()
    }
}

#[test]
fn models_of_pytorch_and_every_operator_answer_as_onnxruntime_does() {
    let cases = golden();
    for case in &cases {
        let program = case.lower().unwrap_or_else(|e| panic!("{}: {e}", case.graph));
        let user: Vec<&[f32]> = case.inputs.iter().filter(|i| !i.is_pair).map(|i| &i.values[..]).collect();
        let pairs = || case.inputs.iter().filter(|i| i.is_pair);
        let row = |n: usize| pairs().flat_map(|i| case.row(n, &i.shape, &i.values)).collect::<Vec<f32>>();
        let rows = case.rows().1;
        for kernels in Kernels::all() {
            for plan in [&program.straight, &program.collapsed] {
                let program =
                    RowProgram { kernels, straight: plan.clone(), collapsed: plan.clone(), ..program.clone() };
                for (n, got) in run(&program, rows, &user, &row).iter().enumerate() {
                    let mut first = 0;
                    for output in &case.outputs {
                        let want = case.row(n, &output.shape, &output.values);
                        let got = &got[first..first + want.len()];
                        near(got, &want, &format!("{} {} `{}` row {n}", kernels.name(), case.graph, output.name));
                        first += want.len();
                    }
                }
            }
        }
    }
    assert_eq!(cases.len(), 20);
}

/// A reranker without a history, as in early versions of the demo, with its inputs.
fn reranker() -> (Vec<u8>, Vec<DeclaredInput>, (&'static str, Vec<Size>)) {
    let mut inputs =
        vec![given("query", false, &[fixed(1), fixed(64)]), given("item", true, &[fixed(1), ROWS, fixed(64)])];
    for name in ["log_popularity", "log_build", "log_depends", "log_recommends", "log_suggests"] {
        inputs.push(given(name, true, &[fixed(1), ROWS]));
    }
    (file("tests/golden/reranker.onnx"), inputs, ("logits", vec![fixed(1), ROWS, fixed(5)]))
}

#[test]
fn a_reranker_collapses_to_three_products_per_row() {
    let (bytes, inputs, output) = reranker();
    let program = lower(&bytes, &inputs, &output).unwrap();
    let products = |plan: &Plan| plan.rows.iter().filter(|s| matches!(s.work, steps::Work::Product { .. })).count();
    assert_eq!((products(&program.collapsed), program.collapsed.rows.len()), (3, 3));
    assert!(program.collapsed.row_work * 2 < program.straight.row_work);
    let graph = import::import(&bytes, &inputs, &[made(output.0, &output.1)]).unwrap();
    let query: Vec<f32> = numbers(64, 1).iter().map(|x| x / 8.0).collect();
    let row = |n: usize| numbers(69, n).iter().map(|x| x / 8.0).collect::<Vec<f32>>();
    let made = run(&program, 200, &[&query], &row);
    for (n, got) in made.iter().enumerate() {
        let row = row(n);
        let mut inputs = vec![&query[..], &row[..64]];
        inputs.extend((64..69).map(|c| &row[c..=c]));
        near(got, &interpret::row(&graph.values, graph.outputs[0], &inputs), &format!("row {n}"));
    }
}

#[test]
fn bf16_rerankers_store_pairs_between_products() {
    let (bytes, inputs, output) = reranker();
    let single = lower(&bytes, &inputs, &output).unwrap();
    let graph = import::import(&bytes, &inputs, &[made(output.0, &output.1)]).unwrap();
    let query: Vec<f32> = numbers(64, 1).iter().map(|x| x / 8.0).collect();
    let row = |n: usize| numbers(69, n).iter().map(|x| x / 8.0).collect::<Vec<f32>>();
    let want = run(&single, 300, &[&query], &row);
    for kernels in Kernels::tried().into_iter().filter(|k| k.has_bf16()) {
        let both = RowProgram::of(&graph, Precision::Bf16, kernels).unwrap();
        let program = RowProgram { straight: both.collapsed.clone(), ..both };
        let forms: Vec<(Form, Form)> = program
            .collapsed
            .rows
            .iter()
            .filter_map(|step| match step.work {
                steps::Work::Product { factors, result, .. } => Some((factors, result)),
                _ => None,
            })
            .collect();
        let expected = [(Form::Pairs, Form::Pairs), (Form::Pairs, Form::Single), (Form::Single, Form::Single)];
        assert_eq!(forms, expected);
        let made = run(&program, 300, &[&query], &row);
        let scale = want.iter().flatten().fold(0f32, |most, x| most.max(x.abs()));
        for (n, (got, want)) in made.iter().zip(&want).enumerate() {
            let off = got.iter().zip(want).fold(0f32, |most, (x, y)| most.max((x - y).abs()));
            assert!(off <= 0.02 * scale, "row {n}: {got:?} is not {want:?}");
            assert_eq!(&run(&program, 1, &[&query], &|_| row(n))[0][..], &got[..], "row {n} alone");
        }
    }
}

#[test]
fn unsupported_operators_are_rejected_by_name() {
    let size = [given("size", true, &[ROWS, fixed(3)])];
    for (name, expected) in [
        ("wrong_operator", "operator `Frobnicate`"),
        ("wrong_rows", "fixes the number of candidates of an input of shape [1, 3], expected any number"),
        ("wrong_type", "output `query` has integers"),
    ] {
        let bytes = file(&format!("tests/golden/tiny/{name}.onnx"));
        let error = RowProgram::lower(&bytes, &size, &[made("query", &[ROWS, fixed(3)])]).unwrap_err().to_string();
        assert!(error.contains(expected), "got `{error}`, expected `{expected}`");
    }
    let (bytes, inputs, _) = tiny("user");
    let error = RowProgram::lower(&bytes, &inputs, &[made("query", &[ROWS, fixed(5)])]).unwrap_err().to_string();
    assert!(error.contains("output `query`"), "{error}");
    let error = RowProgram::lower(&bytes, &inputs[..2], &[made("query", &[ROWS, fixed(4)])]).unwrap_err().to_string();
    assert!(error.contains("input `size`"), "{error}");
    let mut model = ModelProto::parse_buf(&bytes).unwrap();
    let node = &mut model.graph.as_mut().unwrap().node[0];
    let other = AttributeProto { name: Some("axes_of_evil".into()), ..Default::default() };
    node.attribute.push(other);
    let error =
        RowProgram::lower(&model.write_buf().unwrap(), &inputs, &[made("query", &[ROWS, fixed(4)])]).unwrap_err();
    assert!(error.to_string().contains("attribute `axes_of_evil`"), "{error}");
}

#[test]
fn a_flipped_byte_never_panics() {
    for name in ["user", "users", "item", "overarch"] {
        let (whole, inputs, output) = tiny(name);
        for (at, bit) in (0..whole.len()).flat_map(|at| [(at, at % 8), (at, (at + 3) % 8)]) {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << bit;
            if let Ok(program) = lower(&bytes, &inputs, &output) {
                run(&program, 3, &[&[0.5; 4]], &|n| numbers(program.given, n));
            }
        }
        for length in 0..whole.len() {
            let _ = lower(&whole[..length], &inputs, &output);
        }
    }
}

#[test]
fn graphs_of_pytorch_with_flipped_bytes_never_panic() {
    for case in golden() {
        let whole = file(&format!("tests/golden/{}.onnx", case.graph));
        let step = if case.graph.starts_with("import") { 1_009 } else { 113 };
        for at in (0..whole.len()).step_by(step) {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            if let Ok(program) = case.lower_bytes(&bytes) {
                let user: Vec<&[f32]> = case.inputs.iter().filter(|i| !i.is_pair).map(|i| &i.values[..]).collect();
                run(&program, 2, &user, &|n| numbers(program.given, n));
            }
        }
    }
}

#[test]
fn compiled_graphs_allocate_nothing_after_warm_up() {
    let (bytes, inputs, output) = reranker();
    let program = lower(&bytes, &inputs, &output).unwrap();
    let mut scratch = Scratch::default();
    let mut score = |rows: usize| {
        let mut fill = |given: InputRows<'_>| given.each(|n, row| row.fill(n as f32 / 1000.0));
        program.run(rows, &[&[0.1; 64]], &mut scratch, &mut fill, &mut |_, _, _| Ok(())).unwrap();
    };
    score(1000);
    score(5);
    let allocated = allocation_counter::measure(|| {
        score(1000);
        score(5);
    });
    assert_eq!(allocated.count_total, 0);
}
