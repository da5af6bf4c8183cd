//! Pages of a retrieval. A cursor names the version, the position and the place at which the next page begins, so that all pages are slices of one
//! ranking, whatever is published or updated meanwhile.
//!
//! Nothing is kept of a ranking: a page runs the pass again, for as many more results, over the view that the first one saw. That view is kept for
//! a while where updates have gone beyond it. A cursor gives nothing that a request could not ask for, so it is not signed but checked when it comes back: that it
//! is whole, that the request is the same, and that its version and view are still there.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::error::{Error, Result};
use crate::limits::{CANDIDATES_MAX, RESULTS_MAX};
use crate::locks::locked;
use crate::registry::{Loaded, Registry, Which};
use crate::request::{Answer, Content, Ranked, Reading, Retrieve};
use crate::view::View;

/// How long the view of a page is kept for the next one.
const KEPT: Duration = Duration::from_secs(60);
/// Views that are kept at most; the oldest goes first.
const VIEWS_MAX: usize = 64;
/// How often it is looked whether a view must go.
const SWEEP: Duration = Duration::from_secs(1);
/// Longest cursor, in bytes of its text.
const CURSOR_BYTES_MAX: usize = 256;
/// Sets the sum of a cursor apart from other sums.
const SEED: u64 = 0x7061_6765_7321;

/// Where a page begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Cursor {
    version: u64,
    position: u64,
    /// The position of the snapshot under it, which moves where updates of a shard are folded in.
    base: u64,
    /// Results before it.
    offset: usize,
    /// Candidates of the first page, which those of all others are.
    candidates: usize,
    /// A digest of the request and of the snapshot.
    asked: u64,
}

impl Cursor {
    fn text(&self) -> Result<String> {
        let wrong = |e| Error::internal(format!("a cursor that cannot be written: {e}"));
        let mut bytes = postcard::to_allocvec(self).map_err(wrong)?;
        bytes.extend_from_slice(&xxh3_64_with_seed(&bytes, SEED).to_le_bytes());
        Ok(URL_SAFE_NO_PAD.encode(bytes))
    }

    /// Results that all pages have together at most.
    fn depth(&self) -> usize {
        self.candidates.min(RESULTS_MAX)
    }

    fn read(text: &str) -> Result<Self> {
        let wrong = || Error::invalid("field `cursor`: not one that an answer had");
        let bytes = if text.len() <= CURSOR_BYTES_MAX { URL_SAFE_NO_PAD.decode(text).ok() } else { None };
        let bytes = bytes.ok_or_else(wrong)?;
        let (body, sum) = bytes.split_last_chunk::<8>().ok_or_else(wrong)?;
        if xxh3_64_with_seed(body, SEED) != u64::from_le_bytes(*sum) {
            return Err(wrong());
        }
        let (cursor, rest) = postcard::take_from_bytes::<Cursor>(body).map_err(|_| wrong())?;
        let is_sane = rest.is_empty() && cursor.offset < cursor.depth() && cursor.candidates <= CANDIDATES_MAX;
        if is_sane { Ok(cursor) } else { Err(wrong()) }
    }
}

/// A page that is asked for.
#[derive(Debug)]
pub(super) struct Page {
    /// Where it begins.
    cursor: Cursor,
    /// Results of it at most.
    size: usize,
    /// What answers it.
    pub(super) model: Arc<Loaded>,
    pub(super) view: Arc<View>,
}

