//! Dense loops for any instruction set.

use super::maps;
use super::normalize::{self, Norm};
use super::operands::{
    Binary, EqualFold, Fold, Form, Keys, LANES, MapTarget, Operand, PANEL, PairRows, Product, Unary, pair,
};
use super::recurrent::{self, CellStep};

/// Number of rows of a tile.
const ROWS: usize = 4;

pub(super) fn product(product: &Product<'_>, out: &mut [f32], stride: usize) {
    for first in (0..product.rows).step_by(ROWS) {
        for column in (0..product.columns).step_by(LANES) {
            match product.rows - first {
                1 => tile::<1>(product, out, stride, first, column),
                2 => tile::<2>(product, out, stride, first, column),
                3 => tile::<3>(product, out, stride, first, column),
                _ => tile::<ROWS>(product, out, stride, first, column),
            }
        }
    }
}

fn tile<const M: usize>(product: &Product<'_>, out: &mut [f32], stride: usize, first: usize, column: usize) {
    let mut sums = [[0f32; LANES]; M];
    if !product.bias.is_empty() {
        sums.iter_mut().for_each(|sum| sum.copy_from_slice(&product.bias[column..column + LANES]));
    }
    for part in product.parts {
        let start = column / PANEL * part.weights.panel_stride + column % PANEL;
        for k in 0..part.depth {
            let weights = &part.weights.numbers[start + k * part.weights.row_stride..][..LANES];
            for (m, sum) in sums.iter_mut().enumerate() {
                let x = part.rows[(first + m) * part.stride + k];
                sum.iter_mut().zip(weights).for_each(|(sum, w)| *sum += x * w);
            }
        }
    }
    let width = LANES.min(product.columns - column);
    for (m, sum) in sums.iter_mut().enumerate() {
        if product.relu {
            sum.iter_mut().for_each(|x| *x = if *x < 0.0 { 0.0 } else { *x });
        }
        out[(first + m) * stride + column..][..width].copy_from_slice(&sum[..width]);
    }
}

pub(super) fn column(product: &Product<'_>, out: &mut [f32], stride: usize) {
    maps::column::<false>(product, out, stride);
}

pub(super) fn map1(f: Unary, input: &Operand<'_>, target: &mut MapTarget<'_>) {
    maps::map1::<false>(f, input, target);
}

pub(super) fn map2(f: Binary, a: &Operand<'_>, b: &Operand<'_>, target: &mut MapTarget<'_>) {
    maps::map2(f, a, b, target);
}

pub(super) fn fold(f: Fold, input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>) {
    maps::fold(f, input, count, target);
}

pub(super) fn softmax(numbers: &mut [f32], width: usize) {
    normalize::softmax::<false>(numbers, width);
}

pub(super) fn norm(norm: &Norm<'_>, input: &Operand<'_>, target: &mut MapTarget<'_>) {
    normalize::norm(norm, input, target);
}

pub(super) fn fold_equal(keys: &Keys<'_>, folds: &[EqualFold<'_>], out: &mut [f32], stride: usize) {
    maps::fold_equal(keys, folds, out, stride);
}

pub(super) fn narrow(input: &Operand<'_>, count: usize, target: &mut MapTarget<'_>) {
    maps::narrow(input, count, target);
}

pub(super) fn pack_narrow(matrix: &[f32], depth: usize, columns: usize, rows: PairRows, out: &mut [f32]) {
    maps::pack_narrow(matrix, depth, columns, rows, out);
}

pub(super) fn reset(step: &CellStep<'_>, h: &[f32], to: &mut [f32]) {
    recurrent::reset::<false>(step, h, to);
}

pub(super) fn advance(step: &CellStep<'_>, is_active: &dyn Fn(usize) -> bool, h: &mut [f32], c: &mut [f32]) {
    recurrent::advance::<false>(step, is_active, h, c);
}

/// Product of factors in bf16 pairs.
pub(super) fn product_of_pairs(product: &Product<'_>, out: &mut [f32], stride: usize) {
    let halves = |x: f32| [f32::from_bits(x.to_bits() << 16), f32::from_bits(x.to_bits() & 0xffff_0000)];
    let sum = |row: usize, column: usize| {
        let mut sum = product.bias.get(column).copied().unwrap_or(0.0);
        for part in product.parts {
            let start = column / PANEL * part.weights.panel_stride + column % PANEL;
            for k in 0..part.depth {
                let x = halves(part.rows[row * part.stride + k]);
                let w = halves(part.weights.numbers[start + k * part.weights.row_stride]);
                sum += x[0] * w[0] + x[1] * w[1];
            }
        }
        if product.relu && sum < 0.0 { 0.0 } else { sum }
    };
    for row in 0..product.rows {
        match product.result {
            Form::Single => (0..product.columns).for_each(|column| out[row * stride + column] = sum(row, column)),
            Form::Pairs => {
                for n in 0..Form::Pairs.room(product.columns) {
                    let second = if 2 * n + 1 < product.columns { sum(row, 2 * n + 1) } else { 0.0 };
                    out[row * stride + n] = pair(sum(row, 2 * n), second);
                }
            }
        }
    }
}
