//! Faults of streams, as a server sees them, as a table. In each case acknowledged items are found during the fault, `/readyz`
//! warns operators, and the server continues without a restart afterwards, with every update that was acknowledged before and
//! after.

// Prints the number of cases.
#![allow(clippy::print_stdout)]

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Broker, ask, message, send};
use crate::network::Wire;
use crate::support::{Server, ids, put, renamed, sterling, until, vectors};

const ITEMS: &str = "/v1/models/vectors/items";

/// A server, its broker, and the network between them.
pub struct World {
    pub broker: Broker,
    pub wire: Wire,
    pub folder: tempfile::TempDir,
    pub server: Server,
    /// Acknowledged items.
    written: BTreeSet<i64>,
    /// Backups of the broker's data.
    copies: Vec<tempfile::TempDir>,
    /// Servers that were started to help it.
    others: Vec<Server>,
}

/// Update service of a server during a fault.
#[derive(Clone, Copy, PartialEq)]
enum Writes {
    /// Updates are accepted.
    Go,
    /// Updates are answered with this status.
    Fail(u16),
}

/// One fault.
struct Fault {
    name: &'static str,
    inflict: fn(&mut World),
    /// Expected warning of `/readyz`.
    reported: &'static str,
    writes: Writes,
    mend: fn(&mut World),
    /// True if the warning ends with the fault; skipped messages are reported for an hour.
    ends: bool,
}

/// Publishes a model of thirty items to a store in a folder.
fn publish(folder: &tempfile::TempDir, name: &str) {
    let lines: String = (0..30)
        .map(|id| format!("{{\"id\": {id}, \"embedding\": [{id}, 1], \"attributes\": {{\"n\": 0}}}}\n"))
        .collect();
    let model = renamed(vectors(folder.path(), &lines), name);
    put(&folder.path().join("store"), &model).unwrap();
}

/// Starts a server that merges only on request.
fn serve(folder: &tempfile::TempDir, updates: &str, settings: &[(&str, &str)]) -> Server {
    let mut command = sterling();
    command
        .args(["serve", "--listen", "127.0.0.1:0", "--updates", updates, "--store"])
        .arg(folder.path().join("store"));
    command.env("STERLING_MERGE__SHARE", "0").env("STERLING_ENGINE__TIMEOUT_MS", "20000");
    Server::spawn(command.envs(settings.iter().copied()))
}

impl World {
    pub fn start() -> Self {
        let broker = Broker::start();
        let (wire, folder) = (broker.behind_a_wire(), tempfile::tempdir().unwrap());
        publish(&folder, "vectors");
        let server = serve(&folder, &wire.url(), &[]);
        server.wait_ready();
        World { broker, wire, folder, server, written: BTreeSet::new(), copies: Vec::new(), others: Vec::new() }
    }

    fn api(&self, call: &str, body: Value) -> String {
        ask(self.broker.port, &format!("$JS.API.STREAM.{call}"), &body.to_string()).expect("the broker answers")
    }

    /// Changes a limit of the stream.
    fn limit(&self, limit: &str, to: Value) {
        let mut stream = json!({"name": "sterling-vectors", "subjects": ["sterling.vectors"], "storage": "file",
            "retention": "limits", "deny_delete": true, "discard": "new"});
        stream[limit] = to;
        let reported = self.api("UPDATE.sterling-vectors", stream);
        assert!(!reported.contains("\"error\""), "{reported}");
    }

    fn stray(&self, message: &str) {
        assert!(ask(self.broker.port, "sterling.vectors", message).is_some(), "the stream takes it");
    }

    /// Puts a new item, and records it if it was acknowledged.
    fn put(&mut self) -> (u16, Value) {
        let id = 100 + self.written.len() as i64;
        let items = json!({"items": [{"id": id, "embedding": [id, 2], "attributes": {"n": id}}]});
        let (status, reported) = self.server.post(&format!("{ITEMS}:upsert"), items);
        if status == 200 {
            self.written.insert(id);
        }
        (status, reported)
    }

