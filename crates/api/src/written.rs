//! Tasks and columns of items, as a shard serializes them for a router.

use serde::{Deserialize, Serialize};

use sterling_core::error::{Error, Result};
use sterling_core::packed;

/// JSON of items without ids and scores, ready to be copied.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ItemJson {
    /// End offset of each item's JSON.
    #[serde(with = "packed::numbers")]
    pub ends: Vec<u32>,
    /// JSON of all items. The JSON is sent separately from the other fields: it may be long, and is never copied.
    #[serde(skip)]
    pub text: Vec<u8>,
}

impl ItemJson {
    /// Returns the JSON of one item; empty if the item has none.
    pub fn of(&self, item: usize) -> &[u8] {
        let start = item.checked_sub(1).map_or(Some(0), |before| self.ends.get(before).copied());
        let range = start.zip(self.ends.get(item).copied());
        range.and_then(|(start, end)| self.text.get(start as usize..end as usize)).unwrap_or_default()
    }

    /// Appends the JSON of the next item.
    ///
    /// # Errors
    /// `TooCostly` beyond the 32-bit offsets of the protocol.
    pub fn push(&mut self, text: &[u8]) -> Result<()> {
        let end = self.text.len() + text.len();
        let end = u32::try_from(end).map_err(|_| {
            let most = u32::MAX;
            Error::too_costly(format!(
                "the columns of the items take {end} bytes, expected at most {most} from one shard"
            ))
        })?;
        self.text.extend_from_slice(text);
        self.ends.push(end);
        Ok(())
    }
}
