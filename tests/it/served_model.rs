//! A server compared with a plain map: a client puts, changes and deletes items, sends every kind of request, merges, restarts
//! and kills the server. Every answer equals that of the map at the position in the answer.
//!
//! The map, its updates and its filters are those of `fresh`, which compares views with them in one process. Here everything goes
//! over HTTP: acknowledgements in order, views that lag behind the journal, pages, lists, dry runs, repeated calls.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterling::index::ivf::Rescore;
use sterling::serving::fresh::Update;
use sterling::serving::view::Attribute;
use sterling::snapshot::Store;

use crate::fresh::{DIMENSION, Item, Random, apply, best, catalogue, filter, publish, update};
use crate::support::{Server, agent, sterling};

const MODEL: &str = "/v1/models/vectors";
/// Range of item ids, some of which exist.
const IDS: usize = 250;
/// Number of stored maps: a view lags behind the journal by a few updates.
const HISTORY: usize = 400;
/// Number of compared answers in the default suite, or as many as fit into its time; a few at least.
const ANSWERS: u64 = 2_500;
const ANSWERS_MIN: u64 = 300;
const TIME: Duration = Duration::from_secs(40);

/// A map of the items, and its history.
struct Model {
    items: BTreeMap<i64, Item>,
    position: u64,
    /// The map at each of the last positions.
    history: VecDeque<(u64, BTreeMap<i64, Item>)>,
    compared: u64,
}

impl Model {
    fn apply(&mut self, update: &Update) {
        apply(&mut self.items, update);
        self.step();
    }

    /// Adds a position without a change to an item.
    fn step(&mut self) {
        self.position += 1;
        self.remember();
    }

    fn remember(&mut self) {
        self.history.push_back((self.position, self.items.clone()));
        if self.history.len() > HISTORY {
            self.history.pop_front();
        }
    }

    /// Returns the map at the position of an answer.
    fn at(&self, answer: &Value) -> &BTreeMap<i64, Item> {
        let position = answer["position"].as_u64().unwrap();
        let found = self.history.iter().find(|(at, _)| *at == position);
        &found.unwrap_or_else(|| panic!("position {position}, the last is {}", self.position)).1
    }
}

/// A client, its server and its map.
struct Client<'f> {
    folder: &'f Path,
    server: Server,
    agent: ureq::Agent,
    model: Model,
    random: Random,
    calls: u64,
    /// Number of starts of the server: a restart drops the views of pages.
    starts: u64,
}

fn serve(folder: &Path) -> Server {
    let mut command = sterling();
    // On a busy machine an answer takes seconds; other tests measure time.
    command
        .env("STERLING_MERGE__SHARE", "0")
        .env("STERLING_HTTP__DRAIN_MS", "0")
        .env("STERLING_ENGINE__TIMEOUT_MS", "60000");
    command.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(folder.join("store"));
    let server = Server::spawn(command.arg("--updates").arg(folder.join("updates")));
    server.wait_ready();
    server
}

/// Returns the JSON of an update that is no deletion.
fn sent(update: &Update) -> Value {
    let value = |attribute: &Attribute| match attribute {
        Attribute::Missing => Value::Null,
        Attribute::Integers(values) => json!(values),
        Attribute::Texts(values) => json!(values),
        Attribute::Number(value) => json!(value),
    };
    let object = |attributes: &[(String, Attribute)]| -> Value {
        attributes.iter().map(|(name, attribute)| (name.clone(), value(attribute))).collect()
    };
    match update {
        Update::Put(put) => json!({"id": put.id, "embedding": put.vector, "attributes": object(&put.attributes)}),
        Update::Set { id, attributes } => json!({"id": id, "set": object(attributes)}),
        other => panic!("{other:?}"),
    }
}

/// Predicate: whether an item, by its id, may be found.
type Passes = Box<dyn Fn(i64, &Item) -> bool>;

/// A retrieval, and its expected results from a map.
struct Question {
    body: Value,
    query: Vec<f32>,
    passes: Passes,
    filter: String,
    k: usize,
}

