//! The loops over rows and blocks of columns, which `dispatch` compiles for each instruction set.

use super::groups::GroupsPart;
use super::lanes::{BLOCK, Lanes};
use super::operands::{GradientRows, Stretches};
use super::rules::{Decay, RuleKind, Step};
use crate::memory::prefetch_range;
use sterling_core::limits::COMPONENT_MAX;

/// Maximum number of a row's occurrences that are added one by one; longer sums add the sums of such groups.
pub const RUN: usize = 256;
/// Prefetch distance in distinct rows.
const PREFETCH_ROWS: usize = 24;

/// Buffers of one row: gradient, row, and two state vectors of its width, `[blocks]` each.
pub(super) struct Room<'a, L> {
    pub(super) gradient: &'a mut [L],
    pub(super) row: &'a mut [L],
    pub(super) first: &'a mut [L],
    pub(super) second: &'a mut [L],
}

/// Updates the rows of `groups` in order; adds rejected rows to `rejected`.
#[inline(always)]
pub(super) fn update_rows<L: Lanes>(
    step: &Step,
    groups: &GroupsPart<'_>,
    gradients: &GradientRows<'_>,
    masters: &mut Stretches<'_>,
    room: Room<'_, L>,
    rejected: &mut Vec<u32>,
) {
    let Room { gradient, row, first, second } = room;
    let (rows, starts) = (groups.rows(), groups.starts());
    let stride = masters.stride;
    for at in 0..rows.len() {
        if let Some(next) = rows.get(at + PREFETCH_ROWS) {
            let start = (*next - masters.first_row) as usize * stride;
            prefetch_range(masters.data.as_ptr().wrapping_add(start).cast(), stride * 4);
        }
        let occurrences = starts[at] as usize..starts[at + 1] as usize;
        let run = occurrences.start..occurrences.end.min(occurrences.start + RUN);
        sum_run(groups, run, gradients, gradient);
        if occurrences.len() > RUN {
            add_runs(groups, occurrences.start + RUN..occurrences.end, gradients, gradient, first);
        }
        let start = (rows[at] - masters.first_row) as usize * stride;
        let stretch = &mut masters.data[start..start + stride];
        if !update_row(step, stretch, masters.width, gradient, row, [&mut *first, &mut *second]) {
            rejected.push(rows[at]);
        }
    }
}

/// Adds the sums of further groups of [`RUN`] occurrences, each computed in the buffer `run`.
#[inline(always)]
fn add_runs<L: Lanes>(
    groups: &GroupsPart<'_>,
    occurrences: std::ops::Range<usize>,
    gradients: &GradientRows<'_>,
    sum: &mut [L],
    run: &mut [L],
) {
    for start in occurrences.clone().step_by(RUN) {
        sum_run(groups, start..occurrences.end.min(start + RUN), gradients, run);
        for (sum, run) in sum.iter_mut().zip(&*run) {
            *sum = sum.add(*run);
        }
    }
}

#[inline(always)]
fn sum_run<L: Lanes>(
    groups: &GroupsPart<'_>,
    run: std::ops::Range<usize>,
    gradients: &GradientRows<'_>,
    sum: &mut [L],
) {
    sum.fill(L::splat(0.0));
    let slots = &groups.slots()[run.clone()];
    let Some(weights) = groups.weights() else {
        for slot in slots {
            let gradient = gradients.row(*slot as usize, sum.len());
            for (sum, gradient) in sum.iter_mut().zip(gradient) {
                *sum = sum.add(L::load(gradient));
            }
        }
        return;
    };
    for (slot, weight) in slots.iter().zip(&weights[run]) {
        let (gradient, weight) = (gradients.row(*slot as usize, sum.len()), L::splat(*weight));
        for (sum, gradient) in sum.iter_mut().zip(gradient) {
            *sum = sum.add(weight.mul(L::load(gradient)));
        }
    }
}

