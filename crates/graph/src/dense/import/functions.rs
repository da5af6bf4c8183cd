//! Activations, rounding, and functions that consist of several operations.

use rten_onnx::onnx::NodeProto;

use super::known::{Attributes, Importer, WHOLE_MAX, refused};
use crate::dense::ir::{Id, Op};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Binary, Fold, Unary};

/// Maximum count of numbers that are multiplied along axes.
const PRODUCT_MAX: usize = 256;

impl Importer {
    /// Returns the sign of each number: 1, 0 or -1.
    pub(super) fn sign(&mut self, a: Id) -> Result<Id> {
        let zero = self.scalar(0.0)?;
        let (above, below) = (self.graph.binary(Binary::Less, zero, a)?, self.graph.binary(Binary::Less, a, zero)?);
        self.graph.binary(Binary::Sub, above, below)
    }

    /// Returns the index of the largest or smallest number along an axis; of equal numbers the first, or the last if
    /// requested.
    pub(super) fn index_of_extreme(&mut self, operator: &str, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let axis = self.axis(a, attributes.integer("axis", 0))?;
        let keep = attributes.integer("keepdims", 1) != 0;
        let is_last = attributes.integer("select_last_index", 0) != 0;
        let made = self.extreme_along(operator, a, axis, is_last)?;
        let made = if keep { made } else { self.without_axes(made, &[axis])? };
        self.whole.insert(made);
        Ok(made)
    }

    fn extreme_along(&mut self, operator: &str, a: Id, axis: usize, is_last: bool) -> Result<Id> {
        let shape = self.graph.shape(a).to_vec();
        let size = shape[axis];
        let extreme = self.graph.fold(if operator == "ArgMax" { Fold::Max } else { Fold::Min }, a, &[axis])?;
        let is_extreme = self.graph.binary(Binary::Equal, a, extreme)?;
        let mut along = vec![1; shape.len()];
        along[axis] = size;
        // Other positions get an index beyond the axis. A final sum is avoided, because later products could be merged
        // with a sum, and an index must stay exact.
        let (fold, beyond) = if is_last { (Fold::Max, -1.0) } else { (Fold::Min, size as f32) };
        let indices = self.graph.number(along, (0..size).map(|n| n as f32).collect())?;
        let beyond = self.scalar(beyond)?;
        let retained = self.graph.binary(Binary::Keep, is_extreme, indices)?;
        let others = self.graph.binary(Binary::Drop, is_extreme, beyond)?;
        let ranked = self.graph.binary(Binary::Add, retained, others)?;
        self.graph.fold(fold, ranked, &[axis])
    }

    /// Returns `max(a, 0) + slope * min(a, 0)`.
    pub(super) fn leaky(&mut self, a: Id, slope: Id) -> Result<Id> {
        let zero = self.scalar(0.0)?;
        let (above, below) = (self.graph.unary(Unary::Relu, a)?, self.graph.binary(Binary::Min, a, zero)?);
        let below = self.graph.binary(Binary::Mul, below, slope)?;
        self.graph.binary(Binary::Add, above, below)
    }