impl Question {
    fn random(random: &mut Random) -> Self {
        let query: Vec<f32> = (0..DIMENSION).map(|_| random.below(9) as f32 - 4.0).collect();
        let (filter, is_eligible) =
            if random.below(4) == 0 { (String::new(), Box::new(|_: &Item| true) as _) } else { filter(random, 2) };
        let excluded: BTreeSet<i64> = (0..random.below(20)).map(|_| random.below(IDS) as i64 - 60).collect();
        let k = 1 + random.below(30);
        let mut body = json!({"vector": query, "k": k, "filter": filter, "exclude": excluded, "columns": ["language", "year", "price"]});
        // Every candidate of every list is as complete as an exact search.
        match random.below(2) {
            0 => body["exact"] = json!(true),
            _ => (body["candidates"], body["probes"]) = (json!(100_000), json!(1)),
        }
        let passes = Box::new(move |id, item: &Item| is_eligible(item) && !excluded.contains(&id));
        Question { body, query, passes, filter, k }
    }

    /// Probes all lists, unless the search is exact.
    fn of_lists(mut self, lists: u64) -> Self {
        if self.body.get("probes").is_some() {
            self.body["probes"] = json!(lists);
        }
        self
    }

    /// Compares items of an answer with those of a map at ranks `first..first + count`.
    fn check(&self, answer: &Value, items: &BTreeMap<i64, Item>, (first, count): (usize, usize)) {
        let mut want = best(items, &self.query, &self.passes, first + count);
        want.drain(..first.min(want.len()));
        let got = answer["items"].as_array().unwrap();
        let pairs: Vec<(f32, i64)> =
            got.iter().map(|item| (item["score"].as_f64().unwrap() as f32, item["id"].as_i64().unwrap())).collect();
        assert_eq!(pairs, want, "{}", self.body);
        got.iter().for_each(|item| same(&item["columns"], &items[&item["id"].as_i64().unwrap()]));
    }
}

/// Compares the columns of an answer with an item.
fn same(columns: &Value, item: &Item) {
    let want = item.attributes_json();
    for name in ["language", "year", "price"] {
        // A single value is a scalar, no value is null.
        let list = |value: &Value| match value {
            Value::Null => Vec::new(),
            Value::Array(values) => values.clone(),
            one => vec![one.clone()],
        };
        let (got, want) = (list(&columns[name]), list(&want[name]));
        let alike = |(a, b): (&Value, &Value)| a == b || a.is_f64() && a.as_f64() == b.as_f64();
        assert!(got.len() == want.len() && got.iter().zip(&want).all(alike), "{name}: {got:?}, expected {want:?}");
    }
}

