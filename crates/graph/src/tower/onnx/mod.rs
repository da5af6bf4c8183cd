//! ONNX files: reads inputs and outputs, and checks that a runtime can safely load the file.
//!
//! A malformed file may end the process: by unbounded nesting, by chains of thousands of nodes, or by shapes that grow
//! with the numbers of a request. [`read`] rejects what the file alone reveals:
//!
//! 1. `external`: constants in other files are moved into the graph file before it is read.
//! 2. `wire`: messages nest no deeper than ONNX needs for a graph without control flow.
//! 3. `check`: topological order, each name defined once, complete constants, shapes that follow from shapes.
//! 4. `misread`: nodes that the fallback runtime evaluates differently from the specification, if it runs the graph.
//!
//! `sterling_snapshot::sandbox` detects what only execution reveals.

mod check;
mod external;
mod misread;
mod wire;

use std::ops::RangeInclusive;

pub use external::inlined;

use rten_onnx::onnx::{DataType, ModelProto, ValueInfoProto};

use sterling_core::error::{Error, Result};

/// Maximum file size in bytes, including external data: half of ONNX's own limit.
pub const BYTES_MAX: usize = 1 << 30;
/// Supported opsets: from the first opset with broadcasting to the last opset that models were tested with.
const OPSETS: RangeInclusive<i64> = 7..=25;

/// An input or output of a graph. In the shape, `None` is a size that differs between runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Name in the file.
    pub name: String,
    /// Dimensions, if the file declares them.
    pub shape: Option<Vec<Option<usize>>>,
}

/// Inputs and outputs of a file that passed the checks.
pub(super) struct Ports {
    pub(super) inputs: Vec<Port>,
    pub(super) outputs: Vec<Port>,
    /// Deviation of the fallback runtime from the ONNX specification, if it evaluates this graph differently.
    pub(super) misread: Option<String>,
}

/// Checks a file without running the graph.
///
/// # Errors
/// `Invalid` with the invalid node, constant, input or output.
pub(super) fn read(bytes: &[u8]) -> Result<Ports> {
    let unusable = |e: &dyn std::fmt::Display| Error::invalid(format!("not a usable ONNX graph: {e}"));
    if bytes.len() > BYTES_MAX {
        return Err(unusable(&format!("{} bytes, expected at most {BYTES_MAX}", bytes.len())));
    }
    wire::check(bytes).map_err(|e| unusable(&e))?;
    let model = ModelProto::parse_buf(bytes).map_err(|e| unusable(&e))?;
    let graph = model.graph.as_ref().ok_or_else(|| unusable(&"the file has no graph"))?;
    check_opset(&model)?;
    check::graph(graph)?;
    let is_constant = |value: &&ValueInfoProto| graph.initializer.iter().any(|tensor| tensor.name == value.name);
    let port = |what: &str, value: &ValueInfoProto| port(value).map_err(|e| e.within(what));
    Ok(Ports {
        // Files of the first ONNX versions list constants among the inputs.
        inputs: graph.input.iter().filter(|v| !is_constant(v)).map(|v| port("input", v)).collect::<Result<_>>()?,
        outputs: graph.output.iter().map(|v| port("output", v)).collect::<Result<_>>()?,
        misread: misread::misread(graph),
    })
}

/// Rejects untested opsets, because the meaning of operators depends on the opset.
fn check_opset(model: &ModelProto) -> Result<()> {
    let is_standard = |domain: &Option<String>| domain.as_deref().is_none_or(|d| d.is_empty() || d == "ai.onnx");
    let named = model.opset_import.iter().find(|opset| is_standard(&opset.domain)).and_then(|opset| opset.version);
    if named.is_some_and(|version| OPSETS.contains(&version)) {
        return Ok(());
    }
    let (least, most) = (OPSETS.start(), OPSETS.end());
    let named = named.map_or("no version of the operators".into(), |version| format!("operators of opset {version}"));
    Err(Error::invalid(format!("{named}, expected opset {least} to {most}: export with `opset_version={most}`")))
}

fn port(value: &ValueInfoProto) -> Result<Port> {
    let name = value.name.clone().filter(|n| !n.is_empty()).ok_or_else(|| Error::invalid("has no name"))?;
    let Some(tensor) = value.r#type.as_ref().and_then(|t| t.tensor_type.as_ref()) else {
        return Ok(Port { name, shape: None });
    };
    if let Some(kind) = tensor.elem_type.filter(|kind| *kind != DataType::FLOAT) {
        let kind = kind.to_string().to_lowercase();
        return Err(Error::invalid(format!("`{name}` is tensor({kind}), expected tensor(float)")));
    }
    let Some(shape) = &tensor.shape else { return Ok(Port { name, shape: None }) };
    let size = |dim: &rten_onnx::onnx::Dimension| match dim.dim_value {
        None => Ok(None),
        Some(n) => usize::try_from(n)
            .map(Some)
            .map_err(|_| Error::invalid(format!("`{name}` has a dimension of {n}, expected 0 or more"))),
    };
    Ok(Port { shape: Some(shape.dim.iter().map(size).collect::<Result<_>>()?), name })
}
