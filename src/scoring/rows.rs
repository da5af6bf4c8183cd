//! Users from a file of JSON lines, in chunks, and the request of each.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::http::wire::{self, Retrievals};
use crate::limits::BODY_BYTES_MAX;
use crate::request::Retrieve;

/// Rows that are scored together.
pub(super) const CHUNK_ROWS: usize = 64;
const ID: &str = "id";
const COLUMNS: &str = "columns";

/// What requests get that do not say: fields of a `:retrieve`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Defaults(BTreeMap<String, String>);

/// Consecutive rows of a file.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    /// Its place among the chunks of the file.
    pub(super) number: usize,
    /// The row of the file that it begins with, from 0.
    pub(super) first_row: u64,
    pub(super) lines: Vec<String>,
    /// Bytes of the file up to its end.
    pub(super) bytes: u64,
}

impl Defaults {
    /// The fields of a JSON object.
    ///
    /// # Errors
    /// `Invalid` where it is none, or where a request of these fields and a user could not be read.
    pub fn parse(text: &str) -> Result<Self> {
        let fields: BTreeMap<String, Box<RawValue>> =
            serde_json::from_str(text).map_err(|e| Error::invalid(format!("request: not a JSON object: {e}")))?;
        if let Some(field) = ["features", "vector", "requests", ID].iter().find(|field| fields.contains_key(**field)) {
            return Err(Error::invalid(format!("request: field `{field}` is of a row, expected none for all")));
        }
        let defaults = Defaults(fields.into_iter().map(|(name, value)| (name, value.get().to_owned())).collect());
        defaults.request("{\"id\": 0, \"features\": {}}").1.map_err(|e| e.within("request"))?;
        Ok(defaults)
    }

    /// The item columns that answers tell.
    pub(super) fn columns(&self) -> Result<Vec<String>> {
        match self.0.get(COLUMNS) {
            Some(text) => serde_json::from_str(text).map_err(|e| Error::invalid(format!("request: columns: {e}"))),
            None => Ok(Vec::new()),
        }
    }

    /// One text for them.
    pub fn canonical(&self) -> String {
        let fields: Vec<String> =
            self.0.iter().map(|(name, value)| format!("{}:{value}", serde_json::Value::from(name.as_str()))).collect();
        format!("{{{}}}", fields.join(","))
    }

    /// The id and the request of a row: its own fields, and these where it has none.
    pub(super) fn request(&self, line: &str) -> (Option<i64>, Result<Retrieve>) {
        let wrong = |e: &dyn std::fmt::Display| Error::invalid(format!("not a JSON object: {e}"));
        let mut fields: BTreeMap<String, &RawValue> = match serde_json::from_str(line) {
            Ok(fields) => fields,
            Err(e) => return (None, Err(wrong(&e))),
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
        let more = self.0.iter().filter(|(name, _)| !fields.contains_key(*name));
        let mut body = String::with_capacity(line.len() + 64);
        for (name, value) in own.chain(more.map(|(name, value)| (name.as_str(), value.as_str()))) {
            body.push(if body.is_empty() { '{' } else { ',' });
            body.push_str(&serde_json::Value::from(name).to_string());
            body.push(':');
            body.push_str(value);
        }
        body.push('}');
        let read = wire::retrievals(body.as_bytes()).and_then(|read| match read {
            Retrievals::One(request, _) => Ok(*request),
            Retrievals::Many(_) => Err(Error::invalid("got a list of requests, expected one a row")),
        });
        (Some(id), read)
    }
}

/// Hands the chunks of a file of JSON lines out until `take` says that it wants no more. Empty lines are no rows.
pub(super) fn read(path: &Path, mut take: impl FnMut(Chunk) -> bool) -> Result<()> {
    let file = File::open(path).map_err(|e| Error::io(path.display(), e))?;
    let mut lines = BufReader::with_capacity(1 << 20, file);
    let mut chunk = Chunk::default();
    let (mut row, mut bytes) = (0, 0);
    loop {
        let mut line = Vec::new();
        let most = BODY_BYTES_MAX as u64;
        let read = lines.by_ref().take(most).read_until(b'\n', &mut line);
        let read = read.map_err(|e| Error::io(path.display(), e))?;
        if read as u64 == most && line.last() != Some(&b'\n') {
            let what = format!("row {}: longer than {most} bytes", row + 1);
            return Err(Error::invalid(what).within(path.display()));
        }
        bytes += read as u64;
        // What is no UTF-8 is a problem of its row.
        let text = String::from_utf8(line).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned());
        let text = if row == 0 { text.trim_start_matches('\u{feff}').trim() } else { text.trim() };
        if !text.is_empty() {
            chunk.lines.push(text.to_owned());
            row += 1;
        }
        if chunk.lines.len() == CHUNK_ROWS || (read == 0 && !chunk.lines.is_empty()) {
            let next = Chunk { number: chunk.number + 1, first_row: row, ..Chunk::default() };
            if !take(Chunk { bytes, ..std::mem::replace(&mut chunk, next) }) {
                return Ok(());
            }
        }
        if read == 0 {
            return Ok(());
        }
    }
}
