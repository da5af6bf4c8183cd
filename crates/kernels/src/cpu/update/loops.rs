//! The loops over blocks of 16 columns, compiled for each instruction set by `dispatch`.
//!
//! They are plain loops of fixed length, which the compiler turns into vectors. Rust never contracts a product and a sum, and additions,
//! products, quotients and roots round alike in vectors and alone: all instruction sets give the same bits.

use super::dispatch::{GradientRows, Stretches};
use super::groups::GroupsPart;
use super::rules::{Decay, RuleKind, Step};
use crate::memory::prefetch_range;
use sterling_core::limits::COMPONENT_MAX;

/// Columns of a block.
pub const BLOCK: usize = 16;
/// Occurrences of a row that are added one to the other; sums of more are sums of such runs.
pub const RUN: usize = 256;
/// How many distinct rows ahead of the one being updated a stretch is asked for.
const PREFETCH_ROWS: usize = 24;

pub(super) type Block = [f32; BLOCK];

/// Memory for one row: gradient, row, and two states of its width, `[blocks]` each.
pub(super) struct Room<'a> {
    pub(super) gradient: &'a mut [Block],
    pub(super) row: &'a mut [Block],
    pub(super) states: [&'a mut [Block]; 2],
}

/// Updates the rows of `groups`, in order; adds those that it does not write to `rejected`.
#[inline(always)]
pub(super) fn update_rows(
    step: &Step,
    groups: &GroupsPart<'_>,
    gradients: &GradientRows<'_>,
    masters: &mut Stretches<'_>,
    room: &mut Room<'_>,
    rejected: &mut Vec<u32>,
) {
    let (rows, starts) = (groups.rows(), groups.starts());
    let stride = masters.stride;
    for at in 0..rows.len() {
        if let Some(next) = rows.get(at + PREFETCH_ROWS) {
            let first = (*next - masters.first_row) as usize * stride;
            prefetch_range(masters.data.as_ptr().wrapping_add(first).cast(), stride * 4);
        }
        sum_occurrences(groups, starts[at] as usize, starts[at + 1] as usize, gradients, room.gradient);
        let first = (rows[at] - masters.first_row) as usize * stride;
        let stretch = &mut masters.data[first..first + stride];
        if !update_row(step, stretch, masters.width, room) {
            rejected.push(rows[at]);
        }
    }
}

/// Sums the gradients of the occurrences `from..to` into `sum`.
#[inline(always)]
fn sum_occurrences(groups: &GroupsPart<'_>, from: usize, to: usize, gradients: &GradientRows<'_>, sum: &mut [Block]) {
    sum_run(groups, from, to.min(from + RUN), gradients, sum);
    if to > from + RUN {
        sum_long(groups, from + RUN, to, gradients, sum);
    }
}

/// Adds the sums of further runs.
#[inline(never)]
fn sum_long(groups: &GroupsPart<'_>, from: usize, to: usize, gradients: &GradientRows<'_>, sum: &mut [Block]) {
    let mut run = vec![[0f32; BLOCK]; sum.len()];
    for start in (from..to).step_by(RUN) {
        sum_run(groups, start, to.min(start + RUN), gradients, &mut run);
        for (block, run) in sum.iter_mut().zip(&run) {
            for lane in 0..BLOCK {
                block[lane] += run[lane];
            }
        }
    }
}

#[inline(always)]
fn sum_run(groups: &GroupsPart<'_>, from: usize, to: usize, gradients: &GradientRows<'_>, sum: &mut [Block]) {
    for block in sum.iter_mut() {
        *block = [0.0; BLOCK];
    }
    let slots = &groups.slots()[from..to];
    match groups.weights() {
        None => {
            for slot in slots {
                let gradient = gradients.row(*slot as usize, sum.len());
                for (block, gradient) in sum.iter_mut().zip(gradient) {
                    for lane in 0..BLOCK {
                        block[lane] += gradient[lane];
                    }
                }
            }
        }
        Some(weights) => {
            for (slot, weight) in slots.iter().zip(&weights[from..to]) {
                let gradient = gradients.row(*slot as usize, sum.len());
                for (block, gradient) in sum.iter_mut().zip(gradient) {
                    for lane in 0..BLOCK {
                        block[lane] += weight * gradient[lane];
                    }
                }
            }
        }
    }
}

