//! The delta compared with a plain map: after any upsert, change or deletion, every answer equals that of the map at its
//! position.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use sterling::index::ivf::Rescore;
use sterling::items::InvalidItem;
use sterling::limits::FRESH_BYTES;
use sterling::publish::merge;
use sterling::serving::fresh::{CallAnswer, Fresh, Put, Update, UpdateRejection};
use sterling::serving::view::{Attribute, Category, View};
use sterling::snapshot::{Placement, Snapshot, Store};
use sterling::units::ItemId;

use crate::support::{output, put, retrieve, vectors};

pub const DIMENSION: usize = 6;
const LANGUAGES: [&str; 6] = ["en", "fr", "de", "fi", "zu", "eo"];
/// Values that parsers of JSON, filters and columns are most likely to get wrong.
const ODD_TEXTS: [&str; 8] = ["", " ", "NOT", "IN (a)", "q\"q", "b\\b", "ü\nß", "7"];
const ODD_YEARS: [i64; 9] =
    [i64::MIN, i64::MIN + 1, i64::MAX, -1, 0, (1 << 53) - 1, 1 << 53, (1 << 53) + 1, -(1 << 53) - 1];
const ODD_PRICES: [f64; 8] = [-0.0, 5e-324, 0.1, 0.30000000000000004, -1.5, 9007199254740994.0, 1e300, -1e300];

/// Random numbers that are the same in every run (SplitMix64).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ (x >> 31)) % end as u64) as usize
    }
}

/// An item of the map. The numbers of its vector are integers, so that sums of products are exact in any order.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    pub vector: Vec<f32>,
    languages: Vec<String>,
    years: Vec<i64>,
    price: Option<f64>,
}

/// Returns one of the usual values, or, rarely, an odd one.
fn value<T: Clone>(random: &mut Random, odd: &[T], likely: impl Fn(&mut Random) -> T) -> T {
    if random.below(8) == 0 { odd[random.below(odd.len())].clone() } else { likely(random) }
}

fn language(random: &mut Random, count: usize) -> String {
    value(random, &ODD_TEXTS, |random| LANGUAGES[random.below(count)]).to_owned()
}

fn year(random: &mut Random, count: usize) -> i64 {
    value(random, &ODD_YEARS, |random| 2000 + random.below(count) as i64)
}

fn price(random: &mut Random) -> f64 {
    value(random, &ODD_PRICES, |random| random.below(100) as f64 / 4.0)
}

fn several<T: Ord>(count: usize, mut one: impl FnMut() -> T) -> Vec<T> {
    let values: BTreeSet<T> = (0..count).map(|_| one()).collect();
    values.into_iter().collect()
}

impl Item {
    fn random(random: &mut Random, novel: bool) -> Self {
        let (known_languages, known_years) = if novel { (LANGUAGES.len(), 60) } else { (3, 20) };
        let vector = (0..DIMENSION).map(|_| random.below(15) as f32 - 7.0).collect();
        let languages = several(random.below(3), || language(random, known_languages));
        let years = several([0, 1, 1, 1, 1, 1, 2, 3][random.below(8)], || year(random, known_years));
        let price = (random.below(8) > 0).then(|| price(random));
        Item { vector, languages, years, price }
    }

    fn attributes(&self) -> Vec<(String, Attribute)> {
        let years = Some(self.years.clone()).filter(|years| !years.is_empty());
        vec![
            ("language".into(), Attribute::Texts(self.languages.clone())),
            ("year".into(), years.map_or(Attribute::Missing, Attribute::Integers)),
            ("price".into(), self.price.map_or(Attribute::Missing, Attribute::Number)),
        ]
    }