impl Client<'_> {
    /// Posts a body; `None` without an answer, as from a killed server.
    fn post(&self, path: &str, key: Option<&str>, body: &Value) -> Option<(u16, Value)> {
        let mut request = self.agent.post(format!("http://{}{MODEL}{path}", self.server.address));
        request = request.header("content-type", "application/json");
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let mut answer = request.send(body.to_string()).ok()?;
        let text = answer.body_mut().with_config().limit(1 << 30).read_to_string().ok()?;
        Some((answer.status().as_u16(), serde_json::from_str(&text).ok()?))
    }

    fn ask(&mut self, path: &str, body: &Value) -> Value {
        // An idle connection may be closed at the moment of its reuse; a repetition changes nothing.
        let (status, answer) = (0..3).find_map(|_| self.post(path, None, body)).expect("the server answers");
        assert_eq!(status, 200, "{path} {body}: {answer}");
        self.model.compared += 1;
        answer
    }

    /// Returns a path that sees all acknowledged updates, or only those that are visible by now.
    fn path(&mut self, path: &str) -> String {
        match self.random.below(2) {
            0 => format!("{path}?min_position={}", self.model.position),
            _ => path.to_owned(),
        }
    }

    fn id(&mut self) -> i64 {
        self.random.below(IDS) as i64 - 60
    }

    /// Returns the updates of one call, each for another item.
    fn updates(&mut self, happens: usize) -> Vec<Update> {
        let ids: BTreeSet<i64> = (0..1 + self.random.below(12)).map(|_| self.id()).collect();
        let random = &mut self.random;
        ids.into_iter()
            .map(|id| {
                let n = random.below(happens);
                update(random, id, n)
            })
            .collect()
    }

    /// Makes a call, twice if it has a key: the second answer must be equal, without an effect.
    fn call(&mut self, path: &str, body: &Value) -> Value {
        self.calls += 1;
        let key = (self.random.below(4) == 0).then(|| format!("call {}", self.calls));
        let (status, answer) = self.post(path, key.as_deref(), body).unwrap();
        assert_eq!((status, &answer["repeated"]), (200, &json!(false)), "{path} {body}: {answer}");
        self.model.compared += 1;
        if key.is_some() {
            if self.random.below(8) == 0 {
                self.respawn("KILL");
            }
            let (_, mut again) = self.post(path, key.as_deref(), body).unwrap();
            assert_eq!(again["repeated"], true);
            again["repeated"] = json!(false);
            assert_eq!(again.to_string(), answer.to_string(), "the first answer, byte for byte");
            self.model.compared += 1;
        }
        answer
    }

    /// Applies an acknowledged call to the map; with a key, its record comes last.
    fn acknowledged(&mut self, updates: &[Update], answer: &Value) {
        updates.iter().for_each(|update| self.model.apply(update));
        let position = answer["position"].as_u64().unwrap();
        assert!((self.model.position..=self.model.position + 1).contains(&position), "{answer}");
        if position > self.model.position {
            self.model.step();
        }
    }

    fn upsert(&mut self) {
        let mut updates = self.updates(8);
        let body = json!({"items": updates.iter().map(sent).collect::<Vec<Value>>()});
        let answer = self.call("/items:upsert", &body);
        let refused: BTreeSet<usize> =
            answer["refused"].as_array().unwrap().iter().map(|r| r["place"].as_u64().unwrap() as usize).collect();
        for place in &refused {
            let Update::Set { id, .. } = &updates[*place] else { panic!("{answer}") };
            assert!(!self.model.items.contains_key(id), "{id} was acknowledged: {answer}");
        }
        let mut place = 0..;
        updates.retain(|_| !refused.contains(&place.next().unwrap()));
        assert_eq!(answer["accepted"].as_u64(), Some(updates.len() as u64));
        self.acknowledged(&updates, &answer);
    }

    /// Puts items and deletes some of them at once, waiting only for the acknowledgement.
    fn put_and_delete(&mut self) {
        self.upsert();
        let ids: Vec<i64> = (0..1 + self.random.below(8)).map(|_| self.id()).collect();
        let last = self.model.items.keys().copied().nth(self.random.below(self.model.items.len().max(1)));
        let ids: Vec<i64> = ids.into_iter().chain(last).collect();
        let answer = self.call("/items:delete", &json!({"ids": ids}));
        let ids: BTreeSet<i64> = ids.into_iter().collect();
        assert_eq!(answer["deleted"].as_u64(), Some(ids.len() as u64), "{answer}");
        let updates: Vec<Update> = ids.into_iter().map(|id| Update::Delete { id }).collect();
        self.acknowledged(&updates, &answer);
    }

    fn delete_by_filter(&mut self) {
        let (text, passes) = filter(&mut self.random, 1);
        let ids: Vec<i64> = self.model.items.iter().filter(|(_, item)| passes(item)).map(|(id, _)| *id).collect();
        let dry = self.ask("/items:delete", &json!({"filter": text, "dry_run": true}));
        assert_eq!(
            (&dry["deleted"], &dry["matched"], &dry["dry_run"]),
            (&json!(0), &json!(ids.len()), &json!(true)),
            "{text}"
        );
        if ids.len() * 10 > self.model.items.len() {
            return;
        }
        let answer = self.call("/items:delete", &json!({"filter": text}));
        assert_eq!((&answer["deleted"], &answer["matched"]), (&json!(ids.len()), &json!(ids.len())), "{text}");
        let updates: Vec<Update> = ids.into_iter().map(|id| Update::Delete { id }).collect();
        self.acknowledged(&updates, &answer);
    }

    fn lists(&self) -> u64 {
        self.server.get_json(MODEL)["lists"].as_u64().unwrap()
    }

    fn retrieve(&mut self, lists: u64) {
        let question = Question::random(&mut self.random).of_lists(lists);
        let path = self.path(":retrieve");
        let answer = self.ask(&path, &question.body);
        question.check(&answer, self.model.at(&answer), (0, question.k));
    }

    /// Several requests of one body see one position.
    fn list(&mut self, lists: u64) {
        let questions: Vec<Question> =
            (0..2 + self.random.below(4)).map(|_| Question::random(&mut self.random).of_lists(lists)).collect();
        let bodies: Vec<&Value> = questions.iter().map(|question| &question.body).collect();
        let path = self.path(":retrieve");
        let answer = self.ask(&path, &json!({"requests": bodies}));
        let results = answer["results"].as_array().unwrap();
        assert_eq!(results.len(), questions.len());
        for (question, result) in questions.iter().zip(results) {
            question.check(result, self.model.at(&answer), (0, question.k));
        }
        self.model.compared += questions.len() as u64 - 1;
    }

    /// Pages are slices of the ranking that the first one saw, regardless of updates in the meantime.
    fn pages(&mut self) {
        let mut question = Question::random(&mut self.random);
        let depth = 40;
        question.body.as_object_mut().unwrap().remove("probes");
        (question.body["exact"], question.body["candidates"]) = (json!(true), json!(depth));
        let (mut first, mut cursor, starts) = (0, json!(""), self.starts);
        let mut seen: Option<BTreeMap<i64, Item>> = None;
        loop {
            let size = (1 + self.random.below(15)).min(depth - first);
            (question.body["k"], question.body["cursor"]) = (json!(size), cursor);
            let path = if first == 0 { self.path(":retrieve") } else { ":retrieve".to_owned() };
            let (status, answer) = self.post(&path, None, &question.body).unwrap();
            if status == 410 && starts != self.starts {
                return;
            }
            assert_eq!(status, 200, "{}: {answer}", question.body);
            self.model.compared += 1;
            let items = seen.get_or_insert_with(|| self.model.at(&answer).clone());
            question.check(&answer, items, (first, size));
            first += size;
            cursor = answer["cursor"].clone();
            if cursor.is_null() {
                let eligible = best(items, &question.query, &question.passes, depth).len();
                assert!(first >= eligible, "page at {first} of {eligible}: {}", question.filter);
                return;
            }
            if self.random.below(2) == 0 {
                self.upsert();
            }
        }
    }

    fn rank(&mut self) {
        let query: Vec<f32> = (0..DIMENSION).map(|_| self.random.below(9) as f32 - 4.0).collect();
        let ids: BTreeSet<i64> = (0..20).map(|_| self.id()).collect();
        let path = self.path(":rank");
        let answer = self.ask(&path, &json!({"vector": query, "items": ids}));
        let items = self.model.at(&answer);
        let want = best(items, &query, |id, _| ids.contains(&id), ids.len());
        let got = answer["items"].as_array().unwrap().iter();
        let got: Vec<(f32, i64)> =
            got.map(|item| (item["score"].as_f64().unwrap() as f32, item["id"].as_i64().unwrap())).collect();
        assert_eq!(got, want);
        let unknown: BTreeSet<i64> = ids.into_iter().filter(|id| !items.contains_key(id)).collect();
        let reported = answer["unknown"].as_array().map_or(&[][..], Vec::as_slice);
        assert_eq!(reported.iter().map(|id| id.as_i64().unwrap()).collect::<BTreeSet<_>>(), unknown);
    }

    fn item(&mut self) {
        let id = self.id();
        let (status, text) = self.server.get(&format!("{MODEL}/items/{id}?min_position={}", self.model.position));
        let item = self.model.items.get(&id);
        assert_eq!(status, if item.is_some() { 200 } else { 404 }, "{id}: {text}");
        if let Some(item) = item {
            same(&serde_json::from_str::<Value>(&text).unwrap()["attributes"], item);
        }
        self.model.compared += 1;
    }

    fn merge(&mut self) {
        if self.model.items.is_empty() {
            return;
        }
        let made = self.ask("/items:merge", &json!({}));
        assert_eq!(
            (made["position"].as_u64(), made["items"].as_u64()),
            (Some(self.model.position), Some(self.model.items.len() as u64))
        );
    }

    /// Ends the server, gracefully or not, and starts it again: it has all acknowledged updates.
    fn restart(&mut self, signal: &str) {
        self.respawn(signal);
        let state = self.server.get_json(&format!("{MODEL}/items:position"));
        assert_eq!(state["durable"].as_u64(), Some(self.model.position), "after {signal}");
        self.model.compared += 1;
    }

    fn respawn(&mut self, signal: &str) {
        self.server.signal(signal);
        let started = Instant::now();
        while self.server.is_running() {
            assert!(started.elapsed() < Duration::from_secs(60), "{signal} does not end it");
            std::thread::sleep(Duration::from_millis(2));
        }
        self.begin();
    }

    fn begin(&mut self) {
        self.server = serve(self.folder);
        self.agent = agent();
        self.starts += 1;
    }

    /// Kills the server during a call: a prefix of its updates is applied.
    fn kill_in_a_call(&mut self) {
        let updates: Vec<Update> = self.updates(5);
        let body = json!({"items": updates.iter().map(sent).collect::<Vec<Value>>()});
        let (process, delay) = (self.server.id().to_string(), self.random.below(4_000) as u64);
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(delay));
            assert!(std::process::Command::new("kill").args(["-KILL", &process]).status().unwrap().success());
        });
        let answer = self.post("/items:upsert", None, &body);
        killer.join().unwrap();
        while self.server.is_running() {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.begin();
        let durable = self.server.get_json(&format!("{MODEL}/items:position"))["durable"].as_u64().unwrap();
        let there = (durable - self.model.position) as usize;
        match answer {
            Some((200, answer)) => assert_eq!((answer["position"].as_u64(), there), (Some(durable), updates.len())),
            _ => assert!(there <= updates.len(), "{there} of {}", updates.len()),
        }
        updates[..there].iter().for_each(|update| self.model.apply(update));
        self.model.compared += 1;
    }
}

