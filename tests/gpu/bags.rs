//! Pooled bags of every row format, compared with plain loops on the CPU.

use half::{bf16, f16};
use sterling::cuda::ops::bags::{IdBags, SlotKeys, SumsTo, TableRows, pool as pool_on, pool_slots};
use sterling::cuda::ops::rows::SlotRows;
use sterling::kernels::cpu::Kernels;
use sterling::kernels::cpu::pool::{self, BagSums, Bags, RowFormat, Rows};

use crate::emulation::{Random, device};

const ROWS: usize = 40;

/// Returns `rows` rows of small numbers, as random codes.
pub fn rows_of(format: RowFormat, width: usize, rows: usize, random: &mut Random) -> Vec<u8> {
    let row_bytes = format.row_bytes(width).unwrap();
    let mut bytes: Vec<u8> = (0..rows * row_bytes).map(|_| random.next() as u8).collect();
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
fn bags_of_every_format_and_width_equal_those_of_the_cpu() {
    let device = device();
    let mut random = Random::new(3);
    // Wide, narrow, and widths that are no multiple of four numbers per load.
    for format in RowFormat::ALL {
        let widths: &[usize] = if format.bits() >= 8 { &[4, 64, 260, 1, 7, 33] } else { &[4, 64, 260, 12] };
        for (n, &width) in widths.iter().enumerate() {
            let bytes = rows_of(format, width, ROWS, &mut random);
            let mut offsets = vec![0usize];
            for length in [0, 1, 5, 33, 2, 70, 0, 3, 9, 1, 4, 0, 2, 6, 1, 31, 2, 3, 5] {
                offsets.push(offsets[offsets.len() - 1] + length);
            }
            let count = offsets[offsets.len() - 1];
            let ids: Vec<i64> = (0..count).map(|_| random.below(ROWS + 2) as i64 - 2).collect();
            let weights = random.numbers(count);
            let (stride, column, weighted, is_mean) = (width + 5, 3, n % 2 == 0, n % 3 == 0);
            let rows = Rows::new(format, width, &bytes).unwrap();
            let requested = Bags { ids: &ids, offsets: &offsets, weights: weighted.then_some(&weights), mean: is_mean };
            let mut want = vec![7f32; (offsets.len() - 1) * stride];
            let mut sums = BagSums { data: &mut want, stride, column };
            pool::pool(Kernels::named("portable").unwrap(), &rows, &requested, &mut sums);

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

/// Candidates of two queries: each slot takes the row of its own number, one that it names, or several.
#[test]
fn rows_of_slots_are_those_that_the_cpu_pools() {
    let (device, mut random) = (device(), Random::new(5));
    let (stride, counts) = (70, [70u32, 9]);
    for (n, format) in RowFormat::ALL.into_iter().enumerate() {
        let width = [4, 64, 12, 260, 20, 8][n];
        let bytes = rows_of(format, width, ROWS, &mut random);
        let table = TableRows { bytes: device.copy(&bytes).unwrap(), format, width };
        let rows = Rows::new(format, width, &bytes).unwrap();
        let slots: Vec<u32> = (0..2 * stride).map(|_| random.below(ROWS) as u32).collect();
        let keys_of_slots: Vec<Vec<i64>> = (0..ROWS)
            .map(|slot| (0..[1, 0, 3, 40][slot % 4]).map(|_| random.below(ROWS + 1) as i64 - 1).collect())
            .collect();
        let key = |row: &i64| u32::try_from(*row).unwrap_or(SlotKeys::NONE);
        let single: Vec<u32> = (0..ROWS).map(|slot| key(&(slot as i64 * 7 % 41 - 1))).collect();
        let several: Vec<u32> = keys_of_slots.iter().flatten().map(key).collect();
        let ends = keys_of_slots.iter().scan(0, |sum, keys| {
            *sum += keys.len() as u32;
            Some(*sum)
        });
        let offsets: Vec<u32> = std::iter::once(0).chain(ends).collect();
        let copied = |numbers: &[u32]| Some(device.copy(numbers).unwrap());
        let is_mean = n % 2 == 1;
        type RowsOfSlot<'a> = &'a dyn Fn(usize) -> Vec<i64>;
        let ways: [(SlotKeys, RowsOfSlot<'_>); 3] = [
            (SlotKeys::default(), &|slot| vec![slot as i64]),
            (SlotKeys { keys: copied(&single), ..SlotKeys::default() }, &|slot| vec![slot as i64 * 7 % 41 - 1]),
            (SlotKeys { keys: copied(&several), offsets: copied(&offsets), is_mean }, &|slot| {
                keys_of_slots[slot].clone()
            }),
        ];
        let (slots_on, counts_on) = (device.copy(&slots).unwrap(), device.copy(&counts).unwrap());
        let of = SlotRows { slots: &slots_on, counts: &counts_on, stride };
        for (way, (keys, rows_of_slot)) in ways.iter().enumerate() {
            let (out_stride, column) = (width + 3, 2);
            let out = device.copy(&vec![7f32; 2 * stride * out_stride]).unwrap();
            let to = SumsTo { data: &out, stride: out_stride, column };
            pool_slots(&device, &table, keys, &of, &to).unwrap();
            assert!(pool_slots(&device, &table, keys, &of, &SumsTo { column: 4, ..to }).is_err());
            let out = out.to_vec().unwrap();
            for (place, got) in out.chunks_exact(out_stride).enumerate() {
                let mut want = vec![7f32; out_stride];
                if place % stride < counts[place / stride] as usize {
                    let ids = rows_of_slot(slots[place] as usize);
                    let bags = Bags { ids: &ids, offsets: &[0, ids.len()], weights: None, mean: keys.is_mean };
                    let mut sums = BagSums { data: &mut want, stride: out_stride, column };
                    pool::pool(Kernels::named("portable").unwrap(), &rows, &bags, &mut sums);
                }
                let near = got.iter().zip(&want).all(|(got, want)| (got - want).abs() <= 2e-5 * want.abs().max(1.0));
                assert!(near, "{format:?}, way {way}, place {place}: {got:?}, expected {want:?}");
            }
        }
    }
}
