//! Requests of a router to a shard: embed users, select candidates, rerank the chosen ones. Compares the GPU with the CPU, and
//! shards on several GPUs with the complete index on one.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use sterling::api::{Retrievals, retrievals};
use sterling::cuda::Devices;
use sterling::error::Result;
use sterling::graph::tower::Threads;
use sterling::index::ivf::Rescore;
use sterling::items::shard_of;
use sterling::publish::{Output, Plan, publish};
use sterling::request::{
    Answer, Content, Embed, EmbeddedUser, Ranked, Reading, Request, Rerank, Retrieve, Select, Selected, User,
};
use sterling::server::gather::{self, ShardAnswer, Sharded};
use sterling::serving::pass::{self, Cpu, Cuda, Pass, Prepared, Residents};
use sterling::serving::view::View;
use sterling::snapshot::{Placement, Recipe, Snapshot, Store, shard_folder};
use sterling::units::ItemId;

use crate::emulation::{Random, device, sharing};
use crate::models::zoo;
use crate::whole_pass::{agree, request, root, vectors};

/// Returns retrievals of a model's golden users, and of one without features.
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

/// Checks for the same candidates with the same scores, in the same order if scores differ, and the same bounds for omitted
/// candidates.
pub fn select_alike(cpu: &Answer, gpu: &Answer, what: &str) {
    // With a filter, the CPU selects some survivors directly by their rows; the GPU selects by their codes.
    let is_filtered = cpu.explain.as_ref().is_some_and(|explain| explain.route == "words");
    let (Content::Selected(cpu), Content::Selected(gpu)) = (&cpu.content, &gpu.content) else { panic!("{what}") };
    assert_eq!(cpu.queries.len(), gpu.queries.len(), "{what}");
    let alike = |a: f32, b: f32| (a - b).abs() <= if is_filtered { 0.1 } else { 2e-4 * a.abs().max(1.0) };
    let near = |a: f32, b: f32| (a - b).abs() <= 2e-4 * a.abs().max(1.0);
    for (cpu, gpu) in cpu.queries.iter().zip(&gpu.queries) {
        let reported = |s: &Selected| (s.ids.len(), s.codes.len(), s.scores.len(), s.is_all, s.may_go_further);
        assert_eq!(reported(cpu), reported(gpu), "{what}");
        assert_eq!((cpu.selected, cpu.candidates), (gpu.selected, gpu.candidates), "{what}");
        assert!(gpu.codes.windows(2).all(|pair| pair[0] >= pair[1]), "{what}: best first");
        for (n, id) in gpu.ids.iter().enumerate() {
            assert!(alike(cpu.codes[n], gpu.codes[n]), "{what}: {n}");
            match cpu.ids.iter().position(|known| known == id) {
                Some(at) => {
                    let is_alike = alike(cpu.codes[at], gpu.codes[n]) && near(cpu.scores[at], gpu.scores[n]);
                    assert!(is_alike, "{what}: {id} at {n}, expected at {at}");
                }
                // The last candidate may be another one with an equal score.
                None => assert!(alike(cpu.codes[cpu.codes.len() - 1], gpu.codes[n]), "{what}: {id} at {n}"),
            }
        }
    }
}

/// Checks for at least as many candidates, each with at least the same score.
fn none_is_worse(cpu: &Answer, gpu: &Answer, what: &str) {
    let (Content::Selected(cpu), Content::Selected(gpu)) = (&cpu.content, &gpu.content) else { panic!("{what}") };
    for (cpu, gpu) in cpu.queries.iter().zip(&gpu.queries) {
        assert!(gpu.codes.len() >= cpu.codes.len(), "{what}: {} of {}", gpu.codes.len(), cpu.codes.len());
        assert!(cpu.codes.iter().zip(&gpu.codes).all(|(cpu, gpu)| gpu + 0.1 >= *cpu), "{what}");
    }
}

/// Returns selections that a router sends for retrievals: an expected share, the maximum, and with more probed lists.
pub fn selections(view: &Arc<View>, requests: &[Retrieve]) -> Vec<Prepared> {
    let of_request = |request: &Retrieve| {
        let select = |(all, further)| Select { retrieve: request.clone(), all, further, ahead: false };
        [(false, false), (true, false), (true, true)].map(|how| Request::Select(Box::new(select(how))))
    };
    requests.iter().flat_map(of_request).map(|request| pass::prepare(view, request).unwrap()).collect()
}

