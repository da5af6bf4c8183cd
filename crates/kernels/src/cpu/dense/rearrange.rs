//! Rearrangement of numbers in blocks: transposed matrices, and ranges of different lengths.

use super::super::isa::{Isa, Kernels};
use super::operands::{MapTarget, Operand};

/// List of indices in the form of transposed matrices or ranges, which are copied faster than single numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Matrices `[rows, columns]`, whose rows are `stride` apart, that are transposed; one per offset.
    Transposed {
        /// Rows of a matrix.
        rows: usize,
        /// Columns of a matrix.
        columns: usize,
        /// Distance between rows.
        stride: usize,
        /// Index of the first number of each matrix.
        firsts: Vec<u32>,
    },
    /// Ranges of consecutive numbers: index of the first number, and length.
    Runs(Vec<(u32, u32)>),
}

/// Minimum mean length of ranges, and minimum side of a matrix.
const RUN_MIN: usize = 4;

impl Order {
    /// Returns these indices as an order, if they transpose matrices or form ranges.
    pub fn of(index: &[u32]) -> Option<Order> {
        Order::transposed(index).or_else(|| Order::runs(index))
    }

    fn transposed(index: &[u32]) -> Option<Order> {
        let &[first, second, ..] = index else { return None };
        let stride = second.checked_sub(first).filter(|&stride| stride > 1)?;
        let rows = 1 + index.windows(2).take_while(|two| two[1] == two[0].wrapping_add(stride)).count();
        // The matrix has a further column if the next indices begin one number later.
        let columns = 1 + index
            .chunks(rows)
            .zip(index.chunks(rows).skip(1))
            .take_while(|(a, b)| a[0].checked_add(1) == Some(b[0]))
            .count();
        let columns = columns.min(stride as usize);
        if rows < RUN_MIN || columns < RUN_MIN || !index.len().is_multiple_of(rows * columns) {
            return None;
        }
        let firsts: Vec<u32> = index.iter().copied().step_by(rows * columns).collect();
        let is_same = index.chunks(rows * columns).zip(&firsts).all(|(matrix, &first)| {
            let wanted = (0..columns as u64)
                .flat_map(|c| (0..rows as u64).map(move |r| u64::from(first) + c + r * u64::from(stride)));
            wanted.eq(matrix.iter().map(|&n| u64::from(n)))
        });
        is_same.then_some(Order::Transposed { rows, columns, stride: stride as usize, firsts })
    }

    fn runs(index: &[u32]) -> Option<Order> {
        let runs: Vec<(u32, u32)> =
            index.chunk_by(|a, b| a.checked_add(1) == Some(*b)).map(|run| (run[0], run.len() as u32)).collect();
        (!runs.is_empty() && runs.len() * RUN_MIN <= index.len()).then_some(Order::Runs(runs))
    }

    /// Returns the count of numbers, and the end of the last number that is read.
    fn sizes(&self) -> (usize, usize) {
        match self {
            Order::Transposed { rows, columns, stride, firsts } => {
                let most = firsts.iter().max().map_or(0, |&first| first as usize + (rows - 1) * stride + columns);
                (firsts.len() * rows * columns, most)
            }
            Order::Runs(runs) => {
                let most = runs.iter().map(|&(first, count)| first as usize + count as usize).max();
                (runs.iter().map(|run| run.1 as usize).sum(), most.unwrap_or(0))
            }
        }
    }
}

