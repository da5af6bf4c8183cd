//! Items to codes: the values whose sum is near the residual, and nearer yet along the item.
//!
//! A query that an item is a good answer to lies about in the item's direction, so that of the error `e = r - r'` the part
//! along the item, `e·x / |x|`, moves its score most. What is made small is `|e|² + (ETA - 1) (e·x / |x|)²`: first each subspace
//! takes its nearest value, then each in turn the best one beside the others.

use rayon::prelude::*;

use super::books::{Codebooks, VALUES, least};
use super::options::OF_LINE;
use crate::device::cpu::kernels::{BLOCK, LINE};

/// So many times as much does an error along the item weigh: 2 to 3 found most of words of GloVe and of sentences.
const ETA: f32 = 2.5;
/// Rounds in which subspaces choose beside the others.
const ROUNDS: usize = 2;

/// The codes of all slots, `[blocks, M / 8, 16, 4]`; `slot` gives the row and the centroid of one that holds an item.
pub(in crate::ivf) fn blocked<'a>(
    books: &Codebooks,
    slots: usize,
    slot: impl Fn(usize) -> Option<(&'a [f32], &'a [f32])> + Sync,
) -> Vec<u8> {
    let bytes = books.subspaces / OF_LINE * LINE;
    let mut codes = vec![0u8; slots / BLOCK * bytes];
    codes.par_chunks_exact_mut(bytes).enumerate().for_each_init(
        || Encoder::new(books),
        |encoder, (block, codes)| {
            for lane in 0..BLOCK {
                if let Some((row, centroid)) = slot(block * BLOCK + lane) {
                    for (subspace, &code) in encoder.encode(row, centroid).iter().enumerate() {
                        let (line, place) = (subspace / OF_LINE, subspace % OF_LINE);
                        codes[line * LINE + lane * 4 + place % 4] |= code << (place / 4 * 4);
                    }
                }
            }
        },
    );
    codes
}

/// Finds codes, in memory that is kept from item to item.
struct Encoder<'a> {
    books: &'a Codebooks,
    /// `[M, 16]`: of the residual's error in each subspace the square, and the part along the item.
    squares: Vec<[f32; VALUES]>,
    along: Vec<[f32; VALUES]>,
    codes: Vec<u8>,
}

impl<'a> Encoder<'a> {
    fn new(books: &'a Codebooks) -> Self {
        let room = || vec![[0f32; VALUES]; books.subspaces];
        Encoder { books, squares: room(), along: room(), codes: vec![0; books.subspaces] }
    }

    /// The codes of an item, `[M]`.
    fn encode(&mut self, row: &[f32], centroid: &[f32]) -> &[u8] {
        let Encoder { books, squares, along, codes } = self;
        let length = row.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
        let mut error_along = 0f32;
        for (subspace, (squares, along)) in squares.iter_mut().zip(along.iter_mut()).enumerate() {
            (*squares, *along) = ([0.0; VALUES], [0.0; VALUES]);
            for d in books.bounds(subspace) {
                let (residual, direction) = (row[d] - centroid[d], row[d] / length);
                for n in 0..VALUES {
                    let error = residual - books.values[d][n];
                    squares[n] += error * error;
                    along[n] += error * direction;
                }
            }
            let nearest = least(squares);
            codes[subspace] = nearest as u8;
            error_along += along[nearest];
        }
        for _ in 0..ROUNDS {
            let mut is_settled = true;
            for ((code, squares), along) in codes.iter_mut().zip(&*squares).zip(&*along) {
                let others = error_along - along[usize::from(*code)];
                let cost = |n: usize| squares[n] + (ETA - 1.0) * (others + along[n]) * (others + along[n]);
                let best = least(&std::array::from_fn(cost));
                error_along = others + along[best];
                is_settled &= *code == best as u8;
                *code = best as u8;
            }
            if is_settled {
                break;
            }
        }
        codes
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::ivf::tests::vectors;

    #[test]
    fn scores_of_near_queries_are_closer_than_by_the_nearest_values() {
        let (count, dimension) = (2000, 24);
        let rows = vectors(count, dimension, 4);
        let centroid = vec![0.01f32; dimension];
        let residuals: Vec<f32> = rows.iter().map(|x| x - 0.01).collect();
        let books = Codebooks::train(&residuals, dimension, 16, 1);
        assert_eq!(books, Codebooks::train(&residuals, dimension, 16, 1), "the same from the same seed");
        let mut encoder = Encoder::new(&books);
        let (mut chosen, mut nearest) = (0f64, 0f64);
        for row in rows.chunks_exact(dimension) {
            let error = |codes: &[u8]| -> f64 {
                let of = |subspace: usize| {
                    let value = |d: usize| books.values[d][usize::from(codes[subspace])];
                    books.bounds(subspace).map(|d| f64::from((row[d] - centroid[d] - value(d)) * row[d])).sum::<f64>()
                };
                (0..16).map(of).sum::<f64>().powi(2)
            };
            chosen += error(encoder.encode(row, &centroid));
            let nearest_codes: Vec<u8> = encoder.squares.iter().map(|squares| least(squares) as u8).collect();
            nearest += error(&nearest_codes);
        }
        assert!(chosen < 0.5 * nearest, "{chosen} against {nearest}");
    }

    #[test]
    fn vectors_of_nothing_and_of_fewer_dimensions_than_subspaces_have_codes() {
        let rows = [0f32; 6];
        let books = Codebooks::train(&rows, 3, 8, 1);
        let codes = blocked(&books, 16, |slot| (slot < 2).then_some((&rows[..3], &[0.0; 3][..])));
        assert_eq!(codes, vec![0; 64]);
    }
}
