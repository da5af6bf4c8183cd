//! Model packages that tests make: graphs node by node, tables, `model.toml` and items.

use std::path::{Path, PathBuf};

use rten_onnx::onnx::{
    AttributeProto, AttributeType, DataType, Dimension, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    TensorProto, TensorShapeProto, TypeProto, TypeProtoTensor, ValueInfoProto,
};
use sterling::files::TensorFile;
use sterling::publish::Publish;
use sterling::snapshot::{Placement, Snapshot, Store};
use sterling::view::View;

use crate::support::put;

/// A graph that grows node by node; sizes of -1 are left open.
#[derive(Clone, Default)]
pub struct Onnx {
    graph: GraphProto,
}

fn port(name: &str, shape: &[i64]) -> ValueInfoProto {
    let size = |&n: &i64| Dimension {
        dim_value: (n >= 0).then_some(n),
        dim_param: (n < 0).then(|| format!("{name}_open")),
    };
    let shape = TensorShapeProto { dim: shape.iter().map(size).collect() };
    let tensor = TypeProtoTensor { elem_type: Some(DataType::FLOAT), shape: Some(shape) };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto { tensor_type: Some(tensor), ..Default::default() }),
    }
}

impl Onnx {
    pub fn input(mut self, name: &str, shape: &[i64]) -> Self {
        self.graph.input.push(port(name, shape));
        self
    }

    pub fn output(mut self, name: &str, shape: &[i64]) -> Self {
        self.graph.output.push(port(name, shape));
        self
    }

    pub fn numbers(mut self, name: &str, shape: &[i64], values: &[f32]) -> Self {
        let tensor = TensorProto {
            name: Some(name.into()),
            dims: shape.to_vec(),
            data_type: Some(DataType::FLOAT),
            float_data: values.to_vec(),
            ..Default::default()
        };
        self.graph.initializer.push(tensor);
        self
    }

    pub fn integers(mut self, name: &str, values: &[i64]) -> Self {
        let tensor = TensorProto {
            name: Some(name.into()),
            dims: vec![values.len() as i64],
            data_type: Some(DataType::INT64),
            int64_data: values.to_vec(),
            ..Default::default()
        };
        self.graph.initializer.push(tensor);
        self
    }

    pub fn node(self, operator: &str, inputs: &[&str], output: &str) -> Self {
        self.node_with(operator, inputs, output, &[])
    }

    /// With attributes that are integers: one stands alone, several are a list.
    pub fn node_with(mut self, operator: &str, inputs: &[&str], output: &str, attributes: &[(&str, &[i64])]) -> Self {
        let attribute = |(name, values): &(&str, &[i64])| match values {
            [one] => AttributeProto {
                name: Some((*name).into()),
                i: Some(*one),
                r#type: Some(AttributeType::INT),
                ..Default::default()
            },
            many => AttributeProto {
                name: Some((*name).into()),
                ints: many.to_vec(),
                r#type: Some(AttributeType::INTS),
                ..Default::default()
            },
        };
        self.graph.node.push(NodeProto {
            op_type: Some(operator.into()),
            input: inputs.iter().map(|&name| name.into()).collect(),
            output: vec![output.into()],
            attribute: attributes.iter().map(attribute).collect(),
            ..Default::default()
        });
        self
    }

    pub fn write(self, path: &Path) {
        let opset = OperatorSetIdProto { domain: None, version: Some(17) };
        let model = ModelProto {
            ir_version: Some(8),
            graph: Some(self.graph),
            opset_import: vec![opset],
            ..Default::default()
        };
        std::fs::write(path, model.write_buf().unwrap()).unwrap();
    }
}

/// A package in a folder of its own, with the items that it is published with.
pub struct Made {
    folder: tempfile::TempDir,
}

impl Made {
    pub fn new(model: &str, items: &[serde_json::Value]) -> Self {
        let made = Made { folder: tempfile::tempdir().unwrap() };
        std::fs::write(made.path("model.toml"), model).unwrap();
        let lines: Vec<String> = items.iter().map(ToString::to_string).collect();
        std::fs::write(made.path("items.jsonl"), lines.join("\n")).unwrap();
        made
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    pub fn graph(self, file: &str, graph: Onnx) -> Self {
        graph.write(&self.path(file));
        self
    }

    pub fn text(self, file: &str, text: &str) -> Self {
        std::fs::write(self.path(file), text).unwrap();
        self
    }

    /// Tables of f32 in `tables.safetensors`.
    pub fn tables(self, tables: &[(&str, usize, &[f32])]) -> Self {
        let mut file = TensorFile::new();
        for (name, width, values) in tables {
            file.add(*name, &[values.len() / width, *width], values).unwrap();
        }
        file.write(&self.path("tables.safetensors")).unwrap();
        self
    }

    pub fn publication(&self) -> Publish {
        let mut what = Publish {
            package: Some(self.folder.path().into()),
            items: Some(self.path("items.jsonl")),
            ..Publish::default()
        };
        what.recipe.index.rescore = sterling::ivf::Rescore::F32;
        what
    }

    /// Publishes into the store and returns the version's folder.
    pub fn publish(&self, store: &Path) -> sterling::error::Result<PathBuf> {
        let version = put(store, &self.publication())?;
        let name = Store::new(store).models().unwrap().pop().unwrap();
        Ok(Store::new(store).folder(&name, version))
    }

    /// Publishes and loads.
    pub fn view(&self) -> sterling::error::Result<std::sync::Arc<View>> {
        let store = tempfile::tempdir().unwrap();
        let folder = self.publish(store.path())?;
        Ok(view(&folder))
    }
}

pub fn view(folder: &Path) -> std::sync::Arc<View> {
    std::sync::Arc::new(View::new(std::sync::Arc::new(Snapshot::load(folder, &Placement::whole()).unwrap())))
}
