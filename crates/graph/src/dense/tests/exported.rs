//! Graphs of exporters beyond the golden files: rejected sizes, and messages that name the cause.

use rten_onnx::onnx::{
    AttributeProto, AttributeType, DataType, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
};

use super::{ROWS, fixed, given, made, near, run};
use crate::dense::{DeclaredInput, RowProgram};
use sterling_core::error::Result;

fn node(text: &str, attributes: &[(&str, i64)]) -> NodeProto {
    let (outputs, call) = text.split_once(" = ").unwrap();
    let (operator, inputs) = call.trim_end_matches(')').split_once('(').unwrap();
    let names = |list: &str| list.split(", ").map(str::to_owned).collect();
    let attribute = |&(name, i): &(&str, i64)| AttributeProto {
        name: Some(name.into()),
        i: Some(i),
        r#type: Some(AttributeType::INT),
        ..AttributeProto::default()
    };
    let (domain, operator) = match operator.rsplit_once('.') {
        Some((domain, operator)) => (Some(domain.to_owned()), operator),
        None => (None, operator),
    };
    NodeProto {
        domain,
        op_type: Some(operator.into()),
        input: names(inputs),
        output: names(outputs),
        attribute: attributes.iter().map(attribute).collect(),
        ..NodeProto::default()
    }
}

fn text(mut node: NodeProto, name: &str, value: &str) -> NodeProto {
    let value = Some(value.to_owned());
    node.attribute.push(AttributeProto { name: Some(name.into()), s: value, ..AttributeProto::default() });
    node
}

fn integers(name: &str, shape: &[usize], all: &[i64]) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        dims: shape.iter().map(|&d| d as i64).collect(),
        data_type: Some(DataType::INT64),
        int64_data: all.to_vec(),
        ..TensorProto::default()
    }
}

fn floats(name: &str, shape: &[usize]) -> TensorProto {
    let numbers = vec![0.5; shape.iter().product()];
    TensorProto {
        data_type: Some(DataType::FLOAT),
        float_data: numbers,
        int64_data: vec![],
        ..integers(name, shape, &[])
    }
}

/// Compiles nodes over `x` `[Q, 3, 4]` and `z` `[Q, 4]` with output `out`.
fn compiled(nodes: Vec<NodeProto>, constants: Vec<TensorProto>, shape: &[i64]) -> Result<RowProgram> {
    let graph = GraphProto { node: nodes, initializer: constants, ..GraphProto::default() };
    let opset = |domain: Option<&str>| OperatorSetIdProto { domain: domain.map(Into::into), version: Some(20) };
    let model = ModelProto {
        graph: Some(graph),
        opset_import: vec![opset(None), opset(Some("com.microsoft"))],
        ..ModelProto::default()
    };
    let inputs: [DeclaredInput; 2] =
        [given("x", true, &[ROWS, fixed(3), fixed(4)]), given("z", true, &[ROWS, fixed(4)])];
    let mut sizes = vec![ROWS];
    sizes.extend(shape.iter().map(|&d| fixed(d)));
    RowProgram::lower(&model.write_buf().unwrap(), &inputs, &[made("out", &sizes)])
}

