//! Tests of the evaluation against outputs of ONNX Runtime and the text of the ONNX reference.

#![allow(clippy::unwrap_used)]

use serde::Deserialize;

use super::*;
use crate::sandbox::graphs::{Builder, int, ints, node};

#[derive(Deserialize)]
struct Tensor {
    name: String,
    shape: Vec<usize>,
    values: Vec<f32>,
}

#[derive(Deserialize)]
struct Case {
    graph: String,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
}

fn real(tensor: &Tensor) -> Array {
    Array::real(tensor.shape.clone(), tensor.values.iter().map(|&x| f64::from(x)).collect())
}

/// Graphs written by `python/make_dense_golden.py` and `python/make_import_golden.py`: models of PyTorch's exporters, and each
/// supported operator.
#[test]
fn models_of_pytorch_and_every_operator_evaluate_as_in_onnxruntime() {
    let golden = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join("tests/golden");
    let cases = |(folder, name): (&str, &str)| {
        let folder = golden.join(folder);
        let cases: Vec<Case> = serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap();
        assert!(!cases.is_empty());
        cases.into_iter().map(move |case| (folder.clone(), case))
    };
    for (folder, case) in
        [("dense", "cases.json"), ("dense", "sequences.json"), ("import", "cases.json")].into_iter().flat_map(cases)
    {
        let oracle = Oracle::read(&std::fs::read(folder.join(format!("{}.onnx", case.graph))).unwrap()).unwrap();
        let inputs: Vec<(String, Array)> = case.inputs.iter().map(|input| (input.name.clone(), real(input))).collect();
        let names: Vec<&str> = case.outputs.iter().map(|output| output.name.as_str()).collect();
        // A random rounding to half precision is off by more than the tolerance here.
        let modes = [Mode::Exact, Mode::Nearest, Mode::Random(3)];
        for mode in modes.into_iter().take(if case.graph == "kinds" { 2 } else { 3 }) {
            let made = oracle.run(&inputs, &names, &mut Arithmetic::new(mode, u64::MAX), &mut |_, _, _| ());
            for (made, want) in made.unwrap_or_else(|e| panic!("{}: {e}", case.graph)).iter().zip(&case.outputs) {
                let name = &want.name;
                assert_eq!(made.shape, want.shape, "{} `{}`", case.graph, want.name);
                let scale = want.values.iter().fold(1f32, |most, x| most.max(x.abs()));
                for (got, want) in made.as_reals().into_iter().zip(&want.values) {
                    let is_near = (got - f64::from(*want)).abs() <= f64::from(scale) * 2e-5;
                    assert!(is_near || got as f32 == *want, "{} `{name}`: {got} is not {want}", case.graph);
                }
            }
        }
    }
}

/// Returns the result of one node.
fn made(node: NodeProto, inputs: &[Array]) -> Array {
    let names: Vec<String> = (0..inputs.len()).map(|n| format!("in{n}")).collect();
    let output = node.output[0].clone();
    let oracle = Oracle::read(&Builder::of(node).bytes(18)).unwrap();
    let inputs: Vec<(String, Array)> = names.into_iter().zip(inputs.iter().cloned()).collect();
    let mut all =
        oracle.run(&inputs, &[&output], &mut Arithmetic::new(Mode::Exact, u64::MAX), &mut |_, _, _| ()).unwrap();
    all.remove(0)
}

fn i64s(shape: &[usize], numbers: &[i64]) -> Array {
    Array::whole(array::Element::Signed(64), shape.to_vec(), numbers.to_vec())
}

fn f32s(shape: &[usize], numbers: &[f64]) -> Array {
    Array::real(shape.to_vec(), numbers.to_vec())
}

#[test]
fn integers_wrap_and_divide_as_their_type_does() {
    let i32s = |numbers: &[i64]| Array::whole(array::Element::Signed(32), vec![numbers.len()], numbers.to_vec());
    let product = made(node("Mul", &["in0", "in1"], "out"), &[i32s(&[100_000_000, -7]), i32s(&[64, 3])]);
    assert_eq!(product.wholes().unwrap(), [2_105_032_704, -21]);
    let quotient = made(node("Div", &["in0", "in1"], "out"), &[i64s(&[3], &[7, -7, 9]), i64s(&[1], &[2])]);
    assert_eq!(quotient.wholes().unwrap(), [3, -3, 4]);
    let rest = made(node("Mod", &["in0", "in1"], "out"), &[i64s(&[3], &[7, -7, 9]), i64s(&[1], &[3])]);
    assert_eq!(rest.wholes().unwrap(), [1, 2, 0]);
    let mean = made(node("ReduceMean", &["in0", "in1"], "out"), &[i64s(&[1, 3], &[1, 2, 5]), i64s(&[1], &[1])]);
    assert_eq!(mean.wholes().unwrap(), [2]);
    let cast = made(int(node("Cast", &["in0"], "out"), "to", 6), &[f32s(&[3], &[-1.9, 2.9, 3e9])]);
    assert_eq!(cast.wholes().unwrap(), [-1, 2, i64::from(i32::MIN)]);
}

