//! Queries out of the distribution of the calibration queries, which have an nprobe of their own ([`OodProbing`]).
//!
//! No sample of queries out of distribution exists, so random queries are drawn. Half of the random queries point in any direction.
//! The other half of the queries are orthogonal to the centroids of some lists: like queries for a new kind of items, they differ
//! in directions in which the items of the index are alike.
//!
//! [`OodProbing`]: sterling_index::ivf::OodProbing

use rayon::prelude::*;

use super::queries::{Queries, bell, length};
use super::share::random;
use sterling_core::units::ListId;
use sterling_index::ivf;

/// Number of random queries that are drawn; only those that are out of distribution are measured.
const DRAWN: usize = 48;
/// Minimum number of random queries that are out of distribution; with fewer, none is measured.
const DRAWN_MIN: usize = 12;
/// One calibration query in this number counts as out of distribution.
const ONE_IN: usize = 128;

impl Queries {
    /// Returns the queries, followed by random queries that are out of their distribution. Adds none if too few random
    /// queries are.
    pub(super) fn with_ood_queries(&self, index: &ivf::Index, seed: u64) -> Queries {
        let reach = |query: &Vec<f32>| index.reach(query, &mut ivf::Scratch::default());
        let mut reaches: Vec<f32> = self.vectors.par_iter().map(reach).collect();
        reaches.sort_unstable_by(f32::total_cmp);
        let ood_reach = reaches.get(reaches.len() / ONE_IN).copied().filter(|reach| reach.is_finite());
        let ood_reach = ood_reach.unwrap_or(f32::MIN);
        // If lists are chosen by L2 distance, the reach of a query (see [`ivf::Index::reach`]) depends on its norm.
        let as_long = |(query, of): (Vec<f32>, &Vec<f32>)| scaled(query, length(of));
        let drawn = draw(index, DRAWN, random(seed, DRAWN as u64)).into_iter();
        let drawn = drawn.zip(self.vectors.iter().cycle()).map(as_long);
        let mut ood: Vec<Vec<f32>> = drawn.filter(|query| reach(query) < ood_reach).collect();
        if ood.len() < DRAWN_MIN {
            ood.clear();
        }
        let vectors = [self.vectors.as_slice(), &ood].concat();
        let mut made_of = self.made_of.clone();
        made_of.resize(vectors.len(), None);
        Queries { vectors, made_of, ood: ood.len(), ood_reach, ..self.clone() }
    }

    /// Returns the queries that are in distribution.
    pub(super) fn without_ood(mut self) -> Queries {
        let count = self.vectors.len() - self.ood;
        self.vectors.truncate(count);
        self.made_of.truncate(count);
        Queries { ood: 0, ood_reach: 0.0, ..self }
    }
}

/// Draws `count` queries `[D]`. Every other one is orthogonal to the centroids of D / 2 lists.
fn draw(index: &ivf::Index, count: usize, seed: u64) -> Vec<Vec<f32>> {
    let (width, lists) = (index.dimension(), index.lists());
    let directions = (width / 2).min(lists);
    let first = (random(seed, 0) % lists as u64) as usize;
    let mut basis: Vec<Vec<f32>> = Vec::new();
    for n in 0..directions {
        let list = ListId(((first + n * lists / directions) % lists) as u32);
        let direction = scaled(orthogonal(index.centroid(list).to_vec(), &basis), 1.0);
        basis.extend(Some(direction).filter(|direction| direction.iter().all(|x| x.is_finite())));
    }
    let query = |n: usize| {
        let query: Vec<f32> = (0..width).map(|d| bell(random(seed ^ 1, (n * width + d) as u64))).collect();
        if n.is_multiple_of(2) { query } else { orthogonal(query, &basis) }
    };
    (0..count).map(query).collect()
}

/// Subtracts the projections of a vector on orthonormal directions.
fn orthogonal(mut vector: Vec<f32>, basis: &[Vec<f32>]) -> Vec<f32> {
    for direction in basis {
        let product: f32 = vector.iter().zip(direction).map(|(x, y)| x * y).sum();
        vector.iter_mut().zip(direction).for_each(|(x, y)| *x -= product * y);
    }
    vector
}

/// Scales a vector to a length; a vector of zeros is not changed.
fn scaled(mut vector: Vec<f32>, to: f32) -> Vec<f32> {
    let scale = to / length(&vector).max(f32::MIN_POSITIVE);
    vector.iter_mut().for_each(|x| *x *= scale);
    vector
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use sterling_core::tensor::Matrix;
    use sterling_index::ivf::{Options, Rescore, RowSurvey};
    use sterling_storage::rows::RowStore;

    const WIDTH: usize = 24;

    #[test]
    fn half_of_the_random_queries_are_orthogonal_to_the_items() {
        // Items of the first half of the dimensions, nearly.
        let number = |n: usize| bell(random(5, n as u64)) * if n % WIDTH < WIDTH / 2 { 1.0 } else { 0.01 };
        let values: Vec<f32> = (0..2000 * WIDTH).map(number).collect();
        let store = RowStore::from(Matrix::new(&values, WIDTH).unwrap());
        let options = Options { lists: 40, iterations: 3, rescore: Rescore::F32, ..Options::default() };
        let built = ivf::build(&store, &RowSurvey::of(&store).unwrap(), &options, &|_| ()).unwrap();
        let index = ivf::Index::open(&built.in_memory(&store, "index").unwrap()).unwrap();
        let queries = draw(&index, 20, 1);
        assert_eq!(queries, draw(&index, 20, 1));
        let reach = |query: &Vec<f32>| index.reach(query, &mut ivf::Scratch::default());
        let reaches: Vec<f32> = queries.iter().map(reach).collect();
        let mean = |skipped: usize| reaches.iter().skip(skipped).step_by(2).sum::<f32>() / 10.0;
        assert!(mean(1) < 0.3 * mean(0), "{reaches:?}");
    }
}
