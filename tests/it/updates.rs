//! Updates over HTTP, with real processes: acknowledged updates become visible, stay, and are never lost.

use std::path::Path;

use serde_json::{Value, json};
use sterling::publish::{Output, Plan};

use crate::onnx::Onnx;
use crate::packages::Made;
use crate::support::{Server, agent, ids, put, vectors};

const LINES: &str = concat!(
    "{\"id\": 1, \"embedding\": [1, 0], \"attributes\": {\"lang\": [\"en\"], \"year\": 2001, \"price\": 1.5}}\n",
    "{\"id\": 2, \"embedding\": [0, 1], \"attributes\": {\"lang\": [\"fr\"], \"year\": 2002, \"price\": 2.5}}\n",
    "{\"id\": 3, \"embedding\": [1, 1], \"attributes\": {\"lang\": [\"en\", \"fr\"], \"year\": 2003, \"price\": 3.5}}\n",
);
const ITEMS: &str = "/v1/models/vectors/items";

fn published(folder: &Path) {
    put(&folder.join("store"), &vectors(folder, LINES)).unwrap();
}

fn serve(folder: &Path) -> Server {
    Server::start_with(&folder.join("store"), &["--updates", folder.join("updates").to_str().unwrap()])
}

fn upsert(server: &Server, items: Value) -> Value {
    server.ask(&format!("{ITEMS}:upsert"), json!({"items": items}))
}

/// Returns the results at this position or later.
fn found(server: &Server, position: u64, body: Value) -> Value {
    server.ask(&format!("/v1/models/vectors:retrieve?min_position={position}"), body)
}

fn all(server: &Server, position: u64) -> Vec<i64> {
    let mut ids = ids(&found(server, position, json!({"vector": [1, 2], "k": 100})));
    ids.sort_unstable();
    ids
}

/// Posts with headers; returns the status and the answer.
fn post(server: &Server, path: &str, headers: &[(&str, &str)], body: &str) -> (u16, Value) {
    let mut request = agent().post(format!("http://{}{path}", server.address));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let mut response = request.send(body).unwrap();
    let text = response.body_mut().read_to_string().unwrap();
    (response.status().as_u16(), serde_json::from_str(&text).unwrap_or(Value::Null))
}

#[test]
fn calls_change_items_put_before() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path());
    let server = serve(folder.path());
    for id in 10..60 {
        let attributes = json!({"lang": ["de"], "year": 2010, "price": 1});
        let put = upsert(&server, json!([{"id": id, "embedding": [1, id], "attributes": attributes}]));
        let path = format!("{ITEMS}:upsert?min_position={}", put["position"]);
        let changed = server.ask(&path, json!({"items": [{"id": id, "set": {"price": id}}]}));
        assert_eq!((&changed["accepted"], &changed["refused"]), (&json!(1), &json!([])), "{changed}");
    }
    let (status, problem) = post(&server, &format!("{ITEMS}:upsert?min_position=999"), &[], "{\"items\": []}");
    assert_eq!(status, 400, "{problem}");
    assert!(
        problem["detail"].as_str().unwrap().contains("min_position: got 999, the last update has position 100"),
        "{problem}"
    );
}

