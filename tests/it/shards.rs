//! Document shards: partitioned after training, they answer together as the complete index does, bit for bit.

use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use sterling::api::{Retrievals, retrievals};
use sterling::error::{Error, Kind, Result};
use sterling::graph::tower::Threads;
use sterling::index::ivf::Rescore;
use sterling::items::shard_of;
use sterling::publish::{Output, Plan, Source};
use sterling::request::{Answer, Content, Embed, EmbeddedUser, Rank, Ranked, Reading, Request, Retrieve, Select, User};
use sterling::server::gather::{Gathered, ShardAnswer, Sharded, embed, rank, retrieve};
use sterling::serving::pass::{self, Cpu};
use sterling::serving::view::View;
use sterling::snapshot::{self, Manifest, Placement, SHARDS_FILE, Snapshot, Store, shard_folder};
use sterling::units::ItemId;

use crate::onnx::{Onnx, integers, value};
use crate::packages::{Made, view};
use crate::support::{Server, ids, put, root, run, vectors};
use crate::{contract, queries};

/// An item of an answer, as bits.
type Row = (i64, u32, u32, Vec<u32>);

fn row(ranked: &Ranked, n: usize) -> Row {
    let tasks = ranked.tasks.chunks_exact(ranked.ids.len()).map(|task| task[n].to_bits()).collect();
    (ranked.ids[n].0, ranked.scores[n].to_bits(), ranked.similarities[n].to_bits(), tasks)
}

fn try_ask(view: &Arc<View>, request: Request) -> Result<Answer> {
    let prepared = pass::prepare(view, request)?;
    pass::run(&mut Cpu::new(Threads::new(1)), &[prepared], None).remove(0)
}

fn ask(view: &Arc<View>, request: Request) -> Answer {
    try_ask(view, request).unwrap()
}

fn items(answer: Answer) -> Ranked {
    let Content::Items(ranked) = answer.content else { panic!("{answer:?}") };
    ranked
}

/// Shards in this process, some of which fail in some round.
struct InProcess<'a> {
    views: &'a [Arc<View>],
    items: Vec<usize>,
    /// These shards answer no request of these kinds.
    lost: Vec<(usize, &'static str)>,
    /// False if all shards are of releases that cannot rerank in the first round.
    ahead: bool,
    /// Kinds of the requests to the shards.
    asked: Mutex<Vec<&'static str>>,
}

impl<'a> InProcess<'a> {
    fn new(views: &'a [Arc<View>]) -> Self {
        let items = views.iter().map(|view| view.items()).collect();
        InProcess { views, items, lost: Vec::new(), ahead: true, asked: Mutex::default() }
    }

    fn without_ahead(self) -> Self {
        InProcess { ahead: false, ..self }
    }