    pub(super) fn activation(&mut self, operator: &str, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let (zero, one) = (self.scalar(0.0)?, self.scalar(1.0)?);
        match operator {
            "Elu" => {
                let alpha = self.scalar(attributes.float("alpha", 1.0))?;
                let below = self.graph.binary(Binary::Min, a, zero)?;
                let below = self.graph.unary(Unary::Exp, below)?;
                let below = self.graph.binary(Binary::Sub, below, one)?;
                let below = self.graph.binary(Binary::Mul, below, alpha)?;
                let above = self.graph.unary(Unary::Relu, a)?;
                self.graph.binary(Binary::Add, above, below)
            }
            "Mish" => {
                let soft = self.graph.unary(Unary::Softplus, a)?;
                let gate = self.graph.unary(Unary::Tanh, soft)?;
                self.graph.binary(Binary::Mul, a, gate)
            }
            "Gelu" => match attributes.text("approximate", "none").as_str() {
                "none" => self.graph.unary(Unary::Gelu, a),
                "tanh" => self.gelu_by_tanh(a),
                other => Err(refused(format!("`approximate` {other} is not supported"))),
            },
            "Selu" => {
                let alpha = self.scalar(attributes.float("alpha", 1.673_263_2))?;
                let gamma = self.scalar(attributes.float("gamma", 1.050_701))?;
                let below = self.exponential_below(a, alpha, None)?;
                let above = self.graph.unary(Unary::Relu, a)?;
                let sum = self.graph.binary(Binary::Add, above, below)?;
                self.graph.binary(Binary::Mul, sum, gamma)
            }
            "Celu" => {
                let alpha = self.scalar(attributes.float("alpha", 1.0))?;
                let below = self.exponential_below(a, alpha, Some(alpha))?;
                let above = self.graph.unary(Unary::Relu, a)?;
                self.graph.binary(Binary::Add, above, below)
            }
            "ThresholdedRelu" => {
                let alpha = self.scalar(attributes.float("alpha", 1.0))?;
                let is_above = self.graph.binary(Binary::Less, alpha, a)?;
                self.graph.binary(Binary::Keep, is_above, a)
            }
            "Shrink" => {
                let (bound, bias) = (attributes.float("lambd", 0.5), attributes.float("bias", 0.0));
                let (low, high, bias) = (self.scalar(-bound)?, self.scalar(bound)?, self.scalar(bias)?);
                let (is_below, is_above) =
                    (self.graph.binary(Binary::Less, a, low)?, self.graph.binary(Binary::Less, high, a)?);
                let (more, less) = (self.graph.binary(Binary::Add, a, bias)?, self.graph.binary(Binary::Sub, a, bias)?);
                let below = self.graph.binary(Binary::Keep, is_below, more)?;
                let above = self.graph.binary(Binary::Keep, is_above, less)?;
                self.graph.binary(Binary::Add, below, above)
            }
            "Softsign" => {
                let size = self.graph.unary(Unary::Abs, a)?;
                let size = self.graph.binary(Binary::Add, size, one)?;
                self.graph.binary(Binary::Div, a, size)
            }
            "Swish" => self.swish(a, attributes.float("alpha", 1.0)),
            _ => {
                let is_swish = operator == "HardSwish";
                let slope = if is_swish { 1.0 / 6.0 } else { attributes.float("alpha", 0.2) };
                let offset = if is_swish { 0.5 } else { attributes.float("beta", 0.5) };
                let (slope, offset) = (self.scalar(slope)?, self.scalar(offset)?);
                let line = self.graph.binary(Binary::Mul, a, slope)?;
                let line = self.graph.binary(Binary::Add, line, offset)?;
                let line = self.graph.binary(Binary::Max, line, zero)?;
                let gate = self.graph.binary(Binary::Min, line, one)?;
                if is_swish { self.graph.binary(Binary::Mul, a, gate) } else { Ok(gate) }
            }
        }
    }

    /// Returns `alpha (exp(min(a, 0) / divisor) - 1)`.
    fn exponential_below(&mut self, a: Id, alpha: Id, divisor: Option<Id>) -> Result<Id> {
        let (zero, one) = (self.scalar(0.0)?, self.scalar(1.0)?);
        let mut below = self.graph.binary(Binary::Min, a, zero)?;
        if let Some(divisor) = divisor {
            below = self.graph.binary(Binary::Div, below, divisor)?;
        }
        let below = self.graph.unary(Unary::Exp, below)?;
        let below = self.graph.binary(Binary::Sub, below, one)?;
        self.graph.binary(Binary::Mul, below, alpha)
    }

    /// Returns `x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`.
    pub(super) fn gelu_by_tanh(&mut self, a: Id) -> Result<Id> {
        let [root, cubic, one, half] =
            [(2.0 / std::f32::consts::PI).sqrt(), 0.044_715, 1.0, 0.5].map(|x| self.scalar(x));
        let square = self.graph.binary(Binary::Mul, a, a)?;
        let cube = self.graph.binary(Binary::Mul, square, a)?;
        let cube = self.graph.binary(Binary::Mul, cube, cubic?)?;
        let sum = self.graph.binary(Binary::Add, a, cube)?;
        let inner = self.graph.binary(Binary::Mul, sum, root?)?;
        let gate = self.graph.unary(Unary::Tanh, inner)?;
        let gate = self.graph.binary(Binary::Add, gate, one?)?;
        let share = self.graph.binary(Binary::Mul, a, half?)?;
        self.graph.binary(Binary::Mul, share, gate)
    }

