//! Problems: errors in the format of RFC 9457, limited to details that a caller may see.

use std::error::Error as _;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use sterling_core::error::{Error, Kind};

/// An error in the format of RFC 9457, sent as `application/problem+json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Type of the problem: `about:blank#` and the code.
    #[serde(rename = "type")]
    pub kind: String,
    /// HTTP status as text.
    pub title: String,
    /// HTTP status.
    pub status: u16,
    /// Received and expected value.
    pub detail: String,
    /// Stable code for programs.
    pub code: String,
    /// True if the same request may succeed later.
    pub retryable: bool,
    /// Byte offset in the invalid text, such as a filter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<usize>,
}

/// Returns the HTTP status of an error kind. No other code maps kinds to statuses.
pub fn status(kind: Kind) -> (u16, &'static str) {
    match kind {
        Kind::Invalid => (400, "Bad Request"),
        Kind::NotFound => (404, "Not Found"),
        Kind::Conflict => (409, "Conflict"),
        Kind::Gone => (410, "Gone"),
        Kind::Unsupported | Kind::TooCostly => (422, "Unprocessable Content"),
        Kind::Corrupt | Kind::Io | Kind::Internal => (500, "Internal Server Error"),
        Kind::Overloaded | Kind::NotReady | Kind::Unavailable | Kind::Partial => (503, "Service Unavailable"),
        Kind::DeadlineExceeded => (504, "Gateway Timeout"),
        Kind::NoSpace => (507, "Insufficient Storage"),
    }
}

impl From<&Error> for Problem {
    fn from(error: &Error) -> Self {
        let (status, title) = status(error.kind());
        let code = error.kind().name();
        Problem {
            kind: format!("about:blank#{code}"),
            title: title.into(),
            status,
            detail: detail(error),
            code: code.into(),
            retryable: error.kind().is_retryable(),
            offset: error.offset(),
        }
    }
}

/// Longest `detail`, in bytes: messages quote input, which may be as long as a body.
const DETAIL_BYTES_MAX: usize = 1000;

/// Returns the message for the caller. Errors of the server may contain its paths and node addresses, which belong in the log
/// only.
fn detail(error: &Error) -> String {
    let text = match error.kind() {
        Kind::Io | Kind::Internal => "the server failed; its log has details under this request's id".into(),
        Kind::Corrupt | Kind::NotReady | Kind::Unavailable | Kind::NoSpace | Kind::Partial => {
            without_places(&error.to_string())
        }
        // `NotFound` with a source is a missing file; other errors of this kind name input of the caller.
        Kind::NotFound if error.source().is_some() => without_places(&error.to_string()),
        _ => error.to_string(),
    };
    if text.len() <= DETAIL_BYTES_MAX {
        return text;
    }
    // Keeps the end of a long message too: many messages end with the location in the text.
    let head = text.floor_char_boundary(DETAIL_BYTES_MAX - 100);
    let tail = text.ceil_char_boundary(text.len() - 100);
    format!("{} ... {}", &text[..head], &text[tail..])
}

/// Removes folders from file names, and addresses of nodes.
pub fn without_places(text: &str) -> String {
    replaced(text, |name| if is_address(name) { "a node" } else { last_of(name) })
}

/// Removes folders from file paths but keeps addresses of nodes, for operators, who need the addresses but not the location of a
/// store.
pub fn without_folders(text: &str) -> String {
    replaced(text, |name| if name.starts_with(['/', '.']) { last_of(name) } else { name })
}

/// Replaces each word of a text.
fn replaced(text: &str, word_of: impl Fn(&str) -> &str) -> String {
    let is_mark = |c: char| c.is_whitespace() || "`'\"()[]<>,;=".contains(c);
    let mut out = String::with_capacity(text.len());
    for piece in text.split_inclusive(is_mark) {
        let word = piece.trim_end_matches(is_mark);
        let name = word.trim_end_matches([':', '.']);
        out.push_str(word_of(name));
        out.push_str(&word[name.len()..]);
        out.push_str(&piece[word.len()..]);
    }
    out
}

/// Returns the last component of a path.
fn last_of(name: &str) -> &str {
    name.trim_end_matches('/').rsplit('/').next().unwrap_or(name)
}

fn is_address(word: &str) -> bool {
    let port = |port: &str| !port.is_empty() && port.parse::<u16>().is_ok();
    word.contains("://") || word.rsplit_once(':').is_some_and(|(host, p)| !host.is_empty() && port(p))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_addresses_stay_here() {
        for (text, public) in [
            (
                "/srv/store/shop/3/index.safetensors: checksum 4, expected 5",
                "index.safetensors: checksum 4, expected 5",
            ),
            ("store/shop/3: the manifest names no `index.safetensors`", "3: the manifest names no `index.safetensors`"),
            ("table `items`: 10.0.0.1:6379: connection refused", "table `items`: a node: connection refused"),
            ("cluster redis://cache-0.cache:6379/: full", "cluster a node: full"),
            ("nodes [cache-0:6379, cache-1:6379]", "nodes [a node, a node]"),
            (
                "version 9 of model `tiny` is not in memory; there are: 1, 2",
                "version 9 of model `tiny` is not in memory; there are: 1, 2",
            ),
            ("call `:recall`: expected `:retrieve`", "call `:recall`: expected `:retrieve`"),
        ] {
            assert_eq!(without_places(text), public);
        }
        for (text, public) in [
            ("model `a`: /srv/store/a/wish.json: expected value", "model `a`: wish.json: expected value"),
            ("journal ../updates/a: 10.0.0.1:6379 is 3/4 full...", "journal a: 10.0.0.1:6379 is 3/4 full..."),
        ] {
            assert_eq!(without_folders(text), public);
        }
        let hidden = Problem::from(&Error::internal("slot 7 of /srv/store has no row"));
        assert!(!hidden.detail.contains("/srv"), "{}", hidden.detail);
        let hidden = Problem::from(&Error::io("/srv/x", std::io::Error::from(std::io::ErrorKind::NotFound)));
        assert!(hidden.status == 404 && !hidden.detail.contains("/srv"), "{}", hidden.detail);
    }

    #[test]
    fn details_of_problems_are_short_for_any_input() {
        let long = Error::invalid(format!("field `k`: got {}, expected less at line 3", "\u{fc}".repeat(1 << 20)));
        let detail = Problem::from(&long).detail;
        assert!(detail.len() <= DETAIL_BYTES_MAX + 10 && detail.starts_with("field `k`: got \u{fc}"));
        assert!(detail.ends_with("at line 3"));
    }

    #[test]
    fn every_kind_has_its_own_status_class() {
        for (kind, expected) in [
            (Kind::TooCostly, 422),
            (Kind::NoSpace, 507),
            (Kind::Overloaded, 503),
            (Kind::DeadlineExceeded, 504),
            (Kind::Conflict, 409),
        ] {
            assert_eq!(Problem::from(&Error::new(kind, "x")).status, expected);
        }
    }
}
