use std::fs;
use std::sync::atomic::Ordering::SeqCst;

use tempfile::TempDir;

use super::super::lease::{LEASE, LEASE_MS};
use super::memory::{CallFault, Fault, Memory};
use super::*;
use sterling_core::error::Kind;
use sterling_storage::objects::{Objects as _, Proof, WriteCondition, prove};

/// A store in a bucket, with cache folders of several machines.
struct Bench {
    memory: Arc<Memory>,
    caches: TempDir,
}

impl Bench {
    fn new() -> Self {
        Bench { memory: Memory::new(), caches: tempfile::tempdir().unwrap() }
    }

    /// Returns the store as seen from a machine, with a cache of this size.
    fn seen_from(&self, machine: &str, limit_mb: u64) -> Store {
        let folder = Some(self.caches.path().join(machine));
        let options = CacheOptions { folder, limit_mb };
        let remote = Remote::new("s3://bucket/models".into(), self.memory.clone(), &options).unwrap();
        Store { shelf: Arc::new(remote), shard: None, folds: None }
    }

    fn store(&self, machine: &str) -> Store {
        let store = self.seen_from(machine, 64);
        store.renew().unwrap();
        store
    }
}

fn data(held: &PinnedVersion) -> Vec<u8> {
    fs::read(held.folder().join("data.bin")).unwrap()
}

#[test]
fn published_versions_are_fetched_completely() {
    let bench = Bench::new();
    let (here, there) = (bench.store("here"), bench.store("there"));
    assert_eq!((put(&here, 1).unwrap(), put(&there, 2).unwrap(), put(&here, 3).unwrap()), (1, 2, 3));
    there.renew().unwrap();
    assert_eq!((there.models().unwrap(), there.versions("m").unwrap()), (vec!["m".to_owned()], vec![1, 2, 3]));
    let outline = there.outline("m", 3).unwrap();
    assert!(outline.join(MANIFEST).exists() && outline.join(MODEL_FILE).exists() && !outline.join("data.bin").exists());
    let held = there.ensure_local("m", 3).unwrap();
    assert_eq!((held.folder(), data(&held)), (&*there.folder("m", 3), vec![3; 100_000]));
    Manifest::read(held.folder()).unwrap().verify(held.folder()).unwrap();
    // The other file was hard-linked from the version that was published here.
    let read = bench.memory.bytes_read.load(SeqCst);
    assert!(read < 100_100, "{read} bytes were read");
    there.ensure_local("m", 3).unwrap();
    assert_eq!(bench.memory.bytes_read.load(SeqCst), read, "cached files are not read again");
    let keys = bench.memory.keys();
    assert!(keys.iter().all(|key| !key.contains(LEASE) && !key.contains(".probe")), "{keys:?}");
    here.remove("m", 2).unwrap();
    there.renew().unwrap();
    assert_eq!(there.versions("m").unwrap(), [1, 3]);
    assert_eq!(there.ensure_local("m", 2).unwrap_err().kind(), Kind::NotFound);
    assert_eq!(put(&here, 4).unwrap(), 4);
}

#[test]
fn publishers_at_once_get_a_number_each_and_a_number_is_given_once() {
    let bench = Bench::new();
    let mut given: Vec<u64> = std::thread::scope(|scope| {
        let publish = |n: u8| put(&bench.store(&format!("machine {n}")), n).unwrap();
        let publishers: Vec<_> = (0..6).map(|n| scope.spawn(move || publish(n))).collect();
        publishers.into_iter().map(|publisher| publisher.join().unwrap()).collect()
    });
    given.sort_unstable();
    assert_eq!(given, (1..=6).collect::<Vec<_>>());
    let store = bench.store("a");
    store.remove("m", 6).unwrap();
    assert_eq!(put(&store, 1).unwrap(), 7);
    // A write whose answer was lost was still done.
    bench.memory.loses_answer.store(true, SeqCst);
    assert_eq!(put(&store, 1).unwrap(), 9, "the number whose answer was lost stays unused");
    store.renew().unwrap();
    assert_eq!(store.versions("m").unwrap(), [1, 2, 3, 4, 5, 7, 9]);
}

