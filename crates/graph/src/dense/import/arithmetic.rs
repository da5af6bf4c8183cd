//! Operators that compute numbers element by element or by matrix products.

use rten_onnx::onnx::{DataType, NodeProto};

use super::fused::MICROSOFT;
use super::known::{Attributes, Importer, refused};
use crate::dense::ir::{Id, Op, broadcast};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Binary, Fold, Unary};

/// Returns the unary function that an operator stands for; `None` if the operator is not one unary function.
fn function(operator: &str) -> Option<Unary> {
    Some(match operator {
        "Relu" => Unary::Relu,
        "Sigmoid" => Unary::Sigmoid,
        "Tanh" => Unary::Tanh,
        "Exp" => Unary::Exp,
        "Log" => Unary::Log,
        "Sqrt" => Unary::Sqrt,
        "Abs" => Unary::Abs,
        "Neg" => Unary::Neg,
        "Reciprocal" => Unary::Reciprocal,
        "Erf" => Unary::Erf,
        "Softplus" => Unary::Softplus,
        "Not" => Unary::Not,
        "IsNaN" => Unary::IsNan,
        "Sin" => Unary::Sin,
        "Cos" => Unary::Cos,
        "Tan" => Unary::Tan,
        "Asin" => Unary::Asin,
        "Acos" => Unary::Acos,
        "Atan" => Unary::Atan,
        "Sinh" => Unary::Sinh,
        "Cosh" => Unary::Cosh,
        "Asinh" => Unary::Asinh,
        "Acosh" => Unary::Acosh,
        "Atanh" => Unary::Atanh,
        _ => return None,
    })
}

/// Returns the binary function of an operator, which is applied from left to right to more than two operands.
fn function_of_two(operator: &str) -> Option<Binary> {
    Some(match operator {
        "Add" | "Sum" => Binary::Add,
        "Sub" => Binary::Sub,
        "Mul" | "And" => Binary::Mul,
        "Div" => Binary::Div,
        "Max" | "Or" => Binary::Max,
        "Min" => Binary::Min,
        "Equal" => Binary::Equal,
        "Less" => Binary::Less,
        "LessOrEqual" => Binary::LessOrEqual,
        _ => return None,
    })
}

