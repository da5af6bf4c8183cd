//! Checks the operands of an update, and selects row width and instruction set.

use super::groups::GroupsPart;
#[cfg(target_arch = "aarch64")]
use super::lanes::aarch64::Neon;
#[cfg(target_arch = "x86_64")]
use super::lanes::x86::{Avx2, Avx512};
use super::lanes::{BLOCK, Lanes, Portable};
use super::loops::{Room, update_rows};
use super::operands::{GradientRows, Stretches};
use super::rules::Step;
use crate::cpu::isa::{Isa, Kernels};

/// Applies one step of a rule to the rows of `groups`, whose gradients are sums over their occurrences. Returns the rows that are
/// not written, because row or state would not be finite or a number would exceed `COMPONENT_MAX`.
///
/// # Panics
/// If a row is outside of `masters`, a slot has no gradient, the widths differ, or a row has no room for its state.
pub fn update(
    kernels: Kernels,
    step: &Step,
    groups: &GroupsPart<'_>,
    gradients: &GradientRows<'_>,
    masters: &mut Stretches<'_>,
) -> Vec<u32> {
    let mut rejected = Vec::new();
    let (Some(first), Some(last)) = (groups.rows().first(), groups.rows().last()) else { return rejected };
    let end = (u64::from(*last) + 1).saturating_sub(u64::from(masters.first_row)) as usize;
    assert!(*first >= masters.first_row && end <= masters.data.len() / masters.stride, "a row outside of `masters`");
    assert!(groups.slots_end() <= gradients.len(), "a slot beyond the gradients");
    assert!(masters.width.div_ceil(BLOCK) == gradients.blocks(), "gradients of another width than the rows");
    assert!(masters.width + step.kind.state_width(masters.width) <= masters.stride, "no room for the state");
    match kernels.isa {
        Isa::Portable => update_by_width::<Portable>(step, groups, gradients, masters, &mut rejected),
        // SAFETY: `Kernels` is made only after the features were found.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2(step, groups, gradients, masters, &mut rejected) },
        // SAFETY: `Kernels` is made only after the features were found.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { avx512(step, groups, gradients, masters, &mut rejected) },
        // All code of this target is compiled for NEON.
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::Dotprod => update_by_width::<Neon>(step, groups, gradients, masters, &mut rejected),
    }
    rejected
}

/// # Safety
/// The CPU has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2(
    step: &Step,
    groups: &GroupsPart<'_>,
    gradients: &GradientRows<'_>,
    masters: &mut Stretches<'_>,
    rejected: &mut Vec<u32>,
) {
    update_by_width::<Avx2>(step, groups, gradients, masters, rejected);
}

/// # Safety
/// The CPU has AVX-512 F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn avx512(
    step: &Step,
    groups: &GroupsPart<'_>,
    gradients: &GradientRows<'_>,
    masters: &mut Stretches<'_>,
    rejected: &mut Vec<u32>,
) {
    update_by_width::<Avx512>(step, groups, gradients, masters, rejected);
}

/// Rows of common widths stay in registers, other rows in memory.
#[inline(always)]
fn update_by_width<L: Lanes>(
    step: &Step,
    groups: &GroupsPart<'_>,
    gradients: &GradientRows<'_>,
    masters: &mut Stretches<'_>,
    rejected: &mut Vec<u32>,
) {
    match gradients.blocks() {
        1 => update_by_blocks::<L, 1>(step, groups, gradients, masters, rejected),
        2 => update_by_blocks::<L, 2>(step, groups, gradients, masters, rejected),
        4 => update_by_blocks::<L, 4>(step, groups, gradients, masters, rejected),
        8 => update_by_blocks::<L, 8>(step, groups, gradients, masters, rejected),
        blocks => {
            let mut rows = vec![L::splat(0.0); 4 * blocks];
            let (moving, states) = rows.split_at_mut(2 * blocks);
            let (gradient, row) = moving.split_at_mut(blocks);
            let (first, second) = states.split_at_mut(blocks);
            update_rows(step, groups, gradients, masters, Room { gradient, row, first, second }, rejected);
        }
    }
}

#[inline(always)]
fn update_by_blocks<L: Lanes, const BLOCKS: usize>(
    step: &Step,
    groups: &GroupsPart<'_>,
    gradients: &GradientRows<'_>,
    masters: &mut Stretches<'_>,
    rejected: &mut Vec<u32>,
) {
    let [mut gradient, mut row, mut first, mut second] = [[L::splat(0.0); BLOCKS]; 4];
    let room = Room { gradient: &mut gradient, row: &mut row, first: &mut first, second: &mut second };
    update_rows(step, groups, gradients, masters, room, rejected);
}
