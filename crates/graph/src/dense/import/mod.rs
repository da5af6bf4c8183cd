//! Imports ONNX: each operator of the table in `docs/guide/own-model.md` becomes a few operations; other operators are
//! rejected by name.
//!
//! Shapes are known except for the number of rows, which [`Size::Rows`] represents. Integers (shapes, axes, indices) are
//! evaluated during import and become values only where numbers are compared with them; booleans are the numbers 1 and 0.

mod arithmetic;
mod einsum;
mod functions;
mod fused;
mod heads;
mod integers;
mod known;
mod lookups;
mod norms;
mod recurrent;
mod rows;
mod scans;
mod types;
mod views;
mod windows;

pub use known::{DeclaredInput, DeclaredOutput, Size};

use rten_onnx::onnx::{DataType, ModelProto, NodeProto};

use super::graph::Graph;
use super::ir::Id;
use fused::MICROSOFT;
use integers::MOVES;
use known::{Attributes, Importer, Known, WHOLE_MAX, refused};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::Unary;
pub(crate) use types::ElementTypes;

/// Operators that may compute integers larger than their operands. Those in `LINEAR` keep the order of integers beyond
/// the exact range of f32.
const LINEAR: [&str; 4] = ["Add", "Sub", "Mul", "Sum"];
const COUNTS: [&str; 9] =
    ["ReduceSum", "ReduceL1", "ReduceSumSquare", "ReduceProd", "MatMul", "Gemm", "Einsum", "PRelu", "CumSum"];
/// Operators besides [`MOVES`] whose results are copies of numbers of their operands, or numbers that every float type
/// represents exactly.
const EXACT: [&str; 20] = [
    "Identity",
    "Constant",
    "ConstantOfShape",
    "Split",
    "Squeeze",
    "Unsqueeze",
    "Trilu",
    "Dropout",
    "Relu",
    "Neg",
    "Abs",
    "Sign",
    "Max",
    "Min",
    "Clip",
    "Where",
    "ReduceMax",
    "ReduceMin",
    "TopK",
    "MaxPool",
];
/// Maximum number of nodes of a graph.
const NODES_MAX: usize = 20_000;

/// Imports a graph whose inputs are `given`.
///
/// # Errors
/// `Unsupported` with the operator, the attribute or the shape that the table of operators does not list.
pub(super) fn import(bytes: &[u8], given: &[DeclaredInput], outputs: &[DeclaredOutput]) -> Result<Graph> {
    let model = ModelProto::parse_buf(bytes).map_err(|e| refused(format!("the file is not a valid ONNX file: {e}")))?;
    let standard = |domain: &Option<String>| domain.as_deref().is_none_or(|d| d.is_empty() || d == "ai.onnx");
    let opset = model.opset_import.iter().find(|o| standard(&o.domain)).and_then(|o| o.version).unwrap_or(1);
    let proto = model.graph.ok_or_else(|| refused("the ONNX file has no graph"))?;
    if proto.node.len() > NODES_MAX {
        return Err(refused(format!("{} nodes, expected at most {NODES_MAX}", proto.node.len())));
    }
    let mut importer = Importer::new(given, opset);
    importer.initial(&proto, given)?;
    for node in &proto.node {
        let operator = match (node.domain.as_deref().unwrap_or(""), node.op_type.as_deref().unwrap_or("")) {
            ("" | "ai.onnx", operator) => operator.to_owned(),
            ("com.microsoft", operator) => format!("{MICROSOFT}{operator}"),
            (domain, operator) => {
                return Err(refused(format!("operator `{operator}` of domain `{domain}` is not supported")));
            }
        };
        let operator = operator.as_str();
        importer.types.add_node(node);
        let made = match operator {
            "CastLike" => match types::cast_of(node, &importer.types) {
                Some(cast) => importer.node("Cast", &cast),
                None => Err(refused("the type of the second input is not known")),
            },
            _ => importer.node(operator, node),
        };
        made.and_then(|()| importer.round_halves(operator, node)).map_err(|e| {
            let node = node.name.as_deref().filter(|n| !n.is_empty()).map_or(String::new(), |n| format!(" `{n}`"));
            e.within(format!("operator `{operator}`{node}"))
        })?;
    }
    let id = |output: &DeclaredOutput| match importer.known.get(&output.name) {
        Some(Known::Value(id)) if importer.whole.contains(id) => {
            Err(refused(format!("output `{}` has integers, expected floats", output.name)))
        }
        Some(Known::Value(id)) => Ok(*id),
        _ => Err(refused(format!("output `{}` is missing or not numeric", output.name))),
    };
    importer.graph.outputs = outputs.iter().map(id).collect::<Result<_>>()?;
    Ok(importer.graph)
}