impl Importer {
    pub(super) fn numbers(&mut self, operator: &str, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let a = self.number(node, 0)?;
        if let Some(f) = function(operator) {
            if self.whole.contains(&a) && !matches!(f, Unary::Abs | Unary::Neg | Unary::Relu) {
                return Err(refused("the operator does not support integers computed from shapes"));
            }
            return match self.turned.get(&a).cloned() {
                Some((of, order)) => {
                    let made = self.graph.unary(f, of)?;
                    self.turned_from(made, order)
                }
                None => self.graph.unary(f, a),
            };
        }
        if let Some(f) = function_of_two(operator) {
            let others = (1..node.input.len()).map(|n| self.number(node, n)).collect::<Result<Vec<_>>>()?;
            if f == Binary::Div && others.iter().chain([&a]).any(|id| self.whole.contains(id)) {
                return self.divided(a, &others);
            }
            return others.into_iter().try_fold(a, |a, b| self.binary(f, a, b));
        }
        match operator {
            "MatMul" => {
                let b = self.value(node, 1)?;
                self.product(a, b)
            }
            "Gemm" => self.gemm(node, attributes),
            "Einsum" => self.einsum(node, attributes),
            "Greater" | "GreaterOrEqual" => {
                let b = self.number(node, 1)?;
                let f = if operator == "Greater" { Binary::Less } else { Binary::LessOrEqual };
                self.binary(f, b, a)
            }
            "Xor" => {
                let b = self.number(node, 1)?;
                let equal = self.binary(Binary::Equal, a, b)?;
                self.graph.unary(Unary::Not, equal)
            }
            "Where" => {
                let (x, y) = (self.number(node, 1)?, self.number(node, 2)?);
                let (retained, dropped) = (self.binary(Binary::Keep, a, x)?, self.binary(Binary::Drop, a, y)?);
                // A side of zeros adds nothing: `Keep` and `Drop` set numbers that are not chosen to zero.
                let shape = broadcast(self.graph.shape(retained), self.graph.shape(dropped))?;
                let is_result = |id: Id, other: Id| {
                    let is_zeros = |numbers: &[f32]| numbers.iter().all(|x| x.to_bits() == 0);
                    self.graph.shape(id) == shape && self.graph.constant(other).is_some_and(is_zeros)
                };
                match (is_result(dropped, x), is_result(retained, y)) {
                    (true, _) => Ok(dropped),
                    (_, true) => Ok(retained),
                    _ => self.graph.binary(Binary::Add, retained, dropped),
                }
            }
            "Cast" => self.cast(a, attributes),
            "Dropout" => {
                attributes.float("ratio", 0.0);
                attributes.integer("seed", 0);
                let is_training = if Importer::has(node, 2) { Some(self.number(node, 2)?) } else { None };
                match is_training.is_some_and(|id| self.graph.constant(id) != Some(&[0.0])) {
                    true => Err(refused("training mode is not supported")),
                    false => Ok(a),
                }
            }
            "ReduceSum" | "ReduceMean" | "ReduceMax" | "ReduceMin" | "ReduceL1" | "ReduceL2" | "ReduceSumSquare"
            | "ReduceLogSumExp" | "ReduceLogSum" | "ReduceProd" => self.reduce(operator, node, attributes),
            "Clip" => self.clip(node, attributes),
            "LeakyRelu" => {
                let slope = self.scalar(attributes.float("alpha", 0.01))?;
                self.leaky(a, slope)
            }
            "PRelu" => {
                let slope = self.value(node, 1)?;
                self.leaky(a, slope)
            }
            "Elu" | "HardSigmoid" | "HardSwish" | "Mish" | "Gelu" | "Selu" | "Celu" | "ThresholdedRelu" | "Shrink"
            | "Softsign" | "Swish" => {
                if self.whole.contains(&a) {
                    return Err(refused("the operator does not support integers computed from shapes"));
                }
                self.activation(operator, attributes, a)
            }
            "Floor" | "Ceil" | "Round" => self.rounded(operator, a),
            "Mod" => self.remainder(node, attributes, a),
            "Mean" => {
                let others = (1..node.input.len()).map(|n| self.number(node, n)).collect::<Result<Vec<_>>>()?;
                let sum = others.into_iter().try_fold(a, |a, b| self.binary(Binary::Add, a, b))?;
                self.per_count(sum, vec![], vec![node.input.len()])
            }
            "IsInf" => self.is_infinite(attributes, a),
            "Pow" => {
                let exponent = self.number(node, 1)?;
                let made = self.power(a, exponent)?;
                self.with_axes_of(made, &[a, exponent])
            }
            "Sign" => self.sign(a),
            "Hardmax" => self.hard_max(attributes, a),
            "ArgMax" | "ArgMin" => self.index_of_extreme(operator, attributes, a),
            "Softmax"
            | "LogSoftmax"
            | "LayerNormalization"
            | "RMSNormalization"
            | "SimplifiedLayerNormalization"
            | "BatchNormalization"
            | "InstanceNormalization"
            | "GroupNormalization" => self.norm(operator, node, attributes, a),
            "Conv" | "MaxPool" | "AveragePool" | "GlobalMaxPool" | "GlobalAveragePool" => {
                self.windowed(operator, node, attributes, a)
            }
            _ if operator.starts_with(MICROSOFT) => self.fused(operator, node, attributes, a),
            _ => self.view(operator, node, attributes, a),
        }
    }

