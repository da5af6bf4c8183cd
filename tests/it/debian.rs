//! The Debian model, as `sterling demo` publishes and serves it: answers, recall, and filters on real data.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

use serde_json::{Value, json};

use sterling::index::ivf;
use sterling::snapshot::SearchGoal;
use sterling::units::{ItemId, Slot};

use crate::recall::view;
use crate::support::{Server, ids, json as read, put, renamed, root, sterling, text, vectors};

const RETRIEVE: &str = "/v1/models/debian:retrieve";

/// One server for the concurrent tests of this file; it ends with the last of them. The model is published at the first use, and
/// again only if the package changes.
pub fn server() -> Arc<Server> {
    static SERVER: Mutex<Weak<Server>> = Mutex::new(Weak::new());
    let mut shared = SERVER.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(running) = shared.upgrade() {
        return running;
    }
    let store = store();
    // The second example of the README.
    let item = text(root().join("README.md")).lines().find(|l| l.starts_with("{\"id\"")).unwrap().to_owned();
    let folder = tempfile::tempdir().unwrap();
    if !store.join("shop").exists() {
        put(&store, &renamed(vectors(folder.path(), &item), "shop")).unwrap();
    }
    let mut demo = sterling();
    // A debug build on a busy machine is slow.
    demo.args(["demo", "--listen", "127.0.0.1:0", "--store"]).arg(store).env("STERLING_ENGINE__TIMEOUT_MS", "60000");
    let server = Arc::new(Server::spawn(&mut demo));
    *shared = Arc::downgrade(&server);
    server
}

pub fn store() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("debian-store")
}

