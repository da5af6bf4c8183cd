//! Static checks of a graph: limited size, topological order, complete constants, and shapes that only depend on
//! shapes.
//!
//! Because of the last rule, sandbox validation represents all requests: if the size of every value follows from the
//! number of rows alone, no request needs more memory or time than the validation with as many rows did, for any
//! inputs.

use std::collections::{HashMap, HashSet};

use half::{bf16, f16};
use rten_onnx::onnx::{DataLocation, DataType, GraphProto, NodeProto, TensorProto};

use sterling_core::error::{Error, Result};

/// Maximum number of nodes of a graph.
const NODES_MAX: usize = 16_384;
/// Maximum length of a chain of nodes, since runtimes traverse a graph recursively.
const DEPTH_MAX: usize = 2_048;
/// Maximum number of elements of a constant, or of a shape that is given as a constant.
const NUMBERS_MAX: u64 = 1 << 28;

/// Static knowledge about a value.
#[derive(Clone, Copy)]
struct Known {
    depth: usize,
    /// True if the value depends on the elements of an input, not only on the input's shape.
    is_data: bool,
}

/// Rejects a graph that no runtime should load.
///
/// # Errors
/// `Invalid` with the invalid node, constant or name.
pub(super) fn graph(graph: &GraphProto) -> Result<()> {
    if graph.node.len() > NODES_MAX {
        return Err(Error::invalid(format!("{} nodes, expected at most {NODES_MAX}", graph.node.len())));
    }
    let mut known: HashMap<&str, Known> = HashMap::new();
    let mut constants: HashMap<&str, &TensorProto> = HashMap::new();
    for tensor in &graph.initializer {
        let name = tensor.name.as_deref().unwrap_or("");
        check_tensor(tensor).map_err(|e| e.within(format!("constant `{name}`")))?;
        if constants.insert(name, tensor).is_some() {
            return Err(Error::invalid(format!("constant `{name}` is given twice")));
        }
        known.insert(name, Known { depth: 0, is_data: false });
    }
    let mut inputs = HashSet::new();
    for input in &graph.input {
        let name = input.name.as_deref().unwrap_or("");
        if !inputs.insert(name) {
            return Err(Error::invalid(format!("input `{name}` is given twice")));
        }
        known.entry(name).or_insert(Known { depth: 0, is_data: true });
    }
    for (place, node) in graph.node.iter().enumerate() {
        let made = check_node(node, &known, &constants).map_err(|e| e.within(shown(node, place)))?;
        for output in node.output.iter().filter(|name| !name.is_empty()) {
            if known.insert(output, made).is_some() {
                return Err(Error::invalid(format!("`{output}` is computed twice")).within(shown(node, place)));
            }
        }
        if let (Some("Constant"), Some(tensor)) = (node.op_type.as_deref(), constant(node)) {
            constants.insert(node.output.first().map_or("", String::as_str), tensor);
        }
    }
    match graph.output.iter().filter_map(|o| o.name.as_deref()).find(|name| !known.contains_key(name)) {
        Some(name) => Err(Error::invalid(format!("output `{name}`: no node computes it"))),
        None => Ok(()),
    }
}

/// Returns the name and operator of a node, for messages.
pub(super) fn shown(node: &NodeProto, place: usize) -> String {
    let operator = node.op_type.as_deref().unwrap_or("?");
    match node.name.as_deref().filter(|name| !name.is_empty()) {
        Some(name) => format!("node `{name}` ({operator})"),
        None => format!("node {} ({operator})", place + 1),
    }
}

/// Returns the tensor of a `Constant` node.
pub(super) fn constant(node: &NodeProto) -> Option<&TensorProto> {
    node.attribute.iter().find(|a| a.name.as_deref() == Some("value"))?.t.as_ref()
}

fn check_node(
    node: &NodeProto,
    known: &HashMap<&str, Known>,
    constants: &HashMap<&str, &TensorProto>,
) -> Result<Known> {
    let operator = node.op_type.as_deref().unwrap_or("");
    for attribute in &node.attribute {
        let name = attribute.name.as_deref().unwrap_or("");
        attribute.t.as_ref().map_or(Ok(()), check_tensor).map_err(|e| e.within(format!("attribute `{name}`")))?;
    }
    if let Some(what) = follows_numbers(operator) {
        return Err(Error::invalid(format!("{what}, expected sizes that follow from the number of rows alone")));
    }
    let mut made = Known { depth: 1, is_data: false };
    for (place, name) in node.input.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
        let Some(read) = known.get(name.as_str()) else {
            return Err(Error::invalid(format!(
                "reads `{name}`, which no earlier node computes; nodes must be in topological order, without cycles"
            )));
        };
        made.depth = made.depth.max(read.depth + 1);
        made.is_data |= read.is_data;
        if sets_shape(operator, place) {
            if read.is_data {
                return Err(Error::invalid(format!(
                    "`{name}` sets a size that depends on input values, expected one that depends on shapes only"
                )));
            }
            check_size(operator, constants.get(name.as_str()).copied())?;
        }
    }
    if made.depth > DEPTH_MAX {
        return Err(Error::invalid(format!("ends a chain of more than {DEPTH_MAX} nodes, expected a shorter chain")));
    }
    made.is_data &= !["Shape", "Size"].contains(&operator);
    Ok(made)
}

/// Returns how the size of an operator's results depends on input values; `None` if it does not.
fn follows_numbers(operator: &str) -> Option<&'static str> {
    match operator {
        "NonZero" | "Compress" | "Unique" | "NonMaxSuppression" | "StringSplit" => {
            Some("the size of the results depends on input values")
        }
        "If" | "Loop" | "Scan" | "SequenceMap" => Some("the node decides which nodes run"),
        _ => None,
    }
}

