//! Item files that must be rejected, each with the location of the error, and catalogues with many equal items.

use sterling::error::Kind;
use sterling::index::ivf::Rescore;
use sterling::publish::{Plan, Source};

use crate::support::{Server, ids, put, vectors};

#[test]
fn bad_item_files_are_rejected_with_the_location() {
    let store = tempfile::tempdir().unwrap();
    let one = "{\"id\": 1, \"embedding\": [1, 2]}";
    for (lines, expected) in [
        ("".to_owned(), "no items"),
        ("\n\n".to_owned(), "no items"),
        (format!("{one}\n{one}"), "id 1 occurs at items 1 and 2"),
        (format!("{one}\n{{\"id\": 2, \"embedding\": [1]}}"), "line 2"),
        (format!("{one}\n{{\"id\": 2, \"embedding\": [1, 2, 3]}}"), "line 2"),
        (format!("{one}\n{{\"id\": 2}}"), "embedding"),
        (format!("{one}\n{{\"embedding\": [1, 2]}}"), "line 2"),
        (format!("{one}\n{{\"id\": \"two\", \"embedding\": [1, 2]}}"), "line 2"),
        (format!("{one}\n{{\"id\": 2.5, \"embedding\": [1, 2]}}"), "line 2"),
        (format!("{one}\n{{\"id\": 9223372036854775808, \"embedding\": [1, 2]}}"), "line 2"),
        (format!("{one}\n{{\"id\": 2, \"embedding\": [1, null]}}"), "line 2"),
        (format!("{one}\n{{\"id\": 2, \"embedding\": [1, 1e39]}}"), "line 2: not an item: number out of range"),
        (format!("{one}\n{{\"id\": 2, \"embedding\": [1, NaN]}}"), "line 2"),
        (format!("{one}\n{{\"id\": 2, \"embedding\": []}}"), "line 2"),
        (format!("{one}\n{{\"id\": 2, \"embedding\": [1, 2], \"colour\": \"red\"}}"), "colour"),
        (format!("{one}\n{{\"id\": 2, \"embedding\": [1, 2], \"attributes\": {{\"a\": {{}}}}}}"), "line 2"),
        (format!("{one}\n{{\"id\": 2, \"embedd"), "line 2"),
        (format!("{one}\nnull"), "line 2"),
        ("{\"id\": 1, \"embedding\": [1, 2], \"attributes\": {\"a\": \"x\"}}\n{\"id\": 2, \"embedding\": [1, 2], \"attributes\": {\"a\": 3}}".to_owned(), "`a`"),
    ] {
        let error = put(store.path(), &vectors(store.path(), &lines)).expect_err(&lines);
        assert_eq!(error.kind(), Kind::Invalid, "{lines}: {error}");
        let reported = error.to_string();
        assert!(reported.contains(expected) && reported.contains("items.jsonl"), "{lines}: {reported}");
    }
}