#[test]
fn graphs_that_cannot_be_compiled_are_rejected_with_the_cause() {
    let one = |text: &str, attributes: &[(&str, i64)]| vec![node(text, attributes)];
    let with = |before: &str, last: NodeProto| vec![node(before, &[("to", 7)]), last];
    let i = |name: &str, all: &[i64]| integers(name, &[all.len()], all);
    let cases: Vec<(Vec<NodeProto>, Vec<TensorProto>, &str)> = vec![
        (
            one("out = com.microsoft.Frobnicate(x)", &[]),
            vec![],
            "`com.microsoft.Frobnicate`: the operator is not supported",
        ),
        (one("out = com.example.Relu(x)", &[]), vec![], "operator `Relu` of domain `com.example` is not supported"),
        (one("out = com.microsoft.FusedMatMul(x, x)", &[("transBatchA", 1)]), vec![], "attribute `transBatchA`"),
        (one("out, mask = Dropout(x)", &[("seed", 3), ("rate", 1)]), vec![], "attribute `rate`"),
        (
            vec![node("y, mean = LayerNormalization(x, s)", &[]), node("out = Add(y, mean)", &[])],
            vec![TensorProto {
                data_type: Some(DataType::FLOAT),
                float_data: vec![1.0; 4],
                int64_data: vec![],
                ..i("s", &[0; 4])
            }],
            "output `mean` is used",
        ),
        (one("out = CumSum(x, axis)", &[]), vec![i("axis", &[0])], "does not support the candidate axis"),
        (one("out = CumSum(x, axis)", &[]), vec![i("axis", &[5])], "axis or index 5 is out of range"),
        (
            vec![text(node("out = Pad(x, pads)", &[]), "mode", "spiral")],
            vec![i("pads", &[0, 0, 1, 0, 0, 0])],
            "`mode` spiral",
        ),
        (one("out = Pad(x, pads)", &[]), vec![i("pads", &[1, 0, 0, 0, 0, 0])], "does not support the candidate axis"),
        (one("out = Pad(x, pads)", &[]), vec![i("pads", &[0, 0, 0, 0, 0, 1 << 40])], "pads"),
        (one("out = Pad(x, pads)", &[]), vec![i("pads", &[0, 0, 0, 0, 40_000, 40_000])], "the result of shape"),
        (one("out, places = TopK(x, k)", &[("axis", 1)]), vec![i("k", &[4])], "`k` is not a constant from 1 to 3"),
        (with("k = Cast(z)", node("out, places = TopK(x, k)", &[])), vec![], "input 1: got floats, expected integers"),
        (
            with("i = Cast(z)", node("out = OneHot(i, depth, v)", &[])),
            vec![i("depth", &[1 << 30]), i("v", &[0, 1])],
            "`depth`",
        ),
        (
            with("i = Cast(z)", node("out = OneHot(i, depth, v)", &[])),
            vec![i("depth", &[1 << 21]), i("v", &[0, 1])],
            "at most 4194304 numbers",
        ),
        (with("i = Cast(z)", node("out = Mod(i, i)", &[])), vec![], "expected integers divided by constants"),
        (one("out = Mod(x, z)", &[]), vec![], "expected integers divided by constants"),
        (
            with("i = Cast(z)", node("out = Gather(x, i)", &[("axis", 1)])),
            vec![],
            "per-candidate indices into per-candidate values",
        ),
        (with("i = Cast(x)", node("out = GatherND(x, i)", &[("batch_dims", 2)])), vec![], "`batch_dims` 2"),
        (
            with("i = Cast(x)", text(node("out = ScatterElements(x, i, x)", &[]), "reduction", "add")),
            vec![],
            "`reduction` add is not supported",
        ),
        (
            with("i = Cast(x)", node("out = ScatterElements(x, i, x)", &[("axis", 1)])),
            vec![],
            "got computed indices, expected constant ones",
        ),
        (vec![text(node("out = Einsum(x, z)", &[]), "equation", "abc,ab->aa")], vec![], "equation `abc,ab->aa`"),
        (
            vec![text(node("out = Einsum(x, z)", &[]), "equation", "aab,ab->a")],
            vec![],
            "the diagonal `a` of shape [1, 3, 4]",
        ),
        (one("out = Attention(x, x, x, , x)", &[("q_num_heads", 2), ("kv_num_heads", 2)]), vec![], "input `past_key`"),
        (
            one("out = Attention(x, x, x)", &[("q_num_heads", 3), ("kv_num_heads", 3)]),
            vec![],
            "shape [1, 3, 4] does not split into 3 heads",
        ),
        (
            one("out = Attention(x, x, x)", &[("q_num_heads", 1), ("kv_num_heads", 2)]),
            vec![],
            "1 heads of queries do not fit 2 heads of keys",
        ),
        (
            one("out = Attention(x, x, x, z)", &[("q_num_heads", 1), ("kv_num_heads", 1)]),
            vec![],
            "the mask has shape [1, 4], expected 3 keys",
        ),
        (one("out = com.microsoft.MultiHeadAttention(x, x, x)", &[("num_heads", 0)]), vec![], "`num_heads` is 0"),
        (
            one("out = com.microsoft.GroupQueryAttention(x, x, x, , , n, n)", &[("num_heads", 1), ("kv_num_heads", 1)]),
            vec![i("n", &[7])],
            "3 queries, 3 keys and a total length of [7]",
        ),
        (
            one("out = RotaryEmbedding(x, w, w, p)", &[("num_heads", 2)]),
            vec![floats("w", &[5, 3]), integers("p", &[1, 3], &[0, 1, 2])],
            "3 angles do not rotate 2 of 2 elements of a head",
        ),
        (one("out = CastLike(x, other)", &[]), vec![], "the type of the second input is not known"),
        (with("i = Cast(z)", node("out = Div(i, n)", &[])), vec![i("n", &[24])], "its integers may exceed 16777216"),
        (vec![text(node("out = Einsum(x, z)", &[]), "equation", "...b")], vec![], "equation `...b`"),
        (
            one("out = Slice(x, s, e, a, t)", &[]),
            vec![i("s", &[0]), i("e", &[1]), i("a", &[1]), i("t", &[0])],
            "step 0",
        ),
        (
            vec![
                node("s = Shape(x)", &[("end", 1)]),
                node("r = Squeeze(s)", &[]),
                node("q = Range(o, r, e)", &[]),
                node("out = Add(q, e)", &[]),
                node("f = Cast(out)", &[("to", 1)]),
            ],
            vec![integers("o", &[], &[0]), integers("e", &[], &[1])],
            "row numbers are only supported",
        ),
        (
            vec![node("out = Expand(big, size)", &[])],
            vec![i("big", &[1]), i("size", &[1 << 20, 1 << 20])],
            "the result of shape",
        ),
        (
            vec![node("big = Expand(one, size)", &[]), node("out = Add(big, big)", &[])],
            vec![i("one", &[1]), i("size", &[1 << 17])],
            "131072 integers, expected at most 65536",
        ),
    ];
    for (nodes, constants, expected) in cases {
        let shown = format!("{:?} of {:?}", nodes.last().unwrap().op_type, nodes.last().unwrap().input);
        let error = compiled(nodes, constants, &[3, 4]).expect_err(&shown).to_string();
        assert!(error.contains(expected), "{shown}: got `{error}`, expected `{expected}`");
    }
}

