//! Whether a bucket keeps to the conditions of a write. Some that speak like S3 pass over them: of two publishers both would
//! then win, and one of two who activate would overwrite the other unseen.

use std::hash::{BuildHasher, RandomState};

use super::{Objects, Over, replace};
use sterling_core::error::{Error, Kind, Result};

/// What the probe showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// Conditions hold.
    Kept,
    /// The bucket takes no writes of this caller, who then has no need of conditions.
    ReadOnly,
}

/// Creates an object of a random key twice and replaces it twice over its first state: the second of each must fail. The object
/// is removed afterwards.
///
/// # Errors
/// `Unsupported` naming the condition that was passed over; `Unavailable`.
pub fn prove(objects: &dyn Objects) -> Result<Proof> {
    let key = format!(".probe-{:016x}", RandomState::new().hash_one(std::process::id()));
    let proven = probe(objects, &key);
    // What stays is a few bytes that nobody looks at: a bucket that does not answer is not waited for once more.
    if !proven.as_ref().is_err_and(|e| e.kind() == Kind::Unavailable) {
        let _ = objects.remove(&key);
    }
    match proven {
        Err(e) if e.kind() == Kind::Io => Ok(Proof::ReadOnly),
        other => other.map(|()| Proof::Kept),
    }
}

fn probe(objects: &dyn Objects, key: &str) -> Result<()> {
    // What stands there in the end tells whether the condition held, where an answer is lost.
    let refused = |what: &str, again: Result<_>| match again {
        Err(e) if e.kind() == Kind::Conflict => Ok(()),
        Err(e) => Err(e),
        Ok(_) => Err(Error::unsupported(format!(
            "it took {what} that must fail: a store has to keep to the conditions of writes (`If-None-Match` and `If-Match`), \
             or publishers would overwrite each other"
        ))),
    };
    let first = replace(objects, key, b"1", &Over::Nothing)?;
    refused("a second object of one key", replace(objects, key, b"2", &Over::Nothing))?;
    replace(objects, key, b"3", &Over::This(first.clone()))?;
    refused("an object in the place of one that was gone", replace(objects, key, b"4", &Over::This(first)))
}