pub fn heldout() -> Vec<Value> {
    text(root().join("models/debian/heldout.jsonl")).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Compares the ids of both lists; neighbours whose scores differ by rounding only may have swapped ranks.
fn agree(found: &[Value], wanted: &[Value], score: &str, tolerance: f64) {
    assert_eq!(found.len(), wanted.len());
    let number = |item: &Value| item[score].as_f64().unwrap();
    for (place, (a, b)) in found.iter().zip(wanted).enumerate() {
        assert!((number(a) - number(b)).abs() <= tolerance, "place {place}: {a}, expected {b}");
        let tied = || wanted.iter().any(|w| w["id"] == a["id"] && (number(w) - number(a)).abs() <= tolerance);
        // The last ranks may hold an item that the other list just missed.
        let at_the_edge = || number(a) - number(wanted.last().unwrap()) <= tolerance;
        assert!(a["id"] == b["id"] || tied() || at_the_edge(), "place {place}: {a}, expected {b}");
    }
}

#[test]
fn served_answers_are_those_of_the_python_evaluation() {
    let server = server();
    for case in read(root().join("models/debian/golden.json")).as_array().unwrap() {
        let answer = server.ask("/v1/models/debian:embed", json!({"features": case["features"]}));
        for (a, b) in answer["embedding"].as_array().unwrap().iter().zip(case["query"].as_array().unwrap()) {
            assert!((a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 1e-4);
        }
        let request = json!({"features": case["features"], "exclude": case["exclude"], "exact": true,
                             "k": 2000, "candidates": 2000, "timeout_ms": 60000});
        let answer = server.ask(RETRIEVE, request);
        let mut items = answer["items"].as_array().unwrap().clone();
        let full = case["full"].as_array().unwrap();
        agree(&items[..full.len()], full, "score", 2e-3);
        let similarity = |item: &Value| item["similarity"].as_f64().unwrap();
        items.sort_by(|a, b| similarity(b).total_cmp(&similarity(a)));
        let retrieval = case["retrieval"].as_array().unwrap();
        agree(&items[..retrieval.len()], retrieval, "similarity", 1e-4);
    }
}

#[test]
fn every_list_probed_and_rescored_is_exact_and_defaults_keep_the_recall() {
    let server = server();
    let lists = server.get_json("/v1/models/debian")["lists"].as_u64().unwrap();
    let (mut hits, mut wanted) = (0, 0);
    for user in heldout().iter().step_by(20) {
        let mut request = json!({"features": user["features"], "exclude": user["exclude"], "k": 100, "candidates": 100,
                                 "timeout_ms": 60000});
        request["exact"] = true.into();
        let exact = ids(&server.ask(RETRIEVE, &request));
        request["exact"] = false.into();
        let found: BTreeSet<i64> = ids(&server.ask(RETRIEVE, &request)).into_iter().collect();
        hits += exact.iter().filter(|id| found.contains(id)).count();
        wanted += exact.len();
        request["probes"] = lists.into();
        assert_eq!(ids(&server.ask(RETRIEVE, &request)), exact, "{}", user["user"]);
    }
    let recall = hits as f64 / wanted as f64;
    assert!(wanted > 5000 && recall >= 0.96, "recall@100 = {recall} over {wanted}");
}

/// Items as queries would underestimate the lists that users need: an item's query lies near its neighbours, a user's does not.
#[test]
fn users_need_more_lists_than_items_suggest() {
    let server = server();
    let view = view(&store().join("debian/1"));
    let (index, calibration) = (&view.main().index, view.main().calibration.as_ref().unwrap());
    assert_eq!(calibration.source, "queries.jsonl");
    let items = (0..60usize).map(|n| {
        let mut row = vec![0.0; index.dimension()];
        index.row(view.slot(ItemId(n as i64 * 1000)).unwrap(), &mut row);
        row
    });
    let embedded = |user: &Value| {
        let answer = server.ask("/v1/models/debian:embed", json!({"features": user["features"]}));
        answer["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect::<Vec<f32>>()
    };
    let users: Vec<Vec<f32>> = heldout().iter().step_by(40).map(embedded).collect();
    let probes = calibration
        .choose(SearchGoal { candidates: 100, pass_rate: 1.0, recall: 0.9 }, view.items(), index.lists())
        .probes;
    // The reranker reads features, so items cannot be queries of a server: measures the share of the best 100 in the probed
    // lists.
    let slots: Vec<u32> = index.filled_slots().map(|slot| slot.0).collect();
    let recall = |query: &Vec<f32>| {
        let (mut products, mut scratch) = (vec![0.0; slots.len()], ivf::Scratch::default());
        index.products(query, &slots, &mut products);
        let mut best: Vec<(f32, u32)> = products.into_iter().zip(slots.iter().copied()).collect();
        best.select_nth_unstable_by(99, |a, b| b.0.total_cmp(&a.0));
        let probed: BTreeSet<usize> = index.probe(query, probes, &mut scratch).map(|(list, _)| list.index()).collect();
        let is_found = |slot: u32| probed.contains(&index.list_of(Slot(slot)).index());
        best[..100].iter().filter(|(_, slot)| is_found(*slot)).count() as f64 / 100.0
    };
    let mean = |queries: Vec<Vec<f32>>| queries.iter().map(recall).sum::<f64>() / queries.len() as f64;
    let (of_items, of_users) = (mean(items.collect()), mean(users));
    assert!((of_users - 0.9).abs() < 0.03, "users find {of_users} by {probes} of {} lists", index.lists());
    assert!((of_items - of_users).abs() > 0.02, "items find {of_items}, users {of_users}");
}

#[test]
fn filters_lose_nothing_and_let_nothing_through() {
    let server = server();
    let users = heldout();
    let features = &users[7]["features"];
    let all = server.ask(
        RETRIEVE,
        json!({"features": features, "k": 100_000, "candidates": 100_000, "exact": true,
        "timeout_ms": 60000, "columns": ["section", "priority", "architecture", "installed_kb"]}),
    );
    let all = all["items"].as_array().unwrap();
    assert!(all.len() > 60_000);
    type Check = fn(&Value) -> bool;
    let cases: [(&str, Check); 7] = [
        ("section:python", |c| c["section"] == "python"),
        ("section:python AND NOT priority:optional", |c| c["section"] == "python" && c["priority"] != "optional"),
        ("NOT section:python", |c| c["section"] != "python"),
        ("section IN (games, zope) OR priority:required", |c| {
            c["section"] == "games" || c["section"] == "zope" || c["priority"] == "required"
        }),
        ("priority:required", |c| c["priority"] == "required"),
        ("installed_kb < 100 AND architecture:all", |c| {
            c["installed_kb"].as_f64().is_some_and(|kb| kb < 100.0) && c["architecture"] == "all"
        }),
        ("NOT (section:libs OR installed_kb >= 50)", |c| {
            c["section"] != "libs" && c["installed_kb"].as_f64().is_none_or(|kb| kb < 50.0)
        }),
    ];
    for (filter, holds) in cases {
        let want: BTreeSet<i64> =
            all.iter().filter(|i| holds(&i["columns"])).map(|i| i["id"].as_i64().unwrap()).collect();
        assert!(!want.is_empty(), "{filter} matches nothing");
        let request = json!({"features": features, "filter": filter, "k": 100_000, "candidates": 100_000, "timeout_ms": 60000,
                             "probes": server.get_json("/v1/models/debian")["lists"]});
        let found: BTreeSet<i64> = ids(&server.ask(RETRIEVE, request)).into_iter().collect();
        assert_eq!(found.len(), want.len(), "{filter}");
        assert_eq!(found, want, "{filter}");
        // With the defaults, a page of results is full if enough items pass.
        let page = server.ask(RETRIEVE, json!({"features": features, "filter": filter, "k": 50}));
        let page = ids(&page);
        assert_eq!(page.len(), want.len().min(50), "{filter}");
        assert!(page.iter().all(|id| want.contains(id)), "{filter}");
    }
}

#[test]
fn the_demo_shows_names_and_restarts_from_its_store() {
    let server = server();
    let said = server.said.join("\n");
    assert!(said.contains("taken out:") && said.contains("git has:"), "{said}");
    let again = Server::spawn(sterling().args(["demo", "--listen", "127.0.0.1:0", "--store"]).arg(store()));
    assert!(!again.said.join("\n").contains("published"), "{:?}", again.said);
    again.wait_ready();
    assert_eq!(again.get_json("/v1/models/debian")["digest"], server.get_json("/v1/models/debian")["digest"]);
}

/// Returns the `curl` calls of a document: path and body.
fn calls_of(document: &str) -> Vec<(String, String)> {
    let page = text(root().join(document));
    let call = |part: &str| {
        let (path, rest) = part.split_once(" -d '").unwrap();
        (path.to_owned(), rest.split_once('\'').unwrap().0.to_owned())
    };
    page.split("curl http://127.0.0.1:8080").skip(1).map(call).collect()
}

#[test]
fn the_calls_in_the_documents_work_as_printed() {
    let server = server();
    for document in ["README.md", "docs/reference/http.md", "docs/guide/first-search.md", "docs/guide/filters.md"] {
        let calls = calls_of(document);
        assert!(!calls.is_empty());
        for (path, body) in calls {
            let answer = server.ask(&path, body);
            let reported = if path.starts_with("/v2/") { &answer["outputs"] } else { &answer["items"] };
            assert!(!reported.as_array().unwrap().is_empty(), "{document}: {path}");
        }
    }
}

/// The README prints the answer to its first request, shortened.
#[test]
fn the_first_request_of_the_readme_is_answered_as_printed() {
    let server = server();
    let page = text(root().join("README.md"));
    let (path, body) = calls_of("README.md").remove(0);
    let request: Value = serde_json::from_str(&body).unwrap();
    let answer = server.ask(&path, body);
    let printed = page.split("```text\n").nth(1).unwrap().split("```").next().unwrap();
    let number = |line: &str, name: &str| -> f64 {
        let (_, rest) = line.split_once(&format!("\"{name}\":")).unwrap();
        rest.split([',', '}']).next().unwrap().parse().unwrap()
    };
    let lines: Vec<&str> = printed.lines().filter(|line| line.contains("\"id\":")).collect();
    let items = answer["items"].as_array().unwrap();
    assert_eq!(lines.len(), items.len());
    for (line, item) in lines.iter().zip(items) {
        assert_eq!(number(line, "id") as i64, item["id"].as_i64().unwrap(), "{item}");
        assert!((number(line, "score") - item["score"].as_f64().unwrap()).abs() < 1e-3, "{line}: {item}");
        assert!(line.contains(&format!("\"columns\":{}", item["columns"])), "{line}: {item}");
    }
    // The ids match the names beside them.
    for id in request["features"]["installed"].as_array().unwrap() {
        let name = server.get_json(&format!("/v1/models/debian/items/{id}"))["attributes"]["name"].clone();
        assert!(page.replace('\n', " ").contains(&format!("`{}` ({id})", name.as_str().unwrap())), "{id}: {name}");
    }
}