#[test]
fn acknowledged_calls_happen_to_an_item_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path());
    let server = serve(folder.path());
    // Requests do not wait for visibility, which lags behind acknowledgement.
    let mut last = 0;
    for id in 100..160 {
        let put = json!({"id": id, "embedding": [1, 1], "attributes": {"year": 1}});
        upsert(&server, json!([put]));
        let changed = upsert(&server, json!([{"id": id, "set": {"year": id}}]));
        assert_eq!((&changed["accepted"], &changed["refused"]), (&json!(1), &json!([])), "{changed}");
        if id % 2 == 0 {
            let removed = server.ask(&format!("{ITEMS}:delete"), json!({"ids": [id]}));
            assert_eq!(removed["deleted"], 1, "{removed}");
        }
        if id % 3 == 0 {
            last = upsert(&server, json!([put]))["position"].as_u64().unwrap();
            let filter = json!({"filter": "year:1"});
            let removed = server.ask(&format!("{ITEMS}:delete"), &filter);
            assert_eq!((&removed["deleted"], &removed["matched"]), (&json!(1), &json!(1)), "{removed}");
        }
        last = last.max(server.get_json(&format!("{ITEMS}:position"))["durable"].as_u64().unwrap());
    }
    let expected: Vec<i64> = [1, 2, 3].into_iter().chain((100..160).filter(|id| id % 2 == 1 && id % 3 != 0)).collect();
    assert_eq!(all(&server, last), expected);
    for id in expected.iter().filter(|id| **id >= 100) {
        assert_eq!(server.get_json(&format!("{ITEMS}/{id}"))["attributes"]["year"], *id);
    }
    // Changes of items that never existed or are deleted are rejected.
    let answer = upsert(&server, json!([{"id": 555, "set": {"year": 1}}, {"id": 100, "set": {"year": 1}}]));
    let refused = answer["refused"].as_array().unwrap();
    assert_eq!((&answer["accepted"], refused.len()), (&json!(0), 2), "{answer}");
    assert!(refused.iter().all(|item| item["reason"] == "no such item, expected an existing one"), "{answer}");
}

#[test]
fn a_repeated_call_has_the_first_answer() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path());
    let mut server = serve(folder.path());
    let key = |key: &'static str| [("idempotency-key", key), ("content-type", "application/json")];
    let items =
        json!({"items": [{"id": 2, "set": {"year": 9}}, {"id": 900, "set": {"year": 9}}, {"id": 7}]}).to_string();
    let removed = json!({"filter": "lang:fr"}).to_string();
    let (upserts, deletes) = (format!("{ITEMS}:upsert"), format!("{ITEMS}:delete"));
    let calls = |server: &Server| {
        let answers = [
            post(server, &upserts, &key("put"), &items),
            post(server, &deletes, &key("filter"), &removed),
            post(server, &deletes, &key("ids"), "{\"ids\": [1, 77]}"),
        ];
        answers.map(|(status, answer)| {
            assert_eq!(status, 200, "{answer}");
            answer
        })
    };
    let first = calls(&server);
    assert_eq!(first[0]["refused"].as_array().unwrap().len(), 2);
    assert!(first.iter().all(|answer| answer["repeated"] == false));
    let repeated = first.clone().map(|mut answer| {
        answer["repeated"] = json!(true);
        answer.to_string()
    });
    // A repetition by key ignores later changes: the item of a rejected change exists now, those of the deletions do not.
    upsert(
        &server,
        json!([{"id": 900, "embedding": [1, 1]}, {"id": 4, "embedding": [1, 1], "attributes": {"lang": "fr"}}]),
    );
    let durable = |server: &Server| server.get_json(&format!("{ITEMS}:position"))["durable"].as_u64().unwrap();
    let position = durable(&server);
    for _ in 0..2 {
        assert_eq!(calls(&server).map(|answer| answer.to_string()), repeated);
        assert_eq!(durable(&server), position);
        server.signal("KILL");
        server.wait();
        server = serve(folder.path());
    }
    assert_eq!(all(&server, position), [4, 900]);
}

