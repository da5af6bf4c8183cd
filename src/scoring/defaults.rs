//! What a row asks: its own fields, and those of the job where it has none.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::http::wire::{self, Retrievals};
use crate::request::Retrieve;

const ID: &str = "id";
const COLUMNS: &str = "columns";

/// What requests get that do not say: fields of a `:retrieve`.
#[derive(Clone, Debug, PartialEq)]
pub struct Defaults {
    fields: BTreeMap<String, String>,
    /// What they make of a row that says nothing.
    retrieve: Retrieve,
}

impl Defaults {
    /// The fields of a JSON object.
    ///
    /// # Errors
    /// `Invalid` where it is none, or where a request of these fields and a user could not be read.
    pub fn parse(text: &str) -> Result<Self> {
        let place = |e: Error| e.within("request");
        let fields: BTreeMap<String, Box<RawValue>> =
            serde_json::from_str(text).map_err(|e| place(Error::invalid(format!("not a JSON object: {e}"))))?;
        if let Some(field) = ["features", "vector", "requests", ID].iter().find(|field| fields.contains_key(**field)) {
            return Err(place(Error::invalid(format!("field `{field}` is of a row, expected none for all"))));
        }
        let fields: BTreeMap<String, String> =
            fields.into_iter().map(|(name, value)| (name, value.get().to_owned())).collect();
        let retrieve = read(&joined(fields.iter().map(shown), r#""features":{}"#)).map_err(place)?;
        Ok(Defaults { fields, retrieve })
    }

    /// The item columns that answers tell.
    pub(super) fn columns(&self) -> &[String] {
        &self.retrieve.reading.columns
    }

    /// One text for them, whatever the order and the spaces that they were written with.
    pub fn canonical(&self) -> String {
        let fields = self.fields.iter().map(|(name, value)| {
            let value: serde_json::Value = serde_json::from_str(value).unwrap_or_default();
            (name, value.to_string())
        });
        let fields: Vec<String> = fields.map(|(name, value)| format!("{}:{value}", quoted(name))).collect();
        format!("{{{}}}", fields.join(","))
    }

    /// The id and the request of a row: its own fields, and these where it has none.
    pub(super) fn request(&self, line: &str) -> (Option<i64>, Result<Retrieve>) {
        let mut fields: BTreeMap<String, &RawValue> = match serde_json::from_str(line) {
            Ok(fields) => fields,
            Err(e) => return (None, Err(Error::invalid(format!("not a JSON object: {e}")))),
        };
        let id = match fields.remove(ID).map(|id| serde_json::from_str::<i64>(id.get())) {
            Some(Ok(id)) => id,
            Some(Err(_)) => return (None, Err(Error::invalid("field `id`: expected a 64-bit integer"))),
            None => return (None, Err(Error::invalid("field `id` is missing, expected a 64-bit integer"))),
        };
        if fields.contains_key(COLUMNS) {
            return (Some(id), Err(Error::invalid("field `columns`: all rows have those of the job, expected none")));
        }
        let own = fields.iter().map(|(name, value)| (name.as_str(), value.get()));
        let more = self.fields.iter().filter(|(name, _)| !fields.contains_key(*name)).map(shown);
        (Some(id), read(&joined(own.chain(more), "")).and_then(|request| self.bounded(request)))
    }

    /// Refuses more results than the memory of a job is bounded by.
    fn bounded(&self, request: Retrieve) -> Result<Retrieve> {
        match request.k > self.retrieve.k {
            true => Err(Error::invalid(format!(
                "field `k`: got {}, expected at most {}, that of the job",
                request.k, self.retrieve.k
            ))),
            false => Ok(request),
        }
    }
}

fn shown<'a>((name, value): (&'a String, &'a String)) -> (&'a str, &'a str) {
    (name, value)
}

fn quoted(name: &str) -> String {
    serde_json::Value::from(name).to_string()
}

/// An object of fields, after some that are written already.
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

fn read(body: &str) -> Result<Retrieve> {
    match wire::retrievals(body.as_bytes())? {
        Retrievals::One(request, _) => Ok(*request),
        Retrievals::Many(_) => Err(Error::invalid("got a list of requests, expected one a row")),
    }
}
