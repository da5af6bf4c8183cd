//! Query parameters of calls.

use std::borrow::Cow;
use std::str::FromStr;

use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequestParts, Query};
use axum::http::Uri;
use axum::http::request::Parts;
use percent_encoding::percent_decode_str;
use serde::de::DeserializeOwned;

use super::answer::Rejection;
use sterling_core::error::{Error, Result, ShortNumber};

/// All query parameters of a call; invalid ones are answered with a problem.
pub struct Parameters<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Parameters<T> {
    type Rejection = Rejection;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Rejection> {
        let Query(parameters) = Query::from_request_parts(parts, state)
            .await
            .map_err(|e: QueryRejection| unread(&parts.uri, &e.body_text()))?;
        Ok(Parameters(parameters))
    }
}

/// Turns the library's message about a parameter into an error with the received value.
fn unread(uri: &Uri, reported: &str) -> Error {
    let reported = reported.rsplit_once("query string: ").map_or(reported, |(_, reported)| reported);
    let found = reported.split_once(": ").and_then(|(name, why)| {
        let (name, text) = pairs(uri).find(|(of, _)| of == name)?;
        Some(format!("{name}: got `{text}`: {why}"))
    });
    Error::invalid(found.unwrap_or_else(|| format!("parameters: {reported}")))
}

/// Parses an integer query parameter.
pub(super) fn number(uri: &Uri, name: &str) -> Result<Option<u64>> {
    parameter(uri, name, "one whole number")
}

/// Parses a query parameter that may occur once.
pub(super) fn parameter<T: FromStr>(uri: &Uri, name: &str, expected: &str) -> Result<Option<T>> {
    let mut texts = pairs(uri).filter(|(key, _)| key == name).map(|(_, text)| text);
    let Some(text) = texts.next() else { return Ok(None) };
    match text.parse() {
        Ok(value) if texts.next().is_none() => Ok(Some(value)),
        _ => Err(Error::invalid(format!("{name}: got `{text}`, expected {expected}"))),
    }
}

/// Parses the least share of the items that an answer must cover.
pub(super) fn min_coverage(uri: &Uri) -> Result<Option<f64>> {
    match parameter::<f64>(uri, "min_coverage", "a number from 0 to 1")? {
        Some(other) if !(0.0..=1.0).contains(&other) => {
            Err(Error::invalid(format!("min_coverage: got {}, expected 0 to 1", ShortNumber(other))))
        }
        asked => Ok(asked),
    }
}

/// Rejects unknown parameters, since ignoring them would hide mistakes.
pub(super) fn check_known(uri: &Uri, known: &[&str]) -> Result<()> {
    let Some((name, _)) = pairs(uri).find(|(name, _)| !known.contains(&&**name)) else { return Ok(()) };
    let listed = known.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let expected = match known.len() {
        0 => "this call takes none".to_owned(),
        1 => format!("expected {listed}"),
        _ => format!("expected one of {listed}"),
    };
    Err(Error::invalid(format!("parameters: unknown parameter `{name}`, {expected}")))
}

/// Returns the query parameters as names and values. The query is split before it is decoded, like paths; `+` is a
/// space, as in forms.
fn pairs(uri: &Uri) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, str>)> {
    let parts = uri.query().unwrap_or_default().split('&').filter(|part| !part.is_empty());
    parts.map(|part| part.split_once('=').unwrap_or((part, ""))).map(|(name, text)| (decoded(name), decoded(text)))
}

fn decoded(text: &str) -> Cow<'_, str> {
    match text.contains(['%', '+']) {
        true => percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned().into(),
        false => text.into(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn parameters_are_read_or_rejected_but_never_ignored() {
        let number = |query: &str| number(&format!("/x?{query}").parse().unwrap(), "n").map_err(|e| e.to_string());
        for (query, expected) in [
            ("", None),
            ("m=1", None),
            ("n=0", Some(0)),
            ("&m=2&&n=7&", Some(7)),
            ("n=%31", Some(1)),
            ("%6E=1", Some(1)),
            ("m=1%26n=2&n=3", Some(3)),
        ] {
            assert_eq!(number(query), Ok(expected), "{query}");
        }
        for (query, came) in
            [("n", ""), ("n=", ""), ("n=1&%6e=1", "1"), ("n=%3", "%3"), ("n=-1", "-1"), ("n=1+", "1 "), ("n&n=3", "")]
        {
            assert_eq!(number(query), Err(format!("n: got `{came}`, expected one whole number")), "{query}");
        }
        for (text, is_right) in
            [("0", true), ("1", true), ("0.95", true), ("1.01", false), ("-0.1", false), ("NaN", false)]
        {
            let asked = min_coverage(&format!("/x?min_coverage={text}").parse().unwrap());
            assert_eq!(asked.is_ok(), is_right, "{text}");
        }
    }
}
