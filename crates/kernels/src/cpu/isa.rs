//! The instruction set in use, as a token of what was found.

#[cfg(target_arch = "x86_64")]
use super::amx;

/// The instruction set in use.
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

/// A set of kernels that this machine can run. Only those of [`Kernels::all`] are ever handed out, which is what
/// makes its calls sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels {
    pub(super) isa: Isa,
    /// Whether the instruction set has products of bf16.
    pub(super) has_bf16: bool,
    /// Whether it looks up bytes among 64 at a time.
    pub(super) has_vbmi: bool,
    /// What multiplies tiles, where something does.
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

    /// Whether there are products of bf16. Those by `avx512bf16` are slower than those of f32 on Intel's processors, where it has to be named.
    #[inline]
    pub fn has_bf16(self) -> bool {
        self.has_bf16
    }

    #[cfg(all(any(test, feature = "testing"), target_arch = "x86_64"))]
    pub(super) fn emulated(wrong: bool) -> Kernels {
        let tiles = Some(amx::Source::Emulated { wrong });
        Kernels { has_bf16: true, tiles, ..Kernels::of(Isa::Portable) }
    }

    /// The name, as `STERLING_KERNEL` takes it.
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