    /// Changes attributes.
    fn set(&mut self, attributes: &[(String, Attribute)]) {
        for (name, to) in attributes {
            match (name.as_str(), to) {
                ("language", Attribute::Texts(texts)) => self.languages = texts.clone(),
                ("year", Attribute::Integers(years)) => self.years = years.clone(),
                ("year", Attribute::Missing) => self.years.clear(),
                ("price", Attribute::Number(price)) => self.price = Some(*price),
                ("price", Attribute::Missing) => self.price = None,
                other => panic!("{other:?}"),
            }
        }
    }

    /// Returns the item as it is sent and published.
    pub fn json(&self, id: i64) -> Value {
        json!({"id": id, "embedding": self.vector, "attributes": self.attributes_json()})
    }

    /// Returns its attributes as they are sent.
    pub fn attributes_json(&self) -> Value {
        json!({"language": self.languages, "year": self.years, "price": self.price})
    }

    pub fn score(&self, query: &[f32]) -> f32 {
        self.vector.iter().zip(query).map(|(a, b)| a * b).sum()
    }
}

pub type Test = Box<dyn Fn(&Item) -> bool>;

/// Quotes a text for a filter.
fn quoted(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("\"{escaped}\"")
}

/// A comparison: its operator in a filter, and its function.
type Compared<T> = (&'static str, fn(&T, &T) -> bool);

fn compared<T: PartialOrd>(random: &mut Random) -> Compared<T> {
    let all: [Compared<T>; 7] = [
        ("<", |a, b| a < b),
        ("<=", |a, b| a <= b),
        (">", |a, b| a > b),
        (">=", |a, b| a >= b),
        ("=", |a, b| a == b),
        ("==", |a, b| a == b),
        ("!=", |a, b| a != b),
    ];
    all[random.below(all.len())]
}

/// Returns a filter and its meaning, with every operator and spelling.
pub fn filter(random: &mut Random, depth: usize) -> (String, Test) {
    if depth > 0 && random.below(2) == 0 {
        let ((a, is_a), (b, is_b)) = (filter(random, depth - 1), filter(random, depth - 1));
        let spelling = random.below(3);
        return match random.below(3) {
            0 => (
                format!("({a}) {} ({b})", ["AND", "&", "&&"][spelling]),
                Box::new(move |item| is_a(item) && is_b(item)),
            ),
            1 => {
                (format!("({a}) {} ({b})", ["OR", "|", "||"][spelling]), Box::new(move |item| is_a(item) || is_b(item)))
            }
            _ => (format!("{} ({a})", ["NOT", "!", "not"][spelling]), Box::new(move |item| !is_a(item))),
        };
    }
    let count = 1 + random.below(4);
    match random.below(8) {
        0 | 1 => {
            let text = language(random, LANGUAGES.len());
            (format!("language:{}", quoted(&text)), Box::new(move |item| item.languages.contains(&text)))
        }
        2 => {
            let texts = several(count, || language(random, LANGUAGES.len()));
            let list = texts.iter().map(|text| quoted(text)).collect::<Vec<_>>().join(", ");
            let is_in = move |item: &Item| item.languages.iter().any(|text| texts.contains(text));
            match random.below(2) {
                0 => (format!("language IN ({list})"), Box::new(is_in)),
                _ => (format!("language NOT IN ({list})"), Box::new(move |item| !is_in(item))),
            }
        }
        3 => {
            let one = year(random, 62);
            (format!("year:{one}"), Box::new(move |item| item.years.contains(&one)))
        }
        4 => {
            let some = several(count, || year(random, 62));
            let list = some.iter().map(i64::to_string).collect::<Vec<_>>().join(", ");
            let is_in = move |item: &Item| item.years.iter().any(|year| some.contains(year));
            match random.below(2) {
                0 => (format!("year IN ({list})"), Box::new(is_in)),
                _ => (format!("year NOT IN ({list})"), Box::new(move |item| !is_in(item))),
            }
        }
        5 => {
            let (bound, (written, compare)) = (year(random, 62), compared::<i64>(random));
            (
                format!("year {written} {bound}"),
                Box::new(move |item| item.years.iter().any(|year| compare(year, &bound))),
            )
        }
        6 => {
            // A bound between two years.
            let (bound, (written, compare)) = (2000.5 + random.below(60) as f64, compared::<f64>(random));
            let is_so = move |item: &Item| item.years.iter().any(|year| compare(&(*year as f64), &bound));
            (format!("year {written} {bound:?}"), Box::new(is_so))
        }
        _ => {
            let (bound, (written, compare)) = (price(random), compared::<f64>(random));
            (
                format!("price {written} {bound:?}"),
                Box::new(move |item| item.price.is_some_and(|p| compare(&p, &bound))),
            )
        }
    }
}

/// Returns the expected result of a search over a map: best first, ties by the lowest id.
pub fn best(
    items: &BTreeMap<i64, Item>,
    query: &[f32],
    passes: impl Fn(i64, &Item) -> bool,
    count: usize,
) -> Vec<(f32, i64)> {
    let mut all: Vec<(f32, i64)> =
        items.iter().filter(|(id, item)| passes(**id, item)).map(|(id, item)| (item.score(query), *id)).collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    all.truncate(count);
    all
}

/// Publishes the items of a map.
fn published(folder: &Path, items: &BTreeMap<i64, Item>, rescore: Rescore) -> Arc<Snapshot> {
    let store = Store::new(folder.join("store"));
    let version = publish(&store, folder, items, (rescore, None));
    loaded(&store, version)
}

pub fn publish(
    store: &Store,
    folder: &Path,
    items: &BTreeMap<i64, Item>,
    (rescore, shards): (Rescore, Option<u32>),
) -> u64 {
    let lines: String = items.iter().map(|(id, item)| format!("{}\n", item.json(*id))).collect();
    let mut what = vectors(folder, &lines);
    what.recipe.index.lists = 9;
    what.recipe.index.rescore = rescore;
    what.output = output(shards);
    put(store.root(), &what).unwrap()
}

fn loaded(store: &Store, version: u64) -> Arc<Snapshot> {
    let held = store.ensure_local("vectors", version).unwrap();
    Arc::new(Snapshot::load(held.folder(), &Placement::default()).unwrap())
}

/// Returns an initial catalogue with a value of every attribute.
pub fn catalogue(random: &mut Random, count: i64) -> BTreeMap<i64, Item> {
    let mut items: BTreeMap<i64, Item> = (0..count).map(|id| (id * 3 - 50, Item::random(random, false))).collect();
    let first = items.values_mut().next().unwrap();
    (first.languages, first.years, first.price) = (vec!["en".into()], vec![2001], Some(1.25));
    items
}

/// Applies a random change to the map, and returns the corresponding update.
fn happens(random: &mut Random, items: &mut BTreeMap<i64, Item>, ids: usize) -> Update {
    let id = random.below(ids) as i64 - 60;
    let happens = random.below(10);
    occurs(random, items, id, happens)
}

/// Applies a change to one item and returns the update: the item is put (below 5), changed (below 8) or deleted.
fn occurs(random: &mut Random, items: &mut BTreeMap<i64, Item>, id: i64, happens: usize) -> Update {
    let update = update(random, id, happens);
    apply(items, &update);
    update
}

/// Returns an update of an item, which is put (below 5), changed (below 8) or deleted.
pub fn update(random: &mut Random, id: i64, happens: usize) -> Update {
    match happens {
        0..5 => {
            let item = Item::random(random, true);
            Update::Put(Put { id, vector: Some(item.vector.clone()), attributes: item.attributes(), dense: Vec::new() })
        }
        5..8 => {
            let (retained, mut attributes) = (random.below(3), Item::random(random, true).attributes());
            attributes.remove(retained);
            Update::Set { id, attributes }
        }
        _ => Update::Delete { id },
    }
}

/// Applies an update to a map.
pub fn apply(items: &mut BTreeMap<i64, Item>, update: &Update) {
    match update {
        Update::Put(put) => {
            let vector = put.vector.clone().unwrap();
            let mut item = Item { vector, languages: Vec::new(), years: Vec::new(), price: None };
            item.set(&put.attributes);
            items.insert(put.id, item);
        }
        Update::Set { id, attributes } => {
            if let Some(item) = items.get_mut(id) {
                item.set(attributes);
            }
        }
        Update::Delete { id } => drop(items.remove(id)),
        other => panic!("{other:?}"),
    }
}

/// Sends requests to a view and compares the answers with the map.
fn check(random: &mut Random, view: &Arc<View>, items: &BTreeMap<i64, Item>) {
    assert_eq!(view.items(), items.len());
    let query: Vec<f32> = (0..DIMENSION).map(|_| random.below(9) as f32 - 4.0).collect();
    let (text, passes) =
        if random.below(4) == 0 { (String::new(), Box::new(|_: &Item| true) as Test) } else { filter(random, 2) };
    let excluded: Vec<i64> = (0..random.below(20)).map(|_| random.below(200) as i64 - 60).collect();
    let k = 1 + random.below(30);
    let expected = best(items, &query, |id, item| passes(item) && !excluded.contains(&id), k);
    let body = |exact: bool| -> Value {
        let mut body = json!({"vector": query, "k": k, "filter": text, "exclude": excluded, "columns": ["year"]});
        // Every list and every candidate, so that searches without `exact` are deterministic too.
        let all = json!({"candidates": 100_000, "probes": view.main().index.lists()});
        let exact = if exact { json!({"exact": true}) } else { all };
        body.as_object_mut().unwrap().extend(exact.as_object().unwrap().clone());
        body
    };
    // Two unfiltered requests with one list each are searched together.
    let answers = retrieve(view, &[body(true), body(false), body(false), json!({"vector": query, "k": k})]);
    for answer in &answers[..3] {
        let (ranked, _) = answer.as_ref().unwrap();
        let got: Vec<(f32, i64)> = ranked.similarities.iter().copied().zip(ranked.ids.iter().map(|id| id.0)).collect();
        assert_eq!(got, expected, "filter `{text}`, excluded {excluded:?}");
        let columns = view.columns();
        for (slot, id) in ranked.slots.iter().zip(&ranked.ids) {
            let item = &items[&id.0];
            let reported =
                columns.first().list().enumerate().map(|(n, column)| (column.name(), columns.cell(n, *slot).into()));
            let reported: BTreeMap<&str, Attribute> = reported.collect();
            for (name, attribute) in item.attributes() {
                let is_empty = matches!(&attribute, Attribute::Texts(texts) if texts.is_empty());
                assert_eq!(
                    reported[name.as_str()],
                    if is_empty { Attribute::Missing } else { attribute },
                    "{name} of {id}"
                );
            }
            assert_eq!((view.slot(*id), view.id(*slot)), (Some(*slot), *id));
        }
    }
    // With a few lists, fewer may be found first, but never a missing item, and never fewer than K.
    let (ranked, _) = answers[3].as_ref().unwrap();
    assert_eq!(ranked.ids.len(), k.min(items.len()));
    for (id, similarity) in ranked.ids.iter().zip(&ranked.similarities) {
        assert_eq!(*similarity, items[&id.0].score(&query));
    }
    for id in -60..200 {
        assert_eq!(view.slot(ItemId(id)).is_some(), items.contains_key(&id), "{id}");
    }
    browse(random, view, items);
}

/// Compares the listing of values, and of the items that have a value, with the map.
fn browse(random: &mut Random, view: &Arc<View>, items: &BTreeMap<i64, Item>) {
    let text = LANGUAGES[random.below(LANGUAGES.len())];
    let having = |item: &&Item| item.languages.iter().any(|language| language == text);
    let count = items.values().filter(having).count();
    let reported = view.values("language", text, 10).unwrap();
    let expected = (count > 0).then_some((Category::Text(text), Some(count)));
    assert_eq!(reported.values, expected.into_iter().collect::<Vec<_>>());
    let found: BTreeSet<i64> =
        view.find("language", text, 10_000).unwrap().iter().map(|slot| view.id(*slot).0).collect();
    assert_eq!(found, items.iter().filter(|(_, item)| having(item)).map(|(id, _)| *id).collect());
    let prices = items.values().filter_map(|item| item.price);
    let range = prices.fold(None, |range: Option<(f64, f64)>, price| {
        Some(range.map_or((price, price), |(least, most)| (least.min(price), most.max(price))))
    });
    assert_eq!(view.values("price", "", 1).unwrap().range, range);
}

/// Applies random updates, at most `most` between two checks. At intervals they are merged into a version, which continues with
/// the later updates; updates that the version lacks are applied to it again, as after a restart. The same for a version with one
/// shard, whose updates are checkpointed.
fn against_a_map(seed: u64, operations: usize, ids: usize, most: usize, merges: usize, rescore: Rescore) {
    against_a_map_of(seed, operations, (ids, most, merges), (rescore, None));
}

fn against_a_map_of(
    seed: u64,
    operations: usize,
    (ids, most, merges): (usize, usize, usize),
    (rescore, shards): (Rescore, Option<u32>),
) {
    // In place as on a CPU, or rebuilt per item as for a GPU.
    let of = |main: &Arc<Snapshot>, position| match seed % 2 {
        0 => Fresh::new(main.clone(), position),
        _ => Fresh::new(main.clone(), position).in_place(),
    };
    let random = &mut Random::new(seed);
    let folder = tempfile::tempdir().unwrap();
    let mut items = catalogue(random, 60);
    let store = Store::new(folder.path().join("store"));
    let version = publish(&store, folder.path(), &items, (rescore, shards));
    let store = if shards.is_some() { store.of_shard(0).with_checkpoints(folder.path().join("folds")) } else { store };
    let mut main = loaded(&store, version);
    let mut fresh = of(&main, 0);
    let mut log: Vec<Vec<u8>> = Vec::new();
    while log.len() < operations {
        let count = 1 + random.below(most);
        let updates: Vec<Update> = (0..count).map(|_| happens(random, &mut items, ids)).collect();
        log.extend(updates.iter().map(|update| update.encode().unwrap()));
        assert!(fresh.apply(&updates).unwrap().is_empty());
        if random.below(merges) == 0 && !items.is_empty() {
            let before = fresh.view().unwrap();
            let made = merge(&store, &before, &|_| ()).unwrap();
            assert_eq!((made.position, made.items), (log.len() as u64, items.len()));
            assert_eq!(made.version == version, shards.is_some());
            main = loaded(&store, made.version);
            fresh = of(&main, made.position);
        }
        if random.below(100) == 0 {
            let after = main.manifest.position;
            let rest: Vec<Update> = log[after as usize..].iter().map(|bytes| Update::decode(bytes).unwrap()).collect();
            fresh = of(&main, after);
            rest.chunks(100).for_each(|updates| assert!(fresh.catch_up(updates).unwrap().is_empty()));
        }
        let view = Arc::new(fresh.view().unwrap());
        assert_eq!(view.position(), log.len() as u64);
        check(random, &view, &items);
    }
}

#[test]
fn every_answer_is_that_of_a_plain_map_at_its_position() {
    against_a_map(1, 1_200, 250, 40, 8, Rescore::F32);
    against_a_map(2, 600, 250, 40, 8, Rescore::F16);
    against_a_map(5, 600, 250, 40, 8, Rescore::F16);
    against_a_map_of(3, 1_200, (250, 40, 8), (Rescore::F16, Some(1)));
}

#[test]
fn attribute_updates_move_no_item() {
    let random = &mut Random::new(8);
    let folder = tempfile::tempdir().unwrap();
    let mut items = catalogue(random, 90);
    let store = Store::new(folder.path().join("store"));
    let mut main = loaded(&store, publish(&store, folder.path(), &items, (Rescore::F16, None)));
    for round in 0..3 {
        let mut fresh = Fresh::new(main.clone(), main.manifest.position).in_place();
        let mut changed = BTreeSet::new();
        let mut position = main.manifest.position;
        // Changes only, most of them repeated: no item moves.
        for _ in 0..30 {
            let ids: Vec<i64> = (0..random.below(40))
                .map(|_| random.below(items.len()))
                .map(|n| *items.keys().nth(n).unwrap())
                .collect();
            let updates: Vec<Update> = ids.iter().map(|&id| occurs(random, &mut items, id, 5)).collect();
            position += updates.len() as u64;
            changed.extend(ids);
            let earlier = Arc::new(fresh.view().unwrap());
            let seen = earlier.matching("year >= 2000").unwrap();
            assert!(fresh.apply(&updates).unwrap().is_empty());
            let view = Arc::new(fresh.view().unwrap());
            assert_eq!((view.position(), view.fresh_items(), view.changed_items()), (position, 0, changed.len()));
            (0..4).for_each(|_| check(random, &view, &items));
            assert_eq!(earlier.matching("year >= 2000").unwrap(), seen, "a view never changes");
        }
        // Some are deleted, some put again, some of these changed again; deleted items have no changes left.
        let ids: Vec<i64> = items.keys().copied().collect();
        let kinds = [9, 1, 5];
        let updates: Vec<Update> =
            (0..90).map(|n| occurs(random, &mut items, ids[n * 7 % ids.len()], kinds[n % 3])).collect();
        assert!(fresh.apply(&updates).unwrap().is_empty());
        let view = Arc::new(fresh.view().unwrap());
        assert_eq!(
            view.changed_items(),
            main.ids
                .slots()
                .filter(|slot| {
                    let id = main.ids.item(*slot);
                    let sets = updates
                        .iter()
                        .filter(|update| matches!(update, Update::Set { id: of, .. } if *of == id.0))
                        .count();
                    view.slot(id) == Some(*slot) && (changed.contains(&id.0) || sets > 0)
                })
                .count(),
            "round {round}"
        );
        (0..10).for_each(|_| check(random, &view, &items));
        main = loaded(&store, merge(&store, &view, &|_| ()).unwrap().version);
        let merged = Arc::new(View::new(main.clone()));
        assert!(merged.is_bare());
        (0..10).for_each(|_| check(random, &merged, &items));
    }
}

#[test]
fn many_items_beside_few_are_found_too() {
    // More than the table holds: segments are created and merged.
    against_a_map(3, 5_000, 4_000, 300, 12, Rescore::Bf16);
}

#[test]
fn items_deleted_during_a_join_stay_deleted() {
    let random = &mut Random::new(6);
    let folder = tempfile::tempdir().unwrap();
    let mut items = catalogue(random, 40);
    let mut fresh = Fresh::new(published(folder.path(), &items, Rescore::F32), 0);
    let mut joins = 0;
    for _ in 0..3 {
        // More than two tables: a merge starts in the middle, and is in progress or done when the last of these are applied.
        let updates: Vec<Update> = (0..3_000).map(|_| happens(random, &mut items, 4_000)).collect();
        assert!(fresh.apply(&updates).unwrap().is_empty());
        let before = Arc::new(fresh.view().unwrap());
        check(random, &before, &items);
        let updates: Vec<Update> = items.keys().step_by(3).map(|&id| Update::Delete { id }).collect();
        assert!(fresh.apply(&updates).unwrap().is_empty());
        updates.iter().for_each(|update| {
            let Update::Delete { id } = update else { return };
            items.remove(id);
        });
        let looked = std::time::Instant::now();
        while looked.elapsed() < std::time::Duration::from_secs(30) && !fresh.tidy().unwrap() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        joins += usize::from(looked.elapsed() < std::time::Duration::from_secs(30));
        check(random, &Arc::new(fresh.view().unwrap()), &items);
    }
    assert!(joins > 0);
}

#[test]
fn memory_of_updates_is_counted() {
    const TEXT: usize = 50_000;
    let random = &mut Random::new(9);
    let folder = tempfile::tempdir().unwrap();
    let items = catalogue(random, 40);
    let main = published(folder.path(), &items, Rescore::F32);
    let texts = |n: usize| vec![("language".to_owned(), Attribute::Texts(vec![format!("{n}{}", "x".repeat(TEXT))]))];
    let bytes = |fresh: &mut Fresh| fresh.view().unwrap().extra_bytes(|_| false) as usize;
    let set = |&id: &i64, text: usize| Update::Set { id, attributes: texts(text) };

    let mut fresh = Fresh::new(main.clone(), 0).in_place();
    assert_eq!(bytes(&mut fresh), 0);
    let changed: Vec<Update> = items.keys().map(|id| set(id, 1)).collect();
    assert!(fresh.apply(&changed).unwrap().is_empty());
    let of_all = bytes(&mut fresh);
    assert!((40 * TEXT..41 * TEXT).contains(&of_all), "{of_all}");
    assert!(fresh.apply(&changed).unwrap().is_empty());
    assert_eq!(bytes(&mut fresh), of_all, "replaced items are not found");
    let short = |&id: &i64| Update::Set { id, attributes: vec![("language".to_owned(), Attribute::Missing)] };
    let updates: Vec<Update> = items.keys().take(30).map(short).collect();
    assert!(fresh.apply(&updates).unwrap().is_empty());
    assert!((10 * TEXT..11 * TEXT).contains(&bytes(&mut fresh)));
    let updates: Vec<Update> = items.keys().map(|&id| Update::Delete { id }).collect();
    assert!(fresh.apply(&updates).unwrap().is_empty());
    assert_eq!(bytes(&mut fresh), 0, "deleted items have not changed");

    let mut fresh = Fresh::new(main, 0);
    let updates: Vec<Update> = (0..40)
        .map(|n| Put {
            id: 1000 + n,
            vector: Some(vec![1.0; DIMENSION]),
            attributes: texts(n as usize),
            dense: Vec::new(),
        })
        .map(Update::Put)
        .collect();
    assert!(fresh.apply(&updates).unwrap().is_empty());
    let view = fresh.view().unwrap();
    let (of_all, known) = (view.extra_bytes(|_| false), view.extra_bytes(|_| true));
    assert!((40 * TEXT as u64..50 * TEXT as u64).contains(&of_all) && known == 0, "{of_all} {known}");
    let share = of_all as f64 / FRESH_BYTES as f64;
    assert!((view.fullness() - share).abs() < 1e-9, "{} {share}", view.fullness());
}

#[test]
fn many_operations_are_those_of_a_plain_map() {
    // A hundred thousand take minutes: `scripts/fresh_model.sh`.
    let operations = std::env::var("STERLING_TEST_OPERATIONS").ok().and_then(|count| count.parse().ok());
    let operations = operations.unwrap_or(400);
    against_a_map(7, operations, operations / 5, 40, 100, Rescore::F32);
}

#[test]
fn updates_round_trip_and_other_bytes_are_rejected() {
    let put = Put {
        id: -5,
        vector: Some(vec![1.5, -0.0]),
        attributes: vec![("a".into(), Attribute::Number(0.1)), ("b".into(), Attribute::Missing)],
        dense: vec![("pca".into(), vec![3.0])],
    };
    let call = Update::Call { key: "k".into(), digest: 7, count: 3 };
    let wrong = InvalidItem { id: Some(-1), field: "set.year".into(), reason: "expected integers".into() };
    let answer = CallAnswer { matched: 2, refused: vec![UpdateRejection { place: 300, wrong }] };
    let answered = Update::AnsweredCall { key: "k".into(), digest: 7, count: 3, answer };
    let set = Update::Set { id: i64::MIN, attributes: vec![("c".into(), Attribute::Integers(vec![1, -1]))] };
    for update in [Update::Put(put), set, Update::Delete { id: 9 }, call, answered] {
        let bytes = update.encode().unwrap();
        assert_eq!(Update::decode(&bytes).unwrap(), update);
        for length in 0..bytes.len() {
            assert!(Update::decode(&bytes[..length]).is_err(), "{update:?} cut at {length}");
        }
        assert!(Update::decode(&[bytes.as_slice(), &[0]].concat()).is_err());
    }
    assert!(Update::decode(&[200, 1, 2]).is_err());
}

#[test]
fn inapplicable_updates_change_nothing() {
    let random = &mut Random::new(5);
    let folder = tempfile::tempdir().unwrap();
    let mut items = catalogue(random, 30);
    let main = published(folder.path(), &items, Rescore::F32);
    let put = |vector: Option<Vec<f32>>, attributes: Vec<(String, Attribute)>| {
        Update::Put(Put { id: -50, vector, attributes, dense: Vec::new() })
    };
    let text = |name: &str| vec![(name.to_owned(), Attribute::Texts(vec!["x".into()]))];
    let updates = [
        put(None, Vec::new()),
        put(Some(vec![1.0; DIMENSION + 1]), Vec::new()),
        put(Some(vec![f32::NAN; DIMENSION]), Vec::new()),
        // These change nothing either, and are no errors: other versions of the model may have the column.
        Update::Set { id: -50, attributes: text("colour") },
        Update::Set { id: 12_345, attributes: text("language") },
        Update::Set { id: 12_345, attributes: text("price") },
        Update::Delete { id: 12_345 },
        Update::Call { key: "k".into(), digest: 0, count: 9 },
    ];
    for fresh in [Fresh::new(main.clone(), 7), Fresh::new(main.clone(), 7).in_place()] {
        let mut fresh = fresh;
        let misfits = fresh.apply(&updates).unwrap();
        assert_eq!(
            misfits.iter().map(|misfit| (misfit.position, misfit.is_whole)).collect::<Vec<_>>(),
            [(8, true), (9, true), (10, true)]
        );
        let view = Arc::new(fresh.view().unwrap());
        assert_eq!((view.position(), fresh.position()), (15, 15));
        check(random, &view, &items);
    }
    // An attribute of another type than its column, as after a publication that changed the column: the item stays, without the
    // attribute.
    let all = [text("year"), vec![("language".to_owned(), Attribute::Texts(vec!["fi".into()]))]].concat();
    let updates = [
        put(Some(vec![1.0; DIMENSION]), all),
        Update::Set { id: -47, attributes: text("price") },
        Update::Set { id: -44, attributes: vec![("price".into(), Attribute::Number(f64::NAN))] },
    ];
    items.insert(
        -50,
        Item { vector: vec![1.0; DIMENSION], languages: vec!["fi".into()], years: Vec::new(), price: None },
    );
    [-47, -44].iter().for_each(|id| items.get_mut(id).unwrap().price = None);
    for fresh in [Fresh::new(main.clone(), 0), Fresh::new(main, 0).in_place()] {
        let mut fresh = fresh;
        let misfits = fresh.apply(&updates).unwrap();
        assert_eq!(
            misfits.iter().map(|misfit| (misfit.position, misfit.is_whole)).collect::<Vec<_>>(),
            [(1, false), (2, false), (3, false)]
        );
        assert!(misfits[0].error.to_string().contains("attribute `year`: got texts, expected integers"));
        let view = Arc::new(fresh.view().unwrap());
        (0..5).for_each(|_| check(random, &view, &items));
    }
}
