#![allow(clippy::unwrap_used)]
use std::path::Path;

use serde_json::{Value, json};

use super::*;

fn golden(file: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/text").join(file)).unwrap()
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::parse(&golden(&format!("{name}.json"))).unwrap()
}

/// `python/make_text_golden.py` computes the ids with the Python package.
#[test]
fn tokenizes_as_the_python_package_does() {
    let tokens: Value = serde_json::from_slice(&golden("tokens.json")).unwrap();
    for (name, cases) in tokens["cases"].as_object().unwrap() {
        let tokenizer = tokenizer(name);
        for case in cases.as_array().unwrap() {
            let retained = if case["keep"] == "first" { Retained::First } else { Retained::Last };
            let length = case["length"].as_u64().unwrap() as usize;
            let found = tokenizer.encode(case["text"].as_str().unwrap(), length, retained).unwrap();
            assert_eq!(json!(found), case["ids"], "{name}: {case}");
        }
    }
}

#[test]
fn ignores_truncation_and_padding_of_the_file() {
    let mut file: Value = serde_json::from_slice(&golden("wordpiece.json")).unwrap();
    file["truncation"] = json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    file["padding"] = json!({"strategy": {"Fixed": 128}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "[PAD]"});
    let padded = Tokenizer::parse(file.to_string().as_bytes()).unwrap();
    let text = "a package and its model serve a user";
    let encode = |tokenizer: &Tokenizer| tokenizer.encode(text, 64, Retained::First).unwrap();
    assert_eq!(encode(&padded), encode(&tokenizer("wordpiece")));
}

#[test]
fn rejects_unusable_files() {
    let file = |edit: &dyn Fn(&mut Value)| {
        let mut file: Value = serde_json::from_slice(&golden("bpe.json")).unwrap();
        edit(&mut file);
        file.to_string().into_bytes()
    };
    let piece = |bytes: usize| {
        let mut file: Value = serde_json::from_slice(&golden("unigram.json")).unwrap();
        file["model"]["vocab"].as_array_mut().unwrap().push(json!(["x".repeat(bytes), -9.0]));
        file.to_string().into_bytes()
    };
    Tokenizer::parse(&piece(256)).unwrap();
    let long = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "b".repeat(40)});
    for (bytes, expected) in [
        (Vec::new(), "not a tokenizer.json"),
        (b"{}".to_vec(), "missing field `model`"),
        (b"[1]".to_vec(), "not a tokenizer.json"),
        (vec![0xff; 100], "not a tokenizer.json"),
        (vec![b' '; FILE_BYTES_MAX + 1], "expected at most 67108864"),
        (vec![b'['; 100_000], "not a tokenizer.json"),
        (file(&|f| f["model"]["dropout"] = json!(0.1)), "model.dropout: got 0.1"),
        (file(&|f| f["model"]["type"] = json!("Neural")), "not a tokenizer.json"),
        (file(&|f| f["model"]["merges"] = json!(["x y"])), "not a tokenizer.json"),
        (file(&|f| f["version"] = json!("9.0")), "not a tokenizer.json"),
        (file(&|f| f["normalizer"] = json!({"type": "Magic"})), "normalizer: type: got `Magic`, expected one of Bert"),
        (
            file(&|f| f["normalizer"] = json!({"pattern": {"String": "~"}, "content": "a"})),
            "normalizer: type: got none",
        ),
        (
            file(&|f| f["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [{}]})),
            "pre_tokenizer: type: got",
        ),
        (file(&|f| f["model"]["continuing_subword_prefix"] = json!("#".repeat(257))), "prefix: got 257 bytes"),
        (file(&|f| f["model"]["end_of_word_suffix"] = json!("#".repeat(257))), "suffix: got 257 bytes"),
        (piece(257), "model.vocab: the longest piece: got 257 bytes, expected at most 256"),
        (
            file(&|f| f["normalizer"] = json!({"type": "Sequence", "normalizers": [long, long]})),
            "normalizer, pre_tokenizer: may make a text 4800 times as long",
        ),
        (
            file(&|f| {
                f["pre_tokenizer"] =
                    json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false})
            }),
            "not a tokenizer.json",
        ),
    ] {
        let error = Tokenizer::parse(&bytes).unwrap_err();
        assert!(error.to_string().contains(expected), "{expected}: {error}");
    }
}

#[test]
fn special_tokens_count_as_rows() {
    let mut file: Value = serde_json::from_slice(&golden("bpe.json")).unwrap();
    let template = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 9}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [999_999], "tokens": ["<s>"]}}});
    let bert = json!({"type": "BertProcessing", "sep": ["[SEP]", 888_888], "cls": ["[CLS]", 5]});
    for (processor, rows) in [
        (bert.clone(), 888_889),
        (template.clone(), 1_000_000),
        (json!({"type": "Sequence", "processors": [bert, template]}), 1_000_000),
    ] {
        file["post_processor"] = processor;
        assert_eq!(Tokenizer::parse(file.to_string().as_bytes()).unwrap().rows(), rows);
    }
}

#[test]
fn rejects_lengths_without_room_for_the_text() {
    let tokenizer = tokenizer("wordpiece");
    for length in 0..=2 {
        let error = tokenizer.encode("a", length, Retained::First).unwrap_err().to_string();
        assert!(error.contains("expected more than the 2 special tokens"), "{error}");
    }
    assert_eq!(tokenizer.encode("a model", 3, Retained::First).unwrap().len(), 3);
}

/// Work is bounded by the length of the feature, not by that of the text.
#[test]
fn long_texts_cost_little() {
    let texts = [
        "word ".repeat(200_000),
        "x".repeat(1 << 20),
        "日".repeat(1 << 18),
        " ".repeat(1 << 20),
        "a\u{301}".repeat(1 << 19),
    ];
    for name in ["wordpiece", "bpe", "unigram"] {
        let tokenizer = tokenizer(name);
        for text in &texts {
            for retained in [Retained::First, Retained::Last] {
                let ids = tokenizer.encode(text, 64, retained).unwrap();
                assert!(ids.len() <= 64 && ids.iter().all(|&id| (id as u64) < tokenizer.rows()), "{name}");
            }
        }
    }
}

#[test]
fn truncates_texts_between_characters() {
    let text = "日本語🦀é".repeat(50);
    for most in 0..text.len() + 2 {
        let (first, last) = (shortened(&text, most, Retained::First), shortened(&text, most, Retained::Last));
        assert!(first.len() <= most && text.starts_with(first) && most.min(text.len()) - first.len() < 4);
        assert!(last.len() <= most && text.ends_with(last) && most.min(text.len()) - last.len() < 4);
    }
}
