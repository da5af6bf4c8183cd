//! Dependencies between the files of `src/`, and their cycles.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::{Kind, Named, Source, read};

/// The files of a crate by the paths of their modules.
pub struct Modules {
    files: BTreeMap<Vec<String>, File>,
}

struct File {
    path: String,
    source: Source,
}

/// A path in one file that refers to another.
pub struct Import {
    pub from: String,
    pub line: usize,
    pub to: String,
    pub in_tests: bool,
}

/// Returns the module of a file under `src/`.
fn module_of(path: &str) -> Vec<String> {
    let inner = path.split_once("src/").map_or(path, |(_, inner)| inner).trim_end_matches(".rs");
    let mut parts: Vec<String> = inner.split('/').map(str::to_owned).collect();
    if parts.last().is_some_and(|last| last == "mod") || parts == ["lib"] {
        parts.pop();
    }
    parts
}

impl Modules {
    /// Parses files, each with its path from the root of the repository and its text.
    pub fn new(files: &[(String, String)]) -> Self {
        let file = |(path, text): &(String, String)| (module_of(path), File { path: path.clone(), source: read(text) });
        Modules { files: files.iter().filter(|(path, _)| path != "src/main.rs").map(file).collect() }
    }

    /// Returns the path from the root of the crate, or `None` for one outside of it.
    fn absolute(&self, module: &[String], named: &Named) -> Option<Vec<String>> {
        let mut segments = named.segments.iter().map(String::as_str).peekable();
        let (mut at, mut inside) = (module.to_vec(), named.inside);
        match segments.peek().copied()? {
            "crate" => {
                segments.next();
                return Some(segments.map(str::to_owned).collect());
            }
            "super" | "self" => {
                while let Some(step) = segments.next_if(|s| ["super", "self"].contains(s)) {
                    match (step, inside) {
                        ("self", _) => {}
                        (_, 0) => drop(at.pop()?),
                        _ => inside -= 1,
                    }
                }
                if inside > 0 {
                    return None;
                }
            }
            // A child module, named without `self`.
            first => {
                at.push(first.to_owned());
                if inside > 0 || !self.files.contains_key(&at) {
                    return None;
                }
                at.pop();
            }
        }
        at.extend(segments.map(str::to_owned));
        Some(at)
    }

    /// Returns the file of the module that a path names. Re-exported names are followed.
    fn file_of(&self, path: &[String], turns: usize) -> Option<&[String]> {
        let (module, file) = (0..=path.len()).rev().find_map(|n| self.files.get_key_value(&path[..n]))?;
        let rest = &path[module.len()..];
        let Some(name) = rest.first().filter(|_| turns > 0) else { return Some(module) };
        let exports = || file.source.paths.iter().filter(|p| p.kind == Kind::Export && p.inside == 0);
        let by_name = exports().find(|p| p.segments.last() == Some(name));
        let defines = file.source.types.iter().any(|t| t == name);
        let glob = || exports().find(|p| p.segments.last().is_some_and(|last| last == "*")).filter(|_| !defines);
        let followed = by_name.or_else(glob).and_then(|export| {
            let mut target = self.absolute(module, export)?;
            if target.last().is_some_and(|last| last == "*") {
                target.pop();
                target.push(name.clone());
            }
            target.extend(rest[1..].iter().cloned());
            self.file_of(&target, turns - 1)
        });
        Some(followed.unwrap_or(module))
    }

    /// Returns every path from one file to another.
    pub fn imports(&self) -> Vec<Import> {
        let mut found = Vec::new();
        for (module, file) in &self.files {
            for named in &file.source.paths {
                let Some(path) = self.absolute(module, named) else { continue };
                let Some(target) = self.file_of(&path, 4) else { continue };
                // A re-export of a module's own content is its table of contents, not a use.
                let is_contents = named.kind == Kind::Export && target.starts_with(module);
                if target != module.as_slice() && !target.is_empty() && !is_contents {
                    found.push(Import {
                        from: file.path.clone(),
                        line: named.line,
                        to: self.files[target].path.clone(),
                        in_tests: named.in_tests,
                    });
                }
            }
        }
        found
    }

    /// Returns the cycles among the entries of each folder: the folder, its entries that reach each other, and their imports.
    /// Tests may import anything.
    pub fn circles(&self) -> Vec<Circle> {
        let mut ties: BTreeMap<String, BTreeMap<(String, String), String>> = BTreeMap::new();
        for import in self.imports().iter().filter(|i| !i.in_tests && !is_test_file(&i.from)) {
            if let Some((folder, from, to)) = parted(&import.from, &import.to) {
                let place = format!("{}:{} names {}", import.from, import.line, import.to);
                ties.entry(folder).or_default().entry((from, to)).or_insert(place);
            }
        }
        let mut circles = Vec::new();
        for (folder, ties) in ties {
            let mut seen = BTreeSet::new();
            for entry in ties.keys().map(|(from, _)| from) {
                if seen.contains(entry) {
                    continue;
                }
                let forth = reached(entry, ties.keys().map(|(a, b)| (a, b)));
                let back = reached(entry, ties.keys().map(|(a, b)| (b, a)));
                let entries: BTreeSet<String> = forth.intersection(&back).cloned().collect();
                if entries.len() > 1 {
                    let within = |(from, to): &(String, String)| entries.contains(from) && entries.contains(to);
                    let ties = ties.iter().filter(|(tie, _)| within(tie)).map(|(_, place)| place.clone()).collect();
                    seen.extend(entries.iter().cloned());
                    circles.push(Circle { folder: folder.clone(), entries: entries.into_iter().collect(), ties });
                }
            }
        }
        circles
    }
}

