//! Which position of a model's updates a call sees.

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

/// The view of a model that a call asks for: of this moment, or of the one at which `min_position` is seen.
pub(super) async fn seen(app: &App, model: &Loaded, uri: &Uri) -> Result<Arc<View>> {
    match number(uri, "min_position")? {
        Some(position) => reached(app, model, position, app.updates_wait).await,
        None => Ok(model.view()),
    }
}

/// The view of a model of the moment at which a position is seen, where that comes in time.
pub(super) async fn reached(app: &App, model: &Loaded, position: u64, wait: Duration) -> Result<Arc<View>> {
    let feed = app.feed(model).ok();
    let durable = feed.as_ref().map_or(0, |feed| feed.last()).max(model.view().position());
    // Where others append too, what they have appended may still be on its way.
    if position > durable && !feed.is_some_and(|feed| feed.has_others()) {
        return Err(Error::invalid(format!("min_position: got {position}, the last update has {durable}")));
    }
    timeout(wait, model.content().reached(position)).await.unwrap_or_else(|_| {
        let shown = model.view().position();
        Err(Error::deadline(format!("min_position: {position} is not seen yet, {shown} is")))
    })
}

/// A parameter of the query that has a position for each of so many shards, with commas between them.
pub(super) fn positions(uri: &Uri, name: &str, shards: usize) -> Result<Option<Vec<u64>>> {
    let expected = if shards == 1 {
        "one whole number".to_owned()
    } else {
        format!("{shards} whole numbers with commas, one a shard, as `positions` of an answer has them")
    };
    let Some(List(positions)) = parameter::<List>(uri, name, &expected)? else { return Ok(None) };
    match positions.len() == shards {
        true => Ok(Some(positions)),
        false => Err(Error::invalid(format!("{name}: got {} positions, expected {expected}", positions.len()))),
    }
}

/// Numbers with commas between them.
struct List(Vec<u64>);

impl FromStr for List {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        text.split(',').map(str::parse).collect::<std::result::Result<_, _>>().map(List)
    }
}
