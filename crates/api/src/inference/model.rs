//! Descriptions of the server and of models in the protocol.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::info::ModelInfo;

/// Description of the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InferenceServer {
    /// `sterling`.
    pub name: String,
    /// Release of the server.
    pub version: String,
    /// Supported extensions of the protocol.
    pub extensions: Vec<String>,
}

/// An error of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InferenceError {
    /// Error message.
    pub error: String,
}

/// Liveness or readiness.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InferenceReady {
    /// Model name, if one was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// For a server: true if it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live: Option<bool>,
    /// True if the server or model accepts requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
}

/// Description of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InferenceModel {
    /// Name of the model.
    pub name: String,
    /// Versions in memory.
    pub versions: Vec<String>,
    /// `sterling`.
    pub platform: String,
    /// Input tensors; all except one are optional.
    pub inputs: Vec<TensorInfo>,
    /// Output tensors.
    pub outputs: Vec<TensorInfo>,
}

/// Description of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TensorInfo {
    /// Name of the tensor.
    pub name: String,
    /// Data type of its values.
    pub datatype: String,
    /// Dimensions; -1 means any size.
    pub shape: Vec<i64>,
}

impl InferenceReady {
    /// Returns the state of a server that accepts requests. Sets both fields: the text of the protocol names the state
    /// `live`, KServe's server and client name it `ready`.
    pub fn server() -> Self {
        InferenceReady { name: None, live: Some(true), ready: Some(true) }
    }
}

impl InferenceServer {
    /// Returns the description of this server.
    pub fn this() -> Self {
        InferenceServer {
            name: "sterling".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            extensions: vec!["binary_tensor_data".into()],
        }
    }
}

/// Returns the protocol's description of a model.
pub fn inference_model(model: &ModelInfo, versions: Vec<u64>) -> InferenceModel {
    let tensor = |name: &str, datatype: &str, shape: &[i64]| TensorInfo {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.to_vec(),
    };
    let features = model.features.iter().map(|feature| match (feature.kind.as_str(), feature.width) {
        ("dense", width) => tensor(&feature.name, "FP32", &[-1, width.map_or(-1, |width| width as i64)]),
        ("category", _) => tensor(&feature.name, "BYTES", &[-1, -1]),
        ("text", _) => tensor(&feature.name, "BYTES", &[-1, 1]),
        _ => tensor(&feature.name, "INT64", &[-1, -1]),
    });
    let width = model.dimension * model.queries.len().max(1);
    let mut inputs: Vec<TensorInfo> = features.collect();
    if inputs.is_empty() {
        inputs.push(tensor("vector", "FP32", &[-1, width as i64]));
    }
    let fixed = [("ids", "INT64"), ("scores", "FP32"), ("similarities", "FP32")];
    let mut outputs: Vec<TensorInfo> =
        fixed.into_iter().map(|(name, datatype)| tensor(name, datatype, &[-1, -1])).collect();
    outputs.push(tensor("counts", "INT64", &[-1]));
    outputs.extend(model.tasks.iter().map(|task| tensor(&format!("tasks.{task}"), "FP32", &[-1, -1])));
    outputs.extend(model.columns.iter().map(|c| tensor(&format!("columns.{}", c.name), "BYTES", &[-1, -1])));
    InferenceModel {
        name: model.name.clone(),
        versions: versions.iter().map(u64::to_string).collect(),
        platform: "sterling".into(),
        inputs,
        outputs,
    }
}
