//! The evaluation against examples of the ONNX reference.

#![allow(clippy::unwrap_used)]
