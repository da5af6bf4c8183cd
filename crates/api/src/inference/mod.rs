//! KServe's Open Inference Protocol, version 2: users as input tensors, their best items as output tensors.
//!
//! The first dimension of every tensor is the request, so that a call is a list of retrievals over one version. If rows have
//! fewer values than the width of a tensor, a tensor of counts gives their numbers. `tensor` reads and writes tensors, as JSON or
//! as raw bytes after it; `call` converts tensors to retrievals, `outcome` converts answers to tensors, `model` describes the
//! available tensors.

mod call;
mod model;
mod outcome;
mod tensor;

pub use call::{Inference, InferenceRequest, inference};
pub use model::{InferenceError, InferenceModel, InferenceReady, InferenceServer, inference_model};
#[cfg(test)]
pub(crate) use outcome::STEP_VALUES;
pub use outcome::{InferenceReply, InferenceResponse, InferenceSizer};