/// Returns whether the input at this index is a size, or a bound of a size, of the operator's result.
pub(super) fn sets_shape(operator: &str, place: usize) -> bool {
    match operator {
        "ConstantOfShape" | "Range" => true,
        "Reshape" | "Expand" | "Tile" | "TopK" | "OneHot" | "Upsample" | "Split" | "SplitToSequence" | "Squeeze"
        | "Unsqueeze" => place == 1,
        "Slice" | "Resize" => place > 0,
        "Pad" => place == 1 || place == 3,
        _ => operator.starts_with("Reduce") && place == 1,
    }
}

/// Rejects a constant size that is implausibly large.
fn check_size(operator: &str, tensor: Option<&TensorProto>) -> Result<()> {
    let Some(sizes) = tensor.filter(|_| ["ConstantOfShape", "Expand", "Reshape", "Tile"].contains(&operator)) else {
        return Ok(());
    };
    let Some(sizes) = integers(sizes) else { return Ok(()) };
    let numbers = sizes.iter().filter(|n| **n > 0).try_fold(1u64, |all, &n| all.checked_mul(n as u64));
    match numbers.filter(|&n| n <= NUMBERS_MAX) {
        Some(_) => Ok(()),
        None => Err(Error::invalid(format!("got a size of {sizes:?}, expected at most {NUMBERS_MAX} numbers"))),
    }
}

/// Returns the elements of a tensor of 64-bit integers; `None` for other types.
pub(super) fn integers(tensor: &TensorProto) -> Option<Vec<i64>> {
    if tensor.data_type != Some(DataType::INT64) {
        return None;
    }
    Some(match &tensor.raw_data {
        Some(raw) => raw.borrow().as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        None => tensor.int64_data.clone(),
    })
}

/// Rejects constants that are incomplete or not numeric.
fn check_tensor(tensor: &TensorProto) -> Result<()> {
    if tensor.data_location == Some(DataLocation::EXTERNAL) || !tensor.external_data.is_empty() {
        return Err(Error::invalid(
            "the data is in a file outside of the model package, expected a file next to the graph",
        ));
    }
    let numbers = tensor.dims.iter().try_fold(1u64, |all, &n| all.checked_mul(u64::try_from(n).ok()?));
    let Some(numbers) = numbers.filter(|&n| n <= NUMBERS_MAX) else {
        return Err(Error::invalid(format!("got shape {:?}, expected at most {NUMBERS_MAX} numbers", tensor.dims)));
    };
    let kind = tensor.data_type.unwrap_or(DataType(0));
    let Some((bits, listed)) = stored(tensor, kind) else {
        return Err(Error::invalid(format!("got numbers of type {kind}, expected floats, integers or booleans")));
    };
    let (got, expected, what) = match &tensor.raw_data {
        Some(raw) => (raw.borrow().len() as u64, (numbers * bits).div_ceil(8), "bytes"),
        None => (listed as u64, if bits < 8 { numbers.div_ceil(2) } else { numbers }, "numbers"),
    };
    if got != expected {
        return Err(Error::invalid(format!("{got} {what} for shape {:?}, expected {expected}", tensor.dims)));
    }
    match has_nan(tensor, kind) {
        true => Err(Error::invalid("got NaN, expected numbers")),
        false => Ok(()),
    }
}

/// Returns the bits per number of a type, and the number of elements in the field for this type; `None` for other
/// types.
fn stored(tensor: &TensorProto, kind: DataType) -> Option<(u64, usize)> {
    let small = tensor.int32_data.len();
    Some(match kind {
        DataType::FLOAT => (32, tensor.float_data.len()),
        DataType::DOUBLE => (64, tensor.double_data.len()),
        DataType::INT64 => (64, tensor.int64_data.len()),
        DataType::INT32 => (32, small),
        DataType::FLOAT16 | DataType::BFLOAT16 | DataType::INT16 | DataType::UINT16 => (16, small),
        DataType::INT8 | DataType::UINT8 | DataType::BOOL => (8, small),
        DataType::INT4 | DataType::UINT4 => (4, small),
        _ => return None,
    })
}

fn has_nan(tensor: &TensorProto, kind: DataType) -> bool {
    let raw = tensor.raw_data.as_ref().map(|raw| raw.borrow());
    let pairs = |is_nan: fn([u8; 2]) -> bool| {
        let listed = || tensor.int32_data.iter().any(|&n| is_nan((n as u16).to_le_bytes()));
        raw.as_ref().map_or_else(listed, |raw| raw.as_chunks::<2>().0.iter().any(|b| is_nan(*b)))
    };
    match kind {
        DataType::FLOAT => match &raw {
            Some(raw) => raw.as_chunks::<4>().0.iter().any(|b| f32::from_le_bytes(*b).is_nan()),
            None => tensor.float_data.iter().any(|x| x.is_nan()),
        },
        DataType::DOUBLE => match &raw {
            Some(raw) => raw.as_chunks::<8>().0.iter().any(|b| f64::from_le_bytes(*b).is_nan()),
            None => tensor.double_data.iter().any(|x| x.is_nan()),
        },
        DataType::FLOAT16 => pairs(|b| f16::from_le_bytes(b).is_nan()),
        DataType::BFLOAT16 => pairs(|b| bf16::from_le_bytes(b).is_nan()),
        _ => false,
    }
}
