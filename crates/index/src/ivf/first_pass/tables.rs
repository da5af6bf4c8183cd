//! Query tables: the product of the query with each value of each subspace, quantized to bytes.

use super::codebook::Codebooks;
use super::coder::Coder;
use super::options::{OF_LINE, VALUES};
use super::signs::DIMENSIONS;
use sterling_kernels::cpu::kernels::{CodeQuery, TABLE};

/// Largest value of a byte.
const MOST: f32 = 255.0;

/// Tables of a query, reused between calls to avoid allocations. All tables have one quantization step: the widest range of
/// a subspace's 16 products over 255. The sum of the minimum products of all subspaces is a constant part of the scores.
#[derive(Clone, Debug, Default)]
pub(in crate::ivf) struct Tables {
    /// Quantized products, `[M / 8, 8, 16]`.
    bytes: Vec<u8>,
    products: Vec<[f32; VALUES]>,
    step: f32,
    base: f32,
    /// Rotated query for sign codes; empty for product codes.
    rotated: Vec<f32>,
}

impl Tables {
    /// Computes the tables of `vector` `[D]`.
    pub(in crate::ivf) fn set(&mut self, coder: &Coder, vector: &[f32]) {
        let Tables { bytes, products, step, base, rotated } = self;
        products.clear();
        products.resize(coder.subspaces(), [0.0; VALUES]);
        rotated.clear();
        let (range, sum) = match coder {
            Coder::Pq4(books) => subspace_products(books, vector, products),
            Coder::Rabitq(rotation) => {
                rotation.rotate(vector.iter().copied(), rotated);
                of_signs(rotated, products)
            }
        };
        let inverse = MOST / range;
        let inverse = if inverse.is_finite() { inverse } else { 0.0 };
        (*step, *base) = (if inverse > 0.0 { range / MOST } else { 0.0 }, sum);
        bytes.clear();
        bytes.extend(products.as_flattened().iter().map(|product| byte(product * inverse)));
        debug_assert_eq!(bytes.len(), coder.subspaces() / OF_LINE * TABLE);
    }

    /// Returns the query for a list, given the product of the vector with its centroid.
    pub(in crate::ivf) fn of_list(&self, product: f32) -> CodeQuery<'_> {
        let Tables { bytes: tables, step, base, .. } = self;
        match self.rotated.is_empty() {
            true => CodeQuery { tables, step: *step, base: 0.0, bias: product + base },
            // With sign codes, each item's factor multiplies the sum and also the constant `base`.
            false => CodeQuery { tables, step: *step, base: *base, bias: product },
        }
    }
}

/// Rounds a number from 0 to 255 to a byte: adding 2^23 leaves the integer in the low mantissa bits, which vectorizes.
fn byte(x: f32) -> u8 {
    (x + 8_388_608.0).to_bits() as u8
}

/// Computes the products with the values of each subspace, relative to the subspace's minimum. Returns the widest range of a
/// subspace's products and the sum of the minima.
fn subspace_products(books: &Codebooks, vector: &[f32], products: &mut [[f32; VALUES]]) -> (f32, f32) {
    let (mut range, mut sum) = (0f32, 0f32);
    for (subspace, products) in products.iter_mut().enumerate() {
        for d in books.bounds(subspace) {
            products.iter_mut().zip(&books.values[d]).for_each(|(product, value)| *product += vector[d] * value);
        }
        let least = halved(products, |a, b| if a < b { a } else { b });
        products.iter_mut().for_each(|product| *product -= least);
        range = range.max(halved(products, |a, b| if a > b { a } else { b }));
        sum += least;
    }
    (range, sum)
}

/// Reduces 16 values by halving, which vectorizes.
fn halved(values: &[f32; VALUES], both: impl Fn(f32, f32) -> f32) -> f32 {
    let mut left = *values;
    for half in [8, 4, 2, 1] {
        (0..half).for_each(|n| left[n] = both(left[n], left[n + half]));
    }
    left[0]
}

