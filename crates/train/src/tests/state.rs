//! Optimizer state that is damaged, a disk that is full, and 500 steps compared with PyTorch.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::json;

use super::{TRAIN, TestFolder, events, files};
use crate::side::Side;
use crate::step_random::StepRandom;
use crate::{TrainOptions, Trainer};
use sterling_core::error::Kind;
use sterling_embedding::train::MasterTable;
use sterling_kernels::threads::Threads;
use sterling_snapshot::model::Package;

#[test]
fn changed_bytes_of_optimizer_state_are_state_or_refused() {
    let place = TestFolder::new(TRAIN);
    let path = place.events("e.jsonl", &events(100));
    place.run(place.options(&path, "work"), "out");
    let file = place.path("out/optimizer.safetensors");
    let bytes = fs::read(&file).unwrap();
    let sum_file = place.path("out/optimizer.checksum.json");
    let sum = fs::read(&sum_file).unwrap();
    let mut refused = 0;
    for n in 0..400u64 {
        let (mut changed, draws) = (bytes.clone(), StepRandom::new(9, n));
        // Most of the changes are in the header, which describes the other bytes.
        let within = if n % 4 == 0 { bytes.len() } else { 1500.min(bytes.len()) } as u64;
        for change in 0..1 + draws.below(0, 3) {
            let at = (draws.below(10 + change, within) as usize).min(changed.len() - 1);
            match draws.below(20 + change, 4) {
                0 => changed.truncate(at.max(1)),
                1 => changed[at] = b'0' + draws.below(30 + change, 10) as u8,
                2 => changed[at] ^= 1 << draws.below(30 + change, 8),
                _ => drop(changed.remove(at)),
            }
        }
        fs::write(&file, &changed).unwrap();
        // With the checksum, and without, as another program writes the state.
        let has_sum = n % 2 == 0;
        match has_sum {
            true => fs::write(&sum_file, &sum).unwrap(),
            false => drop(fs::remove_file(&sum_file)),
        }
        let options = TrainOptions { judge: 0, ..place.options(&path, "work2") };
        if let Err(e) = Trainer::open(&place.path("out"), options) {
            let (kind, text) = (e.kind(), e.to_string());
            assert!(kind != Kind::Internal && text.contains("optimizer.safetensors"), "{n}: {text}");
            refused += 1;
        } else {
            assert!(!has_sum || changed == bytes, "{n}: a changed byte was read");
        }
    }
    assert!(refused > 100, "{refused}");
}

const CHILD: &str = "STERLING_TRAIN_IN";
const CHILD_STEPS: &str = "STERLING_TRAIN_CHECKPOINT_STEPS";

/// In a child process of the next test: a run in the folder that the environment names.
#[test]
fn child_with_a_full_disk() {
    let Ok(folder) = std::env::var(CHILD) else { return };
    let folder = Path::new(&folder);
    let run = || {
        let checkpoint_steps = std::env::var(CHILD_STEPS).unwrap().parse().unwrap();
        let options = TrainOptions {
            checkpoint_steps,
            max_refused: "50%".parse().unwrap(),
            ..TrainOptions::new(vec![folder.join("e.jsonl")], folder.join(format!("work{checkpoint_steps}")))
        };
        let mut trainer = Trainer::open(&folder.join("package"), options)?;
        trainer.run(&|_| ())?;
        trainer.write(&folder.join(format!("out{checkpoint_steps}")))
    };
    run().unwrap_or_else(|e| panic!("failed: {:?} {e}", e.kind()));
}