impl Page {
    /// The page that a request asks for with `cursor`, which is empty for the first; the request becomes that for all results up to its end.
    ///
    /// # Errors
    /// `Invalid` for a cursor that is none, or of another request; `Gone` where its version or its view is no more; `Unsupported` where a
    /// model of several queries is not told how many candidates it is to rank.
    pub(super) fn of(
        (registry, pages): (&Registry, &Pages),
        seen: (&Arc<Loaded>, &Arc<View>),
        request: &mut Retrieve,
        cursor: &str,
    ) -> Result<Self> {
        let page = if cursor.is_empty() {
            Page::first(seen, request)?
        } else {
            let cursor = Cursor::read(cursor)?;
            let (model, view) = pages.view(registry, seen.0.name(), &cursor)?;
            if cursor.asked != digest(&model, request)? {
                return Err(Error::invalid(
                    "field `cursor`: of another request, expected all but `k` as it was for the page before",
                ));
            }
            Page { size: request.k, cursor, model, view }
        };
        let size = page.size.min(page.cursor.depth() - page.cursor.offset);
        request.k = page.cursor.offset + size;
        request.candidates = Some(page.cursor.candidates);
        Ok(Page { size, ..page })
    }

    fn first((model, view): (&Arc<Loaded>, &Arc<View>), request: &Retrieve) -> Result<Self> {
        let main = view.main();
        if request.candidates.is_none() && !main.package.spec.queries().is_empty() {
            return Err(Error::unsupported(
                "field `cursor`: pages of a model of several queries need `candidates`, of which they are slices",
            ));
        }
        let candidates = request.candidates.unwrap_or_else(|| main.recipe.serving.candidates.max(request.k));
        let asked = digest(model, request)?;
        let (version, position, base) = (model.version(), view.position(), main.manifest.position);
        let cursor = Cursor { version, position, base, offset: 0, candidates, asked };
        Ok(Page { cursor, size: request.k, model: model.clone(), view: view.clone() })
    }

    /// Takes the results before this page out of an answer. Returns the cursor of the next page, where there is one.
    pub(super) fn cut(&self, answer: &mut Answer) -> Result<Option<String>> {
        let Content::Items(ranked) = &mut answer.content else {
            return Err(Error::internal("an answer without items in place of a page"));
        };
        let next = self.cursor.offset + self.size;
        // Where there were fewer results than asked for, and where all candidates were told of, there are no others.
        let is_last = ranked.ids.len() < next || next >= self.cursor.depth();
        skip(ranked, self.cursor.offset);
        if is_last { Ok(None) } else { Cursor { offset: next, ..self.cursor.clone() }.text().map(Some) }
    }
}

/// One name for what a request asks of a snapshot, whatever page of it.
fn digest(model: &Loaded, request: &Retrieve) -> Result<u64> {
    let reading = Reading { explain: false, ..request.reading.clone() };
    let asked = Retrieve { k: 0, reading, ..request.clone() };
    let bytes = postcard::to_allocvec(&(model.name(), model.digest(), &asked));
    Ok(xxh3_64(&bytes.map_err(|e| Error::internal(format!("a request that cannot be written: {e}")))?))
}

/// Takes the first `count` items away.
fn skip(ranked: &mut Ranked, count: usize) {
    let all = ranked.ids.len();
    let count = count.min(all);
    let tasks = ranked.tasks.len().checked_div(all).unwrap_or(0);
    let kept = (0..tasks).flat_map(|task| task * all + count..(task + 1) * all);
    ranked.tasks = kept.map(|place| ranked.tasks[place]).collect();
    ranked.slots.drain(..count.min(ranked.slots.len()));
    ranked.ids.drain(..count);
    ranked.scores.drain(..count);
    ranked.similarities.drain(..count);
}

/// A view that is kept for the next page.
struct Kept {
    model: Arc<Loaded>,
    view: Arc<View>,
    until: Instant,
}

impl Kept {
    /// True for a view of what is in memory as that version, whatever holds it.
    fn is_of(&self, loaded: &Loaded) -> bool {
        let of = |loaded: &Loaded| (loaded.name().to_owned(), loaded.version(), loaded.digest().to_owned());
        of(&self.model) == of(loaded)
    }
}

/// The views that cursors were given for.
#[derive(Clone, Default)]
pub(super) struct Pages(Arc<Mutex<VecDeque<Kept>>>);

