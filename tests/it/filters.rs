//! The filter language and its guarantees in the complete pass: the examples of docs/reference/filter-language.md, and random
//! filters over random catalogues compared with a naive evaluation of the items.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};
use sterling::index::columns::Operator;
use sterling::index::filter::{Expr, Leaf, Test, parse};
use sterling::limits::{FILTER_BYTES_MAX, FILTER_DEPTH_MAX, FILTER_LEAVES_MAX};
use sterling::publish::{Plan, publish};
use sterling::request::{Explain, Ranked};
use sterling::serving::view::View;
use sterling::snapshot::{Placement, Recipe, Snapshot, Store};

use crate::support::retrieve;

const PAGE: &str = include_str!("../../docs/reference/filter-language.md");
const QUERY: [f32; 4] = [0.4, -0.3, 0.8, 0.2];

/// Recipes whose indexes answer the same filters differently.
const RECIPES: [&str; 4] = [
    "",
    // Bloom planes only, and few of them.
    "[filter]\nexact_share_min = 1.0\nposting_share_max = 0.0\nbits_per_term = 2\nnumber_buckets = 0\n",
    // Posting lists wherever possible.
    "[filter]\nexact_share_min = 1.0\nposting_share_max = 1.0\n",
    "[filter]\nexact_share_min = 0.3\nposting_share_max = 0.05\nhashes = 2\nnumber_buckets = 3\n",
];

