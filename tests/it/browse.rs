//! Browsing a catalogue: items by a part of a value, and the values of a column, compared with a plain list, also after
//! updates.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sterling::server::http::Options;

use crate::in_process::{Callee as _, InProcess};
use crate::support::{Server, put, vectors};

const MODEL: &str = "/v1/models/vectors";

struct Book {
    id: i64,
    title: String,
    tags: Vec<String>,
    pages: Option<i64>,
    price: f64,
}

impl Book {
    fn new(n: i64) -> Self {
        let tags = (0..n % 3).map(|t| format!("tag{}", (n + t) % 4)).collect();
        let title = [format!("Vim {n}"), format!("the vim book {n}"), "vim".into(), format!("Émile {n}")];
        let pages = (n % 5 > 0).then_some(n % 7 - 2);
        Book { id: n, title: title[n as usize % 4].clone(), tags, pages, price: n as f64 / 4.0 }
    }

    fn json(&self) -> Value {
        let attributes = json!({"title": self.title, "tags": self.tags, "pages": self.pages, "price": self.price});
        json!({"id": self.id, "embedding": [1, self.id], "attributes": attributes})
    }
}

/// Rank of a match: 0 for the complete text, 1 for a prefix, 2 for another position; `None` without a match.
fn closeness(value: &str, text: &str) -> Option<u8> {
    let (value, text) = (value.to_ascii_lowercase(), text.to_ascii_lowercase());
    match value.find(&text)? {
        0 if value.len() == text.len() => Some(0),
        0 => Some(1),
        _ => Some(2),
    }
}

fn found(server: &Server, parameters: &str) -> Vec<i64> {
    let answer = server.get_json(&format!("{MODEL}/items?{parameters}"));
    answer["items"].as_array().unwrap().iter().map(|item| item["id"].as_i64().unwrap()).collect()
}

/// Checks a column's values and their counts in the server's answer against those of `all`.
fn check_values<'a>(server: &Server, position: u64, column: &str, contains: &str, all: impl Iterator<Item = &'a str>) {
    let path = format!("{MODEL}/columns/{column}?limit=1000&contains={contains}&min_position={position}");
    let answer = server.get_json(&path);
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    all.for_each(|value| *counts.entry(value).or_default() += 1);
    let mut expected: Vec<_> = counts
        .into_iter()
        .filter_map(|(value, items)| Some((closeness(value, contains)?, std::cmp::Reverse(items), value)))
        .collect();
    expected.sort();
    let reported: Vec<_> =
        answer["values"].as_array().unwrap().iter().map(|v| (v["value"].to_string(), &v["items"])).collect();
    let expected: Vec<_> =
        expected.iter().map(|(_, items, value)| (json!(value).to_string(), json!(items.0))).collect();
    assert_eq!(reported, expected.iter().map(|(value, items)| (value.clone(), items)).collect::<Vec<_>>(), "{path}");
    assert_eq!(answer["found"], expected.len());
}

fn check(server: &Server, position: u64, books: &BTreeMap<i64, Book>) {
    for text in ["vim", "VIM", "im 1", "émile", "xyz", ""] {
        let mut expected: Vec<_> =
            books.values().filter_map(|b| Some((closeness(&b.title, text)?, &b.title, b.id))).collect();
        expected.sort();
        let reported =
            found(server, &format!("contains={}&limit=100&min_position={position}", text.replace(' ', "%20")));
        let closest = |ids: &[i64]| {
            ids.iter().map(|id| (closeness(&books[id].title, text), books[id].title.clone())).collect::<Vec<_>>()
        };
        let expected: Vec<i64> = expected.into_iter().map(|(_, _, id)| id).take(100).collect();
        assert_eq!(closest(&reported), closest(&expected), "{text}");
    }
    for text in ["", "tag", "3", "nothing"] {
        check_values(server, position, "tags", text, books.values().flat_map(|b| b.tags.iter().map(String::as_str)));
    }
    check_values(server, position, "title", "vim", books.values().map(|b| b.title.as_str()));
    let prices = server.get_json(&format!("{MODEL}/columns/price?min_position={position}"));
    let (least, greatest) =
        books.values().fold((f64::MAX, f64::MIN), |(a, b), book| (a.min(book.price), b.max(book.price)));
    assert_eq!((prices["least"].as_f64(), prices["greatest"].as_f64()), (Some(least), Some(greatest)));
    let index = server.get_json(&format!("{MODEL}/index"));
    assert_eq!(index["items"], books.len());
}