#[test]
fn interrupted_publications_are_no_versions_and_are_removed() {
    let bench = Bench::new();
    put(&bench.store("a"), 1).unwrap();
    let mut complete = vec![1];
    // The process is killed at each of its writes in turn, simulated by a bucket that is unavailable from this write
    // on.
    for writes in 4..20 {
        let store = bench.store(&format!("killed {writes}"));
        store.prove().unwrap();
        bench.memory.writes_left.store(writes, SeqCst);
        let published = put(&store, 9);
        bench.memory.writes_left.store(usize::MAX, SeqCst);
        bench.memory.is_down.store(false, SeqCst);
        let reader = bench.store("reader");
        let now = reader.versions("m").unwrap();
        assert!(now.len() <= complete.len() + 1, "{now:?} after {complete:?}");
        if published.is_ok() {
            assert!(now.len() == complete.len() + 1);
        }
        complete = now;
        for version in &complete {
            reader.ensure_local("m", *version).unwrap();
        }
    }
    // Their objects are kept as long as they may be active.
    put(&bench.store("a"), 2).unwrap();
    let leases = |memory: &Memory| memory.keys().iter().filter(|key| key.ends_with(LEASE)).count();
    assert!(leases(&bench.memory) > 0);
    bench.memory.clock_ms.fetch_add(LEASE_MS as u64 + 1, SeqCst);
    let last = put(&bench.store("a"), 3).unwrap();
    assert_eq!(leases(&bench.memory), 0, "{:?}", bench.memory.keys());
    complete.extend([last - 1, last]);
    let reader = bench.store("reader");
    assert_eq!(reader.versions("m").unwrap(), complete);
    // A process that ended in its probe leaves a few bytes.
    let of_versions = |key: &&String| !key.ends_with(".given") && !key.starts_with(".probe");
    assert_eq!(bench.memory.keys().iter().filter(of_versions).count(), complete.len() * 4, "{:?}", bench.memory.keys());
}

#[test]
fn a_merged_version_is_superseded_by_a_published_one() {
    let bench = Bench::new();
    let (here, there) = (bench.store("here"), bench.store("there"));
    put(&here, 1).unwrap();
    let derived = |store: &Store, meanwhile: &dyn Fn()| {
        store.publish_unrivalled("m", |folder, version| {
            meanwhile();
            fill(folder, "m", version, 5)
        })
    };
    assert_eq!(derived(&here, &|| ()).unwrap(), 2);
    let beaten = derived(&here, &|| assert_eq!(put(&there, 2).unwrap(), 4));
    assert_eq!(beaten.unwrap_err().kind(), Kind::Conflict);
    let outer = there.publish("m", |folder, version| {
        assert_eq!(derived(&here, &|| ()).unwrap_err().kind(), Kind::Conflict);
        fill(folder, "m", version, 6)
    });
    outer.unwrap();
    here.renew().unwrap();
    assert_eq!(here.versions("m").unwrap(), [1, 2, 4, 5]);
}

#[test]
fn interrupted_fetches_resume() {
    let bench = Bench::new();
    put(&bench.store("here"), 1).unwrap();
    let key = "m/1/data.bin".to_owned();
    for cut in [0, 1, 999, 1000, 50_500, 99_999] {
        let store = bench.store(&format!("cut at {cut}"));
        let before = bench.memory.bytes_read.load(SeqCst);
        bench.memory.faults.lock().unwrap().push((key.clone(), Fault::Cut(cut)));
        if cut == 0 {
            // No data arrived: the caller retries later.
            assert_eq!(store.ensure_local("m", 1).unwrap_err().kind(), Kind::Unavailable);
        }
        assert_eq!(data(&store.ensure_local("m", 1).unwrap()), vec![1; 100_000]);
        let read = bench.memory.bytes_read.load(SeqCst) - before;
        assert_eq!(read, 150_010, "each byte once");
    }
    // The next process resumes a fetch that was interrupted together with its process.
    let store = bench.store("killed");
    bench.memory.faults.lock().unwrap().extend([(key.clone(), Fault::Cut(40_000)), (key.clone(), Fault::Cut(0))]);
    assert_eq!(store.ensure_local("m", 1).unwrap_err().kind(), Kind::Unavailable);
    assert!(!store.folder("m", 1).exists());
    drop(store);
    let before = bench.memory.bytes_read.load(SeqCst);
    bench.store("killed").ensure_local("m", 1).unwrap();
    assert_eq!(bench.memory.bytes_read.load(SeqCst) - before, 110_000);
}

