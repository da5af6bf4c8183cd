//! What the protocol says of the server and of models.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::info::ModelInfo;

/// The server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InferenceServer {
    /// `sterling`.
    pub name: String,
    /// Its release.
    pub version: String,
    /// Extensions of the protocol that it has.
    pub extensions: Vec<String>,
}

/// What was wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InferenceError {
    /// In words.
    pub error: String,
}

/// Whether something lives or is ready.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InferenceReady {
    /// The model, where one is asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Of a server: it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live: Option<bool>,
    /// It takes requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
}

/// A model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InferenceModel {
    /// Its name.
    pub name: String,
    /// Its versions in memory.
    pub versions: Vec<String>,
    /// `sterling`.
    pub platform: String,
    /// The tensors that it takes; all of them may be left out but one.
    pub inputs: Vec<TensorInfo>,
    /// The tensors that it gives.
    pub outputs: Vec<TensorInfo>,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// What its values are.
    pub datatype: String,
    /// Its dimensions, -1 for one of any size.
    pub shape: Vec<i64>,
}

impl InferenceReady {
    /// A server that takes requests: the protocol's text names that `live` here too, KServe's own server and client `ready`.
    pub fn server() -> Self {
        InferenceReady { name: None, live: Some(true), ready: Some(true) }
    }
}

impl InferenceServer {
    /// This one.
    pub fn this() -> Self {
        InferenceServer {
            name: "sterling".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            extensions: vec!["binary_tensor_data".into()],
        }
    }
}

/// A model as the protocol tells of it.
pub fn inference_model(model: &ModelInfo, versions: Vec<u64>) -> InferenceModel {
    let tensor = |name: &str, datatype: &str, shape: &[i64]| TensorInfo {
        name: name.into(),
        datatype: datatype.into(),
        shape: shape.to_vec(),
    };
    let features = model.features.iter().map(|feature| match (feature.kind.as_str(), feature.width) {
        ("dense", width) => tensor(&feature.name, "FP32", &[-1, width.map_or(-1, |width| width as i64)]),
        ("category", _) => tensor(&feature.name, "BYTES", &[-1, -1]),
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
