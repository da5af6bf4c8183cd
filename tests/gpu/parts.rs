//! What a router asks of a shard: users embedded whole, candidates that are chosen reranked; on the card against the CPU.

use std::sync::Arc;

use serde_json::{Value, json};
use sterling::device::cuda::Devices;
use sterling::http::wire::{Retrievals, retrievals};
use sterling::pass::{self, Cpu, Cuda, Pass, Prepared, Residents};
use sterling::request::{
    Answer, Content, Embed, EmbeddedUser, Ranked, Reading, Request, Rerank, Retrieve, Select, User,
};
use sterling::tower::Threads;
use sterling::units::ItemId;
use sterling::view::View;

use crate::emulation::{cards, device, devices};
use crate::models::zoo;
use crate::whole_pass::{agree, request, root};

/// Retrievals of a model's golden users, and of one that brings nothing.
fn of_users(name: &str) -> Vec<Retrieve> {
    let text = std::fs::read_to_string(root().join("models").join(name).join("golden.json")).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let users = golden["requests"].as_array().unwrap().iter().map(|case| case["features"].clone()).chain([json!({})]);
    let body = |features: Value| {
        request(&json!({"features": features, "exclude": []}), &json!({"k": 60, "candidates": 60, "exact": true}))
    };
    let bodies: Vec<Value> = users.map(body).collect();
    let Retrievals::Many(requests) = retrievals(json!({"requests": bodies}).to_string().as_bytes()).unwrap() else {
        panic!("one request")
    };
    requests.into_iter().map(|request| request.unwrap().0).collect()
}

fn answers(pass: &mut dyn Pass, prepared: &[Prepared]) -> Vec<Answer> {
    pass::run(pass, prepared, None).into_iter().map(|answer| answer.unwrap()).collect()
}

fn items(answer: &Answer) -> &Ranked {
    let Content::Items(ranked) = &answer.content else { panic!("{answer:?}") };
    ranked
}

fn user(answer: &Answer) -> &EmbeddedUser {
    let Content::Embedding(user) = &answer.content else { panic!("{answer:?}") };
    user
}

/// What a router asks for of each user: to embed it whole, to select its candidates, and to rerank those that were found.
fn parts(view: &Arc<View>, retrieve: &Retrieve) -> Vec<Prepared> {
    let prepare = |request: Request| pass::prepare(view, request).unwrap();
    let User::Features(features) = &retrieve.user else { panic!("{:?}", retrieve.user) };
    let embed = Embed { features: features.clone(), on_degraded: Default::default(), whole: true };
    let [embed, found] = [Request::Embed(embed), Request::Retrieve(retrieve.clone())].map(prepare);
    let made = answers(&mut Cpu::new(Threads::new(1)), &[embed, found]);
    let (embedded, found) = (User::Embedded(user(&made[0]).clone()), items(&made[1]));
    let candidates: Vec<(ItemId, f32)> = found.ids.iter().copied().zip(found.similarities.iter().copied()).collect();
    // One that is not there drops out.
    let candidates = vec![candidates.into_iter().chain([(ItemId(i64::MIN), 0.5)]).collect()];
    let reading = Reading { explain: true, ..Reading::default() };
    let select = Retrieve { user: embedded.clone(), reading: reading.clone(), ..retrieve.clone() };
    let embed = Embed { features: features.clone(), on_degraded: Default::default(), whole: true };
    let all = [
        Request::Embed(embed),
        Request::Select(Box::new(Select { retrieve: select, all: false, further: false })),
        Request::Rerank(Rerank { user: embedded, candidates, k: 20, reading }),
    ];
    all.into_iter().map(prepare).collect()
}

fn on(devices: impl Into<Devices>) -> Cuda {
    Cuda::new(Arc::new(Residents::new(devices).with_budget(64 << 20)), Threads::new(1))
}

#[test]
fn whole_pass_of_parts_answers_as_on_the_cpu() {
    let store = tempfile::tempdir().unwrap();
    let mut with_tensors = 0;
    for name in ["dcn", "din", "sasrec"] {
        let view = zoo(store.path(), name);
        // All in one batch.
        let prepared: Vec<Prepared> = of_users(name).iter().flat_map(|retrieve| parts(&view, retrieve)).collect();
        let of_cpu = answers(&mut Cpu::new(Threads::new(1)), &prepared);
        let shared = devices(&cards(&[1 << 30, 1 << 30]));
        for (cards, mut pass) in [("one card", on(device())), ("two cards", on(shared))] {
            for (n, (cpu, gpu)) in of_cpu.iter().zip(answers(&mut pass, &prepared)).enumerate() {
                let what = format!("{name} on {cards}, {n}");
                let explained = gpu.explain.as_ref().map(|explain| (explain.kernel, explain.note.clone()));
                match (n % 3, explained) {
                    (0, _) => {
                        let near = |a: &[f32], b: &[f32]| {
                            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-5 * a.abs().max(1.0))
                        };
                        let (cpu, gpu) = (user(cpu), user(&gpu));
                        assert!(near(&cpu.query, &gpu.query), "{what}: {cpu:?}, {gpu:?}");
                        assert_eq!(cpu.tensors.len(), gpu.tensors.len(), "{what}");
                        assert!(cpu.tensors.iter().zip(&gpu.tensors).all(|(a, b)| near(a, b)), "{what}");
                        with_tensors += usize::from(gpu.tensors.iter().any(|tensor| !tensor.is_empty()));
                    }
                    (1, Some((_, note))) => {
                        assert_eq!(cpu.content, gpu.content, "{what}");
                        assert!(note.is_some_and(|note| note.contains("is selected on the CPU")), "{what}");
                    }
                    (_, Some((kernel, note))) => {
                        assert!(["emulated", "cuda"].contains(&kernel), "{what}: {note:?}");
                        assert_eq!(items(&gpu).ids.len(), 20, "{what}");
                        agree(cpu, &gpu, &what);
                    }
                    (_, None) => panic!("{what}: nothing was explained"),
                }
            }
        }
    }
    assert!(with_tensors > 0, "no model read more of a user than the query");
}
