//! The parameters of an ONNX file: finds them among the file's constants, and writes the file with new values.

use std::ops::Range;

use rten_onnx::onnx::{DataLocation, DataType, GraphProto, ModelProto, TensorProto};

use sterling_core::error::{Error, Result};

/// A parameter of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Name of the initializer in the file.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Range of the parameter's elements in the array of all parameters, row-major.
    pub range: Range<usize>,
}

/// Constants with numbers of at least this magnitude are attention masks, not parameters.
const MASK: f32 = 1e4;

/// Field numbers of ONNX messages.
const MODEL_GRAPH: u64 = 7;
const GRAPH_INITIALIZER: u64 = 5;
const TENSOR_FLOATS: u64 = 4;
const TENSOR_NAME: u64 = 8;
const TENSOR_RAW: u64 = 9;

/// Returns the constants of a file that may be parameters, in the file's order, and their numbers concatenated.
///
/// # Errors
/// `Unsupported` if `bytes` is no ONNX file; `Invalid` if the count of numbers does not match a shape.
pub(super) fn parameters(bytes: &[u8], frozen: &[&str]) -> Result<(Vec<Parameter>, Vec<f32>)> {
    let model = ModelProto::parse_buf(bytes).map_err(|e| Error::unsupported(format!("not an ONNX file: {e}")))?;
    let graph = model.graph.ok_or_else(|| Error::unsupported("the ONNX file has no graph"))?;
    if let Some(name) = frozen.iter().find(|name| !is_known(&graph, name)) {
        return Err(Error::invalid(format!("frozen `{name}`: the graph has no input or constant of this name")));
    }
    let (mut parameters, mut initial): (Vec<Parameter>, Vec<f32>) = (Vec::new(), Vec::new());
    for tensor in &graph.initializer {
        let name = tensor.name.as_deref().unwrap_or("");
        if tensor.data_type != Some(DataType::FLOAT) || frozen.contains(&name) || is_statistic(&graph, name) {
            continue;
        }
        let numbers = numbers(tensor).map_err(|e| e.within(format!("constant `{name}`")))?;
        let shape: Option<Vec<usize>> = tensor.dims.iter().map(|&size| usize::try_from(size).ok()).collect();
        let shape = shape.unwrap_or_default();
        let count = shape.iter().try_fold(1usize, |count, &size| count.checked_mul(size));
        if count != Some(numbers.len()) {
            let (got, expected) = (numbers.len(), &tensor.dims);
            return Err(Error::invalid(format!("constant `{name}`: got {got} numbers, expected shape {expected:?}")));
        }
        if is_parameter(name, &shape, &numbers) {
            let range = initial.len()..initial.len() + numbers.len();
            parameters.push(Parameter { name: name.into(), shape, range });
            initial.extend(numbers);
        }
    }
    Ok((parameters, initial))
}

fn is_known(graph: &GraphProto, name: &str) -> bool {
    let named = |own: &Option<String>| own.as_deref() == Some(name);
    graph.initializer.iter().any(|tensor| named(&tensor.name)) || graph.input.iter().any(|input| named(&input.name))
}

/// Returns whether a constant is the running mean or variance of a batch norm.
fn is_statistic(graph: &GraphProto, name: &str) -> bool {
    let mut norms = graph.node.iter().filter(|node| node.op_type.as_deref() == Some("BatchNormalization"));
    norms.any(|node| node.input.iter().skip(3).any(|input| input == name))
}

/// Returns whether a constant is a parameter. A constant is not a parameter if it is a single number that PyTorch's
/// exporter wrote, such as an epsilon (`val_3`, scalar or of shape `[1]`, while parameters are named like
/// `layer.scale`), or a mask of large numbers or of zeros and ones.
fn is_parameter(name: &str, shape: &[usize], numbers: &[f32]) -> bool {
    let is_named = name.contains('.') && !name.contains("::");
    let is_flag = |x: &f32| *x == 0.0 || *x == 1.0;
    let is_mask = shape.len() > 1 && numbers.iter().all(is_flag) && numbers.contains(&0.0) && numbers.contains(&1.0);
    (numbers.len() > 1 || is_named) && !is_mask && !numbers.is_empty() && numbers.iter().all(|x| x.abs() < MASK)
}

