//! Where a page begins, as a text that only servers and routers read.
//!
//! It names the version, what was seen of it by each shard, and how many results lie before it. It gives nothing that a request could not ask for, so it is not signed
//! but checked when it comes back: that it is whole, and that the request is the same.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::route::protocol::ViewPosition;
use sterling_core::error::{Error, Result};
use sterling_core::limits::{CANDIDATES_MAX, RESULTS_MAX, SHARDS_MAX};
use sterling_core::request::{Reading, Retrieve};

/// Bytes of a cursor besides those of what shards have seen, and of that, in its text at most.
const CURSOR_BYTES_MAX: usize = 256;
const VIEW_BYTES_MAX: usize = 28;
/// Sets the sum of a cursor apart from other sums.
const SEED: u64 = 0x7061_6765_7322;

/// Where a page begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Cursor {
    pub(super) version: u64,
    /// What each shard has seen, in their order; one of what was not cut.
    pub(super) views: Vec<ViewPosition>,
    /// Results before it.
    pub(super) offset: usize,
    /// Candidates of the first page, which those of all others are.
    pub(super) candidates: usize,
    /// A digest of the request and of the version.
    pub(super) asked: u64,
}

impl Cursor {
    /// The cursor as its text.
    pub(super) fn text(&self) -> Result<String> {
        let wrong = |e| Error::internal(format!("a cursor that cannot be written: {e}"));
        let mut bytes = postcard::to_allocvec(self).map_err(wrong)?;
        bytes.extend_from_slice(&xxh3_64_with_seed(&bytes, SEED).to_le_bytes());
        Ok(URL_SAFE_NO_PAD.encode(bytes))
    }

    /// The cursor that a text is.
    ///
    /// # Errors
    /// `Invalid` for one that is none.
    pub(super) fn read(text: &str) -> Result<Self> {
        let wrong = || Error::invalid("field `cursor`: not one that an answer had");
        let is_short = text.len() <= CURSOR_BYTES_MAX + SHARDS_MAX as usize * VIEW_BYTES_MAX;
        let bytes = if is_short { URL_SAFE_NO_PAD.decode(text).ok() } else { None };
        let bytes = bytes.ok_or_else(wrong)?;
        let (body, sum) = bytes.split_last_chunk::<8>().ok_or_else(wrong)?;
        if xxh3_64_with_seed(body, SEED) != u64::from_le_bytes(*sum) {
            return Err(wrong());
        }
        let (cursor, rest) = postcard::take_from_bytes::<Cursor>(body).map_err(|_| wrong())?;
        let is_sane = rest.is_empty() && cursor.offset < cursor.depth() && cursor.candidates <= CANDIDATES_MAX;
        if is_sane { Ok(cursor) } else { Err(wrong()) }
    }

    /// Results that all pages have together at most.
    fn depth(&self) -> usize {
        self.candidates.min(RESULTS_MAX)
    }

    /// Makes a request that for all results up to the end of the page. Returns how many the page has at most.
    pub(super) fn reach(&self, request: &mut Retrieve) -> usize {
        let size = request.k.min(self.depth() - self.offset);
        request.k = self.offset + size;
        request.candidates = Some(self.candidates);
        size
    }

    /// Where the page behind one of `size` results begins, where `found` were there up to its end: nowhere where there were fewer than asked for, and where all
    /// candidates were told of.
    pub(super) fn next(&self, size: usize, found: usize) -> Option<Cursor> {
        let offset = self.offset + size;
        (found >= offset && offset < self.depth()).then(|| Cursor { offset, ..self.clone() })
    }

    /// That the request is that of the page before, but for its size.
    ///
    /// # Errors
    /// `Invalid` where it is another one.
    pub(super) fn check(&self, asked: u64) -> Result<()> {
        let another = "field `cursor`: of another request, expected all but `k` as it was for the page before";
        if self.asked == asked { Ok(()) } else { Err(Error::invalid(another)) }
    }
}

/// One name for what a request asks of a version, whatever page of it.
pub(super) fn asked(model: &str, digest: &str, request: &Retrieve) -> Result<u64> {
    let reading = Reading { explain: false, ..request.reading.clone() };
    let asked = Retrieve { k: 0, reading, ..request.clone() };
    let bytes = postcard::to_allocvec(&(model, digest, &asked));
    Ok(xxh3_64(&bytes.map_err(|e| Error::internal(format!("a request that cannot be written: {e}")))?))
}

/// That a cursor is asked for with one request alone.
///
/// # Errors
/// `Invalid`, of a list.
pub(super) fn alone(cursor: Option<&String>) -> Result<()> {
    match cursor {
        Some(_) => Err(Error::invalid("field `cursor` in a list of requests: pages are asked for one by one")),
        None => Ok(()),
    }
}

/// A page of a model of several queries, where the request does not say of how many candidates.
pub(super) fn of_several_queries() -> Error {
    Error::unsupported(
        "field `cursor`: pages of a model of several queries need `candidates`, of which they are slices",
    )
}

/// A page whose version or view is no more.
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
    fn a_cursor_is_read_as_it_was_written_and_not_otherwise() {
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
        for wrong in ["", " ", "x", "====", &format!("{text}A"), &format!("{text}{text}"), &long, "\u{fc}\u{fc}"] {
            assert!(Cursor::read(wrong).is_err());
        }
        for (offset, candidates) in
            [(1000, 1000), (20, 0), (0, CANDIDATES_MAX + 1), (RESULTS_MAX, CANDIDATES_MAX), (usize::MAX, usize::MAX)]
        {
            let text = Cursor { offset, candidates, ..cursor(1) }.text().unwrap();
            assert!(Cursor::read(&text).is_err(), "{offset} {candidates}: sums can be made by anybody");
        }
    }

    #[test]
    fn a_cursor_of_as_many_shards_as_there_may_be_is_read() {
        let most = ViewPosition { position: u64::MAX, base: u64::MAX };
        let cursor = Cursor { views: vec![most; SHARDS_MAX as usize], version: u64::MAX, ..cursor(1) };
        assert_eq!(Cursor::read(&cursor.text().unwrap()).unwrap(), cursor);
    }
}
