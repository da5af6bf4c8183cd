//! Items that are partitioned over several emulated GPUs: the same answers as with one GPU, bit for bit.

use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use sterling::cuda::Device;
use sterling::graph::tower::Threads;
use sterling::index::ivf::Rescore;
use sterling::request::{Answer, Content};
use sterling::serving::fresh::{Fresh, Update};
use sterling::serving::pass::{self, Cuda, Pass, Residents};
use sterling::serving::view::View;
use sterling::snapshot::PartFormat;

use crate::emulation::{Random, cards, device, devices, sharing};
use crate::models::{ZOO, zoo};
use crate::updates::{asked, catalogue, changed};
use crate::whole_pass::{debian, heldout, mixed, prepare, request, root, vectors};

const GIB: u64 = 1 << 30;

/// Returns a pass on one GPU, and one on several GPUs with these memory sizes.
fn one_and_several(memory_bytes: &[u64], budget_bytes: usize) -> [Cuda; 2] {
    let pass =
        |residents: Residents| Cuda::new(Arc::new(residents.with_budget(budget_bytes).with_updates()), Threads::new(1));
    [pass(Residents::new(device())), pass(Residents::new(sharing(memory_bytes)))]
}

/// Returns the answers of both passes; both must come from GPUs.
fn answers(view: &Arc<View>, passes: &mut [Cuda; 2], bodies: &[Value]) -> Vec<[Answer; 2]> {
    let explained = |body: &Value| {
        let mut body = body.clone();
        body["explain"] = true.into();
        body
    };
    let prepared = prepare(view, &bodies.iter().map(explained).collect::<Vec<_>>());
    let [one, several] = passes.each_mut().map(|pass| pass::run(pass as &mut dyn Pass, &prepared, None));
    let both = one.into_iter().zip(several).map(|(one, several)| [one.unwrap(), several.unwrap()]);
    let both: Vec<[Answer; 2]> = both.collect();
    for [one, several] in &both {
        let [one, several] = [one, several].map(|answer| answer.explain.as_ref().unwrap());
        assert!(["emulated", "cuda"].contains(&one.kernel), "{:?}", one.note);
        assert_eq!(several.kernel, one.kernel, "{:?}", several.note);
        let shared = ["partitioned over emulated:0, emulated:1", "partitioned over cuda:"];
        assert!(several.note.as_ref().is_some_and(|note| shared.iter().any(|by| note.contains(by))));
    }
    both
}

/// Checks for the same items, scores, similarities and tasks, bit for bit, and the same scan counts.
fn equal(one: &Answer, several: &Answer, what: &str) {
    let (Content::Items(a), Content::Items(b)) = (&one.content, &several.content) else { panic!("{what}") };
    let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    assert_eq!((&a.ids, &a.slots), (&b.ids, &b.slots), "{what}");
    assert_eq!(bits(&a.similarities), bits(&b.similarities), "{what}");
    assert_eq!((bits(&a.scores), bits(&a.tasks)), (bits(&b.scores), bits(&b.tasks)), "{what}");
    let (a, b) = (one.explain.as_ref().unwrap(), several.explain.as_ref().unwrap());
    let looked_at = |e: &sterling::request::Explain| (e.route, e.probed, e.scanned, e.survivors, e.candidates);
    assert_eq!(looked_at(a), looked_at(b), "{what}");
}

fn all_equal(view: &Arc<View>, passes: &mut [Cuda; 2], bodies: &[Value], what: &str) {
    for ([one, several], body) in answers(view, passes, bodies).iter().zip(bodies) {
        equal(one, several, &format!("{what}: {body}"));
    }
}

