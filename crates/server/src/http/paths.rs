//! Path patterns of the table of calls, such as `/v1/models/{model}/versions/{version}:load`, and the names in them.
//!
//! `{name}` matches a text without a colon, because a verb follows a colon; `{name*}` matches any text. A path is split first and
//! then decoded, once: escaped characters neither split it nor hide a verb.

use std::borrow::Cow;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use percent_encoding::percent_decode_str;

use super::answer::Rejection;
use sterling_core::error::{Error, Result};
use sterling_core::request::VersionSelector;

/// Decoded names in the path of a call, in order.
#[derive(Clone)]
pub(super) struct PathNames {
    /// Pattern of the path in the table of calls.
    path: &'static str,
    names: Vec<String>,
}

impl PathNames {
    /// Creates the names of a path.
    pub(super) fn new(path: &'static str, names: Vec<String>) -> Self {
        PathNames { path, names }
    }

    /// Returns the first name, which is the model's if the pattern names a model.
    pub(super) fn first(&self) -> Option<&str> {
        self.names.first().map(String::as_str)
    }
}

/// Split and decoded path.
#[derive(Debug)]
pub(super) struct Segments<'a>(Vec<Cow<'a, str>>);

impl<'a> Segments<'a> {
    /// Splits and decodes a path; `None` if a segment is not UTF-8.
    pub(super) fn of(path: &'a str) -> Option<Self> {
        let decoded = path.split('/').map(|segment| percent_decode_str(segment).decode_utf8().ok());
        decoded.collect::<Option<_>>().map(Segments)
    }

    /// Returns the names in this path if it matches `pattern`.
    pub(super) fn names(&self, pattern: &str) -> Option<Vec<String>> {
        let wanted = pattern.split('/');
        let mut names = Vec::new();
        let mut count = 0;
        for (want, came) in wanted.zip(&self.0) {
            count += 1;
            let Some((_, verb)) = want.strip_prefix('{').and_then(|rest| rest.split_once('}')) else {
                if want == came {
                    continue;
                }
                return None;
            };
            let name = match (verb.strip_prefix(':'), came.rsplit_once(':')) {
                (Some(verb), Some((name, end))) if end == verb => name,
                (None, None) => came,
                (None, Some(_)) if want.ends_with("*}") => came,
                _ => return None,
            };
            if name.is_empty() {
                return None;
            }
            names.push(name.to_owned());
        }
        (count == self.0.len() && count == pattern.split('/').count()).then_some(names)
    }

    /// Splits off the verb at the end of the path.
    pub(super) fn verb(self) -> Option<(String, Segments<'a>)> {
        let Segments(mut parts) = self;
        let last = parts.pop()?;
        let (name, verb) = last.rsplit_once(':')?;
        let verb = verb.to_owned();
        parts.push(Cow::Owned(name.to_owned()));
        Some((verb, Segments(parts)))
    }
}

/// Type that the names of a path are parsed into.
pub trait OfNames: Sized {
    /// Parses the names.
    ///
    /// # Errors
    /// `Invalid` for a name of the wrong kind.
    fn of(names: &[String]) -> Result<Self>;
}

fn at(names: &[String], place: usize) -> Result<&str> {
    names
        .get(place)
        .map(String::as_str)
        .ok_or_else(|| Error::internal(format!("the path of a call has no name {place}")))
}

impl OfNames for String {
    fn of(names: &[String]) -> Result<Self> {
        at(names, 0).map(str::to_owned)
    }
}

impl OfNames for (String, String) {
    fn of(names: &[String]) -> Result<Self> {
        Ok((at(names, 0)?.to_owned(), at(names, 1)?.to_owned()))
    }
}

/// Model and version. A version has one valid spelling, so that caches and path rules cannot be bypassed.
impl OfNames for (String, u64) {
    fn of(names: &[String]) -> Result<Self> {
        let (model, text) = (at(names, 0)?, at(names, 1)?);
        let version = text.parse().ok().filter(|version: &u64| version.to_string() == text).ok_or_else(|| {
            Error::invalid(format!(
                "version `{text}`: expected a whole number, as `GET /v1/models/{model}/versions` lists"
            ))
        })?;
        Ok((model.to_owned(), version))
    }
}

