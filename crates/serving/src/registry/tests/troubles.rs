//! Warnings about a store that differs from the served state.

use super::*;
use sterling_snapshot::Desired;

#[test]
fn an_unreachable_store_removes_no_version() {
    let bed = Bed::with(|_, _, _| Ok(()), Options { only: Some("m".into()), ..Options::default() });
    (1..=2).for_each(|version| bed.put("m", version, "x"));
    let store = Store::new(bed.folder.path().join("store"));
    let desired = |desired_state: &mut Desired| {
        desired_state.version = Some(2);
        desired_state.labels.insert("old".into(), 1);
    };
    store.change_desired("m", &Desired::default(), desired).unwrap();
    bed.registry.refresh();
    let labels = |bed: &Bed| bed.registry.labels("m").unwrap().into_iter().collect::<Vec<_>>();
    let before = (bed.active("m"), labels(&bed));
    assert_eq!(before, (is(2, "x"), vec![("old".into(), 1)]));
    // Simulates an unmounted store: an empty folder in its place.
    let (store, away) = (bed.folder.path().join("store"), bed.folder.path().join("away"));
    fs::rename(&store, &away).unwrap();
    fs::create_dir(&store).unwrap();
    bed.registry.refresh();
    assert_eq!((bed.active("m"), labels(&bed)), before);
    let troubles = bed.registry.troubles();
    assert!(troubles.iter().any(|reported| reported.contains("version 2 is served from memory")), "{troubles:?}");
    assert!(troubles.iter().any(|reported| reported.contains("expected revision 1 or a later one")), "{troubles:?}");
    fs::remove_dir(&store).unwrap();
    fs::rename(&away, &store).unwrap();
    bed.registry.refresh();
    assert_eq!((bed.active("m"), labels(&bed)), before);
    assert_eq!(bed.registry.troubles(), [""; 0]);
}

#[test]
fn rejected_versions_that_should_serve_are_reported() {
    let bed = Bed::new(|_, version, _| if version == 2 { Err(Error::corrupt("no")) } else { Ok(()) });
    bed.put("m", 1, "x");
    bed.put("m", 2, "x");
    let reported =
        "model `m`: version 2 was rejected (corrupt), version 1 answers: `GET /v1/models/m/versions` has the reason";
    assert_eq!((bed.active("m"), bed.registry.troubles()), (is(1, "x"), vec![reported.to_owned()]));
    // While a later version is active, the rejected version would not serve anyway, so it is no trouble.
    bed.put("m", 3, "x");
    assert_eq!((bed.active("m"), bed.registry.troubles()), (is(3, "x"), vec![]));
    // The folder of an active version was damaged.
    fs::remove_file(bed.path("m", 3).join("text")).unwrap();
    bed.registry.refresh();
    let reported = "model `m`: version 3 is served from memory, its files in the store were rejected (corrupt): \
                `GET /v1/models/m/versions` has the reason";
    assert_eq!((bed.active("m"), bed.registry.troubles()), (is(3, "x"), vec![reported.to_owned()]));
}

#[test]
fn versions_that_the_store_has_no_more_are_no_trouble() {
    let bed = Bed::new(|_, version, _| if version == 2 { Err(Error::corrupt("no")) } else { Ok(()) });
    bed.put("m", 1, "x");
    bed.put("m", 2, "x");
    assert_eq!(bed.registry.troubles().len(), 1);
    fs::remove_dir_all(bed.path("m", 2)).unwrap();
    bed.registry.refresh();
    assert_eq!((bed.active("m"), bed.registry.troubles()), (is(1, "x"), vec![]));
}
