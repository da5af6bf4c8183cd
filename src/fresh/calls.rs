//! Calls with a key, which happen once however often they are sent.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::files;

/// Calls with a key that are remembered.
const CALLS_MAX: usize = 10_000;
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
}

/// Calls by the keys that their callers know them by.
#[derive(Default)]
pub(super) struct Calls {
    /// `None` for one that is under way.
    by_key: BTreeMap<String, Option<Call>>,
    /// The keys of those that were made, the oldest first.
    order: VecDeque<String>,
}

impl Calls {
    /// Those that were made, the oldest first.
    fn made(&self) -> Vec<(String, Call)> {
        let made = |key: &String| Some((key.clone(), self.by_key.get(key)?.clone()?));
        self.order.iter().filter_map(made).collect()
    }

    /// Takes note of a call that was made.
    pub(super) fn remember(&mut self, key: &str, made: Call) {
        if self.by_key.insert(key.into(), Some(made)).flatten().is_none() {
            self.order.push_back(key.into());
        }
        while self.order.len() > CALLS_MAX {
            let oldest = self.order.pop_front();
            oldest.map(|key| self.by_key.remove(&key));
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

    /// Keeps those that were made in a folder.
    ///
    /// # Errors
    /// `Io` with the file.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let text = serde_json::to_vec(&self.made()).map_err(|e| Error::internal(format!("calls: {e}")))?;
        files::write_atomic(&folder.join(CALLS), |out| out.write_all(&text)).map(drop)
    }

    /// As [`super::Feed::begin`].
    pub(super) fn begin(&mut self, key: &str, digest: u64) -> Result<Option<Call>> {
        match self.by_key.get(key) {
            None => {
                self.by_key.insert(key.into(), None);
                Ok(None)
            }
            Some(Some(made)) if made.digest == digest => Ok(Some(made.clone())),
            Some(Some(_)) => Err(Error::conflict(format!("idempotency key `{key}`: it was used for another call"))),
            Some(None) => Err(Error::conflict(format!("idempotency key `{key}`: a call with it is under way"))),
        }
    }

    /// As [`super::Feed::end`].
    pub(super) fn end(&mut self, key: &str, made: Option<Call>) {
        match made {
            Some(made) => self.remember(key, made),
            None => drop(self.by_key.remove(key)),
        }
    }
}
