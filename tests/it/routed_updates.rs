//! Updates through a router: each item goes to its shard, answers have the caller's order, and updates that a shard did not
//! accept are reported.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use arrow_array::types::Float32Type;
use arrow_array::{ArrayRef, FixedSizeListArray, Int64Array, StringArray};
use serde_json::{Value, json};
use sterling::items::shard_of;
use sterling::publish::{Output, Plan};
use sterling::units::ItemId;

use crate::route::{route, route_polling_every};
use crate::shards;
use crate::support::{Server, agent, ids, put, run, sterling, until};
use crate::wire::{send_arrow, stream};

const ITEMS: &str = "/v1/models/vectors/items";

/// Starts a server of one shard of a store that accepts updates, with more arguments.
pub fn serve(store: &Path, shard: u32, updates: &str, listen: &str) -> Server {
    let mut command = sterling();
    command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_REFRESH_MS", "100").env("STERLING_ENGINE__WORKERS", "1");
    command.args(["serve", "--shard", &shard.to_string(), "--listen", listen, "--updates", updates, "--store"]);
    let server = Server::spawn(command.arg(store).stderr(Stdio::null()));
    server.wait_ready();
    server
}

/// Three shards with their own journals, a router over them, and the complete catalogue on one server.
pub struct Cut {
    pub folder: tempfile::TempDir,
    pub one: Server,
    pub shards: Vec<Server>,
    pub router: Server,
}

impl Cut {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let what = shards::catalogue(folder.path(), sterling::index::ivf::Rescore::F16);
        put(folder.path(), &what).unwrap();
        let text = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let one = Server::start_with(folder.path(), &["--updates", &text("one")]);
        put(folder.path(), &Plan { output: Output::shards(3), ..what }).unwrap();
        let shard = |n: u32| serve(folder.path(), n, &text(&format!("of-{n}")), "127.0.0.1:0");
        let shards: Vec<Server> = (0..3).map(shard).collect();
        let router = route(shards.iter().map(|server| server.address.as_str()));
        Cut { folder, one, shards, router }
    }

    pub fn updates(&self, shard: u32) -> String {
        self.folder.path().join(format!("of-{shard}")).to_str().unwrap().to_owned()
    }
}

pub fn home(id: i64) -> usize {
    shard_of(ItemId(id), 3) as usize
}

/// Formats the positions of an answer for `min_position`.
pub fn token(answer: &Value) -> String {
    let positions = answer["positions"].as_array().unwrap_or_else(|| panic!("{answer}"));
    positions.iter().map(Value::to_string).collect::<Vec<_>>().join(",")
}

pub fn item(id: i64) -> Value {
    json!({"id": id, "embedding": [1, id % 7, 0.5, -0.25], "attributes": {"colour": "violet", "price": id % 5, "maker": "new"}})
}

fn post(server: &Server, path: &str, headers: &[(&str, &str)], body: &str) -> (u16, Value) {
    let mut request = agent().post(format!("http://{}{path}", server.address));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let mut answer = request.send(body).unwrap();
    let status = answer.status().as_u16();
    (status, serde_json::from_str(&answer.body_mut().read_to_string().unwrap()).unwrap())
}

#[test]
fn items_and_requests_in_arrow_go_through_a_router() {
    let cut = Cut::new();
    let ids: Vec<Option<i64>> = (0..40).map(|n| (n != 17).then_some(7000 + n)).collect();
    let vectors = (0..40).map(|n| Some([1.0, (n % 7) as f32, 0.5, -0.25].map(Some)));
    let columns: [(&str, ArrayRef); 4] = [
        ("id", Arc::new(Int64Array::from(ids))),
        ("embedding", Arc::new(FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(vectors, 4))),
        ("attributes.colour", Arc::new(StringArray::from(vec!["violet"; 40]))),
        ("attributes.price", Arc::new(Int64Array::from_iter((0..40).map(|n| (n != 5).then_some(n % 5))))),
    ];
    let body = stream(&columns, None);
    let (status, expected) = send_arrow(&cut.one, &format!("{ITEMS}:upsert"), &body);
    assert_eq!((status, expected["accepted"].as_u64()), (200, Some(39)), "{expected}");
    let (status, made) = send_arrow(&cut.router, &format!("{ITEMS}:upsert"), &body);
    assert_eq!(
        (status, &made["accepted"], &made["refused"]),
        (200, &expected["accepted"], &expected["refused"]),
        "{made}"
    );
    let queries: [(&str, ArrayRef); 1] = [("vector", columns[1].1.slice(3, 4))];
    let requested =
        stream(&queries, Some(json!({"k": 9, "exact": true, "filter": "colour:violet", "columns": ["price"]})));
    let (status, reported) =
        send_arrow(&cut.router, &format!("/v1/models/vectors:retrieve?min_position={}", token(&made)), &requested);
    let path = format!("/v1/models/vectors:retrieve?min_position={}", expected["position"]);
    let complete = send_arrow(&cut.one, &path, &requested).1;
    assert_eq!(status, 200, "{reported}");
    let items = |answer: &Value| -> Vec<Value> {
        answer["results"].as_array().unwrap().iter().map(|result| result["items"].clone()).collect()
    };
    assert!(items(&reported).iter().all(|items| items.as_array().is_some_and(|items| items.len() == 9)), "{reported}");
    assert_eq!(items(&reported), items(&complete));
}