    fn losing(self, lost: &[(usize, &'static str)]) -> Self {
        InProcess { lost: lost.to_vec(), ..self }
    }
}

impl Sharded for InProcess<'_> {
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

    async fn ask(&self, shard: usize, mut request: Request) -> Result<ShardAnswer<()>> {
        let kind = match &mut request {
            Request::Embed(_) => "embed",
            Request::Select(select) => {
                select.ahead &= self.ahead;
                "select"
            }
            Request::Rerank(_) => "rerank",
            _ => "other",
        };
        self.asked.lock().unwrap().push(kind);
        if self.lost.contains(&(shard, kind)) {
            return Err(Error::unavailable("it is deleted"));
        }
        let Answer { content, degraded_rows, .. } = try_ask(&self.views[shard], request)?;
        Ok(ShardAnswer { content, degraded_rows, beside: () })
    }
}

fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn rows(ranked: &Ranked) -> Vec<Row> {
    (0..ranked.ids.len()).map(|n| row(ranked, n)).collect()
}

/// Returns the merged answer of shards, with two rounds and with reranking in the first; and the number of repeated requests in
/// two rounds.
fn gathered(views: &[Arc<View>], request: &Retrieve) -> (Vec<Row>, usize) {
    let (found, _) = search_in_rounds(InProcess::new(views), request);
    let (in_two, again) = search_in_rounds(InProcess::new(views).without_ahead(), request);
    assert_eq!(found, in_two);
    (found, again)
}

fn search_in_rounds(shards: InProcess<'_>, request: &Retrieve) -> (Vec<Row>, usize) {
    let gathered = wait(retrieve(&shards, request.clone(), 1.0)).unwrap();
    assert!(gathered.missing.is_empty() && gathered.coverage == 1.0);
    (rows(&gathered.ranked()), gathered.again)
}

/// Publishes a plan in shards, and loads them.
pub fn cut(store: &Path, what: &Plan, shards: u32) -> Vec<Arc<View>> {
    let what = Plan { output: Output::shards(shards), ..what.clone() };
    let version = put(store, &what).unwrap();
    let name = Store::new(store).sharded_models().unwrap().pop().unwrap();
    let folder = Store::new(store).folder(&name, version);
    (0..shards).map(|shard| view(&shard_folder(&folder, shard))).collect()
}

pub fn whole(store: &Path, what: &Plan) -> Arc<View> {
    let version = put(store, what).unwrap();
    let name = Store::new(store).models().unwrap().pop().unwrap();
    view(&Store::new(store).folder(&name, version))
}

fn read(body: &Value) -> Retrieve {
    let Retrievals::One(request, ..) = retrievals(body.to_string().as_bytes()).unwrap() else { panic!("{body}") };
    *request
}

/// Compares the merged answers of shards with those of the complete index, and returns the number of repeated requests.
pub fn check(whole: &Arc<View>, shards: &[Arc<View>], bodies: &[Value]) -> usize {
    let mut again = 0;
    for body in bodies {
        let request = read(body);
        let ranked = items(ask(whole, Request::Retrieve(request.clone())));
        let (found, times) = gathered(shards, &request);
        assert_eq!(found, rows(&ranked), "{} shards, {body}", shards.len());
        again += times;
    }
    again
}

/// Returns items with few different vectors, so that most scores are shared by several, and ids of both signs.
fn lines(count: i64) -> String {
    let line = |n: i64| {
        let (a, b) = (((n * 37) % 101) as f64 * 0.06, ((n * 53) % 47) as f64 * 0.13);
        let embedding = [a.sin(), a.cos() * b.sin(), b.cos(), ((n % 9) as f64 - 4.0) / 4.0];
        let colour = ["red", "green", "blue"][(n % 3) as usize];
        let attributes = json!({"colour": colour, "price": n % 17, "maker": format!("m{}", n % 211)});
        json!({"id": n * 7 - 9000, "embedding": embedding, "attributes": attributes}).to_string()
    };
    (0..count).map(line).collect::<Vec<_>>().join("\n")
}

pub fn catalogue(folder: &Path, rescore: Rescore) -> Plan {
    let mut what = vectors(folder, &lines(700));
    what.recipe.index.lists = 12;
    what.recipe.index.rescore = rescore;
    what
}

#[test]
fn shards_answer_like_the_complete_version_bit_for_bit() {
    for (rescore, counts) in [(Rescore::F16, &[1, 2, 5][..]), (Rescore::None, &[3])] {
        let store = tempfile::tempdir().unwrap();
        let what = catalogue(store.path(), rescore);
        let of_all = whole(store.path(), &what);
        let mut bodies = Vec::new();
        for (n, vector) in [[1.0, 0.5, -0.25, 0.1], [0.0, -1.0, 0.5, 0.0], [-0.3, 0.2, 0.9, -0.7]].iter().enumerate() {
            for (k, candidates, probes) in [(1, 1, 1), (10, 40, 3), (37, 37, 5), (100, 400, 12), (700, 700, 12)] {
                bodies.push(json!({"vector": vector, "k": k, "candidates": candidates, "probes": probes}));
            }
            let excluded: Vec<i64> = (0..150).map(|i| (i * 5 + n as i64) * 7 - 9000).collect();
            bodies.push(json!({"vector": vector, "k": 50, "probes": 6, "exclude": excluded}));
            for filter in ["colour:red", "colour:red OR NOT price < 9", "NOT colour:green AND price >= 3"] {
                bodies.push(json!({"vector": vector, "k": 20, "candidates": 90, "probes": 12, "filter": filter}));
                bodies.push(json!({"vector": vector, "k": 20, "exact": true, "filter": filter}));
            }
            for filter in ["maker:m7", "maker:m7 AND colour:red", "maker:nobody", "maker IN (m1, m2) AND price < 9"] {
                bodies.push(json!({"vector": vector, "k": 20, "exact": true, "filter": filter}));
            }
        }
        // A vector of zeros makes all scores equal.
        bodies.push(json!({"vector": [0, 0, 0, 0], "k": 30, "probes": 12}));
        for &shards in counts {
            let views = cut(store.path(), &what, shards);
            let of_shards: usize = views.iter().map(|view| view.items()).sum();
            assert_eq!(of_shards, of_all.items());
            for view in &views {
                let part = view.main().manifest.shard.unwrap();
                assert_eq!((part.shards, part.items), (shards, 700));
                assert_eq!(view.coverage(), view.items() as f64 / 700.0);
                assert_eq!(view.main().index.lists(), 12);
                let slots = view.main().index.filled_slots();
                assert!(slots.into_iter().all(|slot| shard_of(view.id(slot), shards) == part.shard));
            }
            check(&of_all, &views, &bodies);
        }
    }
}

#[test]
fn rerankers_and_value_models_rank_the_candidates_of_all_shards() {
    for (merge, counts) in [("union", &[1, 3][..]), ("intersection", &[2]), ("weighted", &[5])] {
        let made = queries::package(merge);
        let store = tempfile::tempdir().unwrap();
        let of_all = whole(store.path(), &made.publication());
        let lists = of_all.main().index.lists();
        let mut bodies = Vec::new();
        for taste in [[1.0, 0.5, 0.75, 0.5], [0.3, -0.9, 0.3, -0.9]] {
            for (k, candidates) in [(1, 5), (20, 25), (400, 400)] {
                for filter in ["", "colour:red", "NOT colour:green"] {
                    let probes = if filter.is_empty() { lists.div_ceil(2) } else { lists };
                    let of_features = json!({"features": {"taste": taste}, "k": k, "candidates": candidates,
                                             "filter": filter, "probes": probes});
                    let mut of_vector = of_features.clone();
                    of_vector.as_object_mut().unwrap().remove("features");
                    of_vector["vector"] = json!(taste);
                    bodies.extend([of_features, of_vector]);
                }
            }
        }
        for &shards in counts {
            check(&of_all, &cut(store.path(), &made.publication(), shards), &bodies);
        }
    }
}

#[test]
fn tensors_of_the_user_are_made_once_and_sent_along() {
    let made: Made = contract::package("last", "f32", true);
    let store = tempfile::tempdir().unwrap();
    let of_all = whole(store.path(), &made.publication());
    let features = [
        json!({"history": [1, 4, 2], "age": [0.5], "likes": ["acme", "bolt"]}),
        json!({"history": [], "age": [1.5]}),
        json!({"history": [5, 5, 0, 1, 2, 3], "age": [-2.0], "likes": "zürich"}),
    ];
    let bodies: Vec<Value> =
        features.iter().flat_map(|f| [1, 3, 9].map(|k| json!({"features": f, "k": k, "exact": true}))).collect();
    check(&of_all, &cut(store.path(), &made.publication(), 2), &bodies);
    // An embedding that no tower of this version made is rejected.
    let embedded =
        |query: Vec<f32>, tensors: Vec<Vec<f32>>| User::Embedded(EmbeddedUser { query, tensors, largest: None });
    for user in [
        embedded(vec![1.0], Vec::new()),
        embedded(vec![1.0, 2.0], vec![vec![1.0]]),
        embedded(vec![1.0, f32::NAN], Vec::new()),
        embedded(vec![], vec![vec![]]),
    ] {
        let error = pass::prepare(&of_all, Request::Retrieve(Retrieve::of(user))).unwrap_err();
        assert!(error.to_string().starts_with("the user: "), "{error}");
    }
}

#[test]
fn shards_with_unexpectedly_many_results_are_queried_again() {
    let store = tempfile::tempdir().unwrap();
    // The best ones all lie in one shard of three.
    let shard = |id: i64| shard_of(ItemId(id), 3);
    let line = |id: i64| {
        let best = if shard(id) == 1 { 1.0 } else { -1.0 };
        json!({"id": id, "embedding": [best + 0.0001 * (id % 1000) as f64, 0.3], "attributes": {"odd": id % 2}})
            .to_string()
    };
    let text = (0..2400).map(line).collect::<Vec<_>>().join("\n");
    let what = vectors(store.path(), &text);
    let of_all = whole(store.path(), &what);
    let lists = of_all.main().index.lists();
    let views = cut(store.path(), &what, 3);
    let ask = |k: usize, filter: &str| json!({"vector": [1, 0], "k": k, "probes": lists, "filter": filter});
    let again = check(&of_all, &views, &[ask(450, ""), ask(330, "odd:1"), ask(700, "")]);
    assert!(again >= 6, "in both rounds of each, but it was {again}");
    // Randomly distributed items need no second request.
    let even = [json!({"vector": [0, 1], "k": 300, "probes": lists})];
    assert_eq!(check(&of_all, &views, &even), 0);
}

#[test]
fn shards_rerank_early_and_are_queried_once_if_that_suffices() {
    let model = "name = \"contrary\"\ndimension = 4\n[value]\nexpression = \"weight * similarity\"\n\
                 [value.constants]\nweight = 1.0\n";
    let lines: Vec<Value> = lines(2400).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let made = Made::new(model, &lines);
    let store = tempfile::tempdir().unwrap();
    let of_all = whole(store.path(), &made.publication());
    let views = cut(store.path(), &made.publication(), 3);
    let lists = of_all.main().index.lists();
    let asked = |weight: f32, k: usize| {
        let body = json!({"vector": [1, 0.5, -0.25, 0.1], "k": k, "candidates": 400, "probes": lists,
                          "constants": {"weight": weight}});
        check(&of_all, &views, std::slice::from_ref(&body));
        let shards = InProcess::new(&views);
        search_in_rounds(shards, &read(&body)).1
    };
    // By the order in which candidates are found, by ids alone, and all of them.
    assert_eq!([(1.0, 20), (0.0, 20), (1.0, 400), (-1.0, 400)].map(|(weight, k)| asked(weight, k)), [0; 4]);
    let rounds = |weight: f32, lost: &[(usize, &'static str)], coverage: f64| {
        let request = read(&json!({"vector": [1, 0.5, -0.25, 0.1], "k": 20, "candidates": 400, "probes": lists,
                                   "constants": {"weight": weight}}));
        let shards = InProcess::new(&views).losing(lost);
        let found = wait(retrieve(&shards, request, coverage));
        (found, shards.asked.into_inner().unwrap())
    };
    assert_eq!(rounds(1.0, &[], 1.0).1, ["select"; 3]);
    // The best are the worst candidates, most of which are dropped in the end: their shards must send others.
    assert!(asked(-1.0, 20) > 0);
    let (found, asked) = rounds(-1.0, &[], 1.0);
    let reranked = asked.iter().filter(|kind| **kind == "rerank").count();
    assert!(reranked > 0 && found.unwrap().again == reranked, "{asked:?}");
    // A shard that is lost at that point loses its candidates.
    let (found, _) = rounds(-1.0, &[(1, "rerank")], 0.5);
    let expected = rounds(-1.0, &[(1, "select")], 0.5).0.unwrap();
    assert_eq!(rows(&found.unwrap().ranked()), rows(&expected.ranked()));
}

#[test]
fn early_reranking_is_charged() {
    for is_program in [true, false] {
        let store = tempfile::tempdir().unwrap();
        let views = cut(store.path(), &contract::package("last", "f32", is_program).publication(), 1);
        let select = |ahead: bool| {
            let retrieve = read(&json!({"features": contract::features(&contract::users()[0]), "k": 3}));
            let select = Box::new(Select { retrieve, all: false, further: false, ahead });
            pass::prepare(&views[0], Request::Select(select)).unwrap()
        };
        let (ahead, apart) = (select(true), select(false).cost());
        assert!(ahead.cost().work_ns > apart.work_ns && ahead.cost().memory_bytes > apart.memory_bytes);
        assert_eq!(ahead.ranked_apart().cost(), apart);
        assert_eq!(select(false).ranked_apart().cost(), apart);
    }
}

#[test]
fn lists_that_hold_too_few_in_one_shard_may_hold_enough_in_all() {
    let store = tempfile::tempdir().unwrap();
    let what = catalogue(store.path(), Rescore::F32);
    let of_all = whole(store.path(), &what);
    let views = cut(store.path(), &what, 5);
    let lengths = of_all.main().index.list_lengths();
    let vector = [1.0, 0.5, -0.25, 0.1];
    let query = vector.map(|x: f64| x as f32);
    let best = of_all.main().index.probe(&query, 1, &mut sterling::index::ivf::Scratch::default()).next().unwrap().0;
    // Exactly as many as the probed list holds, and one more, for which all must probe further.
    let held = lengths[best.index()] as usize;
    check(&of_all, &views, &[json!({"vector": vector, "k": held, "candidates": held, "probes": 1})]);
    let (found, again) = gathered(&views, &read(&json!({"vector": vector, "k": held + 1, "probes": 1})));
    assert_eq!(found.len(), held + 1);
    assert!(again >= 1);
}

#[test]
fn shards_find_as_many_as_are_wanted_and_eligible() {
    let store = tempfile::tempdir().unwrap();
    let what = catalogue(store.path(), Rescore::F16);
    let of_all = whole(store.path(), &what);
    let filters = ["", "colour:red", "colour:red OR NOT price < 9", "NOT maker IN (m1, m2) AND price >= 3", "maker:m7"];
    for shards in [2, 5] {
        let views = cut(store.path(), &what, shards);
        for (n, filter) in filters.into_iter().enumerate() {
            for (k, recall) in [(1, 0.9), (20, 0.5), (60, 0.5), (100, 0.9), (150, 0.7), (300, 0.98), (700, 0.5)] {
                let excluded: Vec<i64> = (0..(n as i64 % 2) * 90).map(|i| i * 35 - 9000).collect();
                let vector = [1.0, 0.5 - n as f64 / 3.0, -0.25, (k % 7) as f64 / 5.0];
                let body = |more: &str, value: Value| {
                    let mut body = json!({"vector": vector, "k": k, "filter": filter, "exclude": excluded});
                    body[more] = value;
                    read(&body)
                };
                let wanted = items(ask(&of_all, Request::Retrieve(body("exact", json!(true))))).ids.len();
                let request = body("recall", json!(recall));
                let alone = items(ask(&of_all, Request::Retrieve(request.clone()))).ids.len();
                let (found, _) = gathered(&views, &request);
                assert_eq!(
                    (alone, found.len()),
                    (wanted, wanted),
                    "`{filter}`, k {k}, recall {recall}, {shards} shards"
                );
            }
        }
    }
}

#[test]
fn named_items_are_ranked_on_their_shards() {
    let made: Made = contract::package("last", "f32", true);
    let store = tempfile::tempdir().unwrap();
    let of_all = whole(store.path(), &made.publication());
    let views = cut(store.path(), &made.publication(), 2);
    let Retrieve { user, reading, .. } =
        read(&json!({"features": {"history": [1, 4, 2], "age": [0.5], "likes": ["acme", "bolt"]}}));
    let held: Vec<ItemId> = of_all.filled_slots().map(|slot| of_all.id(slot)).collect();
    // Some twice, some missing ones, some of these twice.
    let mut items = held.clone();
    items.extend([-5, 901, -5, 77_777].map(ItemId));
    items.extend(held.iter().take(2));
    for items in [items, vec![held[0]], vec![ItemId(-5)]] {
        let request = Rank { user: user.clone(), items, reading: reading.clone() };
        let expected = self::items(ask(&of_all, Request::Rank(request.clone())));
        let found = wait(rank(&InProcess::new(&views), request, 1.0)).unwrap();
        assert_eq!((rows(&found.ranked()), &found.unknown), (rows(&expected), &expected.unknown));
    }
    let User::Features(features) = user else { panic!() };
    let request = Embed { features, on_degraded: Default::default(), whole: false };
    let expected = ask(&of_all, Request::Embed(request.clone())).content;
    // Any shard can return it.
    for lost in [vec![], vec![(0, "embed")]] {
        let shards = InProcess::new(&views).losing(&lost);
        assert_eq!(wait(embed(&shards, request.clone())).unwrap().content, expected);
    }
    let shards = InProcess::new(&views).losing(&[(0, "embed"), (1, "embed")]);
    assert_eq!(wait(embed(&shards, request)).unwrap_err().kind(), Kind::Unavailable);
}

/// Loads a version of the zoo's model `dcn`, and makes the scores of some items NaN: the model reads the price's logarithm.
fn view_without_scores(folder: &Path, is_spoilt: &dyn Fn(ItemId) -> bool) -> Arc<View> {
    let published = view(folder);
    let mut snapshot = Snapshot::load(folder, &Placement::whole()).unwrap();
    let (_, price) = snapshot.numbers.iter_mut().find(|(name, _)| name == "price").unwrap();
    let spoilt = published.filled_slots().filter(|slot| is_spoilt(published.id(*slot)));
    spoilt.for_each(|slot| price[slot.index()] = -1.0);
    Arc::new(View::new(Arc::new(snapshot)))
}

#[test]
fn shard_without_any_score_omits_its_candidates_as_one_server_does() {
    let store = tempfile::tempdir().unwrap();
    let package = root().join("models/dcn");
    let source = Source::Package { items: Some(package.join("items.jsonl")), folder: package, vectors: None };
    let what = Plan::new(source);
    let version = put(store.path(), &what).unwrap();
    let of_all = Store::new(store.path()).folder("dcn", version);
    let cut = put(store.path(), &Plan { output: Output::shards(3), ..what }).unwrap();
    let of_shards = Store::new(store.path()).folder("dcn", cut);
    let user = json!({"history": [1, 2, 3], "segment": "s1"});
    let held: Vec<ItemId> = view(&of_all).filled_slots().take(60).map(|slot| view(&of_all).id(slot)).collect();
    for spoilt in [1..2, 0..3] {
        let is_spoilt = |id: ItemId| spoilt.contains(&shard_of(id, 3));
        let whole = view_without_scores(&of_all, &is_spoilt);
        let views = [0, 1, 2].map(|shard| view_without_scores(&shard_folder(&of_shards, shard), &is_spoilt));
        for (k, candidates) in [(1, 400), (20, 25), (400, 400)] {
            let request = read(&json!({"features": user, "k": k, "candidates": candidates, "exact": true}));
            let ranking = Rank { user: request.user.clone(), items: held.clone(), reading: request.reading.clone() };
            let expected = try_ask(&whole, Request::Retrieve(request.clone()));
            let in_two = wait(retrieve(&InProcess::new(&views).without_ahead(), request.clone(), 1.0));
            agree(&expected, in_two);
            agree(&expected, wait(retrieve(&InProcess::new(&views), request, 1.0)));
            let expected = try_ask(&whole, Request::Rank(ranking.clone()));
            agree(&expected, wait(rank(&InProcess::new(&views), ranking, 1.0)));
            assert_eq!(expected.is_err(), spoilt.len() == 3);
        }
    }
}

#[test]
fn a_number_that_overflows_the_reranker_is_invalid_at_any_number_of_shards() {
    let folder = tempfile::tempdir().unwrap();
    let package = folder.path().join("package");
    std::fs::create_dir(&package).unwrap();
    let model = "name = 'm'\ndimension = 4\n[user]\ntower = 'user.onnx'\n[[user.features]]\nname = 'x'\nkind = 'dense'\n\
                 width = 4\n[[tasks]]\nname = 't'\n[overarch]\ngraph = 'overarch.onnx'\n[value]\nexpression = 't'\n";
    let user = Onnx::new(&[value("x", &[0, 4])], &[value("query", &[0, 4])], &["query = Identity(x)"]);
    let inputs = [value("query", &[0, 4]), value("item", &[0, 0, 4])];
    let overarch = Onnx::new(&inputs, &[value("logits", &[0, 0, 1])], &["e = Exp(query)", "same = Div(e, e)"])
        .and("wide = Unsqueeze(same, middle)")
        .and("product = Mul(item, wide)")
        .and("logits = ReduceSum(product, last)")
        .with(&[integers("middle", &[1]), integers("last", &[2])]);
    let line = |n: i64| json!({"id": n, "embedding": [n % 7, 1, -1, 0.5]}).to_string() + "\n";
    std::fs::write(package.join("model.toml"), model).unwrap();
    std::fs::write(package.join("user.onnx"), user.bytes()).unwrap();
    std::fs::write(package.join("overarch.onnx"), overarch.bytes()).unwrap();
    std::fs::write(package.join("items.jsonl"), (0..60).map(line).collect::<String>()).unwrap();
    let items = Some(package.join("items.jsonl"));
    let what = Plan::new(Source::Package { folder: package, items, vectors: None });
    let version = put(folder.path(), &Plan { output: Output::shards(2), ..what }).unwrap();
    let of_shards = Store::new(folder.path()).folder("m", version);
    let views = [0, 1].map(|shard| view(&shard_folder(&of_shards, shard)));
    let request = |x: f64| read(&json!({"features": {"x": [x, 0.5, 0, 0]}, "k": 3, "candidates": 60}));
    assert_eq!(wait(retrieve(&InProcess::new(&views), request(80.0), 1.0)).unwrap().ranked().ids.len(), 3);
    let ranking = Rank { user: request(200.0).user, items: vec![ItemId(1), ItemId(2)], reading: Reading::default() };
    for answer in [
        wait(retrieve(&InProcess::new(&views), request(200.0), 1.0)),
        wait(retrieve(&InProcess::new(&views).without_ahead(), request(200.0), 1.0)),
        wait(rank(&InProcess::new(&views), ranking, 1.0)),
    ] {
        let error = answer.unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid, "{error}");
        assert!(error.to_string().contains("feature `x`: got the number 2e2: "), "{error}");
    }
    // A large number that the tower made from ordinary ones is a fault of the model.
    let query = vec![200.0, 0.5, 0.0, 0.0];
    let user = User::Embedded(EmbeddedUser { query, tensors: Vec::new(), largest: None });
    let error = wait(retrieve(&InProcess::new(&views), Retrieve { user, ..request(0.5) }, 1.0)).unwrap_err();
    assert_eq!(error.kind(), Kind::Internal, "{error}");
}

/// Checks that the answer of shards is that of one server, or the same error.
fn agree(expected: &Result<Answer>, found: Result<Gathered<()>>) {
    match expected {
        Ok(expected) => {
            let found = found.unwrap();
            assert!(found.missing.is_empty() && found.coverage == 1.0);
            let Content::Items(ranked) = &expected.content else { panic!("{expected:?}") };
            let found = found.ranked();
            assert!(!ranked.ids.is_empty() && found.ids == ranked.ids, "{:?} {:?}", found.ids, ranked.ids);
            // Products over other numbers of candidates are rounded differently.
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * b.abs();
            assert!(found.scores.iter().zip(&ranked.scores).all(near));
        }
        Err(expected) => {
            let error = found.unwrap_err();
            assert_eq!((expected.kind(), error.kind()), (Kind::Internal, Kind::Internal));
            assert!(error.to_string().contains("`logits` holds NaN for all candidates"), "{error}");
        }
    }
}

#[test]
fn without_lost_shards_the_others_answer_as_if_there_were_no_more() {
    let store = tempfile::tempdir().unwrap();
    let views = cut(store.path(), &catalogue(store.path(), Rescore::F16), 3);
    let share = (700 - views[1].items()) as f64 / 700.0;
    for body in [
        json!({"vector": [1, 0.5, -0.25, 0.1], "k": 40, "probes": 12}),
        json!({"vector": [0, -1, 0.5, 0], "k": 500, "candidates": 600, "probes": 12, "filter": "NOT colour:green"}),
        json!({"vector": [0, -1, 0.5, 0], "k": 30, "exact": true}),
    ] {
        let request = read(&body);
        let gather = |lost: &[(usize, &'static str)], coverage| {
            wait(retrieve(&InProcess::new(&views).without_ahead().losing(lost), request.clone(), coverage))
        };
        let all = rows(&gather(&[], 1.0).unwrap().ranked());
        let mut first = None;
        // Lost before selection, or only at the reranking of its candidates: the answer is the same.
        for lost in [[(1, "select")], [(1, "rerank")]] {
            let found = gather(&lost, share).unwrap();
            assert_eq!(found.coverage, share);
            assert_eq!(found.missing.iter().map(|(shard, _)| *shard).collect::<Vec<_>>(), [1]);
            let found = rows(&found.ranked());
            assert!(found.iter().all(|row| shard_of(ItemId(row.0), 3) != 1) && !found.is_empty());
            assert!(
                all.iter()
                    .filter(|row| shard_of(ItemId(row.0), 3) != 1)
                    .eq(found.iter().take_while(|row| all.contains(row)))
            );
            assert_eq!(first.get_or_insert(found.clone()), &found);
            let error = gather(&lost, 1.0).unwrap_err();
            assert!(error.kind() == Kind::Partial && error.to_string().contains("2 of 3 shards"), "{error}");
        }
        let error = gather(&[(0, "select"), (1, "rerank"), (2, "rerank")], 0.0).unwrap_err();
        assert_eq!(error.kind(), Kind::Partial, "{error}");
    }
    // Any shard reports errors of a request, even if others are lost.
    let wrong = read(&json!({"vector": [1, 0.5, -0.25, 0.1], "probes": 13}));
    let error = wait(retrieve(&InProcess::new(&views), wrong, 0.0)).unwrap_err();
    assert!(error.kind() == Kind::Invalid && error.to_string().starts_with("field `probes`: got 13"), "{error}");
}

#[test]
fn sharded_versions_are_complete_or_rejected() {
    let store = tempfile::tempdir().unwrap();
    let what = Plan { output: Output::shards(3), ..catalogue(store.path(), Rescore::F16) };
    assert_eq!(put(store.path(), &what).unwrap(), 1);
    let folder = Store::new(store.path()).folder("vectors", 1);
    let mut names: Vec<String> =
        std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["shard-0", "shard-1", "shard-2", SHARDS_FILE]);
    let shards = snapshot::Shards::read(&folder).unwrap();
    let load = |shard: u32| Snapshot::load(&shard_folder(&folder, shard), &Placement::whole());
    for (shard, entry) in (0..).zip(&shards.shards) {
        let snapshot = load(shard).unwrap();
        assert_eq!((snapshot.digest(), snapshot.index.items()), (&*entry.digest, entry.items));
    }
    // The file has other bytes, or is missing; a shard is in the folder of another one.
    let mut wrong = shards.clone();
    wrong.shards[1].digest = "0123456789abcdef".into();
    wrong.write(&folder).unwrap();
    let reported = load(1).unwrap_err().to_string();
    assert!(reported.contains("shards.json") && reported.contains("0123456789abcdef"), "{reported}");
    assert!(load(0).is_ok());
    std::fs::remove_file(folder.join(SHARDS_FILE)).unwrap();
    assert!(load(0).unwrap_err().to_string().contains("shards.json"));
    shards.write(&folder).unwrap();
    std::fs::rename(folder.join("shard-0"), folder.join("old")).unwrap();
    std::fs::rename(folder.join("shard-2"), folder.join("shard-0")).unwrap();
    // The manifest names the shard, regardless of the name of its folder.
    assert_eq!(Manifest::read(&folder.join("shard-0")).unwrap().shard.unwrap().shard, 2);

    for (shards, expected) in [(0, "expected 1 to 1024"), (1025, "expected 1 to 1024"), (1000, "expected fewer shards")]
    {
        let error =
            put(store.path(), &Plan { output: Output::shards(shards), ..what.clone() }).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!(Store::new(store.path()).versions("vectors").unwrap().is_empty(), "a cut version is none of the whole");
}

#[test]
fn a_server_of_a_shard_is_an_ordinary_one() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let items = folder.path().join("items.jsonl");
    std::fs::write(&items, lines(500)).unwrap();
    let (items, store_text) = (items.to_str().unwrap(), store.to_str().unwrap());
    let (code, reported, log) =
        run(&["publish", "--name", "shop", "--items", items, "--store", store_text, "--shards", "2"]);
    assert_eq!(code, 0, "{log}");
    assert!(
        reported.contains("shop version 1: 500 items in 2 shards, digest ") && reported.contains("shard 1: "),
        "{reported}"
    );
    let (code, listed, _) = run(&["inspect", store_text]);
    assert!(code == 0 && listed.contains("shop version 1: 500 items in 2 shards"), "{listed}");
    let updates = folder.path().join("updates");
    let server = Server::start_with(&store, &["--shard", "1", "--updates", updates.to_str().unwrap()]);
    let info = server.get_json("/v1/models/shop");
    let part = &info["shard"];
    assert_eq!((&part["shard"], &part["shards"], &part["items"]), (&json!(1), &json!(2), &json!(500)));
    let answer = server.ask("/v1/models/shop:retrieve", json!({"vector": [1, 0, 0, 0], "k": 500, "exact": true}));
    let found = ids(&answer);
    assert!(found.iter().all(|id| shard_of(ItemId(*id), 2) == 1));
    assert_eq!(found.len() as u64, info["items"].as_u64().unwrap());
    assert_eq!(answer["coverage"].as_f64().unwrap(), found.len() as f64 / 500.0);
    // Updates of items of other shards are rejected.
    let other = (0..).find(|id| shard_of(ItemId(*id), 2) == 0).unwrap();
    let upsert = json!({"items": [{"id": other, "embedding": [1, 0, 0, 0]}]});
    let (status, problem) = server.post("/v1/models/shop/items:upsert", &upsert);
    assert!(
        status == 200
            && problem["accepted"] == 0
            && problem.to_string().contains("belongs to shard 0 of 2, this is shard 1"),
        "{problem}"
    );
}
