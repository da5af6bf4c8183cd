//! Desired state in the store, and how far a server follows it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use sterling_snapshot::Desired;

fn desired_state(bed: &Bed, change: impl FnOnce(&mut Desired)) {
    let store = Store::new(bed.folder.path().join("store"));
    store.change_desired("m", &store.desired_state("m").unwrap(), change).unwrap();
    bed.registry.refresh();
}

fn labels(bed: &Bed) -> Vec<(String, u64)> {
    bed.registry.labels("m").unwrap().into_iter().collect()
}

#[test]
fn the_desired_version_answers() {
    let bed = Bed::obedient();
    (1..=3).for_each(|version| bed.put("m", version, "x"));
    assert_eq!(bed.active("m"), is(3, "x"));
    desired_state(&bed, |desired_state| desired_state.version = Some(1));
    assert_eq!(bed.active("m"), is(1, "x"));
    // A newer version is not activated while version 1 is desired.
    bed.put("m", 4, "x");
    assert_eq!(bed.active("m"), is(1, "x"));
    // The decision of this server's operator holds until the desired version changes; changing a label does not end it.
    bed.registry.activate("m", 2).unwrap();
    bed.registry.refresh();
    desired_state(&bed, |desired_state| {
        desired_state.labels.insert("canary".into(), 4);
    });
    assert_eq!((bed.active("m"), labels(&bed)), (is(2, "x"), vec![("canary".into(), 4)]));
    desired_state(&bed, |desired_state| desired_state.version = Some(3));
    assert_eq!(bed.active("m"), is(3, "x"));
    assert_eq!(bed.registry.troubles(), [""; 0]);
    // Without a desired version, the newest one is activated, although it was published long before.
    desired_state(&bed, |desired_state| desired_state.version = None);
    assert_eq!(bed.active("m"), is(4, "x"));
    bed.put("m", 5, "x");
    assert_eq!(bed.active("m"), is(5, "x"));
}

#[test]
fn a_starting_server_loads_the_desired_version_only() {
    let bed = Bed::obedient();
    (1..=2).for_each(|version| bed.publish("m", version, "x", 0));
    let store = Store::new(bed.folder.path().join("store"));
    let wished =
        store.change_desired("m", &Desired::default(), |desired_state| desired_state.version = Some(1)).unwrap();
    bed.registry.refresh();
    assert_eq!((bed.active("m"), bed.reported.tried("m", 2)), (is(1, "x"), 0));
    // If the desired version cannot be loaded, no other version is activated.
    fs::remove_dir_all(bed.path("m", 1)).unwrap();
    let other = Registry::new(store.clone(), bed.reported.clone(), Options::default());
    other.refresh();
    assert!(other.ready().unwrap_err().to_string().contains("desired version 1 is not in memory yet"));
    assert_eq!(other.troubles(), ["model `m`: version 1 is desired in the store, none answers"]);
    store.change_desired("m", &wished, |desired_state| desired_state.version = Some(2)).unwrap();
    other.refresh();
    assert_eq!(other.get("m", VersionSelector::Active).unwrap().version(), 2);
    // A registry that does not follow the store activates the newest once.
    let still = Registry::new(store, bed.reported.clone(), Options { follow: false, ..Options::default() });
    bed.publish("m", 3, "x", 0);
    still.refresh();
    assert_eq!(still.get("m", VersionSelector::Active).unwrap().version(), 3);
}

#[test]
fn a_version_that_may_be_an_old_merge_answers_for_now_only() {
    let bed = Bed::obedient();
    (1..=2).for_each(|version| bed.publish("m", version, "x", 0));
    // The manifest of version 2, which may be a merge of version 1, cannot be read while the server starts.
    let manifest = bed.path("m", 2).join("manifest.json");
    let text = fs::read(&manifest).unwrap();
    fs::remove_file(&manifest).unwrap();
    fs::create_dir(&manifest).unwrap();
    desired_state(&bed, |desired_state| desired_state.version = Some(1));
    assert_eq!(bed.active("m"), is(1, "x"));
    assert_eq!(
        bed.registry.troubles(),
        ["model `m`: version 1 or a later merge of it is desired in the store, version 1 answers"]
    );
    // While it answers, it is not loaded again.
    bed.registry.refresh();
    assert_eq!((bed.registry.troubles().len(), bed.reported.tried("m", 1)), (1, 1));
    fs::remove_dir(&manifest).unwrap();
    fs::write(&manifest, text).unwrap();
    bed.registry.refresh();
    assert_eq!(bed.registry.troubles(), [""; 0]);
    assert_eq!((bed.active("m"), bed.reported.tried("m", 1)), (is(1, "x"), 1));
}

