//! Canary and shadow: their desired state, its changes, and the rollback of a canary.

use super::*;
use sterling_rollout::{Side, Traffic};
use sterling_snapshot::Desired;

fn store(bed: &Bed) -> Store {
    Store::new(bed.folder.path().join("store"))
}

/// Returns a registry of versions 1 to 3, with version 1 desired.
fn bed() -> Bed {
    let options = Options { judged_every: Duration::ZERO, ..Options::default() };
    let bed = Bed::with(|_, _, _| Ok(()), options);
    (1..=3).for_each(|version| bed.publish("m", version, "x", 0));
    store(&bed).change_desired("m", &Desired::default(), |desired_state| desired_state.answer(Some(1))).unwrap();
    bed.registry.refresh();
    assert_eq!((bed.active("m"), bed.in_memory("m")), (is(1, "x"), vec![1]));
    bed
}

fn traffic(text: &str) -> Traffic {
    serde_json::from_str(text).unwrap()
}

fn set(bed: &Bed, text: &str) {
    bed.registry.set_traffic("m", None, traffic(text)).unwrap();
    bed.registry.refresh();
}

/// Returns the canary and the shadow.
fn parts(registry: &Registry<String>) -> (Option<u64>, Option<u64>) {
    let unpinned = registry.unpinned("m").unwrap();
    let canary = unpinned.canary.map(|part| part.loaded.version());
    (canary, unpinned.shadow.map(|part| part.loaded.version()))
}

/// Records `requests` failures or answers for both versions.
fn ask(registry: &Registry<String>, requests: u64, is_failing: bool) {
    let run = registry.unpinned("m").unwrap().canary.unwrap().run.clone();
    for key in 0..requests {
        let (place, side) = run.side(&key.to_le_bytes());
        let is_failed = is_failing && side == Side::Canary;
        run.ended((place, side), (!is_failed).then_some(Duration::from_millis(3)));
    }
}

