//! Pooled bags of every row format against the CPU's plain loops.

use half::{bf16, f16};
use sterling::device::cpu::Kernels;
use sterling::device::cpu::pool::{self, BagSums, Bags, RowFormat, Rows};
use sterling::device::cuda::ops::bags::{IdBags, SumsTo, TableRows, pool as pool_on};

use crate::emulation::{Random, device};

const ROWS: usize = 40;

/// Rows of small numbers, random codes.
fn rows_of(format: RowFormat, width: usize, random: &mut Random) -> Vec<u8> {
    let row_bytes = format.row_bytes(width).unwrap();
    let mut bytes: Vec<u8> = (0..ROWS * row_bytes).map(|_| random.next() as u8).collect();
    for row in bytes.chunks_exact_mut(row_bytes) {
        match format {
            RowFormat::F32 => row.as_chunks_mut::<4>().0.iter_mut().for_each(|b| *b = random.number().to_le_bytes()),
            RowFormat::F16 => {
                row.as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = f16::from_f32(random.number()).to_le_bytes());
            }
            RowFormat::Bf16 => {
                row.as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = bf16::from_f32(random.number()).to_le_bytes());
            }
            _ => {
                let head = row[..4].as_chunks_mut::<2>().0;
                head.iter_mut().for_each(|b| *b = f16::from_f32(random.number() / 64.0).to_le_bytes());
            }
        }
    }
    bytes
}

#[test]
fn bags_of_every_format_and_width_are_those_of_the_cpu() {
    let device = device();
    let mut random = Random::new(3);
    // Wide, narrow, and such that no load of four numbers is whole.
    for format in RowFormat::ALL {
        let widths: &[usize] = if format.bits() >= 8 { &[4, 64, 260, 1, 7, 33] } else { &[4, 64, 260, 12] };
        for (n, &width) in widths.iter().enumerate() {
            let bytes = rows_of(format, width, &mut random);
            let mut offsets = vec![0usize];
            for length in [0, 1, 5, 33, 2, 70, 0, 3, 9, 1, 4, 0, 2, 6, 1, 31, 2, 3, 5] {
                offsets.push(offsets[offsets.len() - 1] + length);
            }
            let count = offsets[offsets.len() - 1];
            let ids: Vec<i64> = (0..count).map(|_| random.below(ROWS + 2) as i64 - 2).collect();
            let weights = random.numbers(count);
            let (stride, column, weighted, is_mean) = (width + 5, 3, n % 2 == 0, n % 3 == 0);
            let rows = Rows::new(format, width, &bytes).unwrap();
            let asked = Bags { ids: &ids, offsets: &offsets, weights: weighted.then_some(&weights), mean: is_mean };
            let mut want = vec![7f32; (offsets.len() - 1) * stride];
            let mut sums = BagSums { data: &mut want, stride, column };
            pool::pool(Kernels::named("portable").unwrap(), &rows, &asked, &mut sums);

            let table = TableRows { bytes: device.copy(&bytes).unwrap(), format, width };
            let narrow: Vec<u32> = offsets.iter().map(|&o| o as u32).collect();
            let (ids, offsets) = (device.copy(&ids).unwrap(), device.copy(&narrow).unwrap());
            let weights = device.copy(&weights).unwrap();
            let data = device.copy(&vec![7f32; want.len()]).unwrap();
            let bags = IdBags { ids: &ids, offsets: &offsets, weights: weighted.then_some(&weights), is_mean };
            pool_on(&device, &table, &bags, &SumsTo { data: &data, stride, column }).unwrap();
            for (at, (got, want)) in data.to_vec().unwrap().iter().zip(&want).enumerate() {
                let place = (at / stride, at % stride);
                assert!(
                    (got - want).abs() <= 2e-5 * want.abs().max(1.0),
                    "{format:?} {width} {place:?}: {got}, {want}"
                );
            }
        }
    }
}
