//! KServe's Open Inference Protocol, version 2: users in as tensors, the best items of each out as tensors.
//!
//! The first dimension of every tensor is the request, so that a call is a list of retrievals over one version. Where rows have fewer values than the tensor has
//! room for, a tensor of counts says how many. `tensor` reads and writes tensors, in JSON or as raw bytes behind it; `call` makes retrievals of them, `outcome` tensors of
//! answers, `model` says which there are.

mod call;
mod model;
mod outcome;
mod tensor;

pub use call::{Inference, InferenceRequest, inference};
pub use model::{InferenceError, InferenceModel, InferenceReady, InferenceServer, inference_model};
pub use outcome::{InferenceReply, InferenceResponse};