#[test]
fn windows_that_cannot_be_compiled_are_rejected_with_their_cause() {
    let one = |text: &str, attributes: &[(&str, i64)]| vec![node(text, attributes)];
    let w = |shape: &[usize]| vec![floats("w", shape)];
    let cases: Vec<(Vec<NodeProto>, Vec<TensorProto>, &str)> = vec![
        (one("out = Conv(x, x)", &[]), vec![], "weights are not constant"),
        (one("out = Conv(x, w)", &[]), w(&[2, 4, 1]), "weights of shape [2, 4, 1] in 1 groups do not fit"),
        (one("out = Conv(x, w)", &[("group", 0)]), w(&[2, 3, 1]), "in 0 groups"),
        (one("out = Conv(x, w)", &[("group", 3)]), w(&[4, 1, 1]), "in 3 groups do not fit an input of shape [1, 3, 4]"),
        (one("out = Conv(x, w)", &[]), w(&[2, 3, 6]), "a window of 6 exceeds 4 elements with pads 0 and 0"),
        (one("out = Conv(x, w, w)", &[]), w(&[2, 3, 1]), "the bias has shape [2, 3, 1], expected [2]"),
        (one("out = Conv(z, w)", &[]), w(&[2, 4, 1]), "expected a batch, channels and further axes"),
        (one("out = Conv(x, w)", &[("rounds", 1)]), w(&[2, 3, 1]), "attribute `rounds`"),
        (
            vec![text(node("out = Conv(x, w)", &[]), "auto_pad", "FULL")],
            w(&[2, 3, 1]),
            "`auto_pad` FULL is not supported",
        ),
        (one("out = MaxPool(x)", &[]), vec![], "`kernel_shape` is missing"),
        (one("out = AveragePool(x)", &[("kernel_shape", 2)]), vec![], "`kernel_shape` is [], expected 1 numbers"),
        (
            vec![node("y = Transpose(x)", &[]), node("out = GlobalMaxPool(y)", &[])],
            vec![],
            "shape [4, 3, 1], the operator does not support the candidate axis",
        ),
        (one("out = GroupNormalization(x, w, w)", &[("num_groups", 2)]), w(&[3]), "`num_groups` is 2"),
        (
            one("out = InstanceNormalization(x, w, w)", &[]),
            w(&[2]),
            "the scale or the bias has shape [2], expected [3]",
        ),
    ];
    for (nodes, constants, expected) in cases {
        let shown = format!("{:?} of {:?}", nodes.last().unwrap().op_type, nodes.last().unwrap().input);
        let error = compiled(nodes, constants, &[3, 4]).expect_err(&shown).to_string();
        assert!(error.contains(expected), "{shown}: got `{error}`, expected `{expected}`");
    }
}

