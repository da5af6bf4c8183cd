//! CPU kernels: the hot loops, and the instruction set that they use, selected once per process.
//!
//! | name | needs |
//! |---|---|
//! | `amx` | AMX with products of bf16 and int8, permission of the operating system, and all of `avx512bf16`: products in bf16, and scans of a list from its second group of four queries on, by tiles |
//! | `avx512bf16` | AVX-512 BF16, and all of `avx512`: products in bf16, which take half the time on AMD processors and twice the time on Intel processors, where `avx512` is preferred |
//! | `avx512` | AVX-512 F, BW, VL, VNNI, and all of `avx2`; if the CPU also has VBMI, product codes are scanned with it, else with AVX2 |
//! | `avx2` | AVX2, FMA, F16C |
//! | `dotprod` | aarch64 with the dot product instructions (Armv8.2 and later) |
//! | `neon` | aarch64 |
//! | `portable` | nothing |
//!
//! `STERLING_KERNEL` forces one of these by name. [`Kernels`] is the token of that choice: [`kernels`] and [`dense`] are its
//! methods, [`pool`] takes it. Before AMX tiles are used, their results are compared with those of the portable loops,
//! once per process.

#[cfg(target_arch = "x86_64")]
mod amx;
pub mod dense;
mod isa;
pub mod kernels;
pub mod pool;
#[cfg(target_arch = "x86_64")]
mod proof;
pub mod update;

use std::sync::OnceLock;

use isa::Isa;
pub use isa::Kernels;
use sterling_core::error::{Error, Result};

/// Returns whether `vdpbf16ps` is faster than f32: it has twice the throughput on AMD processors and half of it on the
/// measured Intel processors (docs/benchmarks/pass.md), which have tiles instead.
#[cfg(target_arch = "x86_64")]
fn has_fast_pairs() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
    name.as_flattened() != b"GenuineIntel"
}

/// Environment variable that forces an instruction set.
pub const KERNEL_VARIABLE: &str = "STERLING_KERNEL";

impl Kernels {
    /// Returns the best kernels of this machine, or those that `STERLING_KERNEL` names.
    ///
    /// # Errors
    /// `Unsupported` if the variable names kernels that do not exist or that this machine cannot run.
    pub fn detect() -> Result<Kernels> {
        static FOUND: OnceLock<std::result::Result<Kernels, String>> = OnceLock::new();
        let found = FOUND.get_or_init(|| match std::env::var(KERNEL_VARIABLE) {
            Ok(name) => Kernels::named(&name).map_err(|e| format!("{KERNEL_VARIABLE}: {e}")),
            Err(_) => Ok(Kernels::all().pop().unwrap_or(Kernels::of(Isa::Portable))),
        });
        found.clone().map_err(Error::unsupported)
    }

    /// Returns the kernels of [`Kernels::detect`]. If the variable names kernels that do not run on this machine,
    /// returns the portable kernels; in that case the program does not start.
    pub fn best() -> Kernels {
        Kernels::detect().unwrap_or(Kernels::of(Isa::Portable))
    }

    /// Returns the kernels with the given name.
    ///
    /// # Errors
    /// `Unsupported` for a name that does not exist or that this machine cannot run.
    pub fn named(name: &str) -> Result<Kernels> {
        let all = Kernels::all();
        all.iter().find(|k| k.name() == name).copied().ok_or_else(|| {
            let known: Vec<&str> = all.iter().map(|k| k.name()).collect();
            Error::unsupported(format!("kernel `{name}` does not run here, expected one of: {}", known.join(", ")))
        })
    }

    /// Returns all kernels that this machine can run, the best one last.
    pub fn all() -> Vec<Kernels> {
        let mut all = vec![Kernels::of(Isa::Portable)];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            if avx2 {
                all.push(Kernels::of(Isa::Avx2));
            }
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
                && is_x86_feature_detected!("popcnt");
            if avx2 && avx512 {
                let wide = Kernels { has_vbmi: is_x86_feature_detected!("avx512vbmi"), ..Kernels::of(Isa::Avx512) };
                let narrow = Kernels { has_bf16: true, ..wide };
                match is_x86_feature_detected!("avx512bf16") {
                    false => all.push(wide),
                    true if has_fast_pairs() => all.extend([wide, narrow]),
                    true => all.extend([narrow, wide]),
                }
                let tiled = Kernels { tiles: Some(amx::Source::Instructions), ..narrow };
                if is_x86_feature_detected!("avx512bf16") && amx::are_there() && tiled.may_serve() {
                    all.push(tiled);
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            all.push(Kernels::of(Isa::Neon));
            if std::arch::is_aarch64_feature_detected!("dotprod") {
                all.push(Kernels::of(Isa::Dotprod));
            }
        }
        all
    }

    /// Returns whether AMX tiles may be used: the operating system permits them, and their results equal those of the portable
    /// loops. Tested once per process.
    #[cfg(target_arch = "x86_64")]
    fn may_serve(self) -> bool {
        static SERVE: OnceLock<bool> = OnceLock::new();
        *SERVE.get_or_init(|| {
            let found = if amx::permit() { proof::hold(self) } else { Err("the operating system does not permit AMX") };
            if let Err(why) = found {
                tracing::warn!(why, "AMX is available but not used; AVX-512 is used instead");
            }
            found.is_ok()
        })
    }

    /// Returns all kernels of this machine, and the AMX kernels with emulated tiles if the machine has no AMX.
    #[cfg(any(test, feature = "testing"))]
    pub fn tried() -> Vec<Kernels> {
        #[allow(unused_mut)]
        let mut tried = Kernels::all();
        #[cfg(target_arch = "x86_64")]
        if Kernels::best().tiles.is_none() {
            tried.push(Kernels::emulated(false));
        }
        tried
    }
}