    /// Multiplies matrices. A constant matrix times columns becomes rows times the transposed matrix, which all rows of
    /// a block share.
    fn product(&mut self, a: Id, b: Id) -> Result<Id> {
        let (left, right, rows) = (self.graph.shape(a).to_vec(), self.graph.shape(b).to_vec(), self.rows(b));
        let (&[m, k], Some((ahead, &[depth, 1]))) = (&left[..], right.split_last_chunk::<2>()) else {
            return self.graph.matmul(a, b);
        };
        if self.graph.constant(a).is_none() || depth != k || rows.is_some_and(|r| r >= ahead.len()) {
            return self.graph.matmul(a, b);
        }
        let turned = self.graph.transpose(a, &[1, 0])?;
        let row = self.graph.reshape(b, [ahead, &[1, k]].concat(), rows)?;
        let made = self.graph.matmul(row, turned)?;
        self.graph.reshape(made, [ahead, &[m, 1]].concat(), rows)
    }

    /// Applies a function to two values. An expanded value is replaced by the value before the expansion if the result
    /// keeps its shape.
    pub(super) fn binary(&mut self, f: Binary, mut a: Id, mut b: Id) -> Result<Id> {
        let shape = broadcast(self.graph.shape(a), self.graph.shape(b))?;
        let rows = |importer: &Importer, a: Id, b: Id| {
            let from_end = |id: Id| importer.rows(id).map(|axis| importer.rank(id) - axis);
            from_end(a).or(from_end(b))
        };
        let counted = rows(self, a, b);
        for is_first in [true, false] {
            let Some(&of) = self.expanded.get(if is_first { &a } else { &b }) else { continue };
            let (x, y) = if is_first { (of, b) } else { (a, of) };
            let same = broadcast(self.graph.shape(x), self.graph.shape(y)).is_ok_and(|s| s == shape);
            if same && rows(self, x, y) == counted {
                (a, b) = (x, y);
            }
        }
        if f == Binary::Mul
            && let Some(made) = self.gated(a, b)?
        {
            return self.with_axes_of(made, &[a, b]);
        }
        self.graph.binary(f, a, b)
    }

    /// Gives a result as many axes as the operand with most axes: a constant of one number may have more axes than the
    /// other operand.
    fn with_axes_of(&mut self, made: Id, others: &[Id]) -> Result<Id> {
        let axes = others.iter().map(|&id| self.rank(id)).max().unwrap_or(0);
        let more = axes.saturating_sub(self.rank(made));
        let shape = [&vec![1; more], self.graph.shape(made)].concat();
        let rows = self.rows(made).map(|axis| axis + more);
        self.graph.reshape(made, shape, rows)
    }

    pub(super) fn without_axes(&mut self, a: Id, axes: &[usize]) -> Result<Id> {
        let shape = self.graph.shape(a).to_vec();
        let retained: Vec<usize> = (0..shape.len()).filter(|axis| !axes.contains(axis)).collect();
        let rows = self.rows(a).and_then(|r| retained.iter().position(|&axis| axis == r));
        self.graph.reshape(a, retained.iter().map(|&axis| shape[axis]).collect(), rows)
    }

    /// Recognizes `x sigmoid(x)`, and `x (1 + erf(x / √2)) / 2` as exporters write them; returns the equivalent single
    /// function.
    fn gated(&mut self, a: Id, b: Id) -> Result<Option<Id>> {
        for (x, gate) in [(a, b), (b, a)] {
            if matches!(self.graph.values[gate].op, Op::Unary(Unary::Sigmoid, of) if of == x) {
                return self.graph.unary(Unary::Silu, x).map(Some);
            }
            if let Some(sum) = self.scaled_by(gate, 0.5)
                && self.is_one_plus_erf(sum, x)
            {
                return self.graph.unary(Unary::Gelu, x).map(Some);
            }
            // Exporters write `(x (1 + erf)) / 2` or `(x / 2) (1 + erf)`.
            let halves = |n: f32| (n - 0.5).abs() < 1e-7;
            if self.graph.constant(gate).is_some_and(|c| matches!(c, [n] if halves(*n)))
                && let Op::Binary(Binary::Mul, u, v) = self.graph.values[x].op
            {
                for (of, sum) in [(u, v), (v, u)] {
                    if self.is_one_plus_erf(sum, of) && self.graph.shape(of) == self.graph.shape(x) {
                        return self.graph.unary(Unary::Gelu, of).map(Some);
                    }
                }
            }
            if let Some(of) = self.scaled_by(x, 0.5)
                && self.is_one_plus_erf(gate, of)
            {
                return self.graph.unary(Unary::Gelu, of).map(Some);
            }
        }
        Ok(None)
    }

