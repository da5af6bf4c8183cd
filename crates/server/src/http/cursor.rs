//! Cursor: start of a page, as an opaque text for clients.
//!
//! A cursor holds the version, the update position of each shard's view, and the number of earlier results. A forged
//! cursor grants nothing that a request could not ask for. So cursors are not signed, but their checksum is verified
//! and the request must be unchanged.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::route::protocol::ViewPosition;
use sterling_core::error::{Error, Result};
use sterling_core::limits::{CANDIDATES_MAX, RESULTS_MAX, SHARDS_MAX};
use sterling_core::request::{Reading, Retrieve};

/// Maximum encoded size of a cursor without its view positions, and per view position, in bytes.
const CURSOR_BYTES_MAX: usize = 256;
const VIEW_BYTES_MAX: usize = 28;
/// Seed that separates checksums of cursors from other checksums.
const SEED: u64 = 0x7061_6765_7322;

/// Start of a page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Cursor {
    pub(super) version: u64,
    /// View position of each shard, in the order of the shards; one entry for an unsharded version.
    pub(super) views: Vec<ViewPosition>,
    /// Number of earlier results.
    pub(super) offset: usize,
    /// Number of candidates of the first page, which all pages share.
    pub(super) candidates: usize,
    /// Digest of the request and of the version.
    pub(super) asked: u64,
}

impl Cursor {
    /// Encodes the cursor.
    pub(super) fn text(&self) -> Result<String> {
        let invalid = |e| Error::internal(format!("cannot encode a cursor: {e}"));
        let mut bytes = postcard::to_allocvec(self).map_err(invalid)?;
        bytes.extend_from_slice(&xxh3_64_with_seed(&bytes, SEED).to_le_bytes());
        Ok(URL_SAFE_NO_PAD.encode(bytes))
    }

    /// Decodes a cursor.
    ///
    /// # Errors
    /// `Invalid` for a text that is no cursor.
    pub(super) fn read(text: &str) -> Result<Self> {
        let invalid = || Error::invalid("field `cursor`: not a cursor of an answer");
        let is_short = text.len() <= CURSOR_BYTES_MAX + SHARDS_MAX as usize * VIEW_BYTES_MAX;
        let bytes = if is_short { URL_SAFE_NO_PAD.decode(text).ok() } else { None };
        let bytes = bytes.ok_or_else(invalid)?;
        let (body, sum) = bytes.split_last_chunk::<8>().ok_or_else(invalid)?;
        if xxh3_64_with_seed(body, SEED) != u64::from_le_bytes(*sum) {
            return Err(invalid());
        }
        let (cursor, rest) = postcard::take_from_bytes::<Cursor>(body).map_err(|_| invalid())?;
        let is_sane = rest.is_empty() && cursor.offset < cursor.depth() && cursor.candidates <= CANDIDATES_MAX;
        if is_sane { Ok(cursor) } else { Err(invalid()) }
    }

    /// Returns the maximum number of results of all pages together.
    fn depth(&self) -> usize {
        self.candidates.min(RESULTS_MAX)
    }

    /// Extends a request to all results up to the end of the page. Returns the maximum number of results of the page.
    ///
    /// Each page probes enough lists for the results of all pages. A later page that probed more lists than an earlier page would
    /// find items that rank before the end of the earlier page.
    pub(super) fn reach(&self, request: &mut Retrieve) -> usize {
        let size = request.k.min(self.depth() - self.offset);
        request.k = self.offset + size;
        request.least = Some(self.depth());
        request.candidates = Some(self.candidates);
        size
    }

    /// Returns the cursor of the page after one of `size` results; `found` is the number of results up to the end of that page.
    /// `None` if there were fewer results than requested, or if all candidates were returned.
    pub(super) fn next(&self, size: usize, found: usize) -> Option<Cursor> {
        let offset = self.offset + size;
        (found >= offset && offset < self.depth()).then(|| Cursor { offset, ..self.clone() })
    }

    /// Checks that the request equals that of the previous page, except for its size.
    ///
    /// # Errors
    /// `Invalid` for a different request.
    pub(super) fn check(&self, asked: u64) -> Result<()> {
        let another = "field `cursor`: of another request, expected all fields but `k` as for the previous page";
        if self.asked == asked { Ok(()) } else { Err(Error::invalid(another)) }
    }
}

/// Returns the digest of a request at a version, equal for all of its pages.
pub(super) fn asked(model: &str, digest: &str, request: &Retrieve) -> Result<u64> {
    let reading = Reading { explain: false, ..request.reading.clone() };
    let asked = Retrieve { k: 0, reading, ..request.clone() };
    let bytes = postcard::to_allocvec(&(model, digest, &asked));
    Ok(xxh3_64(&bytes.map_err(|e| Error::internal(format!("cannot encode a request: {e}")))?))
}

/// Rejects cursors in lists of requests.
///
/// # Errors
/// `Invalid` for a cursor.
pub(super) fn alone(cursor: Option<&String>) -> Result<()> {
    match cursor {
        Some(_) => Err(Error::invalid("field `cursor` in a list of requests: pages are requested one by one")),
        None => Ok(()),
    }
}

/// Returns an error for pages of a model with several queries, if the request does not set `candidates`.
pub(super) fn error_without_candidates() -> Error {
    Error::unsupported(
        "field `cursor`: got no `candidates`, expected a number of candidates, because the model has several queries",
    )
}

/// Returns an error for a page whose version or view no longer exists.
pub(super) fn gone(what: impl std::fmt::Display) -> Error {
    Error::gone(format!("field `cursor`: {what}, begin with the first page"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn cursor(shards: usize) -> Cursor {
        let views = vec![ViewPosition { position: 1 << 40, base: 1 << 39 }; shards];
        Cursor { version: 7, views, offset: 20, candidates: 1000, asked: u64::MAX }
    }

    #[test]
    fn cursors_round_trip_and_altered_ones_are_rejected() {
        let text = cursor(1).text().unwrap();
        assert!(text.len() < 64 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b)), "{text}");
        assert_eq!(Cursor::read(&text).unwrap(), cursor(1));
        for place in 0..text.len() {
            let mut other = text.clone().into_bytes();
            other[place] = if other[place] == b'A' { b'B' } else { b'A' };
            assert!(Cursor::read(std::str::from_utf8(&other).unwrap()).is_err(), "{place}");
            assert!(Cursor::read(&text[..place]).is_err(), "{place}");
        }
        let long = "A".repeat(1 << 20);
        for invalid in ["", " ", "x", "====", &format!("{text}A"), &format!("{text}{text}"), &long, "\u{fc}\u{fc}"] {
            assert!(Cursor::read(invalid).is_err());
        }
        for (offset, candidates) in
            [(1000, 1000), (20, 0), (0, CANDIDATES_MAX + 1), (RESULTS_MAX, CANDIDATES_MAX), (usize::MAX, usize::MAX)]
        {
            let text = Cursor { offset, candidates, ..cursor(1) }.text().unwrap();
            assert!(Cursor::read(&text).is_err(), "{offset} {candidates}: sums can be made by anybody");
        }
    }

    #[test]
    fn a_cursor_of_the_maximum_number_of_shards_is_read() {
        let most = ViewPosition { position: u64::MAX, base: u64::MAX };
        let cursor = Cursor { views: vec![most; SHARDS_MAX as usize], version: u64::MAX, ..cursor(1) };
        assert_eq!(Cursor::read(&cursor.text().unwrap()).unwrap(), cursor);
    }
}
