//! AMX tiles of the processor, by inline assembly: stable Rust has no intrinsics for them.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::marker::PhantomData;

use super::{ROW_BYTES, ROWS, Rows, Shape, TILES, Tiles};

/// Returns true if the processor has tiles of the sizes used here, with bf16 and byte products, and the system saves their state.
pub(crate) fn are_there() -> bool {
    const FEATURES: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    const STATE: u64 = 1 << 17 | 1 << 18;
    if !is_x86_feature_detected!("xsave") || __cpuid(0).eax < 0x1d {
        return false;
    }
    // SAFETY: the feature was detected.
    let enabled = unsafe { _xgetbv(0) };
    if __cpuid_count(7, 0).edx & FEATURES != FEATURES || enabled & STATE != STATE {
        return false;
    }
    let palette = __cpuid_count(0x1d, 1);
    (palette.ebx >> 16) as usize >= TILES
        && (palette.ebx & 0xffff) as usize == ROW_BYTES
        && (palette.ecx & 0xffff) as usize == ROWS
}

/// Requests permission for the threads of this process to use tiles, whose state is 8 KiB per thread. Returns false if
/// the system denies the permission.
#[cfg(target_os = "linux")]
pub(crate) fn permit() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and changes permissions of the process, not its memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

/// Denies the permission: AMX is supported on Linux only.
#[cfg(not(target_os = "linux"))]
pub(crate) fn permit() -> bool {
    false
}

/// Operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Tiles of the thread that created this value; released on drop.
///
/// The numbers stay in tile registers between two instructions; the compiler does not know about these registers. Compiled code
/// never uses these registers otherwise, because no code of this program is compiled for AMX.
pub(crate) struct Instructions {
    shapes: [Shape; TILES],
    of_thread: PhantomData<*const ()>,
}

impl Instructions {
    /// # Safety
    /// [`are_there`] and [`permit`] returned true, and the thread has no other instance: the processor knows only the shapes
    /// configured last.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Self {
        Instructions { shapes: [Shape::default(); TILES], of_thread: PhantomData }
    }
}

impl Drop for Instructions {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: tiles exist (`new`), and their contents are no longer needed.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) }
    }
}

/// # Safety
/// Tiles exist and are configured, and the rows are readable.
#[inline(always)]
unsafe fn load_from<const T: usize>(from: *const u8, stride: usize) {
    // SAFETY: this function's `# Safety` conditions hold.
    unsafe {
        asm!(
            "tileloadd tmm{t}, [{from} + {stride}*1]",
            t = const T,
            from = in(reg) from,
            stride = in(reg) stride,
            options(nostack, preserves_flags, readonly)
        );
    }
}

impl Tiles for Instructions {
    #[inline(always)]
    fn configure(&mut self, shapes: &[Shape; TILES]) {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        for (n, shape) in shapes.iter().enumerate() {
            assert!(shape.rows <= ROWS && shape.row_bytes <= ROW_BYTES, "a shape larger than a tile");
            (row_bytes[n], rows[n]) = (shape.row_bytes as u16, shape.rows as u8);
        }
        self.shapes = *shapes;
        let configuration = Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows };
        // SAFETY: tiles exist (`new`); reads 64 bytes, a valid configuration of palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &configuration, options(nostack, preserves_flags, readonly)) }
    }

    #[inline(always)]
    fn zero<const T: usize>(&mut self) {
        // SAFETY: tiles exist (`new`).
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nostack, preserves_flags, nomem)) }
    }

    #[inline(always)]
    fn load<const T: usize>(&mut self, from: &[u8], stride: usize) {
        self.shapes[T].check(from.len(), stride);
        // SAFETY: tiles exist (`new`); the rows lie within `from`.
        unsafe { load_from::<T>(from.as_ptr(), stride) }
    }

    #[inline(always)]
    fn store<const T: usize>(&self, to: &mut [u8], stride: usize) {
        self.shapes[T].check(to.len(), stride);
        // SAFETY: tiles exist (`new`); the rows lie within `to`.
        unsafe {
            asm!(
                "tilestored [{to} + {stride}*1], tmm{t}",
                t = const T,
                to = in(reg) to.as_mut_ptr(),
                stride = in(reg) stride,
                options(nostack, preserves_flags)
            );
        }
    }

    #[inline(always)]
    fn add_pairs<const C: usize, const A: usize, const B: usize>(&mut self) {
        // SAFETY: tiles exist (`new`).
        unsafe {
            asm!(
                "tdpbf16ps tmm{c}, tmm{a}, tmm{b}",
                c = const C,
                a = const A,
                b = const B,
                options(nostack, preserves_flags, nomem)
            );
        }
    }

    /// Checks the factors once instead of at every step.
    #[inline(always)]
    fn add_steps<const TALL: bool, const WIDE: bool>(&mut self, left: Rows<'_>, right: Rows<'_>, count: usize) {
        let height = self.shapes[4].rows;
        let [all, lines] = [height * (1 + usize::from(TALL)), count * ROWS];
        assert!(self.shapes[4] == self.shapes[5] && self.shapes[6] == self.shapes[7] && self.shapes[6].rows == ROWS);
        Shape { rows: all, row_bytes: count * ROW_BYTES }.check(left.bytes.len(), left.stride);
        let columns = ROW_BYTES * (1 + usize::from(WIDE));
        Shape { rows: lines, row_bytes: columns }.check(right.bytes.len(), right.stride);
        let (mut rows, mut columns) = (left.bytes.as_ptr(), right.bytes.as_ptr());
        for _ in 0..count {
            // SAFETY: tiles exist (`new`); the rows of all steps lie within the factors, as checked.
            unsafe {
                load_from::<4>(rows, left.stride);
                load_from::<6>(columns, right.stride);
                self.add_pairs::<0, 4, 6>();
                if WIDE {
                    load_from::<7>(columns.wrapping_add(ROW_BYTES), right.stride);
                    self.add_pairs::<1, 4, 7>();
                }
                if TALL {
                    load_from::<5>(rows.wrapping_add(height * left.stride), left.stride);
                    self.add_pairs::<2, 5, 6>();
                    if WIDE {
                        self.add_pairs::<3, 5, 7>();
                    }
                }
            }
            rows = rows.wrapping_add(ROW_BYTES);
            columns = columns.wrapping_add(ROWS * right.stride);
        }
    }

    #[inline(always)]
    fn rows_of<const T: usize>(&self) -> usize {
        self.shapes[T].rows
    }

    #[inline(always)]
    fn add_bytes<const C: usize, const A: usize, const B: usize>(&mut self) {
        // SAFETY: tiles exist (`new`).
        unsafe {
            asm!(
                "tdpbsud tmm{c}, tmm{a}, tmm{b}",
                c = const C,
                a = const A,
                b = const B,
                options(nostack, preserves_flags, nomem)
            );
        }
    }
}
