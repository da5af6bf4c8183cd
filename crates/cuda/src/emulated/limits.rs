//! Launch limits of real devices, against which the emulated GPU checks every launch.

use super::Emulated;
use crate::driver::Launch;
use sterling_core::error::{Error, Result};

/// Launch limits of a kind of device; every NVIDIA device from compute capability 8.0 on has the limits of one of
/// these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Name of the device.
    pub name: &'static str,
    /// Bytes of shared memory per block, with the opt-in for more than 48 KiB.
    pub shared_bytes: usize,
}

impl Limits {
    /// NVIDIA's H100 and H200 (compute capability 9.0).
    pub const H100: Limits = Limits { name: "H100", shared_bytes: 227 << 10 };
    /// NVIDIA's A100 (8.0).
    pub const A100: Limits = Limits { name: "A100", shared_bytes: 163 << 10 };
    /// NVIDIA's L4 and A10 (8.6 and 8.9).
    pub const L4: Limits = Limits { name: "L4", shared_bytes: 99 << 10 };
    /// All limits.
    pub const ALL: [Limits; 3] = [Limits::H100, Limits::A100, Limits::L4];
}

/// Limits of all devices: threads per block, blocks per axis of a grid, bytes of arguments.
const THREADS_MAX: u32 = 1024;
const GRID_MAX: [u32; 3] = [(1 << 31) - 1, 65_535, 65_535];
const ARGUMENTS_MAX: usize = 4096;

impl Emulated {
    /// # Errors
    /// `Internal` for a launch that a device rejects.
    pub(super) fn check_limits(&self, launch: &Launch<'_>) -> Result<()> {
        let Launch { kernel, grid, threads, shared_bytes, arguments, .. } = *launch;
        let Limits { name, shared_bytes: shared_max } = self.limits;
        let refused = |what: String| Err(Error::internal(format!("kernel `{kernel}`: {what}")));
        if shared_bytes > shared_max {
            return refused(format!(
                "{shared_bytes} bytes of shared memory per block, expected at most {shared_max} on {name}"
            ));
        }
        if threads > THREADS_MAX || !threads.is_multiple_of(32) || threads == 0 {
            return refused(format!(
                "blocks of {threads} threads, expected whole warps of at most {THREADS_MAX} threads"
            ));
        }
        if grid.iter().zip(GRID_MAX).any(|(&blocks, most)| blocks == 0 || blocks > most) {
            return refused(format!("a grid of {grid:?} blocks, expected 1 to {GRID_MAX:?}"));
        }
        if arguments.len() > ARGUMENTS_MAX {
            return refused(format!("{} bytes of arguments, expected at most {ARGUMENTS_MAX}", arguments.len()));
        }
        Ok(())
    }
}
