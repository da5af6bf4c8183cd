//! Operators on integers, including constants: shapes, axes and indices, evaluated at import.

use rten_onnx::onnx::{DataType, NodeProto};

use super::known::{Attributes, Extent, Importer, IntegerTensor, Known, fixed, place, refused};
use crate::dense::ir::{broadcast, broadcast_strides, positions};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::Unary;

/// Maximum number of integers that a node computes.
const INTEGERS_MAX: usize = 1 << 16;

impl Importer {
    /// Returns the result of a node on integers or constants; `None` if it works on numbers.
    pub(super) fn integers(
        &mut self,
        operator: &str,
        node: &NodeProto,
        attributes: &mut Attributes<'_>,
    ) -> Result<Option<Known>> {
        match operator {
            "Constant" => return self.literal(attributes).map(Some),
            "Identity" => return self.known(node, 0).cloned().map(Some),
            "Shape" => return self.shape_of(node, attributes).map(Some),
            "ConstantOfShape" => return self.filled(node, attributes).map(Some),
            _ => {}
        }
        let are_integers = |n: usize| matches!(self.known(node, n), Ok(Known::Integers(_)));
        if !(0..node.input.len()).all(|n| !Importer::has(node, n) || are_integers(n)) {
            return Ok(None);
        }
        let first = self.extents(node, 0)?.clone();
        let made = match operator {
            "Add" | "Sub" | "Mul" | "Div" | "Mod" | "Max" | "Min" | "Equal" => {
                (1..node.input.len()).try_fold(first, |a, n| pairs(operator, &a, self.extents(node, n)?))?
            }
            "Where" => chosen(&first, self.extents(node, 1)?, self.extents(node, 2)?)?,
            "Gather" => self.gathered(node, attributes, &first)?,
            "Concat" => {
                attributes.integer("axis", 0);
                let parts = (0..node.input.len()).map(|n| self.vector(node, n)).collect::<Result<Vec<_>>>()?;
                IntegerTensor::vector(parts.concat())
            }
            "Slice" => self.sliced(node, &first)?,
            "Range" => self.range(node)?,
            "Unsqueeze" | "Squeeze" => {
                let axes = self.axes(node, attributes, 1)?;
                reshaped(operator, axes.as_deref(), first)?
            }
            "Reshape" => {
                attributes.integer("allowzero", 0);
                match self.fixed(node, 1)?[..] {
                    [] if first.extents.len() == 1 => IntegerTensor { shape: Vec::new(), ..first },
                    [n] if n == -1 || n == first.extents.len() as i64 => IntegerTensor::vector(first.extents),
                    _ => return Err(refused("over integers to a shape of several axes")),
                }
            }
            "Cast" => {
                let to = DataType(i32::try_from(attributes.integer("to", 0)).unwrap_or(0));
                match to {
                    DataType::INT64 => first,
                    DataType::INT32 => IntegerTensor { extents: first.extents.iter().map(wrapped).collect(), ..first },
                    DataType::FLOAT => {
                        let id = self.number(node, 0)?;
                        self.whole.remove(&id);
                        return Ok(Some(Known::Value(id)));
                    }
                    DataType::BOOL => {
                        let id = self.number(node, 0)?;
                        let is_zero = self.graph.unary(Unary::Not, id)?;
                        return self.graph.unary(Unary::Not, is_zero).map(|id| Some(Known::Value(id)));
                    }
                    _ => return Err(refused(format!("of integers to {to:?}"))),
                }
            }
            _ => return Err(refused("over integers")),
        };
        match made.extents.len() {
            0..=INTEGERS_MAX => Ok(Some(Known::Integers(made))),
            count => Err(refused(format!("{count} integers, expected at most {INTEGERS_MAX}"))),
        }
    }

    fn literal(&mut self, attributes: &mut Attributes<'_>) -> Result<Known> {
        let integers = |all: Vec<i64>, shape| {
            Known::Integers(IntegerTensor { extents: all.into_iter().map(Extent::Fixed).collect(), shape })
        };
        if let Some(n) = attributes.take("value_int") {
            return Ok(integers(vec![n.i.unwrap_or(0)], Vec::new()));
        }
        if let Some(all) = attributes.integers("value_ints") {
            let shape = vec![all.len()];
            return Ok(integers(all, shape));
        }
        if let Some(x) = attributes.take("value_float") {
            return self.scalar(x.f.unwrap_or(0.0)).map(Known::Value);
        }
        if let Some(all) = attributes.take("value_floats") {
            return self.graph.number(vec![all.floats.len()], all.floats.clone()).map(Known::Value);
        }
        let tensor = attributes.take("value").and_then(|a| a.t.as_ref());
        self.tensor(tensor.ok_or_else(|| refused("without a `value`"))?)
    }

