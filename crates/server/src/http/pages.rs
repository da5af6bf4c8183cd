//! Pages of a retrieval. A [`Cursor`] names the version, the position and the index at which the next page starts. All pages are
//! therefore slices of one ranking, regardless of later publications and updates.
//!
//! The ranking itself is not stored: a page runs the pass again, for more results, over the view of the first page. The view of a
//! first page is retained for a while after newer updates are visible, also for the pages of routers (`parts`).

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::cursor::{Cursor, asked, error_without_candidates, gone};
use crate::route::protocol::ViewPosition;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::request::{Answer, Content, Ranked, Retrieve, VersionSelector};
use sterling_serving::pass::check_counts;
use sterling_serving::registry::{Loaded, Registry};
use sterling_serving::view::View;

/// Time for which the view of a page is retained for the next page.
const VIEW_LIFETIME: Duration = Duration::from_secs(60);
/// Maximum number of retained views; the oldest is dropped first.
const VIEWS_MAX: usize = 64;
/// Maximum size of the deltas of all retained views, in bytes; the oldest view is dropped first.
const BYTES_MAX: u64 = 1 << 30;
/// Interval between checks for expired views.
const SWEEP: Duration = Duration::from_secs(1);

/// Returns the positions that identify a view of a version.
pub(super) fn position_of(view: &View) -> ViewPosition {
    ViewPosition { position: view.position(), base: view.main().manifest.position }
}

/// Requested page.
#[derive(Debug)]
pub(super) struct Page {
    /// Start of the page.
    cursor: Cursor,
    /// Maximum number of results of the page.
    size: usize,
    /// Version that answers.
    pub(super) model: Arc<Loaded>,
    pub(super) view: Arc<View>,
}

impl Page {
    /// Creates the page that `cursor` selects, which is empty for the first page. Extends the request to all results up to the
    /// end of the page.
    ///
    /// # Errors
    /// `Invalid` for an invalid cursor or one of another request; `Gone` if its version or its view no longer exists;
    /// `Unsupported` if a request to a model with several queries does not set the number of candidates.
    pub(super) fn of(
        (registry, pages): (&Registry, &Pages),
        seen: (&Arc<Loaded>, &Arc<View>),
        request: &mut Retrieve,
        cursor: &str,
    ) -> Result<Self> {
        check_counts(request)?;
        let page = if cursor.is_empty() {
            Page::first(seen, request)?
        } else {
            let cursor = Cursor::read(cursor)?;
            let loaded = registry.get(seen.0.name(), VersionSelector::Version(cursor.version));
            let loaded = loaded.map_err(|_| gone(format!("version {} is not in memory any more", cursor.version)))?;
            cursor.check(asked(loaded.name(), loaded.digest(), request)?)?;
            let [at] = cursor.views[..] else {
                return Err(Error::invalid(
                    "field `cursor`: made by a router for a sharded version, expected one of this server",
                ));
            };
            let (model, view) = pages.view(&loaded, at)?;
            Page { size: 0, cursor, model, view }
        };
        let size = page.cursor.reach(request);
        Ok(Page { size, ..page })
    }

    fn first((model, view): (&Arc<Loaded>, &Arc<View>), request: &Retrieve) -> Result<Self> {
        let main = view.main();
        if request.candidates.is_none() && !main.package.spec.queries().is_empty() {
            return Err(error_without_candidates());
        }
        let candidates = request.candidates.unwrap_or_else(|| main.recipe.serving.candidates.max(request.k));
        let asked = asked(model.name(), model.digest(), request)?;
        let cursor = Cursor { version: model.version(), views: vec![position_of(view)], offset: 0, candidates, asked };
        Ok(Page { cursor, size: 0, model: model.clone(), view: view.clone() })
    }

    /// Removes the results before this page from an answer. Returns the cursor of the next page, if there is one.
    pub(super) fn cut(&self, answer: &mut Answer) -> Result<Option<String>> {
        let Content::Items(ranked) = &mut answer.content else {
            return Err(Error::internal("the answer to a request with a cursor has no items, expected some"));
        };
        let next = self.cursor.next(self.size, ranked.ids.len());
        skip(ranked, self.cursor.offset);
        next.map(|next| next.text()).transpose()
    }
}