/// Catalogues with every kind of row, filters, exact scans, chosen lists and all lists; batches and single requests.
#[test]
fn whole_pass_on_several_gpus_answers_as_on_one() {
    let folder = tempfile::tempdir().unwrap();
    for rescore in [Rescore::None, Rescore::F32, Rescore::F16] {
        let view = vectors(folder.path(), 1500, 20, rescore);
        for (memory, budget) in [(&[GIB, GIB][..], 64 << 20), (&[GIB, GIB, GIB], 64 << 20), (&[GIB, GIB], 1)] {
            let mut passes = one_and_several(memory, budget);
            let mut bodies = mixed(&mut Random::new(9), 16, 20);
            // Filtered searches that choose their lists.
            bodies.iter_mut().skip(1).step_by(2).for_each(|body| body["probes"] = 2.into());
            all_equal(&view, &mut passes, &bodies, &format!("{rescore:?}, {} GPUs, {budget}", memory.len()));
        }
    }
}

/// One candidate to all, more results than items, and equal items, whose order depends on their ids only.
#[test]
fn whole_pass_on_several_gpus_cuts_candidates_as_one_does() {
    let folder = tempfile::tempdir().unwrap();
    let view = vectors(folder.path(), 700, 12, Rescore::F16);
    let mut passes = one_and_several(&[GIB, GIB, GIB], 64 << 20);
    let mut random = Random::new(3);
    let body = |random: &mut Random, k0: usize, zero: bool| {
        let vector = if zero { vec![0.0; 12] } else { random.numbers(12) };
        json!({"vector": vector, "k": k0, "candidates": k0, "probes": 40, "exact": k0.is_multiple_of(3)})
    };
    let counts = [1, 2, 3, 5, 17, 64, 333, 700, 900];
    let bodies: Vec<Value> =
        counts.iter().flat_map(|&k0| [false, true].map(|zero| body(&mut random, k0, zero))).collect();
    all_equal(&view, &mut passes, &bodies, "candidates");
    // Most lists are on one GPU alone.
    let few = vectors(tempfile::tempdir().unwrap().path(), 41, 12, Rescore::F32);
    let mut passes = one_and_several(&[GIB, GIB, GIB], 64 << 20);
    let body = json!({"vector": random.numbers(12), "k": 5, "candidates": 9, "filter": "NOT shelf:nowhere"});
    all_equal(&few, &mut passes, &[body], "lists of an item");
    // Fewer items than GPUs: two of three have none.
    let folder = tempfile::tempdir().unwrap();
    let mut fresh = Fresh::new(catalogue(folder.path(), 300, Rescore::F16, None).main().clone(), 0);
    let ids: Vec<i64> = fresh.view().unwrap().main().ids.slots().map(|slot| fresh.view().unwrap().id(slot).0).collect();
    let removed: Vec<Update> = ids.iter().skip(1).map(|&id| Update::Delete { id }).collect();
    assert!(fresh.apply(&removed).unwrap().is_empty());
    let view = Arc::new(fresh.view().unwrap());
    assert_eq!(view.items(), 1);
    all_equal(&view, &mut one_and_several(&[GIB, GIB, GIB], 64 << 20), &asked(&mut random, 12), "one item");
}

/// A reranker, user towers, sequences, rows looked up by values of items.
#[test]
#[ignore = "long: whole models on several devices"]
fn whole_pass_of_the_zoo_on_several_gpus_answers_as_on_one() {
    let store = tempfile::tempdir().unwrap();
    for name in ZOO {
        let text = std::fs::read_to_string(root().join("models").join(name).join("golden.json")).unwrap();
        let golden: Value = serde_json::from_str(&text).unwrap();
        let view = zoo(store.path(), name);
        let more = [json!({"k": 100, "candidates": 200, "exact": true}), json!({"k": 7, "candidates": 40})];
        let cases = golden["requests"].as_array().unwrap().iter().take(3);
        let users = cases.map(|case| case["features"].clone()).chain([json!({})]);
        let bodies: Vec<Value> = users
            .enumerate()
            .map(|(n, features)| request(&json!({"features": features, "exclude": []}), &more[n % 2]))
            .collect();
        all_equal(&view, &mut one_and_several(&[GIB, GIB], 64 << 20), &bodies, name);
    }
}