#[test]
fn items_that_cannot_be_embedded_are_rejected_before_the_acknowledgement() {
    let model = r#"
name = "vectors"
dimension = 2
[user]
tower = "user.onnx"
[[user.features]]
name = "x"
kind = "dense"
width = 2
[item]
tower = "item.onnx"
[[item.features]]
name = "image"
kind = "dense"
width = 2
[[item.columns]]
name = "year"
"#;
    let graph = |input: &str, output: &str| Onnx::default().input(input, &[-1, 2]).output(output, &[-1, 2]);
    let user = graph("x", "query").numbers("one", &[1, 1], &[1.0]).node("Mul", &["x", "one"], "query");
    let item = graph("image", "item").node("Mul", &["image", "image"], "item");
    let lines: Vec<Value> =
        (1..4).map(|id| json!({"id": id, "attributes": {"image": [id, 1], "year": 2000 + id}})).collect();
    let folder = tempfile::tempdir().unwrap();
    let made = Made::new(model, &lines).graph("user.onnx", user).graph("item.onnx", item);
    made.publish(&folder.path().join("store")).unwrap();
    let server = serve(folder.path());
    let put = |id: i64, image: Value| json!({"id": id, "attributes": {"image": image, "year": 1}});
    let answer = upsert(
        &server,
        json!([
            put(10, json!([2, 3])),
            put(11, json!([(1_u64 << 50), 1])),
            {"id": 12, "attributes": {"year": 1}},
            put(13, Value::Null),
            put(14, json!([0, 5])),
            put(2, json!([(1_u64 << 50), 1])),
        ]),
    );
    assert_eq!((answer["accepted"].as_u64(), answer["position"].as_u64()), (Some(2), Some(2)), "{answer}");
    let refused: Vec<(i64, &str, &str)> = answer["refused"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| (r["id"].as_i64().unwrap(), r["field"].as_str().unwrap(), r["reason"].as_str().unwrap()))
        .collect();
    let missing = "missing, expected 2 numbers, which the item tower reads";
    let unsearchable = "number 1 of the vector that the item tower makes is 1.2676506e30, which cannot be searched";
    assert_eq!(
        refused,
        [
            (11, "attributes", unsearchable),
            (12, "attributes.image", missing),
            (13, "attributes.image", missing),
            (2, "attributes", unsearchable)
        ]
    );
    let body = json!({"features": {"x": [1, 0]}, "k": 100, "exact": true});
    let mut server = Some(server);
    for _ in 0..2 {
        let now = server.take().unwrap_or_else(|| serve(folder.path()));
        let found = found(&now, 2, body.clone());
        assert_eq!(ids(&found), [3, 2, 10, 1, 14], "all that was acknowledged, and the items before");
        let scores: Vec<f64> =
            found["items"].as_array().unwrap().iter().map(|i| i["score"].as_f64().unwrap()).collect();
        assert_eq!(scores, [9.0, 4.0, 4.0, 1.0, 0.0]);
        let metrics = now.get("/metrics").1;
        let mut dropped = metrics.lines().filter(|line| line.starts_with("sterling_updates_refused_total{"));
        assert!(dropped.all(|line| line.ends_with(" 0")), "nothing was dropped");
        now.stop();
    }
}

#[test]
fn an_item_stays_where_a_version_has_another_type_for_one_of_its_attributes() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path());
    let server = serve(folder.path());
    let new = json!({"id": 9, "embedding": [3, 3], "attributes": {"lang": ["xx"], "year": 1999, "price": 0.25}});
    upsert(&server, json!([new, {"id": 2, "set": {"year": 1, "price": 7}}]));
    assert!(!server.get("/readyz").1.contains("warning"));
    let texts: String = LINES
        .lines()
        .map(|line| line.replace("\"year\": 200", "\"year\": \"in 200").replace(", \"price", "\", \"price") + "\n")
        .collect();
    put(&folder.path().join("store"), &vectors(folder.path(), &texts)).unwrap();
    server.ask("/v1/models/vectors/versions/2:activate", json!({}));
    let seen = found(&server, 2, json!({"vector": [1, 2], "k": 9, "columns": ["lang", "year", "price"]}));
    assert_eq!((seen["version"].as_u64(), ids(&seen)), (Some(2), vec![9, 3, 2, 1]));
    assert_eq!(seen["items"][0]["columns"], json!({"lang": "xx", "year": null, "price": 0.25}));
    assert_eq!(seen["items"][1]["columns"]["year"], "in 2003");
    assert_eq!(seen["items"][2]["columns"], json!({"lang": "fr", "year": null, "price": 7.0}));
    let ready = server.get("/readyz").1;
    let warning =
        "warning: model `vectors`, version 2: 0 updates were not applied and 2 attributes of updates are missing";
    assert!(ready.contains(warning) && ready.contains("attribute `year`: got integers, expected texts"), "{ready}");
    assert!(server.get("/metrics").1.contains("sterling_attributes_dropped_total{model=\"vectors\"} 2"));
}

