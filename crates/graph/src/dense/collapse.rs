//! Fuses linear chains into single products.
//!
//! A row value is represented as `Σ x M + c` over *bases* `x` (inputs of the row, results of nonlinear operations) as
//! long as it is linear: a product with a user's vector scales columns of `M`, a product with a matrix multiplies `M`,
//! sums and concatenations combine matrices. If a nonlinear operation reads the value, one product computes it.
//!
//! 1. *Eagerly*, `M` may depend on the user: `(item·A ⊙ q)·B` becomes `item·(A diag(q) B)`, whose matrix is computed once per
//!    request. Eager collapsing pays off from some tens of rows on.
//! 2. Otherwise only matrices without a computation per request are used: constants, and unchanged vectors of the user.
//!
//! Collapsing changes the order of sums, which costs one or two roundings. A sum whose terms may be large and cancel is
//! computed before a multiplication ([`Rewriter::is_summed_first`]): a difference of times or of flags must not become
//! a difference of products. A value minus its own mean is computed as the file defines it ([`centring`]).
//!
//! This file decides which values are collapsed; `collapse/affine.rs` computes with the linear forms.

mod affine;

use std::collections::HashMap;

use super::graph::Graph;
use super::ir::{Id, Op, Side, Value};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Binary, Fold, Unary};

/// Constants of at least this magnitude are added in the order of the graph, and sums are computed before a product
/// with them.
const FAR: f32 = 1024.0;

/// A constant of at least this magnitude, or with such a product, is added to a value before the value is multiplied:
/// a value near it may cancel it. Biases of trained layers are smaller.
const OFFSET: f32 = 64.0;

/// Magnitude of factors that depend on the user.
const UNKNOWN: f32 = 1.0;
/// Factor of values that are only added: constants among them are added once, without rounding errors per row.
const SUMMED: f32 = 0.0;

/// Minimum number of columns of a matrix from which adding the summands of the left factor is cheaper than multiplying
/// each summand.
const RESIDUAL_MIN: usize = 16;

/// Factor by which a basis is multiplied.
#[derive(Clone, Copy, Debug)]
enum Matrix {
    Identity,
    /// `[width]`
    Diagonal(Id),
    /// `[depth, width]`
    Full(Id),
}

/// `Σ x M + c`
#[derive(Clone, Debug)]
struct Affine {
    width: usize,
    parts: Vec<(Id, Matrix)>,
    /// `[width]`
    bias: Option<Id>,
}

/// Returns the same graph with each linear chain replaced by a product.
pub(super) fn collapse(graph: &Graph, is_eager: bool) -> Result<Graph> {
    let count = graph.values.len();
    let mut is_truncated = vec![false; count];
    for value in &graph.values {
        let Op::Unary(Unary::Trunc, mut of) = value.op else { continue };
        is_truncated[of] = true;
        while let Op::Reshape(inner) = graph.values[of].op {
            of = inner;
            is_truncated[of] = true;
        }
    }
    let mut is_as_written = vec![false; count];
    for id in 0..count {
        for kept in centring(graph, id).unwrap_or_default() {
            is_as_written[kept] = true;
        }
    }
    let mut rewriter = Rewriter {
        from: graph,
        to: Graph::new(graph.inputs.clone()),
        made: vec![None; count],
        affine: vec![None; count],
        is_truncated,
        is_as_written,
        inputs: HashMap::new(),
        is_eager,
    };
    for id in 0..count {
        rewriter.visit(id)?;
    }
    rewriter.to.outputs = graph.outputs.iter().map(|&output| rewriter.make(output)).collect::<Result<_>>()?;
    Ok(rewriter.to)
}

