//! Checks of the repository's structure beyond those of Cargo: cycles between files, use of `unsafe`, links, stray paths.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

mod imports;
mod source;

use imports::Modules;

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

/// Returns the crates of the workspace: the folder of each with its sources.
fn crates() -> Vec<(String, Vec<(String, String)>)> {
    let folders = fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = folders.map(|name| format!("crates/{}", name.to_string_lossy())).collect();
    names.sort();
    names.push(".".into());
    let sources =
        |name: &String| if name == "." { files("src", &[".rs"]) } else { files(&format!("{name}/src"), &[".rs"]) };
    names
        .into_iter()
        .map(|name| {
            let found = sources(&name);
            (name, found)
        })
        .collect()
}

fn sources() -> Vec<(String, String)> {
    crates().into_iter().flat_map(|(_, sources)| sources).collect()
}

#[test]
fn files_of_a_folder_form_no_cycle() {
    let mut violations = Vec::new();
    for (_, sources) in crates() {
        let circles = Modules::new(&sources).circles();
        violations
            .extend(circles.iter().map(|c| format!("{}: {:?}\n    {}", c.folder, c.entries, c.ties.join("\n    "))));
    }
    assert!(
        violations.is_empty(),
        "files that need each other are one file, or something lies too high:\n{}",
        violations.join("\n")
    );
}

