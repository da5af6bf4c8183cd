//! Tokenizer for Rust source, which extracts paths and types for the checks.

/// A word or sign of a source file, with its line. Comments, texts and lifetimes are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    pub text: String,
    pub line: usize,
}

/// A path that a file names: `crate::a::B`, `super::c`, `child::d`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub segments: Vec<String>,
    pub line: usize,
    /// Number of inline modules around it: `super` leaves these first.
    pub inside: usize,
    pub kind: Kind,
    /// True inside a test module.
    pub in_tests: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `use a::b;`
    Use,
    /// `use a::b as c;`
    Renamed,
    /// `pub use a::b;`, with any visibility.
    Export,
    /// `a::b` in code.
    Inline,
}

/// A parsed file.
#[derive(Debug, Default)]
pub struct Source {
    pub paths: Vec<Named>,
    /// Names of the types that the file defines.
    pub types: Vec<String>,
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns the end of a text that may be raw: `r##"..."##` ends with the same number of marks; a plain text may have escapes.
fn after_text(chars: &[char], quote: usize, marks: Option<usize>) -> usize {
    let mut at = quote + 1;
    while at < chars.len() {
        match (chars[at], marks) {
            ('\\', None) => at += 1,
            ('"', None) => return at + 1,
            ('"', Some(n)) if chars[at + 1..].iter().take(n).filter(|c| **c == '#').count() == n => return at + 1 + n,
            _ => {}
        }
        at += 1;
    }
    at
}

/// Returns the end of a comment; those between `/*` and `*/` nest.
fn after_comment(chars: &[char], start: usize) -> usize {
    let mut at = start + 2;
    if chars[start + 1] == '/' {
        while at < chars.len() && chars[at] != '\n' {
            at += 1;
        }
        return at;
    }
    let mut depth = 1;
    while at < chars.len() && depth > 0 {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    at
}

/// Returns the words and signs of a text.
pub fn tokens(text: &str) -> Vec<Token> {
    let chars: Vec<char> = text.chars().collect();
    let (mut found, mut at, mut line) = (Vec::new(), 0, 1);
    while at < chars.len() {
        let (c, next) = (chars[at], chars.get(at + 1).copied());
        let end = match c {
            '/' if matches!(next, Some('/' | '*')) => after_comment(&chars, at),
            '"' => after_text(&chars, at, None),
            '\'' if next == Some('\\') => {
                let close = chars[at + 3..].iter().position(|c| *c == '\'').map_or(chars.len(), |n| at + 4 + n);
                close.min(chars.len())
            }
            '\'' if chars.get(at + 2) == Some(&'\'') => at + 3,
            // A lifetime or a label.
            '\'' => at + 1 + chars[at + 1..].iter().take_while(|c| is_word(**c)).count(),
            c if is_word(c) => {
                let mut end = at + chars[at..].iter().take_while(|c| is_word(**c)).count();
                let word: String = chars[at..end].iter().collect();
                let marks = chars[end..].iter().take_while(|c| **c == '#').count();
                let opens = chars.get(end + marks) == Some(&'"');
                match word.as_str() {
                    "r" | "br" | "cr" if opens => end = after_text(&chars, end + marks, Some(marks)),
                    "b" | "c" if opens && marks == 0 => end = after_text(&chars, end, None),
                    // A raw name.
                    "r" if marks == 1 => end += 1,
                    _ => found.push(Token { text: word, line }),
                }
                end
            }
            c if c.is_whitespace() => at + 1,
            c => {
                let pair: String = [Some(c), next].into_iter().flatten().collect();
                let sign = if ["::", "->", "=>"].contains(&pair.as_str()) { pair } else { c.to_string() };
                let end = at + sign.len();
                found.push(Token { text: sign, line });
                end
            }
        };
        line += chars[at..end].iter().filter(|c| **c == '\n').count();
        at = end;
    }
    found
}

/// Parses a file.
pub fn read(text: &str) -> Source {
    let mut reader = Reader { tokens: tokens(text), at: 0, blocks: Vec::new(), source: Source::default() };
    while reader.at < reader.tokens.len() {
        reader.step();
    }
    reader.source
}

/// Kind of block that an open brace belongs to.
#[derive(Clone, Copy, PartialEq)]
enum Block {
    Module {
        of_tests: bool,
    },
    /// Types in it are associated ones.
    Members,
    Other,
}

struct Reader {
    tokens: Vec<Token>,
    at: usize,
    blocks: Vec<Block>,
    source: Source,
}

impl Reader {
    fn text(&self, at: usize) -> &str {
        self.tokens.get(at).map_or("", |token| &token.text)
    }

    fn before(&self, back: usize) -> &str {
        self.at.checked_sub(back).map_or("", |at| self.text(at))
    }

    fn is_name(&self, at: usize) -> bool {
        self.text(at).starts_with(|c: char| c.is_alphabetic() || c == '_')
    }

    fn step(&mut self) {
        match self.text(self.at) {
            "use" if self.before(1) != "." => self.uses(),
            "mod" if self.is_name(self.at + 1) && self.text(self.at + 2) == "{" => {
                let of_tests = self.is_of_tests();
                self.blocks.push(Block::Module { of_tests });
                self.at += 3;
            }
            "impl" | "trait" if self.is_item() => self.members(),
            "struct" | "enum" | "union" | "type" if self.is_item() && self.is_name(self.at + 1) => {
                self.defines();
                self.at += 2;
            }
            "{" => {
                self.blocks.push(Block::Other);
                self.at += 1;
            }
            "}" => {
                self.blocks.pop();
                self.at += 1;
            }
            _ if self.is_name(self.at) && self.text(self.at + 1) == "::" && self.before(1) != "::" => self.inline(),
            _ => self.at += 1,
        }
    }

    /// Returns whether an item may start here: not `-> impl Trait`, `&mut impl Trait`, `r.type` or a path.
    fn is_item(&self) -> bool {
        ["", ";", "}", "{", "]", ")", "pub", "unsafe", "default"].contains(&self.before(1))
    }

    fn is_of_tests(&self) -> bool {
        let marks: Vec<&str> = (1..8).rev().map(|back| self.before(back)).collect();
        marks.join("").contains("cfg(test)]")
    }

    fn in_tests(&self) -> bool {
        self.blocks.contains(&Block::Module { of_tests: true })
    }

    fn inside(&self) -> usize {
        self.blocks.iter().filter(|b| matches!(b, Block::Module { .. })).count()
    }

    fn is_visible(&self) -> bool {
        self.before(1) == "pub"
            || self.before(1) == ")" && self.tokens[..self.at].iter().rev().take(8).any(|t| t.text == "pub")
    }

    fn defines(&mut self) {
        if self.blocks.contains(&Block::Members) || self.in_tests() || self.blocks.contains(&Block::Other) {
            return;
        }
        self.source.types.push(self.tokens[self.at + 1].text.clone());
    }

    /// Reads the head of an `impl` or a `trait`, up to its brace, with its paths.
    fn members(&mut self) {
        if self.text(self.at) == "trait" {
            self.defines();
        }
        self.at += 1;
        while self.at < self.tokens.len() && !["{", ";"].contains(&self.text(self.at)) {
            match self.is_name(self.at) && self.text(self.at + 1) == "::" && self.before(1) != "::" {
                true => self.inline(),
                false => self.at += 1,
            }
        }
        if self.text(self.at) == "{" {
            self.blocks.push(Block::Members);
        }
        self.at += 1;
    }

    fn uses(&mut self) {
        let kind = if self.is_visible() { Kind::Export } else { Kind::Use };
        self.at += 1;
        self.tree(&[], kind);
    }

    /// Reads a use tree: `a::b`, `a::{b, c::{d, self}, *}`, `a as b`.
    fn tree(&mut self, above: &[String], kind: Kind) {
        let mut segments = above.to_vec();
        let line = self.tokens.get(self.at).map_or(0, |t| t.line);
        loop {
            match self.text(self.at) {
                "::" => self.at += 1,
                "{" => {
                    self.at += 1;
                    while !["}", ";", ""].contains(&self.text(self.at)) {
                        self.tree(&segments, kind);
                        if self.text(self.at) == "," {
                            self.at += 1;
                        }
                    }
                    self.at += 1;
                    return;
                }
                "as" => {
                    self.at += 2;
                    let kind = if kind == Kind::Use { Kind::Renamed } else { kind };
                    return self.names(segments, line, kind);
                }
                "self" if !segments.is_empty() => {
                    self.at += 1;
                }
                "," | "}" | ";" | "" => return self.names(segments, line, kind),
                word => {
                    segments.push(word.to_owned());
                    self.at += 1;
                }
            }
        }
    }

    fn inline(&mut self) {
        let line = self.tokens[self.at].line;
        let mut segments = vec![self.text(self.at).to_owned()];
        self.at += 1;
        while self.text(self.at) == "::" && self.is_name(self.at + 1) {
            segments.push(self.text(self.at + 1).to_owned());
            self.at += 2;
        }
        self.names(segments, line, Kind::Inline);
    }

    fn names(&mut self, segments: Vec<String>, line: usize, kind: Kind) {
        let (inside, in_tests) = (self.inside(), self.in_tests());
        self.source.paths.push(Named { segments, line, inside, kind, in_tests });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(text: &str) -> Vec<String> {
        read(text).paths.iter().map(|p| p.segments.join("::")).collect()
    }

    #[test]
    fn groups_over_several_lines_are_read() {
        let text = "use crate::{\n    bloom::{self, Plan},\n    // crate::not\n    ivf as index,\n    wire::*,\n};";
        assert_eq!(paths(text), ["crate::bloom", "crate::bloom::Plan", "crate::ivf", "crate::wire::*"]);
        assert_eq!(read(text).paths[1].line, 2);
        assert_eq!(paths("pub(crate) use crate :: a\n::\nb;"), ["crate::a::b"]);
        assert_eq!(paths("use {crate::a, super::b::{c::d, e}};"), ["crate::a", "super::b::c::d", "super::b::e"]);
    }

    #[test]
    fn relative_paths_are_read_with_the_modules_around_them() {
        let found = read(
            "use super::a;\n#[cfg(test)]\nmod tests {\n use super::*;\n fn f() { super::super::b::g() } }\nuse self::c;",
        );
        let of = |n: usize| {
            let Named { segments, inside, in_tests, .. } = &found.paths[n];
            (segments.join("::"), *inside, *in_tests)
        };
        assert_eq!(of(0), ("super::a".into(), 0, false));
        assert_eq!(of(1), ("super::*".into(), 1, true));
        assert_eq!(of(2), ("super::super::b::g".into(), 1, true));
        assert_eq!(of(3), ("self::c".into(), 0, false));
    }

    #[test]
    fn paths_in_code_are_read_and_those_in_texts_and_comments_are_not() {
        let text = r##"
            //! crate::a
            /* crate::b /* crate::c */ crate::d */
            fn f<'a>(x: &'a crate::e::X) -> impl Fn(u8) -> crate::f::Y {
                let quoted = ('"', '\'', "crate::g \" crate::h", b"crate::i", r#"crate::j " crate::k"#, '\\');
                macro_of!($crate::l::m, <crate::n::T as crate::o::U>::V)
            }
            impl crate::p::Trait for S {}
        "##;
        let expected = ["e::X", "f::Y", "l::m", "n::T", "o::U", "p::Trait"].map(|p| format!("crate::{p}"));
        assert_eq!(paths(text), expected);
    }

    #[test]
    fn kinds_of_uses_are_distinguished() {
        let kinds: Vec<Kind> =
            read("use a::B; pub use a::C; pub(super) use a::D; use a::E as F; fn f() { a::g(); use a::H; }")
                .paths
                .iter()
                .map(|p| p.kind)
                .collect();
        assert_eq!(kinds, [Kind::Use, Kind::Export, Kind::Export, Kind::Renamed, Kind::Inline, Kind::Use]);
    }

    #[test]
    fn types_are_those_of_items() {
        let text = "pub struct A; enum B {} pub(crate) trait C { type D; } impl I for A { type E = u8; }\
            fn f(x: impl J) -> impl K { struct L; let r = x.r#type; } pub type M = u8; mod tests { pub union N {} }\
            #[cfg(test)] mod tests { pub struct O; } #[derive(Debug)] pub struct P<T>(T);";
        assert_eq!(read(text).types, ["A", "B", "C", "M", "N", "P"]);
    }
}