    /// Returns the items that are found and were not published.
    fn found(&self) -> BTreeSet<i64> {
        let answer = self
            .server
            .ask("/v1/models/vectors:retrieve", json!({"vector": [1, 1], "k": 1000, "filter": "n > 0", "exact": true}));
        ids(&answer).into_iter().collect()
    }

    fn holds_all(&self) {
        until("all that was acknowledged is found", || self.found().is_superset(&self.written));
    }

    fn warns(&self, of: &str) {
        let start = Instant::now();
        loop {
            let (status, said) = self.server.get("/readyz");
            assert_eq!(status, 200, "{said}");
            if said.contains("warning: ") && said.contains(of) {
                return;
            }
            assert!(start.elapsed() < Duration::from_secs(30), "no warning of `{of}`: {said}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn back_up(&mut self) {
        let copy = self.broker.backup();
        self.copies.push(copy);
    }

    /// Restores a backup of the broker.
    fn restore(&mut self, copy: usize) {
        self.broker.restore(&self.copies[copy]);
    }

    fn merge(&mut self) {
        self.server.ask(&format!("{ITEMS}:merge"), "");
    }

    /// Returns the numbers of the first and the last message of the stream.
    fn messages(&self) -> (u64, u64) {
        let reported = self.api("INFO.sterling-vectors", json!({}));
        let reported: Value = serde_json::from_str(reported.split_once('\n').unwrap().1.trim()).unwrap();
        let number = |name: &str| reported["state"][name].as_u64().unwrap();
        (number("first_seq"), number("last_seq"))
    }
}

fn nothing(_: &mut World) {}

fn fault(
    name: &'static str,
    inflict: fn(&mut World),
    reported: &'static str,
    writes: Writes,
    mend: fn(&mut World),
) -> Fault {
    Fault { name, inflict, reported, writes, mend, ends: true }
}

/// Returns a fault with skipped messages.
fn stray(name: &'static str, inflict: fn(&mut World)) -> Fault {
    Fault { name, inflict, reported: "were skipped", writes: Writes::Go, mend: nothing, ends: false }
}

/// Returns the faults with the expected behaviour for each.
fn faults() -> Vec<Fault> {
    vec![
        stray("a stray message", |world| world.stray("hello")),
        stray("an empty message", |world| world.stray("")),
        stray("an oversized message", |world| world.stray(&"x".repeat(1_000_000))),
        stray("many stray messages", |world| (0..300).for_each(|n| world.stray(&format!("{{\"n\": {n}}}")))),
        stray("a part of a commit's first bytes", |world| world.stray("STRLST")),
        stray("copies of commits", |world| {
            for sequence in 1..3 {
                let copy = message(world.broker.port, "sterling-vectors", sequence);
                send(world.broker.port, "sterling.vectors", &copy);
            }
        }),
        fault(
            "a deleted stream",
            |world| {
                world.back_up();
                world.api("DELETE.sterling-vectors", json!({}));
            },
            "no such stream",
            Writes::Fail(503),
            |world| world.restore(0),
        ),
        fault(
            "a stream that was deleted and made by hand",
            |world| {
                world.back_up();
                world.api("DELETE.sterling-vectors", json!({}));
                world.api(
                    "CREATE.sterling-vectors",
                    json!({"name": "sterling-vectors", "subjects": ["sterling.vectors"]}),
                );
            },
            "the stream has messages 0 to 0",
            Writes::Fail(503),
            |world| world.restore(0),
        ),
        fault(
            "a broker that comes back having lost everything, with a new stream of the name",
            |world| {
                world.broker.lose_all();
                world.api(
                    "CREATE.sterling-vectors",
                    json!({"name": "sterling-vectors", "subjects": ["sterling.vectors"], "deny_delete": true}),
                );
            },
            "the stream has messages 0 to 0",
            Writes::Fail(503),
            |world| {
                // Only this server has the updates: a version saves them, and a server that starts with it creates the stream
                // after it.
                world.merge();
                let begins = serve(&world.folder, &world.broker.url(), &[]);
                begins.wait_ready();
                world.others.push(begins);
            },
        ),
        fault(
            "a stream restored from an earlier state",
            |world| {
                world.back_up();
                assert_eq!(world.put().0, 200);
                world.holds_all();
                world.back_up();
                world.restore(0);
            },
            "restored from an earlier state",
            Writes::Fail(503),
            |world| world.restore(1),
        ),
        fault(
            "an emptied stream",
            |world| {
                world.api("PURGE.sterling-vectors", json!({}));
            },
            "which the active version needs at a restart",
            Writes::Go,
            World::merge,
        ),
        fault(
            "a stream that was emptied but for its last message",
            |world| {
                (0..2).for_each(|_| assert_eq!(world.put().0, 200));
                world.holds_all();
                world.api("PURGE.sterling-vectors", json!({"keep": 1}));
                assert_eq!(world.messages(), (4, 4));
            },
            "which the active version needs at a restart",
            Writes::Go,
            World::merge,
        ),
        fault(
            "a limit of messages that drops needed ones",
            |world| {
                assert_eq!(world.put().0, 200);
                let mut stream =
                    json!({"name": "sterling-vectors", "subjects": ["sterling.vectors"], "storage": "file"});
                stream["max_msgs"] = json!(1);
                stream["deny_delete"] = json!(true);
                assert!(!world.api("UPDATE.sterling-vectors", stream).contains("\"error\""));
            },
            "which the active version needs at a restart",
            Writes::Go,
            World::merge,
        ),
        fault(
            "a full stream",
            |world| {
                world.limit("max_msgs", json!(2));
                assert_eq!(world.put().0, 507);
            },
            "no space for the update",
            Writes::Fail(507),
            |world| world.limit("max_msgs", json!(-1)),
        ),
        fault(
            "a stream full of bytes",
            |world| {
                world.limit("max_bytes", json!(300));
                assert_eq!(world.put().0, 507);
            },
            "no space for the update",
            Writes::Fail(507),
            |world| world.limit("max_bytes", json!(-1)),
        ),
        fault(
            "a broker that was killed",
            |world| world.broker.kill(),
            "has not answered for",
            Writes::Fail(503),
            |world| {
                world.broker.restart();
            },
        ),
        fault(
            "a broker that hangs",
            |world| world.broker.hang(true),
            "has not answered for",
            Writes::Fail(503),
            |world| {
                world.broker.hang(false);
            },
        ),
        fault(
            "a network that swallows",
            |world| world.wire.swallow(),
            "has not answered for",
            Writes::Fail(503),
            |world| {
                world.wire.mend();
            },
        ),
        fault(
            "a network that is cut",
            |world| world.wire.cut(),
            "has not answered for",
            Writes::Fail(503),
            |world| {
                world.wire.mend();
            },
        ),
    ]
}

#[test]
#[ignore = "long: table of faults"]
fn a_server_degrades_as_stated_warns_and_recovers_from_faults_of_its_stream() {
    let only = std::env::var("STERLING_TEST_STREAM_FAULT").unwrap_or_default();
    let faults = faults();
    assert_eq!(faults.len(), 19);
    for Fault { name, inflict, reported, writes, mend, ends } in
        faults.into_iter().filter(|fault| fault.name.contains(&only))
    {
        println!("{name}");
        let mut world = World::start();
        assert_eq!(world.put().0, 200);
        world.holds_all();
        inflict(&mut world);
        world.warns(reported);
        // Answers continue, with the acknowledged updates.
        assert!(world.found().is_superset(&world.written), "{name}");
        let (status, said) = world.put();
        match writes {
            Writes::Go => assert_eq!(status, 200, "{name}: {said}"),
            Writes::Fail(expected) => assert_eq!(status, expected, "{name}: {said}"),
        }
        world.holds_all();
        mend(&mut world);
        until(name, || world.put().0 == 200);
        world.holds_all();
        if ends {
            until(name, || world.server.warnings().is_empty());
        }
        // A restart also finds all of it.
        let World { folder, wire, broker, written, .. } = world;
        drop(world.server);
        let again = serve(&folder, &wire.url(), &[]);
        again.wait_ready();
        let world = World { broker, wire, folder, server: again, written, copies: Vec::new(), others: Vec::new() };
        world.holds_all();
    }
}

/// Returns the configuration of a broker with these users.
fn users(of: &str) -> String {
    format!("authorization {{ users = [ {of} ] }}\n")
}

#[test]
fn credentials_of_every_kind_are_sent_and_rotated_without_a_restart() {
    use nkeys::KeyPair;
    let (first, second) = (KeyPair::new_user(), KeyPair::new_user());
    let nkey = |pair: &KeyPair| (users(&format!("{{nkey: {}}}", pair.public_key())), pair.seed().unwrap());
    let user = |password: &str| (users(&format!("{{user: s, password: {password}}}")), format!("s:{password}"));
    let token = |token: &str| (format!("authorization {{ token: {token} }}\n"), token.to_owned());
    let kinds = [
        ("user", user("one"), user("two")),
        ("token", token("one"), token("two")),
        ("nkey", nkey(&first), nkey(&second)),
    ];
    for (kind, (before, old), (after, new)) in kinds {
        let (mut broker, folder) = (Broker::configured(&before), tempfile::tempdir().unwrap());
        publish(&folder, "vectors");
        let file = folder.path().join("credentials");
        std::fs::write(&file, &old).unwrap();
        let server = serve(&folder, &broker.url(), &[("STERLING_STREAMS__CREDENTIALS", file.to_str().unwrap())]);
        server.wait_ready();
        let put = |id: i64| {
            let items = json!({"items": [{"id": id, "embedding": [id, 2], "attributes": {"n": id}}]});
            server.post(&format!("{ITEMS}:upsert"), items).0
        };
        assert_eq!(put(100), 200, "{kind}");
        // The broker no longer accepts the old users: this is reported, answers continue, and the new ones are read from the
        // file.
        broker.reconfigure(&after);
        until(kind, || {
            let (status, said) = server.get("/readyz");
            assert_eq!(status, 200, "{said}");
            said.contains("warning: ") && said.to_lowercase().contains("authorization")
        });
        assert_eq!(server.get("/v1/models/vectors/items/100").0, 200, "{kind}");
        std::fs::write(&file, &new).unwrap();
        until(kind, || put(101) == 200);
        until(kind, || server.warnings().is_empty());
    }
}

#[test]
fn credentials_in_addresses_are_sent_and_wrong_ones_reported() {
    let (broker, folder) = (Broker::configured(&users("{user: s, password: \"p@ss\"}")), tempfile::tempdir().unwrap());
    publish(&folder, "vectors");
    let url = |password: &str| format!("nats://s:{password}@127.0.0.1:{}", broker.port);
    let server = serve(&folder, &url("p%40ss"), &[]);
    server.wait_ready();
    let items = json!({"items": [{"id": 1, "set": {"n": 7}}]});
    assert_eq!(server.post(&format!("{ITEMS}:upsert"), items).0, 200);
    let (store, wrong) = (folder.path().join("store"), url("wr0ng"));
    let (code, _, said) = crate::support::run(&[
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--updates",
        &wrong,
        "--store",
        store.to_str().unwrap(),
    ]);
    assert!(code != 0 && said.contains("authorization violation") && !said.contains("wr0ng"), "{said}");
}

#[test]
fn rejections_of_a_broker_are_quoted() {
    let rights =
        |deny: &str| users(&format!("{{user: s, password: one, permissions: {{publish: {{deny: [{deny}]}}}}}}"));
    let (mut broker, folder) = (Broker::configured(&rights("nowhere")), tempfile::tempdir().unwrap());
    publish(&folder, "vectors");
    let server = serve(&folder, &format!("nats://s:one@127.0.0.1:{}", broker.port), &[]);
    server.wait_ready();
    broker.reconfigure(&rights("\"$JS.API.STREAM.INFO.>\""));
    until("it is reported", || {
        let (status, said) = server.get("/readyz");
        assert_eq!(status, 200, "{said}");
        said.contains("warning: ") && said.contains("Permissions Violation")
    });
    broker.reconfigure(&rights("nowhere"));
    until("it goes on", || server.warnings().is_empty());
}

#[test]
fn a_model_that_waits_for_its_broker_delays_no_other_model() {
    let mut world = World::start();
    assert_eq!(world.put().0, 200);
    world.holds_all();
    world.broker.hang(true);
    publish(&world.folder, "second");
    // Its stream is retried for seconds.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(6) {
        for path in ["/livez", "/readyz", "/v1/models/vectors/items/100"] {
            let requested = Instant::now();
            assert_eq!(world.server.get(path).0, 200, "{path}");
            assert!(requested.elapsed() < Duration::from_secs(1), "{path} took {:?}", requested.elapsed());
        }
        let requested = Instant::now();
        assert!(world.found().contains(&100));
        assert!(requested.elapsed() < Duration::from_secs(1), "an answer took {:?}", requested.elapsed());
    }
    world.broker.hang(false);
    until("the second model is there", || world.server.get("/v1/models/second").0 == 200);
    world.holds_all();
}

#[test]
fn a_server_that_restarts_after_its_stream_was_lost_is_not_ready_and_those_with_the_updates_are() {
    let mut world = World::start();
    (0..3).for_each(|_| assert_eq!(world.put().0, 200));
    world.holds_all();
    let note = world.folder.path().join("store/.positions/sterling-vectors");
    until("it is noted", || std::fs::read_to_string(&note).is_ok_and(|text| text.starts_with("00000000000000000003 ")));
    world.broker.lose_all();
    world.warns("no such stream");
    let again = serve(&world.folder, &world.wire.url(), &[]);
    until("it names the missing updates", || {
        let (status, said) = again.get("/readyz");
        status == 503 && said.contains("expected at least position 3, which was acknowledged")
    });
    world.holds_all();
    // A version saves its updates, and both continue with it: the stream is recreated after it.
    world.merge();
    until("it is ready", || again.get("/readyz").0 == 200);
    until("both go on", || world.put().0 == 200);
    world.holds_all();
    world.server = again;
    world.holds_all();
}

#[test]
fn a_server_that_missed_updates_is_not_ready_and_goes_on_with_a_version_that_holds_them() {
    let mut world = World::start();
    assert_eq!(world.put().0, 200);
    world.holds_all();
    let other = serve(&world.folder, &world.broker.url(), &[]);
    other.wait_ready();
    // While the server is disconnected another one continues to write, and the broker keeps those messages for a second.
    world.wire.cut();
    for id in 500..505 {
        let items = json!({"items": [{"id": id, "embedding": [id, 2], "attributes": {"n": id}}]});
        assert_eq!(other.post(&format!("{ITEMS}:upsert"), items).0, 200);
    }
    let (_, last) = world.messages();
    world.limit("max_age", json!(1_000_000_000));
    until("the messages are dropped", || world.messages().0 > last);
    world.limit("max_age", json!(0));
    world.wire.mend();
    until("it names the missing updates", || {
        let (status, said) = world.server.get("/readyz");
        status == 503 && said.contains("applies no more updates") && said.contains("the last one read was 2")
    });
    // Answers continue with the applied updates, and no update is accepted that could not become visible here.
    world.holds_all();
    assert!(!world.found().contains(&500));
    assert_ne!(world.put().0, 200);
    // A version with the missed updates is sufficient.
    other.ask(&format!("{ITEMS}:merge"), "");
    until("it is ready", || world.server.get("/readyz").0 == 200);
    world.written.extend(500..505);
    world.holds_all();
    until("it takes updates", || world.put().0 == 200);
    world.holds_all();
    until("no warning is left", || world.server.warnings().is_empty());
    world.server = other;
    world.holds_all();
}
