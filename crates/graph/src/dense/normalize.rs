//! Fuses softmax and layer normalization along the last axis, each with the scale, bias and `Relu` that follow, into
//! one step that keeps each normalized vector in the L1 cache. The kernel does the same operations in the same order,
//! so results are equal bit for bit.

use super::graph::Graph;
use super::ir::{Id, Op};
use super::steps::{BufferRange, NormalizeWork, Work};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Binary, Fold, Unary};

/// Minimum count of numbers of a value: a step on few numbers takes longer to start than to compute, and chains are
/// faster.
const NUMBERS_MIN: usize = 64;

/// Kind of a fused normalization.
#[derive(Clone, Debug)]
pub(super) enum Normal {
    Softmax,
    /// Layer normalization: per subtracted mean, the divisor that makes it from the sum; the divisor that makes the
    /// mean square; the number added to the mean square; and the constants that scale the result and are added to it.
    Layer {
        centre: Vec<f32>,
        count: f32,
        epsilon: f32,
        scale: Option<Id>,
        bias: Option<Id>,
        relu: bool,
    },
}

/// Values that one step computes: `made` from `x`, whose vectors of `width` numbers are normalized separately.
#[derive(Clone, Debug)]
pub(super) struct NormalGroup {
    pub(super) made: Id,
    pub(super) x: Id,
    pub(super) width: usize,
    pub(super) normal: Normal,
}

#[derive(Clone, Debug, Default)]
pub(super) struct NormalGroups(Vec<NormalGroup>);

impl NormalGroups {
    /// Finds normalizations whose intermediate values are read by nothing else. `readers` counts the readers of each
    /// value; `root` returns the value of which a value is a view.
    pub(super) fn of(graph: &Graph, needed: &[bool], readers: &[usize], root: impl Fn(Id) -> Id) -> NormalGroups {
        let finder = Finder { graph, readers, root: &root };
        let mut groups: Vec<NormalGroup> = Vec::new();
        for id in (0..needed.len()).filter(|&id| needed[id] && root(id) == id) {
            if let Some(group) = finder.softmax(id).or_else(|| finder.layer(id)) {
                groups.push(group);
                continue;
            }
            let read = graph.values[id].op.reads();
            let of = groups.iter_mut().find(|group| read.iter().any(|&read| root(read) == group.made));
            if let Some(group) = of.filter(|group| readers[group.made] == 1) {
                finder.extend(group, id);
            }
        }
        NormalGroups(groups)
    }

    /// Returns the group that computes a value.
    pub(super) fn group(&self, id: Id) -> Option<&NormalGroup> {
        self.0.iter().find(|group| group.made == id)
    }

    /// Returns the values that are read to compute a value; `None` if the value is not the result of a fused
    /// normalization.
    pub(super) fn reads(&self, id: Id) -> Option<Vec<Id>> {
        self.group(id).map(|group| match group.normal {
            Normal::Softmax => vec![group.x],
            Normal::Layer { scale, bias, .. } => [group.x].into_iter().chain(scale).chain(bias).collect(),
        })
    }
}

impl NormalGroup {
    /// Compiles the group to one step; `place` returns the buffer range of a value.
    pub(super) fn compile(&self, graph: &Graph, mut place: impl FnMut(Id) -> Result<BufferRange>) -> Result<Work> {
        let NormalGroup { x, width, made, .. } = *self;
        let (a, runs) = (place(x)?, graph.values[made].count() / width);
        Ok(match &self.normal {
            Normal::Softmax => Work::Softmax { a, runs, width },
            Normal::Layer { centre, count, epsilon, scale, bias, relu } => {
                let (scale, bias) = (scale.map(&mut place).transpose()?, bias.map(&mut place).transpose()?);
                let (centre, count, epsilon, relu) = (centre.clone(), *count, *epsilon, *relu);
                Work::Normalize(Box::new(NormalizeWork { a, runs, width, centre, count, epsilon, scale, bias, relu }))
            }
        })
    }
}

struct Finder<'a, R> {
    graph: &'a Graph,
    readers: &'a [usize],
    root: &'a R,
}