/// PyTorch's exporter broadcasts the number of a row and a position by a maximum, of which it reads the shape.
#[test]
fn positions_within_a_row_are_broadcast_by_the_shape_of_a_maximum() {
    let all = |last: &str| {
        vec![
            node("s = Shape(x)", &[("end", 1)]),
            node("r = Squeeze(s)", &[]),
            node("q = Range(zero, r, one)", &[]),
            node("u = Unsqueeze(q, second)", &[]),
            node("m = Max(u, places)", &[]),
            node("sizes = Shape(m)", &[]),
            node("rows = Expand(u, sizes)", &[]),
            node("steps = Expand(places, sizes)", &[]),
            node("first = Unsqueeze(rows, last)", &[]),
            node("then = Unsqueeze(steps, last)", &[]),
            node("index = Concat(first, then)", &[("axis", -1)]),
            node("wrong = Unsqueeze(m, last)", &[]),
            node("bad = Concat(wrong, then)", &[("axis", -1)]),
            node(last, &[]),
        ]
    };
    let constants = || {
        vec![
            integers("zero", &[], &[0]),
            integers("one", &[], &[1]),
            integers("second", &[1], &[1]),
            integers("last", &[1], &[-1]),
            integers("places", &[1, 3], &[2, 0, 1]),
        ]
    };
    let program = compiled(all("out = GatherND(x, index)"), constants(), &[3, 4]).unwrap();
    let row: Vec<f32> = (0..16).map(|n| n as f32).collect();
    let want = [&row[8..12], &row[..8]].concat();
    assert_eq!(run(&program, 2, &[], &|_| row.clone())[1], want);
    let error = compiled(all("out = GatherND(x, bad)"), constants(), &[3, 4]).unwrap_err().to_string();
    assert!(error.contains("the number of their row"), "{error}");
}

/// NaN in a masked state must not change the state that is selected.
#[test]
fn unselected_numbers_have_no_effect() {
    let nodes = vec![
        node("i = Cast(z)", &[("to", 7)]),
        node("first = Gather(i, zero)", &[("axis", 1)]),
        node("column = Unsqueeze(first, last)", &[]),
        node("out = GatherND(x, column)", &[("batch_dims", 1)]),
    ];
    let constants = vec![integers("zero", &[], &[0]), integers("last", &[1], &[-1])];
    let program = compiled(nodes, constants, &[4]).unwrap();
    for index in [-3i8, -1, 0, 2] {
        let at = index.rem_euclid(3) as usize;
        let x = |n: usize| if n / 4 == at { n as f32 } else { [f32::NAN, f32::INFINITY][n % 2] };
        let row: Vec<f32> = (0..12).map(x).chain([f32::from(index), 9.0, 9.0, 9.0]).collect();
        let want: Vec<f32> = (0..4).map(|n| (at * 4 + n) as f32).collect();
        assert_eq!(run(&program, 1, &[], &|_| row.clone())[0], want, "index {index}");
    }
}

