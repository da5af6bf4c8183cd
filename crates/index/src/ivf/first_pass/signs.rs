//! RaBitQ encoder with one bit per dimension: signs of the rotated residual, and one factor per item.
//!
//! With `r` a rotated residual of W numbers and `s` their signs, `q·r` is estimated by `f q·s`, where `f = |r|² / Σ|r_i|`. The
//! estimate is unbiased over random rotations. The error of the estimate rarely exceeds `ε |q| |r| √((1 - a²) / a²) / √(W - 1)`,
//! where `a = Σ|r_i| / (√W |r|)` is the cosine between the signs and the residual: for `ε = 1.9` in about one of twenty
//! rotations. `a` is about 0.8, so the error is about `0.75 |q| |r| / √W`.
//!
//! Four signs form a code, and the query's tables hold the product of each of the 16 sign patterns. The scan of product
//! codes then works unchanged. This scan needs half the instructions of a scan that counts the bits of a query in four
//! bit planes, and rounds the query less.
//!
//! Source: RaBitQ (Gao & Long, SIGMOD 2024).

use super::rotation::Rotation;

/// Dimensions per code.
pub(super) const DIMENSIONS: usize = 4;

/// Encoder with buffers that are reused between items.
pub(super) struct SignEncoder<'a> {
    rotation: &'a Rotation,
    rotated: Vec<f32>,
    codes: Vec<u8>,
}

impl<'a> SignEncoder<'a> {
    pub(super) fn new(rotation: &'a Rotation) -> Self {
        SignEncoder { rotation, rotated: Vec::new(), codes: Vec::new() }
    }

    /// Encodes an item: codes `[W / 4]` and factor.
    pub(super) fn encode(&mut self, row: &[f32], centroid: &[f32]) -> (&[u8], f32) {
        let SignEncoder { rotation, rotated, codes } = self;
        rotation.rotate(row.iter().zip(centroid).map(|(x, c)| x - c), rotated);
        let code = |four: &[f32]| four.iter().rev().fold(0, |code, x| code << 1 | u8::from(*x >= 0.0));
        codes.clear();
        codes.extend(rotated.chunks_exact(DIMENSIONS).map(code));
        (codes, factor(rotated))
    }
}

/// Returns the factor for products with the signs of `rotated`.
fn factor(rotated: &[f32]) -> f32 {
    let sum = |of: fn(f64) -> f64| rotated.iter().map(|&x| of(f64::from(x))).sum::<f64>();
    let factor = sum(|x| x * x) / sum(f64::abs);
    if factor.is_finite() { factor as f32 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ivf::tests::vectors;

    /// Computes the estimate of a product by the definition of the format.
    fn estimate(rotation: &Rotation, query: &[f32], row: &[f32]) -> f64 {
        let mut rotated = Vec::new();
        rotation.rotate(query.iter().copied(), &mut rotated);
        let mut encoder = SignEncoder::new(rotation);
        let (codes, factor) = encoder.encode(row, &vec![0.0; row.len()]);
        let sign = |d: usize| if codes[d / 4] >> (d % 4) & 1 == 1 { 1.0 } else { -1.0 };
        let product: f64 = rotated.iter().enumerate().map(|(d, x)| sign(d) * f64::from(*x)).sum();
        f64::from(factor) * product
    }

    fn product(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(x, y)| f64::from(x * y)).sum()
    }

    #[test]
    fn estimates_are_right_on_average_and_as_far_off_as_the_bound_says() {
        const DRAWS: u64 = 200;
        for dimension in [256, 384] {
            let values = vectors(6, dimension, 7 + dimension as u64);
            let rows: Vec<&[f32]> = values.chunks_exact(dimension).collect();
            let (mut beyond, mut all) = (0, 0);
            for pair in rows.chunks_exact(2) {
                // A query near its item, a distant one, and one on the opposite side.
                for share in [0.9f32, 0.0, -0.5] {
                    let row = pair[0];
                    let query: Vec<f32> =
                        row.iter().zip(pair[1]).map(|(x, y)| share * x + (1.0 - share.abs()) * y).collect();
                    let (exact, lengths) = (product(&query, row), (product(&query, &query) * product(row, row)).sqrt());
                    let (mut sum, mut squares) = (0.0, 0.0);
                    for seed in 0..DRAWS {
                        let rotation = Rotation::draw(dimension, seed);
                        let mut rotated = Vec::new();
                        rotation.rotate(row.iter().copied(), &mut rotated);
                        let width = rotated.len() as f64;
                        let along = rotated.iter().map(|x| f64::from(x.abs())).sum::<f64>()
                            / (width * product(row, row)).sqrt();
                        let bound = 1.9 * lengths * ((1.0 - along * along) / (along * along) / (width - 1.0)).sqrt();
                        let off = estimate(&rotation, &query, row) - exact;
                        (sum, squares) = (sum + off, squares + off * off);
                        beyond += usize::from(off.abs() > bound);
                        all += 1;
                    }
                    let deviation = (squares / DRAWS as f64).sqrt() / (DRAWS as f64).sqrt();
                    assert!((sum / DRAWS as f64).abs() < 4.0 * deviation, "{dimension} {share}: {sum} {deviation}");
                }
            }
            assert!((beyond as f64) < 0.075 * all as f64, "{dimension}: {beyond} of {all}");
        }
    }

    #[test]
    fn an_item_at_its_centroid_has_no_factor() {
        let rotation = Rotation::draw(5, 1);
        let mut encoder = SignEncoder::new(&rotation);
        assert_eq!(encoder.encode(&[3.0; 5], &[3.0; 5]).1, 0.0);
        let (codes, factor) = encoder.encode(&[1e17, -1e17, 0.0, 0.0, 1.0], &[0.0; 5]);
        assert!(codes.len() == 16 && codes.iter().all(|code| *code < 16) && factor.is_finite() && factor > 0.0);
    }
}