#[test]
#[ignore = "long: whole models on several devices"]
fn whole_pass_of_debian_on_several_gpus_answers_as_on_one() {
    let view = debian();
    let users = heldout(211);
    let lists = view.main().index.lists();
    let asked = [
        json!({"k": 20}),
        json!({"k": 30, "exact": true, "candidates": 50, "filter": "section:python AND NOT priority:optional"}),
        json!({"k": 40, "filter": "priority:required"}),
        json!({"k": 50, "candidates": 100, "filter": "NOT priority:optional"}),
        json!({"k": 50, "candidates": 100, "filter": "section:libs"}),
        json!({"k": 100, "candidates": 1000, "probes": lists}),
    ];
    let bodies: Vec<Value> = asked.iter().zip(users.iter().cycle()).map(|(more, user)| request(user, more)).collect();
    let mut passes = one_and_several(&[4 * GIB, 4 * GIB], 256 << 20);
    all_equal(&view, &mut passes, &bodies, "debian");
    let probed: Vec<u64> = answers(&view, &mut passes, &bodies[3..5])
        .iter()
        .map(|[_, several]| several.explain.as_ref().unwrap().probed)
        .collect();
    assert!(probed.iter().any(|&probed| probed < lists as u64), "no search ended before its last list: {probed:?}");
}

/// Updates on several GPUs: segments with and without lists, deleted items, a reranker over later items.
#[test]
fn whole_pass_on_several_gpus_sees_updates_as_one_does() {
    let folder = tempfile::tempdir().unwrap();
    for package in [None, Some(PartFormat::F32)] {
        let main = catalogue(folder.path(), 800, Rescore::F16, package).main().clone();
        let mut random = Random::new(41);
        let (mut fresh, mut passes) = (Fresh::new(main, 0), one_and_several(&[GIB, GIB], 64 << 20));
        for (turn, updates) in [1, 30, 1400, 5].into_iter().enumerate() {
            let view = changed(&mut fresh, &mut random, updates, package.is_some());
            let bodies = asked(&mut random, 12);
            all_equal(&view, &mut passes, &bodies, &format!("{package:?}, turn {turn}"));
        }
    }
}

/// The memory of several GPUs adds up to that of one, plus the data that each must have: centroids, tables and programs.
#[test]
fn whole_pass_is_shared_by_memory() {
    let folder = tempfile::tempdir().unwrap();
    let view = vectors(folder.path(), 6000, 32, Rescore::F32);
    let bytes =
        |memory: &[u64]| Residents::new(devices(&cards(memory))).with_budget(1 << 20).bytes_of(view.main()).unwrap();
    let [complete] = bytes(&[GIB])[..] else { panic!("one GPU") };
    let index = &view.main().index;
    // Per list: its centroid, its offset, its items on this GPU and in total; plus the rounding of arrays.
    let of_each = index.lists().next_multiple_of(16) * (32 + 4) + (index.lists() + 1) * 48 + 48 * 256;
    for count in [2, 3] {
        let parts = bytes(&vec![GIB; count]);
        let sum: usize = parts.iter().sum();
        assert!(
            sum >= complete && sum <= complete + count * of_each,
            "{parts:?}, {complete} on one, {of_each} on each"
        );
        let even = (complete - of_each) / count;
        assert!(parts.iter().all(|&part| part.abs_diff(even) < complete / 6), "{parts:?} of {complete}");
    }
    // One GPU has less room than its half: the other one takes more, and nothing is missing.
    let small = (complete * 2 / 5 + (1 << 20)) as u64;
    let parts = bytes(&[small, GIB]);
    assert!(parts[0] <= complete * 2 / 5 && parts[1] > complete / 2, "{parts:?} of {complete}");
    let residents = Residents::new(devices(&cards(&[small, GIB]))).with_budget(1 << 20);
    let mut uneven = Cuda::new(Arc::new(residents), Threads::new(1));
    let bodies = [json!({"vector": Random::new(5).numbers(32), "k": 9, "candidates": 60, "explain": true})];
    let answered = pass::run(&mut uneven, &prepare(&view, &bodies), None).remove(0).unwrap();
    assert_eq!(answered.explain.unwrap().kernel, "emulated");
    // Both are too small: the error names each with its size.
    let error = Residents::new(devices(&cards(&[small, small]))).with_budget(1 << 20).bytes_of(view.main());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("does not fit on 2 devices") && error.contains("emulated:0 has room for"), "{error}");
    assert!(
        error.contains("emulated:1 has room for") && error.contains("% of its item bytes have no space"),
        "{error}"
    );
}

