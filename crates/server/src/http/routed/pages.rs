//! Pages of a router: like those of a server, over the views of all shards.
//!
//! A cursor names the view of each shard. Shards keep the named views and the router keeps no state, so any router over the same
//! servers can answer the next page. A page covers all shards or fails.

use std::sync::Arc;

use super::super::cursor::{Cursor, asked, error_without_candidates, gone};
use super::app::RouterApp;
use super::info::info;
use crate::gather::Gathered;
use crate::route::protocol::ViewPosition;
use crate::route::{Conditions, Extra, ShardedVersion};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::request::{Retrieve, VersionSelector};
use sterling_serving::pass::check_counts;

/// Requested page.
pub(super) struct RoutedPage {
    /// Start of the page; the first page has no views yet.
    cursor: Cursor,
    /// Maximum number of results of the page.
    size: usize,
    /// Version that answers.
    pub(super) version: Arc<ShardedVersion>,
}

impl RoutedPage {
    /// Creates the page of `version` that `text` selects, which is empty for the first page. Extends the request to all results
    /// up to the end of the page.
    ///
    /// # Errors
    /// `Invalid` for an invalid cursor or one of another request; `Gone` if its version no longer exists; `Unsupported` if a
    /// request to a model with several queries does not set the number of candidates; errors of shards that report their number
    /// of candidates.
    pub(super) async fn of(
        (app, model): (&RouterApp, &str),
        version: Arc<ShardedVersion>,
        request: &mut Retrieve,
        text: &str,
    ) -> Result<Self> {
        check_counts(request)?;
        let (cursor, version) = if text.is_empty() {
            let candidates = match request.candidates {
                Some(candidates) => candidates,
                None => {
                    let info = info(app, model, VersionSelector::Version(version.version())).await?;
                    if !info.queries.is_empty() {
                        return Err(error_without_candidates());
                    }
                    info.page_candidates.max(request.k)
                }
            };
            let asked = asked(model, version.digest(), request)?;
            let cursor = Cursor { version: version.version(), views: Vec::new(), offset: 0, candidates, asked };
            (cursor, version)
        } else {
            let cursor = Cursor::read(text)?;
            let version =
                app.fleet().get(model, VersionSelector::Version(cursor.version)).map_err(|error| {
                    match error.kind() {
                        Kind::NotFound => gone(format!("no server has version {} in memory any more", cursor.version)),
                        _ => error,
                    }
                })?;
            cursor.check(asked(model, version.digest(), request)?)?;
            let (views, shards) = (cursor.views.len(), version.shards());
            if views != shards {
                return Err(Error::invalid(format!("field `cursor`: made for {views} shards, expected {shards}")));
            }
            (cursor, version)
        };
        let size = cursor.reach(request);
        Ok(RoutedPage { cursor, size, version })
    }

    /// Restricts the conditions of a request to full coverage and the views of this page.
    pub(super) fn terms(&self, terms: Conditions) -> Conditions {
        Conditions { min_coverage: 1.0, views: Some(self.cursor.views.as_slice().into()), ..terms }
    }

    /// Removes the results before this page from a gathered answer. Returns the cursor of the next page, if there is one.
    pub(super) fn cut(&self, gathered: &mut Gathered<Extra>) -> Result<Option<String>> {
        let next = self.cursor.next(self.size, gathered.order.len());
        gathered.order.drain(..self.cursor.offset.min(gathered.order.len()));
        let Some(next) = next else { return Ok(None) };
        let mut views: Vec<Option<ViewPosition>> = vec![None; self.version.shards()];
        gathered.besides().for_each(|(shard, beside)| views[shard] = Some(beside.view));
        let views: Option<Vec<ViewPosition>> = views.into_iter().collect();
        let views = views.ok_or_else(|| Error::internal("some shards did not answer the page, expected all"))?;
        Cursor { views, ..next }.text().map(Some)
    }
}