#[test]
fn differing_objects_are_rejected_by_name() {
    let bench = Bench::new();
    put(&bench.store("here"), 1).unwrap();
    let refused = |machine: &str| {
        let store = bench.store(machine);
        let error = store.ensure_local("m", 1).unwrap_err();
        assert_eq!(error.kind(), Kind::Corrupt, "{error}");
        assert!(!store.folder("m", 1).exists());
        error.to_string()
    };
    bench.memory.change("m/1/data.bin", |bytes| bytes[70_000] ^= 4);
    assert!(refused("flipped").contains("m/1/data.bin: file `data.bin` has checksum"));
    bench.memory.change("m/1/data.bin", |bytes| bytes[70_000] ^= 4);
    bench.memory.change("m/1/data.bin", |bytes| bytes.truncate(99_999));
    assert!(refused("short").contains("`data.bin` has 99999 bytes, expected 100000"));
    bench.memory.change("m/1/data.bin", |bytes| bytes.extend([1, 1]));
    assert!(refused("long").contains("`data.bin` has 100001 bytes"));
    bench.memory.change("m/1/data.bin", |bytes| bytes.truncate(100_000));
    let complete = bench.memory.get("m/1/data.bin").unwrap().0;
    bench.memory.remove("m/1/data.bin").unwrap();
    assert!(refused("missing").contains("file `data.bin` is missing"));
    bench.memory.put("m/1/data.bin", complete, &WriteCondition::Anything).unwrap();
    // A bit flips once, in the rest of an interrupted fetch.
    let store = bench.store("on its way");
    let key = || "m/1/data.bin".to_owned();
    bench.memory.faults.lock().unwrap().extend([(key(), Fault::Cut(40_000)), (key(), Fault::Flip(50_000))]);
    store.ensure_local("m", 1).unwrap();
    assert!(bench.memory.faults.lock().unwrap().is_empty());
    // A manifest that was replaced after the listing belongs to another version.
    let store = bench.store("replaced");
    let manifest = bench.memory.get("m/1/manifest.json").unwrap().0;
    bench.memory.put("m/1/manifest.json", manifest, &WriteCondition::Anything).unwrap();
    assert_eq!(store.ensure_local("m", 1).unwrap_err().kind(), Kind::NotReady);
    store.renew().unwrap();
    store.ensure_local("m", 1).unwrap();
}

#[test]
fn damaged_copies_are_fetched_again() {
    let bench = Bench::new();
    put(&bench.store("here"), 1).unwrap();
    let store = bench.store("there");
    let held = store.ensure_local("m", 1).unwrap();
    fs::write(held.folder().join("data.bin"), [0; 100_000]).unwrap();
    assert!(store.discard("m", 1).unwrap());
    assert_eq!(data(&store.ensure_local("m", 1).unwrap()), vec![1; 100_000]);
    assert!(!Store::new(bench.caches.path()).discard("m", 1).unwrap());
}

#[test]
fn stale_listings_show_an_older_state_of_the_store() {
    let bench = Bench::new();
    let (here, there) = (bench.store("here"), bench.store("there"));
    put(&here, 1).unwrap();
    there.renew().unwrap();
    let old = bench.memory.kept.lock().unwrap().clone();
    *bench.memory.listed.lock().unwrap() = Some(old);
    // A number is used although the listing does not show it.
    assert!(put(&here, 2).is_err(), "the uploaded objects are not visible");
    there.renew().unwrap();
    assert_eq!(there.versions("m").unwrap(), [1]);
    there.ensure_local("m", 1).unwrap();
    *bench.memory.listed.lock().unwrap() = None;
    assert_eq!(put(&here, 2).unwrap(), 3);
    there.renew().unwrap();
    assert_eq!(there.versions("m").unwrap(), [1, 3]);
}