    /// Returns `x sigmoid(alpha x)`.
    pub(super) fn swish(&mut self, a: Id, alpha: f32) -> Result<Id> {
        if alpha == 1.0 {
            return self.graph.unary(Unary::Silu, a);
        }
        let alpha = self.scalar(alpha)?;
        let scaled = self.graph.binary(Binary::Mul, a, alpha)?;
        let gate = self.graph.unary(Unary::Sigmoid, scaled)?;
        self.graph.binary(Binary::Mul, a, gate)
    }

    /// Rounds down (`Floor`), up (`Ceil`), or to the nearest integer, with halves to the even integer (`Round`).
    pub(super) fn rounded(&mut self, operator: &str, a: Id) -> Result<Id> {
        let whole = self.graph.unary(Unary::Trunc, a)?;
        if operator == "Ceil" {
            let is_below = self.graph.binary(Binary::Less, whole, a)?;
            return self.graph.binary(Binary::Add, whole, is_below);
        }
        let is_above = self.graph.binary(Binary::Less, a, whole)?;
        let floor = self.graph.binary(Binary::Sub, whole, is_above)?;
        if operator == "Floor" {
            return Ok(floor);
        }
        let half = self.scalar(0.5)?;
        let rest = self.graph.binary(Binary::Sub, a, floor)?;
        let halved = self.graph.binary(Binary::Mul, floor, half)?;
        let whole_half = self.graph.unary(Unary::Trunc, halved)?;
        let is_even = self.graph.binary(Binary::Equal, halved, whole_half)?;
        let is_half = self.graph.binary(Binary::Equal, rest, half)?;
        let is_up = self.graph.binary(Binary::Drop, is_even, is_half)?;
        let is_over = self.graph.binary(Binary::Less, half, rest)?;
        let is_up = self.graph.binary(Binary::Max, is_over, is_up)?;
        self.graph.binary(Binary::Add, floor, is_up)
    }

    pub(super) fn is_infinite(&mut self, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let (over, under) =
            (attributes.integer("detect_positive", 1) != 0, attributes.integer("detect_negative", 1) != 0);
        let (most, least) = (self.scalar(f32::INFINITY)?, self.scalar(f32::NEG_INFINITY)?);
        match (over, under) {
            (true, true) => {
                let size = self.graph.unary(Unary::Abs, a)?;
                self.graph.binary(Binary::Equal, size, most)
            }
            (true, false) => self.graph.binary(Binary::Equal, a, most),
            (false, true) => self.graph.binary(Binary::Equal, a, least),
            (false, false) => Err(refused("IsInf detects neither infinity, expected at least one")),
        }
    }

    /// Returns 1 at the first of the largest numbers along an axis, and 0 elsewhere.
    pub(super) fn hard_max(&mut self, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let axis = self.axis(a, attributes.integer("axis", if self.opset < 13 { 1 } else { -1 }))?;
        if self.opset < 13 && axis + 1 != self.rank(a) {
            return Err(refused("`axis` is not the last one, as it must be before opset 13"));
        }
        let place = self.extreme_along("ArgMax", a, axis, false)?;
        let mut along = vec![1; self.rank(a)];
        along[axis] = self.graph.shape(a)[axis];
        let all = self.graph.number(along.clone(), (0..along[axis]).map(|n| n as f32).collect())?;
        self.graph.binary(Binary::Equal, place, all)
    }