#[test]
#[ignore = "long: kills servers under load"]
fn updates_wait_for_the_only_server_of_a_shard_that_restarts() {
    let mut cut = Cut::new();
    let router = route_polling_every(3000, cut.shards.iter().map(|server| server.address.as_str()));
    router.wait_ready();
    let (address, updates) = (cut.shards[1].address.clone(), cut.updates(1));
    for round in 0..2 {
        let body = json!({"items": (0..30).map(|n| item(5000 + 100 * round + n)).collect::<Vec<_>>()});
        assert_eq!(cut.shards.remove(1).stop(), Some(0));
        std::thread::scope(|scope| {
            let written = scope.spawn(|| router.post(&format!("{ITEMS}:upsert"), &body));
            cut.shards.insert(1, serve(cut.folder.path(), 1, &updates, &address));
            let (status, made) = written.join().unwrap();
            assert_eq!((status, &made["accepted"]), (200, &json!(30)), "{made}");
        });
    }
}

#[test]
fn items_go_to_their_shards_and_are_answered_in_the_callers_order() {
    let cut = Cut::new();
    // Upserts, changes of existing items, and invalid ones, in random order.
    let mut items: Vec<Value> = (0..30).map(|n| item(5000 + n)).collect();
    items.extend((0..30).map(|n| json!({"id": n * 7 - 9000, "set": {"price": 40 + n}})));
    items[3] = json!({"id": 6000, "set": {"price": 1}});
    items[11] = json!({"id": 6001, "embedding": [1, 2]});
    items[17] = json!({"id": "x"});
    items[40] = json!({"id": 5000, "set": {"price": 1}});
    let body = json!({"items": items});
    let expected = cut.one.ask(&format!("{ITEMS}:upsert"), &body);
    let made = cut.router.ask(&format!("{ITEMS}:upsert"), &body);
    assert_eq!((&made["accepted"], &made["refused"]), (&expected["accepted"], &expected["refused"]), "{made}");
    let places: Vec<u64> = made["refused"].as_array().unwrap().iter().map(|r| r["place"].as_u64().unwrap()).collect();
    assert_eq!((places, made["accepted"].as_u64()), (vec![3, 11, 17, 40], Some(56)));
    // Each position counts the updates of one shard.
    let positions = made["positions"].as_array().unwrap().clone();
    assert_eq!(positions.iter().map(|p| p.as_u64().unwrap()).sum::<u64>(), 56);
    // Written items are read at once, with the token of the answer, and equal those of the single server.
    let seen = token(&made);
    for body in [
        json!({"vector": [1, 3, 0.5, -0.25], "k": 60, "exact": true, "columns": ["colour", "price", "maker"]}),
        json!({"vector": [1, 3, 0.5, -0.25], "k": 60, "exact": true, "filter": "colour:violet OR price > 30", "columns": ["price"]}),
    ] {
        let reported = cut.router.ask(&format!("/v1/models/vectors:retrieve?min_position={seen}"), &body);
        let complete =
            cut.one.ask(&format!("/v1/models/vectors:retrieve?min_position={}", expected["position"]), &body);
        assert_eq!(reported["items"], complete["items"]);
        assert_eq!(reported["positions"], made["positions"]);
    }
    for id in [5001, 5029, -9000] {
        let (status, reported) = cut.router.get(&format!("{ITEMS}/{id}?min_position={seen}"));
        let reported: Value = serde_json::from_str(&reported).unwrap();
        let complete = cut.one.get_json(&format!("{ITEMS}/{id}"));
        assert_eq!((status, &reported["attributes"]), (200, &complete["attributes"]));
        let own = cut.shards[home(id)].get_json(&format!("{ITEMS}/{id}"));
        assert_eq!(own["attributes"], complete["attributes"], "it lies in its shard");
    }
    let state = cut.router.get_json(&format!("{ITEMS}:position?min_position={}", seen.replace(',', "%2C")));
    let complete = cut.one.get_json(&format!("{ITEMS}:position"));
    assert_eq!(
        (&state["items"], &state["fresh_items"], &state["positions"]),
        (&complete["items"], &complete["fresh_items"], &made["positions"])
    );
    assert_eq!(state["shards"].as_array().unwrap().len(), 3);
    // Deletions: by ids, and by a filter at every shard.
    let ids_given = json!({"ids": [5000, 5001, 5001, 5002, 77, -9000]});
    let (reported, complete) =
        (cut.router.ask(&format!("{ITEMS}:delete"), &ids_given), cut.one.ask(&format!("{ITEMS}:delete"), &ids_given));
    assert_eq!((&reported["deleted"], complete["deleted"].as_u64()), (&complete["deleted"], Some(5)));
    assert_eq!((&reported["matched"], complete["matched"].as_u64()), (&complete["matched"], Some(4)));
    let filter = |dry_run: bool| json!({"filter": "colour:violet", "dry_run": dry_run});
    for dry_run in [true, false] {
        let reported = cut.router.ask(&format!("{ITEMS}:delete?min_position={}", token(&reported)), filter(dry_run));
        let deleted = if dry_run { 0 } else { 24 };
        assert_eq!(
            (reported["deleted"].as_u64(), &reported["dry_run"]),
            (Some(deleted), &json!(dry_run)),
            "{reported}"
        );
        assert_eq!(reported["matched"], 24);
        if !dry_run {
            let path = format!("/v1/models/vectors:retrieve?min_position={}", token(&reported));
            let found = cut
                .router
                .ask(&path, json!({"vector": [1, 1, 1, 1], "k": 9, "filter": "colour:violet", "exact": true}));
            assert!(ids(&found).is_empty());
        }
    }
}

