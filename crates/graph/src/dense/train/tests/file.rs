//! Selection of parameters among constants, and files with new values of them.

use rten_onnx::onnx::{DataType, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto};

use super::golden::file;
use super::*;

fn tower() -> (Vec<u8>, Vec<DeclaredInput>, Vec<DeclaredOutput>) {
    let row = |name: &str, width| DeclaredInput {
        name: name.into(),
        is_pair: true,
        shape: vec![Size::Rows, Size::Fixed(width)],
    };
    let given = vec![row("installed", 4), row("section", 2), row("size", 3)];
    let made = vec![DeclaredOutput { name: "query".into(), shape: vec![Size::Rows, Size::Fixed(4)] }];
    (file("tests/golden/tiny/user.onnx"), given, made)
}

fn names(graph: &TrainableGraph) -> Vec<&str> {
    graph.parameters().iter().map(|parameter| &parameter.name[..]).collect()
}

/// Returns a file whose numbers are stored as lists instead of raw bytes.
fn listed(onnx: &[u8]) -> Vec<u8> {
    let mut model = ModelProto::parse_buf(onnx).unwrap();
    let initializers = model.graph.as_mut().unwrap().initializer.iter_mut();
    for tensor in initializers.filter(|tensor| tensor.data_type == Some(DataType::FLOAT)) {
        if let Some(raw) = tensor.raw_data.take() {
            tensor.float_data = raw.borrow().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        }
    }
    model.write_buf().unwrap()
}

#[test]
fn a_written_file_holds_the_parameters_and_nothing_else_changes() {
    let (onnx, given, made) = tower();
    for onnx in [listed(&onnx), onnx] {
        let graph = TrainableGraph::read(&onnx, &given, &made, &[]).unwrap();
        assert_eq!(graph.write(graph.initial()).unwrap(), onnx);
        let others: Vec<f32> = (0..graph.initial().len()).map(|n| n as f32 / 8.0).collect();
        let written = graph.write(&others).unwrap();
        let again = TrainableGraph::read(&written, &given, &made, &[]).unwrap();
        assert_eq!((again.initial(), again.parameters()), (&others[..], graph.parameters()));
        assert_eq!(again.write(graph.initial()).unwrap(), onnx);
        assert!(graph.write(&others[1..]).unwrap_err().to_string().contains("numbers of parameters"));
    }
}

#[test]
fn frozen_constants_and_inputs_have_no_gradient() {
    let (onnx, given, made) = tower();
    let graph = TrainableGraph::read(&onnx, &given, &made, &[]).unwrap();
    assert_eq!(names(&graph), ["w2", "w4", "w7", "w9"]);
    let frozen = TrainableGraph::read(&onnx, &given, &made, &["epsilon", "w2", "size"]).unwrap();
    assert_eq!(names(&frozen), ["w4", "w7", "w9"]);
    let fill = |rows: InputRows<'_>| rows.each(|n, row| row.fill(n as f32 + 0.5));
    let batch = Batch { rows: 3, shared: &[], fill: &fill };
    let (mut workspace, mut all, mut some) =
        (Workspace::new(&Threads::default()), Gradients::default(), Gradients::default());
    let worth = [&[0.3, -0.5, 1.0, 0.25].repeat(3)[..]];
    graph.backward(graph.initial(), &batch, &worth, &mut workspace, &mut all).unwrap();
    frozen.backward(frozen.initial(), &batch, &worth, &mut workspace, &mut some).unwrap();
    assert!(all.inputs[2].iter().any(|x| *x != 0.0));
    assert_eq!(some.inputs[2], [0.0; 9]);
    for parameter in frozen.parameters() {
        let other = graph.parameters().iter().find(|other| other.name == parameter.name).unwrap();
        for (x, y) in some.parameters[parameter.range.clone()].iter().zip(&all.parameters[other.range.clone()]) {
            assert!((x - y).abs() <= 1e-5 * y.abs().max(1e-3), "{}: {x} is not {y}", parameter.name);
        }
    }
}

#[test]
fn single_numbers_are_parameters_if_a_module_named_them() {
    let (onnx, given, made) = tower();
    for (name, shape) in [("epsilon", vec![]), ("epsilon", vec![1]), ("epsilon", vec![1, 1]), ("net.epsilon", vec![1])]
    {
        let mut model = ModelProto::parse_buf(&onnx).unwrap();
        let graph = model.graph.as_mut().unwrap();
        for node in &mut graph.node {
            node.input.iter_mut().filter(|input| **input == "epsilon").for_each(|input| *input = name.into());
        }
        let tensor = graph.initializer.iter_mut().find(|tensor| tensor.name.as_deref() == Some("epsilon")).unwrap();
        (tensor.name, tensor.dims) = (Some(name.into()), shape.clone());
        let graph = TrainableGraph::read(&model.write_buf().unwrap(), &given, &made, &[]).unwrap();
        assert_eq!(names(&graph).contains(&name), name.contains('.'), "{name} {shape:?}");
    }
}