/// Model and item id.
impl OfNames for (String, i64) {
    fn of(names: &[String]) -> Result<Self> {
        let (model, text) = (at(names, 0)?, at(names, 1)?);
        let id = text.parse().map_err(|_| Error::invalid(format!("item `{text}`: expected a whole number")))?;
        Ok((model.to_owned(), id))
    }
}

/// Model and version that the path of a call names; the active version if the path names neither a version nor a label.
#[derive(Clone)]
pub struct Target {
    pub(super) model: String,
    version: Option<u64>,
    label: Option<String>,
}

impl Target {
    fn of(path: &PathNames) -> Result<Self> {
        let names = &path.names;
        if path.path.contains("/{version}") {
            let (model, version) = OfNames::of(names)?;
            return Ok(Target { model, version: Some(version), label: None });
        }
        let label = path.path.contains("/{label}").then(|| at(names, 1)).transpose()?;
        Ok(Target { model: String::of(names)?, version: None, label: label.map(str::to_owned) })
    }

    /// Returns the selected version of the model.
    pub(super) fn selected_version(&self) -> VersionSelector<'_> {
        match (self.version, &self.label) {
            (Some(version), _) => VersionSelector::Version(version),
            (None, Some(label)) => VersionSelector::Label(label),
            (None, None) => VersionSelector::Active,
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Target {
    type Rejection = Rejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Rejection> {
        let path = parts.extensions.get::<PathNames>();
        Ok(Target::of(path.ok_or_else(|| Error::internal("the path of a call was not matched"))?)?)
    }
}

/// Names in the path of a call.
pub struct Names<T>(pub(super) T);

impl<T: OfNames, S: Send + Sync> FromRequestParts<S> for Names<T> {
    type Rejection = Rejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Rejection> {
        let names = parts.extensions.get::<PathNames>().map(|path| path.names.as_slice());
        Ok(Names(T::of(names.unwrap_or_default())?))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn paths_are_split_before_they_are_decoded() {
        let names = |path: &str, pattern: &str| Segments::of(path).unwrap().names(pattern);
        for (path, pattern, expected) in [
            ("/v1/models/a", "/v1/models/{model}", Some(vec!["a"])),
            ("/v1/models/a", "/v1/models/{model}:load", None),
            ("/v1/models/a:load", "/v1/models/{model}", None),
            ("/v1/models/a:load", "/v1/models/{model}:load", Some(vec!["a"])),
            ("/v1/models/a%3Aload", "/v1/models/{model}:load", Some(vec!["a"])),
            ("/v1/models/a:b:load", "/v1/models/{model}:load", Some(vec!["a:b"])),
            ("/v1/models/a:loads", "/v1/models/{model}:load", None),
            ("/v1/models/:load", "/v1/models/{model}:load", None),
            ("/v1/models/a%2Fb", "/v1/models/{model}", Some(vec!["a/b"])),
            ("/v1/models/a/", "/v1/models/{model}", None),
            ("/v1/models/", "/v1/models/{model}", None),
            ("/v1/models", "/v1/models/{model}", None),
            ("/v1//models", "/v1/models", None),
            ("/v1/%6dodels", "/v1/models", Some(vec![])),
            ("/", "/", Some(vec![])),
            ("//", "/", None),
            ("/a/columns/x:y", "/{model}/columns/{column*}", Some(vec!["a", "x:y"])),
        ] {
            let expected = expected.map(|names: Vec<&str>| names.into_iter().map(str::to_owned).collect());
            assert_eq!(names(path, pattern), expected, "{path} as {pattern}");
        }
        assert!(Segments::of("/v1/%ff").is_none());
    }

    #[test]
    fn numbers_in_paths_have_one_text() {
        let names = |id: &str| ["m".to_owned(), id.to_owned()];
        assert_eq!(<(String, u64)>::of(&names("3")).unwrap().1, 3);
        assert_eq!(<(String, i64)>::of(&names("-3")).unwrap().1, -3);
        for text in ["03", "+3", "-3", "", "3 ", "99999999999999999999"] {
            assert!(<(String, u64)>::of(&names(text)).is_err(), "{text}");
        }
        assert!(<(String, i64)>::of(&names("x")).is_err());
    }
}