impl<R: Fn(Id) -> Id> Finder<'_, R> {
    fn op(&self, id: Id) -> &Op {
        &self.graph.values[(self.root)(id)].op
    }

    fn is_read_by(&self, id: Id, readers: usize) -> bool {
        self.readers[(self.root)(id)] == readers
    }

    fn is(&self, a: Id, b: Id) -> bool {
        (self.root)(a) == (self.root)(b)
    }

    fn single(&self, id: Id) -> Option<f32> {
        self.graph.constant((self.root)(id)).filter(|numbers| numbers.len() == 1).map(|numbers| numbers[0])
    }

    /// Returns whether `id` has one number per vector along the last axis of `of`.
    fn is_per_run(&self, id: Id, of: Id) -> bool {
        let (own, shape) = (self.graph.shape(id), self.graph.shape(of));
        own.len() == shape.len() && own.last() == Some(&1) && own.iter().zip(shape).rev().skip(1).all(|(a, b)| a == b)
    }

    /// Returns the operand if `id` reduces along the last axis of `of`, and only one value reads `id`.
    fn folded(&self, f: Fold, id: Id, of: Id) -> Option<Id> {
        match *self.op(id) {
            Op::Fold(g, a) if g == f && self.is_read_by(id, 1) => {
                (self.graph.shape(a).last() == self.graph.shape(of).last()).then_some(a)
            }
            _ => None,
        }
    }

    /// Returns `a` and the divisor if `id` is `Fold(Sum, a) / divisor`, and only one value reads `id`. A factor is such a
    /// divisor if its reciprocal is exact.
    fn mean(&self, id: Id, of: Id) -> Option<(Id, f32)> {
        let (sum, count) = match *self.op(id) {
            Op::Binary(Binary::Div, sum, count) => (sum, self.single(count)?),
            Op::Binary(Binary::Mul, sum, share) => {
                let share = self.single(share)?;
                (sum, Some(share.recip()).filter(|count| count * share == 1.0 && is_power_of_two(*count))?)
            }
            _ => return None,
        };
        let a = self.folded(Fold::Sum, sum, of)?;
        self.is_read_by(id, 1).then_some((a, count))
    }

    /// Returns `a` and the divisor of the mean if `id` is `a - mean(a)`.
    fn centred(&self, id: Id) -> Option<(Id, f32)> {
        let Op::Binary(Binary::Sub, a, mean) = *self.op(id) else { return None };
        let (of, count) = self.mean(mean, a)?;
        (self.is(of, a) && self.is_per_run(mean, a) && self.has_shape_of(id, a)).then_some((a, count))
    }

    fn has_shape_of(&self, id: Id, of: Id) -> bool {
        self.graph.shape((self.root)(id)) == self.graph.shape(of)
    }

    fn group(&self, made: Id, x: Id, normal: Normal) -> Option<NormalGroup> {
        let width = *self.graph.shape(made).last()?;
        let x = (self.root)(x);
        let is_inside = self.graph.values[made].rows.is_none_or(|rows| rows + 1 < self.graph.shape(made).len());
        let is_same = self.graph.values[x].side == self.graph.values[made].side
            && self.graph.values[x].count() == self.graph.values[made].count();
        let is_worth = width > 1 && self.graph.values[made].count() >= NUMBERS_MIN;
        (is_inside && is_same && is_worth).then_some(NormalGroup { made, x, width, normal })
    }

    fn softmax(&self, id: Id) -> Option<NormalGroup> {
        let Op::Binary(Binary::Div, each, sum) = self.graph.values[id].op else { return None };
        let Op::Unary(Unary::Exp, less) = *self.op(each) else { return None };
        let Op::Binary(Binary::Sub, x, most) = *self.op(less) else { return None };
        let is_softmax = self.folded(Fold::Sum, sum, each).is_some_and(|of| self.is(of, each))
            && self.folded(Fold::Max, most, x).is_some_and(|of| self.is(of, x))
            && self.is_per_run(sum, each)
            && self.is_per_run(most, x)
            && self.has_shape_of(less, x)
            && self.graph.shape(id) == self.graph.shape(each)
            && self.graph.shape(each).last() == self.graph.shape(x).last()
            && self.is_read_by(each, 2)
            && self.is_read_by(less, 1);
        if is_softmax { self.group(id, x, Normal::Softmax) } else { None }
    }

    fn layer(&self, id: Id) -> Option<NormalGroup> {
        let Op::Binary(Binary::Div, y, deviation) = self.graph.values[id].op else { return None };
        let Op::Unary(Unary::Sqrt, shifted) = *self.op(deviation) else { return None };
        let Op::Binary(Binary::Add, square, epsilon) = *self.op(shifted) else { return None };
        let (squares, count) = self.mean(square, y)?;
        let Op::Binary(Binary::Mul, a, b) = *self.op(squares) else { return None };
        let is_normal = self.is(a, y)
            && self.is(b, y)
            && self.has_shape_of(squares, y)
            && self.is_per_run(deviation, y)
            && self.graph.shape(id) == self.graph.shape(y)
            && self.is_read_by(deviation, 1)
            && self.is_read_by(shifted, 1)
            && self.is_read_by(squares, 1);
        // The centred value is read twice by its square and once by the quotient.
        let (mut x, first) = self.centred(y).filter(|_| is_normal && self.is_read_by(y, 3))?;
        let mut centre = vec![first];
        if let Some((before, count)) = self.centred(x).filter(|_| self.is_read_by(x, 2)) {
            centre.insert(0, count);
            x = before;
        }
        let epsilon = self.single(epsilon)?;
        self.group(id, x, Normal::Layer { centre, count, epsilon, scale: None, bias: None, relu: false })
    }

    /// Adds a scale, a bias or a `Relu` that follows a fused normalization to its step.
    fn extend(&self, group: &mut NormalGroup, id: Id) {
        let Normal::Layer { scale, bias, relu, .. } = &mut group.normal else { return };
        if *relu || self.graph.shape(id) != self.graph.shape(group.made) {
            return;
        }
        let constant = |a: Id, b: Id| {
            let other = if (self.root)(a) == group.made { b } else { a };
            let is_run = self.graph.shape(other).last() == Some(&group.width);
            let numbers = self.graph.constant((self.root)(other));
            (is_run && numbers.is_some_and(|numbers| numbers.len() == group.width)).then_some(other)
        };
        match self.graph.values[id].op {
            Op::Binary(Binary::Mul, a, b) if scale.is_none() && bias.is_none() => match constant(a, b) {
                Some(other) => *scale = Some(other),
                None => return,
            },
            Op::Binary(Binary::Add, a, b) if bias.is_none() => match constant(a, b) {
                Some(other) => *bias = Some(other),
                None => return,
            },
            Op::Unary(Unary::Relu, _) => *relu = true,
            _ => return,
        }
        group.made = id;
    }
}

fn is_power_of_two(x: f32) -> bool {
    x.is_normal() && x.to_bits().trailing_zeros() >= f32::MANTISSA_DIGITS - 1
}
