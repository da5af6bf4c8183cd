//! The emulated GPU.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use sterling::cuda::emulated::Emulated;
use sterling::cuda::{Choice, Device, Devices};

/// Path of a library that was built before.
const LIBRARY: &str = "STERLING_EMULATION_LIBRARY";
/// Name of a GPU to run on instead of the emulation.
const DEVICE: &str = "STERLING_TEST_DEVICE";
const SEED: &str = "STERLING_EMULATION_SEED";

const PLAIN: [&str; 1] = ["-O1"];
const SANITIZED: [&str; 3] = ["-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"];

fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/cuda/src/kernels")
}

/// Builds the library.
fn make(name: &str, options: &[&str]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (to, made_at) = (folder.join(format!("{name}.so")), folder.join(format!("{name}-{}.so", std::process::id())));
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]);
    let made = compiler.args(options).arg(kernels().join("emulated.cpp")).arg("-o").arg(&made_at).output();
    let made = made.unwrap_or_else(|e| panic!("g++ makes the emulation: {e}"));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    // A library that another run has loaded must not change under it.
    std::fs::rename(made_at, &to).unwrap();
    to
}

/// Returns the GPU of `STERLING_TEST_DEVICE`, else a new emulated one, on the library that this run built.
pub fn device() -> Device {
    if let Ok(named) = std::env::var(DEVICE) {
        return named.parse::<Choice>().unwrap().open().unwrap().device.expect("a GPU").first().clone();
    }
    Device::over(emulated())
}

/// Returns emulated GPUs with these memory sizes, in bytes.
pub fn cards(memory_bytes: &[u64]) -> Vec<Arc<Emulated>> {
    let card = |(n, &bytes): (usize, &u64)| Arc::new(opened().like(&format!("emulated:{n}"), bytes));
    memory_bytes.iter().enumerate().map(card).collect()
}

/// Returns them as devices that share the items.
pub fn devices(cards: &[Arc<Emulated>]) -> Devices {
    Devices::new(cards.iter().map(|card| Device::over(card.clone())).collect()).unwrap()
}

/// Returns devices that share the items: emulated GPUs with these memory sizes in bytes, or the GPU of `STERLING_TEST_DEVICE`,
/// once for each.
pub fn sharing(memory_bytes: &[u64]) -> Devices {
    match std::env::var_os(DEVICE) {
        Some(_) => Devices::new(memory_bytes.iter().map(|_| device()).collect()).unwrap(),
        None => devices(&cards(memory_bytes)),
    }
}

/// Returns an emulated GPU, regardless of `STERLING_TEST_DEVICE`.
pub fn emulated() -> Arc<Emulated> {
    Arc::new(opened())
}

fn opened() -> Emulated {
    seeded(std::env::var(SEED).ok().and_then(|seed| seed.parse().ok()).unwrap_or(1))
}

/// Returns an emulated GPU whose thread and stream order depends on a seed.
pub fn seeded(seed: u64) -> Emulated {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    let library = MADE.get_or_init(|| std::env::var_os(LIBRARY).map_or_else(|| make("plain", &PLAIN), PathBuf::from));
    Emulated::open(library, seed).unwrap()
}

/// Random numbers from a seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 3
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Returns a number between -1 and 1, a multiple of 2^-12.
    pub fn number(&mut self) -> f32 {
        (self.below(8193) as f32 - 4096.0) / 4096.0
    }

    pub fn numbers(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.number()).collect()
    }
}

/// Runs the same tests under sanitizers, which end the process at an out-of-bounds byte, a misaligned read or an overflow.
#[test]
#[ignore = "long: runs the suite again under sanitizers"]
fn kernels_stay_within_their_memory() {
    if std::env::var_os(LIBRARY).is_some() {
        return;
    }
    let library = make("sanitized", &SANITIZED);
    let preload = Command::new("g++").arg("-print-file-name=libasan.so").output().unwrap().stdout;
    let preload = String::from_utf8(preload).unwrap();
    let ran = Command::new(std::env::current_exe().unwrap())
        .args(["--test-threads", "2", "--skip", "kernels_stay_within_their_memory", "--skip", "whole_pass"])
        .env(LIBRARY, &library)
        .env("LD_PRELOAD", preload.trim())
        // Memory that threads of the test keep until the end is no leak of the kernels.
        .env("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=0")
        .env("UBSAN_OPTIONS", "halt_on_error=1:print_stacktrace=1")
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    let reported = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{reported}");
    assert!(!reported.contains("runtime error"), "{reported}");
}
