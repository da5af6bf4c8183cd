//! Element types of the values of a file, inferred from the types of constants and inputs.

use std::collections::HashMap;

use rten_onnx::onnx::{DataType, NodeProto};

/// Element types by name. The result of an unlisted operator has the type of the first input with a known type.
#[derive(Debug, Default)]
pub(crate) struct ElementTypes(HashMap<String, DataType>);

impl ElementTypes {
    /// Records the type of a constant or an input.
    pub(crate) fn insert(&mut self, name: &str, kind: DataType) {
        self.0.insert(name.to_owned(), kind);
    }

    /// Returns the type of a value, if it is known.
    pub(crate) fn of(&self, name: &str) -> Option<DataType> {
        self.0.get(name).copied()
    }

    /// Records the types of a node's outputs.
    pub(crate) fn add_node(&mut self, node: &NodeProto) {
        for (n, name) in node.output.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
            if let Some(kind) = self.of_output(node, n) {
                self.insert(name, kind);
            }
        }
    }

    fn of_output(&self, node: &NodeProto, n: usize) -> Option<DataType> {
        let input = |n: usize| node.input.get(n).and_then(|name| self.of(name));
        let attribute = |name: &str| node.attribute.iter().find(|a| a.name.as_deref() == Some(name));
        let written = |name: &str| attribute(name).and_then(|a| a.i).and_then(|i| i32::try_from(i).ok()).map(DataType);
        let of_tensor = || attribute("value").and_then(|a| a.t.as_ref()).and_then(|t| t.data_type);
        match (node.op_type.as_deref().unwrap_or(""), n) {
            ("Cast", _) => written("to"),
            ("CastLike", _) => input(1),
            ("Constant", _) if attribute("value_float").or(attribute("value_floats")).is_some() => {
                Some(DataType::FLOAT)
            }
            ("Constant", _) if attribute("value_int").or(attribute("value_ints")).is_some() => Some(DataType::INT64),
            ("Constant", _) => of_tensor(),
            ("ConstantOfShape", _) => of_tensor().or(Some(DataType::FLOAT)),
            ("EyeLike", _) => written("dtype").or(input(0)),
            ("Shape" | "Size" | "ArgMax" | "ArgMin" | "NonZero", _) | ("TopK" | "MaxPool", 1) => Some(DataType::INT64),
            ("Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual", _)
            | ("And" | "Or" | "Xor" | "Not" | "IsNaN" | "IsInf", _)
            | ("Dropout", 1) => Some(DataType::BOOL),
            ("ConvInteger" | "MatMulInteger", _) => Some(DataType::INT32),
            ("DequantizeLinear", _) => input(1),
            ("QuantizeLinear", _) => input(2).or(Some(DataType::UINT8)),
            ("Where", _) => input(1),
            ("OneHot", _) => input(2),
            _ => node.input.iter().find_map(|name| self.of(name)),
        }
    }
}

/// Returns a `CastLike` node as a `Cast` node; `None` if the type of the second input is unknown.
pub(super) fn cast_of(node: &NodeProto, types: &ElementTypes) -> Option<NodeProto> {
    let to = types.of(node.input.get(1)?)?;
    let mut cast = NodeProto { op_type: Some("Cast".into()), input: node.input[..1].to_vec(), ..node.clone() };
    let mut attribute = rten_onnx::onnx::AttributeProto { name: Some("to".into()), ..Default::default() };
    attribute.i = Some(to.0.into());
    cast.attribute.push(attribute);
    Some(cast)
}
