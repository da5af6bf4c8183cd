//! Events: requests and what users did, read from files and validated against a package and its items.
//!
//! An event is `{"id": "e1", "user": {"history": [3, 5]}, "item": 17, "time": 1767225600, "type": "click", "value": 4.5,
//! "labels": {"click": 1}, "weight": 1, "context": {"exclude": [3, 5]}}`. Only `user` and `item` are required. `user` holds the
//! features of the request (the `features` of a `:retrieve` body), `context` other fields of that request. Items of `exclude`
//! could not have been the answer, so they are not used as negatives. A repeated `id` counts once.
//!
//! `raw` has the event before validation, `wire` parses it from a JSON line, `table` from rows of Parquet. `check` validates it
//! against the model; `read` reads files.

mod check;
mod raw;
mod read;
mod table;
mod wire;

pub(crate) use check::{Checker, Event, hash};
pub(crate) use raw::RejectionReason;
pub(crate) use read::{CHUNK_EVENTS, Chunk, Inputs, Outcome};