/// Computes the products with the 16 sign patterns of each group of four numbers, like [`subspace_products`]. The
/// pattern whose signs are all opposite to those of the numbers has the minimum product; each sign that agrees adds
/// twice the magnitude of its number.
fn of_signs(rotated: &[f32], products: &mut [[f32; VALUES]]) -> (f32, f32) {
    let (mut range, mut sum) = (0f32, 0f32);
    for (numbers, products) in rotated.as_chunks::<DIMENSIONS>().0.iter().zip(products) {
        let all: f32 = numbers.iter().map(|x| x.abs()).sum();
        products[0] = all - numbers.iter().sum::<f32>();
        for (n, x) in numbers.iter().enumerate() {
            let (without, with) = products.split_at_mut(1 << n);
            with.iter_mut().zip(without).for_each(|(with, without)| *with = *without + 2.0 * x);
        }
        (range, sum) = (range.max(2.0 * all), sum - all);
    }
    (range, sum)
}

#[cfg(test)]
mod tests {
    use super::super::rotation::Rotation;
    use super::*;

    #[test]
    fn table_bytes_equal_products_within_half_a_step() {
        let number = |n: usize| (n.wrapping_mul(0x9E37_79B9) >> 8 & 0xffff) as f32 / 32_768.0 - 1.0;
        for (dimension, subspaces) in [(3, 8), (16, 8), (50, 32), (64, 64)] {
            let values: Vec<f32> = (0..dimension * VALUES).map(number).collect();
            let books = Codebooks::new(&values, subspaces).expect("finite");
            for scale in [1.0, 1e-30, 1e12] {
                let vector: Vec<f32> = (0..dimension).map(|d| number(d + 7777) * scale).collect();
                let mut tables = Tables::default();
                tables.set(&Coder::Pq4(books.clone()), &vector);
                let query = tables.of_list(0.0);
                let table = |subspace: usize, n: usize| f32::from(query.tables[subspace * VALUES + n]) * query.step;
                let (mut exact, mut least) = (0f32, 0f32);
                for subspace in 0..subspaces {
                    let product =
                        |n: usize| books.bounds(subspace).map(|d| vector[d] * books.values[d][n]).sum::<f32>();
                    let low = (0..VALUES).map(product).fold(f32::MAX, f32::min);
                    (exact, least) = (exact + product(subspace % VALUES), least + low);
                    for n in 0..VALUES {
                        let off = (table(subspace, n) - (product(n) - low)).abs();
                        assert!(off <= 0.51 * query.step, "{off} of {}", query.step);
                    }
                }
                assert!((query.bias - least).abs() <= 1e-4 * scale * dimension as f32);
                let sum: f32 = (0..subspaces).map(|subspace| table(subspace, subspace % VALUES)).sum();
                assert!((sum + query.bias - exact).abs() <= 0.51 * query.step * subspaces as f32 + 1e-4 * scale);
            }
        }
    }

    #[test]
    fn sums_of_signs_equal_products_within_half_a_step_each() {
        let number = |n: usize| (n.wrapping_mul(0x9E37_79B9) >> 8 & 0xffff) as f32 / 32_768.0 - 1.0;
        for dimension in [64, 100, 384] {
            let vector: Vec<f32> = (0..dimension).map(number).collect();
            let rotation = Rotation::draw(dimension, 5);
            let mut tables = Tables::default();
            tables.set(&Coder::Rabitq(rotation), &vector);
            let query = tables.of_list(0.25);
            assert_eq!(query.bias, 0.25);
            let codes: Vec<usize> = (0..tables.rotated.len() / DIMENSIONS).map(|n| n * 7 % VALUES).collect();
            let sum: f32 = codes.iter().enumerate().map(|(n, code)| f32::from(query.tables[n * VALUES + code])).sum();
            let sign = |d: usize| if codes[d / DIMENSIONS] >> (d % DIMENSIONS) & 1 == 1 { 1.0 } else { -1.0 };
            let exact: f32 = tables.rotated.iter().enumerate().map(|(d, x)| sign(d) * x).sum();
            let off = (sum * query.step + query.base - exact).abs();
            assert!(query.step > 0.0 && off <= 0.51 * query.step * codes.len() as f32, "{dimension}: {off}");
            // The subspace with the widest range uses all bytes.
            assert!(query.tables.contains(&0) && query.tables.contains(&255));
        }
    }

    #[test]
    fn zero_queries_score_like_their_lists() {
        let books = Codebooks::new(&[0.5; 4 * VALUES], 8).expect("finite");
        let mut tables = Tables::default();
        for vector in [[0.0; 4], [1e-45; 4], [1.0; 4]] {
            tables.set(&Coder::Pq4(books.clone()), &vector);
            let query = tables.of_list(0.25);
            let products = vector.iter().sum::<f32>() * 0.5;
            assert_eq!((query.step, query.bias), (0.0, 0.25 + products));
        }
    }
}
