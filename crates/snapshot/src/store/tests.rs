#![allow(clippy::unwrap_used)]

mod folder;
mod memory;
mod remote;

use std::path::Path;

use super::*;
use crate::model::MODEL_FILE;
use sterling_storage::files;

/// Writes a version of two data files, whose bytes depend on `seed`, as a publication does.
fn fill(folder: &Path, model: &str, version: u64, seed: u8) -> Result<()> {
    let write = |name: &str, bytes: &[u8]| files::write_atomic(&folder.join(name), |out| out.write_all(bytes));
    let named = [(MODEL_FILE, vec![b'#'; 10]), ("data.bin", vec![seed; 100_000]), ("same.bin", vec![7; 50_000])];
    let files = named.iter().map(|(name, bytes)| Ok((name.to_string(), write(name, bytes)?)));
    Manifest::small(model, version, files.collect::<Result<_>>()?).write(folder)
}

fn put(store: &Store, seed: u8) -> Result<u64> {
    store.publish("m", |folder, version| fill(folder, "m", version, seed))
}

/// Tests the desired state in any kind of store.
fn desired_state_round_trips(store: &Store) {
    assert_eq!(store.desired_state("m").unwrap(), Desired::default());
    for seed in 1..=3 {
        put(store, seed).unwrap();
    }
    let nothing = store.desired_state("m").unwrap();
    let first = store.change_desired("m", &nothing, |desired_state| desired_state.version = Some(2)).unwrap();
    assert_eq!((first.version, first.revision), (Some(2), 1));
    // A client with an outdated state gets the current one in the error, and changes nothing.
    let late = store.change_desired("m", &nothing, |desired_state| desired_state.version = Some(3)).unwrap_err();
    assert_eq!(late.kind(), sterling_core::error::Kind::Conflict);
    assert!(late.to_string().contains("to version 2; this change was not applied"), "{late}");
    assert_eq!(store.desired_state("m").unwrap(), first);
    let second = store
        .change_desired("m", &first, |desired_state| {
            desired_state.labels.insert("canary".into(), 3);
        })
        .unwrap();
    assert_eq!(second.reported(), "version 2, labels `canary` = 3");
    for invalid in ["", "a/b", ".x"] {
        assert!(
            store
                .change_desired("m", &second, |desired_state| {
                    desired_state.labels.insert(invalid.into(), 3);
                })
                .is_err(),
            "{invalid}"
        );
    }
    let missing = store.change_desired("m", &second, |desired_state| desired_state.version = Some(9)).unwrap_err();
    assert!(missing.to_string().contains("there are: 1, 2, 3"), "{missing}");
    assert_eq!(store.desired_state("m").unwrap(), second);
    // A removed version does not block other changes of the desired state.
    store.remove("m", 3).unwrap();
    let second = store.change_desired("m", &second, |desired_state| desired_state.version = Some(1)).unwrap();
    put(store, 4).unwrap();
    // Of several concurrent changes, exactly one succeeds.
    let mut now = second;
    for round in 0..5 {
        let race = |n: u64| {
            store.change_desired("m", &now, |desired_state| {
                desired_state.version = [Some(1), Some(2), Some(4)][n as usize % 3]
            })
        };
        let won: Vec<Desired> = std::thread::scope(|scope| {
            let racers: Vec<_> = (0..6).map(|n| scope.spawn(move || race(n))).collect();
            racers.into_iter().filter_map(|racer| racer.join().unwrap().ok()).collect()
        });
        assert_eq!(won.len(), 1, "round {round}");
        now = store.desired_state("m").unwrap();
        assert_eq!(now, won[0]);
    }
    store.renew().unwrap();
    assert_eq!(store.seen_desired("m").unwrap(), now);
}