impl Kernels {
    /// Copies the numbers of each row as `order` says. `input.row` and `target.stride` are the distances between rows.
    ///
    /// # Panics
    /// If a row is shorter than the order says.
    pub fn rearrange(self, order: &Order, input: &Operand<'_>, target: &mut MapTarget<'_>) {
        let (count, most) = order.sizes();
        for row in 0..target.rows {
            let from = &input.numbers[row * input.row..][..most];
            let to = &mut target.numbers[row * target.stride..][..count];
            match (self.isa, order) {
                // SAFETY: `Kernels` is made only after the features were found; the slices are as long as the order says.
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, Order::Transposed { rows, columns, stride, firsts }) => unsafe {
                    for (first, to) in firsts.iter().zip(to.chunks_exact_mut(rows * columns)) {
                        avx512::transpose(
                            from.as_ptr().add(*first as usize),
                            *stride,
                            to.as_mut_ptr(),
                            [*rows, *columns],
                        );
                    }
                },
                // SAFETY: `Kernels` is made only after the features were found; the slices are as long as the order says.
                #[cfg(target_arch = "x86_64")]
                (Isa::Avx512, Order::Runs(runs)) => unsafe { avx512::copy(runs, from.as_ptr(), to.as_mut_ptr()) },
                (_, Order::Transposed { rows, columns, stride, firsts }) => {
                    for (&first, to) in firsts.iter().zip(to.chunks_exact_mut(rows * columns)) {
                        for (column, to) in to.chunks_exact_mut(*rows).enumerate() {
                            let from = from[first as usize + column..].iter().step_by(*stride);
                            to.iter_mut().zip(from).for_each(|(to, x)| *to = *x);
                        }
                    }
                }
                (_, Order::Runs(runs)) => {
                    let mut to = to;
                    for &(first, count) in runs {
                        let (here, behind) = to.split_at_mut(count as usize);
                        here.copy_from_slice(&from[first as usize..][..count as usize]);
                        to = behind;
                    }
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::super::operands::LANES;
    use super::super::registers::lanes;

    /// Copies ranges one after the other.
    ///
    /// # Safety
    /// The CPU has AVX-512 F; all numbers of the ranges exist, and `to` has room for them.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn copy(runs: &[(u32, u32)], from: *const f32, mut to: *mut f32) {
        for &(first, count) in runs {
            let (first, count) = (first as usize, count as usize);
            for at in (0..count).step_by(LANES) {
                let mask = lanes(count - at);
                // SAFETY: masked loads and stores touch only numbers of the range.
                unsafe { _mm512_mask_storeu_ps(to.add(at), mask, _mm512_maskz_loadu_ps(mask, from.add(first + at))) };
            }
            to = to.wrapping_add(count);
        }
    }

    /// Transposes a matrix in tiles of 16 by 16.
    ///
    /// # Safety
    /// The CPU has AVX-512 F; the matrix exists, and there is room for the result.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, [rows, columns]: [usize; 2]) {
        for row in (0..rows).step_by(LANES) {
            for column in (0..columns).step_by(LANES) {
                let (height, width) = ((rows - row).min(LANES), (columns - column).min(LANES));
                let mut tile = [_mm512_setzero_ps(); LANES];
                for (n, tile) in tile.iter_mut().enumerate().take(height) {
                    // SAFETY: masked loads touch only numbers of the matrix.
                    *tile = unsafe { _mm512_maskz_loadu_ps(lanes(width), from.add((row + n) * stride + column)) };
                }
                let turned = turned(tile);
                for (n, &turned) in turned.iter().enumerate().take(width) {
                    // SAFETY: masked stores touch only numbers of the result.
                    unsafe { _mm512_mask_storeu_ps(to.add((column + n) * rows + row), lanes(height), turned) };
                }
            }
        }
    }

    /// Transposes 16 registers of 16 numbers: interleaves neighbouring rows, then pairs of rows, then quarters of
    /// registers.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn turned(tile: [__m512; LANES]) -> [__m512; LANES] {
        let mut two = tile;
        for n in 0..LANES / 2 {
            two[2 * n] = _mm512_unpacklo_ps(tile[2 * n], tile[2 * n + 1]);
            two[2 * n + 1] = _mm512_unpackhi_ps(tile[2 * n], tile[2 * n + 1]);
        }
        // Register 4 g + c holds, per quarter q, column 4 q + c of rows 4 g to 4 g + 3.
        let mut four = two;
        for g in 0..LANES / 4 {
            for half in 0..2 {
                let (a, b) = (_mm512_castps_pd(two[4 * g + half]), _mm512_castps_pd(two[4 * g + 2 + half]));
                four[4 * g + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                four[4 * g + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            }
        }
        let mut turned = four;
        for c in 0..4 {
            let [a, b, d, e] = [four[c], four[4 + c], four[8 + c], four[12 + c]];
            let (low, high) =
                (_mm512_shuffle_f32x4::<0b01_00_01_00>(a, b), _mm512_shuffle_f32x4::<0b01_00_01_00>(d, e));
            turned[c] = _mm512_shuffle_f32x4::<0b10_00_10_00>(low, high);
            turned[4 + c] = _mm512_shuffle_f32x4::<0b11_01_11_01>(low, high);
            let (low, high) =
                (_mm512_shuffle_f32x4::<0b11_10_11_10>(a, b), _mm512_shuffle_f32x4::<0b11_10_11_10>(d, e));
            turned[8 + c] = _mm512_shuffle_f32x4::<0b10_00_10_00>(low, high);
            turned[12 + c] = _mm512_shuffle_f32x4::<0b11_01_11_01>(low, high);
        }
        turned
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use proptest::prelude::*;

    fn check(order: &Order, index: &[u32]) {
        let most = index.iter().max().map_or(0, |&n| n as usize + 1);
        let (of_from, of_to) = (most + 2, index.len() + 3);
        let from: Vec<f32> = (0..of_from + most).map(|n| n as f32).collect();
        for kernels in Kernels::tried() {
            let mut to = vec![-1.0; 2 * of_to];
            let input = Operand { numbers: &from, row: of_from, outer: 0, inner: 1 };
            let mut target = MapTarget { numbers: &mut to, stride: of_to, rows: 2, outer: 1, inner: index.len() };
            kernels.rearrange(order, &input, &mut target);
            for (row, to) in to.chunks(of_to).enumerate() {
                let want: Vec<f32> = index.iter().map(|&n| from[row * of_from + n as usize]).collect();
                assert_eq!(&to[..index.len()], &want, "{} {order:?}", kernels.name());
                assert_eq!(&to[index.len()..], &[-1.0; 3]);
            }
        }
    }

    proptest! {
        #[test]
        fn transposed_matrices_are_those_of_their_indices(
            rows in 4u32..70, columns in 4u32..70, gap in 0u32..5, firsts in prop::collection::vec(0u32..500, 1..4),
        ) {
            // A matrix that begins at the end of the matrix before is taken for more columns of that matrix, and is not
            // transposed.
            prop_assume!(firsts.windows(2).all(|two| two[1] != two[0] + columns));
            let stride = columns + gap;
            let matrix = |first: &u32| {
                let first = *first;
                (0..columns).flat_map(move |c| (0..rows).map(move |r| first + r * stride + c)).collect::<Vec<_>>()
            };
            let index: Vec<u32> = firsts.iter().flat_map(matrix).collect();
            let order = Order::of(&index).unwrap();
            prop_assert!(matches!(order, Order::Transposed { .. }), "{:?}", order);
            check(&order, &index);
        }

        #[test]
        fn orders_copy_what_their_indices_say(
            runs in prop::collection::vec((0u32..300, 1u32..40), 1..12), step in 0u32..20, single in 0u32..4,
        ) {
            let mut index: Vec<u32> = runs.iter().flat_map(|&(first, count)| first..first + count).collect();
            index.extend((0..single).map(|n| 5 + n * step));
            if let Some(order) = Order::of(&index) {
                check(&order, &index);
            }
        }
    }

    /// The lower triangle of a matrix, as DLRM reads its products.
    #[test]
    fn triangles_are_runs() {
        let index: Vec<u32> = (0..16).flat_map(|n| (0..n).map(move |m| n * 16 + m)).collect();
        let order = Order::of(&index).unwrap();
        assert!(matches!(&order, Order::Runs(runs) if runs.len() == 15));
        check(&order, &index);
        assert_eq!(Order::of(&[9, 7, 5, 3, 1, 0, 2]), None);
    }
}