#[test]
fn invalid_input_is_rejected_by_name() {
    let (onnx, given, made) = tower();
    let refused = |onnx: &[u8], given: &[DeclaredInput], made: &[DeclaredOutput], frozen: &[&str], expected: &str| {
        let error = TrainableGraph::read(onnx, given, made, frozen).unwrap_err().to_string();
        assert!(error.contains(expected), "got `{error}`, expected `{expected}`");
    };
    refused(&onnx, &given, &made, &["w3"], "frozen `w3`");
    refused(&onnx, &given[..2], &made, &[], "input `size`");
    refused(&onnx[..onnx.len() / 2], &given, &made, &[], "");
    let size = [DeclaredInput { name: "size".into(), is_pair: true, shape: vec![Size::Rows, Size::Fixed(3)] }];
    let three = [DeclaredOutput { name: "query".into(), shape: vec![Size::Rows, Size::Fixed(3)] }];
    refused(&file("tests/golden/tiny/wrong_operator.onnx"), &size, &three, &[], "operator `Frobnicate`");
    let mut model = ModelProto::parse_buf(&onnx).unwrap();
    model.graph.as_mut().unwrap().initializer[0].dims[0] += 1;
    refused(&model.write_buf().unwrap(), &given, &made, &[], "constant `");
    for dims in [vec![-1, -6], vec![i64::MAX, 4], vec![0]] {
        model.graph.as_mut().unwrap().initializer[0].dims = dims;
        refused(&model.write_buf().unwrap(), &given, &made, &[], "constant `");
    }

    let graph = TrainableGraph::read(&onnx, &given, &made, &[]).unwrap();
    let fill = |rows: InputRows<'_>| rows.each(|_, row| row.fill(0.5));
    let (parameters, mut workspace, mut outputs, mut gradients) =
        (graph.initial(), Workspace::new(&Threads::default()), Vec::new(), Gradients::default());
    let batch = Batch { rows: 2, shared: &[], fill: &fill };
    let more = Batch { shared: &[&[1.0]], ..batch };
    assert!(graph.forward(&parameters[1..], &batch, &mut workspace, &mut outputs).is_err());
    assert!(graph.forward(parameters, &more, &mut workspace, &mut outputs).is_err());
    let worth = [0.0; 7];
    assert!(graph.backward(parameters, &batch, &[&worth], &mut workspace, &mut gradients).is_err());
    assert!(graph.backward(parameters, &batch, &[], &mut workspace, &mut gradients).is_err());
    // A batch without rows has gradients of 0.
    graph.backward(parameters, &Batch { rows: 0, ..batch }, &[&[]], &mut workspace, &mut gradients).unwrap();
    assert!(gradients.parameters.iter().all(|x| *x == 0.0) && gradients.parameters.len() == parameters.len());
}

#[test]
fn flipped_bytes_never_panic() {
    let (onnx, given, made) = tower();
    for at in 0..onnx.len() {
        let mut bytes = onnx.clone();
        bytes[at] ^= 1 << (at % 8);
        if let Ok(graph) = TrainableGraph::read(&bytes, &given, &made, &[]) {
            let _ = graph.write(graph.initial());
        }
        let _ = super::super::file::with_parameters(&onnx[..at], &[], &[]);
    }
}

/// Training keeps the graph of the file: values that cancel out have no gradient.
#[test]
fn graphs_with_parameters_are_those_of_their_files() {
    let node = |operator: &str, inputs: &[&str], output: &str| NodeProto {
        op_type: Some(operator.into()),
        input: inputs.iter().map(|name| (*name).to_owned()).collect(),
        output: vec![output.into()],
        ..NodeProto::default()
    };
    let weights = TensorProto {
        name: Some("w".into()),
        dims: vec![4, 3],
        data_type: Some(DataType::FLOAT),
        float_data: (0..12).map(|n| n as f32 / 8.0).collect(),
        ..TensorProto::default()
    };
    let nodes = vec![
        node("MatMul", &["x", "w"], "h"),
        node("Transpose", &["w"], "turned"),
        node("Softmax", &["h"], "p"),
        node("MatMul", &["p", "turned"], "out"),
    ];
    let graph = GraphProto { node: nodes, initializer: vec![weights], ..GraphProto::default() };
    let opset = OperatorSetIdProto { domain: None, version: Some(20) };
    let model = ModelProto { graph: Some(graph), opset_import: vec![opset], ..ModelProto::default() };
    let onnx = model.write_buf().unwrap();
    let shape = vec![Size::Rows, Size::Fixed(4)];
    let given = [DeclaredInput { name: "x".into(), is_pair: true, shape: shape.clone() }];
    let made = [DeclaredOutput { name: "out".into(), shape }];
    let trainable = TrainableGraph::read(&onnx, &given, &made, &[]).unwrap();
    assert_eq!(names(&trainable), ["w"]);
    let read = with_parameters(&onnx, &given, &made, trainable.parameters()).unwrap();
    assert!(!read.still.is_empty());
    let own = DeclaredInput { name: "w".into(), is_pair: false, shape: vec![Size::Fixed(4), Size::Fixed(3)] };
    let of_file = crate::dense::import::import(&onnx, &[given[0].clone(), own], &made).unwrap();
    assert_eq!(format!("{read:?}"), format!("{of_file:?}"));
}
