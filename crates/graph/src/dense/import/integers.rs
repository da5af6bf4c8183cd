//! Operators on integers, including constants: shapes, axes and indices, evaluated at import.

use rten_onnx::onnx::{DataType, NodeProto};

use super::known::{Attributes, Extent, Importer, IntegerTensor, Known, fixed, place, refused};
use super::views::slice_indices;
use crate::dense::ir::{broadcast, broadcast_strides, positions, strides};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::Unary;

/// Maximum count of integers in the result of a node.
const INTEGERS_MAX: usize = 1 << 16;
/// Operators that rearrange values without computing with them.
pub(super) const MOVES: [&str; 13] = [
    "Gather",
    "Concat",
    "Slice",
    "Reshape",
    "Flatten",
    "Transpose",
    "Expand",
    "Tile",
    "GatherND",
    "GatherElements",
    "ScatterND",
    "ScatterElements",
    "Pad",
];

impl Importer {
    /// Returns the result of a node on integers or constants; `None` if the node computes floats.
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
            "Size" => return self.size_of(node).map(Some),
            "ConstantOfShape" => return self.filled(node, attributes).map(Some),
            _ => {}
        }
        let are_integers = |n: usize| matches!(self.known(node, n), Ok(Known::Integers(_)));
        if !(0..node.input.len()).all(|n| !Importer::has(node, n) || are_integers(n)) {
            return Ok(None);
        }
        let first = self.extents(node, 0)?.clone();
        let are_vectors = (0..node.input.len()).all(|n| self.extents(node, n).is_ok_and(|of| of.shape.len() <= 1));
        let made = match operator {
            "Add" | "Sub" | "Mul" | "Div" | "Mod" | "Max" | "Min" | "Sum" | "Equal" | "Less" | "LessOrEqual"
            | "Greater" | "GreaterOrEqual" | "And" | "Or" | "Xor" => {
                if attributes.integer("fmod", 0) != 0 {
                    return Err(refused("`fmod` is not supported for integers"));
                }
                (1..node.input.len()).try_fold(first, |a, n| pairs(operator, &a, self.extents(node, n)?))?
            }
            "Neg" | "Abs" | "Sign" | "Not" => mapped(operator, first)?,
            "Clip" => {
                let mut made = first;
                for (n, f) in [(1, "Max"), (2, "Min")] {
                    if Importer::has(node, n) {
                        made = pairs(f, &made, self.extents(node, n)?)?;
                    }
                }
                made
            }
            "Where" => chosen(&first, self.extents(node, 1)?, self.extents(node, 2)?)?,
            "Gather" if first.shape.len() == 1 => self.gathered(node, attributes, &first)?,
            "Concat" if are_vectors => {
                attributes.integer("axis", 0);
                let parts = (0..node.input.len()).map(|n| self.vector(node, n)).collect::<Result<Vec<_>>>()?;
                IntegerTensor::vector(parts.concat())
            }
            "Slice" if first.shape.len() == 1 => self.sliced(node, &first)?,
            "Range" => self.range(node)?,
            "Unsqueeze" | "Squeeze" => {
                let axes = self.axes(node, attributes, 1)?;
                reshaped(operator, axes.as_deref(), first)?
            }
            "ReduceSum" | "ReduceProd" | "ReduceMax" | "ReduceMin" => {
                self.reduced(operator, node, attributes, &first)?
            }
            "NonZero" => nonzero(&first)?,
            "Expand" if self.vector(node, 1)?.iter().any(|size| matches!(size, Extent::Rows(_))) => {
                let (a, sizes) = (self.number(node, 0)?, self.vector(node, 1)?);
                let made = self.expand(a, &sizes)?;
                if !first.are_truths {
                    self.whole.insert(made);
                }
                return Ok(Some(Known::Value(made)));
            }
            "Cast" => {
                let to = DataType(i32::try_from(attributes.integer("to", 0)).unwrap_or(0));
                let wrapped = |wrap: fn(i64) -> i64| {
                    IntegerTensor::new(first.shape.clone(), first.extents.iter().map(|n| wrapped(n, wrap)).collect())
                };
                match to {
                    DataType::INT64 => wrapped(|n| n),
                    DataType::INT32 => wrapped(|n| i64::from(n as i32)),
                    DataType::INT16 => wrapped(|n| i64::from(n as i16)),
                    DataType::UINT16 => wrapped(|n| i64::from(n as u16)),
                    DataType::INT8 => wrapped(|n| i64::from(n as i8)),
                    DataType::UINT8 => wrapped(|n| i64::from(n as u8)),
                    DataType::FLOAT | DataType::DOUBLE | DataType::FLOAT16 | DataType::BFLOAT16 => {
                        let id = self.number(node, 0)?;
                        self.whole.remove(&id);
                        return Ok(Some(Known::Value(id)));
                    }
                    DataType::BOOL => {
                        let id = self.number(node, 0)?;
                        let is_zero = self.graph.unary(Unary::Not, id)?;
                        return self.graph.unary(Unary::Not, is_zero).map(|id| Some(Known::Value(id)));
                    }
                    _ => return Err(refused(format!("cannot cast integers computed from shapes to {to:?}"))),
                }
            }
            // A reshape of a scalar or a vector to a vector leaves the integers unchanged.
            "Reshape" if are_vectors && matches!(self.fixed(node, 1)?[..], [-1]) => {
                attributes.integer("allowzero", 0);
                IntegerTensor { shape: vec![first.extents.len()], ..first }
            }
            operator if MOVES.contains(&operator) => self.moved(operator, node, attributes)?,
            _ => return Err(refused("the operator does not support integers computed from shapes")),
        };
        match made.extents.len() {
            0..=INTEGERS_MAX => Ok(Some(Known::Integers(made))),
            count => Err(refused(format!("{count} integers, expected at most {INTEGERS_MAX}"))),
        }
    }

    /// Moves integers with an operator for floats: the operator moves the integers' positions, and each element of the
    /// result is the integer at the position that was moved there.
    fn moved(&mut self, operator: &str, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<IntegerTensor> {
        let data: Vec<usize> = match operator {
            "Concat" => (0..node.input.len()).collect(),
            "ScatterND" | "ScatterElements" => vec![0, 2],
            _ => vec![0],
        };
        let (mut all, mut of_positions, mut are_truths) = (Vec::new(), node.clone(), true);
        for &n in &data {
            let IntegerTensor { extents, shape, are_truths: own } = self.extents(node, n)?.clone();
            let count = all.len() + extents.len();
            if count > INTEGERS_MAX {
                return Err(refused(format!("{count} integers, expected at most {INTEGERS_MAX}")));
            }
            let id = self.graph.number(shape, (all.len()..count).map(|n| n as f32).collect())?;
            // No name in a file starts with a NUL character.
            of_positions.input[n] = format!("\0{n}");
            self.known.insert(of_positions.input[n].clone(), Known::Value(id));
            all.extend(extents);
            are_truths &= own;
        }
        let first = self.value(&of_positions, 0)?;
        let made = self.view(operator, &of_positions, attributes, first);
        data.iter().for_each(|&n| drop(self.known.remove(&of_positions.input[n])));
        let made = made?;
        let from = self
            .graph
            .constant(made)
            .ok_or_else(|| refused("integers that depend on the number of candidates are not supported"))?;
        let extents = from.iter().map(|&n| all[n as usize]).collect();
        Ok(IntegerTensor { extents, shape: self.graph.shape(made).to_vec(), are_truths })
    }

    fn reduced(
        &self,
        operator: &str,
        node: &NodeProto,
        attributes: &mut Attributes<'_>,
        of: &IntegerTensor,
    ) -> Result<IntegerTensor> {
        let f = match operator {
            "ReduceSum" => "Add",
            "ReduceProd" => "Mul",
            "ReduceMax" => "Max",
            _ => "Min",
        };
        attributes.integer("noop_with_empty_axes", 0);
        let rank = of.shape.len();
        let axes = match self.axes(node, attributes, 1)?.filter(|axes| !axes.is_empty()) {
            Some(axes) => axes.iter().map(|&axis| place(axis, rank)).collect::<Result<Vec<_>>>()?,
            None => (0..rank).collect(),
        };
        let kept: Vec<usize> = (0..rank).map(|n| if axes.contains(&n) { 1 } else { of.shape[n] }).collect();
        let mut made: Vec<Option<Extent>> = vec![None; kept.iter().product()];
        let at = positions(&of.shape, &broadcast_strides(&kept, &of.shape));
        for (&extent, at) in of.extents.iter().zip(at) {
            let place = &mut made[at as usize];
            *place = Some(match *place {
                Some(before) => combined(f, before, extent)?,
                None => extent,
            });
        }
        let extents =
            made.into_iter().collect::<Option<_>>().ok_or_else(|| refused("got no integers, expected at least one"))?;
        let shape = match attributes.integer("keepdims", 1) {
            0 => (0..rank).filter(|n| !axes.contains(n)).map(|n| of.shape[n]).collect(),
            _ => kept,
        };
        Ok(IntegerTensor::new(shape, extents))
    }

    fn literal(&mut self, attributes: &mut Attributes<'_>) -> Result<Known> {
        let integers = |all: Vec<i64>, shape| {
            Known::Integers(IntegerTensor::new(shape, all.into_iter().map(Extent::Fixed).collect()))
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
        self.tensor(tensor.ok_or_else(|| refused("attribute `value` is missing or not supported"))?)
    }

    fn shape_of(&mut self, node: &NodeProto, attributes: &mut Attributes<'_>) -> Result<Known> {
        let all: Vec<Extent> = match self.known(node, 0)? {
            Known::Integers(integers) => integers.shape.iter().map(|&d| Extent::Fixed(d as i64)).collect(),
            Known::Columns(_) => return Err(refused("row numbers are not supported as the input")),
            Known::RowNumbers(numbers) => {
                let extent = |(axis, &d): (usize, &usize)| match axis == numbers.rows {
                    true => Extent::Rows(d as i64),
                    false => Extent::Fixed(d as i64),
                };
                numbers.shape.iter().enumerate().map(extent).collect()
            }
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

    /// Returns the count of elements of a value.
    fn size_of(&self, node: &NodeProto) -> Result<Known> {
        let made = match self.known(node, 0)? {
            Known::Integers(integers) => Extent::Fixed(integers.extents.len() as i64),
            Known::Value(id) => match (self.graph.values[*id].count() as i64, self.rows(*id)) {
                (count, Some(_)) => Extent::Rows(count),
                (count, None) => Extent::Fixed(count),
            },
            Known::RowNumbers(_) | Known::Columns(_) => {
                return Err(refused("row numbers are not supported as the input"));
            }
        };
        Ok(Known::Integers(IntegerTensor::new(Vec::new(), vec![made])))
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
                let one =
                    *value.extents.first().ok_or_else(|| refused("attribute `value` is missing or not supported"))?;
                if extents.iter().any(|size| matches!(size, Extent::Rows(_))) {
                    let scalar = IntegerTensor { extents: vec![one], shape: Vec::new(), ..value };
                    let scalar = self.number_of(&Known::Integers(scalar))?;
                    let made = self.expand(scalar, &extents)?;
                    self.whole.insert(made);
                    return Ok(Known::Value(made));
                }
                let sizes = fixed(&IntegerTensor::vector(extents))?;
                let invalid = || refused(format!("got integers of shape {sizes:?}, expected at most {INTEGERS_MAX}"));
                let shape = sizes.iter().map(|&n| usize::try_from(n)).collect::<Result<Vec<_>, _>>();
                let shape = shape.map_err(|_| invalid())?;
                let count = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= INTEGERS_MAX);
                Ok(Known::Integers(IntegerTensor::new(shape, vec![one; count.ok_or_else(invalid)?])))
            }
            Known::RowNumbers(_) | Known::Columns(_) => Err(refused("attribute `value` is missing or not supported")),
        }
    }

    /// Returns the integers of an input with at most one axis.
    pub(super) fn vector(&self, node: &NodeProto, n: usize) -> Result<Vec<Extent>> {
        let integers = self.extents(node, n)?;
        match integers.shape.len() {
            0 | 1 => Ok(integers.extents.clone()),
            _ => Err(refused(format!(
                "input {n}: got integers of shape {:?}, expected at most one axis",
                integers.shape
            ))),
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
            return Err(refused(format!("got integers of shape {:?}, expected one axis", from.shape)));
        }
        let extents = fixed(index)?.into_iter().map(at).collect::<Result<_>>()?;
        Ok(IntegerTensor { extents, shape: index.shape.clone(), are_truths: from.are_truths })
    }

    fn sliced(&self, node: &NodeProto, from: &IntegerTensor) -> Result<IntegerTensor> {
        let steps = if Importer::has(node, 4) { self.fixed(node, 4)? } else { vec![1] };
        let (starts, ends) = (self.fixed(node, 1)?, self.fixed(node, 2)?);
        let ([start], [end], [step], [size]) = (&starts[..], &ends[..], &steps[..], &from.shape[..]) else {
            return Err(refused("got several axes to slice integers along, expected one"));
        };
        let extents = slice_indices(*start, *end, *step, *size)?.into_iter().map(|n| from.extents[n]).collect();
        Ok(IntegerTensor { are_truths: from.are_truths, ..IntegerTensor::vector(extents) })
    }

    fn range(&self, node: &NodeProto) -> Result<IntegerTensor> {
        let ends = (0..3).map(|n| self.fixed(node, n)).collect::<Result<Vec<_>>>()?;
        let ([start], [end], [step]) = (&ends[0][..], &ends[1][..], &ends[2][..]) else {
            return Err(refused("start, end or step has several integers, expected one each"));
        };
        let way = end.checked_sub(*start).filter(|_| *step != 0);
        let way = way.and_then(|way| way.checked_mul(step.signum()));
        let count = way.map(|way| (way.max(0) as u64).div_ceil(step.unsigned_abs()) as i64);
        match count.filter(|&n| n <= INTEGERS_MAX as i64) {
            Some(count) => Ok(IntegerTensor::vector((0..count).map(|n| Extent::Fixed(start + n * step)).collect())),
            None => Err(refused(format!(
                "the range from {start} to {end} by {step} is too long, expected at most {INTEGERS_MAX} integers"
            ))),
        }
    }
}

