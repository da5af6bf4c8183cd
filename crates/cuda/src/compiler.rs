//! NVRTC, loaded on first use. The compiler targets any architecture and needs neither a GPU nor a driver.

use std::ffi::{CString, c_char};

use cudarc::nvrtc::{result, sys};

use super::cubins::Compilation;
use sterling_core::error::{Error, Result};

/// Returns the name and version of the compiler.
///
/// # Errors
/// `Unavailable` if NVRTC is not on the library path.
pub fn version() -> Result<String> {
    // SAFETY: looks up the library by name; loading it only runs its initialisers.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::unavailable("NVRTC is missing: libnvrtc.so was not found, expected that of CUDA 13"));
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the call writes both numbers.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().map_err(|e| failed("NVRTC", &e))?;
    Ok(format!("nvrtc {major}.{minor}"))
}

fn failed(name: &str, e: &dyn std::fmt::Display) -> Error {
    Error::internal(format!("{name}: {e}"))
}

/// Program handle of NVRTC, destroyed on drop.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program was created, and is not used afterwards.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Compiles a kernel source to machine code.
///
/// # Errors
/// `Internal` with the compiler's log if the source does not compile.
pub fn compile(recipe: &Compilation) -> Result<Vec<u8>> {
    let invalid = |e: &dyn std::fmt::Display| failed(recipe.name, e);
    let text = CString::new(recipe.text.as_str()).map_err(|e| invalid(&e))?;
    let name = CString::new(recipe.name).map_err(|e| invalid(&e))?;
    let program = Program(result::create_program(&text, Some(&name)).map_err(|e| invalid(&e))?);
    // SAFETY: the program was just created from `text`, which outlives the program.
    if let Err(e) = unsafe { result::compile_program(program.0, &recipe.options) } {
        // SAFETY: the program was created above and is still alive.
        let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
        let log: String = log.iter().take_while(|&&c| c != 0).map(|&c| char::from(c as u8)).collect();
        return Err(Error::internal(format!("{} for {}: {e}: {log}", recipe.name, recipe.architecture)));
    }
    let mut bytes = 0;
    // SAFETY: the program is compiled; the call writes a number.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &mut bytes) }.result().map_err(|e| invalid(&e))?;
    let mut code = vec![0u8; bytes];
    // SAFETY: the buffer has the size that the compiler returned.
    unsafe { sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast::<c_char>()) }.result().map_err(|e| invalid(&e))?;
    Ok(code)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::cubins::Cubins;
    use crate::sources::KERNELS;

    /// Runs if the library is on the path; nothing else of CUDA is needed.
    #[test]
    fn kernels_compile_into_the_cache_where_the_library_is() {
        let Ok(compiler) = version() else { return };
        let folder = tempfile::tempdir().unwrap();
        let cubins = Cubins::new(folder.path());
        let recipe = Compilation::new(&KERNELS[1], "sm_90", &compiler).unwrap();
        let code = cubins.get(&recipe, compile).unwrap();
        assert!(code.starts_with(b"\x7fELF"), "no GPU code");
        let retained = cubins.get(&recipe, |_| Err(Error::internal("compiled again"))).unwrap();
        assert_eq!(retained, code);
        let broken = Compilation { text: "__global__ void f() { x }".into(), ..recipe };
        let error = compile(&broken).unwrap_err().to_string();
        assert!(error.contains("topk.cu for sm_90") && error.contains("undefined"), "{error}");
    }
}
