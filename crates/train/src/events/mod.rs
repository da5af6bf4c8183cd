//! Events: what users were asked about and did, read from files and checked against a package and its items.
//!
//! An event is `{"id": "e1", "user": {"history": [3, 5]}, "item": 17, "time": 1767225600, "type": "click", "value": 4.5,
//! "labels": {"click": 1}, "weight": 1, "context": {"exclude": [3, 5]}}`. Only `user` and `item` are required. `user` holds the
//! features as the request had them (the `features` of a `:retrieve` body), `context` other fields of that request: items of
//! `exclude` could not have been the answer, so they are no negatives. A repeated `id` counts once.
//!
//! `raw` is an event as any file has it, `wire` reads it from a JSON line, `table` from rows of Parquet; `check` holds it against the
//! model; `read` goes through files.

mod check;
mod raw;
mod read;
mod table;
mod wire;

pub(crate) use check::{Checker, Event};
pub(crate) use raw::Refusal;
pub(crate) use read::{Chunk, Inputs, Outcome};
