//! The emulated card.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use sterling::cuda::emulated::Emulated;
use sterling::cuda::{Choice, Device, Devices};

/// Names a library that was made before.
const LIBRARY: &str = "STERLING_EMULATION_LIBRARY";
/// Names a card to run on in place of the emulation.
const DEVICE: &str = "STERLING_TEST_DEVICE";
const SEED: &str = "STERLING_EMULATION_SEED";

const PLAIN: [&str; 1] = ["-O1"];
const SANITIZED: [&str; 3] = ["-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"];

fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/cuda/src/kernels")
}

/// Makes the library.
fn make(name: &str, options: &[&str]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (to, made_at) = (folder.join(format!("{name}.so")), folder.join(format!("{name}-{}.so", std::process::id())));
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]);
    let made = compiler.args(options).arg(kernels().join("emulated.cpp")).arg("-o").arg(&made_at).output();
    let made = made.unwrap_or_else(|e| panic!("g++ makes the emulation: {e}"));
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    // One that another run has loaded stays as it is for that run.
    std::fs::rename(made_at, &to).unwrap();
    to
}

/// The card that `STERLING_TEST_DEVICE` names, else an emulated one of its own, on the library that this run made.
pub fn device() -> Device {
    if let Ok(named) = std::env::var(DEVICE) {
        return named.parse::<Choice>().unwrap().open().unwrap().device.expect("a card").first().clone();
    }
    Device::over(emulated())
}

/// Emulated cards with so many bytes of memory each.
pub fn cards(memory_bytes: &[u64]) -> Vec<Arc<Emulated>> {
    let card = |(n, &bytes): (usize, &u64)| Arc::new(opened().like(&format!("emulated:{n}"), bytes));
    memory_bytes.iter().enumerate().map(card).collect()
}

/// The same as devices that share the items.
pub fn devices(cards: &[Arc<Emulated>]) -> Devices {
    Devices::new(cards.iter().map(|card| Device::over(card.clone())).collect()).unwrap()
}

/// Devices that share the items: emulated cards with so many bytes of memory each, or the card that `STERLING_TEST_DEVICE` names once for each.
pub fn sharing(memory_bytes: &[u64]) -> Devices {
    match std::env::var_os(DEVICE) {
        Some(_) => Devices::new(memory_bytes.iter().map(|_| device()).collect()).unwrap(),
        None => devices(&cards(memory_bytes)),
    }
}

/// An emulated card, whatever `STERLING_TEST_DEVICE` names.
pub fn emulated() -> Arc<Emulated> {
    Arc::new(opened())
}

fn opened() -> Emulated {
    seeded(std::env::var(SEED).ok().and_then(|seed| seed.parse().ok()).unwrap_or(1))
}

/// An emulated card, the turns of whose threads and streams a seed orders.
pub fn seeded(seed: u64) -> Emulated {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    let library = MADE.get_or_init(|| std::env::var_os(LIBRARY).map_or_else(|| make("plain", &PLAIN), PathBuf::from));
    Emulated::open(library, seed).unwrap()
}

/// Numbers from a seed.
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

    /// Between -1 and 1, of 2^-12 apart.
    pub fn number(&mut self) -> f32 {
        (self.below(8193) as f32 - 4096.0) / 4096.0
    }

    pub fn numbers(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.number()).collect()
    }
}

/// The same tests under sanitizers: what leaves an array by a byte, reads a misaligned number or overflows ends them.
#[test]
#[ignore = "long: runs the suite again under sanitizers"]
fn nothing_leaves_its_memory() {
    if std::env::var_os(LIBRARY).is_some() {
        return;
    }
    let library = make("sanitized", &SANITIZED);
    let preload = Command::new("g++").arg("-print-file-name=libasan.so").output().unwrap().stdout;
    let preload = String::from_utf8(preload).unwrap();
    let ran = Command::new(std::env::current_exe().unwrap())
        .args(["--test-threads", "2", "--skip", "nothing_leaves_its_memory", "--skip", "whole_pass"])
        .env(LIBRARY, &library)
        .env("LD_PRELOAD", preload.trim())
        // Memory that the test's own threads keep is no concern of the kernels.
        .env("ASAN_OPTIONS", "detect_leaks=0:detect_stack_use_after_return=0")
        .env("UBSAN_OPTIONS", "halt_on_error=1:print_stacktrace=1")
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{said}");
    assert!(!said.contains("runtime error"), "{said}");
}
