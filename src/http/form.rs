//! The form in which a caller wants to read an answer.

use axum::extract::Request;
use axum::http::HeaderMap;
use axum::http::header::ACCEPT;

use super::call_id::CallId;
use super::wire::ARROW_STREAM;

/// JSON, or Arrow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Json,
    /// With the call's id, which lies in the stream.
    Arrow(String),
}

impl Form {
    /// What the header `Accept` of a request asks for: Arrow where it names it, JSON in all other cases.
    pub(super) fn of(request: &Request) -> Self {
        match names_arrow(request.headers()) {
            true => Form::Arrow(CallId::of(request)),
            false => Form::Json,
        }
    }
}

fn names_arrow(headers: &HeaderMap) -> bool {
    let ranges =
        headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).flat_map(|text| text.split(','));
    let is_arrow = |range: &str| {
        let mut parts = range.split(';').map(str::trim);
        let is_named = parts.next().is_some_and(|name| name.eq_ignore_ascii_case(ARROW_STREAM));
        let weight = parts.find_map(|part| part.strip_prefix("q=").or(part.strip_prefix("Q=")));
        is_named && weight.is_none_or(|weight| weight.parse::<f32>().is_ok_and(|weight| weight > 0.0))
    };
    ranges.into_iter().any(is_arrow)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn arrow_is_asked_for_by_its_name() {
        for (accept, expected) in [
            ("application/vnd.apache.arrow.stream", true),
            ("Application/Vnd.Apache.Arrow.Stream", true),
            ("application/json;q=0.5, application/vnd.apache.arrow.stream", true),
            ("application/vnd.apache.arrow.stream; q=0.1", true),
            ("application/vnd.apache.arrow.stream;q=0", false),
            ("application/vnd.apache.arrow.stream;q=0.000", false),
            ("application/vnd.apache.arrow.stream;q=x", false),
            ("application/vnd.apache.arrow.file", false),
            ("application/*", false),
            ("*/*", false),
            ("", false),
        ] {
            let headers = HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static(accept))]);
            assert_eq!(names_arrow(&headers), expected, "{accept}");
        }
        assert!(!names_arrow(&HeaderMap::new()));
    }
}