    fn shape_of(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Known> {
        let all: Vec<Extent> = match self.known(node, 0)? {
            Known::Integers(integers) => integers.shape.iter().map(|&d| Extent::Fixed(d as i64)).collect(),
            Known::Value(id) => {
                let rows = self.rows(*id);
                let extent = |(axis, &d): (usize, &usize)| match rows == Some(axis) {
                    true => Extent::Rows(d as i64),
                    false => Extent::Fixed(d as i64),
                };
                self.graph.shape(*id).iter().enumerate().map(extent).collect()
            }
        };
        let rank = all.len() as i64;
        let bound = |n: i64| (if n < 0 { n.saturating_add(rank) } else { n }).clamp(0, rank) as usize;
        let (start, end) = (bound(attributes.integer("start", 0)), bound(attributes.integer("end", rank)));
        Ok(Known::Integers(IntegerTensor::vector(all.get(start..end).unwrap_or(&[]).to_vec())))
    }

    fn filled(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Known> {
        let extents = self.vector(node, 0)?;
        let value = match attributes.take("value").and_then(|a| a.t.as_ref()) {
            Some(tensor) => self.tensor(tensor)?,
            None => Known::Value(self.scalar(0.0)?),
        };
        match value {
            Known::Value(id) => {
                let scalar = self.graph.reshape(id, Vec::new(), None)?;
                self.expand(scalar, &extents).map(Known::Value)
            }
            Known::Integers(value) => {
                let shape = fixed(&IntegerTensor::vector(extents))?;
                let [n] = shape[..] else { return Err(refused("of integers with several axes")) };
                let n = usize::try_from(n).ok().filter(|&n| n <= INTEGERS_MAX);
                let n = n.ok_or_else(|| refused(format!("of {shape:?} integers")))?;
                let value = *value.extents.first().ok_or_else(|| refused("without a `value`"))?;
                Ok(Known::Integers(IntegerTensor::vector(vec![value; n])))
            }
        }
    }

    /// Returns the integers of an input with at most one axis.
    pub(super) fn vector(&self, node: &NodeProto, n: usize) -> Result<Vec<Extent>> {
        let integers = self.extents(node, n)?;
        match integers.shape.len() {
            0 | 1 => Ok(integers.extents.clone()),
            _ => Err(refused(format!("integers of shape {:?} as input {n}", integers.shape))),
        }
    }

    fn gathered(
        &self,
        node: &NodeProto,
        attributes: &mut Attributes<'_>,
        from: &IntegerTensor,
    ) -> Result<IntegerTensor> {
        attributes.integer("axis", 0);
        let index = self.extents(node, 1)?;
        let at = |n: i64| place(n, from.extents.len()).map(|n| from.extents[n]);
        if from.shape.len() != 1 {
            return Err(refused(format!("from integers of shape {:?}", from.shape)));
        }
        let extents = fixed(index)?.into_iter().map(at).collect::<Result<_>>()?;
        Ok(IntegerTensor { extents, shape: index.shape.clone() })
    }

    fn sliced(&self, node: &NodeProto, from: &IntegerTensor) -> Result<IntegerTensor> {
        let steps = if Importer::has(node, 4) { self.fixed(node, 4)? } else { vec![1] };
        let (starts, ends) = (self.fixed(node, 1)?, self.fixed(node, 2)?);
        let ([start], [end], [1], [size]) = (&starts[..], &ends[..], &steps[..], &from.shape[..]) else {
            return Err(refused("of integers along several axes or with steps"));
        };
        let bound = |n: i64| (if n < 0 { n.saturating_add(*size as i64) } else { n }).clamp(0, *size as i64) as usize;
        Ok(IntegerTensor::vector(from.extents.get(bound(*start)..bound(*end)).unwrap_or(&[]).to_vec()))
    }

    fn range(&self, node: &NodeProto) -> Result<IntegerTensor> {
        let ends = (0..3).map(|n| self.fixed(node, n)).collect::<Result<Vec<_>>>()?;
        let ([start], [end], [step]) = (&ends[0][..], &ends[1][..], &ends[2][..]) else {
            return Err(refused("without a start, an end and a step"));
        };
        let count =
            end.checked_sub(*start).filter(|_| *step > 0).map(|way| (way.max(0) as u64).div_ceil(*step as u64) as i64);
        match count.filter(|&n| n <= INTEGERS_MAX as i64) {
            Some(count) => Ok(IntegerTensor::vector((0..count).map(|n| Extent::Fixed(start + n * step)).collect())),
            None => Err(refused(format!("from {start} to {end} by {step}, expected at most {INTEGERS_MAX} integers"))),
        }
    }
}

/// Wraps an integer to 32 bits.
fn wrapped(extent: &Extent) -> Extent {
    match *extent {
        Extent::Fixed(n) => Extent::Fixed(i64::from(n as i32)),
        rows => rows,
    }
}

/// Combines two integers; the number of rows may be multiplied and divided.
fn combined(operator: &str, a: Extent, b: Extent) -> Result<Extent> {
    use Extent::{Fixed, Rows};
    let made = match (operator, a, b) {
        ("Equal", Fixed(a), Fixed(b)) | ("Equal", Rows(a), Rows(b)) => Some(Fixed(i64::from(a == b))),
        // There is at least one row. Whether there are exactly `n` is unknown.
        ("Equal", Rows(_), Fixed(n)) | ("Equal", Fixed(n), Rows(_)) if n <= 0 => Some(Fixed(0)),
        ("Add", Fixed(a), Fixed(b)) => a.checked_add(b).map(Fixed),
        ("Sub", Fixed(a), Fixed(b)) => a.checked_sub(b).map(Fixed),
        ("Max", Fixed(a), Fixed(b)) => Some(Fixed(a.max(b))),
        ("Min", Fixed(a), Fixed(b)) => Some(Fixed(a.min(b))),
        ("Mod", Fixed(a), Fixed(b)) if a >= 0 && b > 0 => Some(Fixed(a % b)),
        ("Mul", Fixed(a), Fixed(b)) => a.checked_mul(b).map(Fixed),
        ("Mul", Rows(a), Fixed(b)) | ("Mul", Fixed(b), Rows(a)) if b > 0 => a.checked_mul(b).map(Rows),
        ("Div", Fixed(a), Fixed(b)) => a.checked_div(b).map(Fixed),
        ("Div", Rows(a), Fixed(b)) if b > 0 && a % b == 0 => Some(Rows(a / b)),
        _ => None,
    };
    made.ok_or_else(|| refused(format!("over the integers {a:?} and {b:?}")))
}

/// Broadcasts the integers of a tensor to a shape.
fn spread(of: &IntegerTensor, shape: &[usize]) -> Vec<Extent> {
    let at = positions(shape, &broadcast_strides(&of.shape, shape));
    at.into_iter().map(|n| of.extents[n as usize]).collect()
}

/// Returns the broadcast shape of tensors that are combined element-wise.
fn shape_of_all(all: &[&IntegerTensor]) -> Result<Vec<usize>> {
    let shape = all.iter().try_fold(Vec::new(), |shape, of| broadcast(&shape, &of.shape))?;
    match shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= INTEGERS_MAX) {
        Some(_) => Ok(shape),
        None => Err(refused(format!("integers of shape {shape:?}, expected at most {INTEGERS_MAX}"))),
    }
}

fn pairs(operator: &str, a: &IntegerTensor, b: &IntegerTensor) -> Result<IntegerTensor> {
    let shape = shape_of_all(&[a, b])?;
    let both = spread(a, &shape).into_iter().zip(spread(b, &shape));
    Ok(IntegerTensor { extents: both.map(|(a, b)| combined(operator, a, b)).collect::<Result<_>>()?, shape })
}

fn chosen(condition: &IntegerTensor, a: &IntegerTensor, b: &IntegerTensor) -> Result<IntegerTensor> {
    let shape = shape_of_all(&[condition, a, b])?;
    let both = spread(a, &shape).into_iter().zip(spread(b, &shape));
    let one = |(condition, (a, b)): (&Extent, (Extent, Extent))| match condition {
        Extent::Fixed(0) => b,
        Extent::Fixed(_) | Extent::Rows(_) => a,
    };
    let extents = spread(condition, &shape).iter().zip(both).map(one).collect();
    Ok(IntegerTensor { extents, shape })
}

fn reshaped(operator: &str, axes: Option<&[i64]>, of: IntegerTensor) -> Result<IntegerTensor> {
    let IntegerTensor { extents, mut shape } = of;
    if operator == "Squeeze" {
        let gone = match axes {
            Some(axes) => axes.iter().map(|&axis| place(axis, shape.len())).collect::<Result<Vec<_>>>()?,
            None => (0..shape.len()).filter(|&axis| shape[axis] == 1).collect(),
        };
        if let Some(axis) = gone.iter().find(|&&axis| shape[axis] != 1) {
            return Err(refused(format!("axis {axis} of integers of shape {shape:?}")));
        }
        let kept = (0..shape.len()).filter(|axis| !gone.contains(axis)).map(|axis| shape[axis]).collect();
        return Ok(IntegerTensor { extents, shape: kept });
    }
    let axes = axes.ok_or_else(|| refused("without axes"))?;
    let rank = shape.len() + axes.len();
    let mut new: Vec<usize> = axes.iter().map(|&axis| place(axis, rank)).collect::<Result<_>>()?;
    new.sort_unstable();
    for axis in new {
        if axis > shape.len() {
            return Err(refused(format!("axes {axes:?}")));
        }
        shape.insert(axis, 1);
    }
    Ok(IntegerTensor { extents, shape })
}