/// Entries of a folder that depend on each other in a cycle.
#[derive(Debug, PartialEq, Eq)]
pub struct Circle {
    pub folder: String,
    pub entries: Vec<String>,
    pub ties: Vec<String>,
}

fn is_test_file(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.contains("/tests/")
}

/// Returns the lowest common folder of two files, and their entries in it. `a.rs` and `a/` are one entry.
fn parted(from: &str, to: &str) -> Option<(String, String, String)> {
    let (from, to): (Vec<&str>, Vec<&str>) = (from.split('/').collect(), to.split('/').collect());
    let same = from.iter().zip(&to).take_while(|(a, b)| a.trim_end_matches(".rs") == b.trim_end_matches(".rs")).count();
    let entry = |parts: &[&str]| parts.get(same).map(|part| part.trim_end_matches(".rs").to_owned());
    Some((from[..same].join("/"), entry(&from)?, entry(&to)?))
}

fn reached<'a>(start: &str, ties: impl Iterator<Item = (&'a String, &'a String)> + Clone) -> BTreeSet<String> {
    let mut found = BTreeSet::from([start.to_owned()]);
    let mut next = vec![start.to_owned()];
    while let Some(entry) = next.pop() {
        for (_, to) in ties.clone().filter(|(from, _)| **from == entry) {
            if found.insert(to.clone()) {
                next.push(to.clone());
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modules(files: &[(&str, &str)]) -> Modules {
        Modules::new(&files.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect::<Vec<_>>())
    }

    fn ties(files: &[(&str, &str)]) -> Vec<(String, String)> {
        modules(files).imports().into_iter().map(|i| (i.from, i.to)).collect()
    }

    fn circles(files: &[(&str, &str)]) -> Vec<(String, Vec<String>)> {
        modules(files).circles().into_iter().map(|c| (c.folder, c.entries)).collect()
    }

    fn pair(a: &str, b: &str) -> (String, String) {
        (a.to_owned(), b.to_owned())
    }

    #[test]
    fn every_form_of_a_path_leads_to_its_file() {
        let others = [
            ("src/b/mod.rs", "mod c;\npub use c::T;\npub use self::d::*;\npub fn here() {}"),
            ("src/b/c.rs", ""),
            ("src/b/d.rs", ""),
        ];
        for (text, expected) in [
            ("use crate::{\n  b::{\n    c::T,\n  },\n};", "src/b/c.rs"),
            ("use super::b::c;", "src/b/c.rs"),
            ("use crate::b::T;", "src/b/c.rs"),
            ("fn f() { crate::b::T::new() }", "src/b/c.rs"),
            ("fn f() { super::b::d::g() }", "src/b/d.rs"),
            ("mod inner { fn f() { super::super::b::c::g() } }", "src/b/c.rs"),
            ("use crate::b;", "src/b/mod.rs"),
        ] {
            let mut files = vec![("src/a.rs", text)];
            files.extend(others);
            assert_eq!(ties(&files), [pair("src/a.rs", expected)], "{text}");
        }
        let own = [
            ("src/a/mod.rs", "mod b; pub use b::T; fn f() { b::g() }"),
            ("src/a/b.rs", "use std::fmt; use self::x::Y;"),
        ];
        assert_eq!(ties(&own), [pair("src/a/mod.rs", "src/a/b.rs")], "the code counts, the table of contents does not");
    }

    #[test]
    fn circles_are_found_in_folders_of_any_depth() {
        let nested = [
            ("src/a/mod.rs", "mod b; mod c; pub use b::B; pub use c::C;"),
            ("src/a/b.rs", "use super::C;"),
            ("src/a/c.rs", "use crate::{\n x,\n a::B,\n};"),
        ];
        let circle =
            |folder: &str, entries: &[&str]| (folder.to_owned(), entries.iter().map(|e| e.to_string()).collect());
        assert_eq!(circles(&nested), [circle("src/a", &["b", "c"])]);
        let through_the_head =
            [("src/a/mod.rs", "mod b; fn f() { b::g() } pub struct S;"), ("src/a/b.rs", "use super::S;")];
        assert_eq!(circles(&through_the_head), [circle("src/a", &["b", "mod"])]);
        let between_folders = [
            ("src/a/mod.rs", ""),
            ("src/a/b/mod.rs", "mod x;"),
            ("src/a/b/x.rs", "use super::super::c::y::Y;"),
            ("src/a/c/y.rs", "use crate::a::d::D;"),
            ("src/a/d.rs", "fn f() { super::b::x::g() }"),
        ];
        assert_eq!(circles(&between_folders), [circle("src/a", &["b", "c", "d"])]);
        let top = [("src/a.rs", "use super::b;"), ("src/b.rs", "use super::{a};")];
        assert_eq!(circles(&top), [circle("src", &["a", "b"])]);
    }

    #[test]
    fn a_file_with_its_own_folder_and_its_tests_make_no_circle() {
        let files = [
            ("src/a/mod.rs", "mod b; mod c;\n#[cfg(test)]\nmod tests { use super::c::C; use super::*; }"),
            ("src/a/b.rs", "use super::c::C;\n#[cfg(test)]\nmod tests;"),
            ("src/a/b/tests.rs", "use super::*; use crate::a::c;"),
            ("src/a/c.rs", "#[cfg(test)]\nmod tests { use crate::a::b::B; }"),
        ];
        assert!(circles(&files).is_empty(), "{:?}", circles(&files));
    }
}