fn wrapped(extent: &Extent, wrap: fn(i64) -> i64) -> Extent {
    match *extent {
        Extent::Fixed(n) => Extent::Fixed(wrap(n)),
        rows => rows,
    }
}

fn mapped(operator: &str, of: IntegerTensor) -> Result<IntegerTensor> {
    let one = |extent: &Extent| match (operator, *extent) {
        ("Neg", Extent::Fixed(n)) => n.checked_neg().map(Extent::Fixed),
        ("Abs", Extent::Fixed(n)) => n.checked_abs().map(Extent::Fixed),
        ("Sign", Extent::Fixed(n)) => Some(Extent::Fixed(n.signum())),
        ("Not", Extent::Fixed(n)) => Some(Extent::Fixed(i64::from(n == 0))),
        ("Abs", rows) => Some(rows),
        ("Sign", Extent::Rows(_)) => Some(Extent::Fixed(1)),
        _ => None,
    };
    let extents = of
        .extents
        .iter()
        .map(|n| one(n).ok_or_else(|| refused(format!("the operator does not support the integer {n:?}"))));
    let are_truths = operator == "Not";
    Ok(IntegerTensor { extents: extents.collect::<Result<_>>()?, shape: of.shape, are_truths })
}

/// Returns the indices of the integers that are not 0, one row of the result per axis.
fn nonzero(of: &IntegerTensor) -> Result<IntegerTensor> {
    let at: Vec<usize> = (0..of.extents.len()).filter(|&n| of.extents[n] != Extent::Fixed(0)).collect();
    if at.len() * of.shape.len() > INTEGERS_MAX {
        return Err(refused(format!("the indices of {} integers exceed {INTEGERS_MAX}", of.extents.len())));
    }
    let along = |(&stride, &size): (&usize, &usize)| {
        at.iter().map(move |n| Extent::Fixed((n / stride % size) as i64)).collect::<Vec<_>>()
    };
    let extents = strides(&of.shape).iter().zip(&of.shape).flat_map(along).collect();
    Ok(IntegerTensor::new(vec![of.shape.len(), at.len()], extents))
}