#[test]
fn browsing_equals_a_plain_scan() {
    let folder = tempfile::tempdir().unwrap();
    let mut books: BTreeMap<i64, Book> = (0..90).map(|n| (n, Book::new(n))).collect();
    let lines: String = books.values().map(|book| format!("{}\n", book.json())).collect();
    put(&folder.path().join("store"), &vectors(folder.path(), &lines)).unwrap();
    let updates = folder.path().join("updates");
    let server = Server::start_with(&folder.path().join("store"), &["--updates", updates.to_str().unwrap()]);
    check(&server, 0, &books);
    for n in (0..40).map(|n| n * 3) {
        books.insert(n, Book { tags: vec![format!("new{}", n % 4)], price: -1.0 - n as f64, ..Book::new(n + 1) });
        books.get_mut(&n).unwrap().id = n;
    }
    let items: Vec<Value> = books.values().filter(|b| b.id % 3 == 0).map(Book::json).collect();
    server.ask(&format!("{MODEL}/items:upsert"), json!({"items": items}));
    let removed: Vec<i64> = (0..90).filter(|n| n % 5 == 0).collect();
    let reported = server.ask(&format!("{MODEL}/items:delete"), json!({"ids": removed}));
    removed.iter().for_each(|id| drop(books.remove(id)));
    check(&server, reported["position"].as_u64().unwrap(), &books);
}

#[test]
fn invalid_requests_are_rejected_with_the_expected_value() {
    let folder = tempfile::tempdir().unwrap();
    let lines: String = (0..9).map(|n| format!("{}\n", Book::new(n).json())).collect();
    put(&folder.path().join("store"), &vectors(folder.path(), &lines)).unwrap();
    let server = InProcess::start(&folder.path().join("store"));
    let long = format!("items?contains={}", "a".repeat(257));
    for (path, status, said) in [
        ("items?limit=0", 400, "expected 1 to 100"),
        ("items?limit=101", 400, "expected 1 to 100"),
        ("items?limit=-1", 400, "limit"),
        ("items?limit=x", 400, "limit: got `x`: "),
        ("items?colour=red", 400, "unknown parameter `colour`"),
        ("items?column=colour", 400, "unknown column `colour`"),
        ("items?column=price", 400, "expected one of texts or integers"),
        ("items?contains=a&contains=b", 400, "contains"),
        ("items?min_position=7", 400, "min_position"),
        (&long, 400, "at most 256"),
        ("columns/colour", 400, "unknown column `colour`"),
        ("columns/tags?limit=1001", 400, "expected 1 to 1000"),
        ("columns/tags?column=x", 400, "unknown parameter `column`"),
        ("columns/", 404, ""),
        ("index/x", 404, ""),
    ] {
        let (got, text) = server.get(&format!("{MODEL}/{path}"));
        assert!(got == status && text.contains(said), "{path}: {got} {text}");
    }
    // Scrapers and probes add their own.
    for path in ["/metrics?collect=all", "/readyz?verbose", "/?from=mail"] {
        assert_eq!(server.get(path).0, 200, "{path}");
    }
    for path in ["items", "columns/tags", "index"] {
        assert_eq!(server.get(&format!("/v1/models/none/{path}")).0, 404);
        assert_eq!(server.post(&format!("{MODEL}/{path}"), json!({})).0, 405, "{path}");
    }
    let items = server.get_json(&format!("{MODEL}/items?column=pages&contains=1&limit=3"));
    let first = &items["items"][0]["attributes"];
    assert_eq!(first["pages"], 1, "the value itself comes before those that hold it: {items}");
    assert_eq!(server.get_json(&format!("{MODEL}/index"))["list_items"].as_array().unwrap().len(), 101);
}

#[test]
fn values_take_the_memory_that_they_have() {
    let folder = tempfile::tempdir().unwrap();
    let text = |n: i64, bytes: usize| format!("{n:08}").repeat(bytes / 8);
    // One long text, and many that are together more than there is memory for.
    let line = |n: i64| {
        let attributes = json!({"title": text(n, if n == 0 { 15_000 } else { 8 }), "body": text(n, 15_000)});
        json!({"id": n, "embedding": [1, n], "attributes": attributes}).to_string() + "\n"
    };
    let store = folder.path().join("store");
    put(&store, &vectors(folder.path(), &(0..300).map(line).collect::<String>())).unwrap();
    let server = InProcess::with(&store, &Options { bodies_mb: 8, ..Options::default() });
    let values = |column: &str, limit: usize| {
        let (status, reported) = server.get(&format!("{MODEL}/columns/{column}?limit={limit}"));
        (status, serde_json::from_str::<Value>(&reported).unwrap())
    };
    let (status, reported) = values("title", 1000);
    assert_eq!((status, reported["values"].as_array().map(Vec::len)), (200, Some(300)));
    let (status, reported) = values("body", 100);
    assert_eq!(
        (status, reported["values"].as_array().map(Vec::len), &reported["found"]),
        (200, Some(100), &json!(300))
    );
    let (status, reported) = values("body", 1000);
    assert_eq!((status, &reported["code"]), (422, &json!("too_costly")), "{reported}");
    // All memory of the answers was released.
    assert_eq!(values("body", 100).0, 200);
}
