//! Resumed runs: other events are rejected, and a package that was already written stays.

use super::*;

/// Folder `work` with the checkpoint at step 6 of a run over `path`, as after a kill.
fn interrupted(place: &TestFolder, path: &Path) {
    let mut trainer = place.open(place.options(path, "work")).unwrap();
    let (at, steps) = (place.path("at"), std::cell::Cell::new(0));
    trainer
        .run(&|_| {
            steps.set(steps.get() + 1);
            if steps.get() == 7 {
                copied(&place.path("work"), &at);
            }
        })
        .unwrap();
    drop(trainer);
    fs::remove_dir_all(place.path("work")).unwrap();
}

#[test]
fn other_events_than_those_of_the_checkpoint_are_rejected() {
    let place = TestFolder::new(TRAIN);
    let lines = events(200);
    let path = place.events("e.jsonl", &lines);
    let (_, expected) = place.run(place.options(&path, "work0"), "out");
    interrupted(&place, &path);
    let size = fs::metadata(&path).unwrap().len() as usize;
    let resume = |lines: &[Value]| {
        // The same name and size, as standard input would have.
        let mut text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        assert!(text.len() <= size, "{} of {size} bytes", text.len());
        text.push_str(&"\n".repeat(size - text.len()));
        fs::write(&path, text).unwrap();
        let _ = fs::remove_dir_all(place.path("work"));
        copied(&place.path("at"), &place.path("work"));
        let mut trainer = place.open(place.options(&path, "work")).unwrap();
        assert_eq!(trainer.resumed_from(), 6);
        let ended = trainer.run(&|_| ()).map(|_| trainer);
        assert!(ended.is_ok() || place.path("work/checkpoints/6").exists());
        ended
    };
    let rejected = |lines: &[Value], expected: &str| {
        let error = resume(lines).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind(), Kind::Conflict, "{text}");
        assert!(text.contains("checkpoints/6: ") && text.contains(expected), "{text}");
    };
    rejected(&[], "the input ends after event 0, but the checkpoint contains 96");
    rejected(&lines[..50], "the input ends after event 50, but the checkpoint contains 96");
    rejected(&lines[1..], "the first 96 events differ");
    let others: [(&str, Value); 5] = [
        ("item", json!(0)),
        ("time", json!(1)),
        ("weight", json!(2)),
        ("user", json!({"installed": [2]})),
        ("context", json!({})),
    ];
    for (field, value) in others {
        let mut other = lines.clone();
        other[95][field] = value;
        let last = other.len() - 1;
        rejected(&other[..last], "the first 96 events differ");
    }
    let mut swapped = lines.clone();
    swapped.swap(3, 4);
    rejected(&swapped, "the first 96 events differ");
    // The same events end with the same bits.
    let trainer = resume(&lines).unwrap();
    trainer.write(&place.path("again")).unwrap();
    assert!(files(&place.path("again")) == expected);
}

#[test]
fn a_run_that_was_killed_after_it_wrote_its_package_ends() {
    let place = TestFolder::new(TRAIN);
    let path = place.events("e.jsonl", &events(200));
    let (out, other) = (place.path("out"), place.path("other"));
    let options = || place.options(&path, "work");
    assert!(options().check_out(&out).is_ok());
    let (_, expected) = place.run(options(), "out");
    assert!(options().check_out(&out).is_ok(), "the run has not ended");
    let elsewhere = place.options(&path, "elsewhere");
    assert!(elsewhere.check_out(&out).is_err(), "the package of another run");
    let mut again = place.open(options()).unwrap();
    assert!(again.resumed_from() > 0);
    again.run(&|_| ()).unwrap();
    again.write(&out).unwrap();
    assert!(files(&out) == expected);
    // Another package at the path is not replaced.
    copied(&out, &other);
    fs::write(other.join("items.jsonl"), "").unwrap();
    let error = again.write(&other).unwrap_err();
    assert!(error.kind() == Kind::Conflict && error.to_string().contains("is not the package of this run"), "{error}");
    assert!(fs::read(other.join("items.jsonl")).unwrap().is_empty());
    let left = files_of(place.folder.path());
    assert!(!left.iter().any(|name| name.starts_with('.')), "{left:?}");
    again.clear().unwrap();
    assert!(options().check_out(&out).is_err() && !place.path("work").exists());
}