#[test]
fn changed_and_deleted_items_stay_so() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path());
    let mut server = serve(folder.path());
    assert_eq!(found(&server, 0, json!({"vector": [1, 0]}))["position"], 0);
    // A value that is not in the snapshot works in filters at once.
    let new = json!({"id": 9, "embedding": [3, 3], "attributes": {"lang": ["xx"], "year": 1999, "price": 0.25}});
    let answer = upsert(&server, json!([new, {"id": 2, "set": {"lang": "xx", "price": 9}}]));
    assert_eq!((answer["position"].as_u64(), answer["accepted"].as_u64()), (Some(2), Some(2)));
    let only = |filter: &str| json!({"vector": [1, 2], "filter": filter, "columns": ["lang", "year", "price"]});
    let check = |server: &Server| {
        let of_xx = found(server, 2, only("lang:xx"));
        assert_eq!(ids(&of_xx), [9, 2]);
        let (first, second) = (&of_xx["items"][0]["columns"], &of_xx["items"][1]["columns"]);
        assert_eq!(*first, json!({"lang": "xx", "year": 1999, "price": 0.25}));
        assert_eq!(*second, json!({"lang": "xx", "year": 2002, "price": 9.0}));
        assert_eq!(ids(&found(server, 2, only("lang:fr"))), [3], "the old value is replaced");
        assert_eq!(ids(&found(server, 2, only("price > 3"))), [3, 2]);
        let ranked =
            server.ask("/v1/models/vectors:rank?min_position=2", json!({"vector": [1, 0], "items": [9, 1, 77]}));
        assert_eq!((ids(&ranked), ranked["unknown"].clone()), (vec![9, 1], json!([77])));
        let item = server.get_json(&format!("{ITEMS}/9?min_position=2"));
        assert_eq!((item["attributes"]["year"].as_i64(), item["position"].as_u64()), (Some(1999), Some(2)));
    };
    check(&server);
    server.signal("KILL");
    server.wait();
    server = serve(folder.path());
    check(&server);
    // Delete by filter, after a dry run with the count.
    let path = format!("{ITEMS}:delete");
    let dry = server.ask(&path, json!({"filter": "lang:xx", "dry_run": true}));
    assert_eq!(
        dry,
        json!({"model": "vectors", "position": 2, "deleted": 0, "matched": 2, "dry_run": true, "repeated": false})
    );
    assert_eq!(all(&server, 2), [1, 2, 3, 9]);
    let removed = server.ask(&path, json!({"filter": "lang:xx"}));
    assert_eq!((removed["deleted"].as_u64(), removed["position"].as_u64()), (Some(2), Some(4)));
    assert_eq!(all(&server, 4), [1, 3]);
    assert_eq!(server.get(&format!("{ITEMS}/9?min_position=4")).0, 404);
    let removed = server.ask(&path, json!({"ids": [1, 1, 555]}));
    // One of the two ids exists; the deletion of the other one is written too, because a concurrent call may have put it.
    let expected =
        json!({"model": "vectors", "position": 6, "deleted": 2, "matched": 1, "dry_run": false, "repeated": false});
    assert_eq!(removed, expected);
    assert_eq!(all(&server, 6), [3]);
    let state = server.get_json(&format!("{ITEMS}:position"));
    assert_eq!(
        (state["durable"].as_u64(), state["items"].as_u64(), state["fresh_items"].as_u64()),
        (Some(6), Some(1), Some(0))
    );
    assert_eq!(server.stop(), Some(0));
    assert_eq!(all(&serve(folder.path()), 6), [3], "deleted items do not come back");
}

