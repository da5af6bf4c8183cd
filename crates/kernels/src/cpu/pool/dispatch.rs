//! Pooled lookup: checks its operands and selects format and instruction set.

use super::bags::{BagSums, Bags};
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::portable;
use super::rows::{RowFormat, Rows, formats};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::cpu::isa::{Isa, Kernels};

/// Writes the sum (or mean) of each bag's rows; an empty bag gives zeros.
///
/// # Panics
/// If an id is not below the number of rows, the offsets decrease or leave the ids, weights and ids differ in number, or
/// the output is too short. Requests are validated by the caller; these are the conditions that memory safety needs.
pub fn pool(kernels: Kernels, rows: &Rows<'_>, bags: &Bags<'_>, out: &mut BagSums<'_>) {
    let count = bags.offsets.len().saturating_sub(1);
    assert!(bags.ids.iter().copied().max().unwrap_or(-1) < rows.len() as i64, "an id beyond the rows");
    assert!(bags.offsets.is_sorted() && (count == 0 || bags.range(count - 1).end <= bags.ids.len()));
    assert!(bags.weights.is_none_or(|w| w.len() == bags.ids.len()));
    assert!(out.column + rows.width <= out.stride && out.data.len() >= count * out.stride);
    match rows.format {
        RowFormat::F32 => pool_as::<{ formats::F32 }>(kernels.isa, rows, bags, out),
        RowFormat::F16 => pool_as::<{ formats::F16 }>(kernels.isa, rows, bags, out),
        RowFormat::Bf16 => pool_as::<{ formats::BF16 }>(kernels.isa, rows, bags, out),
        RowFormat::Int8 => pool_as::<{ formats::INT8 }>(kernels.isa, rows, bags, out),
        RowFormat::Int4 => pool_as::<{ formats::INT4 }>(kernels.isa, rows, bags, out),
        RowFormat::Int2 => pool_as::<{ formats::INT2 }>(kernels.isa, rows, bags, out),
    }
}

fn pool_as<const F: usize>(isa: Isa, rows: &Rows<'_>, bags: &Bags<'_>, out: &mut BagSums<'_>) {
    match isa {
        Isa::Portable => portable::pool(rows, bags, out),
        // SAFETY: `Kernels` exists only if its features were detected; `pool` checked ids, offsets, weights and output.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2::pool::<F>(rows, bags, out) },
        // SAFETY: `Kernels` exists only if its features were detected; `pool` checked ids, offsets, weights and output.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { avx512::pool::<F>(rows, bags, out) },
        // SAFETY: `Kernels` exists only if its features were detected; `pool` checked ids, offsets, weights and output.
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::Dotprod => unsafe { neon::pool::<F>(rows, bags, out) },
    }
}
