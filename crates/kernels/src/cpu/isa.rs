//! The instruction set in use, as a token that proves its detection.

#[cfg(target_arch = "x86_64")]
use super::amx;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "aarch64")]
    Dotprod,
}

/// Set of kernels that this machine can run. Values come from [`Kernels::all`] only, which makes calls of the kernels sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels {
    pub(super) isa: Isa,
    /// True if the instruction set has bf16 products.
    pub(super) has_bf16: bool,
    /// True if the processor has VBMI, which looks up bytes in tables of 64.
    pub(super) has_vbmi: bool,
    /// Tile implementation, if any.
    #[cfg(target_arch = "x86_64")]
    pub(super) tiles: Option<amx::Source>,
}

impl Kernels {
    pub(super) fn of(isa: Isa) -> Kernels {
        Kernels {
            isa,
            has_bf16: false,
            has_vbmi: false,
            #[cfg(target_arch = "x86_64")]
            tiles: None,
        }
    }

    /// Returns true if bf16 products are available. On Intel processors the products of `avx512bf16` are slower than
    /// f32 products, so this instruction set must be requested by name there.
    #[inline]
    pub fn has_bf16(self) -> bool {
        self.has_bf16
    }

    #[cfg(all(any(test, feature = "testing"), target_arch = "x86_64"))]
    pub(super) fn emulated(wrong: bool) -> Kernels {
        let tiles = Some(amx::Source::Emulated { wrong });
        Kernels { has_bf16: true, tiles, ..Kernels::of(Isa::Portable) }
    }

    /// Returns the name that `STERLING_KERNEL` accepts.
    pub fn name(self) -> &'static str {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            _ if self.tiles.is_some() => "amx",
            Isa::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if self.has_bf16 => "avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            Isa::Dotprod => "dotprod",
        }
    }
}
