//! Self-test of the kernels at start: compares a small product and a small scan with the portable loops. All numbers are
//! integers, so that sums are exact in any order.

use super::dense::{Form, Lines, MapTarget, Operand, PANEL, Part, Product, STEP, Weights, pack_pairs};
use super::isa::{Isa, Kernels};
use super::kernels::{BLOCK, Blocks, Int8Query, Lane, Staging};

/// Compares `kernels` with the portable loops.
///
/// # Errors
/// The name of the computation that differs.
pub(super) fn hold(kernels: Kernels) -> Result<(), &'static str> {
    let portable = Kernels::of(Isa::Portable);
    if product(kernels) != product(portable) {
        return Err("the product in bf16 differs from that of the portable loops");
    }
    if scans(kernels) != scans(portable) {
        return Err("the scans for several queries differ from those of the portable loops");
    }
    Ok(())
}

/// Returns integers from -7 to 7, unordered.
fn numbers(count: usize) -> impl Iterator<Item = i8> {
    (0..count).map(|n| (n * 37 % 101 % 15) as i8 - 7)
}

fn singles(count: usize) -> Vec<f32> {
    numbers(count).map(f32::from).collect()
}

/// Product over tiles of two heights and both widths, with parts of two depths that end in complete and in partial
/// steps.
fn product(kernels: Kernels) -> Vec<f32> {
    const ROWS: usize = 35;
    const COLUMNS: usize = 41;
    const DEPTHS: [usize; 2] = [70, 37];
    let rows = DEPTHS.map(|depth| {
        let (numbers, stride) = (singles(ROWS * depth), Form::Pairs.room(depth).next_multiple_of(STEP));
        let mut pairs = vec![0.0; ROWS * stride];
        let input = Operand { numbers: &numbers, row: depth, outer: 0, inner: 1 };
        let mut target = MapTarget { numbers: &mut pairs, stride, rows: ROWS, outer: 1, inner: stride };
        kernels.narrow(&input, depth, &mut target);
        pairs
    });
    let weights = DEPTHS.map(|depth| pack_pairs(&singles(depth * COLUMNS), depth, COLUMNS));
    let bias = Lines::of(&singles(COLUMNS));
    let parts = [0, 1].map(|n| {
        let depth = Form::Pairs.room(DEPTHS[n]);
        let stride = depth.next_multiple_of(STEP);
        let weights = Weights { numbers: weights[n].numbers(), row_stride: PANEL, panel_stride: stride * PANEL };
        Part { rows: &rows[n], stride, depth, weights }
    });
    let (bias, relu, factors) = (bias.numbers(), true, Form::Pairs);
    let product = Product { rows: ROWS, columns: COLUMNS, parts: &parts, bias, relu, factors, ..Product::default() };
    let mut out = vec![0.0; ROWS * COLUMNS];
    kernels.product(&product, &mut out, COLUMNS);
    out
}

/// Results of scans of several widths for eight queries and for one more; AMX tiles scan the second four queries.
fn scans(kernels: Kernels) -> Vec<(Vec<f32>, Vec<u32>)> {
    const QUERIES: usize = 9;
    const ITEMS: usize = 40;
    let mut retained = Vec::new();
    for groups in [7, 30, 64, 75] {
        let count = ITEMS.div_ceil(BLOCK);
        let codes: Vec<u8> = numbers(count * groups * 64).map(|x| x.wrapping_mul(18) as u8 ^ 0x80).collect();
        let scales = vec![1.0; count * BLOCK];
        let rows: Vec<i8> = numbers(2 * QUERIES * groups * 4).map(|x| x.wrapping_mul(18)).collect();
        let mut rooms = vec![(vec![0.0; count * BLOCK + BLOCK], vec![0; count * BLOCK + BLOCK]); QUERIES];
        let queries = rows.chunks_exact(2 * groups * 4).map(|rows| {
            let rows: [&[i8]; 2] = rows.split_at(groups * 4).into();
            let corrections = rows.map(|row| 128 * row.iter().map(|&q| i32::from(q)).sum::<i32>());
            Int8Query { rows, corrections, scale: 1.0 }
        });
        let mut lanes: Vec<Lane<'_>> = rooms
            .iter_mut()
            .zip(queries)
            .map(|((scores, slots), query)| Lane { query, threshold: 0.0, staging: Staging { scores, slots, len: 0 } })
            .collect();
        let blocks = Blocks { codes: &codes, scales: &scales, groups, items: ITEMS, first_slot: 3, next: &[] };
        kernels.scan_many(&blocks, &mut lanes);
        retained.extend(lanes.iter().map(|Lane { staging, .. }| {
            (staging.scores[..staging.len].to_vec(), staging.slots[..staging.len].to_vec())
        }));
    }
    retained
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_with_other_results_are_not_used() {
        for kernels in Kernels::tried() {
            assert_eq!(hold(kernels), Ok(()), "{}", kernels.name());
        }
        let scanned: usize = scans(Kernels::best()).iter().map(|(scores, _)| scores.len()).sum();
        assert!((360..1080).contains(&scanned), "{scanned} of 1440");
        assert!(hold(Kernels::emulated(true)).is_err_and(|why| why.contains("product")));
        assert_ne!(scans(Kernels::emulated(true)), scans(Kernels::of(Isa::Portable)));
    }
}
