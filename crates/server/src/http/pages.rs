//! Pages of a retrieval. A [`Cursor`] names the version, the position and the place at which the next page begins, so that all pages are slices of one
//! ranking, whatever is published or updated meanwhile.
//!
//! Nothing is kept of a ranking: a page runs the pass again, for as many more results, over the view that the first one saw. That view is kept for
//! a while where updates have gone beyond it, also for the pages of routers (`parts`).

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::cursor::{Cursor, asked, gone, of_several_queries};
use crate::route::protocol::ViewPosition;
use sterling_core::error::{Error, Result};
use sterling_core::locks::locked;
use sterling_core::request::{Answer, Content, Ranked, Retrieve};
use sterling_serving::registry::{Loaded, Registry, Which};
use sterling_serving::view::View;

/// How long the view of a page is kept for the next one.
const KEPT: Duration = Duration::from_secs(60);
/// Views that are kept at most; the oldest goes first.
const VIEWS_MAX: usize = 64;
/// Bytes of what lies beside the snapshots of all that are kept, which updates may have replaced since; the same.
const BYTES_MAX: u64 = 1 << 30;
/// How often it is looked whether a view must go.
const SWEEP: Duration = Duration::from_secs(1);

/// How a view is named beside its version.
pub(super) fn position_of(view: &View) -> ViewPosition {
    ViewPosition { position: view.position(), base: view.main().manifest.position }
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
            let loaded = registry.get(seen.0.name(), Which::Version(cursor.version));
            let loaded = loaded.map_err(|_| gone(format!("version {} is not in memory any more", cursor.version)))?;
            cursor.check(asked(loaded.name(), loaded.digest(), request)?)?;
            let [at] = cursor.views[..] else {
                return Err(Error::invalid("field `cursor`: of a version that was cut"));
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
            return Err(of_several_queries());
        }
        let candidates = request.candidates.unwrap_or_else(|| main.recipe.serving.candidates.max(request.k));
        let asked = asked(model.name(), model.digest(), request)?;
        let cursor = Cursor { version: model.version(), views: vec![position_of(view)], offset: 0, candidates, asked };
        Ok(Page { cursor, size: 0, model: model.clone(), view: view.clone() })
    }

    /// Takes the results before this page out of an answer. Returns the cursor of the next page, where there is one.
    pub(super) fn cut(&self, answer: &mut Answer) -> Result<Option<String>> {
        let Content::Items(ranked) = &mut answer.content else {
            return Err(Error::internal("an answer without items in place of a page"));
        };
        let next = self.cursor.next(self.size, ranked.ids.len());
        skip(ranked, self.cursor.offset);
        next.map(|next| next.text()).transpose()
    }
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

/// Bytes beside the snapshots of views: segments that they share count once, what has changed in place for each.
fn bytes_beside(kept: &VecDeque<Kept>) -> u64 {
    let mut known = HashSet::new();
    kept.iter().map(|kept| kept.view.bytes_beside(|segment| !known.insert(Arc::as_ptr(segment)))).sum()
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
        self.keep_view(registry, (page.model.clone(), page.view.clone()));
    }

    /// Keeps a view for pages, in a runtime.
    pub(super) fn keep_view(&self, registry: &Arc<Registry>, (model, view): (Arc<Loaded>, Arc<View>)) {
        let mut kept = self.kept();
        let is_first = kept.is_empty();
        kept.retain(|other| !Arc::ptr_eq(&other.view, &view));
        if kept.len() == VIEWS_MAX {
            kept.pop_front();
        }
        kept.push_back(Kept { model, view, until: Instant::now() + KEPT });
        while kept.len() > 1 && bytes_beside(&kept) > BYTES_MAX {
            kept.pop_front();
        }
        drop(kept);
        if is_first {
            tokio::spawn(self.clone().sweep(registry.clone()));
        }
    }

    /// A view of what is in memory as a version, or was when it was kept.
    ///
    /// # Errors
    /// `Gone` where it is neither what is seen now nor kept.
    pub(super) fn view(&self, loaded: &Arc<Loaded>, at: ViewPosition) -> Result<(Arc<Loaded>, Arc<View>)> {
        let now = loaded.view();
        if position_of(&now) == at {
            return Ok((loaded.clone(), now));
        }
        let kept = self.kept();
        let found = kept.iter().find(|kept| kept.is_of(loaded) && position_of(&kept.view) == at);
        found.map(|kept| (kept.model.clone(), kept.view.clone())).ok_or_else(|| {
            let seconds = KEPT.as_secs();
            gone(format!("position {} was seen more than {seconds} s ago, or by too many since", at.position))
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
    use sterling_core::units::{ItemId, Slot};

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