#[test]
fn a_catalogue_may_become_empty_and_fill_again() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path());
    let server = serve(folder.path());
    server.ask(&format!("{ITEMS}:delete"), json!({"ids": [1, 2, 3]}));
    for filter in ["", "lang:en", "year > 2000"] {
        for exact in [false, true] {
            let body = json!({"vector": [1, 0], "filter": filter, "exact": exact});
            assert_eq!(ids(&found(&server, 3, body)), [0i64; 0], "{filter}");
        }
    }
    upsert(&server, json!([{"id": 1, "embedding": [1, 0], "attributes": {"lang": "en"}}]));
    assert_eq!(ids(&found(&server, 4, json!({"vector": [1, 0], "filter": "lang:en"}))), [1]);
}

#[test]
fn deletes_survive_another_version_and_the_way_back() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path());
    let server = serve(folder.path());
    server.ask(&format!("{ITEMS}:delete"), json!({"ids": [1]}));
    upsert(&server, json!([{"id": 4, "embedding": [5, 5]}]));
    assert_eq!(all(&server, 2), [2, 3, 4]);
    // Published again from the original items: the updates are applied to the version.
    published(folder.path());
    server.ask("/v1/models/vectors/versions/2:activate", json!({}));
    let seen = found(&server, 2, json!({"vector": [1, 2], "k": 100}));
    assert_eq!((seen["version"].as_u64(), ids(&seen)), (Some(2), vec![4, 3, 2]));
    upsert(&server, json!([{"id": 5, "embedding": [6, 6]}]));
    server.ask("/v1/models/vectors/versions/1:activate", json!({}));
    let seen = found(&server, 3, json!({"vector": [1, 2], "k": 100}));
    assert_eq!((seen["version"].as_u64(), ids(&seen)), (Some(1), vec![5, 4, 3, 2]));
}

#[test]
fn a_publication_at_a_position_takes_over_from_there() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path());
    let server = serve(folder.path());
    server.ask(&format!("{ITEMS}:delete"), json!({"ids": [1]}));
    upsert(&server, json!([{"id": 2, "set": {"year": 7}}]));
    // The catalogue contains item 1 again, and includes the first update: only the second is applied to it.
    let what = Plan { output: Output::at(1), ..vectors(folder.path(), LINES) };
    put(&folder.path().join("store"), &what).unwrap();
    server.ask("/v1/models/vectors/versions/2:activate", json!({}));
    assert_eq!(all(&server, 2), [1, 2, 3]);
    assert_eq!(server.get_json(&format!("{ITEMS}/2"))["attributes"]["year"], 7);
    // A version with a position that was never written is rejected.
    put(&folder.path().join("store"), &Plan { output: Output::at(99), ..what }).unwrap();
    let (status, _) = server.post("/v1/models/vectors/versions/3:activate", json!({}));
    assert_ne!(status, 200);
    assert_eq!(all(&server, 2), [1, 2, 3]);
}

#[test]
fn a_repeated_call_happens_once_and_a_late_one_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path());
    let mut server = serve(folder.path());
    let path = format!("{ITEMS}:upsert");
    let body = json!({"items": [{"id": 4, "embedding": [1, 1]}, {"id": 5}]}).to_string();
    let key = [("idempotency-key", "order 66"), ("content-type", "application/json")];
    let (status, first) = post(&server, &path, &key, &body);
    assert_eq!((status, first["accepted"].as_u64(), first["repeated"].as_bool()), (200, Some(1), Some(false)));
    assert_eq!(first["refused"][0]["place"], 1);
    let position = first["position"].as_u64().unwrap();
    for _ in 0..2 {
        let (status, again) = post(&server, &path, &key, &body);
        assert_eq!(
            (status, again["repeated"].as_bool(), again["position"].as_u64()),
            (200, Some(true), Some(position))
        );
        let (status, _) = post(&server, &path, &key, &body.replace("[1,1]", "[2,2]"));
        assert_eq!(status, 409, "the key of another call");
        server.signal("KILL");
        server.wait();
        server = serve(folder.path());
    }
    let at = |server: &Server, position: u64| post(server, &format!("{path}?if_position={position}"), &[], &body);
    let (status, problem) = at(&server, position - 1);
    assert_eq!((status, problem["code"].as_str()), (409, Some("conflict")));
    assert_eq!(at(&server, position).0, 200);
    assert_eq!(at(&server, position).0, 409);
}

