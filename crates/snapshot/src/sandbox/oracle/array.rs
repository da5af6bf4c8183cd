//! Values of an evaluation: typed numbers with a shape.

use rten_onnx::onnx::{DataType, TensorProto};

use super::stop::Stop;

/// Element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    /// f32 or f64.
    Real,
    /// f16.
    Half,
    /// bf16.
    Brain,
    Truth,
    /// Signed integer with this number of bits.
    Signed(u32),
    Unsigned(u32),
}

impl Element {
    pub(super) fn of(kind: DataType) -> Result<Element, Stop> {
        Ok(match kind {
            DataType::FLOAT | DataType::DOUBLE => Element::Real,
            DataType::FLOAT16 => Element::Half,
            DataType::BFLOAT16 => Element::Brain,
            DataType::BOOL => Element::Truth,
            DataType::INT64 => Element::Signed(64),
            DataType::INT32 => Element::Signed(32),
            DataType::INT16 => Element::Signed(16),
            DataType::INT8 => Element::Signed(8),
            DataType::UINT16 => Element::Unsigned(16),
            DataType::UINT8 => Element::Unsigned(8),
            other => return Err(Stop::Unknown(format!("type {other}"))),
        })
    }

    /// Wraps an integer to the width of this type.
    pub(super) fn wrap(self, n: i64) -> i64 {
        match self {
            Element::Real | Element::Half | Element::Brain => n,
            Element::Truth => i64::from(n != 0),
            Element::Signed(bits) => (n << (64 - bits)) >> (64 - bits),
            Element::Unsigned(bits) => n & ((1 << bits) - 1),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Numbers {
    Reals(Vec<f64>),
    Wholes(Vec<i64>),
}

/// Numbers in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Array {
    pub(super) element: Element,
    pub(crate) shape: Vec<usize>,
    numbers: Numbers,
}

impl Array {
    pub(crate) fn real(shape: Vec<usize>, numbers: Vec<f64>) -> Array {
        Array { element: Element::Real, shape, numbers: Numbers::Reals(numbers) }
    }

    /// Creates integers, wrapped to their type.
    pub(super) fn whole(element: Element, shape: Vec<usize>, mut numbers: Vec<i64>) -> Array {
        numbers.iter_mut().for_each(|n| *n = element.wrap(*n));
        Array { element, shape, numbers: Numbers::Wholes(numbers) }
    }

    pub(super) fn truths(shape: Vec<usize>, truths: impl Iterator<Item = bool>) -> Array {
        Array::whole(Element::Truth, shape, truths.map(i64::from).collect())
    }

    pub(super) fn vector(numbers: Vec<i64>) -> Array {
        Array::whole(Element::Signed(64), vec![numbers.len()], numbers)
    }

    pub(super) fn count(&self) -> usize {
        self.shape.iter().product()
    }

    pub(super) fn is_real(&self) -> bool {
        matches!(self.element, Element::Real | Element::Half | Element::Brain)
    }

    /// Returns floats as another float type, without rounding them.
    pub(super) fn typed(self, element: Element) -> Array {
        Array { element, ..self }
    }

    pub(crate) fn reals(&self) -> Result<&[f64], Stop> {
        match &self.numbers {
            Numbers::Reals(numbers) => Ok(numbers),
            Numbers::Wholes(_) => Err(Stop::Invalid(format!("got {:?}, expected floats", self.element))),
        }
    }

    /// Returns integers, or booleans as 0 and 1.
    pub(super) fn wholes(&self) -> Result<&[i64], Stop> {
        match &self.numbers {
            Numbers::Wholes(numbers) => Ok(numbers),
            Numbers::Reals(_) => Err(Stop::Invalid("got floats, expected integers or booleans".into())),
        }
    }

    /// Returns all numbers as f64.
    pub(super) fn as_reals(&self) -> Vec<f64> {
        match &self.numbers {
            Numbers::Reals(numbers) => numbers.clone(),
            Numbers::Wholes(numbers) => numbers.iter().map(|&n| n as f64).collect(),
        }
    }

    /// Gathers the numbers at these positions into an array of another shape.
    pub(super) fn picked(&self, places: &[usize], shape: Vec<usize>) -> Array {
        let numbers = match &self.numbers {
            Numbers::Reals(numbers) => Numbers::Reals(places.iter().map(|&n| numbers[n]).collect()),
            Numbers::Wholes(numbers) => Numbers::Wholes(places.iter().map(|&n| numbers[n]).collect()),
        };
        Array { element: self.element, shape, numbers }
    }

    /// Returns the same numbers in another shape.
    pub(super) fn shaped(&self, shape: Vec<usize>) -> Result<Array, Stop> {
        if shape.iter().product::<usize>() != self.count() {
            return Err(Stop::Invalid(format!("cannot reshape {:?} to {shape:?}", self.shape)));
        }
        Ok(Array { shape, ..self.clone() })
    }

    /// Broadcasts the array to a shape.
    pub(super) fn spread(&self, shape: &[usize]) -> Result<Array, Stop> {
        if self.shape == shape {
            return Ok(self.clone());
        }
        if broadcast(&self.shape, shape)? != shape {
            return Err(Stop::Invalid(format!("shape {:?} does not broadcast to {shape:?}", self.shape)));
        }
        Ok(self.picked(&places(shape, &spread_strides(&self.shape, shape)), shape.to_vec()))
    }

    /// Concatenates the numbers of arrays of one type.
    pub(super) fn chained(parts: &[&Array]) -> Result<Array, Stop> {
        let first = parts.first().ok_or_else(|| Stop::Invalid("Concat has no inputs".into()))?;
        let count = parts.iter().map(|part| part.count()).sum();
        if first.is_real() {
            let mut all = Vec::with_capacity(count);
            for part in parts {
                all.extend_from_slice(part.reals()?);
            }
            return Ok(Array::real(vec![count], all));
        }
        let mut all = Vec::with_capacity(count);
        for part in parts {
            all.extend_from_slice(part.wholes()?);
        }
        Ok(Array::whole(first.element, vec![count], all))
    }
}

/// Returns the stride of each axis: the distance between neighbouring numbers.
pub(super) fn strides(shape: &[usize]) -> Vec<usize> {
    (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect()
}

/// Returns the strides of an array broadcast to a shape; 0 along repeated axes.
fn spread_strides(of: &[usize], shape: &[usize]) -> Vec<usize> {
    let own = strides(of);
    let ahead = shape.len() - of.len();
    (0..shape.len()).map(|axis| if axis < ahead || of[axis - ahead] == 1 { 0 } else { own[axis - ahead] }).collect()
}

/// Returns, for each number of a result of `shape`, its position in an array with these strides.
pub(super) fn places(shape: &[usize], strides: &[usize]) -> Vec<usize> {
    let mut all = vec![0];
    for (&size, &stride) in shape.iter().zip(strides) {
        let mut next = Vec::with_capacity(all.len() * size);
        for &at in &all {
            next.extend((0..size).map(|n| at + n * stride));
        }
        all = next;
    }
    all
}

/// Returns the broadcast shape of two operands.
pub(super) fn broadcast(a: &[usize], b: &[usize]) -> Result<Vec<usize>, Stop> {
    let axes = a.len().max(b.len());
    let size = |of: &[usize], axis: usize| (axis + of.len()).checked_sub(axes).map_or(1, |n| of[n]);
    let both = |axis: usize| match (size(a, axis), size(b, axis)) {
        (x, y) if x == y => Ok(x),
        (1, y) => Ok(y),
        (x, 1) => Ok(x),
        _ => Err(Stop::Invalid(format!("shapes {a:?} and {b:?} do not broadcast"))),
    };
    (0..axes).map(both).collect()
}

/// Reads a constant of a graph file.
pub(super) fn of_tensor(tensor: &TensorProto) -> Result<Array, Stop> {
    let shape = tensor.dims.iter().map(|&d| usize::try_from(d)).collect::<Result<Vec<_>, _>>();
    let shape = shape
        .map_err(|_| Stop::Invalid(format!("a constant has shape {:?}, expected no negative sizes", tensor.dims)))?;
    let kind = tensor.data_type.unwrap_or(DataType(0));
    let raw = tensor.raw_data.as_ref().map(|raw| raw.borrow());
    if let DataType::FLOAT16 | DataType::BFLOAT16 = kind {
        let listed = || tensor.int32_data.iter().map(|&n| n as u16).collect::<Vec<_>>();
        let bits = raw
            .as_ref()
            .map_or_else(listed, |raw| raw.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect());
        let number = |bits: &u16| match kind {
            DataType::FLOAT16 => half::f16::from_bits(*bits).to_f64(),
            _ => half::bf16::from_bits(*bits).to_f64(),
        };
        if bits.len() != shape.iter().product::<usize>() {
            return Err(Stop::Invalid(format!(
                "a constant of shape {:?} has {} elements, expected as many as its shape",
                tensor.dims,
                bits.len()
            )));
        }
        return Ok(Array::real(shape, bits.iter().map(number).collect()).typed(Element::of(kind)?));
    }
    let element = Element::of(kind)?;
    let array = match (element, &raw) {
        (Element::Real, Some(raw)) if kind == DataType::DOUBLE => {
            Array::real(shape, raw.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect())
        }
        (Element::Real, None) if kind == DataType::DOUBLE => Array::real(shape, tensor.double_data.clone()),
        (Element::Real, Some(raw)) => {
            let numbers = raw.as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes)));
            Array::real(shape, numbers.collect())
        }
        (Element::Real, None) => Array::real(shape, tensor.float_data.iter().map(|&x| f64::from(x)).collect()),
        (Element::Signed(64), Some(raw)) => {
            let numbers = raw.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
            Array::whole(element, shape, numbers.collect())
        }
        (Element::Signed(64), None) => Array::whole(element, shape, tensor.int64_data.clone()),
        (Element::Signed(32), Some(raw)) => {
            let numbers = raw.as_chunks::<4>().0.iter().map(|bytes| i64::from(i32::from_le_bytes(*bytes)));
            Array::whole(element, shape, numbers.collect())
        }
        (Element::Signed(16) | Element::Unsigned(16), Some(raw)) => {
            let numbers = raw.as_chunks::<2>().0.iter().map(|bytes| i64::from(i16::from_le_bytes(*bytes)));
            Array::whole(element, shape, numbers.collect())
        }
        (_, Some(raw)) => Array::whole(element, shape, raw.iter().map(|&byte| i64::from(byte)).collect()),
        (_, None) => Array::whole(element, shape, tensor.int32_data.iter().map(|&n| i64::from(n)).collect()),
    };
    let numbers = match &array.numbers {
        Numbers::Reals(numbers) => numbers.len(),
        Numbers::Wholes(numbers) => numbers.len(),
    };
    if numbers != array.count() {
        return Err(Stop::Invalid(format!(
            "a constant of shape {:?} has {numbers} elements, expected as many as its shape",
            tensor.dims
        )));
    }
    Ok(array)
}