    /// Returns the value whose product with `factor` is `id`.
    fn scaled_by(&self, id: Id, factor: f32) -> Option<Id> {
        let is_factor = |id: Id, factor: f32| matches!(self.graph.constant(id), Some([n]) if (n - factor).abs() <= 1e-6 * factor.abs());
        let whole = |of: Id| Some(of).filter(|&of| self.graph.shape(of) == self.graph.shape(id));
        match self.graph.values[id].op {
            Op::Binary(Binary::Mul, a, b) if is_factor(a, factor) => whole(b),
            Op::Binary(Binary::Mul, a, b) if is_factor(b, factor) => whole(a),
            Op::Binary(Binary::Div, a, b) if is_factor(b, 1.0 / factor) => whole(a),
            _ => None,
        }
    }

    fn is_one_plus_erf(&self, id: Id, x: Id) -> bool {
        let Op::Binary(Binary::Add, a, b) = self.graph.values[id].op else { return false };
        [(a, b), (b, a)].into_iter().any(|(one, erf)| {
            let Op::Unary(Unary::Erf, of) = self.graph.values[erf].op else { return false };
            self.graph.constant(one) == Some(&[1.0]) && self.scaled_by(of, std::f32::consts::FRAC_1_SQRT_2) == Some(x)
        })
    }

    pub(super) fn cast(&mut self, a: Id, attributes: &mut Attributes<'_>) -> Result<Id> {
        attributes.integer("saturate", 1);
        match DataType(i32::try_from(attributes.integer("to", 0)).unwrap_or(0)) {
            DataType::FLOAT | DataType::DOUBLE | DataType::FLOAT16 | DataType::BFLOAT16 if self.whole.contains(&a) => {
                // Adding zero makes a new value with the same numbers that is not marked as integers.
                let zero = self.scalar(0.0)?;
                self.graph.binary(Binary::Add, a, zero)
            }
            DataType::FLOAT | DataType::DOUBLE | DataType::FLOAT16 | DataType::BFLOAT16 => Ok(a),
            DataType::BOOL => {
                let is_zero = self.graph.unary(Unary::Not, a)?;
                self.graph.unary(Unary::Not, is_zero)
            }
            DataType::INT64 | DataType::INT32 => {
                let whole = self.graph.unary(Unary::Trunc, a)?;
                self.whole.insert(whole);
                Ok(whole)
            }
            other => Err(refused(format!("Cast to {other:?}, expected a float type, BOOL, INT32 or INT64"))),
        }
    }

    fn power(&mut self, a: Id, of: Id) -> Result<Id> {
        if self.whole.contains(&a) {
            return Err(refused("the operator does not support integers computed from shapes"));
        }
        let Some(&[exponent]) = self.graph.constant(of) else {
            return self.graph.binary(Binary::Pow, a, of);
        };
        let whole = exponent.abs() as usize;
        let made = match exponent.abs() {
            0.5 => self.graph.unary(Unary::Sqrt, a)?,
            n if n.fract() == 0.0 && (1.0..=8.0).contains(&n) => {
                (1..whole).try_fold(a, |power, _| self.graph.binary(Binary::Mul, power, a))?
            }
            // `exp(exponent log(a))` is 0 for `a` = 0, and NaN for `a` below 0, where a root is undefined.
            n if n.fract() != 0.0 && n < 8.0 => {
                let log = self.graph.unary(Unary::Log, a)?;
                let power = self.scalar(n)?;
                let scaled = self.graph.binary(Binary::Mul, log, power)?;
                self.graph.unary(Unary::Exp, scaled)?
            }
            _ => return self.graph.binary(Binary::Pow, a, of),
        };
        if exponent < 0.0 { self.graph.unary(Unary::Reciprocal, made) } else { Ok(made) }
    }

