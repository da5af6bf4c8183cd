//! Imports ONNX: each operator of the table in `models/README.md` becomes a few operations; other operators are
//! rejected by name.
//!
//! Shapes are known except for the number of rows, which [`Size::Rows`] represents. Integers (shapes, axes, indices) are
//! evaluated during import and become values only where numbers are compared with them; booleans are the numbers 1 and 0.

mod arithmetic;
mod einsum;
mod integers;
mod known;
mod norms;
mod recurrent;
mod views;

pub use known::{Given, Made, Size};

use rten_onnx::onnx::{ModelProto, NodeProto};

use super::graph::Graph;
use super::ir::Id;
use known::{Attributes, Importer, Known, WHOLE_MAX, refused};
use sterling_core::error::Result;

/// Maximum number of nodes of a graph.
const NODES_MAX: usize = 20_000;

/// Imports a graph with the inputs `given`.
///
/// # Errors
/// `Unsupported` with the operator, the attribute or the shape that is not in the table.
pub(super) fn import(bytes: &[u8], given: &[Given], outputs: &[Made]) -> Result<Graph> {
    let model = ModelProto::parse_buf(bytes).map_err(|e| refused(format!("no ONNX: {e}")))?;
    let standard = |domain: &Option<String>| domain.as_deref().is_none_or(|d| d.is_empty() || d == "ai.onnx");
    let opset = model.opset_import.iter().find(|o| standard(&o.domain)).and_then(|o| o.version).unwrap_or(1);
    let proto = model.graph.ok_or_else(|| refused("a file without a graph"))?;
    if proto.node.len() > NODES_MAX {
        return Err(refused(format!("{} nodes, expected at most {NODES_MAX}", proto.node.len())));
    }
    let mut importer = Importer::new(given, opset);
    importer.initial(&proto, given)?;
    for node in &proto.node {
        let operator = node.op_type.as_deref().unwrap_or("");
        if !standard(&node.domain) {
            return Err(refused(format!("operator `{operator}` of `{}`", node.domain.as_deref().unwrap_or(""))));
        }
        importer.node(operator, node).map_err(|e| {
            let node = node.name.as_deref().filter(|n| !n.is_empty()).map_or(String::new(), |n| format!(" `{n}`"));
            e.within(format!("operator `{operator}`{node}"))
        })?;
    }
    let id = |output: &Made| match importer.known.get(&output.name) {
        Some(Known::Value(id)) if importer.whole.contains(id) => {
            Err(refused(format!("output `{}` of integers", output.name)))
        }
        Some(Known::Value(id)) => Ok(*id),
        _ => Err(refused(format!("no output `{}` of numbers", output.name))),
    };
    importer.graph.outputs = outputs.iter().map(id).collect::<Result<_>>()?;
    Ok(importer.graph)
}

impl Importer {
    fn node(&mut self, operator: &str, node: &NodeProto) -> Result<()> {
        let attributes = &mut Attributes { all: node.attribute.iter().collect() };
        if operator == "Split" {
            let parts = self.split(node, attributes)?;
            attributes.finish()?;
            for (part, name) in parts.into_iter().zip(&node.output) {
                self.note(node, part)?;
                self.known.insert(name.clone(), Known::Value(part));
            }
            return Ok(());
        }
        if matches!(operator, "GRU" | "LSTM" | "RNN") {
            return self.recurrent(operator, node, attributes);
        }
        if node.output.iter().filter(|o| !o.is_empty()).count() != 1 || node.output[0].is_empty() {
            return Err(refused(format!("{} outputs, expected 1", node.output.len())));
        }
        let made = match self.integers(operator, node, attributes)? {
            Some(known) => known,
            None => {
                let made = self.numbers(operator, node, attributes)?;
                if operator != "Reshape" && operator != "Flatten" {
                    self.note(node, made)?;
                }
                Known::Value(made)
            }
        };
        attributes.finish()?;
        self.known.insert(node.output[0].clone(), made);
        Ok(())
    }

    /// Records properties of a node's result that follow from its inputs: the composition of its rows axis, and whether it holds
    /// integers.
    fn note(&mut self, node: &NodeProto, made: Id) -> Result<()> {
        let inputs: Vec<Id> = (0..node.input.len()).filter_map(|n| self.value(node, n).ok()).collect();
        let operator = node.op_type.as_deref().unwrap_or("");
        let is_whole = |n: usize| match self.known(node, n) {
            Ok(Known::Value(id)) => self.whole.contains(id),
            Ok(Known::Integers(_)) => operator == "Where",
            Err(_) => false,
        };
        let first = match operator {
            "Cast" | "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" | "IsNaN" => node.input.len(),
            "GRU" | "LSTM" | "RNN" => node.input.len(),
            "Where" => 1,
            _ => 0,
        };
        if (first..node.input.len()).any(is_whole) {
            self.whole.insert(made);
            // f32 represents all integers up to 2^24. ONNX integers go beyond, and wrap.
            let counts = [
                "Add",
                "Sub",
                "Mul",
                "Sum",
                "ReduceSum",
                "ReduceL1",
                "ReduceSumSquare",
                "MatMul",
                "Gemm",
                "Einsum",
                "PRelu",
            ];
            if counts.contains(&operator) && self.bound(made) > WHOLE_MAX as f64 {
                return Err(refused(format!("over integers that may lie beyond {WHOLE_MAX}")));
            }
        }
        let size = |id: Id| self.rows(id).map_or(1, |axis| self.graph.shape(id)[axis]);
        if size(made) == 1 {
            return Ok(());
        }
        let mut outer = inputs.iter().filter(|&&id| size(id) > 1).map(|id| self.outer.get(id).copied().unwrap_or(1));
        let Some(first) = outer.next() else { return Err(refused("fixes the number of candidates")) };
        if outer.any(|other| other != first) {
            return Err(refused("two values of candidates that do not line up"));
        }
        self.outer.insert(made, first);
        Ok(())
    }
}
