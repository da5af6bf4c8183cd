//! Requests of rows: a row's own fields, completed by the fields of the job.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use sterling_api::Retrievals;
use sterling_core::error::{Error, Result};
use sterling_core::items::{EMBEDDING, GivenItem, GivenValues, ID};
use sterling_core::limits::FEATURES_MAX;
use sterling_core::request::{Features, Rank, Request, Retrieve, Values};

const COLUMNS: &str = "columns";

/// Task of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Retrieves the best items for a user.
    Retrieve,
    /// Scores a given list of items for a user.
    Rank,
    /// Computes the embedding of an item with the item tower.
    Items,
}

/// Default request fields of a job, for `:retrieve` or `:rank`.
#[derive(Clone, Debug, PartialEq)]
pub struct Questions {
    fields: BTreeMap<String, String>,
    /// Request of a row without fields of its own.
    template: Template,
}

/// Request of a row without fields of its own.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Template {
    Retrieve(Box<Retrieve>),
    Rank(Box<Rank>),
    Items,
}

/// Work for one row.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Question {
    Pass(Box<Request>),
    Item(Features),
}

/// Row id, if there is one, and the row's request or its error.
pub(super) type RowRequest = (Option<i64>, Result<Question>);

impl Questions {
    /// Parses the fields of a JSON object.
    ///
    /// # Errors
    /// `Invalid` if the text is not an object, or if a request with these fields and a user would be invalid.
    pub fn parse(task: Task, text: &str) -> Result<Self> {
        let place = |e: Error| e.within("request");
        let sterling_api::Named::<Box<RawValue>, FEATURES_MAX>(fields) =
            serde_json::from_str(text).map_err(|e| place(Error::invalid(format!("not a JSON object: {e}"))))?;
        let of_rows: &[&str] = match task {
            Task::Retrieve => &[ID, "features", "vector", "requests"],
            Task::Rank => &[ID, "features", "vector", "items"],
            Task::Items => &[ID],
        };
        if let Some(field) = of_rows.iter().find(|field| fields.contains_key(**field)) {
            return Err(place(Error::invalid(format!(
                "field `{field}` belongs to each row, expected none for the job"
            ))));
        }
        let fields: BTreeMap<String, String> =
            fields.into_iter().map(|(name, value)| (name, value.get().to_owned())).collect();
        let with = |first: &str| joined(fields.iter().map(shown), first);
        let template = match task {
            Task::Retrieve => retrieve(&with(r#""features":{}"#)).map(Box::new).map(Template::Retrieve),
            Task::Rank => rank(&with(r#""features":{},"items":[0]"#)).map(Box::new).map(Template::Rank),
            Task::Items => match fields.keys().next() {
                Some(field) => {
                    Err(Error::invalid(format!("field `{field}`: got a field for the task `items`, which has none")))
                }
                None => Ok(Template::Items),
            },
        };
        Ok(Questions { fields, template: template.map_err(place)? })
    }

    pub(super) fn template(&self) -> &Template {
        &self.template
    }

    /// Returns the item columns that answers include.
    pub(super) fn columns(&self) -> &[String] {
        match &self.template {
            Template::Retrieve(retrieve) => &retrieve.reading.columns,
            Template::Rank(rank) => &rank.reading.columns,
            Template::Items => &[],
        }
    }

    /// Returns a canonical text of the fields, which depends neither on their order nor on white space.
    pub fn canonical(&self) -> String {
        let fields = self.fields.iter().map(|(name, value)| {
            let value: serde_json::Value = serde_json::from_str(value).unwrap_or_default();
            format!("{}:{value}", quoted(name))
        });
        format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
    }

    /// Builds the request of a JSON line; fields that the line lacks are those of the job. `sources` are the columns
    /// that the item tower reads.
    pub(super) fn parse_line(&self, line: &str, sources: &[String]) -> RowRequest {
        if self.template == Template::Items {
            return item(line, sources);
        }
        let mut fields = match serde_json::from_str::<sterling_api::Named<&RawValue, FEATURES_MAX>>(line) {
            Ok(sterling_api::Named(fields)) => fields,
            Err(e) => return (None, Err(Error::invalid(format!("not a JSON object: {e}")))),
        };
        let id = match fields.remove(ID).map(|id| serde_json::from_str::<i64>(id.get())) {
            Some(Ok(id)) => id,
            Some(Err(_)) => return (None, Err(Error::invalid("field `id`: expected a 64-bit integer"))),
            None => return (None, Err(Error::invalid("field `id` is missing, expected a 64-bit integer"))),
        };
        if fields.contains_key(COLUMNS) {
            return (Some(id), Err(Error::invalid("field `columns`: set for the whole job, expected none in a row")));
        }
        let own = fields.iter().map(|(name, value)| (name.as_str(), value.get()));
        let more = self.fields.iter().filter(|(name, _)| !fields.contains_key(*name)).map(shown);
        let body = joined(own.chain(more), "");
        let request = match &self.template {
            Template::Rank(_) => rank(&body).map(Request::Rank),
            _ => retrieve(&body).map(Request::Retrieve),
        };
        (Some(id), request.and_then(|request| self.bounded(request)))
    }

    /// Rejects a request for more results than the job's `k`, which bounds memory.
    pub(super) fn bounded(&self, request: Request) -> Result<Question> {
        match (&request, &self.template) {
            (Request::Retrieve(Retrieve { k, .. }), Template::Retrieve(most)) if *k > most.k => {
                Err(Error::invalid(format!("field `k`: got {k}, expected at most {}, the job's `k`", most.k)))
            }
            _ => Ok(Question::Pass(Box::new(request))),
        }
    }
}

fn shown<'a>((name, value): (&'a String, &'a String)) -> (&'a str, &'a str) {
    (name, value)
}

fn quoted(name: &str) -> String {
    serde_json::Value::from(name).to_string()
}

/// Builds a JSON object from fields; `first` is the text of fields that are already serialized.
fn joined<'a>(fields: impl Iterator<Item = (&'a str, &'a str)>, first: &str) -> String {
    let mut body = format!("{{{first}");
    for (name, value) in fields {
        if body.len() > 1 {
            body.push(',');
        }
        body.push_str(&quoted(name));
        body.push(':');
        body.push_str(value);
    }
    body.push('}');
    body
}

fn retrieve(body: &str) -> Result<Retrieve> {
    match sterling_api::retrievals(body.as_bytes())? {
        Retrievals::One(_, _, sterling_api::Shape { cursor: Some(_), .. }) => {
            Err(Error::invalid("field `cursor`: jobs have no pages, a row gets all of its `k` results, expected none"))
        }
        Retrievals::One(request, ..) => Ok(*request),
        Retrievals::Many(_) => Err(Error::invalid("got a list of requests, expected one per row")),
    }
}

fn rank(body: &str) -> Result<Rank> {
    Ok(sterling_api::rank(body.as_bytes())?.0)
}

/// Parses a line of an item file, and keeps the attributes that the item tower reads.
fn item(line: &str, sources: &[String]) -> RowRequest {
    let read = sterling_api::upserts(line.as_bytes(), true).map(|mut items| items.pop());
    let GivenItem { id, embedding, attributes, whole } = match read {
        Ok(Some(Ok(item))) => item,
        Ok(Some(Err(invalid))) => {
            let place = if invalid.field.is_empty() { String::new() } else { format!("field `{}`: ", invalid.field) };
            return (invalid.id, Err(Error::invalid(format!("{place}{}", invalid.reason))));
        }
        Ok(None) => return (None, Err(Error::invalid("no item, expected one per row"))),
        Err(e) => return (None, Err(e)),
    };
    if !whole {
        return (Some(id), Err(Error::invalid("field `set`: expected `attributes` with all attributes of the item")));
    }
    let mut features = Features::new();
    if sources.iter().any(|source| source == ID) {
        features.insert(ID.into(), Values::Integers(vec![id]));
    }
    if let (Some(vector), true) = (embedding, sources.iter().any(|source| source == EMBEDDING)) {
        features.insert(EMBEDDING.into(), Values::Numbers(vector));
    }
    for (name, values) in attributes.into_iter().filter(|(name, _)| sources.contains(name)) {
        let values = match values {
            GivenValues::Missing => continue,
            GivenValues::Integers(integers) => Values::Integers(integers),
            GivenValues::Numbers(numbers) => Values::Numbers(numbers.into_iter().map(|x| x as f32).collect()),
            GivenValues::Texts(texts) => Values::Texts(texts),
        };
        if features.insert(name.clone(), values).is_some() {
            return (Some(id), Err(Error::invalid(format!("attribute `{name}`: given twice"))));
        }
    }
    (Some(id), Ok(Question::Item(features)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn fields_of_a_row_are_taken_as_a_retrieval_takes_them() {
        let questions = Questions::parse(Task::Retrieve, r#"{"k": 5}"#).unwrap();
        assert!(questions.parse_line(r#"{"id": 3, "vector": [1.0], "k": 2}"#, &[]).1.is_ok());
        for (line, id, expected) in [
            (r#"{"id": 3, "vector": [1.0], "vector": [-1.0]}"#, None, "got `vector` twice"),
            (r#"{"id": 3, "id": 4, "vector": [1.0]}"#, None, "got `id` twice"),
            (
                r#"{"id": 3, "vector": [1.0], "cursor": ""}"#,
                Some(3),
                "field `cursor`: jobs have no pages, a row gets all of its `k` results",
            ),
            (r#"{"id": 3, "vector": [1.0], "cursor": "nonsense"}"#, Some(3), "field `cursor`"),
        ] {
            let (known, requested) = questions.parse_line(line, &[]);
            let error = requested.unwrap_err().to_string();
            assert!(known == id && error.contains(expected), "{line}: {error}");
        }
        let of_job = |text: &str| Questions::parse(Task::Retrieve, text).unwrap_err().to_string();
        assert!(of_job(r#"{"k": 5, "k": 6}"#).contains("got `k` twice"));
        assert!(of_job(r#"{"cursor": ""}"#).contains("field `cursor`"));
    }
}