impl Pages {
    fn kept(&self) -> MutexGuard<'_, VecDeque<Kept>> {
        locked(&self.0)
    }

    /// Keeps the view of a page for the next one, in a runtime.
    pub(super) fn keep(&self, registry: &Arc<Registry>, page: &Page) {
        let mut kept = self.kept();
        let is_first = kept.is_empty();
        kept.retain(|other| !Arc::ptr_eq(&other.view, &page.view));
        if kept.len() == VIEWS_MAX {
            kept.pop_front();
        }
        let (model, view) = (page.model.clone(), page.view.clone());
        kept.push_back(Kept { model, view, until: Instant::now() + KEPT });
        drop(kept);
        if is_first {
            tokio::spawn(self.clone().sweep(registry.clone()));
        }
    }

    /// The version and the view that a cursor is of.
    fn view(&self, registry: &Registry, model: &str, cursor: &Cursor) -> Result<(Arc<Loaded>, Arc<View>)> {
        let gone = |what: String| Error::gone(format!("field `cursor`: {what}, begin with the first page"));
        let loaded = registry.get(model, Which::Version(cursor.version));
        let loaded = loaded.map_err(|_| gone(format!("version {} is not in memory any more", cursor.version)))?;
        let now = loaded.view();
        let is_of = |view: &View| (view.position(), view.main().manifest.position) == (cursor.position, cursor.base);
        if is_of(&now) {
            return Ok((loaded, now));
        }
        let kept = self.kept();
        let found = kept.iter().find(|kept| kept.is_of(&loaded) && is_of(&kept.view));
        found.map(|kept| (kept.model.clone(), kept.view.clone())).ok_or_else(|| {
            let seconds = KEPT.as_secs();
            gone(format!("position {} was seen more than {seconds} s ago, or by too many since", cursor.position))
        })
    }

    /// Lets go of views whose time is over or whose version has left the memory, until none is kept.
    async fn sweep(self, registry: Arc<Registry>) {
        loop {
            tokio::time::sleep(SWEEP).await;
            let now = Instant::now();
            let is_there = |kept: &Kept| {
                let loaded = registry.get(kept.model.name(), Which::Version(kept.model.version()));
                loaded.is_ok_and(|loaded| kept.is_of(&loaded))
            };
            let mut kept = self.kept();
            kept.retain(|kept| kept.until > now && is_there(kept));
            if kept.is_empty() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::units::{ItemId, Slot};

    fn cursor() -> Cursor {
        Cursor { version: 7, position: 1 << 40, base: 1 << 39, offset: 20, candidates: 1000, asked: u64::MAX }
    }

    #[test]
    fn a_cursor_is_read_as_it_was_written_and_not_otherwise() {
        let text = cursor().text().unwrap();
        assert!(text.len() < 64 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b)), "{text}");
        assert_eq!(Cursor::read(&text).unwrap(), cursor());
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
            let text = Cursor { offset, candidates, ..cursor() }.text().unwrap();
            assert!(Cursor::read(&text).is_err(), "{offset} {candidates}: sums can be made by anybody");
        }
    }

    #[test]
    fn what_stands_before_a_page_is_taken_away_from_every_column() {
        for (all, count) in [(5, 0), (5, 2), (5, 5), (5, 9), (0, 3)] {
            let column = |task: usize| (0..all).map(move |n| (task * 10 + n) as f32).collect::<Vec<_>>();
            let mut ranked = Ranked {
                slots: (0..all as u32).map(Slot).collect(),
                ids: (0..all as i64).map(ItemId).collect(),
                scores: column(0),
                similarities: column(1),
                tasks: [column(2), column(3)].concat(),
                unknown: Vec::new(),
            };
            skip(&mut ranked, count);
            let left = |column: Vec<f32>| column.into_iter().skip(count).collect::<Vec<_>>();
            assert_eq!(ranked.scores, left(column(0)));
            assert_eq!(ranked.similarities, left(column(1)));
            assert_eq!(ranked.tasks, [left(column(2)), left(column(3))].concat());
            assert_eq!(ranked.ids.len(), ranked.slots.len());
        }
    }
}
