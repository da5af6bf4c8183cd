//! Independent reference evaluation of ONNX files, with which every execution of a graph is compared.
//!
//! The oracle evaluates the nodes of the file in order with plain f64 loops, as the ONNX reference describes them: integers are i64
//! wrapped to the width of their type, booleans are booleans, operands broadcast by their shapes. The oracle shares no code with
//! the compiler of `sterling_graph::dense` or with the fallback runtime and rewrites nothing, so that a bug in the compiler or
//! runtime shows as a difference.
//!
//! The tolerance for f32 is measured, not assumed: the graph is evaluated again with every inexact result rounded to f32
//! ([`Arithmetic`]), up or down at random. The resulting change is the rounding noise of the computation.
//!
//! Modules: `stop`: reasons why a graph cannot be evaluated; `array`: values; `call`: access to a node; `numbers`, `products`,
//! `reductions`, `attention`, `fused`, `recurrent`, `windows`: arithmetic; `views`, `indexing`: data movement.

mod arithmetic;
mod array;
mod attention;
mod call;
mod fused;
mod indexing;
mod numbers;
mod products;
mod recurrent;
mod reductions;
mod stop;
mod views;
mod windows;

use std::collections::HashMap;
use std::rc::Rc;

use rten_onnx::onnx::{ModelProto, NodeProto};

pub(super) use arithmetic::{Arithmetic, Mode};
pub(super) use array::Array;
use array::Element;
use call::Call;
pub(super) use stop::Stop;

/// A parsed graph file that can be evaluated.
pub(super) struct Oracle {
    nodes: Vec<NodeProto>,
    constants: HashMap<String, Rc<Array>>,
    /// Index of the last node that reads each value.
    last_reads: HashMap<String, usize>,
    opset: i64,
}

impl Oracle {
    /// Parses a graph file that has passed the checks of `sterling_graph::tower`.
    pub(super) fn read(bytes: &[u8]) -> Result<Oracle, Stop> {
        let invalid = |what: String| Stop::Invalid(what);
        let model = ModelProto::parse_buf(bytes).map_err(|e| invalid(e.to_string()))?;
        let is_standard = |domain: &Option<String>| domain.as_deref().is_none_or(|d| d.is_empty() || d == "ai.onnx");
        let opset = model.opset_import.iter().find(|o| is_standard(&o.domain)).and_then(|o| o.version).unwrap_or(1);
        let mut graph = model.graph.ok_or_else(|| invalid("the ONNX file has no graph".into()))?;
        for node in graph.node.iter_mut().filter(|node| node.domain.as_deref() == Some("com.microsoft")) {
            node.op_type = Some(format!("{}{}", fused::MICROSOFT, node.op_type.as_deref().unwrap_or("")));
            node.domain = None;
        }
        let mut constants = HashMap::new();
        for tensor in &graph.initializer {
            // A constant of another type makes the node that reads it unsupported.
            if let Ok(array) = array::of_tensor(tensor) {
                constants.insert(tensor.name.clone().unwrap_or_default(), Rc::new(array));
            }
        }
        if let Some(node) = graph.node.iter().find(|node| !is_standard(&node.domain)) {
            return Err(Stop::Unknown(format!("operator `{}`", node.op_type.as_deref().unwrap_or(""))));
        }
        let mut last_reads = HashMap::new();
        for (place, node) in graph.node.iter().enumerate() {
            for name in node.input.iter().chain(&node.output) {
                last_reads.insert(name.clone(), place);
            }
        }
        Ok(Oracle { nodes: graph.node, constants, last_reads, opset })
    }

    /// Evaluates the graph for named inputs and returns the named outputs. Calls `seen` with each output of each node.
    pub(super) fn run(
        &self,
        inputs: &[(String, Array)],
        outputs: &[&str],
        arithmetic: &mut Arithmetic,
        seen: &mut dyn FnMut(&NodeProto, &str, &Array),
    ) -> Result<Vec<Array>, Stop> {
        let mut values: HashMap<&str, Rc<Array>> = HashMap::new();
        for (name, array) in inputs {
            values.insert(name, Rc::new(array.clone()));
        }
        for (place, node) in self.nodes.iter().enumerate() {
            let read = |name: &String| match name.as_str() {
                "" => Ok(None),
                name => match values.get(name).or_else(|| self.constants.get(name)) {
                    Some(array) => Ok(Some(array.clone())),
                    None => Err(Stop::Unknown(format!("the type of `{name}`"))),
                },
            };
            let inputs = node.input.iter().map(read).collect::<Result<Vec<_>, Stop>>()?;
            let call = Call { node, inputs, opset: self.opset };
            let made =
                evaluate(&call, arithmetic).map(|made| narrowed(&call, made, arithmetic)).map_err(
                    |stop| match stop {
                        Stop::Invalid(what) => Stop::Invalid(format!("{}: {what}", shown(node))),
                        stop => stop,
                    },
                )?;
            for (name, array) in node.output.iter().zip(made) {
                seen(node, name, &array);
                values.insert(name, Rc::new(array));
            }
            for name in node.input.iter().chain(&node.output) {
                if self.last_reads.get(name) == Some(&place) && !outputs.contains(&name.as_str()) {
                    values.remove(name.as_str());
                }
            }
        }
        let output = |name: &&str| {
            let array = values.get(name).or_else(|| self.constants.get(*name));
            array.map(|array| (**array).clone()).ok_or_else(|| Stop::Unknown(format!("the type of `{name}`")))
        };
        outputs.iter().map(output).collect()
    }
}

/// Returns the name and operator of a node for messages.
pub(super) fn shown(node: &NodeProto) -> String {
    let operator = node.op_type.as_deref().unwrap_or("?");
    match node.name.as_deref().filter(|name| !name.is_empty()).or(node.output.first().map(String::as_str)) {
        Some(name) => format!("node `{name}` ({operator})"),
        None => format!("a node ({operator})"),
    }
}

/// Gives float results the operator's result type, and rounds them to that type.
fn narrowed(call: &Call<'_>, made: Vec<Array>, arithmetic: &mut Arithmetic) -> Vec<Array> {
    let typed = match call.operator() {
        "Cast" | "CastLike" | "Constant" | "ConstantOfShape" => None,
        "Where" => call.optional(1),
        "OneHot" => call.optional(2),
        _ => call.inputs.iter().flatten().map(|array| &**array).find(|array| array.is_real()),
    };
    let one = |array: Array| {
        let element = typed.filter(|of| of.is_real()).map_or(array.element, |of| of.element);
        match (element, array.reals()) {
            (Element::Half | Element::Brain, Ok(numbers)) => {
                let numbers = numbers.iter().map(|&x| arithmetic.narrowed(x, element)).collect();
                Array::real(array.shape.clone(), numbers).typed(element)
            }
            _ => array,
        }
    };
    made.into_iter().map(one).collect()
}

fn evaluate(call: &Call<'_>, arithmetic: &mut Arithmetic) -> Result<Vec<Array>, Stop> {
    let parts = [
        views::evaluate,
        indexing::evaluate,
        reductions::evaluate,
        products::evaluate,
        attention::evaluate,
        fused::evaluate,
        windows::evaluate,
        recurrent::evaluate,
        numbers::evaluate,
    ];
    for part in parts {
        if let Some(made) = part(call, arithmetic)? {
            return Ok(made);
        }
    }
    Err(Stop::Unknown(format!("operator `{}`", call.operator())))
}

#[cfg(test)]
mod tests;