/// Applies the rule to one stretch, row and state; false where the result would not be finite or would leave the limits, and the
/// stretch is as it was.
#[inline(always)]
fn update_row(step: &Step, stretch: &mut [f32], width: usize, room: &mut Room<'_>) -> bool {
    let Room { gradient, row, states: [first, second] } = room;
    load(&stretch[..width], row);
    if let Some(clip) = step.clip {
        let norm = square_sum(gradient).sqrt();
        if norm > clip {
            scale(gradient, clip / norm);
        }
    }
    if let Decay::L2(lambda) = step.decay {
        for (g, w) in gradient.iter_mut().zip(row.iter()) {
            for lane in 0..BLOCK {
                g[lane] += lambda * w[lane];
            }
        }
    }
    let keep = if let Decay::Decoupled(lambda) = step.decay { 1.0 - step.rate * lambda } else { 1.0 };
    let state = &stretch[width..];
    let mut numbers = [0f32; 2];
    let mut is_valid = true;
    match step.kind {
        RuleKind::Sgd => descend(row, keep, step.rate, gradient),
        RuleKind::RowwiseAdagrad => {
            numbers[0] = state[0] + square_sum(gradient) / width as f32;
            descend(row, keep, step.rate / (numbers[0].sqrt() + step.epsilon), gradient);
        }
        RuleKind::Adagrad => {
            load(&state[..width], first);
            for (m, (w, g)) in first.iter_mut().zip(row.iter_mut().zip(gradient.iter())) {
                for lane in 0..BLOCK {
                    m[lane] += g[lane] * g[lane];
                    w[lane] = keep * w[lane] - step.rate * g[lane] / (m[lane].sqrt() + step.epsilon);
                }
            }
            is_valid = within(first, f32::MAX);
        }
        RuleKind::Adam => {
            load(&state[..width], first);
            load(&state[width..2 * width], second);
            let updates = state[2 * width].to_bits().saturating_add(1);
            numbers[0] = f32::from_bits(updates);
            let [c1, c2] = step.bias_corrections(updates);
            let moments = first.iter_mut().zip(second.iter_mut());
            for ((m, v), (w, g)) in moments.zip(row.iter_mut().zip(gradient.iter())) {
                for lane in 0..BLOCK {
                    m[lane] = step.beta1 * m[lane] + (1.0 - step.beta1) * g[lane];
                    v[lane] = step.beta2 * v[lane] + (1.0 - step.beta2) * (g[lane] * g[lane]);
                    w[lane] = keep * w[lane] - step.rate * (c1 * m[lane]) / ((c2 * v[lane]).sqrt() + step.epsilon);
                }
            }
            is_valid = within(first, f32::MAX) && within(second, f32::MAX);
        }
        RuleKind::RowwiseAdam => {
            load(&state[..width], first);
            let updates = state[width + 1].to_bits().saturating_add(1);
            let [c1, c2] = step.bias_corrections(updates);
            numbers[0] = step.beta2 * state[width] + (1.0 - step.beta2) * (square_sum(gradient) / width as f32);
            numbers[1] = f32::from_bits(updates);
            for (m, g) in first.iter_mut().zip(gradient.iter()) {
                for lane in 0..BLOCK {
                    m[lane] = step.beta1 * m[lane] + (1.0 - step.beta1) * g[lane];
                }
            }
            descend(row, keep, step.rate * c1 / ((c2 * numbers[0]).sqrt() + step.epsilon), first);
            is_valid = within(first, f32::MAX);
        }
    }
    if let Some(max_norm) = step.max_norm {
        let norm = square_sum(row).sqrt();
        if norm > max_norm {
            scale(row, max_norm / norm);
        }
    }
    if !(is_valid && within(row, COMPONENT_MAX) && numbers[0].is_finite()) {
        return false;
    }
    let (weights, state) = stretch.split_at_mut(width);
    store(row, weights);
    match step.kind {
        RuleKind::Sgd => {}
        RuleKind::RowwiseAdagrad => state[0] = numbers[0],
        RuleKind::Adagrad => store(first, &mut state[..width]),
        RuleKind::Adam => {
            store(first, &mut state[..width]);
            store(second, &mut state[width..2 * width]);
            state[2 * width] = numbers[0];
        }
        RuleKind::RowwiseAdam => {
            store(first, &mut state[..width]);
            state[width..width + 2].copy_from_slice(&numbers);
        }
    }
    true
}

/// `w = keep w - factor g`.
#[inline(always)]
fn descend(row: &mut [Block], keep: f32, factor: f32, gradient: &[Block]) {
    for (w, g) in row.iter_mut().zip(gradient) {
        for lane in 0..BLOCK {
            w[lane] = keep * w[lane] - factor * g[lane];
        }
    }
}

#[inline(always)]
fn scale(blocks: &mut [Block], factor: f32) {
    for block in blocks {
        for x in block {
            *x *= factor;
        }
    }
}

/// The sum of squares: blocks in order, each a tree that adds the upper half to the lower one.
#[inline(always)]
fn square_sum(blocks: &[Block]) -> f32 {
    let mut sum = 0.0;
    for block in blocks {
        let mut lanes = *block;
        for lane in &mut lanes {
            *lane *= *lane;
        }
        let mut half = BLOCK / 2;
        while half > 0 {
            for lane in 0..half {
                lanes[lane] += lanes[lane + half];
            }
            half /= 2;
        }
        sum += lanes[0];
    }
    sum
}

/// True where no number is NaN or larger than `limit` in size.
#[inline(always)]
fn within(blocks: &[Block], limit: f32) -> bool {
    let mut is_within = true;
    for block in blocks {
        for x in block {
            is_within &= x.abs() <= limit;
        }
    }
    is_within
}

/// Loads numbers into blocks; what is left of the last block is zeros.
#[inline(always)]
fn load(from: &[f32], to: &mut [Block]) {
    let (blocks, tail) = from.as_chunks::<BLOCK>();
    for (to, block) in to.iter_mut().zip(blocks) {
        *to = *block;
    }
    if !tail.is_empty() {
        let last = &mut to[blocks.len()];
        *last = [0.0; BLOCK];
        last[..tail.len()].copy_from_slice(tail);
    }
}

#[inline(always)]
fn store(from: &[Block], to: &mut [f32]) {
    let (blocks, tail) = to.as_chunks_mut::<BLOCK>();
    let whole = blocks.len();
    for (block, from) in blocks.iter_mut().zip(from) {
        *block = *from;
    }
    if !tail.is_empty() {
        tail.copy_from_slice(&from[whole][..tail.len()]);
    }
}