/// Large, nearly equal numbers: one rounding error of the mean exceeds the differences between the numbers.
#[test]
fn layer_normalization_of_nearly_equal_numbers_is_exact_enough() {
    let nodes = vec![node("out = LayerNormalization(x, s)", &[("axis", 1)])];
    let scale = TensorProto { float_data: vec![1.0; 12], ..floats("s", &[3, 4]) };
    let program = compiled(nodes, vec![scale], &[3, 4]).unwrap();
    for (base, step) in [(1000.1f32, 0.0f32), (-7777.7, 0.0), (1000.1, 1e-3), (1e6, 1.0)] {
        let x: Vec<f32> = (0..12).map(|n| base + step * (n * n % 7) as f32).collect();
        let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / 12.0;
        let variance = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / 12.0;
        let made = run(&program, 1, &[], &|_| [&x[..], &[0.0; 4]].concat()).remove(0);
        for (x, got) in x.iter().zip(made) {
            let want = (f64::from(*x) - mean) / (variance + 1e-5).sqrt();
            assert!((f64::from(got) - want).abs() <= 1e-5, "{base} by {step}: {got} is not {want}");
        }
    }
}

/// A transposition and its reverse around a convolution, as PyTorch writes them, and zeros that are padded before it, cost
/// nothing: one step gathers the windows.
#[test]
fn rearrangements_around_a_convolution_are_one() {
    let perm = |text: &str, axes: &[i64]| {
        let mut made = node(text, &[]);
        let ints = axes.to_vec();
        made.attribute.push(AttributeProto { name: Some("perm".into()), ints, ..AttributeProto::default() });
        made
    };
    let nodes = vec![
        perm("t = Transpose(x)", &[0, 2, 1]),
        node("u = Unsqueeze(t, two)", &[]),
        node("p = Pad(u, pads)", &[]),
        node("c = Conv(p, w)", &[]),
        node("s = Squeeze(c, two)", &[]),
        perm("out = Transpose(s)", &[0, 2, 1]),
    ];
    let constants = vec![
        integers("two", &[1], &[2]),
        integers("pads", &[8], &[0, 0, 0, 2, 0, 0, 0, 0]),
        floats("w", &[4, 4, 1, 3]),
    ];
    let program = compiled(nodes, constants, &[3, 4]).unwrap();
    // One step makes the zeros, one puts them before the steps, one gathers, one multiplies.
    assert_eq!(program.to_string().matches(" = ").count(), 4, "{program}");
    let row: Vec<f32> = (0..16).map(|n| n as f32).collect();
    let sums = [0, 1, 2].map(|n| (0..4 * (n + 1)).map(|n| n as f32 * 0.5).sum::<f32>());
    let want: Vec<f32> = sums.iter().flat_map(|&sum| [sum; 4]).collect();
    assert_eq!(run(&program, 2, &[], &|_| row.clone())[1], want);
}