#[test]
fn pages_read_the_view_of_the_first_page_at_every_shard() {
    const RETRIEVE: &str = "/v1/models/vectors:retrieve";
    let cut = Cut::new();
    let other = route(cut.shards.iter().map(|server| server.address.as_str()));
    let put = |ids: std::ops::Range<i64>| {
        let items: Vec<Value> = ids.map(item).collect();
        cut.router.ask(&format!("{ITEMS}:upsert"), json!({"items": items}))
    };
    let seen = token(&put(5000..5060));
    let body = json!({"vector": [1, 0.5, -0.25, 0.1], "candidates": 60, "columns": ["price"]});
    let with = |k: u64, cursor: &Value| {
        let mut body = body.clone();
        (body["k"], body["cursor"]) = (k.into(), cursor.clone());
        body
    };
    let mut complete = body.clone();
    complete["k"] = 60.into();
    let path = format!("{RETRIEVE}?min_position={seen}");
    let before = cut.router.ask(&path, &complete)["items"].take();
    let first = cut.router.ask(&path, with(9, &json!("")));
    assert_eq!(first["items"], json!(before.as_array().unwrap()[..9]));
    // The best items are deleted, and better ones are put, at all shards.
    let best: Vec<Value> = before.as_array().unwrap().iter().map(|item| item["id"].clone()).collect();
    cut.router.ask(&format!("{ITEMS}:delete"), json!({"ids": best}));
    let after = token(&put(6000..6300));
    let now = cut.router.ask(&format!("{RETRIEVE}?min_position={after}"), &complete);
    assert_ne!(now["items"], before, "updates change the ranking");
    let second = other.ask(RETRIEVE, with(20, &first["cursor"]));
    assert_eq!(second["items"], json!(before.as_array().unwrap()[9..29]), "another router goes on");
    assert_eq!(second["positions"], first["positions"]);
    let last = cut.router.ask(RETRIEVE, with(31, &second["cursor"]));
    assert_eq!((&last["items"], last.get("cursor")), (&json!(before.as_array().unwrap()[29..]), None));
    // A page may be requested again until its views are evicted.
    assert_eq!(other.ask(RETRIEVE, with(20, &first["cursor"]))["items"], second["items"]);
    for n in 0..65 {
        // Some of each shard, so that each has another view.
        let seen = token(&put(7000 + 20 * n..7020 + 20 * n));
        cut.router.ask(&format!("{RETRIEVE}?min_position={seen}"), with(1, &json!("")));
    }
    let (status, reported) = cut.router.post(RETRIEVE, with(20, &first["cursor"]));
    assert_eq!((status, &reported["code"]), (410, &json!("gone")), "{reported}");
    assert!(reported["detail"].as_str().unwrap().contains("begin with the first page"), "{reported}");
}