#[test]
fn a_full_disk_loses_nothing_wherever_it_strikes() {
    let place = TestFolder::new(TRAIN);
    let mut lines = events(300);
    (0..4).for_each(|n| lines.insert(70 * n, json!({"user": {}, "item": 99, "id": "x".repeat(100)})));
    let path = place.events("e.jsonl", &lines);
    let complete = TrainOptions { max_refused: "50%".parse().unwrap(), ..place.options(&path, "whole") };
    let (_, expected) = place.run(complete, "expected");
    let run = |kib: u64, checkpoint_steps: u64| {
        // The kernel does not let a file grow beyond the limit, as it does on a full disk.
        let limited = format!(
            "trap '' XFSZ; ulimit -f {kib}; exec \"$0\" --exact tests::state::child_with_a_full_disk --nocapture"
        );
        let mut command = std::process::Command::new("bash");
        command.arg("-c").arg(limited).arg(std::env::current_exe().unwrap());
        command.env(CHILD, place.folder.path()).env(CHILD_STEPS, checkpoint_steps.to_string());
        let done = command.output().unwrap();
        (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    // With checkpoints, and with none before the package.
    let mut places = BTreeSet::new();
    for checkpoint_steps in [3, 1000] {
        let out = format!("out{checkpoint_steps}");
        let mut ended = false;
        for kib in 0..64 {
            let (code, reported) = run(kib, checkpoint_steps);
            ended = code == Some(0);
            if ended {
                break;
            }
            assert!(code == Some(101) && reported.contains("NoSpace"), "{kib} KiB: {code:?} {reported}");
            assert!(!place.path(&out).exists(), "{kib} KiB");
            let known = [
                "checkpoint at step",
                "quarantine.jsonl",
                ".safetensors",
                ".onnx",
                "items.jsonl",
                "queries.jsonl",
                "model.toml",
            ];
            let found = known.iter().find(|place| reported.contains(*place));
            places.insert(*found.unwrap_or_else(|| panic!("{kib} KiB: {reported}")));
        }
        assert!(ended, "{places:?}");
        assert!(files(&place.path(&out)) == expected, "{checkpoint_steps}");
    }
    assert!(places.contains("checkpoint at step") && places.contains(".safetensors"), "{places:?}");
}

/// A run in PyTorch, by python/make_steps_golden.py.
#[derive(serde::Deserialize)]
struct Steps {
    losses: BTreeMap<u64, f64>,
    packages: String,
    sections: String,
    weights: BTreeMap<String, BTreeMap<String, String>>,
}

#[test]
fn five_hundred_steps_are_those_of_pytorch() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/train/steps.json");
    let golden: Steps = serde_json::from_slice(&fs::read(golden).unwrap()).unwrap();
    let floats = |digits: &str| -> Vec<f32> {
        let byte = |n: usize| u8::from_str_radix(&digits[2 * n..2 * n + 2], 16).unwrap();
        (0..digits.len() / 2).step_by(4).map(|n| f32::from_le_bytes([0, 1, 2, 3].map(|k| byte(n + k)))).collect()
    };
    let near = |name: &str, got: &[f32], want: &[f32], bound: f64| {
        let norm = |all: &mut dyn Iterator<Item = f64>| all.map(|x| x * x).sum::<f64>().sqrt();
        let apart = norm(&mut got.iter().zip(want).map(|(x, y)| f64::from(x - y)));
        let complete = norm(&mut want.iter().map(|x| f64::from(*x)));
        assert!(got.len() == want.len() && apart <= bound * complete, "{name}: {apart} of {complete}");
    };
    let dense = "dense_optimizer = { kind = \"adam\", rate = 0.001, epsilon = 1e-4 }\n";
    let place = TestFolder::new(&(TRAIN.replace("uniform = 8", "uniform = 0\nlog_q = false") + dense));
    for (&steps, loss) in &golden.losses {
        let path = place.events("e.jsonl", &events(16 * steps));
        let out = format!("out{steps}");
        let options = TrainOptions { checkpoint_steps: 1000, ..place.options(&path, &format!("work{steps}")) };
        let (report, _) = place.run(options, &out);
        assert!(report.steps == steps && (report.loss / loss - 1.0).abs() < 1e-5, "{steps}: {} {loss}", report.loss);
        if steps < 500 {
            continue;
        }
        let package = Package::open_with_progress(&place.path(&out), &|_| ()).unwrap();
        for (table, want) in package.tables.iter().zip([&golden.packages, &golden.sections]) {
            let rows = MasterTable::from_table(table, None).unwrap().values().unwrap();
            // The sections are f16.
            near(table.name(), &rows, &floats(want), if table.name() == "packages" { 1e-4 } else { 1e-3 });
        }
        let spec = package.spec.train.as_ref().unwrap().dense_optimizer;
        for (tower, name, output) in [(package.user.as_ref(), "user", "query"), (package.item.as_ref(), "item", "item")]
        {
            let side = Side::read(&package, tower.unwrap(), name, output, Some(&spec), &Threads::default()).unwrap();
            let parameters = side.weights.parameters();
            assert_eq!(parameters.len(), golden.weights[name].len());
            for parameter in parameters {
                let got = &side.weights.numbers[parameter.range.clone()];
                near(&parameter.name, got, &floats(&golden.weights[name][&parameter.name]), 1e-4);
            }
        }
    }
}