/// Half precision rounds halves to even, to infinity beyond its range, and to its subnormal numbers.
#[test]
fn casts_to_half_precision_round() {
    let cast = |text: &str, to: i64| node(text, &[("to", to)]);
    let halved = compiled(vec![cast("h = Cast(x)", 10), cast("out = Cast(h)", 1)], vec![], &[3, 4]).unwrap();
    let x = [1.0, 1.000_488_3, 1.001_464_8, -3.2012, 65_519.0, 65_520.0, 1e-7, 2.0e-8, 0.1, -0.0, 1e9, 2049.0];
    let want = [1.0, 1.0, 1.001_953_1, -3.201_171_9, 65_504.0, f32::INFINITY, 1.192_092_9e-7, 0.0, 0.099_975_586, -0.0];
    let want: Vec<f32> = want.into_iter().chain([f32::INFINITY, 2048.0]).collect();
    assert_eq!(run(&halved, 1, &[], &|_| [&x[..], &[0.0; 4]].concat())[0], want);
    // Every result of a node is rounded; ONNX Runtime computes in f32 from node to node on a CPU.
    let nodes = vec![
        cast("h = Cast(x)", 10),
        node("s = Sigmoid(h)", &[]),
        node("t = Mul(s, h)", &[]),
        cast("out = Cast(t)", 1),
    ];
    let chain = compiled(nodes, vec![], &[3, 4]).unwrap();
    let made = run(&chain, 1, &[], &|_| [&x[..], &[0.0; 4]].concat()).remove(0);
    let half = |x: f32| half::f16::from_f32(x).to_f32();
    for (&x, got) in x.iter().zip(made).filter(|(x, _)| x.abs() < 1e5) {
        assert_eq!(got, half(half(1.0 / (1.0 + (-half(x)).exp())) * half(x)), "{x}");
    }
    let brain = compiled(vec![cast("h = Cast(x)", 16), cast("out = Cast(h)", 1)], vec![], &[3, 4]).unwrap();
    let made = run(&brain, 1, &[], &|_| [&x[..], &[0.0; 4]].concat()).remove(0);
    assert_eq!(made[..4], [1.0, 1.0, 1.0, -3.203_125]);
}

/// Remainders of identifiers and seconds as 64-bit integers, beyond the integers that f32 represents exactly.
#[test]
fn remainders_of_integers_beyond_24_bits_are_exact() {
    let nodes = vec![
        node("i = Cast(z)", &[("to", 7)]),
        node("m = Max(i, none)", &[]),
        node("r = Mod(m, n)", &[]),
        node("out = Cast(r)", &[("to", 1)]),
    ];
    let program = compiled(nodes, vec![integers("none", &[], &[0]), integers("n", &[], &[1009])], &[4]).unwrap();
    let z = [1.7e9f32, 2f32.powi(53) - 2f32.powi(29), 16_777_219.0, -5e12];
    let want: Vec<f32> = z.iter().map(|&x| ((x as i64).max(0) % 1009) as f32).collect();
    assert_eq!(run(&program, 1, &[], &|_| [&[0.0; 12][..], &z].concat())[0], want);
}

/// The last step of a layer reads the last query alone, but all keys and values.
#[test]
fn steps_that_nothing_reads_are_not_computed() {
    let attention = |more: NodeProto| {
        let mut turned = node("k = Transpose(x)", &[]);
        turned.attribute.push(AttributeProto { name: Some("perm".into()), ints: vec![0, 2, 1], ..Default::default() });
        vec![
            node("q = MatMul(x, w)", &[]),
            turned,
            node("s = MatMul(q, k)", &[]),
            node("p = Softmax(s)", &[]),
            node("v = MatMul(p, x)", &[]),
            node("y = Add(v, x)", &[]),
            node("n = LayerNormalization(y, c)", &[]),
            node("h = MatMul(n, w)", &[]),
            node("r = Relu(h)", &[]),
            more,
        ]
    };
    let constants = || {
        let spread = (0..16).map(|n| (n * 7 % 11) as f32 / 8.0 - 0.5).collect();
        let weights = TensorProto { float_data: spread, ..floats("w", &[4, 4]) };
        vec![weights, floats("c", &[4]), integers("last", &[], &[-1])]
    };
    let last = node("out = Gather(r, last)", &[("axis", 1)]);
    let narrow = compiled(attention(last), constants(), &[4]).unwrap();
    let complete = compiled(attention(node("out = Identity(r)", &[])), constants(), &[3, 4]).unwrap();
    let row = |n: usize| (0..16).map(|k| ((k * 5 + n) % 7) as f32 / 4.0).collect::<Vec<_>>();
    for n in 0..3 {
        near(&run(&narrow, 3, &[], &row)[n], &run(&complete, 3, &[], &row)[n][8..], "the last step");
    }
    let flops = |program: &RowProgram| program.figures()[0].row_flops;
    assert!(2 * flops(&narrow) < flops(&complete), "{narrow}{complete}");
}

