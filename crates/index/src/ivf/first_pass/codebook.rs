//! Codebooks: the 16 values per subspace that product quantization chooses from.

use std::ops::Range;

use rayon::prelude::*;

use super::options::{OF_LINE, VALUES};
use crate::ivf::random::mix;
use sterling_core::limits;

/// Rounds of k-means for the training.
const ROUNDS: usize = 12;

/// Codebook values of all subspaces.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::ivf) struct Codebooks {
    /// For each dimension, the components of its subspace's 16 values, `[D, 16]`.
    pub(super) values: Vec<[f32; VALUES]>,
    /// Number of subspaces, M.
    pub(super) subspaces: usize,
}

impl Codebooks {
    /// Number of residuals for the training.
    pub(super) const SAMPLE: usize = 1 << 15;

    /// Creates codebooks from the values of a file.
    ///
    /// # Errors
    /// The reason why the values are invalid.
    pub(super) fn new(values: &[f32], subspaces: usize) -> Result<Self, String> {
        // A residual is the difference of two vector components.
        let is_fit = |x: &f32| x.abs() <= 2.0 * limits::COMPONENT_MAX;
        match values.iter().all(is_fit) && subspaces.is_multiple_of(OF_LINE) {
            true => Ok(Codebooks { values: values.as_chunks().0.to_vec(), subspaces }),
            false => Err("expected finite numbers between -2^57 and 2^57".into()),
        }
    }

    /// Trains codebooks on `residuals` `[n, D]`.
    pub(super) fn train(residuals: &[f32], dimension: usize, subspaces: usize, seed: u64) -> Self {
        let mut books = Codebooks { values: vec![[0.0; VALUES]; dimension], subspaces };
        let of_subspace = |subspace: usize| {
            let bounds = books.bounds(subspace);
            let points = residuals.chunks_exact(dimension).flat_map(|row| row[bounds.clone()].iter().copied());
            values(&points.collect::<Vec<f32>>(), bounds.len(), mix(seed, subspace as u64))
        };
        books.values = (0..subspaces).into_par_iter().flat_map(of_subspace).collect();
        books
    }

    /// Returns the dimension of a vector, D.
    pub(super) fn dimension(&self) -> usize {
        self.values.len()
    }

    /// Returns the dimensions of a subspace; some subspaces are empty if there are more subspaces than dimensions.
    pub(super) fn bounds(&self, subspace: usize) -> Range<usize> {
        let from = |subspace: usize| subspace * self.dimension() / self.subspaces;
        from(subspace)..from(subspace + 1)
    }

    /// Returns all values as stored in a file.
    pub(super) fn numbers(&self) -> Vec<f32> {
        self.values.concat()
    }
}

/// Returns the squared distances of a point to all values `[width, 16]`.
fn distances(point: &[f32], values: &[[f32; VALUES]]) -> [f32; VALUES] {
    let mut squares = [0f32; VALUES];
    for (x, values) in point.iter().zip(values) {
        squares.iter_mut().zip(values).for_each(|(square, value)| *square += (x - value) * (x - value));
    }
    squares
}

/// Returns the index of the minimum, the first one on ties.
pub(super) fn least(of: &[f32; VALUES]) -> usize {
    (1..VALUES).fold(0, |best, n| if of[n] < of[best] { n } else { best })
}

/// Returns the means of 16 clusters of `points` `[n, width]`, as `[width, 16]`.
fn values(points: &[f32], width: usize, seed: u64) -> Vec<[f32; VALUES]> {
    if width == 0 {
        return Vec::new();
    }
    let mut values = first_values(points, width, seed);
    for _ in 0..ROUNDS {
        let (mut sums, mut counts) = (vec![[0f64; VALUES]; width], [0usize; VALUES]);
        for point in points.chunks_exact(width) {
            let nearest = least(&distances(point, &values));
            counts[nearest] += 1;
            sums.iter_mut().zip(point).for_each(|(sums, &x)| sums[nearest] += f64::from(x));
        }
        for (values, sums) in values.iter_mut().zip(&sums) {
            for (n, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
                values[n] = (sums[n] / count as f64) as f32;
            }
        }
    }
    values
}

/// Samples initial values, each with probability proportional to its squared distance from the previous ones (k-means++).
fn first_values(points: &[f32], width: usize, seed: u64) -> Vec<[f32; VALUES]> {
    let points = points.chunks_exact(width);
    let mut values = vec![[0f32; VALUES]; width];
    let mut nearest = vec![f64::INFINITY; points.len()];
    let mut drawn = (mix(seed, 0) % points.len().max(1) as u64) as usize;
    for n in 0..VALUES {
        let Some(point) = points.clone().nth(drawn) else { break };
        values.iter_mut().zip(point).for_each(|(values, &x)| values[n] = x);
        let mut total = 0.0;
        for (nearest, other) in nearest.iter_mut().zip(points.clone()) {
            let square = point.iter().zip(other).map(|(x, y)| f64::from(x - y).powi(2)).sum();
            *nearest = nearest.min(square);
            total += *nearest;
        }
        let mut left = (mix(seed, n as u64 + 1) >> 11) as f64 / (1u64 << 53) as f64 * total;
        let passes = |distance: &f64| {
            left -= distance;
            left < 0.0
        };
        drawn = nearest.iter().position(passes).unwrap_or(drawn);
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_distinct_points_are_their_own_codebook() {
        // Sixteen well separated points, each many times.
        for width in [1, 2, 3] {
            let points: Vec<f32> =
                (0..1600).flat_map(|n| (0..width).map(move |d| ((n % 16) * (d + 3)) as f32)).collect();
            let values = values(&points, width, 9);
            for point in points.chunks_exact(width) {
                assert_eq!(distances(point, &values)[least(&distances(point, &values))], 0.0, "width {width}");
            }
        }
    }

    #[test]
    fn numbers_of_a_file_are_checked() {
        assert!(Codebooks::new(&[1.0; 32], 8).is_ok());
        for invalid in [f32::NAN, f32::INFINITY, -3e30] {
            assert!(Codebooks::new(&[[1.0; 31].as_slice(), &[invalid]].concat(), 8).is_err());
        }
    }
}