/// Removes the first `count` items.
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

/// View that is retained for the next page.
struct RetainedView {
    model: Arc<Loaded>,
    view: Arc<View>,
    until: Instant,
}

impl RetainedView {
    /// Returns whether this is a view of the same version as `loaded`, even if the version was reloaded.
    fn is_of(&self, loaded: &Loaded) -> bool {
        let of = |loaded: &Loaded| (loaded.name().to_owned(), loaded.version(), loaded.digest().to_owned());
        of(&self.model) == of(loaded)
    }
}

/// Returns the delta bytes of the retained views: shared segments count once, in-place changes count per view.
fn extra_bytes(kept: &VecDeque<RetainedView>) -> u64 {
    let mut known = HashSet::new();
    kept.iter().map(|kept| kept.view.extra_bytes(|segment| !known.insert(Arc::as_ptr(segment)))).sum()
}

/// Views for which cursors were issued.
#[derive(Clone, Default)]
pub(super) struct Pages(Arc<Mutex<VecDeque<RetainedView>>>);

impl Pages {
    fn kept(&self) -> MutexGuard<'_, VecDeque<RetainedView>> {
        locked(&self.0)
    }

    /// Keeps the view of a page for the next page. Requires a runtime.
    pub(super) fn keep(&self, registry: &Arc<Registry>, page: &Page) {
        self.keep_view(registry, (page.model.clone(), page.view.clone()));
    }

    /// Keeps a view for pages. Requires a runtime.
    pub(super) fn keep_view(&self, registry: &Arc<Registry>, (model, view): (Arc<Loaded>, Arc<View>)) {
        let mut kept = self.kept();
        let is_first = kept.is_empty();
        kept.retain(|other| !Arc::ptr_eq(&other.view, &view));
        if kept.len() == VIEWS_MAX {
            kept.pop_front();
        }
        kept.push_back(RetainedView { model, view, until: Instant::now() + VIEW_LIFETIME });
        while kept.len() > 1 && extra_bytes(&kept) > BYTES_MAX {
            kept.pop_front();
        }
        drop(kept);
        if is_first {
            tokio::spawn(self.clone().sweep(registry.clone()));
        }
    }

    /// Returns a current or retained view of a loaded version.
    ///
    /// # Errors
    /// `Gone` if the view at this position is neither the current view nor retained.
    pub(super) fn view(&self, loaded: &Arc<Loaded>, at: ViewPosition) -> Result<(Arc<Loaded>, Arc<View>)> {
        let now = loaded.view();
        if position_of(&now) == at {
            return Ok((loaded.clone(), now));
        }
        let kept = self.kept();
        let found = kept.iter().find(|kept| kept.is_of(loaded) && position_of(&kept.view) == at);
        found.map(|kept| (kept.model.clone(), kept.view.clone())).ok_or_else(|| {
            let seconds = VIEW_LIFETIME.as_secs();
            gone(format!(
                "position {} is no longer in memory: earlier positions are kept for at most {seconds} s",
                at.position
            ))
        })
    }

    /// Drops views that expired or whose version was unloaded, until none is retained.
    async fn sweep(self, registry: Arc<Registry>) {
        loop {
            tokio::time::sleep(SWEEP).await;
            let now = Instant::now();
            let is_there = |kept: &RetainedView| {
                let loaded = registry.get(kept.model.name(), VersionSelector::Version(kept.model.version()));
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
    use sterling_core::units::{ItemId, Slot};

    #[test]
    fn earlier_rows_are_removed_from_every_column_of_a_page() {
        for (all, count) in [(5, 0), (5, 2), (5, 5), (5, 9), (0, 3)] {
            let column = |task: usize| (0..all).map(move |n| (task * 10 + n) as f32).collect::<Vec<_>>();
            let mut ranked = Ranked {
                slots: (0..all as u32).map(Slot).collect(),
                ids: (0..all as i64).map(ItemId).collect(),
                scores: column(0),
                similarities: column(1),
                tasks: [column(2), column(3)].concat(),
                unknown: Vec::new(),
                undefined: 0,
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