#[test]
fn calls_with_a_key_happen_once_and_late_ones_not_at_all() {
    let cut = Cut::new();
    let path = format!("{ITEMS}:upsert");
    let lines: String = (5000..5040).map(|id| format!("{}\n", item(id))).collect();
    let headers = [("content-type", "application/x-ndjson"), ("idempotency-key", "one")];
    let (status, first) = post(&cut.router, &path, &headers, &lines);
    assert_eq!((status, &first["accepted"], &first["repeated"]), (200, &json!(40), &json!(false)), "{first}");
    let (status, again) = post(&cut.router, &path, &headers, &lines);
    assert_eq!((status, &again["positions"], &again["repeated"]), (200, &first["positions"], &json!(true)), "{again}");
    // A change and a deletion right after the item's upsert, and both repeated: a repetition returns the first answer.
    let keyed = |key: &'static str, verb: &str, body: &Value| {
        let headers = [("content-type", "application/json"), ("idempotency-key", key)];
        let (status, reported) = post(&cut.router, &format!("{ITEMS}:{verb}"), &headers, &body.to_string());
        assert_eq!(status, 200, "{reported}");
        reported
    };
    let put: Vec<Value> = (5100..5120).map(item).collect();
    let mut set: Vec<Value> = (5100..5120).map(|id| json!({"id": id, "set": {"price": 77}})).collect();
    set.push(json!({"id": 9999, "set": {"price": 1}}));
    let (set, removed) = (json!({"items": set}), json!({"ids": (5100..5110).collect::<Vec<i64>>()}));
    keyed("put", "upsert", &json!({"items": put}));
    let answers = [keyed("set", "upsert", &set), keyed("gone", "delete", &removed)];
    assert_eq!(
        (&answers[0]["accepted"], &answers[0]["refused"][0]["place"]),
        (&json!(20), &json!(20)),
        "{}",
        answers[0]
    );
    assert_eq!((&answers[1]["deleted"], &answers[1]["repeated"]), (&json!(10), &json!(false)), "{}", answers[1]);
    keyed("late", "upsert", &json!({"items": [item(9999), item(5105)]}));
    let again = [keyed("set", "upsert", &set), keyed("gone", "delete", &removed)];
    for (answer, mut again) in answers.iter().zip(again) {
        assert_eq!(again["repeated"], true);
        again["repeated"] = json!(false);
        assert_eq!(again.to_string(), answer.to_string());
    }
    keyed("clean", "delete", &json!({"ids": [9999, 5105]}));
    let state = cut.router.get_json(&format!("{ITEMS}:position"));
    let seen: Vec<String> =
        state["shards"].as_array().unwrap().iter().map(|shard| shard["durable"].to_string()).collect();
    let query = json!({"vector": [1, 1, 1, 1], "k": 100, "exact": true, "filter": "price:77"});
    let found = cut.router.ask(&format!("/v1/models/vectors:retrieve?min_position={}", seen.join(",")), query);
    assert_eq!(ids(&found).into_iter().collect::<BTreeSet<_>>(), (5110..5120).collect());
    // One position per shard, or none.
    let body = json!({"items": [item(5000), item(5001), item(5002), item(5003), item(5004), item(5005)]});
    for wrong in [
        "min_position=3",
        "min_position=1,2",
        "min_position=1,2,3,4",
        "min_position=1,x,3",
        "min_position=,,",
        "min_position=1,2,3&min_position=1,2,3",
    ] {
        for call in [format!("/v1/models/vectors:retrieve?{wrong}"), format!("{ITEMS}:delete?{wrong}")] {
            let body = if call.contains("retrieve") { json!({"vector": [1, 1, 1, 1]}) } else { json!({"ids": [1]}) };
            let (status, reported) = cut.router.post(&call, body);
            assert!(status == 400 && reported.to_string().contains("min_position"), "{call}: {reported}");
        }
        assert_eq!(cut.router.get(&format!("{ITEMS}/5000?{wrong}")).0, 400);
        assert_eq!(cut.router.get(&format!("{ITEMS}:position?{wrong}")).0, 400);
    }
    let (status, reported) = cut.router.post(&format!("{path}?if_position=0,0,0"), &body);
    assert_eq!((status, &reported["code"]), (409, &json!("conflict")), "{reported}");
    let (status, reported) = cut.router.post(&format!("{path}?if_position={}", seen.join(",")), &body);
    assert_eq!((status, &reported["accepted"]), (200, &json!(6)), "{reported}");
    // A position that a shard has not written yet is invalid.
    let (status, reported) =
        cut.router.post("/v1/models/vectors:retrieve?min_position=0,0,99999", json!({"vector": [1, 1, 1, 1]}));
    assert!(status == 400 && reported.to_string().contains("99999"), "{reported}");
    for body in ["{}", "{\"items\": []}", "[]", "{\"items\": [{\"id\": 1}], \"x\": 1}"] {
        assert_eq!(post(&cut.router, &path, &[("content-type", "application/json")], body).0, 400, "{body}");
    }
    assert_eq!(cut.router.post(&format!("{ITEMS}:delete"), json!({"filter": "size:big"})).0, 400);
    assert_eq!(cut.router.post("/v1/models/other/items:delete", json!({"ids": [1]})).0, 404);
    assert_eq!(cut.router.post(&format!("{ITEMS}:merge"), json!({})).0, 422);
}

