//! A node with its inputs and attributes.

use std::rc::Rc;

use rten_onnx::onnx::{AttributeProto, NodeProto, TensorProto};

use super::array::Array;
use super::stop::Stop;

pub(super) struct Call<'a> {
    pub(super) node: &'a NodeProto,
    pub(super) inputs: Vec<Option<Rc<Array>>>,
    pub(super) opset: i64,
}

impl Call<'_> {
    pub(super) fn operator(&self) -> &str {
        self.node.op_type.as_deref().unwrap_or("")
    }

    pub(super) fn optional(&self, n: usize) -> Option<&Array> {
        self.inputs.get(n).and_then(|input| input.as_deref())
    }

    pub(super) fn input(&self, n: usize) -> Result<&Array, Stop> {
        self.optional(n).ok_or_else(|| Stop::Invalid(format!("input {n} is missing")))
    }

    /// Returns all inputs of a variadic operator.
    pub(super) fn all(&self) -> Result<Vec<&Array>, Stop> {
        (0..self.inputs.len()).map(|n| self.input(n)).collect()
    }

    /// Returns an input as integers.
    pub(super) fn integers(&self, n: usize) -> Result<Vec<i64>, Stop> {
        self.input(n)?.wholes().map(<[i64]>::to_vec)
    }

    fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.node.attribute.iter().find(|attribute| attribute.name.as_deref() == Some(name))
    }

    pub(super) fn int(&self, name: &str, default: i64) -> i64 {
        self.attribute(name).map_or(default, |attribute| attribute.i.unwrap_or(0))
    }

    pub(super) fn is_set(&self, name: &str, default: bool) -> bool {
        self.int(name, i64::from(default)) != 0
    }

    pub(super) fn float(&self, name: &str, default: f32) -> f64 {
        f64::from(self.attribute(name).map_or(default, |attribute| attribute.f.unwrap_or(0.0)))
    }

    pub(super) fn given_float(&self, name: &str) -> Option<f64> {
        self.attribute(name).map(|attribute| f64::from(attribute.f.unwrap_or(0.0)))
    }

    pub(super) fn given_int(&self, name: &str) -> Option<i64> {
        self.attribute(name).map(|attribute| attribute.i.unwrap_or(0))
    }

    pub(super) fn floats(&self, name: &str) -> Option<&[f32]> {
        self.attribute(name).map(|attribute| &attribute.floats[..])
    }

    pub(super) fn ints(&self, name: &str) -> Option<Vec<i64>> {
        self.attribute(name).map(|attribute| attribute.ints.clone())
    }

    pub(super) fn text<'a>(&'a self, name: &str, default: &'a str) -> &'a str {
        self.attribute(name).and_then(|attribute| attribute.s.as_deref()).unwrap_or(default)
    }

    pub(super) fn tensor(&self, name: &str) -> Option<&TensorProto> {
        self.attribute(name).and_then(|attribute| attribute.t.as_ref())
    }

    /// Returns integers that old opsets store in an attribute and new opsets in an input.
    pub(super) fn ints_or_input(&self, name: &str, n: usize) -> Result<Option<Vec<i64>>, Stop> {
        match self.ints(name) {
            Some(ints) => Ok(Some(ints)),
            None if self.optional(n).is_some() => self.integers(n).map(Some),
            None => Ok(None),
        }
    }
}

/// Resolves an axis or index that may count from the end.
pub(super) fn place(n: i64, of: usize) -> Result<usize, Stop> {
    let place = if n < 0 { n.saturating_add(of as i64) } else { n };
    let place = usize::try_from(place).ok().filter(|&place| place < of);
    place.ok_or_else(|| Stop::Invalid(format!("axis or index {n} is out of range, expected a number below {of}")))
}
