//! Calls with a key, which happen once however often they are sent.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::update::CallAnswer;
use sterling_core::error::{Error, Result};
use sterling_storage::files;

/// Calls with a key that are remembered.
const CALLS_MAX: usize = 10_000;
/// Bytes of the refusals of all of them: beyond these the oldest calls are forgotten.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// The file of the calls whose records a journal has let go of.
const CALLS: &str = "calls.json";

/// A call that was made before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// A hash of what was sent.
    pub digest: u64,
    /// How many updates it made.
    pub count: u32,
    /// The position after it.
    pub position: u64,
    /// The rest of its answer.
    #[serde(default)]
    pub answer: CallAnswer,
}

/// Calls by the keys that their callers know them by: of those that were made, the ones with the highest positions.
///
/// Versions read the journal from positions of their own, so that a call may be told at any time and again. Which calls are known
/// must not depend on that: their positions say which of them are the last.
#[derive(Default)]
pub(super) struct Calls {
    made: BTreeMap<String, Call>,
    /// The keys of those that were made, by their positions.
    keys: BTreeMap<u64, String>,
    under_way: BTreeSet<String>,
    /// Bytes of their answers.
    bytes: usize,
}

impl Calls {
    /// Those that were made, the oldest first.
    fn made(&self) -> Vec<(&String, &Call)> {
        self.keys.values().filter_map(|key| self.made.get_key_value(key)).collect()
    }

    fn forget(&mut self, key: &str) {
        self.bytes -= self.made.remove(key).map_or(0, |call| call.answer.bytes());
    }

    /// Takes note of a call that was made.
    pub(super) fn remember(&mut self, key: &str, made: Call) {
        // A key that was forgotten may have been used for a later call.
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

    /// Those that a folder keeps.
    ///
    /// # Errors
    /// `Corrupt` or `Io` with the file.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let (path, mut calls) = (folder.join(CALLS), Calls::default());
        let kept: Vec<(String, Call)> = match std::fs::read(&path) {
            Ok(text) => {
                serde_json::from_slice(&text).map_err(|e| Error::corrupt(format!("{}: {e}", path.display())))?
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(Error::io(path.display(), e)),
        };
        kept.into_iter().for_each(|(key, made)| calls.remember(&key, made));
        Ok(calls)
    }

    /// Those that were made, for a file.
    ///
    /// # Errors
    /// `Internal` where they cannot be told.
    pub(super) fn text(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(&self.made()).map_err(|e| Error::internal(format!("calls: {e}")))
    }

    /// Keeps the text of calls in a folder.
    ///
    /// # Errors
    /// `Io` with the file.
    pub(super) fn write(text: &[u8], folder: &Path) -> Result<()> {
        files::write_atomic(&folder.join(CALLS), |out| out.write_all(text)).map(drop)
    }

    /// As [`super::Feed::begin`].
    pub(super) fn begin(&mut self, key: &str, digest: u64) -> Result<Option<Call>> {
        match self.made.get(key) {
            Some(made) if made.digest == digest => Ok(Some(made.clone())),
            Some(_) => Err(Error::conflict(format!("idempotency key `{key}`: it was used for another call"))),
            None if self.under_way.insert(key.into()) => Ok(None),
            None => Err(Error::conflict(format!("idempotency key `{key}`: a call with it is under way"))),
        }
    }

    /// As [`super::Feed::end`].
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

    /// The positions of the calls that are known, each with a key of its own.
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
    fn a_key_means_its_latest_call_whichever_is_told_last() {
        let mut calls = Calls::default();
        calls.remember("a", call(3));
        calls.remember("a", call(9));
        calls.remember("a", call(3));
        assert_eq!(calls.begin("a", 5).unwrap(), Some(call(9)));
        assert_eq!(calls.made().len(), 1);
        // A position has one call: that of a journal that was begun again is told last.
        calls.remember("b", call(9));
        assert_eq!(calls.begin("a", 5).unwrap(), None);
        assert_eq!(calls.begin("b", 5).unwrap(), Some(call(9)));
    }

    #[test]
    fn a_call_that_was_read_from_the_journal_is_known_though_its_end_was_not_told() {
        let mut calls = Calls::default();
        assert_eq!(calls.begin("a", 5).unwrap(), None);
        assert_eq!(calls.begin("a", 5).unwrap_err().kind(), sterling_core::error::Kind::Conflict);
        calls.remember("a", call(2));
        calls.end("a", None);
        assert_eq!(calls.begin("a", 5).unwrap(), Some(call(2)));
        // Nothing came of this one: it may be made again.
        assert_eq!(calls.begin("b", 5).unwrap(), None);
        calls.end("b", None);
        assert_eq!(calls.begin("b", 5).unwrap(), None);
    }
}