/// Returns the operations between a value and `id` if `id` adds a multiple of the sum of the value's numbers to the value:
/// the value minus its mean, in either order.
fn centring(graph: &Graph, id: Id) -> Option<Vec<Id>> {
    let root = |mut id: Id| {
        while let Op::Reshape(of) = graph.values[id].op {
            id = of;
        }
        id
    };
    let is_shared = |id: Id| graph.values[id].side != Side::Pair;
    let Op::Binary(Binary::Add | Binary::Sub, a, b) = graph.values[id].op else { return None };
    [(a, b), (b, a)].into_iter().find_map(|(of, mut at)| {
        let mut kept = vec![id];
        loop {
            kept.push(at);
            at = match graph.values[at].op {
                Op::Fold(Fold::Sum, summed) => return (root(summed) == root(of)).then_some(kept),
                Op::Reshape(of) | Op::Unary(Unary::Neg, of) => of,
                Op::Binary(Binary::Mul | Binary::Div, of, by) if is_shared(by) => of,
                Op::Binary(Binary::Mul, by, of) if is_shared(by) => of,
                _ => return None,
            };
        }
    })
}

struct Rewriter<'a> {
    from: &'a Graph,
    to: Graph,
    /// Per old value, the equal value in the new graph, if it was created.
    made: Vec<Option<Id>>,
    affine: Vec<Option<Affine>>,
    /// Old values that are truncated to integers. Quotients of integers are not rewritten: in f32, `41 * (1 / 41)` is
    /// below 1.
    is_truncated: Vec<bool>,
    /// Old values between a value and the same value minus its mean. The mean cancels an offset that all numbers share.
    /// Rewritten as products, the difference would have the rounding error of the offset.
    is_as_written: Vec<bool>,
    /// For each vector of a linear combination that is an input of the graph, the index of this input.
    inputs: HashMap<Id, usize>,
    is_eager: bool,
}

