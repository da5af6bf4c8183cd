//! Format of an answer.

use axum::http::HeaderMap;
use axum::http::header::ACCEPT;
use axum::http::request::Parts;

use super::call_id::CallId;
use sterling_api::ARROW_STREAM;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Json,
    /// Arrow, with the call id for the stream's metadata.
    Arrow(String),
}

impl Form {
    /// Selects the format by the `Accept` header: Arrow if it is named with at least the weight of JSON (RFC 9110, 12.5.1), else
    /// JSON.
    pub(super) fn of(head: &Parts) -> Self {
        match accepts_arrow(&head.headers) {
            true => Form::Arrow(CallId::of(&head.extensions)),
            false => Form::Json,
        }
    }
}

fn accepts_arrow(headers: &HeaderMap) -> bool {
    let (named, arrow) = weight(headers, ARROW_STREAM);
    named == Precision::Named && arrow > 0.0 && arrow >= weight(headers, "application/json").1
}

/// Specificity with which a media range matches a media type.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
enum Precision {
    #[default]
    Not,
    Any,
    Kind,
    Named,
}

/// Returns the specificity and weight of a media type, from its most specific matching range.
fn weight(headers: &HeaderMap, media: &str) -> (Precision, f32) {
    let texts = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let of_range = |range: &str| {
        let mut parts = range.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let kind = media.split('/').next().unwrap_or_default();
        let precision = if name.eq_ignore_ascii_case(media) {
            Precision::Named
        } else if name.strip_suffix("/*").is_some_and(|of| of.eq_ignore_ascii_case(kind)) {
            Precision::Kind
        } else if name == "*/*" {
            Precision::Any
        } else {
            Precision::Not
        };
        let weight = parts.find_map(|part| part.strip_prefix("q=").or(part.strip_prefix("Q=")));
        (precision, weight.map_or(1.0, |weight| weight.parse().unwrap_or(0.0)))
    };
    let ranges =
        texts.flat_map(|text| text.split(',')).map(of_range).filter(|(precision, _)| *precision != Precision::Not);
    ranges.fold((Precision::Not, 0.0), |best, range| if range.0 > best.0 { range } else { best })
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn arrow_is_requested_by_its_media_type() {
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
            ("application/vnd.apache.arrow.stream;q=0.5, application/json", false),
            ("application/json;q=1, application/vnd.apache.arrow.stream;q=0.9", false),
            ("application/vnd.apache.arrow.stream;q=0.5, */*;q=0.8", false),
            ("application/vnd.apache.arrow.stream;q=0.5, application/*;q=0.4, */*", true),
            ("application/vnd.apache.arrow.stream, application/json", true),
            ("application/vnd.apache.arrow.stream, */*", true),
            ("application/vnd.apache.arrow.stream;q=0.5, text/*", true),
            ("*/*", false),
            ("", false),
        ] {
            let headers = HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static(accept))]);
            assert_eq!(accepts_arrow(&headers), expected, "{accept}");
        }
        assert!(!accepts_arrow(&HeaderMap::new()));
    }
}