#[test]
fn a_bucket_that_is_down_changes_nothing_and_comes_back() {
    let bench = Bench::new();
    let store = bench.store("a");
    put(&store, 1).unwrap();
    let desired_state =
        store.change_desired("m", &Desired::default(), |desired_state| desired_state.version = Some(1)).unwrap();
    store.renew().unwrap();
    assert_eq!(store.seen_desired("m").unwrap(), desired_state);
    bench.memory.is_down.store(true, SeqCst);
    assert_eq!(store.renew().unwrap_err().kind(), Kind::Unavailable);
    assert!(store.trouble().unwrap().contains("the bucket is down"));
    let stamp = store.stamp("m", 1);
    assert_eq!((store.versions("m").unwrap(), stamp.is_some()), (vec![1], true));
    store.ensure_local("m", 1).unwrap();
    // A newly started process has the cached versions and the desired state.
    let other = bench.seen_from("a", 64);
    assert!(other.renew().is_err());
    assert_eq!((other.models().unwrap(), other.versions("m").unwrap()), (vec!["m".to_owned()], vec![1]));
    assert_eq!((other.stamp("m", 1), other.seen_desired("m").unwrap()), (stamp, desired_state));
    assert_eq!(data(&other.ensure_local("m", 1).unwrap()), vec![1; 100_000]);
    assert!(!other.discard("m", 1).unwrap(), "no copy could be fetched again");
    bench.memory.is_down.store(false, SeqCst);
    std::thread::sleep(std::time::Duration::from_millis(1100));
    other.renew().unwrap();
    assert_eq!((other.trouble(), other.stamp("m", 1)), (None, stamp));
}