/// One of the GPUs is lost during a call, another time before: the CPU answers in the same call.
#[test]
fn whole_pass_continues_without_gpus_when_one_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let view = vectors(folder.path(), 900, 16, Rescore::F16);
    let bodies = mixed(&mut Random::new(12), 6, 16);
    let bodies: Vec<Value> = bodies
        .into_iter()
        .map(|mut body| {
            body["explain"] = true.into();
            body
        })
        .collect();
    for lost in [0, 1] {
        for launches in [0, 5, 11] {
            let cards = cards(&[GIB, GIB]);
            let residents = Arc::new(Residents::new(devices(&cards)).with_budget(64 << 20));
            let mut gpu = Cuda::new(residents, Threads::new(1));
            let prepared = prepare(&view, &bodies);
            let kernels = |gpu: &mut Cuda| -> Vec<(&'static str, Option<String>)> {
                let answers = pass::run(gpu, &prepared, None).into_iter();
                answers.map(|answer| answer.unwrap().explain.unwrap()).map(|e| (e.kernel, e.note)).collect()
            };
            assert!(kernels(&mut gpu).iter().all(|(kernel, _)| *kernel == "emulated"));
            cards[lost].lose_after(launches);
            let started = Instant::now();
            for turn in 0..2 {
                let after = kernels(&mut gpu);
                let by_cpu = after.iter().filter(|(kernel, _)| *kernel != "emulated");
                let reported = by_cpu.clone().all(|(_, note)| {
                    note.as_ref().is_some_and(|note| note.contains(&format!("emulated:{lost}: the GPU is lost")))
                });
                assert!(by_cpu.count() > 0 && reported, "turn {turn}, GPU {lost}, {launches}: {after:?}");
            }
            assert!(started.elapsed().as_secs() < 300);
        }
    }
}

/// An array of one GPU is rejected by another; real GPUs would read unrelated memory at the address.
#[test]
fn memory_of_another_gpu_is_rejected() {
    let cards = cards(&[GIB, GIB]).into_iter().map(Device::over).collect::<Vec<Device>>();
    let (a, b) = (cards[0].copy(&[1u32; 64]).unwrap(), cards[1].copy(&[2u32; 64]).unwrap());
    let error = a.copy_from(&b).unwrap_err().to_string();
    assert!(error.contains("not in the memory of emulated:0"), "{error}");
    let wanted = cards[0].copy(&[3u32]).unwrap();
    let scored = |keys| sterling::cuda::ops::top::Scored { keys, slots: None, counts: None, stride: 64 };
    let select = |keys| sterling::cuda::ops::top::select(&cards[0], &scored(keys), &Default::default(), &wanted, 3);
    assert!(select(&a).is_ok());
    let error = select(&b).unwrap_err().to_string();
    assert!(error.contains("memory of another GPU"), "{error}");
    let full = Device::over(crate::emulation::cards(&[1024]).remove(0));
    let _held = full.room::<u8>(1000).unwrap();
    assert!(full.room::<u8>(100).unwrap_err().to_string().contains("out of memory"));
}