/// The step at an index of the row is selected before the layers of single steps.
#[test]
fn steps_that_no_index_names_are_not_computed() {
    let graph = |last: bool| {
        let mut turned = node("k = Transpose(x)", &[]);
        turned.attribute.push(AttributeProto { name: Some("perm".into()), ints: vec![0, 2, 1], ..Default::default() });
        let mut nodes = vec![
            node("q = MatMul(x, w)", &[]),
            turned,
            node("s = MatMul(q, k)", &[]),
            node("b = Add(s, m)", &[]),
            node("p = Softmax(b)", &[]),
            node("v = MatMul(p, x)", &[]),
            node("y = Add(v, x)", &[]),
            node("n = LayerNormalization(y, c)", &[]),
            node("h = MatMul(n, w)", &[]),
            node("r = Relu(h)", &[]),
        ];
        let mut constants = vec![
            TensorProto {
                float_data: (0..16).map(|n| (n * 7 % 11) as f32 / 8.0 - 0.5).collect(),
                ..floats("w", &[4, 4])
            },
            TensorProto { float_data: (0..9).map(|n| -((n * 5 % 7) as f32)).collect(), ..floats("m", &[3, 3]) },
            floats("c", &[4]),
        ];
        if last {
            // The index is the first element of the first step, and the same for all of the row's columns.
            constants.extend([
                integers("zero", &[1], &[0]),
                integers("two", &[2], &[1, 2]),
                integers("shape", &[3], &[1, 1, 4]),
            ]);
            nodes.extend([
                node("first = Gather(x, zero)", &[("axis", 1)]),
                node("one = Gather(first, zero)", &[("axis", 2)]),
                node("whole = Cast(one)", &[("to", 7)]),
                node("index = Expand(whole, shape)", &[]),
                node("step = GatherElements(r, index)", &[("axis", 1)]),
                node("out = Squeeze(step, axes)", &[]),
            ]);
            constants.push(integers("axes", &[1], &[1]));
            return compiled(nodes, constants, &[4]).unwrap();
        }
        nodes.push(node("out = Identity(r)", &[]));
        compiled(nodes, constants, &[3, 4]).unwrap()
    };
    let (narrow, complete) = (graph(true), graph(false));
    let row = |n: usize| {
        let mut row: Vec<f32> = (0..16).map(|k| ((k * 5 + n) % 7) as f32 / 4.0).collect();
        row[0] = (n % 3) as f32;
        row
    };
    let (some, all) = (run(&narrow, 6, &[], &row), run(&complete, 6, &[], &row));
    for n in 0..6 {
        near(&some[n], &all[n][n % 3 * 4..][..4], "the step of the index");
    }
    // Except for the keys, all products are computed for a single step.
    assert!(
        complete.to_string().contains("product in[3, 4]") && !narrow.to_string().contains("product in[3, 4]"),
        "{narrow}"
    );
}

#[test]
fn a_choice_between_numbers_and_zeros_is_one_operation() {
    let graph = |choice: &str| {
        let zero = TensorProto { float_data: vec![0.0], ..floats("zero", &[]) };
        let nodes = vec![node("no = IsNaN(x)", &[]), node("yes = Not(no)", &[]), node(choice, &[])];
        compiled(nodes, vec![zero, floats("half", &[])], &[3, 4]).unwrap()
    };
    let row = |n: usize| (0..16).map(|k| if k % 3 == n { f32::NAN } else { k as f32 - 4.0 }).collect::<Vec<f32>>();
    let cases = [
        ("out = Where(no, zero, x)", 0.0, true),
        ("out = Where(yes, x, zero)", 0.0, true),
        ("out = Where(no, half, x)", 0.5, false),
    ];
    for (choice, instead, is_one) in cases {
        let program = graph(choice);
        for (n, got) in run(&program, 3, &[], &row).iter().enumerate() {
            let want: Vec<f32> = row(n)[..12].iter().map(|x| if x.is_nan() { instead } else { *x }).collect();
            near(got, &want, choice);
        }
        let text = program.to_string();
        assert_eq!(!text.contains("add "), is_one, "{choice}: {text}");
    }
}
