//! Builds valid and invalid ONNX graphs.

use rten_onnx::onnx::{
    AttributeProto, AttributeType, DataType, Dimension, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    TensorProto, TensorShapeProto, TypeProto, TypeProtoTensor, ValueInfoProto,
};

/// Returns a value of numbers; a size of 0 stands for a dynamic one.
pub fn value(name: &str, sizes: &[i64]) -> ValueInfoProto {
    typed(name, DataType::FLOAT, Some(sizes))
}

pub fn typed(name: &str, kind: DataType, sizes: Option<&[i64]>) -> ValueInfoProto {
    let size = |(n, &size): (usize, &i64)| match size {
        0 => Dimension { dim_value: None, dim_param: Some(format!("{name}_{n}")) },
        size => Dimension { dim_value: Some(size), dim_param: None },
    };
    let shape = sizes.map(|sizes| TensorShapeProto { dim: sizes.iter().enumerate().map(size).collect() });
    let tensor_type = Some(TypeProtoTensor { elem_type: Some(kind), shape });
    ValueInfoProto { name: Some(name.into()), r#type: Some(TypeProto { tensor_type, sequence: None }) }
}

pub fn floats(name: &str, shape: &[i64], numbers: &[f32]) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        dims: shape.to_vec(),
        data_type: Some(DataType::FLOAT),
        float_data: numbers.to_vec(),
        ..TensorProto::default()
    }
}

pub fn integers(name: &str, numbers: &[i64]) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        dims: vec![numbers.len() as i64],
        data_type: Some(DataType::INT64),
        int64_data: numbers.to_vec(),
        ..TensorProto::default()
    }
}

/// Parses a node like `made = Operator(read, read)`.
pub fn node(text: &str) -> NodeProto {
    let (made, call) = text.split_once(" = ").unwrap();
    let (operator, read) = call.strip_suffix(')').unwrap().split_once('(').unwrap();
    let names = |list: &str| list.split(',').map(|name| name.trim().to_owned()).filter(|n| !n.is_empty()).collect();
    NodeProto {
        name: Some(format!("make_{}", made.split(',').next().unwrap())),
        op_type: Some(operator.into()),
        input: names(read),
        output: names(made),
        ..NodeProto::default()
    }
}

impl Onnx {
    /// Returns a graph of these nodes, inputs and outputs.
    pub fn new(inputs: &[ValueInfoProto], outputs: &[ValueInfoProto], nodes: &[&str]) -> Self {
        let node = nodes.iter().map(|text| node(text)).collect();
        let graph = GraphProto { node, input: inputs.to_vec(), output: outputs.to_vec(), ..GraphProto::default() };
        Onnx { graph }
    }

    pub fn with(mut self, constants: &[TensorProto]) -> Self {
        self.graph.initializer.extend_from_slice(constants);
        self
    }

    /// Adds a node.
    pub fn and(mut self, text: &str) -> Self {
        self.graph.node.push(node(text));
        self
    }

    /// Adds an attribute to the last node.
    pub fn attribute(mut self, name: &str, i: i64) -> Self {
        let attribute = AttributeProto {
            name: Some(name.into()),
            i: Some(i),
            r#type: Some(AttributeType::INT),
            ..Default::default()
        };
        self.graph.node.last_mut().unwrap().attribute.push(attribute);
        self
    }

    pub fn bytes(self) -> Vec<u8> {
        self.bytes_of_opset(Some(17))
    }

    /// Serializes the graph with another opset version, or without one.
    pub fn bytes_of_opset(self, version: Option<i64>) -> Vec<u8> {
        let opset_import = version.map(|version| OperatorSetIdProto { domain: None, version: Some(version) });
        let opset_import = opset_import.into_iter().collect();
        ModelProto { ir_version: Some(8), graph: Some(self.graph), opset_import, ..ModelProto::default() }
            .write_buf()
            .unwrap()
    }
}

/// A graph that is being built.
#[derive(Clone, Default)]
pub struct Onnx {
    pub graph: GraphProto,
}