#[test]
fn a_failed_desired_version_is_retried_and_the_active_one_keeps_serving() {
    let is_away = Arc::new(AtomicBool::new(true));
    let away = is_away.clone();
    let bed = Bed::new(move |_, version, _| match version == 1 && away.load(Ordering::SeqCst) {
        true => Err(Error::unavailable("away")),
        false => Ok(()),
    });
    bed.publish("m", 1, "x", 0);
    bed.put("m", 2, "x");
    desired_state(&bed, |desired_state| {
        desired_state.version = Some(1);
        desired_state.labels.insert("old".into(), 1);
    });
    assert_eq!((bed.active("m"), bed.registry.troubles().len()), (is(2, "x"), 2));
    is_away.store(false, Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(200));
    bed.registry.refresh();
    assert_eq!((bed.active("m"), labels(&bed)), (is(1, "x"), vec![("old".into(), 1)]));
    assert_eq!(bed.registry.troubles(), [""; 0]);
    // An unreadable file of the desired state changes nothing, and is reported.
    let path = bed.folder.path().join("store/m/wish.json");
    let complete = fs::read(&path).unwrap();
    fs::write(&path, "{").unwrap();
    bed.registry.refresh();
    assert_eq!((bed.active("m"), labels(&bed)), (is(1, "x"), vec![("old".into(), 1)]));
    let troubles = bed.registry.troubles();
    let reported = troubles.iter().all(|trouble| {
        trouble.contains("model `m`: its desired state cannot be read") && trouble.contains("wish.json")
    });
    assert!(troubles.len() == 1 && reported, "{troubles:?}");
    fs::write(&path, complete).unwrap();
    bed.registry.refresh();
    assert_eq!(bed.registry.troubles(), [""; 0]);
}

#[test]
fn labels_of_the_store_come_and_go_and_those_of_a_server_stay() {
    let bed = Bed::obedient();
    (1..=3).for_each(|version| bed.put("m", version, "x"));
    bed.registry.load("m", 1).unwrap();
    bed.registry.label("m", "mine", 1).unwrap();
    let set = |pairs: &[(&str, u64)]| {
        let labels: BTreeMap<String, u64> =
            pairs.iter().map(|(label, version)| (label.to_string(), *version)).collect();
        desired_state(&bed, |desired_state| desired_state.labels = labels);
    };
    set(&[("a", 1), ("b", 2)]);
    assert_eq!(labels(&bed), [("a".into(), 1), ("b".into(), 2), ("mine".into(), 1)]);
    assert_eq!(bed.active("m"), is(3, "x"));
    // A label is moved on this server and in the store: the last change takes effect.
    bed.registry.label("m", "a", 3).unwrap();
    set(&[("a", 1), ("b", 1)]);
    assert_eq!(labels(&bed), [("a".into(), 3), ("b".into(), 1), ("mine".into(), 1)]);
    set(&[("a", 2)]);
    assert_eq!(labels(&bed), [("a".into(), 2), ("mine".into(), 1)]);
    set(&[]);
    assert_eq!(labels(&bed), [("mine".into(), 1)]);
}

#[test]
fn a_version_is_activated_at_all_servers_of_a_store() {
    let bed = Bed::obedient();
    (1..=3).for_each(|version| bed.put("m", version, "x"));
    let store = Store::new(bed.folder.path().join("store"));
    let other = Registry::new(store.clone(), bed.reported.clone(), Options::default());
    other.refresh();
    assert_eq!(bed.registry.desired("m").unwrap().0.version, None);
    bed.registry.activate_in_store("m", 1).unwrap();
    assert_eq!((bed.active("m"), bed.registry.desired("m").unwrap().0.version), (is(1, "x"), Some(1)));
    assert_eq!((store.desired_state("m").unwrap().version, bed.registry.troubles()), (Some(1), vec![]));
    other.refresh();
    assert_eq!(other.get("m", VersionSelector::Active).unwrap().version(), 1);
    // Reverts an activation that this server alone had made: the desired state needs no new revision.
    let revision = store.desired_state("m").unwrap().revision;
    bed.registry.activate("m", 3).unwrap();
    bed.registry.activate_in_store("m", 1).unwrap();
    assert_eq!((bed.active("m"), store.desired_state("m").unwrap().revision), (is(1, "x"), revision));
    // A version that cannot be loaded, or does not exist, changes nothing.
    fs::remove_dir_all(bed.path("m", 2)).unwrap();
    assert!(bed.registry.activate_in_store("m", 2).is_err());
    assert_eq!((bed.active("m"), store.desired_state("m").unwrap().version), (is(1, "x"), Some(1)));
    let options = Options { follow: false, ..Options::default() };
    let alone = Registry::new(store.clone(), bed.reported.clone(), options);
    alone.refresh();
    assert!(alone.activate_in_store("m", 3).unwrap_err().to_string().contains("does not follow"));
    assert!(alone.desired("m").is_none());
}
