//! Matrices and tensors of f32: numbers with their shapes.

use crate::error::{Error, Result};

/// Borrowed row-major matrix `[rows, cols]` of f32 without padding.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    data: &'a [f32],
    cols: usize,
}

impl<'a> Matrix<'a> {
    /// Creates a view of `data` as rows of `cols` numbers.
    ///
    /// # Errors
    /// `Invalid` if `cols` is 0 or does not divide the length.
    #[inline]
    pub fn new(data: &'a [f32], cols: usize) -> Result<Self> {
        if cols == 0 || !data.len().is_multiple_of(cols) {
            return Err(Error::invalid(format!("matrix: {} numbers do not make rows of {cols}", data.len())));
        }
        Ok(Matrix { data, cols })
    }

    /// Returns the number of rows.
    #[inline]
    pub fn rows(&self) -> usize {
        self.data.len() / self.cols
    }

    /// Returns the width of a row.
    #[inline]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns row `r`, `[cols]`.
    #[inline]
    pub fn row(&self, r: usize) -> &'a [f32] {
        &self.data[r * self.cols..(r + 1) * self.cols]
    }

    /// Returns all numbers, row by row.
    #[inline]
    pub fn data(&self) -> &'a [f32] {
        self.data
    }
}

/// Owned row-major f32 tensor with its shape.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tensor {
    shape: Vec<usize>,
    data: Vec<f32>,
}

impl Tensor {
    /// Creates a tensor of the given shape.
    ///
    /// # Errors
    /// `Invalid` if the product of the shape is not the number of values.
    pub fn new(shape: impl Into<Vec<usize>>, data: Vec<f32>) -> Result<Self> {
        let shape = shape.into();
        if shape.iter().product::<usize>() != data.len() {
            return Err(Error::invalid(format!(
                "tensor: shape {shape:?} needs {} numbers, got {}",
                shape.iter().product::<usize>(),
                data.len()
            )));
        }
        Ok(Tensor { shape, data })
    }

    /// Creates a tensor of zeros.
    #[inline]
    pub fn zeros(shape: impl Into<Vec<usize>>) -> Self {
        let shape = shape.into();
        let data = vec![0.0; shape.iter().product()];
        Tensor { shape, data }
    }

    /// Returns the shape, outermost dimension first.
    #[inline]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns all numbers in row-major order.
    #[inline]
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// Returns all numbers in row-major order, mutable.
    #[inline]
    pub fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }

    /// Returns the numbers and drops the shape.
    #[inline]
    pub fn into_data(self) -> Vec<f32> {
        self.data
    }

    /// Views the tensor as rows of its last dimension.
    ///
    /// # Errors
    /// `Invalid` for a tensor without dimensions, or if its last dimension is 0.
    #[inline]
    pub fn rows(&self) -> Result<Matrix<'_>> {
        Matrix::new(&self.data, self.shape.last().copied().unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_checked() {
        assert!(Matrix::new(&[1.0, 2.0, 3.0], 2).is_err());
        assert!(Matrix::new(&[], 0).is_err());
        assert!(Tensor::new([2, 2], vec![0.0; 3]).is_err());
        let t = Tensor::new([2, 1, 3], vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]).expect("six numbers");
        assert_eq!(t.rows().expect("rows of 3").row(1), [3.0, 4.0, 5.0]);
    }
}
