//! Item files that must be refused, each with the place.

use sterling::error::Kind;
use sterling::publish::Vectors;

use crate::support::{put, vectors};

#[test]
fn bad_item_files_are_refused_with_the_place() {
    let store = tempfile::tempdir().unwrap();
    let one = "{\"id\": 1, \"embedding\": [1, 2]}";
    for (lines, expected) in [
        ("".to_owned(), "no items"),
        ("\n\n".to_owned(), "no items"),
        (format!("{one}\n{one}"), "id 1 stands at items 1 and 2"),
        (format!("{one}\n{{\"id\": 2, \"embedding\": [1]}}"), "line 2"),
        (format!("{one}\n{{\"id\": 2, \"embedding\": [1, 2, 3]}}"), "line 2"),
        (format!("{one}\n{{\"id\": 2}}"), "embedding"),
        (format!("{one}\n{{\"embedding\": [1, 2]}}"), "line 2"),
        (format!("{one}\n{{\"id\": \"two\", \"embedding\": [1, 2]}}"), "line 2"),
        (format!("{one}\n{{\"id\": 2.5, \"embedding\": [1, 2]}}"), "line 2"),
        (format!("{one}\n{{\"id\": 9223372036854775808, \"embedding\": [1, 2]}}"), "line 2"),
        (format!("{one}\n{{\"id\": 2, \"embedding\": [1, null]}}"), "line 2"),
        (format!("{one}\n{{\"id\": 2, \"embedding\": [1, 1e39]}}"), "finite"),
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
        let said = error.to_string();
        assert!(said.contains(expected) && said.contains("items.jsonl"), "{lines}: {said}");
    }
}

#[test]
fn vectors_beside_the_file_must_fit_it() {
    let store = tempfile::tempdir().unwrap();
    let mut what = vectors(store.path(), "{\"id\": 1}\n{\"id\": 2}\n");
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
    what.vectors = Some(Vectors::Npy(npy.clone()));
    for (bytes, expected) in [
        ([header("3, 2"), numbers(&[1.0; 6])].concat(), "3 vectors, expected one for each of the 2 items"),
        ([header("2, 2"), numbers(&[1.0; 3])].concat(), "v.npy"),
        ([header("2, 2"), numbers(&[1.0, 2.0, f32::NAN, 1.0])].concat(), "item 2 holds NaN"),
        ([header("4,"), numbers(&[1.0; 4])].concat(), "v.npy"),
        (b"PK\x03\x04".to_vec(), "v.npy"),
    ] {
        std::fs::write(&npy, bytes).unwrap();
        let error = put(store.path(), &what).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
    std::fs::write(&npy, [header("2, 2"), numbers(&[1.0, 2.0, 3.0, 4.0])].concat()).unwrap();
    assert_eq!(put(store.path(), &what).unwrap(), 1);
}
