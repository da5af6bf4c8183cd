//! Updates through a router over shards of several servers, all of which follow the stream of their shard.

use serde_json::{Value, json};
use sterling::items::shard_of;
use sterling::publish::{Output, Plan};
use sterling::units::ItemId;

use super::Broker;
use crate::route::route;
use crate::routed_updates::{serve, token};
use crate::shards;
use crate::support::{Server, ids, put, until};

const ITEMS: &str = "/v1/models/vectors/items";

#[test]
#[ignore = "long: a server tries for ten seconds to reach its broker"]
fn updates_that_a_dead_broker_cannot_store_are_reported_as_not_applied() {
    let mut broker = Broker::start();
    let folder = tempfile::tempdir().unwrap();
    let plan =
        Plan { output: Output::shards(2), ..shards::catalogue(folder.path(), sterling::index::ivf::Rescore::F16) };
    put(folder.path(), &plan).unwrap();
    let servers = [0, 1].map(|shard| serve(folder.path(), shard, &broker.url(), "127.0.0.1:0"));
    let router = route(servers.iter().map(|server| server.address.as_str()));
    let item = |id: i64| json!({"id": id, "embedding": [1, 2, 0.5, 0]});
    let body = json!({"items": (5000..5010).map(item).collect::<Vec<Value>>()});
    assert_eq!(router.post(&format!("{ITEMS}:upsert"), &body).0, 200);
    broker.kill();
    until("the servers notice", || servers.iter().all(|server| !server.warnings().is_empty()));
    let (status, reported) = router.post(&format!("{ITEMS}:upsert"), &body);
    assert_eq!(status, 503, "{reported}");
    for failed in reported["failed"].as_array().unwrap() {
        let why = failed["reason"].as_str().unwrap();
        assert!(failed["may_be_applied"] == false && why.contains("it was not written"), "{reported}");
    }
}

#[test]
fn all_servers_of_a_shard_get_routed_updates() {
    let broker = Broker::start();
    let folder = tempfile::tempdir().unwrap();
    let what =
        Plan { output: Output::shards(2), ..shards::catalogue(folder.path(), sterling::index::ivf::Rescore::F16) };
    put(folder.path(), &what).unwrap();
    let start = |shard: u32| serve(folder.path(), shard, &broker.url(), "127.0.0.1:0");
    let mut servers: Vec<(u32, Server)> = [0, 0, 1, 1].map(|shard| (shard, start(shard))).into();
    let router = route(servers.iter().map(|(_, server)| server.address.as_str()));
    let item = |id: i64| json!({"id": id, "embedding": [1, 2, 0.5, 0], "attributes": {"colour": "violet", "price": 1, "maker": "new"}});
    let upsert = |ids: std::ops::Range<i64>| {
        let made = router.ask(&format!("{ITEMS}:upsert"), json!({"items": ids.map(item).collect::<Vec<Value>>()}));
        assert_eq!(made["refused"], json!([]), "{made}");
        made
    };
    let hold = |servers: &[(u32, Server)], made: &Value, all: std::ops::Range<i64>| {
        let violet = json!({"vector": [1, 2, 0.5, 0], "k": 500, "exact": true, "filter": "colour:violet"});
        for (shard, server) in servers {
            let position = &made["positions"][*shard as usize];
            let mut found = ids(&server.ask(&format!("/v1/models/vectors:retrieve?min_position={position}"), &violet));
            found.sort_unstable();
            let its: Vec<i64> = all.clone().filter(|id| shard_of(ItemId(*id), 2) == *shard).collect();
            assert_eq!(found, its, "shard {shard}");
        }
        let mut found = ids(&router.ask(&format!("/v1/models/vectors:retrieve?min_position={}", token(made)), &violet));
        found.sort_unstable();
        assert!(found.into_iter().eq(all));
    };
    let made = upsert(5000..5040);
    hold(&servers, &made, 5000..5040);
    // A merge of one server of a shard is adopted by the other: they follow one stream, and share a store.
    assert_eq!(servers[0].1.ask(&format!("{ITEMS}:merge"), "")["version"], 1);
    let fresh_items = |server: &Server| server.get_json(&format!("{ITEMS}:position"))["fresh_items"].as_u64();
    until("both have it", || servers[..2].iter().all(|(_, server)| fresh_items(server) == Some(0)));
    assert!(servers[2..].iter().all(|(_, server)| fresh_items(server) > Some(0)));
    hold(&servers, &made, 5000..5040);
    // If one is killed, the other accepts the writes, and the restarted one catches up completely.
    let (shard, killed) = servers.remove(0);
    killed.signal("KILL");
    killed.wait();
    let mut last = Value::Null;
    for n in 0..10 {
        until("the other one takes it", || {
            let body =
                json!({"items": [item(5040 + 4 * n), item(5041 + 4 * n), item(5042 + 4 * n), item(5043 + 4 * n)]});
            let (status, made) = router.post(&format!("{ITEMS}:upsert"), body);
            last = made;
            status == 200
        });
    }
    servers.insert(0, (shard, start(shard)));
    let last = upsert(5080..5100);
    hold(&servers, &last, 5000..5100);
    let removed = router.ask(&format!("{ITEMS}:delete"), json!({"filter": "colour:violet"}));
    assert_eq!(removed["deleted"], 100);
    for (shard, server) in &servers {
        let state =
            server.get_json(&format!("{ITEMS}:position?min_position={}", removed["positions"][*shard as usize]));
        assert_eq!(state["fresh_items"], 0);
    }
}
