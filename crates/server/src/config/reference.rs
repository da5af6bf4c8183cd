//! `docs/CONFIG.md`, written from the types of the configuration: their documentation, their defaults.

#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;

use serde_json::{Map, Value};
use utoipa::PartialSchema;

use super::{Config, PeerOptions, PlacementOptions, StreamOptions, compact, engine, http};

const HEAD: &str = "# Configuration

Written from the code: `STERLING_BLESS=1 cargo test -p sterling-server config::` writes it again.

`sterling serve` takes its defaults, then one TOML file (`--config`), then variables of the environment, then flags; the later ones go before. A variable is
`STERLING_` and the key in capitals, with two underscores between section and key: `STERLING_ENGINE__QUEUE=64`. Lists are TOML: `STERLING_TABLES__REMOTE='[\"redis://a:6379\"]'`.
A variable that nearly names a key is an error: one of a section that has no such key, one that is a key but for its underscores, a value that is no UTF-8. Others that begin with `STERLING_` are passed
over with a warning, for orchestrators set some. A key that is unknown in the file is an error.
`sterling serve --check` says what is wrong with a configuration without a start.

Beside these, `STERLING_LOG` sets what is logged (`info`, `sterling=debug,info`), and `--log-json` how; `STERLING_KERNEL` chooses the kernels of the CPU, for tests.
";

/// The documentation of a type or field on one line, as a cell of a table.
fn said(of: &Value) -> String {
    let text = of["description"].as_str().unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

fn rows(page: &mut String, properties: &Map<String, Value>, defaults: &Value) {
    page.push_str("\n| key | default | meaning |\n|---|---|---|\n");
    for (key, of) in properties {
        let meaning = said(of);
        assert!(!meaning.is_empty(), "{key} is not documented");
        let default = match &defaults[key.as_str()] {
            Value::Null => String::new(),
            value => format!("`{}`", serde_json::to_string(value).unwrap()),
        };
        writeln!(page, "| `{key}` | {default} | {meaning} |").unwrap();
    }
}

fn schema<T: PartialSchema>() -> Value {
    serde_json::to_value(T::schema()).unwrap()
}

fn page() -> String {
    let sections = [
        ("access", schema::<http::AccessOptions>()),
        ("tls", schema::<http::TlsOptions>()),
        ("traces", schema::<http::TraceOptions>()),
        ("tables", schema::<PlacementOptions>()),
        ("peers", schema::<PeerOptions>()),
        ("engine", schema::<engine::Options>()),
        ("http", schema::<http::Options>()),
        ("merge", schema::<compact::Options>()),
        ("streams", schema::<StreamOptions>()),
    ];
    let all = schema::<Config>();
    let defaults = serde_json::to_value(Config::default()).unwrap();
    let mut properties = all["properties"].as_object().unwrap().clone();
    assert!(properties.keys().eq(defaults.as_object().unwrap().keys()), "a key that is not described");
    properties.retain(|key, _| sections.iter().all(|(section, _)| key != section));
    let mut page = HEAD.to_owned();
    rows(&mut page, &properties, &defaults);
    for (section, of) in &sections {
        let (own, defaults) = (of["properties"].as_object().unwrap(), &defaults[section]);
        assert!(own.keys().eq(defaults.as_object().unwrap().keys()), "{section}: a key that is not described");
        write!(page, "\n## `[{section}]`\n\n{}\n", said(of)).unwrap();
        rows(&mut page, own, defaults);
    }
    page
}

#[test]
fn the_page_lists_every_key_as_the_code_has_it() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/CONFIG.md");
    let made = page();
    if std::env::var_os("STERLING_BLESS").is_some() {
        std::fs::write(path, &made).unwrap();
    }
    let there = std::fs::read_to_string(path).unwrap_or_default();
    assert!(made == there, "the configuration changed: run with STERLING_BLESS=1");
}
