//! What protects the structure of the project: layers, where `unsafe` lives, links, stray paths.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Each module of `src/` with its layer; a module imports only from lower layers, or from the listed peers of its own.
/// The same table stands in ARCHITECTURE.md.
const LAYERS: &[(&str, u8, &[&str])] = &[
    ("error", 0, &[]),
    ("units", 0, &[]),
    ("limits", 0, &[]),
    ("tensor", 0, &["error"]),
    ("telemetry", 0, &["error"]),
    ("request", 1, &[]),
    ("wire", 1, &[]),
    ("device", 2, &[]),
    ("files", 2, &["device"]),
    ("npy", 2, &["device"]),
    ("filter", 3, &[]),
    ("value", 3, &[]),
    ("topk", 3, &[]),
    ("columns", 3, &["filter"]),
    ("bloom", 3, &["filter", "columns"]),
    ("ivf", 3, &["topk"]),
    ("sparse", 3, &[]),
    ("tower", 3, &["sparse"]),
    ("overarch", 3, &["tower"]),
    ("items", 4, &[]),
    ("model", 4, &["items"]),
    ("snapshot", 4, &["items", "model"]),
    ("forward", 5, &[]),
    ("engine", 6, &[]),
    ("http", 7, &["engine"]),
    ("bench", 7, &[]),
    ("config", 8, &[]),
    ("cli", 8, &["config"]),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn walk(folder: &Path, suffixes: &[&str], found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if !["target", ".git", "store", "data", ".venv", "node_modules"].contains(&name.as_str()) {
                walk(&path, suffixes, found);
            }
        } else if suffixes.iter().any(|s| name.ends_with(s)) {
            found.push(path);
        }
    }
}

fn files(folder: &str, suffixes: &[&str]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    walk(&root().join(folder), suffixes, &mut found);
    found.sort();
    found
        .into_iter()
        .map(|p| (p.strip_prefix(root()).unwrap().to_string_lossy().into_owned(), fs::read_to_string(&p).unwrap()))
        .collect()
}

/// The modules that a source file names in `crate::...` paths, comments left out.
fn imports(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for line in text.lines().filter(|l| !l.trim_start().starts_with("//")) {
        for (at, _) in line.match_indices("crate::") {
            if line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$') {
                continue;
            }
            let rest = &line[at + "crate::".len()..];
            let names = match rest.strip_prefix('{') {
                Some(group) => group.split(',').map(str::trim).collect(),
                None => vec![rest],
            };
            for name in names {
                let end = name.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(name.len());
                if end > 0 {
                    found.insert(name[..end].to_owned());
                }
            }
        }
    }
    found
}

fn module_of(path: &str) -> Option<&str> {
    let inner = path.strip_prefix("src/")?;
    let first = inner.split('/').next()?;
    let name = first.strip_suffix(".rs").unwrap_or(first);
    (!["lib", "main"].contains(&name)).then_some(name)
}

#[test]
fn imports_go_only_down_the_layers() {
    let layers: BTreeMap<_, _> = LAYERS.iter().map(|(name, layer, peers)| (*name, (*layer, *peers))).collect();
    let mut wrong = Vec::new();
    for (path, text) in files("src", &[".rs"]) {
        let Some(module) = module_of(&path) else { continue };
        let Some(&(layer, peers)) = layers.get(module) else {
            wrong.push(format!("{path}: module `{module}` has no layer in tests/tidy.rs"));
            continue;
        };
        for import in imports(&text).iter().filter(|i| *i != module) {
            match layers.get(import.as_str()) {
                None => wrong.push(format!("{path}: `crate::{import}` is not a module with a layer")),
                Some((below, _)) if *below < layer || peers.contains(&import.as_str()) => {}
                Some((other, _)) => wrong.push(format!("{path} (layer {layer}) imports `{import}` (layer {other})")),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_layer_table_of_the_architecture_page_is_this_one() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    for (module, layer, _) in LAYERS {
        let row = page.lines().find(|l| l.starts_with(&format!("| {layer} |"))).unwrap_or_default();
        assert!(row.contains(&format!("`{module}`")), "ARCHITECTURE.md: layer {layer} does not name `{module}`: {row}");
    }
}

#[test]
fn unsafe_lives_under_device_and_says_why() {
    let mut wrong = Vec::new();
    for (path, text) in files("src", &[".rs"]).into_iter().chain(files("benches", &[".rs"])) {
        let lines: Vec<&str> = text.lines().collect();
        for (number, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap();
            if !code.split(|c: char| !(c.is_alphanumeric() || c == '_')).any(|word| word == "unsafe") {
                continue;
            }
            if !path.starts_with("src/device/") {
                wrong.push(format!("{path}:{}: unsafe outside src/device", number + 1));
            }
            let explained = lines[number.saturating_sub(12)..=number]
                .iter()
                .any(|l| l.contains("SAFETY:") || l.contains("# Safety"));
            if !explained {
                wrong.push(format!("{path}:{}: unsafe without a SAFETY comment", number + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn links_and_named_paths_of_the_documents_exist() {
    let mut wrong = Vec::new();
    for (path, text) in files(".", &[".md"]) {
        let folder = root().join(&path).parent().unwrap().to_path_buf();
        for part in text.split("](").skip(1) {
            let target = part.split([')', ' ']).next().unwrap().split('#').next().unwrap();
            if !target.is_empty() && !target.contains("://") && !folder.join(target).exists() {
                wrong.push(format!("{path}: link to {target}"));
            }
        }
        // `src/...`, `docs/...` and the like in code marks are promises too.
        for word in text.split('`').skip(1).step_by(2) {
            let rooted =
                ["src/", "docs/", "tests/", "benches/", "models/", "indexes/", "python/", "deploy/", "scripts/"];
            let plain = word.chars().all(|c| c.is_alphanumeric() || "/._-".contains(c));
            if plain && rooted.iter().any(|r| word.starts_with(r)) && !root().join(word).exists() {
                wrong.push(format!("{path}: names {word}"));
            }
        }
    }
    assert!(wrong.is_empty(), "dead paths:\n{}", wrong.join("\n"));
}

#[test]
fn no_file_is_two_concepts_long() {
    const LINES_MAX: usize = 900;
    let long: Vec<String> = files("src", &[".rs"])
        .into_iter()
        .map(|(path, text)| (text.lines().count(), path))
        .filter(|(lines, _)| *lines > LINES_MAX)
        .map(|(lines, path)| format!("{path}: {lines} lines"))
        .collect();
    assert!(long.is_empty(), "look for the second concept inside:\n{}", long.join("\n"));
}

#[test]
fn nothing_is_left_undone_or_ignored() {
    let marks = [["TO", "DO"].concat(), ["FIX", "ME"].concat(), ["#[ig", "nore"].concat(), ["todo", "!("].concat()];
    let mut wrong = Vec::new();
    for folder in ["src", "tests", "benches", "python"] {
        for (path, text) in files(folder, &[".rs", ".py"]) {
            wrong.extend(marks.iter().filter(|m| text.contains(*m)).map(|m| format!("{path}: {m}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_source_file_opens_with_prose() {
    let silent: Vec<String> =
        files("src", &[".rs"]).into_iter().filter(|(_, t)| !t.starts_with("//!")).map(|(p, _)| p).collect();
    assert!(silent.is_empty(), "files without an opening `//!`: {silent:?}");
}