/// Applies the rule to a row and its state, which are contiguous in `stretch`. If the result would not be finite or
/// would exceed the limits, returns false and leaves both unchanged.
#[inline(always)]
fn update_row<L: Lanes>(
    step: &Step,
    stretch: &mut [f32],
    width: usize,
    gradient: &mut [L],
    row: &mut [L],
    [first, second]: [&mut [L]; 2],
) -> bool {
    load(&stretch[..width], row);
    if let Some(clip) = step.clip {
        scale_to(gradient, clip);
    }
    if let Decay::L2(lambda) = step.decay {
        for (g, w) in gradient.iter_mut().zip(&*row) {
            *g = g.add(L::splat(lambda).mul(*w));
        }
    }
    if let Decay::Decoupled(lambda) = step.decay {
        let keep = L::splat(1.0 - step.rate * lambda);
        for w in row.iter_mut() {
            *w = keep.mul(*w);
        }
    }
    let state = &stretch[width..];
    let mut numbers = [0f32; 2];
    let mut is_valid = true;
    match step.kind {
        RuleKind::Sgd => descend(row, step.rate, gradient),
        RuleKind::RowwiseAdagrad => {
            numbers[0] = state[0] + square_sum(gradient) / width as f32;
            descend(row, step.rate / (numbers[0].sqrt() + step.epsilon), gradient);
        }
        RuleKind::Adagrad => {
            load(&state[..width], first);
            let (rate, epsilon) = (L::splat(step.rate), L::splat(step.epsilon));
            for block in 0..row.len() {
                let g = gradient[block];
                let m = first[block].add(g.mul(g));
                first[block] = m;
                row[block] = row[block].sub(rate.mul(g).div(m.sqrt().add(epsilon)));
                is_valid &= m.is_within(f32::MAX);
            }
        }
        RuleKind::Adam => {
            load(&state[..width], first);
            load(&state[width..2 * width], second);
            let updates = state[2 * width].to_bits().saturating_add(1);
            numbers[0] = f32::from_bits(updates);
            let [c1, c2] = step.bias_corrections(updates).map(L::splat);
            let (rate, epsilon) = (L::splat(step.rate), L::splat(step.epsilon));
            let [b1, b2, a1, a2] = [step.beta1, step.beta2, 1.0 - step.beta1, 1.0 - step.beta2].map(L::splat);
            for block in 0..row.len() {
                let g = gradient[block];
                let m = b1.mul(first[block]).add(a1.mul(g));
                let v = b2.mul(second[block]).add(a2.mul(g.mul(g)));
                (first[block], second[block]) = (m, v);
                let change = rate.mul(c1.mul(m)).div(c2.mul(v).sqrt().add(epsilon));
                row[block] = row[block].sub(change);
                is_valid &= m.is_within(f32::MAX) & v.is_within(f32::MAX);
            }
        }
        RuleKind::RowwiseAdam => {
            load(&state[..width], first);
            let updates = state[width + 1].to_bits().saturating_add(1);
            let [c1, c2] = step.bias_corrections(updates);
            let mean = square_sum(gradient) / width as f32;
            numbers = [step.beta2 * state[width] + (1.0 - step.beta2) * mean, f32::from_bits(updates)];
            let [b1, a1] = [step.beta1, 1.0 - step.beta1].map(L::splat);
            for (m, g) in first.iter_mut().zip(&*gradient) {
                *m = b1.mul(*m).add(a1.mul(*g));
                is_valid &= m.is_within(f32::MAX);
            }
            descend(row, step.rate * c1 / ((c2 * numbers[0]).sqrt() + step.epsilon), first);
        }
    }
    if let Some(max_norm) = step.max_norm {
        scale_to(row, max_norm);
    }
    for w in &*row {
        is_valid &= w.is_within(COMPONENT_MAX);
    }
    if !(is_valid & numbers[0].is_finite()) {
        return false;
    }
    let (values, state) = stretch.split_at_mut(width);
    store(row, values);
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

/// Subtracts `factor` times the gradient from a row.
#[inline(always)]
fn descend<L: Lanes>(row: &mut [L], factor: f32, gradient: &[L]) {
    let factor = L::splat(factor);
    for (w, g) in row.iter_mut().zip(gradient) {
        *w = w.sub(factor.mul(*g));
    }
}

/// Scales a row down to a maximum norm.
#[inline(always)]
fn scale_to<L: Lanes>(row: &mut [L], norm_max: f32) {
    let norm = square_sum(row).sqrt();
    if norm > norm_max {
        let factor = L::splat(norm_max / norm);
        for x in row.iter_mut() {
            *x = x.mul(factor);
        }
    }
}

/// Returns the sum of squares, block by block.
#[inline(always)]
fn square_sum<L: Lanes>(blocks: &[L]) -> f32 {
    let mut sum = 0.0;
    for block in blocks {
        sum += block.mul(*block).sum();
    }
    sum
}

/// Loads numbers into blocks; the rest of the last block is filled with zeros.
#[inline(always)]
fn load<L: Lanes>(from: &[f32], to: &mut [L]) {
    let (blocks, tail) = from.as_chunks::<BLOCK>();
    for (to, block) in to.iter_mut().zip(blocks) {
        *to = L::load(block);
    }
    if !tail.is_empty() {
        let mut last = [0.0; BLOCK];
        last[..tail.len()].copy_from_slice(tail);
        to[blocks.len()] = L::load(&last);
    }
}

#[inline(always)]
fn store<L: Lanes>(from: &[L], to: &mut [f32]) {
    let (blocks, tail) = to.as_chunks_mut::<BLOCK>();
    for (block, from) in blocks.iter_mut().zip(from) {
        from.store(block);
    }
    if !tail.is_empty() {
        let mut last = [0.0; BLOCK];
        from[blocks.len()].store(&mut last);
        tail.copy_from_slice(&last[..tail.len()]);
    }
}