#[test]
fn integers_of_two_shapes_are_broadcast() {
    let (column, row) = (i64s(&[3, 1], &[0, 1, 2]), i64s(&[1, 3], &[0, 1, 2]));
    let differences = made(node("Sub", &["in0", "in1"], "out"), &[column.clone(), row.clone()]);
    assert_eq!(
        (differences.shape.as_slice(), differences.wholes().unwrap()),
        (&[3, 3][..], &[0, -1, -2, 1, 0, -1, 2, 1, 0][..])
    );
    let equal = made(node("Equal", &["in0", "in1"], "out"), &[column, row]);
    assert_eq!(equal.wholes().unwrap(), [1, 0, 0, 0, 1, 0, 0, 0, 1]);
}

#[test]
fn ties_signs_and_axes_are_those_of_the_reference() {
    let ties = f32s(&[2, 3], &[1.0, 3.0, 3.0, 0.0, 0.0, 0.0]);
    let first = made(int(node("ArgMax", &["in0"], "out"), "axis", -1), std::slice::from_ref(&ties));
    assert_eq!((first.shape.as_slice(), first.wholes().unwrap()), (&[2, 1][..], &[1, 0][..]));
    let last =
        made(int(int(node("ArgMax", &["in0"], "out"), "axis", 1), "select_last_index", 1), std::slice::from_ref(&ties));
    assert_eq!(last.wholes().unwrap(), [2, 2]);
    let signs = made(node("Sign", &["in0"], "out"), &[f32s(&[3], &[-0.5, 0.0, 7.0])]);
    assert_eq!(signs.reals().unwrap(), [-1.0, 0.0, 1.0]);
    let flat = made(int(node("Flatten", &["in0"], "out"), "axis", -1), &[f32s(&[2, 1, 3], &[0.0; 6])]);
    assert_eq!(flat.shape, [2, 3]);
    let nothing = made(
        int(node("ReduceLogSumExp", &["in0", "in1"], "out"), "keepdims", 0),
        &[f32s(&[1, 2], &[f64::NEG_INFINITY; 2]), i64s(&[1], &[1])],
    );
    assert_eq!(nothing.reals().unwrap(), [f64::NEG_INFINITY]);
    let back = made(
        node("Slice", &["in0", "in1", "in2", "in3", "in4"], "out"),
        &[
            f32s(&[4], &[0.0, 1.0, 2.0, 3.0]),
            i64s(&[1], &[-1]),
            i64s(&[1], &[i64::MIN]),
            i64s(&[1], &[0]),
            i64s(&[1], &[-2]),
        ],
    );
    assert_eq!(back.reals().unwrap(), [3.0, 1.0]);
    let turned = made(
        ints(node("Transpose", &["in0"], "out"), "perm", &[1, 0]),
        &[f32s(&[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0])],
    );
    assert_eq!(turned.reals().unwrap(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
}

#[test]
fn unknown_operators_and_oversized_work_are_reported() {
    let unknown = Builder::of(node("Frobnicate", &["in0"], "out")).bytes(18);
    let run = |bytes: &[u8], limit: u64| {
        let inputs = [("in0".to_owned(), f32s(&[4, 4], &[1.0; 16]))];
        Oracle::read(bytes).unwrap().run(&inputs, &["out"], &mut Arithmetic::new(Mode::Exact, limit), &mut |_, _, _| ())
    };
    assert_eq!(run(&unknown, u64::MAX).unwrap_err(), Stop::Unknown("operator `Frobnicate`".into()));
    let product = Builder::of(node("MatMul", &["in0", "in0"], "out")).bytes(18);
    assert_eq!(run(&product, 63).unwrap_err(), Stop::TooLarge);
    assert!(run(&product, 100).is_ok());
}