/// Decodes retrievals from their bodies, with `explain`.
pub fn read(bodies: &[Value]) -> Vec<Retrieve> {
    let Retrievals::Many(requests) = retrievals(json!({"requests": bodies}).to_string().as_bytes()).unwrap() else {
        panic!("one request")
    };
    let explained = |mut request: Retrieve| {
        request.reading.explain = true;
        request
    };
    requests.into_iter().map(|request| explained(request.unwrap().0)).collect()
}

/// Returns the requests of a router for each user: embed, select candidates, rerank the results.
fn parts(view: &Arc<View>, retrieve: &Retrieve) -> Vec<Prepared> {
    let prepare = |request: Request| pass::prepare(view, request).unwrap();
    let User::Features(features) = &retrieve.user else { panic!("{:?}", retrieve.user) };
    let embed = Embed { features: features.clone(), on_degraded: Default::default(), whole: true };
    let [embed, found] = [Request::Embed(embed), Request::Retrieve(retrieve.clone())].map(prepare);
    let made = answers(&mut Cpu::new(Threads::new(1)), &[embed, found]);
    let (embedded, found) = (User::Embedded(user(&made[0]).clone()), items(&made[1]));
    let candidates: Vec<(ItemId, f32)> = found.ids.iter().copied().zip(found.similarities.iter().copied()).collect();
    // A missing item is dropped.
    let candidates = vec![candidates.into_iter().chain([(ItemId(i64::MIN), 0.5)]).collect()];
    let reading = Reading { explain: true, ..Reading::default() };
    let select = Retrieve { user: embedded.clone(), reading: reading.clone(), ..retrieve.clone() };
    let embed = Embed { features: features.clone(), on_degraded: Default::default(), whole: true };
    let all = [
        Request::Embed(embed),
        Request::Select(Box::new(Select { retrieve: select, all: false, further: false, ahead: true })),
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
        let shared = sharing(&[1 << 30, 1 << 30]);
        for (cards, mut pass) in [("one GPU", on(device())), ("two GPUs", on(shared))] {
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
                    (1, Some((kernel, note))) => {
                        assert!(["emulated", "cuda"].contains(&kernel), "{what}: {note:?}");
                        select_alike(cpu, &gpu, &what);
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

/// Returns requests for every route of candidate search.
fn by_every_method() -> Vec<Value> {
    let mut random = Random::new(41);
    let excluded: Vec<i64> = (0..300).map(|n| n * 7 - 3000).collect();
    let more = [
        json!({"k": 10, "candidates": 40, "probes": 3}),
        json!({"k": 1, "candidates": 1, "probes": 1}),
        json!({"k": 100, "candidates": 300, "probes": 40}),
        json!({"k": 700, "candidates": 1500, "probes": 40}),
        json!({"k": 50, "candidates": 50, "probes": 6, "exclude": excluded}),
        // Its lists have fewer items than results.
        json!({"k": 200, "probes": 2}),
        json!({"k": 20, "candidates": 90, "probes": 40, "filter": "shelf:s1 OR price < 300"}),
        json!({"k": 20, "candidates": 60, "filter": "shelf:s3"}),
        json!({"k": 20, "exact": true, "filter": "NOT shelf:s0"}),
        json!({"k": 20, "exact": true}),
        json!({"k": 20, "filter": "shelf:nowhere"}),
    ];
    let mut bodies = Vec::new();
    for (n, more) in more.into_iter().enumerate() {
        let mut body = more;
        body["vector"] = if n == 3 { json!(vec![0.0; 20]) } else { json!(random.numbers(20)) };
        bodies.push(body);
    }
    bodies
}

#[test]
fn whole_pass_of_selections_answers_as_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let requests = read(&by_every_method());
    for rescore in [Rescore::F16, Rescore::None] {
        let view = vectors(folder.path(), 1500, 20, rescore);
        let prepared = selections(&view, &requests);
        let of_cpu = answers(&mut Cpu::new(Threads::new(1)), &prepared);
        let shared = sharing(&[1 << 30, 1 << 30]);
        for (cards, mut pass) in [("one GPU", on(device())), ("two GPUs", on(shared))] {
            for (n, (cpu, gpu)) in of_cpu.iter().zip(answers(&mut pass, &prepared)).enumerate() {
                let what = format!("{rescore:?} on {cards}, {n}");
                let [cpu_told, reported] = [cpu, &gpu].map(|answer| answer.explain.as_ref().unwrap());
                assert!(["emulated", "cuda"].contains(&reported.kernel), "{what}: {:?}", reported.note);
                let request = &requests[n / 3];
                // These continue until they have enough results. A GPU checks less often, so it scans more lists.
                let chooses = !request.exact && (request.k == 200 && n % 3 == 2 || request.probes.is_none());
                if chooses && request.filter != "shelf:nowhere" {
                    assert!(reported.probed >= cpu_told.probed, "{what}");
                    none_is_worse(cpu, &gpu, &what);
                } else {
                    select_alike(cpu, &gpu, &what);
                    assert_eq!((cpu_told.route, cpu_told.candidates), (reported.route, reported.candidates), "{what}");
                }
            }
        }
    }
}

/// Shards, each on its own GPU.
struct OnCards {
    views: Vec<Arc<View>>,
    items: Vec<usize>,
    passes: Vec<Mutex<Cuda>>,
}

impl Sharded for OnCards {
    type Call = Request;
    type Extra = ();

    fn items(&self) -> &[usize] {
        &self.items
    }

    fn home(&self, item: ItemId) -> usize {
        shard_of(item, self.views.len() as u32) as usize
    }

    fn turn(&self) -> usize {
        0
    }

    fn call(&self, request: Request) -> Request {
        request
    }

    async fn ask(&self, shard: usize, request: Request) -> Result<ShardAnswer<()>> {
        let prepared = pass::prepare(&self.views[shard], request)?;
        let mut pass = self.passes[shard].lock().unwrap();
        let answer = answers(&mut *pass, &[prepared]).remove(0);
        if let Some(explain) = &answer.explain {
            assert!(["emulated", "cuda"].contains(&explain.kernel), "{:?}", explain.note);
        }
        Ok(ShardAnswer { content: answer.content, degraded_rows: answer.degraded_rows, beside: () })
    }
}

#[test]
fn whole_pass_of_shards_on_gpus_answers_as_one_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let rescore = Rescore::F16;
    let whole = vectors(folder.path(), 1500, 20, rescore);
    let requests = read(&by_every_method());
    let prepared: Vec<Prepared> =
        requests.iter().map(|request| pass::prepare(&whole, Request::Retrieve(request.clone())).unwrap()).collect();
    let of_whole = answers(&mut on(device()), &prepared);
    for shards in [1, 3] {
        let mut recipe = Recipe::default();
        (recipe.index.rescore, recipe.index.lists) = (rescore, 40);
        let store = Store::new(folder.path().join(format!("cut-{shards}")));
        let path = folder.path().join("items.jsonl");
        let what = Plan { recipe, output: Output::shards(shards), ..Plan::of_vectors("vectors", path) };
        let (name, version) = publish(&store, &what, &|_, _, _| {}).unwrap();
        let folder = store.folder(&name, version);
        let load = |shard| Snapshot::load(&shard_folder(&folder, shard), &Placement::whole()).unwrap();
        let views: Vec<Arc<View>> = (0..shards).map(|shard| Arc::new(View::new(Arc::new(load(shard))))).collect();
        let counts = views.iter().map(|view| view.items()).collect();
        let passes = views.iter().map(|_| Mutex::new(on(device()))).collect();
        let cut = OnCards { views, items: counts, passes };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for (request, whole) in requests.iter().zip(&of_whole) {
            // If a filtered search chooses its lists, each shard chooses its own.
            if request.probes.is_none() && !request.exact && !request.filter.is_empty() {
                continue;
            }
            let gathered = runtime.block_on(gather::retrieve(&cut, request.clone(), 1.0)).unwrap();
            assert!(gathered.missing.is_empty());
            let (found, whole) = (gathered.ranked(), items(whole));
            let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            let what = format!("{shards} shards: k {}, `{}`", request.k, request.filter);
            assert_eq!((&found.ids, bits(&found.scores)), (&whole.ids, bits(&whole.scores)), "{what}");
        }
    }
}
