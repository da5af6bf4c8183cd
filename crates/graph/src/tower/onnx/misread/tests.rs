//! Graphs that the fallback runtime would evaluate silently differently, and similar ones that it evaluates correctly.

#![allow(clippy::unwrap_used)]

use rten_onnx::onnx::{AttributeProto, Dimension, TensorShapeProto, TypeProto, TypeProtoTensor};

use super::*;

fn node(text: &str) -> NodeProto {
    let (output, call) = text.split_once(" = ").unwrap();
    let (operator, inputs) = call.trim_end_matches(')').split_once('(').unwrap();
    let (operator, to) = operator.split_once(':').map_or((operator, None), |(operator, to)| (operator, Some(to)));
    let to = to.map(|to| AttributeProto { name: Some("to".into()), i: to.parse().ok(), ..AttributeProto::default() });
    NodeProto {
        op_type: Some(operator.into()),
        input: inputs.split(", ").map(str::to_owned).collect(),
        output: output.split(", ").map(str::to_owned).collect(),
        attribute: to.into_iter().collect(),
        ..NodeProto::default()
    }
}

fn input(name: &str, axes: usize) -> ValueInfoProto {
    let dim = (0..axes).map(|_| Dimension { dim_value: None, dim_param: None }).collect();
    let tensor_type = Some(TypeProtoTensor { elem_type: Some(DataType::FLOAT), shape: Some(TensorShapeProto { dim }) });
    ValueInfoProto { name: Some(name.into()), r#type: Some(TypeProto { tensor_type, sequence: None }) }
}

fn constant_of(name: &str, n: i64) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        data_type: Some(DataType::INT64),
        int64_data: vec![n],
        ..TensorProto::default()
    }
}

/// Returns the report of nodes over `x` `[Q, S, D]`, its mask and constants.
fn reported(nodes: &[&str]) -> Option<String> {
    let float = |name: &str, x: f32| TensorProto {
        data_type: Some(DataType::FLOAT),
        float_data: vec![x],
        int64_data: vec![],
        ..constant_of(name, 0)
    };
    let half = TensorProto {
        data_type: Some(DataType::FLOAT16),
        int32_data: vec![0x3c00],
        int64_data: vec![],
        ..constant_of("h", 0)
    };
    misread(&GraphProto {
        node: nodes.iter().map(|text| node(text)).collect(),
        initializer: vec![
            constant_of("n", 24),
            constant_of("one", 1),
            constant_of("none", 0),
            constant_of("big", 2_654_435_761),
            constant_of("end", i64::MAX),
            constant_of("start", i64::MIN),
            float("million", 1e6),
            float("low", 0.0),
            float("part", 0.5),
            float("unit", 1.0),
            half,
        ],
        input: vec![input("x", 3), input("x_mask", 2)],
        ..GraphProto::default()
    })
}

