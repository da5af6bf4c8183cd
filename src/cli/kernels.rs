//! `sterling kernels`: prints the kernels of this CPU, and compiles GPU kernels ahead of time.

use std::path::PathBuf;

use super::output::say;
use super::store::local_path;
use sterling_core::error::{Error, Result};
#[cfg(feature = "cuda")]
use sterling_cuda::cubins::Compilation;
use sterling_cuda::cubins::Cubins;
use sterling_cuda::sources::KERNELS;
use sterling_kernels::cpu;

#[derive(Debug, clap::Args)]
pub(super) struct Kernels {
    /// Compile the GPU kernels ahead of time; needs libnvrtc.so.13, but no GPU.
    #[arg(long)]
    compile: bool,
    /// GPU architecture to compile for, such as sm_90; repeatable.
    #[arg(long, value_name = "SM", default_values_t = ["sm_80".to_owned(), "sm_90".to_owned(), "sm_100".to_owned()])]
    arch: Vec<String>,
    /// Folder of compiled kernels; default: the user's cache.
    #[arg(long, env = "STERLING_KERNELS", value_name = "FOLDER", value_parser = local_path())]
    folder: Option<PathBuf>,
}

impl Kernels {
    pub(super) fn run(self) -> Result<()> {
        if !self.compile {
            let all: Vec<&str> = cpu::Kernels::all().iter().map(|kernels| kernels.name()).collect();
            say(format_args!("cpu: {}, in use {}", all.join(" "), cpu::Kernels::detect()?.name()))?;
            for source in &KERNELS {
                say(format_args!("{}: {}", source.name, source.kernels().collect::<Vec<_>>().join(" ")))?;
            }
            return Ok(());
        }
        let missing = || {
            Error::invalid(
                "--folder: missing, expected a folder, because without a home folder no default cache exists",
            )
        };
        let cubins = self.folder.map(Cubins::new).or_else(Cubins::of_user).ok_or_else(missing)?;
        compile(&cubins, &self.arch)
    }
}

#[cfg(feature = "cuda")]
fn compile(cubins: &Cubins, architectures: &[String]) -> Result<()> {
    use sterling_cuda::compiler;
    let version = compiler::version()?;
    for architecture in architectures {
        for source in &KERNELS {
            let recipe = Compilation::new(source, architecture, &version)?;
            let was_there = cubins.read(&recipe).is_some();
            let code = cubins.get(&recipe, compiler::compile)?;
            if !was_there && cubins.read(&recipe).is_none() {
                cubins.write(&recipe, &code)?;
            }
            let what = if was_there { "there" } else { "compiled" };
            say(format_args!("{what}: {}, {} bytes", cubins.place(&recipe).display(), code.len()))?;
        }
    }
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn compile(_: &Cubins, _: &[String]) -> Result<()> {
    Err(sterling_cuda::choice::no_cuda())
}