#[test]
fn shards_that_do_not_take_their_items_are_named_and_the_others_go_on() {
    let mut cut = Cut::new();
    let path = format!("{ITEMS}:upsert");
    let items: Vec<Value> = (5000..5040).map(item).collect();
    let body = json!({"items": items}).to_string();
    let headers = [("content-type", "application/json"), ("idempotency-key", "all")];
    let address = cut.shards[1].address.clone();
    cut.shards[1].signal("KILL");
    cut.shards.remove(1).wait();
    let (status, reported) = post(&cut.router, &path, &headers, &body);
    assert_eq!(
        (status, &reported["code"], &reported["retryable"]),
        (503, &json!("partial"), &json!(true)),
        "{reported}"
    );
    let lost: Vec<u64> = (0..40).filter(|n| home(5000 + *n as i64) == 1).collect();
    let failed = &reported["failed"][0];
    assert_eq!(
        (&failed["shard"], &failed["places"], &failed["retryable"]),
        (&json!(1), &json!(lost), &json!(true)),
        "{reported}"
    );
    assert!(
        failed["may_be_applied"] == false
            && failed["may_be_done"] == false
            && failed["reason"].as_str().is_some_and(|why| !why.is_empty()),
        "{reported}"
    );
    assert_eq!((reported["accepted"].as_u64(), &reported["positions"][1]), (Some(40 - lost.len() as u64), &json!(0)));
    assert!(reported["positions"][0].as_u64() > Some(0) && reported["positions"][2].as_u64() > Some(0));
    // The other shards have applied their updates; the repeated call reaches the restarted shard, and applies nothing twice.
    let there = cut.shards[0].get_json(&format!("{ITEMS}:position"));
    cut.shards.insert(1, serve(cut.folder.path(), 1, &cut.updates(1), &address));
    until("the shard is back", || cut.router.get(&format!("{ITEMS}:position")).0 == 200);
    let (status, again) = post(&cut.router, &path, &headers, &body);
    assert_eq!((status, &again["accepted"], &again["repeated"]), (200, &json!(40), &json!(false)), "{again}");
    assert_eq!(cut.shards[0].get_json(&format!("{ITEMS}:position"))["durable"], there["durable"]);
    let query = json!({"vector": [1, 1, 1, 1], "k": 100, "exact": true, "filter": "colour:violet"});
    let found = cut.router.ask(&format!("/v1/models/vectors:retrieve?min_position={}", token(&again)), query);
    let mut found = ids(&found);
    found.sort_unstable();
    assert!(found.into_iter().eq(5000..5040));
    // If all parts of a call fail, the call fails with their error.
    cut.shards.drain(..).for_each(|server| {
        server.signal("KILL");
        server.wait();
    });
    let (status, reported) = post(&cut.router, &path, &[("content-type", "application/json")], &body);
    assert_eq!(
        (status, &reported["code"], &reported["accepted"]),
        (503, &json!("unavailable"), &json!(0)),
        "{reported}"
    );
    assert_eq!(reported["failed"].as_array().unwrap().len(), 3);
}

