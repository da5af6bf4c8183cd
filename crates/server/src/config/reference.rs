//! Generates `docs/reference/configuration.md` from the configuration types: their doc comments and defaults.

#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;

use serde_json::{Map, Value, json};
use utoipa::PartialSchema;

use super::{CacheOptions, Config, PeerOptions, PlacementOptions, StreamOptions, compact, engine, http, route};

const HEAD: &str = "# Configuration

This page lists the configuration keys of `sterling serve` and `sterling route`. It is written from the code:
`STERLING_BLESS=1 cargo test -p sterling-server config::` regenerates it.

Later sources take precedence:

1. defaults;
2. one TOML file (`--config`);
3. environment variables: `STERLING_` and the key in capitals, with two underscores between section and key, such as
   `STERLING_ENGINE__QUEUE=64`; lists are TOML: `STERLING_TABLES__REMOTE='[\"redis://a:6379\"]'`;
4. flags.

An unknown key in the file is an error. So is a variable that resembles a key: a known section with an unknown key, a
key with other underscores, or a value that is not UTF-8. Other `STERLING_` variables are ignored with a warning,
because orchestrators set some. `sterling serve --check` reports the errors of a configuration without starting.

`STERLING_LOG` sets the log level (`info`, `sterling=debug,info`), and `--log-json` the JSON format. `STERLING_KERNEL`
selects the CPU kernels, for tests. An empty default means unset. Sizes in MiB are multiples of 2^20 bytes.
";

const ROUTE_HEAD: &str = "
## `[route]`

Servers behind a router. `sterling route` also reads `listen` (default `127.0.0.1:8090`), `[access]` without
`admin_listen`, `[http]` and `[traces]`.
";

/// Keys of `[route]` with their meanings.
const ROUTE: [(&str, &str); 10] = [
    (
        "servers",
        "Servers of all shards, each as `HOST:PORT`; a name stands for all of its addresses. Each server reports its shard.",
    ),
    ("refresh_ms", "Interval between two polls of the servers and their names, in milliseconds."),
    ("min_replicas", "Number of servers that each shard of a version needs before the version answers."),
    ("min_coverage", "Default for the share of the items that an answer must cover."),
    ("least_coverage", "Least `min_coverage` that a request may ask for; 1.0 forbids partial answers."),
    ("timeout_ms", "Default deadline of requests, in milliseconds."),
    ("requests", "Maximum number of concurrent requests."),
    ("audit_share", "Share of retrievals that run again exactly after their answer, to measure recall; 0: none."),
    ("key", "Access key that the servers need; empty if they need none."),
    (
        "tls",
        "TLS to the servers: `ca`, their authorities as PEM (without it plain HTTP); `certificate` and `key` of the router, if servers set `tls.client_ca`.",
    ),
];

/// Returns the description of a type or field on one line, as a table cell.
fn description(of: &Value) -> String {
    let text = of["description"].as_str().unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

fn rows(page: &mut String, properties: &Map<String, Value>, defaults: &Value) {
    page.push_str("\n| key | default | meaning |\n|---|---|---|\n");
    for (key, of) in properties {
        let meaning = description(of);
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
        ("cache", schema::<CacheOptions>()),
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
        write!(page, "\n## `[{section}]`\n\n{}\n", description(of)).unwrap();
        rows(&mut page, own, defaults);
    }
    page.push_str(ROUTE_HEAD);
    let meanings: Map<String, Value> =
        ROUTE.iter().map(|(key, meaning)| ((*key).to_owned(), json!({"description": meaning}))).collect();
    let defaults = serde_json::to_value(route::Options::default()).unwrap();
    assert!(meanings.keys().eq(defaults.as_object().unwrap().keys()), "route: a key that is not described");
    rows(&mut page, &meanings, &defaults);
    page
}

#[test]
fn the_page_lists_every_key_as_the_code_has_it() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/configuration.md");
    let made = page();
    if std::env::var_os("STERLING_BLESS").is_some() {
        std::fs::write(path, &made).unwrap();
    }
    let there = std::fs::read_to_string(path).unwrap_or_default();
    assert!(made == there, "the configuration changed: run with STERLING_BLESS=1");
}
