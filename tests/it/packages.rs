//! Model packages that tests build: graphs node by node, tables, `model.toml` and items.

use std::path::{Path, PathBuf};

use rten_onnx::onnx::{AttributeProto, AttributeType};
use sterling::publish::Plan;
use sterling::serving::view::View;
use sterling::snapshot::{Placement, Snapshot, Store};
use sterling::storage::files::TensorFile;

use crate::onnx::{self, Onnx};
use crate::support::put;

/// Returns the sizes of an input or output; those of -1 are dynamic.
fn sizes(shape: &[i64]) -> Vec<i64> {
    shape.iter().map(|&n| n.max(0)).collect()
}

/// A graph that is built node by node.
impl Onnx {
    pub fn input(mut self, name: &str, shape: &[i64]) -> Self {
        self.graph.input.push(onnx::value(name, &sizes(shape)));
        self
    }

    pub fn output(mut self, name: &str, shape: &[i64]) -> Self {
        self.graph.output.push(onnx::value(name, &sizes(shape)));
        self
    }

    pub fn numbers(self, name: &str, shape: &[i64], values: &[f32]) -> Self {
        self.with(&[onnx::floats(name, shape, values)])
    }

    pub fn integers(self, name: &str, values: &[i64]) -> Self {
        self.with(&[onnx::integers(name, values)])
    }

    pub fn node(self, operator: &str, inputs: &[&str], output: &str) -> Self {
        self.node_with(operator, inputs, output, &[])
    }

    /// Adds a node with integer attributes: a single one is a scalar, several are a list.
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
        self = self.and(&format!("{output} = {operator}({})", inputs.join(", ")));
        self.graph.node.last_mut().unwrap().attribute = attributes.iter().map(attribute).collect();
        self
    }

    pub fn write(self, path: &Path) {
        std::fs::write(path, self.bytes()).unwrap();
    }
}

/// A package in its own folder, with the items that it is published with.
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

    /// Writes tables of f32 to `tables.safetensors`.
    pub fn tables(self, tables: &[(&str, usize, &[f32])]) -> Self {
        let mut file = TensorFile::new();
        for (name, width, values) in tables {
            file.add(*name, &[values.len() / width, *width], values).unwrap();
        }
        file.write(&self.path("tables.safetensors")).unwrap();
        self
    }

    pub fn publication(&self) -> Plan {
        let mut what = Plan::of_package(self.folder.path());
        what.recipe.index.rescore = sterling::index::ivf::Rescore::F32;
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
