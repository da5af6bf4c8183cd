//! Update positions that calls require.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::http::Uri;
use tokio::time::timeout;

use super::app::App;
use super::parameters::{number, parameter};
use sterling_core::error::{Error, Result};
use sterling_serving::registry::Loaded;
use sterling_serving::view::View;

/// Returns the view that a call requires: the current one, or the first that contains the updates up to `min_position`.
pub(super) async fn seen(app: &App, model: &Loaded, uri: &Uri) -> Result<Arc<View>> {
    match number(uri, "min_position")? {
        Some(position) => reached(app, model, position, app.updates_wait).await,
        None => Ok(model.view()),
    }
}

/// Waits for the first view that contains the updates up to a position.
pub(super) async fn reached(app: &App, model: &Loaded, position: u64, wait: Duration) -> Result<Arc<View>> {
    let feed = app.feed(model).ok();
    let durable = feed.as_ref().map_or(0, |feed| feed.last()).max(model.view().position());
    // With several writers, updates of other servers may not have arrived yet.
    if position > durable && !feed.is_some_and(|feed| feed.has_others()) {
        return Err(Error::invalid(format!("min_position: got {position}, the last update has position {durable}")));
    }
    timeout(wait, model.content().reached(position)).await.unwrap_or_else(|_| {
        let shown = model.view().position();
        Err(Error::deadline(format!(
            "min_position: {position} is not visible yet, the last visible position is {shown}"
        )))
    })
}

/// Parses a query parameter with one position per shard, separated by commas.
pub(super) fn positions(uri: &Uri, name: &str, shards: usize) -> Result<Option<Vec<u64>>> {
    let expected = if shards == 1 {
        "one whole number".to_owned()
    } else {
        format!("{shards} whole numbers with commas, one per shard, as `positions` of an answer has them")
    };
    let Some(List(positions)) = parameter::<List>(uri, name, &expected)? else { return Ok(None) };
    match positions.len() == shards {
        true => Ok(Some(positions)),
        false => Err(Error::invalid(format!("{name}: got {} positions, expected {expected}", positions.len()))),
    }
}

/// Numbers separated by commas.
struct List(Vec<u64>);

impl FromStr for List {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        text.split(',').map(str::parse).collect::<std::result::Result<_, _>>().map(List)
    }
}
