//! Content types of request bodies.

use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};

use super::answer::Rejection;
use sterling_api::ARROW_STREAM;

/// Content type of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyType {
    Json,
    /// JSON objects, one per line.
    Lines,
    /// Stream of Arrow's IPC format.
    Arrow,
}

impl BodyType {
    /// Reads the content type from the header, if it is JSON or one of `others`.
    ///
    /// # Errors
    /// 415 with the accepted types.
    pub(super) fn of(headers: &HeaderMap, others: &[BodyType]) -> Result<Self, Rejection> {
        let Some(kind) = headers.get(CONTENT_TYPE) else { return Ok(BodyType::Json) };
        let essence = kind.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim();
        let mut taken = std::iter::once(&BodyType::Json).chain(others);
        if let Some(sent) = taken.find(|sent| sent.names().iter().any(|name| name.eq_ignore_ascii_case(essence))) {
            return Ok(*sent);
        }
        let expected: Vec<&str> = std::iter::once(&BodyType::Json).chain(others).map(|sent| sent.names()[0]).collect();
        let detail = format!("content type {kind:?}: expected {}", expected.join(" or "));
        Err(Rejection::http(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", detail))
    }

    fn names(self) -> &'static [&'static str] {
        match self {
            // curl's `-d` sends the form type by default.
            BodyType::Json => &["application/json", "application/x-www-form-urlencoded"],
            BodyType::Lines => &["application/x-ndjson", "application/jsonl"],
            BodyType::Arrow => &[ARROW_STREAM],
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn bodies_are_parsed_by_their_content_type() {
        let of = |kind: &'static str, others: &[BodyType]| {
            BodyType::of(&HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(kind))]), others).ok()
        };
        for (kind, expected) in [
            ("application/json", Some(BodyType::Json)),
            ("Application/JSON; charset=utf-8", Some(BodyType::Json)),
            ("application/x-www-form-urlencoded", Some(BodyType::Json)),
            ("application/vnd.apache.arrow.stream", Some(BodyType::Arrow)),
            ("application/vnd.apache.arrow.stream;x=y", Some(BodyType::Arrow)),
            ("application/jsonl", None),
            ("application/vnd.apache.arrow.file", None),
            ("text/plain", None),
            ("", None),
        ] {
            assert_eq!(of(kind, &[BodyType::Arrow]), expected, "{kind}");
        }
        assert_eq!(of("application/x-ndjson", &[BodyType::Lines, BodyType::Arrow]), Some(BodyType::Lines));
        assert_eq!(of(ARROW_STREAM, &[]), None);
        assert_eq!(BodyType::of(&HeaderMap::new(), &[]).ok(), Some(BodyType::Json));
    }
}