/// Returns a published catalogue; its folder may be deleted, because the files stay mapped.
fn snapshot(items: &[Value], recipe: &str) -> Arc<View> {
    let folder = tempfile::tempdir().unwrap();
    let lines: Vec<String> = items
        .iter()
        .enumerate()
        .map(|(n, item)| {
            let mut item = item.clone();
            let angle = (n * n + n) as f32;
            item["embedding"] = json!([angle.sin(), angle.cos(), (angle * 0.7).sin(), 0.5]);
            item.to_string()
        })
        .collect();
    let path = folder.path().join("items.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    let store = Store::new(folder.path().join("store"));
    let recipe = Recipe::parse(recipe).unwrap();
    let what = Plan { recipe, ..Plan::of_vectors("test", path) };
    let (name, version) = publish(&store, &what, &|_, _, _| {}).unwrap();
    let snapshot = Snapshot::load(&store.folder(&name, version), &Placement::whole()).unwrap();
    Arc::new(View::new(Arc::new(snapshot)))
}

type Found = (Ranked, Option<Explain>);

fn ask(view: &Arc<View>, fields: Value) -> sterling::error::Result<Found> {
    let mut request = json!({"vector": QUERY, "explain": true});
    request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    retrieve(view, &[request]).pop().unwrap()
}

fn ids((ranked, _): &Found) -> BTreeSet<i64> {
    let ids: BTreeSet<i64> = ranked.ids.iter().map(|id| id.0).collect();
    assert_eq!(ids.len(), ranked.ids.len(), "an item is returned twice");
    ids
}

/// Returns the lines of all blocks of the page with this name, split at the arrow.
fn examples(name: &str) -> Vec<(&'static str, &'static str)> {
    let blocks = PAGE.split("```").skip(1).step_by(2);
    let lines = blocks.filter_map(|block| block.strip_prefix(name)?.strip_prefix('\n')).flat_map(str::lines);
    lines.map(|line| line.split_once('→').unwrap_or_else(|| panic!("{line}: no arrow"))).collect()
}

fn page_items() -> Vec<Value> {
    let block = PAGE.split("```jsonl\n").nth(1).unwrap().split("```").next().unwrap();
    block.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn examples_of_the_page_return_the_stated_results() {
    let (items, examples) = (page_items(), examples("filter"));
    assert!(examples.len() >= 35, "{} examples", examples.len());
    for recipe in RECIPES {
        let snapshot = snapshot(&items, recipe);
        for (filter, expected) in &examples {
            let expected: BTreeSet<i64> = expected.split_whitespace().map(|id| id.parse().unwrap()).collect();
            for exact in [false, true] {
                let found = ask(&snapshot, json!({"filter": filter, "exact": exact}));
                let found = found.unwrap_or_else(|e| panic!("{filter}: {e}"));
                assert_eq!(ids(&found), expected, "{filter}, recipe {recipe:?}");
            }
        }
    }
}

#[test]
fn the_canonical_forms_of_the_page_are_true() {
    let examples = examples("canonical");
    assert!(examples.len() >= 6);
    for (filter, form) in examples {
        let canonical = parse(filter).unwrap().canonical();
        assert_eq!(canonical.to_string(), form.trim(), "{filter}");
        assert_eq!(parse(form).unwrap().canonical(), canonical);
    }
}

#[test]
fn the_errors_of_the_page_are_true() {
    let snapshot = snapshot(&page_items(), "");
    let examples = examples("errors");
    assert!(examples.len() >= 12);
    for (filter, message) in examples {
        let filter = filter.trim_end();
        let error = ask(&snapshot, json!({"filter": filter})).expect_err(filter);
        assert_eq!(error.to_string(), message.trim());
        assert!(message.contains(&format!("byte {}", error.offset().unwrap())), "{message}");
    }
}

#[test]
fn the_limits_of_the_page_are_the_limits() {
    let with_comma = |n: usize| format!("{},{:03}", n / 1000, n % 1000);
    for limit in [with_comma(FILTER_BYTES_MAX), with_comma(FILTER_LEAVES_MAX), FILTER_DEPTH_MAX.to_string()] {
        assert!(PAGE.contains(&limit), "{limit} is not on the page");
    }
    for (option, value) in toml::to_string(&sterling::index::filter::Options::default()).unwrap().lines().map(|line| {
        let (option, value) = line.split_once(" = ").unwrap();
        (option.to_owned(), value.to_owned())
    }) {
        assert!(PAGE.contains(&format!("| `{option}` | {value} |")), "{option} = {value} is not on the page");
    }
}

fn leaf(feature: &str, test: Test) -> Expr {
    Expr::Leaf(Leaf { feature: feature.into(), test, offset: 0 })
}

/// Tags from frequent to rare, one or several years per item, prices that may be missing.
fn items() -> impl Strategy<Value = Vec<Value>> {
    let tags = proptest::collection::btree_set((0u32..1000).prop_map(|x| format!("t {}", x * x / 25_000)), 0..6);
    let years = proptest::collection::btree_set(prop_oneof![-3i64..4, 1900i64..2000], 0..3);
    let price = proptest::option::of(prop_oneof![-2i32..3, -400i32..400]);
    let attributes = (tags, years, price).prop_map(|(tags, years, price)| {
        let mut attributes = json!({"tag": tags, "year": years});
        if let Some(price) = price {
            attributes["price"] = json!(f64::from(price) / 8.0);
        }
        attributes
    });
    proptest::collection::vec(attributes, 40..400).prop_map(|all| {
        let item = |(n, mut attributes): (usize, Value)| {
            if n == 0 {
                // The columns exist in every catalogue, with the types that the filters use.
                attributes = json!({"tag": ["t 0"], "year": [7, 8], "price": 0.5});
            }
            json!({"id": n, "attributes": attributes})
        };
        all.into_iter().enumerate().map(item).collect()
    })
}

fn filter() -> impl Strategy<Value = Expr> {
    use Operator::*;
    let operator = || proptest::sample::select(vec![Less, LessEqual, Greater, GreaterEqual, Equal, NotEqual]);
    let tags = proptest::collection::vec((0u32..42).prop_map(|t| format!("t {t}")), 1..4);
    let year = || prop_oneof![-4i64..5, 1890i64..2010];
    let term = prop_oneof![
        4 => tags.prop_map(|tags| leaf("tag", Test::Has(tags))),
        1 => year().prop_map(|year| leaf("year", Test::Has(vec![year.to_string()]))),
        1 => (operator(), year()).prop_map(|(o, year)| leaf("year", Test::Compares(o, year.to_string()))),
        1 => (operator(), -420i32..420).prop_map(|(o, n)| leaf("price", Test::Compares(o, (f64::from(n) / 8.0).to_string()))),
    ];
    let term = prop_oneof![
        8 => term,
        1 => proptest::sample::select(vec!["tag", "year", "price"]).prop_map(|column| leaf(column, Test::IsPresent)),
    ];
    term.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            inner.clone().prop_map(|e| Expr::Not(Box::new(e))),
            proptest::collection::vec(inner.clone(), 1..4).prop_map(Expr::And),
            proptest::collection::vec(inner, 1..4).prop_map(Expr::Or),
        ]
    })
}

/// Evaluates the filter on an item's JSON.
fn naive(filter: &Expr, item: &Value) -> bool {
    match filter {
        Expr::All => true,
        Expr::Not(inner) => !naive(inner, item),
        Expr::And(parts) => parts.iter().all(|p| naive(p, item)),
        Expr::Or(parts) => parts.iter().any(|p| naive(p, item)),
        Expr::Leaf(leaf) => {
            let values = match &item["attributes"][&leaf.feature] {
                Value::Array(values) => values.clone(),
                Value::Null => Vec::new(),
                one => vec![one.clone()],
            };
            values.iter().any(|value| match &leaf.test {
                Test::Has(wanted) => {
                    wanted.iter().any(|w| *value == json!(w) || value.as_i64().is_some_and(|v| v.to_string() == *w))
                }
                Test::Compares(operator, number) => operator.holds(value.as_f64().unwrap(), number.parse().unwrap()),
                Test::IsPresent => true,
            })
        }
    }
}

