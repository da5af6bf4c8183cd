//! Fuzzing of all parsers of external input: the committed corpus, and inputs that are derived from it.
//!
//! An input is mutated in a few places at a time (bits, bytes, special numbers, pieces that are removed, doubled or taken from
//! others, words of the format). An input with a new outcome, by its message without numbers and names, joins the pool for
//! further mutations, so that a run gets past the first checks. The test suite tries the same few thousand inputs per target;
//! `STERLING_FUZZ_SECONDS=600 cargo test --release --test fuzz` continues until each target has used that much CPU time, and
//! `STERLING_FUZZ_SEED` selects other inputs. A failing input is written to `target/fuzz`: add it to the corpus together with the
//! fix.

#![allow(clippy::unwrap_used)]

mod targets;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use targets::{TARGETS, Target};

/// Number of inputs per target if no duration is set.
const INPUTS: usize = 3000;
/// Maximal size of the pool for mutations.
const POOL_MAX: usize = 2000;
/// Number of inputs between checks of the CPU time.
const INPUTS_PER_CHECK: usize = 100;
/// Maximal length of an input, in bytes.
const INPUT_BYTES_MAX: usize = 64 << 10;
/// Memory that an input may use: a constant in bytes, and bytes per byte of input.
const MEMORY: (usize, usize) = (64 << 20, 1024);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Marsaglia's xorshift: the same inputs for the same seed, on every machine.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// Returns the corpus of a target: its own folder, and short golden files of the format.
fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let mut folders = vec![root().join("tests/fuzz/corpus").join(target.name)];
    folders.extend(match target.name {
        "faiss" => Some(root().join("tests/golden/faiss")),
        "journal" => Some(root().join("tests/golden/journal")),
        _ => None,
    });
    let mut paths: Vec<PathBuf> = folders
        .iter()
        .flat_map(|folder| std::fs::read_dir(folder).unwrap())
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    let inputs: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    inputs.into_iter().filter(|input| input.len() <= INPUT_BYTES_MAX).collect()
}

/// Mutates an input of the pool.
fn made(pool: &[Vec<u8>], words: &[&str], chance: &mut Chance) -> Vec<u8> {
    let mut input = pool[chance.below(pool.len())].clone();
    for _ in 0..1 + chance.below(4) {
        let at = chance.below(input.len() + 1);
        let end = (at + 1 + chance.below(16)).min(input.len());
        match chance.below(9) {
            0 if at < input.len() => input[at] ^= 1 << chance.below(8),
            1 if at < input.len() => input[at] = chance.next() as u8,
            2 => drop(input.drain(at.min(end)..end)),
            3 => input.truncate(at),
            4 => {
                let piece = input[at.min(end)..end].to_vec();
                input.splice(at..at, piece);
            }
            5 => {
                let other = &pool[chance.below(pool.len())];
                let from = chance.below(other.len() + 1);
                let until = (from + chance.below(64)).min(other.len());
                input.splice(at..at, other[from..until].iter().copied());
            }
            6 => {
                let numbers = [0_u64, 1, 0x7f, 0xff, 0x7fff_ffff, 0xffff_ffff, u64::MAX / 2, u64::MAX, 1 << 40];
                let number = numbers[chance.below(numbers.len())].to_le_bytes();
                let width = [1, 2, 4, 8][chance.below(4)];
                let until = (at + width).min(input.len());
                input.splice(at.min(until)..until, number[..width].iter().copied());
            }
            _ => {
                let word = words[chance.below(words.len())];
                input.splice(at..at, word.bytes());
            }
        }
    }
    input.truncate(INPUT_BYTES_MAX);
    input
}

/// Hashes an outcome without its variable parts: numbers and quoted text.
fn signature(outcome: &str) -> u64 {
    let mut quoted = false;
    let is_kept = |c: &char| {
        quoted ^= *c == '`' || *c == '"' || *c == '\'';
        !quoted && !c.is_ascii_digit()
    };
    xxhash_rust::xxh3::xxh3_64(outcome.chars().filter(is_kept).take(400).collect::<String>().as_bytes())
}

/// Runs one input; a failing one is saved.
fn run(target: &Target, input: &[u8], folder: &Path) -> String {
    let mut outcome = None;
    let used = allocation_counter::measure(|| {
        outcome = Some(catch_unwind(AssertUnwindSafe(|| (target.run)(input, folder))));
    });
    let bound = MEMORY.0 + MEMORY.1 * input.len();
    let wrong = match outcome.unwrap() {
        Ok(outcome) if used.bytes_max as usize <= bound => return outcome,
        Ok(_) => format!("took {} bytes of memory, expected at most {bound}", used.bytes_max),
        Err(_) => "panicked".into(),
    };
    let retained = root().join("target/fuzz");
    std::fs::create_dir_all(&retained).unwrap();
    let path = retained.join(format!("{}-{:016x}", target.name, xxhash_rust::xxh3::xxh3_64(input)));
    std::fs::write(&path, input).unwrap();
    panic!("{}: {wrong} by {} bytes, in {}", target.name, input.len(), path.display());
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap())
}

/// Returns the CPU time of this thread so far; a test has its own thread.
fn processor_time() -> Duration {
    let figures = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(figures.split(' ').next().unwrap().parse().unwrap())
}

fn fuzz(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    // In memory if possible: writing each input to disk would take most of the time.
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let mut pool = corpus(target);
    assert!(!pool.is_empty(), "{name}: no corpus");
    let mut known = BTreeSet::new();
    let mut is_taken = false;
    for input in &pool {
        let outcome = run(target, input, folder.path());
        is_taken |= outcome.contains("taken");
        known.insert(signature(&outcome));
    }
    assert!(is_taken, "{name}: nothing of the corpus is taken");
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15 ^ number("STERLING_FUZZ_SEED").unwrap_or(0));
    let time = number("STERLING_FUZZ_SECONDS").map(Duration::from_secs);
    let (mut count, mut took) = (0, Duration::ZERO);
    while time.map_or(count < INPUTS, |time| took < time) {
        let input = made(&pool, target.words, &mut chance);
        let outcome = run(target, &input, folder.path());
        if pool.len() < POOL_MAX && known.insert(signature(&outcome)) {
            pool.push(input);
        }
        count += 1;
        if time.is_some() && count % INPUTS_PER_CHECK == 0 {
            took = processor_time();
        }
    }
    if time.is_some() {
        let (seconds, outcomes) = (took.as_secs(), known.len());
        writeln!(std::io::stdout().lock(), "{name}: {count} inputs, {seconds} s, {outcomes} outcomes").unwrap();
    }
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            fuzz(stringify!($name));
        })*

        #[test]
        fn every_target_is_run() {
            assert_eq!([$(stringify!($name)),*].to_vec(), TARGETS.iter().map(|target| target.name).collect::<Vec<_>>());
        }
    };
}

targets! { filter value requests manifest safetensors index faiss journal jagged arrow npy }
