//! Compares both halves of split graphs with the complete graph, and checks which cuts pay off.

use super::super::split::{best_cut, split};
use super::*;

/// Compiles both halves of a graph.
fn halves(graph: &Graph, is_item: &[bool], cut: &ItemCut, kernels: Kernels) -> Halves {
    let parts = split(graph, is_item, cut).unwrap();
    let program = |graph: &Graph| RowProgram::of(graph, Precision::F32, kernels).unwrap();
    Halves {
        digest: parts.item.digest(cut),
        item: program(&parts.item.graph),
        item_inputs: parts.item.inputs,
        candidates: program(&parts.candidates.graph),
        candidate_inputs: parts.candidates.inputs,
        width: parts.width,
    }
}

/// Returns a cut at these values.
fn cut_at(ids: &[Id]) -> ItemCut {
    serde_json::from_value(serde_json::json!(ids)).unwrap()
}

/// Returns the numbers of a row in some of the inputs after the user's.
fn some(row: &[f32], inputs: &[usize]) -> Vec<f32> {
    let width = row.len() - 1;
    let of = |&n: &usize| if n == 1 { row[..width].to_vec() } else { row[width..].to_vec() };
    inputs.iter().filter(|n| **n > 0).flat_map(of).collect()
}

/// Returns the item's values: not constant, and dependent on inputs of the item alone.
fn items(graph: &Graph, is_item: &[bool]) -> Vec<Id> {
    let (mut reads_item, mut reads_other) = (Vec::new(), Vec::new());
    for value in &graph.values {
        let (item, other) = match value.op {
            super::super::ir::Op::Inputs(n) => (is_item[n], !is_item[n]),
            ref op => {
                let any = |of: &[bool]| op.reads().iter().any(|&read| of[read]);
                (any(&reads_item), any(&reads_other))
            }
        };
        reads_item.push(item);
        reads_other.push(other);
    }
    let is_input = |id: Id| matches!(graph.values[id].op, super::super::ir::Op::Inputs(_));
    (0..graph.values.len()).filter(|&id| reads_item[id] && !reads_other[id] && !is_input(id)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn both_halves_of_every_split_compute_what_the_graph_defines(
        width in widths(), rows in widths(), of_column in any::<bool>(), picks in any::<u64>(),
        steps in prop::collection::vec((any::<u8>(), 0usize..32, 0usize..32, 1usize..130), 4..16),
    ) {
        let rows = rows.min(ROOM / width).max(1);
        let graph = graph(width, &steps);
        // Inputs are a query, a row and a column; the column may be the retrieval score.
        let is_item = [false, true, of_column];
        let query = numbers(width, 5);
        let row = |n: usize| numbers(width + 1, n);
        let mean = |n: usize, id: Id| {
            let row = row(n);
            interpret::row(&graph.values, id, &[&query, &row[..width], &row[width..]])
        };
        let needed = graph.needed(&graph.outputs, &[]);
        let items: Vec<Id> = items(&graph, &is_item).into_iter().filter(|&id| needed[id]).collect();
        let random: Vec<Id> = items.iter().copied().filter(|id| picks >> (id % 64) & 1 == 1).collect();
        let mut cuts: Vec<ItemCut> = [&items, &random].into_iter().filter(|c| !c.is_empty()).map(|c| cut_at(c)).collect();
        cuts.extend(best_cut(&graph, &is_item, &[0; 3]).unwrap());
        let all = |ids: &[Id]| -> Vec<Vec<f32>> {
            (0..rows).map(|n| ids.iter().flat_map(|&id| mean(n, id)).collect()).collect()
        };
        let outputs = all(&graph.outputs);
        prop_assume!(outputs.iter().flatten().all(|x| x.is_finite()));
        for cut in &cuts {
            let retained = all(&serde_json::from_value::<Vec<Id>>(serde_json::to_value(cut).unwrap()).unwrap());
            for kernels in Kernels::all() {
                let halves = halves(&graph, &is_item, cut, kernels);
                let of_item = run(&halves.item, rows, &[], &|n| some(&row(n), &halves.item_inputs));
                for (n, (got, want)) in of_item.iter().zip(&retained).enumerate() {
                    prop_assert_eq!(want.len(), halves.width);
                    near(got, want, &format!("{} item of row {n}", kernels.name()));
                }
                let given = |n: usize| [of_item[n].clone(), some(&row(n), &halves.candidate_inputs)].concat();
                for plan in [&halves.candidates.straight, &halves.candidates.collapsed] {
                    let (straight, collapsed) = (plan.clone(), plan.clone());
                    let program = RowProgram { straight, collapsed, ..halves.candidates.clone() };
                    let made = run(&program, rows, &[&query], &given);
                    for (n, (got, want)) in made.iter().zip(&outputs).enumerate() {
                        near(got, want, &format!("{} row {n}", kernels.name()));
                        if n % 7 == 0 {
                            let alone = run(&program, 1, &[&query], &|_| given(n));
                            prop_assert_eq!(&alone[0], got);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn user_side_steps_run_once_per_request(
        width in widths(),
        steps in prop::collection::vec((any::<u8>(), 0usize..32, 0usize..32, 1usize..130), 1..14),
    ) {
        let graph = graph(width, &steps);
        let program = RowProgram::of(&graph, Precision::F32, Kernels::best()).unwrap();
        for plan in [&program.straight, &program.collapsed] {
            let reads_row = |step: &steps::Step| {
                let places = step.work.places();
                places.iter().any(|place| matches!(place.memory, steps::Memory::Rows(_) | steps::Memory::Given))
            };
            // Except for values that are copied to every row because they are outputs of each.
            let is_spread = |step: &steps::Step| matches!(step.work, steps::Work::Pick { .. });
            prop_assert!(plan.rows.iter().all(|step| reads_row(step) || is_spread(step)));
            prop_assert!(!plan.user.iter().any(reads_row));
        }
    }
}

/// Cost of reading a query, a row and a column.
const WORK: [usize; 3] = [0, 256, 400];

/// A network of three layers over an item of 64 numbers, whose product with the query is the output.
fn deep_item(width: usize) -> Graph {
    let mut graph = Graph::new(vec![input(Side::User, width), input(Side::Pair, 64), input(Side::Pair, 1)]);
    let mut x = graph.input(1).unwrap();
    for (n, (depth, columns)) in [(64, 256), (256, 256), (256, width)].into_iter().enumerate() {
        let weights = graph.number(vec![depth, columns], numbers(depth * columns, n)).unwrap();
        x = graph.matmul(x, weights).unwrap();
        if n < 2 {
            x = graph.unary(Unary::Relu, x).unwrap();
        }
    }
    let query = graph.input(0).unwrap();
    let product = graph.binary(Binary::Mul, x, query).unwrap();
    graph.outputs = vec![graph.fold(Fold::Sum, product, &[2]).unwrap()];
    graph
}

#[test]
fn item_side_networks_are_precomputed_at_their_narrowest_tensor() {
    let is_item = [false, true, true];
    // Its last layer is linear: the query goes through it once, and the cut is before or after it.
    let cut = best_cut(&deep_item(16), &is_item, &WORK).unwrap().expect("a cut");
    let narrow = split(&deep_item(16), &is_item, &cut).unwrap();
    assert_eq!((narrow.width, narrow.candidates.inputs), (16, vec![0]));
    let cut = best_cut(&deep_item(400), &is_item, &WORK).unwrap().expect("a cut");
    assert_eq!(split(&deep_item(400), &is_item, &cut).unwrap().width, 256);
    // Without item inputs, no value is the item's.
    assert_eq!(best_cut(&deep_item(16), &[false, false, false], &WORK).unwrap(), None);
}

/// Storing the first value and the narrow layer is cheaper than storing nothing, but storing the wide layer alone is cheapest.
/// Both wide values would exceed the limit of stored numbers.
#[test]
fn a_value_may_be_stored_alone() {
    let inputs = vec![input(Side::User, 900), input(Side::User, 512), input(Side::Pair, 900)];
    let mut graph = Graph::new(inputs);
    let [first, second, item] = [0, 1, 2].map(|n| graph.input(n).unwrap());
    let layer = |graph: &mut Graph, x: Id, depth: usize, columns: usize| {
        let weights = graph.number(vec![depth, columns], numbers(depth * columns, columns)).unwrap();
        graph.matmul(x, weights).unwrap()
    };
    let narrow = layer(&mut graph, item, 900, 78);
    let [narrow, wide] = [graph.unary(Unary::Tanh, narrow), graph.unary(Unary::Tanh, item)].map(Result::unwrap);
    let last = layer(&mut graph, narrow, 78, 512);
    let sum = graph.binary(Binary::Add, last, second).unwrap();
    let sum = graph.unary(Unary::Tanh, sum).unwrap();
    let product = graph.binary(Binary::Mul, wide, first).unwrap();
    let product = graph.unary(Unary::Tanh, product).unwrap();
    let folds = [sum, product].map(|x| graph.fold(Fold::Sum, x, &[2]).unwrap());
    graph.outputs = vec![graph.concat(2, &folds).unwrap()];
    let cut = best_cut(&graph, &[false, false, true], &[0, 0, 20_000]).unwrap().expect("a cut");
    assert_eq!(cut, cut_at(&[last]));
}

#[test]
fn item_side_values_are_not_stored_if_fusing_is_cheaper() {
    let (bytes, inputs, output) = reranker();
    let network = ReadGraph::read(&bytes, &inputs, &[made(output.0, &output.1)]).unwrap();
    let is_item: Vec<bool> = inputs.iter().map(|input| input.is_pair).collect();
    assert_eq!(network.best_cut(&is_item, &vec![1000; is_item.len()]).unwrap(), None);
}

#[test]
fn splits_of_another_graph_are_rejected() {
    let graph = deep_item(16);
    let is_item = [false, true, true];
    for ids in [&[][..], &[9999], &[usize::MAX], &[0], &[graph.outputs[0]], &[3, 3], &[5, 3]] {
        let error = split(&graph, &is_item, &cut_at(ids)).unwrap_err().to_string();
        assert!(error.contains("not a cut of this graph"), "{ids:?}: {error}");
    }
}

#[test]
fn the_digest_of_item_side_values_depends_on_weights_and_values() {
    let made = |weight: f32| {
        let mut graph = Graph::new(vec![input(Side::User, 2), input(Side::Pair, 2)]);
        let (query, item) = (graph.input(0).unwrap(), graph.input(1).unwrap());
        let all: Vec<Id> = [weight, 1.0]
            .iter()
            .map(|&w| {
                let matrix = graph.number(vec![2, 2], vec![w, 0.5, 0.25, 2.0]).unwrap();
                let product = graph.matmul(item, matrix).unwrap();
                graph.unary(Unary::Tanh, product).unwrap()
            })
            .collect();
        let both = graph.binary(Binary::Add, all[0], all[1]).unwrap();
        graph.outputs = vec![graph.binary(Binary::Mul, both, query).unwrap()];
        (graph, all)
    };
    let digest = |graph: &Graph, at: Id| {
        let cut = cut_at(&[at]);
        let half = halves(graph, &[false, true], &cut, Kernels::best());
        (half.digest, half.item.digest())
    };
    let (graph, values) = made(0.125);
    let (other, _) = made(0.75);
    let (first, second) = (digest(&graph, values[0]), digest(&graph, values[1]));
    let changed = digest(&other, values[0]);
    assert!(first.1 == second.1 && first.1 == changed.1, "the texts are alike");
    assert!(first.0 != second.0 && first.0 != changed.0 && first.0.len() == 32);
    assert_eq!(first, digest(&made(0.125).0, values[0]));
}