#[test]
fn only_eligible_items_are_returned_and_none_is_lost() {
    let recipe = |n: usize| format!("{}\n[index]\nlists = {}\n[serving]\nprobes = 1\n", RECIPES[n % 4], 1 + n / 4 % 13);
    let mut runner = TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
    let cases = (items(), proptest::collection::vec(filter(), 12), 0usize..52, 1usize..60);
    let outcome = runner.run(&cases, |(items, filters, choice, few)| {
        let snapshot = snapshot(&items, &recipe(choice));
        let all = items.len();
        for filter in filters {
            let text = filter.canonical().to_string();
            let truth: BTreeSet<i64> =
                items.iter().filter(|i| naive(&filter, i)).map(|i| i["id"].as_i64().unwrap()).collect();
            // With room for every item the answer is complete, however few lists are probed.
            let found = ask(&snapshot, json!({"filter": text, "k": all, "candidates": all}));
            let found = found.map_err(|e| TestCaseError::fail(format!("{text}: {e}")))?;
            prop_assert_eq!(&ids(&found), &truth, "{}: {:?}", text, found.1);
            // With room for few, it is that many of the complete result.
            let found = ask(&snapshot, json!({"filter": text, "k": few, "candidates": few})).unwrap();
            prop_assert_eq!(found.0.ids.len(), truth.len().min(few), "{}: {:?}", text, found.1);
            prop_assert!(ids(&found).is_subset(&truth), "{}", text);
            // Excluded items make room for others.
            let removed: Vec<i64> = truth.iter().copied().filter(|id| id % 2 == 0).collect();
            let left: BTreeSet<i64> = truth.iter().copied().filter(|id| id % 2 != 0).collect();
            let found =
                ask(&snapshot, json!({"filter": text, "k": few, "candidates": few, "exclude": removed})).unwrap();
            prop_assert_eq!(found.0.ids.len(), left.len().min(few), "{} and excluded: {:?}", text, found.1);
            prop_assert!(ids(&found).is_subset(&left), "{}", text);
            let found = ask(&snapshot, json!({"filter": text, "k": all, "exact": true, "exclude": removed})).unwrap();
            prop_assert_eq!(ids(&found), left, "{}", text);
        }
        Ok(())
    });
    outcome.unwrap();
}

/// Requests over few filters, so that a batch of them shares lists, plans and bitmaps.
fn requests() -> impl Strategy<Value = Vec<Value>> {
    let filters = proptest::collection::vec(filter(), 3);
    let one = (
        0usize..8,
        -9i32..9,
        1usize..60,
        proptest::option::of(1usize..200),
        0usize..14,
        proptest::collection::vec(0i64..500, 0..40),
        0u8..12,
    );
    (filters, proptest::collection::vec(one, 2..40)).prop_map(|(filters, all)| {
        let request = |(which, angle, k, candidates, probes, exclude, odd): (usize, i32, usize, Option<usize>, usize, Vec<i64>, u8)| {
            let filter = match filters.get(which) {
                Some(filter) if odd % 2 == 0 => format!("NOT (NOT ({}))", filter.canonical()),
                Some(filter) => filter.canonical().to_string(),
                None if odd == 7 => "tag:\"t 1\" AND (nothing".to_owned(),
                None => String::new(),
            };
            let angle = f64::from(angle);
            let mut request = json!({"vector": [angle.cos(), angle.sin(), 0.3, -0.2], "k": k, "candidates": candidates.map(|c| c + k),
                                     "filter": filter, "exclude": exclude, "exact": odd == 11, "columns": ["price"]});
            if probes > 0 {
                request["probes"] = probes.into();
            }
            request
        };
        all.into_iter().map(request).collect()
    })
}

#[test]
fn a_request_is_answered_in_a_batch_as_it_is_alone() {
    let recipe = |n: usize| {
        format!("{}\n[index]\nlists = {}\nrescore = \"{}\"\n", RECIPES[n % 4], 1 + n % 13, ["f16", "none"][n % 2])
    };
    let mut runner = TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&(items(), requests(), 0usize..52), |(items, requests, choice)| {
        let snapshot = snapshot(&items, &recipe(choice));
        let mut requests = requests;
        requests.iter_mut().for_each(|request| request["explain"] = true.into());
        let together = retrieve(&snapshot, &requests);
        for (request, found) in requests.iter().zip(together) {
            let alone = retrieve(&snapshot, std::slice::from_ref(request)).pop().unwrap();
            match (found, alone) {
                (Ok(found), Ok(alone)) => {
                    prop_assert_eq!(&found.0, &alone.0, "{:?}", request);
                    let funnel = |of: &Found| {
                        let e = of.1.as_ref().unwrap();
                        (e.route, e.filter.clone(), e.probed, e.scanned, e.survivors, e.candidates, e.returned)
                    };
                    prop_assert_eq!(funnel(&found), funnel(&alone), "{:?}", request);
                }
                (Err(found), Err(alone)) => prop_assert_eq!(found.to_string(), alone.to_string()),
                (found, alone) => prop_assert!(false, "{:?}: {:?}, alone {:?}", request, found, alone),
            }
        }
        Ok(())
    });
    outcome.unwrap();
}