    fn gemm(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let (mut a, mut b) = (self.value(node, 0)?, self.value(node, 1)?);
        let (alpha, beta) = (attributes.float("alpha", 1.0), attributes.float("beta", 1.0));
        if self.rank(a) != 2 || self.rank(b) != 2 {
            return Err(refused("got inputs that are no matrices, expected two axes each"));
        }
        if attributes.integer("transA", 0) != 0 {
            a = self.graph.transpose(a, &[1, 0])?;
        }
        if attributes.integer("transB", 0) != 0 {
            b = self.graph.transpose(b, &[1, 0])?;
        }
        let mut sum = self.graph.matmul(a, b)?;
        if alpha != 1.0 {
            let alpha = self.scalar(alpha)?;
            sum = self.graph.binary(Binary::Mul, sum, alpha)?;
        }
        if Importer::has(node, 2) {
            let mut bias = self.value(node, 2)?;
            if beta != 1.0 {
                let beta = self.scalar(beta)?;
                bias = self.graph.binary(Binary::Mul, bias, beta)?;
            }
            sum = self.graph.binary(Binary::Add, sum, bias)?;
        }
        Ok(sum)
    }

    fn reduce(&mut self, operator: &str, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let mut a = self.value(node, 0)?;
        let keep = attributes.integer("keepdims", 1) != 0;
        let is_no_op = attributes.integer("noop_with_empty_axes", 0) != 0;
        let axes = self.axes(node, attributes, 1)?.filter(|axes| !axes.is_empty());
        if axes.is_none() && is_no_op {
            return Err(refused("`noop_with_empty_axes` without `axes` is not supported"));
        }
        if self.whole.contains(&a) && matches!(operator, "ReduceMean" | "ReduceL2" | "ReduceLogSumExp" | "ReduceLogSum")
        {
            return Err(refused("the operator does not support integers computed from shapes"));
        }
        let axes = match axes {
            Some(axes) => axes.iter().map(|&axis| self.axis(a, axis)).collect::<Result<Vec<_>>>()?,
            None => (0..self.rank(a)).collect(),
        };
        a = match operator {
            "ReduceL2" | "ReduceSumSquare" => self.graph.binary(Binary::Mul, a, a)?,
            "ReduceL1" => self.graph.unary(Unary::Abs, a)?,
            _ => a,
        };
        let mut made = match operator {
            "ReduceMax" => self.graph.fold(Fold::Max, a, &axes)?,
            "ReduceMin" => self.graph.fold(Fold::Min, a, &axes)?,
            "ReduceMean" => self.mean(a, &axes)?,
            "ReduceLogSumExp" => self.log_sum_exp(a, &axes)?,
            "ReduceProd" => self.product_along(a, &axes)?,
            "ReduceLogSum" => {
                let sum = self.graph.fold(Fold::Sum, a, &axes)?;
                self.graph.unary(Unary::Log, sum)?
            }
            _ => self.graph.fold(Fold::Sum, a, &axes)?,
        };
        if operator == "ReduceL2" {
            made = self.graph.unary(Unary::Sqrt, made)?;
        }
        if keep { Ok(made) } else { self.without_axes(made, &axes) }
    }

    fn clip(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Id> {
        let mut made = self.value(node, 0)?;
        for (n, name, f) in [(1, "min", Binary::Max), (2, "max", Binary::Min)] {
            let bound = match attributes.take(name) {
                Some(bound) => Some(self.scalar(bound.f.unwrap_or(0.0))?),
                None if Importer::has(node, n) => Some(self.number(node, n)?),
                None => None,
            };
            if let Some(bound) = bound {
                made = self.graph.binary(f, made, bound)?;
            }
        }
        Ok(made)
    }
}
