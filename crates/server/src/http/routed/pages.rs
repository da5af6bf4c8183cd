//! Pages of a router: as those of a server, over the views of all shards.
//!
//! A cursor names the view that each shard saw. The shards keep these, the router nothing: any router over the same servers gives the next page.
//! A page is of all shards, or none.

use std::sync::Arc;

use super::super::cursor::{Cursor, asked, gone, of_several_queries};
use super::app::RouterApp;
use super::info::info;
use crate::gather::Gathered;
use crate::route::protocol::ViewPosition;
use crate::route::{Beside, Conditions, Offering};
use sterling_core::error::{Error, Kind, Result};
use sterling_core::request::{Retrieve, Which};

/// A page that is asked for.
pub(super) struct RoutedPage {
    /// Where it begins; the first one names no views.
    cursor: Cursor,
    /// Results of it at most.
    size: usize,
    /// What answers it.
    pub(super) version: Arc<Offering>,
}

impl RoutedPage {
    /// The page that a request asks for with `text`, which is empty for the first, of `version`; the request becomes that for all results up to its end.
    ///
    /// # Errors
    /// `Invalid` for a cursor that is none, or of another request; `Gone` where its version is no more; `Unsupported` where a model of several queries is
    /// not told how many candidates it is to rank; those of shards that do not say how many they rank.
    pub(super) async fn of(
        (app, model): (&RouterApp, &str),
        version: Arc<Offering>,
        request: &mut Retrieve,
        text: &str,
    ) -> Result<Self> {
        let (cursor, version) = if text.is_empty() {
            let candidates = match request.candidates {
                Some(candidates) => candidates,
                None => {
                    let info = info(app, model, Which::Version(version.version())).await?;
                    if !info.queries.is_empty() {
                        return Err(of_several_queries());
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
                app.fleet().get(model, Which::Version(cursor.version)).map_err(|error| match error.kind() {
                    Kind::NotFound => {
                        gone(format!("version {} is in the memory of no server any more", cursor.version))
                    }
                    _ => error,
                })?;
            cursor.check(asked(model, version.digest(), request)?)?;
            let (views, shards) = (cursor.views.len(), version.shards());
            if views != shards {
                return Err(Error::invalid(format!("field `cursor`: of {views} shards, expected {shards}")));
            }
            (cursor, version)
        };
        let size = cursor.reach(request);
        Ok(RoutedPage { cursor, size, version })
    }

    /// The terms of a request as they are for this page.
    pub(super) fn terms(&self, terms: Conditions) -> Conditions {
        Conditions { min_coverage: 1.0, views: Some(self.cursor.views.as_slice().into()), ..terms }
    }

    /// Takes the results before this page out of what shards answered. Returns the cursor of the next page, where there is one.
    pub(super) fn cut(&self, gathered: &mut Gathered<Beside>) -> Result<Option<String>> {
        let next = self.cursor.next(self.size, gathered.order.len());
        gathered.order.drain(..self.cursor.offset.min(gathered.order.len()));
        let Some(next) = next else { return Ok(None) };
        let mut views: Vec<Option<ViewPosition>> = vec![None; self.version.shards()];
        gathered.besides().for_each(|(shard, beside)| views[shard] = Some(beside.view));
        let views: Option<Vec<ViewPosition>> = views.into_iter().collect();
        let views = views.ok_or_else(|| Error::internal("a page of some shards in place of all"))?;
        Cursor { views, ..next }.text().map(Some)
    }
}