/// Combines two integers, each fixed or a multiple of the number of rows, which is unknown until the graph runs. The
/// result must have one of these forms too.
fn combined(operator: &str, a: Extent, b: Extent) -> Result<Extent> {
    use Extent::{Fixed, Rows};
    let made = match (operator, a, b) {
        ("Equal", Fixed(a), Fixed(b)) | ("Equal", Rows(a), Rows(b)) => Some(Fixed(i64::from(a == b))),
        // The number of rows is at least 1. Whether it equals a given positive integer is unknown.
        ("Equal", Rows(_), Fixed(n)) | ("Equal", Fixed(n), Rows(_)) if n <= 0 => Some(Fixed(0)),
        ("Less", Fixed(a), Fixed(b)) => Some(Fixed(i64::from(a < b))),
        ("LessOrEqual", Fixed(a), Fixed(b)) => Some(Fixed(i64::from(a <= b))),
        ("Less", Rows(_), Fixed(n)) if n <= 1 => Some(Fixed(0)),
        ("Less", Fixed(n), Rows(_)) if n <= 0 => Some(Fixed(1)),
        ("LessOrEqual", Rows(_), Fixed(n)) if n <= 0 => Some(Fixed(0)),
        ("LessOrEqual", Fixed(n), Rows(_)) if n <= 1 => Some(Fixed(1)),
        ("Greater" | "GreaterOrEqual", a, b) => {
            return combined(if operator == "Greater" { "Less" } else { "LessOrEqual" }, b, a);
        }
        ("And", a, b) => Some(Fixed(i64::from(a != Fixed(0) && b != Fixed(0)))),
        ("Or", a, b) => Some(Fixed(i64::from(a != Fixed(0) || b != Fixed(0)))),
        ("Xor", a, b) => Some(Fixed(i64::from((a != Fixed(0)) != (b != Fixed(0))))),
        ("Sum", a, b) => return combined("Add", a, b),
        ("Add", Rows(a), Rows(b)) => a.checked_add(b).map(Rows),
        ("Add" | "Sub", Rows(a), Fixed(0)) | ("Add", Fixed(0), Rows(a)) => Some(Rows(a)),
        ("Sub", Rows(a), Rows(b)) if a == b => Some(Fixed(0)),
        ("Sub", Rows(a), Rows(b)) if a > b => a.checked_sub(b).map(Rows),
        ("Max", Rows(a), Rows(b)) => Some(Rows(a.max(b))),
        ("Min", Rows(a), Rows(b)) => Some(Rows(a.min(b))),
        ("Max", Rows(a), Fixed(n)) | ("Max", Fixed(n), Rows(a)) if n <= a => Some(Rows(a)),
        ("Mul", Rows(_), Fixed(0)) | ("Mul", Fixed(0), Rows(_)) => Some(Fixed(0)),
        ("Div", Rows(a), Rows(b)) if a % b == 0 => Some(Fixed(a / b)),
        ("Mod", Rows(a), Fixed(b)) if b > 0 && a % b == 0 => Some(Fixed(0)),
        // The remainder has the sign of the divisor.
        ("Mod", Fixed(a), Fixed(b)) if b < 0 || a < 0 => {
            a.checked_rem(b).map(|rest| Fixed(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }))
        }
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
    made.ok_or_else(|| refused(format!("the operator does not support the integers {a:?} and {b:?}")))
}

