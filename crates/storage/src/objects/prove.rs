//! Probe that verifies that a bucket enforces conditional writes. Some S3-compatible services ignore conditions. Two publishers
//! of one version would then both succeed, and of two concurrent activations one would silently overwrite the other.

use std::hash::{BuildHasher, RandomState};

use super::{Objects, WriteCondition, replace};
use sterling_core::error::{Error, Kind, Result};

/// Result of the probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// The bucket enforces conditions of writes, such as `If-Match`.
    Kept,
    /// The bucket accepts no writes of this caller, which therefore needs no conditions.
    ReadOnly,
}

/// Creates an object with a random key twice, and replaces the object twice on condition of its first state. The second creation
/// and the second replacement must fail. Removes the object afterwards.
///
/// # Errors
/// `Unsupported` with the condition that was ignored; `Unavailable` if the bucket does not answer.
pub fn prove(objects: &dyn Objects) -> Result<Proof> {
    let key = format!(".probe-{:016x}", RandomState::new().hash_one(std::process::id()));
    let proven = probe(objects, &key);
    // If the bucket does not answer, the probe object is not removed: it has a few bytes and is never read.
    if !proven.as_ref().is_err_and(|e| e.kind() == Kind::Unavailable) {
        let _ = objects.remove(&key);
    }
    match proven {
        Err(e) if e.kind() == Kind::Io => Ok(Proof::ReadOnly),
        other => other.map(|()| Proof::Kept),
    }
}

fn probe(objects: &dyn Objects, key: &str) -> Result<()> {
    // If an answer is lost, the final content of the object shows whether the condition held.
    let refused = |what: &str, again: Result<_>| match again {
        Err(e) if e.kind() == Kind::Conflict => Ok(()),
        Err(e) => Err(e),
        Ok(_) => Err(Error::unsupported(format!(
            "it accepted {what}, which must fail: a store has to enforce the conditions of writes (`If-None-Match` \
             and `If-Match`), or publishers would overwrite each other"
        ))),
    };
    let first = replace(objects, key, b"1", &WriteCondition::Nothing)?;
    refused("a second object of one key", replace(objects, key, b"2", &WriteCondition::Nothing))?;
    replace(objects, key, b"3", &WriteCondition::This(first.clone()))?;
    refused(
        "a replacement of an object that was replaced before",
        replace(objects, key, b"4", &WriteCondition::This(first)),
    )
}