#[test]
fn vector_files_must_match_the_item_file() {
    let store = tempfile::tempdir().unwrap();
    let what = vectors(store.path(), "{\"id\": 1}\n{\"id\": 2}\n");
    let npy = store.path().join("v.npy");
    let header = |shape: &str| {
        let mut text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}");
        while (10 + text.len() + 1) % 64 != 0 {
            text.push(' ');
        }
        text.push('\n');
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((text.len() as u16).to_le_bytes());
        bytes.extend(text.as_bytes());
        bytes
    };
    let numbers = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let items = what.source.item_file().unwrap();
    let what = Plan::new(Source::Vectors { name: "vectors".into(), items, vectors: Some(npy.clone()) });
    for (bytes, expected) in [
        ([header("3, 2"), numbers(&[1.0; 6])].concat(), "3 vectors, expected one for each of the 2 items"),
        ([header("2, 2"), numbers(&[1.0; 3])].concat(), "v.npy"),
        (
            [header("2, 2"), numbers(&[1.0, 2.0, f32::NAN, 1.0])].concat(),
            "v.npy: row 2 (item id 2), column 1: got NaN, expected",
        ),
        (
            [header("2, 2"), numbers(&[1.0, f32::INFINITY, 2.0, 1.0])].concat(),
            "v.npy: row 1 (item id 1), column 2: got inf",
        ),
        (header("2, 0"), "v.npy: vectors of 0 numbers, expected 1 to"),
        ([header("4,"), numbers(&[1.0; 4])].concat(), "v.npy"),
        (b"PK\x03\x04".to_vec(), "v.npy"),
    ] {
        std::fs::write(&npy, bytes).unwrap();
        let error = put(store.path(), &what).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
        assert!(!error.contains("items.jsonl") || error.contains("3 vectors"), "{error}");
    }
    std::fs::write(&npy, [header("2, 2"), numbers(&[1.0, 2.0, 3.0, 4.0])].concat()).unwrap();
    assert_eq!(put(store.path(), &what).unwrap(), 1);
    // A package whose vectors have another width.
    let made = crate::queries::package("union");
    let count = std::fs::read_to_string(made.path("items.jsonl")).unwrap().lines().count();
    std::fs::write(&npy, [header(&format!("{count}, 3")), numbers(&vec![1.0; 3 * count])].concat()).unwrap();
    let mut what = made.publication();
    if let Source::Package { vectors, .. } = &mut what.source {
        *vectors = Some(npy);
    }
    let error = put(store.path(), &what).unwrap_err().to_string();
    assert!(error.contains("v.npy: vectors of 3 numbers, expected 2 by model.toml"), "{error}");
}

#[test]
fn equal_scores_are_ordered_by_id_however_they_are_found() {
    let store = tempfile::tempdir().unwrap();
    // Ids of both signs in no order, five vectors with exact codes, 0 and -0 among the scores.
    let items: Vec<(i64, [f64; 3], i64)> = (0..3000)
        .map(|n: i64| {
            let id = (n * 1009) % 3000 - 1500;
            let vector = [[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [-1.0, 0.0, 1.0]];
            (id, vector[n as usize % 5], id.rem_euclid(7))
        })
        .collect();
    let line = |(id, vector, c): &(i64, [f64; 3], i64)| {
        let attributes = serde_json::json!({"c": c, "rare": if id % 100 == 0 { "yes" } else { "no" }});
        serde_json::json!({"id": id, "embedding": vector, "attributes": attributes}).to_string()
    };
    let mut what = vectors(store.path(), &items.iter().map(line).collect::<Vec<_>>().join("\n"));
    let queries = [[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 1.0, 0.0]];
    let passes = |filter: &str, id: i64, c: i64| match filter {
        "c:3" => c == 3,
        "NOT c:3" => c != 3,
        "rare:yes" => id % 100 == 0,
        _ => true,
    };
    let filters = ["", "c:3", "NOT c:3", "rare:yes"];
    for (rescore, lists) in [(Rescore::F16, 1), (Rescore::None, 40), (Rescore::F32, 40)] {
        (what.recipe.index.rescore, what.recipe.index.lists) = (rescore, lists);
        put(store.path(), &what).unwrap();
        let server = Server::start(store.path());
        for (query, filter) in queries.iter().flat_map(|q| filters.map(|f| (q, f))) {
            let score = |v: &[f64; 3]| v.iter().zip(query).map(|(a, b)| a * b).sum::<f64>();
            let mut expected: Vec<_> = items.iter().filter(|(id, _, c)| passes(filter, *id, *c)).collect();
            expected.sort_by(|a, b| score(&b.1).partial_cmp(&score(&a.1)).unwrap().then(a.0.cmp(&b.0)));
            let expected: Vec<i64> = expected.iter().map(|item| item.0).collect();
            for (k, candidates, exact) in [(5, 5, false), (5, 5, true), (5, 3000, false), (700, 701, false)] {
                let body = serde_json::json!({
                    "vector": query, "filter": filter, "k": k, "candidates": candidates, "exact": exact, "probes": lists,
                });
                let got = ids(&server.ask("/v1/models/vectors:retrieve", &body));
                assert_eq!(got, expected[..k.min(expected.len())], "{rescore:?}: {body}");
            }
        }
    }
}