#[test]
fn unused_versions_are_evicted_and_used_ones_are_not() {
    let bench = Bench::new();
    let here = bench.store("here");
    for seed in 1..=9 {
        // 2 MB per version: 4 fit.
        here.publish("m", |folder, version| {
            fill(folder, "m", version, seed)?;
            fs::write(folder.join("data.bin"), vec![seed; 2_000_000]).unwrap();
            let mut manifest = Manifest::read(folder)?;
            manifest.files.insert("data.bin".into(), files::Checksum::of(&vec![seed; 2_000_000]));
            manifest.write(folder)
        })
        .unwrap();
    }
    let store = bench.seen_from("small", 8);
    store.renew().unwrap();
    let there = |store: &Store| (1..=9).filter(|version| store.folder("m", *version).exists()).collect::<Vec<_>>();
    let first = store.ensure_local("m", 1).unwrap();
    for version in 2..=6 {
        store.ensure_local("m", version).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(there(&store), [1, 4, 5, 6]);
    let held: Vec<PinnedVersion> = [4, 5, 6].map(|version| store.ensure_local("m", version).unwrap()).into();
    let full = store.ensure_local("m", 7).unwrap_err();
    assert_eq!(full.kind(), Kind::NoSpace);
    assert!(full.to_string().contains("a version needs 2 MB, the limit for all versions is 8 MB"), "{full}");
    drop(first);
    // A version in use is kept, whether by another process or by this one.
    bench.seen_from("small", 8).renew().unwrap();
    let store = bench.seen_from("small", 8);
    store.renew().unwrap();
    store.ensure_local("m", 7).unwrap();
    assert_eq!(there(&store), [4, 5, 6, 7]);
    assert!(held.iter().all(|held| held.folder().join("data.bin").exists()));
}

#[test]
fn buckets_that_ignore_conditions_are_rejected() {
    let bench = Bench::new();
    let store = bench.store("a");
    store.prove().unwrap();
    bench.memory.ignores_conditions.store(true, SeqCst);
    for refused in [store.prove().unwrap_err(), put(&bench.store("b"), 1).unwrap_err()] {
        assert_eq!(refused.kind(), Kind::Unsupported);
        assert!(
            refused.to_string().contains("store s3://bucket/models: it accepted a second object of one key"),
            "{refused}"
        );
    }
    assert_eq!(bench.memory.keys(), [""; 0]);
    bench.memory.ignores_conditions.store(false, SeqCst);
    bench.memory.is_read_only.store(true, SeqCst);
    assert_eq!(prove(&*bench.memory).unwrap(), Proof::ReadOnly);
    bench.store("c").prove().unwrap();
    assert_eq!(put(&bench.store("c"), 1).unwrap_err().kind(), Kind::Io);
    bench.memory.is_down.store(true, SeqCst);
    assert_eq!(store.prove().unwrap_err().kind(), Kind::Unavailable);
}

#[test]
fn the_desired_state_changes_by_compare_and_swap() {
    let bench = Bench::new();
    let store = bench.store("a");
    desired_state_round_trips(&store);
    // A lost answer is not mistaken for a concurrent change.
    let before = store.desired_state("m").unwrap();
    bench.memory.loses_answer.store(true, SeqCst);
    let now = store.change_desired("m", &before, |desired_state| desired_state.version = None).unwrap();
    assert_eq!(store.desired_state("m").unwrap(), now);
}

#[test]
fn shards_are_fetched_one_by_one() {
    use super::super::super::manifest::ShardOf;
    let bench = Bench::new();
    let here = bench.store("here");
    here.publish("m", |folder, version| {
        let cut = |shard| {
            let inner = shard_folder(folder, shard);
            fs::create_dir(&inner).unwrap();
            fill(&inner, "m", version, shard as u8)?;
            let mut manifest = Manifest::read(&inner)?;
            manifest.shard = Some(ShardOf { shard, shards: 2, items: 6 });
            manifest.write(&inner)?;
            Ok(manifest)
        };
        Shards::of(&[cut(0)?, cut(1)?]).write(folder)
    })
    .unwrap();
    let store = bench.store("there");
    assert_eq!((store.versions("m").unwrap(), store.sharded_versions("m").unwrap()), (vec![], vec![1]));
    let (shards, manifests) = store.shards("m", 1).unwrap();
    assert!(shards.check(&manifests[1]).is_ok());
    let second = store.clone().of_shard(1);
    assert_eq!(second.versions("m").unwrap(), [1]);
    let held = second.ensure_local("m", 1).unwrap();
    assert_eq!((data(&held)[0], held.folder()), (1, &*second.folder("m", 1)));
    assert!(held.folder().parent().unwrap().join(SHARDS_FILE).exists());
    assert!(!shard_folder(held.folder().parent().unwrap(), 0).exists());
    assert_eq!(store.of_shard(2).versions("m").unwrap(), [0; 0]);
}

#[test]
fn every_new_object_changes_the_listing_of_a_version() {
    let bench = Bench::new();
    put(&bench.store("here"), 1).unwrap();
    let complete = std::mem::take(&mut *bench.memory.kept.lock().unwrap());
    let store = bench.store("there");
    let mut stamps = Vec::new();
    let (manifest, others): (Vec<_>, Vec<_>) = complete.iter().partition(|(key, _)| key.ends_with(MANIFEST));
    for (key, object) in manifest.into_iter().chain(others) {
        if let Some(stamp) = store.stamp("m", 1) {
            assert_eq!(store.ensure_local("m", 1).unwrap_err().kind(), Kind::Corrupt, "before {key}");
            if !key.ends_with(".given") {
                assert!(!stamps.contains(&stamp), "before {key}");
                stamps.push(stamp);
            }
        }
        bench.memory.kept.lock().unwrap().insert(key.clone(), object.clone());
        store.renew().unwrap();
    }
    assert_eq!(stamps.len(), 3);
    assert_eq!(data(&store.ensure_local("m", 1).unwrap()), vec![1; 100_000]);
    // Each file was transferred once, despite the retries.
    assert_eq!(bench.memory.bytes_read.load(SeqCst), 150_010);
    // Objects of publications and objects outside of versions do not change the fingerprint.
    let stamp = store.stamp("m", 1);
    for key in ["m/1/.publishing", "m/1/.x/y/.z", "m/wish.json", "m/x/1", "1", "m/1x/a"] {
        bench.memory.put(key, vec![1], &WriteCondition::Anything).unwrap();
    }
    store.renew().unwrap();
    assert_eq!(store.stamp("m", 1), stamp);
    bench.memory.remove("m/1/same.bin").unwrap();
    store.renew().unwrap();
    assert_ne!(store.stamp("m", 1), stamp);
}

#[test]
fn one_listing_never_removes_files_of_another_publication() {
    let bench = Bench::new();
    put(&bench.store("a"), 1).unwrap();
    bench.memory.put("m/1/.publishing", Vec::new(), &WriteCondition::Anything).unwrap();
    bench.memory.clock_ms.fetch_add(LEASE_MS as u64 + 1, SeqCst);
    // A listing that lacks the manifest of a version with an expired lease.
    let mut invalid = bench.memory.kept.lock().unwrap().clone();
    invalid.remove("m/1/manifest.json");
    *bench.memory.listed.lock().unwrap() = Some(invalid);
    let _ = put(&bench.store("b"), 2);
    *bench.memory.listed.lock().unwrap() = None;
    assert!(bench.store("c").versions("m").unwrap().contains(&1), "{:?}", bench.memory.keys());
}

/// Actions of publishers, operators and servers with one fault at each call in turn: afterwards the state is as if there had been
/// no fault, or the caller got an error.
#[test]
#[expect(clippy::print_stdout, reason = "the number of cases is part of the result")]
fn one_fault_at_any_call_loses_nothing_and_mixes_nothing() {
    let cases: usize = std::thread::scope(|scope| {
        let kinds = [CallFault::Before, CallFault::After, CallFault::Missing, CallFault::Conflict, CallFault::Flip];
        let tables: Vec<_> = kinds.into_iter().map(|fault| scope.spawn(move || table(fault))).collect();
        tables.into_iter().map(|table| table.join().unwrap()).sum()
    });
    println!("{cases} cases");
    assert!(cases > 150, "{cases}");
}

/// Runs the cases of one fault: at each call of the script in turn.
fn table(fault: CallFault) -> usize {
    let mut at = 0;
    loop {
        let bench = Bench::new();
        put(&bench.store("first"), 1).unwrap();
        bench.memory.fail_at(at, fault);
        let (publisher, server) = (bench.seen_from("publisher", 64), bench.seen_from("server", 64));
        let reported = script(&publisher, &server);
        let is_met = bench.memory.no_fault();
        let store = bench.store("reader");
        let versions = store.versions("m").unwrap();
        let context = || format!("{fault:?} at {at}: {reported:?}, {versions:?}, {:?}", bench.memory.keys());
        assert!(versions.contains(&1), "{}", context());
        for version in &versions {
            let held = store.ensure_local("m", *version).unwrap();
            assert_eq!(data(&held), vec![if *version == 1 { 1 } else { 2 }; 100_000], "{}", context());
        }
        // Actions that returned success have taken effect.
        if let Ok(version) = &reported[0] {
            assert!(versions.contains(version), "{}", context());
        }
        let desired_state = store.desired_state("m").unwrap();
        if reported[1].is_ok() {
            assert_eq!((desired_state.version, desired_state.labels.get("old")), (Some(1), Some(&1)), "{}", context());
        }
        // No manual repair is needed.
        let next = put(&bench.store("next"), 2).unwrap();
        assert!(versions.iter().all(|version| next > *version), "{}", context());
        let server = bench.store("server");
        assert_eq!(server.versions("m").unwrap().last(), Some(&next), "{}", context());
        server.ensure_local("m", next).unwrap();
        assert_eq!(server.seen_desired("m").unwrap(), desired_state, "{}", context());
        if !is_met {
            return at;
        }
        at += 1;
    }
}

/// Publishes a version, activates the first one and labels it, and fetches both on another machine.
fn script(publisher: &Store, server: &Store) -> Vec<Result<u64>> {
    let published = publisher.renew().and_then(|()| put(publisher, 2));
    let desired = publisher.desired_state("m").and_then(|before| {
        publisher.change_desired("m", &before, |desired_state| {
            desired_state.version = Some(1);
            desired_state.labels.insert("old".into(), 1);
        })
    });
    let fetched = server.renew().and_then(|()| {
        let _ = server.seen_desired("m");
        server.ensure_local("m", server.versions("m")?.last().copied().unwrap_or(1))
    });
    vec![published, desired.map(|desired_state| desired_state.revision), fetched.map(|_| 0)]
}