#[test]
fn shards_of_several_servers_with_journals_of_their_own_are_not_written_to() {
    let cut = Cut::new();
    let elsewhere = cut.folder.path().join("elsewhere");
    let second = serve(cut.folder.path(), 2, elsewhere.to_str().unwrap(), "127.0.0.1:0");
    let addresses = || cut.shards.iter().map(|server| server.address.as_str());
    let router = route(addresses().chain([second.address.as_str()]));
    let body = json!({"ids": [-9000]});
    let (status, reported) = router.post(&format!("{ITEMS}:delete"), &body);
    assert_eq!((status, &reported["code"]), (422, &json!("unsupported")), "{reported}");
    let why = reported["detail"].as_str().unwrap();
    assert!(why.contains("shard 2") && why.contains("2 servers with journals of their own"), "{why}");
    assert_eq!(router.post(&format!("{ITEMS}:upsert"), json!({"items": [item(1)]})).0, 422);
    // An address that never answered may be another server.
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let router = route(addresses().chain([nobody.as_str()]));
    let (status, reported) = router.post(&format!("{ITEMS}:delete"), &body);
    assert!(status == 503 && reported["detail"].as_str().unwrap().contains("which has not answered yet"), "{reported}");
    // Servers without updates are no targets either.
    let without: Vec<Server> = (0..3).map(|shard| crate::route::serve_shard(cut.folder.path(), shard)).collect();
    let router = route(without.iter().map(|server| server.address.as_str()));
    let (status, reported) = router.post(&format!("{ITEMS}:delete"), &body);
    assert!(status == 422 && reported.to_string().contains("accepts no updates"), "{reported}");
    assert_eq!(router.get(&format!("{ITEMS}:position")).0, 422);
}

