//! A card that is none: kernels compiled for the host's processor run one thread after the other (`kernels/emulate.h`).
//!
//! It is slow and finds what a card would pass over: reads of memory that nobody wrote, threads that miss a barrier, and, in a
//! library built with a sanitizer, whatever leaves its array.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use libloading::Library;

use super::driver::{Driver, Launch};
use crate::error::{Error, Result};

// SAFETY: what each call asks for is what the methods of `Driver` ask for; the types are those of `kernels/emulated.cpp`.
type LaunchFn = unsafe extern "C" fn(*const c_char, *const u32, u32, usize, *const c_void, usize, u64) -> *const c_char;
// SAFETY: as above.
type AllocFn = unsafe extern "C" fn(usize) -> *mut c_void;
// SAFETY: as above.
type FreeFn = unsafe extern "C" fn(*mut c_void);

/// The kernels as a shared library, and memory of the host.
#[derive(Debug)]
pub struct Emulated {
    launch: LaunchFn,
    alloc: AllocFn,
    free: FreeFn,
    /// Orders the turns of threads; another one for each launch.
    seed: AtomicU64,
    launches: AtomicU64,
    /// Keeps the functions loaded.
    _library: Library,
}

impl Emulated {
    /// Loads the library that `kernels/emulated.cpp` became. Threads take turns in an order that `seed` chooses.
    ///
    /// # Errors
    /// `Unavailable` where the file is no such library.
    pub fn open(library: &Path, seed: u64) -> Result<Self> {
        let missing = |e: libloading::Error| Error::unavailable(format!("{}: {e}", library.display()));
        // SAFETY: the library's initialisers register kernels and do nothing else.
        let loaded = unsafe { Library::new(library) }.map_err(missing)?;
        // SAFETY: the types are those of `kernels/emulated.cpp`, which belongs to this file.
        let (launch, alloc, free) = unsafe {
            (
                *loaded.get::<LaunchFn>(b"emu_launch").map_err(missing)?,
                *loaded.get::<AllocFn>(b"emu_alloc").map_err(missing)?,
                *loaded.get::<FreeFn>(b"emu_free").map_err(missing)?,
            )
        };
        Ok(Emulated { launch, alloc, free, seed: seed.into(), launches: 0.into(), _library: loaded })
    }

    /// How many kernels it has launched.
    pub fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }
}

impl Driver for Emulated {
    fn name(&self) -> String {
        "emulated".into()
    }

    fn kind(&self) -> &'static str {
        "emulated"
    }

    fn memory(&self) -> Result<(u64, u64)> {
        Ok((1 << 33, 1 << 33))
    }

    fn alloc(&self, bytes: usize) -> Result<u64> {
        // SAFETY: the library allocates like malloc.
        let memory = unsafe { (self.alloc)(bytes) };
        if memory.is_null() {
            Err(Error::overloaded(format!("{bytes} bytes cannot be had")))
        } else {
            Ok(memory as u64)
        }
    }

    unsafe fn free(&self, address: u64) {
        // SAFETY: the caller's condition; the address is a pointer of `alloc`.
        unsafe { (self.free)(address as *mut c_void) }
    }

    unsafe fn upload(&self, to: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the caller's condition; addresses are pointers of `alloc`, which `from` cannot overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to as *mut u8, from.len()) };
        Ok(())
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<()> {
        // SAFETY: as in `upload`.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn clear(&self, address: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's condition.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, bytes) };
        Ok(())
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        let name = CString::new(launch.kernel).map_err(|e| Error::internal("a kernel's name").caused_by(e))?;
        let seed = self.seed.fetch_add(1, Ordering::Relaxed);
        self.launches.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the library checks the size of the arguments; what they point to is the caller's condition.
        let failure = unsafe {
            (self.launch)(
                name.as_ptr(),
                launch.grid.as_ptr(),
                launch.threads,
                launch.shared_bytes,
                launch.arguments.as_ptr().cast(),
                launch.arguments.len(),
                seed,
            )
        };
        if failure.is_null() {
            return Ok(());
        }
        // SAFETY: a text that stays until the next launch of this thread.
        let why = unsafe { CStr::from_ptr(failure) }.to_string_lossy().into_owned();
        Err(Error::internal(why))
    }
}