impl Importer {
    fn node(&mut self, operator: &str, node: &NodeProto) -> Result<()> {
        let attributes = &mut Attributes { all: node.attribute.iter().collect() };
        if let Some(parts) = self.several(operator, node, attributes)? {
            attributes.finish()?;
            for (n, name) in node.output.iter().enumerate() {
                match parts.get(n).copied().flatten() {
                    Some(part) => {
                        self.note(operator, node, part)?;
                        self.known.insert(name.clone(), Known::Value(part));
                    }
                    None => self.check_unread(name)?,
                }
            }
            return Ok(());
        }
        if matches!(operator, "GRU" | "LSTM" | "RNN") {
            self.check_loose(operator, node)?;
            return self.recurrent(operator, node, attributes);
        }
        let (first, others) = node.output.split_first().ok_or_else(|| refused("the node has no outputs"))?;
        others.iter().try_for_each(|name| self.check_unread(name))?;
        let known = match self.row_numbers(operator, node, attributes)? {
            None => self.integers(operator, node, attributes)?,
            known => known,
        };
        let made = match known {
            Some(known) => known,
            None => {
                self.check_loose(operator, node)?;
                let made = self.numbers(operator, node, attributes)?;
                if operator != "Reshape" && operator != "Flatten" {
                    self.note(operator, node, made)?;
                }
                Known::Value(made)
            }
        };
        attributes.finish()?;
        self.known.insert(first.clone(), made);
        Ok(())
    }

    /// Rounds half-precision results of a node to their type, since compiled graphs compute in f32.
    fn round_halves(&mut self, operator: &str, node: &NodeProto) -> Result<()> {
        if EXACT.contains(&operator) || MOVES.contains(&operator) {
            return Ok(());
        }
        for name in &node.output {
            let f = match self.types.of(name) {
                Some(DataType::FLOAT16) => Unary::RoundF16,
                Some(DataType::BFLOAT16) => Unary::RoundBf16,
                _ => continue,
            };
            let Some(Known::Value(id)) = self.known.get(name) else { continue };
            let id = *id;
            let made = match self.turned.get(&id).cloned() {
                Some((of, order)) => {
                    let made = self.graph.unary(f, of)?;
                    self.turned_from(made, order)?
                }
                None => self.graph.unary(f, id)?,
            };
            if let Some(&outer) = self.outer.get(&id) {
                self.outer.insert(made, outer);
            }
            self.known.insert(name.clone(), Known::Value(made));
        }
        Ok(())
    }

    /// Returns the outputs of an operator with several outputs; `None` for other operators.
    fn several(
        &mut self,
        operator: &str,
        node: &NodeProto,
        attributes: &mut Attributes<'_>,
    ) -> Result<Option<Vec<Option<Id>>>> {
        let all = |made: Vec<Id>| made.into_iter().map(Some).collect();
        Ok(match operator {
            "Split" => Some(all(self.split(node, attributes)?)),
            "TopK" => Some(all(self.top(node, attributes)?)),
            "com.microsoft.SkipLayerNormalization" | "com.microsoft.SkipSimplifiedLayerNormalization" => {
                Some(self.skip_norm(operator, node, attributes)?)
            }
            "RotaryEmbedding" | "com.microsoft.RotaryEmbedding" => Some(self.rotary(operator, node, attributes)?),
            operator if heads::is_attention(operator) => Some(self.attention(operator, node, attributes)?),
            _ => None,
        })
    }