#[test]
fn routers_show_their_key_to_shards_that_ask_for_one() {
    let folder = tempfile::tempdir().unwrap();
    let what =
        Plan { output: Output::shards(2), ..shards::catalogue(folder.path(), sterling::index::ivf::Rescore::F16) };
    put(folder.path(), &what).unwrap();
    let file = folder.path().join("keys.toml").to_str().unwrap().to_owned();
    let key = |arguments: &[&str]| {
        let (code, said, wrong) = run(&[&["key"], arguments, &["--file", &file]].concat());
        assert_eq!(code, 0, "{wrong}");
        said.trim().to_owned()
    };
    let (reader, writer) = (key(&["reader"]), key(&["writer", "--role", "write"]));
    let servers: Vec<Server> = (0..2u32)
        .map(|shard| {
            let mut command = sterling();
            command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_ACCESS__KEYS", &file);
            command
                .args(["serve", "--shard", &shard.to_string(), "--listen", "127.0.0.1:0", "--store"])
                .arg(folder.path());
            command.arg("--updates").arg(folder.path().join(shard.to_string()));
            let server = Server::spawn(&mut command);
            server.wait_ready();
            server
        })
        .collect();
    let router = |key: &str, keys: Option<&str>| {
        let mut command = sterling();
        command.env("STERLING_HTTP__DRAIN_MS", "0").env("STERLING_ROUTE__REFRESH_MS", "100");
        command.env("STERLING_ROUTE__KEY", key).args(["route", "--listen", "127.0.0.1:0"]);
        if let Some(keys) = keys {
            command.env("STERLING_ACCESS__KEYS", keys);
        }
        for server in &servers {
            command.args(["--server", &server.address]);
        }
        Server::spawn(&mut command)
    };
    let (query, body) =
        (json!({"vector": [1, 0, 0, 0], "k": 5}), json!({"items": [item(5000), item(5001), item(5002)]}));
    let (retrieve, upsert) = ("/v1/models/vectors:retrieve", format!("{ITEMS}:upsert"));
    // With a read key a router serves reads, and reports why it cannot write.
    let reading = router(&reader, None);
    reading.wait_ready();
    assert_eq!(ids(&reading.ask(retrieve, &query)).len(), 5);
    let (status, reported) = reading.post(&upsert, &body);
    assert!(status == 422 && reported.to_string().contains("route.key"), "{reported}");
    assert_eq!(reported["accepted"], 0);
    // With a write key it does both; its own callers need their own keys, if it requires any.
    let writing = router(&writer, None);
    writing.wait_ready();
    let made = writing.ask(&upsert, &body);
    assert_eq!(made["accepted"], 3);
    let found = writing.ask(
        &format!("{retrieve}?min_position={}", token(&made)),
        json!({"vector": [1, 0, 0, 0], "k": 9, "filter": "colour:violet", "exact": true}),
    );
    assert_eq!(ids(&found).len(), 3);
    let guarded = router(&writer, Some(&file));
    until("it is ready", || guarded.get("/readyz").0 == 200);
    assert_eq!(guarded.post(&upsert, &body).0, 401);
    let with = |key: &str| {
        post(
            &guarded,
            &upsert,
            &[("content-type", "application/json"), ("authorization", &format!("Bearer {key}"))],
            &body.to_string(),
        )
    };
    assert_eq!((with(&reader).0, with(&writer).0), (403, 200));
    // Without a valid key it reaches no server.
    for wrong in ["", "stk_wrong"] {
        let outside = router(wrong, None);
        outside.wait_for_polls("servers");
        assert_eq!(outside.get("/readyz").0, 503);
        assert_eq!(outside.post(retrieve, &query).0, 503);
    }
}

#[test]
fn a_publication_at_a_position_of_each_shard_takes_over_from_there() {
    let cut = Cut::new();
    let upsert = |ids: std::ops::Range<i64>| {
        cut.router.ask(&format!("{ITEMS}:upsert"), json!({"items": ids.map(item).collect::<Vec<Value>>()}))
    };
    let exported = upsert(5000..5020);
    // Updates after the export are in the journals only, and earlier ones in the items only.
    let last = upsert(5020..5030);
    let positions: Vec<u64> = exported["positions"].as_array().unwrap().iter().map(|p| p.as_u64().unwrap()).collect();
    let mut what = shards::catalogue(cut.folder.path(), sterling::index::ivf::Rescore::F16);
    let lines: String = (5000..5019).map(|id| format!("{}\n", item(id))).collect();
    let items = what.source.item_file().unwrap();
    let mut file = std::fs::read_to_string(&items).unwrap();
    file.push('\n');
    file.push_str(&lines);
    std::fs::write(&items, file).unwrap();
    let at = |positions: &[u64]| Output::Shards { count: 3, positions: positions.into() };
    let wrong = Plan { output: at(&[7]), ..what.clone() };
    assert!(put(cut.folder.path(), &wrong).unwrap_err().to_string().contains("expected 3"));
    let wrong = Plan { output: at(&[1, 2]), ..what.clone() };
    assert!(put(cut.folder.path(), &wrong).unwrap_err().to_string().contains("got 2, expected 3"));
    what.output = at(&positions);
    let version = put(cut.folder.path(), &what).unwrap();
    until("it answers", || {
        cut.router.get_json("/v1/models/vectors/versions").to_string().contains(&format!("\"version\":{version}")) && {
            let reported = cut.router.ask("/v1/models/vectors:retrieve", json!({"vector": [1, 1, 1, 1], "k": 1}));
            reported["version"] == version
        }
    });
    let query = json!({"vector": [1, 1, 1, 1], "k": 100, "exact": true, "filter": "colour:violet"});
    let mut found = ids(&cut.router.ask(&format!("/v1/models/vectors:retrieve?min_position={}", token(&last)), query));
    found.sort_unstable();
    // 5019 was written before the export, and is not in the items: updates before the positions are not applied again.
    assert!(found.into_iter().eq((5000..5019).chain(5020..5030)));
}
