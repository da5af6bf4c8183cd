//! Tests of formats and their inverses, and of every kernel against decoding row by row.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::cpu::Kernels;

#[test]
fn row_bytes_and_width_are_inverse() {
    for format in RowFormat::ALL {
        for width in (4..300).step_by(4) {
            let bytes = format.row_bytes(width).expect("multiples of four fill bytes");
            assert_eq!(format.width_of(bytes).expect("such a row"), width);
        }
        assert!(format.row_bytes(0).is_err() && format.row_bytes(usize::MAX).is_err());
        assert!(format.width_of(0).is_err() && format.width_of(format.head_bytes()).is_err());
        assert_eq!(RowFormat::named(format.name()).expect("its own name"), format);
    }
    assert!(RowFormat::Int4.row_bytes(3).is_err() && RowFormat::Int2.row_bytes(6).is_err());
    assert!(RowFormat::F32.width_of(6).is_err() && RowFormat::named("int3").is_err());
    assert!(Rows::new(RowFormat::F32, 2, &[0; 12]).is_err());
}

proptest! {
    /// Checks that every kernel sums like row-by-row decoding, for every format, width and shape of bags.
    #[test]
    fn kernels_agree_with_the_naive_sum(
        format in prop::sample::select(RowFormat::ALL.to_vec()),
        quarters in 1usize..90,
        bags in prop::collection::vec(prop::collection::vec((-1i64..50, -2f32..2.0), 0..40), 0..6),
        weighted: bool,
        mean: bool,
        seed: u64,
    ) {
        let width = quarters * 4;
        let row_bytes = format.row_bytes(width).expect("a multiple of four");
        let mut state = seed | 1;
        let mut next = || { state ^= state << 13; state ^= state >> 7; state ^= state << 17; state };
        let mut bytes: Vec<u8> = (0..50 * row_bytes).map(|_| next() as u8).collect();
        for row in bytes.chunks_exact_mut(row_bytes) {
            // Random bytes are valid codes; plain numbers and row headers are small and finite.
            let mut small = || (next() % 4096) as f32 / 1024.0 - 2.0;
            match format {
                RowFormat::F32 => row.as_chunks_mut::<4>().0.iter_mut().for_each(|b| *b = small().to_le_bytes()),
                RowFormat::Bf16 => row.as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = bf16::from_f32(small()).to_le_bytes()),
                RowFormat::F16 => row.as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = f16::from_f32(small()).to_le_bytes()),
                _ => row[..4].as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = f16::from_f32(small() / 64.0).to_le_bytes()),
            }
        }
        let rows = Rows::new(format, width, &bytes).expect("whole rows");
        let ids: Vec<i64> = bags.iter().flatten().map(|(id, _)| *id).collect();
        let weights: Vec<f32> = bags.iter().flatten().map(|(_, w)| *w).collect();
        let mut offsets = vec![0];
        bags.iter().for_each(|b| offsets.push(offsets[offsets.len() - 1] + b.len()));
        let requested = Bags { ids: &ids, offsets: &offsets, weights: weighted.then_some(&weights[..]), mean };
        let (stride, column) = (width + 5, 3);
        for kernels in Kernels::all() {
            let mut data = vec![7f32; bags.len() * stride];
            pool(kernels, &rows, &requested, &mut BagSums { data: &mut data, stride, column });
            for (b, bag) in bags.iter().enumerate() {
                let mut sum = vec![0f64; width];
                let mut size = 1e-3;
                for (id, weight) in bag.iter().filter(|(id, _)| *id >= 0) {
                    let mut row = vec![0f32; width];
                    rows.decode(*id as usize, &mut row);
                    let weight = if weighted { f64::from(*weight) } else { 1.0 };
                    size += row.iter().fold(0f64, |m, x| m.max(f64::from(x.abs()))) * weight.abs();
                    sum.iter_mut().zip(&row).for_each(|(s, x)| *s += weight * f64::from(*x));
                }
                if mean && !bag.is_empty() {
                    sum.iter_mut().for_each(|s| *s /= bag.len() as f64);
                }
                let got = &data[b * stride..][..stride];
                prop_assert!(got[..column].iter().chain(&got[column + width..]).all(|x| *x == 7.0));
                for (x, s) in got[column..column + width].iter().zip(&sum) {
                    prop_assert!((f64::from(*x) - s).abs() < 1e-5 * size, "{} {:?}: {x} for {s}", kernels.name(), format);
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "beyond the rows")]
fn an_id_beyond_the_rows_panics() {
    let rows = Rows::new(RowFormat::F32, 1, &[0; 8]).expect("two rows");
    let bags = Bags { ids: &[2], offsets: &[0, 1], weights: None, mean: false };
    let kernels = Kernels::all()[0];
    pool(kernels, &rows, &bags, &mut BagSums { data: &mut [0.0], stride: 1, column: 0 });
}