/// Broadcasts the integers of a tensor to a shape.
fn spread(of: &IntegerTensor, shape: &[usize]) -> Vec<Extent> {
    let at = positions(shape, &broadcast_strides(&of.shape, shape));
    at.into_iter().map(|n| of.extents[n as usize]).collect()
}

/// Returns the broadcast shape of tensors for an element-wise operation.
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
    let extents = both.map(|(a, b)| combined(operator, a, b)).collect::<Result<_>>()?;
    let are_truths = !["Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Sum"].contains(&operator);
    Ok(IntegerTensor { extents, shape, are_truths })
}

fn chosen(condition: &IntegerTensor, a: &IntegerTensor, b: &IntegerTensor) -> Result<IntegerTensor> {
    let shape = shape_of_all(&[condition, a, b])?;
    let both = spread(a, &shape).into_iter().zip(spread(b, &shape));
    let one = |(condition, (a, b)): (&Extent, (Extent, Extent))| match condition {
        Extent::Fixed(0) => b,
        Extent::Fixed(_) | Extent::Rows(_) => a,
    };
    let extents = spread(condition, &shape).iter().zip(both).map(one).collect();
    Ok(IntegerTensor { extents, shape, are_truths: a.are_truths && b.are_truths })
}

fn reshaped(operator: &str, axes: Option<&[i64]>, of: IntegerTensor) -> Result<IntegerTensor> {
    let IntegerTensor { extents, mut shape, are_truths } = of;
    if operator == "Squeeze" {
        let removed = match axes {
            Some(axes) => axes.iter().map(|&axis| place(axis, shape.len())).collect::<Result<Vec<_>>>()?,
            None => (0..shape.len()).filter(|&axis| shape[axis] == 1).collect(),
        };
        if let Some(axis) = removed.iter().find(|&&axis| shape[axis] != 1) {
            return Err(refused(format!("cannot remove axis {axis} of integers of shape {shape:?}, expected size 1")));
        }
        let kept = (0..shape.len()).filter(|axis| !removed.contains(axis)).map(|axis| shape[axis]).collect();
        return Ok(IntegerTensor { extents, shape: kept, are_truths });
    }
    let axes = axes.ok_or_else(|| refused("attribute or input `axes` is missing"))?;
    let rank = shape.len() + axes.len();
    let mut new: Vec<usize> = axes.iter().map(|&axis| place(axis, rank)).collect::<Result<_>>()?;
    new.sort_unstable();
    for axis in new {
        if axis > shape.len() {
            return Err(refused(format!("axes {axes:?} are out of range, expected axes below {rank}")));
        }
        shape.insert(axis, 1);
    }
    Ok(IntegerTensor { extents, shape, are_truths })
}