impl Rewriter<'_> {
    fn visit(&mut self, id: Id) -> Result<()> {
        let value = &self.from.values[id];
        if value.side != Side::Pair {
            self.make(id)?;
        } else if value.is_vector() {
            self.affine[id] = match self.follow(id)? {
                Some(affine) if self.is_far(&affine) => Some(self.settled(id, &affine)?),
                affine => affine,
            };
        }
        Ok(())
    }

    /// Returns whether a constant is so large that adding it early would round away the terms that it cancels with. For
    /// example, a mask subtracted from 1 and multiplied by -10,000 is exactly 0 for set entries only if the subtraction
    /// is computed first.
    fn is_far(&self, affine: &Affine) -> bool {
        let numbers = affine.bias.filter(|_| !affine.parts.is_empty()).and_then(|bias| self.to.constant(bias));
        numbers.is_some_and(|numbers| largest_magnitude(numbers) >= FAR)
    }

    /// Returns the value of the new graph that equals an old value, in the old shape.
    fn make(&mut self, id: Id) -> Result<Id> {
        if let Some(made) = self.made[id] {
            return Ok(made);
        }
        let Value { op, shape, rows, .. } = self.from.values[id].clone();
        let made = match (self.affine[id].clone(), &op) {
            // A view is computed once with the value of which it is a view.
            (Some(_), &Op::Reshape(of)) if self.affine[of].is_some() => {
                let made = self.make(of)?;
                self.affine[id] = self.affine[of].clone();
                self.to.reshape(made, shape, rows)?
            }
            (Some(affine), _) => {
                let flat = self.materialise(&affine)?;
                // A vector that is equal in all rows is not multiplied by matrices later, as that would happen per row.
                if !affine.parts.is_empty() {
                    self.affine[id] = Some(identity(flat, affine.width));
                }
                self.to.reshape(flat, shape, rows)?
            }
            (None, op) => {
                let op = op.over(&mut |read| self.make(read))?;
                self.to.add(op, shape, rows)?
            }
        };
        self.made[id] = Some(made);
        Ok(made)
    }

    /// Returns a row value in affine form; `None` if the value is not linear.
    fn follow(&mut self, id: Id) -> Result<Option<Affine>> {
        let value = self.from.values[id].clone();
        let width = value.count();
        match value.op {
            _ if self.is_as_written[id] => Ok(None),
            Op::Inputs(first) => {
                let input = self.to.input(first)?;
                let basis = self.to.reshape(input, vec![1, width], Some(0))?;
                self.inputs.insert(basis, first);
                Ok(Some(identity(basis, width)))
            }
            Op::Unary(Unary::Neg, a) => {
                let Some(affine) = self.affine[a].clone() else { return Ok(None) };
                let minus = self.to.number(vec![1], vec![-1.0])?;
                self.scale(affine, minus, width).map(Some)
            }
            Op::Binary(f @ (Binary::Add | Binary::Sub), a, b) => {
                let (Some(_), Some(mut right)) = (self.operand(a)?, self.operand(b)?) else { return Ok(None) };
                // Creating the second operand may have created the first operand too: `x - max(x)` computes `x` first.
                let Some(mut left) = self.operand(a)? else { return Ok(None) };
                if left.width != width {
                    left = self.summed_first(a, left, SUMMED)?;
                }
                if right.width != width {
                    right = self.summed_first(b, right, SUMMED)?;
                }
                if f == Binary::Sub {
                    let minus = self.to.number(vec![1], vec![-1.0])?;
                    let own = right.width;
                    right = self.scale(right, minus, own)?;
                }
                let (left, right) = (self.widen(left, width)?, self.widen(right, width)?);
                self.sum(left, right).map(Some)
            }
            Op::Binary(Binary::Mul, a, b) => {
                let (affine, shared) = if self.affine[a].is_some() { (a, b) } else { (b, a) };
                self.scaled(affine, shared, false, width)
            }
            Op::Binary(Binary::Div, ..) if self.is_truncated[id] => Ok(None),
            Op::Binary(Binary::Div, a, b) => self.scaled(a, b, true, width),
            Op::MatMul(a, b) => self.product(a, b, width),
            Op::Fold(Fold::Sum, a) if self.from.values[a].is_vector() => {
                let Some(affine) = self.affine[a].clone() else { return Ok(None) };
                let affine = self.summed_first(a, affine, SUMMED)?;
                self.fold(&affine).map(Some)
            }
            Op::Reshape(a) => Ok(self.affine[a].clone()),
            Op::Pick(a, _) if self.from.values[a].side != Side::Pair => {
                let shared = self.make(a)?;
                let Op::Pick(_, index) = &value.op else { return Ok(None) };
                let bias = self.to.pick(shared, index.to_vec(), vec![width], None)?;
                Ok(Some(Affine { width, parts: Vec::new(), bias: Some(bias) }))
            }
            _ => Ok(None),
        }
    }

    /// Returns an operand of a sum in affine form: a linear value, or a vector that all rows share.
    fn operand(&mut self, id: Id) -> Result<Option<Affine>> {
        let value = &self.from.values[id];
        if value.side == Side::Pair {
            if self.affine[id].is_none() && value.is_vector() {
                let basis = self.basis(id)?;
                return Ok(Some(basis));
            }
            return Ok(self.affine[id].clone());
        }
        if !value.is_vector() {
            return Ok(None);
        }
        let width = value.count();
        let made = self.make(id)?;
        let bias = self.to.reshape(made, vec![width], None)?;
        Ok(Some(Affine { width, parts: Vec::new(), bias: Some(bias) }))
    }

    /// Returns the result of a nonlinear operation as a basis.
    fn basis(&mut self, id: Id) -> Result<Affine> {
        let width = self.from.values[id].count();
        let made = self.make(id)?;
        let flat = self.to.reshape(made, vec![1, width], Some(0))?;
        let affine = identity(flat, width);
        self.affine[id] = Some(affine.clone());
        Ok(affine)
    }

    fn scaled(&mut self, a: Id, shared: Id, inverse: bool, width: usize) -> Result<Option<Affine>> {
        let other = &self.from.values[shared];
        if other.side == Side::Pair || !other.is_vector() {
            return Ok(None);
        }
        // The reciprocal of an unknown number may overflow although the quotient does not.
        let is_safe = |numbers: &[f32]| numbers.iter().all(|x| x.recip().is_normal());
        if inverse && !self.from.constant(shared).is_some_and(is_safe) {
            return Ok(None);
        }
        let Some(affine) = self.operand(a)? else { return Ok(None) };
        if inverse && self.is_computed_number(&affine) {
            return Ok(None);
        }
        let largest = |numbers: &[f32]| match inverse {
            true => numbers.iter().fold(0.0, |most, x| x.recip().abs().max(most)),
            false => largest_magnitude(numbers),
        };
        let factor = self.from.constant(shared).map_or(UNKNOWN, largest);
        let mut affine = self.summed_first(a, affine, factor)?;
        let has_full = affine.parts.iter().any(|(_, m)| matches!(m, Matrix::Full(_)));
        if !self.is_eager && has_full && other.side != Side::Constant {
            affine = self.settled(a, &affine)?;
        }
        let made = self.make(shared)?;
        let count = self.from.values[shared].count();
        let factor = self.to.reshape(made, vec![count], None)?;
        if inverse { self.divide(affine, factor, width) } else { self.scale(affine, factor, width) }.map(Some)
    }

    /// Returns whether a sum must be computed before it is multiplied or summed further, because its terms may be so
    /// large that their difference would be rounded away. This is the case if:
    ///
    /// - the factor is large: `factor` is the largest magnitude of constant factors, [`UNKNOWN`] or [`SUMMED`];
    /// - several values are added element-wise, or a value and numbers that are computed from it;
    /// - a large constant is added element-wise, and the value is multiplied;
    /// - a single number of the row (a column, not an embedding) is added to a number of the user.
    fn is_summed_first(&self, affine: &Affine, factor: f32) -> bool {
        if affine.parts.len() + usize::from(affine.bias.is_some()) < 2 {
            return false;
        }
        if factor >= FAR {
            return true;
        }
        let (products, added): (Vec<_>, Vec<_>) = affine.parts.iter().partition(|(_, m)| matches!(m, Matrix::Full(_)));
        let Some(&&(x, _)) = added.first() else { return false };
        let is_one = |&&(y, _): &&(Id, Matrix)| y == x || self.to.values[y].count() == 1;
        let offset = affine.bias.and_then(|bias| self.to.constant(bias)).map_or(0.0, largest_magnitude);
        let is_of_user = affine.bias.is_some_and(|bias| !self.is_constant(bias));
        added.len() > 1
            || products.iter().any(is_one)
            || (factor > SUMMED && offset * factor.max(1.0) >= OFFSET)
            || (is_of_user && (affine.width == 1 || self.is_made_of_numbers(x)))
    }

    /// Returns whether a basis is a concatenation of single numbers of the row.
    fn is_made_of_numbers(&self, id: Id) -> bool {
        match &self.to.values[id].op {
            Op::Reshape(a) => self.is_made_of_numbers(*a),
            Op::Concat(_, parts) => parts.iter().any(|&part| self.is_made_of_numbers(part)),
            Op::Inputs(first) => self.to.inputs[*first].shape.iter().all(|&size| size == 1),
            _ => false,
        }
    }

    /// Returns whether a value is a single number that was computed, such as a sum of which a mean is made. Its quotient
    /// is computed as written, so that the mean of equal numbers is that number.
    fn is_computed_number(&self, affine: &Affine) -> bool {
        let mut at = match affine.parts[..] {
            [(x, Matrix::Identity)] if affine.width == 1 && affine.bias.is_none() => x,
            _ => return false,
        };
        while let Op::Reshape(of) = self.to.values[at].op {
            at = of;
        }
        !matches!(self.to.values[at].op, Op::Inputs(_))
    }

    fn summed_first(&mut self, id: Id, affine: Affine, factor: f32) -> Result<Affine> {
        if self.is_summed_first(&affine, factor) { self.settled(id, &affine) } else { Ok(affine) }
    }

    fn is_constant(&self, id: Id) -> bool {
        self.to.values[id].side == Side::Constant
    }

    /// Computes a row value and uses the result as a basis.
    fn settled(&mut self, id: Id, affine: &Affine) -> Result<Affine> {
        let settled = identity(self.materialise(affine)?, affine.width);
        self.affine[id] = Some(settled.clone());
        Ok(settled)
    }

    /// Multiplies a vector by a matrix that all rows share.
    fn product(&mut self, a: Id, b: Id, width: usize) -> Result<Option<Affine>> {
        let (left, right) = (&self.from.values[a], &self.from.values[b]);
        let depth = left.count();
        if !left.is_vector() || right.side == Side::Pair || right.count() != depth * width {
            return Ok(None);
        }
        let made = self.make(b)?;
        let matrix = self.to.reshape(made, vec![depth, width], None)?;
        self.times(a, matrix, width).map(Some)
    }

    fn times(&mut self, a: Id, matrix: Id, width: usize) -> Result<Affine> {
        // The parts of a concatenation are multiplied separately.
        let mut at = a;
        while let Op::Reshape(of) = self.from.values[at].op
            && self.from.values[of].is_vector()
        {
            at = of;
        }
        if let Op::Concat(_, parts) = &self.from.values[at].op
            && self.from.values[at].side == Side::Pair
        {
            let mut total: Option<Affine> = None;
            let mut first = 0;
            for &part in parts {
                let depth = self.from.values[part].count();
                let index = (first * width..(first + depth) * width).map(|n| n as u32).collect();
                let rows = self.to.pick(matrix, index, vec![depth, width], None)?;
                let product = self.times(part, rows, width)?;
                total = Some(match total {
                    Some(total) => self.sum(total, product)?,
                    None => product,
                });
                first += depth;
            }
            if let Some(total) = total {
                return Ok(total);
            }
        }
        let affine = match self.affine[a].clone() {
            Some(affine) => affine,
            None => self.basis(a)?,
        };
        let factor = self.to.constant(matrix).map_or(UNKNOWN, largest_magnitude);
        let is_worth = self.is_cheaper_on_matrices(&affine, matrix, width) && !self.is_summed_first(&affine, factor);
        let affine = if is_worth { affine } else { self.settled(a, &affine)? };
        self.multiplied(affine, matrix, width)
    }

    /// Returns whether multiplying the matrices of an affine value is cheaper than computing the value and multiplying
    /// it.
    fn is_cheaper_on_matrices(&self, affine: &Affine, matrix: Id, width: usize) -> bool {
        // A residual sum `x + y`, as between cross layers, is added before one product instead of multiplied twice.
        let summands = affine.parts.iter().filter(|(_, m)| !matches!(m, Matrix::Full(_))).count();
        if summands > 1 && width >= RESIDUAL_MIN {
            return false;
        }
        affine.parts.iter().all(|(x, m)| match *m {
            Matrix::Identity => true,
            Matrix::Diagonal(d) => self.is_eager || (self.is_constant(d) && self.is_constant(matrix)),
            Matrix::Full(m) => {
                let depth = self.to.values[*x].count();
                let is_less = depth * width <= (depth + width) * affine.width;
                // A narrow value between wide ones (a low-rank layer) is computed. A value of few numbers, such as a
                // dot product, is not: its operands are usually multiplied by other matrices anyway.
                let is_low_rank = affine.width >= RESIDUAL_MIN && depth * width > 2 * (depth + width) * affine.width;
                let are_constant = self.is_constant(m) && self.is_constant(matrix);
                if self.is_eager { !is_low_rank } else { is_less && are_constant }
            }
        })
    }
}

fn largest_magnitude(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0.0, |most, x| most.max(x.abs()))
}

fn identity(basis: Id, width: usize) -> Affine {
    Affine { width, parts: vec![(basis, Matrix::Identity)], bias: None }
}
