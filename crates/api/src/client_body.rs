//! Request bodies as a client writes them, from the typed requests of [`sterling_core::request`].

use serde::Serialize;
use serde_json::{Value, json};

use sterling_core::error::{Error, Result};
use sterling_core::request::{OnDegraded, Rank, Reading, Retrieve, User, Values};

/// Returns the body of a `:retrieve` that the server parses to this request.
///
/// # Errors
/// `Unsupported` for a user given by an embedding, which only servers exchange with each other.
pub fn retrieve_body(request: &Retrieve) -> Result<Value> {
    let mut body = json!({
        "filter": request.filter,
        "exclude": request.exclude,
        "k": request.k,
        "candidates": request.candidates,
        "query_candidates": request.query_candidates,
        "recall": request.recall,
        "probes": request.probes,
        "exact": request.exact,
    });
    add_shared(&mut body, &request.user, &request.reading)?;
    Ok(body)
}

/// Returns the body of a `:rank` that the server parses to this request.
///
/// # Errors
/// As [`retrieve_body`].
pub fn rank_body(request: &Rank) -> Result<Value> {
    let mut body = json!({"items": request.items});
    add_shared(&mut body, &request.user, &request.reading)?;
    Ok(body)
}

/// Adds the fields that retrievals and rankings have in common.
fn add_shared(body: &mut Value, user: &User, reading: &Reading) -> Result<()> {
    let (field, value) = match user {
        User::Features(features) => {
            let features = features.iter().map(|(name, values)| (name.clone(), json!(WrittenValues::from(values))));
            ("features", Value::Object(features.collect()))
        }
        User::Vector(vector) => ("vector", json!(vector)),
        User::Embedded(_) => {
            return Err(Error::unsupported("got an embedded user, expected features or a vector"));
        }
    };
    body[field] = value;
    body["columns"] = json!(reading.columns);
    body["constants"] = json!(reading.constants);
    body["explain"] = json!(reading.explain);
    body["on_degraded"] = json!(match reading.on_degraded {
        OnDegraded::Fail => "fail",
        OnDegraded::DefaultRows => "default_rows",
    });
    Ok(())
}

/// Values of a feature as a request body has them.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub enum WrittenValues<'a> {
    /// Ids.
    Integers(&'a [i64]),
    /// Numbers of a dense feature.
    Numbers(&'a [f32]),
    /// Texts.
    Texts(&'a [String]),
    /// Ids, each with a weight.
    Weighted {
        /// The ids.
        values: &'a [i64],
        /// Weight of each id.
        weights: &'a [f32],
    },
}

impl<'a> From<&'a Values> for WrittenValues<'a> {
    fn from(values: &'a Values) -> Self {
        match values {
            Values::Integers(values) => WrittenValues::Integers(values),
            Values::Numbers(values) => WrittenValues::Numbers(values),
            Values::Texts(values) => WrittenValues::Texts(values),
            Values::Weighted { ids, weights } => WrittenValues::Weighted { values: ids, weights },
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{Retrievals, rank, retrievals};
    use sterling_core::request::EmbeddedUser;
    use sterling_core::units::ItemId;

    fn reading() -> Reading {
        let constants = [("w".to_owned(), 0.1f32)].into();
        Reading { columns: vec!["name".into()], constants, explain: true, on_degraded: OnDegraded::DefaultRows }
    }

    #[test]
    fn bodies_are_read_back_as_the_same_requests() {
        let features = [
            ("ids", Values::Integers(vec![i64::MIN, 7])),
            ("numbers", Values::Numbers(vec![0.1, -2.5e-8])),
            ("texts", Values::Texts(vec!["a\"b".into()])),
            ("weighted", Values::Weighted { ids: vec![3, 4], weights: vec![0.3, 2.0] }),
        ];
        let features = features.into_iter().map(|(name, values)| (name.to_owned(), values)).collect();
        let all = Retrieve {
            filter: "section:python AND size > 3".into(),
            exclude: vec![ItemId(1), ItemId(-2)],
            k: 3,
            candidates: Some(50),
            query_candidates: [("second".to_owned(), 9)].into(),
            recall: Some(0.9),
            reading: reading(),
            ..Retrieve::of(User::Features(features))
        };
        let probing = Retrieve { probes: Some(4), exact: true, ..Retrieve::of(User::Vector(vec![0.1, 1e-20])) };
        for request in [all, probing] {
            let body = retrieve_body(&request).unwrap().to_string();
            let Retrievals::One(read, ..) = retrievals(body.as_bytes()).unwrap() else { panic!("{body}") };
            assert_eq!(*read, request, "{body}");
        }
        let request = Rank { user: User::Vector(vec![0.5]), items: vec![ItemId(9)], reading: reading() };
        let body = rank_body(&request).unwrap().to_string();
        assert_eq!(rank(body.as_bytes()).unwrap().0, request, "{body}");
    }

    #[test]
    fn embedded_users_have_no_body() {
        let error = retrieve_body(&Retrieve::of(User::Embedded(EmbeddedUser::default()))).unwrap_err();
        assert!(error.to_string().contains("expected features or a vector"), "{error}");
    }
}