    /// Rejects integers beyond the exact range of f32, unless they are clipped, moved, or used as indices (an index out
    /// of range selects nothing).
    fn check_loose(&self, operator: &str, node: &NodeProto) -> Result<()> {
        let is_loose = |n: usize| matches!(self.known(node, n), Ok(Known::Value(id)) if self.loose.contains(id));
        let allowed = match operator {
            "Max" | "Min" | "Clip" | "Neg" | "Where" | "Squeeze" | "Unsqueeze" | "OneHot" => return Ok(()),
            "Gather" | "GatherND" | "GatherElements" => 1,
            // Remainders are exact for integers that no arithmetic has rounded.
            "Mod" => 0,
            operator if LINEAR.contains(&operator) || MOVES.contains(&operator) => return Ok(()),
            _ => usize::MAX,
        };
        match (0..node.input.len()).any(|n| n != allowed && is_loose(n)) {
            true => Err(refused(format!("its integers may exceed {WHOLE_MAX}, beyond which f32 is not exact"))),
            false => Ok(()),
        }
    }

    /// Rejects an output that compiled graphs do not compute, if a node or the caller reads the output.
    fn check_unread(&self, name: &str) -> Result<()> {
        match self.read.contains(name) && !name.is_empty() {
            true => Err(refused(format!("output `{name}` is used, expected that only the first output is used"))),
            false => Ok(()),
        }
    }

    /// Records properties of a node's result that follow from the node's inputs: how the row axis is composed, and
    /// whether the result holds integers.
    fn note(&mut self, operator: &str, node: &NodeProto, made: Id) -> Result<()> {
        let inputs: Vec<Id> = (0..node.input.len()).filter_map(|n| self.value(node, n).ok()).collect();
        let is_whole = |n: usize| match self.known(node, n) {
            Ok(Known::Value(id)) => self.whole.contains(id),
            Ok(Known::Integers(of)) => operator == "Where" || (n == 0 && !of.are_truths),
            Ok(Known::RowNumbers(_) | Known::Columns(_)) | Err(_) => false,
        };
        // Inputs that have the element type of the result.
        let typed = match operator {
            "Cast" | "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" | "IsNaN" | "IsInf" => 0..0,
            "GRU" | "LSTM" | "RNN" => 0..0,
            "RotaryEmbedding" | "com.microsoft.RotaryEmbedding" => 0..1,
            operator if heads::is_attention(operator) => 0..1,
            "Where" => 1..3,
            "Gather" | "GatherND" | "GatherElements" | "ScatterND" | "ScatterElements" | "CumSum" | "Pad" | "TopK" => {
                0..1
            }
            "OneHot" => 2..3,
            _ => 0..node.input.len(),
        };
        if typed.into_iter().any(is_whole) {
            self.whole.insert(made);
            // f32 represents all integers up to 2^24 exactly. ONNX integers may be larger, and wrap around on overflow.
            let is_beyond = self.bound(made) > WHOLE_MAX as f64;
            if is_beyond && (LINEAR.contains(&operator) || inputs.iter().any(|id| self.loose.contains(id))) {
                self.loose.insert(made);
            } else if is_beyond && COUNTS.contains(&operator) {
                return Err(refused(format!("its integers may exceed {WHOLE_MAX}, beyond which f32 is not exact")));
            }
        }
        let size = |id: Id| self.rows(id).map_or(1, |axis| self.graph.shape(id)[axis]);
        if size(made) == 1 {
            return Ok(());
        }
        let mut outer = inputs.iter().filter(|&&id| size(id) > 1).map(|id| self.outer.get(id).copied().unwrap_or(1));
        let Some(first) = outer.next() else {
            return Err(refused("the node fixes the number of candidates, expected any number"));
        };
        if outer.any(|other| other != first) {
            return Err(refused("two inputs have different candidate axes or different numbers of candidates"));
        }
        self.outer.insert(made, first);
        Ok(())
    }
}