fn numbers(tensor: &TensorProto) -> Result<Vec<f32>> {
    if tensor.data_location == Some(DataLocation::EXTERNAL) {
        return Err(Error::unsupported("the numbers are in another file, expected all data in one file"));
    }
    Ok(match &tensor.raw_data {
        Some(raw) => raw.borrow().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        None => tensor.float_data.clone(),
    })
}

/// Returns a copy of a file with new parameter values. Shapes do not change, so no other byte changes.
///
/// # Errors
/// `Corrupt` if the file is truncated; `Unsupported` if a parameter is not stored as f32.
pub(super) fn with_parameters(bytes: &[u8], parameters: &[Parameter], numbers: &[f32]) -> Result<Vec<u8>> {
    let mut file = bytes.to_vec();
    let mut is_written = vec![false; parameters.len()];
    for graph in fields(bytes, 0..bytes.len())?.into_iter().filter(|field| field.number == MODEL_GRAPH) {
        for tensor in fields(bytes, graph.range)?.into_iter().filter(|field| field.number == GRAPH_INITIALIZER) {
            let parts = fields(bytes, tensor.range)?;
            let name = parts.iter().find(|part| part.number == TENSOR_NAME).map(|part| &bytes[part.range.clone()]);
            let Some(n) = parameters.iter().position(|p| Some(p.name.as_bytes()) == name) else { continue };
            let places = parts.iter().filter(|part| matches!(part.number, TENSOR_RAW | TENSOR_FLOATS));
            let places: Vec<usize> = places.flat_map(|part| part.range.clone().step_by(4)).collect();
            let own = &numbers[parameters[n].range.clone()];
            if places.len() != own.len() {
                return Err(Error::unsupported(format!(
                    "parameter `{}`: {} numbers of f32 in the file, expected {}",
                    parameters[n].name,
                    places.len(),
                    own.len()
                )));
            }
            for (place, x) in places.into_iter().zip(own) {
                file[place..place + 4].copy_from_slice(&x.to_le_bytes());
            }
            is_written[n] = true;
        }
    }
    match parameters.iter().zip(&is_written).find(|(_, written)| !**written) {
        Some((parameter, _)) => Err(Error::unsupported(format!("parameter `{}` is not in the file", parameter.name))),
        None => Ok(file),
    }
}

/// A field of a message: its number and the range of its content; the range is empty for numbers of variable length.
struct Field {
    number: u64,
    range: Range<usize>,
}

/// Returns the fields of the message at `range`.
fn fields(bytes: &[u8], range: Range<usize>) -> Result<Vec<Field>> {
    let cut = || Error::corrupt("the ONNX file is truncated");
    let (bytes, mut at) = (bytes.get(..range.end).ok_or_else(cut)?, range.start);
    let mut all = Vec::new();
    while at < bytes.len() {
        let key = varint(bytes, &mut at).ok_or_else(cut)?;
        let length = match key & 7 {
            0 => varint(bytes, &mut at).map(|_| 0),
            1 => Some(8),
            2 => varint(bytes, &mut at),
            5 => Some(4),
            wire => {
                return Err(Error::corrupt(format!(
                    "the ONNX file has a field of wire type {wire}, which is not supported"
                )));
            }
        };
        let end = length.and_then(|length| at.checked_add(usize::try_from(length).ok()?));
        let end = end.filter(|&end| end <= bytes.len()).ok_or_else(cut)?;
        all.push(Field { number: key >> 3, range: at..end });
        at = end;
    }
    Ok(all)
}

fn varint(bytes: &[u8], at: &mut usize) -> Option<u64> {
    let mut value = 0;
    for place in 0..10 {
        let byte = *bytes.get(*at)?;
        *at += 1;
        value |= u64::from(byte & 0x7f) << (7 * place);
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}
