//! Maker of a random graph: the values that the graph has so far, and random choices of values, axes and constants.

use super::onnx_file::Builder;
use sterling_core::random::{GAMMA, splitmix64};

/// Random numbers by SplitMix64.
pub(super) struct Random(pub(super) u64);

impl Random {
    fn next(&mut self) -> u64 {
        let number = splitmix64(self.0);
        self.0 = self.0.wrapping_add(GAMMA);
        number
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(super) fn number(&mut self) -> f32 {
        self.below(2001) as f32 / 1000.0 - 1.0
    }

    pub(super) fn numbers(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.number() * scale).collect()
    }
}

/// A value of the graph: its name, its shape, and whether it differs between rows.
#[derive(Clone, Debug)]
pub(super) struct Value {
    pub(super) name: String,
    /// Shape; the row axis has size 1.
    pub(super) shape: Vec<usize>,
    pub(super) is_pair: bool,
}

pub(super) struct Maker {
    pub(super) random: Random,
    pub(super) builder: Builder,
    pub(super) values: Vec<Value>,
    pub(super) axis: usize,
}

pub(super) const MASK: &str = "mask";

impl Maker {
    pub(super) fn pick(&mut self) -> Value {
        // Prefers late values, so that graphs grow deep.
        let count = self.values.len();
        let place = self.random.below(count).max(self.random.below(count));
        self.values[place].clone()
    }

    pub(super) fn keep(&mut self, name: String, shape: Vec<usize>, is_pair: bool) {
        if shape.iter().product::<usize>() <= 200 && shape.len() <= 5 {
            self.values.push(Value { name, shape, is_pair });
        }
    }

    /// Picks an axis after the row axis, counted from the front or from the end.
    pub(super) fn inner_axis(&mut self, a: &Value) -> (usize, i64) {
        let first = self.axis + 1;
        let axis = first + self.random.below(a.shape.len() - first);
        (axis, if self.random.below(2) == 0 { axis as i64 } else { axis as i64 - a.shape.len() as i64 })
    }

    /// Adds a constant that broadcasts with a value, sometimes with more axes.
    pub(super) fn beside(&mut self, a: &Value, scale: f32) -> String {
        let mut shape = vec![1; a.shape.len()];
        for (size, &of_value) in shape.iter_mut().zip(&a.shape).skip(self.axis + 1) {
            if self.random.below(2) == 0 {
                *size = of_value;
            }
        }
        let dropped = self.random.below(shape.len() + 1);
        let ahead = shape.iter().take_while(|size| **size == 1).count();
        shape.drain(..dropped.min(ahead));
        let numbers = self.random.numbers(shape.iter().product(), scale);
        self.builder.floats(&shape, numbers)
    }

    /// Returns the shape of a value combined with a constant.
    pub(super) fn rank_with(&self, a: &Value, constant: &str) -> Vec<usize> {
        let tensor = self.builder.constants.iter().find(|tensor| tensor.name.as_deref() == Some(constant)).unwrap();
        let more = tensor.dims.len().saturating_sub(a.shape.len());
        [&vec![1; more][..], &a.shape].concat()
    }
}

/// Returns the broadcast shape of two values, including the row axis.
pub(super) fn together(a: &Value, b: &Value) -> Option<Vec<usize>> {
    if a.shape.len() != b.shape.len() {
        return None;
    }
    a.shape
        .iter()
        .zip(&b.shape)
        .map(|(&x, &y)| if x == y || y == 1 { Some(x) } else { (x == 1).then_some(y) })
        .collect()
}
