//! The sparse layer compared with golden files of TorchRec and FBGEMM (`python/make_sparse_golden.py`).

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::Value;
use sterling::embedding::format::encode_rows;
use sterling::embedding::{
    BagConfig, EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor, KeyedTensor, Lookup, Pooling, RowFormat,
    SequenceConfig, Table, TableSpec, Unseen,
};
use sterling::kernels::buffer::Buffer;
use sterling::kernels::cpu::Kernels;
use sterling::kernels::cpu::pool::Rows;

use crate::support::loses;

fn golden(name: &str) -> Value {
    let path = format!("{}/tests/golden/sparse/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn bytes(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn floats(hex: &Value) -> Vec<f32> {
    bytes(hex).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn whole(list: &Value) -> Vec<i64> {
    list.as_array().unwrap().iter().map(|v| v.as_i64().unwrap()).collect()
}

fn texts(list: &Value) -> Vec<String> {
    list.as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_owned()).collect()
}

fn jagged(golden: &Value) -> KeyedJaggedTensor {
    let weights = golden["weights"].is_string().then(|| floats(&golden["weights"]));
    let lengths = whole(&golden["lengths"]);
    KeyedJaggedTensor::from_lengths(texts(&golden["keys"]), whole(&golden["values"]), &lengths, weights).unwrap()
}

fn check(got: &KeyedJaggedTensor, golden: &Value) {
    assert_eq!(*got, jagged(golden));
    assert_eq!(got.stride() as i64, golden["stride"].as_i64().unwrap());
    assert!(got.offsets().iter().map(|&o| o as i64).eq(whole(&golden["offsets"])));
    assert!(got.length_per_key().map(|n| n as i64).eq(whole(&golden["length_per_key"])));
    let again = KeyedJaggedTensor::from_offsets(
        got.keys().to_vec(),
        got.values().to_vec(),
        &whole(&golden["offsets"]),
        got.weights().map(<[f32]>::to_vec),
    );
    assert_eq!(again.unwrap(), *got);
}

/// Checks that `got` and `expected` differ by at most a millionth of `size`, the largest sum of the terms' magnitudes.
fn close(got: &[f32], expected: &[f32], size: f32, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (at, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((g - e).abs() <= 1e-6 * size.max(e.abs()), "{what}: number {at} is {g}, expected {e}");
    }
}

#[test]
fn jagged_tensors_equal_torchrec() {
    for case in golden("jagged").as_array().unwrap() {
        let kjt = jagged(&case["input"]);
        check(&kjt, &case["input"]);
        let order: Vec<usize> = whole(&case["order"]).iter().map(|&f| f as usize).collect();
        check(&kjt.permute(&order).unwrap(), &case["permuted"]);
        let sizes: Vec<usize> = whole(&case["sizes"]).iter().map(|&n| n as usize).collect();
        for (part, expected) in kjt.split(&sizes).unwrap().iter().zip(case["split"].as_array().unwrap()) {
            assert_eq!(part.keys().to_vec(), texts(&expected["keys"]));
            if !part.keys().is_empty() {
                check(part, expected);
            }
        }
        let renamed = kjt.to_jagged().into_iter().map(|(key, part)| (format!("{key}2"), part));
        let other = KeyedJaggedTensor::from_jagged(renamed).unwrap();
        check(&KeyedJaggedTensor::concat(&[&kjt, &other]).unwrap(), &case["concat"]);
        for (key, part) in kjt.to_jagged() {
            let expected = &case["jagged"][&key];
            let rows = expected["rows"].as_array().unwrap();
            assert!((0..part.stride()).all(|b| part.run(b) == whole(&rows[b])));
            let padded: Vec<i64> = expected["padded"].as_array().unwrap().iter().flat_map(whole).collect();
            assert_eq!(part.to_padded(3, -1), padded);
        }
    }
}

fn tables(golden: &Value) -> Vec<Arc<Table>> {
    let table = |(name, t): (&String, &Value)| {
        let width = t["width"].as_u64().unwrap() as usize;
        Arc::new(Table::from_f32(name, width, &floats(&t["values"]), RowFormat::F32, Unseen::Zero).unwrap())
    };
    golden["tables"].as_object().unwrap().iter().map(table).collect()
}

#[test]
fn collections_equal_torchrec() {
    let golden = golden("collections");
    for case in golden["pooled"].as_array().unwrap() {
        let bag = |b: &Value| BagConfig {
            feature: b["feature"].as_str().unwrap().into(),
            table: b["table"].as_str().unwrap().into(),
            pooling: if b["pooling"] == "mean" { Pooling::Mean } else { Pooling::Sum },
        };
        let bags: Vec<BagConfig> = case["bags"].as_array().unwrap().iter().map(bag).collect();
        for kernels in Kernels::all() {
            let collection = EmbeddingBagCollection::new(tables(&golden), &bags).unwrap().with_kernels(kernels);
            let (out, report) = collection.lookup(&jagged(&case["input"]), &Lookup::default()).unwrap();
            assert_eq!(out.keys(), texts(&case["keys"]));
            assert!(out.length_per_key().map(|n| n as i64).eq(whole(&case["length_per_key"])));
            close(out.values(), &floats(&case["values"]), 10.0, kernels.name());
            assert!(report.iter().all(|t| t.unseen == 0 && t.ids > 0));
        }
    }
    let sequence = |(feature, table): (&str, &str)| SequenceConfig { feature: feature.into(), table: table.into() };
    let uses = [("seen", "articles"), ("liked", "articles"), ("tags", "tags")].map(sequence);
    let collection = EmbeddingCollection::new(tables(&golden), &uses).unwrap();
    let (rows, _) = collection.lookup(&jagged(&golden["sequence"]["input"]), &Lookup::default()).unwrap();
    for (key, part) in rows {
        let expected = &golden["sequence"]["features"][&key];
        assert!(part.lengths().map(|n| n as i64).eq(whole(&expected["lengths"])));
        assert_eq!(part.values(), floats(&expected["values"]), "single rows are copied, not summed");
    }
}

#[test]
fn keyed_tensors_regroup_as_torchrec_does() {
    let golden = &golden("collections")["regroup"];
    let left = KeyedTensor::new(vec!["a".into(), "b".into()], &[2, 3], (0..10).map(|x| x as f32).collect()).unwrap();
    let right = KeyedTensor::new(vec!["c".into()], &[1], vec![50.0, 60.0]).unwrap();
    let groups: Vec<Vec<String>> = golden["groups"].as_array().unwrap().iter().map(texts).collect();
    let groups: Vec<Vec<&str>> = groups.iter().map(|g| g.iter().map(String::as_str).collect()).collect();
    let groups: Vec<&[&str]> = groups.iter().map(Vec::as_slice).collect();
    let out = KeyedTensor::regroup(&[&left, &right], &groups).unwrap();
    for (tensor, expected) in out.iter().zip(golden["values"].as_array().unwrap()) {
        assert_eq!(tensor.data(), floats(expected));
    }
    assert!(KeyedTensor::regroup(&[&left, &left], &[&["a"]]).is_err());
    assert!(KeyedTensor::regroup(&[&left], &[&["c"]]).is_err());
}

#[test]
fn rows_are_stored_and_summed_as_fbgemm_does() {
    for case in golden("formats").as_array().unwrap() {
        let width = case["width"].as_u64().unwrap() as usize;
        let values = floats(&case["values"]);
        for (name, golden) in case["formats"].as_object().unwrap() {
            let format = RowFormat::named(name).unwrap();
            let stored = bytes(&golden["hex"]);
            assert_eq!(format.row_bytes(width).unwrap() as u64, golden["row_bytes"].as_u64().unwrap());
            let ours = encode_rows(format, width, &values).unwrap();
            for (r, (ours, theirs)) in ours
                .chunks_exact(format.row_bytes(width).unwrap())
                .zip(stored.chunks_exact(format.row_bytes(width).unwrap()))
                .enumerate()
            {
                assert_eq!(ours, theirs, "{name}, width {width}, row {r}");
            }
            let rows = (values.len() / width) as u64;
            let spec = TableSpec { name: "t".into(), rows, width, format, unseen: Unseen::Zero };
            let table = Arc::new(Table::host(spec, Buffer::copied(&stored).unwrap()).unwrap());
            for output in golden["outputs"].as_array().unwrap() {
                check_output(&table, output, &values);
            }
        }
    }
}

fn check_output(table: &Arc<Table>, golden: &Value, values: &[f32]) {
    let (ids, lengths) = (whole(&golden["ids"]), whole(&golden["lengths"]));
    let weights = golden["weights"].is_string().then(|| floats(&golden["weights"]));
    let size = ids
        .iter()
        .map(|&id| values[id as usize * table.width()..][..table.width()].iter().fold(0f32, |m, x| m.max(x.abs())))
        .sum::<f32>();
    let kjt = KeyedJaggedTensor::from_lengths(["f"], ids, &lengths, weights).unwrap();
    let what = format!("{:?} {}", table.spec().format, golden["pooling"]);
    let expected = floats(&golden["values"]);
    if golden["pooling"] == "none" {
        let uses = [SequenceConfig { feature: "f".into(), table: "t".into() }];
        let rows =
            EmbeddingCollection::new(vec![table.clone()], &uses).unwrap().lookup(&kjt, &Lookup::default()).unwrap().0;
        return close(rows[0].1.values(), &expected, size, &what);
    }
    let pooling = if golden["pooling"] == "mean" { Pooling::Mean } else { Pooling::Sum };
    let bags = [BagConfig { feature: "f".into(), table: "t".into(), pooling }];
    for kernels in Kernels::all() {
        let collection = EmbeddingBagCollection::new(vec![table.clone()], &bags).unwrap().with_kernels(kernels);
        let (out, _) = collection.lookup(&kjt, &Lookup::default()).unwrap();
        close(out.values(), &expected, size, &what);
    }
}

#[test]
fn malformed_jagged_input_is_rejected_by_name() {
    let long = i64::MAX;
    // Keys, number of values, lengths, part of the message.
    let lengths: [(&[&str], usize, &[i64], &str); 12] = [
        (&["a"], 3, &[2], "add up to 2, expected the 3 values"),
        (&["a"], 1, &[2], "length 0 is 2, more than remain of the 1 values"),
        (&["a"], 3, &[4, -1], "length 0 is 4, more than remain of the 3 values"),
        (&["a"], 3, &[3, -1, 1], "length 1 is -1, expected 0 or more"),
        (&["a"], 0, &[i64::MIN], "expected 0 or more"),
        (&["a"], 2, &[1, long], "length 1 is 9223372036854775807, more than remain of the 2 values"),
        (&["a"], 2, &[long, long, 4], "length 0 is 9223372036854775807, more than remain"),
        (&["a"], 1, &[], "add up to 0, expected the 1 values"),
        (&["a", "b"], 3, &[1, 1, 1], "multiple of the number of keys, 2"),
        (&["a", "a"], 2, &[1, 1], "`a` occurs twice"),
        (&[], 1, &[1], "multiple of the number of keys, 0"),
        (&["a", "b", "a"], 0, &[0, 0, 0], "`a` occurs twice"),
    ];
    for (keys, values, lengths, part) in lengths {
        let error = KeyedJaggedTensor::from_lengths(keys.to_vec(), vec![0; values], lengths, None).unwrap_err();
        assert!(error.to_string().contains(part), "{lengths:?}: {error}");
    }
    let offsets: [(usize, &[i64], &str); 9] = [
        (0, &[], "the first offset is None, expected 0"),
        (2, &[1, 2], "the first offset is Some(1), expected 0"),
        (2, &[-1, 2], "the first offset is Some(-1), expected 0"),
        (2, &[0, 3, 2], "offset 2 is 2, below the 3 before it"),
        (2, &[0, -1, 2], "offset 1 is -1, below the 0 before it"),
        (2, &[0, long, i64::MIN], "below the"),
        (2, &[0, 1], "the last offset is 1, expected the 2 values"),
        (2, &[0, long], "expected the 2 values"),
        (2, &[0], "the last offset is 0, expected the 2 values"),
    ];
    for (values, offsets, part) in offsets {
        let error = KeyedJaggedTensor::from_offsets(["a"], vec![0; values], offsets, None).unwrap_err();
        assert!(error.to_string().contains(part), "{offsets:?}: {error}");
    }
    for (weights, part) in [
        (vec![], "0 weights for 2 values"),
        (vec![1.0; 3], "3 weights for 2 values"),
        (vec![1.0, f32::NAN], "weight 1 is NaN"),
        (vec![f32::INFINITY, 1.0], "weight 0 is inf"),
        (vec![1.0, f32::NEG_INFINITY], "weight 1 is -inf"),
    ] {
        let error = KeyedJaggedTensor::from_lengths(["a"], vec![1, 2], &[2], Some(weights)).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
    let kjt = KeyedJaggedTensor::from_lengths(["a", "b"], vec![1, 2], &[1, 1], None).unwrap();
    let weighted = KeyedJaggedTensor::from_lengths(["c"], vec![1], &[1], Some(vec![1.0])).unwrap();
    let longer = KeyedJaggedTensor::from_lengths(["c"], vec![1], &[1, 0], None).unwrap();
    for refused in [
        kjt.permute(&[2]),
        kjt.permute(&[0, 0]),
        kjt.permute(&[usize::MAX]),
        kjt.split(&[1]).map(|_| kjt.clone()),
        kjt.split(&[usize::MAX, 3]).map(|_| kjt.clone()),
        KeyedJaggedTensor::concat(&[&kjt, &kjt]),
        KeyedJaggedTensor::concat(&[&kjt, &weighted]),
        KeyedJaggedTensor::concat(&[&kjt, &longer]),
    ] {
        assert!(refused.is_err(), "{refused:?}");
    }
}

#[test]
fn every_policy_for_unseen_ids_is_applied_and_counted() {
    let values: Vec<f32> = (1..=5).map(|x| x as f32).collect();
    let ids = vec![0, -1, 5, i64::MAX, i64::MIN, 4];
    let kjt = KeyedJaggedTensor::from_lengths(["f"], ids.clone(), &[6], None).unwrap();
    for unseen in [Unseen::Zero, Unseen::Row(2), Unseen::Hash] {
        let table = Arc::new(Table::from_f32("t", 1, &values, RowFormat::F32, unseen).unwrap());
        let uses = [SequenceConfig { feature: "f".into(), table: "t".into() }];
        let sequence = EmbeddingCollection::new(vec![table.clone()], &uses).unwrap();
        let (rows, counts) = sequence.lookup(&kjt, &Lookup::default()).unwrap();
        let rows = rows[0].1.values();
        assert_eq!((counts[0].ids, counts[0].unseen), (6, 4));
        assert_eq!((rows[0], rows[5]), (1.0, 5.0));
        match unseen {
            Unseen::Zero => assert_eq!(rows[1..5], [0.0; 4]),
            Unseen::Row(_) => assert_eq!(rows[1..5], [3.0; 4]),
            Unseen::Hash => {
                assert!(rows[1..5].iter().all(|x| values.contains(x)));
                let rows: Vec<Option<u64>> = ids.iter().map(|&id| table.resolve(id).0).collect();
                assert!(rows.iter().all(|row| row.is_some_and(|row| row < 5)));
            }
        }
        let bags = [BagConfig { feature: "f".into(), table: "t".into(), pooling: Pooling::Mean }];
        for kernels in Kernels::all() {
            let pooled = EmbeddingBagCollection::new(vec![table.clone()], &bags).unwrap().with_kernels(kernels);
            let (out, counts) = pooled.lookup(&kjt, &Lookup::default()).unwrap();
            assert_eq!((counts[0].ids, counts[0].unseen), (6, 4));
            close(out.values(), &[rows.iter().sum::<f32>() / 6.0], 5.0, kernels.name());
        }
    }
    let beyond = Table::from_f32("t", 1, &values, RowFormat::F32, Unseen::Row(5)).unwrap_err();
    assert!(beyond.to_string().contains("row 5, expected a row below 5"), "{beyond}");
}

proptest! {
    /// The error of a number in a format stays below the bounds in docs/reference/formats.md.
    #[test]
    fn formats_keep_their_stated_error(
        unit in prop::collection::vec(-1f32..1.0, 8),
        exponent in -24i32..14,
        middle in -2f32..2.0,
    ) {
        let row: Vec<f32> = unit.iter().map(|x| (x + middle) * (exponent as f32).exp2()).collect();
        for format in RowFormat::ALL {
            let stored = encode_rows(format, 8, &row).unwrap();
            let mut back = [0f32; 8];
            Rows::new(format, 8, &stored).unwrap().decode(0, &mut back);
            for (x, y) in row.iter().zip(&back) {
                let bound = loses(format, *x, &row, &stored);
                prop_assert!((x - y).abs() <= bound * 1.000_01, "{format:?}: {x} became {y}, expected within {bound}");
            }
        }
    }
}
