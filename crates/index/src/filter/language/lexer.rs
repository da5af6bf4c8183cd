//! Lexer: splits the text into tokens with byte offsets.

use sterling_core::error::{Error, Result};

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    /// Unquoted word or number.
    Word(String),
    /// Quoted string; never a keyword.
    Quoted(String),
    /// One of `( ) , : ! & | < <= > >= = !=`.
    Sign(&'static str),
    End,
}

impl Token {
    /// Returns the token as errors show it.
    pub(super) fn shown(&self) -> String {
        match self {
            Token::Word(text) => format!("`{text}`"),
            Token::Quoted(text) => format!("\"{text}\""),
            Token::Sign(sign) => format!("`{sign}`"),
            Token::End => "the end".into(),
        }
    }

    pub(super) fn is_keyword(&self, keyword: &str) -> bool {
        matches!(self, Token::Word(text) if text.eq_ignore_ascii_case(keyword))
    }
}

const KEYWORDS: [&str; 4] = ["and", "or", "not", "in"];
/// Operators in the order of matching, longer ones first; `&&`, `||` and `==` are alternative spellings.
const SIGNS: [(&str, &str); 16] = [
    ("<=", "<="),
    (">=", ">="),
    ("!=", "!="),
    ("==", "="),
    ("&&", "&"),
    ("||", "|"),
    ("(", "("),
    (")", ")"),
    (",", ","),
    (":", ":"),
    ("!", "!"),
    ("&", "&"),
    ("|", "|"),
    ("<", "<"),
    (">", ">"),
    ("=", "="),
];

fn in_word(c: char) -> bool {
    c.is_alphanumeric() || "_-./+~@#%*$".contains(c)
}

/// Returns true if `text` needs no quotes.
pub(super) fn is_word(text: &str) -> bool {
    !text.is_empty() && text.chars().all(in_word) && !KEYWORDS.iter().any(|k| text.eq_ignore_ascii_case(k))
}

pub(super) fn tokens(text: &str) -> Result<Vec<(Token, usize)>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        let start = at;
        if c.is_whitespace() {
            at += c.len_utf8();
        } else if c == '"' {
            let (string, end) = quoted(text, start)?;
            found.push((Token::Quoted(string), start));
            at = end;
        } else if let Some((spelling, sign)) = SIGNS.iter().find(|(s, _)| text[at..].starts_with(s)) {
            found.push((Token::Sign(sign), start));
            at += spelling.len();
        } else if in_word(c) {
            at += text[at..].find(|c| !in_word(c)).unwrap_or(text.len() - at);
            found.push((Token::Word(text[start..at].into()), start));
        } else {
            return Err(Error::invalid(format!(
                "filter: got `{c}` at byte {start}, expected a term, `(` or an operator"
            ))
            .at(start));
        }
    }
    found.push((Token::End, text.len()));
    Ok(found)
}

fn quoted(text: &str, start: usize) -> Result<(String, usize)> {
    let mut string = String::new();
    let mut chars = text[start + 1..].char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Ok((string, start + 1 + at + 1)),
            '\\' => match chars.next() {
                Some((_, 'n')) => string.push('\n'),
                Some((_, 't')) => string.push('\t'),
                Some((_, c @ ('"' | '\\'))) => string.push(c),
                other => {
                    let offset = start + 1 + at;
                    let got = other.map_or("the end".to_string(), |(_, c)| format!("`\\{c}`"));
                    return Err(Error::invalid(format!(
                        "filter: got {got} at byte {offset}, expected one of \\\" \\\\ \\n \\t"
                    ))
                    .at(offset));
                }
            },
            c => string.push(c),
        }
    }
    Err(Error::invalid(format!("filter: the string that opens at byte {start} has no end, expected `\"`")).at(start))
}