#[test]
fn integers_that_may_exceed_32_bits_are_reported() {
    let cases: [(&[&str], &str); 18] = [
        (&["i = Cast:7(x)", "j = Mod(i, n)"], "node 2 (Mod): `i` is an int64 tensor with integers from -inf to inf"),
        (&["i = Cast:7(x)", "j = Add(i, one)"], "node 2 (Add): `i`"),
        (
            &["i = Cast:7(x)", "c = Clip(i, none, n)", "j = Mul(c, big)"],
            "node 3 (Mul): `big` is an int64 tensor with integers",
        ),
        (
            &["c = Clip(x, low, million)", "i = Cast:7(c)", "j = Mul(i, i)"],
            "node 3 (Mul): the result is an int64 tensor with integers from 0e0 to 1e12",
        ),
        (&["i = Cast:7(x)", "j = Cast:1(i)"], "node 2 (Cast): `i`"),
        (&["i = Cast:7(x)", "j = Cast:6(i)"], "node 2 (Cast): `i`"),
        (&["i = Cast:7(x)", "u = Unsqueeze(i, one)", "j = Mod(u, n)"], "node 3 (Mod): `u`"),
        (&["i = Cast:7(x)", "j = Equal(i, big)"], "node 2 (Equal): `i`"),
        (&["i = Cast:7(x)", "s = ReduceSum(i, one)"], "node 2 (ReduceSum): `i`"),
        (
            &["i = Cast:7(x)", "m = Max(i, none)", "j = Sub(m, one)"],
            "node 3 (Sub): `m` is an int64 tensor with integers from 0e0 to inf",
        ),
        (&["i = CastLike(x, n)", "j = Mod(i, n)"], "node 2 (Mod): `i`"),
        (&["i = Cast:7(x)", "a, b = Split(i, one)", "j = Mod(b, n)"], "node 3 (Mod): `b`"),
        (&["h2 = Cast:10(x)", "y = Cast:1(h2)"], "node 1 (Cast): the runtime computes in f32"),
        (&["y = Add(h, h)", "z = Cast:1(y)"], "node 1 (Add): the runtime computes in f32"),
        (&["t = Cast:9(x)"], "node 1 (Cast): the runtime keeps numbers other than 0 and 1"),
        (&["d = Div(x_mask, million)", "t = Cast:9(d)"], "node 2 (Cast): the runtime keeps numbers other than 0 and 1"),
        (
            &["c = Clip(x_mask, low, part)", "t = Cast:9(c)"],
            "node 2 (Cast): the runtime keeps numbers other than 0 and 1",
        ),
        (
            &["g = Gemm(x_mask, x_mask, part)", "c = Clip(g, low, unit)", "t = Cast:9(c)"],
            "node 3 (Cast): the runtime keeps",
        ),
    ];
    for (nodes, expected) in cases {
        let got = reported(nodes).unwrap_or_default();
        assert!(got.contains(expected), "{nodes:?}: got `{got}`, expected `{expected}`");
    }
}

#[test]
fn integers_within_32_bits_and_saturated_ones_that_only_select_are_not() {
    let cases: [&[&str]; 19] = [
        // The last state of a sequence.
        &["s = ReduceSum(x_mask, one)", "i = Cast:7(s)", "j = Sub(i, one)", "m = Max(j, none)", "y = Gather(x, m)"],
        // Positions of padded sequences.
        &["c = CumSum(x_mask, one)", "i = Cast:7(c)", "m = Cast:7(x_mask)", "p = Mul(i, m)", "j = Add(p, one)"],
        // Positions from the end of a sequence.
        &["l = Shape(x)", "p = Range(none, l, one)", "s = ReduceSum(x_mask, one)", "i = Cast:7(s)", "j = Sub(p, i)"],
        &["i = Cast:7(x)", "c = Clip(i, none, n)", "j = Mod(c, n)", "f = Cast:1(j)"],
        &["i = Cast:7(x)", "y = Gather(x, i)"],
        &["i = Cast:7(x)", "y = OneHot(i, n, low)"],
        &["i = Cast:7(x)", "t = Equal(i, n)", "f = Cast:1(t)"],
        &["i = Cast:7(x)", "t = Less(i, n)", "u = Not(t)"],
        &["i = Cast:6(x)", "j = Add(i, i)", "k = Cast:7(j)", "l = Mod(k, n)"],
        &["y = Slice(x, start, end, one)"],
        &["s = Shape(x)", "m = Mul(s, s)", "p = Mul(m, m)", "y = Reshape(x, p)"],
        &["v, i = TopK(x, one)", "j = Add(i, one)", "y = Cast:1(j)"],
        &["m = Cast:7(x_mask)", "a, b = Split(m, one)", "j = Mul(b, n)", "y = Cast:1(j)"],
        &["t = Cast:9(x_mask)", "u = Not(t)"],
        &["c = Clip(x_mask, low, unit)", "t = Cast:9(c)"],
        &["g = Gemm(x_mask, x_mask, unit)", "c = Clip(g, low, unit)", "t = Cast:9(c)"],
        &["g = Greater(x, low)", "t = Cast:9(g)", "s = Cast:7(t)", "r = ReduceSum(s, one)", "y = Cast:1(r)"],
        &["f = Cast:1(h)", "y = Mul(x, f)"],
        &["i = Cast:7(x)", "m = Where(g, i, end)", "c = Min(m, n)", "d = Max(c, none)", "y = Cast:1(d)"],
    ];
    for nodes in cases {
        assert_eq!(reported(nodes), None, "{nodes:?}");
    }
}