#[test]
fn every_answer_of_a_server_is_that_of_a_plain_map_at_its_position() {
    // A hundred thousand answers take minutes: `scripts/fresh_model.sh`.
    let answers: Option<u64> = std::env::var("STERLING_TEST_ANSWERS").ok().and_then(|count| count.parse().ok());
    let (answers, until) = answers.map_or((ANSWERS, Some(Instant::now() + TIME)), |answers| (answers, None));
    let folder = tempfile::tempdir().unwrap();
    let mut random = Random::new(11);
    let items = catalogue(&mut random, 60);
    publish(&Store::new(folder.path().join("store")), folder.path(), &items, (Rescore::F32, None));
    let mut model = Model { items, position: 0, history: VecDeque::new(), compared: 0 };
    model.remember();
    let server = serve(folder.path());
    let mut client = Client { folder: folder.path(), server, agent: agent(), model, random, calls: 0, starts: 1 };
    let mut lists = client.lists();
    let is_over =
        |compared| compared >= answers || compared >= ANSWERS_MIN && until.is_some_and(|until| Instant::now() > until);
    while !is_over(client.model.compared) {
        match client.random.below(600) {
            0..2 => client.restart("TERM"),
            2..4 => client.restart("KILL"),
            4..8 => client.kill_in_a_call(),
            8..16 => {
                client.merge();
                lists = client.lists();
            }
            16..80 => client.upsert(),
            80..140 => client.put_and_delete(),
            140..180 => client.delete_by_filter(),
            180..350 => client.retrieve(lists),
            350..430 => client.list(lists),
            430..480 => client.pages(),
            480..540 => client.rank(),
            _ => client.item(),
        }
    }
    client.restart("TERM");
}