    /// Multiplies the numbers along axes, one axis after the other.
    pub(super) fn product_along(&mut self, a: Id, axes: &[usize]) -> Result<Id> {
        let count: usize = axes.iter().map(|&axis| self.graph.shape(a)[axis]).product();
        if count > PRODUCT_MAX || self.rows(a).is_some_and(|r| axes.contains(&r)) {
            return Err(refused(format!("product of {count} elements, expected at most {PRODUCT_MAX}")));
        }
        let mut made = a;
        for &axis in axes {
            let parts = (0..self.graph.shape(made)[axis]).map(|n| self.along(made, axis, &[n]));
            let parts = parts.collect::<Result<Vec<_>>>()?;
            let (first, others) =
                parts.split_first().ok_or_else(|| refused("got no elements, expected at least one"))?;
            made = others.iter().try_fold(*first, |product, &part| self.graph.binary(Binary::Mul, product, part))?;
        }
        Ok(made)
    }

    /// Divides integers by constant integers, rounding towards 0.
    pub(super) fn divided(&mut self, a: Id, by: &[Id]) -> Result<Id> {
        by.iter().try_fold(a, |a, &by| {
            self.check_divisor(a, by, true)?;
            let quotient = self.graph.binary(Binary::Div, a, by)?;
            self.graph.unary(Unary::Trunc, quotient)
        })
    }

    /// Returns the remainder of a division: of floats, or of integers by constant positive integers.
    pub(super) fn remainder(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>, a: Id) -> Result<Id> {
        let by = self.number(node, 1)?;
        let is_signed = attributes.integer("fmod", 0) != 0;
        if is_signed && !self.whole.contains(&a) && !self.whole.contains(&by) {
            return self.graph.binary(Binary::Rem, a, by);
        }
        let rest = match self.bound(a) > WHOLE_MAX as f64 && self.is_exact(a) {
            // The quotient may exceed what f32 represents exactly, but the remainder of floats is exact.
            true => {
                self.check_constant_divisor(a, by, false)?;
                self.graph.binary(Binary::Rem, a, by)?
            }
            false => {
                self.check_divisor(a, by, false)?;
                let quotient = self.graph.binary(Binary::Div, a, by)?;
                let quotient = self.graph.unary(Unary::Trunc, quotient)?;
                let whole = self.graph.binary(Binary::Mul, quotient, by)?;
                self.graph.binary(Binary::Sub, a, whole)?
            }
        };
        if is_signed {
            return Ok(rest);
        }
        let zero = self.scalar(0.0)?;
        let is_below = self.graph.binary(Binary::Less, rest, zero)?;
        let more = self.graph.binary(Binary::Keep, is_below, by)?;
        self.graph.binary(Binary::Add, rest, more)
    }

    /// Returns whether f32 represents the integers of a value exactly, even beyond [`WHOLE_MAX`], for example if a
    /// float was truncated without further arithmetic.
    fn is_exact(&mut self, a: Id) -> bool {
        match self.graph.values[a].op {
            Op::Unary(Unary::Trunc, _) | Op::Constant(_) => true,
            Op::Unary(Unary::Abs | Unary::Neg, of) | Op::Reshape(of) | Op::Pick(of, _) => self.is_exact(of),
            Op::Binary(Binary::Max | Binary::Min, x, y) => self.is_exact(x) && self.is_exact(y),
            _ => self.bound(a) <= WHOLE_MAX as f64,
        }
    }

    fn check_constant_divisor(&self, a: Id, by: Id, may_be_negative: bool) -> Result<()> {
        let is_known = |x: &f32| x.abs() >= 1.0 && (may_be_negative || *x > 0.0) && x.abs() <= (WHOLE_MAX / 2) as f32;
        match (self.whole.contains(&a), self.graph.constant(by)) {
            (true, Some(by)) if by.iter().all(is_known) => Ok(()),
            _ => Err(refused("expected integers divided by constants")),
        }
    }

    /// Checks a division of integers. A quotient of integers up to [`WHOLE_MAX`] is exact after truncation.
    fn check_divisor(&mut self, a: Id, by: Id, may_be_negative: bool) -> Result<()> {
        self.check_constant_divisor(a, by, may_be_negative)?;
        match self.bound(a) > WHOLE_MAX as f64 {
            true => Err(refused(format!("its integers may exceed {WHOLE_MAX}, beyond which f32 is not exact"))),
            false => Ok(()),
        }
    }
}
