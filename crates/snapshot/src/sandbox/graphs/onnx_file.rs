//! Builder of ONNX files: nodes with their attributes, constants, inputs and outputs.

use rten_onnx::onnx::{
    AttributeProto, AttributeType, DataType, Dimension, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    TensorProto, TensorShapeProto, TypeProto, TypeProtoTensor, ValueInfoProto,
};

/// Builder of an ONNX file.
#[derive(Default)]
pub(in crate::sandbox) struct Builder {
    pub(super) nodes: Vec<NodeProto>,
    pub(super) constants: Vec<TensorProto>,
    pub(super) inputs: Vec<ValueInfoProto>,
    pub(super) outputs: Vec<ValueInfoProto>,
}

/// Returns a float value with this number of axes.
pub(super) fn port(name: &str, axes: usize) -> ValueInfoProto {
    let dim = (0..axes).map(|n| Dimension { dim_value: None, dim_param: Some(format!("{name}_{n}")) }).collect();
    let shape = Some(TensorShapeProto { dim });
    let tensor_type = Some(TypeProtoTensor { elem_type: Some(DataType::FLOAT), shape });
    ValueInfoProto { name: Some(name.into()), r#type: Some(TypeProto { tensor_type, sequence: None }) }
}

/// Returns the file of a linear layer from `x` to `query`; all weights are multiples of `weight`.
pub(in crate::sandbox) fn dense_layer(width: usize, columns: usize, weight: f32) -> Vec<u8> {
    let mut builder = Builder::default();
    let weights = (0..width * columns).map(|n| weight * (n as f32 / 8.0 - 0.5)).collect();
    let weights = builder.floats(&[width, columns], weights);
    builder.nodes.push(node("MatMul", &["x", &weights], "query"));
    builder.inputs = vec![port("x", 2)];
    builder.outputs = vec![port("query", 2)];
    builder.bytes(17)
}

pub(in crate::sandbox) fn node(operator: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        name: Some(format!("make_{output}")),
        op_type: Some(operator.into()),
        input: inputs.iter().map(|name| (*name).to_owned()).collect(),
        output: vec![output.into()],
        ..NodeProto::default()
    }
}

pub(in crate::sandbox) fn int(mut node: NodeProto, name: &str, i: i64) -> NodeProto {
    let attribute =
        AttributeProto { name: Some(name.into()), i: Some(i), r#type: Some(AttributeType::INT), ..Default::default() };
    node.attribute.push(attribute);
    node
}

pub(in crate::sandbox) fn ints(mut node: NodeProto, name: &str, all: &[i64]) -> NodeProto {
    let attribute = AttributeProto {
        name: Some(name.into()),
        ints: all.to_vec(),
        r#type: Some(AttributeType::INTS),
        ..Default::default()
    };
    node.attribute.push(attribute);
    node
}

pub(super) fn float(mut node: NodeProto, name: &str, f: f32) -> NodeProto {
    let attribute = AttributeProto {
        name: Some(name.into()),
        f: Some(f),
        r#type: Some(AttributeType::FLOAT),
        ..Default::default()
    };
    node.attribute.push(attribute);
    node
}

pub(super) fn text(mut node: NodeProto, name: &str, s: &str) -> NodeProto {
    let attribute = AttributeProto {
        name: Some(name.into()),
        s: Some(s.into()),
        r#type: Some(AttributeType::STRING),
        ..Default::default()
    };
    node.attribute.push(attribute);
    node
}

impl Builder {
    /// Returns a builder of a file with this node alone.
    pub(in crate::sandbox) fn of(node: NodeProto) -> Self {
        Builder { nodes: vec![node], ..Builder::default() }
    }

    pub(in crate::sandbox) fn bytes(&self, opset: i64) -> Vec<u8> {
        let graph = GraphProto {
            node: self.nodes.clone(),
            initializer: self.constants.clone(),
            input: self.inputs.clone(),
            output: self.outputs.clone(),
            ..GraphProto::default()
        };
        let of = |domain: Option<&str>, version| OperatorSetIdProto {
            domain: domain.map(Into::into),
            version: Some(version),
        };
        let opset_import = vec![of(None, opset), of(Some("com.microsoft"), 1)];
        ModelProto { ir_version: Some(8), graph: Some(graph), opset_import, ..ModelProto::default() }
            .write_buf()
            .unwrap()
    }

    pub(super) fn floats(&mut self, shape: &[usize], numbers: Vec<f32>) -> String {
        let name = format!("c{}", self.constants.len());
        self.constants.push(TensorProto {
            name: Some(name.clone()),
            dims: shape.iter().map(|&d| d as i64).collect(),
            data_type: Some(DataType::FLOAT),
            float_data: numbers,
            ..TensorProto::default()
        });
        name
    }

    pub(super) fn integers(&mut self, shape: &[usize], numbers: Vec<i64>) -> String {
        let name = format!("c{}", self.constants.len());
        self.constants.push(TensorProto {
            name: Some(name.clone()),
            dims: shape.iter().map(|&d| d as i64).collect(),
            data_type: Some(DataType::INT64),
            int64_data: numbers,
            ..TensorProto::default()
        });
        name
    }

    pub(super) fn add(&mut self, operator: &str, inputs: &[&str]) -> String {
        self.add_node(|output| node(operator, inputs, output))
    }

    pub(super) fn add_node(&mut self, make: impl FnOnce(&str) -> NodeProto) -> String {
        let output = format!("v{}", self.nodes.len());
        self.nodes.push(make(&output));
        output
    }
}