#[test]
fn versions_of_the_traffic_are_loaded_and_dropped() {
    let bed = bed();
    set(&bed, r#"{"canary": {"version": 2, "share": 0.5}, "shadow": {"version": 3, "share": 1}}"#);
    assert_eq!((parts(&bed.registry), bed.in_memory("m")), ((Some(2), Some(3)), vec![1, 2, 3]));
    assert_eq!(bed.active("m"), is(1, "x"));
    for (version, part) in [(2, "canary"), (3, "shadow")] {
        let refused = bed.registry.unload("m", version).unwrap_err();
        assert!(refused.kind() == Kind::Conflict && refused.to_string().contains(part), "{refused}");
    }
    // A newly started process applies the same traffic.
    let other = Registry::new(store(&bed), bed.reported.clone(), Options::default());
    other.refresh();
    assert_eq!(parts(&other), (Some(2), Some(3)));
    // Statistics are retained while nothing changes, and reset with the share, the version or the bytes.
    ask(&bed.registry, 100, false);
    let seen = |bed: &Bed| bed.registry.traffic("m").unwrap().canary.unwrap().observed().canary.requests;
    assert!(seen(&bed) > 20);
    bed.registry.refresh();
    set(&bed, r#"{"canary": {"version": 2, "share": 0.5}}"#);
    assert!(seen(&bed) > 20 && parts(&bed.registry) == (Some(2), None) && bed.in_memory("m") == [1, 2]);
    set(&bed, r#"{"canary": {"version": 2, "share": 0.6}}"#);
    assert_eq!(seen(&bed), 0);
    set(&bed, "{}");
    assert_eq!((parts(&bed.registry), bed.in_memory("m")), ((None, None), vec![1]));
    other.refresh();
    assert_eq!(parts(&other), (None, None));
}

#[test]
fn labels_stand_for_versions() {
    let bed = bed();
    let label = |version| {
        let desired_state = store(&bed).desired_state("m").unwrap();
        store(&bed)
            .change_desired("m", &desired_state, |desired_state| {
                desired_state.labels.extend([("next".into(), version)])
            })
            .unwrap();
        bed.registry.refresh();
        bed.registry.refresh();
    };
    label(2);
    set(&bed, r#"{"canary": {"label": "next", "share": 0.5}}"#);
    assert_eq!(parts(&bed.registry), (Some(2), None));
    label(3);
    assert_eq!(parts(&bed.registry), (Some(3), None));
    let desired_state = store(&bed).desired_state("m").unwrap();
    let refused =
        store(&bed).change_desired("m", &desired_state, |desired_state| desired_state.labels.clear()).unwrap_err();
    assert!(refused.to_string().contains("its canary is label `next`"), "{refused}");
    // On this server, the label points to the active version.
    bed.registry.label("m", "next", 1).unwrap();
    assert_eq!(parts(&bed.registry), (None, None));
}

#[test]
fn invalid_traffic_is_rejected_and_changes_nothing() {
    let bed = bed();
    set(&bed, r#"{"canary": {"version": 2, "share": 0.5}}"#);
    let before = store(&bed).desired_state("m").unwrap();
    for (text, kind, expected) in [
        (r#"{"canary": {"version": 1, "share": 0.5}}"#, Kind::Conflict, "version 1 is the active version"),
        (r#"{"canary": {"version": 9, "share": 0.5}}"#, Kind::NotFound, "there are: 1, 2, 3"),
        (r#"{"canary": {"label": "next", "share": 0.5}}"#, Kind::NotFound, "its canary is label `next`"),
        (r#"{"shadow": {"label": "next", "share": 0.5}}"#, Kind::NotFound, "its shadow is label `next`"),
        (r#"{"shadow": {"version": 0, "share": 0.5}}"#, Kind::NotFound, "version 0"),
        (r#"{"canary": {"share": 0.5}}"#, Kind::Invalid, "canary: got no version"),
        (r#"{"canary": {"version": 2, "share": 7}}"#, Kind::Invalid, "canary.share: got 7"),
        (r#"{"shadow": {"version": 2, "share": 0.5, "per_second": -1}}"#, Kind::Invalid, "shadow.per_second"),
    ] {
        let refused = bed.registry.set_traffic("m", None, traffic(text)).unwrap_err();
        assert!(refused.kind() == kind && refused.to_string().contains(expected), "{text}: {refused}");
    }
    let unknown = bed.registry.set_traffic("n", None, Traffic::default()).unwrap_err();
    assert_eq!(unknown.kind(), Kind::NotFound);
    let options = Options { follow: false, ..Options::default() };
    let still = Registry::new(store(&bed), bed.reported.clone(), options);
    still.refresh();
    assert_eq!(still.set_traffic("m", None, Traffic::default()).unwrap_err().kind(), Kind::Unsupported);
    assert_eq!((store(&bed).desired_state("m").unwrap(), parts(&bed.registry)), (before, (Some(2), None)));
    // A canary needs a desired version: without one, the newest is activated automatically. A shadow does not need one.
    let loose = Bed::obedient();
    (1..=2).for_each(|version| loose.put("m", version, "x"));
    let canary = traffic(r#"{"canary": {"version": 1, "share": 0.5}}"#);
    let refused = loose.registry.set_traffic("m", None, canary).unwrap_err();
    assert!(refused.to_string().contains("sterling activate m VERSION"), "{refused}");
    set(&loose, r#"{"shadow": {"version": 1, "share": 0.5}}"#);
    assert_eq!(parts(&loose.registry), (None, Some(1)));
}

#[test]
fn one_of_two_concurrent_operators_wins() {
    let bed = bed();
    let revision = bed.registry.traffic("m").unwrap().revision;
    let share = |share: f64| traffic(&format!("{{\"canary\": {{\"version\": 2, \"share\": {share}}}}}"));
    bed.registry.set_traffic("m", Some(revision), share(0.1)).unwrap();
    let late = bed.registry.set_traffic("m", Some(revision), share(0.2)).unwrap_err();
    assert!(late.kind() == Kind::Conflict && late.to_string().contains("canary version 2 with 10 %"), "{late}");
    for round in 0..5 {
        let revision = bed.registry.traffic("m").unwrap().revision;
        let registry = &bed.registry;
        let won: usize = std::thread::scope(|scope| {
            let race = |n: u32| registry.set_traffic("m", Some(revision), share(f64::from(n) / 10.0)).is_ok();
            let racers: Vec<_> = (0..6).map(|n| scope.spawn(move || race(n))).collect();
            racers.into_iter().map(|racer| usize::from(racer.join().unwrap())).sum()
        });
        assert_eq!(won, 1, "round {round}");
    }
}

#[test]
fn activating_a_canary_ends_it() {
    for version in [Some(2), None] {
        let bed = bed();
        set(&bed, r#"{"canary": {"version": 2, "share": 0.5}, "shadow": {"version": 2, "share": 0.5}}"#);
        let desired_state = store(&bed).desired_state("m").unwrap();
        let now =
            store(&bed).change_desired("m", &desired_state, |desired_state| desired_state.answer(version)).unwrap();
        assert!(now.traffic.canary.is_none() && now.traffic.shadow.is_some());
        bed.registry.refresh();
        assert_eq!((bed.active("m").0, parts(&bed.registry).0), (version.unwrap_or(3), None));
    }
    // The canary is active on this server alone: here it is no canary, on other servers it still is.
    let bed = bed();
    set(&bed, r#"{"canary": {"version": 2, "share": 0.5}}"#);
    bed.registry.activate("m", 2).unwrap();
    assert_eq!((parts(&bed.registry).0, bed.active("m")), (None, is(2, "x")));
    bed.registry.activate("m", 3).unwrap();
    assert_eq!(parts(&bed.registry).0, Some(2));
}

#[test]
fn a_worse_canary_is_rolled_back_everywhere() {
    let bed = bed();
    set(&bed, r#"{"canary": {"version": 2, "share": 0.3}}"#);
    let other = Registry::new(store(&bed), bed.reported.clone(), Options::default());
    other.refresh();
    ask(&bed.registry, 1000, false);
    bed.registry.refresh();
    assert_eq!(bed.registry.unpinned("m").unwrap().canary.unwrap().run.share(), 0.3);
    assert_eq!(bed.registry.troubles(), [""; 0]);
    ask(&bed.registry, 1000, true);
    bed.registry.refresh();
    let now = bed.registry.traffic("m").unwrap();
    let setting = now.setting.canary.unwrap();
    let stopped = setting.stopped.unwrap();
    assert_eq!((setting.share, stopped.share, now.canary.unwrap().share()), (0.0, 0.3, 0.0));
    assert!(stopped.reason.contains("failed requests"), "{}", stopped.reason);
    let troubles = bed.registry.troubles();
    assert!(troubles.len() == 1 && troubles[0].contains("its canary was rolled back: failed requests"), "{troubles:?}");
    other.refresh();
    assert_eq!(other.unpinned("m").unwrap().canary.unwrap().run.share(), 0.0);
    // The stopped canary stays in memory, is rolled back once, and restarts only by an operator's change.
    let revision = now.revision;
    bed.registry.refresh();
    assert_eq!((bed.registry.traffic("m").unwrap().revision, bed.in_memory("m")), (revision, vec![1, 2]));
    let again = traffic(&format!("{{\"canary\": {}}}", serde_json::to_string(&setting_of(&bed, 0.2)).unwrap()));
    bed.registry.set_traffic("m", Some(revision), again).unwrap();
    let now = bed.registry.traffic("m").unwrap();
    assert_eq!((now.setting.canary.unwrap().stopped, now.canary.unwrap().share()), (None, 0.2));
    assert_eq!(bed.registry.troubles(), [""; 0]);
}

/// Returns the canary's setting with another share, as a client would send it back.
fn setting_of(bed: &Bed, share: f64) -> sterling_rollout::Canary {
    sterling_rollout::Canary { share, ..bed.registry.traffic("m").unwrap().setting.canary.unwrap() }
}

#[test]
fn a_manual_canary_is_not_rolled_back_and_a_failed_store_write_stops_it_locally() {
    let bed = bed();
    set(&bed, r#"{"canary": {"version": 2, "share": 0.3, "automatic": false}}"#);
    ask(&bed.registry, 1000, true);
    bed.registry.refresh();
    assert_eq!(bed.registry.unpinned("m").unwrap().canary.unwrap().run.share(), 0.3);
    set(&bed, r#"{"canary": {"version": 2, "share": 0.3}}"#);
    ask(&bed.registry, 1000, true);
    let path = bed.folder.path().join("store/m/wish.json");
    let desired_state = fs::read(&path).unwrap();
    fs::write(&path, "{").unwrap();
    bed.registry.refresh();
    assert_eq!(bed.registry.unpinned("m").unwrap().canary.unwrap().run.share(), 0.0);
    let troubles = bed.registry.troubles();
    assert!(troubles.iter().any(|trouble| trouble.contains("was rolled back")), "{troubles:?}");
    assert!(bed.registry.traffic("m").unwrap().setting.canary.unwrap().stopped.is_none());
    fs::write(&path, desired_state).unwrap();
    bed.registry.refresh();
    assert_eq!(store(&bed).desired_state("m").unwrap().traffic.canary.unwrap().share, 0.0);
    // Another writer has removed the canary meanwhile; it stays removed.
    set(&bed, r#"{"canary": {"version": 2, "share": 0.4}}"#);
    ask(&bed.registry, 1000, true);
    let desired_state = store(&bed).desired_state("m").unwrap();
    store(&bed)
        .change_desired("m", &desired_state, |desired_state| desired_state.traffic = Traffic::default())
        .unwrap();
    bed.registry.refresh();
    assert!(store(&bed).desired_state("m").unwrap().traffic.is_empty() && parts(&bed.registry) == (None, None));
}

#[test]
fn an_ended_canary_stays_ended_while_the_store_is_stale() {
    let bed = bed();
    set(&bed, r#"{"canary": {"version": 2, "share": 0.5}}"#);
    let path = bed.folder.path().join("store/m/wish.json");
    let before = fs::read(&path).unwrap();
    set(&bed, "{}");
    let after = fs::read(&path).unwrap();
    // Simulates a bucket whose listing fails: an earlier state is seen again, or none at all.
    for earlier in [Some(before), None] {
        match earlier {
            Some(bytes) => fs::write(&path, bytes).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        (0..2).for_each(|_| bed.registry.refresh());
        assert_eq!((parts(&bed.registry), bed.active("m")), ((None, None), is(1, "x")));
        let troubles = bed.registry.troubles();
        assert!(troubles.len() == 1 && troubles[0].contains("expected revision 3 or a later one"), "{troubles:?}");
    }
    fs::write(&path, after).unwrap();
    bed.registry.refresh();
    assert_eq!(bed.registry.troubles(), [""; 0]);
    // The server's own write counts, although the file was deleted and restarts at the first revision.
    fs::remove_file(&path).unwrap();
    store(&bed).change_desired("m", &Desired::default(), |desired_state| desired_state.answer(Some(1))).unwrap();
    set(&bed, r#"{"canary": {"version": 2, "share": 0.5}}"#);
    assert_eq!((parts(&bed.registry), bed.registry.troubles()), ((Some(2), None), Vec::new()));
}
