use std::fs;

use super::super::folder::{names_in, place};
use super::*;
use sterling_core::error::Kind;

fn whole(folder: &Path) -> Result<()> {
    fs::write(folder.join(MANIFEST), b"{}").map_err(|e| Error::io(folder.display(), e))
}

#[test]
fn a_merged_version_is_superseded_by_a_published_one() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    store.publish("m", |folder, _| whole(folder)).unwrap();
    assert_eq!(store.publish_unrivalled("m", |folder, _| whole(folder)).unwrap(), 2);
    // Another version is published during the publication, or another publication is active at its start or end.
    let beaten = store.publish_unrivalled("m", |folder, _| {
        store.publish("m", |folder, _| whole(folder))?;
        whole(folder)
    });
    assert_eq!(beaten.unwrap_err().kind(), Kind::Conflict);
    assert_eq!(store.versions("m").unwrap(), [1, 2, 4]);
    let outer = store.publish("m", |folder, _| {
        let inner = store.publish_unrivalled("m", |_, _| unreachable!());
        assert_eq!(inner.unwrap_err().kind(), Kind::Conflict);
        whole(folder)
    });
    assert_eq!(outer.unwrap(), 5);
    // A failed publication does not block it.
    assert!(store.publish("m", |_, _| Err(Error::invalid("no"))).is_err());
    let last = store.publish_unrivalled("m", |folder, _| whole(folder)).unwrap();
    store.remove("m", 2).unwrap();
    assert_eq!(store.versions("m").unwrap(), [1, 4, 5, last]);
    assert!(store.remove("m", 2).is_err());
    assert_eq!(names_in(&root.path().join("m")).unwrap().len(), 5, "four versions and the lock");
}

#[test]
fn a_missing_folder_is_reported_until_it_returns() {
    let root = tempfile::tempdir().unwrap();
    let (here, removed) = (root.path().join("store"), root.path().join("gone"));
    let store = Store::new(&here);
    // The first publication creates a folder that never existed.
    store.renew().unwrap();
    assert_eq!(store.trouble(), None);
    store.publish("m", |folder, _| whole(folder)).unwrap();
    store.renew().unwrap();
    assert_eq!(store.trouble(), None);
    fs::rename(&here, &removed).unwrap();
    store.renew().unwrap();
    let reported = store.trouble().unwrap();
    assert!(reported.contains("cannot be read") && !reported.contains(root.path().to_str().unwrap()), "{reported}");
    fs::write(&here, "a file in its place").unwrap();
    store.renew().unwrap();
    assert!(store.trouble().unwrap().contains("not a directory"));
    fs::remove_file(&here).unwrap();
    fs::rename(&removed, &here).unwrap();
    store.renew().unwrap();
    assert_eq!(store.trouble(), None);
}

#[test]
fn publications_are_atomic_and_numbered_ascending() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path().join("store"));
    assert!(store.models().unwrap().is_empty());
    for expected in [1, 2] {
        let version = store
            .publish("m", |folder, version| {
                assert_eq!(version, expected);
                whole(folder)
            })
            .unwrap();
        assert_eq!(version, expected);
    }
    let failed = store.publish("m", |folder, _| {
        fs::write(folder.join("half"), b"x").unwrap();
        Err(Error::invalid("no"))
    });
    assert!(failed.is_err());
    assert_eq!(store.versions("m").unwrap(), [1, 2]);
    assert_eq!(
        names_in(&root.path().join("store/m")).unwrap().len(),
        3,
        "two versions, the lock, nothing half-written"
    );
    fs::create_dir(root.path().join("store/m/3")).unwrap();
    assert_eq!(store.versions("m").unwrap(), [1, 2], "a folder without a manifest is no version");
    assert_eq!(store.models().unwrap(), ["m"]);
    for name in ["", "a/b", "..", ".x", "a b", "ü", &"x".repeat(129)] {
        assert_eq!(store.publish(name, |_, _| Ok(())).unwrap_err().kind(), Kind::Invalid, "{name}");
    }
}

#[test]
fn the_desired_state_changes_by_compare_and_swap() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    desired_state_round_trips(&store);
    for text in ["", "{}", "[]", "{\"format\": 1}", "{\"format\": 2, \"revision\": 1, \"nonce\": \"\"}"] {
        fs::write(root.path().join("m").join(DESIRED_FILE), text).unwrap();
        assert!(store.desired_state("m").unwrap_err().to_string().contains("wish.json"), "{text}");
    }
    let many: Vec<String> = (0..300).map(|n| format!("\"l{n}\": 1")).collect();
    let text = format!("{{\"format\": 1, \"revision\": 1, \"nonce\": \"\", \"labels\": {{{}}}}}", many.join(","));
    fs::write(root.path().join("m").join(DESIRED_FILE), text).unwrap();
    assert!(store.desired_state("m").unwrap_err().to_string().contains("300 labels"));
}

#[test]
fn a_folder_that_cannot_be_made_durable_is_removed() {
    let root = tempfile::tempdir().unwrap();
    let (from, to) = (root.path().join("from"), root.path().join("to"));
    fs::create_dir(&from).unwrap();
    let failed = || Err(std::io::Error::other("no sync"));
    assert_eq!(place(&from, &to, failed).unwrap_err().to_string(), "no sync");
    assert_eq!(names_in(root.path()).unwrap(), ["from"]);
    // If the rename cannot be reverted, the error reports that.
    let blocked = || {
        fs::write(&from, "a file in its place")?;
        Err(std::io::Error::other("no sync"))
    };
    let reported = place(&from, &to, blocked).unwrap_err().to_string();
    assert!(
        reported.starts_with("no sync; the version is published, but may be lost in a power failure"),
        "{reported}"
    );
    fs::remove_file(&from).unwrap();
    fs::rename(&to, &from).unwrap();
    place(&from, &to, || Ok(())).unwrap();
    assert_eq!(names_in(root.path()).unwrap(), ["to"]);
}

#[test]
fn an_aborted_publication_leaves_neither_files_nor_a_gap() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    store.publish("m", |folder, _| whole(folder)).unwrap();
    let unwound = |fill: &dyn Fn(&Path)| {
        let broken = || {
            store.publish_unrivalled("m", |folder, version| {
                assert_eq!(version, 2);
                whole(folder)?;
                fill(folder);
                std::panic::resume_unwind(Box::new("begins again"));
            })
        };
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(broken)).is_err());
    };
    unwound(&|_| {});
    assert_eq!(names_in(&root.path().join("m")).unwrap().len(), 2, "a version and the lock");
    assert_eq!(store.publish_unrivalled("m", |folder, _| whole(folder)).unwrap(), 2);
    store.remove("m", 2).unwrap();
    // A published number is never reused.
    assert_eq!(store.publish("m", |folder, _| whole(folder)).unwrap(), 3);
}
