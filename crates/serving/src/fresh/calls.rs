//! Idempotency keys: calls with a key take effect once, however often they are sent.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::update::CallAnswer;
use sterling_core::error::{Error, Result};
use sterling_storage::files;

/// Maximum number of remembered calls.
const CALLS_MAX: usize = 10_000;
/// Maximum bytes of the recorded rejections of calls; beyond it the oldest calls are forgotten.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// File that stores the completed calls whose journal records were truncated.
const CALLS: &str = "calls.json";

/// Completed call with an idempotency key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Hash of the request.
    pub digest: u64,
    /// Number of updates of the call.
    pub count: u32,
    /// Position after the last update of the call.
    pub position: u64,
    /// Fields of the answer apart from position and count.
    #[serde(default)]
    pub answer: CallAnswer,
}

/// Completed calls with the highest positions, by idempotency key.
///
/// Versions read the journal from different positions, so a call may be recorded several times and in any order. Which calls are
/// remembered must not depend on that order; only their positions decide.
#[derive(Default)]
pub(super) struct Calls {
    made: BTreeMap<String, Call>,
    /// Keys of completed calls, by position.
    keys: BTreeMap<u64, String>,
    under_way: BTreeSet<String>,
    /// Bytes of the recorded answers.
    bytes: usize,
}

impl Calls {
    /// Returns completed calls, oldest first.
    fn made(&self) -> Vec<(&String, &Call)> {
        self.keys.values().filter_map(|key| self.made.get_key_value(key)).collect()
    }

    fn forget(&mut self, key: &str) {
        self.bytes -= self.made.remove(key).map_or(0, |call| call.answer.bytes());
    }

    /// Records a completed call.
    pub(super) fn remember(&mut self, key: &str, made: Call) {
        // A client may have reused a forgotten key for a later call.
        if self.made.get(key).is_some_and(|known| known.position >= made.position) {
            return;
        }
        let position = made.position;
        self.bytes += made.answer.bytes();
        if let Some(earlier) = self.made.insert(key.into(), made) {
            self.bytes -= earlier.answer.bytes();
            self.keys.remove(&earlier.position);
        }
        if let Some(other) = self.keys.insert(position, key.into()) {
            self.forget(&other);
        }
        while (self.keys.len() > CALLS_MAX || self.bytes > ANSWER_BYTES_MAX)
            && let Some((_, oldest)) = self.keys.pop_first()
        {
            self.forget(&oldest);
        }
    }

    /// Reads the calls stored in a folder.
    ///
    /// # Errors
    /// `Corrupt` or `Io` with the file.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let (path, mut calls) = (folder.join(CALLS), Calls::default());
        let retained: Vec<(String, Call)> = match std::fs::read(&path) {
            Ok(text) => {
                serde_json::from_slice(&text).map_err(|e| Error::corrupt(format!("{}: {e}", path.display())))?
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(Error::io(path.display(), e)),
        };
        retained.into_iter().for_each(|(key, made)| calls.remember(&key, made));
        Ok(calls)
    }

    /// Serializes the completed calls.
    ///
    /// # Errors
    /// `Internal` if serialization fails.
    pub(super) fn text(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(&self.made())
            .map_err(|e| Error::internal(format!("cannot encode the calls with idempotency keys: {e}")))
    }

    /// Writes serialized calls to a folder.
    ///
    /// # Errors
    /// `Io` with the file.
    pub(super) fn write(text: &[u8], folder: &Path) -> Result<()> {
        files::write_atomic(&folder.join(CALLS), |out| out.write_all(text)).map(drop)
    }

    /// See [`super::ModelUpdates::begin`].
    pub(super) fn begin(&mut self, key: &str, digest: u64) -> Result<Option<Call>> {
        match self.made.get(key) {
            Some(made) if made.digest == digest => Ok(Some(made.clone())),
            Some(_) => Err(Error::conflict(format!(
                "idempotency key `{key}`: used for another call before, expected a new key"
            ))),
            None if self.under_way.insert(key.into()) => Ok(None),
            None => Err(Error::conflict(format!("idempotency key `{key}`: a call with this key is in progress"))),
        }
    }

    /// See [`super::ModelUpdates::end`].
    pub(super) fn end(&mut self, key: &str, made: Option<Call>) {
        self.under_way.remove(key);
        if let Some(made) = made {
            self.remember(key, made);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn call(position: u64) -> Call {
        Call { digest: 5, count: 1, position, answer: CallAnswer::default() }
    }

    /// Returns the positions of known calls, each of which has its own key.
    fn known(calls: &Calls) -> Vec<u64> {
        let made = calls.made();
        assert!(made.iter().all(|(key, made)| **key == format!("key {}", made.position)));
        assert_eq!((made.len(), calls.keys.len()), (calls.made.len(), calls.made.len()));
        made.iter().map(|(_, made)| made.position).collect()
    }

    #[test]
    fn the_last_calls_stay_known_while_earlier_ones_are_read_again() {
        let last = 2 * CALLS_MAX as u64 + 500;
        let mut calls = Calls::default();
        let latest: Vec<u64> = (last + 1 - CALLS_MAX as u64..=last).collect();
        (1..=last).for_each(|n| calls.remember(&format!("key {n}"), call(n)));
        assert_eq!(known(&calls), latest);
        for n in 1..=last {
            calls.remember(&format!("key {n}"), call(n));
            assert_eq!(calls.begin(&format!("key {last}"), 5).unwrap(), Some(call(last)));
        }
        assert_eq!(known(&calls), latest);
        calls.remember(&format!("key {}", last + 1), call(last + 1));
        assert_eq!(known(&calls), (latest[1]..=last + 1).collect::<Vec<_>>());
    }

    #[test]
    fn an_idempotency_key_means_its_latest_call() {
        let mut calls = Calls::default();
        calls.remember("a", call(3));
        calls.remember("a", call(9));
        calls.remember("a", call(3));
        assert_eq!(calls.begin("a", 5).unwrap(), Some(call(9)));
        assert_eq!(calls.made().len(), 1);
        // Each position belongs to one call; after a journal was recreated, the call recorded last is the right one.
        calls.remember("b", call(9));
        assert_eq!(calls.begin("a", 5).unwrap(), None);
        assert_eq!(calls.begin("b", 5).unwrap(), Some(call(9)));
    }

    #[test]
    fn calls_read_from_the_journal_are_known() {
        let mut calls = Calls::default();
        assert_eq!(calls.begin("a", 5).unwrap(), None);
        assert_eq!(calls.begin("a", 5).unwrap_err().kind(), sterling_core::error::Kind::Conflict);
        calls.remember("a", call(2));
        calls.end("a", None);
        assert_eq!(calls.begin("a", 5).unwrap(), Some(call(2)));
        // The call had no effect, so it may be repeated.
        assert_eq!(calls.begin("b", 5).unwrap(), None);
        calls.end("b", None);
        assert_eq!(calls.begin("b", 5).unwrap(), None);
    }
}
