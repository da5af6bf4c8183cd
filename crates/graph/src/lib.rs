//! ONNX graphs as compiled programs ([`dense`]), and the user tower and reranker that run on them ([`tower`]).

pub mod dense;
pub mod tower;
