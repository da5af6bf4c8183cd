//! Arithmetic on affine values `Σ x M + c`, and the products that compute them.

use std::collections::HashMap;

use super::super::ir::Id;
use super::{Affine, Matrix, Rewriter};
use sterling_core::error::Result;
use sterling_kernels::cpu::dense::{Binary, Fold, PARTS_MAX, Unary};

impl Rewriter<'_> {
    /// Multiplies an affine value by a vector `[width]` or `[1]`.
    pub(super) fn scale(&mut self, affine: Affine, factor: Id, width: usize) -> Result<Affine> {
        let affine = self.widen(affine, width)?;
        let factor = self.broadcast_vector(factor, width)?;
        let mut parts = Vec::new();
        for (x, matrix) in affine.parts {
            parts.push((
                x,
                match matrix {
                    Matrix::Identity => Matrix::Diagonal(factor),
                    Matrix::Diagonal(d) => Matrix::Diagonal(self.to.binary(Binary::Mul, d, factor)?),
                    Matrix::Full(m) => Matrix::Full(self.to.binary(Binary::Mul, m, factor)?),
                },
            ));
        }
        let bias = affine.bias.map(|bias| self.to.binary(Binary::Mul, bias, factor)).transpose()?;
        Ok(Affine { width, parts, bias })
    }

    /// Divides an affine value by a constant vector `[width]` or `[1]`. Constants are divided, not multiplied by a
    /// rounded reciprocal: the mean of equal constants must be that constant, to cancel it.
    pub(super) fn divide(&mut self, affine: Affine, divisor: Id, width: usize) -> Result<Affine> {
        let affine = self.widen(affine, width)?;
        let divisor = self.broadcast_vector(divisor, width)?;
        let inverse = self.to.unary(Unary::Reciprocal, divisor)?;
        let mut parts = Vec::new();
        for (x, matrix) in affine.parts {
            let mut quotient = |m: Id| match self.is_constant(m) {
                true => self.to.binary(Binary::Div, m, divisor),
                false => self.to.binary(Binary::Mul, m, inverse),
            };
            let quotient = match matrix {
                Matrix::Identity => Matrix::Diagonal(inverse),
                Matrix::Diagonal(d) => Matrix::Diagonal(quotient(d)?),
                Matrix::Full(m) => Matrix::Full(quotient(m)?),
            };
            parts.push((x, quotient));
        }
        let bias = affine.bias.map(|bias| self.to.binary(Binary::Div, bias, divisor)).transpose()?;
        Ok(Affine { width, parts, bias })
    }

    /// Broadcasts a vector of `width` numbers or one number to `[width]`.
    fn broadcast_vector(&mut self, vector: Id, width: usize) -> Result<Id> {
        match self.to.values[vector].count() == width {
            true => Ok(vector),
            false => self.to.pick(vector, vec![0; width], vec![width], None),
        }
    }

    /// Broadcasts an affine value of one number to `width` numbers.
    pub(super) fn widen(&mut self, affine: Affine, width: usize) -> Result<Affine> {
        if affine.width == width {
            return Ok(affine);
        }
        let ones = self.to.number(vec![1, width], vec![1.0; width])?;
        let mut parts = Vec::new();
        for (x, matrix) in affine.parts {
            let full = match matrix {
                Matrix::Identity => ones,
                Matrix::Diagonal(m) | Matrix::Full(m) => self.to.binary(Binary::Mul, m, ones)?,
            };
            parts.push((x, Matrix::Full(full)));
        }
        let bias = affine.bias.map(|bias| self.broadcast_vector(bias, width)).transpose()?;
        Ok(Affine { width, parts, bias })
    }

    pub(super) fn sum(&mut self, mut a: Affine, b: Affine) -> Result<Affine> {
        for (x, matrix) in b.parts {
            let is_full = |m: &Matrix| matches!(m, Matrix::Full(_));
            let alike = a.parts.iter().position(|(y, m)| *y == x && is_full(m) == is_full(&matrix));
            let Some(at) = alike else {
                a.parts.push((x, matrix));
                continue;
            };
            let (one, other) = (self.matrix(a.parts[at].1, a.width)?, self.matrix(matrix, a.width)?);
            let sum = self.to.binary(Binary::Add, one, other)?;
            a.parts[at].1 = if is_full(&matrix) { Matrix::Full(sum) } else { Matrix::Diagonal(sum) };
        }
        a.bias = match (a.bias, b.bias) {
            (Some(x), Some(y)) => Some(self.to.binary(Binary::Add, x, y)?),
            (x, y) => x.or(y),
        };
        Ok(a)
    }

    fn matrix(&mut self, matrix: Matrix, width: usize) -> Result<Id> {
        match matrix {
            Matrix::Identity => self.to.number(vec![width], vec![1.0; width]),
            Matrix::Diagonal(m) | Matrix::Full(m) => Ok(m),
        }
    }

    pub(super) fn multiplied(&mut self, affine: Affine, matrix: Id, width: usize) -> Result<Affine> {
        let mut parts = Vec::new();
        for (x, m) in affine.parts {
            let full = match m {
                Matrix::Identity => matrix,
                Matrix::Diagonal(d) => {
                    let column = self.to.reshape(d, vec![affine.width, 1], None)?;
                    self.to.binary(Binary::Mul, matrix, column)?
                }
                Matrix::Full(m) => self.to.matmul(m, matrix)?,
            };
            parts.push((x, Matrix::Full(full)));
        }
        let mut bias = None;
        if let Some(own) = affine.bias {
            let row = self.to.reshape(own, vec![1, affine.width], None)?;
            let product = self.to.matmul(row, matrix)?;
            bias = Some(self.to.reshape(product, vec![width], None)?);
        }
        Ok(Affine { width, parts, bias })
    }

    /// Sums all numbers of an affine value.
    pub(super) fn fold(&mut self, affine: &Affine) -> Result<Affine> {
        let mut parts = Vec::new();
        for &(x, matrix) in &affine.parts {
            let column = match matrix {
                Matrix::Identity => self.to.number(vec![affine.width, 1], vec![1.0; affine.width])?,
                Matrix::Diagonal(d) => self.to.reshape(d, vec![affine.width, 1], None)?,
                Matrix::Full(m) => self.to.fold(Fold::Sum, m, &[1])?,
            };
            parts.push((x, Matrix::Full(column)));
        }
        let bias = affine.bias.map(|bias| self.to.fold(Fold::Sum, bias, &[0])).transpose()?;
        Ok(Affine { width: 1, parts, bias })
    }

    /// Computes an affine value as a row `[1, width]`.
    pub(super) fn materialise(&mut self, affine: &Affine) -> Result<Id> {
        let mut full = Vec::new();
        let mut other = Vec::new();
        for &(x, matrix) in &affine.parts {
            match matrix {
                Matrix::Full(m) => full.push((x, m)),
                Matrix::Identity => other.push(x),
                Matrix::Diagonal(d) => other.push(self.to.binary(Binary::Mul, x, d)?),
            }
        }
        let full = self.joined(full)?;
        let mut bias = affine.bias;
        let mut total: Option<Id> = None;
        for parts in full.chunks(PARTS_MAX) {
            let sum = self.to.linear(parts.to_vec(), bias.take())?;
            total = Some(self.plus(total, sum)?);
        }
        for x in other {
            total = Some(self.plus(total, x)?);
        }
        match (total, bias) {
            (Some(total), Some(bias)) => self.to.binary(Binary::Add, total, bias),
            (Some(total), None) => Ok(total),
            (None, bias) => {
                let bias = match bias {
                    Some(bias) => bias,
                    None => self.to.number(vec![affine.width], vec![0.0; affine.width])?,
                };
                let index = (0..affine.width as u32).collect();
                self.to.pick(bias, index, vec![1, affine.width], Some(0))
            }
        }
    }

    fn plus(&mut self, total: Option<Id>, x: Id) -> Result<Id> {
        total.map_or(Ok(x), |total| self.to.binary(Binary::Add, total, x))
    }

    /// Joins neighbouring inputs with constant matrices into one part.
    fn joined(&mut self, mut parts: Vec<(Id, Id)>) -> Result<Vec<(Id, Id)>> {
        let number = |inputs: &HashMap<Id, usize>, x: Id| inputs.get(&x).copied().unwrap_or(usize::MAX);
        parts.sort_by_key(|(x, m)| (!self.is_constant(*m), number(&self.inputs, *x)));
        let mut joined: Vec<(Id, Id)> = Vec::new();
        let mut run: Vec<(usize, Id)> = Vec::new();
        for (x, m) in parts {
            let n = number(&self.inputs, x);
            if n == usize::MAX || !self.is_constant(m) {
                joined.push((x, m));
                continue;
            }
            if run.last().is_some_and(|(last, _)| last + 1 != n) {
                joined.push(self.join(&run)?);
                run.clear();
            }
            run.push((n, m));
        }
        if !run.is_empty() {
            joined.push(self.join(&run)?);
        }
        Ok(joined)
    }

    fn join(&mut self, run: &[(usize, Id)]) -> Result<(Id, Id)> {
        let matrices: Vec<Id> = run.iter().map(|(_, m)| *m).collect();
        Ok((self.to.inputs(run[0].0, run.len())?, self.to.concat(0, &matrices)?))
    }
}
