//! Operators of the domain `com.microsoft`, which ONNX Runtime's optimizer writes in place of several standard nodes.

use rten_onnx::onnx::NodeProto;

use super::known::{Attributes, Importer, refused};
use crate::dense::ir::Id;
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Binary, Unary};

/// Prefix of the names of these operators in the importer.
pub(super) const MICROSOFT: &str = "com.microsoft.";

impl Importer {
    pub(super) fn fused(
        &mut self,
        operator: &str,
        node: &NodeProto,
        attributes: &mut Attributes<'_>,
        a: Id,
    ) -> Result<Id> {
        match operator.trim_start_matches(MICROSOFT) {
            "Gelu" => self.graph.unary(Unary::Gelu, a),
            "BiasGelu" => {
                let sum = self.graph.binary(Binary::Add, a, self.value(node, 1)?)?;
                self.graph.unary(Unary::Gelu, sum)
            }
            "FastGelu" => {
                let sum = match Importer::has(node, 1) {
                    true => self.graph.binary(Binary::Add, a, self.value(node, 1)?)?,
                    false => a,
                };
                self.gelu_by_tanh(sum)
            }
            "QuickGelu" => self.swish(a, attributes.float("alpha", 1.702)),
            "FusedMatMul" => self.fused_product(node, attributes),
            _ => Err(refused("the operator is not supported")),
        }
    }

    /// Returns `alpha a b`, with either matrix transposed.
    fn fused_product(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let mut factors = [self.value(node, 0)?, self.value(node, 1)?];
        for (factor, (turn, batch)) in factors.iter_mut().zip([("transA", "transBatchA"), ("transB", "transBatchB")]) {
            if attributes.integer(batch, 0) != 0 {
                return Err(refused(format!("attribute `{batch}` is set, expected 0")));
            }
            let rank = self.rank(*factor);
            if attributes.integer(turn, 0) != 0 && rank > 1 {
                let mut order: Vec<usize> = (0..rank).collect();
                order.swap(rank - 1, rank - 2);
                *factor = self.graph.transpose(*factor, &order)?;
            }
        }
        let product = self.graph.matmul(factors[0], factors[1])?;
        let alpha = attributes.float("alpha", 1.0);
        if alpha == 1.0 {
            return Ok(product);
        }
        let alpha = self.scalar(alpha)?;
        self.graph.binary(Binary::Mul, product, alpha)
    }

    /// Normalizes the sum of two values. Returns the outputs of the node by position; the last output is the sum.
    pub(super) fn skip_norm(
        &mut self,
        operator: &str,
        node: &NodeProto,
        attributes: &mut Attributes<'_>,
    ) -> Result<Vec<Option<Id>>> {
        let is_rms = operator.ends_with("SkipSimplifiedLayerNormalization");
        let (a, skip) = (self.value(node, 0)?, self.value(node, 1)?);
        let mut sum = self.graph.binary(Binary::Add, a, skip)?;
        let bias = if is_rms { 3 } else { 4 };
        if Importer::has(node, bias) {
            sum = self.graph.binary(Binary::Add, sum, self.value(node, bias)?)?;
        }
        let axes = [self.axis(sum, -1)?];
        let epsilon = attributes.float("epsilon", 1e-12);
        let scale = self.value(node, 2)?;
        let mut made = if is_rms { sum } else { self.centred(sum, &axes)? };
        made = self.scaled_by_root(made, scale, epsilon, &axes)?;
        if !is_rms && Importer::has(node, 3) {
            made = self.graph.binary(Binary::Add, made, self.value(node, 3)?)?;
        }
        Ok(vec![Some(made), None, None, Some(sum)])
    }
}