#[test]
fn the_architecture_page_names_every_crate_with_its_dependencies() {
    let page = fs::read_to_string(root().join("docs/internals/architecture.md")).unwrap();
    let mut violations = Vec::new();
    for (folder, _) in crates().iter().filter(|(folder, _)| folder != ".") {
        let name = folder.strip_prefix("crates/").unwrap();
        let manifest = fs::read_to_string(root().join(folder).join("Cargo.toml")).unwrap();
        let own = manifest.split("[dependencies]").nth(1).unwrap().split("\n[").next().unwrap();
        let needs: Vec<&str> =
            own.lines().filter_map(|line| line.strip_prefix("sterling-")?.split(['.', ' ']).next()).collect();
        let row = page.lines().find(|l| l.starts_with(&format!("| `{name}` |"))).unwrap_or_default();
        let reported: BTreeSet<&str> = row.split('|').nth(3).unwrap_or_default().split_whitespace().collect();
        if reported != needs.iter().copied().collect() {
            violations.push(format!("`{name}` depends on {needs:?}, the page has: {row}"));
        }
    }
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

#[test]
fn every_crate_has_a_readme_and_an_example_on_its_front_page() {
    let mut violations = Vec::new();
    for (folder, sources) in crates() {
        let readme = root().join(&folder).join("README.md");
        let (_, front) = sources.iter().find(|(path, _)| path.ends_with("src/lib.rs")).unwrap();
        let has_example = front.lines().filter(|line| line.starts_with("//! ```")).count() >= 2;
        violations.extend((!readme.is_file() || !has_example).then_some(folder));
    }
    assert!(violations.is_empty(), "{violations:?} lack a README or an example");
}

/// A user of the index or of the embedding layer alone compiles no GPU crate and no HTTP crate. JSON comes with the header of
/// safetensors files.
#[test]
fn index_embedding_and_graph_build_without_gpu_and_http_crates() {
    const UNWANTED: [&str; 9] =
        ["sterling-cuda", "cudarc", "redis", "hyper", "http", "reqwest", "axum", "ureq", "object_store"];
    for name in ["sterling-index", "sterling-embedding", "sterling-graph"] {
        let dependencies = |depth: &str| -> BTreeSet<String> {
            let mut tree = Command::new(env!("CARGO"));
            tree.args(["tree", "--offline", "--locked", "--no-default-features", "-e", "normal", "--prefix", "none"]);
            let output = tree.args(["-p", name, "--depth", depth]).current_dir(root()).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let lines = String::from_utf8(output.stdout).unwrap();
            lines.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
        };
        let all = dependencies("100");
        assert!(all.contains("safetensors"), "{name}: {all:?}");
        let violations: Vec<&&str> = UNWANTED.iter().filter(|unwanted| all.contains(**unwanted)).collect();
        assert!(violations.is_empty(), "{name} depends on {violations:?}");
        assert!(!dependencies("1").contains("serde_json"), "{name} depends on serde_json itself");
    }
}

#[test]
fn unsafe_lives_in_two_crates_and_says_why() {
    let mut violations = Vec::new();
    for (path, text) in sources().into_iter().chain(files("benches", &[".rs"])) {
        let lines: Vec<&str> = text.lines().collect();
        for (number, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap();
            // Not `unsafe-inline`, which is a word of HTTP.
            if !code.split(|c: char| !(c.is_alphanumeric() || "_-".contains(c))).any(|word| word == "unsafe") {
                continue;
            }
            if !path.starts_with("crates/kernels/") && !path.starts_with("crates/cuda/") {
                violations.push(format!("{path}:{}: unsafe outside the crates `kernels` and `cuda`", number + 1));
            }
            let explained = lines[number.saturating_sub(12)..=number]
                .iter()
                .any(|l| l.contains("SAFETY:") || l.contains("# Safety"));
            if !explained {
                violations.push(format!("{path}:{}: unsafe without a SAFETY comment", number + 1));
            }
        }
    }
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

/// Returns the part of a source file before its tests.
fn without_tests(text: &str) -> &str {
    let ends = ["#[cfg(test)]\nmod ", "#[cfg(all(test"].into_iter().filter_map(|start| text.find(start));
    &text[..ends.min().unwrap_or(text.len())]
}

#[test]
fn threads_start_in_one_module_and_the_architecture_page_has_them_all() {
    const STARTERS: [&str; 2] = ["crates/core/src/tasks.rs", "crates/kernels/src/priority.rs"];
    const STARTS: [&str; 9] = [
        "thread::spawn",
        "thread::Builder",
        "scope.spawn",
        "spawn_scoped",
        "runtime::Builder",
        "Runtime::new",
        "Builder::new_",
        "spawn_blocking(",
        "ThreadPoolBuilder",
    ];
    let is_test = |path: &str| path.contains("/tests") || path.ends_with("/faults.rs");
    // Folders called `store` are left out by `sources`.
    let all = sources().into_iter().chain(files("crates/snapshot/src/store", &[".rs"]));
    let code: Vec<(String, String)> = all.filter(|(path, _)| !is_test(path)).collect();
    let mut violations = Vec::new();
    let mut users: BTreeSet<(String, String)> = BTreeSet::new();
    for (path, text) in code.iter().filter(|(path, _)| !STARTERS.contains(&path.as_str())) {
        for line in without_tests(text).lines().map(|line| line.split("//").next().unwrap()) {
            violations
                .extend(STARTS.iter().filter(|start| line.contains(**start)).map(|start| format!("{path}: {start}")));
            for rest in line.split("tasks::").skip(1) {
                let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                if name == name.to_uppercase() && !name.is_empty() {
                    users.insert((name, path.clone()));
                }
            }
        }
    }
    let page = fs::read_to_string(root().join("docs/internals/architecture.md")).unwrap();
    let table = page.split("## Threads and runtimes").nth(1).unwrap().split("\n## ").next().unwrap();
    let tasks = fs::read_to_string(root().join(STARTERS[0])).unwrap();
    let declared = without_tests(&tasks).split("\ntasks! {").nth(1).unwrap().split("\n}").next().unwrap();
    let declared = declared.lines().filter_map(|line| line.trim().split_once(" = \""));
    let declared: BTreeSet<(String, String)> =
        declared.map(|(task, rest)| (rest.split('"').next().unwrap().to_owned(), task.to_owned())).collect();
    let mut rows: BTreeSet<(String, String)> = BTreeSet::new();
    for row in table.lines().filter(|line| line.starts_with("| `")) {
        let mut spans = row.split('`').skip(1).step_by(2);
        // `pass-N` and `watch-0` are numbered threads.
        let name = spans.next().unwrap().trim_end_matches("-N").trim_end_matches("-0");
        match declared.iter().find(|(known, _)| known == name) {
            Some((_, task)) => {
                rows.extend(spans.filter(|span| span.ends_with(".rs")).map(|path| (task.clone(), path.to_owned())));
            }
            None => violations.push(format!("the table has `{name}`, which no task is called")),
        }
    }
    violations.extend(
        users.symmetric_difference(&rows).map(|(task, path)| format!("{task} in {path}: in code or table only")),
    );
    let unused = declared.iter().filter(|(_, task)| !rows.iter().any(|(known, _)| known == task));
    violations.extend(unused.map(|(_, task)| format!("{task}: nothing starts it")));
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

#[test]
fn links_and_named_paths_of_the_documents_exist() {
    let mut violations = Vec::new();
    for (path, text) in files(".", &[".md"]) {
        let folder = root().join(&path).parent().unwrap().to_path_buf();
        for part in text.split("](").skip(1) {
            let target = part.split([')', ' ']).next().unwrap().split('#').next().unwrap();
            if !target.is_empty() && !target.contains("://") && !folder.join(target).exists() {
                violations.push(format!("{path}: link to {target}"));
            }
        }
        // Paths in code spans, such as `src/...` and `docs/...`, must exist too.
        for word in text.split('`').skip(1).step_by(2) {
            let rooted = [
                "src/", "crates/", "docs/", "tests/", "benches/", "models/", "indexes/", "python/", "deploy/",
                "scripts/",
            ];
            let plain = word.chars().all(|c| c.is_alphanumeric() || "/._-".contains(c));
            if plain && rooted.iter().any(|r| word.starts_with(r)) && !root().join(word).exists() {
                violations.push(format!("{path}: names {word}"));
            }
        }
    }
    assert!(violations.is_empty(), "dead paths:\n{}", violations.join("\n"));
}

#[test]
fn every_tensor_of_a_snapshot_is_in_the_format_page() {
    let page = fs::read_to_string(root().join("docs/reference/formats.md")).unwrap();
    let mut missing = Vec::new();
    for (path, text) in sources() {
        let code = text.split("#[cfg(test)]").next().unwrap();
        for call in [".add_owned(", ".add_json("].iter().flat_map(|call| code.split(call).skip(1)) {
            let name = call.trim_start().trim_start_matches("format!(");
            let Some(name) = name.strip_prefix('"').and_then(|name| name.split('"').next()) else { continue };
            let name = name.replace("{number}", "N");
            if !page.contains(&format!("`{name}`")) {
                missing.push(format!("{path}: `{name}`"));
            }
        }
    }
    assert!(missing.is_empty(), "docs/reference/formats.md does not name:\n{}", missing.join("\n"));
}

#[test]
fn no_file_is_two_concepts_long() {
    const LINES_MAX: usize = 900;
    let long: Vec<String> = sources()
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
    let mut violations = Vec::new();
    for folder in ["src", "crates", "tests", "benches", "python"] {
        for (path, text) in files(folder, &[".rs", ".py"]) {
            // Tests of the long suite are marked like this.
            let text = text.replace(&[&marks[2], " = \"long: "].concat(), "");
            violations.extend(marks.iter().filter(|m| text.contains(*m)).map(|m| format!("{path}: {m}")));
        }
    }
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}