#[test]
fn bad_input_is_rejected_by_item_and_the_rest_is_accepted() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path());
    let server = serve(folder.path());
    let vector = json!([1, 1]);
    let items = json!([
        {"id": 10, "embedding": vector},
        {"id": 10, "embedding": vector},
        {"id": 11, "embedding": [1]},
        {"id": 12},
        {"id": 13, "embedding": [1, 1e30]},
        {"id": 14, "embedding": vector, "attributes": {"colour": "red"}},
        {"id": 15, "embedding": vector, "attributes": {"year": "x"}},
        {"id": 16, "embedding": vector, "attributes": {"year": 1.5}},
        {"id": 17, "embedding": vector, "attributes": {"price": [1, 2]}},
        {"id": 18, "embedding": vector, "attributes": {"lang": 3}},
        {"id": 19, "set": {"year": 1}},
        {"id": 1, "set": {"year": 1}, "embedding": vector},
        {"id": 1.5, "embedding": vector},
        {"embedding": vector},
        {"id": 20, "embedding": vector, "more": 1},
        {"id": 21, "embedding": ["x", 1]},
        {"id": 22, "embedding": vector, "attributes": {"price": 7, "year": null, "lang": []}},
        {"id": 23, "embedding": vector, "attributes": {"lang": "x".repeat(70_000)}},
        {"id": 24, "embedding": vector, "attributes": {"lang": vec!["x"; 3_000]}},
        {"id": 2, "set": {"year": vec![7; 9_000]}}
    ]);
    let answer = upsert(&server, items);
    assert_eq!((answer["accepted"].as_u64(), answer["position"].as_u64()), (Some(2), Some(2)));
    let refused: Vec<(u64, &str)> = answer["refused"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| (r["place"].as_u64().unwrap(), r["field"].as_str().unwrap()))
        .collect();
    let expected = [
        (1, "id"),
        (2, "embedding"),
        (3, "embedding"),
        (4, "embedding"),
        (5, "attributes.colour"),
        (6, "attributes.year"),
        (7, "attributes.year"),
        (8, "attributes.price"),
        (9, "attributes.lang"),
        (10, "id"),
        (11, "embedding"),
        (12, "id"),
        (13, ""),
        (14, "more"),
        (15, "embedding[0]"),
        (17, "attributes"),
        (18, "attributes"),
        (19, "set"),
    ];
    assert_eq!(refused, expected);
    let refused = answer["refused"].as_array().unwrap();
    assert!(refused.iter().filter(|r| r.get("id").is_none()).map(|r| r["place"].as_u64()).eq([Some(12), Some(13)]));
    let odd = [
        (json!({"id": 2, "set": null}), "set", "invalid type: null, expected an object of attributes at line 1 column"),
        (
            json!({"id": 2, "set": {"year": 9_223_372_036_854_775_808_u64}}),
            "set.year",
            "got 9223372036854775808, expected an integer of at most 9223372036854775807",
        ),
        (
            json!({"id": 2, "set": {"price": 9_007_199_254_740_993_i64}}),
            "set.price",
            "got 9007199254740993, expected a number that a 64-bit float represents exactly",
        ),
        (json!({"id": 2, "set": {"year": 1999.0}}), "set.year", "got 1999.0, expected integers"),
        (json!({"id": 2, "set": {"year": true}}), "set.year", "got the text `true`, expected integers"),
        (json!({"id": 2, "set": {"year": ["a", "b"]}}), "set.year", "got 2 texts, expected integers"),
        (
            json!({"id": 2, "set": {"lang": {}}}),
            "set.lang",
            "expected a text, a number, a list of texts or of numbers, or null",
        ),
        (
            json!({"id": 2, "set": {"year": 1}, "attributes": {}}),
            "set",
            "beside `attributes`: expected the attributes that change, or all of them",
        ),
    ];
    for (item, field, reason) in odd {
        let answer = upsert(&server, json!([item]));
        let refused = &answer["refused"][0];
        assert_eq!((&refused["id"], &refused["field"]), (&json!(2), &json!(field)), "{answer}");
        assert!(refused["reason"].as_str().unwrap().starts_with(reason), "{answer}");
    }
    assert_eq!(all(&server, 2), [1, 2, 3, 10, 22]);
    let upsert = format!("{ITEMS}:upsert");
    for (path, body, status) in [
        (upsert.as_str(), "", 400),
        (upsert.as_str(), "[]", 400),
        (upsert.as_str(), "{\"items\": []}", 400),
        ("/v1/models/vectors/items:upsert?if_position=x", "{\"items\": []}", 400),
        ("/v1/models/none/items:upsert", "{\"items\": []}", 404),
        ("/v1/models/vectors/items:delete", "{}", 400),
        ("/v1/models/vectors/items:delete", "{\"filter\": \"year >\"}", 400),
        ("/v1/models/vectors/items:delete", "{\"filter\": \"colour:red\"}", 400),
        ("/v1/models/vectors:retrieve?min_position=99", "{\"vector\": [1, 1]}", 400),
        ("/v1/models/vectors:retrieve?min_position=-1", "{\"vector\": [1, 1]}", 400),
    ] {
        let (got, problem) = server.post(path, body);
        assert_eq!(got, status, "{path} {body}: {problem}");
    }
    assert_eq!(server.get(&format!("{ITEMS}/x")).0, 400);
    // Invalid JSON in an item rejects only that item.
    let (status, answer) = server
        .post(&upsert, "{\"items\": [{\"id\": 1, \"embedding\": [NaN, 1]}, {\"id\": 2, \"set\": {\"year\": 2}}]}");
    assert_eq!((status, &answer["accepted"], &answer["refused"][0]["place"]), (200, &json!(1), &json!(0)), "{answer}");
    let lines = "{\"id\": 30, \"embedding\": [1, 0]}\n{\"id\": 31\n\n{\"id\": 32, \"embedding\": [0, 1]}\n";
    let (status, answer) = post(&server, &upsert, &[("content-type", "application/x-ndjson")], lines);
    assert_eq!((status, answer["accepted"].as_u64()), (200, Some(2)));
    assert_eq!(answer["refused"][0]["place"], 1);
    assert_eq!(all(&server, answer["position"].as_u64().unwrap()), [1, 2, 3, 10, 22, 30, 32]);
}

#[test]
fn servers_without_updates_report_it_and_a_journal_has_one_server() {
    let folder = tempfile::tempdir().unwrap();
    published(folder.path());
    let server = Server::start(&folder.path().join("store"));
    let (status, problem) = server.post(&format!("{ITEMS}:upsert"), json!({"items": [{"id": 1}]}));
    assert_eq!((status, problem["code"].as_str()), (422, Some("unsupported")));
    let first = serve(folder.path());
    upsert(&first, json!([{"id": 7, "embedding": [1, 1]}]));
    // A second server waits until the first has ended, as in an overlapping restart.
    let mut command = crate::support::sterling();
    let second =
        Server::spawn(command.env("STERLING_HTTP__DRAIN_MS", "0").args(["serve", "--listen", "127.0.0.1:0"]).args([
            "--store".as_ref(),
            folder.path().join("store").as_os_str(),
            "--updates".as_ref(),
            folder.path().join("updates").as_os_str(),
        ]));
    let (status, why) = second.get("/readyz");
    assert_eq!(status, 503, "{why}");
    assert_eq!(first.stop(), Some(0));
    second.wait_ready();
    assert_eq!(all(&second, 1), [1, 2, 3, 7]);
}
