//! What protects the structure of the project: layers and circles, names, where `unsafe` lives, links, stray paths.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

mod imports;
mod source;

use imports::Modules;
use source::Kind;

/// Each module of `src/` with its layer; a module imports only from lower layers, or from the listed peers of its own.
/// The same table stands in ARCHITECTURE.md.
const LAYERS: &[(&str, u8, &[&str])] = &[
    ("error", 0, &[]),
    ("units", 0, &[]),
    ("draws", 0, &[]),
    ("limits", 0, &[]),
    ("locks", 0, &[]),
    ("blocking", 0, &[]),
    ("packed", 0, &["units"]),
    ("quota", 0, &["error"]),
    ("tensor", 0, &["error"]),
    ("telemetry", 0, &["error"]),
    ("request", 1, &[]),
    ("traffic", 1, &[]),
    ("device", 2, &[]),
    ("files", 2, &["device"]),
    ("rows", 2, &["device", "files"]),
    ("npy", 2, &["device", "files", "rows"]),
    ("gather", 2, &[]),
    ("objects", 2, &[]),
    ("value", 3, &[]),
    ("topk", 3, &[]),
    ("journal", 3, &[]),
    ("columns", 3, &[]),
    ("filter", 3, &["columns"]),
    ("ivf", 3, &["topk"]),
    ("embedding", 3, &[]),
    ("dense", 3, &[]),
    ("tower", 3, &["dense", "embedding"]),
    ("planner", 4, &[]),
    ("items", 4, &[]),
    ("model", 4, &["items"]),
    ("snapshot", 4, &["items", "model", "planner"]),
    ("trial", 4, &["model"]),
    ("search", 4, &[]),
    ("view", 5, &[]),
    ("fresh", 5, &["view", "registry"]),
    ("pass", 5, &["view"]),
    ("registry", 5, &["view"]),
    ("engine", 6, &[]),
    ("route", 6, &[]),
    ("jobs", 6, &[]),
    ("http", 7, &["engine"]),
    ("bench", 7, &[]),
    ("warmup", 7, &["http"]),
    ("scoring", 7, &["http"]),
    ("publish", 8, &[]),
    ("compact", 8, &["publish"]),
    ("config", 8, &["compact"]),
    ("doctor", 8, &[]),
    ("cli", 8, &["compact", "config", "doctor", "publish"]),
];

/// Names that several modules share, each with the one whose type is meant where the name stands without its module. Types of
/// the others are qualified outside their own module.
const SHARED: &[(&str, &str)] = &[
    // That of `http` is its JSON, and the name is part of the public API's description.
    ("Explain", "request"),
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

fn module_of(path: &str) -> Option<&str> {
    let inner = path.strip_prefix("src/")?;
    let first = inner.split('/').next()?;
    let name = first.strip_suffix(".rs").unwrap_or(first);
    (!["lib", "main"].contains(&name)).then_some(name)
}

#[test]
fn imports_go_only_down_the_layers() {
    let layers: BTreeMap<_, _> = LAYERS.iter().map(|(name, layer, peers)| (*name, (*layer, *peers))).collect();
    let sources = files("src", &[".rs"]);
    let unknown = sources.iter().filter_map(|(path, _)| module_of(path)).filter(|m| !layers.contains_key(m));
    let mut wrong: Vec<String> = unknown.map(|m| format!("module `{m}` has no layer in tests/tidy/main.rs")).collect();
    for import in Modules::new(&sources).imports() {
        let Some(module) = module_of(&import.from) else { continue };
        let named = import.module[0].as_str();
        let (Some((layer, peers)), Some((below, _))) = (layers.get(module), layers.get(named)) else { continue };
        if named != module && below >= layer && !peers.contains(&named) {
            wrong.push(format!("{}:{} (layer {layer}) imports `{named}` (layer {below})", import.from, import.line));
        }
    }
    wrong.dedup();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn files_of_a_folder_form_no_circle() {
    let wrong: Vec<String> = Modules::new(&files("src", &[".rs"]))
        .circles()
        .iter()
        .map(|circle| format!("{}: {:?}\n    {}", circle.folder, circle.entries, circle.ties.join("\n    ")))
        .collect();
    assert!(
        wrong.is_empty(),
        "files that need each other are one file, or something lies too high:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn a_type_name_that_two_modules_share_is_qualified_elsewhere() {
    let modules = Modules::new(&files("src", &[".rs"]));
    let mut homes: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (path, source) in modules.sources() {
        for defined in source.types.iter().filter(|t| t.is_public) {
            homes.entry(&defined.name).or_default().extend(module_of(path));
        }
    }
    let shared = |name: &str| homes.get(name).is_some_and(|homes| homes.len() > 1);
    let mut wrong = BTreeSet::new();
    for import in modules.imports() {
        let (Some(name), home) = (import.rest.last(), import.module[0].as_str()) else { continue };
        let is_plain = import.kind == Kind::Use && !import.in_tests && !import.from.ends_with("/tests.rs");
        let is_own = module_of(&import.from) == Some(home);
        if is_plain && !is_own && shared(name) && !SHARED.contains(&(name, home)) {
            wrong.insert(format!(
                "{}:{}: `{name}` of `{home}`, one of {:?}",
                import.from,
                import.line,
                homes[name.as_str()]
            ));
        }
    }
    let gone = SHARED.iter().filter(|(name, home)| !shared(name) || !homes[name].contains(home));
    wrong.extend(gone.map(|(name, home)| format!("`{name}` of `{home}` is alone by now, delete the exception")));
    let wrong: Vec<String> = wrong.into_iter().collect();
    assert!(wrong.is_empty(), "name the module at the use, or call one of the types otherwise:\n{}", wrong.join("\n"));
}

#[test]
fn no_function_takes_more_than_seven_parameters() {
    const PARAMETERS_MAX: usize = 7;
    let mut wrong = Vec::new();
    for (path, source) in Modules::new(&files("src", &[".rs"])).sources() {
        let long = source.functions.iter().filter(|(_, _, count)| *count > PARAMETERS_MAX);
        wrong.extend(long.map(|(name, line, count)| format!("{path}:{line}: `{name}` takes {count}")));
    }
    assert!(wrong.is_empty(), "put what belongs together into a struct:\n{}", wrong.join("\n"));
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
            // Not `unsafe-inline`, which is a word of HTTP.
            if !code.split(|c: char| !(c.is_alphanumeric() || "_-".contains(c))).any(|word| word == "unsafe") {
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
fn every_tensor_of_a_snapshot_is_in_the_format_page() {
    let page = fs::read_to_string(root().join("docs/FORMAT.md")).unwrap();
    let mut missing = Vec::new();
    for (path, text) in files("src", &[".rs"]) {
        let code = text.split("#[cfg(test)]").next().unwrap();
        for call in code.split(".add_owned(").skip(1) {
            let name = call.trim_start().trim_start_matches("format!(");
            let Some(name) = name.strip_prefix('"').and_then(|name| name.split('"').next()) else { continue };
            let name = name.replace("{number}", "N");
            if !page.contains(&format!("`{name}`")) {
                missing.push(format!("{path}: `{name}`"));
            }
        }
    }
    assert!(missing.is_empty(), "docs/FORMAT.md does not name:\n{}", missing.join("\n"));
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
